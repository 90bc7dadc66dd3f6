//! Catch-up: what a lost slot would have sent is published from the outbox table, up to where a new slot begins.
//!
//! A checkpoint that says so is stored first. Whatever is killed after that, the next start finds it and begins anew; what is
//! stored by then is found in the stream by its id. See `docs/decisions/0009`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tracing::info;
use waljet_jetstream::Matching;
use waljet_pgoutput::Lsn;
use waljet_pipeline::error::GAP_PENDING;
use waljet_pipeline::{Action, Checkpoint, Checkpoints, Confirmed, Fault, Replace};
use waljet_postgres::error::{
    CATCH_UP, PUBLICATION_MISSING, SLOT_ACTIVE, SLOT_INVALIDATED, SLOT_MISSING, SLOT_MOVED, WAL_REMOVED, other_cluster,
    wal_behind,
};
use waljet_postgres::slot::{self, DEFAULT_CREATE_WAIT};
use waljet_postgres::{CatchUp, Failover, SharedControl, SlotState, SourceWatch, TableOptions, TableSource, Turn};

use crate::assemble::{Ends, Gap, Relay, Views, assemble_with, now};
use crate::checkpoint::Store;
use crate::config::{CheckpointStore, Config};
use crate::error::{ABORTED, CATCH_UP_BLIND, halt};
use crate::render::Failure;
use crate::signal::Shutdown;

/// How often a long catch-up tells how far it is.
const PROGRESS: Duration = Duration::from_secs(5);

/// What is lost with a slot, and is in the table all the same.
const CLOSABLE: [&str; 6] =
    [SLOT_MISSING.0, SLOT_INVALIDATED.0, SLOT_MOVED.0, WAL_REMOVED.0, PUBLICATION_MISSING.0, CATCH_UP.0];

/// Returns whether all of these are gaps that the table closes.
pub(crate) fn closes(faults: &[Fault]) -> bool {
    let closable = |fault: &Fault| {
        let noted = |code: &&str| fault.message.ends_with(&format!("[{code}]"));
        CLOSABLE.contains(&fault.code.0) || fault.code == GAP_PENDING && CLOSABLE.iter().any(noted)
    };
    !faults.is_empty() && faults.iter().all(|fault| fault.action == Action::Gap && closable(fault))
}

/// How a catch-up ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Everything is stored, and the slot goes on from there.
    CaughtUp,
    /// It was told to stop before.
    Stopped,
}

/// A catch-up whose slot is there, and which is ready to run.
pub(crate) struct Prepared {
    relay: Relay<TableSource, Held>,
    store: Store,
    about: CatchUp,
    /// The checkpoint that says that it is not finished.
    pending: Checkpoint,
    done: watch::Receiver<bool>,
    /// Kept until the checkpoint says that it is finished.
    turn: Turn,
}

/// Stores what is to be done, creates the slot and begins to read the table.
///
/// # Errors
///
/// The table cannot be read as it would have to be, the store of the checkpoint does not answer, or the stream no longer tells
/// what it was given. [`SLOT_ACTIVE`] where there is nothing to be done any more, or another relay does it.
pub(crate) async fn prepare(config: &Config, failover: Failover) -> Result<Prepared, Fault> {
    let (connect, name) = (&config.source.connect, &config.source.slot);
    if config.checkpoint.store == CheckpointStore::None {
        let what = "a catch-up needs a stored checkpoint, and checkpoint.store is \"none\"";
        return Err(halt(CATCH_UP, what).hint("set checkpoint.store = \"postgres\" or \"nats\""));
    }
    let Some(sequence) = config.catch_up.sequence.clone() else {
        let what = format!("a catch-up needs to know in which order the rows of {} were inserted", config.source.table);
        return Err(halt(CATCH_UP, what).hint("set outbox.columns.sequence to a column that grows with each insert"));
    };
    // All that follows is looked at anew: what led here may be made up for by now.
    let turn = Turn::take(connect, name).await?;
    let (server, history) = (turn.server(), turn.server().history);
    let store = Store::new(config, SharedControl::default());
    let stored = store.load().await?;
    let old = slot::show(connect, name).await?;
    if let Some(stored) = &stored {
        let confirmed = stored.confirmed;
        if confirmed.history.system_id != history.system_id {
            return Err(other_cluster(confirmed.history.system_id, history.system_id));
        }
        // Transactions that the server lost may have left their ids to others, which would pass for stored.
        if !server.includes(confirmed) {
            return Err(wal_behind(confirmed, server));
        }
        if old.as_ref().is_some_and(|old| goes_on(old, stored, store.own_wal())) {
            return Err(Fault::new(SLOT_ACTIVE, Action::Retry, format!("slot {name:?} has nothing to make up for")));
        }
    }
    let visible = stored.as_ref().and_then(|stored| stored.visible.clone());
    let stored_rows = config.catch_up.xid.clone().zip(visible.clone());
    if stored_rows.is_none() {
        all_ids_are_there(config).await?;
    }
    let pending = Checkpoint {
        confirmed: stored.as_ref().map_or(Confirmed { history, lsn: Lsn::ZERO }, |stored| stored.confirmed),
        stream: stored.and_then(|stored| stored.stream),
        visible,
        gap: Some(format!("a catch-up from {} was not finished [{CATCH_UP}]", config.source.table)),
        at: now(),
    };
    store.save(&pending, Replace::Anything).await?;
    let mut failover = failover;
    if let Some(old) = old {
        if old.failover == Some(true) {
            failover = Failover::On;
        }
        slot::drop(connect, name).await?;
        info!(slot = name, "dropped the slot that has lost its place");
    }
    let options = TableOptions {
        connect: connect.clone(),
        slot: name.clone(),
        failover,
        table: config.source.table.clone(),
        sequence,
        stored: stored_rows,
        wait: DEFAULT_CREATE_WAIT,
    };
    let (source, about) = TableSource::create(options).await?;
    let done = source.done();
    let held = Held { name: store.name(), checkpoint: Checkpoint { gap: None, ..pending.clone() } };
    let watch = watch::channel(SourceWatch::default()).1;
    let ends = Ends { source, watch, store: held, matching: Matching::Id };
    let relay = assemble_with(config, ends, Gap::Refuse)?;
    Ok(Prepared { relay, store, about, pending, done, turn })
}

/// Returns whether a slot has all that its relay lacks, as it has once another relay has made up for it.
fn goes_on(slot: &SlotState, stored: &Checkpoint, own_wal: u64) -> bool {
    let moved = |stands: Lsn| stands.bytes_since(stored.confirmed.lsn) > own_wal;
    slot.invalidation_reason.is_none() && stored.gap.is_none() && !slot.confirmed_flush.is_none_or(moved)
}

/// Refuses to compare all rows with a stream that has lost some of its messages: the events of those would be sent again.
async fn all_ids_are_there(config: &Config) -> Result<(), Fault> {
    let client = waljet_jetstream::connect(&config.nats).await?;
    let stream = &config.stream.stream;
    if waljet_jetstream::is_whole(&client, &config.nats, stream).await? {
        return Ok(());
    }
    let what = format!(
        "stream {stream:?} no longer holds all that it was given, and the checkpoint does not tell which rows of {} are stored",
        config.source.table
    );
    Err(Fault::new(CATCH_UP_BLIND, Action::Gap, what).hint(
        "compare the table with what consumers have, publish what is missing by hand, then: waljet run --accept-gap",
    ))
}

impl Prepared {
    /// What tells how it is doing.
    pub(crate) fn views(&self) -> &Arc<Views> {
        &self.relay.views
    }

    /// Publishes what is missing. `tell` is called now and then with how many rows are settled, and of how many.
    ///
    /// # Errors
    ///
    /// A fault that only a person can mend, or [`CATCH_UP`] where it has to be begun anew.
    pub(crate) async fn run(self, shutdown: &mut Shutdown, tell: impl Fn(u64, u64)) -> Result<Ended, Failure> {
        let Self { relay, store, about, pending, mut done, turn } = self;
        info!(rows = about.rows, up_to = %about.at.lsn, "catching up from the table");
        let finished = done.clone();
        let (stop, stopped) = watch::channel(false);
        let mut running = Box::pin(relay.pipeline.run(stopped));
        let mut aborting = shutdown.clone();
        let mut ticks = tokio::time::interval(PROGRESS);
        ticks.tick().await;
        let ended = loop {
            tokio::select! {
                biased;
                () = aborting.aborting() => {
                    let fault = halt(ABORTED, "aborted by a second signal during a catch-up");
                    return Err(fault.hint("nothing is lost: the next start begins the catch-up anew").into());
                }
                () = shutdown.draining(), if !*stop.borrow() => drop(stop.send_replace(true)),
                _ = done.wait_for(|done| *done), if !*stop.borrow() => drop(stop.send_replace(true)),
                _ = ticks.tick() => tell(relay.views.settled(), about.rows),
                ended = &mut running => break ended,
            }
        };
        ended?;
        if !*finished.borrow() {
            return Ok(Ended::Stopped);
        }
        let (confirmed, visible) = (about.at, Some(about.visible));
        store.save(&Checkpoint { confirmed, visible, gap: None, at: now(), ..pending }, Replace::Anything).await?;
        drop(turn);
        tell(relay.views.settled(), about.rows);
        info!(up_to = %confirmed.lsn, "caught up; going on with the slot");
        Ok(Ended::CaughtUp)
    }
}

/// The checkpoint as it was before: it does not move until the catch-up is finished.
#[derive(Debug)]
struct Held {
    name: &'static str,
    checkpoint: Checkpoint,
}

impl Checkpoints for Held {
    fn name(&self) -> &'static str {
        self.name
    }

    fn own_wal(&self) -> u64 {
        u64::MAX
    }

    async fn load(&self) -> Result<Option<Checkpoint>, Fault> {
        Ok(Some(self.checkpoint.clone()))
    }

    async fn save(&self, _: &Checkpoint, _: Replace) -> Result<(), Fault> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use waljet_pipeline::error::STREAM_AHEAD;
    use waljet_pipeline::pending_gap;

    use super::*;

    #[test]
    fn a_lost_slot_is_made_up_for_from_the_table_and_other_gaps_are_not() {
        let gap = |code| Fault::new(code, Action::Gap, "what");
        assert!(closes(&[gap(SLOT_MISSING)]) && closes(&[gap(SLOT_MOVED), gap(WAL_REMOVED)]));
        assert!(!closes(&[]) && !closes(&[gap(STREAM_AHEAD)]) && !closes(&[gap(SLOT_MOVED), gap(STREAM_AHEAD)]));
        // A slot that was never read from is missing, and init makes it.
        assert!(!closes(&[Fault::new(SLOT_MISSING, Action::Halt, "what")]));
        assert!(closes(&[pending_gap("slot \"w\" stands elsewhere [slot-moved]")]));
        assert!(!closes(&[pending_gap("the stream went back [stream-went-back]")]));
    }
}
