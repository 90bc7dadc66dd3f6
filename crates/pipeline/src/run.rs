//! The pipeline: two halves, run together as one task.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tracing::{info, warn};
use waljet_pgoutput::Lsn;

use crate::checkpoint::Checkpoints;
use crate::error;
use crate::hold::Hold;
use crate::intake::Intake;
use crate::keeper::{Keeper, KeeperOptions, Progress};
use crate::lane::Lane;
use crate::queue::{Item, Queue, QueueOptions};
use crate::retry::Backoff;
use crate::status::Monitor;
use crate::transaction::Assembler;
use crate::window::Budget;
use crate::{Action, Fault, PipelineOptions, Sink, Source};

/// Items on their way between the halves. Events are bounded by the window; this bounds the marks between them.
const ITEMS: usize = 256;

/// Moves events from a source to a sink until it is stopped.
#[derive(Debug)]
pub struct Pipeline<S, K, C> {
    intake: Intake<S, C>,
    keeper: Arc<Keeper<C>>,
    lane: Lane<K>,
    items: mpsc::Sender<Item>,
    confirmed: watch::Receiver<Option<Lsn>>,
}

/// How a stop went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// The last confirmed position.
    pub confirmed: Option<Lsn>,
    /// Whether every event that was received was stored.
    pub drained: bool,
}

impl<S: Source, K: Sink, C: Checkpoints> Pipeline<S, K, C> {
    /// Puts a pipeline together. `seed` decides the jitter of its pauses.
    #[must_use]
    pub fn new(source: S, sink: K, checkpoints: C, options: PipelineOptions, monitor: Arc<Monitor>, seed: u64) -> Self {
        let (items, receiver) = mpsc::channel(ITEMS);
        let (confirmed_sender, confirmed) = watch::channel(None);
        let (progress_sender, progress) = watch::channel(Progress::default());
        let keeper = Arc::new(Keeper::new(KeeperOptions {
            store: checkpoints,
            interval: options.checkpoint_interval,
            clock: options.clock,
            monitor: Arc::clone(&monitor),
            progress,
            confirmed: confirmed_sender,
        }));
        let budget = Arc::new(Budget::new(options.window));
        let intake = Intake {
            source,
            assembler: Assembler::new(options.outbox, options.route, options.headers),
            backoff: Backoff::new(options.retry, seed),
            budget: Arc::clone(&budget),
            monitor: Arc::clone(&monitor),
            confirmed: confirmed.clone(),
            keeper: Arc::clone(&keeper),
            accept_gap: options.accept_gap,
            hold: Hold::new(options.replay_window),
            clock: options.clock,
            resume: None,
        };
        let queue = Queue::new(QueueOptions {
            items: receiver,
            budget,
            monitor,
            progress: progress_sender,
            clock: options.clock,
            drain_timeout: options.drain_timeout,
            accept_gap: options.accept_gap,
        });
        let lane = Lane { sink, backoff: Backoff::new(options.retry, !seed), queue };
        Self { intake, keeper, lane, items, confirmed }
    }

    /// Runs until `stop` turns true; then takes nothing more, waits for what is unacknowledged up to the drain
    /// timeout, and confirms it.
    ///
    /// # Errors
    ///
    /// A fault that only a person can mend.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any time: nothing that is not stored was confirmed.
    pub async fn run(self, stop: watch::Receiver<bool>) -> Result<Stopped, Fault> {
        let Self { mut intake, keeper, mut lane, items, confirmed } = self;
        let result = tokio::select! {
            biased;
            result = async { tokio::try_join!(intake.run(items, stop), lane.run()) } => result,
            never = keeper.run() => match never {},
        };
        match &result {
            Ok(_) => keeper.finish().await,
            Err(fault) if fault.action == Action::Gap => keeper.note_gap(fault).await,
            Err(_) => {}
        }
        let lsn = *confirmed.borrow();
        // After a fault nobody knows what the server's position would mean: it is told nothing more.
        let last = if result.is_ok() { intake.last_told(lsn) } else { None };
        if let Err(fault) = intake.source.close(last).await {
            warn!(code = %fault.code, error = fault.summary(), "the last position may not have been taken");
        }
        let ((), drained) = result?;
        if !drained {
            let fault = Fault::new(error::NOT_DRAINED, Action::Retry, "stopped with events unacknowledged");
            warn!(code = %fault.code, "{fault}");
        }
        info!(confirmed = %lsn.unwrap_or(Lsn::ZERO), drained, "stopped");
        Ok(Stopped { confirmed: lsn, drained })
    }
}
