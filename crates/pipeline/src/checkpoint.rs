//! The stored checkpoint: what is known of both ends, kept where a crash of the relay does not reach it.
//!
//! A slot has no identity: one that was dropped and created again, or moved, looks like one that was confirmed up to
//! there. So each position is stored *before* PostgreSQL is told of it, and a slot that stands past the stored position
//! was moved by somebody else. See `docs/decisions/0007`.

use std::future::{Future, ready};

use waljet_pgoutput::Timestamp;

use crate::{Confirmed, Fault, Visible};

/// How far everything is stored, and in which stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// The position, in its history. The slot was never told of a later one.
    pub confirmed: Confirmed,
    /// The stream as it was; `None` where it had not been looked at yet.
    pub stream: Option<StreamMark>,
    /// What is visible in this snapshot is stored; `None` where that was not found out yet. It is what tells the rows that a lost
    /// slot would have sent from those that are stored.
    pub visible: Option<Visible>,
    /// A gap that was found and that nobody has accepted yet.
    pub gap: Option<String>,
    /// When it was made.
    pub at: Timestamp,
}

/// A stream at some time, such that one which was recreated or went back can be told from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamMark {
    /// Its name.
    pub stream: String,
    /// When it was created, as the broker writes it.
    pub created: String,
    /// A sequence that it had stored.
    pub last_sequence: u64,
}

impl StreamMark {
    /// Takes what was learned later about the same stream, or all of it where it is another one.
    pub(crate) fn learn(&mut self, later: &Self) {
        if (&self.stream, &self.created) == (&later.stream, &later.created) {
            self.last_sequence = self.last_sequence.max(later.last_sequence);
        } else {
            self.clone_from(later);
        }
    }
}

/// What a save may replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replace {
    /// Only one that the new position [follows](Confirmed::follows). Another is left as it is, without an error: it came from
    /// another relay of the same slot.
    Earlier,
    /// Whatever is there: the operator's word.
    Anything,
}

impl Replace {
    /// Returns whether `new` may take the place of `stored`.
    #[must_use]
    pub fn permits(self, stored: Confirmed, new: Confirmed) -> bool {
        self == Self::Anything || new.follows(stored)
    }
}

/// Where checkpoints are kept.
///
/// # Contract
///
/// What [`save`](Self::save) returned `Ok` for survives a crash of the relay, and is what [`load`](Self::load) returns
/// from then on. A save that failed may have been taken all the same.
pub trait Checkpoints: Send + Sync {
    /// Where: `postgres`, `nats` or `none`.
    fn name(&self) -> &'static str;

    /// How many bytes of WAL a save makes itself. As far past the stored position the slot may be moved without another save:
    /// there is nothing but the save in between, and an idle relay would else write for ever. Less than an event takes.
    fn own_wal(&self) -> u64 {
        0
    }

    /// Reads the checkpoint of the slot.
    ///
    /// # Errors
    ///
    /// [`Action::Halt`](crate::Action::Halt) where a person has to create or permit something first;
    /// [`Action::Retry`](crate::Action::Retry) for all else.
    ///
    /// # Cancel safety
    ///
    /// May be cancelled.
    fn load(&self) -> impl Future<Output = Result<Option<Checkpoint>, Fault>> + Send;

    /// Writes the checkpoint of the slot.
    ///
    /// # Errors
    ///
    /// As for [`load`](Self::load).
    ///
    /// # Cancel safety
    ///
    /// A cancelled call may or may not have written it.
    fn save(&self, checkpoint: &Checkpoint, replace: Replace) -> impl Future<Output = Result<(), Fault>> + Send;
}

/// Keeps nothing: what happens to slot and stream between two runs of the relay cannot be noticed then.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoCheckpoints;

/// The name of [`NoCheckpoints`].
pub const NONE: &str = "none";

impl Checkpoints for NoCheckpoints {
    fn name(&self) -> &'static str {
        NONE
    }

    fn load(&self) -> impl Future<Output = Result<Option<Checkpoint>, Fault>> + Send {
        ready(Ok(None))
    }

    fn save(&self, _: &Checkpoint, _: Replace) -> impl Future<Output = Result<(), Fault>> + Send {
        ready(Ok(()))
    }
}
