//! Which store keeps the checkpoint, as `checkpoint.store` says.

use waljet_jetstream::CheckpointBucket;
use waljet_pgoutput::Lsn;
use waljet_pipeline::{Action, Check, Checkpoint, Checkpoints, Confirmed, Fault, NoCheckpoints, Replace};
use waljet_postgres::{CheckpointTable, SharedControl};

use crate::config::{CheckpointStore, Config};

/// One of the stores.
#[derive(Debug)]
pub(crate) enum Store {
    /// A table of the source database.
    Postgres(CheckpointTable),
    /// A JetStream bucket.
    Nats(CheckpointBucket),
    /// None.
    None(NoCheckpoints),
}

impl Store {
    /// Takes the configured store; `control` is the source's connection, where there is one.
    pub(crate) fn new(config: &Config, control: SharedControl) -> Self {
        let source = &config.source;
        match config.checkpoint.store {
            CheckpointStore::Postgres => {
                Self::Postgres(CheckpointTable::new(source.connect.clone(), &source.slot, control))
            }
            CheckpointStore::Nats => {
                Self::Nats(CheckpointBucket::new(config.nats.clone(), &config.stream.stream, &source.slot))
            }
            CheckpointStore::None => Self::None(NoCheckpoints),
        }
    }

    /// Looks whether it can be used.
    pub(crate) async fn check(&self) -> Check {
        match self {
            Self::Postgres(table) => table.check().await,
            Self::Nats(bucket) => bucket.check().await,
            Self::None(_) => Check::warning(
                "checkpoint",
                "checkpoint.store is none: a slot that is moved while no relay runs goes unnoticed",
                "set checkpoint.store = \"postgres\" or \"nats\"",
            ),
        }
    }

    /// Tells the store that the operator moves the slot: the next start does not take that for a gap, and goes on past one that
    /// was found before.
    ///
    /// # Errors
    ///
    /// The store does not answer. One that is not there has nothing to be told.
    pub(crate) async fn moved(&self, to: Lsn) -> Result<(), Fault> {
        let stored = match self.load().await {
            Ok(Some(stored)) if stored.confirmed.lsn < to || stored.gap.is_some() => stored,
            Ok(_) => return Ok(()),
            Err(fault) if fault.action == Action::Halt => return Ok(()),
            Err(fault) => return Err(fault),
        };
        let confirmed = Confirmed { lsn: to.max(stored.confirmed.lsn), ..stored.confirmed };
        // What was passed over is not to come from the table one day.
        self.save(&Checkpoint { confirmed, visible: None, gap: None, ..stored }, Replace::Anything).await
    }
}

impl Checkpoints for Store {
    fn name(&self) -> &'static str {
        match self {
            Self::Postgres(store) => store.name(),
            Self::Nats(store) => store.name(),
            Self::None(store) => store.name(),
        }
    }

    fn own_wal(&self) -> u64 {
        match self {
            Self::Postgres(store) => store.own_wal(),
            Self::Nats(store) => store.own_wal(),
            Self::None(store) => store.own_wal(),
        }
    }

    async fn load(&self) -> Result<Option<Checkpoint>, Fault> {
        match self {
            Self::Postgres(store) => store.load().await,
            Self::Nats(store) => store.load().await,
            Self::None(store) => store.load().await,
        }
    }

    async fn save(&self, checkpoint: &Checkpoint, replace: Replace) -> Result<(), Fault> {
        match self {
            Self::Postgres(store) => store.save(checkpoint, replace).await,
            Self::Nats(store) => store.save(checkpoint, replace).await,
            Self::None(store) => store.save(checkpoint, replace).await,
        }
    }
}
