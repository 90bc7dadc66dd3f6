//! Bounds: memory, log, WAL and time, whatever the servers do.
//!
//! The tests are small by default. The same at full size: `WALJET_FREEZE_SECONDS=60`, `WALJET_FOREIGN_MB=500`,
//! `WALJET_LARGE_ROWS=1000000`, `WALJET_LOST_ACKS=1000000`.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;
use waljet_integration::{confirmed, foreign_wal, newest, options, status, walsender};
use waljet_testbed::{
    Direction, Mode, Pair, Proxy, Rig, Workload, WorkloadOptions, connect, large_transaction, wait_for,
};

/// How long a backlog may take to be worked off.
const LIMIT: Duration = Duration::from_secs(240);

/// The most memory that the relay may take, in MiB: what is documented for a transaction of any size.
const MOST_MIB: u64 = 64;

/// Reads a size from the environment.
fn size(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Reads a line of `/proc/<pid>/status` in KiB, such as `VmHWM`; none where there is no such file.
fn memory_kib(pid: u32, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_stands_still_costs_neither_the_replication_connection_nor_an_event() -> Result<()> {
    let frozen_for = Duration::from_secs(size("WALJET_FREEZE_SECONDS", 15));
    let mut options = options(&Pair::newest()?)?;
    options.postgres.settings.push(("wal_sender_timeout".into(), "5s".into()));
    let mut rig = Rig::start(options).await?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    // More than the window and the kernel's buffers hold, so that the walsender has to wait.
    let workload = WorkloadOptions { rate: Some(1_000.0), ..WorkloadOptions::new(rig.postgres.url()) };
    let workload = Workload::start(workload).await?;
    wait_for("the first events", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? > 100)).await?;
    let pid = walsender(&client).await?;

    rig.nats.freeze().await?;
    let start = Instant::now();
    let reason = rig.not_ready(Duration::from_secs(12)).await?;
    println!("not ready after {:?}: {}", start.elapsed(), reason.trim());
    ensure!(reason.starts_with("sink: "), "{reason}");
    let held = confirmed(&client).await?;
    while start.elapsed() < frozen_for {
        // The time is the condition here: nothing may happen in it.
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(walsender(&client).await?, pid, "after {:?}: {}", start.elapsed(), rig.log());
        assert_eq!(confirmed(&client).await?, held, "after {:?}", start.elapsed());
        let answer = rig.get("/readyz").await?;
        ensure!(answer.status == 503, "ready after {:?}", start.elapsed());
    }
    rig.nats.thaw().await?;
    workload.stop().await;
    rig.settle(LIMIT).await?;
    rig.ready().await?;
    assert_eq!(walsender(&client).await?, pid);
    let books = rig.books().await?;
    println!("{books}");
    books.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_outbox_beside_foreign_wal_keeps_no_wal() -> Result<()> {
    let megabytes = size("WALJET_FOREIGN_MB", 100);
    let mut rig = newest().await?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    let sql = "SELECT (pg_current_wal_lsn() - restart_lsn)::bigint,
                      (pg_current_wal_lsn() - confirmed_flush_lsn)::bigint FROM pg_replication_slots";
    let behind = async || -> Result<(i64, i64)> {
        let row = client.query_one(sql, &[]).await?;
        Ok((row.get(0), row.get(1)))
    };
    let before: i64 = client.query_one("SELECT (pg_current_wal_lsn() - '0/0')::bigint", &[]).await?.get(0);
    let mut most = 0;
    for _ in 0..megabytes.div_ceil(25) {
        foreign_wal(&client, 25).await?;
        wait_for("the slot to follow", Duration::from_secs(10), async || {
            // Logs which transactions run, as every server does now and then: restart_lsn only moves from one such
            // record to the next.
            client.batch_execute("CHECKPOINT").await?;
            let (restart, confirmed) = behind().await?;
            ensure!(confirmed < 1 << 20 && restart < 16 << 20, "{restart} and {confirmed} bytes behind");
            Ok::<_, anyhow::Error>(true)
        })
        .await?;
        most = most.max(behind().await?.0);
    }
    let after: i64 = client.query_one("SELECT (pg_current_wal_lsn() - '0/0')::bigint", &[]).await?.get(0);
    println!("{} MB of WAL, restart_lsn at most {most} bytes behind", (after - before) / 1_000_000);
    ensure!(after - before > megabytes as i64 * 1_000_000, "only {} bytes of WAL were written", after - before);
    assert_eq!(rig.stored().await?, 0);
    Ok(())
}

/// Rows of the large transaction.
fn large_rows() -> u32 {
    size("WALJET_LARGE_ROWS", 200_000) as u32
}

/// What has to be filled up to make a row of 600 bytes, as the relay gets it.
const FILLER: u32 = 480;

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_of_any_size_runs_in_64_mib() -> Result<()> {
    let rows = large_rows();
    let mut rig = newest().await?;
    rig.up().await?;
    let pid = rig.relay()?.pid();
    let idle = memory_kib(pid, "VmRSS");
    large_transaction(&rig.postgres.url(), rows, FILLER).await?;
    let start = Instant::now();
    rig.settle(LIMIT).await?;
    let took = start.elapsed();
    let most = memory_kib(pid, "VmHWM");
    println!(
        "{rows} rows in {took:?}, {:.0} a second; resident memory {idle:?} KiB idle, {most:?} KiB at most",
        f64::from(rows) / took.as_secs_f64()
    );
    if let Some(most) = most {
        ensure!(most < MOST_MIB << 10, "{most} KiB");
    }
    assert_eq!(status(&rig).await?["events"], json!({ "stored": rows, "duplicate": 0, "skipped": 0 }));
    assert_eq!(rig.stored().await?, u64::from(rows));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_killed_in_the_middle_of_a_large_transaction_stores_none_of_it_twice() -> Result<()> {
    let rows = large_rows();
    let mut rig = newest().await?;
    // So short that the ids are forgotten: only the stream itself tells what is stored.
    rig.set("nats.duplicate_window", "1s")?;
    rig.up().await?;
    large_transaction(&rig.postgres.url(), rows, FILLER).await?;
    let middle = async |share: u64| {
        let part = u64::from(rows) * share / 10;
        wait_for("a part of it", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? > part)).await
    };
    middle(6).await?;
    rig.relay()?.kill()?;
    // No condition to wait for: the broker does not show its window.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let stored = rig.stored().await?;
    ensure!(stored < u64::from(rows), "it was through already");
    rig.relay()?.start_again()?;
    let start = Instant::now();
    rig.settle(LIMIT).await?;
    let pid = rig.relay()?.pid();
    println!("{stored} were stored, the rest took {:?}, at most {:?} KiB", start.elapsed(), memory_kib(pid, "VmHWM"));
    let expected = json!({ "stored": u64::from(rows) - stored, "duplicate": 0, "skipped": stored });
    assert_eq!(status(&rig).await?["events"], expected);
    let books = rig.books().await?;
    books.check()?;
    assert_eq!(books.stored, u64::from(rows));
    if let Some(most) = memory_kib(pid, "VmHWM") {
        ensure!(most < MOST_MIB << 10, "{most} KiB");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_away_for_long_costs_neither_memory_nor_log_nor_a_storm_of_connections() -> Result<()> {
    let away = Duration::from_secs(size("WALJET_AWAY_SECONDS", 20));
    let mut rig = newest().await?;
    let proxy = Proxy::start(rig.nats.port())?;
    rig.set("nats.url", &rig.nats.url_at(proxy.port()))?;
    rig.up().await?;
    let workload = WorkloadOptions { rate: Some(300.0), ..WorkloadOptions::new(rig.postgres.url()) };
    let workload = Workload::start(workload).await?;
    wait_for("the first events", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? > 100)).await?;

    proxy.set(Mode::Reset)?;
    let start = Instant::now();
    wait_for("the window to fill", LIMIT, async || {
        let window = &status(&rig).await?["window"];
        Ok::<_, anyhow::Error>(window["events"] == window["max_events"])
    })
    .await?;
    // By then the pauses between the attempts have grown.
    tokio::time::sleep(away.saturating_sub(start.elapsed()) / 2).await;
    let pid = rig.relay()?.pid();
    let (memory, accepted, lines) = (memory_kib(pid, "VmRSS"), proxy.accepted(), rig.log().lines().count());
    let since = Instant::now();
    tokio::time::sleep(away.saturating_sub(start.elapsed())).await;
    let seconds = since.elapsed().as_secs_f64();
    let attempts = (proxy.accepted() - accepted) as f64 / seconds;
    let (memory_after, lines_after) = (memory_kib(pid, "VmRSS"), rig.log().lines().count());
    println!(
        "in {seconds} s: {attempts:.2} attempts a second, {memory:?} to {memory_after:?} KiB, {lines} to {lines_after} lines"
    );
    ensure!(attempts < 1.0, "{attempts} attempts a second");
    ensure!(((lines_after - lines) as f64) < seconds, "{} lines in {seconds} s:\n{}", lines_after - lines, rig.log());
    if let (Some(before), Some(after)) = (memory, memory_after) {
        ensure!(after < before + (4 << 10), "from {before} to {after} KiB");
    }
    proxy.set(Mode::Pass)?;
    workload.stop().await;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledgements_that_are_lost_again_and_again_cost_no_memory() -> Result<()> {
    let target = size("WALJET_LOST_ACKS", 20_000);
    let mut rig = newest().await?;
    let proxy = Proxy::start(rig.nats.port())?;
    rig.set("nats.url", &rig.nats.url_at(proxy.port()))?;
    // The mode in which the broker answers each message on its own.
    rig.set("publisher.mode", "chain")?;
    rig.set_raw("window.max_events", "4096")?;
    rig.up().await?;
    let pid = rig.relay()?.pid();
    // What the stream held although no acknowledgement came is what was found there when it was read back.
    let lost = async || Ok::<u64, anyhow::Error>(status(&rig).await?["events"]["skipped"].as_u64().unwrap_or(0));
    let (mut committed, mut early, start) = (0, None, Instant::now());
    while lost().await? < target {
        if rig.stored().await? + 20_000 > committed {
            large_transaction(&rig.postgres.url(), 50_000, 10).await?;
            committed += 50_000;
        }
        proxy.set(Mode::Stall(Direction::ToClient))?;
        // A window goes out; how much of it does not matter.
        tokio::time::sleep(Duration::from_millis(200)).await;
        proxy.set(Mode::Reset)?;
        proxy.set(Mode::Pass)?;
        let before = lost().await?;
        wait_for("what was stored to be found", LIMIT, async || {
            let stored = status(&rig).await?["events"]["stored"].as_u64();
            Ok::<_, anyhow::Error>(lost().await? > before || rig.stored().await? >= committed && stored.is_some())
        })
        .await?;
        ensure!(start.elapsed() < Duration::from_secs(target / 50) + LIMIT, "only {} of {target}", lost().await?);
        // By a third of them the buffers have their size.
        if early.is_none() && lost().await? > target / 3 {
            early = memory_kib(pid, "VmRSS");
        }
    }
    let late = memory_kib(pid, "VmRSS");
    println!("{} acknowledgements lost in {:?}: {early:?} to {late:?} KiB", lost().await?, start.elapsed());
    if let (Some(early), Some(late)) = (early, late) {
        ensure!(late < early + (8 << 10), "from {early} to {late} KiB");
    }
    ensure!(rig.relay()?.pid() == pid, "the relay was restarted");
    rig.settle(LIMIT).await?;
    let stored = rig.stored().await?;
    ensure!(stored == committed, "{stored} of {committed} are stored");
    Ok(())
}
