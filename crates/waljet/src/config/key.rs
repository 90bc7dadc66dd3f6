//! What a configuration key is: a path, a kind, a default and a sentence about it.

use super::keys::{KEYS, LATER};

/// One key of the configuration.
#[derive(Debug)]
pub(crate) struct Key {
    /// The dotted path: `outbox.columns.id`.
    pub(crate) path: &'static str,
    /// What it takes.
    pub(crate) kind: Kind,
    /// The default, as it would be written; `None` where the key is unset by default.
    pub(crate) default: Option<&'static str>,
    /// What it does.
    pub(crate) doc: &'static str,
}

/// What a key takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Any text but the empty one.
    Text,
    /// The name of a database object: up to 63 bytes, as it is, without quotes.
    Name,
    /// The name of a replication slot.
    Slot,
    /// A column that must exist.
    Column,
    /// A column that may be missing: the empty text says so.
    OptionalColumn,
    /// `schema.table`.
    Table,
    /// `true` or `false`.
    Bool,
    /// A whole number in a range.
    Integer {
        /// The least.
        min: u64,
        /// The most.
        max: u64,
    },
    /// A time such as `"5s"`, in a range written the same way.
    Duration {
        /// The shortest.
        min: &'static str,
        /// The longest.
        max: &'static str,
    },
    /// A size such as `"8MiB"`, in a range written the same way.
    Bytes {
        /// The least.
        min: &'static str,
        /// The most.
        max: &'static str,
    },
    /// One of a few words.
    Choice {
        /// The words.
        values: &'static [&'static str],
        /// Words that a later version will know.
        later: &'static [&'static str],
    },
    /// Texts: an array, or one text with commas.
    List,
    /// Port numbers: one, or as many as there are hosts.
    Ports,
    /// URLs that may hold a password.
    Urls,
    /// One URL or connection string that may hold a password.
    Url,
    /// The path of a file.
    Path,
    /// `address:port` or `"off"`.
    Listen,
    /// A text that is never printed.
    Secret,
}

impl Kind {
    /// Returns what the key takes, for a message and for the reference.
    pub(crate) fn expects(&self) -> String {
        match self {
            Self::Text => "a text".to_owned(),
            Self::Name => "a name of 1 to 63 bytes".to_owned(),
            Self::Slot => "1 to 63 lower-case letters, digits and underscores".to_owned(),
            Self::Column => "the name of a column".to_owned(),
            Self::OptionalColumn => "the name of a column, or \"\" for none".to_owned(),
            Self::Table => "a table such as \"public.outbox\"".to_owned(),
            Self::Bool => "true or false".to_owned(),
            Self::Integer { min, max } => format!("a whole number from {min} to {max}"),
            Self::Duration { min, max } => format!("a duration such as \"5s\", from {min} to {max}"),
            Self::Bytes { min, max } => format!("a size such as \"8MiB\", from {min} to {max}"),
            Self::Choice { values, .. } => {
                let quoted: Vec<_> = values.iter().map(|value| format!("\"{value}\"")).collect();
                quoted.join(" or ")
            }
            Self::List => "a list of texts".to_owned(),
            Self::Ports => "a port number, or a list of them".to_owned(),
            Self::Urls => "a URL or a list of URLs".to_owned(),
            Self::Url => "a URL".to_owned(),
            Self::Path => "the path of a file".to_owned(),
            Self::Listen => "an address such as \"127.0.0.1:9464\", or \"off\"".to_owned(),
            Self::Secret => "a text that is never printed".to_owned(),
        }
    }

    /// Returns whether a value of this kind is itself a secret.
    pub(crate) fn is_secret(&self) -> bool {
        matches!(self, Self::Secret)
    }
}

impl Key {
    /// Finds a key by its path.
    pub(crate) fn find(path: &str) -> Option<&'static Self> {
        KEYS.iter().find(|key| key.path == path)
    }

    /// Returns whether the value can also be read from a file that the key's `_file` twin names.
    pub(crate) fn has_file_twin(&self) -> bool {
        matches!(self.kind, Kind::Secret | Kind::Url | Kind::Urls)
    }
}

/// Returns the environment variable of a path.
pub(crate) fn variable(path: &str) -> String {
    format!("WALJET_{}", path.to_ascii_uppercase().replace('.', "__"))
}

/// Returns whether `path` is a table that keys are in: `outbox`, `outbox.columns`.
pub(crate) fn is_section(path: &str) -> bool {
    KEYS.iter().any(|key| key.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

/// Returns what a path is for that a later version will know, for it or for what it lies in.
pub(crate) fn later(path: &str) -> Option<&'static str> {
    let covers = |known: &str| path.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    LATER.iter().find(|(known, _)| covers(known)).map(|(_, what)| *what)
}

/// Returns the known path that `path` was probably meant to be.
pub(crate) fn nearest(path: &str) -> Option<String> {
    let twins = KEYS.iter().filter(|key| key.has_file_twin()).map(|key| format!("{}_file", key.path));
    let known: Vec<String> = KEYS.iter().map(|key| key.path.to_owned()).chain(twins).collect();
    let last = |path: &str| path.rsplit('.').next().map(str::to_owned);
    let near = known.iter().map(|known| (distance(path, known), known)).min_by_key(|(distance, _)| *distance);
    match near {
        Some((distance, known)) if distance <= 1 + path.len() / 6 => Some(known.clone()),
        // The right name in the wrong section.
        _ => known.iter().find(|known| last(known) == last(path)).cloned(),
    }
}

/// Counts the insertions, deletions, replacements and swaps of neighbours between two texts.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_or_misplaced_key_is_recognised() {
        assert_eq!(nearest("postgres.slto").as_deref(), Some("postgres.slot"));
        assert_eq!(nearest("window.max_event").as_deref(), Some("window.max_events"));
        assert_eq!(nearest("nats.password_fil").as_deref(), Some("nats.password_file"));
        assert_eq!(nearest("publication").as_deref(), Some("postgres.publication"));
        assert_eq!(nearest("postgres.stream").as_deref(), Some("nats.stream"));
        assert_eq!(nearest("kafka.brokers"), None);
    }

    #[test]
    fn variables_nest_by_two_underscores() {
        assert_eq!(variable("outbox.columns.aggregate_id"), "WALJET_OUTBOX__COLUMNS__AGGREGATE_ID");
    }

    #[test]
    fn keys_of_a_section_stand_together() {
        let mut sections: Vec<&str> =
            KEYS.iter().filter_map(|key| key.path.rsplit_once('.')).map(|(table, _)| table).collect();
        sections.dedup();
        let count = sections.len();
        sections.sort_unstable();
        sections.dedup();
        assert_eq!(sections.len(), count);
    }

    #[test]
    fn every_key_has_one_path_and_a_sentence() {
        for (at, key) in KEYS.iter().enumerate() {
            assert!(KEYS[at + 1..].iter().all(|other| other.path != key.path), "{}", key.path);
            assert!(key.doc.ends_with('.') && key.doc.len() > 10, "{}", key.path);
            assert!(!is_section(key.path), "{}", key.path);
            assert!(later(key.path).is_none(), "{}", key.path);
        }
    }
}
