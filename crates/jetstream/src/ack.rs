//! What comes back on the reply subject: `<inbox>.<generation>.<token>`.

use async_nats::{Message, StatusCode};
use serde::Deserialize;

/// An answer to a published message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It is stored.
    Stored { sequence: u64, duplicate: bool },
    /// Another stream stored it.
    Elsewhere { stream: String },
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
    let answer = match message.status {
        Some(status) if status == StatusCode::NO_RESPONDERS => Answer::Status(503),
        Some(status) if message.payload.is_empty() => Answer::Status(status.as_u16()),
        _ => parse(&message.payload, stream),
    };
    (token, answer)
}

/// Reads the answer's JSON.
fn parse(payload: &[u8], expected: &str) -> Answer {
    #[derive(Deserialize)]
    struct PubAck<'a> {
        #[serde(borrow, default)]
        stream: std::borrow::Cow<'a, str>,
        #[serde(default)]
        seq: u64,
        #[serde(default)]
        duplicate: bool,
        error: Option<Reason>,
    }
    #[derive(Deserialize)]
    struct Reason {
        #[serde(default)]
        code: u64,
        #[serde(default)]
        err_code: u64,
        #[serde(default)]
        description: String,
    }
    match serde_json::from_slice::<PubAck<'_>>(payload) {
        Ok(PubAck { error: Some(Reason { code, err_code, description }), .. }) => {
            if err_code == 0 && (code == 503 || code == 429) {
                return Answer::Status(code as u16);
            }
            Answer::Error { err_code, description }
        }
        // A sequence of 0 is no proof of anything: old clusters answer so for an id that is only being stored.
        Ok(PubAck { seq: 0, .. }) => Answer::Unknown,
        Ok(PubAck { stream, seq, duplicate, error: None }) => {
            if stream == expected {
                Answer::Stored { sequence: seq, duplicate }
            } else {
                Answer::Elsewhere { stream: stream.into_owned() }
            }
        }
        Err(_) => Answer::Unknown,
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
