//! What PostgreSQL does that a relay has to know: ten facts, each as a claim about the relay.
//!
//! | fact | where |
//! | --- | --- |
//! | the walsender sends one message for one change: a backlog is many small ones | [`positions`] |
//! | a publication that changes loses rows without a word | [`publication`] |
//! | a start position past the end of the WAL is accepted | [`positions`] |
//! | a server that stops waits for its WAL to be confirmed | [`shutdown`] |
//! | confirmed positions do not survive a crash | [`positions`] |
//! | rows of a transaction share LSNs | [`positions`] |
//! | the last position is lost unless it is told at the end | [`shutdown`] |
//! | a dead peer looks like a silent one | [`liveness`] |
//! | `verify-ca` and `verify-full` are two things | [`tls`] |
//! | a failover slot is only copied while it moves | [`failover`] |

mod failover;
mod liveness;
mod positions;
mod publication;
mod shutdown;
mod tls;

use std::time::Duration;

use anyhow::Result;
use waljet_testbed::{Rig, wait_for};

/// How long events may take to arrive.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits until the stream holds this many messages.
async fn stored(rig: &Rig, events: u64) -> Result<()> {
    let what = format!("{events} stored events");
    wait_for(&what, LIMIT, async || Ok::<_, anyhow::Error>(rig.stored().await? >= events)).await
}
