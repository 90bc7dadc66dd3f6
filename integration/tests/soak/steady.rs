//! A steady load of 5,000 events a second on three brokers, whose leader is killed once.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_nats::jetstream::{self, consumer::AckPolicy, consumer::pull};
use futures_util::StreamExt;
use waljet_integration::leader_first;
use waljet_testbed::{STREAM, addresses, connect, wait_for};

use super::cluster::start;
use super::{LIMIT, say};

/// Events a second.
const RATE: i64 = 5_000;

/// Events in a transaction.
const EVENTS: i64 = 100;

/// Transactions: ten seconds of them.
const TRANSACTIONS: i64 = 10 * RATE / EVENTS;

/// Commits the load, one transaction every 20 ms or, on a machine that is slower, as fast as it goes.
async fn commit(url: String) -> Result<Duration> {
    let client = connect(&url).await?;
    let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
               SELECT 'steady', (n % 50)::text, 'happened', jsonb_build_object('version', n)
               FROM generate_series($1::bigint, $2::bigint) AS n";
    let insert = client.prepare(sql).await?;
    let started = tokio::time::Instant::now();
    let mut next = started;
    for number in 0..TRANSACTIONS {
        client.execute(&insert, &[&(number * EVENTS + 1), &((number + 1) * EVENTS)]).await?;
        next += Duration::from_secs_f64(EVENTS as f64 / RATE as f64);
        tokio::time::sleep_until(next).await;
    }
    Ok(started.elapsed())
}

/// Returns the longest time between two messages that the stream stored.
async fn longest_pause(url: &str) -> Result<f64> {
    let mut stream = jetstream::new(async_nats::connect(addresses(url)).await?).get_stream(STREAM).await?;
    let last = stream.info().await?.state.last_sequence;
    let config = pull::Config { ack_policy: AckPolicy::None, headers_only: true, ..pull::Config::default() };
    let mut messages = stream.create_consumer(config).await?.messages().await?;
    let (mut before, mut longest) = (None, 0.0_f64);
    loop {
        let message = messages.next().await.context("the stream gives no more")??;
        let info = message.info().map_err(anyhow::Error::msg)?;
        let at = info.published.unix_timestamp_nanos() as f64 / 1e9;
        longest = longest.max(at - before.replace(at).unwrap_or(at));
        if info.stream_sequence >= last {
            return Ok(longest);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn five_thousand_events_a_second_survive_the_death_of_the_leader() -> Result<()> {
    let (cluster, rig) = start("fast").await?;
    let load = tokio::spawn(commit(rig.postgres.url()));
    // In the middle of it.
    let middle = (TRANSACTIONS * EVENTS / 3) as u64;
    wait_for("a third of it", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? > middle)).await?;
    let node = leader_first(&cluster).await?[0];
    node.kill().await?;
    let took = load.await??;
    node.start_again().await?;
    cluster.wait_ready().await?;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    // A consumer may be placed on the member that has just come back.
    let url = cluster.url();
    let pause = wait_for("the stream to be read", LIMIT, async || longest_pause(&url).await.map(Some)).await?;
    say(&format!(
        "steady load: {:.0} events a second committed, longest pause of the stream {:.2} s; {books}",
        books.committed as f64 / took.as_secs_f64(),
        pause
    ));
    ensure!(books.committed == (TRANSACTIONS * EVENTS) as u64, "{books}");
    books.check()
}
