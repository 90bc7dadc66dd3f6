//! What tests do to the stream and to the servers that store it.

use std::time::Duration;

use anyhow::{Context as _, Result};
use async_nats::jetstream::{self, Context, stream::Config};
use waljet_testbed::{Nats, NatsCluster, Rig, STREAM, addresses, wait_for};

/// How long an election may take, on a busy machine.
const ELECTION: Duration = Duration::from_secs(120);

/// Connects to the broker at `url`, or to one of several.
///
/// # Errors
///
/// Nobody answers.
pub async fn jetstream_at(url: &str) -> Result<Context> {
    Ok(jetstream::new(async_nats::connect(addresses(url)).await?))
}

/// Connects to the rig's own broker.
///
/// # Errors
///
/// It does not answer.
pub async fn broker(rig: &Rig) -> Result<Context> {
    jetstream_at(&rig.nats.url()).await
}

/// Changes the stream's configuration.
///
/// # Errors
///
/// The broker does not take it.
pub async fn edit_stream(url: &str, change: impl FnOnce(&mut Config)) -> Result<()> {
    let context = jetstream_at(url).await?;
    let mut config = context.get_stream(STREAM).await?.cached_info().config.clone();
    change(&mut config);
    context.update_stream(&config).await?;
    Ok(())
}

/// Waits until the stream has a leader, and returns the members with that one first.
///
/// # Errors
///
/// There is none, or it is no member of this cluster.
pub async fn leader_first(cluster: &NatsCluster) -> Result<Vec<&Nats>> {
    let leader = wait_for("the stream to have a leader", ELECTION, async || {
        let info = jetstream_at(&cluster.url()).await?.get_stream(STREAM).await?.cached_info().clone();
        Ok::<_, anyhow::Error>(info.cluster.and_then(|cluster| cluster.leader))
    })
    .await?;
    cluster.node(&leader).context("the leader is no member")?;
    let mut nodes: Vec<&Nats> = cluster.nodes().iter().collect();
    nodes.sort_by_key(|node| node.name() != leader);
    Ok(nodes)
}

/// Has the leader of the stream step down.
///
/// # Errors
///
/// Nobody answers.
pub async fn step_down(url: &str) -> Result<()> {
    let client = async_nats::connect(addresses(url)).await?;
    client.request(format!("$JS.API.STREAM.LEADER.STEPDOWN.{STREAM}"), "".into()).await?;
    Ok(())
}
