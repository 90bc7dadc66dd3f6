//! A database and a broker in memory, both faulty by a seed, and the ledger that judges what came of it.
//!
//! Everything runs on tokio's paused clock in one thread, so that a seed repeats a run exactly.

mod broker;
mod database;

pub use broker::{Broker, BrokerFaults, Fence, SimulatedSink};
pub use database::{Database, ScriptedSource, SourceFaults, Transaction, key};
