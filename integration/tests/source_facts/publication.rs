//! Publications that change under a running relay.
//!
//! The server skips rows that the publication does not hold at their place in the WAL, and says nothing. Two ways
//! out of it: where only the catalogue says so, the relay turns red and goes on when it is mended, naming the
//! window; where the stream itself cannot be decoded without the publication, going on needs the operator's word.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio_postgres::Client;
use waljet_integration::{commit_singly, confirmed, foreign_wal, newest, oldest, status, walsender};
use waljet_testbed::{Rig, connect, wait_for};

use super::{LIMIT, stored};

/// How soon readiness tells.
const SOON: Duration = Duration::from_secs(5);

/// One way to break a publication, and what the relay is to say.
struct Break {
    /// The statement that breaks it.
    sql: &'static str,
    /// The code.
    code: &'static str,
    /// What the reason has to hold besides: names, and the statement that mends it.
    says: &'static [&'static str],
    /// The statement that mends it.
    mend: &'static str,
}

const TABLE_DROPPED: Break = Break {
    sql: "ALTER PUBLICATION waljet DROP TABLE outbox",
    code: "publication-table",
    says: &["\"waljet\"", "public.outbox", "ALTER PUBLICATION \"waljet\" ADD TABLE \"public\".\"outbox\";"],
    mend: "ALTER PUBLICATION waljet ADD TABLE outbox",
};

const INSERTS_OFF: Break = Break {
    sql: "ALTER PUBLICATION waljet SET (publish = 'update')",
    code: "publication-insert",
    says: &["\"waljet\"", "ALTER PUBLICATION \"waljet\" SET (publish = 'insert');"],
    mend: "ALTER PUBLICATION waljet SET (publish = 'insert')",
};

/// The name leads to a new table, the publication to the old one (FC-063).
const TABLE_REPLACED: Break = Break {
    sql: "ALTER TABLE outbox RENAME TO outbox_old; CREATE TABLE outbox (LIKE outbox_old INCLUDING ALL)",
    code: "publication-table",
    says: &["\"waljet\"", "public.outbox", "ALTER PUBLICATION \"waljet\" ADD TABLE \"public\".\"outbox\";"],
    mend: "ALTER PUBLICATION waljet ADD TABLE outbox",
};

/// Waits until the relay is red for this reason.
async fn red(rig: &Rig, broken: &Break) -> Result<()> {
    wait_for("the relay to say why it is not ready", SOON, async || {
        let reason = rig.not_ready(SOON).await?;
        for text in broken.says.iter().chain([&broken.code]) {
            ensure!(reason.contains(text), "expected {text} in {reason}");
        }
        Ok::<_, anyhow::Error>(true)
    })
    .await
}

/// The line that names the window, and the window.
fn window(log: &str) -> Result<&str> {
    let line = log.lines().find(|line| line.contains("may have been skipped"));
    line.with_context(|| format!("the window is not in the log:\n{log}"))
}

async fn wal_end(client: &Client) -> Result<i64> {
    Ok(client.query_one("SELECT (pg_current_wal_lsn() - '0/0')::bigint", &[]).await?.get(0))
}

/// Three phases: before, while it is broken, after. The rows of the second are lost, and that is said.
async fn broken_and_mended(mut rig: Rig, broken: &Break) -> Result<()> {
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 10).await?;
    rig.settle(LIMIT).await?;
    // Also past the WAL of its own checkpoint, and of whatever the server writes by itself.
    let idle = async || Ok::<_, anyhow::Error>(confirmed(&client).await? >= wal_end(&client).await?);
    wait_for("the position to reach the end of the WAL", LIMIT, idle).await?;
    let good = confirmed(&client).await?;
    client.batch_execute(broken.sql).await?;
    let skipped_from = wal_end(&client).await?;
    commit_singly(&client, 10).await?;
    red(&rig, broken).await?;
    // It stands where the proof ends, for as long as nobody mends it.
    let held = confirmed(&client).await?;
    ensure!((good..=skipped_from).contains(&held), "confirmed {held}, broken at {skipped_from}");
    foreign_wal(&client, 1).await?;
    let seen = wal_end(&client).await?;
    wait_for("the relay to have seen the foreign WAL", LIMIT, async || {
        let proven = status(&rig).await?["postgres"]["wal_end"].to_string();
        let sql = "SELECT ($1::text::pg_lsn - '0/0')::bigint";
        let at: i64 = client.query_one(sql, &[&proven.trim_matches('"')]).await?.get(0);
        Ok::<_, anyhow::Error>(at >= seen)
    })
    .await?;
    assert_eq!(confirmed(&client).await?, held);
    assert_eq!(rig.stored().await?, 10);

    let pid = rig.relay()?.pid();
    client.batch_execute(broken.mend).await?;
    rig.ready().await?;
    commit_singly(&client, 10).await?;
    stored(&rig, 20).await?;
    ensure!(rig.relay()?.ended()?.is_none() && rig.relay()?.pid() == pid, "{}", rig.log());
    let log = rig.log();
    let line = window(&log)?;
    ensure!(line.contains("from") && line.contains("to") && line.contains("waljet"), "{line}");
    // The position moves again.
    let end = wal_end(&client).await?;
    wait_for("the position to move on", LIMIT, async || Ok::<_, anyhow::Error>(confirmed(&client).await? >= end)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publication_that_loses_the_table_shows_until_it_is_mended_on_the_newest_servers() -> Result<()> {
    broken_and_mended(newest().await?, &TABLE_DROPPED).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publication_that_loses_the_table_shows_until_it_is_mended_on_the_oldest_servers() -> Result<()> {
    broken_and_mended(oldest().await?, &TABLE_DROPPED).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publication_without_inserts_shows_until_it_is_mended_on_the_newest_servers() -> Result<()> {
    broken_and_mended(newest().await?, &INSERTS_OFF).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publication_without_inserts_shows_until_it_is_mended_on_the_oldest_servers() -> Result<()> {
    broken_and_mended(oldest().await?, &INSERTS_OFF).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_was_renamed_and_replaced_shows_until_it_is_published_on_the_newest_servers() -> Result<()> {
    broken_and_mended(newest().await?, &TABLE_REPLACED).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_was_renamed_and_replaced_shows_until_it_is_published_on_the_oldest_servers() -> Result<()> {
    broken_and_mended(oldest().await?, &TABLE_REPLACED).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_connects_again_while_the_publication_is_broken_waits_for_it() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 10).await?;
    rig.settle(LIMIT).await?;
    client.batch_execute(TABLE_DROPPED.sql).await?;
    red(&rig, &TABLE_DROPPED).await?;
    let gone = walsender(&client).await?;
    client.execute("SELECT pg_terminate_backend($1)", &[&(gone as i32)]).await?;
    let waiting = async || {
        let source = status(&rig).await?["source"].clone();
        ensure!(source["state"] == "waiting" && source["fault"]["code"] == TABLE_DROPPED.code, "{source}");
        Ok::<_, anyhow::Error>(true)
    };
    wait_for("the source to wait for the publication", LIMIT, waiting).await?;
    red(&rig, &TABLE_DROPPED).await?;
    client.batch_execute(TABLE_DROPPED.mend).await?;
    commit_singly(&client, 10).await?;
    stored(&rig, 20).await?;
    rig.ready().await?;
    window(&rig.log())?;
    Ok(())
}

const DROPPED: Break = Break {
    sql: "DROP PUBLICATION waljet",
    code: "publication-missing",
    says: &["\"waljet\"", "CREATE PUBLICATION \"waljet\" FOR TABLE \"public\".\"outbox\""],
    mend: "CREATE PUBLICATION waljet FOR TABLE outbox WITH (publish = 'insert')",
};

/// Nothing was written while it was gone: nothing is in doubt but the time.
async fn dropped_and_made_again(mut rig: Rig) -> Result<()> {
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 10).await?;
    rig.settle(LIMIT).await?;
    client.batch_execute(DROPPED.sql).await?;
    red(&rig, &DROPPED).await?;
    client.batch_execute(DROPPED.mend).await?;
    rig.ready().await?;
    commit_singly(&client, 10).await?;
    rig.settle(LIMIT).await?;
    window(&rig.log())?;
    let books = rig.books().await?;
    books.check()?;
    assert_eq!(books.stored, 20);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publication_that_was_dropped_and_made_again_costs_nothing_on_the_newest_servers() -> Result<()> {
    dropped_and_made_again(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publication_that_was_dropped_and_made_again_costs_nothing_on_the_oldest_servers() -> Result<()> {
    dropped_and_made_again(oldest().await?).await
}

/// Rows were written while it was gone. No server can send them, and none gets past their place without being told:
/// 15 and older refuse, newer ones skip them with a warning.
async fn rows_while_it_was_dropped(mut rig: Rig) -> Result<()> {
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    // Must not keep the server's warning from the relay.
    client.batch_execute("ALTER ROLE postgres SET client_min_messages = 'error'").await?;
    rig.relay()?.start_again()?;
    rig.ready().await?;
    commit_singly(&client, 10).await?;
    rig.settle(LIMIT).await?;
    client.batch_execute(DROPPED.sql).await?;
    let dropped = wal_end(&client).await?;
    commit_singly(&client, 1).await?;
    for _ in 0..2 {
        let exit = rig.relay()?.wait(Duration::from_secs(10))?;
        let log = rig.log();
        assert_eq!(exit.code(), Some(4), "{log}");
        let error = log.lines().rfind(|line| line.starts_with("error:")).context("an error")?;
        ensure!(error.contains("[publication-missing]") && error.contains("after 0/"), "{error}");
        ensure!(log.contains("waljet slot advance --to"), "{log}");
        ensure!(confirmed(&client).await? <= dropped);
        // A publication of today does not help at that place in the WAL.
        client.batch_execute(DROPPED.mend).await.ok();
        rig.relay()?.start_again()?;
    }
    rig.relay()?.kill()?;

    let end: String = client.query_one("SELECT pg_current_wal_lsn()::text", &[]).await?.get(0);
    let output = rig.waljet(&["slot", "advance", "--to", &end, "--yes"]).await?;
    ensure!(output.status.success(), "{output:?}");
    rig.relay()?.start_again()?;
    rig.ready().await?;
    commit_singly(&client, 10).await?;
    stored(&rig, 20).await?;
    let books = rig.books().await?;
    assert_eq!((books.stored, books.lost, books.doubled, books.foreign), (20, 1, 0, 0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_dropped_publication_are_a_gap_that_needs_a_word_on_the_newest_servers() -> Result<()> {
    rows_while_it_was_dropped(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_dropped_publication_are_a_gap_that_needs_a_word_on_the_oldest_servers() -> Result<()> {
    rows_while_it_was_dropped(oldest().await?).await
}
