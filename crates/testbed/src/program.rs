//! Any other program that a test or the demo starts, kills and starts again.

use std::{
    ffi::OsString,
    fs::File,
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};

use crate::{
    process::{log_tail, read_log, send},
    spawn::{die_with_parent, on_spawner},
};

/// How long a killed program may take to be gone.
const KILLED: Duration = Duration::from_secs(10);

/// What to run.
#[derive(Debug, Clone)]
pub struct ProgramOptions {
    /// The executable.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Environment variables beside those of this process.
    pub env: Vec<(OsString, OsString)>,
    /// The folder to run in.
    pub dir: PathBuf,
    /// Where standard output and error are appended.
    pub log: PathBuf,
}

/// A running program of our own user; dropping it kills it, and so does our death.
#[derive(Debug)]
pub struct Program {
    options: ProgramOptions,
    child: Child,
}

impl Program {
    /// Starts it.
    ///
    /// # Errors
    ///
    /// It cannot be run.
    pub fn start(options: ProgramOptions) -> Result<Program> {
        let child = spawn(options.clone())?;
        Ok(Program { options, child })
    }

    /// Kills it if it still runs, and starts it with the same arguments and the same log.
    ///
    /// # Errors
    ///
    /// It cannot be killed or run.
    pub fn start_again(&mut self) -> Result<()> {
        self.kill()?;
        self.child = spawn(self.options.clone())?;
        Ok(())
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGKILL and waits until it is gone.
    ///
    /// # Errors
    ///
    /// It does not go.
    pub fn kill(&mut self) -> Result<()> {
        if self.ended()?.is_none() {
            self.signal(libc::SIGKILL)?;
            self.wait(KILLED)?;
        }
        Ok(())
    }

    /// Sends SIGTERM and waits; returns how it ended and how long that took.
    ///
    /// # Errors
    ///
    /// It does not end in time.
    pub fn terminate(&mut self, limit: Duration) -> Result<(ExitStatus, Duration)> {
        let start = Instant::now();
        self.signal(libc::SIGTERM)?;
        let status = self.wait(limit)?;
        Ok((status, start.elapsed()))
    }

    /// Sends a signal, such as `libc::SIGSTOP`.
    ///
    /// # Errors
    ///
    /// It is gone.
    pub fn signal(&self, signal: i32) -> Result<()> {
        send(self.pid(), signal).with_context(|| format!("send signal {signal} to {}", self.name()))
    }

    /// Returns how it ended, if it has.
    ///
    /// # Errors
    ///
    /// The system does not say.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("look after {}", self.name()))
    }

    /// Waits until it ends.
    ///
    /// # Errors
    ///
    /// It does not end in time; the error holds the end of its log.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() >= end {
                bail!(
                    "{} did not end within {limit:?}; its log ends with:\n{}",
                    self.name(),
                    log_tail(&self.options.log)
                );
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// What it wrote so far, over all its starts.
    pub fn log(&self) -> String {
        read_log(&self.options.log)
    }

    fn name(&self) -> String {
        self.options.program.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Nobody is left to tell; the kernel ends it with us at the latest.
        let _ = self.kill();
    }
}

fn spawn(options: ProgramOptions) -> Result<Child> {
    let shown = options.program.display().to_string();
    on_spawner(move || spawn_here(&options))?.map_err(|error| anyhow!(error)).with_context(|| format!("run {shown}"))
}

fn spawn_here(options: &ProgramOptions) -> io::Result<Child> {
    let log = open_log(&options.log)?;
    let mut command = Command::new(&options.program);
    command.args(&options.args).current_dir(&options.dir).stdin(Stdio::null());
    command.stdout(log.try_clone()?).stderr(log);
    without_ours(&mut command);
    command.envs(options.env.iter().map(|(name, value)| (name, value)));
    // Ctrl-C in a terminal reaches us alone.
    command.process_group(0);
    die_with_parent(&mut command, libc::SIGKILL);
    command.spawn()
}

/// Takes away what is meant for the tests, or would change the configuration that they write.
pub(crate) fn without_ours(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("WALJET_") {
            command.env_remove(name);
        }
    }
}

fn open_log(path: &Path) -> io::Result<File> {
    File::options().create(true).append(true).open(path)
}
