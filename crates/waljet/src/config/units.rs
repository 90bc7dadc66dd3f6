//! Durations and sizes as configuration writes them: `"1m30s"`, `"8MiB"`.

use std::time::Duration;

/// Units of time, largest first, in milliseconds.
const TIME: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

/// Units of size; the binary ones, largest first, are those that sizes are printed in.
const SIZE: [(&str, u64); 10] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1000),
    ("KB", 1000),
    ("B", 1),
];

/// Reads one or more numbers with units, such as `5s`, `250ms` or `1h30m`.
pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    let mut rest = text.trim();
    let mut millis: u64 = 0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let (number, after) = split_number(rest)?;
        let unit_len = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        let (unit, tail) = after.split_at(unit_len);
        let (_, factor) = TIME.iter().find(|(name, _)| *name == unit.trim())?;
        millis = millis.checked_add(number.checked_mul(*factor)?)?;
        rest = tail;
    }
    Some(Duration::from_millis(millis))
}

/// Prints a duration so that [`parse_duration`] reads it back; parts below a millisecond are dropped.
pub(crate) fn format_duration(duration: Duration) -> String {
    let mut millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    if millis == 0 {
        return "0s".to_owned();
    }
    let mut text = String::new();
    for (unit, factor) in TIME {
        if millis / factor > 0 {
            text.push_str(&format!("{}{unit}", millis / factor));
            millis %= factor;
        }
    }
    text
}

/// Reads a number of bytes, with or without a unit: `8MiB`, `512kB`, `1048576`.
pub(crate) fn parse_bytes(text: &str) -> Option<u64> {
    let (number, unit) = split_number(text.trim())?;
    match unit.trim() {
        "" => Some(number),
        unit => SIZE.iter().find(|(name, _)| *name == unit).and_then(|(_, factor)| number.checked_mul(*factor)),
    }
}

/// Prints a size in the largest binary unit that divides it, so that [`parse_bytes`] reads it back.
pub(crate) fn format_bytes(bytes: u64) -> String {
    let unit = SIZE
        .iter()
        .filter(|(name, _)| name.ends_with("iB"))
        .find(|(_, factor)| bytes >= *factor && bytes.is_multiple_of(*factor));
    unit.map_or_else(|| format!("{bytes}B"), |(name, factor)| format!("{}{name}", bytes / factor))
}

/// Prints a size for a person to read: one decimal, rounded, `1.4 GiB`.
pub(crate) fn human_bytes(bytes: u64) -> String {
    let unit = SIZE.iter().filter(|(name, _)| name.ends_with("iB")).find(|(_, factor)| bytes >= *factor);
    unit.map_or_else(|| format!("{bytes} B"), |(name, factor)| format!("{:.1} {name}", bytes as f64 / *factor as f64))
}

/// Splits off the leading decimal digits.
fn split_number(text: &str) -> Option<(u64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    Some((digits.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_printed_back() {
        for (text, millis, shown) in [
            ("5s", 5000, "5s"),
            ("250ms", 250, "250ms"),
            ("90s", 90_000, "1m30s"),
            ("1h30m", 5_400_000, "1h30m"),
            ("1500ms", 1500, "1s500ms"),
            ("0s", 0, "0s"),
            ("2d", 172_800_000, "2d"),
        ] {
            let duration = parse_duration(text).unwrap_or_default();
            assert_eq!(duration, Duration::from_millis(millis), "{text}");
            assert_eq!(format_duration(duration), shown);
            assert_eq!(parse_duration(shown), Some(duration));
        }
    }

    #[test]
    fn text_that_is_no_duration_is_refused() {
        for text in ["", "5", "s", "-5s", "5 parsecs", "1.5s", "99999999999999999999s", "18446744073709551615d"] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }

    #[test]
    fn sizes_are_read_and_printed_back() {
        for (text, bytes, shown) in [
            ("8MiB", 8 << 20, "8MiB"),
            ("1MB", 1_000_000, "1000000B"),
            ("512", 512, "512B"),
            ("64 KiB", 65_536, "64KiB"),
            ("0", 0, "0B"),
        ] {
            assert_eq!(parse_bytes(text), Some(bytes), "{text}");
            assert_eq!(format_bytes(bytes), shown);
            assert_eq!(parse_bytes(shown), Some(bytes));
        }
        assert_eq!(human_bytes(1_503_238_553), "1.4 GiB");
        assert_eq!(human_bytes(12), "12 B");
    }

    #[test]
    fn text_that_is_no_size_is_refused() {
        for text in ["", "MiB", "-1", "8 apples", "8mib", "1.5GiB", "18446744073709551615KiB"] {
            assert_eq!(parse_bytes(text), None, "{text}");
        }
    }
}
