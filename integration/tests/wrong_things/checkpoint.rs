//! The stored checkpoint: what was done to slot or stream while no relay ran is noticed at the next start.

use anyhow::{Context, Result, ensure};
use async_nats::jetstream;
use serde_json::Value;
use waljet_integration::{newest, oldest, status};
use waljet_testbed::{Durability, Pair, Postgres, PostgresOptions, Rig, STREAM, connect, wait_for};

use super::{LIMIT, confirmed, found, good, insert, red, run_ends, said, sql_on};

const NEW_SLOT: &str = "SELECT pg_drop_replication_slot('waljet');
                        SELECT pg_create_logical_replication_slot('waljet', 'pgoutput')";

const SLOT_STANDS: &str = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 'waljet'";

/// Delivers three events and stops in order.
async fn delivered(mut rig: Rig, store: &str) -> Result<Rig> {
    rig.set("checkpoint.store", store)?;
    rig.up().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await?;
    rig.relay()?.terminate(LIMIT)?;
    Ok(rig)
}

/// A slot that is not the one that was read from is a gap, again and again, until the operator says to go on.
async fn new_slot(rig: Rig, store: &str) -> Result<()> {
    let mut rig = delivered(rig, store).await?;
    let before = confirmed(&rig).await?;
    insert(&rig, 4..=6).await?;
    sql_on(&rig, NEW_SLOT).await?;
    let after = confirmed(&rig).await?;
    for _ in 0..2 {
        run_ends(&mut rig, 4, "slot-moved")
            .await?
            .says(&["slot \"waljet\"", &before, &after, "the last checkpoint is of 20"])
            .hints(&["compare the table with the stream", "waljet run --accept-gap"]);
        found(&rig, "slot-moved").await?.says(&[&before, &after, "the last checkpoint is of 20"]);
    }
    ensure!(rig.stored().await? == 3, "published over a gap");
    rig.start_relay_with(&["run", "--accept-gap"])?;
    rig.ready().await?;
    insert(&rig, 7..=9).await?;
    wait_for("what came after the gap", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? == 6)).await?;
    rig.relay()?.terminate(LIMIT)?;
    // The word was for that gap alone, and it is over.
    rig.start_relay()?;
    rig.ready().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_was_made_anew_while_no_relay_ran_is_a_gap() -> Result<()> {
    new_slot(newest().await?, "postgres").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_was_made_anew_is_a_gap_with_the_checkpoint_in_jetstream_too() -> Result<()> {
    new_slot(newest().await?, "nats").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_was_made_anew_is_a_gap_on_the_oldest_servers_too() -> Result<()> {
    new_slot(oldest().await?, "nats").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_somebody_moved_is_a_gap_and_one_that_the_operator_moved_is_not() -> Result<()> {
    let mut rig = delivered(newest().await?, "postgres").await?;
    insert(&rig, 4..=6).await?;
    let sql = "SELECT pg_current_wal_lsn()::text";
    let end: String = connect(&rig.postgres.url()).await?.query_one(sql, &[]).await?.try_get(0)?;
    let done = said(&rig, &["slot", "advance", "--to", &end, "--yes"]).await?;
    ensure!(done.code == 0, "{}", done.err);
    insert(&rig, 7..=7).await?;
    rig.start_relay()?;
    wait_for("what came after the move", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? == 4)).await?;
    rig.relay()?.terminate(LIMIT)?;

    insert(&rig, 8..=9).await?;
    sql_on(&rig, "SELECT pg_replication_slot_advance('waljet', pg_current_wal_lsn())").await?;
    run_ends(&mut rig, 4, "slot-moved").await?;
    ensure!(rig.stored().await? == 4, "published over a gap");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_was_made_anew_while_no_relay_ran_is_a_gap() -> Result<()> {
    let mut rig = delivered(newest().await?, "postgres").await?;
    let context = jetstream::new(async_nats::connect(rig.nats.url()).await?);
    let config = context.get_stream(STREAM).await?.cached_info().config.clone();
    context.delete_stream(STREAM).await?;
    context.create_stream(config).await?;
    insert(&rig, 4..=6).await?;
    run_ends(&mut rig, 4, "stream-went-back").await?.says(&["stream \"OUTBOX\" was recreated"]);
    // Noted, so that a restart does not pass over it, and told before the stream is looked at.
    run_ends(&mut rig, 4, "gap-pending").await?.says(&["was recreated"]).hints(&["waljet run --accept-gap"]);
    found(&rig, "gap-pending").await?.says(&["was recreated", "stream-went-back"]);
    ensure!(rig.stored().await? == 0, "published over a gap");
    rig.start_relay_with(&["run", "--accept-gap"])?;
    wait_for("what came after the gap", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? == 3)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_forgets_what_it_was_told_sends_nothing_twice_after_a_checkpoint() -> Result<()> {
    let mut options = waljet_integration::options(&Pair::newest()?)?;
    options.postgres.durability = Durability::Durable;
    let mut rig = Rig::start(options).await?;
    rig.up().await?;
    insert(&rig, 1..=50).await?;
    rig.settle(LIMIT).await?;
    rig.relay()?.terminate(LIMIT)?;
    let told = confirmed(&rig).await?;
    // The slot's position is saved only now and then, the row of the checkpoint with its commit.
    rig.postgres.kill().await?;
    rig.postgres.start_again().await?;
    let kept = confirmed(&rig).await?;
    ensure!(kept != told, "the slot forgot nothing");
    rig.start_relay()?;
    rig.ready().await?;
    insert(&rig, 51..=60).await?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()?;
    let events = &status(&rig).await?["events"];
    ensure!((&events["stored"], &events["duplicate"]) == (&Value::from(10), &Value::from(0)), "{events}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn another_cluster_is_a_gap_until_the_address_is_corrected() -> Result<()> {
    let mut rig = delivered(newest().await?, "nats").await?;
    let right = rig.postgres.url();
    // Of one version, the servers of tests are copies of one cluster.
    let other = Postgres::start(PostgresOptions::new(&Pair::oldest()?)).await?;
    rig.set("postgres.url", &other.url())?;
    rig.init().await?;
    let before = connect(&other.url()).await?.query_one(SLOT_STANDS, &[]).await?.try_get::<_, String>(0)?;
    for _ in 0..2 {
        run_ends(&mut rig, 4, "other-cluster").await?.hints(&["correct postgres.url", "waljet run --accept-gap"]);
        found(&rig, "other-cluster").await?;
    }
    let after = connect(&other.url()).await?.query_one(SLOT_STANDS, &[]).await?.try_get::<_, String>(0)?;
    ensure!(before == after, "the other cluster's slot was moved");
    rig.set("postgres.url", &right)?;
    insert(&rig, 4..=6).await?;
    rig.start_relay()?;
    rig.ready().await?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()
}

async fn writes(rig: &Rig) -> Result<u64> {
    status(rig).await?["checkpoint"]["writes"].as_u64().context("the status has no writes")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_checkpoint_is_written_at_most_once_in_an_interval_and_not_when_idle() -> Result<()> {
    let mut rig = newest().await?;
    rig.set("checkpoint.interval", "500ms")?;
    rig.up().await?;
    let (started, before) = (std::time::Instant::now(), writes(&rig).await?);
    for version in 1..=200 {
        insert(&rig, version..=version).await?;
    }
    rig.settle(LIMIT).await?;
    let most = 2 + started.elapsed().as_millis() / 500;
    let made = writes(&rig).await? - before;
    ensure!(made > 0 && u128::from(made) <= most, "{made} writes, at most {most} expected");
    let before = writes(&rig).await?;
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    ensure!(writes(&rig).await? <= before + 1, "an idle relay writes");
    let settled = writes(&rig).await?;
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    ensure!(writes(&rig).await? == settled, "an idle relay writes");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_may_not_write_is_told_what_to_grant_and_the_events_flow() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    sql_on(&rig, "CREATE ROLE relay LOGIN REPLICATION").await?;
    rig.set("postgres.url", &rig.postgres.url().replace("postgres@", "relay@"))?;
    let warned = good(&rig).await?;
    ensure!(warned.contains("GRANT SELECT, INSERT, UPDATE ON waljet.checkpoint TO \"relay\""), "{warned}");
    rig.start_relay()?;
    rig.ready().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await?;
    let checkpoint = status(&rig).await?["checkpoint"].clone();
    ensure!(checkpoint["fault"]["code"] == "checkpoint-missing", "{checkpoint}");
    ensure!(rig.log().contains("going on without a stored checkpoint"), "{}", rig.log());

    // What the remedy says is all that is missing.
    let grants = warned.lines().find_map(|line| line.trim().strip_prefix("hint: GRANT")).context("no GRANT")?;
    sql_on(&rig, &format!("GRANT{grants}")).await?;
    rig.relay()?.start_again()?;
    insert(&rig, 4..=6).await?;
    rig.settle(LIMIT).await?;
    wait_for("a checkpoint", LIMIT, async || Ok::<_, anyhow::Error>(writes(&rig).await? > 0)).await?;
    ensure!(status(&rig).await?["checkpoint"]["fault"].is_null());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_cannot_be_written_any_more_holds_the_slot_and_readiness_says_so() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    let grants = "CREATE ROLE relay LOGIN REPLICATION; GRANT USAGE ON SCHEMA waljet TO relay;
                  GRANT SELECT, INSERT, UPDATE ON waljet.checkpoint TO relay";
    sql_on(&rig, grants).await?;
    rig.set("postgres.url", &rig.postgres.url().replace("postgres@", "relay@"))?;
    rig.start_relay()?;
    rig.ready().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await?;
    wait_for("a checkpoint", LIMIT, async || Ok::<_, anyhow::Error>(writes(&rig).await? > 1)).await?;
    sql_on(&rig, "REVOKE UPDATE ON waljet.checkpoint FROM relay").await?;
    let before = confirmed(&rig).await?;
    insert(&rig, 4..=6).await?;
    wait_for("the events", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? == 6)).await?;
    red(&rig, "checkpoint: the role \"relay\" may not read and write waljet.checkpoint", LIMIT * 2).await?;
    ensure!(confirmed(&rig).await? == before, "the slot was moved without a checkpoint");
    sql_on(&rig, "GRANT UPDATE ON waljet.checkpoint TO relay").await?;
    rig.ready().await?;
    wait_for("the slot to move", LIMIT, async || Ok::<_, anyhow::Error>(confirmed(&rig).await? != before)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_gone_is_named_with_the_last_checkpoint() -> Result<()> {
    let rig = delivered(newest().await?, "postgres").await?;
    sql_on(&rig, "SELECT pg_drop_replication_slot('waljet')").await?;
    found(&rig, "slot-missing").await?;
    Ok(())
}
