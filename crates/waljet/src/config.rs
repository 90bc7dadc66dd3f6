//! Configuration: what is written in a file, the environment and flags becomes what is meant.
//!
//! `keys` is the one table of keys. [`file`] and [`environment`] give values, [`resolve`] chooses one a key
//! and reads it, [`check`] looks at keys together, and [`Config`] is the result. Nothing here connects to
//! anything; the only files read are the configuration and those that hold secrets.

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

use waljet_pipeline::Fault;

pub(crate) use reference::reference;
pub(crate) use resolve::Effective;
pub(crate) use show::{show, show_json};
pub(crate) use value::Table;

use crate::error::{CONFIG_FILE, halt};
use crate::secret::Secret;
use origin::{Given, Origin};
use value::{Raw, Value};

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
    pub(crate) outbox: Outbox,
    /// `[route]`.
    pub(crate) route: Route,
    /// `[headers]`.
    pub(crate) headers: Headers,
    /// `[nats]`.
    pub(crate) nats: Nats,
    /// `[stream]`.
    pub(crate) stream: Stream,
    /// `[publisher]`.
    pub(crate) publisher: Publisher,
    /// `[window]`.
    pub(crate) window: Window,
    /// `[retry]`.
    pub(crate) retry: Retry,
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

/// The outbox table.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    /// Schema and name.
    pub(crate) table: Table,
    /// The event id's column.
    pub(crate) id: String,
    /// The aggregate type's column.
    pub(crate) aggregate_type: String,
    /// The aggregate id's column.
    pub(crate) aggregate_id: String,
    /// The event type's column.
    pub(crate) event_type: String,
    /// The payload's column.
    pub(crate) payload: String,
    /// The headers' column.
    pub(crate) headers: Option<String>,
    /// The tenant's column.
    pub(crate) tenant_id: Option<String>,
    /// The schema version's column.
    pub(crate) schema_version: Option<String>,
}

/// How subjects are made.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    /// The template.
    pub(crate) subject: String,
    /// Whether an event with a value that cannot stand in a subject is refused rather than escaped.
    pub(crate) unsafe_token: String,
}

/// Headers that are sent beside those that always are.
#[derive(Clone, Debug)]
pub(crate) struct Headers {
    /// `Aggregate-Type`.
    pub(crate) aggregate_type: bool,
    /// `Event-Type`.
    pub(crate) event_type: bool,
    /// `Schema-Version`.
    pub(crate) schema_version: bool,
    /// `Tenant-Id`.
    pub(crate) tenant_id: bool,
    /// `Content-Type`.
    pub(crate) content_type: Option<String>,
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

/// How much may be unacknowledged.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    /// Events.
    pub(crate) max_events: u64,
    /// Bytes.
    pub(crate) max_bytes: u64,
}

/// How failures are retried.
#[derive(Clone, Debug)]
pub(crate) struct Retry {
    /// The longest first pause.
    pub(crate) initial: Duration,
    /// The longest pause.
    pub(crate) max: Duration,
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
    if faults.is_empty() { Ok(build(&effective)) } else { Err(faults) }
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

/// Builds the result from values that have been checked.
fn build(effective: &Effective) -> Config {
    let values = Values(effective);
    Config {
        postgres: Postgres {
            conninfo: check::conninfo(effective),
            password_file: effective
                .entry("postgres.password")
                .and_then(|entry| entry.secret_file.as_ref())
                .map(PathBuf::from),
            slot: values.text("postgres.slot"),
            publication: values.text("postgres.publication"),
        },
        outbox: Outbox {
            table: values.table("outbox.table"),
            id: values.text("outbox.columns.id"),
            aggregate_type: values.text("outbox.columns.aggregate_type"),
            aggregate_id: values.text("outbox.columns.aggregate_id"),
            event_type: values.text("outbox.columns.event_type"),
            payload: values.text("outbox.columns.payload"),
            headers: values.text_if("outbox.columns.headers"),
            tenant_id: values.text_if("outbox.columns.tenant_id"),
            schema_version: values.text_if("outbox.columns.schema_version"),
        },
        route: Route { subject: values.text("route.subject"), unsafe_token: values.text("route.unsafe_token") },
        headers: Headers {
            aggregate_type: values.bool("headers.aggregate_type"),
            event_type: values.bool("headers.event_type"),
            schema_version: values.bool("headers.schema_version"),
            tenant_id: values.bool("headers.tenant_id"),
            content_type: values.text_if("headers.content_type"),
        },
        nats: build_nats(&values),
        stream: Stream {
            replicas: values.number("stream.replicas"),
            storage: values.text("stream.storage"),
            duplicate_window: values.duration("stream.duplicate_window"),
            max_age: Some(values.duration("stream.max_age")).filter(|age| !age.is_zero()),
            max_bytes: Some(values.number("stream.max_bytes")).filter(|bytes| *bytes > 0),
        },
        publisher: Publisher {
            mode: values.text("publisher.mode"),
            ack_timeout: values.duration("publisher.ack_timeout"),
        },
        window: Window { max_events: values.number("window.max_events"), max_bytes: values.number("window.max_bytes") },
        retry: Retry { initial: values.duration("retry.initial"), max: values.duration("retry.max") },
        admin_listen: values.text_if("admin.listen").filter(|listen| listen != "off"),
        log: Log { format: values.text("log.format"), level: values.text("log.level") },
        drain_timeout: values.duration("shutdown.drain_timeout"),
    }
}

/// Builds `[nats]`.
fn build_nats(values: &Values<'_>) -> Nats {
    Nats {
        urls: values.urls("nats.url"),
        stream: values.text("nats.stream"),
        credentials: values.path("nats.credentials"),
        nkey: values.secret("nats.nkey"),
        jwt: values.secret("nats.jwt"),
        token: values.secret("nats.token"),
        user: values.text_if("nats.user"),
        password: values.secret("nats.password"),
        tls: NatsTls {
            required: values.bool("nats.tls.required"),
            first: values.bool("nats.tls.first"),
            ca: values.path("nats.tls.ca"),
            cert: values.path("nats.tls.cert"),
            key: values.path("nats.tls.key"),
        },
        domain: values.text_if("nats.domain"),
        api_prefix: values.text_if("nats.api_prefix"),
        inbox_prefix: values.text("nats.inbox_prefix"),
    }
}

/// Takes checked values by path. A value that is not of the kind that its key has would be a mistake in
/// this file, which the test that builds a configuration from defaults finds.
pub(crate) struct Values<'a>(&'a Effective);

impl Values<'_> {
    fn text_if(&self, path: &str) -> Option<String> {
        match self.0.value(path)? {
            Value::Text(text) if !text.is_empty() => Some(text.clone()),
            _ => None,
        }
    }

    fn text(&self, path: &str) -> String {
        self.text_if(path).expect("the key has a default of this kind")
    }

    fn path(&self, path: &str) -> Option<PathBuf> {
        self.text_if(path).map(PathBuf::from)
    }

    fn secret(&self, path: &str) -> Option<Secret> {
        if let Some(Value::Secret(secret)) = self.0.value(path) { Some(secret.clone()) } else { None }
    }

    fn bool(&self, path: &str) -> bool {
        matches!(self.0.value(path), Some(Value::Bool(true)))
    }

    fn number(&self, path: &str) -> u64 {
        let (Some(Value::Integer(number)) | Some(Value::Bytes(number))) = self.0.value(path) else {
            unreachable!("{path} has a default of this kind")
        };
        *number
    }

    fn duration(&self, path: &str) -> Duration {
        let Some(Value::Duration(duration)) = self.0.value(path) else {
            unreachable!("{path} has a default of this kind")
        };
        *duration
    }

    fn table(&self, path: &str) -> Table {
        let Some(Value::Table(table)) = self.0.value(path) else { unreachable!("{path} has a default of this kind") };
        table.clone()
    }

    fn urls(&self, path: &str) -> Vec<Secret> {
        let Some(Value::Urls(urls)) = self.0.value(path) else { return Vec::new() };
        urls.iter().map(Secret::new).collect()
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
        build(&effective)
    }

    #[test]
    fn a_database_is_all_that_a_configuration_needs() {
        let config = parsed("[postgres]\nurl = \"postgres://a@b/c\"\n");
        assert_eq!(config.postgres.slot, "waljet");
        assert_eq!(config.outbox.table.to_string(), "public.outbox");
        assert_eq!(config.outbox.tenant_id.as_deref(), Some("tenant_id"));
        assert_eq!(config.nats.urls[0].expose(), "nats://127.0.0.1:4222");
        assert_eq!((config.stream.max_age, config.stream.max_bytes), (None, None));
        assert_eq!((config.window.max_events, config.window.max_bytes), (1024, 8 << 20));
        assert_eq!(config.admin_listen.as_deref(), Some("127.0.0.1:9464"));
    }

    #[test]
    fn what_is_written_is_what_is_meant() {
        let text = "[postgres]\nurl = \"postgres://a@b/c\"\npassword_file = \"/run/pw\"\n[outbox]\npreset = \"debezium\"\n\
                    [nats]\nurl = [\"nats://a:1\", \"nats://b:2\"]\ntoken_file = \"/run/token\"\n[nats.tls]\nfirst = true\n\
                    [stream]\nmax_age = \"7d\"\n[admin]\nlisten = \"off\"\n";
        let config = parsed(text);
        assert_eq!(config.postgres.conninfo.expose(), "postgres://a@b/c");
        assert_eq!(config.postgres.password_file.as_deref(), Some(Path::new("/run/pw")));
        assert_eq!((config.outbox.event_type.as_str(), config.outbox.headers), ("type", None));
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
