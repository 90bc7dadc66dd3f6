//! SIGTERM and SIGINT: the first drains, the second aborts.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use waljet_pipeline::Fault;

use crate::error::{START, halt};

/// How far the process is on its way to its end. It never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Nobody asked for an end.
    Running,
    /// Nothing new is taken; what is in flight is waited for and confirmed.
    Draining,
    /// Nothing is waited for any more. Always safe: what is not acknowledged was not confirmed.
    Aborting,
}

/// Tells others how far the process is on its way to its end.
#[derive(Clone, Debug)]
pub(crate) struct Shutdown {
    phase: watch::Receiver<Phase>,
}

impl Shutdown {
    /// Waits until draining or aborting begins.
    ///
    /// # Cancel safety
    ///
    /// Can be cancelled and called again.
    pub(crate) async fn draining(&mut self) {
        self.reached(Phase::Draining).await;
    }

    /// Waits until aborting begins.
    ///
    /// # Cancel safety
    ///
    /// Can be cancelled and called again.
    pub(crate) async fn aborting(&mut self) {
        self.reached(Phase::Aborting).await;
    }

    async fn reached(&mut self, phase: Phase) {
        if self.phase.wait_for(|reached| *reached >= phase).await.is_err() {
            // Whoever could ask for an end is gone, so nobody ever will.
            std::future::pending::<()>().await;
        }
    }
}

/// Moves a [`Shutdown`] on.
#[derive(Debug)]
pub(crate) struct Trigger {
    phase: watch::Sender<Phase>,
}

impl Trigger {
    /// Starts in [`Phase::Running`].
    pub(crate) fn new() -> (Self, Shutdown) {
        let (sender, receiver) = watch::channel(Phase::Running);
        (Self { phase: sender }, Shutdown { phase: receiver })
    }

    /// Takes one request to end and returns the phase that it led to.
    pub(crate) fn advance(&self) -> Phase {
        let next = match *self.phase.borrow() {
            Phase::Running => Phase::Draining,
            Phase::Draining | Phase::Aborting => Phase::Aborting,
        };
        self.phase.send_replace(next);
        next
    }
}

/// Listens for signals from now on. The task runs as long as the runtime.
///
/// # Errors
///
/// The handlers could not be installed.
pub(crate) fn listen() -> Result<(Shutdown, JoinHandle<()>), Fault> {
    let install = |kind| signal(kind).map_err(|error| halt(START, "install the signal handlers").cause(error));
    let (mut terminate, mut interrupt) = (install(SignalKind::terminate())?, install(SignalKind::interrupt())?);
    let (trigger, shutdown) = Trigger::new();
    let task = tokio::spawn(async move {
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            match trigger.advance() {
                Phase::Draining => tracing::info!(signal = name, "draining; a second signal aborts"),
                Phase::Running | Phase::Aborting => tracing::warn!(signal = name, "aborting"),
            }
        }
    });
    Ok((shutdown, task))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn the_first_request_drains_and_the_second_aborts() {
        let (trigger, mut shutdown) = Trigger::new();
        assert!(timeout(SOON, shutdown.draining()).await.is_err());

        assert_eq!(trigger.advance(), Phase::Draining);
        shutdown.draining().await;
        assert!(timeout(SOON, shutdown.aborting()).await.is_err());

        assert_eq!(trigger.advance(), Phase::Aborting);
        shutdown.aborting().await;
        shutdown.draining().await;
        assert_eq!(trigger.advance(), Phase::Aborting);
    }

    #[tokio::test]
    async fn nobody_to_ask_for_an_end_is_no_end() {
        let (trigger, mut shutdown) = Trigger::new();
        drop(trigger);
        assert!(timeout(SOON, shutdown.draining()).await.is_err());
    }
}
