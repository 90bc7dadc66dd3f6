//! What the sink is told: the servers, the stream and the lane to it.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The servers and how to connect to them.
#[derive(Clone, PartialEq, Eq)]
pub struct NatsOptions {
    /// Addresses such as `nats://host:4222`; one that answers is enough. User and password in one serve where
    /// `auth` is [`Auth::None`].
    pub servers: Vec<String>,
    /// Who the client is.
    pub auth: Auth,
    /// Encryption.
    pub tls: TlsOptions,
    /// The connection's name, as `nats server report connections` shows it.
    pub name: String,
    /// The JetStream domain; excludes `api_prefix`.
    pub domain: Option<String>,
    /// The subject prefix of the JetStream API where an account imports it under another name than `$JS.API`.
    pub api_prefix: Option<String>,
    /// The prefix of reply subjects where the user may not subscribe to `_INBOX.>`.
    pub inbox_prefix: Option<String>,
    /// How long one server may take to answer, for the connection as for a request.
    pub connect_timeout: Duration,
    /// A server that leaves two pings unanswered is left at the third.
    pub ping_interval: Duration,
}

/// Below the 10 s within which readiness must tell that the broker stands still.
pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Three times this is how long a dead connection can go unnoticed while nothing is published.
pub const DEFAULT_PING_INTERVAL: Duration = Duration::from_secs(5);

impl Default for NatsOptions {
    fn default() -> Self {
        Self {
            servers: vec!["nats://127.0.0.1:4222".to_owned()],
            auth: Auth::None,
            tls: TlsOptions::default(),
            name: "waljet".to_owned(),
            domain: None,
            api_prefix: None,
            inbox_prefix: None,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
            ping_interval: DEFAULT_PING_INTERVAL,
        }
    }
}

impl NatsOptions {
    /// Returns the prefix of JetStream API subjects.
    #[must_use]
    pub fn js_prefix(&self) -> String {
        match (&self.api_prefix, &self.domain) {
            (Some(prefix), _) => prefix.trim_end_matches('.').to_owned(),
            (None, Some(domain)) => format!("$JS.{domain}.API"),
            (None, None) => "$JS.API".to_owned(),
        }
    }
}

impl fmt::Debug for NatsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let servers: Vec<String> = self.servers.iter().map(|server| shown(server)).collect();
        f.debug_struct("NatsOptions")
            .field("servers", &servers)
            .field("auth", &self.auth)
            .field("tls", &self.tls)
            .field("name", &self.name)
            .field("domain", &self.domain)
            .field("api_prefix", &self.api_prefix)
            .field("inbox_prefix", &self.inbox_prefix)
            .field("connect_timeout", &self.connect_timeout)
            .field("ping_interval", &self.ping_interval)
            .finish()
    }
}

/// Returns a server's address without its user and password.
#[must_use]
pub fn shown(server: &str) -> String {
    let (scheme, rest) = server.trim().split_once("://").unwrap_or(("nats", server.trim()));
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    format!("{scheme}://{host}")
}

/// A text that never shows in logs and messages.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Returns the text.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hidden]")
    }
}

/// Who the client is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Auth {
    /// Nobody in particular.
    #[default]
    None,
    /// A token.
    Token(Secret),
    /// A user and a password.
    UserPassword {
        /// The user.
        user: String,
        /// The password.
        password: Secret,
    },
    /// A credentials file with JWT and seed, read again at each connection.
    Credentials(PathBuf),
    /// The seed of an nkey.
    NKey(Secret),
    /// A user JWT and the seed it was issued for.
    Jwt {
        /// The JWT.
        jwt: Secret,
        /// The seed.
        seed: Secret,
    },
}

/// Encryption.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// Refuses a server that does not encrypt.
    pub required: bool,
    /// Encrypts before the server's greeting (`handshake_first` on the server).
    pub first: bool,
    /// The certificates to trust in place of the system's.
    pub ca_file: Option<PathBuf>,
    /// The client's certificate; needs `key_file`.
    pub cert_file: Option<PathBuf>,
    /// The key of the client's certificate.
    pub key_file: Option<PathBuf>,
}

/// The stream: what `init` creates it with, and what `check` compares it with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// Its name.
    pub stream: String,
    /// The subjects that events are routed to, such as `outbox.>`.
    pub subject_space: String,
    /// How many servers store it.
    pub replicas: usize,
    /// How long the broker remembers message ids.
    pub duplicate_window: Duration,
    /// How long messages are kept; unlimited where not given.
    pub max_age: Option<Duration>,
    /// How much is kept. At this size the broker refuses new messages (`discard: new`) rather than drop old ones.
    pub max_bytes: Option<u64>,
    /// The largest message, with its headers.
    pub max_msg_size: Option<u32>,
    /// Whether rows may bring headers of their own, which `check` then looks at the stream's `allow_rollup` for.
    pub row_headers: bool,
    /// Whether transactions are to be stored whole ([`ModeChoice::Atomic`]), for which the stream has to allow it.
    pub atomic: bool,
}

/// What the broker takes by itself, and what a restart of the relay may take.
pub const DEFAULT_DUPLICATE_WINDOW: Duration = Duration::from_secs(120);

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            stream: "OUTBOX".to_owned(),
            subject_space: "outbox.>".to_owned(),
            replicas: 1,
            duplicate_window: DEFAULT_DUPLICATE_WINDOW,
            max_age: None,
            max_bytes: None,
            max_msg_size: None,
            row_headers: true,
            atomic: false,
        }
    }
}

/// The lane: how many messages are under way, and how long one may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneOptions {
    /// How order is kept.
    pub mode: ModeChoice,
    /// How many messages may be unacknowledged at once in fast and chain mode; from 1 to [`MAX_WINDOW`].
    pub window: usize,
    /// How long the oldest unacknowledged message may wait, measured from its sending.
    pub ack_timeout: Duration,
    /// How events are recognized when the stream is read back.
    pub matching: Matching,
}

/// What makes an event and a message the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Matching {
    /// Id and commit LSN: a row that has the id of another one is another event.
    #[default]
    Place,
    /// The id: for events that come from the table, which does not tell their commit LSN. All ids are read before the first event is
    /// sent, 32 bytes of memory for each.
    Id,
}

/// Beyond 256 more buys little on a fast network; 1,024 also fills one of 10 ms round trip at 100,000 a second.
pub const DEFAULT_WINDOW: usize = 1024;
/// Beyond this only latency grows.
pub const MAX_WINDOW: usize = 4096;
/// Below the 10 s within which readiness must tell that the broker stands still.
pub const DEFAULT_ACK_TIMEOUT: Duration = Duration::from_secs(5);

impl Default for LaneOptions {
    fn default() -> Self {
        Self {
            mode: ModeChoice::Auto,
            window: DEFAULT_WINDOW,
            ack_timeout: DEFAULT_ACK_TIMEOUT,
            matching: Matching::Place,
        }
    }
}

/// Which mode the lane works in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModeChoice {
    /// Fast where server and stream know batches; otherwise lanes on a stream that takes other subjects, too; otherwise
    /// chain, and serial for as long as another publisher writes to the stream.
    #[default]
    Auto,
    /// Always atomic: server and stream must know atomic batches.
    Atomic,
    /// Always fast: server and stream must know batches.
    Fast,
    /// Always chain: the stream must have no other publisher.
    Chain,
    /// Always one message of each ordering key at a time.
    Lanes,
    /// Always one message at a time.
    Serial,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_secret_shows_in_debug_output() {
        let auths = [
            Auth::Token(Secret::from("hush")),
            Auth::UserPassword { user: "u".into(), password: Secret::from("hush") },
            Auth::NKey(Secret::from("hush")),
            Auth::Jwt { jwt: Secret::from("hush"), seed: Secret::from("hush") },
        ];
        for auth in auths {
            let options = NatsOptions { auth, servers: vec!["nats://u:hush@h:1".into()], ..NatsOptions::default() };
            assert!(!format!("{options:?}").contains("hush"), "{options:?}");
        }
    }

    #[test]
    fn a_server_is_shown_without_user_and_password() {
        for (text, expected) in [
            ("nats://u:p@h:4222", "nats://h:4222"),
            ("tls://u:p@x@h", "tls://h"),
            ("h:4222", "nats://h:4222"),
            ("token@h", "nats://h"),
        ] {
            assert_eq!(shown(text), expected);
        }
    }

    #[test]
    fn the_prefix_of_the_api_follows_domain_and_import() {
        let prefix = |domain: Option<&str>, api: Option<&str>| {
            NatsOptions { domain: domain.map(Into::into), api_prefix: api.map(Into::into), ..NatsOptions::default() }
                .js_prefix()
        };
        assert_eq!(prefix(None, None), "$JS.API");
        assert_eq!(prefix(Some("hub"), None), "$JS.hub.API");
        assert_eq!(prefix(Some("hub"), Some("from.hub.")), "from.hub");
    }
}
