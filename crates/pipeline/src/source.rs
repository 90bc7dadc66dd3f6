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
    /// `resume` is how far this process has confirmed, or `None` on the first call: then the slot's own
    /// position counts. Before the server hears of the position, it is made sure that it belongs to the server's
    /// history. Replaces a connection that is there.
    ///
    /// # Errors
    ///
    /// Any [`Fault`]; on [`Action::Retry`](crate::Action::Retry) the caller tries again after a backoff.
    ///
    /// # Cancel safety
    ///
    /// A cancelled call leaves the source unconnected.
    fn connect(&mut self, resume: Option<Confirmed>) -> impl Future<Output = Result<Identity, Fault>> + Send;

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
    fn a_position_of_another_cluster_is_never_covered() {
        assert!(!covers(8, 3, 10));
    }
}
