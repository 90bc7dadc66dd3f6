//! Users of NATS, and what they may not do.

use std::time::Duration;

use anyhow::{Result, ensure};
use waljet_testbed::{Pair, Rig, connect};

use super::{LIMIT, confirmed, found, good, insert, red, said};

/// The server's users: the tests are the one without credentials.
fn users(permissions: &str) -> String {
    format!(
        "authorization {{ users: [
            {{ user: tests, password: tests }}
            {{ user: relay, password: \"right-secret\", permissions: {{ {permissions} }} }}
        ] }}
        no_auth_user: tests"
    )
}

async fn with_user(permissions: &str) -> Result<Rig> {
    with_user_on(&Pair::newest()?, permissions).await
}

async fn with_user_on(pair: &Pair, permissions: &str) -> Result<Rig> {
    let mut options = waljet_integration::options(pair)?;
    options.nats.extra = users(permissions);
    let mut rig = Rig::start(options).await?;
    // The stream and all else, as somebody who may.
    rig.init().await?;
    rig.set("nats.user", "relay")?;
    rig.set("nats.password", "right-secret")?;
    Ok(rig)
}

/// Returns the process that the relay reads from.
async fn walsender(rig: &Rig) -> Result<i32> {
    let sql = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'waljet'";
    Ok(connect(&rig.postgres.url()).await?.query_one(sql, &[]).await?.try_get(0)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_of_nats_is_told_without_showing_it_and_waited_for() -> Result<()> {
    let mut rig = with_user("publish: [\">\"]").await?;
    rig.set("nats.password", "wrong-secret")?;
    let address = format!("nats://127.0.0.1:{}", rig.nats.port());
    found(&rig, "nats-authentication").await?.says(&[&address]).hints(&["correct nats.user and nats.password"]);
    rig.start_relay()?;
    red(&rig, "[nats-authentication]", LIMIT).await?;
    for args in [&["check"][..], &["check", "--json"], &["config", "show"], &["status", "--json"]] {
        let said = said(&rig, args).await?;
        ensure!(!said.out.contains("-secret") && !said.err.contains("-secret"), "{args:?}: {}{}", said.out, said.err);
    }
    ensure!(!rig.log().contains("-secret"), "{}", rig.log());
    rig.nats.reload(&users("publish: [\">\"]").replace("right-secret", "wrong-secret")).await?;
    rig.ready().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_may_not_publish_is_found_by_check() -> Result<()> {
    let rig = with_user("publish: { deny: [\"outbox.>\"] }").await?;
    let told = found(&rig, "nats-permission").await?.says(&["publish on subject \"outbox."]);
    told.hints(&["permissions: { publish: { allow: [\"outbox.>\"] } }"]);
    rig.nats.reload(&users("publish: { allow: [\"outbox.>\", \"$JS.API.>\"] }")).await?;
    good(&rig).await?;
    Ok(())
}

async fn taken_away_and_given_back(pair: &Pair) -> Result<()> {
    let mut rig = with_user_on(pair, "publish: [\">\"]").await?;
    rig.start_relay()?;
    rig.ready().await?;
    insert(&rig, 1..=3).await?;
    rig.settle(LIMIT).await?;
    let reader = walsender(&rig).await?;

    rig.nats.reload(&users("publish: { deny: [\"outbox.>\"] }")).await?;
    let before = confirmed(&rig).await?;
    insert(&rig, 4..=6).await?;
    let reason = red(&rig, "[nats-permission]", Duration::from_secs(10)).await?;
    assert!(reason.contains("publish on subject \"outbox.order.changed\""), "{reason}");
    // Over several attempts it stays red with that reason, and does nothing but try.
    for _ in 0..10 {
        let answer = rig.get("/readyz").await?;
        ensure!(answer.status == 503 && !answer.body.contains("nats-unreachable"), "{}", answer.body);
        ensure!(rig.get("/livez").await?.status == 200);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    ensure!(rig.stored().await? == 3, "something was stored");
    ensure!(confirmed(&rig).await? == before, "the slot was moved");

    rig.nats.reload(&users("publish: [\">\"]")).await?;
    rig.ready().await?;
    rig.settle(LIMIT).await?;
    ensure!(walsender(&rig).await? == reader, "the database was left meanwhile");
    rig.books().await?.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_permission_that_is_taken_away_and_given_back_needs_no_restart() -> Result<()> {
    taken_away_and_given_back(&Pair::newest()?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_permission_that_is_taken_away_and_given_back_needs_no_restart_on_the_oldest_servers() -> Result<()> {
    taken_away_and_given_back(&Pair::oldest()?).await
}
