//! The tail of the stream: the last event of ours that it holds, and whether all before it are there.

use std::collections::VecDeque;

use async_nats::Client;
use futures_util::{StreamExt, stream};
use waljet_pipeline::{Fault, Position};

use crate::api::{Api, Stored, StreamInfo};
use crate::options::{DEFAULT_CONNECT_TIMEOUT, NatsOptions};

/// How far to look behind messages that are not ours or were deleted.
const WALK_BACK: u64 = 1024;
/// How many messages to look at after a generation that ended, at most.
const WALK_ON: u64 = 4096;
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
    /// Whether the event was stored on condition of the stream's last sequence.
    pub(crate) chained: bool,
}

/// Reads the tail of `stream` below `subject_space`, with the API's usual prefix.
///
/// # Errors
///
/// Any fault of a request.
pub async fn read_tail(client: &Client, stream: &str, subject_space: &str) -> Result<Tail, Fault> {
    read_tail_with(client, &NatsOptions::default(), stream, subject_space).await
}

/// Reads the tail of `stream` below `subject_space`, with the API prefix or domain of `nats`.
///
/// # Errors
///
/// Any fault of a request.
pub async fn read_tail_with(
    client: &Client,
    nats: &NatsOptions,
    stream: &str,
    subject_space: &str,
) -> Result<Tail, Fault> {
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
    stored.position.map(|position| Tail {
        position: Some(position),
        sequence: stored.sequence,
        foreign: false,
        chained: stored.chained,
    })
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

/// What was sent and not acknowledged when a generation ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unsettled {
    /// The last sequence that is known to be settled: what lies behind it was looked at or acknowledged.
    pub(crate) sequence: u64,
    /// The last position that is known to be stored.
    pub(crate) position: Option<Position>,
    /// What followed, in the order of sending.
    pub(crate) sent: VecDeque<Position>,
}

impl Unsettled {
    /// Adds what an earlier generation had sent beyond this one: it may still be on its way.
    pub(crate) fn with_earlier(mut self, earlier: &Self) -> Self {
        let beyond = match self.sent.back().or(self.position.as_ref()) {
            Some(last) => earlier.sent.iter().position(|sent| sent == last).map(|at| at + 1),
            None => Some(0),
        };
        if let Some(at) = beyond {
            self.sent.extend(earlier.sent.iter().skip(at));
        }
        self
    }

    /// Returns the tail, or what was acknowledged where that is later: events that are published behind a hole lie
    /// before ones that were stored already.
    pub(crate) fn or_later(&self, tail: Tail) -> Tail {
        match (self.position, tail.position) {
            (Some(known), Some(found)) if known.history == found.history && !known.at_or_before(&found) => {
                Tail { position: Some(known), ..tail }
            }
            _ => tail,
        }
    }
}

/// Looks whether what is stored since is the beginning of what was sent.
///
/// The broker compares numbers only: a message of another publisher can take the place of one of ours, and what
/// followed ours then fits behind it. The tail is moved back before such a hole, so that nothing is taken for stored
/// that is not; what lies behind it is recognised by its id.
pub(crate) async fn verified(api: &Api, stream: &str, tail: Tail, unsettled: &Unsettled) -> Result<Tail, Fault> {
    if tail.sequence <= unsettled.sequence || unsettled.sent.is_empty() {
        return Ok(tail);
    }
    let until = tail.sequence.min(unsettled.sequence.saturating_add(WALK_ON));
    let mut found = Vec::new();
    let mut reads = reads(api, stream, unsettled.sequence + 1..=until);
    while let Some(read) = reads.next().await {
        found.push(read?);
    }
    Ok(judge(tail, unsettled, &found))
}

/// Judges what was found at the sequences behind the last settled one; `None` stands for a deleted message.
fn judge(tail: Tail, unsettled: &Unsettled, found: &[Option<Stored>]) -> Tail {
    // Only a message of somebody else can hide a hole: without one, the numbers cannot have fitted.
    if found.iter().flatten().all(|stored| stored.position.is_some()) {
        return tail;
    }
    let mut settled =
        Tail { position: unsettled.position, sequence: unsettled.sequence, foreign: true, chained: tail.chained };
    let mut sent = unsettled.sent.iter();
    for stored in found {
        match stored {
            // Deleted since, and most likely ours.
            None => _ = sent.next(),
            Some(Stored { position: None, .. }) => {}
            Some(Stored { sequence, position: Some(position), .. }) => {
                let follows = match sent.next() {
                    Some(sent) => sent == position,
                    None => settled.position.is_none_or(|last| last.at_or_before(position)),
                };
                if !follows {
                    return settled;
                }
                settled.position = Some(*position);
                settled.sequence = *sequence;
            }
        }
    }
    // Either all was looked at, or so much of somebody else's that the rest is in doubt.
    settled
}

/// Looks whether messages of another publisher lie among the last ones of ours, where one can hide a hole.
///
/// For the first generation of a process, which does not know what the last one of the process before had sent.
pub(crate) async fn without_hidden_hole(
    api: &Api,
    stream: &str,
    tail: Tail,
    info: &StreamInfo,
    window: usize,
) -> Result<Tail, Fault> {
    if !tail.chained {
        return Ok(tail);
    }
    let until = tail.sequence.saturating_sub(window as u64).max(info.state.first_seq);
    let mut settled = Some(tail.clone());
    let mut foreign = false;
    let mut read_bytes = 0;
    let mut reads = reads(api, stream, (until..tail.sequence).rev());
    while let Some(read) = reads.next().await {
        let Some(stored) = read? else { continue };
        read_bytes += stored.size;
        match ours(&stored) {
            None => {
                foreign = true;
                settled = None;
            }
            Some(found) => {
                let chained = found.chained;
                settled.get_or_insert(Tail { foreign: true, ..found });
                if !chained {
                    break;
                }
            }
        }
        // More than any window holds in bytes.
        if read_bytes > MAX_BYTES_BACK {
            break;
        }
    }
    Ok(settled.unwrap_or(Tail { foreign, ..Tail::default() }))
}

/// How many bytes of answers to read when looking back.
const MAX_BYTES_BACK: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use waljet_pipeline::History;

    fn position(ordinal: u64) -> Position {
        Position {
            history: History { system_id: 1, timeline: 1 },
            commit_lsn: "0/10".parse().unwrap_or_default(),
            ordinal,
        }
    }

    fn unsettled(last: Option<u64>, sent: std::ops::Range<u64>) -> Unsettled {
        Unsettled { sequence: 0, position: last.map(position), sent: sent.map(position).collect() }
    }

    /// Messages at the sequences from 1 on: ours by ordinal, somebody else's, or deleted.
    #[derive(Clone, Copy)]
    enum At {
        Ours(u64),
        Foreign,
        Deleted,
    }
    use At::{Deleted, Foreign, Ours};

    /// Judges a stream in which `sent` is under way and nothing was settled before.
    fn judged(sent: std::ops::Range<u64>, stored: &[At]) -> (Option<u64>, u64) {
        let found: Vec<Option<Stored>> = (1..)
            .zip(stored)
            .map(|(sequence, at)| {
                let message = |position| Some(Stored { sequence, position, chained: true, size: 0 });
                match at {
                    Ours(ordinal) => message(Some(position(*ordinal))),
                    Foreign => message(None),
                    Deleted => None,
                }
            })
            .collect();
        let tail = found.iter().flatten().filter_map(ours).next_back().unwrap_or_default();
        let tail = judge(tail, &unsettled(None, sent), &found);
        (tail.position.map(|position| position.ordinal), tail.sequence)
    }

    #[test]
    fn a_prefix_of_what_was_sent_is_believed() {
        assert_eq!(judged(0..9, &[Ours(0), Ours(1), Ours(2)]), (Some(2), 3));
        assert_eq!(judged(0..2, &[Ours(0), Ours(1), Ours(2)]), (Some(2), 3));
    }

    #[test]
    fn a_message_whose_place_was_taken_is_not_taken_for_stored() {
        assert_eq!(judged(0..9, &[Ours(0), Foreign, Ours(2), Ours(3)]), (Some(0), 1));
        assert_eq!(judged(0..9, &[Foreign, Ours(1)]), (None, 0));
    }

    #[test]
    fn a_foreign_message_that_hides_nothing_does_no_harm() {
        assert_eq!(judged(0..9, &[Ours(0), Foreign, Ours(1)]), (Some(1), 3));
        assert_eq!(judged(0..9, &[Foreign, Foreign, Ours(0)]), (Some(0), 3));
        assert_eq!(judged(0..1, &[Ours(0), Foreign, Ours(1)]), (Some(1), 3));
    }

    #[test]
    fn a_purge_is_not_taken_for_a_hole() {
        assert_eq!(judged(0..9, &[Deleted, Deleted, Ours(2)]), (Some(2), 3));
        assert_eq!(judged(0..9, &[Deleted, Foreign, Ours(1)]), (Some(1), 3));
    }

    #[test]
    fn what_was_acknowledged_behind_a_hole_counts_as_the_tail() {
        let known = unsettled(Some(7), 8..9);
        let tail = |ordinal| Tail { position: Some(position(ordinal)), sequence: 5, ..Tail::default() };
        assert_eq!(known.or_later(tail(3)), tail(7));
        assert_eq!(known.or_later(tail(8)), tail(8));
        assert_eq!(known.or_later(Tail::default()), Tail::default());
    }

    #[test]
    fn what_an_earlier_generation_sent_beyond_is_remembered() {
        let merged = unsettled(Some(2), 3..5).with_earlier(&unsettled(None, 1..9));
        assert_eq!(merged.sent, unsettled(None, 3..9).sent);
        let merged = unsettled(Some(2), 3..3).with_earlier(&unsettled(None, 1..5));
        assert_eq!(merged.sent, unsettled(None, 3..5).sent);
        let merged = unsettled(Some(8), 9..12).with_earlier(&unsettled(None, 1..5));
        assert_eq!(merged.sent, unsettled(None, 9..12).sent);
    }
}
