//! Three brokers: a follower that hangs, a rolling restart, and no quorum.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use waljet_integration::{confirmed, leader_first, options, progress};
use waljet_testbed::{NatsCluster, NatsOptions, Pair, Rig, Workload, WorkloadOptions, connect};

use super::{END, position};
use crate::wrong_things::insert;

/// Elections take their time.
const LIMIT: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread")]
async fn three_brokers_may_hang_restart_and_lose_their_quorum() -> Result<()> {
    let pair = Pair::newest()?;
    let cluster = NatsCluster::start(NatsOptions::new(&pair), 3).await?;
    let mut rig = Rig::start(options(&pair)?).await?;
    rig.use_broker(&cluster.url())?;
    rig.set_raw("nats.replicas", "3")?;
    rig.set("publisher.ack_timeout", "2s")?;
    rig.up().await?;
    let workload = WorkloadOptions { rate: Some(200.0), ..WorkloadOptions::new(rig.postgres.url()) };
    let workload = Workload::start(workload).await?;

    // The others are a majority; the relay may have to leave a connection to the one that hangs.
    let nodes = leader_first(&cluster).await?;
    let follower = nodes.last().context("a follower")?;
    follower.freeze().await?;
    progress(&rig).await?;
    follower.thaw().await?;

    // As a rolling upgrade does: clients are sent away first.
    for node in cluster.nodes() {
        node.lame_duck().await?;
        progress(&rig).await?;
        node.stop().await?;
        progress(&rig).await?;
        node.start_again().await?;
        cluster.wait_ready().await?;
    }
    workload.stop().await;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()?;

    let nodes = leader_first(&cluster).await?;
    for node in &nodes[1..] {
        node.kill().await?;
    }
    let client = connect(&rig.postgres.url()).await?;
    let versions = client.query_one("SELECT count(*) FROM outbox", &[]).await?.get::<_, i64>(0) as u32 + 1;
    insert(&rig, versions..=versions).await?;
    let pending = position(&rig, END).await?;
    insert(&rig, versions + 1..=versions + 5).await?;
    let reason = rig.not_ready(LIMIT).await?;
    println!("without a quorum: {}", reason.trim());
    ensure!(reason.starts_with("sink: "), "{reason}");
    ensure!(confirmed(&client).await? < pending, "something was confirmed");
    for node in &nodes[1..] {
        node.start_again().await?;
    }
    cluster.wait_ready().await?;
    rig.ready().await?;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    println!("{books}");
    books.check()
}
