//! What a stream holds of events that the slot does not know to be stored: it is read back before anything is sent,
//! and where the stream no longer tells, the relay says so.
//!
//! Each test stores events while nothing reaches PostgreSQL of what the relay confirms, kills the relay, lets the
//! duplicate window pass, and starts the relay again.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_nats::HeaderMap;
use async_nats::jetstream::consumer::{AckPolicy, pull};
use async_nats::jetstream::{stream::Config, stream::RetentionPolicy};
use futures_util::{StreamExt, future};
use serde_json::Value;
use waljet_integration::{broker, commit_singly, confirmed, options, status};
use waljet_testbed::{Direction, Mode, Pair, Proxy, Rig, STREAM, connect, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

/// The broker forgets ids after this.
const WINDOW: Duration = Duration::from_secs(1);

/// Events that are stored and not confirmed.
const EVENTS: u32 = 200;

/// What the log says where the stream no longer tells.
const WARNING: &str = "the stream no longer tells which events it was given: they may be stored twice";

/// What it says of what it skipped.
const SKIPPED: &str = "events that the stream held were skipped";

/// A rig with a proxy before PostgreSQL, and a stream as `init` makes it but for `change`.
async fn rig(pair: &Pair, change: impl FnOnce(&mut Config)) -> Result<(Rig, Proxy)> {
    let mut options = options(pair)?;
    // The walsender hears nothing for as long as the test likes.
    options.postgres.settings.push(("wal_sender_timeout".into(), "0".into()));
    let mut rig = Rig::start(options).await?;
    let proxy = Proxy::start(rig.postgres.port())?;
    rig.set("postgres.url", &rig.postgres.url_at(proxy.port()))?;
    rig.set("nats.duplicate_window", "1s")?;
    rig.init().await?;
    let broker = broker(&rig).await?;
    let mut config = broker.get_stream(STREAM).await?.cached_info().config.clone();
    assert_eq!(config.duplicate_window, WINDOW);
    change(&mut config);
    broker.delete_stream(STREAM).await?;
    broker.create_stream(config).await?;
    Ok((rig, proxy))
}

/// Stores events of which PostgreSQL does not hear, and kills the relay.
async fn store_unconfirmed(rig: &mut Rig, proxy: &Proxy) -> Result<()> {
    rig.start_relay()?;
    rig.ready().await?;
    let client = connect(&rig.postgres.url()).await?;
    proxy.set(Mode::Stall(Direction::ToServer))?;
    let before = confirmed(&client).await?;
    let stored = rig.stored().await?;
    commit_singly(&client, EVENTS).await?;
    wait_for("the events to be stored", LIMIT, async || {
        Ok::<_, anyhow::Error>(rig.stored().await? == stored + u64::from(EVENTS))
    })
    .await?;
    rig.relay()?.kill()?;
    proxy.reset_connections()?;
    proxy.set(Mode::Pass)?;
    assert_eq!(confirmed(&client).await?, before, "PostgreSQL was told");
    // Whatever the broker still refuses from here on is not for its window.
    tokio::time::sleep(WINDOW * 2).await;
    Ok(())
}

/// Starts the relay again, and waits until everything is stored and confirmed.
async fn go_on(rig: &mut Rig) -> Result<Value> {
    rig.start_relay()?;
    rig.ready().await?;
    rig.settle(LIMIT).await?;
    let status = status(rig).await?;
    println!("{:#}", status["sink"]);
    Ok(status)
}

/// The warning, in the views, about this many events, with this reason.
async fn warned(rig: &Rig, status: &Value, unsure: u64, why: &str) -> Result<()> {
    let log = rig.log();
    let line = log.lines().find(|line| line.contains(WARNING)).with_context(|| format!("no warning in:\n{log}"))?;
    println!("{line}");
    ensure!(line.contains("WARN") && line.contains("read-back-incomplete") && line.contains(why), "{line}");
    ensure!(log.matches(WARNING).count() == 1, "warned again and again:\n{log}");
    let sink = &status["sink"];
    ensure!(sink["read_back"]["missing"].as_str().is_some_and(|missing| missing.contains(why)), "{sink:#}");
    ensure!(sink["read_backs"]["unsure"] == unsure, "{sink:#}");
    let metrics = rig.get("/metrics").await?.body;
    ensure!(metrics.contains(&format!("\nwaljet_read_back_unsure_events_total {unsure}\n")), "{metrics}");
    let shown = rig.waljet(&["status"]).await?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let expected = format!("sent nevertheless: {unsure} events");
    ensure!(shown.lines().any(|line| line.starts_with("not known ") && line.contains(&expected)), "{shown}");
    Ok(())
}

/// Nothing is warned of, and this many events were skipped.
fn skipped(rig: &Rig, status: &Value, events: u32) -> Result<()> {
    let log = rig.log();
    ensure!(!log.contains(WARNING), "{log}");
    ensure!(status["sink"]["read_back"]["missing"].is_null(), "{status:#}");
    ensure!(status["events"]["skipped"] == events, "{status:#}");
    let line =
        log.lines().find(|line| line.contains(SKIPPED)).with_context(|| format!("skipped in silence:\n{log}"))?;
    println!("{line}");
    ensure!(line.contains(&format!("\"skipped\":{events},")), "{line}");
    Ok(())
}

async fn read_back(pair: &Pair) -> Result<()> {
    let (mut rig, proxy) = rig(pair, |_| {}).await?;
    store_unconfirmed(&mut rig, &proxy).await?;
    let status = go_on(&mut rig).await?;
    skipped(&rig, &status, EVENTS)?;
    // In the log, in the status, and in the metrics.
    let log = rig.log();
    let line = log.lines().find(|line| line.contains("stream read back")).context("nothing was read back")?;
    println!("{line}");
    ensure!(line.contains("\"messages\":200,\"found\":200,\"seconds\":0."), "{line}");
    for read_back in [&status["sink"]["read_back"], &status["sink"]["read_backs"]] {
        ensure!(read_back["messages"] == EVENTS && read_back["found"] == EVENTS, "{status:#}");
        ensure!(read_back["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{status:#}");
    }
    ensure!(status["sink"]["read_backs"]["count"] == 1, "{status:#}");
    let metrics = rig.get("/metrics").await?.body;
    for line in ["waljet_read_backs_total 1", "waljet_read_back_messages_total 200", "waljet_read_back_found_total 200"]
    {
        ensure!(metrics.contains(&format!("\n{line}\n")), "{metrics}");
    }
    ensure!(metrics.contains("\nwaljet_read_back_seconds_total 0."), "{metrics}");
    let shown = rig.waljet(&["status"]).await?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    ensure!(shown.contains("200 messages in 1 read-backs and 0."), "{shown}");
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_read_back_took_and_found_is_shown() -> Result<()> {
    read_back(&Pair::newest()?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_read_back_took_and_found_is_shown_on_the_oldest_servers() -> Result<()> {
    read_back(&Pair::oldest()?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_a_slot_that_went_back_in_a_crash_are_skipped_beyond_the_duplicate_window() -> Result<()> {
    let (mut rig, _proxy) = rig(&Pair::newest()?, |_| {}).await?;
    rig.start_relay()?;
    rig.ready().await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, EVENTS).await?;
    rig.settle(LIMIT).await?;
    let before = confirmed(&client).await?;
    rig.relay()?.kill()?;
    rig.postgres.kill().await?;
    rig.postgres.start_again().await?;
    let client = connect(&rig.postgres.url()).await?;
    ensure!(confirmed(&client).await? < before, "the slot did not go back, so that there is nothing to see");
    tokio::time::sleep(WINDOW * 2).await;
    let status = go_on(&mut rig).await?;
    let log = rig.log();
    ensure!(log.contains(SKIPPED) && !log.contains(WARNING), "{log}");
    ensure!(status["events"]["skipped"].as_u64().is_some_and(|skipped| skipped > 0), "{status:#}");
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_back_that_takes_long_says_how_far_it_is_and_the_relay_stays_alive() -> Result<()> {
    let (mut rig, proxy) = rig(&Pair::newest()?, |_| {}).await?;
    store_unconfirmed(&mut rig, &proxy).await?;
    // Making the consumer and asking it takes longer than the log is silent for.
    let slow = Proxy::start(rig.nats.port())?;
    slow.set(Mode::Delay(Duration::from_secs(1)))?;
    rig.set("nats.url", &rig.nats.url_at(slow.port()))?;
    rig.start_relay()?;
    wait_for("the relay to say how far it is", LIMIT, async || {
        Ok::<_, anyhow::Error>(rig.log().contains("reading the stream back"))
    })
    .await?;
    assert_eq!(rig.get("/livez").await?.status, 200);
    slow.set(Mode::Pass)?;
    rig.settle(LIMIT).await?;
    skipped(&rig, &status(&rig).await?, EVENTS)?;
    rig.books().await?.check()
}

async fn purged(pair: &Pair) -> Result<()> {
    let (mut rig, proxy) = rig(pair, |_| {}).await?;
    store_unconfirmed(&mut rig, &proxy).await?;
    broker(&rig).await?.get_stream(STREAM).await?.purge().await?;
    let status = go_on(&mut rig).await?;
    warned(&rig, &status, EVENTS.into(), "the stream held messages, and none of a relay is left").await?;
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_was_purged_gets_the_unconfirmed_events_again_with_a_warning() -> Result<()> {
    purged(&Pair::newest()?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_was_purged_gets_the_unconfirmed_events_again_with_a_warning_on_the_oldest_servers() -> Result<()>
{
    purged(&Pair::oldest()?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_messages_aged_out_is_warned_of_only_where_events_are_sent_again() -> Result<()> {
    let aging = |config: &mut Config| config.max_age = Duration::from_secs(3);
    let (mut rig, proxy) = rig(&Pair::newest()?, aging).await?;
    let aged_out = async |rig: &Rig| {
        wait_for("the messages to age out", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? == 0)).await
    };
    // Everything is confirmed: that it aged out says nothing.
    rig.start_relay()?;
    rig.ready().await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 10).await?;
    wait_for("the events to be stored", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? == 10)).await?;
    rig.relay()?.terminate(LIMIT)?;
    aged_out(&rig).await?;
    rig.start_relay()?;
    rig.ready().await?;
    commit_singly(&client, 10).await?;
    wait_for("the events to be stored", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? == 10)).await?;
    let log = rig.log();
    ensure!(!log.contains(WARNING), "{log}");
    rig.relay()?.terminate(LIMIT)?;
    aged_out(&rig).await?;
    // What is not confirmed comes again.
    store_unconfirmed(&mut rig, &proxy).await?;
    aged_out(&rig).await?;
    rig.start_relay()?;
    rig.ready().await?;
    wait_for("the events to be stored", LIMIT, async || {
        Ok::<_, anyhow::Error>(status(&rig).await?["events"]["stored"] == EVENTS)
    })
    .await?;
    warned(&rig, &status(&rig).await?, EVENTS.into(), "none of a relay is left").await
}

/// A stream from which the first half was consumed by the time that the relay comes back.
async fn half_consumed(pair: &Pair, retention: RetentionPolicy) -> Result<()> {
    let (mut rig, proxy) = rig(pair, |config| config.retention = retention).await?;
    let stream = broker(&rig).await?.get_stream(STREAM).await?;
    let config = pull::Config {
        durable_name: Some("consumer".into()),
        ack_policy: AckPolicy::Explicit,
        ..pull::Config::default()
    };
    let consumer = stream.create_consumer(config).await?;
    store_unconfirmed(&mut rig, &proxy).await?;
    let half = u64::from(EVENTS / 2);
    let mut batch = consumer.fetch().max_messages(EVENTS as usize / 2).messages().await?;
    while let Some(message) = batch.next().await {
        message.map_err(|error| anyhow::anyhow!(error))?.ack().await.map_err(|error| anyhow::anyhow!(error))?;
    }
    wait_for("them to be removed", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? == half)).await?;
    let status = go_on(&mut rig).await?;
    // What was consumed is sent again, what was not is found.
    assert_eq!((rig.stored().await?, &status["events"]["skipped"]), (u64::from(EVENTS), &Value::from(half)));
    warned(&rig, &status, half, "what the stream held before the event at").await
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_work_queue_what_is_left_is_found_and_what_was_consumed_is_warned_of() -> Result<()> {
    half_consumed(&Pair::newest()?, RetentionPolicy::WorkQueue).await
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_work_queue_what_is_left_is_found_and_what_was_consumed_is_warned_of_on_the_oldest_servers() -> Result<()>
{
    half_consumed(&Pair::oldest()?, RetentionPolicy::WorkQueue).await
}

#[tokio::test(flavor = "multi_thread")]
async fn of_an_interest_stream_what_is_left_is_found_and_what_was_consumed_is_warned_of() -> Result<()> {
    half_consumed(&Pair::newest()?, RetentionPolicy::Interest).await
}

async fn one_deleted(pair: &Pair) -> Result<()> {
    let (mut rig, proxy) = rig(pair, |_| {}).await?;
    store_unconfirmed(&mut rig, &proxy).await?;
    broker(&rig).await?.get_stream(STREAM).await?.delete_message(100).await?;
    let status = go_on(&mut rig).await?;
    assert_eq!(status["events"]["skipped"], EVENTS - 1);
    warned(&rig, &status, 1, "messages were removed from the stream past the position resumed from").await?;
    let books = rig.books().await?;
    ensure!((books.lost, books.doubled) == (0, 0), "{books}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_message_that_was_deleted_is_sent_again_with_a_warning() -> Result<()> {
    one_deleted(&Pair::newest()?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_message_that_was_deleted_is_sent_again_with_a_warning_on_the_oldest_servers() -> Result<()> {
    one_deleted(&Pair::oldest()?).await
}

/// Another publisher's messages below the relay's own subjects, more than a first look goes back.
async fn foreign_tail(pair: &Pair, delete_last: bool) -> Result<()> {
    const FOREIGN: u64 = 3_000;
    let (mut rig, proxy) = rig(pair, |_| {}).await?;
    store_unconfirmed(&mut rig, &proxy).await?;
    let broker = broker(&rig).await?;
    for _ in 0..FOREIGN / 100 {
        let acks = future::try_join_all((0..100).map(|_| broker.publish("outbox.other", "".into()))).await?;
        future::try_join_all(acks.into_iter().map(IntoFuture::into_future)).await?;
    }
    if delete_last {
        // 2.9 then finds nothing by subject.
        broker.get_stream(STREAM).await?.delete_message(u64::from(EVENTS) + FOREIGN).await?;
    }
    let status = go_on(&mut rig).await?;
    let log = rig.log();
    ensure!(status["events"]["skipped"] == EVENTS && log.contains(SKIPPED), "{status:#}\n{log}");
    // The removed message stands behind the relay's last: nobody can know whose it was.
    ensure!(status["sink"]["read_back"]["missing"].is_null() != delete_last, "{status:#}");
    ensure!(status["sink"]["read_backs"]["unsure"] == 0 && !log.contains(WARNING), "{status:#}\n{log}");
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 10).await?;
    rig.settle(LIMIT).await?;
    let all = |stored| stored == u64::from(EVENTS) + 10 + FOREIGN - u64::from(delete_last);
    wait_for("all to be stored", LIMIT, async || Ok::<_, anyhow::Error>(all(rig.stored().await?))).await?;
    let books = rig.books().await?;
    println!("{books}");
    ensure!((books.lost, books.doubled, books.reordered) == (0, 0, 0), "{books}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_thousands_of_messages_of_another_publisher_nothing_is_stored_twice() -> Result<()> {
    foreign_tail(&Pair::newest()?, false).await
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_thousands_of_messages_of_another_publisher_nothing_is_stored_twice_on_the_oldest_servers() -> Result<()>
{
    foreign_tail(&Pair::oldest()?, false).await
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_deleted_message_of_another_publisher_nothing_is_stored_twice_on_the_oldest_servers() -> Result<()> {
    foreign_tail(&Pair::oldest()?, true).await
}

/// The same messages as another version of the relay might have stored them: every other one with a position that
/// this one cannot read, the rest without.
async fn another_version(pair: &Pair, keep: usize) -> Result<()> {
    let (mut rig, proxy) = rig(pair, |_| {}).await?;
    store_unconfirmed(&mut rig, &proxy).await?;
    let broker = broker(&rig).await?;
    let stream = broker.get_stream(STREAM).await?;
    let mut messages = Vec::new();
    for sequence in 1..=u64::from(EVENTS) {
        messages.push(stream.get_raw_message(sequence).await?);
    }
    stream.purge().await?;
    for (n, message) in messages.into_iter().enumerate() {
        let mut headers = HeaderMap::new();
        let id = message.headers.get("Nats-Msg-Id").context("the event has no id")?.clone();
        headers.insert("Nats-Msg-Id", id);
        if n < keep {
            let position = message.headers.get("Waljet-Position").context("the event has no position")?.clone();
            headers.insert("Waljet-Position", position);
        } else if n % 2 == 0 {
            headers.insert("Waljet-Position", "2/some-other-form");
        }
        let ack = broker.publish_with_headers(message.subject, headers, message.payload).await?.await?;
        ensure!(!ack.duplicate, "the window was not over");
    }
    let status = go_on(&mut rig).await?;
    ensure!(status["events"]["skipped"] == EVENTS, "{status:#}");
    let log = rig.log();
    ensure!(log.contains(&format!("\"skipped\":{EVENTS},")) && !log.contains(WARNING), "{log}");
    let books = rig.books().await?;
    ensure!((books.lost, books.doubled, books.stored) == (0, 0, EVENTS.into()), "{books}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_another_version_of_the_relay_are_found_by_their_ids() -> Result<()> {
    another_version(&Pair::newest()?, 0).await
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_another_version_behind_some_of_ours_are_found_by_their_ids_on_the_oldest_servers() -> Result<()> {
    another_version(&Pair::oldest()?, 50).await
}

/// Stands between the relay and the API, and answers for a new consumer as a replica does that has none of the messages yet.
async fn serve_behind(rig: &mut Rig) -> Result<()> {
    rig.set("nats.api_prefix", "BEHIND.API")?;
    let client = async_nats::connect(rig.nats.url()).await?;
    let mut requests = client.subscribe("BEHIND.API.>").await?;
    tokio::spawn(async move {
        while let Some(request) = requests.next().await {
            let Some(reply) = request.reply else { continue };
            let subject = request.subject.replacen("BEHIND.API", "$JS.API", 1);
            if !subject.contains(".CONSUMER.CREATE.") {
                client.publish_with_reply(subject, reply, request.payload).await?;
                continue;
            }
            let answer = client.request(subject, request.payload).await?;
            let mut answer: Value = serde_json::from_slice(&answer.payload)?;
            answer["num_pending"] = 0.into();
            client.publish(reply, answer.to_string().into()).await?;
        }
        Ok::<_, anyhow::Error>(())
    });
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_is_behind_does_not_end_the_read_back() -> Result<()> {
    let (mut rig, proxy) = rig(&Pair::newest()?, |_| {}).await?;
    serve_behind(&mut rig).await?;
    store_unconfirmed(&mut rig, &proxy).await?;
    let status = go_on(&mut rig).await?;
    skipped(&rig, &status, EVENTS)?;
    rig.books().await?.check()
}
