//! The source: one slot, read through one replication connection, watched through one control connection.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use waljet_pgoutput::Lsn;
use waljet_pipeline::{Action, Confirmed, Fault, Frame, History, Horizon, Identity, Resume, Source};

use crate::batch::{Batch, Budget};
use crate::connect::ConnectOptions;
use crate::control::{Control, SharedControl, text};
use crate::dial::{HANDSHAKE_TIMEOUT, dial};
use crate::error::{self, CONNECTION_LOST, SLOT_MISSING, UNCONFIRMED};
use crate::publication::{self, TableName};
use crate::reader::{Closing, Reader, ReaderEnds, ReaderOptions};
use crate::replication;
use crate::slot::{self, SlotState};
use crate::watch::{Evidence, Proof, SourceWatch, Watcher};
use crate::wire::Wire;

/// The longest time between two standby statuses. A quarter of `wal_sender_timeout` if that is less.
pub const DEFAULT_FEEDBACK_INTERVAL: Duration = Duration::from_secs(1);
/// How long the server may be silent where `wal_sender_timeout` is off.
pub const DEFAULT_DEAD_AFTER: Duration = Duration::from_secs(30);
/// Bytes of received frames that may wait; enough to keep the walsender busy through a pause of the pipeline.
pub const DEFAULT_READ_BUDGET: usize = 4 * 1024 * 1024;
/// How often publication and slot are looked at; an idle relay's position moves as often.
pub const DEFAULT_WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Batches that may wait, whatever they weigh.
const BATCHES: usize = 256;
/// How long a slot that is read by somebody is waited for before the connection attempt is given up.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long closing may take in all.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(3000);

/// What to read, and from where.
#[derive(Clone, Debug)]
pub struct SourceOptions {
    /// The database.
    pub connect: ConnectOptions,
    /// The slot's name.
    pub slot: String,
    /// The publication's name, as it is in the catalogue.
    pub publication: String,
    /// The outbox table.
    pub table: TableName,
    /// Columns that have to be there.
    pub columns: Vec<String>,
    /// Whether messages of `pg_logical_emit_message` come, too.
    pub messages: Messages,
    /// The longest time between two standby statuses.
    pub feedback_interval: Duration,
    /// How long the server may be silent; `None` takes its `wal_sender_timeout`.
    pub dead_after: Option<Duration>,
    /// Bytes of received frames that may wait to be taken.
    pub read_budget: usize,
    /// How often publication and slot are looked at.
    pub watch_interval: Duration,
}

/// Whether messages of `pg_logical_emit_message` are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Messages {
    /// Rows only.
    #[default]
    Off,
    /// Messages of every prefix come.
    On,
}

impl SourceOptions {
    /// Makes options with the defaults.
    #[must_use]
    pub fn new(
        connect: ConnectOptions,
        slot: impl Into<String>,
        publication: impl Into<String>,
        table: TableName,
    ) -> Self {
        Self {
            connect,
            slot: slot.into(),
            publication: publication.into(),
            table,
            columns: Vec::new(),
            messages: Messages::Off,
            feedback_interval: DEFAULT_FEEDBACK_INTERVAL,
            dead_after: None,
            read_budget: DEFAULT_READ_BUDGET,
            watch_interval: DEFAULT_WATCH_INTERVAL,
        }
    }
}

/// A [`Source`] over a replication slot.
#[derive(Debug)]
pub struct ReplicationSource {
    options: Arc<SourceOptions>,
    control: SharedControl,
    session: Option<Session>,
    reported: Lsn,
    evidence: watch::Sender<Evidence>,
    state: watch::Sender<SourceWatch>,
    /// The history of the last connection.
    history: Option<History>,
    /// Whether somebody else was seen to read the slot since the last connection.
    other_reader: bool,
}

/// A connection that streams.
#[derive(Debug)]
struct Session {
    batches: mpsc::Receiver<Result<Batch, Fault>>,
    current: std::vec::IntoIter<Frame>,
    budget: Arc<Budget>,
    flushed: watch::Sender<Lsn>,
    horizon: watch::Receiver<Option<Horizon>>,
    closing: oneshot::Sender<Closing>,
    /// Ends both tasks when dropped.
    _tasks: JoinSet<()>,
}

impl ReplicationSource {
    /// Makes an unconnected source.
    #[must_use]
    pub fn new(options: SourceOptions) -> Self {
        Self {
            options: Arc::new(options),
            control: SharedControl::default(),
            session: None,
            reported: Lsn::ZERO,
            evidence: watch::Sender::default(),
            state: watch::Sender::default(),
            history: None,
            other_reader: false,
        }
    }

    /// Returns the control connection, for a [`CheckpointTable`](crate::CheckpointTable).
    #[must_use]
    pub fn control(&self) -> SharedControl {
        self.control.clone()
    }

    /// Returns the snapshots for operators; they go on across connections.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<SourceWatch> {
        self.state.subscribe()
    }

    async fn open(&mut self, resume: Option<Resume>) -> Result<Identity, Fault> {
        let options = self.options.clone();
        slot::validate_name(&options.slot)?;
        let control = match self.control.take_unused() {
            Some(control) => control,
            None => Arc::new(Control::connect(&options.connect).await?),
        };
        self.control.put(Arc::clone(&control));
        let limits = Limits::read(&control, &options).await?;
        let slot = self.verify_slot(&control, resume.map(|resume| resume.confirmed.lsn)).await?;
        let membership = publication::inspect(&control, &options.publication, &options.table).await?;
        if let Some(fault) = membership
            .fault(&options.publication, &options.table)
            .or_else(|| membership.columns_fault(&options.publication, &options.table, &options.columns))
        {
            // The checks before the start end with it; a relay that runs waits, as it does while it is connected.
            return Err(Fault { action: Action::Retry, ..fault });
        }
        let stream = dial(&options.connect, &control.endpoint).await?;
        let end_point = stream.server_end_point();
        let mut wire = Wire::start(stream, &options.connect, end_point, HANDSHAKE_TIMEOUT).await?;
        let system = replication::identify_system(&mut wire).await?;
        let switch_points = replication::switch_points(&mut wire, system.history.timeline).await?;
        let slot_confirmed = slot.confirmed_flush.unwrap_or(Lsn::ZERO);
        let identity = Identity {
            history: system.history,
            wal_end: system.wal_end,
            switch_points,
            slot_confirmed,
            handed_over: self.other_reader && resume.is_some_and(|resume| !resume.from_slot),
        };
        // All before the first status: what it says moves the slot of whatever server this is.
        verify_resume(&options.slot, resume, &identity)?;
        let messages = options.messages == Messages::On;
        let from = resume.filter(|resume| !resume.from_slot).map_or(Lsn::ZERO, |resume| resume.confirmed.lsn);
        replication::start(&mut wire, &options.slot, &options.publication, messages, from).await?;
        tracing::debug!(server = %control.endpoint, from = %from.max(slot_confirmed), "streaming");
        // Readings of another history prove nothing here.
        if self.history.replace(system.history).is_some_and(|history| history != system.history) {
            self.evidence.send_replace(Evidence::default());
        }
        self.other_reader = false;
        // A position of another cluster must not be reported to this one.
        self.reported = Lsn::ZERO;
        self.session = Some(self.spawn(control, wire, from.max(slot_confirmed), limits));
        Ok(identity)
    }

    /// Reads the slot and makes sure that it can be streamed from.
    async fn verify_slot(&mut self, control: &Control, resume: Option<Lsn>) -> Result<SlotState, Fault> {
        let name = &self.options.slot;
        let missing = |fault: Fault| match resume {
            // It was there when this process confirmed that position: what came since is in no slot.
            Some(resume) if fault.code == SLOT_MISSING => Fault {
                action: Action::Gap,
                message: format!("slot {name:?} is gone; events committed since {resume} are not in any slot"),
                ..fault
            },
            _ => fault,
        };
        let deadline = Instant::now() + RELEASE_TIMEOUT;
        let slot = slot::released(control, name, deadline).await.map_err(missing)?;
        self.state.send_modify(|state| state.slot = Some(slot.clone()));
        if let Some(fault) = slot.unusable(self.options.connect.dbname()) {
            return Err(fault);
        }
        match slot.active_pid {
            Some(pid) => {
                self.other_reader = true;
                Err(slot::active(control, name, pid, Action::Retry).await)
            }
            None => Ok(slot),
        }
    }

    fn spawn(&self, control: Arc<Control>, wire: Wire<crate::dial::Stream>, start: Lsn, limits: Limits) -> Session {
        let (batch_sender, batches) = mpsc::channel(BATCHES);
        let (flushed, flushed_receiver) = watch::channel(self.reported);
        let (closing, closing_receiver) = oneshot::channel();
        let (horizon_sender, horizon) = watch::channel(None);
        let proven = self.evidence.borrow().proven();
        let (proof, proof_receiver) = watch::channel(Proof { proven, stopping: false });
        let budget = Arc::new(Budget::new(self.options.read_budget.max(1)));
        let ends = ReaderEnds {
            batches: batch_sender,
            budget: budget.clone(),
            flushed: flushed_receiver,
            proof: proof_receiver,
            closing: closing_receiver,
        };
        let reader_options = ReaderOptions {
            start,
            feedback_interval: limits.feedback_interval,
            ping_after: limits.dead_after / 2,
            dead_after: limits.dead_after,
        };
        let watcher = Watcher {
            options: self.options.clone(),
            control: Some(control),
            shared: self.control.clone(),
            evidence: self.evidence.clone(),
            proof,
            state: self.state.clone(),
            horizon: horizon_sender,
            ends: VecDeque::new(),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(Reader::new(wire.stream, wire.frames, reader_options, ends).run());
        tasks.spawn(watcher.run());
        Session { batches, current: Vec::new().into_iter(), budget, flushed, horizon, closing, _tasks: tasks }
    }
}

impl Source for ReplicationSource {
    async fn connect(&mut self, resume: Option<Resume>) -> Result<Identity, Fault> {
        self.session = None;
        // Large, and only awaited once in a while.
        Box::pin(self.open(resume)).await
    }

    async fn next(&mut self) -> Result<Frame, Fault> {
        let Some(session) = &mut self.session else {
            return Err(Fault::new(CONNECTION_LOST, Action::Retry, "the source is not connected"));
        };
        loop {
            if let Some(frame) = session.current.next() {
                return Ok(frame);
            }
            // Nothing waits for it: it goes before the next batch, and even an idle server sends one a second.
            if session.horizon.has_changed().unwrap_or(false)
                && let Some(horizon) = session.horizon.borrow_and_update().clone()
            {
                return Ok(Frame::Horizon(horizon));
            }
            let fault = match session.batches.recv().await {
                Some(Ok(batch)) => {
                    session.budget.release(batch.bytes);
                    session.current = batch.frames.into_iter();
                    continue;
                }
                Some(Err(fault)) => fault,
                None => Fault::new(CONNECTION_LOST, Action::Retry, "the task that reads the stream ended"),
            };
            self.session = None;
            return Err(fault);
        }
    }

    fn report(&mut self, flushed: Lsn) {
        if flushed <= self.reported {
            return;
        }
        self.reported = flushed;
        if let Some(session) = &self.session {
            session.flushed.send_replace(flushed);
        }
    }

    async fn close(&mut self, flushed: Option<Confirmed>) -> Result<(), Fault> {
        let session = self.session.take();
        let Some(Confirmed { history, lsn }) = flushed else { return Ok(()) };
        let flushed = Confirmed { history, lsn: lsn.max(self.reported) };
        self.reported = flushed.lsn;
        let options = self.options.clone();
        timeout(CLOSE_TIMEOUT, Box::pin(confirm(&options, session, flushed))).await.map_err(|_| {
            unconfirmed(&options.slot, flushed.lsn).cause(error::timed_out("close the stream", CLOSE_TIMEOUT))
        })?
    }
}

/// Tells the last position over the stream, then makes sure that the slot has it.
async fn confirm(options: &SourceOptions, session: Option<Session>, flushed: Confirmed) -> Result<(), Fault> {
    let Confirmed { history, lsn } = flushed;
    if let Some(session) = session {
        let (done, told) = oneshot::channel();
        // A task that is gone has left its fault in the channel; what counts is the slot, read below.
        if session.closing.send(Closing { flushed: lsn, done }).is_ok()
            && let Ok(Err(fault)) = told.await
        {
            tracing::debug!(error = fault.summary(), "last status was not answered");
        }
    }
    let failed = |fault: Fault| unconfirmed(&options.slot, lsn).cause(fault);
    let control = Control::connect(&options.connect).await.map_err(failed)?;
    let slot = slot::released(&control, &options.slot, Instant::now() + RELEASE_TIMEOUT).await.map_err(failed)?;
    if slot.confirmed_flush.is_some_and(|confirmed| confirmed >= lsn) {
        return Ok(());
    }
    // The address may lead to another server by now, whose slot must not be moved by a position of this one's.
    let found = identify_at(&options.connect, &control).await.map_err(failed)?;
    if found != history {
        let message = format!("{lsn} was confirmed in history {history}, and the server is of {found}");
        return Err(Fault::new(UNCONFIRMED, Action::Gap, message));
    }
    slot::advance_with(&control, &options.slot, lsn).await.map_err(failed)?;
    Ok(())
}

/// Asks the server who it is: its cluster and timeline.
///
/// # Errors
///
/// Any fault of the connection.
///
/// # Cancel safety
///
/// May be cancelled.
pub async fn identify(connect: &ConnectOptions) -> Result<History, Fault> {
    let control = Control::connect(connect).await?;
    identify_at(connect, &control).await
}

/// As [`identify`], of the server that the control connection leads to.
async fn identify_at(connect: &ConnectOptions, control: &Control) -> Result<History, Fault> {
    let stream = dial(connect, &control.endpoint).await?;
    let end_point = stream.server_end_point();
    let mut wire = Wire::start(stream, connect, end_point, HANDSHAKE_TIMEOUT).await?;
    Ok(replication::identify_system(&mut wire).await?.history)
}

fn unconfirmed(slot: &str, flushed: Lsn) -> Fault {
    Fault::new(UNCONFIRMED, Action::Retry, format!("could not confirm {flushed} to slot {slot:?}"))
}

/// The server takes any start position without a word; what it cannot mean has to be found here.
fn verify_resume(name: &str, resume: Option<Resume>, server: &Identity) -> Result<(), Fault> {
    let Some(Resume { confirmed: Confirmed { history, lsn }, own_wal, stored, .. }) = resume else { return Ok(()) };
    if history.system_id != server.history.system_id {
        return Err(error::other_cluster(history.system_id, server.history.system_id));
    }
    if !server.includes(Confirmed { history, lsn }) {
        return Err(error::wal_behind(Confirmed { history, lsn }, server));
    }
    let slot = server.slot_confirmed;
    if slot.bytes_since(lsn) <= own_wal || (server.handed_over && !stored) {
        return Ok(());
    }
    // A standby copies the slot apart from the WAL, and may have been promoted before the row of the checkpoint reached it.
    // Past the switch nobody but this relay had anything to confirm.
    if stored && server.includes(Confirmed { history, lsn: slot }) && history.timeline != server.history.timeline {
        tracing::warn!(
            slot = name, confirmed = %slot, checkpoint = %lsn,
            "the promoted server's slot is past its checkpoint, as it is where the last one did not reach it: going on from the slot"
        );
        return Ok(());
    }
    Err(error::slot_moved(name, slot, lsn))
}

/// Times that follow from the server's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limits {
    feedback_interval: Duration,
    dead_after: Duration,
}

impl Limits {
    async fn read(control: &Control, options: &SourceOptions) -> Result<Self, Fault> {
        let sql = "SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'";
        let row = control.row("read wal_sender_timeout", sql).await?;
        let millis = text(&row, "setting").parse().map_err(error::protocol)?;
        Ok(Self::new(Duration::from_millis(millis), options))
    }

    /// `sender_timeout` is zero where it is off.
    fn new(sender_timeout: Duration, options: &SourceOptions) -> Self {
        if sender_timeout.is_zero() {
            let dead_after = options.dead_after.unwrap_or(DEFAULT_DEAD_AFTER);
            return Self { feedback_interval: options.feedback_interval, dead_after };
        }
        Self {
            feedback_interval: options.feedback_interval.min(sender_timeout / 4).max(Duration::from_millis(10)),
            dead_after: options.dead_after.unwrap_or(sender_timeout),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a missing value fails the test")]
mod tests {
    use waljet_pipeline::error::OTHER_CLUSTER;

    use super::*;
    use crate::error::{SLOT_MOVED, WAL_BEHIND};

    fn options() -> SourceOptions {
        let connect = ConnectOptions::parse("host=h user=u").unwrap();
        SourceOptions::new(connect, "w", "w", TableName::new("public", "outbox"))
    }

    #[test]
    fn status_goes_out_four_times_within_the_servers_patience() {
        let limits = |millis| Limits::new(Duration::from_millis(millis), &options());
        assert_eq!(limits(60_000).feedback_interval, Duration::from_secs(1));
        assert_eq!(limits(60_000).dead_after, Duration::from_secs(60));
        assert_eq!(limits(2_000).feedback_interval, Duration::from_millis(500));
        assert_eq!(limits(0), Limits { feedback_interval: Duration::from_secs(1), dead_after: DEFAULT_DEAD_AFTER });
    }

    #[test]
    fn a_start_that_the_server_would_take_without_a_word_is_refused() {
        let history = |system_id, timeline| History { system_id, timeline };
        let server = |timeline, slot_confirmed, handed_over| Identity {
            history: history(1, timeline),
            wal_end: Lsn(100),
            switch_points: vec![(1, Lsn(60))],
            slot_confirmed: Lsn(slot_confirmed),
            handed_over,
        };
        let verify = |resume: Option<(u64, u32, u64)>, stored: bool, server: Identity| {
            let resume = resume.map(|(id, timeline, lsn)| {
                let confirmed = Confirmed { history: history(id, timeline), lsn: Lsn(lsn) };
                Resume { confirmed, own_wal: 0, from_slot: false, stored }
            });
            verify_resume("w", resume, &server).err().map(|fault| (fault.code, fault.action))
        };
        let why = |resume, server| verify(resume, false, server);
        assert_eq!(why(None, server(1, 50, false)), None);
        assert_eq!(why(Some((1, 1, 50)), server(1, 50, false)), None);
        assert_eq!(why(Some((1, 1, 100)), server(1, 50, false)), None);
        assert_eq!(why(Some((1, 1, 101)), server(1, 50, false)), Some((WAL_BEHIND, Action::Gap)));
        assert_eq!(why(Some((1, 1, 49)), server(1, 50, false)), Some((SLOT_MOVED, Action::Gap)));
        // A standby whose peer had the slot in between takes it as it is.
        assert_eq!(why(Some((1, 1, 49)), server(1, 50, true)), None);
        assert_eq!(why(Some((2, 1, 50)), server(1, 50, false)), Some((OTHER_CLUSTER, Action::Gap)));
        // A promoted server has what was confirmed before it left, and nothing beyond.
        assert_eq!(why(Some((1, 1, 60)), server(2, 50, false)), None);
        assert_eq!(why(Some((1, 1, 61)), server(2, 50, false)), Some((WAL_BEHIND, Action::Gap)));
        assert_eq!(why(Some((1, 3, 50)), server(2, 50, false)), Some((WAL_BEHIND, Action::Gap)));
        // The row of a checkpoint may have stayed behind the slot, but not beyond the place where it was left.
        let moved = Some((SLOT_MOVED, Action::Gap));
        assert_eq!(verify(Some((1, 1, 50)), true, server(2, 60, false)), None);
        assert_eq!(verify(Some((1, 1, 50)), true, server(2, 61, false)), moved);
        assert_eq!(verify(Some((1, 1, 50)), true, server(1, 60, false)), moved);
        assert_eq!(verify(Some((1, 1, 50)), true, server(1, 60, true)), moved);
        assert_eq!(why(Some((1, 1, 50)), server(2, 60, false)), moved);
    }
}
