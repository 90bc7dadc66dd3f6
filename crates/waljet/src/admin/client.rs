//! Asks the admin endpoint of a running relay.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// How long the whole may take: the relay is on this machine and answers from memory.
const TIMEOUT: Duration = Duration::from_secs(3);

/// A status is a few kilobytes; whatever is longer is something else.
const MAX_ANSWER: u64 = 1 << 20;

/// Asks the relay that listens on `listen` for its status.
///
/// # Errors
///
/// Nobody answers, or whoever does is not a relay.
pub(crate) async fn status(listen: &str) -> io::Result<Value> {
    let timed_out = || io::Error::new(io::ErrorKind::TimedOut, "no answer within 3 s");
    let answer = tokio::time::timeout(TIMEOUT, get(listen, "/status")).await.map_err(|_| timed_out())??;
    let value: Value = serde_json::from_str(&answer).map_err(|_| not_a_relay())?;
    if value["ready"].is_boolean() { Ok(value) } else { Err(not_a_relay()) }
}

/// Returns the body of a 200 answer. HTTP/1.0, so that it comes in one piece and ends with the connection.
async fn get(listen: &str, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(reachable(listen)).await?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: {listen}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer).await?;
    let answer = String::from_utf8(answer).map_err(|_| not_a_relay())?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(not_a_relay)?;
    let code = head.split(' ').nth(1);
    if head.starts_with("HTTP/1.") && code == Some("200") { Ok(body.to_owned()) } else { Err(not_a_relay()) }
}

/// Returns an address at which something that listens on all addresses can be reached.
fn reachable(listen: &str) -> String {
    match listen.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_unspecified() => {
            let ip = if address.is_ipv4() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { IpAddr::V6(Ipv6Addr::LOCALHOST) };
            SocketAddr::new(ip, address.port()).to_string()
        }
        _ => listen.to_owned(),
    }
}

/// Whoever listens there is something else.
fn not_a_relay() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the answer is not that of a relay")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    async fn answered(answer: &'static str) -> io::Result<Value> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 1024]).await.unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
        });
        let status = status(&address.to_string()).await;
        server.await.unwrap();
        status
    }

    #[tokio::test]
    async fn a_relay_is_known_by_its_answer() {
        let status = answered("HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{\"ready\":false}").await;
        assert_eq!(status.unwrap()["ready"], Value::Bool(false));
        for other in ["HTTP/1.1 404 Not Found\r\n\r\n{\"ready\":true}", "HTTP/1.1 200 OK\r\n\r\n<html>", "hello", ""] {
            assert!(answered(other).await.is_err(), "{other}");
        }
    }

    #[tokio::test]
    async fn nobody_there_is_an_error() {
        assert!(status("127.0.0.1:1").await.is_err());
    }

    #[test]
    fn an_address_that_means_all_is_reached_on_this_machine() {
        assert_eq!(reachable("0.0.0.0:9464"), "127.0.0.1:9464");
        assert_eq!(reachable("[::]:9464"), "[::1]:9464");
        assert_eq!(reachable("10.0.0.1:9464"), "10.0.0.1:9464");
        assert_eq!(reachable("localhost:9464"), "localhost:9464");
    }
}
