//! Keeps the checkpoint: stores each position before the source may report it.
//!
//! ```text
//!  lane ── progress ──► keeper ── save ──► store
//!                         └─ once it is saved ──► intake ──► standby status
//! ```

use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{error, info, warn};
use waljet_pgoutput::{Lsn, Timestamp};

use crate::checkpoint::{self, Checkpoint, Checkpoints, Replace, StreamMark};
use crate::error::{CHECKPOINT_UNSAVED, GAP_PENDING, OTHER_CLUSTER, STREAM_AHEAD};
use crate::retry::Backoff;
use crate::status::Monitor;
use crate::{Action, Confirmed, Fault, Horizon, headers};

/// An idle relay's position moves with the WAL of others. It is worth a write at once only after so much of it: each write
/// makes WAL itself, at most a page and a little.
const WORTH_A_WRITE: u64 = 64 * 1024;

/// Less of it is worth a write once the position has stood still for so long.
const QUIET: Duration = Duration::from_secs(3);

/// Twice as long for each further such write, up to this: whatever a write makes the server write, it does not go on for ever.
const MOST_QUIET: Duration = Duration::from_secs(300);

/// How long the last write before the end may take.
const LAST_WRITE: Duration = Duration::from_secs(2);

/// How often it is tried whether a store that could not be used can be by now.
const UNUSABLE_AGAIN: Duration = Duration::from_secs(30);

/// How far the lane has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Everything up to here is stored.
    pub(crate) confirmed: Option<Confirmed>,
    /// The stream, as last seen.
    pub(crate) stream: Option<StreamMark>,
}

/// Stores checkpoints.
#[derive(Debug)]
pub(crate) struct Keeper<C> {
    store: C,
    interval: Duration,
    clock: fn() -> Timestamp,
    monitor: Arc<Monitor>,
    progress: watch::Receiver<Progress>,
    /// What the source may report.
    confirmed: watch::Sender<Option<Lsn>>,
    state: Mutex<State>,
}

/// What a keeper needs.
pub(crate) struct KeeperOptions<C> {
    pub(crate) store: C,
    pub(crate) interval: Duration,
    pub(crate) clock: fn() -> Timestamp,
    pub(crate) monitor: Arc<Monitor>,
    pub(crate) progress: watch::Receiver<Progress>,
    pub(crate) confirmed: watch::Sender<Option<Lsn>>,
}

#[derive(Debug)]
struct State {
    /// What the store holds. `None` where it could not be used, or none is wanted: positions are reported at once then.
    saved: Option<Checkpoint>,
    /// The latest position that this process tried to store, whether it heard that it did or not.
    tried: Option<Confirmed>,
    saved_at: Instant,
    /// What was last visible, until all before its position is stored.
    horizon: Option<Horizon>,
    warned: bool,
}

impl<C: Checkpoints> Keeper<C> {
    pub(crate) fn new(options: KeeperOptions<C>) -> Self {
        let KeeperOptions { store, interval, clock, monitor, progress, confirmed } = options;
        monitor.checkpoint_store(store.name());
        let state =
            Mutex::new(State { saved: None, tried: None, saved_at: Instant::now(), horizon: None, warned: false });
        Self { store, interval, clock, monitor, progress, confirmed, state }
    }

    /// Reads the checkpoint, for a connection to be made. `None` where there is none, or the store cannot be used.
    pub(crate) async fn load(&self) -> Result<Option<Checkpoint>, Fault> {
        match self.store.load().await {
            Ok(Some(found)) => {
                self.monitor.checkpoint_saved(&found, false);
                self.lock().saved = Some(found.clone());
                Ok(Some(found))
            }
            Ok(None) => Ok(None),
            Err(fault) => match self.unusable(fault) {
                Ok(()) => Ok(None),
                // It is the source that waits for it, and would else be told to be at fault.
                Err(fault) => Err(Fault { message: format!("checkpoint: {}", fault.message), ..fault }),
            },
        }
    }

    /// How far the slot may stand past the stored position.
    pub(crate) fn own_wal(&self) -> u64 {
        self.store.own_wal()
    }

    /// Whether a stored position can only come from another relay of this slot.
    pub(crate) fn is_anothers(&self, stored: Confirmed) -> bool {
        self.lock().tried.is_none_or(|tried| tried.history != stored.history || tried.lsn < stored.lsn)
    }

    /// Stores where a first connection began, or one that the operator has given word for.
    pub(crate) async fn begin(&self, from: Confirmed) -> Result<(), Fault> {
        if self.store.name() == checkpoint::NONE {
            return Ok(());
        }
        let first = Checkpoint { confirmed: from, stream: None, visible: None, gap: None, at: (self.clock)() };
        match self.store.save(&first, Replace::Anything).await {
            Ok(()) => {
                self.saved(first);
                Ok(())
            }
            Err(fault) => self.unusable(fault),
        }
    }

    /// Takes what is visible, unless an earlier look is not stored yet.
    pub(crate) fn saw(&self, horizon: Horizon) {
        self.lock().horizon.get_or_insert(horizon);
    }

    /// Forgets what was visible over the connection before: its position means nothing in another history.
    pub(crate) fn forget_horizon(&self) {
        self.lock().horizon = None;
    }

    /// Stores positions as they come, one in each interval at most.
    pub(crate) async fn run(&self) -> Infallible {
        let mut progress = self.progress.clone();
        let mut backoff = Backoff::new(crate::RetryOptions::default(), 0);
        let mut quiet = Quiet::default();
        loop {
            let due = match self.due(&progress.borrow_and_update()) {
                Due::At(due) => {
                    quiet = Quiet::default();
                    Some(due)
                }
                Due::WhenQuiet(lsn) => Some(quiet.due(lsn)),
                Due::Never => None,
            };
            tokio::select! {
                changed = progress.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => pending::<()>().await,
                },
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            }
            loop {
                // The last of what came meanwhile; a borrow must not live on while it is saved.
                let last = progress.borrow_and_update().clone();
                let Err(fault) = self.save(&last).await else { break };
                self.failed(&fault);
                sleep(backoff.next_pause(Instant::now(), fault.retry_within)).await;
            }
            backoff.reset();
            quiet.wrote();
        }
    }

    /// Stores the last position, at the end.
    pub(crate) async fn finish(&self) {
        let progress = self.progress.borrow().clone();
        self.due(&progress);
        // What was not worth a write while the relay ran is worth the last one: the next start begins exactly there. And where
        // the relay went without, it may find a store by now, which holds an old position if it holds any.
        let without = self.lock().saved.is_none();
        if !without && *self.confirmed.borrow() >= progress.confirmed.map(|confirmed| confirmed.lsn) {
            return;
        }
        let saved = timeout(LAST_WRITE, self.save(&progress)).await;
        let fault = match saved {
            Ok(Ok(())) => return,
            Ok(Err(fault)) => fault.summary(),
            Err(_) => format!("it took longer than {} s", LAST_WRITE.as_secs()),
        };
        warn!(code = %CHECKPOINT_UNSAVED, error = fault, "the last checkpoint was not stored; it costs a longer read-back");
    }

    /// Stores that a gap was found, so that a restart does not pass over it.
    ///
    /// One between a database and a stream that do not belong together is not: it is found at each start until the
    /// configuration is corrected, and the checkpoint may be that of another relay.
    pub(crate) async fn note_gap(&self, fault: &Fault) {
        let Some(mut checkpoint) = self.lock().saved.clone() else { return };
        if [GAP_PENDING, OTHER_CLUSTER, STREAM_AHEAD].contains(&fault.code) || checkpoint.gap.is_some() {
            return;
        }
        // A later position may have been taken although its answer was lost, and would not be replaced by an earlier one.
        checkpoint.confirmed = resume(self.lock().tried, Some(&checkpoint)).unwrap_or(checkpoint.confirmed);
        checkpoint.gap = Some(format!("{} [{}]", fault.summary(), fault.code));
        if let Ok(Err(fault)) = timeout(LAST_WRITE, self.store.save(&checkpoint, Replace::Earlier)).await {
            warn!(code = %fault.code, error = fault.summary(), "the gap was not noted in the checkpoint");
        }
    }

    /// Returns when a position is to be stored. Releases one that needs no storing.
    fn due(&self, progress: &Progress) -> Due {
        let Some(confirmed) = progress.confirmed else { return Due::Never };
        let state = self.lock();
        let Some(saved) = &state.saved else {
            self.release(confirmed.lsn);
            let again = state.warned && state.saved_at.elapsed() > UNUSABLE_AGAIN;
            return if again { Due::At(Instant::now()) } else { Due::Never };
        };
        // What was stored of another timeline says nothing about this one's slot.
        let same = confirmed.history == saved.confirmed.history;
        let moved = if same { confirmed.lsn.bytes_since(saved.confirmed.lsn) } else { u64::MAX };
        if moved <= self.store.own_wal() {
            self.release(confirmed.lsn);
        }
        let events = progress.stream.is_some() && progress.stream != saved.stream;
        if events || moved >= WORTH_A_WRITE {
            Due::At(state.saved_at + self.interval)
        } else if moved > self.store.own_wal() {
            Due::WhenQuiet(confirmed.lsn)
        } else {
            Due::Never
        }
    }

    async fn save(&self, progress: &Progress) -> Result<(), Fault> {
        let Some(confirmed) = progress.confirmed else { return Ok(()) };
        let (unusable, confirmed, visible) = {
            let mut state = self.lock();
            let reached = state.horizon.take_if(|horizon| horizon.lsn <= confirmed.lsn);
            let before = || state.saved.as_ref().and_then(|saved| saved.visible.clone());
            let visible = reached.map(|horizon| horizon.visible).or_else(before);
            (state.saved.is_none(), resume(Some(confirmed), state.saved.as_ref()).unwrap_or(confirmed), visible)
        };
        let next = Checkpoint { confirmed, stream: progress.stream.clone(), visible, gap: None, at: (self.clock)() };
        if unusable && self.store.name() == checkpoint::NONE {
            self.release(confirmed.lsn);
            return Ok(());
        }
        self.lock().tried = Some(confirmed);
        match self.store.save(&next, Replace::Earlier).await {
            Ok(()) if unusable => info!(store = self.store.name(), "checkpoints are stored from now on"),
            Ok(()) => {}
            Err(fault) if unusable => {
                self.lock().saved_at = Instant::now();
                self.release(confirmed.lsn);
                return self.unusable(fault);
            }
            Err(fault) => return Err(fault),
        }
        self.saved(next);
        self.release(confirmed.lsn);
        Ok(())
    }

    /// Lets the source report a position.
    fn release(&self, lsn: Lsn) {
        self.confirmed.send_if_modified(|confirmed| {
            let raise = *confirmed < Some(lsn);
            if raise {
                *confirmed = Some(lsn);
            }
            raise
        });
    }

    fn saved(&self, checkpoint: Checkpoint) {
        self.monitor.checkpoint_saved(&checkpoint, true);
        let mut state = self.lock();
        state.saved = Some(checkpoint);
        state.saved_at = Instant::now();
        state.warned = false;
    }

    /// Takes a fault of a store that never held anything: the relay goes without, and says so.
    fn unusable(&self, fault: Fault) -> Result<(), Fault> {
        let mut state = self.lock();
        if state.saved.is_some() || matches!(fault.action, Action::Retry) {
            return Err(fault);
        }
        self.monitor.checkpoint_fault(&fault);
        if !std::mem::replace(&mut state.warned, true) {
            let (code, error, hint) = (fault.code, fault.summary(), fault.hint.as_deref().unwrap_or(""));
            warn!(%code, error, hint, "going on without a stored checkpoint: a slot or a stream that is changed while the relay is not running cannot be told from an untouched one");
        }
        Ok(())
    }

    fn failed(&self, fault: &Fault) {
        if self.monitor.checkpoint_fault(fault) {
            let (code, error, hint) = (fault.code, fault.summary(), fault.hint.as_deref().unwrap_or(""));
            error!(%code, error, hint, "checkpoint not stored; events flow, and nothing is confirmed until it is");
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// When a position is to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    /// Then.
    At(Instant),
    /// Once it has stood still for a while.
    WhenQuiet(Lsn),
    /// Not at all.
    Never,
}

/// How long a position has stood still, and how long it has to.
#[derive(Debug, Default)]
struct Quiet {
    since: Option<(Lsn, Instant)>,
    writes: u32,
}

impl Quiet {
    /// Returns when a position that is there now has stood still for long enough.
    fn due(&mut self, lsn: Lsn) -> Instant {
        let (_, since) = *self.since.take_if(|(at, _)| *at == lsn).get_or_insert((lsn, Instant::now()));
        self.since = Some((lsn, since));
        since + QUIET.saturating_mul(1 << self.writes.min(16)).min(MOST_QUIET)
    }

    /// Notes a write, whatever it was due for.
    fn wrote(&mut self) {
        self.writes += u32::from(self.since.take().is_some());
    }
}

/// Returns where to resume: at what this process knows, unless the store knows better: another relay of this slot had it
/// since, and may have followed the database to a later timeline.
pub(crate) fn resume(own: Option<Confirmed>, stored: Option<&Checkpoint>) -> Option<Confirmed> {
    match (own, stored.map(|stored| stored.confirmed)) {
        (Some(own), Some(stored)) if own.follows(stored) => Some(own),
        (own, stored) => stored.or(own),
    }
}

/// Says in the fault of a gap since when events may be missing.
pub fn date(fault: &mut Fault, stored: &Checkpoint) {
    if let Some(at) = headers::commit_time(stored.at) {
        fault.message.push_str(&format!("; the last checkpoint is of {at}"));
    }
}

/// Makes the fault of a gap that was found before and is not accepted.
#[must_use]
pub fn pending_gap(gap: &str) -> Fault {
    Fault::new(GAP_PENDING, Action::Gap, format!("a gap was found before: {gap}"))
        .hint("waljet run --catch-up, where a slot is what was lost; or compare the table with the stream, then go on with: waljet run --accept-gap")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::History;

    fn confirmed(timeline: u32, lsn: u64) -> Confirmed {
        Confirmed { history: History { system_id: 7, timeline }, lsn: Lsn(lsn) }
    }

    fn checkpoint(timeline: u32, lsn: u64) -> Checkpoint {
        Checkpoint { confirmed: confirmed(timeline, lsn), stream: None, visible: None, gap: None, at: Timestamp(0) }
    }

    #[test]
    fn the_later_position_of_one_history_counts() {
        assert_eq!(resume(None, None), None);
        assert_eq!(resume(Some(confirmed(1, 5)), None), Some(confirmed(1, 5)));
        assert_eq!(resume(None, Some(&checkpoint(1, 5))), Some(confirmed(1, 5)));
        assert_eq!(resume(Some(confirmed(1, 5)), Some(&checkpoint(1, 9))), Some(confirmed(1, 9)));
        assert_eq!(resume(Some(confirmed(1, 9)), Some(&checkpoint(1, 5))), Some(confirmed(1, 9)));
    }

    #[test]
    fn of_two_timelines_the_later_one_counts() {
        assert_eq!(resume(Some(confirmed(1, 9)), Some(&checkpoint(2, 5))), Some(confirmed(2, 5)));
        assert_eq!(resume(Some(confirmed(2, 5)), Some(&checkpoint(1, 9))), Some(confirmed(2, 5)));
    }
}
