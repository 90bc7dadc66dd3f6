//! What the integration tests share: the relay's program, built once, and rigs of servers around it.
//!
//! The tests meet the relay as its users do: its commands, its configuration, its admin endpoint, and the two servers.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use waljet_testbed::{Pair, Rig, RigOptions};

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
    let output = Command::new(env!("CARGO")).args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let output = output.context("run cargo")?;
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
