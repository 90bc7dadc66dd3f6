//! Connections that cannot pile up: a few at once, each for a few seconds.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

/// Connections at once: probes, a scraper or two and some people. More wait in the kernel's backlog.
const MAX_CONNECTIONS: usize = 64;

/// How long a connection lives: each is for one request, whose answer is made at once.
pub(super) const LIFETIME: Duration = Duration::from_secs(10);

/// The pause after a failed accept, usually for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// Accepts connections within the limits.
pub(super) struct LimitedListener {
    listener: TcpListener,
    permits: Arc<Semaphore>,
    lifetime: Duration,
}

impl LimitedListener {
    /// Limits what `listener` accepts to connections that live for `lifetime`.
    pub(super) fn new(listener: TcpListener, lifetime: Duration) -> Self {
        Self { listener, permits: Arc::new(Semaphore::new(MAX_CONNECTIONS)), lifetime }
    }
}

impl Listener for LimitedListener {
    type Io = LimitedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let Ok(permit) = Arc::clone(&self.permits).acquire_owned().await else {
                // Nobody closes the semaphore.
                std::future::pending::<()>().await;
                continue;
            };
            match self.listener.accept().await {
                Ok((stream, address)) => return (LimitedStream::new(stream, permit, self.lifetime), address),
                Err(error) => {
                    tracing::debug!(%error, "a connection to the admin endpoint was not accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection that fails once its time is over, whatever it waits for.
pub(super) struct LimitedStream {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl LimitedStream {
    fn new(stream: TcpStream, permit: OwnedSemaphorePermit, lifetime: Duration) -> Self {
        Self { stream, end: Box::pin(tokio::time::sleep(lifetime)), _permit: permit }
    }

    /// Passes on what the socket says, or the end of the time.
    fn within_time<T>(&mut self, cx: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_pending() && self.end.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::Error::from(io::ErrorKind::TimedOut)));
        }
        polled
    }
}

impl AsyncRead for LimitedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.within_time(cx, polled)
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.within_time(cx, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        self.within_time(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn a_connection_that_says_nothing_ends_and_frees_its_place() {
        let mut listener =
            LimitedListener::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), Duration::from_millis(20));
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut stream, _) = listener.accept().await;
        assert_eq!(listener.permits.available_permits(), MAX_CONNECTIONS - 1);

        let error = stream.read(&mut [0; 1]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(stream);
        assert_eq!(listener.permits.available_permits(), MAX_CONNECTIONS);
    }
}
