//! Slots that standbys copy (PostgreSQL 17 and later).

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use waljet_integration::{commit_singly, confirmed, foreign_wal, newest};
use waljet_testbed::{Pair, Postgres, PostgresOptions, Rig, SLOT, connect, wait_for};

use super::{LIMIT, stored};

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_relay_keeps_a_failover_slot_moving() -> Result<()> {
    let mut rig = newest().await?;
    failover_slot(&mut rig).await?;
    let client = connect(&rig.postgres.url()).await?;
    let row = client.query_one("SELECT failover FROM pg_replication_slots WHERE slot_name = $1", &[&SLOT]).await?;
    ensure!(row.get::<_, bool>(0), "the slot is not marked for failover");
    for _ in 0..3 {
        let before = confirmed(&client).await?;
        foreign_wal(&client, 1).await?;
        let moved = async || Ok::<_, anyhow::Error>(confirmed(&client).await? > before + 1_000_000);
        wait_for("the slot to follow foreign WAL", Duration::from_secs(5), moved).await?;
    }
    Ok(())
}

async fn failover_slot(rig: &mut Rig) -> Result<()> {
    let output = rig.waljet(&["init", "--failover"]).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    rig.start_relay()?;
    rig.ready().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_goes_on_at_a_promoted_standby_from_its_copy_of_the_slot() -> Result<()> {
    let mut rig = newest().await?;
    let standby = Postgres::start(PostgresOptions::new(&Pair::newest()?)).await?;
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", rig.postgres.port(), standby.port());
    rig.set("postgres.url", &format!("postgres://postgres@{hosts}/postgres"))?;
    make_standby(&rig, &standby).await?;
    failover_slot(&mut rig).await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 50).await?;
    rig.settle(LIMIT).await?;

    // Not before there is a slot: while there is none, the standby looks ever more seldom.
    standby.set(&[("sync_replication_slots", "on")]).await?;
    let copy = connect(&standby.url()).await?;
    let sql = "SELECT synced AND NOT temporary FROM pg_replication_slots WHERE slot_name = $1";
    wait_for("the standby's copy of the slot", LIMIT, async || {
        // The copy is kept once the slot has come to a place that the standby can decode from.
        client.execute("SELECT pg_log_standby_snapshot()", &[]).await?;
        let row = copy.query_opt(sql, &[&SLOT]).await?.context("there is no copy yet")?;
        Ok::<_, anyhow::Error>(row.get::<_, bool>(0))
    })
    .await?;
    let end: String = client.query_one("SELECT pg_current_wal_lsn()::text", &[]).await?.get(0);
    let replayed = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn";
    let caught_up = async || Ok::<_, anyhow::Error>(copy.query_one(replayed, &[&end]).await?.get::<_, bool>(0));
    wait_for("the standby to replay", LIMIT, caught_up).await?;

    rig.postgres.kill().await?;
    copy.execute("SELECT pg_promote()", &[]).await?;
    commit_singly(&copy, 50).await?;
    stored(&rig, 100).await?;
    rig.ready().await?;
    let books = waljet_testbed::Books::read(&standby.url(), &rig.nats.url(), waljet_testbed::STREAM).await?;
    books.check()?;
    assert_eq!(books.committed, 100);
    Ok(())
}

/// Makes a server the standby of the rig's, from a copy of its data folder.
async fn make_standby(rig: &Rig, standby: &Postgres) -> Result<()> {
    standby.stop_fast().await?;
    rig.postgres.stop_fast().await?;
    let (from, to) = (rig.postgres.data_dir(), standby.data_dir());
    std::fs::remove_dir_all(to).context("remove the standby's data")?;
    copy(from, to)?;
    // Only its being there counts.
    copy(&to.join("PG_VERSION"), &to.join("standby.signal"))?;
    rig.postgres.start_again().await?;
    let client = connect(&rig.postgres.url()).await?;
    client.execute("SELECT pg_create_physical_replication_slot('standby')", &[]).await?;
    let primary = format!("host=127.0.0.1 port={} user=postgres dbname=postgres", rig.postgres.port());
    let settings =
        [("primary_conninfo", primary.as_str()), ("primary_slot_name", "standby"), ("hot_standby_feedback", "on")];
    standby.set(&settings).await?;
    standby.start_again().await
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    // With owners and modes, which PostgreSQL is particular about.
    let status = Command::new("cp").arg("-a").args([from, to]).status().context("run cp")?;
    ensure!(status.success(), "cp ended with {status}");
    Ok(())
}
