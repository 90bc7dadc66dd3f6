//! The main job: committed rows arrive once, in order, with their headers; and the slot is told.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_nats::jetstream::{self, stream::LastRawMessageErrorKind};
use waljet_integration::{newest, oldest, status};
use waljet_testbed::{Counters, Pair, Rig, STREAM, Workload, WorkloadOptions, connect};

const LIMIT: Duration = Duration::from_secs(60);

/// 20,000 events in transactions of mixed size on 50 keys, a tenth rolled back, a tenth with a savepoint that is.
async fn twenty_thousand_events(mut rig: Rig) -> Result<()> {
    rig.up().await?;
    rig.init().await.context("init a second time")?;
    let options = WorkloadOptions { transactions: Some(5_800), ..WorkloadOptions::new(rig.postgres.url()) };
    let counters = Workload::start(options).await?.finish().await;
    assert_eq!(Counters::get(&counters.failed), 0);
    assert!(Counters::get(&counters.rolled_back) > 300 && Counters::get(&counters.savepoints) > 300);
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    books.check()?;
    ensure!(books.committed >= 19_000, "{books}");

    let status = status(&rig).await?;
    assert_eq!(status["source"]["state"], "open");
    let (exit, took) = rig.relay()?.terminate(Duration::from_secs(5))?;
    ensure!(exit.success(), "expected exit code 0 after SIGTERM, found {exit}; {}", rig.log());
    ensure!(took < Duration::from_secs(5));

    // After a clean stop nothing is sent again.
    rig.relay()?.start_again()?;
    rig.ready().await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let again = waljet_integration::status(&rig).await?;
    assert_eq!(again["events"], serde_json::json!({ "stored": 0, "duplicate": 0, "skipped": 0 }));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn mixed_transactions_arrive_once_and_in_order_on_the_newest_servers() -> Result<()> {
    twenty_thousand_events(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn mixed_transactions_arrive_once_and_in_order_on_the_oldest_servers() -> Result<()> {
    twenty_thousand_events(oldest().await?).await
}

/// Reads one message back as a consumer would see it.
async fn message(rig: &Rig, sequence: u64) -> Result<jetstream::message::StreamMessage> {
    let client = async_nats::connect(rig.nats.url()).await?;
    let stream = jetstream::new(client).get_stream(STREAM).await?;
    Ok(stream.get_raw_message(sequence).await?)
}

async fn every_header(mut rig: Rig) -> Result<()> {
    for header in ["aggregate_type", "event_type", "schema_version", "tenant_id"] {
        rig.set_raw(&format!("headers.{header}"), "true")?;
    }
    rig.set("headers.content_type", "application/json")?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    let row = client
        .query_one(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers, tenant_id, schema_version)
             VALUES ('018f6b1e-0000-7000-8000-000000000001', 'order', '42', 'order.created', '{\"total\": 1.50}',
                     '{\"traceparent\": \"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\", \"n\": 7}', 'acme', 3)
             RETURNING payload::text, (extract(epoch FROM clock_timestamp()) * 1e6)::bigint",
            &[],
        )
        .await?;
    let (payload, written): (String, i64) = (row.get(0), row.get(1));
    rig.settle(LIMIT).await?;
    let message = message(&rig, 1).await?;
    assert_eq!(message.subject.as_str(), "outbox.order.order%2Ecreated");
    assert_eq!(message.payload, payload.as_bytes());
    let header = |name: &str| message.headers.get(name).map(|value| value.as_str().to_owned());
    assert_eq!(header("Nats-Msg-Id").as_deref(), Some("018f6b1e-0000-7000-8000-000000000001"));
    assert_eq!(header("Aggregate-Id").as_deref(), Some("42"));
    assert_eq!(header("Aggregate-Type").as_deref(), Some("order"));
    assert_eq!(header("Event-Type").as_deref(), Some("order.created"));
    assert_eq!(header("Schema-Version").as_deref(), Some("3"));
    assert_eq!(header("Tenant-Id").as_deref(), Some("acme"));
    assert_eq!(header("Content-Type").as_deref(), Some("application/json"));
    assert_eq!(header("traceparent").as_deref(), Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"));
    assert_eq!(header("n").as_deref(), Some("7"));

    let system: String = client.query_one("SELECT system_identifier::text FROM pg_control_system()", &[]).await?.get(0);
    let position = header("Waljet-Position").context("the position")?;
    ensure!(position.starts_with(&format!("{system}:1:")) && position.ends_with(":0"), "{position}");
    let time = header("Waljet-Commit-Time").context("the commit time")?;
    let parse = "SELECT (extract(epoch FROM $1::text::timestamptz) * 1e6)::bigint";
    let committed: i64 = client.query_one(parse, &[&time]).await?.get(0);
    ensure!(time.ends_with('Z') && (committed - written).abs() < 1_000_000, "{time}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_carries_every_header_on_the_newest_servers() -> Result<()> {
    every_header(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_carries_every_header_on_the_oldest_servers() -> Result<()> {
    every_header(oldest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn payloads_pass_byte_for_byte() -> Result<()> {
    let mut rig = newest().await?;
    let client = connect(&rig.postgres.url()).await?;
    // An existing table of Debezium's layout, with bytes, for a role whose settings would change their text form.
    client
        .batch_execute(
            "CREATE TABLE events (id bigint PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload bytea);
             ALTER ROLE postgres SET bytea_output = 'escape'; ALTER ROLE postgres SET DateStyle = 'German'",
        )
        .await?;
    rig.set("outbox.table", "public.events")?;
    rig.set("outbox.preset", "debezium")?;
    rig.up().await?;
    let bodies: [Option<Vec<u8>>; 4] =
        [Some(vec![0, 0xff, 0x5c, 0x27]), Some(Vec::new()), None, Some((0..500_000).map(|n| (n * 7) as u8).collect())];
    for (id, body) in bodies.iter().enumerate() {
        let sql = "INSERT INTO events VALUES ($1, 'file', '1', 'stored', $2)";
        client.execute(sql, &[&(id as i64), body]).await?;
    }
    waljet_testbed::wait_for("four messages", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? >= 4)).await?;
    for (at, body) in bodies.iter().enumerate() {
        let message = message(&rig, at as u64 + 1).await?;
        assert_eq!(message.payload.as_ref(), body.as_deref().unwrap_or_default());
        assert_eq!(message.headers.get("Waljet-Payload").map(|v| v.as_str()), body.is_none().then_some("null"));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn only_inserts_of_the_outbox_are_events_whatever_else_happens_to_it() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    let insert = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', '1', 'e', '{}')";
    client.batch_execute("ALTER PUBLICATION waljet SET (publish = 'insert, update, delete, truncate')").await?;
    client.batch_execute(&format!("BEGIN; {insert}; DELETE FROM outbox; COMMIT")).await?;
    client
        .batch_execute(&format!("{insert}; UPDATE outbox SET payload = '[]'; DELETE FROM outbox; TRUNCATE outbox"))
        .await?;
    // A table rewrite, and changes of the table in the middle of a transaction, bring nothing and lose nothing.
    client
        .batch_execute(&format!(
            "BEGIN; {insert}; ALTER TABLE outbox ADD COLUMN extra text DEFAULT 'x'; {insert};
             ALTER TABLE outbox DROP COLUMN tenant_id; {insert}; COMMIT"
        ))
        .await?;
    for rewrite in ["VACUUM FULL outbox", "CLUSTER outbox USING outbox_pkey"] {
        client.batch_execute(rewrite).await?;
    }
    client.batch_execute(&format!("{insert}; SELECT pg_logical_emit_message(true, 'other', 'x')")).await?;
    waljet_testbed::wait_for("six messages", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? >= 6)).await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(rig.stored().await?, 6);
    let metrics = rig.get("/metrics").await?.body;
    for line in ["{operation=\"update\"} 1", "{operation=\"delete\"} 2", "{operation=\"truncate\"} 1"] {
        ensure!(metrics.contains(&format!("waljet_ignored_total{line}")), "{metrics}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prepared_transaction_is_published_when_it_is_committed_and_never_when_it_is_rolled_back() -> Result<()> {
    let mut options = waljet_integration::options(&Pair::newest()?)?;
    options.postgres.settings.push(("max_prepared_transactions".into(), "5".into()));
    let mut rig = Rig::start(options).await?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    let insert = |key: &str| {
        format!(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', '{key}', 'e', '{{}}')"
        )
    };
    let prepare = |key: &str, gid: &str| format!("BEGIN; {}; PREPARE TRANSACTION '{gid}'", insert(key));
    client.batch_execute(&prepare("kept", "g1")).await?;
    client.batch_execute(&prepare("gone", "g2")).await?;
    client.batch_execute(&insert("between")).await?;
    client.batch_execute("ROLLBACK PREPARED 'g2'").await?;
    client.batch_execute("COMMIT PREPARED 'g1'").await?;
    rig.settle(LIMIT).await?;
    let key = async |sequence| -> Result<String> {
        let message = message(&rig, sequence).await?;
        Ok(message.headers.get("Aggregate-Id").context("the key")?.as_str().to_owned())
    };
    assert_eq!((key(1).await?, key(2).await?), ("between".into(), "kept".into()));
    assert_eq!(rig.stored().await?, 2);
    Ok(())
}

/// The server writes the file and reads it back: multi-insert WAL records, as COPY makes them.
const COPY: &str =
    "COPY (SELECT 'a', n::text, 'e', '{}' FROM generate_series(1, 1000) n) TO PROGRAM 'cat > copied.tsv';
    COPY outbox (aggregate_type, aggregate_id, event_type, payload) FROM PROGRAM 'cat copied.tsv'";

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_copy_share_an_lsn_and_are_all_stored() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    client.batch_execute(COPY).await?;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    books.check()?;
    assert_eq!(books.stored, 1000);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_that_init_makes_is_as_documented() -> Result<()> {
    let rig = newest().await?;
    rig.init().await?;
    let client = async_nats::connect(rig.nats.url()).await?;
    let mut stream = jetstream::new(client).get_stream(STREAM).await?;
    let config = stream.info().await?.config.clone();
    assert_eq!(config.subjects, ["outbox.>"]);
    assert_eq!(config.duplicate_window, Duration::from_secs(120));
    let error = stream.get_raw_message(1).await.unwrap_err();
    assert_eq!(error.kind(), LastRawMessageErrorKind::NoMessageFound);
    Ok(())
}
