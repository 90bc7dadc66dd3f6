//! Peers that are gone without a word.

use std::time::Duration;

use anyhow::{Result, ensure};
use waljet_integration::{commit_singly, newest, options, walsender};
use waljet_testbed::{Direction, Mode, Pair, Proxy, Rig, connect, wait_for};

use super::LIMIT;

/// Starts a rig whose server gives silent clients up after two seconds, which makes the relay as impatient.
async fn impatient() -> Result<Rig> {
    let mut options = options(&Pair::newest()?)?;
    options.postgres.settings.push(("wal_sender_timeout".into(), "2s".into()));
    Rig::start(options).await
}

/// Waits until another walsender serves the slot.
async fn served_anew(rig: &Rig, before: u32) -> Result<()> {
    let client = connect(&rig.postgres.url()).await?;
    wait_for("another walsender", LIMIT, async || {
        let now = walsender(&client).await?;
        ensure!(now != before, "it is still {now}");
        Ok::<_, anyhow::Error>(true)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_walsender_is_noticed_and_left() -> Result<()> {
    let mut rig = impatient().await?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    let frozen = walsender(&client).await?;
    rig.postgres.freeze_backend(frozen).await?;
    commit_singly(&client, 10).await?;
    let reason = rig.not_ready(Duration::from_secs(8)).await?;
    ensure!(reason.contains("postgres-silent") || reason.contains("slot-active"), "{reason}");
    // The frozen one holds the slot for as long as it is frozen; the relay says whom it waits for.
    let held = async || {
        let reason = rig.get("/readyz").await?.body;
        ensure!(reason.contains("slot-active") && reason.contains(&frozen.to_string()), "{reason}");
        Ok::<_, anyhow::Error>(true)
    };
    wait_for("the reason", LIMIT, held).await?;
    rig.postgres.thaw_backend(frozen).await?;
    served_anew(&rig, frozen).await?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_walsender_that_was_terminated_is_replaced() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    let gone = walsender(&client).await?;
    client.execute("SELECT pg_terminate_backend($1)", &[&(gone as i32)]).await?;
    served_anew(&rig, gone).await?;
    commit_singly(&client, 10).await?;
    rig.settle(LIMIT).await?;
    rig.ready().await?;
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_swallows_everything_is_noticed_from_both_sides() -> Result<()> {
    let mut rig = impatient().await?;
    let proxy = Proxy::start(rig.postgres.port())?;
    rig.set("postgres.url", &rig.postgres.url_at(proxy.port()))?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    let before = walsender(&client).await?;

    proxy.set(Mode::Stall(Direction::Both))?;
    commit_singly(&client, 10).await?;
    let reason = rig.not_ready(Duration::from_secs(8)).await?;
    ensure!(reason.starts_with("source: "), "{reason}");
    proxy.set(Mode::Pass)?;
    served_anew(&rig, before).await?;
    rig.ready().await?;
    rig.settle(LIMIT).await?;

    // The server is left with a walsender that holds the slot, until it notices for itself.
    let before = walsender(&client).await?;
    proxy.strand_server()?;
    commit_singly(&client, 10).await?;
    served_anew(&rig, before).await?;
    rig.settle(LIMIT).await?;
    rig.ready().await?;
    rig.books().await?.check()
}
