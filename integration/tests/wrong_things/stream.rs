//! Streams that cannot be what the relay publishes to, or only with a warning.

use std::time::Duration;

use anyhow::Result;
use async_nats::jetstream::stream::Config;
use waljet_integration::{broker, newest, oldest};
use waljet_testbed::Rig;

use super::{found, good, run_ends, stream_config};

/// Replaces the stream of `init` by one of another configuration.
async fn replace(rig: &Rig, config: Config) -> Result<()> {
    let broker = broker(rig).await?;
    // It may not be there.
    let _ = broker.delete_stream(&config.name).await;
    broker.create_stream(config).await?;
    Ok(())
}

async fn each_stream(mut rig: Rig) -> Result<()> {
    rig.init().await?;
    let space = "outbox.>";

    replace(&rig, stream_config("orders.>")).await?;
    let message = "stream \"OUTBOX\" takes orders.>, expected outbox.>";
    run_ends(&mut rig, 3, "stream-subjects").await?.says(&[message]);
    let told = found(&rig, "stream-subjects").await?.says(&[message]);
    told.hints(&["nats stream edit OUTBOX --subjects=\"outbox.>\""]);
    broker(&rig).await?.update_stream(stream_config(space)).await?;
    good(&rig).await?;

    broker(&rig).await?.update_stream(Config { no_ack: true, ..stream_config(space) }).await?;
    let message = "stream \"OUTBOX\" does not acknowledge (no_ack)";
    run_ends(&mut rig, 3, "stream-no-ack").await?.says(&[message]);
    found(&rig, "stream-no-ack").await?.says(&[message]).hints(&["nats stream edit OUTBOX --ack"]);
    broker(&rig).await?.update_stream(stream_config(space)).await?;
    good(&rig).await?;

    broker(&rig).await?.update_stream(Config { sealed: true, ..stream_config(space) }).await?;
    let message = "stream \"OUTBOX\" is sealed and takes no message ever again";
    run_ends(&mut rig, 3, "stream-sealed").await?.says(&[message]);
    found(&rig, "stream-sealed").await?.says(&[message]).hints(&["create another stream and set nats.stream"]);

    // The remedy, and that two streams cannot have the same subjects.
    rig.set("nats.stream", "OTHER")?;
    let message = "subjects of \"outbox.>\" belong to stream OUTBOX";
    found(&rig, "stream-overlap").await?.says(&[message]).hints(&["nats stream edit OUTBOX", "route.subject"]);
    rig.set("route.subject", "events.{aggregate_type}")?;
    rig.init().await?;
    good(&rig).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_cannot_take_events_is_named_with_the_command_that_mends_it() -> Result<()> {
    each_stream(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_cannot_take_events_is_named_with_the_command_that_mends_it_on_the_oldest_servers() -> Result<()>
{
    each_stream(oldest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_duplicate_window_is_a_warning_and_no_fault() -> Result<()> {
    let rig = newest().await?;
    rig.init().await?;
    replace(&rig, Config { duplicate_window: Duration::from_secs(30), ..stream_config("outbox.>") }).await?;
    let out = good(&rig).await?;
    assert!(out.contains("the broker remembers message ids for 30s, less than a restart may take"), "{out}");
    assert!(out.contains("hint: nats stream edit OUTBOX --dupe-window=2m"), "{out}");
    broker(&rig).await?.update_stream(stream_config("outbox.>")).await?;
    let out = good(&rig).await?;
    assert!(!out.contains("remembers message ids"), "{out}");
    Ok(())
}
