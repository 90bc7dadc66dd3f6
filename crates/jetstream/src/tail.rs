//! The tail of the stream: the last event of ours that it holds.

use std::ops::ControlFlow;

use async_nats::Client;
use waljet_pipeline::{Fault, Position};

use crate::api::{Api, ApiError, Stored, StreamInfo};
use crate::options::{DEFAULT_CONNECT_TIMEOUT, NatsOptions};
use crate::scan::Scan;

/// How far the first look goes behind messages that are not ours.
const FIRST_STEP: u64 = 1024;
/// How much farther each next one goes, down to the stream's beginning.
const STEP_FACTOR: u64 = 4;
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
    /// The sequence of the last message that may be an event's: it has an id, if no position that can be read.
    pub(crate) marked: u64,
    /// How many messages had to be read to find it.
    pub(crate) looked_at: u64,
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

/// Returns whether a stream still holds all that it was ever given; one that does not exist does.
///
/// # Errors
///
/// Any fault of a request.
pub async fn is_whole(client: &Client, nats: &NatsOptions, stream: &str) -> Result<bool, Fault> {
    let api = Api::on_client(client, nats.js_prefix(), DEFAULT_CONNECT_TIMEOUT);
    match api.stream_info(stream).await {
        // A stream may be made to begin at a sequence of its own.
        Ok(info) => Ok(info.state.num_deleted == 0
            && (info.state.last_seq == 0 || info.state.first_seq <= info.config.first_seq.max(1))),
        Err(ApiError::Broker { err_code: 10059, .. }) => Ok(true),
        Err(error) => Err(error.fault("read the state of the stream", stream)),
    }
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
        if tail.marked <= info.state.last_seq {
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
    let failed = |error: ApiError| error.fault("read the tail of the stream", stream);
    let last = api.message(stream, state.last_seq).await.map_err(failed)?;
    if let Some(tail) = last.as_ref().and_then(ours) {
        return Ok(tail);
    }
    // A relay of another version is no other publisher.
    let foreign = last.is_some_and(|last| !last.unreadable);
    let below = api.last_message(stream, space).await.map_err(failed)?;
    if let Some(tail) = below.as_ref().and_then(ours) {
        return Ok(Tail { foreign, ..tail });
    }
    // 2.9 finds nothing by subject once the last message was deleted, and another publisher may write below our
    // subjects: go back through the headers.
    let mut tail = Tail { foreign, ..Tail::default() };
    let mut scan = Scan::new(api, stream, space, info);
    let (mut high, mut step) = (below.as_ref().map_or(state.last_seq + 1, |below| below.sequence + 1), FIRST_STEP);
    while high > state.first_seq && tail.position.is_none() {
        let low = high.saturating_sub(step).max(state.first_seq);
        // Far back there may be nothing at all.
        let next = scan.next(low).await?.map(|next| next.sequence);
        if let Some(start) = next.filter(|start| *start < high) {
            scan.read(start..=high - 1, |message| {
                if message.id.is_some() || message.unreadable {
                    tail.marked = tail.marked.max(message.sequence);
                }
                if message.position.is_some() {
                    (tail.position, tail.sequence) = (message.position, message.sequence);
                }
                ControlFlow::Continue(())
            })
            .await?;
        }
        (high, step) = (low, step.saturating_mul(STEP_FACTOR));
    }
    Ok(Tail { looked_at: scan.messages(), marked: tail.marked.max(tail.sequence), ..tail })
}

/// Returns the tail that a message is, if it is ours.
fn ours(stored: &Stored) -> Option<Tail> {
    let sequence = stored.sequence;
    stored.position.map(|position| Tail { position: Some(position), sequence, marked: sequence, ..Tail::default() })
}
