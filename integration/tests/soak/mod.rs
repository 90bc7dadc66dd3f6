//! The fault bench: random schedules of faults under load, in every publisher mode, and the books at the end.
//!
//! - [`schedule`]: when which fault comes, from a seed.
//! - [`fault`]: what is done to a relay between one broker and one database.
//! - [`bench`]: the servers, the proxies and the load that a run needs.
//! - [`tally`]: what was done, counted.
//! - [`runs`]: one run for each publisher mode; [`cluster`]: three brokers; [`disk`]: a disk that fills up.
//!
//! The seed is printed, and `WALJET_SEED=7` repeats the schedule (what the servers do in between is theirs).
//! `WALJET_SOAK_MINUTES`, set by `./test --soak`, is divided among the random runs, which then go one after the other,
//! so that together they take about that long.

mod bench;
mod cluster;
mod disk;
mod fault;
mod runs;
mod schedule;
mod steady;
mod tally;

use std::io::Write;
use std::time::Duration;

/// How long a run may take to come to rest after the last fault.
const LIMIT: Duration = Duration::from_secs(180);

/// The random runs that share the minutes: five modes on one broker, two on three.
const RUNS: u32 = 7;

/// How long a run goes on unless minutes are given.
const SHORT: Duration = Duration::from_secs(12);

/// Only one run at a time has the minutes.
static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// How long one run goes on, and whether that is a soak.
fn length() -> (Duration, bool) {
    match std::env::var("WALJET_SOAK_MINUTES") {
        Ok(text) => (Duration::from_secs(text.parse::<u64>().unwrap() * 60) / RUNS, true),
        Err(_) => (SHORT, false),
    }
}

/// Waits for the turn of a run, where runs take turns.
async fn turn(soak: bool) -> Option<tokio::sync::MutexGuard<'static, ()>> {
    if soak { Some(TURN.lock().await) } else { None }
}

/// Says something that is seen although the test passes: the test harness keeps what is printed by `println!`.
fn say(text: &str) {
    // Nobody is left to tell.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The seed of a run.
fn told_seed(run: &str) -> anyhow::Result<u64> {
    let seed = waljet_integration::seed()?;
    say(&format!("{run}: repeat with WALJET_SEED={seed}"));
    Ok(seed)
}
