//! The connection: one attempt, and what the server says about it later.

use std::error::Error;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::rustls;
use async_nats::{Client, ConnectError, ConnectErrorKind, ConnectOptions, Event, ServerAddr, ServerError};
use tokio::sync::watch;
use waljet_pipeline::{Action, Fault};

use crate::error;
use crate::options::{Auth, NatsOptions, shown};

/// Connects once.
///
/// # Errors
///
/// Says which server could not be reached, or what it refused. [`Action::Retry`] throughout, since credentials and
/// certificates may be put right while the relay waits, except for options that cannot be used at all.
pub async fn connect(options: &NatsOptions) -> Result<Client, Fault> {
    Ok(Connection::open(options, &[], Reconnect::ForEver).await?.client)
}

/// Whether the client connects again by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reconnect {
    /// As async-nats does.
    ForEver,
    /// As little as async-nats allows: one attempt a server, at once. What the client still holds is then either sent
    /// soon or never.
    Barely,
}

/// A client, and what the server said unasked.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The client.
    pub(crate) client: Client,
    /// What happened to the connection.
    pub(crate) news: watch::Receiver<News>,
}

/// What happened to a connection since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct News {
    /// It was lost, even if it was made again.
    pub(crate) lost: bool,
    /// The last thing the server refused.
    pub(crate) violation: Option<Violation>,
    /// How many times the server refused something.
    pub(crate) violations: u64,
}

/// Something the user may not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    /// `publish` or `subscribe`, as in the server's configuration.
    pub(crate) permission: &'static str,
    /// The subject.
    pub(crate) subject: String,
}

impl Violation {
    /// Reads it from the server's message, `Permissions Violation for Publish to "subject"`.
    fn parse(text: &str) -> Option<Self> {
        let lower = text.to_ascii_lowercase();
        let at = lower.find("permissions violation for ")? + "permissions violation for ".len();
        let permission = if lower[at..].starts_with("publish") { "publish" } else { "subscribe" };
        let subject = text.split('"').nth(1)?.to_owned();
        Some(Self { permission, subject })
    }

    /// Makes the fault that names the permission.
    pub(crate) fn fault(&self, user_needs: &str) -> Fault {
        let Self { permission, subject } = self;
        Fault::new(
            error::PERMISSION,
            Action::Retry,
            format!("{permission} on subject {subject:?}: the server refused it to this user"),
        )
        .hint(format!("add it to the user: permissions: {{ {permission}: {{ allow: [{user_needs:?}] }} }}"))
    }
}

impl Connection {
    /// Connects once, to one of the configured servers or one that the cluster had named earlier.
    pub(crate) async fn open(options: &NatsOptions, known: &[String], reconnect: Reconnect) -> Result<Self, Fault> {
        let mut servers = Vec::with_capacity(options.servers.len() + known.len());
        for server in options.servers.iter().chain(known) {
            servers.push(address(server)?);
        }
        let (sender, news) = watch::channel(News::default());
        let mut connect = settings(options, &servers).await?;
        connect = connect.event_callback(move |event| {
            note(&sender, &event);
            async {}
        });
        if reconnect == Reconnect::Barely {
            connect = connect.max_reconnects(servers.len().max(1));
        }
        let limit = options.connect_timeout * (servers.len().max(1) as u32) + Duration::from_millis(500);
        match tokio::time::timeout(limit, connect.connect(servers)).await {
            Ok(Ok(client)) => Ok(Self { client, news }),
            Ok(Err(error)) => Err(fault(options, error)),
            Err(_) => Err(unreachable(options, "no answer within the time limit")),
        }
    }

    /// Returns whether the connection is the one that was made, and stands.
    pub(crate) fn is_intact(&self) -> bool {
        self.client.connection_state() == State::Connected
            && self.client.statistics().connects.load(Ordering::Relaxed) == 1
            && !self.news.borrow().lost
    }
}

/// Keeps what an event says.
fn note(sender: &watch::Sender<News>, event: &Event) {
    match event {
        Event::Disconnected | Event::Closed => sender.send_modify(|news| news.lost = true),
        Event::ServerError(ServerError::Other(text)) => {
            if let Some(violation) = Violation::parse(text) {
                sender.send_modify(|news| {
                    news.violation = Some(violation);
                    news.violations += 1;
                });
            }
        }
        _ => {}
    }
}

/// Parses a server's address.
fn address(server: &str) -> Result<ServerAddr, Fault> {
    server.trim().parse().map_err(|error: std::io::Error| {
        Fault::new(error::OPTIONS, Action::Halt, format!("parse the server address {:?}", shown(server)))
            .hint("nats://host:4222")
            .cause(error)
    })
}

/// Translates the options.
async fn settings(options: &NatsOptions, servers: &[ServerAddr]) -> Result<ConnectOptions, Fault> {
    let mut connect = authenticated(options, servers)
        .await?
        .name(&options.name)
        .connection_timeout(options.connect_timeout)
        .request_timeout(Some(options.connect_timeout))
        .ping_interval(options.ping_interval)
        .require_tls(options.tls.required);
    if options.tls.first {
        connect = connect.tls_first();
    }
    if let Some(ca_file) = &options.tls.ca_file {
        readable("nats.tls.ca", ca_file)?;
        connect = connect.add_root_certificates(ca_file.clone());
    }
    match (&options.tls.cert_file, &options.tls.key_file) {
        (Some(cert), Some(key)) => {
            readable("nats.tls.cert", cert)?;
            readable("nats.tls.key", key)?;
            connect = connect.add_client_certificate(cert.clone(), key.clone());
        }
        (None, None) => {}
        _ => {
            let fault =
                Fault::new(error::OPTIONS, Action::Halt, "only one of the client certificate and its key is set");
            return Err(fault.hint("set both nats.tls.cert and nats.tls.key"));
        }
    }
    if let Some(prefix) = &options.inbox_prefix {
        connect = connect.custom_inbox_prefix(prefix);
    }
    Ok(connect)
}

/// Starts the settings with who the client is.
async fn authenticated(options: &NatsOptions, servers: &[ServerAddr]) -> Result<ConnectOptions, Fault> {
    let connect = ConnectOptions::new();
    Ok(match &options.auth {
        // async-nats takes no notice of these in an address.
        Auth::None => match servers.iter().find_map(|server| Some((server.username()?, server.password()))) {
            Some((user, Some(password))) => connect.user_and_password(decoded(user), decoded(password)),
            Some((token, None)) => connect.token(decoded(token)),
            None => connect,
        },
        Auth::Token(token) => connect.token(token.expose().to_owned()),
        Auth::UserPassword { user, password } => connect.user_and_password(user.clone(), password.expose().to_owned()),
        Auth::Credentials(path) => connect.credentials_file(path).await.map_err(|error| {
            let fault = Fault::new(
                error::OPTIONS,
                Action::Retry,
                format!("read the credentials file {:?}", path.display().to_string()),
            );
            fault.hint("a file as `nsc generate creds` writes it, readable by waljet").cause(error)
        })?,
        Auth::NKey(seed) => connect.nkey(seed.expose().to_owned()),
        Auth::Jwt { jwt, seed } => {
            let text = format!(
                "-----BEGIN NATS USER JWT-----\n{}\n------END NATS USER JWT------\n\n\
                 -----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
                jwt.expose().trim(),
                seed.expose().trim()
            );
            connect.credentials(&text).map_err(|_| {
                let fault = Fault::new(error::OPTIONS, Action::Halt, "the user JWT or its seed cannot be used");
                fault.hint("a JWT, and a user seed that starts with SU, as `nsc generate creds` prints them")
            })?
        }
    })
}

/// Finds a file that is not there before the library reports it as a TLS error.
fn readable(setting: &str, path: &Path) -> Result<(), Fault> {
    match std::fs::File::open(path) {
        Ok(_) => Ok(()),
        Err(error) => {
            let message = format!("open the file {:?} of {setting}", path.display().to_string());
            Err(Fault::new(error::OPTIONS, Action::Retry, message).hint(format!("correct {setting}")).cause(error))
        }
    }
}

/// Undoes the percent encoding of a part of an address.
fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let hex = (byte == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(value) => {
                out.push(value);
                at += 3;
            }
            None => {
                out.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8(out).unwrap_or_else(|_| text.to_owned())
}

/// Translates a refused connection.
fn fault(options: &NatsOptions, error: ConnectError) -> Fault {
    let servers = listed(options);
    match error.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => Fault::new(
            error::AUTHENTICATION,
            Action::Retry,
            format!("connect to {servers}: the server refused the credentials"),
        )
        .hint("correct nats.user and nats.password, nats.token, nats.nkey or nats.credentials")
        .cause(error),
        ConnectErrorKind::Tls => tls(&servers, error),
        ConnectErrorKind::ServerParse => {
            Fault::new(error::OPTIONS, Action::Halt, format!("parse the server addresses {servers}")).cause(error)
        }
        _ if is_tls(&error) => tls(&servers, error),
        // The server's own words where it closes the door otherwise: a maximum of connections, an expired JWT.
        _ if source_contains(&error, "authentication") => Fault::new(
            error::AUTHENTICATION,
            Action::Retry,
            format!("connect to {servers}: the server refused the credentials"),
        )
        .hint("issue new credentials, or correct the ones in use")
        .cause(error),
        _ => unreachable(options, error),
    }
}

/// The fault of servers that do not answer.
fn unreachable(options: &NatsOptions, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Fault {
    Fault::new(error::UNREACHABLE, Action::Retry, format!("connect to {}", listed(options)))
        .hint("start the server, or correct nats.url")
        .cause(cause)
}

/// The fault of a failed handshake.
fn tls(servers: &str, error: ConnectError) -> Fault {
    Fault::new(error::TLS, Action::Retry, format!("negotiate TLS with {servers}"))
        .hint("compare nats.tls.ca, nats.tls.cert and nats.tls.first with the server's tls block")
        .cause(error)
}

/// Names the servers.
pub(crate) fn listed(options: &NatsOptions) -> String {
    options.servers.iter().map(|server| shown(server)).collect::<Vec<_>>().join(", ")
}

/// Looks for an error of rustls, which the library hands over as an I/O error.
fn is_tls(error: &ConnectError) -> bool {
    causes(error).into_iter().any(|cause| {
        let inner = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        inner.is_some_and(|inner| inner.is::<rustls::Error>()) || cause.is::<rustls::Error>()
    })
}

/// Looks for a word in the causes.
fn source_contains(error: &ConnectError, word: &str) -> bool {
    causes(error).into_iter().any(|cause| cause.to_string().to_lowercase().contains(word))
}

/// Returns the causes, outermost first.
fn causes(error: &ConnectError) -> Vec<&(dyn Error + 'static)> {
    let mut causes = Vec::new();
    let mut next = error.source();
    while let Some(cause) = next {
        causes.push(cause);
        next = cause.source();
    }
    causes
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
mod tests {
    use super::*;

    #[test]
    fn a_violation_names_permission_and_subject() {
        let parsed = |text| Violation::parse(text).map(|v| (v.permission, v.subject));
        let publish = r#"Permissions Violation for Publish to "outbox.order.created""#;
        assert_eq!(parsed(publish), Some(("publish", "outbox.order.created".to_owned())));
        let subscribe = r#"Permissions Violation for Subscription to "_INBOX.x.*""#;
        assert_eq!(parsed(subscribe), Some(("subscribe", "_INBOX.x.*".to_owned())));
        assert_eq!(parsed("Slow Consumer"), None);
        assert_eq!(parsed("Permissions Violation for Publish"), None);
    }

    #[test]
    fn user_and_password_of_an_address_are_decoded() {
        assert_eq!(decoded("p%40ss%2Fword"), "p@ss/word");
        assert_eq!(decoded("100%"), "100%");
        assert_eq!(decoded("%zz"), "%zz");
    }

    #[tokio::test]
    async fn a_closed_port_is_reported_without_user_and_password() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let servers = vec![format!("nats://someone:hush@127.0.0.1:{port}")];
        let fault = connect(&NatsOptions { servers, ..NatsOptions::default() }).await.unwrap_err();
        assert_eq!((fault.code, fault.action), (error::UNREACHABLE, Action::Retry));
        assert!(
            !fault.summary().contains("hush") && fault.summary().contains(&port.to_string()),
            "{}",
            fault.summary()
        );
    }
}
