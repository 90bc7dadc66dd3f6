//! A broker whose disk is full.
//!
//! A disk that is small enough is a tmpfs in a mount namespace of a user namespace, which needs no root; the namespace
//! is held by a shell that ends with the test, and the broker enters it at each start. Where the kernel does not let
//! users make namespaces, the test says so and is skipped.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use waljet_integration::options;
use waljet_testbed::{Pair, Rig, Workload, WorkloadOptions, large_transaction, wait_for};

use super::{LIMIT, say};

/// A nats-server whose streams are on a small disk, as a script that stands in for the program.
///
/// It runs in the server's folder, where the test finds and leaves files: `refused` where there is no such disk, `grow`
/// to make the disk larger, `grown` when that is done.
fn script(nats: &Path) -> String {
    format!(
        r#"#!/bin/sh
if [ ! -e holder ] && [ ! -e refused ]; then
    unshare -Urm sh -c '
        mount -t tmpfs -o size=6m none store || exit 1
        echo $$ >holder.new && mv holder.new holder
        while [ -d /proc/{test} ] && [ -e holder ]; do
            if [ -e grow ] && [ ! -e grown ]; then mount -o remount,size=256m none store && : >grown; fi
            sleep 0.1
        done' </dev/null >holder.log 2>&1 &
    started=$!
    while [ ! -e holder ] && kill -0 $started 2>/dev/null; do sleep 0.05; done
    [ -e holder ] || : >refused
fi
if [ -e refused ]; then exec {nats} "$@"; fi
exec nsenter -t "$(cat holder)" -U -m --preserve-credentials --wd="$PWD" {nats} "$@"
"#,
        test = std::process::id(),
        nats = nats.display(),
    )
}

/// The folder of the script, which the servers' account can enter.
struct Script(PathBuf);

impl Script {
    fn write(nats: &Path) -> Result<Self> {
        let folder = PathBuf::from(format!("/tmp/waljet-disk-{}", std::process::id()));
        std::fs::create_dir_all(&folder).context("make the folder of the script")?;
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755))?;
        let script = Self(folder);
        std::fs::write(script.path(), self::script(nats))?;
        std::fs::set_permissions(script.path(), std::fs::Permissions::from_mode(0o755))?;
        Ok(script)
    }

    fn path(&self) -> PathBuf {
        self.0.join("nats-server")
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fills_up_and_is_freed_costs_nothing() -> Result<()> {
    let pair = Pair::newest()?;
    let script = Script::write(&pair.nats)?;
    let mut options = options(&pair)?;
    options.nats.program = script.path();
    let mut rig = Rig::start(options).await?;
    let folder = rig.nats.store_dir().parent().context("the store has no folder")?.to_owned();
    if folder.join("refused").exists() {
        let why = std::fs::read_to_string(folder.join("holder.log")).unwrap_or_default();
        say(&format!("skipped: a_disk_that_fills_up_and_is_freed_costs_nothing: no small disk here: {}", why.trim()));
        return Ok(());
    }
    rig.up().await?;
    let workload = WorkloadOptions { rate: Some(100.0), ..WorkloadOptions::new(rig.postgres.url()) };
    let workload = Workload::start(workload).await?;
    large_transaction(&rig.postgres.url(), 5_000, 2_000).await?;
    let reason = rig.not_ready(LIMIT).await?;
    say(&format!("full disk: {}", reason.trim()));
    let full = async || Ok::<_, anyhow::Error>(rig.nats.log().contains("no space left on device"));
    wait_for("the broker to say that its disk is full", LIMIT, full).await?;
    // What was stored without an acknowledgement is found once more, which is progress. From then on it stays red: the relay does not
    // take for stored what is not.
    let mut red = 0;
    wait_for("readiness to stay red", LIMIT, async || {
        red = if rig.get("/readyz").await?.status == 503 { red + 1 } else { 0 };
        Ok::<_, anyhow::Error>(red > 100)
    })
    .await?;
    let process = rig.relay()?.pid();
    std::fs::write(folder.join("grow"), "")?;
    let grown = async || Ok::<_, anyhow::Error>(folder.join("grown").exists());
    wait_for("the disk to be larger", LIMIT, grown).await?;
    // A stream that could not be written to stays so until its server starts again.
    rig.nats.restart().await?;
    rig.ready().await?;
    workload.stop().await;
    rig.settle(LIMIT).await?;
    ensure!(rig.relay()?.pid() == process && rig.relay()?.ended()?.is_none(), "the relay was restarted");
    let books = rig.books().await?;
    say(&format!("full disk: {books}"));
    // The shell that holds the disk ends.
    let _ = std::fs::remove_file(folder.join("holder"));
    books.check()
}
