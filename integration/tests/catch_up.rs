//! A lost slot and a table that was there before: what no slot sends comes from the table, once and in order.
//!
//! The broker forgets ids after a second, so that nothing here rests on its refusing copies.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use waljet_integration::{broker, commit_singly, newest, oldest, pause, progress, status, stored};
use waljet_testbed::{Rig, STREAM, Workload, WorkloadOptions, connect, large_transaction, wait_for};

/// How long it may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Events that are committed while no relay runs.
const UNSTORED: u32 = 10_000;

/// What the log says at the end of it.
const CAUGHT_UP: &str = "caught up; going on";

const DROP_SLOT: &str = "SELECT pg_drop_replication_slot('waljet')";

async fn load(rig: &Rig) -> Result<Workload> {
    Workload::start(WorkloadOptions { rate: Some(200.0), ..WorkloadOptions::new(rig.postgres.url()) }).await
}

async fn sql(rig: &Rig, sql: &str) -> Result<()> {
    Ok(connect(&rig.postgres.url()).await?.batch_execute(sql).await?)
}

/// A relay that has stored events under load and was killed at it; the load goes on.
async fn killed(mut rig: Rig, store: &str) -> Result<(Rig, Workload)> {
    rig.set("postgres.on_gap", "catch-up")?;
    rig.set("checkpoint.store", store)?;
    rig.set("nats.duplicate_window", "1s")?;
    rig.up().await?;
    let workload = load(&rig).await?;
    progress(&rig).await?;
    // The checkpoint has a snapshot by which the rows are told apart.
    wait_for("a checkpoint to be written", LIMIT, async || {
        Ok::<_, anyhow::Error>(status(&rig).await?["checkpoint"]["writes"].as_u64() > Some(3))
    })
    .await?;
    rig.relay()?.kill()?;
    Ok((rig, workload))
}

/// Stops the load, waits until all is stored, and judges.
async fn judge(rig: &Rig, workload: Workload) -> Result<()> {
    workload.stop().await;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    println!("{books}");
    ensure!(rig.log().contains(CAUGHT_UP), "{}", rig.log());
    books.check()
}

async fn slot_is_lost(rig: Rig, store: &str) -> Result<()> {
    let (mut rig, workload) = killed(rig, store).await?;
    let client = connect(&rig.postgres.url()).await?;
    let before: i64 = client.query_one("SELECT count(*) FROM outbox", &[]).await?.try_get(0)?;
    large_transaction(&rig.postgres.url(), UNSTORED / 2, 10).await?;
    sql(&rig, DROP_SLOT).await?;
    // These are in no slot at all.
    commit_singly(&client, UNSTORED / 2).await?;
    rig.start_relay()?;
    rig.ready().await?;
    let log = rig.log();
    let line = log.lines().find(|line| line.contains("catching up from the table")).context("no catch-up")?;
    println!("{line}");
    // What was stored long before is not even looked at.
    let looked: i64 =
        line.split("\"rows\":").nth(1).and_then(|rest| rest.split(',').next()).context("rows")?.parse()?;
    ensure!(looked >= i64::from(UNSTORED) && looked < before + i64::from(UNSTORED) * 2, "{looked} of {before}: {line}");
    judge(&rig, workload).await?;
    // And that was that.
    rig.relay()?.terminate(LIMIT)?;
    rig.start_relay()?;
    rig.ready().await?;
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_dropped_under_load_costs_nothing_but_a_catch_up() -> Result<()> {
    slot_is_lost(newest().await?, "postgres").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_dropped_under_load_costs_nothing_on_the_oldest_servers() -> Result<()> {
    slot_is_lost(oldest().await?, "nats").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_is_killed_while_it_catches_up_begins_anew_and_doubles_nothing() -> Result<()> {
    let (mut rig, workload) = killed(newest().await?, "postgres").await?;
    sql(&rig, DROP_SLOT).await?;
    large_transaction(&rig.postgres.url(), UNSTORED * 5, 10).await?;
    let mut random = fastrand::Rng::new();
    let mut interrupted = 0;
    for _ in 0..6 {
        let before = rig.log().matches(CAUGHT_UP).count();
        rig.start_relay()?;
        wait_for("the catch-up to begin", LIMIT, async || {
            Ok::<_, anyhow::Error>(rig.log().contains("catching up from"))
        })
        .await?;
        pause(&mut random, 500).await;
        rig.relay()?.kill()?;
        interrupted += usize::from(rig.log().matches(CAUGHT_UP).count() == before);
    }
    println!("interrupted {interrupted} times");
    ensure!(interrupted > 0, "it was never killed in the middle");
    rig.start_relay()?;
    rig.ready().await?;
    judge(&rig, workload).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_lost_under_a_running_relay_is_caught_up_without_a_restart() -> Result<()> {
    let mut rig = newest().await?;
    rig.set("postgres.on_gap", "catch-up")?;
    rig.set("nats.duplicate_window", "1s")?;
    rig.up().await?;
    let workload = load(&rig).await?;
    progress(&rig).await?;
    let pid = rig.relay()?.pid();
    let drop = "SELECT pg_terminate_backend(active_pid), pg_drop_replication_slot(slot_name) FROM pg_replication_slots";
    wait_for("the slot to be free for a moment", LIMIT, async || Ok::<_, anyhow::Error>(sql(&rig, drop).await.is_ok()))
        .await?;
    wait_for("the catch-up", LIMIT, async || Ok::<_, anyhow::Error>(rig.log().contains(CAUGHT_UP))).await?;
    progress(&rig).await?;
    ensure!(rig.relay()?.pid() == pid && rig.relay()?.ended()?.is_none(), "{}", rig.log());
    judge(&rig, workload).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_somebody_moved_over_events_is_caught_up() -> Result<()> {
    let (mut rig, workload) = killed(newest().await?, "postgres").await?;
    commit_singly(&connect(&rig.postgres.url()).await?, 500).await?;
    sql(&rig, "SELECT pg_replication_slot_advance('waljet', pg_current_wal_lsn())").await?;
    rig.start_relay()?;
    rig.ready().await?;
    judge(&rig, workload).await
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_relays_that_find_the_slot_lost_one_makes_up_for_it() -> Result<()> {
    let (mut rig, workload) = killed(newest().await?, "postgres").await?;
    sql(&rig, DROP_SLOT).await?;
    large_transaction(&rig.postgres.url(), UNSTORED, 10).await?;
    let mut second = rig.second_relay()?;
    rig.start_relay()?;
    let both = || format!("{}\n{}", rig.log(), second.log());
    wait_for("one of them to catch up", LIMIT, async || Ok::<_, anyhow::Error>(both().contains(CAUGHT_UP)))
        .await
        .with_context(both)?;
    workload.stop().await;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()?;
    // Whichever has it, the other waits for it and does no more.
    let log = both();
    ensure!(log.matches(CAUGHT_UP).count() == 1, "{log}");
    ensure!(second.ended()?.is_none() && rig.relay()?.ended()?.is_none(), "one has ended: {log}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_policy_the_word_is_the_operators() -> Result<()> {
    let (mut rig, workload) = killed(newest().await?, "postgres").await?;
    rig.set("postgres.on_gap", "halt")?;
    sql(&rig, DROP_SLOT).await?;
    rig.start_relay()?;
    let exit = rig.relay()?.wait(LIMIT)?;
    let log = rig.log();
    ensure!(exit.code() == Some(4) && log.contains("[slot-missing]"), "{exit}: {log}");
    ensure!(log.contains("waljet run --catch-up"), "the remedy is not named: {log}");
    rig.start_relay_with(&["run", "--catch-up"])?;
    rig.ready().await?;
    judge(&rig, workload).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_without_transaction_ids_is_compared_with_the_whole_stream_or_not_at_all() -> Result<()> {
    let (mut rig, workload) = killed(newest().await?, "postgres").await?;
    workload.stop().await;
    rig.set("outbox.columns.xid", "")?;
    sql(&rig, DROP_SLOT).await?;
    commit_singly(&connect(&rig.postgres.url()).await?, 100).await?;
    rig.start_relay()?;
    rig.ready().await?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()?;
    rig.relay()?.terminate(LIMIT)?;

    // A message that is gone could have been any event's.
    broker(&rig).await?.get_stream(STREAM).await?.delete_message(1).await?;
    sql(&rig, DROP_SLOT).await?;
    commit_singly(&connect(&rig.postgres.url()).await?, 1).await?;
    let before = rig.stored().await?;
    rig.start_relay()?;
    let exit = rig.relay()?.wait(LIMIT)?;
    ensure!(exit.code() == Some(4) && rig.log().contains("[catch-up-blind]"), "{exit}: {}", rig.log());
    ensure!(rig.stored().await? == before, "something was published");
    Ok(())
}

async fn backfill(rig: &Rig) -> Result<String> {
    let output = rig.waljet(&["init", "--backfill"]).await?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{said}");
    Ok(said)
}

async fn rows_from_before(mut rig: Rig) -> Result<()> {
    rig.set("nats.duplicate_window", "1s")?;
    rig.init().await?;
    sql(&rig, DROP_SLOT).await?;
    sql(&rig, "TRUNCATE waljet.checkpoint").await?;
    large_transaction(&rig.postgres.url(), UNSTORED, 10).await?;
    let workload = load(&rig).await?;
    let said = backfill(&rig).await?;
    ensure!(said.contains("backfill: "), "{said}");
    rig.start_relay()?;
    rig.ready().await?;
    progress(&rig).await?;
    workload.stop().await;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    println!("{books}");
    books.check()?;
    // A slot that is there has what came since.
    rig.relay()?.terminate(LIMIT)?;
    let output = rig.waljet(&["init", "--backfill"]).await?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && said.contains("slot \"waljet\" exists"), "{said}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_the_first_start_are_backfilled_under_load() -> Result<()> {
    rows_from_before(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_from_before_the_first_start_are_backfilled_on_the_oldest_servers() -> Result<()> {
    rows_from_before(oldest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_that_was_killed_is_not_taken_for_a_finished_one() -> Result<()> {
    let mut rig = newest().await?;
    rig.set("nats.duplicate_window", "1s")?;
    rig.init().await?;
    sql(&rig, DROP_SLOT).await?;
    sql(&rig, "TRUNCATE waljet.checkpoint").await?;
    large_transaction(&rig.postgres.url(), UNSTORED * 5, 10).await?;
    rig.start_relay_with(&["init", "--backfill"])?;
    wait_for("the first rows", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? > 0)).await?;
    rig.relay()?.kill()?;
    let before = rig.stored().await?;
    ensure!(before < u64::from(UNSTORED * 5), "it was finished");
    rig.start_relay()?;
    let exit = rig.relay()?.wait(LIMIT)?;
    ensure!(exit.code() == Some(4), "{exit}: {}", rig.log());
    backfill(&rig).await?;
    stored(&rig, u64::from(UNSTORED * 5)).await?;
    rig.start_relay()?;
    rig.ready().await?;
    commit_singly(&connect(&rig.postgres.url()).await?, 10).await?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()
}
