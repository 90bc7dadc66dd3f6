//! The message that goes to the stream.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use bytes::Bytes;
use waljet_pgoutput::Timestamp;

use crate::Position;

/// A concrete subject that is fit to be published to.
///
/// Made only by a route: non-empty tokens, no white space, control characters or wildcards, not longer than
/// [`Subject::MAX_LEN`], and below the literal prefix of its template.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject(String);

impl Subject {
    /// The longest subject in bytes. Far below the server's control line of 4,096 bytes, which also holds the
    /// reply subject: a longer one would cost the connection.
    pub const MAX_LEN: usize = 1024;

    /// Checks `text` and makes it a subject.
    ///
    /// # Errors
    ///
    /// Says what is wrong, without the text, which may hold row values.
    pub fn new(text: String) -> Result<Self, InvalidSubject> {
        if text.len() > Self::MAX_LEN {
            return Err(InvalidSubject::TooLong(text.len()));
        }
        if text.split('.').any(str::is_empty) {
            return Err(InvalidSubject::EmptyToken);
        }
        if text.chars().any(|c| c.is_whitespace() || c.is_control() || matches!(c, '*' | '>')) {
            return Err(InvalidSubject::Character);
        }
        if text.starts_with('$') || text.starts_with("_INBOX.") {
            return Err(InvalidSubject::Reserved);
        }
        Ok(Self(text))
    }

    /// Returns the subject as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a text is not a subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSubject {
    /// Over [`Subject::MAX_LEN`].
    #[error("the subject has {0} bytes, at most {max} are allowed", max = Subject::MAX_LEN)]
    TooLong(usize),
    /// Two dots in a row, or one at an end.
    #[error("the subject has an empty token")]
    EmptyToken,
    /// White space, a control character or a wildcard.
    #[error("the subject has white space, a control character or a wildcard")]
    Character,
    /// A subject that NATS keeps for itself.
    #[error("the subject starts with $ or _INBOX, which NATS keeps for itself")]
    Reserved,
}

/// What keeps its order among itself: a digest of aggregate type and aggregate id.
///
/// Two keys of the same digest only wait for each other without need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OrderingKey(u64);

impl OrderingKey {
    /// Digests the two halves.
    #[must_use]
    pub fn of(aggregate_type: &str, aggregate_id: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        (aggregate_type, aggregate_id).hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// One event as it goes to the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboundMessage {
    /// Where it stands in the database's history.
    pub position: Position,
    /// When its transaction was committed.
    pub commit_time: Timestamp,
    /// The event id, sent as `Nats-Msg-Id`.
    pub id: String,
    /// What keeps its order.
    pub key: OrderingKey,
    /// Where it goes.
    pub subject: Subject,
    /// All headers but those that a sink adds for its mode. Names and values are checked: see
    /// [`headers`](crate::headers).
    pub headers: Vec<(&'static str, String)>,
    /// Headers that the row brought.
    pub row_headers: Vec<(String, String)>,
    /// The payload column's bytes: a slice of the buffer that the socket was read into.
    pub payload: Bytes,
}

impl OutboundMessage {
    /// Bytes of the header block as NATS encodes it, with `NATS/1.0` and the blank line, without what the
    /// sink adds.
    #[must_use]
    pub fn headers_len(&self) -> usize {
        let line = |name: &str, value: &str| name.len() + value.len() + 4;
        let own: usize = self.headers.iter().map(|(name, value)| line(name, value)).sum();
        let row: usize = self.row_headers.iter().map(|(name, value)| line(name, value)).sum();
        "NATS/1.0\r\n\r\n".len() + own + row
    }

    /// Bytes that count against the in-flight window: subject, headers and payload.
    #[must_use]
    pub fn size(&self) -> usize {
        self.subject.as_str().len() + self.headers_len() + self.payload.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_that_would_cost_the_connection_or_match_nothing_is_refused() {
        let why = |text: &str| Subject::new(text.to_owned()).map(|_| ());
        assert_eq!(why("outbox.order.created"), Ok(()));
        assert_eq!(why("outbox.ünï.日本"), Ok(()));
        assert_eq!(why("outbox..created"), Err(InvalidSubject::EmptyToken));
        assert_eq!(why(".x"), Err(InvalidSubject::EmptyToken));
        assert_eq!(why("x."), Err(InvalidSubject::EmptyToken));
        assert_eq!(why(""), Err(InvalidSubject::EmptyToken));
        for text in ["a b", "a\tb", "a.*", "a.>", "a\u{0}b", "a\r\nb", "a\u{a0}b"] {
            assert_eq!(why(text), Err(InvalidSubject::Character), "{text:?}");
        }
        assert_eq!(why("$JS.API.x"), Err(InvalidSubject::Reserved));
        assert_eq!(why(&"x".repeat(1025)), Err(InvalidSubject::TooLong(1025)));
    }
}
