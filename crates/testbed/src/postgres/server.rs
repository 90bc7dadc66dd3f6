//! The blocking side of a PostgreSQL server: its files, its process, its signals.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::{PostgresOptions, config, memory::Segment, template};
use crate::{
    PortLease,
    folder::{Folder, give},
    process::{Process, children, freeze, log_tail, read_log, send, show_log_if_failing},
    spawn::{ServerCommand, describe},
    wait::poll,
};

/// How long a start may take, crash recovery included.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long a fast stop may take; walsenders hold it up until their client has answered.
const FAST_LIMIT: Duration = Duration::from_secs(60);
/// How long an immediate stop may take before the postmaster is killed.
const IMMEDIATE_LIMIT: Duration = Duration::from_secs(10);
/// How long backends may take to notice that their postmaster was killed.
const ORPHAN_LIMIT: Duration = Duration::from_secs(3);
/// How long a reload may take to show up in the log.
const RELOAD_LIMIT: Duration = Duration::from_secs(5);

/// A cluster and, while it runs, its postmaster.
#[derive(Debug)]
pub(super) struct Server {
    options: PostgresOptions,
    /// Settings made after the start, which the next start keeps.
    changed: Vec<(String, String)>,
    port: PortLease,
    process: Option<Process>,
    /// The segment of the last postmaster, until it is known to be gone.
    segment: Option<Segment>,
    /// The process id for those who do not hold the lock; 0 while stopped.
    pid: Arc<AtomicU32>,
    /// Last, so that it is removed when the process has ended.
    folder: Folder,
}

impl Server {
    /// Makes the cluster, without starting it.
    pub(super) fn create(options: PostgresOptions, pid: Arc<AtomicU32>) -> Result<Server> {
        let folder = Folder::create("postgres")?;
        let port = PortLease::take()?;
        let server = Server { options, changed: Vec::new(), port, process: None, segment: None, pid, folder };
        template::create(&server.options, &server.data())?;
        let conf = server.data().join("postgresql.conf");
        let mut text = fs::read_to_string(&conf).context("read postgresql.conf")?;
        text.push_str(&format!("\ninclude '{}'\n", config::FILE));
        fs::write(&conf, text).context("write postgresql.conf")?;
        server.write_file("pg_hba.conf", config::hba(&server.options.auth, &server.options.hba).as_bytes())?;
        for (name, content) in &server.options.files {
            server.write_file(name, content)?;
        }
        Ok(server)
    }

    /// Returns the port.
    pub(super) fn port(&self) -> u16 {
        self.port.port()
    }

    /// Returns the data folder.
    pub(super) fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Returns where the log goes.
    pub(super) fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Starts the server and waits until it takes connections.
    pub(super) fn start(&mut self) -> Result<()> {
        ensure!(self.process.is_none(), "start PostgreSQL: it runs already");
        let (data, log) = (self.data(), self.log());
        self.write_file(config::FILE, config::conf(&self.options, self.port(), &self.changed).as_bytes())?;
        let command = ServerCommand {
            program: self.options.bin.join("postgres"),
            args: vec!["-D".into(), data.clone().into()],
            dir: data.clone(),
            log: log.clone(),
            // Immediate shutdown: unlike after a kill, the postmaster removes its shared memory.
            death_signal: libc::SIGQUIT,
        };
        // Kept at once, so that every way out of here ends it.
        let process = self.process.insert(Process::start(command, &data)?);
        let pid = process.pid();
        self.segment = poll("PostgreSQL to start", START_LIMIT, || {
            if let Some(status) = process.ended()? {
                bail!("PostgreSQL ended with {} while starting\n{}", describe(status), log_tail(&log));
            }
            Ok(ready_segment(&data, pid))
        })
        .inspect_err(|_| self.abandon())?;
        self.pid.store(pid, Ordering::Release);
        Ok(())
    }

    /// Stops with SIGINT, as a planned restart does, and returns how long it took.
    pub(super) fn stop_fast(&mut self) -> Result<Duration> {
        self.thaw()?;
        let started = Instant::now();
        let process = self.running()?;
        process.signal(libc::SIGINT)?;
        process.wait("the fast shutdown of PostgreSQL", FAST_LIMIT)?;
        self.gone();
        Ok(started.elapsed())
    }

    /// Stops with SIGQUIT: no checkpoint, so that the next start recovers from the WAL.
    pub(super) fn stop_immediate(&mut self) -> Result<()> {
        self.thaw()?;
        let process = self.running()?;
        process.signal(libc::SIGQUIT)?;
        if process.wait("the immediate shutdown of PostgreSQL", IMMEDIATE_LIMIT).is_err() {
            return self.kill();
        }
        self.gone();
        Ok(())
    }

    /// Kills the postmaster and waits until its backends and its shared memory are gone.
    pub(super) fn kill(&mut self) -> Result<()> {
        let process = self.running()?;
        let orphans = children(process.pid());
        process.kill()?;
        self.process = None;
        self.pid.store(0, Ordering::Release);
        let Some(segment) = self.segment else { return Ok(()) };
        // Frozen backends would never notice.
        orphans.iter().for_each(|pid| drop(send(*pid, libc::SIGCONT)));
        let released = || Ok((!segment.in_use()).then_some(()));
        if poll("the backends to end", ORPHAN_LIMIT, released).is_err() {
            // Those in the middle of a long query. While one is attached, no new server can start.
            orphans.iter().for_each(|pid| drop(send(*pid, libc::SIGKILL)));
            poll("the killed backends to end", ORPHAN_LIMIT, released)?;
        }
        Ok(())
    }

    /// Freezes the whole server.
    pub(super) fn freeze(&mut self) -> Result<()> {
        self.running()?.freeze(children)
    }

    /// Lets a frozen server go on, and each backend that was frozen on its own.
    pub(super) fn thaw(&mut self) -> Result<()> {
        self.running()?.thaw(children)
    }

    /// Freezes one backend.
    pub(super) fn freeze_backend(&mut self, backend: u32) -> Result<()> {
        freeze(self.own(backend)?)
    }

    /// Sends a signal to one backend.
    pub(super) fn signal_backend(&mut self, backend: u32, signal: i32) -> Result<()> {
        send(self.own(backend)?, signal).with_context(|| format!("send signal {signal} to backend {backend}"))
    }

    /// Changes settings for this and every later start; a running server reads them at once.
    pub(super) fn set(&mut self, settings: Vec<(String, String)>) -> Result<()> {
        self.changed.extend(settings);
        self.write_file(config::FILE, config::conf(&self.options, self.port(), &self.changed).as_bytes())?;
        self.reload()
    }

    /// Changes who may connect, and how.
    pub(super) fn set_hba(&mut self, lines: &[String]) -> Result<()> {
        self.write_file("pg_hba.conf", config::hba(&self.options.auth, lines).as_bytes())?;
        self.reload()
    }

    /// Writes a file into the data folder, closed to others, as PostgreSQL wants its keys.
    pub(super) fn write_file(&self, name: &str, content: &[u8]) -> Result<()> {
        let path = self.data().join(name);
        fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
            .with_context(|| format!("close {}", path.display()))?;
        give(&path)
    }

    /// Ends the server as fast as possible, whatever state it is in.
    pub(super) fn abandon(&mut self) {
        if self.process.is_some() && self.stop_immediate().is_err() {
            let _ = self.kill();
        }
        self.process = None;
        self.pid.store(0, Ordering::Release);
        if let Some(segment) = self.segment.take() {
            segment.remove();
        }
    }

    fn reload(&mut self) -> Result<()> {
        let Some(process) = &self.process else { return Ok(()) };
        let log = self.log();
        let count = || read_log(&log).matches("reloading configuration files").count();
        let before = count();
        process.signal(libc::SIGHUP)?;
        poll("PostgreSQL to reload", RELOAD_LIMIT, || Ok((count() > before).then_some(())))
    }

    /// Makes sure that a process is a backend of this server.
    fn own(&mut self, backend: u32) -> Result<u32> {
        let postmaster = self.running()?.pid();
        ensure!(children(postmaster).contains(&backend), "process {backend} is no backend of this server");
        Ok(backend)
    }

    fn running(&mut self) -> Result<&mut Process> {
        self.process.as_mut().context("PostgreSQL is not running")
    }

    /// Notes that the postmaster has ended in order and has removed its shared memory.
    fn gone(&mut self) {
        self.process = None;
        self.segment = None;
        self.pid.store(0, Ordering::Release);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.abandon();
        show_log_if_failing("PostgreSQL", &self.log());
    }
}

/// Reads from `postmaster.pid` whether the postmaster with this id takes connections.
///
/// Line 1 is the process id, which an earlier postmaster may have left behind; line 7 the shared
/// memory; line 8 the state.
fn ready_segment(data: &Path, pid: u32) -> Option<Option<Segment>> {
    let text = fs::read_to_string(data.join("postmaster.pid")).ok()?;
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let ours = lines.first()?.parse() == Ok(pid);
    (ours && *lines.get(7)? == "ready").then(|| Segment::parse(lines[6]))
}
