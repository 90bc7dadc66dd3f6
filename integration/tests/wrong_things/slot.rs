//! The slot, and the room for it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use waljet_integration::{newest, oldest};
use waljet_testbed::{PortLease, Program, ProgramOptions, Rig, connect};

use super::{LIMIT, confirmed, fails, found, good, insert, red, rig, run_ends, said_with, settings, sql_on};

/// Starts a relay beside the rig's own one, with this environment.
fn start_another(rig: &Rig, env: &[(&str, &str)]) -> Result<(Program, PortLease)> {
    let admin = PortLease::take()?;
    let mut options: ProgramOptions = rig.program_options(&["run"]);
    options.log.set_file_name("another.log");
    let listen = format!("127.0.0.1:{}", admin.port());
    options.env = env.iter().chain([&("WALJET_ADMIN__LISTEN", listen.as_str())]).map(owned).collect();
    Ok((Program::start(options)?, admin))
}

fn owned((name, value): &(&str, &str)) -> (std::ffi::OsString, std::ffi::OsString) {
    ((*name).into(), (*value).into())
}

/// Waits until the relay behind another admin endpoint is ready.
async fn another_ready(admin: &PortLease) -> Result<()> {
    let port = admin.port();
    waljet_testbed::wait_for("the other relay to be ready", LIMIT, async || {
        let answer = tokio::task::spawn_blocking(move || waljet_testbed::http_get(port, "/readyz")).await??;
        ensure!(answer.status == 200, "{}", answer.body);
        Ok::<_, anyhow::Error>(true)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_was_never_there_is_made_by_init() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    sql_on(&rig, "SELECT pg_drop_replication_slot('waljet')").await?;
    let message = "slot \"waljet\" does not exist";
    run_ends(&mut rig, 3, "slot-missing").await?.says(&[message]).hints(&["waljet init creates it"]);
    found(&rig, "slot-missing").await?.says(&[message]).hints(&["waljet init creates it"]);
    fails(&rig, &["slot", "show"], 1, "slot-missing").await?.says(&[message]).hints(&["waljet slot create"]);
    let before = rig.log().len();
    rig.up().await?;
    let log = rig.log().split_off(before);
    ensure!(log.matches("replication started").count() == 1, "{log}");
    Ok(())
}

async fn each_wrong_slot(mut rig: Rig) -> Result<()> {
    rig.init().await?;
    let drop = "SELECT pg_drop_replication_slot('waljet')";
    let slots = [
        (
            "SELECT pg_create_logical_replication_slot('waljet', 'test_decoding')",
            "slot-plugin",
            "slot \"waljet\": expected the plugin pgoutput, found test_decoding",
        ),
        (
            "SELECT pg_create_physical_replication_slot('waljet')",
            "slot-plugin",
            "slot \"waljet\": expected the plugin pgoutput, found no plugin (a physical slot)",
        ),
        (
            "SELECT pg_create_logical_replication_slot('waljet', 'pgoutput', false, true)",
            "slot-two-phase",
            "slot \"waljet\" sends transactions when they are prepared, even if they are rolled back later",
        ),
    ];
    for (wrong, code, message) in slots {
        sql_on(&rig, drop).await?;
        sql_on(&rig, wrong).await?;
        run_ends(&mut rig, 3, code).await?.says(&[message]).hints(&[drop]);
        fails(&rig, &["init"], 1, code).await?.says(&[message]).hints(&[drop]);
        found(&rig, code).await?.says(&[message]).hints(&[drop]).mend(&rig).await?;
        rig.init().await?;
        good(&rig).await?;
    }
    sql_on(&rig, "CREATE DATABASE other").await?;
    let url = rig.postgres.url();
    let url = url.rsplit_once('/').map(|(server, _)| format!("{server}/other")).context("a URL with a database")?;
    sql_on(&rig, drop).await?;
    let other = connect(&url).await?;
    other.batch_execute("SELECT pg_create_logical_replication_slot('waljet', 'pgoutput')").await?;
    let message = "slot \"waljet\": expected the database \"postgres\", found \"other\"";
    run_ends(&mut rig, 3, "slot-database").await?.says(&[message]);
    found(&rig, "slot-database").await?.says(&[message]).hints(&["postgres.slot", "connect to that database"]);
    rig.set("postgres.slot", "mine")?;
    rig.init().await?;
    good(&rig).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_of_another_kind_is_refused_with_the_statement_that_drops_it() -> Result<()> {
    each_wrong_slot(newest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_of_another_kind_is_refused_with_the_statement_that_drops_it_on_the_oldest_servers() -> Result<()> {
    each_wrong_slot(oldest().await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_waits_names_the_first_and_takes_over_when_it_dies() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    let (mut first, admin) = start_another(&rig, &[])?;
    another_ready(&admin).await?;
    insert(&rig, 1..=5).await?;
    rig.settle(LIMIT).await?;
    let sql = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'waljet'";
    let pid: i32 = connect(&rig.postgres.url()).await?.query_one(sql, &[]).await?.try_get(0)?;
    let message = format!("slot \"waljet\" is read by pid {pid}");

    rig.start_relay()?;
    let reason = red(&rig, "[slot-active]", LIMIT).await?;
    assert!(reason.contains(&message), "{reason}");
    let terminate = format!("SELECT pg_terminate_backend({pid});");
    found(&rig, "slot-active").await?.says(&[&message]).hints(&[&terminate]);
    fails(&rig, &["slot", "drop", "--yes"], 1, "slot-active").await?.says(&[&message]).hints(&[&terminate]);
    ensure!(rig.relay()?.ended()?.is_none(), "the second relay ended:\n{}", rig.log());

    first.kill()?;
    rig.ready().await?;
    insert(&rig, 6..=10).await?;
    rig.settle(LIMIT).await?;
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_slot_free_is_named_with_its_limit_by_init_and_by_check() -> Result<()> {
    let mut rig = rig(|options| settings(options, &[("max_replication_slots", "1")])).await?;
    sql_on(&rig, "SELECT pg_create_physical_replication_slot('taken')").await?;
    let told = fails(&rig, &["init"], 1, "postgres-slots-exhausted").await?.says(&["create slot \"waljet\""]);
    assert!(told.causes.contains("all replication slots are in use"), "{told:?}");
    told.hints(&["max_replication_slots", "SELECT slot_name, active FROM pg_replication_slots"]);
    let told = found(&rig, "postgres-slots-exhausted").await?.says(&["all 1 replication slots are in use"]);
    told.hints(&["drop an unused slot", "ALTER SYSTEM SET max_replication_slots = 6;"]).mend(&rig).await?;
    run_ends(&mut rig, 3, "slot-missing").await?;
    rig.postgres.restart().await?;
    rig.init().await?;
    good(&rig).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_walsender_free_is_waited_for_and_named_with_its_limit() -> Result<()> {
    let mut rig = rig(|options| settings(options, &[("max_wal_senders", "1")])).await?;
    rig.init().await?;
    let other = [
        ("WALJET_POSTGRES__SLOT", "other"),
        ("WALJET_NATS__STREAM", "OTHER"),
        ("WALJET_ROUTE__SUBJECT", "other.{aggregate_type}"),
    ];
    let said = said_with(&rig, &other, &["init"]).await?;
    ensure!(said.code == 0, "{}", said.err);
    let (mut taker, admin) = start_another(&rig, &other)?;
    another_ready(&admin).await?;

    let told = found(&rig, "postgres-too-many-connections").await?;
    ensure!(told.causes.contains("max_wal_senders"), "{told:?}");
    rig.start_relay()?;
    let reason = red(&rig, "[postgres-too-many-connections]", LIMIT).await?;
    assert!(reason.contains("max_wal_senders"), "{reason}");
    taker.kill()?;
    rig.ready().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_lost_its_wal_is_a_gap_whether_the_relay_starts_or_only_looks() -> Result<()> {
    let mut rig = rig(|options| {
        settings(options, &[("max_slot_wal_keep_size", "1MB"), ("max_wal_size", "2MB"), ("min_wal_size", "2MB")]);
        options.postgres.initdb.push("--wal-segsize=1".into());
    })
    .await?;
    rig.up().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await?;
    rig.relay()?.terminate(Duration::from_secs(10))?;
    insert(&rig, 4..=6).await?;
    let at = confirmed(&rig).await?;
    let client = connect(&rig.postgres.url()).await?;
    for _ in 0..4 {
        client.batch_execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000000))").await?;
        client.batch_execute("SELECT pg_switch_wal()").await?;
    }
    client.batch_execute("CHECKPOINT").await?;

    let message = format!("slot \"waljet\" was invalidated (wal_removed); events committed since {at} are not in it");
    let stored = "the last event in stream \"OUTBOX\" is at ";
    let hint = "waljet slot drop --yes, waljet slot create, and waljet run --accept-gap";
    found(&rig, "slot-invalidated").await?.says(&[&message, stored]).hints(&[hint]);
    run_ends(&mut rig, 4, "slot-invalidated").await?.says(&[&message, stored]).hints(&[hint]);
    ensure!(rig.stored().await? == 3, "something was stored past the gap");

    for args in [&["slot", "drop", "--yes"][..], &["slot", "create"]] {
        let output = rig.waljet(args).await?;
        ensure!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    rig.start_relay_with(&["run", "--accept-gap"])?;
    rig.ready().await?;
    insert(&rig, 7..=9).await?;
    waljet_testbed::wait_for("the events past the gap", LIMIT, async || {
        let stored = rig.stored().await?;
        ensure!(stored == 6, "{stored} are stored");
        Ok::<_, anyhow::Error>(true)
    })
    .await
    .with_context(|| rig.log())
}
