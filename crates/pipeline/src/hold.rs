//! The replay window: how far the slot is held back behind what is confirmed, so that the WAL of that time stays readable.
//!
//! ```text
//!  slot ◄──── window ────► confirmed ◄─ in flight ─► received
//!   └─ what the server may forget ends here
//! ```
//!
//! Any position at or before the confirmed one is safe to report: the server sends again whatever was committed past it. See
//! `docs/decisions/0008`.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;
use waljet_pgoutput::{Lsn, Timestamp};

use crate::{Checkpoint, Confirmed};

/// How many marks a window is divided into; the position moves in such steps.
const STEPS: u32 = 256;

/// How much WAL stays available behind the confirmed position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayWindow {
    /// For how long; zero for no window.
    pub age: Duration,
    /// How many bytes at most, whatever the time; `None` for no such limit.
    pub max_bytes: Option<u64>,
}

impl ReplayWindow {
    /// Whether the slot is held back at all.
    #[must_use]
    pub fn is_on(&self) -> bool {
        !self.age.is_zero()
    }
}

/// Decides how much of what is confirmed the server is told.
#[derive(Debug)]
pub(crate) struct Hold {
    window: ReplayWindow,
    /// Positions, and when they were confirmed; a step apart at least.
    marks: VecDeque<(Instant, Lsn)>,
    confirmed: Lsn,
    /// The last position that is old enough.
    aged: Lsn,
}

impl Hold {
    pub(crate) fn new(window: ReplayWindow) -> Self {
        Self { window, marks: VecDeque::new(), confirmed: Lsn::ZERO, aged: Lsn::ZERO }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.window.is_on()
    }

    /// Begins in a history, at a position that was confirmed before: by this process, or by one before it at the time of its
    /// checkpoint.
    pub(crate) fn begin(&mut self, start: Confirmed, stored: Option<&Checkpoint>, clock: Timestamp, now: Instant) {
        // Positions of another timeline are not to be told to this one's slot.
        self.marks.retain(|(_, lsn)| *lsn <= start.lsn);
        self.aged = self.aged.min(start.lsn);
        self.confirmed = start.lsn;
        let at = stored.filter(|stored| self.marks.is_empty() && stored.confirmed == start).map(|stored| stored.at);
        let age = at.map_or(0, |at| clock.0.saturating_sub(at.0).max(0).unsigned_abs());
        let since = now.checked_sub(Duration::from_micros(age).min(self.window.age)).unwrap_or(now);
        if self.marks.back().is_none_or(|(_, lsn)| *lsn < start.lsn) {
            self.marks.push_back((since, start.lsn));
        }
    }

    /// Takes a confirmed position.
    pub(crate) fn confirm(&mut self, lsn: Lsn, now: Instant) {
        self.confirmed = self.confirmed.max(lsn);
        let due = |(at, _): &(Instant, Lsn)| now.duration_since(*at) >= self.window.age / STEPS;
        if self.is_on() && self.marks.back().is_none_or(due) && self.marks.back().is_none_or(|(_, last)| *last < lsn) {
            self.marks.push_back((now, lsn));
        }
    }

    /// Returns how far the server may be told.
    pub(crate) fn released(&mut self, now: Instant) -> Lsn {
        if !self.is_on() {
            return self.confirmed;
        }
        while let Some((_, lsn)) =
            self.marks.front().filter(|(at, _)| now.saturating_duration_since(*at) >= self.window.age)
        {
            self.aged = *lsn;
            self.marks.pop_front();
        }
        let most = self.window.max_bytes.map_or(Lsn::ZERO, |most| Lsn(self.confirmed.0.saturating_sub(most)));
        self.aged.max(most)
    }

    /// How often to look whether more may be told.
    pub(crate) fn step(&self) -> Duration {
        (self.window.age / STEPS).clamp(Duration::from_millis(100), Duration::from_secs(10))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::History;

    const SECOND: Duration = Duration::from_secs(1);

    fn window(seconds: u64, max_bytes: Option<u64>) -> ReplayWindow {
        ReplayWindow { age: Duration::from_secs(seconds), max_bytes }
    }

    fn at(lsn: u64) -> Confirmed {
        Confirmed { history: History { system_id: 1, timeline: 1 }, lsn: Lsn(lsn) }
    }

    #[test]
    fn without_a_window_everything_confirmed_is_told() {
        let (mut hold, now) = (Hold::new(ReplayWindow::default()), Instant::now());
        hold.begin(at(10), None, Timestamp(0), now);
        assert_eq!(hold.released(now), Lsn(10));
        hold.confirm(Lsn(20), now);
        assert_eq!(hold.released(now), Lsn(20));
        assert!(hold.marks.len() <= 1);
    }

    #[test]
    fn a_position_is_told_once_it_was_confirmed_for_as_long_as_the_window() {
        let (mut hold, start) = (Hold::new(window(256, None)), Instant::now());
        hold.begin(at(10), None, Timestamp(0), start);
        for second in 1..=300 {
            let now = start + SECOND * second;
            hold.confirm(Lsn(10 + u64::from(second)), now);
            let released = hold.released(now);
            assert!(released <= Lsn(10 + u64::from(second).saturating_sub(256)), "{second}: {released}");
            // In steps of a 256th.
            assert!(second < 256 || released >= Lsn(10 + u64::from(second) - 257), "{second}: {released}");
        }
        // An idle hour later all of it.
        assert_eq!(hold.released(start + SECOND * 600), Lsn(310));
    }

    #[test]
    fn no_more_wal_is_held_than_the_limit() {
        let (mut hold, now) = (Hold::new(window(3600, Some(100))), Instant::now());
        hold.begin(at(1000), None, Timestamp(0), now);
        assert_eq!(hold.released(now), Lsn(900));
        hold.confirm(Lsn(5000), now);
        assert_eq!(hold.released(now), Lsn(4900));
    }

    #[test]
    fn a_new_process_counts_from_the_time_of_the_checkpoint() {
        let (mut hold, now) = (Hold::new(window(60, None)), Instant::now());
        let stored =
            Checkpoint { confirmed: at(500), stream: None, visible: None, gap: None, at: Timestamp(1_000_000) };
        hold.begin(at(500), Some(&stored), Timestamp(51_000_000), now);
        assert_eq!(hold.released(now), Lsn(0));
        // The machine may have been up for less than that.
        let early = hold.marks.front().is_some_and(|(at, _)| *at < now);
        assert_eq!(hold.released(now + SECOND * if early { 10 } else { 60 }), Lsn(500));
    }

    #[test]
    fn what_a_left_timeline_had_further_on_is_not_told_to_the_next() {
        let (mut hold, now) = (Hold::new(window(60, None)), Instant::now());
        hold.begin(at(500), None, Timestamp(0), now);
        hold.confirm(Lsn(900), now + SECOND);
        let next = Confirmed { history: History { system_id: 1, timeline: 2 }, lsn: Lsn(700) };
        hold.begin(next, None, Timestamp(0), now + SECOND * 2);
        assert_eq!(hold.released(now + SECOND * 61), Lsn(500));
        assert_eq!(hold.released(now + SECOND * 70), Lsn(700));
    }

    #[test]
    fn memory_is_bounded_however_often_something_is_confirmed() {
        let (mut hold, start) = (Hold::new(window(256, None)), Instant::now());
        for millis in 0..100_000 {
            hold.confirm(Lsn(millis), start + Duration::from_millis(millis));
        }
        assert!(hold.marks.len() <= 257, "{}", hold.marks.len());
    }
}
