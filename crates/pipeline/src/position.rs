//! Where an event stands in the history of its database.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use waljet_pgoutput::Lsn;

/// Which history a position belongs to.
///
/// LSNs of two clusters, or of two timelines past their fork, say nothing about each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct History {
    /// The cluster's system identifier, set by `initdb`.
    pub system_id: u64,
    /// The timeline, raised by each promotion.
    pub timeline: u32,
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.system_id, self.timeline)
    }
}

/// The position of one raw change: `<system id>:<timeline>:<commit LSN>:<ordinal>`.
///
/// The commit LSN is where the commit record starts, which `pgoutput` tells before the first row,
/// so that a transaction of any size has its positions while it is still being read. The ordinal
/// counts every change of the transaction from 0, before any filter. See `docs/decisions/0004`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Position {
    /// The cluster and timeline.
    pub history: History,
    /// Where the transaction's commit record starts.
    pub commit_lsn: Lsn,
    /// The number of the change within its transaction.
    pub ordinal: u64,
}

impl Position {
    /// Returns whether `self` is `other` or lies before it, which only means something within one cluster
    /// and for timelines that [`Identity::covers`](crate::Identity::covers) has found to be connected.
    #[must_use]
    pub fn at_or_before(&self, other: &Self) -> bool {
        (self.commit_lsn, self.ordinal) <= (other.commit_lsn, other.ordinal)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.history, self.commit_lsn, self.ordinal)
    }
}

/// The text is not a position.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected <system id>:<timeline>:<commit LSN>:<ordinal>, found {0:?}")]
pub struct ParsePositionError(String);

impl FromStr for Position {
    type Err = ParsePositionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(':');
        let mut parse = || {
            let position = Self {
                history: History { system_id: parts.next()?.parse().ok()?, timeline: parts.next()?.parse().ok()? },
                commit_lsn: parts.next()?.parse().ok()?,
                ordinal: parts.next()?.parse().ok()?,
            };
            parts.next().is_none().then_some(position)
        };
        parse().ok_or_else(|| ParsePositionError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(commit_lsn: u64, ordinal: u64) -> Position {
        let history = History { system_id: 7_431_000_000_000_000_001, timeline: 1 };
        Position { history, commit_lsn: Lsn(commit_lsn), ordinal }
    }

    #[test]
    fn a_position_survives_printing_and_parsing() {
        let text = "7431000000000000001:1:0/16B3748:12";
        assert_eq!(position(0x16B_3748, 12).to_string(), text);
        assert_eq!(text.parse(), Ok(position(0x16B_3748, 12)));
    }

    #[test]
    fn a_text_with_missing_foreign_or_extra_parts_is_refused() {
        for text in ["", "1:1:0/1", "1:1:0/1:0:0", "x:1:0/1:0", "1:1:1:0", "1:-1:0/1:0"] {
            assert!(text.parse::<Position>().is_err(), "{text}");
        }
    }

    #[test]
    fn commits_order_before_ordinals() {
        assert!(position(5, 9).at_or_before(&position(6, 0)));
        assert!(position(6, 0).at_or_before(&position(6, 0)));
        assert!(!position(6, 1).at_or_before(&position(6, 0)));
    }
}
