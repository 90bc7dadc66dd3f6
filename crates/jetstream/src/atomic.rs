//! Atomic mode: all events of a transaction in one batch that the broker stores whole or not at all (ADR-50,
//! nats-server 2.12.1).
//!
//! ```text
//! send ─► unit: a transaction, or a part of one ─► batch: Nats-Batch-Sequence 1 … len, the last one commits
//!
//! headers         Nats-Batch-Id, Nats-Batch-Sequence, and Nats-Batch-Commit with the last message
//! reply subject   <prefix><token>
//! answers         nothing at all for a message that is held until the commit; { seq, count } for the commit
//! ```
//!
//! A unit of one message goes without a batch: it cannot be stored in part. Units follow each other without waiting
//! where the stream is ours alone, since each names with its first message the sequence that the stream must be at, so
//! that whatever follows a unit that failed is refused. Beside other publishers one unit is under way at a time.
//!
//! A batch is never sent again blindly. The broker refuses one that it has stored already, but also one in which an id is
//! that of another event; so the stream is read back first. A batch that the broker refuses for its ids although the
//! stream does not hold its events is sent message by message.

use std::collections::VecDeque;
use std::time::Duration;

use async_nats::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;
use waljet_pipeline::{Ack, Action, Fault, Placement, Position, headers};

use crate::ack::Answer;
use crate::api::StreamInfo;
use crate::fast::{Outgoing, Queued};
use crate::provision::{ATOMIC_SINCE, version};
use crate::{encode, error};

/// Messages of a batch at most, unless the server is configured for fewer.
const MOST: usize = 1000;
/// Batches under way at most. More gain nothing, and the server holds 50 of a stream at most.
const BATCHES: usize = 4;
/// So many refusals of a batch for its ids, with the stream read back in between, mean that its events cannot be stored
/// together. The first may be about an earlier copy that was still being stored.
const REFUSALS: u32 = 2;

/// The error of a batch that holds a duplicate.
const DUPLICATE: u64 = 10201;
/// The error of a batch that is too large.
const TOO_LARGE: u64 = 10199;

const BATCH_ID: HeaderName = HeaderName::from_static("Nats-Batch-Id");
const BATCH_SEQUENCE: HeaderName = HeaderName::from_static("Nats-Batch-Sequence");
const BATCH_COMMIT: HeaderName = HeaderName::from_static("Nats-Batch-Commit");

/// What the headers above, and the one that tells of a split, add to a message at most.
pub(crate) const ADDED: usize = "Nats-Batch-Id: \r\n".len()
    + 64
    + "Nats-Batch-Sequence: 1000\r\n".len()
    + "Nats-Batch-Commit: 1\r\n".len()
    + "Waljet-Atomic: split\r\n".len();

/// Returns why the stream takes no atomic batches, and what mends that; `None` where it does.
pub(crate) fn hindrance(server: &str, info: &StreamInfo, stream: &str) -> Option<(String, String)> {
    let (major, minor, patch) = ATOMIC_SINCE;
    if version(server).is_none_or(|version| version < ATOMIC_SINCE) {
        let why = format!("nats-server is {server}, expected {major}.{minor}.{patch} or newer");
        return Some((why, "upgrade nats-server, or set publisher.mode to auto".to_owned()));
    }
    if !info.config.allow_atomic {
        let why = format!("stream {stream:?} does not allow atomic batches (allow_atomic)");
        return Some((why, error::remedy(error::STREAM_NOT_ATOMIC, stream).unwrap_or_default()));
    }
    None
}

/// What is remembered from one generation to the next.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Messages of a batch at most, as far as the server has told.
    pub(crate) most: usize,
    /// The first event of a batch that was refused for its ids, and how often.
    refused: Option<(Position, u32)>,
    /// The last event of a transaction that was not stored whole.
    split: Option<Position>,
}

impl Default for Memory {
    fn default() -> Self {
        Self { most: MOST, refused: None, split: None }
    }
}

impl Memory {
    /// Takes in how a generation ended.
    pub(crate) fn ended(&mut self, units: &Units) {
        if let Some(most) = units.too_large {
            self.most = most.clamp(1, MOST);
        }
        let Some(position) = units.refused else { return };
        let before = self.refused.filter(|(refused, _)| *refused == position).map_or(0, |(_, times)| times);
        self.refused = Some((position, before + 1));
        if before + 1 == REFUSALS {
            tracing::warn!(
                %position,
                code = %error::BATCH_DUPLICATE,
                "the stream had an event of the same id, or two events of the transaction have one: they are published one by one"
            );
        }
    }

    /// Returns the first event of what cannot be stored together.
    pub(crate) fn singly(&self) -> Option<Position> {
        self.refused.filter(|(_, times)| *times >= REFUSALS).map(|(position, _)| position)
    }

    /// Counts what was stored: transactions whole and transactions in parts.
    pub(crate) fn count(&mut self, stored: Stored) -> (u64, u64) {
        let Stored { last, whole } = stored;
        if whole {
            return (1, 0);
        }
        let known = self.split.is_some_and(|split| split.commit_lsn == last.commit_lsn);
        self.split = Some(last);
        (0, u64::from(!known))
    }
}

/// A unit that was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    last: Position,
    whole: bool,
}

/// How units are made and sent.
#[derive(Debug)]
pub(crate) struct Rules {
    /// Beginning of the ids of batches, which nobody else may use.
    pub(crate) id: String,
    /// Others publish to the stream, so that its sequence says nothing.
    pub(crate) shared: bool,
    /// What begins with this event is sent message by message.
    pub(crate) singly: Option<Position>,
}

/// What an answer leads to.
#[derive(Debug)]
pub(crate) enum Turn {
    /// Nothing.
    On,
    /// A batch is stored.
    Stored(Ack),
    /// It is to be judged as that to a message without a batch.
    Alone,
    /// The batch has failed.
    Failed(Fault),
}

/// The units of one generation.
#[derive(Debug)]
pub(crate) struct Units {
    rules: Rules,
    waiting: VecDeque<Unit>,
    under_way: VecDeque<Sent>,
    /// The token of the next message to go out.
    next: u64,
    begun: u64,
    /// The sequence of the last message that went out, should all be stored.
    expected: u64,
    /// The first event of a batch that was refused for its ids.
    refused: Option<Position>,
    /// How many messages a batch may have, as the server told when it refused one.
    too_large: Option<usize>,
    stored: Option<Stored>,
}

/// What is to be stored together.
#[derive(Debug)]
struct Unit {
    messages: VecDeque<Queued>,
    complete: bool,
    whole: bool,
    /// It goes message by message.
    singly: bool,
}

/// A unit under way.
#[derive(Debug)]
struct Sent {
    /// The token of its first message.
    first: u64,
    len: u64,
    /// Where its first message stands.
    position: Position,
    stored: Stored,
    /// It is one message of a unit that goes message by message.
    singly: bool,
    at: Instant,
}

impl Units {
    /// Makes the units of a generation on a stream whose last sequence is `base`.
    pub(crate) fn new(rules: Rules, base: u64) -> Self {
        Self {
            rules,
            waiting: VecDeque::new(),
            under_way: VecDeque::new(),
            next: 0,
            begun: 0,
            expected: base,
            refused: None,
            too_large: None,
            stored: None,
        }
    }

    pub(crate) fn push(&mut self, message: Queued, placement: Placement) {
        if placement.first || self.waiting.back().is_none_or(|unit| unit.complete) {
            let singly = self.rules.singly == Some(message.position);
            let unit = Unit { messages: VecDeque::new(), complete: false, whole: placement.whole && !singly, singly };
            self.waiting.push_back(unit);
        }
        let Some(unit) = self.waiting.back_mut() else { return };
        unit.messages.push_back(message);
        unit.complete = placement.last;
    }

    /// Makes messages of all units that may go out now.
    pub(crate) fn begin(&mut self, now: Instant) -> Vec<Outgoing> {
        let mut all = Vec::new();
        while let Some(unit) = self.waiting.front_mut().filter(|unit| unit.complete) {
            let batches = self.under_way.iter().filter(|sent| sent.len > 1).count();
            // One that goes by itself may turn out to be a duplicate, which takes no sequence.
            let alone = self.under_way.back().is_some_and(|sent| sent.singly);
            let free = match (self.rules.shared || unit.singly || alone, unit.messages.len()) {
                (true, _) => self.under_way.is_empty(),
                (false, 1) => true,
                (false, _) => batches < BATCHES,
            };
            if !free {
                break;
            }
            let len = if unit.singly { 1 } else { unit.messages.len() };
            let messages: Vec<_> = unit.messages.drain(..len).collect();
            let (whole, singly) = (unit.whole, unit.singly);
            if unit.messages.is_empty() {
                self.waiting.pop_front();
            }
            self.send(messages, whole, now, &mut all);
            if let Some(sent) = self.under_way.back_mut() {
                sent.singly = singly;
            }
        }
        all
    }

    /// Numbers the messages of a unit.
    fn send(&mut self, messages: Vec<Queued>, whole: bool, now: Instant, all: &mut Vec<Outgoing>) {
        let (Some(first), Some(last)) = (messages.first(), messages.last()) else { return };
        let (len, position) = (messages.len(), first.position);
        let stored = Stored { last: last.position, whole };
        self.under_way.push_back(Sent { first: self.next, len: len as u64, position, stored, singly: false, at: now });
        self.begun += 1;
        let id = format!("{}-{}", self.rules.id, self.begun);
        for (index, message) in messages.into_iter().enumerate() {
            let Queued { subject, mut headers, payload, .. } = message;
            if index == 0 && !self.rules.shared {
                encode::expect(&mut headers, self.expected);
            }
            if len > 1 {
                number(&mut headers, &id, index + 1, len);
            }
            if !whole {
                headers.insert(headers::ATOMIC, "split");
            }
            all.push(Outgoing { subject, reply: self.next.to_string(), headers, payload });
            self.next += 1;
        }
        self.expected += len as u64;
    }

    /// Returns when the oldest unit has been silent for too long.
    pub(crate) fn deadline(&self, ack_timeout: Duration) -> Option<Instant> {
        self.under_way.front().map(|sent| sent.at + ack_timeout)
    }

    /// Takes in an answer to the message of `token`; `silent` where it says nothing.
    pub(crate) fn take(&mut self, token: u64, answer: &Answer, silent: bool, now: Instant) -> Turn {
        let oldest = self.under_way.front().map(|sent| sent.first);
        let Some(sent) = self.under_way.iter_mut().find(|sent| (sent.first..sent.first + sent.len).contains(&token))
        else {
            return Turn::Alone;
        };
        let (position, last) = (sent.position, sent.first + sent.len - 1);
        match answer {
            _ if sent.len == 1 => Turn::Alone,
            Answer::Unknown if silent && token != last => {
                sent.at = now;
                Turn::On
            }
            Answer::BatchOver { count, sequence, .. } if *count == sent.len && token == last => {
                if oldest != Some(sent.first) {
                    let what = "a batch was acknowledged before the one that was sent before it";
                    return Turn::Failed(Fault::new(error::ACK_ORDER, Action::Retry, what));
                }
                Turn::Stored(Ack { token, sequence: *sequence, duplicate: false })
            }
            // What a server says that takes the messages one by one.
            Answer::Stored { .. } => Turn::Failed(
                Fault::new(
                    error::STREAM_NOT_ATOMIC,
                    Action::Retry,
                    "the server that leads the stream knows no atomic batches",
                )
                .hint("upgrade all nats-servers of the cluster to 2.12.1 or newer, or set publisher.mode to auto"),
            ),
            Answer::Error { err_code: DUPLICATE, .. } => {
                self.refused = Some(position);
                Turn::Alone
            }
            Answer::Error { err_code: TOO_LARGE, description } => {
                let len = usize::try_from(sent.len).unwrap_or(MOST);
                let told = description.rsplit(|c: char| !c.is_ascii_digit()).find_map(|digits| digits.parse().ok());
                self.too_large = Some(told.filter(|most| *most < len).unwrap_or(len / 2));
                Turn::Alone
            }
            _ => Turn::Alone,
        }
    }

    /// Takes off what is stored; `last_sequence` is the stream's by now.
    pub(crate) fn acknowledged(&mut self, token: u64, last_sequence: u64, now: Instant) {
        while self.under_way.front().is_some_and(|sent| sent.first + sent.len <= token + 1) {
            self.stored = self.under_way.pop_front().map(|sent| sent.stored);
        }
        match self.under_way.front_mut() {
            Some(next) => next.at = next.at.max(now),
            // A duplicate took no sequence.
            None => self.expected = last_sequence,
        }
    }

    /// Returns what was stored last, once.
    pub(crate) fn take_stored(&mut self) -> Option<Stored> {
        self.stored.take()
    }
}

/// Sets the headers that make a message one of a batch.
fn number(headers: &mut HeaderMap, id: &str, n: usize, len: usize) {
    headers.insert(BATCH_ID, id);
    headers.insert(BATCH_SEQUENCE, HeaderValue::from(n as u64));
    if n == len {
        headers.insert(BATCH_COMMIT, "1");
    }
}

#[cfg(test)]
#[path = "atomic_tests.rs"]
mod tests;
