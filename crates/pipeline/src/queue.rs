//! The window with what fills it and what is known about it: the state of a lane.

mod opening;
mod outcome;

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tracing::debug;
use waljet_pgoutput::{Lsn, Timestamp};

use crate::grouping::{Grouping, Turn, View};
use crate::keeper::Progress;
use crate::keys::Keys;
use crate::read_back::Replay;
use crate::status::Monitor;
use crate::transaction::RefusedEvent;
use crate::window::{Budget, Entry, Refusal, Window};
use crate::{
    Checkpoint, Code, Fault, IdDigest, Identity, Opened, OutboundMessage, Placement, Position, PublisherMode, Sink,
    Stored, StreamMark,
};

/// How often the loop turns when nothing happens.
const TICK: Duration = Duration::from_secs(1);

/// How long an event that was refused waits until it is tried again: a limit may have been raised.
const REFUSED_AGAIN: Duration = Duration::from_secs(30);

/// The same failure is not logged again before this has passed.
const LOG_AGAIN: Duration = Duration::from_secs(30);

/// What the source's half hands over, in its order.
#[derive(Debug)]
pub(crate) enum Item {
    /// A connection was made, and what was stored of the one before.
    Connected(Identity, Option<Box<Checkpoint>>),
    /// An event.
    Message(Box<OutboundMessage>),
    /// An event that cannot be published.
    Refused(RefusedEvent),
    /// Once all before it is stored, this position may be confirmed.
    Mark(Lsn),
}

/// The window and what fills it.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) window: Window,
    pub(crate) items: mpsc::Receiver<Item>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) monitor: Arc<Monitor>,
    progress: watch::Sender<Progress>,
    clock: fn() -> Timestamp,
    drain_timeout: Duration,
    accept_gap: bool,
    identity: Option<Identity>,
    /// The stream as it was last seen.
    stream: Option<StreamMark>,
    last_admitted: Option<Position>,
    /// What was committed before is stored, as the checkpoint says.
    checkpoint: Option<Lsn>,
    /// Set when no more items come: by then everything must be stored.
    pub(crate) deadline: Option<Instant>,
    /// The number of the first entry that was not looked at in this generation.
    cursor: u64,
    /// An entry that was to be sent and could not be, yet.
    held: Option<u64>,
    /// Which keys have a message in flight; only used where the generation's order is by key.
    keys: Keys,
    /// What is to be stored together; only used where the generation's mode can do that.
    grouping: Grouping,
    /// The entries that were sent in this generation, by token; `None` once acknowledged.
    sent: VecDeque<Option<u64>>,
    /// The token of the front of `sent`.
    first_token: u64,
    /// How many of `sent` are not acknowledged.
    in_flight: usize,
    /// Whether this generation has sent an event that an earlier one had sent: then copies are no news.
    sent_again: bool,
    mode: PublisherMode,
    pub(crate) max_in_flight: usize,
    pub(crate) stored: Stored,
    /// What comes again after the stream was read back.
    pub(crate) replay: Replay,
    /// Whether the generation is to end, for all that it knew is void.
    pub(crate) reopen: bool,
    /// Whether the stream's tail is still to be compared with the database's history.
    tail_unchecked: bool,
    logged: Option<(Code, Instant)>,
    /// When an event was last found to have another's id.
    same_id_logged: Option<(Code, Instant)>,
}

/// What a queue needs to know.
pub(crate) struct QueueOptions {
    pub(crate) items: mpsc::Receiver<Item>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) monitor: Arc<Monitor>,
    pub(crate) progress: watch::Sender<Progress>,
    pub(crate) clock: fn() -> Timestamp,
    pub(crate) drain_timeout: Duration,
    pub(crate) accept_gap: bool,
}

impl Queue {
    pub(crate) fn new(options: QueueOptions) -> Self {
        Self {
            window: Window::default(),
            items: options.items,
            budget: options.budget,
            monitor: options.monitor,
            progress: options.progress,
            clock: options.clock,
            drain_timeout: options.drain_timeout,
            accept_gap: options.accept_gap,
            identity: None,
            stream: None,
            last_admitted: None,
            checkpoint: None,
            deadline: None,
            cursor: 0,
            held: None,
            keys: Keys::default(),
            grouping: Grouping::default(),
            sent: VecDeque::new(),
            first_token: 0,
            in_flight: 0,
            sent_again: false,
            mode: PublisherMode::Serial,
            max_in_flight: 1,
            stored: Stored::default(),
            replay: Replay::default(),
            reopen: false,
            tail_unchecked: true,
            logged: None,
            same_id_logged: None,
        }
    }

    /// Waits until the source was connected once: before that, nothing is known to compare the stream with.
    pub(crate) async fn first_connection(&mut self) -> Result<(), Fault> {
        let mut tick = ticks();
        while self.identity.is_none() && self.deadline.is_none() {
            tokio::select! {
                item = self.items.recv() => self.take(item)?,
                _ = tick.tick() => self.monitor.turn(),
            }
        }
        Ok(())
    }

    /// Takes items while something else is awaited. `None` when nothing is left to do, or the time is over.
    pub(crate) async fn meanwhile<F: Future>(&mut self, other: F) -> Result<Option<F::Output>, Fault> {
        let mut tick = ticks();
        tokio::pin!(other);
        loop {
            if self.finished() {
                return Ok(None);
            }
            tokio::select! {
                biased;
                output = &mut other => return Ok(Some(output)),
                item = self.items.recv(), if self.deadline.is_none() => {
                    self.take(item)?;
                    self.show();
                }
                _ = tick.tick() => self.monitor.turn(),
            }
        }
    }

    /// Opens a generation, taking items meanwhile.
    pub(crate) async fn open<K: Sink>(
        &mut self,
        sink: &mut K,
        from: &Position,
    ) -> Result<Option<Result<Opened, Fault>>, Fault> {
        let seen = self.stream.clone();
        self.meanwhile(sink.open(from, seen.as_ref())).await
    }

    pub(crate) fn finished(&self) -> bool {
        self.deadline.is_some_and(|deadline| self.window.is_empty() || Instant::now() >= deadline)
    }

    /// Takes what is there without waiting.
    pub(crate) fn take_ready(&mut self) -> Result<(), Fault> {
        while let Ok(item) = self.items.try_recv() {
            self.take(Some(item))?;
        }
        Ok(())
    }

    pub(crate) fn take(&mut self, item: Option<Item>) -> Result<(), Fault> {
        match item {
            Some(Item::Message(message)) => {
                self.last_admitted = Some(message.position);
                self.window.admit(*message, Instant::now());
            }
            Some(Item::Refused(event)) => {
                self.last_admitted = Some(event.position);
                self.window.admit_refused(event, Instant::now());
            }
            Some(Item::Mark(lsn)) => {
                self.window.mark(lsn);
                self.confirm();
            }
            Some(Item::Connected(identity, stored)) => self.connected(identity, stored)?,
            None => {
                self.deadline = Some(Instant::now() + self.drain_timeout);
                self.withdraw();
            }
        }
        Ok(())
    }

    /// Returns whether events are kept back until they can be stored together.
    pub(crate) fn groups(&self) -> bool {
        self.mode == PublisherMode::Atomic
    }

    /// Says whether the turn of an entry has come, and what it is to be stored together with.
    pub(crate) fn place(&mut self, number: u64) -> Turn {
        if !self.groups() {
            return Turn::Now(Placement::ALONE);
        }
        let view = View {
            window: &self.window,
            stored: &self.stored,
            ends: self.deadline.is_some(),
            full: self.items.is_empty() && self.budget.is_starving(),
        };
        self.grouping.place(number, &view)
    }

    /// Takes back a transaction whose end does not come any more, for the next start to publish it whole.
    fn withdraw(&mut self) {
        let Some(number) = self.groups().then(|| self.grouping.unfinished(&self.window)).flatten() else { return };
        let (events, bytes) = self.window.withdraw(number);
        self.budget.release(events, bytes);
        self.held = self.held.filter(|held| *held < number);
        self.cursor = self.cursor.min(number);
        debug!(events, "the end of a transaction was not received: it is left for the next start");
    }

    /// Takes the entry whose turn it is; one that cannot be sent has to be given back with [`hold`](Self::hold).
    pub(crate) fn next(&mut self) -> Option<u64> {
        if self.in_flight >= self.max_in_flight {
            return None;
        }
        if let Some(number) = self.held.take().or_else(|| self.keys.next_ready()) {
            return Some(number);
        }
        // What left the window may have taken entries along that were stored before.
        self.cursor = self.cursor.max(self.window.front());
        while let Some(entry) = self.window.get(self.cursor) {
            let number = self.cursor;
            self.cursor += 1;
            // Stored by an earlier generation, behind something that was not.
            if entry.done {
                continue;
            }
            let key = entry.message.as_ref().map(|message| message.key);
            let waits = self.mode == PublisherMode::Lanes && key.is_some_and(|key| !self.keys.offer(key, number));
            if !waits {
                return Some(number);
            }
        }
        None
    }

    /// Gives back an entry that cannot be sent yet; it comes first the next time.
    pub(crate) fn hold(&mut self, number: u64) {
        self.held = Some(number);
    }

    /// The token of the next message.
    pub(crate) fn next_token(&self) -> u64 {
        self.first_token + self.sent.len() as u64
    }

    /// Returns whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    pub(crate) fn was_sent(&mut self, number: u64, now: Instant) {
        if let Some(entry) = self.window.get_mut(number) {
            self.replay.sent(entry, (self.clock)(), &self.monitor);
            entry.sent_at = Some(now);
            entry.attempts += 1;
            entry.refusal = None;
            self.sent_again |= entry.attempts > 1;
        }
        self.sent.push_back(Some(number));
        self.in_flight += 1;
    }

    pub(crate) fn refuse(&mut self, number: u64, fault: Fault) {
        if let Some(entry) = self.window.get_mut(number) {
            entry.refusal = Some(Refusal { fault, retry_at: Instant::now() + REFUSED_AGAIN });
        }
    }

    pub(crate) fn show(&self) {
        let oldest = self.window.oldest().map(|entry| entry.received_at);
        self.monitor.window(self.window.len(), self.window.bytes(), oldest);
    }
}

impl Stored {
    pub(crate) fn holds(&self, entry: &Entry) -> bool {
        if self.before.is_some_and(|before| entry.position.commit_lsn < before) {
            return true;
        }
        let Some(message) = entry.message.as_ref().filter(|_| !self.ids.is_empty()) else { return false };
        let id = IdDigest::of(&message.id);
        self.ids.contains(&id.at(entry.position.commit_lsn)) || self.ids.contains(&id)
    }
}

pub(crate) fn ticks() -> tokio::time::Interval {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
