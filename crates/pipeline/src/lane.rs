//! The half that faces the broker: empties the window into the stream, generation by generation.
//!
//! ```text
//!            open                  first failure
//!  waiting ───────► generation ──────────────────► waiting (backoff) ─► …
//!                   send from the oldest event that is not known to be stored;
//!                   acknowledgements take events off the front
//! ```

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{debug, error, info, warn};
use waljet_pgoutput::{Lsn, Timestamp};

use crate::error;
use crate::retry::Backoff;
use crate::status::{EndState, Monitor};
use crate::transaction::RefusedEvent;
use crate::window::{Budget, Entry, Refusal, Window};
use crate::{Ack, Action, Code, Fault, IdDigest, Identity, Opened, OutboundMessage, Position, Rejection, Sink, Stored};

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

/// A lane: a sink and the window in front of it.
#[derive(Debug)]
pub(crate) struct Lane<K> {
    pub(crate) sink: K,
    pub(crate) backoff: Backoff,
    pub(crate) queue: Queue,
}

/// The window and what fills it.
#[derive(Debug)]
pub(crate) struct Queue {
    window: Window,
    items: mpsc::Receiver<Item>,
    budget: Arc<Budget>,
    monitor: Arc<Monitor>,
    confirmed: watch::Sender<Option<Lsn>>,
    clock: fn() -> Timestamp,
    drain_timeout: Duration,
    accept_gap: bool,
    identity: Option<Identity>,
    last_admitted: Option<Position>,
    /// Set when no more items come: by then everything must be stored.
    deadline: Option<Instant>,
    /// The number of the next entry to send.
    cursor: u64,
    /// The entries that were sent in this generation and are not acknowledged.
    sent: VecDeque<u64>,
    /// The token of the front of `sent`.
    first_token: u64,
    max_in_flight: usize,
    stored: Stored,
    logged: Option<(Code, Instant)>,
}

/// How a generation ended.
enum End {
    /// Nothing more comes and everything is stored, or the time for that is over.
    Finished,
    /// More of the stream has to be read back.
    ReadOn,
    /// A failure.
    Failed(Fault),
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

impl<K: Sink> Lane<K> {
    /// Publishes until no more items come and all are stored, or the drain timeout is over. Returns whether all
    /// are stored.
    ///
    /// # Errors
    ///
    /// A fault that only a person can mend.
    pub(crate) async fn run(&mut self) -> Result<bool, Fault> {
        self.queue.first_connection().await?;
        let mut first = true;
        loop {
            let Some(opened) = self.open().await? else { break };
            self.queue.begin(opened, first)?;
            first = false;
            let before = self.queue.window.front();
            let end = self.generation().await?;
            if self.queue.window.front() > before {
                self.backoff.reset();
            }
            match end {
                End::Finished => break,
                End::ReadOn => {}
                End::Failed(fault) => {
                    self.queue.failed(&fault);
                    let pause = self.backoff.next_pause(Instant::now());
                    if self.queue.meanwhile(tokio::time::sleep(pause)).await?.is_none() {
                        break;
                    }
                }
            }
        }
        self.queue.monitor.sink_state(EndState::Closed);
        Ok(self.queue.window.is_empty())
    }

    /// Opens a generation, trying for ever. `None` when there is nothing left to open it for.
    async fn open(&mut self) -> Result<Option<Opened>, Fault> {
        loop {
            if self.queue.finished() {
                return Ok(None);
            }
            self.queue.monitor.sink_state(EndState::Connecting);
            let from = self.queue.resume_from();
            let Some(opened) = self.queue.meanwhile(self.sink.open(&from)).await? else { return Ok(None) };
            match opened {
                Ok(opened) => {
                    self.backoff.succeeded(Instant::now());
                    return Ok(Some(opened));
                }
                Err(fault) if matches!(fault.action, Action::Halt | Action::Gap) => {
                    self.queue.failed(&fault);
                    return Err(fault);
                }
                Err(fault) => {
                    self.queue.failed(&fault);
                    let pause = self.backoff.next_pause(Instant::now());
                    if self.queue.meanwhile(tokio::time::sleep(pause)).await?.is_none() {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Sends and takes acknowledgements until the generation ends.
    async fn generation(&mut self) -> Result<End, Fault> {
        let mut tick = ticks();
        loop {
            self.queue.take_ready()?;
            match self.send().await {
                Ok(None) => {}
                Ok(Some(end)) => return Ok(end),
                Err(fault) => return Ok(End::Failed(fault)),
            }
            let queue = &mut self.queue;
            queue.show();
            if queue.finished() {
                return Ok(End::Finished);
            }
            tokio::select! {
                biased;
                // 1. Acknowledgements make room, and a refusal must stop the sending.
                ack = self.sink.ack() => match ack {
                    Ok(ack) => queue.acknowledged(ack),
                    Err(rejection) => return Ok(End::Failed(queue.rejected(rejection))),
                },
                // 2. More to send.
                item = queue.items.recv(), if queue.deadline.is_none() => queue.take(item)?,
                // 3. The loop turns at least this often: for its liveness, and to try refused events again.
                _ = tick.tick() => queue.monitor.turn(),
            }
        }
    }

    /// Sends what is ready and fits in. Returns an end where one is reached.
    async fn send(&mut self) -> Result<Option<End>, Fault> {
        let queue = &mut self.queue;
        let mut any = false;
        while queue.sent.len() < queue.max_in_flight {
            let number = queue.cursor;
            let Some(entry) = queue.window.get(number) else { break };
            if queue.stored.holds(entry) {
                queue.found_stored(number);
                continue;
            }
            if queue.stored.through.is_some_and(|through| !entry.position.at_or_before(&through)) {
                if queue.sent.is_empty() {
                    return Ok(Some(End::ReadOn));
                }
                break;
            }
            let now = Instant::now();
            let message = match (&entry.message, &entry.refusal) {
                (Some(message), None) => message,
                (Some(message), Some(refusal)) if refusal.retry_at <= now => message,
                _ => {
                    queue.blocked(number);
                    break;
                }
            };
            let token = queue.first_token + queue.sent.len() as u64;
            match self.sink.send(token, message).await {
                Ok(()) => {
                    queue.was_sent(number, now);
                    any = true;
                }
                Err(fault) if fault.action == Action::Refuse => {
                    queue.refuse(number, fault);
                    queue.blocked(number);
                    break;
                }
                Err(fault) => return Err(fault),
            }
        }
        if any {
            self.sink.flush().await?;
        }
        Ok(None)
    }
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
            sent: VecDeque::new(),
            first_token: 0,
            max_in_flight: 1,
            stored: Stored::default(),
            logged: None,
        }
    }

    /// Waits until the source was connected once: before that, nothing is known to compare the stream with.
    async fn first_connection(&mut self) -> Result<(), Fault> {
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
    async fn meanwhile<F: Future>(&mut self, other: F) -> Result<Option<F::Output>, Fault> {
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

    fn finished(&self) -> bool {
        self.deadline.is_some_and(|deadline| self.window.is_empty() || Instant::now() >= deadline)
    }

    /// Takes what is there without waiting.
    fn take_ready(&mut self) -> Result<(), Fault> {
        while let Ok(item) = self.items.try_recv() {
            self.take(Some(item))?;
        }
        Ok(())
    }

    fn take(&mut self, item: Option<Item>) -> Result<(), Fault> {
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
        if let Some(last) = self.last_admitted.filter(|last| !identity.covers(last)) {
            let Identity { history, wal_end, .. } = identity;
            let message =
                format!("the event at {last} is not part of the database's history {history} up to {wal_end}");
            return Err(Fault::new(error::DATABASE_CHANGED, Action::Gap, message)
                .hint("the server lost transactions whose events may be published; then start the relay again"));
        }
        self.identity = Some(identity);
        Ok(())
    }

    /// The position of the first event that is not known to be stored.
    fn resume_from(&self) -> Position {
        let identity = self.identity.as_ref();
        let confirmed = self.window.confirmed().max(identity.map(|identity| identity.slot_confirmed));
        let start = Position {
            history: identity.map_or(crate::History { system_id: 0, timeline: 0 }, |identity| identity.history),
            commit_lsn: confirmed.unwrap_or(Lsn::ZERO),
            ordinal: 0,
        };
        self.window.oldest().map_or(start, |entry| entry.position)
    }

    fn begin(&mut self, opened: Opened, first: bool) -> Result<(), Fault> {
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
        self.sent.clear();
        self.first_token = 0;
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

    fn was_sent(&mut self, number: u64, now: Instant) {
        if let Some(entry) = self.window.get_mut(number) {
            entry.sent_at = Some(now);
            entry.attempts += 1;
            entry.refusal = None;
        }
        self.sent.push_back(number);
        self.cursor += 1;
    }

    fn refuse(&mut self, number: u64, fault: Fault) {
        if let Some(entry) = self.window.get_mut(number) {
            entry.refusal = Some(Refusal { fault, retry_at: Instant::now() + REFUSED_AGAIN });
        }
    }

    /// Shows that the lane stands at an event that cannot be published.
    fn blocked(&mut self, number: u64) {
        let Some(entry) = self.window.get(number) else { return };
        let Some(refusal) = &entry.refusal else { return };
        let (position, fault) = (entry.position, &refusal.fault);
        self.monitor.sink_fault(fault, EndState::Blocked);
        if log_now(&mut self.logged, fault.code) {
            let (code, error, hint) = (fault.code, fault.summary(), fault.hint.as_deref().unwrap_or(""));
            error!(%position, %code, error, hint, "event cannot be published; nothing behind it is");
        }
    }

    fn acknowledged(&mut self, ack: Ack) {
        self.monitor.turn();
        while self.first_token <= ack.token {
            let Some(number) = self.sent.pop_front() else { return };
            let duplicate = ack.duplicate && self.first_token == ack.token;
            self.first_token += 1;
            let monitor = Arc::clone(&self.monitor);
            for entry in self.done(number) {
                observe(&monitor, &entry, duplicate, (self.clock)());
                monitor.acknowledged(ack.sequence, entry.position);
                if duplicate && entry.attempts == 1 {
                    let Position { commit_lsn, ordinal, .. } = entry.position;
                    let sequence = ack.sequence;
                    warn!(%commit_lsn, ordinal, sequence, "the stream had an event of this id already; the ids of two events may be the same");
                }
            }
        }
        self.logged = None;
        self.confirm();
    }

    /// Notes that the stream holds an entry already.
    fn found_stored(&mut self, number: u64) {
        self.cursor += 1;
        self.monitor.metrics.skipped.inc();
        self.done(number);
        self.confirm();
    }

    fn done(&mut self, number: u64) -> Vec<Entry> {
        let left: Vec<_> = self.window.done(number).collect();
        self.budget.release(left.len(), left.iter().map(Entry::size).sum());
        left
    }

    /// Takes what the broker said, and returns it as a failure of the generation.
    fn rejected(&mut self, rejection: Rejection) -> Fault {
        let Rejection { token, fault } = rejection;
        let index = token.and_then(|token| token.checked_sub(self.first_token)).and_then(|n| usize::try_from(n).ok());
        let number = index.and_then(|index| self.sent.get(index)).copied();
        match (fault.action, number) {
            (Action::Refuse, Some(number)) => {
                let again = Fault::new(fault.code, Action::Retry, fault.message.clone());
                self.refuse(number, fault);
                again
            }
            _ => fault,
        }
    }

    fn failed(&mut self, fault: &Fault) {
        self.monitor.sink_fault(fault, EndState::Waiting);
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

    fn show(&self) {
        let oldest = self.window.oldest().map(|entry| entry.received_at);
        self.monitor.window(self.window.len(), self.window.bytes(), oldest);
    }
}

impl Stored {
    fn holds(&self, entry: &Entry) -> bool {
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

fn ticks() -> tokio::time::Interval {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
