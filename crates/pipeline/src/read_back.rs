//! What reading a stream back took, what it could not tell, and what becomes of the events that come again.

use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};
use tracing::{info, warn};
use waljet_pgoutput::{Lsn, Timestamp};

use crate::status::Monitor;
use crate::window::Entry;
use crate::{Position, error};

/// What it took to find out which events a stream holds, and what it no longer tells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReadBack {
    /// Messages that were read.
    pub messages: u64,
    /// Event ids among them that count as stored.
    pub found: u64,
    /// How long it took, with the look at the stream's tail.
    #[serde(rename = "seconds", serialize_with = "seconds")]
    pub took: Duration,
    /// What the stream no longer holds of what would have to be known.
    #[serde(serialize_with = "text")]
    pub missing: Option<Missing>,
    /// How long the broker itself remembers ids.
    #[serde(skip)]
    pub duplicate_window: Duration,
}

/// Why a stream does not tell of every event at or past a position whether it was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// It held messages and none of those that are left is a relay's.
    Everything,
    /// The earliest event that is left stands here, past the position, and something before it was removed.
    Before(Position),
    /// Messages past the position were removed.
    Between,
    /// More messages have no position that can be read than ids are remembered of.
    Unplaced,
}

impl Missing {
    /// Returns whether an event at `position`, which was not found, may have been stored nevertheless.
    fn concerns(&self, position: &Position) -> bool {
        match self {
            Self::Before(first) => !first.at_or_before(position),
            Self::Everything | Self::Between | Self::Unplaced => true,
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Everything => f.write_str("the stream held messages, and none of a relay is left"),
            Self::Before(first) => write!(f, "what the stream held before the event at {first} was removed"),
            Self::Between => f.write_str("messages were removed from the stream past the position resumed from"),
            Self::Unplaced => f.write_str("too many messages of the stream have no position that can be read"),
        }
    }
}

/// All read-backs so far, in sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ReadBacks {
    /// How many read anything.
    pub count: u64,
    /// Messages that were read.
    pub messages: u64,
    /// Event ids among them that counted as stored.
    pub found: u64,
    /// How long they took.
    pub seconds: f64,
    /// Events that were sent although the stream no longer told whether it had them.
    pub unsure: u64,
}

/// Follows the events that come again after the stream was read back.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    read_back: ReadBack,
    /// Where the WAL ended when this relay came: what was committed later was never sent by another one.
    began_at: Lsn,
    skipped: u64,
    /// How many were skipped at the last tick.
    before: u64,
    warned: bool,
}

impl Replay {
    /// Notes where the WAL ended when this relay took the slot.
    pub(crate) fn begin_at(&mut self, wal_end: Lsn) {
        self.began_at = wal_end;
    }

    /// Begins a generation.
    pub(crate) fn open(&mut self, stream: &str, read_back: &ReadBack) {
        self.tell();
        let ReadBack { messages, found, took, .. } = read_back;
        if *messages > 0 {
            let seconds = took.as_millis() as f64 / 1e3;
            info!(%stream, messages, found, seconds, "stream read back; the events found are stored already");
        }
        // The same again is no news.
        self.warned &= self.read_back.missing == read_back.missing;
        self.read_back = read_back.clone();
    }

    /// Notes that an event was skipped.
    pub(crate) fn skipped(&mut self) {
        self.skipped += 1;
        if self.skipped == self.read_back.found {
            self.tell();
        }
    }

    /// Tells what was skipped once nothing was for a while.
    pub(crate) fn tick(&mut self) {
        if self.skipped == self.before {
            self.tell();
        }
        self.before = self.skipped;
    }

    /// Tells how many events were skipped since the last time.
    pub(crate) fn tell(&mut self) {
        let skipped = std::mem::take(&mut self.skipped);
        self.before = 0;
        if skipped > 0 {
            info!(skipped, "events that the stream held were skipped");
        }
    }

    /// Looks at an event that is sent: is it known not to be stored?
    pub(crate) fn sent(&mut self, entry: &Entry, now: Timestamp, monitor: &Monitor) {
        let (Some(missing), Some(message)) = (&self.read_back.missing, &entry.message) else { return };
        let known = entry.attempts == 0 && entry.position.commit_lsn >= self.began_at;
        let age = Duration::from_micros(now.0.saturating_sub(message.commit_time.0).max(0).unsigned_abs());
        // What was stored since it was committed is younger than that, and the broker remembers its id.
        if known || !missing.concerns(&entry.position) || age < self.read_back.duplicate_window {
            return;
        }
        monitor.metrics.read_back_unsure.inc();
        if !std::mem::replace(&mut self.warned, true) {
            let (position, code) = (entry.position, error::READ_BACK_INCOMPLETE);
            warn!(%code, %position, why = %missing, "the stream no longer tells which events it was given: they may be stored twice");
        }
    }
}

fn seconds<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(value.as_secs_f64())
}

fn text<S: Serializer>(value: &Option<Missing>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => serializer.collect_str(value),
        None => serializer.serialize_none(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use bytes::Bytes;
    use prometheus::Registry;
    use tokio::time::Instant;

    use super::*;
    use crate::{History, Metrics, OrderingKey, OutboundMessage, Subject, WindowOptions};

    const WINDOW: Duration = Duration::from_secs(10);

    fn position(commit_lsn: u64) -> Position {
        Position { history: History { system_id: 1, timeline: 1 }, commit_lsn: Lsn(commit_lsn), ordinal: 0 }
    }

    /// Sends one event and returns whether that counted as unsure.
    fn unsure(missing: Option<Missing>, commit_lsn: u64, attempts: u32, age_seconds: i64) -> bool {
        let monitor = Monitor::new(Metrics::register(&Registry::new()).unwrap(), WindowOptions::default());
        let mut replay = Replay::default();
        replay.begin_at(Lsn(100));
        replay.open("S", &ReadBack { missing, duplicate_window: WINDOW, ..ReadBack::default() });
        let mut window = crate::window::Window::default();
        window.admit(
            OutboundMessage {
                position: position(commit_lsn),
                id: "1".into(),
                subject: Subject::new("a".to_owned()).unwrap(),
                headers: Vec::new(),
                row_headers: Vec::new(),
                payload: Bytes::new(),
                key: OrderingKey::of("a", "b"),
                commit_time: Timestamp(0),
            },
            Instant::now(),
        );
        let entry = window.get_mut(0).unwrap();
        entry.attempts = attempts;
        replay.sent(entry, Timestamp(age_seconds * 1_000_000), &monitor);
        monitor.metrics.read_back_unsure.get() > 0
    }

    #[test]
    fn an_event_is_unsure_only_where_something_before_may_have_sent_it() {
        let all = Some(Missing::Everything);
        assert!(unsure(all, 99, 0, 60));
        // Nothing is missing; committed since this relay came; sent by this relay; the broker remembers the id.
        assert!(!unsure(None, 99, 0, 60));
        assert!(!unsure(all, 100, 0, 60));
        assert!(unsure(all, 100, 1, 60));
        assert!(!unsure(all, 99, 0, 9));
    }

    #[test]
    fn what_stands_behind_the_earliest_event_left_is_known() {
        let before = Some(Missing::Before(position(50)));
        assert!(unsure(before, 49, 0, 60));
        assert!(!unsure(before, 50, 0, 60));
        assert!(unsure(Some(Missing::Between), 50, 0, 60));
    }

    #[test]
    fn the_views_show_seconds_and_what_is_missing() {
        let read_back =
            ReadBack { messages: 3, found: 2, took: Duration::from_millis(1500), missing: None, ..ReadBack::default() };
        let shown = serde_json::to_value(&read_back).unwrap();
        assert_eq!(shown, serde_json::json!({ "messages": 3, "found": 2, "seconds": 1.5, "missing": null }));
        let missing = ReadBack { missing: Some(Missing::Before(position(5))), ..read_back };
        let expected = "what the stream held before the event at 1:1:0/5:0 was removed";
        assert_eq!(serde_json::to_value(&missing).unwrap()["missing"], expected);
    }
}
