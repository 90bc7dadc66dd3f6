//! Requests to the JetStream API, as plain JSON.
//!
//! async-nats parses replies into types that servers before 2.10 do not fill, so the few fields that matter are read
//! here, each with a default.

use std::time::Duration;

use async_nats::{Client, RequestErrorKind, Subscriber};
use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::watch;
use waljet_pipeline::{Action, Fault, IdDigest, Position, headers};

use crate::connect::{Connection, News};
use crate::{base64, error};

/// Longer than any answer that is an error.
const MAX_ERROR_ANSWER: usize = 4096;
/// Error codes that mean "there is no such message".
const NO_MESSAGE: [u64; 2] = [10037, 10043];

/// The API as one account sees it.
#[derive(Clone, Debug)]
pub(crate) struct Api {
    client: Client,
    news: Option<watch::Receiver<News>>,
    prefix: String,
    timeout: Duration,
}

/// A stream, as `STREAM.INFO` describes it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct StreamInfo {
    pub(crate) config: StreamConfig,
    #[serde(default)]
    pub(crate) created: String,
    pub(crate) state: StreamState,
    #[serde(default)]
    pub(crate) cluster: Option<ClusterInfo>,
}

/// The settings that matter to a publisher; durations in nanoseconds.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StreamConfig {
    pub(crate) subjects: Vec<String>,
    pub(crate) retention: String,
    pub(crate) storage: String,
    pub(crate) discard: String,
    pub(crate) discard_new_per_subject: bool,
    pub(crate) max_age: i64,
    pub(crate) max_bytes: i64,
    pub(crate) max_msgs: i64,
    pub(crate) max_msgs_per_subject: i64,
    pub(crate) max_msg_size: i64,
    pub(crate) num_replicas: usize,
    pub(crate) duplicate_window: i64,
    /// The sequence that the stream was created to begin with.
    pub(crate) first_seq: u64,
    pub(crate) sealed: bool,
    pub(crate) no_ack: bool,
    pub(crate) allow_rollup_hdrs: bool,
    pub(crate) allow_batched: bool,
    pub(crate) allow_atomic: bool,
    pub(crate) mirror: Option<Value>,
    pub(crate) sources: Option<Value>,
    pub(crate) subject_transform: Option<Value>,
    pub(crate) persist_mode: Option<String>,
}

/// What a stream holds.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StreamState {
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
    pub(crate) first_seq: u64,
    pub(crate) last_seq: u64,
    pub(crate) num_deleted: u64,
    pub(crate) consumer_count: u64,
}

/// Who stores a stream.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ClusterInfo {
    pub(crate) leader: Option<String>,
}

/// A message that a stream holds, as far as a publisher wants to know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stored {
    /// Its sequence.
    pub(crate) sequence: u64,
    /// The position it carries, where it is ours.
    pub(crate) position: Option<Position>,
    /// Whether it carries a position that cannot be read: it is of another version of the relay.
    pub(crate) unreadable: bool,
    /// Its id.
    pub(crate) id: Option<IdDigest>,
}

impl Stored {
    /// Takes what the headers say.
    pub(crate) fn new(sequence: u64, id: Option<IdDigest>, position: Option<&str>) -> Self {
        let parsed = position.and_then(|text| text.parse().ok());
        Self { sequence, position: parsed, unreadable: position.is_some() && parsed.is_none(), id }
    }
}

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum ApiError {
    /// The broker answered with an error.
    Broker { err_code: u64, description: String },
    /// Any other reason.
    Other(Fault),
}

impl ApiError {
    /// Makes the fault of having failed at `what` with `stream`.
    pub(crate) fn fault(self, what: &str, stream: &str) -> Fault {
        match self {
            Self::Broker { err_code: 10059, .. } => {
                Fault::new(error::STREAM_MISSING, Action::Retry, format!("{what}: there is no stream {stream:?}"))
                    .hint("waljet init")
            }
            Self::Broker { err_code, description } => error::broker_fault(err_code, &description, what, stream),
            Self::Other(mut fault) => {
                fault.message = format!("{what}: {}", fault.message);
                fault
            }
        }
    }
}

impl Api {
    /// Makes an API on a connection that a lane owns.
    pub(crate) fn new(connection: &Connection, prefix: String, timeout: Duration) -> Self {
        Self { client: connection.client.clone(), news: Some(connection.news.clone()), prefix, timeout }
    }

    /// Makes an API on a client that somebody else owns.
    pub(crate) fn on_client(client: &Client, prefix: String, timeout: Duration) -> Self {
        Self { client: client.clone(), news: None, prefix, timeout }
    }

    /// Reads what the stream's leader knows about it.
    pub(crate) async fn stream_info(&self, stream: &str) -> Result<StreamInfo, ApiError> {
        self.request(&format!("STREAM.INFO.{stream}"), Bytes::new()).await
    }

    /// Creates a stream.
    pub(crate) async fn create_stream(&self, stream: &str, settings: &Value) -> Result<(), ApiError> {
        let _: Value = self.request(&format!("STREAM.CREATE.{stream}"), settings.to_string().into()).await?;
        Ok(())
    }

    /// Returns the streams that take subjects of `filter`.
    pub(crate) async fn streams_on(&self, filter: &str) -> Result<Vec<String>, ApiError> {
        #[derive(Deserialize)]
        struct Names {
            #[serde(default)]
            streams: Option<Vec<String>>,
        }
        let names: Names = self.request("STREAM.NAMES", json!({ "subject": filter }).to_string().into()).await?;
        Ok(names.streams.unwrap_or_default())
    }

    /// Asks for the account, which fails where it has no JetStream.
    pub(crate) async fn account(&self) -> Result<(), ApiError> {
        let _: Value = self.request("INFO", Bytes::new()).await?;
        Ok(())
    }

    /// Reads one message, from the stream's leader.
    pub(crate) async fn message(&self, stream: &str, sequence: u64) -> Result<Option<Stored>, ApiError> {
        self.get(stream, json!({ "seq": sequence })).await
    }

    /// Reads the last message below `filter`, from the stream's leader.
    ///
    /// Never a direct get: any replica answers one, with whatever it has by then.
    pub(crate) async fn last_message(&self, stream: &str, filter: &str) -> Result<Option<Stored>, ApiError> {
        self.get(stream, json!({ "last_by_subj": filter })).await
    }

    /// Reads sequence and body of the last message on `subject`, from the stream's leader.
    pub(crate) async fn last_value(&self, stream: &str, subject: &str) -> Result<Option<(u64, Vec<u8>)>, ApiError> {
        let request = format!("STREAM.MSG.GET.{stream}");
        let query = json!({ "last_by_subj": subject }).to_string();
        let Some(Message { seq, data, .. }) = message(&self.request_raw(&request, query.into()).await?)? else {
            return Ok(None);
        };
        // An empty body is a deleted key, and must not be what cannot be read.
        let body = base64::decode(&data).ok_or_else(|| {
            let what = "the body of the message is not Base64";
            ApiError::Other(Fault::new(error::UNEXPECTED_ANSWER, Action::Retry, what))
        })?;
        Ok(Some((seq, body)))
    }

    /// Reads the first message below `filter` at or behind a sequence, from the stream's leader.
    pub(crate) async fn next_message(
        &self,
        stream: &str,
        filter: &str,
        sequence: u64,
    ) -> Result<Option<Stored>, ApiError> {
        self.get(stream, json!({ "seq": sequence, "next_by_subj": filter })).await
    }

    /// Reads which sequences between the stream's first and last were removed.
    pub(crate) async fn removed(&self, stream: &str) -> Result<Vec<u64>, ApiError> {
        #[derive(Deserialize)]
        struct Info {
            state: State,
        }
        #[derive(Deserialize)]
        struct State {
            #[serde(default)]
            deleted: Option<Vec<u64>>,
        }
        let body = json!({ "deleted_details": true }).to_string();
        let info: Info = self.request(&format!("STREAM.INFO.{stream}"), body.into()).await?;
        Ok(info.state.deleted.unwrap_or_default())
    }

    /// Creates a consumer that goes by itself when nobody asks it, and returns its name and how many messages it has.
    pub(crate) async fn create_consumer(&self, stream: &str, config: &Value) -> Result<(String, u64), ApiError> {
        #[derive(Deserialize)]
        struct Created {
            name: String,
            #[serde(default)]
            num_pending: u64,
        }
        let body = json!({ "stream_name": stream, "config": config });
        let created: Created = self.request(&format!("CONSUMER.CREATE.{stream}"), body.to_string().into()).await?;
        Ok((created.name, created.num_pending))
    }

    /// Deletes a consumer.
    pub(crate) async fn delete_consumer(&self, stream: &str, consumer: &str) -> Result<(), ApiError> {
        let _: Value = self.request(&format!("CONSUMER.DELETE.{stream}.{consumer}"), Bytes::new()).await?;
        Ok(())
    }

    /// Asks a consumer for its next messages; what comes back ends with a status where there are fewer.
    pub(crate) async fn next_messages(
        &self,
        stream: &str,
        consumer: &str,
        batch: usize,
        expires: Duration,
    ) -> Result<Subscriber, Fault> {
        let lost = |error: Box<dyn std::error::Error + Send + Sync>| {
            Fault::new(error::DISCONNECTED, Action::Retry, "ask for the messages of the stream").cause(error)
        };
        let inbox = self.client.new_inbox();
        let answers = self.client.subscribe(inbox.clone()).await.map_err(|error| lost(error.into()))?;
        let subject = format!("{}.CONSUMER.MSG.NEXT.{stream}.{consumer}", self.prefix);
        let body = json!({ "batch": batch, "expires": u64::try_from(expires.as_nanos()).unwrap_or(u64::MAX) });
        let asked = self.client.publish_with_reply(subject, inbox, body.to_string().into()).await;
        asked.map_err(|error| lost(error.into()))?;
        Ok(answers)
    }

    async fn get(&self, stream: &str, query: Value) -> Result<Option<Stored>, ApiError> {
        let subject = format!("STREAM.MSG.GET.{stream}");
        stored(&self.request_raw(&subject, query.to_string().into()).await?)
    }

    async fn request<T: DeserializeOwned>(&self, subject: &str, body: Bytes) -> Result<T, ApiError> {
        parse(&self.request_raw(subject, body).await?)
    }

    /// Sends a request and waits for the answer, the time limit, or the server's word that the user may not ask.
    async fn request_raw(&self, subject: &str, body: Bytes) -> Result<Bytes, ApiError> {
        let subject = format!("{}.{subject}", self.prefix);
        let answer = tokio::time::timeout(self.timeout, self.client.request(subject.clone(), body));
        let refused = refused(self.news.clone(), &subject);
        let result = tokio::select! {
            biased;
            // An answer that came is worth more than what was refused.
            result = answer => result,
            fault = refused => return Err(ApiError::Other(fault)),
        };
        let fault = match result {
            Ok(Ok(message)) => return Ok(message.payload),
            Ok(Err(error)) => match error.kind() {
                RequestErrorKind::NoResponders => {
                    let fault =
                        Fault::new(error::JETSTREAM_UNAVAILABLE, Action::Retry, "nobody answers JetStream requests");
                    fault.hint(error::remedy(error::JETSTREAM_UNAVAILABLE, "").unwrap_or_default())
                }
                RequestErrorKind::TimedOut => silent(&subject, self.timeout),
                RequestErrorKind::InvalidSubject | RequestErrorKind::MaxPayloadExceeded | RequestErrorKind::Other => {
                    Fault::new(error::DISCONNECTED, Action::Retry, format!("send a request to {subject:?}"))
                        .cause(error)
                }
            },
            Err(_) => silent(&subject, self.timeout),
        };
        Err(ApiError::Other(fault))
    }
}

/// Reads an answer to `STREAM.MSG.GET` for what a publisher wants to know.
pub(crate) fn stored(answer: &[u8]) -> Result<Option<Stored>, ApiError> {
    let Some(Message { seq, hdrs, .. }) = message(answer)? else { return Ok(None) };
    let block = hdrs.and_then(|text| base64::decode(&text)).unwrap_or_default();
    let id = header(&block, headers::MSG_ID).map(IdDigest::of);
    Ok(Some(Stored::new(seq, id, header(&block, headers::POSITION))))
}

/// A message in an answer to `STREAM.MSG.GET`; what it holds is in Base64.
#[derive(Debug, Deserialize)]
struct Message {
    seq: u64,
    #[serde(default)]
    hdrs: Option<String>,
    #[serde(default)]
    data: String,
}

/// Reads an answer to `STREAM.MSG.GET`; `None` where there is no such message.
fn message(answer: &[u8]) -> Result<Option<Message>, ApiError> {
    #[derive(Deserialize)]
    struct Reply {
        message: Message,
    }
    match parse::<Reply>(answer) {
        Ok(Reply { message }) => Ok(Some(message)),
        Err(ApiError::Broker { err_code, .. }) if NO_MESSAGE.contains(&err_code) => Ok(None),
        // 2.9 answers a deleted sequence with a 404 of the store's own words.
        Err(ApiError::Broker { err_code: _, description })
            if description.contains("message") && description.contains("not found") =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Waits for the server to refuse `subject`, or the replies, to this user; or for the connection to be lost.
async fn refused(news: Option<watch::Receiver<News>>, subject: &str) -> Fault {
    let Some(mut news) = news else { return std::future::pending().await };
    loop {
        {
            let now = news.borrow_and_update();
            if now.lost {
                return Fault::new(error::DISCONNECTED, Action::Retry, "the connection to the server was lost");
            }
            match &now.violation {
                Some(violation) if violation.permission == "subscribe" => {
                    return violation.fault(&inbox_filter(&violation.subject));
                }
                Some(violation) if violation.subject == subject => return violation.fault(subject),
                _ => {}
            }
        }
        if news.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Returns what a user must be allowed to subscribe to, given one inbox of many.
pub(crate) fn inbox_filter(inbox: &str) -> String {
    match inbox.split_once('.') {
        Some((prefix, _)) => format!("{prefix}.>"),
        None => inbox.to_owned(),
    }
}

/// The fault of a request without an answer.
fn silent(subject: &str, limit: Duration) -> Fault {
    Fault::new(error::TIMEOUT, Action::Retry, format!("no answer on {subject:?} within {limit:?}"))
        .hint("check that the server runs, and that the user may publish to the subject and subscribe to the inbox")
}

/// The error in an answer.
#[derive(Debug, Deserialize)]
pub(crate) struct Reason {
    /// The class of the error, as in HTTP.
    #[serde(default)]
    pub(crate) code: u64,
    /// Which error it is.
    #[serde(default)]
    pub(crate) err_code: u64,
    /// In words.
    #[serde(default)]
    pub(crate) description: String,
}

/// Reads an answer, or the error that it holds.
fn parse<T: DeserializeOwned>(answer: &[u8]) -> Result<T, ApiError> {
    #[derive(Deserialize)]
    struct Failed {
        error: Reason,
    }
    // An error is short, and all that an answer with one holds; a message may be large and is read once.
    if answer.len() < MAX_ERROR_ANSWER
        && let Ok(Failed { error }) = serde_json::from_slice(answer)
    {
        let err_code = if error.err_code == 0 { error.code } else { error.err_code };
        return Err(ApiError::Broker { err_code, description: error.description });
    }
    serde_json::from_slice(answer).map_err(|cause| {
        let fault = Fault::new(error::UNEXPECTED_ANSWER, Action::Retry, "the answer is not what JetStream sends");
        ApiError::Other(fault.cause(cause))
    })
}

/// Finds a header's value in a header block as NATS encodes it.
fn header<'a>(block: &'a [u8], name: &str) -> Option<&'a str> {
    let text = std::str::from_utf8(block).ok()?;
    text.split("\r\n").skip(1).find_map(|line| {
        let (found, value) = line.split_once(':')?;
        (found == name).then(|| value.trim())
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test may stop at the first surprise")]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_found_by_its_exact_name() {
        let block = b"NATS/1.0\r\nNats-Msg-Id: 7\r\nWaljet-Position: 1:1:0/5:2\r\n\r\n";
        assert_eq!(header(block, headers::POSITION), Some("1:1:0/5:2"));
        assert_eq!(header(block, "waljet-position"), None);
        assert_eq!(header(&[0xff, 0xfe], headers::POSITION), None);
        assert_eq!(header(b"", headers::POSITION), None);
    }

    #[test]
    fn an_error_answer_is_told_from_a_reply() {
        let answer = br#"{"type":"x","error":{"code":404,"err_code":10059,"description":"stream not found"}}"#;
        match parse::<StreamInfo>(answer) {
            Err(ApiError::Broker { err_code: 10059, description }) => assert_eq!(description, "stream not found"),
            other => panic!("{other:?}"),
        }
        assert!(matches!(parse::<Value>(answer), Err(ApiError::Broker { err_code: 10059, .. })));
        assert!(matches!(parse::<StreamInfo>(b"{}"), Err(ApiError::Other(_))));
    }

    #[test]
    fn an_answer_of_an_old_server_is_read() {
        let answer = br#"{"config":{"name":"S","subjects":["a.>"],"retention":"limits","num_replicas":1,
            "max_consumers":-1,"duplicate_window":120000000000},"created":"2026-01-01T00:00:00Z","state":{"last_seq":7}}"#;
        let info: StreamInfo = parse(answer).unwrap();
        assert_eq!((info.state.last_seq, info.config.subjects.len()), (7, 1));
        assert!(info.cluster.is_none() && !info.config.sealed);
    }
}
