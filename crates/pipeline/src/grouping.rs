//! Which entries of the window are stored together: all events of a transaction, where they are not too many.

use tokio::time::Instant;

use crate::window::Window;
use crate::{Placement, Stored};

/// What decides about an entry's turn.
#[derive(Debug)]
pub(crate) struct View<'a> {
    pub(crate) window: &'a Window,
    pub(crate) stored: &'a Stored,
    /// Nothing more comes.
    pub(crate) ends: bool,
    /// Nothing more comes before something has left the window.
    pub(crate) full: bool,
}

/// Whether the turn of an entry has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It has, among these.
    Now(Placement),
    /// More of its transaction has to come first.
    Later,
    /// An entry of its transaction cannot be sent, so none of it is.
    Blocked(u64),
}

/// Follows which entries go together.
///
/// A transaction is kept back until its end has come, or until it turns out to be larger than a batch or the window;
/// then it goes in several parts, none of which is whole.
#[derive(Debug, Default)]
pub(crate) struct Grouping {
    /// How many entries may go together.
    most: u64,
    /// What goes together at present.
    group: Option<Group>,
    /// The entry that was looked at last, and how far its transaction was seen to be fit.
    seen: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Group {
    first: u64,
    end: u64,
    whole: bool,
}

/// Why a group ends where it does.
enum End {
    /// The transaction does.
    Complete,
    /// What follows of it cannot go along.
    Cut,
}

impl Grouping {
    pub(crate) fn new(most: usize) -> Self {
        Self { most: most.max(1) as u64, group: None, seen: None }
    }

    /// Says whether the turn of an entry has come. Entries are asked for in window order.
    pub(crate) fn place(&mut self, number: u64, view: &View<'_>) -> Turn {
        let current = self.group.filter(|group| (group.first..group.end).contains(&number));
        let Group { first, end, whole } = match current {
            Some(group) => group,
            None => match self.look(number, view) {
                Ok(group) => group,
                Err(turn) => return turn,
            },
        };
        Turn::Now(Placement { first: number == first, last: number + 1 == end, whole })
    }

    /// Returns the first entry of the transaction whose end has not come, where nothing of it was sent.
    pub(crate) fn unfinished(&self, window: &Window) -> Option<u64> {
        if window.is_complete() {
            return None;
        }
        let last = window.end().checked_sub(1)?;
        let commit_lsn = window.get(last)?.position.commit_lsn;
        let same = |number: &u64| window.get(*number).is_some_and(|entry| entry.position.commit_lsn == commit_lsn);
        let first = (window.front()..=last).rev().take_while(same).last()?;
        let begun = window.continues(first, commit_lsn) || self.group.is_some_and(|group| group.end > first);
        (!begun).then_some(first)
    }

    /// Makes a group that begins with this entry, where it can be made.
    fn look(&mut self, first: u64, view: &View<'_>) -> Result<Group, Turn> {
        let View { window, stored, ends, full } = *view;
        let Some(entry) = window.get(first) else { return Err(Turn::Later) };
        let (commit_lsn, now) = (entry.position.commit_lsn, Instant::now());
        let mut end = self.seen.filter(|(number, _)| *number == first).map_or(first, |(_, end)| end);
        let why = loop {
            let Some(entry) = window.get(end) else {
                self.seen = Some((first, end));
                if window.is_complete() {
                    break End::Complete;
                }
                // All that could make room for more is this transaction itself.
                if ends || (full && window.front() == first) {
                    break End::Cut;
                }
                return Err(Turn::Later);
            };
            if entry.position.commit_lsn != commit_lsn {
                break End::Complete;
            }
            let unknown = stored.through.is_some_and(|through| !entry.position.at_or_before(&through));
            if end - first >= self.most || entry.done || unknown || stored.holds(entry) {
                break End::Cut;
            }
            let refused = entry.refusal.as_ref().is_some_and(|refusal| refusal.retry_at > now);
            if entry.message.is_none() || refused {
                return Err(Turn::Blocked(end));
            }
            end += 1;
        };
        let whole = matches!(why, End::Complete) && !window.continues(first, commit_lsn);
        let group = Group { first, end: end.max(first + 1), whole };
        (self.group, self.seen) = (Some(group), None);
        Ok(group)
    }
}
