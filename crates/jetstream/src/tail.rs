//! The tail of the stream: the last event of ours that it holds.

use async_nats::Client;
use futures_util::{StreamExt, stream};
use waljet_pipeline::{Fault, Position};

use crate::api::{Api, Stored, StreamInfo};
use crate::options::{DEFAULT_CONNECT_TIMEOUT, NatsOptions};

/// How far to look behind messages that are not ours or were deleted.
const WALK_BACK: u64 = 1024;
/// How many reads are under way at once: with messages of the usual `max_payload` these are 8 MiB.
const READS_AT_ONCE: usize = 8;
/// How often to read again what changes while it is read.
const ATTEMPTS: usize = 16;

/// The last event of a relay that a stream holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    /// Its position; `None` where the stream does not hold one, or nothing can be said.
    pub position: Option<Position>,
    /// Its sequence, 0 where there is none.
    pub sequence: u64,
    /// Whether the stream's last message came from another publisher.
    pub foreign: bool,
}

/// Reads the tail of `stream` below `subject_space`, with the API prefix or domain of `nats`.
///
/// # Errors
///
/// Any fault of a request.
pub async fn read_tail(client: &Client, nats: &NatsOptions, stream: &str, subject_space: &str) -> Result<Tail, Fault> {
    let api = Api::on_client(client, nats.js_prefix(), DEFAULT_CONNECT_TIMEOUT);
    Ok(info_and_tail(&api, stream, subject_space).await?.1)
}

/// Reads the stream's state and its tail, such that nothing of ours was stored between the two.
///
/// Were the last sequence older than the tail, the first message sent would be refused and the second take its place.
pub(crate) async fn info_and_tail(api: &Api, stream: &str, space: &str) -> Result<(StreamInfo, Tail), Fault> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        let info = api.stream_info(stream).await.map_err(|e| e.fault("read the state of the stream", stream))?;
        let tail = locate(api, stream, space, &info).await?;
        if tail.sequence <= info.state.last_seq {
            return Ok((info, tail));
        }
        if attempt == ATTEMPTS {
            let what = format!("read the tail of stream {stream:?}: it moves faster than it is read");
            return Err(Fault::new(crate::error::FENCE, waljet_pipeline::Action::Retry, what));
        }
    }
}

/// Finds the last message with a position.
async fn locate(api: &Api, stream: &str, space: &str, info: &StreamInfo) -> Result<Tail, Fault> {
    let state = &info.state;
    if state.messages == 0 || state.last_seq == 0 {
        return Ok(Tail::default());
    }
    let failed = |error: crate::api::ApiError| error.fault("read the tail of the stream", stream);
    let last = api.message(stream, state.last_seq).await.map_err(failed)?;
    if let Some(tail) = last.as_ref().and_then(ours) {
        return Ok(tail);
    }
    let foreign = last.is_some();
    let below = api.last_message(stream, space).await.map_err(failed)?;
    if let Some(tail) = below.as_ref().and_then(ours) {
        return Ok(Tail { foreign, ..tail });
    }
    // 2.9 finds nothing by subject once the last message was deleted, and another publisher may write below our
    // subjects: look at the messages one by one.
    let from = below.map_or(state.last_seq, |stored| stored.sequence);
    let until = from.saturating_sub(WALK_BACK).max(state.first_seq);
    let mut reads = reads(api, stream, (until..from).rev());
    while let Some(read) = reads.next().await {
        if let Some(tail) = read?.as_ref().and_then(ours) {
            return Ok(Tail { foreign, ..tail });
        }
    }
    Ok(Tail { foreign, ..Tail::default() })
}

/// Returns the tail that a message is, if it is ours.
fn ours(stored: &Stored) -> Option<Tail> {
    stored.position.map(|position| Tail { position: Some(position), sequence: stored.sequence, foreign: false })
}

/// Reads messages in the given order, several at once.
fn reads<'a>(
    api: &'a Api,
    stream: &'a str,
    sequences: impl Iterator<Item = u64> + Send + 'a,
) -> impl futures_util::Stream<Item = Result<Option<Stored>, Fault>> + Send + Unpin + 'a {
    let read = move |sequence| async move {
        api.message(stream, sequence).await.map_err(|e| e.fault("read a message of the stream", stream))
    };
    Box::pin(stream::iter(sequences).map(read).buffered(READS_AT_ONCE))
}
