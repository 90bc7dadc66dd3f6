//! Creating the stream, once.

use async_nats::Client;
use serde::Serialize;
use waljet_pipeline::{Action, Fault};

use crate::api::{Api, ApiError};
use crate::error;
use crate::options::{NatsOptions, StreamOptions};

/// The settings that a stream is created with, as the JetStream API takes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StreamSettings {
    /// The stream's name.
    pub name: String,
    /// What it takes.
    pub subjects: Vec<String>,
    /// `limits`: consumers do not decide what is kept, so that the tail can be read back.
    pub retention: &'static str,
    /// `file`: a memory stream forgets both messages and ids at a restart.
    pub storage: &'static str,
    /// `new` where there is a size limit: a full stream refuses new events, which then wait in the database, rather
    /// than drop old ones that nobody may have read.
    pub discard: &'static str,
    /// Servers that store it.
    pub num_replicas: usize,
    /// Nanoseconds, 0 for ever.
    pub max_age: u64,
    /// Bytes, -1 unlimited.
    pub max_bytes: i64,
    /// Messages, unlimited.
    pub max_msgs: i64,
    /// Bytes, -1 up to the server's `max_payload`.
    pub max_msg_size: i64,
    /// Nanoseconds.
    pub duplicate_window: u64,
    /// Lets readers take single messages from any replica.
    pub allow_direct: bool,
    /// Allows fast-ingest batches; from server 2.14 on.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub allow_batched: bool,
    /// Allows atomic batches; from server 2.12 on, and only where `publisher.mode` asks for them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub allow_atomic: bool,
}

/// A server's version: major, minor, patch.
pub type Version = (u64, u64, u64);

/// The first version with fast-ingest batches.
pub(crate) const BATCHES_SINCE: Version = (2, 14, 0);

/// The first version with atomic batches of messages that have ids.
pub(crate) const ATOMIC_SINCE: Version = (2, 12, 1);

/// Returns what [`init`] would create on a server of `version`; without one, what every server takes.
#[must_use]
pub fn plan(options: &StreamOptions, version: Option<Version>) -> StreamSettings {
    let nanos = |duration: std::time::Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    StreamSettings {
        name: options.stream.clone(),
        subjects: vec![options.subject_space.clone()],
        retention: "limits",
        storage: "file",
        discard: if options.max_bytes.is_some() { "new" } else { "old" },
        num_replicas: options.replicas.max(1),
        max_age: options.max_age.map_or(0, nanos),
        max_bytes: options.max_bytes.map_or(-1, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX)),
        max_msgs: -1,
        max_msg_size: options.max_msg_size.map_or(-1, i64::from),
        // The broker refuses a window that outlasts the messages.
        duplicate_window: nanos(
            options.max_age.map_or(options.duplicate_window, |age| age.min(options.duplicate_window)),
        ),
        allow_direct: true,
        allow_batched: version.is_some_and(|version| version >= BATCHES_SINCE),
        allow_atomic: options.atomic && version.is_some_and(|version| version >= ATOMIC_SINCE),
    }
}

/// Something that `init` looked after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Done {
    /// What: `stream "OUTBOX"`.
    pub what: String,
    /// Whether it had to be created.
    pub outcome: Outcome,
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It was missing and is there now.
    Created,
    /// It was there and stays as it is.
    Existed,
}

/// Creates the stream where it is missing. An existing one is never changed.
///
/// # Errors
///
/// Any fault of the connection, and the broker's reason for not creating it.
pub async fn init(nats: &NatsOptions, options: &StreamOptions) -> Result<Vec<Done>, Fault> {
    let client = crate::connect(nats).await?;
    let api = Api::on_client(&client, nats.js_prefix(), nats.connect_timeout);
    let outcome = create(&client, &api, options).await?;
    Ok(vec![Done { what: format!("stream {:?}", options.stream), outcome }])
}

async fn create(client: &Client, api: &Api, options: &StreamOptions) -> Result<Outcome, Fault> {
    let name = &options.stream;
    match api.stream_info(name).await {
        Ok(_) => return Ok(Outcome::Existed),
        Err(ApiError::Broker { err_code: 10059, .. }) => {}
        Err(error) => return Err(error.fault("look for the stream", name)),
    }
    let settings = serde_json::json!(plan(options, version(&client.server_info().version)));
    match api.create_stream(name, &settings).await {
        Ok(()) => Ok(Outcome::Created),
        // Somebody was faster, with other settings.
        Err(ApiError::Broker { err_code: 10058, .. }) => Ok(Outcome::Existed),
        Err(ApiError::Broker { err_code, description }) => Err(refused(api, options, err_code, &description).await),
        Err(error) => Err(error.fault(&format!("create stream {name:?}"), name)),
    }
}

/// Says why the broker does not create the stream, and what mends that.
async fn refused(api: &Api, options: &StreamOptions, err_code: u64, description: &str) -> Fault {
    let name = &options.stream;
    let mut message = format!("create stream {name:?}: the broker answered {description:?} (error {err_code})");
    let (code, hint) = match err_code {
        10065 => {
            let others = api.streams_on(&options.subject_space).await.unwrap_or_default().join(", ");
            message = format!(
                "create stream {name:?} on {:?}: stream {others} takes such subjects already",
                options.subject_space
            );
            (error::STREAM_OVERLAP, format!("set nats.stream to {others}, or choose another prefix in route.subject"))
        }
        10005 | 10074 => {
            let replicas = options.replicas;
            (
                error::STREAM_CREATE,
                format!("{replicas} replicas need as many JetStream servers in one cluster: set nats.replicas lower"),
            )
        }
        10002 | 10023 | 10026 | 10027 | 10028 | 10047 | 10113 | 10122 => (
            error::RESOURCES,
            "raise the account's or the server's JetStream limits, or set nats.max_bytes; nats account info shows them"
                .to_owned(),
        ),
        10039 | 10076 | 10008 => {
            (error::JETSTREAM_UNAVAILABLE, error::remedy(error::JETSTREAM_UNAVAILABLE, name).unwrap_or_default())
        }
        _ => (
            error::STREAM_CREATE,
            "waljet init --print shows the settings; correct the one that the broker names".to_owned(),
        ),
    };
    Fault::new(code, Action::Halt, message).hint(hint)
}

/// Reads a server's version, `2.12.0-RC.1` as 2.12.0.
#[must_use]
pub fn version(text: &str) -> Option<Version> {
    let mut parts = text.trim_start_matches('v').splitn(3, '.').map(|part| {
        let digits = part.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
        digits.parse().ok()
    });
    Some((parts.next()??, parts.next()??, parts.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_version_is_read_with_or_without_a_suffix() {
        assert_eq!(version("2.9.10"), Some((2, 9, 10)));
        assert_eq!(version("2.12.0-RC.1"), Some((2, 12, 0)));
        assert_eq!(version("v2.15.1"), Some((2, 15, 1)));
        assert_eq!(version("2"), None);
        assert_eq!(version(""), None);
    }

    #[test]
    fn a_size_limit_makes_the_stream_refuse_rather_than_forget() {
        let options = StreamOptions::default();
        assert_eq!(plan(&options, None).discard, "old");
        let limited = StreamOptions { max_bytes: Some(1 << 30), ..options };
        let plan = plan(&limited, None);
        assert_eq!((plan.discard, plan.max_bytes), ("new", 1 << 30));
    }

    #[test]
    fn batches_are_allowed_where_the_server_knows_them() {
        let options = StreamOptions::default();
        let json = |version| serde_json::json!(plan(&options, version)).to_string();
        assert!(!json(Some((2, 9, 10))).contains("allow_batched"));
        assert!(!json(None).contains("allow_batched"));
        assert!(json(Some((2, 14, 0))).contains(r#""allow_batched":true"#));
    }

    #[test]
    fn atomic_batches_are_allowed_where_they_are_asked_for_and_known() {
        let options = StreamOptions { atomic: true, ..StreamOptions::default() };
        let allowed = |options, version| plan(options, Some(version)).allow_atomic;
        assert!(allowed(&options, (2, 12, 1)) && !allowed(&options, (2, 12, 0)));
        assert!(!allowed(&StreamOptions::default(), (2, 15, 1)));
    }

    #[test]
    fn the_window_never_outlasts_the_messages() {
        let options = StreamOptions { max_age: Some(Duration::from_secs(30)), ..StreamOptions::default() };
        assert_eq!(plan(&options, None).duplicate_window, 30_000_000_000);
    }
}
