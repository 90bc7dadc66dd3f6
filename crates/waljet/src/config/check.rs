//! What keys must fulfil together, and values that are more than text.

use waljet_pipeline::{Fault, InvalidTemplate, Route, UnsafeToken, headers};
use waljet_postgres::ConnectOptions;

use super::key::variable;
use super::resolve::Effective;
use super::units::format_duration;
use super::value::Value;
use crate::error::{CONFIG_CONFLICT, CONFIG_MISSING, CONFIG_VALUE, halt};
use crate::secret::{Secret, redact_url};

/// Keys that say in parts what `postgres.url` says as one.
const PARTS: [&str; 4] = ["postgres.host", "postgres.port", "postgres.user", "postgres.dbname"];

/// Keys that may stand beside either form, with the names that libpq gives them.
const BESIDE: [(&str, &str); 5] = [
    ("postgres.password", "password"),
    ("postgres.sslmode", "sslmode"),
    ("postgres.sslrootcert", "sslrootcert"),
    ("postgres.sslcert", "sslcert"),
    ("postgres.sslkey", "sslkey"),
];

/// Ways to log in to NATS, of which one can be used.
const LOGINS: [&str; 4] = ["nats.credentials", "nats.nkey", "nats.token", "nats.user"];

/// Adds all faults of keys that do not fit together. Keys that are faulty by themselves count as set.
pub(crate) fn check(effective: &Effective, faults: &mut Vec<Fault>) {
    let rules = Rules { effective };
    let postgres = rules.postgres();
    if postgres.is_empty() && !effective.faulty.iter().any(|path| path.starts_with("postgres.")) {
        faults.extend(connect(effective).err());
    }
    faults.extend(postgres);
    faults.extend(rules.outbox());
    faults.extend(rules.route());
    faults.extend(rules.nats());
    faults.extend(rules.order("retry.initial", "retry.max"));
    if rules.duration("nats.max_age").is_some_and(|age| !age.is_zero()) {
        faults.extend(rules.order("nats.duplicate_window", "nats.max_age"));
    }
    faults.extend(rules.log_level());
}

/// Reads where the database is and how to log in there.
pub(crate) fn connect(effective: &Effective) -> Result<ConnectOptions, Fault> {
    let mut options = ConnectOptions::parse(conninfo(effective).expose())?;
    // Read again at each connection, so that the password may be rotated.
    options.password_file =
        effective.entry("postgres.password").and_then(|entry| entry.secret_file.as_ref()).map(Into::into);
    Ok(options)
}

/// Returns everything about the connection in one text that libpq would take, but a password that comes
/// from a file, which is read at each connection.
fn conninfo(effective: &Effective) -> Secret {
    let Some(Value::Urls(urls)) = effective.value("postgres.url") else {
        let parts = [("host", 0), ("port", 1), ("user", 2), ("dbname", 3)].map(|(name, at)| (PARTS[at], name));
        return Secret::new(pairs(effective, parts.into_iter().chain(BESIDE)).trim_start());
    };
    let url = urls.concat();
    if !url.contains("://") {
        return Secret::new(format!("{url}{}", pairs(effective, BESIDE.into_iter())));
    }
    let mut text = url;
    for (path, name) in BESIDE {
        if let Some(value) = plain(effective, path) {
            text.push(if text.contains('?') { '&' } else { '?' });
            text.push_str(&format!("{name}={}", percent_encode(&value)));
        }
    }
    Secret::new(text)
}

/// Reads the template of the subject.
pub(crate) fn route(effective: &Effective) -> Result<Route, InvalidTemplate> {
    let text = |path| plain(effective, path).unwrap_or_default();
    let refuse = text("route.unsafe_token") == "refuse";
    Route::new(&text("route.subject"), if refuse { UnsafeToken::Refuse } else { UnsafeToken::Escape })
}

/// Writes keys as ` name='value'`.
fn pairs(effective: &Effective, keys: impl Iterator<Item = (&'static str, &'static str)>) -> String {
    let pair = |(path, name): (&str, &str)| {
        let value = plain(effective, path)?.replace('\\', "\\\\").replace('\'', "\\'");
        Some(format!(" {name}='{value}'"))
    };
    keys.filter_map(pair).collect()
}

/// Returns the value of a key as plain text, secret or not.
fn plain(effective: &Effective, path: &str) -> Option<String> {
    let entry = effective.entry(path)?;
    match entry.value.as_ref().filter(|_| entry.secret_file.is_none())? {
        Value::Text(text) => Some(text.clone()),
        Value::Secret(secret) => Some(secret.expose().to_owned()),
        Value::List(items) => Some(items.join(",")),
        Value::Bool(_)
        | Value::Integer(_)
        | Value::Duration(_)
        | Value::Bytes(_)
        | Value::Urls(_)
        | Value::Table(_) => None,
    }
}

/// Writes every byte but letters, digits and `-._~/` as `%XX`.
fn percent_encode(text: &str) -> String {
    let encode = |byte: u8| match byte {
        byte if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

/// The rules, each giving the faults that it finds.
struct Rules<'a> {
    effective: &'a Effective,
}

impl Rules<'_> {
    /// One form of saying where the database is, whole.
    fn postgres(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        let parts: Vec<&str> = PARTS.into_iter().filter(|part| self.set(part)).collect();
        match (self.set("postgres.url"), parts.first()) {
            (false, None) => faults.push(self.missing("postgres.url", "where the database is")),
            (true, Some(part)) => faults.push(self.conflict("postgres.url", part)),
            (false, Some(_)) => {
                let needed = [("postgres.host", "where the database is"), ("postgres.user", "the role to log in as")];
                faults.extend(
                    needed.iter().filter(|(path, _)| !self.set(path)).map(|(path, what)| self.missing(path, what)),
                );
            }
            (true, None) => {}
        }
        faults.extend(self.needs("postgres.sslcert", "postgres.sslkey"));
        faults.extend(self.needs("postgres.sslkey", "postgres.sslcert"));
        if let (Some(Value::List(hosts)), Some(Value::List(ports))) =
            (self.value("postgres.host"), self.value("postgres.port"))
            && ports.len() > 1
            && ports.len() != hosts.len()
        {
            let what = format!("expected one port or one for each of {} hosts, found {}", hosts.len(), ports.len());
            faults.push(self.wrong("postgres.port", &what));
        }
        if let Some(Value::Urls(urls)) = self.value("postgres.url") {
            let url = urls.concat();
            let known = ["postgres://", "postgresql://"].iter().any(|scheme| url.starts_with(scheme));
            if !known && (url.contains("://") || !url.contains('=')) {
                let found = redact_url(&url);
                let what = format!("expected postgres://user@host:5432/database or key=value pairs, found {found:?}");
                faults.push(self.wrong("postgres.url", &what));
            }
        }
        faults
    }

    /// Headers and subjects need the columns that they are made of.
    fn outbox(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        let subject = plain(self.effective, "route.subject").unwrap_or_default();
        for name in ["schema_version", "tenant_id"] {
            let (header, column) = (format!("headers.{name}"), format!("outbox.columns.{name}"));
            if self.value(&column).is_none_or(|value| *value != Value::Text(String::new())) {
                continue;
            }
            let absent = format!("{column} is \"\": there is no such column");
            if self.value(&header) == Some(&Value::Bool(true)) {
                faults.push(self.conflict_text(&header, &absent));
            }
            if subject.contains(&format!("{{{name}}}")) {
                faults.push(self.conflict_text("route.subject", &absent));
            }
        }
        faults
    }

    /// The template makes subjects, and what is sent with every event can be a header.
    fn route(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        if let Err(error) = route(self.effective) {
            let subject = plain(self.effective, "route.subject").unwrap_or_default();
            let what = format!("expected a template such as outbox.{{event_type}}, found {subject:?}");
            faults.push(self.wrong("route.subject", &what).cause(error));
        }
        let content_type = plain(self.effective, "headers.content_type");
        if content_type.is_some_and(|text| !headers::is_value(&text)) {
            faults.push(self.wrong("headers.content_type", "expected a text without control characters"));
        }
        faults
    }

    /// One way to log in, whole; URLs and names that NATS takes.
    fn nats(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        let logins: Vec<&str> = LOGINS.into_iter().filter(|login| self.set(login)).collect();
        faults.extend(logins.windows(2).map(|pair| self.conflict(pair[0], pair[1])));
        for (key, other) in [
            ("nats.password", "nats.user"),
            ("nats.user", "nats.password"),
            ("nats.jwt", "nats.nkey"),
            ("nats.tls.cert", "nats.tls.key"),
            ("nats.tls.key", "nats.tls.cert"),
        ] {
            faults.extend(self.needs(key, other));
        }
        if self.set("nats.domain") && self.set("nats.api_prefix") {
            faults.push(self.conflict("nats.domain", "nats.api_prefix"));
        }
        if let Some(Value::Urls(urls)) = self.value("nats.url") {
            for url in urls.iter().filter(|url| !is_nats_url(url)) {
                let what = format!("expected nats://host:4222 or tls://host:4222, found {:?}", redact_url(url));
                faults.push(self.wrong("nats.url", &what));
            }
        }
        if let Some(Value::Text(stream)) = self.value("nats.stream")
            && stream.contains(|c: char| c.is_whitespace() || c.is_control() || ".*>/\\".contains(c))
        {
            let what = format!("expected a name without white space and without . * > / \\, found {stream:?}");
            faults.push(self.wrong("nats.stream", &what));
        }
        for path in ["nats.inbox_prefix", "nats.api_prefix", "nats.domain"] {
            if let Some(Value::Text(subject)) = self.value(path)
                && !is_subject_prefix(subject)
            {
                faults.push(
                    self.wrong(
                        path,
                        &format!("expected tokens separated by dots, without wildcards, found {subject:?}"),
                    ),
                );
            }
        }
        faults
    }

    /// The shorter time is not longer than the longer one.
    fn order(&self, short: &str, long: &str) -> Option<Fault> {
        let (shorter, longer) = (self.duration(short)?, self.duration(long)?);
        let [a, b] = [shorter, longer].map(format_duration);
        (shorter > longer).then(|| self.conflict_text(short, &format!("{a} is longer than {long}, which is {b}")))
    }

    /// The filter of the log can be read.
    fn log_level(&self) -> Option<Fault> {
        let Some(Value::Text(level)) = self.value("log.level") else { return None };
        let error = tracing_subscriber::EnvFilter::try_new(level).err()?;
        Some(self.wrong("log.level", &format!("expected a level or a filter, found {level:?}")).cause(error))
    }

    fn value(&self, path: &str) -> Option<&Value> {
        self.effective.value(path)
    }

    fn set(&self, path: &str) -> bool {
        self.effective.is_set(path)
    }

    fn duration(&self, path: &str) -> Option<std::time::Duration> {
        if self.effective.faulty.contains(path) {
            return None;
        }
        if let Some(Value::Duration(duration)) = self.value(path) { Some(*duration) } else { None }
    }

    /// `key (origin)`.
    fn place(&self, path: &str) -> String {
        let origin = self.effective.entry(path).map(|entry| entry.origin.to_string());
        format!("{path} ({})", origin.unwrap_or_default())
    }

    fn missing(&self, path: &str, what: &str) -> Fault {
        halt(CONFIG_MISSING, format!("{path} is not set: {what}"))
            .hint(format!("set {path} in the configuration file, or the environment variable {}", variable(path)))
    }

    fn conflict(&self, one: &str, other: &str) -> Fault {
        halt(CONFIG_CONFLICT, format!("{} and {} exclude each other", self.place(one), self.place(other)))
            .hint("remove one of them")
    }

    fn conflict_text(&self, path: &str, what: &str) -> Fault {
        halt(CONFIG_CONFLICT, format!("{}: {what}", self.place(path)))
    }

    fn needs(&self, path: &str, other: &str) -> Option<Fault> {
        let lacking = self.set(path) && !self.set(other);
        lacking.then(|| {
            halt(CONFIG_MISSING, format!("{} needs {other}, which is not set", self.place(path)))
                .hint(format!("set {other} in the configuration file, or the environment variable {}", variable(other)))
        })
    }

    fn wrong(&self, path: &str, what: &str) -> Fault {
        halt(CONFIG_VALUE, format!("{}: {what}", self.place(path)))
    }
}

/// Returns whether NATS can be reached by `url`: over TCP, by scheme or without one.
fn is_nats_url(url: &str) -> bool {
    let rest = match url.split_once("://") {
        None => url,
        Some(("nats" | "tls", rest)) => rest,
        Some(_) => return false,
    };
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    !host.is_empty() && !host.contains(char::is_whitespace)
}

/// Returns whether a text can stand before other tokens of a subject.
fn is_subject_prefix(text: &str) -> bool {
    text.split('.').all(|token| !token.is_empty() && !token.contains(|c: char| c.is_whitespace() || "*>".contains(c)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use std::path::Path;

    use super::super::file;
    use super::super::resolve::resolve;
    use super::*;

    fn effective(text: &str) -> (Effective, Vec<Fault>) {
        let given = file::read("w.toml", text).unwrap();
        let mut faults = Vec::new();
        let no_file = |_: &Path| Err(std::io::Error::from(std::io::ErrorKind::NotFound));
        let effective = resolve(&given, &no_file, &mut faults);
        (effective, faults)
    }

    fn faults(text: &str) -> Vec<String> {
        let (effective, mut faults) = effective(text);
        check(&effective, &mut faults);
        faults.into_iter().map(|fault| fault.message).collect()
    }

    fn conninfo_of(text: &str) -> String {
        conninfo(&effective(text).0).expose().to_owned()
    }

    #[test]
    fn one_url_is_all_that_must_be_set() {
        assert_eq!(faults("[postgres]\nurl = \"postgres://a@b/c\"\n"), Vec::<String>::new());
        assert_eq!(faults(""), ["postgres.url is not set: where the database is"]);
    }

    #[test]
    fn keys_that_exclude_or_need_each_other_are_named_all_at_once() {
        let text = "[postgres]\nurl = \"postgres://a@b/c\"\nhost = \"h\"\nsslcert = \"x\"\n[nats]\npassword = \"p\"\ntoken = \"t\"\njwt = \"j\"\n\
                    credentials = \"c\"\ndomain = \"d\"\napi_prefix = \"e\"\nmax_age = \"1m\"\n[retry]\ninitial = \"10s\"\n[headers]\ntenant_id = true\n\
                    [outbox]\npreset = \"debezium\"\n[log]\nlevel = \"a=b=c\"\n";
        assert_eq!(
            faults(text),
            [
                "postgres.url (w.toml:2) and postgres.host (w.toml:3) exclude each other",
                "postgres.sslcert (w.toml:4) needs postgres.sslkey, which is not set",
                "headers.tenant_id (w.toml:16): outbox.columns.tenant_id is \"\": there is no such column",
                "nats.credentials (w.toml:9) and nats.token (w.toml:7) exclude each other",
                "nats.password (w.toml:6) needs nats.user, which is not set",
                "nats.jwt (w.toml:8) needs nats.nkey, which is not set",
                "nats.domain (w.toml:10) and nats.api_prefix (w.toml:11) exclude each other",
                "retry.initial (w.toml:14): 10s is longer than retry.max, which is 5s",
                "nats.duplicate_window (default): 2m is longer than nats.max_age, which is 1m",
                "log.level (w.toml:20): expected a level or a filter, found \"a=b=c\"",
            ]
        );
    }

    #[test]
    fn urls_of_another_kind_are_refused_without_their_passwords() {
        let text = "[postgres]\nurl = \"mysql://u:hunter2@b/c\"\n[nats]\nurl = [\"nats://h\", \"ws://u:hunter2@h\"]\nstream = \"a.b\"\ninbox_prefix = \"a..b\"\n";
        let found = faults(text).join("\n");
        assert_eq!(found.lines().count(), 4, "{found}");
        assert!(!found.contains("hunter2"), "{found}");
    }

    #[test]
    fn a_template_that_makes_no_subject_or_needs_a_missing_column_is_refused() {
        let with = |subject: &str| {
            faults(&format!(
                "[postgres]\nurl = \"postgres://a@b/c\"\n[outbox]\npreset = \"debezium\"\n[route]\nsubject = \"{subject}\"\n"
            ))
        };
        assert_eq!(
            with("events.{tenant_id}"),
            ["route.subject (w.toml:6): outbox.columns.tenant_id is \"\": there is no such column"]
        );
        assert_eq!(with("{event_type}").len(), 1);
        assert_eq!(with("events.{event_type}"), Vec::<String>::new());
    }

    #[test]
    fn a_faulty_value_is_not_also_called_missing() {
        assert_eq!(faults("[postgres]\nurl = 5\n").len(), 1);
    }

    #[test]
    fn parts_become_one_connection_string() {
        let text = "[postgres]\nhost = [\"a\", \"b\"]\nport = [1, 2]\nuser = \"o'x\"\ndbname = \"d\"\npassword = \"p w\\\\\"\nsslmode = \"require\"\n";
        assert_eq!(
            conninfo_of(text),
            "host='a,b' port='1,2' user='o\\'x' dbname='d' password='p w\\\\' sslmode='require'"
        );
        assert_eq!(faults(text), Vec::<String>::new());
        assert_eq!(faults(&text.replace("[1, 2]", "[1, 2, 3]")).len(), 1);
    }

    #[test]
    fn what_stands_beside_a_url_goes_into_it() {
        let beside = "password = \"p&w\"\nsslmode = \"require\"\n";
        let url = |url: &str| conninfo_of(&format!("[postgres]\nurl = \"{url}\"\n{beside}"));
        assert_eq!(url("postgres://a@b/c"), "postgres://a@b/c?password=p%26w&sslmode=require");
        assert_eq!(url("postgres://a@b/c?x=y"), "postgres://a@b/c?x=y&password=p%26w&sslmode=require");
        assert_eq!(url("host=b dbname=c"), "host=b dbname=c password='p&w' sslmode='require'");
    }
}
