//! Configuration: what is written in a file, the environment and flags becomes what is meant.
//!
//! `keys` is the one table of keys. [`file`] and [`environment`] give values, [`resolve`] chooses one a key
//! and reads it, [`check`] looks at keys together, and [`Config`] is the result. Nothing here connects to
//! anything; the only files read are the configuration and those that hold secrets.

mod build;
mod check;
mod environment;
mod file;
mod key;
mod keys;
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

use waljet_pipeline::{Fault, HeaderOptions, OutboxOptions, RetryOptions, Route, WindowOptions};

pub(crate) use reference::reference;
pub(crate) use resolve::Effective;
pub(crate) use show::{show, show_json};

use crate::error::{CONFIG_FILE, halt};
use crate::secret::Secret;
use origin::{Given, Origin};
use value::Raw;

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
    /// `[postgres]`.
    pub(crate) postgres: Postgres,
    /// `[outbox]`.
    pub(crate) outbox: OutboxOptions,
    /// `[route]`.
    pub(crate) route: Route,
    /// `[headers]`.
    pub(crate) headers: HeaderOptions,
    /// `[nats]`.
    pub(crate) nats: Nats,
    /// `[stream]`.
    pub(crate) stream: Stream,
    /// `[publisher]`.
    pub(crate) publisher: Publisher,
    /// `[window]`.
    pub(crate) window: WindowOptions,
    /// `[retry]`.
    pub(crate) retry: RetryOptions,
    /// `admin.listen`; `None` where it is off.
    pub(crate) admin_listen: Option<String>,
    /// `[log]`.
    pub(crate) log: Log,
    /// `shutdown.drain_timeout`.
    pub(crate) drain_timeout: Duration,
}

/// The database and what is read from it.
#[derive(Clone, Debug)]
pub(crate) struct Postgres {
    /// URL or connection string, all parts in it.
    pub(crate) conninfo: Secret,
    /// The file that holds the password, read again at each connection so that it may be rotated.
    pub(crate) password_file: Option<PathBuf>,
    /// The replication slot.
    pub(crate) slot: String,
    /// The publication.
    pub(crate) publication: String,
}

/// The broker and how to log in there.
#[derive(Clone, Debug)]
pub(crate) struct Nats {
    /// The servers; they may hold passwords.
    pub(crate) urls: Vec<Secret>,
    /// The stream.
    pub(crate) stream: String,
    /// The credentials file.
    pub(crate) credentials: Option<PathBuf>,
    /// The seed of an NKey.
    pub(crate) nkey: Option<Secret>,
    /// A user JWT.
    pub(crate) jwt: Option<Secret>,
    /// A token.
    pub(crate) token: Option<Secret>,
    /// A user.
    pub(crate) user: Option<String>,
    /// The user's password.
    pub(crate) password: Option<Secret>,
    /// TLS.
    pub(crate) tls: NatsTls,
    /// The JetStream domain.
    pub(crate) domain: Option<String>,
    /// The JetStream API's prefix.
    pub(crate) api_prefix: Option<String>,
    /// The prefix of reply subjects.
    pub(crate) inbox_prefix: String,
}

/// TLS towards the broker.
#[derive(Clone, Debug)]
pub(crate) struct NatsTls {
    /// Whether a connection without TLS is refused.
    pub(crate) required: bool,
    /// Whether TLS starts at once.
    pub(crate) first: bool,
    /// The authorities' certificates.
    pub(crate) ca: Option<PathBuf>,
    /// The client's certificate.
    pub(crate) cert: Option<PathBuf>,
    /// The client's key.
    pub(crate) key: Option<PathBuf>,
}

/// How `init` creates the stream.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    /// How many servers hold it.
    pub(crate) replicas: u64,
    /// `file` or `memory`.
    pub(crate) storage: String,
    /// How long ids are known.
    pub(crate) duplicate_window: Duration,
    /// How long events are kept; `None` for ever.
    pub(crate) max_age: Option<Duration>,
    /// How large it may become; `None` without a limit.
    pub(crate) max_bytes: Option<u64>,
}

/// How events are published.
#[derive(Clone, Debug)]
pub(crate) struct Publisher {
    /// `auto`, `chain` or `serial`.
    pub(crate) mode: String,
    /// How long an acknowledgement may take.
    pub(crate) ack_timeout: Duration,
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Config {
        let given = file::read("w.toml", text).unwrap();
        let mut faults = Vec::new();
        let effective = resolve::resolve(&given, &|_| Ok("from a file\n".to_owned()), &mut faults);
        check::check(&effective, &mut faults);
        assert!(faults.is_empty(), "{faults:?}");
        build::build(&effective)
    }

    #[test]
    fn a_database_is_all_that_a_configuration_needs() {
        let config = parsed("[postgres]\nurl = \"postgres://a@b/c\"\n");
        assert_eq!(config.postgres.slot, "waljet");
        assert_eq!((config.outbox.schema.as_str(), config.outbox.table.as_str()), ("public", "outbox"));
        assert_eq!(config.outbox.columns.tenant_id.as_deref(), Some("tenant_id"));
        assert_eq!(config.nats.urls[0].expose(), "nats://127.0.0.1:4222");
        assert_eq!((config.stream.max_age, config.stream.max_bytes), (None, None));
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
        assert_eq!(config.postgres.conninfo.expose(), "postgres://a@b/c");
        assert_eq!(config.postgres.password_file.as_deref(), Some(Path::new("/run/pw")));
        assert_eq!((config.outbox.columns.event_type.as_str(), config.outbox.columns.headers), ("type", None));
        assert_eq!(config.nats.urls.len(), 2);
        assert_eq!(config.nats.token.as_ref().map(Secret::expose), Some("from a file"));
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
