//! The window with what fills it and what is known about it: the state of a lane.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{debug, error, info, warn};
use waljet_pgoutput::{Lsn, Timestamp};

use crate::error;
use crate::keys::Keys;
use crate::status::Monitor;
use crate::transaction::RefusedEvent;
use crate::window::{Budget, Entry, Refusal, Window};
use crate::{
    Ack, Action, Code, Fault, History, IdDigest, Identity, Opened, OutboundMessage, Position, PublisherMode, Rejection,
    Stored,
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
    /// A connection was made.
    Connected(Identity),
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
    budget: Arc<Budget>,
    pub(crate) monitor: Arc<Monitor>,
    confirmed: watch::Sender<Option<Lsn>>,
    clock: fn() -> Timestamp,
    drain_timeout: Duration,
    accept_gap: bool,
    identity: Option<Identity>,
    last_admitted: Option<Position>,
    /// Set when no more items come: by then everything must be stored.
    pub(crate) deadline: Option<Instant>,
    /// The number of the first entry that was not looked at in this generation.
    cursor: u64,
    /// An entry that was to be sent and could not be, yet.
    held: Option<u64>,
    /// Which keys have a message in flight; only used where the generation's order is by key.
    keys: Keys,
    /// The entries that were sent in this generation, by token; `None` once acknowledged.
    sent: VecDeque<Option<u64>>,
    /// The token of the front of `sent`.
    first_token: u64,
    /// How many of `sent` are not acknowledged.
    in_flight: usize,
    mode: PublisherMode,
    pub(crate) max_in_flight: usize,
    pub(crate) stored: Stored,
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
    pub(crate) confirmed: watch::Sender<Option<Lsn>>,
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
            confirmed: options.confirmed,
            clock: options.clock,
            drain_timeout: options.drain_timeout,
            accept_gap: options.accept_gap,
            identity: None,
            last_admitted: None,
            deadline: None,
            cursor: 0,
            held: None,
            keys: Keys::default(),
            sent: VecDeque::new(),
            first_token: 0,
            in_flight: 0,
            mode: PublisherMode::Serial,
            max_in_flight: 1,
            stored: Stored::default(),
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
            Some(Item::Connected(identity)) => self.connected(identity)?,
            None => self.deadline = Some(Instant::now() + self.drain_timeout),
        }
        Ok(())
    }

    /// Compares a new connection with what was given out over the ones before.
    fn connected(&mut self, identity: Identity) -> Result<(), Fault> {
        let before = self.identity.as_ref().map(|identity| identity.history.system_id);
        let now = identity.history.system_id;
        if let Some(before) = before.filter(|before| *before != now) {
            let message = format!("expected the database of system identifier {before}, found {now}");
            return Err(Fault::new(error::DATABASE_CHANGED, Action::Gap, message)
                .hint("find out what was done to the database; then start the relay again"));
        }
        if identity.handed_over {
            self.last_admitted = None;
        }
        if let Some(last) = self.last_admitted.filter(|last| !identity.covers(last)) {
            let Identity { history, wal_end, .. } = identity;
            let message =
                format!("the event at {last} is not part of the database's history {history} up to {wal_end}");
            return Err(Fault::new(error::DATABASE_CHANGED, Action::Gap, message)
                .hint("the server lost transactions whose events may be published; then start the relay again"));
        }
        if identity.handed_over {
            info!(slot_confirmed = %identity.slot_confirmed, "another relay had the slot: beginning where it left it");
            let (events, bytes) = self.window.clear();
            self.budget.release(events, bytes);
            self.reopen = true;
            self.tail_unchecked = true;
        }
        self.identity = Some(identity);
        Ok(())
    }

    /// The position of the first event that is not known to be stored.
    pub(crate) fn resume_from(&self) -> Position {
        let identity = self.identity.as_ref();
        let confirmed = self.window.confirmed().max(identity.map(|identity| identity.slot_confirmed));
        let start = Position {
            history: identity.map_or(History { system_id: 0, timeline: 0 }, |identity| identity.history),
            commit_lsn: confirmed.unwrap_or(Lsn::ZERO),
            ordinal: 0,
        };
        self.window.oldest().map_or(start, |entry| entry.position)
    }

    pub(crate) fn begin(&mut self, opened: Opened) -> Result<(), Fault> {
        let first = std::mem::take(&mut self.tail_unchecked);
        if first {
            self.check_tail(&opened)?;
        }
        let stored = opened.stored.ids.len();
        let Opened { stream, mode, last_sequence, .. } = &opened;
        let tail = opened.tail.map(|tail| tail.to_string()).unwrap_or_default();
        if first || self.logged.is_some() {
            info!(%stream, %mode, last_sequence, tail, stored, "stream open");
        } else {
            debug!(%stream, %mode, last_sequence, tail, stored, "stream open");
        }
        self.monitor.sink_opened(&opened);
        self.cursor = self.window.front();
        self.reopen = false;
        self.held = None;
        self.keys.clear();
        self.sent.clear();
        self.first_token = 0;
        self.in_flight = 0;
        self.mode = opened.mode;
        self.max_in_flight = opened.max_in_flight.max(1);
        self.stored = opened.stored;
        Ok(())
    }

    fn check_tail(&self, opened: &Opened) -> Result<(), Fault> {
        let (Some(tail), Some(identity)) = (&opened.tail, &self.identity) else { return Ok(()) };
        if identity.covers(tail) {
            return Ok(());
        }
        let Identity { history, wal_end, .. } = identity;
        let stream = &opened.stream;
        let message = format!(
            "the last event in stream {stream:?} is at {tail}, which is not part of the database's history {history} up to {wal_end}"
        );
        if self.accept_gap {
            warn!(error = message, "gap accepted by the operator");
            return Ok(());
        }
        Err(Fault::new(error::STREAM_AHEAD, Action::Gap, message)
            .hint("use another stream for this database, or accept the gap with: waljet run --accept-gap"))
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
            entry.sent_at = Some(now);
            entry.attempts += 1;
            entry.refusal = None;
        }
        self.sent.push_back(Some(number));
        self.in_flight += 1;
    }

    pub(crate) fn refuse(&mut self, number: u64, fault: Fault) {
        if let Some(entry) = self.window.get_mut(number) {
            entry.refusal = Some(Refusal { fault, retry_at: Instant::now() + REFUSED_AGAIN });
        }
    }

    /// Holds an event that cannot be published, and shows that the lane stands there.
    pub(crate) fn blocked(&mut self, number: u64) {
        self.hold(number);
        let Some(entry) = self.window.get(number) else { return };
        let Some(refusal) = &entry.refusal else { return };
        let (position, fault) = (entry.position, &refusal.fault);
        self.monitor.sink_blocked(fault);
        if log_now(&mut self.logged, fault.code) {
            let (code, error, hint) = (fault.code, fault.summary(), fault.hint.as_deref().unwrap_or(""));
            error!(%position, %code, error, hint, "event cannot be published; nothing behind it is");
        }
    }

    pub(crate) fn acknowledged(&mut self, ack: Ack) {
        self.monitor.turn();
        if self.mode == PublisherMode::Lanes {
            self.settle(ack.token, ack);
        } else {
            (self.first_token..=ack.token).for_each(|token| self.settle(token, ack));
        }
        while self.sent.front().is_some_and(Option::is_none) {
            self.sent.pop_front();
            self.first_token += 1;
        }
        self.logged = None;
        self.confirm();
    }

    /// Notes that the message of a token is stored, as the acknowledgement of this or a later one says.
    fn settle(&mut self, token: u64, ack: Ack) {
        let Some(number) = self.number(token) else { return };
        if let Some(slot) = self.index(token).and_then(|index| self.sent.get_mut(index)) {
            *slot = None;
            self.in_flight -= 1;
        }
        let duplicate = ack.duplicate && token == ack.token;
        if let Some(entry) = self.window.get(number) {
            observe(&self.monitor, entry, duplicate, (self.clock)());
            self.monitor.acknowledged(ack.sequence, entry.position);
            if duplicate && entry.attempts == 1 && log_now(&mut self.same_id_logged, error::SAME_ID) {
                let Position { commit_lsn, ordinal, .. } = entry.position;
                let sequence = ack.sequence;
                warn!(%commit_lsn, ordinal, sequence, code = %error::SAME_ID, "the stream had an event of this id already; the ids of two events may be the same");
            }
        }
        self.done(number);
    }

    /// Notes that the stream holds an entry already.
    pub(crate) fn found_stored(&mut self, number: u64) {
        self.monitor.metrics.skipped.inc();
        self.monitor.progress();
        self.done(number);
        self.confirm();
    }

    fn done(&mut self, number: u64) {
        if let Some(message) = self.window.get(number).and_then(|entry| entry.message.as_ref())
            && self.mode == PublisherMode::Lanes
        {
            self.keys.stored(message.key);
        }
        let (events, bytes) = self.window.done(number);
        self.budget.release(events, bytes);
    }

    fn index(&self, token: u64) -> Option<usize> {
        usize::try_from(token.checked_sub(self.first_token)?).ok()
    }

    fn number(&self, token: u64) -> Option<u64> {
        self.sent.get(self.index(token)?).copied().flatten()
    }

    /// Takes what the broker said, and returns it as a failure of the generation.
    pub(crate) fn rejected(&mut self, rejection: Rejection) -> Fault {
        let Rejection { token, fault } = rejection;
        match (fault.action, token.and_then(|token| self.number(token))) {
            (Action::Refuse, Some(number)) => {
                let again = Fault::new(fault.code, Action::Retry, fault.message.clone());
                self.refuse(number, fault);
                again
            }
            _ => fault,
        }
    }

    pub(crate) fn failed(&mut self, fault: &Fault) {
        self.monitor.sink_fault(fault);
        self.monitor.metrics.publish_retries.with_label_values(&[fault.code.0]).inc();
        let (code, error, hint) = (fault.code, fault.summary(), fault.hint.as_deref().unwrap_or(""));
        let waiting = self.window.len();
        if log_now(&mut self.logged, fault.code) {
            warn!(%code, error, hint, waiting, "publishing failed, beginning anew from the first event not known to be stored");
        } else {
            debug!(%code, error, waiting, "publishing failed again");
        }
        self.show();
    }

    fn confirm(&self) {
        let Some(lsn) = self.window.confirmed() else { return };
        let raised = self.confirmed.send_if_modified(|confirmed| {
            let raise = confirmed.is_none_or(|old| old < lsn);
            if raise {
                *confirmed = Some(lsn);
            }
            raise
        });
        if raised {
            self.monitor.confirmed(lsn);
        }
    }

    pub(crate) fn show(&self) {
        let oldest = self.window.oldest().map(|entry| entry.received_at);
        self.monitor.window(self.window.len(), self.window.bytes(), oldest);
    }
}

impl Stored {
    pub(crate) fn holds(&self, entry: &Entry) -> bool {
        let id = entry.message.as_ref().map(|message| message.id.as_str());
        !self.ids.is_empty() && id.is_some_and(|id| self.ids.contains(&IdDigest::of(id)))
    }
}

fn observe(monitor: &Monitor, entry: &Entry, duplicate: bool, now: Timestamp) {
    let metrics = &monitor.metrics;
    let counter = if duplicate { &metrics.duplicate } else { &metrics.stored };
    counter.inc();
    if let Some(sent_at) = entry.sent_at {
        metrics.publish_to_ack.observe(sent_at.elapsed().as_secs_f64());
    }
    if let Some(message) = &entry.message {
        let micros = now.0.saturating_sub(message.commit_time.0);
        metrics.commit_to_ack.observe(micros.max(0) as f64 / 1e6);
    }
}

/// Returns whether a failure of this code is to be logged now, and notes that it is.
fn log_now(logged: &mut Option<(Code, Instant)>, code: Code) -> bool {
    let now = Instant::now();
    let recent = logged.is_some_and(|(last, at)| last == code && now.duration_since(at) < LOG_AGAIN);
    if !recent {
        *logged = Some((code, now));
    }
    !recent
}

pub(crate) fn ticks() -> tokio::time::Interval {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
