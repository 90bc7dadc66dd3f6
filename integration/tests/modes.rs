//! Every publisher mode under every fault of the broker's end, under load: the books must balance.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_nats::jetstream::{self, stream::Config, stream::DiscardPolicy};
use waljet_integration::{edit_stream, nap, newest, not_ready_for, oldest, options, progress, status};
use waljet_testbed::{
    Books, Direction, Mode, NatsCluster, NatsOptions, Pair, Proxy, Rig, STREAM, Workload, WorkloadOptions, addresses,
    connect, wait_for,
};

const LIMIT: Duration = Duration::from_secs(120);

/// Load that leaves the servers room to be killed in the middle of something.
async fn load(rig: &Rig) -> Result<Workload> {
    // One message at a time is slow, and more so on a busy machine.
    let rate = if mode(rig).await? == "serial" { 60.0 } else { 400.0 };
    Workload::start(WorkloadOptions { rate: Some(rate), ..WorkloadOptions::new(rig.postgres.url()) }).await
}

/// Stops the load, waits until all is stored, and reads the books.
async fn books(rig: &Rig, workload: Workload) -> Result<Books> {
    workload.stop().await;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    println!("{books}");
    ensure!(books.committed > 20, "there was hardly any load: {books}");
    Ok(books)
}

async fn mode(rig: &Rig) -> Result<String> {
    Ok(status(rig).await?["sink"]["mode"].as_str().unwrap_or_default().to_owned())
}

/// All faults of the broker's end, one after the other, under load.
async fn everything_breaks(name: &str) -> Result<Books> {
    let mut rig = newest().await?;
    let proxy = Proxy::start(rig.nats.port())?;
    rig.set("publisher.mode", name)?;
    rig.set("publisher.ack_timeout", "1s")?;
    if matches!(name, "fast" | "chain") {
        // Late copies are kept out by more than their ids.
        rig.set("nats.duplicate_window", "1s")?;
    }
    rig.set("nats.url", &rig.nats.url_at(proxy.port()))?;
    rig.up().await?;
    assert_eq!(mode(&rig).await?, name);
    let workload = load(&rig).await?;
    for _ in 0..3 {
        progress(&rig).await?;
        rig.nats.kill().await?;
        rig.nats.start_again().await?;
        progress(&rig).await?;
        rig.relay()?.start_again()?;
        progress(&rig).await?;
        proxy.reset_connections()?;
    }
    for direction in [Direction::ToServer, Direction::ToClient] {
        progress(&rig).await?;
        proxy.set(Mode::Cut { direction, after: 20_000 })?;
        nap(500).await;
        proxy.set(Mode::Stall(direction))?;
        nap(1_500).await;
        proxy.set(Mode::Pass)?;
    }
    progress(&rig).await?;
    rig.nats.freeze().await?;
    nap(1_500).await;
    rig.nats.thaw().await?;
    progress(&rig).await?;
    // Above what can be stored by then: a limit below what the stream holds would make room by itself.
    let client = connect(&rig.postgres.url()).await?;
    let committed: i64 = client.query_one("SELECT count(*) FROM outbox", &[]).await?.get(0);
    let room = if name == "serial" { 200 } else { 1_500 };
    let full = |config: &mut Config| (config.max_messages, config.discard) = (committed + room, DiscardPolicy::New);
    edit_stream(&rig.nats.url(), full).await?;
    wait_for("the stream to be full", LIMIT, async || Ok::<_, anyhow::Error>(rig.log().contains("stream-full")))
        .await?;
    nap(500).await;
    edit_stream(&rig.nats.url(), |config| config.max_messages = -1).await?;
    rig.ready().await?;
    assert_eq!(mode(&rig).await?, name);
    books(&rig, workload).await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_fast_mode_the_books_balance_whatever_breaks() -> Result<()> {
    everything_breaks("fast").await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_chain_mode_the_books_balance_whatever_breaks() -> Result<()> {
    everything_breaks("chain").await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_serial_mode_the_books_balance_whatever_breaks() -> Result<()> {
    everything_breaks("serial").await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_lanes_mode_the_books_balance_by_key_whatever_breaks() -> Result<()> {
    let books = everything_breaks("lanes").await?;
    // Keys do overtake each other, or the mode would not be what it says.
    ensure!(books.reordered > 0, "{books}");
    books.check_by_key()
}

/// A stream on three servers, whose leader is killed, frozen and told to step down, under load.
async fn leaders_die(name: &str) -> Result<()> {
    let pair = Pair::newest()?;
    let cluster = NatsCluster::start(NatsOptions::new(&pair), 3).await?;
    let mut rig = Rig::start(options(&pair)?).await?;
    rig.use_broker(&cluster.url())?;
    rig.set("publisher.mode", name)?;
    rig.set("publisher.ack_timeout", "2s")?;
    rig.set_raw("nats.replicas", "3")?;
    rig.up().await?;
    assert_eq!(mode(&rig).await?, name);
    let workload = load(&rig).await?;
    for round in 0..3 {
        progress(&rig).await?;
        let client = async_nats::connect(addresses(&cluster.url())).await?;
        let info = jetstream::new(client.clone()).get_stream(STREAM).await?.cached_info().clone();
        let leader = info.cluster.and_then(|cluster| cluster.leader).context("the stream has no leader")?;
        let node = cluster.node(&leader).context("the leader is no member")?;
        match round {
            0 => {
                node.kill().await?;
                progress(&rig).await?;
                node.start_again().await?;
                cluster.wait_ready().await?;
            }
            1 => {
                node.freeze().await?;
                nap(6_000).await;
                node.thaw().await?;
                cluster.wait_ready().await?;
            }
            _ => {
                client.request(format!("$JS.API.STREAM.LEADER.STEPDOWN.{STREAM}"), "".into()).await?;
            }
        }
    }
    progress(&rig).await?;
    assert_eq!(mode(&rig).await?, name);
    books(&rig, workload).await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_fast_mode_the_books_balance_while_leaders_die() -> Result<()> {
    leaders_die("fast").await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_chain_mode_the_books_balance_while_leaders_die() -> Result<()> {
    leaders_die("chain").await
}

#[tokio::test(flavor = "multi_thread")]
async fn fast_mode_keeps_its_order_beside_another_publisher() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    edit_stream(&rig.nats.url(), |config| config.subjects.push("other.>".into())).await?;
    rig.start_relay()?;
    rig.ready().await?;
    assert_eq!(mode(&rig).await?, "fast");
    let workload = load(&rig).await?;
    let other = jetstream::new(async_nats::connect(rig.nats.url()).await?);
    for n in 0..2_000 {
        // Inside of the relay's subjects, too.
        let subject = if n % 2 == 0 { "other.x" } else { "outbox.other.x" };
        other.publish(subject, "".into()).await?.await?;
        if n % 500 == 0 {
            rig.nats.kill().await?;
            rig.nats.start_again().await?;
        }
    }
    workload.stop().await;
    let all = |books: &Books| books.committed + books.foreign == books.stored && books.lost == 0;
    wait_for("every event to be stored", LIMIT, async || Ok::<_, anyhow::Error>(all(&rig.books().await?))).await?;
    let books = rig.books().await?;
    println!("{books}");
    assert_eq!(mode(&rig).await?, "fast");
    ensure!(books.foreign >= 2_000 && (books.doubled, books.reordered) == (0, 0), "{books}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn where_the_broker_knows_no_batches_automatic_mode_is_chain() -> Result<()> {
    let mut rig = oldest().await?;
    rig.up().await?;
    assert_eq!(mode(&rig).await?, "chain");
    let check = rig.waljet(&["check"]).await?;
    let said = String::from_utf8_lossy(&check.stdout).into_owned();
    ensure!(said.contains("auto is chain"), "{said}");
    rig.relay()?.kill()?;
    rig.set("publisher.mode", "fast")?;
    rig.start_relay()?;
    not_ready_for(&rig, "stream-without-batches").await
}

#[tokio::test(flavor = "multi_thread")]
async fn fast_mode_waits_for_a_stream_that_allows_batches() -> Result<()> {
    let mut rig = newest().await?;
    rig.set("publisher.mode", "fast")?;
    rig.init().await?;
    edit_stream(&rig.nats.url(), |config| config.allow_batch_publish = false).await?;
    rig.start_relay()?;
    not_ready_for(&rig, "stream-without-batches").await?;
    edit_stream(&rig.nats.url(), |config| config.allow_batch_publish = true).await?;
    rig.ready().await?;
    let workload = load(&rig).await?;
    progress(&rig).await?;
    // Taken away again while it runs, it is waited for again.
    edit_stream(&rig.nats.url(), |config| config.allow_batch_publish = false).await?;
    not_ready_for(&rig, "stream-without-batches").await?;
    edit_stream(&rig.nats.url(), |config| config.allow_batch_publish = true).await?;
    rig.ready().await?;
    books(&rig, workload).await?.check()
}
