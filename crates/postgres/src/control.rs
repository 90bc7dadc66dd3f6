//! The control connection: SQL beside the stream.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_postgres::config::{SslMode, SslNegotiation, TargetSessionAttrs};
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};
use tokio_postgres::{Client, SimpleQueryMessage, SimpleQueryRow, SimpleQueryStream};
use waljet_pipeline::{Action, Fault};

use crate::connect::{ConnectOptions, Endpoint};
use crate::dial::{HANDSHAKE_TIMEOUT, Stream, dial};
use crate::error::{self, UNREACHABLE};
use crate::wire::PINNED;

/// What the server itself bounds a statement by; catalogue queries take milliseconds.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for an answer: longer than the server's own limit, so that its word is heard.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// A session for SQL. Closed when dropped.
#[derive(Debug)]
pub(crate) struct Control {
    client: Client,
    /// Where it is connected to, so that the replication connection goes to the same server.
    pub(crate) endpoint: Endpoint,
    /// `server_version_num`.
    pub(crate) version: u32,
    /// `server_version`.
    pub(crate) version_text: String,
    /// Whether the server is a standby.
    pub(crate) standby: bool,
    _connection: JoinSet<()>,
}

/// The control connection that a source and a store of checkpoints share, so that a relay has one.
#[derive(Clone, Debug, Default)]
pub struct SharedControl(Arc<Mutex<Shared>>);

#[derive(Debug, Default)]
struct Shared {
    current: Option<Arc<Control>>,
    unused: bool,
}

impl SharedControl {
    /// Puts a connection there, in the place of the one before.
    pub(crate) fn put(&self, control: Arc<Control>) {
        *self.lock() = Shared { current: Some(control), unused: false };
    }

    /// Puts a connection there that was just made; the next to need a new one takes it.
    pub(crate) fn put_unused(&self, control: Arc<Control>) {
        *self.lock() = Shared { current: Some(control), unused: true };
    }

    /// Returns the connection, unless it is closed.
    pub(crate) fn current(&self) -> Option<Arc<Control>> {
        self.lock().current.clone().filter(|control| !control.client.is_closed())
    }

    /// Returns the connection if nobody took it for a new one yet.
    pub(crate) fn take_unused(&self) -> Option<Arc<Control>> {
        let mut shared = self.lock();
        let unused = std::mem::take(&mut shared.unused);
        shared.current.clone().filter(|control| unused && !control.client.is_closed())
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Control {
    /// Connects to the first address that answers and is the kind of server that is looked for.
    pub(crate) async fn connect(options: &ConnectOptions) -> Result<Self, Fault> {
        let wanted = options.config().get_target_session_attrs();
        let mut last = None;
        for endpoint in options.endpoints() {
            match Self::connect_to(options, &endpoint).await {
                Ok(control) if wanted == TargetSessionAttrs::ReadWrite && control.standby => {
                    last = Some(Fault::new(
                        UNREACHABLE,
                        Action::Retry,
                        format!("{endpoint} is a standby, and a primary is looked for"),
                    ));
                }
                Ok(control) if wanted == TargetSessionAttrs::ReadOnly && !control.standby => {
                    last = Some(Fault::new(
                        UNREACHABLE,
                        Action::Retry,
                        format!("{endpoint} is a primary, and a standby is looked for"),
                    ));
                }
                Ok(control) => return Ok(control),
                Err(fault) if fault.action == Action::Retry => last = Some(fault),
                Err(fault) => return Err(fault),
            }
        }
        Err(last.unwrap_or_else(|| Fault::new(UNREACHABLE, Action::Retry, "the connection options name no host")))
    }

    /// Connects to one address.
    pub(crate) async fn connect_to(options: &ConnectOptions, endpoint: &Endpoint) -> Result<Self, Fault> {
        let stream = dial(options, endpoint).await?;
        let mut config = options.config().clone();
        if let Some(password) = options.password()? {
            config.password(password);
        }
        config.options(session_options(config.get_options()));
        // TLS is there already, by the same code as for the stream; the client only has to know the binding.
        match &stream {
            Stream::Tls(_) => config.ssl_mode(SslMode::Require).ssl_negotiation(SslNegotiation::Direct),
            Stream::Tcp(_) | Stream::Unix(_) => {
                config.ssl_mode(SslMode::Disable).ssl_negotiation(SslNegotiation::Postgres)
            }
        };
        let context = format!("connect to {endpoint}");
        let (client, connection) = timeout(HANDSHAKE_TIMEOUT, config.connect_raw(stream, Established))
            .await
            .map_err(|_| error::timed_out(&context, HANDSHAKE_TIMEOUT))?
            .map_err(|error| error::from_client(&context, error))?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = %error, "control connection ended");
            }
        });
        let mut control = Self {
            client,
            endpoint: endpoint.clone(),
            version: 0,
            version_text: String::new(),
            standby: false,
            _connection: task,
        };
        control.read_version().await?;
        Ok(control)
    }

    async fn read_version(&mut self) -> Result<(), Fault> {
        let sql = "SELECT current_setting('server_version_num') AS num, current_setting('server_version') AS version, \
                   pg_is_in_recovery() AS standby";
        let row = self.row("read the server's version", sql).await?;
        self.version = text(&row, "num").parse().unwrap_or_default();
        // Distributors add their own words after the number.
        self.version_text = text(&row, "version").split_whitespace().next().unwrap_or_default().to_owned();
        self.standby = flag(&row, "standby");
        Ok(())
    }

    /// Runs statements and returns the rows of all of them. `context` is a verb and its object.
    pub(crate) async fn rows(&self, context: &str, sql: &str) -> Result<Vec<SimpleQueryRow>, Fault> {
        self.rows_within(context, sql, ANSWER_TIMEOUT).await
    }

    /// As [`rows`](Self::rows), with a limit of its own; the server's has to be set in the statements.
    pub(crate) async fn rows_within(
        &self,
        context: &str,
        sql: &str,
        limit: Duration,
    ) -> Result<Vec<SimpleQueryRow>, Fault> {
        let messages = timeout(limit, self.client.simple_query(sql))
            .await
            .map_err(|_| error::timed_out(context, limit))?
            .map_err(|error| error::from_client(context, error))?;
        let row = |message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        };
        Ok(messages.into_iter().filter_map(row).collect())
    }

    /// Runs a query of any length and returns its rows as they come: the server waits while nobody takes them.
    pub(crate) async fn stream(&self, context: &str, sql: &str) -> Result<SimpleQueryStream, Fault> {
        self.client.simple_query_raw(sql).await.map_err(|error| error::from_client(context, error))
    }

    /// Runs statements that return at least one row, and returns the first.
    pub(crate) async fn row(&self, context: &str, sql: &str) -> Result<SimpleQueryRow, Fault> {
        let first = self.rows(context, sql).await?.into_iter().next();
        first.ok_or_else(|| error::protocol(format_args!("it sent no row when asked to {context}")))
    }
}

/// Returns a column's text, empty for NULL.
pub(crate) fn text<'a>(row: &'a SimpleQueryRow, column: &str) -> &'a str {
    row.try_get(column).ok().flatten().unwrap_or_default()
}

/// Returns a column's text, or `None` for NULL and for a column that is not there.
pub(crate) fn optional(row: &SimpleQueryRow, column: &str) -> Option<String> {
    row.try_get(column).ok().flatten().map(str::to_owned)
}

/// Returns whether a boolean column is true.
pub(crate) fn flag(row: &SimpleQueryRow, column: &str) -> bool {
    text(row, column) == "t"
}

fn session_options(own: Option<&str>) -> String {
    let mut options = own.unwrap_or_default().to_owned();
    // The last one counts, so a URL's own options do not reach the pinned ones.
    for (name, value) in PINNED {
        options.push_str(&format!(" -c {name}={value}"));
    }
    let millis = STATEMENT_TIMEOUT.as_millis();
    // The only write is the checkpoint's, which must not wait for a standby that is away.
    options.push_str(" -c synchronous_commit=local");
    options.push_str(&format!(" -c statement_timeout={millis} -c lock_timeout={millis}"));
    options
}

/// Hands an established TLS stream to the client as it is.
struct Established;

impl TlsConnect<Stream> for Established {
    type Stream = Stream;
    type Error = std::io::Error;
    type Future = std::future::Ready<std::io::Result<Stream>>;

    fn connect(self, stream: Stream) -> Self::Future {
        std::future::ready(Ok(stream))
    }
}

impl TlsStream for Stream {
    fn channel_binding(&self) -> ChannelBinding {
        self.server_end_point().map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}
