//! A database that commits by a schedule, and a source that loses its connection by a seed.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use waljet_pgoutput::{
    Begin, Column, Commit, Insert, Lsn, Message, Oid, Relation, ReplicaIdentity, Timestamp, Tuple, Value, Xid,
};

use super::Broker;
use crate::{Action, Code, Confirmed, Fault, Frame, History, Identity, Resume, Source};

/// The system identifier of every simulated database.
const SYSTEM_ID: u64 = 7_431_000_000_000_000_001;

const OUTBOX: Oid = Oid(16_384);
const FOREIGN: Oid = Oid(16_385);

/// A committed transaction.
#[derive(Clone, Debug)]
pub struct Transaction {
    /// When it is committed, from the start of the run.
    pub at: Duration,
    /// Where its commit record starts.
    pub commit_lsn: Lsn,
    /// Where it ends.
    pub end_lsn: Lsn,
    /// Its changes in their order: the event's id, or `None` for a row of another table.
    pub changes: Vec<Option<String>>,
}

/// How often a source fails.
#[derive(Clone, Copy, Debug, Default)]
pub struct SourceFaults {
    /// Chance that a connection is lost at a frame.
    pub lost: f64,
    /// Chance that a connection cannot be made.
    pub refused: f64,
}

/// A database with one slot.
#[derive(Clone, Debug)]
pub struct Database(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    transactions: Vec<Transaction>,
    slot_confirmed: Lsn,
    /// Where earlier timelines ended.
    switch_points: Vec<(u32, Lsn)>,
    started: Instant,
    faults: SourceFaults,
    random: fastrand::Rng,
    broker: Broker,
    violations: Vec<String>,
    disconnects: u64,
}

impl Database {
    /// Makes a database that commits these transactions. Every confirmed position is held against the broker.
    #[must_use]
    pub fn new(transactions: Vec<Transaction>, broker: Broker, faults: SourceFaults, seed: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            transactions,
            slot_confirmed: Lsn(1),
            switch_points: Vec::new(),
            started: Instant::now(),
            faults,
            random: fastrand::Rng::with_seed(seed),
            broker,
            violations: Vec::new(),
            disconnects: 0,
        })))
    }

    /// Connects a new source to the slot.
    #[must_use]
    pub fn source(&self) -> ScriptedSource {
        ScriptedSource {
            database: self.clone(),
            connected: false,
            first_at: Instant::now(),
            disconnects: 0,
            next: 0,
            queue: VecDeque::new(),
            told: Lsn::ZERO,
        }
    }

    /// Ends all faults.
    pub fn heal(&self) {
        self.lock().faults = SourceFaults::default();
    }

    /// The slot forgets confirmations, as after a crash of the server: back to at most this position.
    pub fn forget(&self, lsn: Lsn) {
        let mut state = self.lock();
        state.slot_confirmed = state.slot_confirmed.min(lsn);
    }

    /// Somebody moves the slot ahead.
    pub fn advance(&self, lsn: Lsn) {
        let mut state = self.lock();
        state.slot_confirmed = state.slot_confirmed.max(lsn);
    }

    /// A standby that has all the WAL and the slot takes over, on a new timeline.
    pub fn promote(&self) {
        let mut state = self.lock();
        let left = (state.timeline(), state.wal_end());
        state.switch_points.push(left);
        state.disconnects += 1;
    }

    /// Ends the connection that there is.
    pub fn disconnect(&self) {
        self.lock().disconnects += 1;
    }

    /// The slot's confirmed position.
    #[must_use]
    pub fn slot_confirmed(&self) -> Lsn {
        self.lock().slot_confirmed
    }

    /// The ids of all events, in commit order.
    #[must_use]
    pub fn ledger(&self) -> Vec<String> {
        self.lock().transactions.iter().flat_map(|tx| tx.changes.iter().flatten().cloned()).collect()
    }

    /// What was confirmed although it was not stored.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn timeline(&self) -> u32 {
        self.switch_points.last().map_or(1, |(timeline, _)| timeline + 1)
    }

    fn visible(&self) -> usize {
        let elapsed = self.started.elapsed();
        self.transactions.partition_point(|tx| tx.at <= elapsed)
    }

    fn wal_end(&self) -> Lsn {
        let last = self.visible().checked_sub(1).and_then(|index| self.transactions.get(index));
        last.map_or(Lsn(1), |tx| tx.end_lsn)
    }

    /// Takes a confirmed position, and checks that all events before it are stored.
    fn confirm(&mut self, lsn: Lsn) {
        if lsn > self.wal_end() {
            self.violations.push(format!("confirmed {lsn}, past the end of the WAL"));
        }
        let from = self.slot_confirmed;
        for tx in self.transactions.iter().filter(|tx| tx.commit_lsn >= from && tx.end_lsn <= lsn) {
            for id in tx.changes.iter().flatten().filter(|id| !self.broker.holds(id)) {
                self.violations.push(format!("confirmed {lsn} with event {id} not stored"));
            }
        }
        self.slot_confirmed = self.slot_confirmed.max(lsn);
    }
}

/// A source of a [`Database`].
#[derive(Debug)]
pub struct ScriptedSource {
    database: Database,
    connected: bool,
    /// When the first frame of the connection comes.
    first_at: Instant,
    /// The disconnects that were before the connection was made.
    disconnects: u64,
    next: usize,
    queue: VecDeque<Frame>,
    told: Lsn,
}

fn fault(message: &str) -> Fault {
    Fault::new(Code("simulated"), Action::Retry, message)
}

impl Source for ScriptedSource {
    async fn connect(&mut self, resume: Option<Resume>) -> Result<Identity, Fault> {
        self.connected = false;
        self.queue.clear();
        tokio::time::sleep(Duration::from_millis(20)).await;
        let mut state = self.database.lock();
        let refused = state.faults.refused;
        if state.random.f64() < refused {
            return Err(fault("connection refused"));
        }
        let identity = Identity {
            history: History { system_id: SYSTEM_ID, timeline: state.timeline() },
            wal_end: state.wal_end(),
            switch_points: state.switch_points.clone(),
            slot_confirmed: state.slot_confirmed,
            handed_over: false,
        };
        if let Some(resume) = resume {
            let Identity { slot_confirmed, .. } = identity;
            let moved = slot_confirmed.bytes_since(resume.confirmed.lsn) > resume.own_wal;
            if moved || !identity.includes(resume.confirmed) {
                let message = format!("the slot stands at {slot_confirmed}, and {:?} was confirmed", resume.confirmed);
                return Err(Fault::new(Code("source-gap"), Action::Gap, message));
            }
        }
        let told = resume.filter(|resume| !resume.from_slot).map_or(Lsn::ZERO, |resume| resume.confirmed.lsn);
        let start = state.slot_confirmed.max(told);
        self.next = state.transactions.partition_point(|tx| tx.commit_lsn < start);
        self.first_at = Instant::now() + Duration::from_millis(state.random.u64(0..50));
        self.connected = true;
        self.disconnects = state.disconnects;
        for (oid, name) in [(OUTBOX, "outbox"), (FOREIGN, "foreign")] {
            self.queue.push_back(change(start, &Message::Relation(relation(oid, name))));
        }
        Ok(identity)
    }

    async fn next(&mut self) -> Result<Frame, Fault> {
        loop {
            if !self.connected {
                return Err(fault("not connected"));
            }
            tokio::time::sleep_until(self.first_at).await;
            let wait = {
                let mut state = self.database.lock();
                let lost = state.faults.lost;
                if state.random.f64() < lost || state.disconnects > self.disconnects {
                    self.connected = false;
                    return Err(fault("connection lost"));
                }
                if let Some(frame) = self.queue.pop_front() {
                    return Ok(frame);
                }
                if self.next < state.visible() {
                    let tx = state.transactions[self.next].clone();
                    self.next += 1;
                    self.queue.extend(frames(&tx));
                    continue;
                }
                // Caught up: a keepalive now and then, until the next commit.
                let wal_end = state.wal_end();
                let at = state.transactions.get(self.next).map(|tx| state.started + tx.at);
                if wal_end > self.told {
                    self.told = wal_end;
                    return Ok(Frame::Keepalive { wal_end });
                }
                at.unwrap_or_else(|| Instant::now() + Duration::from_secs(1))
            };
            tokio::time::sleep_until(wait).await;
        }
    }

    fn report(&mut self, flushed: Lsn) {
        if self.connected {
            self.database.lock().confirm(flushed);
        }
    }

    async fn close(&mut self, flushed: Option<Confirmed>) -> Result<(), Fault> {
        if let Some(Confirmed { lsn, .. }) = flushed.filter(|_| self.connected) {
            self.database.lock().confirm(lsn);
        }
        self.connected = false;
        Ok(())
    }
}

/// How many ordering keys there are.
const KEYS: u64 = 7;

/// The columns of the simulated outbox.
const COLUMNS: [&str; 5] = ["id", "aggregate_type", "aggregate_id", "event_type", "payload"];

fn relation(oid: Oid, name: &'static str) -> Relation {
    let column = |name: &'static str| Column {
        key: false,
        name: Bytes::from_static(name.as_bytes()),
        type_oid: Oid(25),
        type_modifier: -1,
    };
    Relation {
        xid: None,
        oid,
        schema: Bytes::from_static(b"public"),
        name: Bytes::from_static(name.as_bytes()),
        replica_identity: ReplicaIdentity::Default,
        columns: COLUMNS.map(column).into(),
    }
}

fn frames(tx: &Transaction) -> Vec<Frame> {
    let begin = Begin { final_lsn: tx.commit_lsn, commit_time: Timestamp(0), xid: Xid(1) };
    let commit = Commit { flags: 0, commit_lsn: tx.commit_lsn, end_lsn: tx.end_lsn, commit_time: Timestamp(0) };
    let row = |id: &Option<String>| {
        let (oid, id) = id.as_ref().map_or((FOREIGN, "x"), |id| (OUTBOX, id.as_str()));
        let text = |text: &str| Value::Text(Bytes::copy_from_slice(text.as_bytes()));
        let values = vec![text(id), text("order"), text(&key(id)), text("created"), text("{}")];
        Message::Insert(Insert { xid: None, relation: oid, new: Tuple(values) })
    };
    let mut messages = vec![Message::Begin(begin)];
    messages.extend(tx.changes.iter().map(row));
    messages.push(Message::Commit(commit));
    messages.iter().map(|message| change(tx.end_lsn, message)).collect()
}

/// The key of an event: its number's remainder.
#[must_use]
pub fn key(id: &str) -> String {
    let number = id.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or(0);
    (number % KEYS).to_string()
}

fn change(wal_end: Lsn, message: &Message) -> Frame {
    let data = message.to_bytes().expect("a message made here fits the wire format");
    Frame::Change { wal_end, data }
}
