//! A database, a broker and the relay as a process between them.
//!
//! The rig knows the relay as its users do: by its command line, its configuration and its admin endpoint.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::folder::Folder;
use crate::program::without_ours;
use crate::workload::connect;
use crate::{
    Books, HttpResponse, Nats, NatsOptions, Pair, PortLease, Postgres, PostgresOptions, Program, ProgramOptions,
    addresses, http_get, wait_for,
};

/// The slot that the rig configures.
pub const SLOT: &str = "waljet";

/// The stream that the rig configures.
pub const STREAM: &str = "OUTBOX";

/// How long the relay may take to become ready.
const READY: Duration = Duration::from_secs(30);

/// What to put between which servers.
#[derive(Debug, Clone)]
pub struct RigOptions {
    /// The relay.
    pub program: PathBuf,
    /// The database.
    pub postgres: PostgresOptions,
    /// The broker.
    pub nats: NatsOptions,
}

impl RigOptions {
    /// Returns the usual options for a pair of servers.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>, pair: &Pair) -> Self {
        Self { program: program.into(), postgres: PostgresOptions::new(pair), nats: NatsOptions::new(pair) }
    }
}

/// Two servers, a configuration and a relay. Dropping it ends all of them and removes what they wrote.
#[derive(Debug)]
pub struct Rig {
    relay: Option<Program>,
    /// The database.
    pub postgres: Postgres,
    /// The broker.
    pub nats: Nats,
    /// Where the stream is read.
    broker: String,
    admin: PortLease,
    settings: BTreeMap<String, String>,
    program: PathBuf,
    folder: Folder,
}

impl Rig {
    /// Starts both servers and writes a configuration; the relay is not started yet.
    ///
    /// # Errors
    ///
    /// A server does not start.
    pub async fn start(options: RigOptions) -> Result<Self> {
        let (postgres, nats) = tokio::try_join!(Postgres::start(options.postgres), Nats::start(options.nats))?;
        let admin = PortLease::take()?;
        let mut rig = Self {
            settings: BTreeMap::new(),
            folder: Folder::create("relay")?,
            program: options.program,
            relay: None,
            postgres,
            broker: nats.url(),
            nats,
            admin,
        };
        let (postgres, nats) = (rig.postgres.url(), rig.nats.url());
        rig.set("postgres.url", &postgres)?;
        rig.set("postgres.slot", SLOT)?;
        rig.set("nats.url", &nats)?;
        rig.set("nats.stream", STREAM)?;
        let listen = format!("127.0.0.1:{}", rig.admin.port());
        rig.set("admin.listen", &listen)?;
        Ok(rig)
    }

    /// Sets a key of the configuration to a text. A relay that runs does not see it.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn set(&mut self, key: &str, text: &str) -> Result<()> {
        self.set_raw(key, &format!("{text:?}"))
    }

    /// Takes another broker than the rig's own, such as a cluster: for the relay and for the books.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn use_broker(&mut self, url: &str) -> Result<()> {
        url.clone_into(&mut self.broker);
        self.set("nats.url", url)
    }

    /// Sets a key of the configuration to a value as TOML writes it.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn set_raw(&mut self, key: &str, value: &str) -> Result<()> {
        self.settings.insert(key.to_owned(), value.to_owned());
        let mut text = String::new();
        for (key, value) in &self.settings {
            writeln!(text, "{key} = {value}")?;
        }
        std::fs::write(self.config(), text).context("write the configuration")
    }

    /// The configuration file.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.folder.path().join("waljet.toml")
    }

    /// Where the relay's log is.
    #[must_use]
    pub fn log_path(&self) -> PathBuf {
        self.folder.path().join("waljet.log")
    }

    /// Runs a command of the relay to its end.
    ///
    /// # Errors
    ///
    /// It cannot be run.
    pub async fn waljet(&self, args: &[&str]) -> Result<Output> {
        self.waljet_with(&[], args).await
    }

    /// Runs a command of the relay to its end, with further environment variables.
    ///
    /// # Errors
    ///
    /// It cannot be run.
    pub async fn waljet_with(&self, env: &[(&str, &str)], args: &[&str]) -> Result<Output> {
        let mut command = Command::new(&self.program);
        command.args(self.args(args)).current_dir(self.folder.path());
        without_ours(&mut command);
        command.envs(env.iter().copied());
        let shown = args.join(" ");
        let output = tokio::task::spawn_blocking(move || command.output()).await?;
        output.with_context(|| format!("run waljet {shown}"))
    }

    /// Runs `init`, which must succeed.
    ///
    /// # Errors
    ///
    /// It does not; the error holds what it said.
    pub async fn init(&self) -> Result<()> {
        let output = self.waljet(&["init"]).await?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "waljet init ended with {}:\n{said}", output.status);
        Ok(())
    }

    /// Starts the relay.
    ///
    /// # Errors
    ///
    /// It cannot be run.
    pub fn start_relay(&mut self) -> Result<()> {
        self.start_relay_with(&["run"])
    }

    /// Starts the relay by another command line.
    ///
    /// # Errors
    ///
    /// It cannot be run.
    pub fn start_relay_with(&mut self, args: &[&str]) -> Result<()> {
        self.relay = Some(Program::start(self.program_options(args))?);
        Ok(())
    }

    /// How the relay is started, for a test that starts another one beside it: with another admin endpoint in its
    /// environment, and another log.
    #[must_use]
    pub fn program_options(&self, args: &[&str]) -> ProgramOptions {
        ProgramOptions {
            program: self.program.clone(),
            args: self.args(args),
            env: Vec::new(),
            dir: self.folder.path().to_owned(),
            log: self.log_path(),
        }
    }

    /// Starts another relay with the same configuration, but without an admin endpoint.
    ///
    /// # Errors
    ///
    /// It cannot be run.
    pub fn second_relay(&self) -> Result<Program> {
        Program::start(ProgramOptions {
            program: self.program.clone(),
            args: self.args(&["run"]),
            env: vec![("WALJET_ADMIN__LISTEN".into(), "off".into())],
            dir: self.folder.path().to_owned(),
            log: self.folder.path().join("second.log"),
        })
    }

    /// The relay.
    ///
    /// # Errors
    ///
    /// It was not started.
    pub fn relay(&mut self) -> Result<&mut Program> {
        self.relay.as_mut().context("the relay was not started")
    }

    /// Starts everything: `init`, the relay, and waits until it is ready.
    ///
    /// # Errors
    ///
    /// One of them does not work.
    pub async fn up(&mut self) -> Result<()> {
        self.init().await?;
        self.start_relay()?;
        self.ready().await
    }

    /// Waits until the relay says that it is ready.
    ///
    /// # Errors
    ///
    /// It does not in time; the error holds its log.
    pub async fn ready(&self) -> Result<()> {
        let ready = wait_for("waljet to be ready", READY, async || {
            let answer = self.get("/readyz").await?;
            ensure!(answer.status == 200, "{}", answer.body);
            Ok::<_, anyhow::Error>(true)
        });
        ready.await.with_context(|| format!("its log:\n{}", self.log()))
    }

    /// Waits until the relay says that it is not ready, and returns why.
    ///
    /// # Errors
    ///
    /// It stays ready.
    pub async fn not_ready(&self, limit: Duration) -> Result<String> {
        wait_for("waljet to be not ready", limit, async || {
            let answer = self.get("/readyz").await?;
            ensure!(answer.status == 503, "{}", answer.body);
            Ok::<_, anyhow::Error>(Some(answer.body))
        })
        .await
    }

    /// Asks the admin endpoint.
    ///
    /// # Errors
    ///
    /// It does not answer.
    pub async fn get(&self, path: &'static str) -> Result<HttpResponse> {
        let port = self.admin.port();
        tokio::task::spawn_blocking(move || http_get(port, path)).await?
    }

    /// The port of the admin endpoint.
    #[must_use]
    pub fn admin_port(&self) -> u16 {
        self.admin.port()
    }

    /// What the relay logged so far, over all its starts.
    #[must_use]
    pub fn log(&self) -> String {
        self.relay.as_ref().map(Program::log).unwrap_or_default()
    }

    /// How many messages the stream holds.
    ///
    /// # Errors
    ///
    /// The broker does not answer.
    pub async fn stored(&self) -> Result<u64> {
        stored(&self.broker).await
    }

    /// Waits until the stream holds as many messages as the table has rows, and the slot's confirmed position has
    /// reached the end that the WAL had at the call.
    ///
    /// # Errors
    ///
    /// It does not come to that in time; the error holds the relay's log.
    pub async fn settle(&self, limit: Duration) -> Result<()> {
        let client = connect(&self.postgres.url()).await?;
        let row = client.query_one("SELECT count(*), pg_current_wal_lsn()::text FROM outbox", &[]).await?;
        let (committed, end): (i64, String) = (row.try_get(0)?, row.try_get(1)?);
        let stored = wait_for("the stream to hold every committed event", limit, async || {
            let stored = self.stored().await?;
            ensure!(stored >= committed as u64, "{stored} of {committed} events are stored");
            Ok::<_, anyhow::Error>(true)
        });
        stored.await.with_context(|| format!("its log:\n{}", tail(&self.log())))?;
        let sql = "SELECT confirmed_flush_lsn >= $1::text::pg_lsn, confirmed_flush_lsn::text
                   FROM pg_replication_slots WHERE slot_name = $2";
        let confirmed = wait_for("the slot's confirmed position to reach the end", limit, async || {
            let row = client.query_one(sql, &[&end, &SLOT]).await?;
            let (reached, at): (bool, String) = (row.try_get(0)?, row.try_get(1)?);
            ensure!(reached, "it is at {at}, the end is {end}");
            Ok::<_, anyhow::Error>(true)
        });
        confirmed.await.with_context(|| format!("its log:\n{}", tail(&self.log())))
    }

    /// Reads the books.
    ///
    /// # Errors
    ///
    /// A server does not answer.
    pub async fn books(&self) -> Result<Books> {
        Books::read(&self.postgres.url(), &self.broker, STREAM).await
    }

    fn args(&self, args: &[&str]) -> Vec<OsString> {
        let config: &Path = &self.config();
        let own = ["--config".into(), config.into()];
        own.into_iter().chain(args.iter().map(Into::into)).collect()
    }
}

/// How many messages the rig's stream holds.
///
/// # Errors
///
/// The broker does not answer.
pub async fn stored(nats: &str) -> Result<u64> {
    let client = async_nats::connect(addresses(nats)).await?;
    let mut stream = async_nats::jetstream::new(client).get_stream(STREAM).await?;
    Ok(stream.info().await?.state.messages)
}

/// The last lines of a log.
fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}
