//! The relay as a process: its end, its connections, its place among the server's standbys, and its clock.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use waljet_integration::{newest, status, stored, walsender};
use waljet_testbed::{Program, Rig, Workload, WorkloadOptions, connect, wait_for};

use super::{CONFIRMED, END, LIMIT, position};
use crate::wrong_things::{found_warning, good, insert, rig, settings};

async fn load(rig: &Rig) -> Result<Workload> {
    Workload::start(WorkloadOptions { rate: Some(400.0), ..WorkloadOptions::new(rig.postgres.url()) }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_under_load_drains_and_a_second_signal_ends_it_at_once() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    let workload = load(&rig).await?;
    for _ in 0..5 {
        let before = rig.stored().await?;
        wait_for("the relay to work", LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? > before + 50))
            .await?;
        let exit = rig.relay()?.terminate(LIMIT)?.0;
        ensure!(exit.code() == Some(0), "{exit}: {}", rig.log());
        rig.relay()?.start_again()?;
        rig.ready().await?;
        // At most the part of a transaction that it was in the middle of comes again, and is found stored.
        let events = status(&rig).await?["events"].clone();
        ensure!(events["skipped"].as_u64() < Some(50) && events["duplicate"] == 0, "{events}");
    }
    workload.stop().await;
    rig.settle(LIMIT).await?;

    rig.set("shutdown.drain_timeout", "10m")?;
    rig.relay()?.terminate(LIMIT)?;
    rig.start_relay()?;
    rig.ready().await?;
    rig.nats.freeze().await?;
    insert(&rig, 1..=3).await?;
    let pending = async || Ok::<_, anyhow::Error>(status(&rig).await?["window"]["events"] == 3);
    wait_for("events to be pending", LIMIT, pending).await?;
    let drained = |rig: &Rig| rig.log().matches("a second signal aborts").count();
    let before = drained(&rig);
    rig.relay()?.signal(libc::SIGTERM)?;
    wait_for("the relay to drain", LIMIT, async || drained(&rig) > before).await?;
    assert!(rig.relay()?.ended()?.is_none(), "it did not wait for what is pending");
    let exit = rig.relay()?.terminate(LIMIT)?.0;
    ensure!(exit.code() == Some(1) && rig.log().contains("[aborted]"), "{exit}: {}", rig.log());
    rig.nats.thaw().await?;
    rig.relay()?.start_again()?;
    rig.settle(LIMIT).await?;
    // The last three share a key with the load, whose versions are higher.
    let books = rig.books().await?;
    ensure!((books.lost, books.doubled, books.foreign) == (0, 0, 0), "{books}");
    Ok(())
}

/// Connections of the relay to PostgreSQL, and walsenders among them.
async fn connections(rig: &Rig) -> Result<(i64, i64)> {
    let sql = "SELECT count(*), count(*) FILTER (WHERE backend_type = 'walsender') FROM pg_stat_activity
               WHERE application_name = 'waljet'";
    let row = connect(&rig.postgres.url()).await?.query_one(sql, &[]).await?;
    Ok((row.try_get(0)?, row.try_get(1)?))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_has_two_connections_and_a_waiting_one_no_walsender() -> Result<()> {
    let mut rig = newest().await?;
    rig.up().await?;
    let both = async || {
        let found = connections(&rig).await?;
        ensure!(found == (2, 1), "{found:?}");
        Ok::<_, anyhow::Error>(true)
    };
    wait_for("the connections of the checks to be closed", LIMIT, both).await?;
    let standbys: Vec<Program> = (0..3).map(|_| rig.second_relay()).collect::<Result<_>>()?;
    wait_for("the others to wait", LIMIT, async || standbys.iter().all(|relay| relay.log().contains("slot-active")))
        .await?;
    let mut most = (0, 0);
    for _ in 0..20 {
        // A look at what may be there for a moment only.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let found = connections(&rig).await?;
        most = (found.0.max(most.0), found.1.max(most.1));
    }
    // While it starts, each of them also sees whether it could replicate.
    ensure!(most.0 <= 2 + 2 * 3, "{most:?}");
    let settled = async || {
        let found = connections(&rig).await?;
        ensure!(found.1 == 1, "{found:?}");
        Ok::<_, anyhow::Error>(true)
    };
    wait_for("one walsender to be left", LIMIT, settled).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_commits_would_wait_for_is_warned_about() -> Result<()> {
    let rig = newest().await?;
    rig.init().await?;
    rig.postgres.set(&[("synchronous_standby_names", "standby, waljet")]).await?;
    let warning = "matches this relay's application_name \"waljet\": commits may wait for it";
    found_warning(&rig, warning, "name the standbys one by one").await?;
    rig.postgres.set(&[("synchronous_standby_names", "")]).await?;
    ensure!(!good(&rig).await?.contains("commits may wait"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_is_about_to_lose_its_wal_is_told_beforehand_and_never_dropped() -> Result<()> {
    let mut rig = rig(|options| {
        settings(options, &[("max_slot_wal_keep_size", "8MB"), ("max_wal_size", "2MB"), ("min_wal_size", "2MB")]);
        options.postgres.initdb.push("--wal-segsize=1".into());
    })
    .await?;
    rig.init().await?;
    found_warning(&rig, "8 MB: a relay that lags further loses the slot", "alert on the slot's safe_wal_size").await?;
    rig.start_relay()?;
    rig.ready().await?;
    rig.nats.freeze().await?;
    insert(&rig, 1..=1).await?;
    let held = position(&rig, CONFIRMED).await?;
    let client = connect(&rig.postgres.url()).await?;
    for _ in 0..4 {
        client.batch_execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 900000))").await?;
        client.batch_execute("SELECT pg_switch_wal()").await?;
    }
    client.batch_execute("CHECKPOINT").await?;
    wait_for("the running relay to show it", LIMIT, async || {
        let slot = status(&rig).await?["postgres"]["slot"].clone();
        let retained = slot["retained_bytes"].as_u64().unwrap_or(0);
        ensure!(slot["wal_status"] == "extended" && retained > 2_000_000, "{slot}");
        ensure!(slot["safe_wal_size"].as_u64().is_some_and(|safe| safe < 8 << 20), "{slot}");
        Ok::<_, anyhow::Error>(true)
    })
    .await?;
    ensure!(position(&rig, CONFIRMED).await? <= position(&rig, END).await? && held > 0);
    rig.relay()?.kill()?;
    rig.nats.thaw().await?;
    let free = async || Ok::<_, anyhow::Error>(walsender(&client).await.is_err());
    wait_for("the slot to be free", LIMIT, free).await?;
    found_warning(&rig, "wal_status is extended: it is lost after", "raise max_slot_wal_keep_size").await?;
    rig.relay()?.start_again()?;
    rig.settle(LIMIT).await
}

/// Moves the wall clock of the process that it is loaded into by what a file says, in seconds.
const SHIM: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    int result = syscall(SYS_clock_gettime, id, t);
    const char *path = getenv("WALL_CLOCK_FILE");
    if (id == CLOCK_REALTIME && path) {
        FILE *file = fopen(path, "r");
        long offset = 0;
        if (file) {
            if (fscanf(file, "%ld", &offset) == 1) t->tv_sec += offset;
            fclose(file);
        }
    }
    return result;
}
"#;

/// Builds the shim, beside which the file with the offset is.
fn shim(rig: &Rig) -> Result<(PathBuf, PathBuf)> {
    let folder = rig.config().parent().context("a folder")?.to_owned();
    let (source, library, offset) = (folder.join("clock.c"), folder.join("clock.so"), folder.join("offset"));
    std::fs::write(&source, SHIM)?;
    std::fs::write(&offset, "0")?;
    // What links the tests is there.
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().context("run cc")?;
    ensure!(built.success(), "cc ended with {built}");
    Ok((library, offset))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wall_clock_that_jumps_by_hours_disturbs_nothing() -> Result<()> {
    let rig = rig(|options| settings(options, &[("wal_sender_timeout", "3s")])).await?;
    rig.init().await?;
    let (library, offset) = shim(&rig)?;
    let mut options = rig.program_options(&["run"]);
    options.env.push(("LD_PRELOAD".into(), library.into()));
    options.env.push(("WALL_CLOCK_FILE".into(), offset.clone().into()));
    let relay = Program::start(options)?;
    rig.ready().await?;
    let client = connect(&rig.postgres.url()).await?;
    let pid = walsender(&client).await?;
    let mut versions = 1;
    for hours in [2_i64, -2, 0] {
        std::fs::write(&offset, (hours * 3600).to_string())?;
        // It did jump, for what is shown of the time.
        let clock = "SELECT extract(epoch FROM clock_timestamp())::bigint";
        wait_for("the relay's clock to jump", LIMIT, async || {
            let now: i64 = client.query_one(clock, &[]).await?.get(0);
            let shown = status(&rig).await?["postgres"]["refreshed_unix_seconds"].as_i64().unwrap_or(0);
            ensure!((shown - now - hours * 3600).abs() < 60, "it shows {shown}, the time is {now}");
            Ok::<_, anyhow::Error>(true)
        })
        .await
        .with_context(|| relay.log())?;
        for _ in 0..6 {
            // The time is the condition here: what is due in it must happen, and nothing else.
            tokio::time::sleep(Duration::from_millis(250)).await;
            insert(&rig, versions..=versions).await?;
            stored(&rig, u64::from(versions)).await?;
            versions += 1;
            ensure!(rig.get("/readyz").await?.status == 200, "{hours} h: {}", relay.log());
        }
        ensure!(walsender(&client).await? == pid, "{hours} h: {}", relay.log());
    }
    rig.settle(LIMIT).await?;
    rig.books().await?.check()
}
