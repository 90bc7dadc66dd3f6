//! Starting a server as the right user, and so that it cannot outlive us.
//!
//! On Linux the kernel ends the server when the *thread* that spawned it ends, so one thread that
//! lives as long as the process spawns them all; threads of a test end with their test. Elsewhere
//! a guard process does it, see [`crate::process`].

use std::{
    ffi::{CStr, CString, OsString},
    fs::{self, File},
    io,
    os::unix::{
        fs::MetadataExt,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{OnceLock, mpsc},
    thread,
};

use anyhow::{Context, Result, anyhow, ensure};

/// A user and its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Account {
    /// The user id.
    pub(crate) uid: u32,
    /// The id of its primary group.
    pub(crate) gid: u32,
}

impl Account {
    /// The account of this process.
    pub(crate) fn current() -> Account {
        // SAFETY: both calls take nothing, cannot fail and touch no memory of ours.
        unsafe { Account { uid: libc::geteuid(), gid: libc::getegid() } }
    }

    /// The account the servers run as: ours, or `postgres` or `nobody` when we are root.
    ///
    /// PostgreSQL refuses to run as root, and `initdb` wants an entry in the list of users, so it
    /// has to be a user that exists.
    pub(crate) fn for_servers() -> Result<Account> {
        static FOUND: OnceLock<Option<Account>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            if is_root() { [c"postgres", c"nobody"].into_iter().find_map(look_up) } else { Some(Account::current()) }
        });
        found.context("run PostgreSQL as root: neither a user postgres nor a user nobody exists")
    }

    /// Tells whether the account can enter a folder and every folder above it.
    pub(crate) fn reaches(self, dir: &Path) -> bool {
        let Ok(dir) = dir.canonicalize() else { return false };
        self.uid == 0
            || dir.ancestors().all(|step| {
                fs::metadata(step).is_ok_and(|found| {
                    let bit = match (found.uid() == self.uid, found.gid() == self.gid) {
                        (true, _) => 0o100,
                        (false, true) => 0o010,
                        (false, false) => 0o001,
                    };
                    found.mode() & bit != 0
                })
            })
    }
}

/// Tells whether we are root.
pub(crate) fn is_root() -> bool {
    Account::current().uid == 0
}

fn look_up(name: &CStr) -> Option<Account> {
    let name = CString::from(name);
    // SAFETY: the name ends with a zero byte. The entry that is pointed to is read at once, and
    // no other thread asks, because the only caller runs inside `OnceLock::get_or_init`.
    unsafe {
        let entry = libc::getpwnam(name.as_ptr());
        (!entry.is_null()).then(|| Account { uid: (*entry).pw_uid, gid: (*entry).pw_gid })
    }
}

/// What to run, where, and what to do with it when we die.
#[derive(Debug, Clone)]
pub(crate) struct ServerCommand {
    /// The executable.
    pub(crate) program: PathBuf,
    /// Its arguments.
    pub(crate) args: Vec<OsString>,
    /// The folder to run in, which the servers' account must be able to enter.
    pub(crate) dir: PathBuf,
    /// Where standard output and error are appended.
    pub(crate) log: PathBuf,
    /// The signal to end it with when we die.
    pub(crate) death_signal: i32,
}

impl ServerCommand {
    /// Starts the program.
    pub(crate) fn spawn(self) -> Result<Child> {
        let shown = self.program.display().to_string();
        let account = Account::for_servers()?;
        let bin = self.program.parent().unwrap_or(Path::new("/"));
        ensure!(
            account.reaches(bin),
            "run {shown}: the user that servers run as (uid {}) cannot enter its folder\nhint: run `export \
             $(./tools.sh --pairs)`, which as root keeps the servers in /var/cache/waljet",
            account.uid
        );
        on_spawner(move || self.spawn_here(account))?.with_context(|| format!("run {shown}"))
    }

    /// Runs the program to its end and returns its exit status.
    pub(crate) fn run(self) -> Result<ExitStatus> {
        let shown = self.program.display().to_string();
        self.spawn()?.wait().with_context(|| format!("wait for {shown}"))
    }

    fn spawn_here(self, account: Account) -> io::Result<Child> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = Command::new(&self.program);
        command.args(&self.args).current_dir(&self.dir).stdin(Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        // A known locale, and nothing of ours, such as PGDATA or PGPORT.
        command.env_clear().env("PATH", "/usr/bin:/bin").env("LC_ALL", "C").env("TZ", "UTC");
        // Ctrl-C in a terminal then reaches us alone, and we stop the servers in order.
        command.process_group(0);
        if account != Account::current() {
            command.uid(account.uid).gid(account.gid);
        }
        die_with_parent(&mut command, self.death_signal);
        command.spawn()
    }
}

/// Asks the kernel to end the child when the thread that spawns it ends.
#[cfg(target_os = "linux")]
pub(crate) fn die_with_parent(command: &mut Command, signal: i32) {
    let parent = std::process::id() as i32;
    // SAFETY: the closure calls only functions that are safe between fork and exec. The standard
    // library runs it after the change of user, which would clear the setting.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, signal) != 0 {
                return Err(io::Error::last_os_error());
            }
            // We may have died before the call above.
            if libc::getppid() != parent {
                libc::raise(libc::SIGKILL);
            }
            Ok(())
        });
    }
}

/// Other systems have no such call; a [`crate::process::Guard`] does it there.
#[cfg(not(target_os = "linux"))]
pub(crate) fn die_with_parent(_command: &mut Command, _signal: i32) {}

/// Runs a job on the one thread that spawns all servers and never ends.
pub(crate) fn on_spawner<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    type Job = Box<dyn FnOnce() + Send>;
    static SPAWNER: OnceLock<mpsc::SyncSender<Job>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, queue) = mpsc::sync_channel::<Job>(16);
        thread::spawn(move || queue.into_iter().for_each(|job| job()));
        jobs
    });
    let (answer, result) = mpsc::sync_channel(1);
    let job = Box::new(move || drop(answer.send(job())));
    spawner.send(job).map_err(|_| anyhow!("the thread that spawns servers is gone"))?;
    result.recv().context("the thread that spawns servers is gone")
}

/// Runs a blocking job on a thread of its own and awaits it.
///
/// A worker of the caller's runtime that blocks would hold up tasks that the job may be waiting
/// for, such as a relay that has to answer before a walsender ends.
///
/// # Cancel safety
///
/// The job runs to its end even if nobody waits for it any more.
pub(crate) async fn off_thread<T: Send + 'static>(job: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (answer, result) = tokio::sync::oneshot::channel();
    let thread = thread::Builder::new().name("testbed".to_owned());
    thread.spawn(move || drop(answer.send(job()))).context("start a thread")?;
    result.await.context("the thread that did the job panicked")?
}

/// Describes how a process ended, for an error.
pub(crate) fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "an unknown end".to_owned(),
    }
}
