//! What is confirmed, and when.

use anyhow::{Result, ensure};
use async_nats::jetstream::stream::DiscardPolicy;
use serde_json::json;
use waljet_integration::{edit_stream, foreign_wal, newest, status, stored};
use waljet_testbed::{Mode, Proxy, connect, large_transaction, wait_for};

use super::{CONFIRMED, END, LIMIT, position};
use crate::wrong_things::{insert, red};

#[tokio::test(flavor = "multi_thread")]
async fn keepalives_from_far_past_a_pending_event_confirm_nothing() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await?;
    rig.nats.freeze().await?;
    insert(&rig, 4..=4).await?;
    let first_pending = position(&rig, END).await?;
    insert(&rig, 5..=13).await?;
    foreign_wal(&connect(&rig.postgres.url()).await?, 5).await?;
    let seen = position(&rig, END).await?;
    wait_for("the relay to have seen the foreign WAL", LIMIT, async || {
        let received = status(&rig).await?["source"]["received_lsn"].clone();
        let received = position(&rig, &format!("'{}'::pg_lsn", received.as_str().unwrap_or("0/0"))).await?;
        ensure!(received >= seen, "{received} of {seen} bytes");
        Ok::<_, anyhow::Error>(true)
    })
    .await?;
    let held = position(&rig, CONFIRMED).await?;
    ensure!(held < first_pending, "{held} was confirmed, the first pending event ends at {first_pending}");

    rig.relay()?.kill()?;
    ensure!(position(&rig, CONFIRMED).await? == held, "the slot moved on");
    rig.nats.thaw().await?;
    rig.relay()?.start_again()?;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    books.check()?;
    assert_eq!(books.stored, 13);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_a_transaction_confirms_nothing_of_it() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    edit_stream(&rig.nats.url(), |config| (config.max_messages, config.discard) = (150, DiscardPolicy::New)).await?;
    large_transaction(&rig.postgres.url(), 250, 10).await?;
    let committed = position(&rig, END).await?;
    red(&rig, "[stream-full]", LIMIT).await?;
    stored(&rig, 150).await?;
    let held = position(&rig, CONFIRMED).await?;
    ensure!(held < committed, "{held} was confirmed, the transaction ends at {committed}");

    rig.relay()?.kill()?;
    edit_stream(&rig.nats.url(), |config| config.max_messages = -1).await?;
    rig.relay()?.start_again()?;
    rig.settle(LIMIT).await?;
    assert_eq!(status(&rig).await?["events"], json!({ "stored": 100, "duplicate": 0, "skipped": 150 }));
    let books = rig.books().await?;
    books.check()?;
    assert_eq!(books.stored, 250);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_somebody_else_moved_is_a_gap_to_a_relay_that_runs() -> Result<()> {
    let mut rig = newest().await?;
    let proxy = Proxy::start(rig.postgres.port())?;
    rig.set("postgres.url", &rig.postgres.url_at(proxy.port()))?;
    rig.up().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await?;
    proxy.set(Mode::Refuse)?;
    insert(&rig, 4..=6).await?;
    let client = connect(&rig.postgres.url()).await?;
    wait_for("the slot to be free", LIMIT, async || {
        let row = client.query_one("SELECT active FROM pg_replication_slots", &[]).await?;
        Ok::<_, anyhow::Error>(!row.try_get::<_, bool>(0)?)
    })
    .await?;
    client.execute("SELECT pg_replication_slot_advance('waljet', pg_current_wal_lsn())", &[]).await?;
    proxy.set(Mode::Pass)?;
    let exit = rig.relay()?.wait(LIMIT)?;
    let log = rig.log();
    ensure!(exit.code() == Some(4) && log.contains("slot-moved"), "{exit}: {log}");
    assert_eq!(rig.stored().await?, 3);
    Ok(())
}
