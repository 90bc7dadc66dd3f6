//! Every publisher mode under every fault of the broker's end, under load: the books must balance.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_nats::jetstream::{self, stream::DiscardPolicy};
use waljet_integration::{newest, options, status};
use waljet_testbed::{
    Direction, Mode, NatsCluster, NatsOptions, Pair, Proxy, Rig, STREAM, Workload, WorkloadOptions, wait_for,
};

const LIMIT: Duration = Duration::from_secs(120);

/// As much as two cores carry beside servers that die.
async fn load(rig: &Rig) -> Result<Workload> {
    Workload::start(WorkloadOptions { rate: Some(400.0), ..WorkloadOptions::new(rig.postgres.url()) }).await
}

/// Stops the load, waits until all is stored, and reads the books.
async fn balance(rig: &Rig, workload: Workload) -> Result<()> {
    workload.stop().await;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    println!("{books}");
    ensure!(books.committed > 100, "there was hardly any load: {books}");
    books.check()
}

async fn mode_of(rig: &Rig) -> Result<String> {
    Ok(status(rig).await?["sink"]["mode"].as_str().unwrap_or_default().to_owned())
}

async fn nap(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

/// All faults of the broker's end, one after the other, under load.
async fn everything_breaks(mode: &str) -> Result<()> {
    let mut rig = newest().await?;
    let proxy = Proxy::start(rig.nats.port())?;
    rig.set("publisher.mode", mode)?;
    rig.set("publisher.ack_timeout", "1s")?;
    rig.set("nats.url", &rig.nats.url_at(proxy.port()))?;
    rig.up().await?;
    assert_eq!(mode_of(&rig).await?, mode);
    let workload = load(&rig).await?;
    for round in 0..3 {
        nap(300).await;
        rig.nats.kill().await?;
        nap(100).await;
        rig.nats.start_again().await?;
        nap(400).await;
        rig.relay()?.start_again()?;
        nap(400).await;
        proxy.reset_connections()?;
        nap(200).await;
        let direction = [Direction::ToServer, Direction::ToClient, Direction::Both][round];
        proxy.set(Mode::Cut { direction, after: 3_000 })?;
        nap(300).await;
        proxy.set(Mode::Stall(direction))?;
        nap(1_200).await;
        proxy.set(Mode::Pass)?;
        nap(300).await;
        rig.nats.freeze().await?;
        nap(1_500).await;
        rig.nats.thaw().await?;
    }
    rig.ready().await?;
    assert_eq!(mode_of(&rig).await?, mode);
    balance(&rig, workload).await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_fast_mode_the_books_balance_whatever_breaks() -> Result<()> {
    everything_breaks("fast").await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_chain_mode_the_books_balance_whatever_breaks() -> Result<()> {
    everything_breaks("chain").await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_serial_mode_the_books_balance_whatever_breaks() -> Result<()> {
    everything_breaks("serial").await
}
