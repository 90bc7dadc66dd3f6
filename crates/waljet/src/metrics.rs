//! The metrics that are about the relay as a whole rather than about its pipeline.

use prometheus::{Error, IntGauge, IntGaugeVec, Opts, Registry};
use waljet_postgres::SlotState;

/// What `waljet_slot_safe_bytes` says where the server keeps WAL without a limit.
const UNLIMITED: i64 = -1;

/// Gauges of the slot and of the build.
#[derive(Debug)]
pub(crate) struct RelayMetrics {
    retained: IntGauge,
    safe: IntGauge,
}

impl RelayMetrics {
    /// Makes the gauges and registers them.
    ///
    /// # Errors
    ///
    /// The registry holds one of the names already.
    pub(crate) fn register(registry: &Registry) -> Result<Self, Error> {
        let gauge = |name, help| {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, Error>(gauge)
        };
        let build = IntGaugeVec::new(Opts::new("waljet_build_info", "The version, always 1."), &["version"])?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        registry.register(Box::new(build))?;
        gauge("waljet_dead_letters", "Events that were set aside since they can never be stored.")?;
        Ok(Self {
            retained: gauge("waljet_slot_retained_bytes", "WAL that the server keeps for the slot.")?,
            safe: gauge(
                "waljet_slot_safe_bytes",
                "WAL that may still be written before the slot is in danger; -1 without max_slot_wal_keep_size.",
            )?,
        })
    }

    /// Sets the gauges from the slot as it was last read.
    pub(crate) fn set(&self, slot: Option<&SlotState>) {
        let retained = slot.and_then(|slot| slot.retained_bytes).unwrap_or(0);
        self.retained.set(i64::try_from(retained).unwrap_or(i64::MAX));
        self.safe.set(slot.and_then(|slot| slot.safe_wal_size).unwrap_or(UNLIMITED));
    }
}
