//! The edge towards the database.

use std::future::Future;

use bytes::Bytes;
use waljet_pgoutput::Lsn;

use crate::{Fault, History, Position};

/// How far everything is stored, and in which history that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirmed {
    /// The cluster and timeline that the position belongs to.
    pub history: History,
    /// The end of a commit, or a keepalive's position.
    pub lsn: Lsn,
}

impl Confirmed {
    /// Returns whether this is `other`, or comes after it: in one cluster, all of a later timeline comes after an earlier one,
    /// whatever the positions are.
    #[must_use]
    pub fn follows(&self, other: Self) -> bool {
        self.history.system_id == other.history.system_id
            && (self.history.timeline, self.lsn) >= (other.history.timeline, other.lsn)
    }
}

/// Where reading begins, and what the slot is expected to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resume {
    /// How far this process, or the one before it, has confirmed.
    pub confirmed: Confirmed,
    /// By how many bytes the slot may stand past it: the WAL that storing that position made.
    pub own_wal: u64,
    /// Whether what the slot holds before it is read once more, as far as the slot went back: for a new process to find it in the
    /// stream.
    pub from_slot: bool,
    /// Whether the position was read from the store just now: then no other relay can have moved the slot past it.
    pub stored: bool,
}

/// A source of committed changes: one replication slot.
///
/// # Contract
///
/// - Frames come in the order in which the server sent them. A transaction is sent only once it is
///   committed, whole, and in commit order (`streaming` off).
/// - After [`connect`](Self::connect), every transaction whose commit LSN is at or past the `resume`
///   position comes, from its first row on; ones before it may come again.
/// - The server hears from the source often enough to keep the connection however long
///   [`next`](Self::next) is not called, and never of a position that [`report`](Self::report) was not told.
/// - A [`Frame::Keepalive`] says that all that was committed before its position has been given out as
///   frames before it, **and** that the publication held the outbox table all that time.
pub trait Source: Send {
    /// Connects, verifies that the server is the one it should be, and starts streaming.
    ///
    /// With no `resume` the slot's own
    /// position counts. Before the server hears of the position, it is made sure that it belongs to the server's
    /// history. Nothing is reported to it before the next [`report`](Self::report). Replaces a connection that is there.
    ///
    /// # Errors
    ///
    /// Any [`Fault`]; on [`Action::Retry`](crate::Action::Retry) the caller tries again after a backoff.
    ///
    /// # Cancel safety
    ///
    /// A cancelled call leaves the source unconnected.
    fn connect(&mut self, resume: Option<Resume>) -> impl Future<Output = Result<Identity, Fault>> + Send;

    /// Waits for the next frame.
    ///
    /// # Errors
    ///
    /// The connection is gone, or the server said something that cannot be gone past. The source is then
    /// unconnected.
    ///
    /// # Cancel safety
    ///
    /// No frame is lost by a cancelled call.
    fn next(&mut self) -> impl Future<Output = Result<Frame, Fault>> + Send;

    /// Sets the position to be reported as flushed, which never goes back. Does not wait.
    fn report(&mut self, flushed: Lsn);

    /// Reports `flushed` a last time, waits until the server has taken it, and disconnects. A server of another
    /// history is told nothing.
    ///
    /// # Errors
    ///
    /// The server did not take the position in time; it will then send some transactions again.
    fn close(&mut self, flushed: Option<Confirmed>) -> impl Future<Output = Result<(), Fault>> + Send;
}

/// One thing that a source says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// One `pgoutput` message, not decoded yet.
    Change {
        /// The server's position when it sent this.
        wal_end: Lsn,
        /// The message.
        data: Bytes,
    },
    /// All that was committed before this position has been given out.
    Keepalive {
        /// The position.
        wal_end: Lsn,
    },
    /// What was visible at some time, beside the stream.
    Horizon(Horizon),
}

/// What a reader of the database saw at some time: where everything before the position is stored, all rows that are visible in
/// the snapshot are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Horizon {
    /// A position past the commits of all that is visible.
    pub lsn: Lsn,
    /// What was visible.
    pub visible: Visible,
}

/// A snapshot, by which rows are told apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visible {
    /// The snapshot, as `pg_current_snapshot` writes it.
    pub snapshot: String,
    /// The commits of all that is not visible in it are past this position: where to begin to look for them.
    pub after: Lsn,
}

/// Who answered: `IDENTIFY_SYSTEM` and the timeline's history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cluster and its current timeline.
    pub history: History,
    /// Up to where the server has WAL.
    pub wal_end: Lsn,
    /// Where earlier timelines ended, as the timeline's history file has it: (timeline, switch point).
    pub switch_points: Vec<(u32, Lsn)>,
    /// The slot's confirmed position when the connection was made.
    pub slot_confirmed: Lsn,
    /// Whether another reader had the slot since this source read it last, and moved it: the events up to its
    /// position were that reader's to store.
    pub handed_over: bool,
}

impl Identity {
    /// Returns whether everything before `confirmed` is part of this server's history.
    #[must_use]
    pub fn includes(&self, confirmed: Confirmed) -> bool {
        let Confirmed { history: History { system_id, timeline }, lsn } = confirmed;
        let left = |(left, end): &(u32, Lsn)| *left == timeline && lsn <= *end;
        system_id == self.history.system_id
            && lsn <= self.wal_end
            && (timeline == self.history.timeline || self.switch_points.iter().any(left))
    }

    /// Returns whether `position` is part of this server's history: the same cluster, a timeline that
    /// this one descends from and had not left by then, and WAL that the server has.
    #[must_use]
    pub fn covers(&self, position: &Position) -> bool {
        position.history.system_id == self.history.system_id
            && position.commit_lsn <= self.wal_end
            && (position.history.timeline == self.history.timeline
                || self
                    .switch_points
                    .iter()
                    .any(|(timeline, end)| *timeline == position.history.timeline && position.commit_lsn < *end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            history: History { system_id: 7, timeline: 3 },
            wal_end: Lsn(1000),
            switch_points: vec![(1, Lsn(100)), (2, Lsn(500))],
            slot_confirmed: Lsn(600),
            handed_over: false,
        }
    }

    fn covers(system_id: u64, timeline: u32, lsn: u64) -> bool {
        let history = History { system_id, timeline };
        identity().covers(&Position { history, commit_lsn: Lsn(lsn), ordinal: 0 })
    }

    #[test]
    fn a_position_of_the_same_timeline_is_covered_up_to_the_end_of_the_wal() {
        assert!(covers(7, 3, 1000));
        assert!(!covers(7, 3, 1001));
    }

    #[test]
    fn a_position_of_an_earlier_timeline_is_covered_only_before_the_switch() {
        assert!(covers(7, 2, 499));
        assert!(!covers(7, 2, 500));
        assert!(!covers(7, 4, 10));
    }

    #[test]
    fn what_was_confirmed_up_to_a_switch_is_included_and_nothing_beyond() {
        let includes = |system_id, timeline, lsn| {
            identity().includes(Confirmed { history: History { system_id, timeline }, lsn: Lsn(lsn) })
        };
        assert!(includes(7, 3, 1000) && !includes(7, 3, 1001));
        assert!(includes(7, 2, 500) && !includes(7, 2, 501));
        assert!(!includes(7, 4, 10) && !includes(8, 3, 10));
    }

    #[test]
    fn a_later_timeline_follows_an_earlier_one_and_no_cluster_another() {
        let at = |system_id, timeline, lsn| Confirmed { history: History { system_id, timeline }, lsn: Lsn(lsn) };
        assert!(at(7, 1, 5).follows(at(7, 1, 5)) && at(7, 1, 6).follows(at(7, 1, 5)));
        assert!(!at(7, 1, 4).follows(at(7, 1, 5)));
        assert!(at(7, 2, 4).follows(at(7, 1, 5)) && !at(7, 1, 5).follows(at(7, 2, 4)));
        assert!(!at(8, 2, 9).follows(at(7, 1, 5)));
    }

    #[test]
    fn a_position_of_another_cluster_is_never_covered() {
        assert!(!covers(8, 3, 10));
    }
}
