//! `waljet demo`: a producer, the relay and the books, on throw-away servers that are killed on the way.

mod progress;
mod report;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use waljet_testbed::{
    Counters, Durability, Pair, PostgresOptions, Rig, RigOptions, STREAM, Workload, WorkloadOptions, large_transaction,
};

pub(crate) use report::Report;

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

/// Runs the demo and prints what came of it. Returns whether the books balance.
///
/// # Errors
///
/// A server cannot be started, or something does not happen in time.
pub(crate) async fn run(options: DemoOptions) -> Result<Report> {
    let started = Instant::now();
    let progress = Progress::new();
    progress.say("starting a private PostgreSQL and a private NATS server");
    let mut rig = rig().await?;
    progress.say(&describe(&rig));
    progress.say("waljet init: outbox table, publication, slot and stream");
    rig.init().await?;
    progress.say("waljet run");
    rig.start_relay()?;
    rig.ready().await?;

    let workload = Workload::start(WorkloadOptions::new(rig.postgres.url())).await?;
    let counters = Arc::clone(workload.counters());
    let watcher = progress.watch(Arc::clone(&counters), rig.nats.url());
    let large = trouble(&mut rig, &progress, options).await?;
    progress.say("the orders service stops; the relay stores what is left");
    workload.stop().await;
    rig.settle(SETTLE).await?;
    watcher.abort();

    let stop = clean_stop(&mut rig).await.context("stop the relay and start it again")?;
    progress.say("reading the books: every event of the outbox table against every message of the stream");
    let books = rig.books().await?;
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
        progress.say(&look_around(&rig)?);
        tokio::signal::ctrl_c().await.context("wait for Ctrl-C")?;
    }
    Ok(report)
}

/// Lets events flow, and kills each part once. Returns the rows of the large transaction.
async fn trouble(rig: &mut Rig, progress: &Progress, options: DemoOptions) -> Result<u32> {
    let flow = || tokio::time::sleep(options.phase);
    let outage = Duration::from_secs(1);
    flow().await;

    progress.say(&format!("one transaction of {} rows", options.large));
    let url = rig.postgres.url();
    let large = tokio::spawn(async move { large_transaction(&url, options.large, 200).await });
    tokio::time::sleep(options.phase / 2).await;

    progress.say("kill -9 waljet");
    rig.relay()?.kill()?;
    tokio::time::sleep(outage).await;
    rig.relay()?.start_again()?;
    progress.say("waljet is back");
    flow().await;
    large.await.context("wait for the large transaction")??;

    progress.say("kill -9 nats-server");
    rig.nats.kill().await?;
    tokio::time::sleep(outage).await;
    rig.nats.start_again().await?;
    progress.say("nats-server is back");
    flow().await;

    progress.say("kill -9 postgres");
    rig.postgres.kill().await?;
    tokio::time::sleep(outage).await;
    rig.postgres.start_again().await?;
    progress.say("postgres is back");
    flow().await;
    Ok(options.large)
}

/// Stops the relay cleanly, starts it again, and returns how long the stop took. That nothing is sent again
/// shows in the books.
async fn clean_stop(rig: &mut Rig) -> Result<Duration> {
    let (status, took) = rig.relay()?.terminate(STOP)?;
    ensure!(status.success(), "expected exit code 0 after SIGTERM, found {status}");
    rig.relay()?.start_again()?;
    rig.ready().await?;
    Ok(took)
}

async fn rig() -> Result<Rig> {
    let pair = Pair::newest()?;
    let program = std::env::current_exe().context("find the waljet program")?;
    let postgres = PostgresOptions { durability: Durability::Durable, ..PostgresOptions::new(&pair) };
    Rig::start(RigOptions { postgres, ..RigOptions::new(program, &pair) }).await
}

/// One line about what runs where.
fn describe(rig: &Rig) -> String {
    format!("{}, {}, relay log {}", rig.postgres.url(), rig.nats.url(), rig.log_path().display())
}

/// What a person can type while all stays up.
fn look_around(rig: &Rig) -> Result<String> {
    let program = std::env::current_exe().context("find the waljet program")?;
    let (program, config) = (program.display(), rig.config());
    let (config, postgres, nats, admin) = (config.display(), rig.postgres.url(), rig.nats.url(), rig.admin_port());
    Ok(format!(
        "all stays up until Ctrl-C; in another terminal:\n  \
         {program} --config {config} status\n  \
         psql {postgres} -c \"INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) \
         VALUES ('order', '42', 'created', '{{}}')\"\n  \
         nats --server {nats} stream view {STREAM}\n  \
         curl http://127.0.0.1:{admin}/metrics"
    ))
}
