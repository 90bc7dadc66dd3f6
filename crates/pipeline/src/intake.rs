//! The half that faces the database: connects the source, reads, and fills the window.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{debug, error, info, warn};
use waljet_pgoutput::Lsn;

use crate::queue::Item;
use crate::retry::Backoff;
use crate::status::{EndState, Monitor};
use crate::transaction::{Assembler, Step};
use crate::window::Budget;
use crate::{Action, Confirmed, Fault, Frame, Source};

/// Reads one source into one lane.
#[derive(Debug)]
pub(crate) struct Intake<S> {
    pub(crate) source: S,
    pub(crate) assembler: Assembler,
    pub(crate) backoff: Backoff,
    pub(crate) budget: Arc<Budget>,
    pub(crate) monitor: Arc<Monitor>,
    pub(crate) confirmed: watch::Receiver<Option<Lsn>>,
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

impl<S: Source> Intake<S> {
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
        let lsn = *self.confirmed.borrow_and_update();
        let resume = self.confirmed_as(lsn);
        let identity = match self.source.connect(resume).await {
            Ok(identity) => identity,
            Err(fault) => return Ended::Lost(fault),
        };
        let start = identity.slot_confirmed.max(resume.map_or(Lsn::ZERO, |resume| resume.lsn));
        info!(
            system_id = identity.history.system_id,
            timeline = identity.history.timeline,
            resume = %start,
            "replication started"
        );
        self.backoff.succeeded(Instant::now());
        self.assembler.connected(identity.history);
        if identity.handed_over {
            self.assembler.forget();
        }
        self.resume = Some(Confirmed { history: identity.history, lsn: start });
        self.monitor.source_history(identity.history, start);
        self.monitor.source_state(EndState::Open);
        if items.send(Item::Connected(identity)).await.is_err() {
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
                        self.source.report(lsn);
                    }
                }
                // 2. The stream itself.
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

    async fn take(&mut self, frame: Frame, items: &mpsc::Sender<Item>) -> Result<(), Fault> {
        let item = match frame {
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
