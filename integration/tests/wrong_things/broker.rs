//! The way to NATS, JetStream, and the events that a broker does not take in for now.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use waljet_integration::{broker, newest};

use super::{LIMIT, confirmed, fails, found, good, insert, red, rig};

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_does_not_answer_is_told_at_once_and_waited_for() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    rig.nats.stop().await?;
    let address = format!("nats://127.0.0.1:{}", rig.nats.port());
    let started = Instant::now();
    found(&rig, "nats-unreachable").await?.says(&[&address]).hints(&["start the server, or correct nats.url"]);
    ensure!(started.elapsed() < Duration::from_secs(10), "check took {:?}", started.elapsed());
    rig.start_relay()?;
    let reason = red(&rig, "[nats-unreachable]", LIMIT).await?;
    assert!(reason.contains(&address), "{reason}");
    insert(&rig, 1..=3).await?;
    rig.nats.start_again().await?;
    rig.ready().await?;
    rig.settle(LIMIT).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_without_jetstream_is_named_with_the_block_that_enables_it() -> Result<()> {
    let mut rig = rig(|options| options.nats.jetstream = None).await?;
    let hint = ["jetstream {} in the server's configuration", "nats.domain"];
    fails(&rig, &["init"], 1, "jetstream-unavailable").await?.hints(&["enable JetStream on the server"]);
    found(&rig, "jetstream-unavailable").await?.hints(&hint);
    rig.start_relay()?;
    red(&rig, "[jetstream-unavailable]", LIMIT).await?;
    insert(&rig, 1..=3).await?;
    rig.nats.reload(&format!("jetstream {{ store_dir: {:?} }}", rig.nats.store_dir())).await?;
    rig.init().await?;
    rig.ready().await?;
    rig.settle(LIMIT).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_missing_is_waited_for_and_then_gets_everything_in_order() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    broker(&rig).await?.delete_stream(waljet_testbed::STREAM).await?;
    found(&rig, "stream-missing").await?.says(&["stream \"OUTBOX\""]).hints(&["waljet init"]);
    let before = confirmed(&rig).await?;
    rig.start_relay()?;
    red(&rig, "[stream-missing]", LIMIT).await?;
    insert(&rig, 1..=50).await?;
    // It has tried again with the events in hand, and confirmed nothing.
    waljet_testbed::wait_for("events in the window", LIMIT, async || {
        let status = waljet_integration::status(&rig).await?;
        ensure!(status["window"]["events"] == 50, "{}", status["window"]);
        Ok::<_, anyhow::Error>(true)
    })
    .await?;
    ensure!(confirmed(&rig).await? == before, "the slot was moved");
    rig.init().await?;
    rig.ready().await?;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    books.check()?;
    ensure!(books.stored == 50, "{books}");
    // While it runs, its own slot is what a check finds taken.
    rig.relay()?.terminate(LIMIT)?;
    good(&rig).await?;
    Ok(())
}
