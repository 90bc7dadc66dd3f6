//! What the pipeline can be told, with the defaults and their reasons.

use std::time::Duration;

use waljet_pgoutput::Timestamp;

use crate::{ReplayWindow, Route};

/// Unacknowledged events at most. Above 256 the broker gains 5 to 10 % on a local link; over a network, the
/// rate times the round trip must fit in.
pub const DEFAULT_MAX_EVENTS: usize = 1024;

/// Bytes of unacknowledged events at most: the full window of events of 8 KiB.
pub const DEFAULT_MAX_BYTES: usize = 8 * 1024 * 1024;

/// The first pause after a failure. A leader election takes longer, a second writer's message less.
pub const DEFAULT_RETRY_MIN: Duration = Duration::from_millis(50);

/// The longest pause between two attempts: what an operator is ready to wait after mending something.
pub const DEFAULT_RETRY_MAX: Duration = Duration::from_secs(5);

/// The shortest time between two writes of the checkpoint.
pub const DEFAULT_CHECKPOINT_INTERVAL: Duration = Duration::from_secs(1);

/// How long a stop waits for acknowledgements. Process managers kill after 10 s.
pub const DEFAULT_DRAIN_TIMEOUT: Duration = Duration::from_secs(4);

/// Everything that the pipeline can be told.
#[derive(Clone, Debug)]
pub struct PipelineOptions {
    /// Which table holds the events, and in which columns.
    pub outbox: OutboxOptions,
    /// How subjects are made.
    pub route: Route,
    /// Which headers are sent beside those that always are.
    pub headers: HeaderOptions,
    /// How much may be unacknowledged.
    pub window: WindowOptions,
    /// The shortest time between two writes of the checkpoint.
    pub checkpoint_interval: Duration,
    /// How far the slot is held back behind what is confirmed.
    pub replay_window: ReplayWindow,
    /// How failures are retried.
    pub retry: RetryOptions,
    /// How long a drain may wait for acknowledgements.
    pub drain_timeout: Duration,
    /// Whether to go on where the stream and the database do not fit together: the operator's word.
    pub accept_gap: bool,
    /// The wall clock, for the time from commit to acknowledgement.
    pub clock: fn() -> Timestamp,
}

/// Which table holds the events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxOptions {
    /// The table's schema.
    pub schema: String,
    /// The table's name.
    pub table: String,
    /// Its columns.
    pub columns: Columns,
}

/// The names of the outbox table's columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns {
    /// The event id.
    pub id: String,
    /// The first half of the ordering key.
    pub aggregate_type: String,
    /// The second half of the ordering key.
    pub aggregate_id: String,
    /// What happened.
    pub event_type: String,
    /// The message body.
    pub payload: String,
    /// A JSON object of headers.
    pub headers: Option<String>,
    /// The tenant.
    pub tenant_id: Option<String>,
    /// The version of the payload's schema.
    pub schema_version: Option<String>,
}

impl Columns {
    /// The columns of the table that `waljet init` makes.
    #[must_use]
    pub fn waljet() -> Self {
        Self {
            id: "id".into(),
            aggregate_type: "aggregate_type".into(),
            aggregate_id: "aggregate_id".into(),
            event_type: "event_type".into(),
            payload: "payload".into(),
            headers: Some("headers".into()),
            tenant_id: Some("tenant_id".into()),
            schema_version: Some("schema_version".into()),
        }
    }

    /// The columns that Debezium's outbox event router reads.
    #[must_use]
    pub fn debezium() -> Self {
        Self {
            id: "id".into(),
            aggregate_type: "aggregatetype".into(),
            aggregate_id: "aggregateid".into(),
            event_type: "type".into(),
            payload: "payload".into(),
            headers: None,
            tenant_id: None,
            schema_version: None,
        }
    }

    /// The columns without which no event can be made.
    #[must_use]
    pub fn required(&self) -> [&str; 5] {
        [&self.id, &self.aggregate_type, &self.aggregate_id, &self.event_type, &self.payload].map(String::as_str)
    }
}

/// Headers beside `Nats-Msg-Id`, `Waljet-Position`, `Waljet-Commit-Time` and `Aggregate-Id`. Off by default:
/// each costs the relay, the broker and the disk, and the default subject carries type and event type.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderOptions {
    /// `Aggregate-Type`.
    pub aggregate_type: bool,
    /// `Event-Type`.
    pub event_type: bool,
    /// `Schema-Version`.
    pub schema_version: bool,
    /// `Tenant-Id`.
    pub tenant_id: bool,
    /// `Content-Type`, with this value.
    pub content_type: Option<String>,
}

/// How much may be unacknowledged at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowOptions {
    /// Events, at least 1.
    pub max_events: usize,
    /// Bytes of subjects, headers and payloads. A single larger event passes alone.
    pub max_bytes: usize,
}

impl Default for WindowOptions {
    fn default() -> Self {
        Self { max_events: DEFAULT_MAX_EVENTS, max_bytes: DEFAULT_MAX_BYTES }
    }
}

/// How failures are retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryOptions {
    /// The first pause is up to this.
    pub min: Duration,
    /// No pause is longer.
    pub max: Duration,
}

impl Default for RetryOptions {
    fn default() -> Self {
        Self { min: DEFAULT_RETRY_MIN, max: DEFAULT_RETRY_MAX }
    }
}
