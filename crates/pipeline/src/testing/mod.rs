//! A database and a broker in memory, both faulty by a seed, and the ledger that judges what came of it.
//!
//! Everything runs on tokio's paused clock in one thread, so that a seed repeats a run exactly.

mod broker;
mod checkpoints;
mod database;
mod options;

pub use broker::{Broker, BrokerFaults, Fence, SimulatedSink, Together};
pub use checkpoints::MemoryCheckpoints;
pub use database::{Database, ScriptedSource, SourceFaults, Transaction, key};
pub use options::{monitor, options};
