//! The edge towards the broker: one lane to one stream.

use std::collections::HashSet;
use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::Serialize;
use waljet_pgoutput::Lsn;

use crate::{Fault, OutboundMessage, Position, ReadBack, StreamMark};

/// A lane to one stream that cannot be overtaken.
///
/// # Contract
///
/// A *generation* begins with [`open`](Self::open) and ends with the first error of any method. Within a
/// generation messages carry the tokens 0, 1, 2, … in the order of [`send`](Self::send), and:
///
/// - a message is stored only if all earlier ones of its generation are stored (by an earlier generation,
///   too); what was sent before a generation ended may still be stored later, under the same rule. In
///   [`PublisherMode::Lanes`] this rule does not hold, and the caller keeps one message of a key in flight;
/// - an acknowledgement of a generation that has ended is never given out;
/// - a message that is in the stream already, by its id, counts as stored.
///
/// After an error the caller opens a new generation and sends again from the first message that is not
/// known to be stored.
pub trait Sink: Send {
    /// Begins a generation: connects where needed, verifies the stream and reads back what it holds.
    ///
    /// `from` is the position of the first event that is not known to be stored; the stream is read back
    /// from there, by event id, so that nothing is stored twice however long ago it was stored first. `seen` is the stream as
    /// it was before, by this relay or by the one before it.
    ///
    /// # Errors
    ///
    /// Any [`Fault`]; on [`Action::Retry`](crate::Action::Retry) the caller tries again after a backoff. A stream of that name
    /// that was created anew, or whose last sequence went back, is [`Action::Gap`](crate::Action::Gap).
    ///
    /// # Cancel safety
    ///
    /// A cancelled call leaves the sink without a generation.
    fn open(
        &mut self,
        from: &Position,
        seen: Option<&StreamMark>,
    ) -> impl Future<Output = Result<Opened, Fault>> + Send;

    /// Hands one message to the connection, without waiting for the broker. `token` counts from 0 in each
    /// generation. In [`PublisherMode::Atomic`], what `placement` ties together is stored together; the sink may keep
    /// it back until the last of it has come.
    ///
    /// # Errors
    ///
    /// A fault with [`Action::Refuse`](crate::Action::Refuse) is about this message: nothing of it was sent
    /// and the generation goes on, its next `send` using the same token. Any other ends the generation.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: a cancelled call may or may not have sent the message; open a new generation.
    fn send(
        &mut self,
        token: u64,
        message: &OutboundMessage,
        placement: Placement,
    ) -> impl Future<Output = Result<(), Fault>> + Send;

    /// Says that no further message is at hand: what is buffered goes out now.
    ///
    /// # Errors
    ///
    /// As for [`send`](Self::send).
    fn flush(&mut self) -> impl Future<Output = Result<(), Fault>> + Send;

    /// Waits for the next acknowledgement.
    ///
    /// # Errors
    ///
    /// A [`Rejection`]; the generation has ended.
    ///
    /// # Cancel safety
    ///
    /// No acknowledgement is lost by a cancelled call.
    fn ack(&mut self) -> impl Future<Output = Result<Ack, Rejection>> + Send;
}

/// What is known at the start of a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The stream.
    pub stream: String,
    /// When it was created, as the broker writes it.
    pub created: String,
    /// How its order is kept.
    pub mode: PublisherMode,
    /// The stream's last sequence.
    pub last_sequence: u64,
    /// The position of the last event of a relay that the stream holds; `None` where it does not hold one.
    pub tail: Option<Position>,
    /// The events at or past the position that the generation was opened from.
    pub stored: Stored,
    /// What it took to find that out, and what the stream no longer tells.
    pub read_back: ReadBack,
    /// How many messages may be unacknowledged at once in this generation.
    pub max_in_flight: usize,
    /// How many messages can be stored together; 1 in all modes but [`PublisherMode::Atomic`].
    pub max_batch: usize,
}

/// Where a message stands among those that are to be stored together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// It is the first of them.
    pub first: bool,
    /// It is the last of them.
    pub last: bool,
    /// Together they are all events of a transaction.
    pub whole: bool,
}

impl Placement {
    /// A message that is tied to no other.
    pub const ALONE: Self = Self { first: true, last: true, whole: true };
}

/// Which events are stored already, by id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// The digests of their ids, [`at`](IdDigest::at) their transactions; without those where a message does not say its own.
    pub ids: HashSet<IdDigest>,
    /// How far was read. `None` where all was; otherwise events past this position may be stored too, and
    /// the next generation is to be opened from the first of them.
    pub through: Option<Position>,
    /// What was committed before this is stored, whatever the stream holds by now: the stored checkpoint says so. Not the sink's to
    /// set.
    pub before: Option<Lsn>,
}

/// 128 bits of an event id: enough to hold millions of ids in little memory, and for no two of them to
/// be taken for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IdDigest(u64, u64);

impl IdDigest {
    /// Digests an event id.
    #[must_use]
    pub fn of(id: &str) -> Self {
        let half = |salt: u64| {
            let mut hasher = DefaultHasher::new();
            (salt, id).hash(&mut hasher);
            hasher.finish()
        };
        Self(half(1), half(2))
    }

    /// The id as that of an event of one transaction. Two tables may number their events alike, and an id may be used again: only
    /// a message of the same transaction is the same event.
    #[must_use]
    pub fn at(self, commit_lsn: Lsn) -> Self {
        Self(self.0 ^ commit_lsn.0, self.1)
    }
}

/// How a lane keeps messages from overtaking each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PublisherMode {
    /// The events of a transaction in one batch, which the broker stores whole or not at all.
    Atomic,
    /// Pipelined in batches of the broker's own (fast-ingest), in which it refuses whatever follows a lost message.
    Fast,
    /// Pipelined, each message naming the sequence that must be the stream's last
    /// (`Nats-Expected-Last-Sequence`), so that whatever follows a lost one is refused.
    Chain,
    /// One message in flight for each ordering key, many keys at once: for a stream that others write to, too.
    Lanes,
    /// One message at a time.
    Serial,
}

impl fmt::Display for PublisherMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Atomic => "atomic",
            Self::Fast => "fast",
            Self::Chain => "chain",
            Self::Lanes => "lanes",
            Self::Serial => "serial",
        })
    }
}

/// An acknowledgement: the message and all before it in its generation are stored. In
/// [`PublisherMode::Lanes`] it is about the message alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// The message's token.
    pub token: u64,
    /// The stream sequence of the message.
    pub sequence: u64,
    /// Whether the broker had a message of this id already; for the last message of a batch, of any id in it.
    pub duplicate: bool,
}

/// Why a generation ended while waiting for acknowledgements.
#[derive(Debug)]
pub struct Rejection {
    /// The message that the broker refused, where it was about one.
    pub token: Option<u64>,
    /// What the broker said. With [`Action::Refuse`](crate::Action::Refuse) the message of `token` can never
    /// be stored; otherwise the same messages are to be sent again.
    pub fault: Fault,
}
