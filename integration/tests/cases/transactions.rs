//! Shapes of transactions, and what of them is never stored.

use anyhow::{Context, Result, ensure};
use tokio_postgres::Client;
use waljet_integration::{broker, newest, stored};
use waljet_testbed::{Rig, STREAM, connect, wait_for};

use super::LIMIT;

/// Rows of each piece of a large transaction, far more than 64 kB of them.
const PIECE: i64 = 2_000;

/// Inserts rows of one key, with these versions.
async fn rows(client: &Client, key: &str, from: i64, to: i64) -> Result<()> {
    let sql = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
               SELECT 'order', $1, 'changed', jsonb_build_object('version', n) FROM generate_series($2::bigint, $3) n";
    client.execute(sql, &[&key, &from, &to]).await.with_context(|| format!("insert rows of {key}"))?;
    Ok(())
}

/// The key of the message at this sequence.
async fn key(rig: &Rig, sequence: u64) -> Result<String> {
    let message = broker(rig).await?.get_stream(STREAM).await?.get_raw_message(sequence).await?;
    Ok(message.headers.get("Aggregate-Id").context("the key")?.as_str().to_owned())
}

/// As many sessions as names, each with a transaction begun.
async fn sessions<const N: usize>(rig: &Rig) -> Result<[Client; N]> {
    let mut sessions = Vec::new();
    for _ in 0..N {
        let client = connect(&rig.postgres.url()).await?;
        client.batch_execute("BEGIN").await?;
        sessions.push(client);
    }
    sessions.try_into().map_err(|_| anyhow::anyhow!("other than {N} sessions"))
}

#[tokio::test(flavor = "multi_thread")]
async fn large_transactions_that_interleave_arrive_whole_and_in_the_order_of_their_commits() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    // Under the relay that runs: from here on the server keeps the rows of a transaction on disk, or would stream them.
    rig.postgres.set(&[("logical_decoding_work_mem", "64kB")]).await?;
    let [first, second, rolled_back, killed] = sessions::<4>(&rig).await?;
    rows(&first, "first", 1, PIECE).await?;
    rows(&rolled_back, "rolled back", 1, PIECE).await?;
    rows(&second, "second", 1, PIECE).await?;
    rows(&killed, "killed", 1, PIECE).await?;
    rows(&first, "first", PIECE + 1, 2 * PIECE).await?;
    rows(&second, "second", PIECE + 1, 2 * PIECE).await?;
    let other = connect(&rig.postgres.url()).await?;
    let pid: i32 = killed.query_one("SELECT pg_backend_pid()", &[]).await?.get(0);
    other.execute("SELECT pg_terminate_backend($1)", &[&pid]).await?;
    rolled_back.batch_execute("ROLLBACK").await?;
    assert_eq!(rig.stored().await?, 0, "rows of open transactions were stored");
    second.batch_execute("COMMIT").await?;
    first.batch_execute("COMMIT").await?;
    rig.settle(LIMIT).await?;
    // Books in which positions rise from message to message leave no room for one transaction within another.
    let books = rig.books().await?;
    books.check()?;
    assert_eq!(books.stored, 4 * PIECE as u64);
    assert_eq!((key(&rig, 1).await?, key(&rig, 2 * PIECE as u64 + 1).await?), ("second".into(), "first".into()));
    // Otherwise the setting was not in force, and nothing was shown.
    let spilled = "SELECT coalesce(sum(spill_txns + stream_txns), 0)::bigint FROM pg_stat_replication_slots";
    wait_for("the server to tell that it kept rows on disk", LIMIT, async || {
        Ok::<_, anyhow::Error>(other.query_one(spilled, &[]).await?.get::<_, i64>(0) >= 2)
    })
    .await
}

/// Two hundred subtransactions that keep their row, and as many that do not.
const EXCEPTIONS: &str = "DO $$ BEGIN FOR n IN 1..400 LOOP
    BEGIN
        INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
        VALUES ('order', 'loop', 'changed', jsonb_build_object('version', n));
        IF n % 2 = 0 THEN RAISE EXCEPTION 'no'; END IF;
    EXCEPTION WHEN raise_exception THEN NULL;
    END;
END LOOP; END $$";

#[tokio::test(flavor = "multi_thread")]
async fn savepoints_origins_and_messages_change_nothing_about_the_rows_that_were_committed() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    // The transaction that began first, with the lower positions, commits last.
    let [slow] = sessions::<1>(&rig).await?;
    rows(&slow, "slow", 1, 1).await?;
    let client = connect(&rig.postgres.url()).await?;
    rows(&client, "quick", 1, 1).await?;
    slow.batch_execute("COMMIT").await?;

    client.batch_execute("BEGIN").await?;
    rows(&client, "savepoint", 1, 1).await?;
    client.batch_execute("SAVEPOINT x").await?;
    rows(&client, "savepoint", 2, 2).await?;
    client.batch_execute("ROLLBACK TO SAVEPOINT x").await?;
    rows(&client, "savepoint", 3, 3).await?;
    client.batch_execute("COMMIT").await?;
    client.batch_execute(EXCEPTIONS).await?;

    client.batch_execute("BEGIN; SELECT pg_logical_emit_message(true, 'waljet', 'x')").await?;
    rows(&client, "message", 1, 1).await?;
    client.batch_execute("COMMIT").await?;

    let setup = "SELECT pg_replication_origin_create('elsewhere'), pg_replication_origin_session_setup('elsewhere')";
    client.batch_execute(setup).await?;
    client.batch_execute("BEGIN; SELECT pg_replication_origin_xact_setup('0/1', now())").await?;
    rows(&client, "origin", 1, 1).await?;
    client.batch_execute("COMMIT; SELECT pg_replication_origin_session_reset()").await?;

    // Once more from wherever the slot stands.
    rig.relay()?.start_again()?;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    books.check()?;
    assert_eq!(books.stored, 2 + 2 + 200 + 2);
    assert_eq!((key(&rig, 1).await?, key(&rig, 2).await?), ("quick".into(), "slow".into()));

    // A row that its own transaction removes is an event all the same.
    client.batch_execute("BEGIN").await?;
    rows(&client, "removed", 1, 1).await?;
    client.batch_execute("DELETE FROM outbox WHERE aggregate_id = 'removed'; COMMIT").await?;
    stored(&rig, books.stored + 1).await?;
    let left: i64 = client.query_one("SELECT count(*) FROM outbox", &[]).await?.get(0);
    ensure!(left as u64 == books.stored, "{left} rows are left");
    Ok(())
}
