//! The testbed against the servers it starts.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

mod leaks;
mod nats;
mod postgres;
mod process;
mod proxy;
