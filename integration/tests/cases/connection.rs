//! The replication connection: silence, and halves of it.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use waljet_integration::{stored, walsender};
use waljet_testbed::{Direction, Mode, Proxy, connect, wait_for};

use super::LIMIT;
use crate::wrong_things::{insert, rig, settings, sql_on};

/// A transaction of another table, which the walsender reads through without sending anything.
const GIANT: &str = "CREATE TABLE elsewhere (n int); INSERT INTO elsewhere SELECT generate_series(1, 400000)";

#[tokio::test(flavor = "multi_thread")]
async fn neither_a_quiet_link_nor_a_giant_foreign_transaction_costs_the_connection() -> Result<()> {
    let timeout = Duration::from_secs(3);
    // The server says nothing while it writes out a piece of a transaction, so the pieces are small.
    let few = [("wal_sender_timeout", "3s"), ("logical_decoding_work_mem", "64kB")];
    let mut rig = rig(|options| settings(options, &few)).await?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    let pid = walsender(&client).await?;
    let start = Instant::now();
    while start.elapsed() < timeout * 2 {
        // The time is the condition here: nothing may happen in it.
        tokio::time::sleep(Duration::from_millis(250)).await;
        assert_eq!(walsender(&client).await?, pid, "after {:?}: {}", start.elapsed(), rig.log());
        assert_eq!(rig.get("/readyz").await?.status, 200, "after {:?}", start.elapsed());
    }
    sql_on(&rig, GIANT).await?;
    insert(&rig, 1..=1).await?;
    stored(&rig, 1).await?;
    assert_eq!(walsender(&client).await?, pid, "{}", rig.log());
    ensure!(!rig.log().contains("source lost"), "{}", rig.log());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn status_updates_that_do_not_get_through_are_noticed() -> Result<()> {
    let mut rig = rig(|options| settings(options, &[("wal_sender_timeout", "2s")])).await?;
    let proxy = Proxy::start(rig.postgres.port())?;
    rig.set("postgres.url", &rig.postgres.url_at(proxy.port()))?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    let before = walsender(&client).await?;
    // What the server sends comes through all the time.
    proxy.set(Mode::Stall(Direction::ToServer))?;
    insert(&rig, 1..=3).await?;
    stored(&rig, 3).await?;
    let reason = rig.not_ready(LIMIT).await?;
    ensure!(reason.starts_with("source: "), "{reason}");
    proxy.set(Mode::Pass)?;
    rig.ready().await?;
    rig.settle(LIMIT).await?;
    let served = async || Ok::<_, anyhow::Error>(walsender(&client).await? != before);
    wait_for("another walsender", LIMIT, served).await?;
    rig.books().await?.check()
}
