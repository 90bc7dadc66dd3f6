//! The few lines of HTTP that asking a monitoring port takes.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result};

/// How long to wait for a server on this machine, at each step.
const LIMIT: Duration = Duration::from_secs(2);

/// The answer to a GET.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpResponse {
    /// The status code, such as 200.
    pub status: u16,
    /// The body as text.
    pub body: String,
}

/// Sends a GET to a port on loopback and reads the whole answer, which must not be chunked.
///
/// Blocks for a few seconds at most. HTTP/1.0 makes the server close the connection after the
/// body and keeps it from sending chunks.
///
/// # Errors
///
/// Nobody listens, the answer is late, or it is no HTTP.
pub fn http_get(port: u16, path: &str) -> Result<HttpResponse> {
    let what = || format!("GET http://127.0.0.1:{port}{path}");
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from(([127, 0, 0, 1], port)), LIMIT).with_context(what)?;
    stream.set_read_timeout(Some(LIMIT)).with_context(what)?;
    stream.set_write_timeout(Some(LIMIT)).with_context(what)?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n").with_context(what)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).with_context(what)?;
    parse(&String::from_utf8_lossy(&answer)).with_context(|| format!("read the answer to {}", what()))
}

fn parse(answer: &str) -> Option<HttpResponse> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.")?.get(2..5)?.parse().ok()?;
    Some(HttpResponse { status, body: body.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_and_body_are_read() {
        let expected = HttpResponse { status: 503, body: "{}\r\n".to_owned() };
        assert_eq!(parse("HTTP/1.0 503 Service Unavailable\r\nA: b\r\n\r\n{}\r\n"), Some(expected));
        assert_eq!(parse("SSH-2.0-x\r\n\r\n"), None);
    }
}
