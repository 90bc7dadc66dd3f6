//! Positions: backlogs, crashes, restored servers, rows that share an LSN.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_nats::jetstream;
use futures_util::SinkExt;
use serde_json::json;
use waljet_integration::{commit_singly, confirmed, foreign_wal, newest, oldest, status};
use waljet_testbed::{Rig, STREAM, connect};

use super::{LIMIT, stored};

#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_of_twenty_thousand_single_row_transactions_arrives_whole_and_in_order() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    commit_singly(&connect(&rig.postgres.url()).await?, 20_000).await?;
    rig.up().await?;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    books.check()?;
    assert_eq!(books.stored, 20_000);
    Ok(())
}

/// PostgreSQL forgets what was confirmed since the last checkpoint; the running relay does not.
async fn forgotten_confirmations_of_a_running_relay(mut rig: Rig) -> Result<()> {
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 200).await?;
    rig.settle(LIMIT).await?;
    let before = confirmed(&client).await?;
    rig.postgres.stop_immediate().await?;
    rig.postgres.start_again().await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 10).await?;
    rig.settle(LIMIT).await?;
    ensure!(confirmed(&client).await? > before);
    rig.books().await?.check()?;
    assert_eq!(status(&rig).await?["events"], json!({ "stored": 210, "duplicate": 0, "skipped": 0 }));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_postgres_brings_nothing_twice_on_the_newest_servers() -> Result<()> {
    forgotten_confirmations_of_a_running_relay(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_postgres_brings_nothing_twice_on_the_oldest_servers() -> Result<()> {
    forgotten_confirmations_of_a_running_relay(oldest().await?).await
}

/// Both have forgotten: PostgreSQL what was confirmed, the broker the ids. The stream itself is left.
async fn forgotten_confirmations_of_a_new_relay(mut rig: Rig) -> Result<()> {
    rig.set("nats.duplicate_window", "1s")?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 200).await?;
    rig.settle(LIMIT).await?;
    let before = confirmed(&client).await?;
    rig.relay()?.kill()?;
    rig.postgres.stop_immediate().await?;
    rig.postgres.start_again().await?;
    let client = connect(&rig.postgres.url()).await?;
    ensure!(confirmed(&client).await? < before, "PostgreSQL was expected to have forgotten the position");
    // No condition to wait for: the broker does not show its window.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    rig.relay()?.start_again()?;
    rig.ready().await?;
    commit_singly(&client, 10).await?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()?;
    assert_eq!(status(&rig).await?["events"], json!({ "stored": 10, "duplicate": 0, "skipped": 200 }));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_both_beyond_the_duplicate_window_brings_nothing_twice_on_the_newest_servers() -> Result<()> {
    forgotten_confirmations_of_a_new_relay(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_both_beyond_the_duplicate_window_brings_nothing_twice_on_the_oldest_servers() -> Result<()> {
    forgotten_confirmations_of_a_new_relay(oldest().await?).await
}

/// Puts an older copy of the data folder behind the address, with `confirmed` far ahead of it.
async fn restored(rig: &Rig) -> Result<()> {
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 5).await?;
    rig.settle(LIMIT).await?;
    rig.postgres.stop_fast().await?;
    let data = rig.postgres.data_dir();
    let copy = data.with_extension("copy");
    copy_folder(data, &copy)?;
    rig.postgres.start_again().await?;
    let client = connect(&rig.postgres.url()).await?;
    foreign_wal(&client, 1).await?;
    commit_singly(&client, 5).await?;
    rig.settle(LIMIT).await?;
    rig.postgres.stop_fast().await?;
    std::fs::remove_dir_all(data).context("remove the data folder")?;
    std::fs::rename(&copy, data).context("put the copy in its place")?;
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    // With owners and modes, which PostgreSQL is particular about.
    let status = Command::new("cp").arg("-a").args([from, to]).status().context("run cp")?;
    ensure!(status.success(), "cp ended with {status}");
    Ok(())
}

/// The relay's words about a gap hold two positions at least: what it had, and what the server has.
fn names_both_positions(log: &str) -> Result<()> {
    let line = log.lines().rfind(|line| line.starts_with("error:")).with_context(|| format!("no error in {log}"))?;
    let is_lsn = |word: &&str| word.split_once('/').is_some_and(|(high, low)| is_hex(high) && is_hex(low));
    let words = line.split(|c: char| c.is_whitespace() || matches!(c, ',' | ':' | ';'));
    ensure!(words.filter(is_lsn).count() >= 2, "{line}");
    Ok(())
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_hexdigit())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_relay_stops_at_a_server_that_was_restored_from_an_older_copy() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    restored(&rig).await?;
    rig.postgres.start_again().await?;
    let exit = rig.relay()?.wait(Duration::from_secs(20))?;
    assert_eq!(exit.code(), Some(4), "{}", rig.log());
    names_both_positions(&rig.log())?;
    nothing_confirmed(&rig).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_relay_stops_at_a_server_that_was_restored_from_an_older_copy() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    restored(&rig).await?;
    rig.relay()?.kill()?;
    rig.postgres.start_again().await?;
    rig.relay()?.start_again()?;
    let exit = rig.relay()?.wait(Duration::from_secs(20))?;
    assert_eq!(exit.code(), Some(4), "{}", rig.log());
    names_both_positions(&rig.log())?;
    nothing_confirmed(&rig).await
}

/// The slot stands where a restored server has WAL, and the server never got a position past its own end.
async fn nothing_confirmed(rig: &Rig) -> Result<()> {
    let client = connect(&rig.postgres.url()).await?;
    let end: i64 = client.query_one("SELECT (pg_current_wal_lsn() - '0/0')::bigint", &[]).await?.get(0);
    ensure!(confirmed(&client).await? <= end);
    assert_eq!(rig.stored().await?, 10);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_share_an_lsn_have_positions_of_their_own() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    client.batch_execute("SELECT pg_create_logical_replication_slot('look', 'pgoutput')").await?;
    // With id and seq: where a default is volatile, COPY writes its rows one by one.
    let copy = "COPY outbox (id, seq, aggregate_type, aggregate_id, event_type, payload) FROM STDIN";
    let mut sink = Box::pin(client.copy_in(copy).await?);
    let rows: String =
        (1..=1000).map(|n| format!("{}\t{n}\ta\t{n}\te\t{{\"version\": {n}}}\n", uuid::Uuid::new_v4())).collect();
    sink.send(bytes::Bytes::from(rows)).await?;
    sink.as_mut().finish().await?;

    // First that they do: otherwise this shows nothing.
    let look = "SELECT count(*), count(DISTINCT lsn) FROM pg_logical_slot_get_binary_changes('look', NULL, NULL,
                'proto_version', '1', 'publication_names', 'waljet') WHERE get_byte(data, 0) = ascii('I')";
    let row = client.query_one(look, &[]).await?;
    let (rows, lsns): (i64, i64) = (row.get(0), row.get(1));
    ensure!(rows == 1000 && lsns < 1000, "{rows} rows at {lsns} LSNs");

    rig.settle(LIMIT).await?;
    rig.books().await?.check()?;
    stored(&rig, 1000).await?;
    let context = jetstream::new(async_nats::connect(rig.nats.url()).await?);
    let stream = context.get_stream(STREAM).await?;
    let mut positions = HashSet::new();
    for sequence in 1..=1000 {
        let message = stream.get_raw_message(sequence).await?;
        let position = message.headers.get("Waljet-Position").context("the position")?;
        positions.insert(position.as_str().to_owned());
    }
    assert_eq!(positions.len(), 1000);
    Ok(())
}
