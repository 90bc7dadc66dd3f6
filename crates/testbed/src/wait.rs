//! Waiting for something that has to come true, instead of sleeping and hoping.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// How long to wait between two tries.
const PAUSE: Duration = Duration::from_millis(10);

/// What one try of [`wait_for`] may answer: done with a value, or not yet, perhaps with a reason.
pub trait Answer {
    /// What is handed out once it holds.
    type Value;

    /// Takes the value out, or says why it does not hold yet.
    ///
    /// # Errors
    ///
    /// The reason, which may be empty.
    fn settle(self) -> std::result::Result<Self::Value, String>;
}

impl Answer for bool {
    type Value = ();
    fn settle(self) -> std::result::Result<(), String> {
        self.then_some(()).ok_or_else(String::new)
    }
}

impl<T> Answer for Option<T> {
    type Value = T;
    fn settle(self) -> std::result::Result<T, String> {
        self.ok_or_else(String::new)
    }
}

impl<A: Answer, E: std::fmt::Display> Answer for std::result::Result<A, E> {
    type Value = A::Value;
    fn settle(self) -> std::result::Result<A::Value, String> {
        match self {
            Ok(answer) => answer.settle(),
            // The alternate form shows the whole chain of an `anyhow::Error`.
            Err(error) => Err(format!("{error:#}")),
        }
    }
}

/// Calls `probe` until it answers `true`, `Some` or `Ok` of these, and returns the value.
///
/// An `Err` counts as "not yet": servers that are being killed refuse connections for a while.
///
/// ```
/// # async fn example() -> anyhow::Result<()> {
/// use std::{fs, time::Duration};
///
/// waljet_testbed::wait_for("the marker file", Duration::from_secs(5), async || fs::exists("/tmp/marker")).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// The time is over; the error names `what`, the time, and the last reason.
///
/// # Cancel safety
///
/// As safe as `probe`, whose future is dropped when the time is over.
pub async fn wait_for<A: Answer>(what: &str, limit: Duration, mut probe: impl AsyncFnMut() -> A) -> Result<A::Value> {
    let end = tokio::time::Instant::now() + limit;
    let mut reason = String::new();
    loop {
        match tokio::time::timeout_at(end, probe()).await.map(Answer::settle) {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(why)) => reason = why,
            Err(_) if reason.is_empty() => "no answer to the last try".clone_into(&mut reason),
            Err(_) => {}
        }
        if tokio::time::Instant::now() + PAUSE >= end {
            bail!(overdue(what, limit, &reason));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// The same for the threads that watch a server start or stop; an `Err` ends the wait.
pub(crate) fn poll<T>(what: &str, limit: Duration, mut probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        if Instant::now() >= end {
            bail!(overdue(what, limit, ""));
        }
        thread::sleep(PAUSE / 4);
    }
}

fn overdue(what: &str, limit: Duration, reason: &str) -> String {
    let colon = if reason.is_empty() { "" } else { ": " };
    format!("waited {limit:?} in vain for {what}{colon}{reason}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::{cell::Cell, future::pending};

    use super::*;

    #[tokio::test]
    async fn the_value_of_the_first_answer_is_returned() {
        let tries = Cell::new(0);
        let value = wait_for("three tries", Duration::from_secs(5), async || {
            tries.set(tries.get() + 1);
            if tries.get() < 3 { Err(anyhow::anyhow!("too early")) } else { Ok(Some(tries.get())) }
        });
        assert_eq!(value.await.unwrap(), 3);
    }

    #[tokio::test]
    async fn a_wait_in_vain_names_what_it_waited_for_and_why() {
        let limit = Duration::from_millis(30);
        let error = wait_for("the moon", limit, async || Err::<bool, _>("cloudy")).await.unwrap_err();
        assert_eq!(error.to_string(), "waited 30ms in vain for the moon: cloudy");
    }

    #[tokio::test]
    async fn a_probe_that_hangs_does_not_hang_the_wait() {
        let error = wait_for("an echo", Duration::from_millis(30), async || pending::<bool>().await).await.unwrap_err();
        assert!(error.to_string().contains("no answer to the last try"), "{error}");
    }
}
