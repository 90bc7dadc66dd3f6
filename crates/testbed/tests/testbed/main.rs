//! The testbed against the servers it starts.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

// These look at processes in /proc.
#[cfg(target_os = "linux")]
mod leaks;
#[cfg(target_os = "linux")]
mod nats;
#[cfg(target_os = "linux")]
mod postgres;
#[cfg(target_os = "linux")]
mod process;
mod proxy;
