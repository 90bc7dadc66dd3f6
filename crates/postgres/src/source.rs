//! The source: one slot, read through one replication connection, watched through one control connection.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use waljet_pgoutput::Lsn;
use waljet_pipeline::{Action, Fault, Frame, Identity, Source};

use crate::batch::{Batch, Budget};
use crate::connect::ConnectOptions;
use crate::control::{Control, text};
use crate::dial::{HANDSHAKE_TIMEOUT, dial};
use crate::error::{self, CONNECTION_LOST, SLOT_MISSING, SLOT_MOVED, UNCONFIRMED, WAL_BEHIND};
use crate::publication::{self, TableName};
use crate::reader::{Closing, Reader, ReaderEnds, ReaderOptions};
use crate::replication::{self, System};
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
    session: Option<Session>,
    reported: Lsn,
    evidence: watch::Sender<Evidence>,
    state: watch::Sender<SourceWatch>,
    system_id: Option<u64>,
}

/// A connection that streams.
#[derive(Debug)]
struct Session {
    batches: mpsc::Receiver<Result<Batch, Fault>>,
    current: std::vec::IntoIter<Frame>,
    budget: Arc<Budget>,
    flushed: watch::Sender<Lsn>,
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
            session: None,
            reported: Lsn::ZERO,
            evidence: watch::Sender::default(),
            state: watch::Sender::default(),
            system_id: None,
        }
    }

    /// Returns the snapshots for operators; they go on across connections.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<SourceWatch> {
        self.state.subscribe()
    }

    async fn open(&mut self, resume: Option<Lsn>) -> Result<Identity, Fault> {
        let options = self.options.clone();
        slot::validate_name(&options.slot)?;
        let control = Control::connect(&options.connect).await?;
        let limits = Limits::read(&control, &options).await?;
        let slot = self.verify_slot(&control, resume).await?;
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
        verify_resume(&options.slot, resume, &slot, &system)?;
        let slot_confirmed = slot.confirmed_flush.unwrap_or(Lsn::ZERO);
        let messages = options.messages == Messages::On;
        let from = resume.unwrap_or(Lsn::ZERO);
        replication::start(&mut wire, &options.slot, &options.publication, messages, from).await?;
        tracing::info!(
            slot = options.slot,
            publication = options.publication,
            server = %control.endpoint,
            from = %from.max(slot_confirmed),
            "replication started"
        );
        // Readings of another cluster prove nothing here.
        if self.system_id.replace(system.history.system_id).is_some_and(|id| id != system.history.system_id) {
            self.evidence.send_replace(Evidence::default());
        }
        // Not the greater one: a position of another cluster must not be reported to this one.
        self.reported = from;
        self.session = Some(self.spawn(control, wire, from.max(slot_confirmed), limits));
        Ok(Identity { history: system.history, wal_end: system.wal_end, switch_points, slot_confirmed })
    }

    /// Reads the slot and makes sure that it can be streamed from.
    async fn verify_slot(&self, control: &Control, resume: Option<Lsn>) -> Result<SlotState, Fault> {
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
            Some(pid) => Err(slot::active(control, name, pid, Action::Retry).await),
            None => Ok(slot),
        }
    }

    fn spawn(&self, control: Control, wire: Wire<crate::dial::Stream>, start: Lsn, limits: Limits) -> Session {
        let (batch_sender, batches) = mpsc::channel(BATCHES);
        let (flushed, flushed_receiver) = watch::channel(self.reported);
        let (closing, closing_receiver) = oneshot::channel();
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
            evidence: self.evidence.clone(),
            proof,
            state: self.state.clone(),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(Reader::new(wire.stream, wire.frames, reader_options, ends).run());
        tasks.spawn(watcher.run());
        Session { batches, current: Vec::new().into_iter(), budget, flushed, closing, _tasks: tasks }
    }
}

impl Source for ReplicationSource {
    async fn connect(&mut self, resume: Option<Lsn>) -> Result<Identity, Fault> {
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

    async fn close(&mut self, flushed: Option<Lsn>) -> Result<(), Fault> {
        let session = self.session.take();
        let Some(flushed) = flushed.map(|flushed| flushed.max(self.reported)) else { return Ok(()) };
        self.reported = flushed;
        let options = self.options.clone();
        timeout(CLOSE_TIMEOUT, Box::pin(confirm(&options, session, flushed))).await.map_err(|_| {
            unconfirmed(&options.slot, flushed).cause(error::timed_out("close the stream", CLOSE_TIMEOUT))
        })?
    }
}

/// Tells the last position over the stream, then makes sure that the slot has it.
async fn confirm(options: &SourceOptions, session: Option<Session>, flushed: Lsn) -> Result<(), Fault> {
    if let Some(session) = session {
        let (done, told) = oneshot::channel();
        // A task that is gone has left its fault in the channel; what counts is the slot, read below.
        if session.closing.send(Closing { flushed, done }).is_ok()
            && let Ok(Err(fault)) = told.await
        {
            tracing::debug!(error = fault.summary(), "last status was not answered");
        }
    }
    let failed = |fault: Fault| unconfirmed(&options.slot, flushed).cause(fault);
    let control = Control::connect(&options.connect).await.map_err(failed)?;
    let slot = slot::released(&control, &options.slot, Instant::now() + RELEASE_TIMEOUT).await.map_err(failed)?;
    if slot.confirmed_flush.is_some_and(|confirmed| confirmed >= flushed) {
        return Ok(());
    }
    slot::advance_with(&control, &options.slot, flushed).await.map_err(failed)?;
    Ok(())
}

fn unconfirmed(slot: &str, flushed: Lsn) -> Fault {
    Fault::new(UNCONFIRMED, Action::Retry, format!("could not confirm {flushed} to slot {slot:?}"))
}

/// The server takes any start position without a word; what it cannot mean has to be found here.
fn verify_resume(name: &str, resume: Option<Lsn>, slot: &SlotState, system: &System) -> Result<(), Fault> {
    let Some(resume) = resume else { return Ok(()) };
    if resume > system.wal_end {
        let message = format!(
            "the server has WAL up to {}, and {resume} was confirmed: it was restored, or lost WAL in a failover",
            system.wal_end
        );
        return Err(Fault::new(WAL_BEHIND, Action::Gap, message)
            .hint("compare the table with the stream, then start again with postgres.on_gap = \"catch-up\""));
    }
    match slot.confirmed_flush {
        Some(confirmed) if confirmed > resume => {
            let message = format!(
                "slot {name:?} stands at {confirmed}, and this relay confirmed {resume}: somebody else read or advanced it"
            );
            Err(Fault::new(SLOT_MOVED, Action::Gap, message)
                .hint("find the other reader; waljet replay brings the events in between, if the table still has them"))
        }
        _ => Ok(()),
    }
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
    use waljet_pipeline::History;

    use super::*;

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
        let slot = |confirmed| SlotState { confirmed_flush: Some(Lsn(confirmed)), ..SlotState::default() };
        let system = System { history: History { system_id: 1, timeline: 1 }, wal_end: Lsn(100) };
        let why = |resume: Option<u64>, confirmed| {
            verify_resume("w", resume.map(Lsn), &slot(confirmed), &system).err().map(|fault| (fault.code, fault.action))
        };
        assert_eq!(why(None, 50), None);
        assert_eq!(why(Some(50), 50), None);
        assert_eq!(why(Some(100), 50), None);
        assert_eq!(why(Some(101), 50), Some((WAL_BEHIND, Action::Gap)));
        assert_eq!(why(Some(49), 50), Some((SLOT_MOVED, Action::Gap)));
    }
}
