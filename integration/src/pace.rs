//! How tests go on: by what the relay has done, where they can, and by chance.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use waljet_testbed::{Rig, wait_for};

/// How long a relay may take to get somewhere, on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Waits until the stream holds exactly this many messages.
///
/// # Errors
///
/// It holds fewer or more.
pub async fn stored(rig: &Rig, events: u64) -> Result<()> {
    wait_for(&format!("{events} stored events"), LIMIT, async || {
        let stored = rig.stored().await?;
        ensure!(stored == events, "{stored} are stored");
        Ok::<_, anyhow::Error>(true)
    })
    .await
    .with_context(|| rig.log())
}

/// Waits until as many more events are stored, so that the next fault meets a relay at work.
///
/// # Errors
///
/// It does not go on.
pub async fn progress(rig: &Rig) -> Result<()> {
    let mut before = None;
    wait_for("the relay to go on", LIMIT, async || {
        // A stream without a leader does not tell.
        let stored = rig.stored().await?;
        Ok::<_, anyhow::Error>(stored > *before.get_or_insert(stored) + 50)
    })
    .await
    .with_context(|| rig.log())?;
    Ok(())
}

/// Waits until the relay is not ready for this reason.
///
/// # Errors
///
/// It is ready, or gives another reason.
pub async fn not_ready_for(rig: &Rig, code: &str) -> Result<()> {
    wait_for(&format!("readiness to say {code}"), LIMIT, async || {
        let reason = rig.not_ready(LIMIT).await?;
        ensure!(reason.contains(code), "{reason}");
        Ok::<_, anyhow::Error>(true)
    })
    .await
}

/// Waits, where the time itself is the condition.
pub async fn nap(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

/// Waits for a random time.
pub async fn pause(random: &mut fastrand::Rng, most_millis: u64) {
    nap(random.u64(20..most_millis)).await;
}

/// Returns the seed of a run: `WALJET_SEED`, or a new one.
///
/// # Errors
///
/// `WALJET_SEED` is no number.
pub fn seed() -> Result<u64> {
    match std::env::var("WALJET_SEED") {
        Ok(text) => text.parse().with_context(|| format!("WALJET_SEED is {text:?}, which is no number")),
        Err(_) => Ok(fastrand::u64(..)),
    }
}
