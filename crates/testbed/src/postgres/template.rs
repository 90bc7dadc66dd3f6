//! Fresh clusters: from `initdb`, or as a copy of one that `initdb` made before.
//!
//! A copy takes a tenth of a second, `initdb` half a second. Copies share the system identifier.

use std::{
    ffi::OsString,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use super::{Auth, PostgresOptions, ROLE};
use crate::{
    binaries::{numbers, version},
    folder::{cache, give, make_private, open_lock},
    process::log_tail,
    spawn::{Account, ServerCommand},
};

/// Fills `data`, which must not exist, with a fresh cluster.
pub(super) fn create(options: &PostgresOptions, data: &Path) -> Result<()> {
    if options.fresh_initdb {
        return initdb(options, data);
    }
    let template = template(options)?;
    copy(&template, data).with_context(|| format!("copy the template {}", template.display()))
}

/// Returns the template for these options, made if it is not there.
fn template(options: &PostgresOptions) -> Result<PathBuf> {
    let dir = cache()?.join("templates");
    fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    let path = dir.join(key(options)?);
    if path.exists() {
        return Ok(path);
    }
    let beside = |suffix: &str| PathBuf::from(format!("{}.{suffix}", path.display()));
    let lock = open_lock(&beside("lock"))?;
    lock.lock().context("lock the template")?;
    // Another process may have made it while we waited for the lock.
    if !path.exists() {
        let draft = beside("draft");
        if draft.exists() {
            fs::remove_dir_all(&draft).with_context(|| format!("remove the old {}", draft.display()))?;
        }
        initdb(options, &draft)?;
        fs::rename(&draft, &path).with_context(|| format!("rename {}", draft.display()))?;
    }
    Ok(path)
}

/// Names a template after everything that `initdb` depends on.
fn key(options: &PostgresOptions) -> Result<String> {
    let version = version(&options.bin.join("initdb"))?;
    let mut hasher = DefaultHasher::new();
    (&version, &options.bin, &options.auth, &options.initdb).hash(&mut hasher);
    let major = numbers(&version).first().copied().unwrap_or_default();
    Ok(format!("postgres-{major}-uid-{}-{:016x}", Account::for_servers()?.uid, hasher.finish()))
}

fn initdb(options: &PostgresOptions, data: &Path) -> Result<()> {
    make_private(data)?;
    let with = |suffix: &str| PathBuf::from(format!("{}.{suffix}", data.display()));
    let (log, password_file) = (with("log"), with("pw"));
    let mut args: Vec<OsString> = vec!["-D".into(), data.into()];
    // Not synced: a machine that crashes is none of our cases, and it takes a fifth of a second.
    args.extend(["-U", ROLE, "-E", "UTF8", "--locale=C", "--no-sync"].map(OsString::from));
    match &options.auth {
        Auth::Trust => args.extend(["-A".into(), "trust".into()]),
        Auth::Scram(password) => {
            fs::write(&password_file, password).context("write the password file for initdb")?;
            fs::set_permissions(&password_file, fs::Permissions::from_mode(0o600))
                .context("close the password file")?;
            give(&password_file)?;
            args.extend(["-A".into(), "scram-sha-256".into(), "--pwfile".into(), password_file.clone().into()]);
        }
    }
    args.extend(options.initdb.iter().map(OsString::from));
    let command = ServerCommand {
        program: options.bin.join("initdb"),
        args,
        dir: "/".into(),
        log: log.clone(),
        death_signal: libc::SIGTERM,
    };
    let status = command.run();
    let _ = fs::remove_file(&password_file);
    if !status?.success() {
        bail!("initdb failed\n{}", log_tail(&log));
    }
    let _ = fs::remove_file(&log);
    Ok(())
}

/// Copies a folder with its modes and gives all of it to the servers' account.
fn copy(from: &Path, to: &Path) -> Result<()> {
    make_private(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
            give(&target)?;
        }
    }
    Ok(())
}
