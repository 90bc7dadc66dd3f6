//! A broker that lost what it had acknowledged.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use waljet_integration::{newest, stored};
use waljet_testbed::Rig;

use super::LIMIT;
use crate::wrong_things::{found_warning, insert};

fn copy(from: &Path, to: &Path) -> Result<()> {
    // With owners and modes.
    let status = Command::new("cp").arg("-a").args([from, to]).status().context("run cp")?;
    ensure!(status.success(), "cp ended with {status}");
    Ok(())
}

/// Lets the broker forget what it stored since the copy was made, as a power cut does before a sync.
async fn power_cut(rig: &Rig, copied: &Path) -> Result<()> {
    let store = rig.nats.store_dir();
    rig.nats.kill().await?;
    std::fs::remove_dir_all(store).context("remove the streams")?;
    copy(copied, store)?;
    rig.nats.start_again().await
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_events_that_the_broker_lost_are_a_gap_to_a_relay_that_runs() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await?;
    rig.nats.stop().await?;
    let copied = rig.nats.store_dir().with_extension("copy");
    copy(rig.nats.store_dir(), &copied)?;
    rig.nats.start_again().await?;
    rig.ready().await?;
    insert(&rig, 4..=9).await?;
    rig.settle(LIMIT).await?;
    power_cut(&rig, &copied).await?;
    insert(&rig, 10..=12).await?;
    let exit = rig.relay()?.wait(LIMIT)?;
    let log = rig.log();
    ensure!(exit.code() == Some(4) && log.contains("stream-went-back"), "{exit}: {log}");
    ensure!(log.contains("its last sequence was 9, now it is 3"), "{log}");
    assert_eq!(rig.stored().await?, 3);
    // What makes the difference is said beforehand.
    found_warning(&rig, "a power loss can take acknowledged events with it", "sync_interval: always").await?;
    // A restart is not the operator's word.
    rig.start_relay_with(&["run", "--accept-gap"])?;
    stored(&rig, 6).await
}
