//! What streams and accounts do not take or keep.

use std::time::Duration;

use anyhow::{Result, ensure};
use async_nats::jetstream::stream::{Config, DiscardPolicy, RetentionPolicy};
use waljet_integration::{broker, edit_stream, newest, status, stored};
use waljet_testbed::{Rig, STREAM, connect, wait_for};

use super::{CONFIRMED, END, LIMIT, position};
use crate::wrong_things::{fails, found, found_warning, good, insert, red, rig, run_ends, said_with, stream_config};

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_edited_under_a_running_relay_is_named_and_waited_for() -> Result<()> {
    let mut rig = newest().await?;
    // Batches are answered even by a stream that does not acknowledge.
    rig.set("publisher.mode", "chain")?;
    rig.set("publisher.ack_timeout", "1s")?;
    rig.up().await?;
    let subjects = |subject: &str| vec![subject.to_owned()];
    let edits: [(Config, &str); 2] = [
        // One of the subjects is gone, and the events on others behind it wait, too.
        (Config { subjects: subjects("outbox.other.>"), ..stream_config("") }, "[stream-subjects]"),
        (Config { no_ack: true, ..stream_config("outbox.>") }, "[stream-no-ack]"),
    ];
    let mut versions = 1;
    for (wrong, code) in edits {
        insert(&rig, versions..=versions + 1).await?;
        rig.settle(LIMIT).await?;
        edit_stream(&rig.nats.url(), |config| (config.subjects, config.no_ack) = (wrong.subjects, wrong.no_ack))
            .await?;
        insert(&rig, versions + 2..=versions + 2).await?;
        let pending = position(&rig, END).await?;
        other_event(&rig).await?;
        let reason = red(&rig, code, LIMIT).await?;
        ensure!(reason.contains("OUTBOX"), "{reason}");
        // What is not acknowledged is stored all the same, as the relay may have read by now; what is refused is not.
        if code == "[stream-subjects]" {
            ensure!(position(&rig, CONFIRMED).await? < pending, "{code}: something was confirmed");
        }
        edit_stream(&rig.nats.url(), |config| (config.subjects, config.no_ack) = (subjects("outbox.>"), false)).await?;
        rig.ready().await?;
        rig.settle(LIMIT).await?;
        versions += 3;
    }
    rig.books().await?.check()?;
    edit_stream(&rig.nats.url(), |config| config.sealed = true).await?;
    insert(&rig, 90..=90).await?;
    red(&rig, "[stream-sealed]", LIMIT).await?;
    assert!(rig.relay()?.ended()?.is_none());
    Ok(())
}

/// Commits an event on another subject than those of `insert`.
async fn other_event(rig: &Rig) -> Result<()> {
    let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
               SELECT 'other', '2', 'changed', jsonb_build_object('version', count(*)) FROM outbox";
    connect(&rig.postgres.url()).await?.execute(sql, &[]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subject_that_is_full_holds_the_line_until_there_is_room() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    edit_stream(&rig.nats.url(), |config| {
        (config.max_messages_per_subject, config.discard) = (2, DiscardPolicy::New);
        config.discard_new_per_subject = true;
    })
    .await?;
    found_warning(&rig, "each subject takes 2 events only, and what follows waits", "--max-msgs-per-subject=-1")
        .await?;
    rig.start_relay()?;
    rig.ready().await?;
    insert(&rig, 1..=2).await?;
    rig.settle(LIMIT).await?;
    insert(&rig, 3..=3).await?;
    let pending = position(&rig, END).await?;
    other_event(&rig).await?;
    let reason = red(&rig, "[stream-full]", LIMIT).await?;
    ensure!(reason.contains("per subject"), "{reason}");
    // Several attempts with both at hand.
    wait_for("further attempts", LIMIT, async || {
        let status = status(&rig).await?;
        let attempts = status["sink"]["fault"]["attempts"].as_u64();
        ensure!(status["window"]["events"] == 2 && attempts > Some(4), "{status}");
        Ok::<_, anyhow::Error>(true)
    })
    .await?;
    assert_eq!(rig.stored().await?, 2, "an event on another subject overtook it");
    ensure!(position(&rig, CONFIRMED).await? < pending, "something was confirmed");
    edit_stream(&rig.nats.url(), |config| config.max_messages_per_subject = 10).await?;
    rig.ready().await?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_stream_does_not_keep_is_told_before_the_first_event() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    let broker = broker(&rig).await?;
    edit_stream(&rig.nats.url(), |config| {
        (config.max_age, config.duplicate_window) = (Duration::from_secs(9), Duration::from_secs(9));
    })
    .await?;
    found_warning(&rig, "remembers message ids for 9s, less than a restart may take", "--dupe-window").await?;
    found_warning(&rig, "messages are kept for 9s only, and their ids with them", "--max-age").await?;

    // With nobody interested the broker acknowledges and forgets.
    broker.delete_stream(STREAM).await?;
    broker.create_stream(Config { retention: RetentionPolicy::Interest, ..stream_config("outbox.>") }).await?;
    let lost = "no consumer has an interest in it: events are acknowledged and dropped at once";
    found_warning(&rig, lost, "create the consumers first").await?;
    rig.start_relay()?;
    rig.ready().await?;
    ensure!(rig.log().contains(lost), "{}", rig.log());
    rig.relay()?.kill()?;
    let consumer =
        async_nats::jetstream::consumer::pull::Config { durable_name: Some("c".into()), ..Default::default() };
    broker.get_stream(STREAM).await?.create_consumer(consumer).await?;
    let out = good(&rig).await?;
    ensure!(out.contains("retention is interest") && !out.contains(lost), "{out}");

    // Streams that would store the broker's own answers.
    broker.delete_stream(STREAM).await?;
    let inboxes = vec!["outbox.>".to_owned(), "_INBOX.>".to_owned()];
    broker.create_stream(Config { subjects: inboxes, ..stream_config("") }).await?;
    let message = "stream \"OUTBOX\" takes \"_INBOX.>\", replies of the broker among it";
    found(&rig, "stream-captures-replies").await?.says(&[message]);
    run_ends(&mut rig, 3, "stream-captures-replies").await?.says(&[message]).hints(&["--subjects=\"outbox.>\""]);
    edit_stream(&rig.nats.url(), |config| config.subjects = vec!["outbox.>".to_owned(), "replies.>".to_owned()])
        .await?;
    good(&rig).await?;
    rig.set("nats.inbox_prefix", "replies")?;
    found(&rig, "stream-captures-replies").await?.says(&["takes \"replies.>\""]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_without_room_is_waited_for() -> Result<()> {
    let account = |room: &str| {
        format!(
            "accounts {{ A: {{ jetstream: {{ max_file: {room} }}, users: [{{ user: a, password: a }}] }} }}
             no_auth_user: a"
        )
    };
    let mut rig = rig(|options| options.nats.extra = account("20KB")).await?;
    rig.up().await?;
    insert(&rig, 1..=200).await?;
    let committed = position(&rig, END).await?;
    let reason = red(&rig, "[jetstream-resources]", LIMIT).await?;
    ensure!(reason.contains("nats account info"), "{reason}");
    let held = rig.stored().await?;
    ensure!(held > 0 && held < 200, "{held} of 200 events found room");
    ensure!(position(&rig, CONFIRMED).await? < committed, "something was confirmed past it");
    rig.nats.reload(&account("10MB")).await?;
    rig.ready().await?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_cannot_be_created_is_told_why_and_one_that_exists_is_left_alone() -> Result<()> {
    let account = "accounts { A: { jetstream: { max_streams: 1 }, users: [{ user: a, password: a }] } }
                   no_auth_user: a";
    let mut rig = rig(|options| options.nats.extra = account.into()).await?;
    rig.set_raw("nats.replicas", "3")?;
    fails(&rig, &["init"], 1, "stream-create").await?.hints(&["set nats.replicas lower"]);
    rig.set_raw("nats.replicas", "1")?;
    let broker = broker(&rig).await?;
    let other = Config { name: "OTHER".into(), ..stream_config("outbox.order.>") };
    broker.create_stream(other.clone()).await?;
    let told = fails(&rig, &["init"], 1, "jetstream-resources").await?;
    told.hints(&["raise the account's or the server's JetStream limits"]);
    rig.nats.reload(&account.replace("max_streams: 1", "max_streams: 2")).await?;
    let message = "stream OTHER takes such subjects already";
    fails(&rig, &["init"], 1, "stream-overlap").await?.says(&[message]).hints(&["nats.stream", "route.subject"]);
    found(&rig, "stream-overlap").await?.says(&["belong to stream OTHER"]);
    broker.delete_stream("OTHER").await?;

    let theirs = Config { duplicate_window: Duration::from_secs(90), max_messages: 77, ..stream_config("outbox.>") };
    broker.create_stream(theirs).await?;
    let before = broker.get_stream(STREAM).await?.cached_info().config.clone();
    let said = said_with(&rig, &[("WALJET_NATS__MAX_BYTES", "1MiB")], &["init"]).await?;
    ensure!(said.code == 0, "{}", said.err);
    rig.start_relay()?;
    rig.ready().await?;
    insert(&rig, 1..=3).await?;
    stored(&rig, 3).await?;
    let after = broker.get_stream(STREAM).await?.cached_info().config.clone();
    assert_eq!(before, after);
    Ok(())
}
