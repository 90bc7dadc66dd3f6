//! The headers of a message: those that waljet sets, and the rules for those that a row brings.
//!
//! A header from a row must not be able to set what brokers, clients or waljet read as an instruction, nor
//! to break out of its line.

use jiff::Timestamp as Instant;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use waljet_pgoutput::Timestamp;

/// The event id, by which the broker refuses a second copy.
pub const MSG_ID: &str = "Nats-Msg-Id";
/// The event's [`Position`](crate::Position).
pub const POSITION: &str = "Waljet-Position";
/// When the transaction was committed: RFC 3339, UTC, microseconds.
pub const COMMIT_TIME: &str = "Waljet-Commit-Time";
/// `null` where the payload was SQL NULL and the body is empty for that reason.
pub const PAYLOAD: &str = "Waljet-Payload";
/// `split` where the event's transaction was to be stored whole and was not: it exceeded a limit.
pub const ATOMIC: &str = "Waljet-Atomic";
/// The ordering key's second half.
pub const AGGREGATE_ID: &str = "Aggregate-Id";
/// The ordering key's first half.
pub const AGGREGATE_TYPE: &str = "Aggregate-Type";
/// What happened.
pub const EVENT_TYPE: &str = "Event-Type";
/// The version of the payload's schema.
pub const SCHEMA_VERSION: &str = "Schema-Version";
/// The tenant.
pub const TENANT_ID: &str = "Tenant-Id";
/// The payload's media type.
pub const CONTENT_TYPE: &str = "Content-Type";

/// Prefixes that rows may not use, in any case.
const RESERVED_PREFIXES: [&str; 2] = ["nats-", "waljet-"];

/// Further names that rows may not use: NATS reads them as a status line or as a key-value operation.
const RESERVED_NAMES: [&str; 3] = ["status", "description", "kv-operation"];

/// Why the headers of a row cannot be sent. Holds no header value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The column does not hold a JSON object.
    #[error("the headers are not a JSON object")]
    NotAnObject,
    /// A name that a header cannot have.
    #[error("header name {0:?} is empty or has characters other than visible ASCII without a colon")]
    Name(String),
    /// A name that would instruct the broker or imitate waljet.
    #[error("header {0:?} is reserved: Nats-, Waljet-, Status, Description and KV-Operation are not for rows")]
    Reserved(String),
    /// A control character, CR and LF among them.
    #[error("the value of header {0:?} has a control character")]
    ControlCharacter(String),
    /// An object or an array.
    #[error("the value of header {0:?} is an object or an array, expected a string")]
    Nested(String),
}

/// Reads the JSON object of a row's headers column.
///
/// Strings are taken as they are, numbers and booleans as JSON writes them, null members are left out; of
/// members of the same name the last counts.
///
/// # Errors
///
/// The first rule that a member breaks.
pub fn parse_row_headers(json: &[u8]) -> Result<Vec<(String, String)>, HeaderError> {
    let Members(members) = serde_json::from_slice(json).map_err(|_| HeaderError::NotAnObject)?;
    let mut headers: Vec<(String, String)> = Vec::with_capacity(members.len());
    for (name, value) in members {
        check_name(&name)?;
        let Some(value) = member_text(&name, value.get())? else { continue };
        if !is_value(&value) {
            return Err(HeaderError::ControlCharacter(shown(&name)));
        }
        match headers.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => headers.push((name, value)),
        }
    }
    Ok(headers)
}

/// Returns whether a text may be the value of a header: no control characters, and so no line breaks.
#[must_use]
pub fn is_value(value: &str) -> bool {
    !value.chars().any(char::is_control)
}

/// Writes a commit time: RFC 3339, UTC, microseconds. `None` beyond the years that RFC 3339 can write.
#[must_use]
pub fn commit_time(time: Timestamp) -> Option<String> {
    let instant = Instant::from_microsecond(time.unix_micros()).ok()?;
    Some(format!("{instant:.6}"))
}

fn check_name(name: &str) -> Result<(), HeaderError> {
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_graphic() && b != b':') {
        return Err(HeaderError::Name(shown(name)));
    }
    let lower = name.to_ascii_lowercase();
    let reserved =
        RESERVED_PREFIXES.iter().any(|prefix| lower.starts_with(prefix)) || RESERVED_NAMES.contains(&lower.as_str());
    if reserved { Err(HeaderError::Reserved(shown(name))) } else { Ok(()) }
}

/// The value of a member; `None` for null.
fn member_text(name: &str, raw: &str) -> Result<Option<String>, HeaderError> {
    match raw.as_bytes().first() {
        Some(b'"') => serde_json::from_str(raw).map(Some).map_err(|_| HeaderError::NotAnObject),
        Some(b'n') => Ok(None),
        Some(b'{' | b'[') => Err(HeaderError::Nested(shown(name))),
        _ => Ok(Some(raw.to_owned())),
    }
}

/// Names come from rows: enough of one to find it, not enough to carry data.
fn shown(name: &str) -> String {
    name.chars().take(40).collect()
}

/// The members of a JSON object in their order, doubles included.
struct Members(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Members;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(json: &str) -> Result<Vec<(String, String)>, HeaderError> {
        parse_row_headers(json.as_bytes())
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    #[test]
    fn strings_numbers_and_booleans_become_headers_and_null_is_left_out() {
        let json = r#"{"traceparent":"00-ab-cd-01","n":12345678901234567890,"x":1.0,"b":true,"z":null,"ü":"é"}"#;
        assert_eq!(parse(json), Err(HeaderError::Name("ü".into())));
        let json = r#"{"traceparent":"00-ab-cd-01","n":12345678901234567890,"x":1.0,"b":true,"z":null,"u":"é"}"#;
        let expected = pairs(&[
            ("traceparent", "00-ab-cd-01"),
            ("n", "12345678901234567890"),
            ("x", "1.0"),
            ("b", "true"),
            ("u", "é"),
        ]);
        assert_eq!(parse(json), Ok(expected));
        assert_eq!(parse("{}"), Ok(Vec::new()));
    }

    #[test]
    fn of_two_members_of_one_name_the_last_counts() {
        assert_eq!(parse(r#"{"a":"1","b":"2","a":"3"}"#), Ok(pairs(&[("a", "3"), ("b", "2")])));
    }

    #[test]
    fn a_reserved_name_is_refused_in_any_case() {
        for name in ["Nats-Msg-Id", "nats-rollup", "NATS-TTL", "Waljet-Position", "Status", "kv-operation"] {
            let error = parse(&format!(r#"{{"{name}":"x"}}"#));
            assert_eq!(error, Err(HeaderError::Reserved(name.into())));
        }
    }

    #[test]
    fn what_would_break_out_of_its_line_is_refused() {
        assert_eq!(parse(r#"{"x":"a\r\nNats-Msg-Id: z"}"#), Err(HeaderError::ControlCharacter("x".into())));
        assert_eq!(parse(r#"{"x":"a\u0000"}"#), Err(HeaderError::ControlCharacter("x".into())));
        for name in ["", "a b", "a:b", "a\\r\\nb", "a\\u00e9"] {
            assert!(matches!(parse(&format!(r#"{{"{name}":"x"}}"#)), Err(HeaderError::Name(_))), "{name}");
        }
    }

    #[test]
    fn what_is_no_object_of_scalars_is_refused() {
        assert_eq!(parse(r#"{"x":{"y":1}}"#), Err(HeaderError::Nested("x".into())));
        assert_eq!(parse(r#"{"x":[]}"#), Err(HeaderError::Nested("x".into())));
        for json in ["", "[]", "1", "null", "{", r#""x""#] {
            assert_eq!(parse(json), Err(HeaderError::NotAnObject), "{json}");
        }
    }

    #[test]
    fn a_commit_time_is_written_in_utc_with_microseconds() {
        let time = |micros| commit_time(Timestamp::from_unix_micros(micros)).unwrap();
        assert_eq!(time(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(time(1_795_000_000_123_456), "2026-11-18T11:06:40.123456Z");
        assert_eq!(commit_time(Timestamp(i64::MAX)), None);
    }

    proptest! {
        #[test]
        fn any_bytes_give_headers_that_cannot_break_their_line_or_an_error(json in any::<Vec<u8>>()) {
            let _ = parse_row_headers(&json);
        }

        #[test]
        fn any_string_member_is_kept_or_refused(name in "[ -~]{1,20}", value in any::<String>()) {
            let json = serde_json::json!({ name: &value }).to_string();
            if let Ok(headers) = parse(&json) {
                for (_, kept) in &headers {
                    prop_assert_eq!(kept, &value);
                    prop_assert!(!kept.contains(['\r', '\n', '\0']));
                }
            }
        }
    }
}
