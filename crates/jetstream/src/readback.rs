//! What the stream holds past a position, by event id.
//!
//! ```text
//!   first_seq …… probe ………… probe …… probe … tail        positions grow along the stream,
//!                  ▲ before `from`: start behind it         give or take a window
//!                  └─ headers of all messages from here to the tail ─► ids
//! ```
//!
//! In lanes mode the keys overtake each other, so that an event may stand behind as many later ones as a window
//! holds. Both ends of what is read allow for that.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashSet};

use futures_util::StreamExt;
use serde_json::json;
use tokio::time::{Duration, timeout};
use waljet_pipeline::{Action, Fault, IdDigest, Position, Stored, headers};

use crate::api::{Api, ApiError, StreamInfo};
use crate::error;
use crate::options::MAX_WINDOW;
use crate::tail::Tail;

/// Ids that one read-back returns at most: 9 MB of them.
const MOST: usize = 1 << 18;

/// How far behind the tail the first probe looks: a window, in the usual case of a relay that was killed.
const FIRST_STEP: u64 = 1024;

/// How much farther each next one does.
const STEP_FACTOR: u64 = 8;

/// Messages asked for at once: with headers as large as they may be, 64 MiB.
const BATCH: usize = 1024;

/// How many later events may be stored before an event.
const DISORDER: usize = MAX_WINDOW;

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
    let start = start(api, stream, info, tail, from).await?.saturating_sub(DISORDER as u64).max(1);
    let failed = |error: ApiError| error.fault("read back the stream", stream);
    let consumer = api.create_consumer(stream, &consumer_config(space, start)).await.map_err(failed)?;
    let stored = pull(api, stream, &consumer, tail.sequence, Collected::new(*from)).await;
    // Left behind, it would go by itself after a while.
    let _ = api.delete_consumer(stream, &consumer).await;
    let stored = stored?;
    let (ids, complete) = (stored.ids.len(), stored.through.is_none());
    tracing::info!(%stream, from = start, to = tail.sequence, ids, complete, "stream read back");
    Ok(stored)
}

/// Finds a sequence behind which all messages at or past `from` stand.
async fn start(api: &Api, stream: &str, info: &StreamInfo, tail: &Tail, from: &Position) -> Result<u64, Fault> {
    // A message that was deleted or is not ours says nothing.
    let before = async |sequence| {
        let message = api.message(stream, sequence).await.map_err(|e| e.fault("read back the stream", stream))?;
        let position = message.and_then(|message| message.position);
        Ok::<_, Fault>(position.map(|position| !from.at_or_before(&position)))
    };
    let (mut low, mut high, mut step) = (info.state.first_seq.max(1), tail.sequence, FIRST_STEP);
    while let Some(sequence) = tail.sequence.checked_sub(step).filter(|sequence| *sequence > low) {
        if before(sequence).await? == Some(true) {
            low = sequence;
            break;
        }
        high = sequence;
        step = step.saturating_mul(STEP_FACTOR);
    }
    // The last step may have been a long one.
    while high - low > FIRST_STEP {
        let middle = low + (high - low) / 2;
        match before(middle).await? {
            Some(true) => low = middle,
            Some(false) => high = middle,
            None => break,
        }
    }
    Ok(low)
}

fn consumer_config(space: &str, start: u64) -> serde_json::Value {
    json!({
        "deliver_policy": "by_start_sequence", "opt_start_seq": start,
        "ack_policy": "none", "replay_policy": "instant", "filter_subject": space,
        "headers_only": true, "mem_storage": true, "num_replicas": 1,
        "inactive_threshold": u64::try_from(CONSUMER_LIFE.as_nanos()).unwrap_or(u64::MAX),
    })
}

async fn pull(api: &Api, stream: &str, consumer: &str, end: u64, mut collected: Collected) -> Result<Stored, Fault> {
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
            let header = |name| message.headers.as_ref().and_then(|headers| headers.get(name)).map(|v| v.as_str());
            collected.take(header(headers::MSG_ID), header(headers::POSITION).and_then(|text| text.parse().ok()));
            if sequence >= end {
                return Ok(collected.whole());
            }
            if collected.is_full() {
                return Ok(collected.part());
            }
        }
        if !any {
            return Err(silent(stream, end));
        }
    }
}

/// The ids that were read so far, and how far they are all of them.
struct Collected {
    from: Position,
    most: usize,
    disorder: usize,
    ids: HashSet<IdDigest>,
    /// The latest positions, as many as may be out of order; the earliest of them on top.
    latest: BinaryHeap<Reverse<Place>>,
}

/// A position to be ordered.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place(Position);

impl Ord for Place {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.0.commit_lsn, self.0.ordinal).cmp(&(other.0.commit_lsn, other.0.ordinal))
    }
}

impl PartialOrd for Place {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Collected {
    fn new(from: Position) -> Self {
        Self { from, most: MOST, disorder: DISORDER, ids: HashSet::new(), latest: BinaryHeap::new() }
    }

    /// Takes one message. What stands before the place that publishing resumes from is of no interest.
    fn take(&mut self, id: Option<&str>, position: Option<Position>) {
        if position.is_some_and(|position| !self.from.at_or_before(&position)) {
            return;
        }
        self.ids.extend(id.map(IdDigest::of));
        if let Some(position) = position {
            self.latest.push(Reverse(Place(position)));
            if self.latest.len() > self.disorder {
                self.latest.pop();
            }
        }
    }

    fn is_full(&self) -> bool {
        self.ids.len() >= self.most && self.latest.len() >= self.disorder
    }

    /// All was read.
    fn whole(self) -> Stored {
        Stored { ids: self.ids, through: None }
    }

    /// More is there. An event that was not read may stand behind as many later ones as may be out of order, so only
    /// what lies before those is known to be all.
    fn part(self) -> Stored {
        let through = self.latest.peek().map(|Reverse(Place(position))| *position);
        Stored { ids: self.ids, through }
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
    use waljet_pipeline::History;

    use super::*;

    fn position(commit_lsn: u64) -> Position {
        let history = History { system_id: 1, timeline: 1 };
        Position { history, commit_lsn: waljet_pgoutput::Lsn(commit_lsn), ordinal: 0 }
    }

    fn collect(from: u64, most: usize, disorder: usize, lsns: &[u64]) -> (Vec<u64>, Option<u64>) {
        let mut collected = Collected { most, disorder, ..Collected::new(position(from)) };
        for lsn in lsns {
            if collected.is_full() {
                break;
            }
            collected.take(Some(&lsn.to_string()), Some(position(*lsn)));
        }
        let stored = if collected.is_full() { collected.part() } else { collected.whole() };
        let held = lsns.iter().copied().filter(|lsn| stored.ids.contains(&IdDigest::of(&lsn.to_string()))).collect();
        (held, stored.through.map(|through| through.commit_lsn.0))
    }

    #[test]
    fn what_stands_before_the_place_to_resume_from_takes_no_room() {
        assert_eq!(collect(100, 3, 1, &[1, 2, 3, 4, 5, 100, 101, 102, 103]), (vec![100, 101, 102], Some(102)));
        assert_eq!(collect(100, 3, 1, &[1, 2, 3, 100, 101]), (vec![100, 101], None));
    }

    #[test]
    fn a_part_is_whole_only_up_to_what_later_events_may_still_precede() {
        // 101 was overtaken by three and is not read any more: only up to 100 is it all.
        let (held, through) = collect(100, 4, 4, &[100, 102, 103, 104, 101]);
        assert_eq!((held, through), (vec![100, 102, 103, 104], Some(100)));
    }

    #[test]
    fn the_sequence_is_found_in_both_forms_of_the_reply_subject() {
        assert_eq!(stream_sequence("$JS.ACK.S.c.1.42.7.1700000000000000000.0"), Some(42));
        assert_eq!(stream_sequence("$JS.ACK._.acc.S.c.1.42.7.1700000000000000000.0"), Some(42));
        assert_eq!(stream_sequence("$JS.ACK._.acc.S.c.1.42.7.1700000000000000000.0.token"), Some(42));
        assert_eq!(stream_sequence("$JS.ACK.S"), None);
    }
}
