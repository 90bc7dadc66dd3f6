//! Connection options: the URL and key-value forms of libpq, and what tokio-postgres does not know of them.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{ChannelBinding, Host, TargetSessionAttrs};
use waljet_pipeline::{Action, Fault};

use crate::error::CONNECT_OPTIONS;

/// How long one address may take to answer; libpq waits for ever, which no relay should.
pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long sent bytes may stay unacknowledged before the kernel gives the connection up.
pub const DEFAULT_TCP_USER_TIMEOUT: Duration = Duration::from_secs(30);
/// When an idle connection is first probed; libpq leaves this to the kernel, where it is two hours.
pub const DEFAULT_KEEPALIVES_IDLE: Duration = Duration::from_secs(30);
/// The name that sessions show in `pg_stat_activity`.
pub const DEFAULT_APPLICATION_NAME: &str = "waljet";

/// How to reach a database, and as whom. Never shows the password.
#[derive(Clone)]
pub struct ConnectOptions {
    config: Config,
    /// How far the server is verified.
    pub ssl_mode: SslMode,
    /// Whose signature the server's certificate needs; `None` leaves it to the Mozilla set.
    pub ssl_root_cert: Option<PathBuf>,
    /// The client's certificate chain, PEM.
    pub ssl_cert: Option<PathBuf>,
    /// The client's private key, PEM, not encrypted.
    pub ssl_key: Option<PathBuf>,
    /// A file that holds the password; read again at each connection, so that it may be rotated.
    pub password_file: Option<PathBuf>,
    /// How long one address may take to answer.
    pub connect_timeout: Duration,
    /// How long sent bytes may stay unacknowledged; zero leaves it to the kernel.
    pub tcp_user_timeout: Duration,
}

/// How far the server is verified, as libpq's `sslmode` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    /// No TLS.
    Disable,
    /// TLS if the server has it, unverified.
    Prefer,
    /// TLS, unverified unless a root certificate is given.
    Require,
    /// TLS, and the certificate has a trusted signature.
    VerifyCa,
    /// TLS, and the certificate has a trusted signature and the host's name.
    VerifyFull,
}

/// One address to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// A host, or an address that stands for it.
    Tcp {
        /// The name that the certificate has to carry.
        host: String,
        /// The address to connect to instead of looking the name up.
        address: Option<IpAddr>,
        /// The port.
        port: u16,
    },
    /// A socket file.
    Unix(PathBuf),
}

impl ConnectOptions {
    /// Parses a URL (`postgres://user@host:5432/db?sslmode=verify-full`) or the key-value form
    /// (`host=db1,db2 user=waljet dbname=shop`).
    ///
    /// # Errors
    ///
    /// A part cannot be read, or no host or user is given; the fault never holds the text, which may hold
    /// the password.
    pub fn parse(text: &str) -> Result<Self, Fault> {
        let (rest, own) = if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            split_url(text)?
        } else {
            split_pairs(text)?
        };
        let mut config: Config = rest.parse().map_err(|error: tokio_postgres::Error| {
            let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            invalid(format!("the connection options cannot be read: {why}"))
        })?;
        if !rest.contains("keepalives_idle") {
            config.keepalives_idle(DEFAULT_KEEPALIVES_IDLE);
        }
        if config.get_application_name().is_none() {
            config.application_name(DEFAULT_APPLICATION_NAME);
        }
        // A list of hosts is given so that the primary is found; a standby would have neither slot nor writes.
        if config.get_hosts().len() > 1 {
            config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        let mut options = Self {
            connect_timeout: config.get_connect_timeout().copied().unwrap_or(DEFAULT_CONNECT_TIMEOUT),
            tcp_user_timeout: DEFAULT_TCP_USER_TIMEOUT,
            config,
            ssl_mode: SslMode::Prefer,
            ssl_root_cert: None,
            ssl_cert: None,
            ssl_key: None,
            password_file: None,
        };
        for (key, value) in own {
            options.set_own(&key, &value)?;
        }
        options.validate()?;
        Ok(options)
    }

    fn set_own(&mut self, key: &str, value: &str) -> Result<(), Fault> {
        match key {
            "sslmode" => self.ssl_mode = value.parse()?,
            // The Mozilla set stands in for the system's, which a container often lacks.
            "sslrootcert" => self.ssl_root_cert = (value != "system").then(|| value.into()),
            "sslcert" => self.ssl_cert = Some(value.into()),
            "sslkey" => self.ssl_key = Some(value.into()),
            "tcp_user_timeout" => {
                let millis = value.parse().map_err(|_| invalid_value(key, "milliseconds", value))?;
                self.tcp_user_timeout = Duration::from_millis(millis);
            }
            "keepalives_count" => {
                let count = value.parse().map_err(|_| invalid_value(key, "a number", value))?;
                self.config.keepalives_retries(count);
            }
            "target_session_attrs" => {
                self.config.target_session_attrs(match value {
                    "any" => TargetSessionAttrs::Any,
                    "read-write" | "primary" => TargetSessionAttrs::ReadWrite,
                    "read-only" | "standby" => TargetSessionAttrs::ReadOnly,
                    _ => return Err(invalid_value(key, "any, primary, standby, read-write or read-only", value)),
                });
            }
            "fallback_application_name" if self.application_name() == DEFAULT_APPLICATION_NAME => {
                self.config.application_name(value);
            }
            // Pinned by us, or without meaning for us.
            _ => {}
        }
        Ok(())
    }

    fn validate(&self) -> Result<(), Fault> {
        if self.config.get_hosts().is_empty() && self.config.get_hostaddrs().is_empty() {
            return Err(
                invalid("the connection options name no host".into()).hint("add one: postgres://user@host:5432/db")
            );
        }
        if self.config.get_user().is_none() {
            return Err(
                invalid("the connection options name no user".into()).hint("add one: postgres://user@host:5432/db")
            );
        }
        let (hosts, addresses) = (self.config.get_hosts().len(), self.config.get_hostaddrs().len());
        if addresses > 0 && hosts > 0 && hosts != addresses {
            return Err(invalid(format!("expected as many hostaddr as host values, found {addresses} and {hosts}")));
        }
        let (ports, all) = (self.config.get_ports().len(), hosts.max(addresses));
        if ports > 1 && ports != all {
            return Err(invalid(format!(
                "expected one port or one for each host, found {ports} ports and {all} hosts"
            )));
        }
        if self.ssl_cert.is_some() != self.ssl_key.is_some() {
            return Err(invalid("sslcert and sslkey only work together".into()));
        }
        Ok(())
    }

    /// Sets the role.
    pub fn set_user(&mut self, user: &str) -> &mut Self {
        self.config.user(user);
        self
    }

    /// Sets the password.
    pub fn set_password(&mut self, password: &str) -> &mut Self {
        self.config.password(password);
        self
    }

    /// Sets the database.
    pub fn set_dbname(&mut self, dbname: &str) -> &mut Self {
        self.config.dbname(dbname);
        self
    }

    /// Sets the name that sessions show in `pg_stat_activity`.
    pub fn set_application_name(&mut self, name: &str) -> &mut Self {
        self.config.application_name(name);
        self
    }

    /// Returns the role.
    #[must_use]
    pub fn user(&self) -> &str {
        self.config.get_user().unwrap_or_default()
    }

    /// Returns the database, which is the role's name where none is given.
    #[must_use]
    pub fn dbname(&self) -> &str {
        self.config.get_dbname().unwrap_or_else(|| self.user())
    }

    /// Returns the name that sessions show in `pg_stat_activity`.
    #[must_use]
    pub fn application_name(&self) -> &str {
        self.config.get_application_name().unwrap_or(DEFAULT_APPLICATION_NAME)
    }

    /// Returns `user@host:port/dbname` for messages.
    #[must_use]
    pub fn describe(&self) -> String {
        let hosts: Vec<String> = self.endpoints().iter().map(ToString::to_string).collect();
        format!("{}@{}/{}", self.user(), hosts.join(","), self.dbname())
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn channel_binding(&self) -> ChannelBinding {
        self.config.get_channel_binding()
    }

    /// The addresses in the order in which they are tried.
    pub(crate) fn endpoints(&self) -> Vec<Endpoint> {
        let (hosts, addresses) = (self.config.get_hosts(), self.config.get_hostaddrs());
        let ports = self.config.get_ports();
        let port = |index: usize| ports.get(index).or_else(|| ports.first()).copied().unwrap_or(5432);
        (0..hosts.len().max(addresses.len()))
            .map(|index| match (hosts.get(index), addresses.get(index).copied()) {
                (Some(Host::Unix(folder)), None) => Endpoint::Unix(folder.join(format!(".s.PGSQL.{}", port(index)))),
                (Some(Host::Tcp(host)), address) => Endpoint::Tcp { host: host.clone(), address, port: port(index) },
                (_, Some(address)) => {
                    Endpoint::Tcp { host: address.to_string(), address: Some(address), port: port(index) }
                }
                (None, None) => Endpoint::Tcp { host: String::new(), address: None, port: port(index) },
            })
            .collect()
    }

    /// Reads the password: from its file if there is one.
    pub(crate) fn password(&self) -> Result<Option<Vec<u8>>, Fault> {
        let Some(path) = &self.password_file else { return Ok(self.config.get_password().map(<[u8]>::to_vec)) };
        let mut password = std::fs::read(path)
            .map_err(|error| invalid(format!("could not read the password file {}", path.display())).cause(error))?;
        while password.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
            password.pop();
        }
        Ok(Some(password))
    }
}

impl fmt::Debug for ConnectOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectOptions").field("to", &self.describe()).field("ssl_mode", &self.ssl_mode).finish()
    }
}

impl fmt::Display for ConnectOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port, .. } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port, .. } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

impl std::str::FromStr for SslMode {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        Ok(match text {
            "disable" => Self::Disable,
            // `allow` tries without TLS first, which only tells an eavesdropper more.
            "allow" | "prefer" => Self::Prefer,
            "require" => Self::Require,
            "verify-ca" => Self::VerifyCa,
            "verify-full" => Self::VerifyFull,
            _ => return Err(invalid_value("sslmode", "disable, prefer, require, verify-ca or verify-full", text)),
        })
    }
}

/// Keys that tokio-postgres does not know, or reads otherwise than libpq.
const OWN_KEYS: &[&str] = &[
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "tcp_user_timeout",
    "keepalives_count",
    "target_session_attrs",
    "fallback_application_name",
    "client_encoding",
    "gssencmode",
    "replication",
];

/// What is left for tokio-postgres, and our own pairs.
type Split = (String, Vec<(String, String)>);

fn split_url(text: &str) -> Result<Split, Fault> {
    let Some((base, query)) = text.split_once('?') else { return Ok((text.to_owned(), Vec::new())) };
    let mut own = Vec::new();
    let mut rest = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        if OWN_KEYS.contains(&key) {
            own.push((key.to_owned(), percent_decode(value).ok_or_else(|| invalid_value(key, "UTF-8", value))?));
        } else {
            rest.push(pair);
        }
    }
    let rest = if rest.is_empty() { base.to_owned() } else { format!("{base}?{}", rest.join("&")) };
    Ok((rest, own))
}

fn split_pairs(text: &str) -> Result<Split, Fault> {
    let mut own = Vec::new();
    let mut rest = String::new();
    let mut chars = text.chars().peekable();
    loop {
        while chars.next_if(|c| c.is_whitespace()).is_some() {}
        if chars.peek().is_none() {
            return Ok((rest, own));
        }
        let mut key = String::new();
        while let Some(c) = chars.next_if(|c| *c != '=' && !c.is_whitespace()) {
            key.push(c);
        }
        while chars.next_if(|c| c.is_whitespace()).is_some() {}
        if chars.next() != Some('=') {
            return Err(invalid("the connection options are neither a postgres:// URL nor key=value pairs".into()));
        }
        while chars.next_if(|c| c.is_whitespace()).is_some() {}
        let value =
            pair_value(&mut chars).ok_or_else(|| invalid(format!("the value of {key} has no closing quote")))?;
        if OWN_KEYS.contains(&key.as_str()) {
            own.push((key, value));
        } else {
            rest.push_str(&format!("{key}='{}' ", value.replace('\\', "\\\\").replace('\'', "\\'")));
        }
    }
}

/// Reads a bare or quoted value; a backslash takes the next character as it is.
fn pair_value(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) -> Option<String> {
    let quoted = chars.next_if_eq(&'\'').is_some();
    let mut value = String::new();
    loop {
        match chars.peek() {
            None => return (!quoted).then_some(value),
            Some('\'') if quoted => {
                chars.next();
                return Some(value);
            }
            Some(c) if !quoted && c.is_whitespace() => return Some(value),
            Some('\\') => {
                chars.next();
                value.push(chars.next()?);
            }
            Some(_) => value.extend(chars.next()),
        }
    }
}

fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let hex = std::str::from_utf8(rest.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(hex, 16).ok()?);
        rest = rest.get(2..)?;
    }
    String::from_utf8(bytes).ok()
}

fn invalid(message: String) -> Fault {
    Fault::new(CONNECT_OPTIONS, Action::Halt, message)
}

fn invalid_value(key: &str, expected: &str, found: &str) -> Fault {
    invalid(format!("{key}: expected {expected}, found {found:?}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed parse fails the test")]
mod tests {
    use super::*;

    fn endpoints(text: &str) -> Vec<String> {
        ConnectOptions::parse(text).unwrap().endpoints().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_url_gives_all_its_parts_and_never_shows_the_password() {
        let options = ConnectOptions::parse("postgres://us%40er:p%3As%25@db:5433/shop?sslmode=verify-full&sslrootcert=%2Fetc%2Fca.pem&connect_timeout=2").unwrap();
        assert_eq!(options.describe(), "us@er@db:5433/shop");
        assert_eq!(options.password().unwrap().unwrap(), b"p:s%");
        assert_eq!(options.ssl_mode, SslMode::VerifyFull);
        assert_eq!(options.ssl_root_cert, Some("/etc/ca.pem".into()));
        assert_eq!(options.connect_timeout, Duration::from_secs(2));
        assert_eq!(options.application_name(), "waljet");
        assert!(!format!("{options:?} {options}").contains("p:s%"));
    }

    #[test]
    fn key_value_pairs_with_quotes_and_backslashes_give_the_same() {
        let options =
            ConnectOptions::parse(r"host=db port = 5433 user=u password='it\'s a \\ x' sslmode=require").unwrap();
        assert_eq!(options.password().unwrap().unwrap(), br"it's a \ x");
        assert_eq!(options.describe(), "u@db:5433/u");
        assert_eq!(options.ssl_mode, SslMode::Require);
    }

    #[test]
    fn several_hosts_ipv6_and_sockets_are_tried_in_order() {
        assert_eq!(endpoints("postgres://u@a:1,b:2/d"), ["a:1", "b:2"]);
        assert_eq!(endpoints("postgres://u@[::1]:5/d"), ["[::1]:5"]);
        assert_eq!(endpoints("host=a,b port=7 user=u"), ["a:7", "b:7"]);
        assert_eq!(endpoints("postgres:///d?host=/run/pg&user=u"), ["/run/pg/.s.PGSQL.5432"]);
        assert_eq!(endpoints("host=db hostaddr=10.0.0.1 user=u"), ["db:5432"]);
    }

    #[test]
    fn several_hosts_look_for_the_primary_unless_told_otherwise() {
        let attrs = |text: &str| ConnectOptions::parse(text).unwrap().config().get_target_session_attrs();
        assert_eq!(attrs("host=a,b user=u"), TargetSessionAttrs::ReadWrite);
        assert_eq!(attrs("host=a user=u"), TargetSessionAttrs::Any);
        assert_eq!(attrs("host=a,b user=u target_session_attrs=any"), TargetSessionAttrs::Any);
    }

    #[test]
    fn faults_name_the_part_and_never_the_password() {
        let why = |text: &str| ConnectOptions::parse(text).unwrap_err().message;
        assert_eq!(
            why("postgres://u:secret@h/d?sslmode=on"),
            "sslmode: expected disable, prefer, require, verify-ca or verify-full, found \"on\""
        );
        assert_eq!(why("dbname=d user=u"), "the connection options name no host");
        assert_eq!(why("host=h"), "the connection options name no user");
        assert!(why("host=h user=u password='secret").ends_with("has no closing quote"));
        assert!(!why("postgres://u:secret@h:x/d").contains("secret"));
        assert!(why("host=h user=u colour=red").contains("colour"));
        assert_eq!(why("host=h user=u sslcert=a"), "sslcert and sslkey only work together");
    }
}
