//! Table and publication.

use anyhow::Result;
use waljet_integration::{newest, oldest};
use waljet_testbed::Rig;

use super::{LIMIT, Told, fails, found, good, insert, run_ends, said, sql_on};

/// What is done to the database, the code, the message, and the statement that mends it.
const HOLES: [(&str, &str, &str, &str); 4] = [
    (
        "DROP PUBLICATION waljet",
        "publication-missing",
        "publication \"waljet\" does not exist",
        "CREATE PUBLICATION \"waljet\" FOR TABLE \"public\".\"outbox\" WITH (publish = 'insert', publish_via_partition_root = true);",
    ),
    (
        "ALTER PUBLICATION waljet DROP TABLE outbox",
        "publication-table",
        "publication \"waljet\" does not hold table public.outbox",
        "ALTER PUBLICATION \"waljet\" ADD TABLE \"public\".\"outbox\";",
    ),
    (
        "ALTER PUBLICATION waljet SET (publish = 'update')",
        "publication-insert",
        "publication \"waljet\" does not publish inserts",
        "ALTER PUBLICATION \"waljet\" SET (publish = 'insert');",
    ),
    (
        "ALTER PUBLICATION waljet SET TABLE outbox (id, aggregate_type, aggregate_id, event_type, headers, tenant_id)",
        "column-unpublished",
        "publication \"waljet\" does not send these columns of public.outbox: payload, schema_version",
        "ALTER PUBLICATION \"waljet\" SET TABLE \"public\".\"outbox\";",
    ),
];

async fn each_hole(mut rig: Rig) -> Result<()> {
    rig.init().await?;
    good(&rig).await?;
    for (wrong, code, message, hint) in HOLES {
        sql_on(&rig, wrong).await?;
        run_ends(&mut rig, 3, code).await?.says(&[message]).hints(&[hint]);
        found(&rig, code).await?.says(&[message]).hints(&[hint]).mend(&rig).await?;
        good(&rig).await?;
    }
    // Rows come again, and under their own name.
    rig.start_relay()?;
    rig.ready().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_hole_of_a_publication_is_named_with_the_statement_that_mends_it() -> Result<()> {
    each_hole(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn each_hole_of_a_publication_is_named_with_the_statement_that_mends_it_on_the_oldest_servers() -> Result<()> {
    each_hole(oldest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_publication_hides_or_sends_besides_is_a_warning_with_the_statement_that_ends_it() -> Result<()> {
    let rig = newest().await?;
    rig.init().await?;
    sql_on(&rig, "ALTER PUBLICATION waljet SET TABLE outbox WHERE (aggregate_type = 'order')").await?;
    let out = good(&rig).await?;
    assert!(
        out.contains("has a row filter, and rows that do not match are never sent: (aggregate_type = 'order'"),
        "{out}"
    );
    let hint = "ALTER PUBLICATION \"waljet\" SET TABLE \"public\".\"outbox\";";
    assert!(out.contains(&format!("hint: {hint}")), "{out}");
    sql_on(&rig, hint).await?;
    assert!(!good(&rig).await?.contains("row filter"));

    sql_on(&rig, "ALTER PUBLICATION waljet SET (publish = 'insert, update, delete')").await?;
    let out = good(&rig).await?;
    assert!(out.contains("also publishes update, delete, which the relay ignores"), "{out}");
    let hint = "ALTER PUBLICATION \"waljet\" SET (publish = 'insert');";
    assert!(out.contains(&format!("hint: {hint}")), "{out}");
    sql_on(&rig, hint).await?;
    assert!(!good(&rig).await?.contains("also publishes"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_or_column_that_is_missing_is_named_beside_what_is_there() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    sql_on(&rig, "ALTER TABLE outbox RENAME event_type TO kind").await?;
    found(&rig, "column-missing")
        .await?
        .says(&["table public.outbox lacks event_type; it has id, aggregate_type, aggregate_id, kind, payload"])
        .hints(&["[outbox.columns]"]);
    rig.set("outbox.columns.event_type", "kind")?;
    good(&rig).await?;
    rig.set("outbox.columns.event_type", "event_type")?;
    sql_on(&rig, "ALTER TABLE outbox RENAME kind TO event_type").await?;

    sql_on(&rig, "ALTER TABLE outbox RENAME TO events").await?;
    let message = "table public.outbox does not exist";
    found(&rig, "table-missing").await?.says(&[message]).hints(&["waljet init", "outbox.table"]);
    run_ends(&mut rig, 3, "table-missing").await?.says(&[message]);
    rig.set("outbox.table", "public.events")?;
    good(&rig).await?;
    // The other remedy: a new table, which the publication does not hold yet.
    rig.set("outbox.table", "public.outbox")?;
    fails(&rig, &["init"], 1, "publication-table").await?.mend(&rig).await?;
    rig.init().await?;
    good(&rig).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_do_not_reach_the_wal_are_found_before_the_first_is_written() -> Result<()> {
    let rig = newest().await?;
    sql_on(&rig, "CREATE UNLOGGED TABLE outbox (id int)").await?;
    let message = "rows of public.outbox do not reach the WAL: it is unlogged";
    let told = fails(&rig, &["init"], 1, "table-kind").await?.says(&[message]);
    told.hints(&["ALTER TABLE \"public\".\"outbox\" SET LOGGED;"]).mend(&rig).await?;
    rig.init().await?;
    // It is logged now; what else it lacks is told.
    let said = said(&rig, &["check"]).await?;
    Told::find(&said.out, "column-missing")?.says(&["table public.outbox lacks aggregate_type, aggregate_id"]);
    Ok(())
}
