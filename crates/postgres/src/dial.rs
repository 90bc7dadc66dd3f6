//! From an address to an open session stream, for both connections alike.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pgwire_replication::protocol::framing::write_ssl_request;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use waljet_pipeline::{Action, Fault};

use crate::channel_binding::server_end_point;
use crate::connect::{ConnectOptions, Endpoint, SslMode};
use crate::error::{self, TLS, UNREACHABLE};
use crate::tls;

/// How long TLS and the start-up of a session may take; a server under load forks slowly.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The stream of a session.
#[derive(Debug)]
pub(crate) enum Stream {
    /// A TCP connection.
    Tcp(TcpStream),
    /// A unix socket.
    Unix(UnixStream),
    /// TLS on a TCP connection.
    Tls(Box<TlsStream<TcpStream>>),
}

/// Opens a stream to one address: socket, socket options, TLS.
pub(crate) async fn dial(options: &ConnectOptions, endpoint: &Endpoint) -> Result<Stream, Fault> {
    let limit = options.connect_timeout;
    let unreachable = || {
        Fault::new(UNREACHABLE, Action::Retry, format!("could not connect to {endpoint}"))
            .hint("verify that the server runs, its host and port, and the firewall in between")
    };
    let opened = timeout(limit, open(endpoint)).await;
    let stream = match opened {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(unreachable().cause(error)),
        Err(_) => return Err(unreachable().cause(format!("no answer within {} s", limit.as_secs_f32()))),
    };
    // A socket file stays on this machine; PostgreSQL has no TLS there, and libpq asks for none.
    let (tcp, host) = match (stream, endpoint) {
        (Stream::Tcp(tcp), Endpoint::Tcp { host, .. }) => (tcp, host),
        (stream, _) => return Ok(stream),
    };
    set_socket_options(&tcp, options).map_err(|error| unreachable().cause(error))?;
    if options.ssl_mode == SslMode::Disable {
        return Ok(Stream::Tcp(tcp));
    }
    timeout(HANDSHAKE_TIMEOUT, secure(options, host, tcp))
        .await
        .map_err(|_| error::timed_out("agree on TLS", HANDSHAKE_TIMEOUT))?
}

async fn open(endpoint: &Endpoint) -> io::Result<Stream> {
    match endpoint {
        Endpoint::Unix(path) => UnixStream::connect(path).await.map(Stream::Unix),
        Endpoint::Tcp { address: Some(address), port, .. } => {
            TcpStream::connect((*address, *port)).await.map(Stream::Tcp)
        }
        Endpoint::Tcp { host, port, .. } => {
            let mut last = None;
            for address in lookup_host((host.as_str(), *port)).await? {
                match TcpStream::connect(address).await {
                    Ok(stream) => return Ok(Stream::Tcp(stream)),
                    Err(error) => last = Some(error),
                }
            }
            Err(last.unwrap_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the name has no address")))
        }
    }
}

async fn secure(options: &ConnectOptions, host: &str, mut tcp: TcpStream) -> Result<Stream, Fault> {
    write_ssl_request(&mut tcp).await.map_err(|error| error::lost("ask for TLS", io::Error::other(error)))?;
    // One byte and no more: what follows it belongs to the TLS session, and nothing may be smuggled before.
    let answer = tcp.read_u8().await.map_err(|error| error::lost("ask for TLS", error))?;
    match (answer, options.ssl_mode) {
        (b'S', _) => Ok(Stream::Tls(Box::new(tls::handshake(options, host, tcp).await?))),
        (b'N', SslMode::Prefer) => Ok(Stream::Tcp(tcp)),
        (b'N', _) => Err(Fault::new(TLS, Action::Halt, format!("{host} does not offer TLS, and sslmode demands it"))
            .hint("set ssl = on on the server, or sslmode=prefer where the network is trusted")),
        _ => Err(error::protocol(format_args!("it answered {answer:#04x} to the request for TLS"))),
    }
}

#[cfg(unix)]
fn set_socket_options(tcp: &TcpStream, options: &ConnectOptions) -> io::Result<()> {
    use std::os::fd::AsRawFd;

    tcp.set_nodelay(true)?;
    let fd = tcp.as_raw_fd();
    let seconds = |duration: Duration| i32::try_from(duration.as_secs().max(1)).unwrap_or(i32::MAX);
    let config = options.config();
    if config.get_keepalives() {
        set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
        #[cfg(target_os = "linux")]
        {
            let interval = config.get_keepalives_interval().unwrap_or(Duration::from_secs(10));
            let retries = config.get_keepalives_retries().unwrap_or(3);
            set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, seconds(config.get_keepalives_idle()))?;
            set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, seconds(interval))?;
            set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, i32::try_from(retries).unwrap_or(i32::MAX))?;
        }
        #[cfg(not(target_os = "linux"))]
        let _ = seconds;
    }
    #[cfg(target_os = "linux")]
    if !options.tcp_user_timeout.is_zero() {
        let millis = i32::try_from(options.tcp_user_timeout.as_millis()).unwrap_or(i32::MAX);
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, millis)?;
    }
    Ok(())
}

#[cfg(unix)]
fn set_option(fd: std::os::fd::RawFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the pointer is to a local of the length that is given, and the kernel copies it.
    let result =
        unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), size_of_val(&value) as libc::socklen_t) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Stream {
    /// Returns the digest that binds a password proof to this TLS session.
    pub(crate) fn server_end_point(&self) -> Option<Vec<u8>> {
        let Self::Tls(stream) = self else { return None };
        stream.get_ref().1.peer_certificates()?.first().and_then(|certificate| server_end_point(certificate))
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
