//! What the stream holds past a position, by event id.
//!
//! ```text
//!   first_seq …… probe ………… probe …… probe … tail        positions grow along the stream
//!                  ▲ before `from`: start behind it
//!                  └─ headers of all messages from here to the tail ─► ids
//! ```

use futures_util::StreamExt;
use serde_json::json;
use tokio::time::{Duration, timeout};
use waljet_pipeline::{Action, Fault, IdDigest, Position, Stored, headers};

use crate::api::{Api, ApiError, StreamInfo};
use crate::error;
use crate::tail::Tail;

/// Ids that one read-back returns at most: 9 MB of them.
const MOST: usize = 1 << 18;

/// How far behind the tail the first probe looks: a window, in the usual case of a relay that was killed.
const FIRST_STEP: u64 = 1024;

/// How much farther each next one does.
const STEP_FACTOR: u64 = 8;

/// Messages asked for at once; far below what a subscription of the client holds.
const BATCH: usize = 8192;

/// A consumer that nobody asks is gone after this.
const CONSUMER_LIFE: Duration = Duration::from_secs(30);

/// The stream gives nothing for this long: the read has failed.
const SILENCE: Duration = Duration::from_secs(5);

/// Reads which events at or past `from` are stored, up to the tail.
///
/// # Errors
///
/// Any fault of a request; reading back is then to be tried again before anything is published.
pub(crate) async fn read_back(
    api: &Api,
    stream: &str,
    space: &str,
    info: &StreamInfo,
    tail: &Tail,
    from: &Position,
) -> Result<Stored, Fault> {
    // Positions of another history cannot be compared: whatever it is, the pipeline judges the tail first.
    let past = tail.position.is_some_and(|position| from.at_or_before(&position));
    if !past {
        return Ok(Stored::default());
    }
    let start = start(api, stream, info, tail, from).await?;
    let stored = read(api, stream, space, start, tail.sequence).await?;
    let (ids, complete) = (stored.ids.len(), stored.through.is_none());
    tracing::info!(%stream, from = start, to = tail.sequence, ids, complete, "stream read back");
    Ok(stored)
}

/// Finds a sequence behind which all messages at or past `from` stand.
async fn start(api: &Api, stream: &str, info: &StreamInfo, tail: &Tail, from: &Position) -> Result<u64, Fault> {
    let first = info.state.first_seq.max(1);
    let mut step = FIRST_STEP;
    while let Some(sequence) = tail.sequence.checked_sub(step).filter(|sequence| *sequence > first) {
        let message = api.message(stream, sequence).await.map_err(|e| e.fault("read back the stream", stream))?;
        // A message that was deleted or is not ours says nothing: look farther back.
        let position = message.and_then(|message| message.position);
        if position.is_some_and(|position| !from.at_or_before(&position)) {
            return Ok(sequence + 1);
        }
        step = step.saturating_mul(STEP_FACTOR);
    }
    Ok(first)
}

/// Reads the headers of the messages from `start` to `end`.
async fn read(api: &Api, stream: &str, space: &str, start: u64, end: u64) -> Result<Stored, Fault> {
    let failed = |error: ApiError| error.fault("read back the stream", stream);
    let consumer = api.create_consumer(stream, &consumer_config(space, start)).await.map_err(failed)?;
    let stored = pull(api, stream, &consumer, end).await;
    // Left behind, it would go by itself after a while.
    let _ = api.delete_consumer(stream, &consumer).await;
    stored
}

fn consumer_config(space: &str, start: u64) -> serde_json::Value {
    json!({
        "deliver_policy": "by_start_sequence", "opt_start_seq": start,
        "ack_policy": "none", "replay_policy": "instant", "filter_subject": space,
        "headers_only": true, "mem_storage": true, "num_replicas": 1,
        "inactive_threshold": u64::try_from(CONSUMER_LIFE.as_nanos()).unwrap_or(u64::MAX),
    })
}

async fn pull(api: &Api, stream: &str, consumer: &str, end: u64) -> Result<Stored, Fault> {
    let mut stored = Stored::default();
    loop {
        let mut batch = api.next_messages(stream, consumer, BATCH, SILENCE).await?;
        let mut any = false;
        for _ in 0..BATCH {
            let Ok(Some(message)) = timeout(SILENCE, batch.next()).await else { return Err(silent(stream, end)) };
            // A status: the batch is over, for want of messages or of time.
            if message.status.is_some() {
                break;
            }
            let Some(sequence) = message.reply.as_deref().and_then(stream_sequence) else {
                return Err(Fault::new(
                    error::UNEXPECTED_ANSWER,
                    Action::Retry,
                    format!("read back stream {stream:?}: a message names no sequence"),
                ));
            };
            any = true;
            let header = |name| message.headers.as_ref().and_then(|headers| headers.get(name));
            stored.ids.extend(header(headers::MSG_ID).map(|id| IdDigest::of(id.as_str())));
            if sequence >= end {
                return Ok(stored);
            }
            let position = header(headers::POSITION).and_then(|text| text.as_str().parse().ok());
            if position.is_some() && stored.ids.len() >= MOST {
                stored.through = position;
                return Ok(stored);
            }
        }
        if !any {
            return Err(silent(stream, end));
        }
    }
}

fn silent(stream: &str, end: u64) -> Fault {
    let what = format!("read back stream {stream:?}: it gave nothing more before sequence {end}");
    Fault::new(error::TIMEOUT, Action::Retry, what)
}

/// `$JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer sequence>.<time>.<pending>`, where two more
/// tokens, domain and account, may stand before the stream and one behind.
fn stream_sequence(reply: &str) -> Option<u64> {
    let tokens: Vec<&str> = reply.split('.').collect();
    let at = match tokens.len() {
        9 => 5,
        11.. => 7,
        _ => return None,
    };
    tokens.get(at)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_found_in_both_forms_of_the_reply_subject() {
        assert_eq!(stream_sequence("$JS.ACK.S.c.1.42.7.1700000000000000000.0"), Some(42));
        assert_eq!(stream_sequence("$JS.ACK._.acc.S.c.1.42.7.1700000000000000000.0"), Some(42));
        assert_eq!(stream_sequence("$JS.ACK._.acc.S.c.1.42.7.1700000000000000000.0.token"), Some(42));
        assert_eq!(stream_sequence("$JS.ACK.S"), None);
    }
}
