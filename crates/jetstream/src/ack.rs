//! What comes back on a reply subject.
//!
//! ```text
//! <inbox>.<generation>.<token>                                     in chain, lanes and serial mode
//! <inbox>.<generation>.<batch id>.<flow>.fail.<n>.<op>.$FI         in fast mode
//! ```

use async_nats::{Message, StatusCode};
use serde::Deserialize;

use crate::api::Reason;

/// An answer to a published message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It is stored.
    Stored { sequence: u64, duplicate: bool },
    /// Another stream stored it.
    Elsewhere { stream: String },
    /// A batch is over, and so many of its messages are in. The sequence is that of the last one it stored, 0 for none.
    BatchOver { count: u64, sequence: u64, duplicate: bool },
    /// So many messages of a batch are in.
    BatchFlow { count: u64 },
    /// A message of a batch did not come in.
    BatchGap { expected: u64, found: u64 },
    /// The broker refused it.
    Error { err_code: u64, description: String },
    /// Nobody took it (status 503), or too much came in at once (429).
    Status(u16),
    /// Nothing that JetStream sends.
    Unknown,
}

/// Reads the token of a reply subject and the answer.
pub(crate) fn read(message: &Message, prefix: &str, stream: &str) -> (Option<u64>, Answer) {
    let token = message.subject.as_str().strip_prefix(prefix).and_then(|token| token.parse().ok());
    (token, answer(message, stream))
}

/// Reads the answer.
pub(crate) fn answer(message: &Message, stream: &str) -> Answer {
    match message.status {
        Some(status) if status == StatusCode::NO_RESPONDERS => Answer::Status(503),
        Some(status) if message.payload.is_empty() => Answer::Status(status.as_u16()),
        _ => parse(&message.payload, stream),
    }
}

/// Reads the answer's JSON.
fn parse(payload: &[u8], expected: &str) -> Answer {
    #[derive(Deserialize)]
    struct PubAck<'a> {
        #[serde(borrow, default, rename = "type")]
        kind: std::borrow::Cow<'a, str>,
        #[serde(borrow, default)]
        stream: std::borrow::Cow<'a, str>,
        #[serde(default)]
        seq: u64,
        #[serde(default)]
        last_seq: u64,
        #[serde(default)]
        duplicate: bool,
        /// The batch's size, where the answer is about the whole of one.
        count: Option<u64>,
        error: Option<Reason>,
    }
    let Ok(PubAck { kind, stream, seq, last_seq, duplicate, count, error }) = serde_json::from_slice(payload) else {
        return Answer::Unknown;
    };
    match (&*kind, error, count) {
        ("" | "err", Some(Reason { code, err_code: 0, .. }), _) if code == 503 || code == 429 => {
            Answer::Status(code as u16)
        }
        ("" | "err", Some(Reason { err_code, description, .. }), _) => Answer::Error { err_code, description },
        ("ack", None, _) => Answer::BatchFlow { count: seq },
        ("gap", None, _) => Answer::BatchGap { expected: last_seq, found: seq },
        ("", None, _) if stream != expected => Answer::Elsewhere { stream: stream.into_owned() },
        ("", None, Some(count)) => Answer::BatchOver { count, sequence: seq, duplicate },
        // A sequence of 0 is no proof of anything: old clusters answer so for an id that is only being stored.
        ("", None, None) if seq > 0 => Answer::Stored { sequence: seq, duplicate },
        _ => Answer::Unknown,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
mod tests {
    use super::*;

    fn message(subject: &str, payload: &'static str, status: Option<u16>) -> Message {
        Message {
            subject: subject.into(),
            reply: None,
            payload: payload.into(),
            headers: None,
            status: status.map(|status| StatusCode::try_from(status).unwrap()),
            description: None,
            length: 0,
        }
    }

    #[test]
    fn an_answer_is_read_with_its_token() {
        let table = [
            (r#"{"stream":"S","seq":7}"#, Answer::Stored { sequence: 7, duplicate: false }),
            (r#"{"stream":"S","seq":7,"duplicate":true}"#, Answer::Stored { sequence: 7, duplicate: true }),
            (r#"{"stream":"S","domain":"d","seq":7}"#, Answer::Stored { sequence: 7, duplicate: false }),
            (r#"{"stream":"T","seq":7}"#, Answer::Elsewhere { stream: "T".into() }),
            (r#"{"stream":"S","seq":0,"duplicate":true}"#, Answer::Unknown),
            (
                r#"{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 5"},"stream":"S","seq":0}"#,
                Answer::Error { err_code: 10071, description: "wrong last sequence: 5".into() },
            ),
            (r#"{"error":{"code":429,"description":"slow down"},"stream":"S","seq":0}"#, Answer::Status(429)),
            (r#"{"type":"ack","seq":500,"msgs":250}"#, Answer::BatchFlow { count: 500 }),
            (r#"{"type":"gap","last_seq":4,"seq":9}"#, Answer::BatchGap { expected: 4, found: 9 }),
            (
                r#"{"type":"err","seq":3,"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"}}"#,
                Answer::Error { err_code: 10077, description: "maximum messages exceeded".into() },
            ),
            (
                r#"{"stream":"S","seq":41,"batch":"b","count":12}"#,
                Answer::BatchOver { count: 12, sequence: 41, duplicate: false },
            ),
            (
                r#"{"stream":"S","seq":0,"batch":"b","count":12}"#,
                Answer::BatchOver { count: 12, sequence: 0, duplicate: false },
            ),
            (r#"{"stream":"T","seq":41,"batch":"b","count":12}"#, Answer::Elsewhere { stream: "T".into() }),
            (r#"{"type":"later","seq":7}"#, Answer::Unknown),
            (r#"{"stream":"S"}"#, Answer::Unknown),
            ("+OK", Answer::Unknown),
            ("", Answer::Unknown),
        ];
        for (payload, answer) in table {
            assert_eq!(read(&message("_INBOX.x.3.12", payload, None), "_INBOX.x.3.", "S"), (Some(12), answer));
        }
    }

    #[test]
    fn a_status_is_an_answer_too() {
        assert_eq!(read(&message("i.1.0", "", Some(503)), "i.1.", "S"), (Some(0), Answer::Status(503)));
        assert_eq!(read(&message("i.1.0", "", Some(429)), "i.1.", "S"), (Some(0), Answer::Status(429)));
    }

    #[test]
    fn a_token_of_another_generation_is_none() {
        for subject in ["i.2.0", "i.1.x", "i.1.", "j"] {
            assert_eq!(read(&message(subject, r#"{"stream":"S","seq":7}"#, None), "i.1.", "S").0, None, "{subject}");
        }
    }
}
