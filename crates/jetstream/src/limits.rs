//! The sizes that server and stream take.

use std::time::Duration;

use crate::api::{Api, StreamInfo};
use crate::connect::{Connection, Reconnect};
use crate::options::NatsOptions;

/// How long a look at the limits may take.
const LOOK: Duration = Duration::from_secs(1);

/// The largest message that the server and the stream take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The server's `max_payload`, which counts headers too.
    pub(crate) max_payload: usize,
    /// The stream's `max_msg_size`, which counts headers too.
    pub(crate) max_msg_size: Option<usize>,
}

impl Limits {
    /// Takes what the server said as the connection was made, and what the stream says.
    pub(crate) fn of(connection: &Connection, stream: &StreamInfo) -> Self {
        Self {
            max_payload: connection.client.server_info().max_payload,
            max_msg_size: usize::try_from(stream.config.max_msg_size).ok().filter(|size| *size > 0),
        }
    }
}

/// Reads the limits over a connection of its own; `None` where that fails.
///
/// A server whose configuration was reloaded does not tell its new `max_payload` to clients that are connected.
pub(crate) async fn now(nats: &NatsOptions, known_servers: &[String], stream: &str) -> Option<Limits> {
    let look = async {
        let connection = Connection::open(nats, known_servers, Reconnect::Barely).await.ok()?;
        let info = Api::new(&connection, nats.js_prefix(), LOOK).stream_info(stream).await.ok()?;
        Some(Limits::of(&connection, &info))
    };
    tokio::time::timeout(LOOK, look).await.ok().flatten()
}
