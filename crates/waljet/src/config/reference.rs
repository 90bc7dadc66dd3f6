//! `config reference`: `docs/config.md`, made from the table of keys.

use super::key::{Key, Kind};
use super::keys::KEYS;

/// The text before the tables.
const INTRODUCTION: &str = "# Configuration

This page is made by `waljet config reference`.

A value is taken from the first of these that has it: a flag, the environment, the configuration file
(`--config`, `waljet.toml` where none is named), the default. Every key is also an environment variable:
`outbox.columns.id` is `WALJET_OUTBOX__COLUMNS__ID`. Keys marked *or file* have a twin with `_file` at the
end, `nats.password_file` for instance, which names a file that holds the value; a line break at its end is
dropped. `waljet config show` prints what is in force and where each value comes from, without secrets.

Keys and variables that waljet does not know are refused, and all faults are reported at once. Durations are
written `\"250ms\"`, `\"5s\"`, `\"1m30s\"`, `\"2h\"`, `\"7d\"`; sizes `\"512KiB\"`, `\"8MiB\"`, `\"1GiB\"` or as a number of
bytes. Paths are relative to the folder that the process was started in.
";

/// Writes the reference as Markdown.
pub(crate) fn reference() -> String {
    let mut text = INTRODUCTION.to_owned();
    let mut section = "";
    for key in KEYS {
        let (table, name) = key.path.rsplit_once('.').unwrap_or(("", key.path));
        if table != section {
            text.push_str(&format!("\n## `[{table}]`\n\n| key | takes | default | |\n| --- | --- | --- | --- |\n"));
            section = table;
        }
        let takes = format!("{}{}", key.kind.expects(), if key.has_file_twin() { ", *or file*" } else { "" });
        text.push_str(&format!("| `{name}` | {} | {} | {} |\n", takes.replace('|', "\\|"), default(key), key.doc));
    }
    text
}

/// Returns the default as it would be written in the file.
fn default(key: &Key) -> String {
    let quoted = !matches!(key.kind, Kind::Bool | Kind::Integer { .. });
    match key.default {
        Some("0") => "`0`".to_owned(),
        Some(text) if quoted => format!("`\"{text}\"`"),
        Some(text) => format!("`{text}`"),
        None if matches!(key.kind, Kind::Column | Kind::OptionalColumn) => "by preset".to_owned(),
        None => "none".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_in_the_reference() {
        let text = reference();
        for key in KEYS {
            assert!(text.contains(key.doc), "{}", key.path);
        }
    }

    #[test]
    fn the_page_in_docs_is_what_the_command_prints() {
        let page = include_str!("../../../../docs/config.md");
        assert_eq!(page, reference(), "run `waljet config reference > docs/config.md`");
    }
}
