//! Where the demo takes place: two servers, a folder and the relay as a process of its own.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use waljet_testbed::{
    Durability, Nats, NatsOptions, Pair, PortLease, Postgres, PostgresOptions, Program, ProgramOptions, http_get,
    wait_for,
};

/// The slot of the demo.
pub(super) const SLOT: &str = "waljet";

/// The stream of the demo.
pub(super) const STREAM: &str = "OUTBOX";

/// How long the relay may take to become ready.
const READY: Duration = Duration::from_secs(30);

/// Servers, folder and relay. Dropping it ends all and removes the folder.
#[derive(Debug)]
pub(super) struct Place {
    relay: Option<Program>,
    /// The database.
    pub(super) postgres: Postgres,
    /// The broker.
    pub(super) nats: Nats,
    admin: PortLease,
    folder: Folder,
    program: PathBuf,
    versions: String,
}

impl Place {
    /// Starts the servers and writes the configuration.
    pub(super) async fn build() -> Result<Self> {
        let pair = Pair::newest()?;
        let postgres = Postgres::start(PostgresOptions {
            durability: Durability::Durable,
            ..PostgresOptions::new(&pair)
        });
        let (postgres, nats) = tokio::try_join!(postgres, Nats::start(NatsOptions::new(&pair)))?;
        let (major, (a, b, c)) = (pair.postgres_major()?, pair.nats_version()?);
        let place = Self {
            relay: None,
            postgres,
            nats,
            admin: PortLease::take()?,
            folder: Folder::create()?,
            program: std::env::current_exe().context("find the waljet program")?,
            versions: format!("PostgreSQL {major} and nats-server {a}.{b}.{c}"),
        };
        std::fs::write(place.config(), place.configuration()).context("write the configuration")?;
        Ok(place)
    }

    /// Runs `waljet init`, twice: the second time there is nothing left to do.
    pub(super) async fn init(&self) -> Result<()> {
        for _ in 0..2 {
            let mut command = Command::new(&self.program);
            command.args(self.args("init")).current_dir(&self.folder.0);
            let output = tokio::task::spawn_blocking(move || command.output()).await?.context("run waljet init")?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "waljet init failed:\n{said}");
        }
        Ok(())
    }

    /// Starts the relay.
    pub(super) fn start_relay(&mut self) -> Result<()> {
        let options = ProgramOptions {
            program: self.program.clone(),
            args: self.args("run"),
            env: Vec::new(),
            dir: self.folder.0.clone(),
            log: self.folder.0.join("waljet.log"),
        };
        self.relay = Some(Program::start(options)?);
        Ok(())
    }

    /// The relay.
    pub(super) fn relay(&mut self) -> Result<&mut Program> {
        self.relay.as_mut().context("the relay was not started")
    }

    /// Waits until the relay says that it is ready.
    pub(super) async fn ready(&mut self) -> Result<()> {
        let port = self.admin.port();
        let ready = wait_for("waljet to be ready", READY, async || {
            let answer = tokio::task::spawn_blocking(move || http_get(port, "/readyz")).await??;
            ensure!(answer.status == 200, "{}", answer.body);
            Ok::<_, anyhow::Error>(true)
        });
        let result = ready.await;
        let log = self.relay.as_ref().map(Program::log).unwrap_or_default();
        result.with_context(|| format!("its log:\n{log}"))
    }

    /// How many messages the stream holds.
    pub(super) async fn stored(&self) -> Result<u64> {
        stored(&self.nats.url()).await
    }

    /// One line about what runs where.
    pub(super) fn describe(&self) -> String {
        let Self { versions, postgres, nats, folder, .. } = self;
        format!("{versions}: {}, {}, relay log {}", postgres.url(), nats.url(), folder.0.join("waljet.log").display())
    }

    /// What a person can type while all stays up.
    pub(super) fn look_around(&self) -> String {
        let (program, config) = (self.program.display(), self.config().display().to_string());
        let (postgres, nats, admin) = (self.postgres.url(), self.nats.url(), self.admin.port());
        format!(
            "all stays up until Ctrl-C; in another terminal:\n  \
             {program} --config {config} status\n  \
             psql {postgres} -c \"INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) \
             VALUES ('order', '42', 'created', '{{}}')\"\n  \
             nats --server {nats} stream view {STREAM}\n  \
             curl http://127.0.0.1:{admin}/metrics"
        )
    }

    fn args(&self, command: &str) -> Vec<OsString> {
        vec!["--config".into(), self.config().into(), command.into()]
    }

    fn config(&self) -> PathBuf {
        self.folder.0.join("waljet.toml")
    }

    fn configuration(&self) -> String {
        let (postgres, nats, admin) = (self.postgres.url(), self.nats.url(), self.admin.port());
        format!(
            "[postgres]\nurl = \"{postgres}\"\nslot = \"{SLOT}\"\n\n\
             [nats]\nurl = \"{nats}\"\nstream = \"{STREAM}\"\n\n\
             [admin]\nlisten = \"127.0.0.1:{admin}\"\n"
        )
    }
}

/// How many messages the stream of the demo holds.
pub(super) async fn stored(nats: &str) -> Result<u64> {
    let client = async_nats::connect(nats).await?;
    let context = async_nats::jetstream::new(client);
    let mut stream = context.get_stream(STREAM).await?;
    Ok(stream.info().await?.state.messages)
}

/// A folder that goes with the demo.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn create() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("waljet-demo-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed is in the folder for temporary files all the same.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
