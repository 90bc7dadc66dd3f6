//! A random run for each publisher mode, on one broker.
//!
//! `fast`, `chain` and `atomic` have a duplicate window of 1 s: nothing there rests on the broker's memory of ids, beside that a
//! late copy is refused for its place. `lanes` and `serial` do rest on it: a message that hangs in a connection that was
//! given up, or in a frozen relay, carries nothing but its id, and comes in when that thaws. So their window is
//! [`LONGEST_HANG`], which no fault of the schedule lasts for but the outages, in which the relay is killed and nothing
//! hangs: there, as in the other modes, reading back alone keeps doubles out.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use waljet_integration::pause;
use waljet_testbed::{Books, wait_for};

use super::bench::Bench;
use super::fault::{Fault, all};
use super::schedule::Schedule;
use super::tally::read_backs;
use super::{LIMIT, length, told_seed, turn};

/// How long a message may hang before it comes in: a relay frozen until another one takes over is the longest.
const LONGEST_HANG: Duration = Duration::from_secs(20);

/// How long the duplicate window is in this mode.
fn window(mode: &str) -> Duration {
    if matches!(mode, "fast" | "chain" | "atomic") { Duration::from_secs(1) } else { LONGEST_HANG }
}

async fn whatever_happens(mode: &str) -> Result<Books> {
    let (length, soak) = length();
    let _turn = turn(soak).await;
    let mut random = fastrand::Rng::with_seed(told_seed(mode)?);
    let window = window(mode);
    let outage = window + Duration::from_secs(4);
    let mut bench = Bench::start(mode, window, random.u64(..)).await?;
    // One outage in a short run, too.
    let first: &[Fault] = if mode == "fast" && !soak { &[Fault::Outage(outage)] } else { &[] };
    let mut schedule = Schedule::new(first, all(soak, outage));
    let end = Instant::now() + length;
    while Instant::now() < end {
        pause(&mut random, 1_500).await;
        let Some(fault) = schedule.next(&mut random) else { break };
        fault.happen(&mut bench, &mut random).await.map_err(|error| error.context(format!("{fault:?}")))?;
    }
    bench.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_fast_mode_the_books_balance_whatever_happens() -> Result<()> {
    whatever_happens("fast").await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_chain_mode_the_books_balance_whatever_happens() -> Result<()> {
    whatever_happens("chain").await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_atomic_mode_the_books_balance_whatever_happens() -> Result<()> {
    whatever_happens("atomic").await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_serial_mode_the_books_balance_whatever_happens() -> Result<()> {
    whatever_happens("serial").await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_lanes_mode_the_books_balance_by_key_whatever_happens() -> Result<()> {
    whatever_happens("lanes").await?.check_by_key()
}

/// The relay is killed at work and PostgreSQL forgets what was confirmed since its last checkpoint; when both are back,
/// the broker has forgotten the ids. In every mode the stream itself keeps doubles out.
async fn outage(mode: &str) -> Result<Books> {
    let mut bench = Bench::start(mode, Duration::from_secs(1), told_seed(mode)?).await?;
    for _ in 0..2 {
        let before = bench.rig.stored().await?;
        wait_for("events to be stored", LIMIT, async || {
            Ok::<_, anyhow::Error>(bench.rig.stored().await? > before + 50)
        })
        .await?;
        // The time is the condition: the broker does not show its window.
        Fault::Outage(Duration::from_millis(1_500)).happen(&mut bench, &mut fastrand::Rng::new()).await?;
    }
    bench.rig.ready().await?;
    let skipped = waljet_integration::status(&bench.rig).await?["events"]["skipped"].as_u64();
    let (times, events) = read_backs(&bench.rig.log());
    ensure!(skipped > Some(0), "the crash brought nothing again, so nothing was tested");
    ensure!(times > 0 && Some(events) >= skipped, "{skipped:?} were skipped, the log says {events}");
    bench.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_fast_mode_an_outage_past_the_duplicate_window_doubles_nothing() -> Result<()> {
    outage("fast").await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_chain_mode_an_outage_past_the_duplicate_window_doubles_nothing() -> Result<()> {
    outage("chain").await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_lanes_mode_an_outage_past_the_duplicate_window_doubles_nothing() -> Result<()> {
    outage("lanes").await?.check_by_key()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_serial_mode_an_outage_past_the_duplicate_window_doubles_nothing() -> Result<()> {
    outage("serial").await?.check()
}
