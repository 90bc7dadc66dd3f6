//! An event as it goes over the wire: headers, and the limits that it must keep.
//!
//! ```text
//! HPUB <subject> <reply> <header bytes> <total bytes>\r\n      the control line, below 4,096 bytes
//! NATS/1.0\r\n
//! Nats-Msg-Id: <event id>\r\n
//! Nats-Expected-Last-Sequence: <n>\r\n                         in chain mode, in fast and in atomic
//! Waljet-Position: <position>\r\n  ...                         of the message
//! \r\n
//! <payload>\r\n
//! ```

use std::str::FromStr;

use async_nats::{HeaderMap, HeaderName, HeaderValue};
use waljet_pipeline::{Action, Code, Fault, OutboundMessage};

use crate::limits::Limits;
use crate::{atomic, error};

/// What JetStream takes as headers of one message.
const MAX_HEADERS: usize = 65_535;
/// The header that makes the broker refuse a message where the stream does not stand at this sequence.
const EXPECTED_LAST: &str = "Nats-Expected-Last-Sequence";
/// What the server takes as one protocol line; a longer one costs the connection.
const MAX_CONTROL_LINE: usize = 4096;

/// The stream's last sequence as a message names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpectedLast {
    /// Not at all.
    Not,
    /// This one.
    Sequence(u64),
    /// Perhaps later, by [`expect`]; there has to be room for it.
    Later,
    /// As [`Later`](Self::Later), and with room for what makes a message one of an atomic batch.
    Batched,
}

/// Lets headers that were built with [`ExpectedLast::Later`] name the stream's last sequence.
pub(crate) fn expect(headers: &mut HeaderMap, last_sequence: u64) {
    headers.insert(async_nats::header::NATS_EXPECTED_LAST_SEQUENCE, HeaderValue::from(last_sequence));
}

/// Builds the headers of `message`, or says why it can never be sent.
pub(crate) fn headers(
    message: &OutboundMessage,
    expected_last: ExpectedLast,
    reply_len: usize,
    limits: Limits,
) -> Result<HeaderMap, Fault> {
    let mut map = HeaderMap::new();
    let mut size = "NATS/1.0\r\n\r\n".len();
    let mut add = |name: HeaderName, len: usize, value: &str| {
        size += len + value.len() + ": \r\n".len();
        // Refuses line breaks, which would end the header.
        let value = HeaderValue::from_str(value).map_err(|_| invalid("a header value has a line break"))?;
        map.append(name, value);
        Ok::<(), Fault>(())
    };
    add(async_nats::header::NATS_MESSAGE_ID, "Nats-Msg-Id".len(), &message.id)?;
    if let ExpectedLast::Sequence(sequence) = expected_last {
        let name = async_nats::header::NATS_EXPECTED_LAST_SEQUENCE;
        add(name, EXPECTED_LAST.len(), &sequence.to_string())?;
    }
    for (name, value) in &message.headers {
        // It is the sink's to set, from the id.
        if *name == "Nats-Msg-Id" {
            continue;
        }
        check_name(name)?;
        add(HeaderName::from_static(name), name.len(), value)?;
    }
    for (name, value) in &message.row_headers {
        check_name(name)?;
        let parsed =
            HeaderName::from_str(name).map_err(|_| invalid("a header name has a character that is not allowed"))?;
        add(parsed, name.len(), value)?;
    }
    if matches!(expected_last, ExpectedLast::Later | ExpectedLast::Batched) {
        size += EXPECTED_LAST.len() + ": \r\n".len() + u64::MAX.to_string().len();
    }
    if expected_last == ExpectedLast::Batched {
        size += atomic::ADDED;
    }
    if message.id.is_empty() {
        return Err(invalid("the event has no id, and the broker would not recognise a copy of it"));
    }
    check_size(message, size, reply_len, limits)?;
    Ok(map)
}

/// Compares the sizes with the limits.
fn check_size(message: &OutboundMessage, headers: usize, reply_len: usize, limits: Limits) -> Result<(), Fault> {
    let total = headers + message.payload.len();
    let digits = |n: usize| n.checked_ilog10().unwrap_or(0) as usize + 1;
    let line = "HPUB    \r\n".len() + message.subject.as_str().len() + reply_len + digits(headers) + digits(total);
    if line > MAX_CONTROL_LINE {
        return Err(too_large(
            error::SUBJECT_TOO_LONG,
            "subject and reply subject",
            line,
            "protocol line",
            MAX_CONTROL_LINE,
        ));
    }
    if headers > MAX_HEADERS {
        return Err(too_large(error::HEADERS_TOO_LARGE, "the headers", headers, "JetStream limit", MAX_HEADERS)
            .hint("write fewer or shorter headers"));
    }
    if total > limits.max_payload {
        let fault = too_large(
            error::MESSAGE_TOO_LARGE,
            "headers and payload",
            total,
            "server's max_payload",
            limits.max_payload,
        );
        return Err(fault.hint("raise max_payload in the server's configuration, or write smaller events"));
    }
    match limits.max_msg_size {
        Some(limit) if total > limit => {
            let fault =
                too_large(error::MESSAGE_TOO_LARGE, "headers and payload", total, "stream's max_msg_size", limit);
            Err(fault.hint("nats stream edit STREAM --max-msg-size=SIZE, or write smaller events"))
        }
        _ => Ok(()),
    }
}

/// Finds a name that the wire or the broker takes for something else.
fn check_name(name: &str) -> Result<(), Fault> {
    if name.is_empty() {
        return Err(invalid("a header has an empty name"));
    }
    if !name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':') {
        return Err(invalid("a header name has a character that is not allowed"));
    }
    // A time to live is the only one of the broker's own headers that a relay may be asked to set.
    if name.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("nats-")) && name != "Nats-TTL" {
        return Err(invalid("a header has a name that NATS keeps for itself"));
    }
    Ok(())
}

/// The fault of a header.
fn invalid(why: &str) -> Fault {
    Fault::new(error::HEADER_INVALID, Action::Refuse, why)
        .hint("correct what writes the row; past this row: stop the relay, publish it by hand if it is needed, then waljet slot advance")
}

/// The fault of a size.
fn too_large(code: Code, what: &str, size: usize, limit_of: &str, limit: usize) -> Fault {
    Fault::new(code, Action::Refuse, format!("{what} have {size} bytes, the {limit_of} is {limit}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
mod tests {
    use super::*;
    use bytes::Bytes;
    use waljet_pgoutput::Timestamp;
    use waljet_pipeline::{OrderingKey, Subject};

    const ROOMY: Limits = Limits { max_payload: 1 << 20, max_msg_size: None };

    fn message(payload: usize) -> OutboundMessage {
        OutboundMessage {
            position: "1:1:0/10:0".parse().unwrap(),
            commit_time: Timestamp::default(),
            key: OrderingKey::of("order", "1"),
            id: "id-1".into(),
            subject: Subject::new("outbox.order.created".into()).unwrap(),
            headers: vec![("Waljet-Position", "1:1:0/10:0".into())],
            row_headers: vec![("traceparent".into(), "00-1".into())],
            payload: Bytes::from(vec![b'x'; payload]),
        }
    }

    fn code(message: &OutboundMessage, limits: Limits) -> Option<Code> {
        headers(message, ExpectedLast::Sequence(41), 40, limits).err().map(|fault| {
            assert_eq!(fault.action, Action::Refuse);
            fault.code
        })
    }

    /// Bytes of the header block of `message(_)` in chain mode, counted by hand.
    const BLOCK: usize = 12 + (11 + 4 + 4) + (27 + 2 + 4) + (15 + 10 + 4) + (11 + 4 + 4);

    #[test]
    fn id_and_expected_sequence_stand_beside_the_events_own_headers() {
        let map = headers(&message(3), ExpectedLast::Sequence(41), 40, ROOMY).unwrap();
        let value = |name: &str| map.get(name).map(|value| value.as_str().to_owned());
        assert_eq!(value("Nats-Msg-Id").as_deref(), Some("id-1"));
        assert_eq!(value("Nats-Expected-Last-Sequence").as_deref(), Some("41"));
        assert_eq!(value("Waljet-Position").as_deref(), Some("1:1:0/10:0"));
        assert_eq!(value("traceparent").as_deref(), Some("00-1"));
        assert!(
            headers(&message(3), ExpectedLast::Not, 40, ROOMY).unwrap().get("Nats-Expected-Last-Sequence").is_none()
        );
    }

    #[test]
    fn the_size_limit_counts_headers_and_is_exact() {
        for (payload, refused) in [(99, None), (100, None), (101, Some(error::MESSAGE_TOO_LARGE))] {
            let server = Limits { max_payload: BLOCK + 100, max_msg_size: None };
            assert_eq!(code(&message(payload), server), refused, "{payload}");
            let stream = Limits { max_payload: 1 << 20, max_msg_size: Some(BLOCK + 100) };
            assert_eq!(code(&message(payload), stream), refused, "{payload}");
        }
    }

    #[test]
    fn the_header_limit_is_exact() {
        for (over, refused) in [(-1i64, None), (0, None), (1, Some(error::HEADERS_TOO_LARGE))] {
            let mut message = message(1);
            let room = MAX_HEADERS as i64 - BLOCK as i64 - 5 + over;
            message.row_headers.push(("x".into(), "v".repeat(room as usize)));
            assert_eq!(code(&message, ROOMY), refused, "{over}");
        }
    }

    #[test]
    fn room_is_kept_for_the_sequence_that_is_named_later() {
        let digits = u64::MAX.to_string().len();
        let limits = |spare| Limits { max_payload: BLOCK - 2 + digits + spare, max_msg_size: None };
        let mut map = headers(&message(3), ExpectedLast::Later, 40, limits(3)).unwrap();
        assert!(map.get("Nats-Expected-Last-Sequence").is_none());
        expect(&mut map, u64::MAX);
        assert_eq!(map.get("Nats-Expected-Last-Sequence").unwrap().as_str().len(), digits);
        assert!(headers(&message(3), ExpectedLast::Later, 40, limits(2)).is_err());
    }

    #[test]
    fn a_long_line_is_refused_before_it_costs_the_connection() {
        let fault = headers(&message(1), ExpectedLast::Sequence(1), 4096, ROOMY).unwrap_err();
        assert_eq!((fault.code, fault.action), (error::SUBJECT_TOO_LONG, Action::Refuse));
    }

    #[test]
    fn a_header_that_the_wire_or_the_broker_would_misread_is_refused() {
        for (name, value) in [
            ("", "v"),
            ("a b", "v"),
            ("a:b", "v"),
            ("ä", "v"),
            ("a\r", "v"),
            ("a", "v\r\nNats-Msg-Id: z"),
            ("a", "v\n"),
            ("Nats-Rollup", "all"),
            ("nats-expected-last-msg-id", "1"),
            ("Nats-Trace-Only", "true"),
        ] {
            let mut message = message(1);
            message.row_headers.push((name.into(), value.into()));
            assert_eq!(code(&message, ROOMY), Some(error::HEADER_INVALID), "{name:?} {value:?}");
        }
        let mut nameless = message(1);
        nameless.id = String::new();
        assert_eq!(code(&nameless, ROOMY), Some(error::HEADER_INVALID));
        nameless.id = "a\r\nb".into();
        assert_eq!(code(&nameless, ROOMY), Some(error::HEADER_INVALID));
    }

    #[test]
    fn a_refusal_names_limit_and_size_and_not_the_content() {
        let limits = Limits { max_payload: 10, max_msg_size: None };
        let fault = headers(&message(3), ExpectedLast::Not, 40, limits).unwrap_err();
        let text = fault.summary();
        assert!(text.contains("10") && text.contains(&(BLOCK - 33 + 3).to_string()), "{text}");
        assert!(!text.contains("xxx") && !text.contains("00-1"));
    }
}
