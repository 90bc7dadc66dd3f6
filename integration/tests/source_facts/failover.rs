//! Slots that standbys copy (PostgreSQL 17 and later).

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio_postgres::Client;
use waljet_integration::{commit_singly, confirmed, foreign_wal, newest, progress, walsender};
use waljet_testbed::{
    Pair, Postgres, PostgresOptions, Rig, SLOT, STREAM, Workload, WorkloadOptions, connect, wait_for,
};

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

/// A primary with a relay and 50 stored events, and its standby.
async fn primary_and_standby() -> Result<(Rig, Postgres)> {
    let mut rig = newest().await?;
    let standby = Postgres::start(PostgresOptions::new(&Pair::newest()?)).await?;
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", rig.postgres.port(), standby.port());
    rig.set("postgres.url", &format!("postgres://postgres@{hosts}/postgres"))?;
    make_standby(&rig, &standby).await?;
    failover_slot(&mut rig).await?;
    let client = connect(&rig.postgres.url()).await?;
    commit_singly(&client, 50).await?;
    rig.settle(LIMIT).await?;
    Ok((rig, standby))
}

/// The same, where the standby has it all, and a copy of the slot.
async fn primary_and_copy() -> Result<(Rig, Postgres)> {
    let (rig, standby) = primary_and_standby().await?;
    let client = connect(&rig.postgres.url()).await?;
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
    replayed(&copy, &end).await?;
    Ok((rig, standby))
}

async fn replayed(standby: &Client, end: &String) -> Result<()> {
    let sql = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn";
    let caught_up = async || Ok::<_, anyhow::Error>(standby.query_one(sql, &[end]).await?.get::<_, bool>(0));
    wait_for("the standby to replay", LIMIT, caught_up).await
}

/// Loses the primary for good and makes the standby one.
async fn fail_over(rig: &Rig, standby: &Postgres) -> Result<Client> {
    rig.postgres.kill().await?;
    let client = connect(&standby.url()).await?;
    client.execute("SELECT pg_promote()", &[]).await?;
    Ok(client)
}

async fn all_once(rig: &Rig, standby: &Postgres, events: u64) -> Result<()> {
    stored(rig, events).await?;
    rig.ready().await?;
    let books = waljet_testbed::Books::read(&standby.url(), &rig.nats.url(), STREAM).await?;
    books.check()?;
    assert_eq!(books.committed, events);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_goes_on_at_a_promoted_standby_from_its_copy_of_the_slot() -> Result<()> {
    let (rig, standby) = primary_and_copy().await?;
    let client = fail_over(&rig, &standby).await?;
    commit_singly(&client, 50).await?;
    all_once(&rig, &standby, 100).await?;
    // Slot and checkpoint go on there, too.
    let sql = "SELECT (pg_current_wal_lsn() - '0/0')::bigint";
    let end: i64 = client.query_one(sql, &[]).await?.try_get(0)?;
    wait_for("the slot to follow on the new timeline", LIMIT, async || {
        Ok::<_, anyhow::Error>(confirmed(&client).await? >= end)
    })
    .await?;
    let row = client.query_one("SELECT timeline::int FROM waljet.checkpoint WHERE slot = $1", &[&SLOT]).await?;
    assert_eq!(row.try_get::<_, i32>(0)?, 2);
    Ok(())
}

/// The standby copies the slot apart from the WAL, in which the row of the checkpoint is.
#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_did_not_reach_the_promoted_standby_is_no_gap() -> Result<()> {
    let (mut rig, standby) = primary_and_copy().await?;
    rig.relay()?.kill()?;
    let client = fail_over(&rig, &standby).await?;
    let older = "UPDATE waljet.checkpoint SET confirmed_lsn = confirmed_lsn - 3000";
    assert_eq!(client.execute(older, &[]).await?, 1);
    rig.start_relay()?;
    rig.ready().await?;
    commit_singly(&client, 50).await?;
    all_once(&rig, &standby, 100).await?;
    ensure!(rig.log().contains("is past its checkpoint"), "{}", rig.log());

    // Beyond the switch nobody else can have confirmed anything.
    rig.relay()?.terminate(LIMIT)?;
    commit_singly(&client, 10).await?;
    client.execute(older, &[]).await?;
    rig.start_relay()?;
    let status = rig.relay()?.wait(LIMIT)?;
    ensure!(status.code() == Some(4) && rig.log().contains("[slot-moved]"), "{status}: {}", rig.log());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_reads_a_standby_does_not_take_the_primarys_checkpoint_for_its_own() -> Result<()> {
    let (mut rig, standby) = primary_and_standby().await?;
    let primary = connect(&rig.postgres.url()).await?;
    let copy = connect(&standby.url()).await?;
    // A slot of the standby's own that has the name of the primary's.
    let create = copy.execute("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", &[&SLOT]);
    let snapshots = async {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            primary.execute("SELECT pg_log_standby_snapshot()", &[]).await.ok();
        }
    };
    tokio::select! {
        created = create => created.context("create the standby's slot")?,
        () = snapshots => 0,
    };
    // Of these, the primary's relay knows that they are in its stream, and the row of it comes to the standby.
    commit_singly(&primary, 50).await?;
    stored(&rig, 100).await?;
    rig.settle(LIMIT).await?;
    rig.relay()?.terminate(LIMIT)?;
    let end: String = primary.query_one("SELECT pg_current_wal_lsn()::text", &[]).await?.try_get(0)?;
    replayed(&copy, &end).await?;

    let context = async_nats::jetstream::new(async_nats::connect(rig.nats.url()).await?);
    let other = async_nats::jetstream::stream::Config {
        name: "OTHER".into(),
        subjects: vec!["other.>".into()],
        ..Default::default()
    };
    let stream = context.create_stream(other).await?;
    rig.set("postgres.url", &standby.url())?;
    rig.set("nats.stream", "OTHER")?;
    rig.set("route.subject", "other.{event_type}")?;
    rig.start_relay()?;
    rig.ready().await?;
    let published = wait_for("what the standby's slot holds to be published", LIMIT, async || {
        Ok::<_, anyhow::Error>(stream.get_info().await?.state.messages == 50)
    });
    published.await.with_context(|| rig.log())?;
    ensure!(rig.log().contains("going on without a stored checkpoint"), "{}", rig.log());
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

/// Where the walsender waits for the standby, nothing is in the stream that the new primary does not have.
#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_dies_under_load_leaves_nothing_behind_in_the_stream() -> Result<()> {
    let (rig, standby) = primary_and_copy().await?;
    rig.postgres.set(&[("synchronized_standby_slots", "standby")]).await?;
    let load = |url: String| Workload::start(WorkloadOptions { rate: Some(300.0), ..WorkloadOptions::new(url) });
    let workload = load(rig.postgres.url()).await?;
    progress(&rig).await?;
    // The setting holds from the next connection on at the latest.
    let client = connect(&rig.postgres.url()).await?;
    client.execute("SELECT pg_terminate_backend($1)", &[&(walsender(&client).await? as i32)]).await?;
    progress(&rig).await?;
    progress(&rig).await?;
    let client = fail_over(&rig, &standby).await?;
    workload.stop().await;
    let before: i64 = client.query_one("SELECT count(*) FROM outbox", &[]).await?.try_get(0)?;
    wait_for("the new primary to take writes", LIMIT, async || {
        Ok::<_, anyhow::Error>(!client.query_one("SELECT pg_is_in_recovery()", &[]).await?.try_get::<_, bool>(0)?)
    })
    .await?;
    let workload = load(standby.url()).await?;
    wait_for("the relay to go on there", LIMIT, async || {
        Ok::<_, anyhow::Error>(rig.stored().await? > u64::try_from(before)? + 50)
    })
    .await
    .with_context(|| rig.log())?;
    workload.stop().await;
    let committed: i64 = client.query_one("SELECT count(*) FROM outbox", &[]).await?.try_get(0)?;
    println!("{before} events on the old primary, {committed} in all");
    all_once(&rig, &standby, u64::try_from(committed)?).await
}

/// What the standby had not received is lost with the primary, and the stream has it.
#[tokio::test(flavor = "multi_thread")]
async fn events_that_the_new_primary_never_had_are_a_gap_that_is_named() -> Result<()> {
    let (mut rig, standby) = primary_and_copy().await?;
    standby.set(&[("primary_conninfo", "")]).await?;
    let copy = connect(&standby.url()).await?;
    wait_for("the standby to stop receiving", LIMIT, async || {
        Ok::<_, anyhow::Error>(copy.query_opt("SELECT FROM pg_stat_wal_receiver", &[]).await?.is_none())
    })
    .await?;
    let primary = connect(&rig.postgres.url()).await?;
    commit_singly(&primary, 20).await?;
    rig.settle(LIMIT).await?;
    fail_over(&rig, &standby).await?;
    let exit = rig.relay()?.wait(LIMIT)?;
    let log = rig.log();
    ensure!(exit.code() == Some(4) && log.contains("[wal-behind]"), "{exit}: {log}");
    let error = log.lines().rfind(|line| line.starts_with("error: ")).context("an error")?;
    ensure!(error.contains("on timeline 1") && error.contains("on timeline 2"), "{error}");
    // Neither is that made up for from the table, nor forgotten by a restart.
    rig.set("postgres.on_gap", "catch-up")?;
    rig.start_relay()?;
    let exit = rig.relay()?.wait(LIMIT)?;
    ensure!(exit.code() == Some(4) && rig.stored().await? == 70, "{exit}: {}", rig.log());
    Ok(())
}
