//! Fast mode: JetStream fast-ingest batches whose gaps end them (ADR-50, nats-server 2.14).
//!
//! ```text
//! send ─► queue ─► batch: n = 1 … len, the last one commits ─► its end: { seq, count } ─► next batch
//!
//! reply subject   <prefix><batch id>.<flow>.fail.<n>.<op>.$FI
//! op              0 begins, 1 goes on, 2 is the last message, 4 asks how far it is
//! answers         ack: so many are in; gap, err: it ends here; at the end, how many came in
//! ```
//!
//! The broker stores a message of a batch only if it stored all before it. Nothing ties one batch to the next, so the
//! next begins when the one before has ended with all of its messages in; what is sent meanwhile waits in the queue.
//! A batch is always sent whole and ends with a commit, so none is ever idle, and a lone message costs one round trip.
//!
//! A batch of an earlier connection may still arrive when a later one is under way. The broker refuses its messages by
//! their ids; and where the stream is ours alone, by the sequence that the stream must be at, which a batch names with
//! its first message. What of an older batch comes behind its first message comes within the 10 s after which the
//! broker forgets a batch; so where the ids are forgotten about as soon, every message names its sequence.
//!
//! On a stream of several servers a message counts as come in, too, when an earlier copy of it is on its way through
//! the servers' log, from which a leader that dies can still take it back. So there only the end of a batch counts,
//! and only where the stream holds its last message as this batch stored it: in the log, all others stand before it.

use std::collections::VecDeque;
use std::time::Duration;

use async_nats::{HeaderMap, Subject};
use bytes::Bytes;
use tokio::time::Instant;
use waljet_pipeline::{Ack, Action, Fault, Position};

use crate::ack::Answer;
use crate::api::{Stored, StreamInfo};
use crate::provision::{BATCHES_SINCE, version};
use crate::{encode, error};

/// Acknowledgements within a batch come after so many messages at most: the server gives no fewer.
const MOST_FLOW: usize = 500;
/// What a batch adds to the reply subject at most, beside its id: number, flow, mode, n and op.
const SUFFIX: usize = ".-18446744073709551615.500.fail.18446744073709551615.2.$FI".len();
/// The shortest duplicate window that surely outlasts the broker's memory of a silent batch.
const ROOMY_WINDOW: Duration = Duration::from_secs(30);
/// After so long without an answer the broker is asked how far a batch is: a leader that has changed tells of what it
/// misses only when something more comes in.
const ASK_AFTER: Duration = Duration::from_secs(1);

/// Returns why the stream takes no batches, and what mends that; `None` where it does.
pub(crate) fn hindrance(server: &str, info: &StreamInfo, stream: &str) -> Option<(String, String)> {
    let (major, minor, _) = BATCHES_SINCE;
    if version(server).is_none_or(|version| version < BATCHES_SINCE) {
        let why = format!("nats-server is {server}, expected {major}.{minor} or newer");
        return Some((why, "upgrade nats-server, or set publisher.mode to auto".to_owned()));
    }
    if !info.config.allow_batched {
        let why = format!("stream {stream:?} does not allow batches (allow_batched)");
        let hint = format!("nats stream edit {stream} --interactive, and set allow_batched: true");
        return Some((why, hint));
    }
    let config = &info.config;
    if config.discard_new_per_subject && config.discard == "new" && config.max_msgs_per_subject > 0 {
        // What follows on other subjects in the batch would be stored all the same.
        let why = format!("stream {stream:?} refuses messages by their subjects (discard_new_per_subject)");
        return Some((why, format!("nats stream edit {stream} --max-msgs-per-subject=-1")));
    }
    None
}

/// How batches are made.
#[derive(Debug)]
pub(crate) struct Rules {
    /// Beginning of their ids, which nobody else may use.
    pub(crate) id: String,
    /// How many messages may be unacknowledged at once.
    pub(crate) window: usize,
    /// Several servers store the stream.
    pub(crate) replicated: bool,
    /// Others publish to the stream, so that its sequence says nothing.
    pub(crate) shared: bool,
    /// How long the broker remembers ids.
    pub(crate) duplicate_window: Duration,
}

impl Rules {
    /// The largest batch. Where only its end is an acknowledgement, two of them fill the window: one is on its way
    /// while the next is made.
    fn most(&self) -> usize {
        if self.replicated { (self.window / 2).max(1) } else { self.window }
    }

    /// Returns whether the message at this index names the sequence that the stream must be at.
    fn names_sequence(&self, index: usize) -> bool {
        !self.shared && (index == 0 || self.duplicate_window < ROOMY_WINDOW)
    }

    /// Messages from one acknowledgement within a batch to the next.
    fn flow(&self) -> usize {
        (self.window / 4).clamp(1, MOST_FLOW)
    }
}

/// A message that waits for its batch.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) subject: Subject,
    pub(crate) headers: HeaderMap,
    pub(crate) payload: Bytes,
    pub(crate) position: Position,
}

/// A message with its place in the batch.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) subject: Subject,
    /// The reply subject behind the generation's prefix.
    pub(crate) reply: String,
    pub(crate) headers: HeaderMap,
    pub(crate) payload: Bytes,
}

/// What an answer leads to.
#[derive(Debug)]
pub(crate) enum Turn {
    /// Nothing.
    On,
    /// Messages up to this one are stored.
    Stored(Ack),
    /// Whether the message of this sequence is the batch's last one decides.
    Prove(u64),
    /// The answer is none that a batch has of its own; the message that it is about.
    Other(Option<u64>, Answer),
    /// The batch has failed.
    Failed(Fault),
}

/// The batches of one generation.
#[derive(Debug)]
pub(crate) struct Batches {
    rules: Rules,
    queue: VecDeque<Queued>,
    /// The token of the queue's front.
    next: u64,
    begun: u64,
    batch: Option<Batch>,
    /// Whether somebody else's messages were seen, and not yet told of.
    foreign: bool,
}

/// The batch that is under way.
#[derive(Debug)]
struct Batch {
    /// The token of its first message.
    first: u64,
    len: u64,
    /// How many of its messages are known to be in.
    count: u64,
    /// The stream's last sequence before it, as far as it is known.
    base: u64,
    subject: Subject,
    /// Where its last message stands.
    last: Position,
    /// When it was sent, or got on.
    at: Instant,
    asked: Option<Instant>,
    /// The sequence at its end, while the message there is being read.
    proving: Option<u64>,
}

impl Batches {
    pub(crate) fn new(rules: Rules) -> Self {
        Self { rules, queue: VecDeque::new(), next: 0, begun: 0, batch: None, foreign: false }
    }

    /// Returns how long a reply subject behind the generation's prefix can be.
    pub(crate) fn reply_len(&self) -> usize {
        self.rules.id.len() + SUFFIX
    }

    pub(crate) fn push(&mut self, message: Queued) {
        self.queue.push_back(message);
    }

    /// Returns whether a batch could be filled.
    pub(crate) fn is_full(&self) -> bool {
        self.queue.len() >= self.rules.most()
    }

    /// Returns whether somebody else was seen to publish to the stream since the last call.
    pub(crate) fn take_foreign(&mut self) -> bool {
        std::mem::take(&mut self.foreign)
    }

    /// Makes a batch of what waits, unless one is under way. `base` is the stream's last sequence.
    pub(crate) fn begin(&mut self, base: u64, now: Instant) -> Option<Vec<Outgoing>> {
        let len = self.queue.len().min(self.rules.most());
        if self.batch.is_some() {
            return None;
        }
        let last = self.queue.get(len.checked_sub(1)?)?;
        self.batch = Some(Batch {
            first: self.next,
            len: len as u64,
            count: 0,
            base,
            subject: last.subject.clone(),
            last: last.position,
            at: now,
            asked: None,
            proving: None,
        });
        self.begun += 1;
        self.next += len as u64;
        let (id, flow, rules) = (self.id(), self.rules.flow(), &self.rules);
        let numbered = self.queue.drain(..len).enumerate().map(|(index, message)| {
            let Queued { subject, mut headers, payload, .. } = message;
            if rules.names_sequence(index) {
                encode::expect(&mut headers, base + index as u64);
            }
            let op = match index + 1 {
                n if n == len => 2,
                1 => 0,
                _ => 1,
            };
            Outgoing { subject, reply: format!("{id}.{flow}.fail.{}.{op}.$FI", index + 1), headers, payload }
        });
        Some(numbered.collect())
    }

    /// Returns when the batch has been silent for too long.
    pub(crate) fn deadline(&self, ack_timeout: Duration) -> Option<Instant> {
        self.batch.as_ref().map(|batch| batch.at + ack_timeout)
    }

    /// Returns when to ask how far the batch is.
    pub(crate) fn ask_at(&self) -> Option<Instant> {
        let batch = self.batch.as_ref().filter(|batch| batch.proving.is_none())?;
        Some(batch.asked.unwrap_or(batch.at) + ASK_AFTER)
    }

    /// Makes the message that asks how far the batch is: its subject, and its reply subject behind the prefix.
    pub(crate) fn ask(&mut self, now: Instant) -> Option<(Subject, String)> {
        let (id, flow) = (self.id(), self.rules.flow());
        let batch = self.batch.as_mut()?;
        batch.asked = Some(now);
        Some((batch.subject.clone(), format!("{id}.{flow}.fail.{}.4.$FI", batch.len)))
    }

    /// Takes in an answer that came to `reply`, a reply subject behind the generation's prefix.
    pub(crate) fn take(&mut self, reply: &str, answer: Answer, now: Instant) -> Turn {
        let Some((number, n)) = self.place(reply) else { return Turn::Other(None, Answer::Unknown) };
        // What is still said about a batch that is over changes nothing.
        if number < self.begun || self.batch.is_none() {
            return Turn::On;
        }
        let replicated = self.rules.replicated;
        let Some(batch) = self.batch.as_mut().filter(|batch| number == self.begun && n <= batch.len) else {
            return Turn::Other(None, Answer::Unknown);
        };
        match answer {
            Answer::BatchFlow { count } if count <= batch.len => {
                if count <= batch.count {
                    return Turn::On;
                }
                (batch.count, batch.at) = (count, now);
                if replicated {
                    return Turn::On;
                }
                // It does not name a sequence: this one is surely stored.
                Turn::Stored(Ack { token: batch.first + count - 1, sequence: batch.base, duplicate: false })
            }
            Answer::BatchOver { count, sequence, duplicate } if count == batch.len => {
                self.over(sequence, duplicate, now)
            }
            Answer::BatchOver { count, .. } if count < batch.len => {
                Turn::Failed(failed(&format!("the broker ended a batch after {count} of {} messages", batch.len)))
            }
            Answer::BatchGap { expected, found } => Turn::Failed(failed(&format!(
                "the broker missed messages {expected} to {} of a batch",
                found.saturating_sub(1)
            ))),
            // What a server says that takes the messages one by one, without an eye on their order.
            Answer::Stored { .. } => Turn::Failed(
                Fault::new(
                    error::STREAM_NO_BATCHES,
                    Action::Retry,
                    "the server that leads the stream knows no batches",
                )
                .hint("upgrade all nats-servers of the cluster to 2.14 or newer, or set publisher.mode to chain"),
            ),
            other => Turn::Other(Some(batch.first + n - 1), other),
        }
    }

    /// Takes in the end of a batch whose messages have all come in.
    fn over(&mut self, sequence: u64, duplicate: bool, now: Instant) -> Turn {
        let Some(batch) = &mut self.batch else { return Turn::On };
        // Each new message takes one sequence. A copy of a lone one is acknowledged only when it is stored.
        let ours = batch.base + batch.len;
        let counted = !self.rules.shared && sequence == ours;
        if !self.rules.shared && sequence > ours {
            (self.foreign, self.rules.shared) = (true, true);
        }
        if self.rules.replicated && batch.len > 1 && !counted {
            (batch.proving, batch.at) = (Some(sequence), now);
            return if sequence == 0 { self.prove(None) } else { Turn::Prove(sequence) };
        }
        self.done(sequence, duplicate)
    }

    /// Takes in the message that the stream holds at the sequence of a batch's end.
    pub(crate) fn prove(&mut self, found: Option<&Stored>) -> Turn {
        let Some((batch, sequence)) = self.batch.as_ref().and_then(|batch| Some((batch, batch.proving?))) else {
            return Turn::On;
        };
        if found.is_some_and(|found| found.position == Some(batch.last)) {
            return self.done(sequence, false);
        }
        let what = "copies of a batch's messages were there already, and may still be on their way into the stream";
        Turn::Failed(Fault::new(error::DUPLICATE_IN_PROCESS, Action::Retry, what))
    }

    fn done(&mut self, sequence: u64, duplicate: bool) -> Turn {
        let Some(batch) = self.batch.take() else { return Turn::On };
        // Of a batch the broker does not say so; but copies take no sequence.
        let copies = !self.rules.shared && sequence < batch.base + batch.len;
        let duplicate = if batch.len == 1 { duplicate } else { copies };
        let sequence = if sequence == 0 { batch.base } else { sequence };
        Turn::Stored(Ack { token: batch.first + batch.len - 1, sequence, duplicate })
    }

    /// Reads the number of the batch and of the message that a reply subject is about.
    fn place(&self, reply: &str) -> Option<(u64, u64)> {
        let mut tokens = reply.strip_prefix(self.rules.id.as_str())?.strip_prefix('-')?.split('.');
        let number = tokens.next()?.parse().ok()?;
        let n = tokens.nth(2)?.parse().ok()?;
        (n > 0).then_some((number, n))
    }

    fn id(&self) -> String {
        format!("{}-{}", self.rules.id, self.begun)
    }
}

/// The fault of a batch that ended before its last message.
fn failed(what: &str) -> Fault {
    Fault::new(error::BATCH, Action::Retry, what)
}

#[cfg(test)]
#[path = "fast_tests.rs"]
mod tests;
