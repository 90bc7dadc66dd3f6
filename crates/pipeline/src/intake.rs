//! The half that faces the database: connects the source, reads, and fills the window.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{debug, error, info, warn};
use waljet_pgoutput::{Lsn, Timestamp};

use crate::checkpoint::{Checkpoint, Checkpoints};
use crate::hold::Hold;
use crate::keeper::{self, Keeper};
use crate::queue::Item;
use crate::retry::Backoff;
use crate::status::{EndState, Monitor};
use crate::transaction::{Assembler, Step};
use crate::window::Budget;
use crate::{Action, Confirmed, Fault, Frame, Identity, Resume, Source};

/// Reads one source into one lane.
#[derive(Debug)]
pub(crate) struct Intake<S, C> {
    pub(crate) source: S,
    pub(crate) assembler: Assembler,
    pub(crate) backoff: Backoff,
    pub(crate) budget: Arc<Budget>,
    pub(crate) monitor: Arc<Monitor>,
    pub(crate) confirmed: watch::Receiver<Option<Lsn>>,
    pub(crate) keeper: Arc<Keeper<C>>,
    /// Whether the first connection is made although slot and checkpoint may not fit together.
    pub(crate) accept_gap: bool,
    /// How much of what is confirmed the server is told.
    pub(crate) hold: Hold,
    pub(crate) clock: fn() -> Timestamp,
    /// Where the last connection was resumed, in its history; `None` before the first.
    pub(crate) resume: Option<Confirmed>,
}

/// Why reading ended without a fault.
enum Ended {
    /// The pipeline is to stop.
    Stopped,
    /// The connection is gone.
    Lost(Fault),
}

impl<S: Source, C: Checkpoints> Intake<S, C> {
    /// Reads until told to stop, connecting again for ever. Dropping `items` on the way out tells the lane that
    /// nothing more comes.
    ///
    /// # Errors
    ///
    /// A fault that only a person can mend.
    pub(crate) async fn run(
        &mut self,
        items: mpsc::Sender<Item>,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), Fault> {
        loop {
            let ended = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => Ended::Stopped,
                ended = self.session(&items) => ended,
            };
            let fault = match ended {
                Ended::Stopped => return Ok(()),
                Ended::Lost(fault) => fault,
            };
            let fault = self.lost(fault);
            if matches!(fault.action, Action::Halt | Action::Gap) {
                return Err(fault);
            }
            let pause = self.backoff.next_pause(Instant::now(), fault.retry_within);
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// One connection, from its start to its end. Cancelled by a stop at any point: what was read and not yet
    /// put into the lane was not confirmed either.
    async fn session(&mut self, items: &mpsc::Sender<Item>) -> Ended {
        self.monitor.source_state(EndState::Connecting);
        let (mut identity, resume, stored) = match self.connect().await {
            Ok(connected) => connected,
            Err(fault) => return Ended::Lost(fault),
        };
        let start = identity.slot_confirmed.max(resume.map_or(Lsn::ZERO, |resume| resume.lsn));
        info!(
            system_id = identity.history.system_id,
            timeline = identity.history.timeline,
            resume = %start,
            "replication started"
        );
        let behind = start.bytes_since(identity.slot_confirmed);
        if self.hold.is_on() {
            // Held back on purpose: what it stands behind is stored, and does not come again.
            identity.slot_confirmed = start;
        } else if behind > self.keeper.own_wal() {
            let slot = identity.slot_confirmed;
            info!(%slot, resume = %start, bytes = behind, "the slot went back; what it sends again is stored");
        }
        self.backoff.succeeded(Instant::now());
        self.assembler.connected(identity.history);
        self.keeper.forget_horizon();
        if identity.handed_over {
            self.assembler.forget();
        }
        let begun = Confirmed { history: identity.history, lsn: start };
        let now = Instant::now();
        self.hold.begin(begun, stored.as_ref(), (self.clock)(), now);
        // A new process reads once more what the slot holds, and tells the server of nothing before that is looked at.
        if self.resume.replace(begun).is_some() {
            self.source.report(self.hold.released(now));
        }
        self.monitor.source_history(identity.history, start);
        self.monitor.source_state(EndState::Open);
        let stored = stored.filter(|_| !self.accept_gap).map(Box::new);
        if stored.is_none()
            && let Err(fault) = self.keeper.begin(begun).await
        {
            return Ended::Lost(fault);
        }
        // The word was for what was found until now.
        self.accept_gap = false;
        let mut releases = tokio::time::interval(self.hold.step());
        releases.set_missed_tick_behavior(MissedTickBehavior::Delay);
        if items.send(Item::Connected(identity, stored)).await.is_err() {
            return Ended::Stopped;
        }
        loop {
            tokio::select! {
                biased;
                // 1. A confirmed position goes out before more is read: the slot must not wait for a busy stream.
                changed = self.confirmed.changed() => {
                    if changed.is_err() {
                        return Ended::Stopped;
                    }
                    if let Some(lsn) = *self.confirmed.borrow_and_update() {
                        let now = Instant::now();
                        self.hold.confirm(lsn, now);
                        self.source.report(self.hold.released(now));
                    }
                }
                // 2. Time alone lets the server forget more, where it is held back.
                _ = releases.tick(), if self.hold.is_on() => self.source.report(self.hold.released(Instant::now())),
                // 3. The stream itself.
                frame = self.source.next() => {
                    let taken = match frame {
                        Ok(frame) => self.take(frame, items).await,
                        Err(fault) => Err(fault),
                    };
                    if let Err(fault) = taken {
                        return Ended::Lost(fault);
                    }
                }
            }
        }
    }

    /// Connects where this process or the one before it left off.
    async fn connect(&mut self) -> Result<(Identity, Option<Confirmed>, Option<Checkpoint>), Fault> {
        let mut stored = self.keeper.load().await?;
        let mut trusted = !self.accept_gap || self.hold.is_on();
        loop {
            let lsn = *self.confirmed.borrow_and_update();
            // Far behind, the slot is no place to begin at, whatever the operator's word was for.
            let known = stored.as_ref().filter(|_| trusted);
            let own = self.confirmed_as(lsn);
            let resume = keeper::resume(own, known);
            let from = resume.map(|confirmed| Resume {
                confirmed,
                own_wal: self.keeper.own_wal(),
                from_slot: own.is_none() && !self.hold.is_on(),
                stored: known.is_some(),
            });
            let mut fault = match self.source.connect(from).await {
                Ok(mut identity) => {
                    // What can still be seen is told first; this one cannot, and counts all the same.
                    if let Some(gap) = known.filter(|_| !self.accept_gap).and_then(|known| known.gap.as_ref()) {
                        return Err(keeper::pending_gap(gap));
                    }
                    // Stored, and not by this process: another relay had the slot.
                    let ahead = resume.filter(|_| own.is_some() && own != resume);
                    identity.handed_over |= ahead.is_some_and(|ahead| self.keeper.is_anothers(ahead));
                    return Ok((identity, resume, stored));
                }
                Err(fault) if fault.action == Action::Gap && self.accept_gap && trusted => {
                    trusted = false;
                    continue;
                }
                Err(fault) if fault.action == Action::Gap => fault,
                Err(fault) => return Err(fault),
            };
            // The relay that had the slot until now stored its position before it moved the slot.
            let now = self.keeper.load().await?;
            let moved = now.as_ref().map(|now| now.confirmed) != stored.as_ref().map(|stored| stored.confirmed);
            if !moved {
                if let Some(now) = &now {
                    keeper::date(&mut fault, now);
                }
                return Err(fault);
            }
            stored = now;
        }
    }

    async fn take(&mut self, frame: Frame, items: &mpsc::Sender<Item>) -> Result<(), Fault> {
        let item = match frame {
            Frame::Horizon(horizon) => {
                self.keeper.saw(horizon);
                None
            }
            Frame::Keepalive { wal_end } => {
                self.monitor.received(wal_end);
                // Inside a transaction the position says nothing about its events.
                (!self.assembler.in_transaction()).then_some(Item::Mark(wal_end))
            }
            Frame::Change { wal_end, data } => {
                self.monitor.received(wal_end);
                match self.assembler.step(data)? {
                    Step::Nothing => None,
                    Step::Ignored(operation) => {
                        self.monitor.metrics.ignored.with_label_values(&[operation.label()]).inc();
                        None
                    }
                    Step::Seen => {
                        self.monitor.metrics.skipped.inc();
                        None
                    }
                    Step::Commit(end_lsn) => Some(Item::Mark(end_lsn)),
                    Step::Refused(event) => {
                        self.budget.take(0).await;
                        Some(Item::Refused(event))
                    }
                    Step::Event(message) => {
                        // The window is full: reading stops here, and with it the server's sending.
                        self.budget.take(message.size()).await;
                        Some(Item::Message(message))
                    }
                }
            }
        };
        if let Some(item) = item {
            // The lane outlives the intake, unless it failed: then this half is dropped, too.
            let _ = items.send(item).await;
        }
        Ok(())
    }

    /// Returns a confirmed position with its history: at least where the last connection was resumed, since a slot
    /// may forget what it was told.
    pub(crate) fn confirmed_as(&self, lsn: Option<Lsn>) -> Option<Confirmed> {
        let Confirmed { history, lsn: resumed } = self.resume?;
        Some(Confirmed { history, lsn: lsn.map_or(resumed, |lsn| lsn.max(resumed)) })
    }

    /// Returns the last position that the server is to be told, as [`confirmed_as`](Self::confirmed_as).
    pub(crate) fn last_told(&mut self, lsn: Option<Lsn>) -> Option<Confirmed> {
        let last = self.confirmed_as(lsn)?;
        let now = Instant::now();
        self.hold.confirm(last.lsn, now);
        Some(Confirmed { lsn: self.hold.released(now), ..last }).filter(|last| last.lsn > Lsn::ZERO)
    }

    /// Notes that there is no connection, and returns the fault as it is to be acted on.
    fn lost(&self, fault: Fault) -> Fault {
        // Once it ran, what stands in the way can be mended without a restart.
        let heals = fault.action == Action::Halt && self.resume.is_some();
        let fault = if heals { Fault { action: Action::Retry, ..fault } } else { fault };
        if self.monitor.source_fault(&fault) == EndState::Open {
            self.monitor.metrics.reconnects.with_label_values(&["postgres"]).inc();
        }
        let (error, code, hint) = (fault.summary(), fault.code, fault.hint.as_deref().unwrap_or(""));
        match (fault.action, self.backoff.attempts()) {
            (Action::Halt | Action::Gap, _) => error!(%code, error, hint, "source failed for good"),
            (_, 0) => warn!(%code, error, hint, "source lost, connecting again"),
            (_, attempts) if attempts.is_power_of_two() => warn!(%code, error, hint, attempts, "source still lost"),
            (_, attempts) => debug!(%code, error, attempts, "source still lost"),
        }
        fault
    }
}
