//! What the integration tests share: the relay's program, built once, and rigs of servers around it.
//!
//! The tests meet the relay as its users do: its commands, its configuration, its admin endpoint, and the two servers.

mod pace;
mod stream;

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio_postgres::Client;
use waljet_testbed::{Pair, Rig, RigOptions, SLOT};

pub use pace::{nap, not_ready_for, pause, progress, seed, stored};
pub use stream::{broker, edit_stream, jetstream_at, leader_first, step_down};

/// Returns the relay's program, built from this tree as users build it.
///
/// # Errors
///
/// It does not build.
pub fn program() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    BUILT.get_or_init(|| build().map_err(|error| format!("{error:#}"))).clone().map_err(anyhow::Error::msg)
}

fn build() -> Result<PathBuf> {
    let args = ["build", "--release", "--locked", "--package", "waljet", "--message-format", "json"];
    let mut command = Command::new(env!("CARGO"));
    command.args(args).current_dir(env!("CARGO_MANIFEST_DIR"));
    // What cargo tells this test of its own package makes build scripts run again that look at it, and with them
    // half of the dependencies.
    for (name, _) in std::env::vars_os() {
        let own = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_NAME"];
        if own.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    let output = command.output().context("run cargo")?;
    ensure!(output.status.success(), "cargo build failed:\n{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).context("read what cargo built")?;
    let messages = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut built = messages.filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    built.find(|path| path.ends_with("waljet")).context("cargo built no program waljet")
}

/// Returns the usual options for a rig on a pair of servers.
///
/// # Errors
///
/// The program does not build.
pub fn options(pair: &Pair) -> Result<RigOptions> {
    Ok(RigOptions::new(program()?, pair))
}

/// Starts a rig on the newest servers; the relay is not started yet.
///
/// # Errors
///
/// A server does not start.
pub async fn newest() -> Result<Rig> {
    Rig::start(options(&Pair::newest()?)?).await
}

/// Starts a rig on the oldest supported servers; the relay is not started yet.
///
/// # Errors
///
/// A server does not start.
pub async fn oldest() -> Result<Rig> {
    Rig::start(options(&Pair::oldest()?)?).await
}

/// Asks the relay for its status.
///
/// # Errors
///
/// It does not answer with JSON.
pub async fn status(rig: &Rig) -> Result<Value> {
    serde_json::from_str(&rig.get("/status").await?.body).context("read /status")
}

/// Returns the slot's confirmed position, in bytes of WAL since the beginning.
///
/// # Errors
///
/// There is no such slot.
pub async fn confirmed(client: &Client) -> Result<i64> {
    let sql = "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = $1";
    Ok(client.query_one(sql, &[&SLOT]).await.context("read the slot")?.try_get(0)?)
}

/// Returns the process id of the walsender that serves the slot.
///
/// # Errors
///
/// Nobody reads the slot.
pub async fn walsender(client: &Client) -> Result<u32> {
    let sql = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1";
    let pid: Option<i32> = client.query_one(sql, &[&SLOT]).await.context("read the slot")?.try_get(0)?;
    Ok(pid.context("nobody reads the slot")?.try_into()?)
}

/// Commits this many events, each in a transaction of its own, on 50 keys of their own.
///
/// # Errors
///
/// The database does not take them.
pub async fn commit_singly(client: &Client, events: u32) -> Result<()> {
    // Versions go on from call to call, so that the books can tell the order of each key.
    let sql = format!(
        "DO $$ DECLARE base bigint := (SELECT count(*) FROM outbox); BEGIN FOR n IN 1..{events} LOOP
             INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             VALUES ('single', 's' || n % 50, 'happened', jsonb_build_object('version', base + n));
             COMMIT;
         END LOOP; END $$"
    );
    client.batch_execute(&sql).await.context("commit events one by one")
}

/// Writes about this many megabytes of WAL that the relay has no business with.
///
/// # Errors
///
/// The database does not take them.
pub async fn foreign_wal(client: &Client, megabytes: u64) -> Result<()> {
    client.batch_execute("CREATE TABLE IF NOT EXISTS elsewhere (filler text)").await?;
    client.batch_execute("ALTER TABLE elsewhere ALTER COLUMN filler SET STORAGE PLAIN").await?;
    for _ in 0..megabytes {
        let sql = "INSERT INTO elsewhere SELECT repeat('x', 1000) FROM generate_series(1, 1000)";
        client.batch_execute(sql).await.context("write foreign WAL")?;
        client.batch_execute("TRUNCATE elsewhere").await?;
    }
    Ok(())
}
