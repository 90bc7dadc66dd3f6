//! The preflight: what would keep the relay from working, each with what mends it.
//!
//! Looks at everything that can be looked at, whatever was found before. `LOGIN` and `REPLICATION` are all
//! that the role needs for it.

use std::fmt;

use waljet_pipeline::{Check, Fault};

use crate::control::Control;
use crate::dial::{HANDSHAKE_TIMEOUT, dial};
use crate::replication::identify_system;
use crate::source::SourceOptions;
use crate::wire::Wire;

mod publication;
mod server;
mod slot;
mod table;

/// Runs all checks of the database's end.
pub async fn check(options: &SourceOptions) -> Vec<Check> {
    let mut checks = Vec::new();
    let control = match Control::connect(&options.connect).await {
        Ok(control) => control,
        Err(fault) => {
            checks.push(Check::fault("connection", fault));
            return checks;
        }
    };
    checks.push(Check::good("connection", options.connect.describe()));
    let settings = match server::check(&control, options, &mut checks).await {
        Ok(settings) => settings,
        Err(fault) => {
            checks.push(Check::fault("server", fault));
            return checks;
        }
    };
    checks.push(replication_connection(&control, options).await);
    run("table", table::check(&control, options).await, &mut checks);
    run("publication", publication::check(&control, options).await, &mut checks);
    run("slot", slot::check(&control, options, &settings).await, &mut checks);
    checks
}

/// Takes the lines of one part, or the fault that kept it from being looked at.
fn run(name: &str, lines: Result<Vec<Check>, Fault>, checks: &mut Vec<Check>) {
    match lines {
        Ok(lines) => checks.extend(lines),
        Err(fault) => checks.push(Check::fault(name, fault)),
    }
}

/// Opens the kind of connection that the stream needs: poolers and `pg_hba.conf` treat it differently.
async fn replication_connection(control: &Control, options: &SourceOptions) -> Check {
    const NAME: &str = "replication connection";
    let attempt = async {
        let stream = dial(&options.connect, &control.endpoint).await?;
        let end_point = stream.server_end_point();
        let mut wire = Wire::start(stream, &options.connect, end_point, HANDSHAKE_TIMEOUT).await?;
        identify_system(&mut wire).await
    };
    match Box::pin(attempt).await {
        Ok(system) => {
            Check::good(NAME, format!("system {}, timeline {}", system.history.system_id, system.history.timeline))
        }
        Err(fault) => Check::fault(NAME, fault),
    }
}

/// Makes a check of something that may be a fault.
fn verdict(name: impl Into<String>, fault: Option<Fault>, good: impl fmt::Display) -> Check {
    match fault {
        Some(fault) => Check::fault(name, fault),
        None => Check::good(name, good.to_string()),
    }
}
