//! What the pipeline is doing: one snapshot, from which every view is made.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Serialize, Serializer};
use tokio::time::Instant;
use waljet_pgoutput::Lsn;

use crate::{Checkpoint, Fault, History, Metrics, Opened, Position, PublisherMode, ReadBack, ReadBacks, WindowOptions};

/// Something pending and nothing acknowledged for this long is not ready.
const STALLED_AFTER: Duration = Duration::from_secs(10);

/// The pipeline's loop turns at least once a second; this long without a turn is not alive.
const DEAD_AFTER: Duration = Duration::from_secs(30);

/// A snapshot of a pipeline.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// Whether events flow, or would.
    pub ready: bool,
    /// Why not.
    pub reason: Option<String>,
    /// What mends it.
    pub hint: Option<String>,
    /// Whether the loop turns.
    pub live: bool,
    /// The end towards the database.
    pub source: SourceStatus,
    /// The end towards the broker.
    pub sink: SinkStatus,
    /// What is unacknowledged.
    pub window: WindowStatus,
    /// The stored checkpoint.
    pub checkpoint: CheckpointStatus,
    /// What became of the events so far.
    pub events: EventCounts,
    /// WAL between the received and the confirmed position.
    pub lag_bytes: u64,
}

/// How one end is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndState {
    /// Not tried yet, or stopped.
    #[default]
    Closed,
    /// An attempt is under way.
    Connecting,
    /// Working.
    Open,
    /// Waiting before the next attempt.
    Waiting,
    /// An event cannot be published; the events behind it wait.
    Blocked,
}

/// The end towards the database.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SourceStatus {
    /// How it is doing.
    pub state: EndState,
    /// What is wrong.
    pub fault: Option<FaultReport>,
    /// The cluster and timeline.
    pub history: Option<History>,
    /// Up to where WAL was received.
    #[serde(serialize_with = "text")]
    pub received_lsn: Option<Lsn>,
    /// Up to where everything is stored, as PostgreSQL is told.
    #[serde(serialize_with = "text")]
    pub confirmed_lsn: Option<Lsn>,
}

/// The end towards the broker.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SinkStatus {
    /// How it is doing.
    pub state: EndState,
    /// What is wrong.
    pub fault: Option<FaultReport>,
    /// The stream.
    pub stream: Option<String>,
    /// How its order is kept.
    pub mode: Option<PublisherMode>,
    /// How often publishing began.
    pub generation: u64,
    /// The sequence of the last event that was acknowledged or found.
    pub last_sequence: Option<u64>,
    /// The position of the last event that was acknowledged or found.
    #[serde(serialize_with = "text")]
    pub last_position: Option<Position>,
    /// What the last read-back of the stream took, and what it could not tell.
    pub read_back: Option<ReadBack>,
    /// All read-backs in sum.
    pub read_backs: ReadBacks,
}

/// The stored checkpoint.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CheckpointStatus {
    /// Where it is kept: `postgres`, `nats` or `none`.
    pub store: &'static str,
    /// The position, which the slot is never past.
    #[serde(serialize_with = "text")]
    pub confirmed_lsn: Option<Lsn>,
    /// A sequence that the stream had by then.
    pub stream_sequence: Option<u64>,
    /// How often it was written since the relay started.
    pub writes: u64,
    /// Why it is not kept.
    pub fault: Option<FaultReport>,
}

/// A fault as the views show it.
#[derive(Clone, Debug, Serialize)]
pub struct FaultReport {
    /// The code, which has a section in `docs/errors.md`.
    pub code: &'static str,
    /// What is wrong, with its causes.
    pub message: String,
    /// What mends it.
    pub hint: Option<String>,
    /// How often it was met in a row.
    pub attempts: u32,
    /// For how long.
    pub seconds: f64,
    #[serde(skip)]
    since: Option<Instant>,
}

/// What is unacknowledged.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct WindowStatus {
    /// Events.
    pub events: usize,
    /// Their bytes.
    pub bytes: usize,
    /// The limit of events.
    pub max_events: usize,
    /// The limit of bytes.
    pub max_bytes: usize,
    /// The age of the oldest since it was received.
    pub oldest_unacked_seconds: f64,
}

/// What became of the events so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EventCounts {
    /// The stream took them.
    pub stored: u64,
    /// The broker had them, by its own word.
    pub duplicate: u64,
    /// They were found stored when the stream was read back, or came twice.
    pub skipped: u64,
}

/// Holds the state that snapshots are made of, and the metrics. Shared by the pipeline's two halves and its views.
#[derive(Debug)]
pub struct Monitor {
    /// The metrics.
    pub metrics: Metrics,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    source: SourceStatus,
    sink: SinkStatus,
    checkpoint: CheckpointStatus,
    window: WindowStatus,
    oldest_received: Option<Instant>,
    last_progress: Instant,
    last_turn: Instant,
}

impl Monitor {
    /// Starts with both ends closed.
    #[must_use]
    pub fn new(metrics: Metrics, window: WindowOptions) -> Self {
        let now = Instant::now();
        let window =
            WindowStatus { max_events: window.max_events, max_bytes: window.max_bytes, ..WindowStatus::default() };
        let state = State {
            source: SourceStatus::default(),
            sink: SinkStatus::default(),
            checkpoint: CheckpointStatus::default(),
            window,
            oldest_received: None,
            last_progress: now,
            last_turn: now,
        };
        Self { metrics, state: Mutex::new(state) }
    }

    /// Makes a snapshot.
    #[must_use]
    pub fn status(&self) -> Status {
        let now = Instant::now();
        let state = self.lock();
        let mut window = state.window;
        window.oldest_unacked_seconds = state.oldest_received.map_or(0.0, |since| seconds(now, since));
        let mut source = state.source.clone();
        let mut sink = state.sink.clone();
        let mut checkpoint = state.checkpoint.clone();
        for fault in [&mut source.fault, &mut sink.fault, &mut checkpoint.fault].into_iter().flatten() {
            fault.seconds = fault.since.map_or(0.0, |since| seconds(now, since));
        }
        sink.read_backs = self.metrics.read_backs();
        let (reason, hint) = not_ready(&state, now).map_or((None, None), |why| (Some(why.reason), why.hint));
        let received = state.source.received_lsn.unwrap_or(Lsn::ZERO);
        let events = EventCounts {
            stored: self.metrics.stored.get(),
            duplicate: self.metrics.duplicate.get(),
            skipped: self.metrics.skipped.get(),
        };
        Status {
            ready: reason.is_none(),
            reason,
            hint,
            live: now.duration_since(state.last_turn) < DEAD_AFTER,
            lag_bytes: state.source.confirmed_lsn.map_or(0, |confirmed| received.bytes_since(confirmed)),
            source,
            sink,
            checkpoint,
            window,
            events,
        }
    }

    /// Says that the loop turns.
    pub fn turn(&self) {
        self.lock().last_turn = Instant::now();
    }

    pub(crate) fn source_state(&self, end: EndState) {
        let mut state = self.lock();
        state.source.state = end;
        if end == EndState::Open {
            state.source.fault = None;
        }
    }

    pub(crate) fn source_history(&self, history: History, confirmed: Lsn) {
        let mut state = self.lock();
        state.source.history = Some(history);
        state.source.confirmed_lsn = state.source.confirmed_lsn.max(Some(confirmed));
    }

    /// Notes a fault, and returns what the end was doing until then.
    pub(crate) fn source_fault(&self, fault: &Fault) -> EndState {
        let mut state = self.lock();
        report(&mut state.source.fault, fault);
        std::mem::replace(&mut state.source.state, EndState::Waiting)
    }

    pub(crate) fn received(&self, lsn: Lsn) {
        let mut state = self.lock();
        state.source.received_lsn = state.source.received_lsn.max(Some(lsn));
    }

    pub(crate) fn confirmed(&self, lsn: Lsn) {
        let mut state = self.lock();
        state.source.confirmed_lsn = state.source.confirmed_lsn.max(Some(lsn));
    }

    pub(crate) fn checkpoint_store(&self, store: &'static str) {
        self.lock().checkpoint.store = store;
    }

    /// Notes what the store holds, and whether it was written now.
    pub(crate) fn checkpoint_saved(&self, saved: &Checkpoint, written: bool) {
        let mut state = self.lock();
        let checkpoint = &mut state.checkpoint;
        checkpoint.confirmed_lsn = Some(saved.confirmed.lsn);
        checkpoint.stream_sequence = saved.stream.as_ref().map(|stream| stream.last_sequence);
        checkpoint.writes += u64::from(written);
        checkpoint.fault = None;
    }

    /// Notes why the checkpoint is not kept. Returns whether that is news.
    pub(crate) fn checkpoint_fault(&self, fault: &Fault) -> bool {
        let mut state = self.lock();
        let known = state.checkpoint.fault.as_ref().is_some_and(|known| known.code == fault.code.0);
        report(&mut state.checkpoint.fault, fault);
        !known
    }

    pub(crate) fn sink_state(&self, end: EndState) {
        self.lock().sink.state = end;
    }

    pub(crate) fn sink_opened(&self, opened: &Opened) {
        self.metrics.read_back(&opened.read_back);
        let mut state = self.lock();
        let sink = &mut state.sink;
        sink.state = EndState::Open;
        sink.stream = Some(opened.stream.clone());
        sink.mode = Some(opened.mode);
        sink.generation += 1;
        sink.read_back = Some(opened.read_back.clone());
        if let Some(tail) = &opened.tail {
            sink.last_position = Some(*tail);
            sink.last_sequence = Some(opened.last_sequence);
        }
        // With something pending, only its acknowledgement shows that the fault is over.
        if state.window.events == 0 {
            state.sink.fault = None;
        }
    }

    pub(crate) fn sink_fault(&self, fault: &Fault) {
        let mut state = self.lock();
        state.sink.state = EndState::Waiting;
        report(&mut state.sink.fault, fault);
    }

    pub(crate) fn acknowledged(&self, sequence: u64, position: Position) {
        let mut state = self.lock();
        let sink = &mut state.sink;
        sink.last_sequence = Some(sequence);
        sink.last_position = Some(position);
        sink.state = EndState::Open;
        sink.fault = None;
        state.last_progress = Instant::now();
    }

    /// Notes an event that cannot be published; the same one again changes nothing.
    pub(crate) fn sink_blocked(&self, fault: &Fault) {
        let mut state = self.lock();
        let known = state.sink.fault.as_ref().is_some_and(|known| known.code == fault.code.0);
        if std::mem::replace(&mut state.sink.state, EndState::Blocked) != EndState::Blocked || !known {
            report(&mut state.sink.fault, fault);
        }
    }

    /// Notes that something pending was found stored.
    pub(crate) fn progress(&self) {
        let mut state = self.lock();
        state.sink.fault = None;
        state.last_progress = Instant::now();
    }

    pub(crate) fn window(&self, events: usize, bytes: usize, oldest_received: Option<Instant>) {
        let mut state = self.lock();
        state.window.events = events;
        state.window.bytes = bytes;
        state.oldest_received = oldest_received;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere cannot leave the state half written: each update is a few assignments.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why events do not flow.
struct NotReady {
    reason: String,
    hint: Option<String>,
}

impl From<String> for NotReady {
    fn from(reason: String) -> Self {
        Self { reason, hint: None }
    }
}

fn not_ready(state: &State, now: Instant) -> Option<NotReady> {
    let source = ("source", state.source.state, &state.source.fault);
    let sink = ("sink", state.sink.state, &state.sink.fault);
    for (end, at, fault) in [source, sink] {
        match (fault, at) {
            (Some(fault), _) => {
                return Some(NotReady {
                    reason: format!("{end}: {} [{}]", fault.message, fault.code),
                    hint: fault.hint.clone(),
                });
            }
            (None, EndState::Open) => {}
            (None, EndState::Closed) => return Some(format!("{end}: not connected yet").into()),
            (None, _) => return Some(format!("{end}: connecting").into()),
        }
    }
    // Where there never was a checkpoint, its fault is a warning: nothing is held back for it.
    if let Some(fault) = &state.checkpoint.fault
        && state.checkpoint.confirmed_lsn.is_some()
        && fault.since.is_some_and(|since| now.duration_since(since) >= STALLED_AFTER)
    {
        let reason = format!("checkpoint: {} [{}]", fault.message, fault.code);
        return Some(NotReady { reason, hint: fault.hint.clone() });
    }
    let oldest = state.oldest_received?.max(state.last_progress);
    let waited = now.duration_since(oldest);
    (waited >= STALLED_AFTER).then(|| {
        let events = state.window.events;
        format!("sink: {events} events wait and none was acknowledged for {} s", waited.as_secs()).into()
    })
}

fn report(slot: &mut Option<FaultReport>, fault: &Fault) {
    let before = slot.take().filter(|old| old.code == fault.code.0);
    let since = before.as_ref().and_then(|old| old.since).unwrap_or_else(Instant::now);
    *slot = Some(FaultReport {
        code: fault.code.0,
        message: fault.summary(),
        hint: fault.hint.clone(),
        attempts: before.map_or(0, |old| old.attempts) + 1,
        seconds: 0.0,
        since: Some(since),
    });
}

fn seconds(now: Instant, since: Instant) -> f64 {
    now.duration_since(since).as_secs_f64()
}

fn text<T: std::fmt::Display, S: Serializer>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => serializer.collect_str(value),
        None => serializer.serialize_none(),
    }
}
