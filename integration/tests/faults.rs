//! Everything is killed under load, and the books must balance.
//!
//! The moments come from a seed, which is printed; `WALJET_SEED=7` repeats it. Random schedules of all faults are in
//! `soak`.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use waljet_integration::{newest, oldest, options, pause, seed};
use waljet_testbed::{Durability, Pair, Rig, Workload, WorkloadOptions, wait_for};

const LIMIT: Duration = Duration::from_secs(120);

/// Kills in each of the tests that kill one thing again and again.
const KILLS: usize = 20;

fn told_seed() -> Result<u64> {
    let seed = seed()?;
    println!("repeat with WALJET_SEED={seed}");
    Ok(seed)
}

/// Load that leaves the servers room to be killed in the middle of something.
async fn load(rig: &Rig, seed: u64) -> Result<Workload> {
    Workload::start(WorkloadOptions { rate: Some(400.0), seed, ..WorkloadOptions::new(rig.postgres.url()) }).await
}

/// Stops the load, waits until all is stored, and reads the books.
async fn balance(rig: &Rig, workload: Workload) -> Result<()> {
    workload.stop().await;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    println!("{books}");
    ensure!(books.committed > 100, "there was hardly any load: {books}");
    books.check()
}

async fn kill_the_relay(mut rig: Rig) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(told_seed()?);
    rig.up().await?;
    let workload = load(&rig, random.u64(..)).await?;
    for _ in 0..KILLS {
        pause(&mut random, 500).await;
        rig.relay()?.start_again()?;
    }
    balance(&rig, workload).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_is_killed_twenty_times_loses_and_doubles_nothing() -> Result<()> {
    kill_the_relay(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_is_killed_twenty_times_loses_and_doubles_nothing_on_the_oldest_servers() -> Result<()> {
    kill_the_relay(oldest().await?).await
}

async fn kill_the_broker(mut rig: Rig) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(told_seed()?);
    rig.up().await?;
    let workload = load(&rig, random.u64(..)).await?;
    for _ in 0..KILLS {
        pause(&mut random, 500).await;
        rig.nats.kill().await?;
        pause(&mut random, 200).await;
        rig.nats.start_again().await?;
    }
    balance(&rig, workload).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_killed_twenty_times_loses_and_doubles_nothing() -> Result<()> {
    kill_the_broker(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_killed_twenty_times_loses_and_doubles_nothing_on_the_oldest_servers() -> Result<()> {
    kill_the_broker(oldest().await?).await
}

/// Crashes need what a server promises about commits, so this one syncs to disk.
async fn kill_postgres(pair: &Pair) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(told_seed()?);
    let mut options = options(pair)?;
    options.postgres.durability = Durability::Durable;
    let mut rig = Rig::start(options).await?;
    rig.up().await?;
    let workload = load(&rig, random.u64(..)).await?;
    for round in 0..8 {
        pause(&mut random, 800).await;
        if round % 2 == 0 {
            rig.postgres.kill().await?;
        } else {
            rig.postgres.stop_immediate().await?;
        }
        rig.postgres.start_again().await?;
    }
    balance(&rig, workload).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_crashes_again_and_again_loses_and_doubles_nothing() -> Result<()> {
    kill_postgres(&Pair::newest()?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_crashes_again_and_again_loses_and_doubles_nothing_on_the_oldest_servers() -> Result<()> {
    kill_postgres(&Pair::oldest()?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_full_holds_all_back_and_goes_on_when_room_is_made() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    let client = async_nats::connect(rig.nats.url()).await?;
    let context = async_nats::jetstream::new(client);
    let mut config = context.get_stream("OUTBOX").await?.cached_info().config.clone();
    config.max_messages = 200;
    config.discard = async_nats::jetstream::stream::DiscardPolicy::New;
    context.update_stream(&config).await?;
    let workload = load(&rig, told_seed()?).await?;
    let reason = rig.not_ready(Duration::from_secs(15)).await?;
    ensure!(reason.contains("stream-full"), "{reason}");
    let client = waljet_testbed::connect(&rig.postgres.url()).await?;
    let confirmed = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots";
    // What found room is confirmed, if need be after the stream was read back; then the position stands still.
    let position = async || Ok::<String, anyhow::Error>(client.query_one(confirmed, &[]).await?.get(0));
    wait_for("the position to stand still", LIMIT, async || {
        let before = position().await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        ensure!(position().await? == before && rig.stored().await? == 200, "it moved on from {before}");
        Ok::<_, anyhow::Error>(true)
    })
    .await?;
    let committed: i64 = client.query_one("SELECT count(*) FROM outbox", &[]).await?.get(0);
    ensure!(committed > 200, "nothing was committed past what found room");
    let reason = rig.not_ready(Duration::from_secs(5)).await?;
    ensure!(reason.contains("stream-full"), "{reason}");
    let process = rig.relay()?.pid();
    config.max_messages = -1;
    context.update_stream(&config).await?;
    // Seconds, and no restart: what the relay waits between two tries is less than this.
    let goes_on = async || Ok::<_, anyhow::Error>(rig.stored().await? > 200);
    wait_for("events to be stored again", Duration::from_secs(15), goes_on).await?;
    rig.ready().await?;
    balance(&rig, workload).await?;
    ensure!(rig.relay()?.pid() == process && rig.relay()?.ended()?.is_none(), "the relay was restarted");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_relay_that_wakes_up_neither_doubles_nor_confirms() -> Result<()> {
    let mut rig = newest().await?;
    rig.postgres.set(&[("wal_sender_timeout", "2s")]).await?;
    rig.up().await?;
    let workload = load(&rig, told_seed()?).await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    rig.relay()?.signal(libc::SIGSTOP)?;
    tokio::time::sleep(Duration::from_secs(4)).await;
    rig.relay()?.signal(libc::SIGCONT)?;
    rig.ready().await?;
    balance(&rig, workload).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_waits_and_takes_over_within_two_seconds_of_the_first_ones_death() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    let workload = load(&rig, told_seed()?).await?;
    let mut standby = rig.second_relay()?;
    wait_for("the second relay to wait", LIMIT, async || standby.log().contains("slot-active")).await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(standby.ended()?.is_none(), "{}", standby.log());
    rig.relay()?.kill()?;
    let killed = Instant::now();
    wait_for("the second relay to stream", LIMIT, async || standby.log().contains("replication started")).await?;
    let took = killed.elapsed();
    ensure!(took < Duration::from_secs(2), "it took {took:?}");
    balance(&rig, workload).await
}
