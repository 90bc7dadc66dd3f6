//! The admin endpoint: `/livez`, `/readyz`, `/status` and `/metrics` over HTTP, to read only.

pub(crate) mod client;
mod listener;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus::{Encoder, Registry, TextEncoder};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use waljet_pipeline::Fault;

use crate::error::{ADMIN_LISTEN, halt};
use listener::{LIFETIME, LimitedListener};

/// What the endpoint tells, taken anew for each request; taking it sets the gauges.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    /// Why the process should be restarted, where it should.
    pub(crate) dead: Option<String>,
    /// Why nothing moves, where nothing does.
    pub(crate) not_ready: Option<String>,
    /// The whole state.
    pub(crate) status: Value,
}

/// Where snapshots come from.
pub(crate) type SnapshotSource = Arc<dyn Fn() -> Snapshot + Send + Sync>;

/// The endpoint, bound but not yet answering.
pub(crate) struct Admin {
    listener: TcpListener,
    address: SocketAddr,
}

impl Admin {
    /// Binds `listen`, an address or a name with a port.
    ///
    /// # Errors
    ///
    /// The address is taken, or not one of this machine.
    pub(crate) async fn bind(listen: &str) -> Result<Self, Fault> {
        let fault = |error| {
            halt(ADMIN_LISTEN, format!("listen on {listen} for the admin endpoint"))
                .cause(error)
                .hint("set admin.listen to a free address of this machine, or to \"off\"")
        };
        let listener = TcpListener::bind(listen).await.map_err(fault)?;
        let address = listener.local_addr().map_err(fault)?;
        Ok(Self { listener, address })
    }

    /// Returns the address that is bound.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `end` resolves.
    ///
    /// # Errors
    ///
    /// The listener failed.
    pub(crate) async fn serve(
        self,
        source: SnapshotSource,
        registry: Registry,
        end: impl Future<Output = ()> + Send + 'static,
    ) -> std::io::Result<()> {
        let router = router(source, registry);
        axum::serve(LimitedListener::new(self.listener, LIFETIME), router).with_graceful_shutdown(end).await
    }
}

/// What the handlers need.
#[derive(Clone)]
struct Answers {
    source: SnapshotSource,
    registry: Registry,
}

/// Routes the four paths; no handler reads a body.
fn router(source: SnapshotSource, registry: Registry) -> Router {
    Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/status", get(status))
        .route("/metrics", get(metrics))
        .with_state(Answers { source, registry })
}

/// Says whether the one task still turns; where it does not, only a restart helps.
async fn livez(State(answers): State<Answers>, headers: HeaderMap) -> Response {
    health(&headers, "live", (answers.source)().dead.as_deref())
}

/// Says whether events flow, or why not.
async fn readyz(State(answers): State<Answers>, headers: HeaderMap) -> Response {
    health(&headers, "ready", (answers.source)().not_ready.as_deref())
}

/// Answers 200 with `word`, or 503 with the reason.
fn health(headers: &HeaderMap, word: &str, reason: Option<&str>) -> Response {
    let code = if reason.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    if accepts.is_some_and(|accepts| accepts.contains("application/json")) {
        let body = json!({ word: reason.is_none(), "reason": reason });
        return answer(code, "application/json", body.to_string());
    }
    answer(code, "text/plain; charset=utf-8", format!("{}\n", reason.unwrap_or(word)))
}

/// Tells the whole state.
async fn status(State(answers): State<Answers>) -> Response {
    answer(StatusCode::OK, "application/json", format!("{:#}\n", (answers.source)().status))
}

/// Tells the metrics in Prometheus' text format.
async fn metrics(State(answers): State<Answers>) -> Response {
    // Gauges are set as the snapshot is taken, so that they cannot disagree with it.
    (answers.source)();
    let mut body = Vec::new();
    match TextEncoder::new().encode(&answers.registry.gather(), &mut body) {
        Ok(()) => answer(StatusCode::OK, prometheus::TEXT_FORMAT, body),
        Err(error) => {
            tracing::warn!(%error, "metrics could not be written");
            answer(StatusCode::INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", format!("{error}\n"))
        }
    }
}

/// Makes a response that is not stored by anyone and is the last of its connection: the next request gets
/// a new connection, so that none stays open for longer than the listener allows.
fn answer(code: StatusCode, content_type: &'static str, body: impl Into<axum::body::Body>) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (header::CONNECTION, HeaderValue::from_static("close")),
    ];
    (code, headers, body.into()).into_response()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use prometheus::IntCounter;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::sync::oneshot;

    use super::*;

    /// Serves a snapshot and returns the address; ends when the sender is dropped.
    async fn serve(snapshot: Snapshot) -> (SocketAddr, oneshot::Sender<()>) {
        let registry = Registry::new();
        let counter = IntCounter::new("waljet_test_total", "Counts tests.").unwrap();
        registry.register(Box::new(counter.clone())).unwrap();
        counter.inc();
        let admin = Admin::bind("127.0.0.1:0").await.unwrap();
        let address = admin.address();
        let (sender, receiver) = oneshot::channel::<()>();
        let end = async move { drop(receiver.await) };
        tokio::spawn(admin.serve(Arc::new(move || snapshot.clone()), registry, end));
        (address, sender)
    }

    async fn request(address: SocketAddr, text: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn get(address: SocketAddr, path: &str, headers: &str) -> String {
        request(address, &format!("GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n")).await
    }

    fn snapshot(reason: Option<&str>) -> Snapshot {
        Snapshot { dead: None, not_ready: reason.map(str::to_owned), status: json!({ "mode": "chain" }) }
    }

    #[tokio::test]
    async fn a_moving_relay_is_live_and_ready() {
        let (address, _end) = serve(snapshot(None)).await;
        let answer = get(address, "/readyz", "").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nready\n"), "{answer}");
        assert!(get(address, "/livez", "").await.ends_with("\r\n\r\nlive\n"));
        let answer = get(address, "/readyz", "Accept: application/json\r\n").await;
        assert!(answer.ends_with("{\"ready\":true,\"reason\":null}"), "{answer}");
    }

    #[tokio::test]
    async fn a_relay_that_stands_still_says_why() {
        let (address, _end) = serve(snapshot(Some("waiting for slot \"waljet\""))).await;
        let answer = get(address, "/readyz", "").await;
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        assert!(answer.ends_with("waiting for slot \"waljet\"\n"), "{answer}");
        let answer = get(address, "/readyz", "Accept: application/json\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("\"ready\":false"), "{answer}");
        assert!(get(address, "/livez", "").await.starts_with("HTTP/1.1 200 "));
    }

    #[tokio::test]
    async fn status_is_json_and_metrics_are_prometheus_text() {
        let (address, _end) = serve(snapshot(None)).await;
        let answer = get(address, "/status", "").await;
        assert!(
            answer.contains("content-type: application/json") && answer.contains("\"mode\": \"chain\""),
            "{answer}"
        );
        let answer = get(address, "/metrics", "").await;
        assert!(answer.contains("content-type: text/plain; version=0.0.4"), "{answer}");
        assert!(answer.contains("\nwaljet_test_total 1\n"), "{answer}");
    }

    #[tokio::test]
    async fn nothing_else_is_answered() {
        let (address, _end) = serve(snapshot(None)).await;
        assert!(
            request(address, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                .await
                .starts_with("HTTP/1.1 404 ")
        );
        let post = "POST /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx";
        assert!(request(address, post).await.starts_with("HTTP/1.1 405 "));
    }

    #[tokio::test]
    async fn an_address_that_is_taken_is_named_with_the_key_that_changes_it() {
        let (address, _end) = serve(snapshot(None)).await;
        let fault = Admin::bind(&address.to_string()).await.err().unwrap();
        assert_eq!(fault.code, ADMIN_LISTEN);
        assert!(fault.message.contains(&address.to_string()));
        assert!(fault.hint.is_some_and(|hint| hint.contains("admin.listen")));
    }
}
