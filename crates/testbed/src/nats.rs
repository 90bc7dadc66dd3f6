//! A private nats-server that can be stopped, killed, frozen and started again.

mod cluster;
mod server;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use anyhow::Result;

pub use self::cluster::NatsCluster;
use self::server::Server;
use crate::{
    Pair,
    process::{lock, read_log},
    spawn::off_thread,
};

/// The limits of JetStream; without any, nats-server reserves most of the memory and of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JetStream {
    /// For streams in memory, in bytes.
    pub max_memory_store: u64,
    /// For streams in files, in bytes.
    pub max_file_store: u64,
    /// Further lines for the block, such as `sync_interval: always`.
    pub extra: String,
}

impl Default for JetStream {
    fn default() -> Self {
        JetStream { max_memory_store: 256 << 20, max_file_store: 4 << 30, extra: String::new() }
    }
}

/// What kind of nats-server to start.
#[derive(Debug, Clone)]
pub struct NatsOptions {
    /// The executable.
    pub program: PathBuf,
    /// The server's name.
    pub name: String,
    /// JetStream and its limits; `None` leaves it switched off.
    pub jetstream: Option<JetStream>,
    /// Further configuration, such as accounts or TLS.
    pub extra: String,
    /// Files for the folder the server runs in, to which `extra` can refer by name.
    pub files: Vec<(String, Vec<u8>)>,
}

impl NatsOptions {
    /// Returns the usual options for the nats-server of a pair.
    pub fn new(pair: &Pair) -> NatsOptions {
        NatsOptions {
            program: pair.nats.clone(),
            name: "testbed".to_owned(),
            jetstream: Some(JetStream::default()),
            extra: String::new(),
            files: Vec::new(),
        }
    }
}

/// Splits what [`NatsCluster::url`] returns into what a client connects to.
pub fn addresses(url: &str) -> Vec<String> {
    url.split(',').map(str::to_owned).collect()
}

/// A private nats-server; dropping it stops it and removes its streams.
///
/// The methods that change its state run one after the other, on a thread of their own.
#[derive(Debug)]
pub struct Nats {
    name: String,
    port: u16,
    monitor_port: u16,
    store: PathBuf,
    log: PathBuf,
    pid: Arc<AtomicU32>,
    server: Arc<Mutex<Server>>,
}

impl Nats {
    /// Starts a server of its own.
    ///
    /// # Errors
    ///
    /// The binary does not run or the server does not become healthy; the error then holds the end
    /// of its log.
    pub async fn start(options: NatsOptions) -> Result<Nats> {
        off_thread(move || {
            let nats = Nats::create(options, None)?;
            lock(&nats.server).start()?;
            Ok(nats)
        })
        .await
    }

    /// Makes the folder of a server, without starting it.
    fn create(options: NatsOptions, member: Option<cluster::Member>) -> Result<Nats> {
        let pid = Arc::new(AtomicU32::new(0));
        let name = options.name.clone();
        let server = Server::create(options, member, pid.clone())?;
        let (port, monitor_port, store, log) = (server.port(), server.monitor_port(), server.store(), server.log());
        Ok(Nats { name, port, monitor_port, store, log, pid, server: Arc::new(Mutex::new(server)) })
    }

    /// Returns the URL for clients.
    pub fn url(&self) -> String {
        self.url_at(self.port)
    }

    /// Returns the same URL with another port, such as that of a proxy.
    pub fn url_at(&self, port: u16) -> String {
        format!("nats://127.0.0.1:{port}")
    }

    /// Returns the server's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the port for clients, which stays the same for the server's life.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the port of `/varz`, `/jsz` and `/healthz`.
    pub fn monitor_port(&self) -> u16 {
        self.monitor_port
    }

    /// Returns the process id, while the server runs.
    pub fn pid(&self) -> Option<u32> {
        Some(self.pid.load(Ordering::Acquire)).filter(|pid| *pid != 0)
    }

    /// Returns the folder of the streams; removing it while the server is stopped loses them.
    pub fn store_dir(&self) -> &Path {
        &self.store
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

    /// Stops the server and starts it again.
    ///
    /// # Errors
    ///
    /// As for [`Nats::stop`] and [`Nats::start_again`].
    pub async fn restart(&self) -> Result<()> {
        self.with(|server| server.stop().and_then(|()| server.start())).await
    }

    /// Stops the server in order.
    ///
    /// # Errors
    ///
    /// The server is not running.
    pub async fn stop(&self) -> Result<()> {
        self.with(Server::stop).await
    }

    /// Kills the server with SIGKILL.
    ///
    /// # Errors
    ///
    /// The server is not running.
    pub async fn kill(&self) -> Result<()> {
        self.with(Server::kill).await
    }

    /// Freezes the server: connections stay open and nobody answers.
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

    /// Sends the clients away before stopping, as a rolling upgrade does; returns at once.
    ///
    /// # Errors
    ///
    /// The server is not running.
    pub async fn lame_duck(&self) -> Result<()> {
        self.with(Server::lame_duck).await
    }

    /// Replaces the further configuration, for this and every later start.
    ///
    /// # Errors
    ///
    /// The server is not running, or refuses the configuration.
    pub async fn reload(&self, extra: &str) -> Result<()> {
        let extra = extra.to_owned();
        self.with(move |server| server.reload(extra)).await
    }

    async fn with<T: Send + 'static>(&self, job: impl FnOnce(&mut Server) -> Result<T> + Send + 'static) -> Result<T> {
        let server = self.server.clone();
        off_thread(move || job(&mut lock(&server))).await
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        // Here rather than when the last owner goes, which may be a thread that nobody waits for.
        lock(&self.server).abandon();
    }
}
