//! What operators see of the sink.

use serde::Serialize;
use waljet_pipeline::PublisherMode;

/// The sink as it stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SinkWatch {
    /// Whether there is a connection.
    pub connected: bool,
    /// The server's name.
    pub server: Option<String>,
    /// The server's version.
    pub server_version: Option<String>,
    /// The stream.
    pub stream: String,
    /// How order is kept, from the first generation on.
    pub mode: Option<PublisherMode>,
    /// The stream's last sequence, as far as it is known.
    pub last_sequence: u64,
    /// How many messages the stream held at the start of the generation.
    pub messages: u64,
    /// How many bytes the stream held at the start of the generation.
    pub bytes: u64,
    /// How long the broker remembers message ids.
    pub duplicate_window_seconds: u64,
    /// How many servers store the stream.
    pub replicas: usize,
    /// The server that leads the stream, in a cluster.
    pub leader: Option<String>,
    /// In atomic mode, how many transactions this process stored whole.
    pub whole_transactions: u64,
    /// In atomic mode, how many transactions it stored in parts, which their events say.
    pub split_transactions: u64,
    /// How many generations ended at the fence.
    pub fence_failures: u64,
    /// Whether another publisher was seen to write to the stream.
    pub foreign_publisher: bool,
}
