//! Shutdowns of PostgreSQL and of the relay.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;
use waljet_integration::{commit_singly, confirmed, newest, oldest, status};
use waljet_testbed::{Rig, connect, wait_for};

use super::{LIMIT, stored};

/// A fast shutdown that nobody holds up takes a few tenths of a second.
const PROMPT: Duration = Duration::from_secs(3);

async fn prompt_shutdowns(mut rig: Rig) -> Result<()> {
    rig.up().await?;
    let took = rig.postgres.stop_fast().await?;
    ensure!(took < PROMPT, "with an idle relay, the shutdown took {took:?}");
    rig.postgres.start_again().await?;
    rig.ready().await?;

    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 10).await?;
    rig.settle(LIMIT).await?;
    rig.nats.freeze().await?;
    commit_singly(&client, 50).await?;
    let pending = async || Ok::<_, anyhow::Error>(status(&rig).await?["window"]["events"] == 50);
    wait_for("50 events in the window", LIMIT, pending).await?;
    let before = confirmed(&client).await?;
    let took = rig.postgres.stop_fast().await?;
    ensure!(took < PROMPT, "with pending events, the shutdown took {took:?}");
    rig.postgres.start_again().await?;
    let client = connect(&rig.postgres.url()).await?;
    ensure!(confirmed(&client).await? <= before, "events were confirmed that the broker does not have");
    rig.nats.thaw().await?;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    books.check()?;
    assert_eq!(books.stored, 60);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_shutdown_of_postgres_is_not_held_up_on_the_newest_servers() -> Result<()> {
    prompt_shutdowns(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_shutdown_of_postgres_is_not_held_up_on_the_oldest_servers() -> Result<()> {
    prompt_shutdowns(oldest().await?).await
}

async fn the_last_position(mut rig: Rig) -> Result<()> {
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 100).await?;
    let end: i64 = client.query_one("SELECT (pg_current_wal_lsn() - '0/0')::bigint", &[]).await?.get(0);
    stored(&rig, 100).await?;
    let (exit, _) = rig.relay()?.terminate(Duration::from_secs(5))?;
    ensure!(exit.success(), "{exit}: {}", rig.log());
    ensure!(confirmed(&client).await? >= end, "the slot was not told the last position");

    rig.relay()?.start_again()?;
    commit_singly(&client, 1).await?;
    // Whatever came again would have come before this one.
    stored(&rig, 101).await?;
    rig.settle(LIMIT).await?;
    assert_eq!(status(&rig).await?["events"], json!({ "stored": 1, "duplicate": 0, "skipped": 0 }));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clean_stop_tells_the_last_position_on_the_newest_servers() -> Result<()> {
    the_last_position(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clean_stop_tells_the_last_position_on_the_oldest_servers() -> Result<()> {
    the_last_position(oldest().await?).await
}
