//! `waljet demo`: a producer, the relay and the books, on throw-away servers that are killed on the way.

mod place;
mod progress;
mod report;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use waljet_testbed::{Books, Counters, Workload, WorkloadOptions, large_transaction, wait_for};

pub(crate) use report::Report;

use place::Place;
use progress::Progress;

/// What the demo is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DemoOptions {
    /// How long events flow between two faults.
    pub(crate) phase: Duration,
    /// Rows of the large transaction.
    pub(crate) large: u32,
    /// Whether all stays up afterwards, until Ctrl-C.
    pub(crate) keep: bool,
    /// Whether the result is JSON.
    pub(crate) json: bool,
}

/// How long the relay may take to store what is committed when all is over.
const SETTLE: Duration = Duration::from_secs(120);

/// How long a clean stop may take.
const STOP: Duration = Duration::from_secs(5);

/// Events in the stream are counted this often.
const LOOK: Duration = Duration::from_millis(250);

/// Runs the demo and prints what came of it. Returns whether the books balance.
///
/// # Errors
///
/// A server cannot be started, or something does not happen in time.
pub(crate) async fn run(options: DemoOptions) -> Result<Report> {
    let started = Instant::now();
    let progress = Progress::new();
    progress.say("starting a private PostgreSQL and a private NATS server");
    let mut place = Place::build().await?;
    progress.say(&place.describe());
    progress.say("waljet init: outbox table, publication, slot and stream");
    place.init().await?;
    progress.say("waljet run");
    place.start_relay()?;

    let workload = Workload::start(WorkloadOptions::new(place.postgres.url())).await?;
    let counters = Arc::clone(workload.counters());
    let watcher = progress.watch(Arc::clone(&counters), place.nats.url());
    let large = trouble(&mut place, &progress, options).await?;
    progress.say("the orders service stops; the relay stores what is left");
    workload.stop().await;
    settle(&place).await?;
    watcher.abort();

    let stop = clean_stop(&mut place).await.context("stop the relay and start it again")?;
    progress.say("reading the books: every event of the outbox table against every message of the stream");
    let books = Books::read(&place.postgres.url(), &place.nats.url(), place::STREAM).await?;
    let report = Report {
        books,
        transactions: Counters::get(&counters.committed) + 1,
        rolled_back: Counters::get(&counters.rolled_back),
        savepoints: Counters::get(&counters.savepoints),
        largest_transaction: large,
        kills: ["relay", "nats-server", "postgres"],
        stop_seconds: stop.as_secs_f64(),
        seconds: started.elapsed().as_secs_f64(),
    };
    report.print(options.json)?;
    if options.keep {
        progress.say(&place.look_around());
        tokio::signal::ctrl_c().await.context("wait for Ctrl-C")?;
    }
    Ok(report)
}

/// Lets events flow, and kills each part once. Returns the rows of the large transaction.
async fn trouble(place: &mut Place, progress: &Progress, options: DemoOptions) -> Result<u32> {
    let flow = || tokio::time::sleep(options.phase);
    let outage = Duration::from_secs(1);
    flow().await;

    progress.say(&format!("one transaction of {} rows", options.large));
    let url = place.postgres.url();
    let large = tokio::spawn(async move { large_transaction(&url, options.large, 200).await });
    tokio::time::sleep(options.phase / 2).await;

    progress.say("kill -9 waljet");
    place.relay()?.kill()?;
    tokio::time::sleep(outage).await;
    place.relay()?.start_again()?;
    progress.say("waljet is back");
    flow().await;
    large.await.context("wait for the large transaction")??;

    progress.say("kill -9 nats-server");
    place.nats.kill().await?;
    tokio::time::sleep(outage).await;
    place.nats.start_again().await?;
    progress.say("nats-server is back");
    flow().await;

    progress.say("kill -9 postgres");
    place.postgres.kill().await?;
    tokio::time::sleep(outage).await;
    place.postgres.start_again().await?;
    progress.say("postgres is back");
    flow().await;
    Ok(options.large)
}

/// Waits until the stream holds as many messages as the table has rows, and the slot is told so.
async fn settle(place: &Place) -> Result<()> {
    let client = waljet_testbed::connect(&place.postgres.url()).await?;
    let row = client.query_one("SELECT count(*), pg_current_wal_lsn()::text FROM outbox", &[]).await?;
    let (committed, end): (i64, String) = (row.try_get(0)?, row.try_get(1)?);
    wait_for("the stream to hold every committed event", SETTLE, async || {
        let stored = place.stored().await?;
        tokio::time::sleep(LOOK).await;
        ensure!(stored >= committed as u64, "{stored} of {committed} events are stored");
        Ok::<_, anyhow::Error>(true)
    })
    .await?;
    let sql = "SELECT confirmed_flush_lsn >= $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name = $2";
    wait_for("the slot's confirmed position to reach the end", SETTLE, async || {
        let row = client.query_one(sql, &[&end, &place::SLOT]).await?;
        Ok::<bool, anyhow::Error>(row.try_get(0)?)
    })
    .await
}

/// Stops the relay cleanly, starts it again, and returns how long the stop took. That nothing is sent again
/// shows in the books.
async fn clean_stop(place: &mut Place) -> Result<Duration> {
    let (status, took) = place.relay()?.terminate(STOP)?;
    ensure!(status.success(), "expected exit code 0 after SIGTERM, found {status}");
    place.relay()?.start_again()?;
    place.ready().await?;
    Ok(took)
}
