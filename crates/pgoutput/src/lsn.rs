//! Positions in the write-ahead log.

use std::fmt;
use std::str::FromStr;

/// A log sequence number: a byte position in the write-ahead log, written `16/B374D848`.
///
/// Implements the text form of the type `pg_lsn` (PostgreSQL manual, section 8.20).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// `0/0`, which no WAL record has; PostgreSQL calls it `InvalidXLogRecPtr`.
    pub const ZERO: Self = Self(0);

    /// Returns how many bytes `self` lies past `earlier`, or 0 where it does not.
    #[must_use]
    pub const fn bytes_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

/// The text is not an LSN: two hexadecimal numbers of at most eight digits around a slash.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected an LSN such as 16/B374D848, found {0:?}")]
pub struct ParseLsnError(String);

impl FromStr for Lsn {
    type Err = ParseLsnError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let half = |part: &str| {
            let hex = (1..=8).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit());
            hex.then(|| u64::from_str_radix(part, 16).ok()).flatten()
        };
        text.split_once('/')
            .and_then(|(high, low)| Some(Self(half(high)? << 32 | half(low)?)))
            .ok_or_else(|| ParseLsnError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_lsn_survives_printing_and_parsing() {
        for value in [0, 1, 0x16_B374_D848, u64::MAX] {
            assert_eq!(Lsn(value).to_string().parse(), Ok(Lsn(value)));
        }
    }

    #[test]
    fn text_that_is_no_lsn_is_refused_with_the_text() {
        for text in ["", "/", "1/", "/1", "1", "g/1", "1/123456789", "+1/1", "1/1/1"] {
            assert_eq!(text.parse::<Lsn>(), Err(ParseLsnError(text.to_owned())));
        }
    }

    #[test]
    fn distance_to_a_later_position_is_zero() {
        assert_eq!(Lsn(5).bytes_since(Lsn(9)), 0);
        assert_eq!(Lsn(9).bytes_since(Lsn(5)), 4);
    }
}
