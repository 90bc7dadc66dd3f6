//! Ids: what they are good for, and what happens when two events share one.

use anyhow::{Context, Result, ensure};
use tokio_postgres::Client;
use waljet_integration::{broker, newest, status, stored};
use waljet_testbed::{Program, ProgramOptions, Rig, connect, wait_for};

use super::LIMIT;
use crate::wrong_things::{found_warning, insert, said_with};

/// An event with this id and version, in the transaction that is open.
async fn with_id(client: &Client, id: &str, version: i64) -> Result<()> {
    let sql = "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
               VALUES ($1::text::uuid, 'order', 'same', 'changed', jsonb_build_object('version', $2::bigint))";
    client.execute(sql, &[&id, &version]).await?;
    Ok(())
}

/// Waits until as many copies were counted, and the relay has said so.
async fn told(rig: &Rig, copies: u64, times: usize) -> Result<()> {
    wait_for("the copy to be told", LIMIT, async || {
        let events = status(rig).await?["events"].clone();
        let said = rig.log().matches("the ids of two events may be the same").count();
        ensure!(events["duplicate"] == copies && said == times, "{events}, told {said} times");
        Ok::<_, anyhow::Error>(true)
    })
    .await
    .with_context(|| rig.log())
}

/// An id comes again within the window, in an event of its own and in the middle of others.
async fn used_twice(mode: &str) -> Result<()> {
    let id = "018f6b1e-0000-7000-8000-000000000001";
    let mut rig = newest().await?;
    rig.set("publisher.mode", mode)?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    with_id(&client, id, 1).await?;
    stored(&rig, 1).await?;
    client.execute("DELETE FROM outbox", &[]).await?;
    with_id(&client, id, 2).await?;
    told(&rig, 1, 1).await?;
    let line = rig.log().lines().find(|line| line.contains("same-id")).context("the line")?.to_owned();
    ensure!(line.contains("commit_lsn") && line.contains("sequence"), "{line}");
    assert_eq!(rig.stored().await?, 1);
    client.execute("DELETE FROM outbox", &[]).await?;

    // What is told is not told again at once; a new process has told nothing.
    let clean = rig.relay()?.terminate(LIMIT)?.0;
    ensure!(clean.success(), "{clean}");
    rig.relay()?.start_again()?;
    rig.ready().await?;
    client.batch_execute("BEGIN").await?;
    insert_ten(&client, 1).await?;
    with_id(&client, id, 3).await?;
    insert_ten(&client, 11).await?;
    client.batch_execute("COMMIT").await?;
    stored(&rig, 21).await?;
    told(&rig, 1, 2).await
}

async fn insert_ten(client: &Client, from: i64) -> Result<()> {
    let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
               SELECT 'order', '1', 'changed', jsonb_build_object('version', n) FROM generate_series($1::bigint, $1 + 9) n";
    client.execute(sql, &[&from]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_was_used_before_is_counted_and_told_in_fast_mode() -> Result<()> {
    used_twice("fast").await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_was_used_before_is_counted_and_told_in_chain_mode() -> Result<()> {
    used_twice("chain").await
}

/// Starts another relay on the same stream, with this in its environment.
async fn another(rig: &Rig, env: &[(&str, &str)]) -> Result<Program> {
    let said = said_with(rig, env, &["init"]).await?;
    ensure!(said.code == 0, "{}", said.err);
    let mut options: ProgramOptions = rig.program_options(&["run"]);
    options.log.set_file_name("another.log");
    let off = [("WALJET_ADMIN__LISTEN", "off")];
    options.env = env.iter().chain(&off).map(|(name, value)| (name.into(), value.into())).collect();
    Program::start(options)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_numbers_its_events_is_warned_about() -> Result<()> {
    let mut rig = newest().await?;
    let client = connect(&rig.postgres.url()).await?;
    let table = |name: &str| {
        format!(
            "CREATE TABLE {name} (id bigint PRIMARY KEY, aggregate_type text NOT NULL, aggregate_id text NOT NULL,
                                  event_type text NOT NULL, payload jsonb)"
        )
    };
    client.batch_execute(&table("outbox")).await?;
    for column in ["headers", "tenant_id", "schema_version"] {
        rig.set(&format!("outbox.columns.{column}"), "")?;
    }
    rig.up().await?;
    found_warning(&rig, "ids are numbers (column \"id\" is bigint), unique within this table only", "use uuid").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_relays_on_two_slots_of_one_table_store_each_event_once() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    let mut other = another(&rig, &[("WALJET_POSTGRES__SLOT", "blue")]).await?;
    let log = other.log();
    let workload = waljet_testbed::WorkloadOptions {
        rate: Some(100.0),
        ..waljet_testbed::WorkloadOptions::new(rig.postgres.url())
    };
    let workload = waljet_testbed::Workload::start(workload).await?;
    wait_for("events to be stored", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? > 200)).await?;
    // The hand-over: the old one stops in order, the new one goes on.
    let exit = rig.relay()?.terminate(LIMIT)?.0;
    ensure!(exit.success(), "{exit}");
    workload.stop().await;
    let client = connect(&rig.postgres.url()).await?;
    wait_for("the new relay to have confirmed all", LIMIT, async || {
        let sql =
            "SELECT confirmed_flush_lsn >= pg_current_wal_lsn() FROM pg_replication_slots WHERE slot_name = 'blue'";
        Ok::<_, anyhow::Error>(client.query_one(sql, &[]).await?.try_get::<_, bool>(0)?)
    })
    .await
    .with_context(|| format!("{log}{}", other.log()))?;
    ensure!(other.ended()?.is_none(), "{}", other.log());
    let books = rig.books().await?;
    println!("{books}");
    ensure!((books.lost, books.doubled, books.foreign) == (0, 0, 0), "{books}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_clean_stop_another_stream_gets_none_of_the_events_again() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    insert(&rig, 1..=5).await?;
    rig.settle(LIMIT).await?;
    let exit = rig.relay()?.terminate(LIMIT)?.0;
    ensure!(exit.success(), "{exit}");
    rig.set("nats.stream", "NEXT")?;
    rig.set("route.subject", "next.{aggregate_type}.{event_type}")?;
    rig.up().await?;
    insert(&rig, 6..=8).await?;
    let next = broker(&rig).await?;
    wait_for("the events behind the stop", LIMIT, async || {
        let messages = next.get_stream("NEXT").await?.cached_info().state.messages;
        ensure!(messages == 3, "{messages}");
        Ok::<_, anyhow::Error>(true)
    })
    .await?;
    assert_eq!(rig.stored().await?, 5);
    Ok(())
}
