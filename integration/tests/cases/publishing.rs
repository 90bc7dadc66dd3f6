//! Publishing: answers that do not come, and refusals in the middle of a pipeline.

use anyhow::{Result, ensure};
use waljet_integration::{broker, edit_stream, newest, stored};
use waljet_testbed::{JetStream, Rig, STREAM, connect};

use super::{CONFIRMED, END, LIMIT, position};
use crate::wrong_things::{found, good, insert, red, rig};

#[tokio::test(flavor = "multi_thread")]
async fn a_subscriber_on_the_subject_is_not_taken_for_the_stream() -> Result<()> {
    let mut rig = newest().await?;
    rig.set("publisher.ack_timeout", "1s")?;
    rig.up().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await?;
    // With it there, the server does not say that nobody takes the subject.
    let silent = async_nats::connect(rig.nats.url()).await?;
    let _messages = silent.subscribe("outbox.>").await?;
    silent.flush().await?;
    broker(&rig).await?.delete_stream(STREAM).await?;
    insert(&rig, 4..=4).await?;
    let pending = position(&rig, END).await?;
    insert(&rig, 5..=6).await?;
    red(&rig, "[stream-missing]", LIMIT).await?;
    ensure!(rig.log().contains("no acknowledgement within 1s; there is no stream"), "{}", rig.log());
    ensure!(position(&rig, CONFIRMED).await? < pending, "something was confirmed");

    // What was acknowledged is gone with the old stream, which takes a person to judge.
    rig.init().await?;
    let exit = rig.relay()?.wait(LIMIT)?;
    ensure!(exit.code() == Some(4) && rig.log().contains("stream-went-back"), "{exit}: {}", rig.log());
    rig.start_relay_with(&["run", "--accept-gap"])?;
    stored(&rig, 3).await
}

/// Five events of one key in one transaction, the third of which is large.
async fn five(rig: &Rig, first: u64) -> Result<()> {
    let client = connect(&rig.postgres.url()).await?;
    let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
               SELECT 'order', '1', 'changed', jsonb_build_object('version', n, 'text',
                   CASE WHEN n = $1 + 2 THEN repeat('x', 3000) ELSE '' END) FROM generate_series($1::bigint, $1 + 4) n";
    client.execute(sql, &[&(first as i64)]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_only_the_broker_refuses_is_overtaken_in_no_mode() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    for (round, mode) in ["fast", "chain", "lanes", "serial"].into_iter().enumerate() {
        let before = round as u64 * 5;
        rig.set("publisher.mode", mode)?;
        rig.start_relay()?;
        rig.ready().await?;
        rig.settle(LIMIT).await?;
        // The relay read the limit when it began, and does not know of this one.
        edit_stream(&rig.nats.url(), |config| config.max_message_size = 2_000).await?;
        five(&rig, before + 1).await?;
        let committed = position(&rig, END).await?;
        let reason = red(&rig, "[message-too-large]", LIMIT).await?;
        stored(&rig, before + 2).await?;
        ensure!(position(&rig, CONFIRMED).await? < committed, "{mode}: confirmed past it");
        ensure!(!reason.contains("xxx"), "{mode}: {reason}");
        // It would look again by itself after half a minute.
        edit_stream(&rig.nats.url(), |config| config.max_message_size = -1).await?;
        rig.relay()?.kill()?;
    }
    rig.start_relay()?;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    books.check()?;
    assert_eq!(books.stored, 20);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_domain_is_named_and_the_right_one_serves() -> Result<()> {
    let mut rig =
        rig(|options| options.nats.jetstream = Some(JetStream { extra: "domain: hub".into(), ..JetStream::default() }))
            .await?;
    rig.set("nats.domain", "hub")?;
    rig.init().await?;
    good(&rig).await?;
    rig.set("nats.domain", "elsewhere")?;
    found(&rig, "jetstream-unavailable").await?.hints(&["$JS.elsewhere.API", "nats.domain"]);
    rig.start_relay()?;
    red(&rig, "[jetstream-unavailable]", LIMIT).await?;
    insert(&rig, 1..=3).await?;
    rig.relay()?.kill()?;
    rig.set("nats.domain", "hub")?;
    rig.start_relay()?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()
}
