//! A private PostgreSQL server that can be stopped, killed, frozen and started again.

mod config;
mod memory;
mod server;
mod template;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::Result;

use self::server::Server;
use crate::{
    Pair,
    process::{lock, read_log},
    spawn::off_thread,
};

/// The superuser of every cluster.
const ROLE: &str = "postgres";

/// How clients prove who they are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Auth {
    /// Not at all.
    Trust,
    /// With SCRAM-SHA-256; this is the password of the superuser.
    Scram(String),
}

/// What a commit is worth when the machine fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// PostgreSQL's defaults, for the demo, for measurements and for tests with crashes.
    Durable,
    /// No fsync, which is faster. Commits survive a kill of the server all the same.
    Volatile,
}

/// What kind of PostgreSQL server to start.
#[derive(Debug, Clone)]
pub struct PostgresOptions {
    /// The folder that holds `postgres` and `initdb`.
    pub bin: PathBuf,
    /// Settings, which win over those of the testbed.
    pub settings: Vec<(String, String)>,
    /// Whether commits survive; volatile unless changed.
    pub durability: Durability,
    /// How clients prove who they are; not at all unless changed.
    pub auth: Auth,
    /// Lines of `pg_hba.conf` that come before those of the testbed.
    pub hba: Vec<String>,
    /// Files for the data folder, such as a server's key, closed to others.
    pub files: Vec<(String, Vec<u8>)>,
    /// Further arguments for `initdb`, such as `--wal-segsize=1`.
    pub initdb: Vec<String>,
    /// Runs `initdb` rather than copying a template, so that the system identifier is its own.
    pub fresh_initdb: bool,
}

impl PostgresOptions {
    /// Returns the usual options for the PostgreSQL of a pair.
    pub fn new(pair: &Pair) -> PostgresOptions {
        PostgresOptions {
            bin: pair.postgres.clone(),
            settings: Vec::new(),
            durability: Durability::Volatile,
            auth: Auth::Trust,
            hba: Vec::new(),
            files: Vec::new(),
            initdb: Vec::new(),
            fresh_initdb: false,
        }
    }
}

/// A private PostgreSQL server; dropping it stops it and removes its data.
///
/// The methods that change its state run one after the other, on a thread of their own.
#[derive(Debug)]
pub struct Postgres {
    port: u16,
    data: PathBuf,
    log: PathBuf,
    auth: Auth,
    pid: Arc<AtomicU32>,
    server: Arc<Mutex<Server>>,
}

impl Postgres {
    /// Makes a cluster and starts it.
    ///
    /// # Errors
    ///
    /// The binaries do not run, the cluster cannot be made, or the server does not start; the
    /// error then holds the end of its log.
    pub async fn start(options: PostgresOptions) -> Result<Postgres> {
        off_thread(move || {
            let pid = Arc::new(AtomicU32::new(0));
            let auth = options.auth.clone();
            let mut server = Server::create(options, pid.clone())?;
            server.start()?;
            let (port, data, log) = (server.port(), server.data(), server.log());
            Ok(Postgres { port, data, log, auth, pid, server: Arc::new(Mutex::new(server)) })
        })
        .await
    }

    /// Returns the URL of the database `postgres` for the superuser.
    pub fn url(&self) -> String {
        self.url_at(self.port)
    }

    /// Returns the same URL with another port, such as that of a proxy.
    pub fn url_at(&self, port: u16) -> String {
        let password = match &self.auth {
            Auth::Trust => String::new(),
            Auth::Scram(password) => format!(":{password}"),
        };
        format!("postgres://{ROLE}{password}@127.0.0.1:{port}/postgres")
    }

    /// Returns the port, which stays the same for the server's life.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the process id of the postmaster, while it runs.
    pub fn pid(&self) -> Option<u32> {
        Some(self.pid.load(Ordering::Acquire)).filter(|pid| *pid != 0)
    }

    /// Returns the data folder.
    pub fn data_dir(&self) -> &Path {
        &self.data
    }

    /// Reads what the server has logged, over all its starts.
    pub fn log(&self) -> String {
        read_log(&self.log)
    }

    /// Starts the server again after a stop or a kill.
    ///
    /// # Errors
    ///
    /// It runs already, or does not start.
    pub async fn start_again(&self) -> Result<()> {
        self.with(Server::start).await
    }

    /// Stops in order and starts again.
    ///
    /// # Errors
    ///
    /// As for [`Postgres::stop_fast`] and [`Postgres::start_again`].
    pub async fn restart(&self) -> Result<()> {
        self.with(|server| server.stop_fast().and_then(|_| server.start())).await
    }

    /// Stops in order, as for a planned restart, and returns how long that took.
    ///
    /// PostgreSQL waits for each walsender until its client has received and confirmed all WAL, so
    /// the time shows whether a relay lets go.
    ///
    /// # Errors
    ///
    /// The server is not running, or has not stopped after a minute and still runs.
    pub async fn stop_fast(&self) -> Result<Duration> {
        self.with(Server::stop_fast).await
    }

    /// Stops without a checkpoint; the next start recovers.
    ///
    /// # Errors
    ///
    /// The server is not running.
    pub async fn stop_immediate(&self) -> Result<()> {
        self.with(Server::stop_immediate).await
    }

    /// Kills the postmaster with SIGKILL and waits until its backends are gone too.
    ///
    /// # Errors
    ///
    /// The server is not running, or a backend cannot be killed.
    pub async fn kill(&self) -> Result<()> {
        self.with(Server::kill).await
    }

    /// Freezes the postmaster and all backends: connections stay open and nobody answers.
    ///
    /// # Errors
    ///
    /// The server is not running.
    pub async fn freeze(&self) -> Result<()> {
        self.with(Server::freeze).await
    }

    /// Lets a frozen server go on.
    ///
    /// # Errors
    ///
    /// The server is not running.
    pub async fn thaw(&self) -> Result<()> {
        self.with(Server::thaw).await
    }

    /// Freezes one backend or walsender, by the process id that `pg_stat_activity` shows.
    ///
    /// # Errors
    ///
    /// The server is not running, or the process is none of its own.
    pub async fn freeze_backend(&self, pid: u32) -> Result<()> {
        self.with(move |server| server.freeze_backend(pid)).await
    }

    /// Lets one frozen backend go on.
    ///
    /// # Errors
    ///
    /// As for [`Postgres::freeze_backend`].
    pub async fn thaw_backend(&self, pid: u32) -> Result<()> {
        self.with(move |server| server.signal_backend(pid, libc::SIGCONT)).await
    }

    /// Kills one backend, upon which the postmaster ends all others and recovers.
    ///
    /// # Errors
    ///
    /// As for [`Postgres::freeze_backend`].
    pub async fn kill_backend(&self, pid: u32) -> Result<()> {
        self.with(move |server| server.signal_backend(pid, libc::SIGKILL)).await
    }

    /// Changes settings; a running server reloads, and those that need it wait for a restart.
    ///
    /// # Errors
    ///
    /// The file cannot be written, or the server does not reload.
    pub async fn set(&self, settings: &[(&str, &str)]) -> Result<()> {
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        self.with(move |server| server.set(settings)).await
    }

    /// Replaces the caller's lines of `pg_hba.conf` and reloads.
    ///
    /// # Errors
    ///
    /// As for [`Postgres::set`].
    pub async fn set_hba(&self, lines: &[&str]) -> Result<()> {
        let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        self.with(move |server| server.set_hba(&lines)).await
    }

    async fn with<T: Send + 'static>(&self, job: impl FnOnce(&mut Server) -> Result<T> + Send + 'static) -> Result<T> {
        let server = self.server.clone();
        off_thread(move || job(&mut lock(&server))).await
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Here rather than when the last owner goes, which may be a thread that nobody waits for.
        lock(&self.server).abandon();
    }
}
