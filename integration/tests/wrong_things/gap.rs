//! Gaps: what ends the relay with 4, and what the operator's word does.

use anyhow::{Result, ensure};
use waljet_integration::{newest, stored};
use waljet_testbed::{Pair, Postgres, PostgresOptions, Rig, connect};

use super::{LIMIT, confirmed, fails, found, good, insert, run_ends, said, sql_on};

/// Starts everything, delivers events and stops in order.
async fn delivered(events: u32) -> Result<Rig> {
    let mut rig = newest().await?;
    rig.up().await?;
    insert(&rig, 1..=events).await?;
    rig.settle(LIMIT).await?;
    rig.relay()?.terminate(LIMIT)?;
    Ok(rig)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_was_dropped_after_events_were_stored_is_a_gap() -> Result<()> {
    let mut rig = delivered(3).await?;
    sql_on(&rig, "SELECT pg_drop_replication_slot('waljet')").await?;
    insert(&rig, 4..=6).await?;
    let message = ["slot \"waljet\" does not exist; the last event in stream \"OUTBOX\" is at ", "is in no slot"];
    let hint = ["Nats-Msg-Id", "waljet slot create, and waljet run --accept-gap"];
    run_ends(&mut rig, 4, "slot-missing").await?.says(&message).hints(&hint);
    found(&rig, "slot-missing").await?.says(&message).hints(&hint);
    stored(&rig, 3).await?;

    // What init makes anew is not passed off as the old one.
    let told = said(&rig, &["init"]).await?;
    ensure!(told.code == 0 && told.err.starts_with("warning: slot \"waljet\" is new, and the last event in stream"));
    rig.start_relay_with(&["run", "--accept-gap"])?;
    rig.ready().await?;
    insert(&rig, 7..=9).await?;
    stored(&rig, 6).await
}

#[tokio::test(flavor = "multi_thread")]
async fn another_database_behind_the_same_stream_is_a_gap_until_the_operator_says_otherwise() -> Result<()> {
    let mut rig = delivered(3).await?;
    let system = "SELECT system_identifier::text FROM pg_control_system()";
    let old: String = connect(&rig.postgres.url()).await?.query_one(system, &[]).await?.try_get(0)?;
    let options = PostgresOptions { fresh_initdb: true, ..PostgresOptions::new(&Pair::newest()?) };
    let other = Postgres::start(options).await?;
    let new: String = connect(&other.url()).await?.query_one(system, &[]).await?.try_get(0)?;
    ensure!(old != new, "both databases are {old}");
    rig.set("postgres.url", &other.url())?;
    // Before there is a slot, it is the missing slot that says so.
    let position = format!("{old}:1:");
    run_ends(&mut rig, 4, "slot-missing").await?.says(&[&position]);
    rig.init().await?;
    let client = connect(&other.url()).await?;
    let insert = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', '1', 'e', '{}')";
    client.batch_execute(insert).await?;

    let told = run_ends(&mut rig, 4, "stream-not-of-this-database").await?;
    told.says(&["stream \"OUTBOX\"", &position, &format!("{new}:1")])
        .hints(&["another stream", "waljet run --accept-gap"]);
    stored(&rig, 3).await?;
    rig.start_relay_with(&["run", "--accept-gap"])?;
    rig.ready().await?;
    stored(&rig, 4).await?;

    // The stream ends with an event of the new database now, so that nothing has to be accepted again.
    rig.relay()?.terminate(LIMIT)?;
    rig.start_relay()?;
    rig.ready().await?;
    client.batch_execute(insert).await?;
    stored(&rig, 5).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_is_advanced_or_dropped_only_when_told_so_twice() -> Result<()> {
    let rig = delivered(2).await?;
    let before = confirmed(&rig).await?;
    insert(&rig, 3..=4).await?;
    let sql = "SELECT pg_current_wal_lsn()::text";
    let end: String = connect(&rig.postgres.url()).await?.query_one(sql, &[]).await?.try_get(0)?;
    let range = format!("from {before} to {end}");

    let advance = ["slot", "advance", "--to", end.as_str()];
    let told = fails(&rig, &advance, 2, "confirmation-missing").await?;
    told.says(&["nothing was done", "slot \"waljet\"", &range]).hints(&["--yes"]);
    let told = fails(&rig, &["slot", "drop"], 2, "confirmation-missing").await?;
    told.says(&["nothing was done", "slot \"waljet\"", &format!("from {before} to ")]).hints(&["--yes"]);
    ensure!(confirmed(&rig).await? == before, "the slot was moved");

    let done = said(&rig, &["slot", "advance", "--to", &end, "--yes"]).await?;
    ensure!(
        done.code == 0 && done.err.contains(&format!("advanced slot \"waljet\" from {before} to ")),
        "{}",
        done.err
    );
    good(&rig).await?;
    let back = ["slot", "advance", "--to", before.as_str(), "--yes"];
    fails(&rig, &back, 1, "slot-advance").await?.says(&["slot \"waljet\" cannot be moved back from", &before]);

    let done = said(&rig, &["slot", "drop", "--yes"]).await?;
    ensure!(done.code == 0 && done.err == "dropped slot \"waljet\"\n", "{}", done.err);
    found(&rig, "slot-missing").await?;
    Ok(())
}
