//! Configuration: what is written in a file, the environment and flags becomes what is meant.
//!
//! `keys` is the one table of keys. [`mod@file`] and [`environment`] give values, [`resolve`] chooses one a key
//! and reads it, [`check`] looks at keys together, and [`Config`] is the result. Nothing here connects to
//! anything; the only files read are the configuration and those that hold secrets.

mod build;
mod check;
mod environment;
mod file;
mod key;
pub(crate) mod keys;
mod origin;
mod reference;
mod resolve;
mod show;
pub(crate) mod units;
mod value;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use waljet_jetstream::{LaneOptions, NatsOptions, StreamOptions};
use waljet_pipeline::{Fault, HeaderOptions, OutboxOptions, ReplayWindow, RetryOptions, Route, WindowOptions};

pub(crate) use reference::reference;
pub(crate) use resolve::Effective;
pub(crate) use show::{show, show_json};

use crate::error::{CONFIG_FILE, halt};
use origin::{Given, Origin};
use value::Raw;
use waljet_postgres::SourceOptions;

/// The file that is read where no other is named.
pub(crate) const DEFAULT_FILE: &str = "waljet.toml";

/// What the command line says about the configuration.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inputs {
    /// The file that `--config` names.
    pub(crate) file: Option<PathBuf>,
    /// Keys that flags set: path, flag, value.
    pub(crate) flags: Vec<(&'static str, &'static str, String)>,
}

/// Everything that the relay can be told, checked.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// `[postgres]`, and the table and columns of `[outbox]`.
    pub(crate) source: SourceOptions,
    /// `[outbox]`.
    pub(crate) outbox: OutboxOptions,
    /// `[route]`.
    pub(crate) route: Route,
    /// `[headers]`.
    pub(crate) headers: HeaderOptions,
    /// `[nats]`: the servers.
    pub(crate) nats: NatsOptions,
    /// `[nats]`: the stream.
    pub(crate) stream: StreamOptions,
    /// `[publisher]`, and as much of the window as can be under way.
    pub(crate) lane: LaneOptions,
    /// `[window]`.
    pub(crate) window: WindowOptions,
    /// `[checkpoint]`.
    pub(crate) checkpoint: CheckpointOptions,
    /// What a lost slot comes to, and what a catch-up reads.
    pub(crate) catch_up: CatchUpOptions,
    /// `[replay]`.
    pub(crate) replay_window: ReplayWindow,
    /// `[retry]`.
    pub(crate) retry: RetryOptions,
    /// `admin.listen`; `None` where it is off.
    pub(crate) admin_listen: Option<String>,
    /// `[log]`.
    pub(crate) log: Log,
    /// `shutdown.drain_timeout`.
    pub(crate) drain_timeout: Duration,
}

/// How what a lost slot would have sent is made up for.
#[derive(Clone, Debug)]
pub(crate) struct CatchUpOptions {
    /// Whether that happens by itself.
    pub(crate) by_itself: bool,
    /// The column that grows with each insert.
    pub(crate) sequence: Option<String>,
    /// The column with the row's transaction.
    pub(crate) xid: Option<String>,
}

/// How far the relay has come, as it is kept for the next start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckpointOptions {
    /// Where.
    pub(crate) store: CheckpointStore,
    /// The shortest time between two writes.
    pub(crate) interval: Duration,
}

/// Where the checkpoint is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CheckpointStore {
    /// In a table of the source database.
    Postgres,
    /// In a JetStream bucket.
    Nats,
    /// Nowhere.
    None,
}

/// How the log is written.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    /// `auto`, `text` or `json`.
    pub(crate) format: String,
    /// A level or a filter.
    pub(crate) level: String,
}

/// Reads file and environment and checks all of it.
///
/// # Errors
///
/// All faults there are.
pub(crate) fn load(inputs: &Inputs) -> Result<Config, Vec<Fault>> {
    let (effective, mut faults) = read(inputs);
    check::check(&effective, &mut faults);
    if faults.is_empty() { Ok(build::build(&effective)) } else { Err(faults) }
}

/// Reads file and environment into one value a key, with all faults of single keys.
pub(crate) fn read(inputs: &Inputs) -> (Effective, Vec<Fault>) {
    let mut faults = Vec::new();
    let mut given = read_file(inputs.file.as_deref()).unwrap_or_else(|fault| {
        faults.push(fault);
        Vec::new()
    });
    let variables: Vec<(OsString, OsString)> = std::env::vars_os().collect();
    let (from_environment, unreadable) = environment::read(&variables);
    given.extend(from_environment);
    faults.extend(unreadable);
    let flag = |(path, flag, value): &(&str, &'static str, String)| Given {
        path: (*path).to_owned(),
        raw: Raw::Untyped(value.clone()),
        origin: Origin::Flag(flag),
    };
    given.extend(inputs.flags.iter().map(flag));
    let effective = resolve::resolve(&given, &|path: &Path| std::fs::read_to_string(path), &mut faults);
    (effective, faults)
}

/// Reads the file. The default one may be missing: the environment may say everything.
fn read_file(named: Option<&Path>) -> Result<Vec<Given>, Fault> {
    let path = named.unwrap_or(Path::new(DEFAULT_FILE));
    match std::fs::read_to_string(path) {
        Ok(text) => file::read(&path.display().to_string(), &text),
        Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(halt(CONFIG_FILE, format!("configuration file {path:?} cannot be read"))
            .cause(error)
            .hint("check the path that --config names")),
    }
}

/// Reads a configuration that has no fault.
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
pub(crate) fn parsed(text: &str) -> Config {
    let given = file::read("w.toml", text).unwrap();
    let mut faults = Vec::new();
    let effective = resolve::resolve(&given, &|_| Ok("from a file\n".to_owned()), &mut faults);
    check::check(&effective, &mut faults);
    assert!(faults.is_empty(), "{faults:?}");
    build::build(&effective)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use waljet_jetstream::Auth;

    use super::*;

    #[test]
    fn a_database_is_all_that_a_configuration_needs() {
        let config = parsed("[postgres]\nurl = \"postgres://a@b/c\"\n");
        assert_eq!(config.source.slot, "waljet");
        assert_eq!((config.outbox.schema.as_str(), config.outbox.table.as_str()), ("public", "outbox"));
        assert_eq!(config.outbox.columns.tenant_id.as_deref(), Some("tenant_id"));
        assert_eq!(config.nats, NatsOptions::default());
        assert_eq!(config.stream, StreamOptions::default());
        assert_eq!(config.lane, LaneOptions::default());
        assert_eq!(config.window, WindowOptions::default());
        assert_eq!(config.retry, RetryOptions::default());
        assert_eq!(config.headers, HeaderOptions::default());
        assert_eq!(config.drain_timeout, waljet_pipeline::DEFAULT_DRAIN_TIMEOUT);
        assert_eq!(config.route.subject_space(), "outbox.>");
        assert_eq!(config.admin_listen.as_deref(), Some("127.0.0.1:9464"));
    }

    #[test]
    fn what_is_written_is_what_is_meant() {
        let text = "[postgres]\nurl = \"postgres://a@b/c\"\npassword_file = \"/run/pw\"\n[outbox]\npreset = \"debezium\"\n\
                    [nats]\nurl = [\"nats://a:1\", \"nats://b:2\"]\ntoken_file = \"/run/token\"\nmax_age = \"7d\"\n[nats.tls]\nfirst = true\n\
                    [admin]\nlisten = \"off\"\n";
        let config = parsed(text);
        assert_eq!(config.source.connect.describe(), "a@b:5432/c");
        assert_eq!(config.source.connect.password_file.as_deref(), Some(Path::new("/run/pw")));
        assert_eq!((config.outbox.columns.event_type.as_str(), config.outbox.columns.headers), ("type", None));
        assert_eq!(config.nats.servers, ["nats://a:1", "nats://b:2"]);
        assert_eq!(config.nats.auth, Auth::Token("from a file".into()));
        assert!(config.nats.tls.first && !config.nats.tls.required);
        assert_eq!(config.stream.max_age, Some(Duration::from_secs(7 * 86_400)));
        assert_eq!(config.admin_listen, None);
        assert!(!format!("{:?}", parsed(text)).contains("from a file"));
    }

    #[test]
    fn only_the_default_file_may_be_missing() {
        assert!(read_file(None).unwrap().is_empty());
        let fault = read_file(Some(Path::new("/nowhere/w.toml"))).err().unwrap();
        assert_eq!(fault.code, CONFIG_FILE);
        assert_eq!(fault.message, "configuration file \"/nowhere/w.toml\" cannot be read");
    }
}
