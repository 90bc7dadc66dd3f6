//! Faults that others have reported of such relays, each made to happen to this one.
//!
//! `docs/fault-cases.md` lists the cases, also those that tests elsewhere cover.

mod brokers;
mod cluster;
mod connection;
mod deduplication;
mod expiry;
mod limits;
mod positions;
mod process;
mod publishing;
mod transactions;

use std::time::Duration;

use anyhow::Result;
use waljet_testbed::{Rig, connect};

/// How long a relay may take to get somewhere.
const LIMIT: Duration = Duration::from_secs(60);

/// Asks PostgreSQL for one position, in bytes of WAL since the beginning.
async fn position(rig: &Rig, what: &str) -> Result<i64> {
    let sql = format!("SELECT ({what} - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = 'waljet'");
    Ok(connect(&rig.postgres.url()).await?.query_one(&sql, &[]).await?.try_get(0)?)
}

/// The end of the WAL.
const END: &str = "pg_current_wal_lsn()";

/// What the slot was told.
const CONFIRMED: &str = "confirmed_flush_lsn";
