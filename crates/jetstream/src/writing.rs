//! Messages on their way to the connection, such that a cancelled wait neither loses nor doubles one.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_nats::client::PublishError;
use tokio::time::{Instant, timeout_at};

/// What is being handed to the connection.
#[derive(Default)]
pub(crate) struct Writing {
    /// Behind a lock that is never taken: a future can be moved to another thread, but not be looked at from two.
    future: Option<Mutex<Handing>>,
    since: Option<Instant>,
}

type Handing = Pin<Box<dyn Future<Output = Result<(), PublishError>> + Send>>;

/// Why it was not handed over.
#[derive(Debug)]
pub(crate) enum Stuck {
    /// The connection is gone.
    Lost(PublishError),
    /// The connection took no more within the time limit.
    Full,
}

impl Writing {
    /// Begins to hand messages over. What is still being handed over goes first.
    pub(crate) fn begin(&mut self, messages: impl Future<Output = Result<(), PublishError>> + Send + 'static) {
        let before = self.future.take().map(into_inner);
        self.since = Some(Instant::now());
        self.future = Some(Mutex::new(Box::pin(async move {
            if let Some(before) = before {
                before.await?;
            }
            messages.await
        })));
    }

    /// Waits until all is handed over.
    ///
    /// # Errors
    ///
    /// It could not be, or not within `limit` of its beginning.
    ///
    /// # Cancel safety
    ///
    /// A cancelled call goes on with the next one.
    pub(crate) async fn done(&mut self, limit: Duration) -> Result<(), Stuck> {
        let Some(future) = &mut self.future else { return Ok(()) };
        let future = future.get_mut().unwrap_or_else(PoisonError::into_inner);
        let until = self.since.unwrap_or_else(Instant::now) + limit;
        let result = timeout_at(until, future.as_mut()).await;
        self.future = None;
        match result {
            Ok(Ok(())) => Ok(()),
            Ok(Err(cause)) => Err(Stuck::Lost(cause)),
            Err(_) => Err(Stuck::Full),
        }
    }

    /// Returns whether nothing is being handed over.
    pub(crate) fn is_idle(&self) -> bool {
        self.future.is_none()
    }
}

fn into_inner(future: Mutex<Handing>) -> Handing {
    future.into_inner().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Writing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writing").field("idle", &self.is_idle()).finish()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
mod tests {
    use super::*;
    use tokio::sync::mpsc;

    fn send(
        sender: &mpsc::Sender<u32>,
        numbers: std::ops::Range<u32>,
    ) -> impl Future<Output = Result<(), PublishError>> + use<> {
        let sender = sender.clone();
        async move {
            for number in numbers {
                sender.send(number).await.unwrap();
            }
            Ok(())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_wait_loses_and_doubles_nothing() {
        let (sender, mut receiver) = mpsc::channel(2);
        let mut writing = Writing::default();
        writing.begin(send(&sender, 0..5));
        writing.begin(send(&sender, 5..9));
        let limit = Duration::from_secs(5);
        let mut seen = Vec::new();
        while !writing.is_idle() {
            let _ = tokio::time::timeout(Duration::ZERO, writing.done(limit)).await;
            seen.extend(receiver.try_recv());
        }
        while let Ok(number) = receiver.try_recv() {
            seen.push(number);
        }
        assert_eq!(seen, (0..9).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_limit_counts_from_the_beginning() {
        let (sender, _receiver) = mpsc::channel(2);
        let mut writing = Writing::default();
        writing.begin(send(&sender, 0..5));
        let limit = Duration::from_secs(5);
        for _ in 0..4 {
            assert!(tokio::time::timeout(Duration::from_secs(1), writing.done(limit)).await.is_err());
        }
        assert!(matches!(writing.done(limit).await, Err(Stuck::Full)));
        assert!(writing.is_idle());
    }
}
