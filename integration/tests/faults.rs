//! Everything is killed under load, and the books must balance.
//!
//! The moments come from a seed, which is printed; `WALJET_SEED=7` repeats it. `WALJET_SOAK_MINUTES` (set by
//! `./test --soak`) makes the random schedule go on for that long.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use waljet_integration::{newest, oldest, options, status};
use waljet_testbed::{Durability, Mode, Pair, Proxy, Rig, Workload, WorkloadOptions, wait_for};

const LIMIT: Duration = Duration::from_secs(120);

/// Kills in each of the tests that kill one thing again and again.
const KILLS: usize = 20;

fn seed() -> u64 {
    let seed = std::env::var("WALJET_SEED").ok().map_or_else(|| fastrand::u64(..), |text| text.parse().unwrap());
    println!("repeat with WALJET_SEED={seed}");
    seed
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

async fn pause(random: &mut fastrand::Rng, most_millis: u64) {
    tokio::time::sleep(Duration::from_millis(random.u64(20..most_millis))).await;
}

async fn kill_the_relay(mut rig: Rig) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(seed());
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
    let mut random = fastrand::Rng::with_seed(seed());
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
    let mut random = fastrand::Rng::with_seed(seed());
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
async fn outages_longer_than_the_duplicate_window_double_nothing() -> Result<()> {
    let mut rig = newest().await?;
    rig.set("nats.duplicate_window", "1s")?;
    rig.up().await?;
    let workload = load(&rig, seed()).await?;
    for _ in 0..2 {
        // The relay dies in the middle of its work, and PostgreSQL forgets what was confirmed since its last checkpoint.
        tokio::time::sleep(Duration::from_millis(700)).await;
        rig.relay()?.kill()?;
        rig.postgres.kill().await?;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        rig.postgres.start_again().await?;
        rig.relay()?.start_again()?;
    }
    rig.ready().await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let skipped = status(&rig).await?["events"]["skipped"].clone();
    ensure!(skipped.as_u64() > Some(0), "the crash brought nothing again, so nothing was tested: {skipped}");
    balance(&rig, workload).await
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
    let workload = load(&rig, seed()).await?;
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
    rig.not_ready(Duration::from_secs(5)).await?;
    config.max_messages = -1;
    context.update_stream(&config).await?;
    rig.ready().await?;
    balance(&rig, workload).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_relay_that_wakes_up_neither_doubles_nor_confirms() -> Result<()> {
    let mut rig = newest().await?;
    rig.postgres.set(&[("wal_sender_timeout", "2s")]).await?;
    rig.up().await?;
    let workload = load(&rig, seed()).await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    rig.relay()?.signal(libc::SIGSTOP)?;
    tokio::time::sleep(Duration::from_secs(4)).await;
    rig.relay()?.signal(libc::SIGCONT)?;
    rig.ready().await?;
    balance(&rig, workload).await
}

/// A random schedule of all faults at once, through proxies on both sides.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_happens_under_load_the_books_balance() -> Result<()> {
    let minutes: Option<u64> = std::env::var("WALJET_SOAK_MINUTES").ok().map(|text| text.parse().unwrap());
    let length = minutes.map_or(Duration::from_secs(20), |minutes| Duration::from_secs(minutes * 60));
    let mut random = fastrand::Rng::with_seed(seed());
    let pair = Pair::newest()?;
    let mut options = options(&pair)?;
    options.postgres.durability = Durability::Durable;
    options.postgres.settings.push(("wal_sender_timeout".into(), "3s".into()));
    let mut rig = Rig::start(options).await?;
    let (postgres, nats) = (Proxy::start(rig.postgres.port())?, Proxy::start(rig.nats.port())?);
    rig.set("postgres.url", &rig.postgres.url_at(postgres.port()))?;
    rig.set("nats.url", &rig.nats.url_at(nats.port()))?;
    rig.set("nats.duplicate_window", "1s")?;
    rig.set("publisher.ack_timeout", "1s")?;
    rig.up().await?;
    let workload = load(&rig, random.u64(..)).await?;
    let mut count = [0; 8];
    let end = Instant::now() + length;
    while Instant::now() < end {
        pause(&mut random, 1_500).await;
        let fault = random.usize(0..count.len());
        count[fault] += 1;
        match fault {
            0 => rig.relay()?.start_again()?,
            1 => {
                rig.nats.kill().await?;
                pause(&mut random, 2_000).await;
                rig.nats.start_again().await?;
            }
            2 => {
                rig.postgres.kill().await?;
                pause(&mut random, 500).await;
                rig.postgres.start_again().await?;
            }
            3 => {
                rig.nats.freeze().await?;
                pause(&mut random, 3_000).await;
                rig.nats.thaw().await?;
            }
            4 => postgres.reset_connections()?,
            5 => nats.reset_connections()?,
            6 => stall(&postgres, &mut random).await?,
            _ => stall(&nats, &mut random).await?,
        }
    }
    let names = ["relay killed", "broker killed", "database killed", "broker frozen"];
    let more = ["database cut", "broker cut", "database stalled", "broker stalled"];
    for (name, count) in names.iter().chain(&more).zip(count) {
        println!("{name}: {count}");
    }
    wait_for("the relay to be ready", LIMIT, async || rig.ready().await.map(|()| true)).await?;
    balance(&rig, workload).await
}

/// Lets a connection hang in one direction or both.
async fn stall(proxy: &Proxy, random: &mut fastrand::Rng) -> Result<()> {
    let direction =
        [waljet_testbed::Direction::Both, waljet_testbed::Direction::ToServer, waljet_testbed::Direction::ToClient]
            [random.usize(0..3)];
    proxy.set(Mode::Stall(direction))?;
    pause(random, 4_000).await;
    proxy.set(Mode::Pass)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_waits_and_takes_over_within_two_seconds_of_the_first_ones_death() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    let workload = load(&rig, seed()).await?;
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
