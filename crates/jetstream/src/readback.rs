//! What the stream holds past a position, by event id.
//!
//! ```text
//!   first_seq …… probe ………… probe …… probe … tail        positions grow along the stream,
//!                  ▲ before `from`: start behind it         give or take a window
//!                  └─ headers of all messages from here to the tail ─► ids
//! ```
//!
//! In lanes mode the keys overtake each other, so that an event may stand behind as many later ones as a window
//! holds. Both ends of what is read allow for that.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashSet, VecDeque};
use std::ops::ControlFlow;

use tokio::time::{Duration, Instant};
use waljet_pipeline::{Fault, IdDigest, Position, ReadBack, Stored};

use crate::api::{self, Api, StreamInfo};
use crate::options::{MAX_WINDOW, Matching};
use crate::scan::Scan;
use crate::tail::Tail;

/// Ids that one read-back returns at most: 9 MB of them.
const MOST: usize = 1 << 18;

/// How far behind the tail the first probe looks: a window, in the usual case of a relay that was killed.
const FIRST_STEP: u64 = 1024;

/// How much farther each next one does.
const STEP_FACTOR: u64 = 8;

/// How many later events may be stored before an event.
const DISORDER: usize = MAX_WINDOW;

/// Reads which events at or past `from` are stored, up to the tail, and finds out whether that is all.
///
/// # Errors
///
/// Any fault of a request; reading back is then to be tried again before anything is published.
pub(crate) async fn read_back(
    api: &Api,
    stream: &str,
    space: &str,
    info: &StreamInfo,
    tail: &Tail,
    from: &Position,
    matching: Matching,
) -> Result<(Stored, ReadBack), Fault> {
    let began = Instant::now();
    let mut scan = Scan::new(api, stream, space, info);
    let mut collected = Collected { matching, ..Collected::new(*from) };
    // Positions of another history cannot be compared: whatever it is, the pipeline judges the tail first.
    let past = tail.position.is_some_and(|position| from.at_or_before(&position));
    if !past && tail.position.is_some() {
        collected.before = Some(tail.sequence);
    }
    let start = if past {
        start(&mut scan, info, tail, from).await?.saturating_sub(DISORDER as u64).max(1)
    } else {
        (tail.sequence + 1).max(info.state.first_seq)
    };
    // What has an id and no position that can be read may be an event of another version of the relay.
    if past || tail.marked > tail.sequence {
        scan.read(start..=tail.marked, |message| {
            collected.take(message);
            if collected.is_full() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .await?;
    }
    let missing = collected.missing(api, stream, info).await?;
    let stored = if collected.is_full() { collected.part() } else { collected.whole() };
    let read_back = ReadBack {
        messages: tail.looked_at + scan.messages(),
        found: stored.ids.len() as u64,
        took: began.elapsed(),
        missing,
        duplicate_window: Duration::from_nanos(info.config.duplicate_window.try_into().unwrap_or(0)),
    };
    tracing::debug!(%stream, from = start, to = tail.marked, complete = stored.through.is_none(), "stream read back");
    Ok((stored, read_back))
}

/// Finds a sequence behind which all messages at or past `from` stand.
async fn start(scan: &mut Scan<'_>, info: &StreamInfo, tail: &Tail, from: &Position) -> Result<u64, Fault> {
    // The first message there that is ours says where the place is; one without a position says nothing.
    let mut before = async |sequence| {
        let message = scan.next(sequence).await?;
        Ok::<_, Fault>(message.and_then(|message| message.position).is_some_and(|found| !from.at_or_before(&found)))
    };
    let (mut low, mut high, mut step) = (info.state.first_seq.max(1), tail.sequence, FIRST_STEP);
    while let Some(sequence) = tail.sequence.checked_sub(step).filter(|sequence| *sequence > low) {
        if before(sequence).await? {
            low = sequence;
            break;
        }
        high = sequence;
        step = step.saturating_mul(STEP_FACTOR);
    }
    // The last step may have been a long one.
    while high - low > FIRST_STEP {
        let middle = low + (high - low) / 2;
        if before(middle).await? { low = middle } else { high = middle }
    }
    Ok(low)
}

/// The ids that were read so far, and how far they are all of them.
pub(crate) struct Collected {
    pub(crate) from: Position,
    matching: Matching,
    most: usize,
    disorder: usize,
    ids: HashSet<IdDigest>,
    /// The last ids without a position that can be read: of other publishers, and of other versions of the relay.
    unplaced: VecDeque<IdDigest>,
    /// Whether there were more of these.
    pub(crate) forgotten: bool,
    /// The latest positions, as many as may be out of order; the earliest of them on top.
    latest: BinaryHeap<Reverse<Place>>,
    /// The sequence of the last event before the place that publishing resumes from.
    pub(crate) before: Option<u64>,
    /// The first event past it.
    pub(crate) first: Option<Position>,
}

/// A position to be ordered.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place(Position);

impl Ord for Place {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.0.commit_lsn, self.0.ordinal).cmp(&(other.0.commit_lsn, other.0.ordinal))
    }
}

impl PartialOrd for Place {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Collected {
    pub(crate) fn new(from: Position) -> Self {
        Self {
            from,
            matching: Matching::Place,
            most: MOST,
            disorder: DISORDER,
            ids: HashSet::new(),
            unplaced: VecDeque::new(),
            forgotten: false,
            latest: BinaryHeap::new(),
            before: None,
            first: None,
        }
    }

    /// Takes one message. What stands before the place that publishing resumes from is of no interest.
    pub(crate) fn take(&mut self, message: &api::Stored) {
        let Some(position) = message.position else {
            self.unplaced.extend(message.id);
            if self.unplaced.len() > self.most {
                self.unplaced.pop_front();
                self.forgotten = true;
            }
            return;
        };
        if position.at_or_before(&self.from) {
            self.before = Some(message.sequence);
        } else {
            self.first.get_or_insert(position);
        }
        if self.from.at_or_before(&position) {
            self.ids.extend(message.id.map(|id| match self.matching {
                Matching::Place => id.at(position.commit_lsn),
                Matching::Id => id,
            }));
            self.latest.push(Reverse(Place(position)));
            if self.latest.len() > self.disorder {
                self.latest.pop();
            }
        }
    }

    fn is_full(&self) -> bool {
        // By id, any of them may be needed at any time.
        self.matching == Matching::Place && self.ids.len() >= self.most && self.latest.len() >= self.disorder
    }

    /// All was read.
    fn whole(mut self) -> Stored {
        self.ids.extend(self.unplaced);
        Stored { ids: self.ids, ..Stored::default() }
    }

    /// More is there. An event that was not read may stand behind as many later ones as may be out of order, so only
    /// what lies before those is known to be all.
    fn part(mut self) -> Stored {
        self.ids.extend(self.unplaced);
        let through = self.latest.peek().map(|Reverse(Place(position))| *position);
        Stored { ids: self.ids, through, ..Stored::default() }
    }
}

#[cfg(test)]
mod tests {
    use waljet_pipeline::History;

    use super::*;

    fn position(commit_lsn: u64) -> Position {
        let history = History { system_id: 1, timeline: 1 };
        Position { history, commit_lsn: waljet_pgoutput::Lsn(commit_lsn), ordinal: 0 }
    }

    fn id_at(lsn: u64) -> IdDigest {
        IdDigest::of(&lsn.to_string()).at(waljet_pgoutput::Lsn(lsn))
    }

    fn collect(from: u64, most: usize, disorder: usize, lsns: &[u64]) -> (Vec<u64>, Option<u64>) {
        let mut collected = Collected { most, disorder, ..Collected::new(position(from)) };
        for lsn in lsns {
            if collected.is_full() {
                break;
            }
            let id = Some(IdDigest::of(&lsn.to_string()));
            collected.take(&api::Stored { id, position: Some(position(*lsn)), ..api::Stored::default() });
        }
        let stored = if collected.is_full() { collected.part() } else { collected.whole() };
        let held = lsns.iter().copied().filter(|lsn| stored.ids.contains(&id_at(*lsn))).collect();
        (held, stored.through.map(|through| through.commit_lsn.0))
    }

    #[test]
    fn what_stands_before_the_place_to_resume_from_takes_no_room() {
        assert_eq!(collect(100, 3, 1, &[1, 2, 3, 4, 5, 100, 101, 102, 103]), (vec![100, 101, 102], Some(102)));
        assert_eq!(collect(100, 3, 1, &[1, 2, 3, 100, 101]), (vec![100, 101], None));
    }

    #[test]
    fn a_part_is_whole_only_up_to_what_later_events_may_still_precede() {
        // 101 was overtaken by three and is not read any more: only up to 100 is it all.
        let (held, through) = collect(100, 4, 4, &[100, 102, 103, 104, 101]);
        assert_eq!((held, through), (vec![100, 102, 103, 104], Some(100)));
    }

    #[test]
    fn an_id_without_a_position_counts_and_takes_no_more_room_than_others() {
        let mut collected = Collected { most: 2, ..Collected::new(position(100)) };
        let id = |text: &str| Some(IdDigest::of(text));
        for text in ["a", "b"] {
            collected.take(&api::Stored { id: id(text), unreadable: true, ..api::Stored::default() });
        }
        assert!(!collected.forgotten && !collected.is_full());
        collected.take(&api::Stored { id: id("c"), ..api::Stored::default() });
        assert!(collected.forgotten);
        let held = collected.whole().ids;
        assert!(["b", "c"].iter().all(|text| held.contains(&IdDigest::of(text))) && held.len() == 2);
    }

    #[test]
    fn the_same_id_in_another_transaction_is_another_event() {
        let mut collected = Collected::new(position(100));
        let id = IdDigest::of("1");
        collected.take(&api::Stored { id: Some(id), position: Some(position(101)), ..api::Stored::default() });
        let held = collected.whole().ids;
        let at = |lsn| held.contains(&id.at(waljet_pgoutput::Lsn(lsn)));
        assert!(at(101) && !at(102) && !held.contains(&id));
    }

    #[test]
    fn by_id_all_are_kept_wherever_they_stand() {
        let mut collected = Collected { matching: Matching::Id, most: 1, disorder: 1, ..Collected::new(position(100)) };
        for lsn in [99, 101, 102, 103] {
            let id = Some(IdDigest::of(&lsn.to_string()));
            collected.take(&api::Stored { id, position: Some(position(lsn)), ..api::Stored::default() });
        }
        assert!(!collected.is_full());
        let held = collected.whole().ids;
        assert!((101..104_u64).all(|lsn| held.contains(&IdDigest::of(&lsn.to_string()))) && held.len() == 3);
    }

    #[test]
    fn what_stands_around_the_place_to_resume_from_is_noted() {
        let mut collected = Collected::new(position(100));
        for (sequence, lsn) in [(1, 98), (2, 99), (3, 101), (4, 102)] {
            collected.take(&api::Stored { sequence, position: Some(position(lsn)), ..api::Stored::default() });
        }
        assert_eq!((collected.before, collected.first), (Some(2), Some(position(101))));
        // The very event is kept: nothing before it matters.
        let mut collected = Collected::new(position(100));
        collected.take(&api::Stored { sequence: 7, position: Some(position(100)), ..api::Stored::default() });
        assert_eq!((collected.before, collected.first), (Some(7), None));
    }
}
