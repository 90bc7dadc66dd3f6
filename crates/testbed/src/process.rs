//! A running server process: signals, waiting for its end, and the guard against leaving it behind.

use std::{
    fs,
    io::{self, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{spawn::ServerCommand, wait::poll};

/// How many lines of a log go into an error.
const LOG_LINES: usize = 30;

/// How long a process may take to stand still.
const FREEZE_LIMIT: Duration = Duration::from_secs(2);

/// A server process that is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    /// Where the kernel does not do it, ends the server when we die.
    _guard: Option<Guard>,
    /// While the server is frozen, wakes it up when we die, so that it can end.
    thaw_guard: Option<Guard>,
}

impl Process {
    /// Starts a server.
    ///
    /// `mark` is a text in its command line that no other process has.
    pub(crate) fn start(command: ServerCommand, mark: &Path) -> Result<Process> {
        let signal = command.death_signal;
        let child = command.spawn()?;
        let guard = if cfg!(target_os = "linux") { None } else { Some(Guard::end(child.id(), mark, signal)?) };
        Ok(Process { child, _guard: guard, thaw_guard: None })
    }

    /// Returns the process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal. The process is our child and not waited for yet, so the id is still its own.
    pub(crate) fn signal(&self, signal: i32) -> Result<()> {
        send(self.pid(), signal).with_context(|| format!("send signal {signal} to process {}", self.pid()))
    }

    /// Returns how the process ended, if it did.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("look at the server process")
    }

    /// Waits until the process has ended.
    pub(crate) fn wait(&mut self, what: &str, limit: Duration) -> Result<ExitStatus> {
        poll(what, limit, || self.ended())
    }

    /// Ends the process at once.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill().context("kill the server process")?;
        self.child.wait().context("wait for the killed server process")?;
        Ok(())
    }

    /// Stops the process, and `others` that belong to it, in their tracks.
    pub(crate) fn freeze(&mut self, others: impl FnOnce(u32) -> Vec<u32>) -> Result<()> {
        // The parent first, so that it starts no further process.
        freeze(self.pid())?;
        let others = others(self.pid());
        for pid in &others {
            // It may have ended since it was listed.
            let _ = freeze(*pid);
        }
        self.thaw_guard = Some(Guard::thaw(others.into_iter().chain([self.pid()]))?);
        Ok(())
    }

    /// Lets the process, and `others` that belong to it, go on; no harm to those that do.
    pub(crate) fn thaw(&mut self, others: impl FnOnce(u32) -> Vec<u32>) -> Result<()> {
        for pid in others(self.pid()) {
            let _ = send(pid, libc::SIGCONT);
        }
        self.thaw_guard = None;
        self.signal(libc::SIGCONT)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.kill();
        }
    }
}

/// A shell that waits for our end on a pipe that only we hold, and then sends a signal.
#[derive(Debug)]
pub(crate) struct Guard(Child);

impl Guard {
    /// Ends a server, if a process with `mark` in its command line still has the id.
    fn end(pid: u32, mark: &Path, signal: i32) -> Result<Guard> {
        let script = r#"read -r _; ps -p "$1" -o args= | grep -qF -- "$2" && kill "-$3" "$1""#;
        Guard::start(script, &[&pid.to_string(), &mark.to_string_lossy(), &signal.to_string()])
    }

    /// Wakes processes up, which does no harm to one that never slept.
    fn thaw(pids: impl Iterator<Item = u32>) -> Result<Guard> {
        let pids: Vec<String> = pids.map(|pid| pid.to_string()).collect();
        let pids: Vec<&str> = pids.iter().map(String::as_str).collect();
        Guard::start(r#"read -r _; kill -CONT "$@""#, &pids)
    }

    fn start(script: &str, args: &[&str]) -> Result<Guard> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script, "waljet-guard"]).args(args);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        Ok(Guard(command.spawn().context("start the guard of a server")?))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a signal to a process.
pub(crate) fn send(pid: u32, signal: i32) -> io::Result<()> {
    // SAFETY: the call takes two numbers.
    if unsafe { libc::kill(pid as i32, signal) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Stops a process and waits until it stands still, which it need not do at once.
pub(crate) fn freeze(pid: u32) -> Result<()> {
    send(pid, libc::SIGSTOP).with_context(|| format!("freeze process {pid}"))?;
    let stands = || if cfg!(target_os = "linux") { !matches!(stat(pid), Some(('R' | 'S' | 'D', _))) } else { true };
    poll("a process to stand still", FREEZE_LIMIT, || Ok(stands().then_some(())))
}

/// Lists the children of a process that have not ended.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    if cfg!(target_os = "linux") {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        return pids.filter(|pid| stat(*pid).is_some_and(|(state, of)| state != 'Z' && of == parent)).collect();
    }
    let output = Command::new("pgrep").args(["-P", &parent.to_string()]).output();
    let output = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    output.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Reads the state and the parent of a process from `/proc`.
fn stat(pid: u32) -> Option<(char, u32)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is a name in parentheses that may hold blanks and parentheses.
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Reads a log, with an empty text for one that is not there.
pub(crate) fn read_log(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// The last lines of a log, for an error.
pub(crate) fn log_tail(path: &Path) -> String {
    let log = read_log(path);
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

/// Prints the last lines of a log when the test that used the server is failing.
pub(crate) fn show_log_if_failing(what: &str, path: &Path) {
    if thread::panicking() {
        let tail = log_tail(path);
        let _ = writeln!(io::stderr(), "--- the last lines of the log of {what}\n{tail}\n---");
    }
}

/// Locks a mutex even if a thread panicked with it: a server that is left behind is worse.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    #[test]
    fn children_are_found_and_only_those() {
        let mut sleeper = Command::new("sleep").arg("60").spawn().unwrap();
        assert!(children(std::process::id()).contains(&sleeper.id()));
        assert!(!children(sleeper.id()).contains(&sleeper.id()));
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        assert!(!children(std::process::id()).contains(&sleeper.id()));
    }

    /// The guard that other systems rely on, tried here: closing its pipe is what our death does.
    #[test]
    fn a_guard_ends_the_process_it_was_given_and_no_other() {
        for (mark, ends) in [("60.25", true), ("something else", false)] {
            let mut sleeper = Command::new("sleep").arg("60.25").spawn().unwrap();
            let mut guard = Guard::end(sleeper.id(), Path::new(mark), libc::SIGTERM).unwrap();
            drop(guard.0.stdin.take());
            guard.0.wait().unwrap();
            thread::sleep(Duration::from_millis(50));
            assert_eq!(sleeper.try_wait().unwrap().is_some(), ends, "{mark}");
            sleeper.kill().unwrap();
            sleeper.wait().unwrap();
        }
    }
}
