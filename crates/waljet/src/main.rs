//! The binary: reads what was typed and configured, puts source, pipeline and sink together, and says how
//! it went.
//!
//! This crate must not hold a delivery rule; it only wires.

mod admin;
mod assemble;
mod catch_up;
mod checkpoint;
mod cli;
mod config;
mod demo;
mod error;
mod gap;
mod metrics;
mod preflight;
mod render;
mod secret;
mod signal;
mod telemetry;

use std::process::ExitCode;

use clap::Parser;

use crate::error::{START, halt};
use crate::render::{Exit, outcome};

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help whose reader has gone away is help that was given.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage } else { Exit::Done }.into();
        }
    };
    // Two crates of the tree could each bring a provider; the process has one.
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        return outcome(Err(halt(START, "install the TLS provider").into()));
    }
    outcome(cli::dispatch(&cli))
}
