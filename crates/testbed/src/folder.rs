//! Temporary folders, removed with their server or, after a crash, by the next one who comes.
//!
//! ```text
//! $TMPDIR/waljet-<uid>/
//!   sweep.lock               held while a folder is made or old ones are removed
//!   ports/<port>             held while the port is leased
//!   runs/<label>-<pid>-<n>/  one server; `lock` in it is held for as long as the server is ours
//! ```

use std::{
    env,
    fs::{self, DirBuilder, File},
    io::Write,
    os::unix::fs::{DirBuilderExt, MetadataExt, chown},
    path::{Path, PathBuf},
    process,
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
};

use anyhow::{Context, Result, ensure};

use crate::spawn::{Account, is_root};

/// A folder that belongs to the account the servers run as.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// Tells the sweep of other processes that this folder is in use.
    _lock: File,
}

impl Folder {
    /// Makes an empty folder; the first call of a process also removes what crashed ones left.
    pub(crate) fn create(label: &str) -> Result<Folder> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        static SWEEP: Once = Once::new();
        let runs = base()?.join("runs");
        fs::create_dir_all(&runs).with_context(|| format!("create {}", runs.display()))?;
        // Without this lock, a sweep could take a folder that is made but not locked yet.
        let sweep_lock = open_lock(&runs.with_file_name("sweep.lock"))?;
        sweep_lock.lock().context("lock the temporary folders")?;
        SWEEP.call_once(|| sweep(&runs));
        let path = runs.join(format!("{label}-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        // A process of the same id may have left one behind that the sweep had to keep.
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| format!("remove the old {}", path.display()))?;
        }
        make_private(&path)?;
        let lock = open_lock(&path.join("lock"))?;
        lock.lock().with_context(|| format!("lock {}", path.display()))?;
        Ok(Folder { path, _lock: lock })
    }

    /// Returns the path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if env::var_os("WALJET_KEEP").is_some() {
            let _ = File::create(self.path.join("keep"));
            let _ = writeln!(std::io::stderr(), "kept {}", self.path.display());
        } else {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Returns the folder of all our temporary files, made if need be.
pub(crate) fn base() -> Result<PathBuf> {
    let account = Account::for_servers()?;
    let mut parent = env::temp_dir();
    if !account.reaches(&parent) {
        // As root with a TMPDIR of its own, where the servers' account cannot go.
        parent = PathBuf::from("/tmp");
    }
    let path = parent.join(format!("waljet-{}", Account::current().uid));
    match DirBuilder::new().mode(0o755).create(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| format!("create {}", path.display()));
        }
        _ => {}
    }
    // The name can be guessed, so another user may have put something there.
    let found = fs::symlink_metadata(&path).with_context(|| format!("look at {}", path.display()))?;
    ensure!(
        found.is_dir() && found.uid() == Account::current().uid,
        "{} is not a folder of this user\nhint: remove it, or set TMPDIR to another folder",
        path.display()
    );
    Ok(path)
}

/// Returns the folder for what is worth keeping between runs, made if need be.
///
/// The same that `tools.sh` uses; the temporary folder when that one cannot be written.
pub(crate) fn cache() -> Result<PathBuf> {
    let home = env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let user = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or(home).map(|dir| dir.join("waljet"));
    let system = is_root().then(|| PathBuf::from("/var/cache/waljet"));
    let wanted = env::var_os("WALJET_TOOLS").map(PathBuf::from).or(system).or(user);
    let account = Account::for_servers()?;
    let usable = wanted
        .filter(|dir| dir.is_absolute() && DirBuilder::new().recursive(true).mode(0o755).create(dir).is_ok())
        .filter(|dir| account.reaches(dir))
        .filter(|dir| File::create(dir.join(".writable")).is_ok());
    usable.map_or_else(base, Ok)
}

/// Makes a folder that only the servers' account and root can enter.
pub(crate) fn make_private(path: &Path) -> Result<()> {
    DirBuilder::new().mode(0o700).create(path).with_context(|| format!("create {}", path.display()))?;
    give(path)
}

/// Gives a file or folder to the servers' account.
pub(crate) fn give(path: &Path) -> Result<()> {
    let account = Account::for_servers()?;
    if account == Account::current() {
        return Ok(());
    }
    chown(path, Some(account.uid), Some(account.gid)).with_context(|| format!("give {} away", path.display()))
}

/// Opens a file that is only there to be locked.
pub(crate) fn open_lock(path: &Path) -> Result<File> {
    let opened = File::options().create(true).truncate(false).write(true).open(path);
    opened.with_context(|| format!("open the lock {}", path.display()))
}

/// Removes the folders whose owner is gone, except those that are kept on purpose.
fn sweep(runs: &Path) {
    for entry in fs::read_dir(runs).into_iter().flatten().flatten() {
        let path = entry.path();
        let free = File::open(path.join("lock")).map_or(true, |lock| lock.try_lock().is_ok());
        if free && !path.join("keep").exists() {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    #[test]
    fn a_sweep_takes_what_nobody_holds_and_leaves_the_rest() {
        let ours = Folder::create("sweep-test").unwrap();
        let runs = ours.path().join("runs");
        for name in ["left", "held", "kept"] {
            fs::create_dir_all(runs.join(name)).unwrap();
        }
        let held = open_lock(&runs.join("held/lock")).unwrap();
        held.lock().unwrap();
        open_lock(&runs.join("left/lock")).unwrap();
        File::create(runs.join("kept/keep")).unwrap();
        sweep(&runs);
        let left: Vec<_> = ["left", "held", "kept"].iter().filter(|name| runs.join(name).exists()).collect();
        assert_eq!(left, [&"held", &"kept"]);
        let path = ours.path().to_owned();
        drop(ours);
        assert!(!path.exists());
    }
}
