//! The blocking side of a nats-server: its files, its process, its signals.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};

use super::{NatsOptions, cluster::Member};
use crate::{
    PortLease,
    folder::{Folder, give, make_private},
    http::http_get,
    process::{Process, log_tail, read_log, show_log_if_failing},
    spawn::{ServerCommand, describe},
    wait::poll,
};

/// How long a start may take; recovering large streams takes a while.
const START_LIMIT: Duration = Duration::from_secs(30);
/// How long a stop may take before the server is killed.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How long a reload may take to show up in the log.
const RELOAD_LIMIT: Duration = Duration::from_secs(5);
/// The name of the configuration file in the server's folder.
const CONFIG: &str = "nats.conf";

/// The files of a server and, while it runs, its process.
#[derive(Debug)]
pub(super) struct Server {
    options: NatsOptions,
    member: Option<Member>,
    port: PortLease,
    monitor: PortLease,
    process: Option<Process>,
    /// The process id for those who do not hold the lock; 0 while stopped.
    pid: Arc<AtomicU32>,
    /// Last, so that it is removed when the process has ended.
    folder: Folder,
}

impl Server {
    /// Makes the folder, without starting anything.
    pub(super) fn create(options: NatsOptions, member: Option<Member>, pid: Arc<AtomicU32>) -> Result<Server> {
        let folder = Folder::create("nats")?;
        let (port, monitor) = (PortLease::take()?, PortLease::take()?);
        let server = Server { options, member, port, monitor, process: None, pid, folder };
        make_private(&server.store())?;
        for (name, content) in &server.options.files {
            server.write_file(name, content)?;
        }
        Ok(server)
    }

    /// Returns the port for clients.
    pub(super) fn port(&self) -> u16 {
        self.port.port()
    }

    /// Returns the port for monitoring.
    pub(super) fn monitor_port(&self) -> u16 {
        self.monitor.port()
    }

    /// Returns the folder of the streams.
    pub(super) fn store(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// Returns where the log goes.
    pub(super) fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Starts the server and waits until it serves.
    pub(super) fn start(&mut self) -> Result<()> {
        self.spawn()?;
        self.wait_until_served().inspect_err(|_| self.abandon())
    }

    /// Starts the server without waiting for it.
    pub(super) fn spawn(&mut self) -> Result<()> {
        ensure!(self.process.is_none(), "start nats-server: it runs already");
        self.write_file(CONFIG, self.config().as_bytes())?;
        let config = self.folder.path().join(CONFIG);
        let command = ServerCommand {
            program: self.options.program.clone(),
            args: vec!["-c".into(), config.clone().into()],
            dir: self.folder.path().to_owned(),
            log: self.log(),
            death_signal: libc::SIGTERM,
        };
        let process = self.process.insert(Process::start(command, &config)?);
        self.pid.store(process.pid(), Ordering::Release);
        Ok(())
    }

    /// Waits until a server that was started serves.
    pub(super) fn wait_until_served(&mut self) -> Result<()> {
        // A member of a cluster is not healthy before it has met the others, which may be down.
        let path = if self.member.is_some() { "/varz" } else { "/healthz" };
        let (log, monitor) = (self.log(), self.monitor.port());
        let process = running(&mut self.process)?;
        poll("nats-server to start", START_LIMIT, || {
            if let Some(status) = process.ended()? {
                bail!("nats-server ended with {} while starting\n{}", describe(status), log_tail(&log));
            }
            Ok(http_get(monitor, path).is_ok_and(|answer| answer.status == 200).then_some(()))
        })
    }

    /// Stops the server in order.
    pub(super) fn stop(&mut self) -> Result<()> {
        self.thaw()?;
        let process = running(&mut self.process)?;
        process.signal(libc::SIGTERM)?;
        if process.wait("nats-server to stop", STOP_LIMIT).is_err() {
            process.kill()?;
        }
        self.gone();
        Ok(())
    }

    /// Kills the server.
    pub(super) fn kill(&mut self) -> Result<()> {
        running(&mut self.process)?.kill()?;
        self.gone();
        Ok(())
    }

    /// Freezes the server.
    pub(super) fn freeze(&mut self) -> Result<()> {
        running(&mut self.process)?.freeze(|_| Vec::new())
    }

    /// Lets a frozen server go on.
    pub(super) fn thaw(&mut self) -> Result<()> {
        running(&mut self.process)?.thaw(|_| Vec::new())
    }

    /// Starts the lame duck mode.
    pub(super) fn lame_duck(&mut self) -> Result<()> {
        running(&mut self.process)?.signal(libc::SIGUSR2)
    }

    /// Replaces the further configuration.
    pub(super) fn reload(&mut self, extra: String) -> Result<()> {
        self.options.extra = extra;
        self.write_file(CONFIG, self.config().as_bytes())?;
        let log = self.log();
        let before = read_log(&log).len();
        running(&mut self.process)?.signal(libc::SIGHUP)?;
        poll("nats-server to reload", RELOAD_LIMIT, || {
            let all = read_log(&log);
            let new = all.get(before..).unwrap_or_default();
            // Other errors of the same moment are those of clients.
            if let Some(line) = new.lines().find(|line| line.contains("Failed to reload server configuration")) {
                bail!("nats-server refused the configuration: {line}");
            }
            Ok(new.contains("Reloaded server configuration").then_some(()))
        })
    }

    /// Ends the server as fast as possible, whatever state it is in.
    pub(super) fn abandon(&mut self) {
        // Its streams are thrown away, so nothing is lost by not asking first.
        let _ = self.kill();
        self.gone();
    }

    /// Writes a file into the server's folder, closed to others.
    fn write_file(&self, name: &str, content: &[u8]) -> Result<()> {
        let path = self.folder.path().join(name);
        fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
            .with_context(|| format!("close {}", path.display()))?;
        give(&path)
    }

    fn config(&self) -> String {
        let cluster = self.member.as_ref().map(Member::config).unwrap_or_default();
        config(&self.options, self.port(), self.monitor_port(), &self.store()) + &cluster
    }

    fn gone(&mut self) {
        self.process = None;
        self.pid.store(0, Ordering::Release);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.abandon();
        show_log_if_failing(&format!("nats-server {}", self.options.name), &self.log());
    }
}

fn running(process: &mut Option<Process>) -> Result<&mut Process> {
    process.as_mut().context("nats-server is not running")
}

fn config(options: &NatsOptions, port: u16, monitor: u16, store: &Path) -> String {
    let NatsOptions { name, jetstream, extra, .. } = options;
    let mut text = format!("server_name: {name:?}\nlisten: \"127.0.0.1:{port}\"\nhttp: \"127.0.0.1:{monitor}\"\n");
    if let Some(limits) = jetstream {
        text.push_str(&format!(
            "jetstream {{\n  store_dir: {store:?}\n  max_memory_store: {}\n  max_file_store: {}\n  {}\n}}\n",
            limits.max_memory_store, limits.max_file_store, limits.extra
        ));
    }
    text + extra + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{JetStream, Pair};

    #[test]
    fn limits_and_further_lines_are_in_the_configuration() {
        let pair = Pair { postgres: "/x".into(), nats: "/y".into() };
        let mut options = NatsOptions::new(&pair);
        options.extra = "max_payload: 64KB".into();
        options.jetstream = Some(JetStream { extra: "sync_interval: always".into(), ..JetStream::default() });
        let text = config(&options, 21_000, 21_001, Path::new("/tmp/store"));
        for line in ["max_file_store: 4294967296", "sync_interval: always", "max_payload: 64KB", "\"127.0.0.1:21000\""]
        {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
}
