//! The privileges that the README names are enough, and no more is needed.

use std::time::Duration;

use anyhow::{Result, ensure};
use waljet_integration::options;
use waljet_testbed::{Pair, Rig, connect};

/// The line of the README, as a nats-server's configuration. Everybody else is an administrator.
const USERS: &str = r#"
authorization {
  users: [
    { user: admin, password: admin }
    { user: relay, password: secret, permissions: {
        publish: [
          "outbox.>", "$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.INFO.OUTBOX",
          "$JS.API.STREAM.MSG.GET.OUTBOX", "$JS.API.CONSUMER.CREATE.OUTBOX",
          "$JS.API.CONSUMER.MSG.NEXT.OUTBOX.>", "$JS.API.CONSUMER.DELETE.OUTBOX.>"
          "$KV.waljet.>", "$JS.API.STREAM.MSG.GET.KV_waljet"
        ]
        subscribe: ["_INBOX.>"]
    } }
  ]
}
no_auth_user: admin
"#;

async fn smallest_privileges(pair: &Pair, store: &str) -> Result<()> {
    let mut options = options(pair)?;
    options.nats.extra = USERS.to_owned();
    let mut rig = Rig::start(options).await?;
    rig.set("checkpoint.store", store)?;
    rig.init().await?;
    let admin = connect(&rig.postgres.url()).await?;
    let grants = "CREATE ROLE relay LOGIN REPLICATION; GRANT USAGE ON SCHEMA waljet TO relay;
                  GRANT SELECT, INSERT, UPDATE ON waljet.checkpoint TO relay";
    if store == "postgres" {
        admin.batch_execute(grants).await?;
    } else {
        admin.batch_execute("CREATE ROLE relay LOGIN REPLICATION").await?;
    }
    rig.set("postgres.url", &rig.postgres.url().replace("postgres@", "relay@"))?;
    rig.set("nats.user", "relay")?;
    rig.set("nats.password", "secret")?;
    rig.set("nats.inbox_prefix", "_INBOX")?;
    let check = rig.waljet(&["check"]).await?;
    ensure!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
    rig.start_relay()?;
    rig.ready().await?;

    let insert = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                  SELECT 'order', n::text, 'created', jsonb_build_object('version', txid_current())
                  FROM generate_series(1, 100) n";
    admin.batch_execute(insert).await?;
    rig.settle(Duration::from_secs(30)).await?;

    // Killed in the middle of its work, it also has to read the stream back.
    rig.relay()?.signal(libc::SIGSTOP)?;
    admin.batch_execute(insert).await?;
    rig.relay()?.signal(libc::SIGCONT)?;
    waljet_testbed::wait_for("some more events", Duration::from_secs(30), async || {
        Ok::<_, anyhow::Error>(rig.stored().await? > 100)
    })
    .await?;
    rig.relay()?.start_again()?;
    rig.settle(Duration::from_secs(30)).await?;
    rig.books().await?.check()?;
    let status = rig.waljet(&["status"]).await?;
    ensure!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    ensure!(rig.log().contains("stream read back"), "the relay had nothing to read back:\n{}", rig.log());
    ensure!(!rig.log().contains("permission") && !rig.log().contains("checkpoint-"), "{}", rig.log());
    let checkpoint = &waljet_integration::status(&rig).await?["checkpoint"];
    ensure!(checkpoint["store"] == store && checkpoint["confirmed_lsn"].is_string(), "{checkpoint}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_privileges_are_enough() -> Result<()> {
    smallest_privileges(&Pair::newest()?, "postgres").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_privileges_are_enough_on_the_oldest_servers() -> Result<()> {
    smallest_privileges(&Pair::oldest()?, "nats").await
}
