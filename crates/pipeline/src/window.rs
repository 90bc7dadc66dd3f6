//! The events that are not known to be stored, in commit order, and the position that may be confirmed.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;
use waljet_pgoutput::Lsn;

use crate::{Fault, OutboundMessage, Position, RefusedEvent, WindowOptions};

/// One event of the window.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Where it stands.
    pub(crate) position: Position,
    /// What goes out, or nothing where it can never go out.
    pub(crate) message: Option<OutboundMessage>,
    /// Why it is not sent.
    pub(crate) refusal: Option<Refusal>,
    /// When it was received.
    pub(crate) received_at: Instant,
    /// When it was last handed to the connection.
    pub(crate) sent_at: Option<Instant>,
    /// How often it was handed to the connection.
    pub(crate) attempts: u32,
    /// Whether it is stored; it stays while something before it is not.
    pub(crate) done: bool,
    size: usize,
}

/// Why an event is not sent.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) fault: Fault,
    /// When to look again: the reason may be a limit of the broker's.
    pub(crate) retry_at: Instant,
}

/// The ordered in-flight window of one lane.
///
/// Entries are numbered from 0 in the order of admission, for the life of the window. Marks stand between
/// entries: when everything before a mark is done, its position may be confirmed.
#[derive(Debug, Default)]
pub(crate) struct Window {
    entries: VecDeque<Entry>,
    /// The number of the front entry.
    front: u64,
    marks: VecDeque<Mark>,
    /// The commit LSN of the last entry that left the front.
    left: Option<Lsn>,
    confirmed: Option<Lsn>,
    bytes: usize,
}

#[derive(Debug)]
struct Mark {
    /// Entries with a lower number come before the mark.
    before: u64,
    lsn: Lsn,
}

impl Window {
    /// Puts a message behind all others.
    pub(crate) fn admit(&mut self, message: OutboundMessage, now: Instant) {
        let size = message.size();
        self.push(message.position, Some(message), None, size, now);
    }

    /// Puts an event that can never be published behind all others.
    pub(crate) fn admit_refused(&mut self, event: RefusedEvent, now: Instant) {
        let refusal = Refusal { fault: event.fault, retry_at: now };
        self.push(event.position, None, Some(refusal), 0, now);
    }

    /// Sets a mark behind all entries.
    pub(crate) fn mark(&mut self, lsn: Lsn) {
        let before = self.end();
        match self.marks.back_mut() {
            // After a reconnect the server begins further back: that says nothing about what came since.
            Some(last) if last.lsn >= lsn => {}
            Some(last) if last.before == before => last.lsn = lsn,
            _ => self.marks.push_back(Mark { before, lsn }),
        }
        self.settle();
    }

    /// Notes that an entry is stored. Returns how many entries and bytes leave the front for it.
    pub(crate) fn done(&mut self, number: u64) -> (usize, usize) {
        if let Some(entry) = self.get_mut(number) {
            entry.done = true;
        }
        let (mut entries, mut bytes) = (0, 0);
        while self.entries.front().is_some_and(|entry| entry.done) {
            entries += 1;
            if let Some(entry) = self.entries.pop_front() {
                bytes += entry.size;
                self.left = Some(entry.position.commit_lsn);
            }
        }
        self.front += entries as u64;
        self.bytes -= bytes;
        self.settle();
        (entries, bytes)
    }

    /// Drops all entries and marks. Returns how many entries and bytes they were.
    pub(crate) fn clear(&mut self) -> (usize, usize) {
        let dropped = (self.entries.len(), self.bytes);
        self.front += dropped.0 as u64;
        self.entries.clear();
        self.marks.clear();
        self.left = None;
        // What comes next may lie before what was confirmed so far.
        self.confirmed = None;
        self.bytes = 0;
        dropped
    }

    /// Takes back the entries from this number on. Returns how many entries and bytes they were.
    pub(crate) fn withdraw(&mut self, number: u64) -> (usize, usize) {
        let at = usize::try_from(number.saturating_sub(self.front)).unwrap_or(usize::MAX).min(self.entries.len());
        let (mut entries, mut bytes) = (0, 0);
        for entry in self.entries.drain(at..) {
            entries += 1;
            bytes += entry.size;
        }
        self.bytes -= bytes;
        (entries, bytes)
    }

    /// Returns whether events of this transaction come before the entry, in the window or out of it by now.
    pub(crate) fn continues(&self, number: u64, commit_lsn: Lsn) -> bool {
        if number <= self.front {
            return self.left == Some(commit_lsn);
        }
        self.get(number - 1).is_some_and(|entry| entry.position.commit_lsn == commit_lsn)
    }

    /// Returns whether the transaction of the last entry has ended: a mark past its commit was set.
    pub(crate) fn is_complete(&self) -> bool {
        let Some(last) = self.entries.back() else { return true };
        self.marks.back().is_some_and(|mark| mark.lsn > last.position.commit_lsn)
    }

    /// Returns the position up to which everything is done: the end of a commit, or a keepalive's.
    pub(crate) fn confirmed(&self) -> Option<Lsn> {
        self.confirmed
    }

    pub(crate) fn get(&self, number: u64) -> Option<&Entry> {
        self.entries.get(usize::try_from(number.checked_sub(self.front)?).ok()?)
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut Entry> {
        self.entries.get_mut(usize::try_from(number.checked_sub(self.front)?).ok()?)
    }

    /// The number of the oldest entry.
    pub(crate) fn front(&self) -> u64 {
        self.front
    }

    /// The number that the next entry gets.
    pub(crate) fn end(&self) -> u64 {
        self.front + self.entries.len() as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn oldest(&self) -> Option<&Entry> {
        self.entries.front()
    }

    fn push(
        &mut self,
        position: Position,
        message: Option<OutboundMessage>,
        refusal: Option<Refusal>,
        size: usize,
        now: Instant,
    ) {
        self.bytes += size;
        self.entries.push_back(Entry {
            position,
            message,
            refusal,
            received_at: now,
            sent_at: None,
            attempts: 0,
            size,
            done: false,
        });
    }

    /// Takes the marks that everything before is done for.
    fn settle(&mut self) {
        while self.marks.front().is_some_and(|mark| mark.before <= self.front) {
            let lsn = self.marks.pop_front().map(|mark| mark.lsn);
            self.confirmed = self.confirmed.max(lsn);
        }
    }
}

/// The bounds of a window, shared between the half that fills it and the half that empties it.
///
/// An event that is larger than all bytes is let in when nothing else is there.
#[derive(Debug)]
pub(crate) struct Budget {
    options: WindowOptions,
    used: Mutex<Used>,
    released: Notify,
    starving: Notify,
}

#[derive(Debug, Default)]
struct Used {
    events: usize,
    bytes: usize,
    /// The size of the event that waits for room.
    waiting: Option<usize>,
}

impl Budget {
    pub(crate) fn new(options: WindowOptions) -> Self {
        Self { options, used: Mutex::default(), released: Notify::new(), starving: Notify::new() }
    }

    /// Waits until an event of this size has room, and takes it.
    ///
    /// # Cancel safety
    ///
    /// A cancelled call takes nothing.
    pub(crate) async fn take(&self, size: usize) {
        loop {
            let released = self.released.notified();
            if self.try_take(size) {
                return;
            }
            self.starving.notify_one();
            released.await;
        }
    }

    pub(crate) fn release(&self, events: usize, bytes: usize) {
        {
            let mut used = self.lock();
            used.events = used.events.saturating_sub(events);
            used.bytes = used.bytes.saturating_sub(bytes);
        }
        self.released.notify_waiters();
    }

    fn try_take(&self, size: usize) -> bool {
        let mut used = self.lock();
        let room = self.has_room(&used, size);
        if room {
            (used.events, used.bytes, used.waiting) = (used.events + 1, used.bytes + size, None);
        } else {
            used.waiting = Some(size);
        }
        room
    }

    /// Returns whether an event waits for room that only what is in the window can make.
    pub(crate) fn is_starving(&self) -> bool {
        let used = self.lock();
        used.waiting.is_some_and(|size| !self.has_room(&used, size))
    }

    /// Waits until an event has to wait for room.
    ///
    /// # Cancel safety
    ///
    /// Nothing is missed by a cancelled call.
    pub(crate) async fn starving(&self) {
        self.starving.notified().await;
    }

    fn has_room(&self, used: &Used, size: usize) -> bool {
        let WindowOptions { max_events, max_bytes } = self.options;
        used.events == 0 || (used.events < max_events && used.bytes + size <= max_bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;
    use waljet_pgoutput::Timestamp;

    use super::*;
    use crate::{History, OrderingKey, Subject};

    fn message(lsn: u64) -> OutboundMessage {
        let history = History { system_id: 1, timeline: 1 };
        OutboundMessage {
            position: Position { history, commit_lsn: Lsn(lsn), ordinal: 0 },
            commit_time: Timestamp(0),
            id: lsn.to_string(),
            key: OrderingKey::of("order", "1"),
            subject: Subject::new("s".into()).unwrap(),
            headers: Vec::new(),
            row_headers: Vec::new(),
            payload: Bytes::from_static(b"payload"),
        }
    }

    #[tokio::test]
    async fn a_mark_further_back_does_not_reopen_a_transaction_that_has_ended() {
        let mut window = Window::default();
        window.admit(message(10), Instant::now());
        window.mark(Lsn(11));
        window.admit(message(20), Instant::now());
        window.mark(Lsn(5));
        assert!(!window.is_complete());
        window.withdraw(1);
        assert!(window.is_complete());
        window.done(0);
        assert_eq!(window.confirmed(), Some(Lsn(11)));
    }

    #[tokio::test]
    async fn a_position_is_confirmed_only_when_everything_before_its_mark_is_done() {
        let mut window = Window::default();
        let now = Instant::now();
        window.admit(message(10), now);
        window.admit(message(10), now);
        window.mark(Lsn(11));
        window.admit(message(20), now);
        window.mark(Lsn(21));
        assert_eq!(window.done(1).0, 0);
        assert_eq!(window.done(2).0, 0);
        assert_eq!(window.confirmed(), None);
        assert_eq!(window.done(0).0, 3);
        assert_eq!(window.confirmed(), Some(Lsn(21)));
        assert_eq!((window.len(), window.bytes()), (0, 0));
    }

    #[tokio::test]
    async fn an_open_transaction_confirms_nothing_of_itself() {
        let mut window = Window::default();
        window.admit(message(10), Instant::now());
        assert_eq!(window.done(0).0, 1);
        assert_eq!(window.confirmed(), None);
        window.mark(Lsn(11));
        assert_eq!(window.confirmed(), Some(Lsn(11)));
    }

    #[tokio::test]
    async fn marks_without_entries_between_them_are_one() {
        let mut window = Window::default();
        window.admit(message(10), Instant::now());
        for lsn in 11..100_000 {
            window.mark(Lsn(lsn));
        }
        assert_eq!(window.marks.len(), 1);
        window.done(0);
        assert_eq!(window.confirmed(), Some(Lsn(99_999)));
    }

    #[tokio::test]
    async fn an_event_larger_than_the_budget_passes_alone() {
        let budget = Budget::new(WindowOptions { max_events: 2, max_bytes: 10 });
        assert!(budget.try_take(100));
        assert!(!budget.try_take(1));
        budget.release(1, 100);
        assert!(budget.try_take(5) && budget.try_take(5) && !budget.try_take(0));
    }

    proptest! {
        #[test]
        fn acknowledgements_in_any_order_confirm_exactly_the_finished_prefix(
            sizes in proptest::collection::vec(0u64..4, 1..20),
            seed in any::<u64>(),
        ) {
            let mut window = Window::default();
            let now = std::time::Instant::now().into();
            let mut owner = Vec::new();
            for (transaction, events) in sizes.iter().enumerate() {
                for _ in 0..*events {
                    window.admit(message(transaction as u64), now);
                    owner.push(transaction);
                }
                window.mark(Lsn(transaction as u64 + 1));
            }
            let mut pending: Vec<usize> = (0..owner.len()).collect();
            let mut random = fastrand::Rng::with_seed(seed);
            loop {
                let first_open = pending.iter().map(|number| owner[*number]).min().unwrap_or(sizes.len());
                let expected = (first_open > 0).then_some(Lsn(first_open as u64));
                prop_assert_eq!(window.confirmed(), expected);
                if pending.is_empty() {
                    break;
                }
                let number = pending.swap_remove(random.usize(..pending.len()));
                window.done(number as u64);
            }
            prop_assert_eq!(window.bytes(), 0);
        }
    }
}
