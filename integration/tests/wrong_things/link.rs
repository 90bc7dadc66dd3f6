//! The way to PostgreSQL, and who is let in.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use waljet_integration::newest;
use waljet_testbed::Auth;

use super::{LIMIT, fails, found, good, insert, red, rig, run_ends, said, settings, sql_on};

/// A check may not keep a person waiting for a server that is not there.
const AT_ONCE: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn a_wal_level_that_is_too_low_is_named_with_the_statement_that_raises_it() -> Result<()> {
    let mut rig = rig(|options| settings(options, &[("wal_level", "replica")])).await?;
    let message = "wal_level: expected logical, found replica";
    let hint = "ALTER SYSTEM SET wal_level = 'logical'; then restart the server";
    fails(&rig, &["init"], 1, "postgres-wal-level").await?.hints(&[hint]);
    run_ends(&mut rig, 3, "postgres-wal-level").await?.says(&[message]).hints(&[hint]);
    found(&rig, "postgres-wal-level").await?.says(&[message]).hints(&[hint]).mend(&rig).await?;
    rig.postgres.restart().await?;
    rig.init().await?;
    good(&rig).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_without_replication_is_named_with_the_statement_that_lets_it() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    sql_on(&rig, "CREATE ROLE app LOGIN").await?;
    let url = rig.postgres.url().replace("postgres@", "app@");
    rig.set("postgres.url", &url)?;
    let message = "role \"app\" lacks the REPLICATION attribute";
    let hint = "ALTER ROLE \"app\" REPLICATION;";
    run_ends(&mut rig, 3, "postgres-privilege").await?.says(&[message]).hints(&[hint]);
    found(&rig, "postgres-privilege").await?.says(&[message]).hints(&[hint]).mend(&rig).await?;
    // LOGIN and REPLICATION are all that the relay needs.
    good(&rig).await?;
    rig.start_relay()?;
    rig.ready().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgresql_that_does_not_answer_is_told_at_once_and_waited_for() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    rig.postgres.stop_fast().await?;
    let address = format!("127.0.0.1:{}", rig.postgres.port());
    let started = Instant::now();
    found(&rig, "postgres-unreachable").await?.says(&[&address]);
    ensure!(started.elapsed() < AT_ONCE, "check took {:?}", started.elapsed());
    rig.start_relay()?;
    let reason = red(&rig, "[postgres-unreachable]", LIMIT).await?;
    assert!(reason.contains(&address), "{reason}");
    rig.postgres.start_again().await?;
    rig.ready().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_and_an_unknown_database_are_told_without_showing_the_password() -> Result<()> {
    let mut rig = rig(|options| options.postgres.auth = Auth::Scram("right-secret".into())).await?;
    let right = rig.postgres.url();
    ensure!(right.contains("right-secret"), "the password is not in the URL");
    rig.init().await?;
    good(&rig).await?;

    rig.set("postgres.url", &right.replace("right-secret", "wrong-secret"))?;
    let told = found(&rig, "postgres-authentication").await?;
    ensure!(told.causes.contains("password authentication failed for user \"postgres\""), "{told:?}");
    ensure!(told.hint.contains("postgres.password") && told.hint.contains("pg_hba.conf"), "{told:?}");
    run_ends(&mut rig, 3, "postgres-authentication").await?;

    let server = right.rsplit_once('/').context("a URL with a database")?.0;
    rig.set("postgres.url", &format!("{server}/shop"))?;
    let told = found(&rig, "postgres-database-missing").await?;
    ensure!(told.causes.contains("database \"shop\" does not exist"), "{told:?}");
    ensure!(told.hint.contains("postgres.url"), "{told:?}");
    run_ends(&mut rig, 3, "postgres-database-missing").await?;

    for args in [&["check"][..], &["check", "--json"], &["config", "show"], &["config", "show", "--json"], &["status"]]
    {
        let said = said(&rig, args).await?;
        ensure!(!said.out.contains("-secret") && !said.err.contains("-secret"), "{args:?}: {}{}", said.out, said.err);
    }
    ensure!(!rig.log().contains("-secret"), "{}", rig.log());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_tls_is_not_talked_to_in_the_clear_where_tls_is_required() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    let url = rig.postgres.url();
    for mode in ["require", "verify-full"] {
        rig.set("postgres.url", &format!("{url}?sslmode={mode}"))?;
        let told = found(&rig, "postgres-tls").await?.says(&["127.0.0.1 does not offer TLS, and sslmode demands it"]);
        told.hints(&["set ssl = on on the server", "sslmode=prefer"]);
        run_ends(&mut rig, 3, "postgres-tls").await?;
    }
    rig.set("postgres.url", &format!("{url}?sslmode=prefer"))?;
    good(&rig).await?;
    Ok(())
}
