//! `config show`: the effective value of every key and where it comes from, without secrets.

use serde_json::json;

use super::resolve::{Effective, Entry};

/// Writes the configuration as TOML, each line with its origin as a comment; unset keys as comments.
pub(crate) fn show(effective: &Effective) -> String {
    let mut text = String::new();
    let mut section = "";
    for entry in &effective.entries {
        let (table, name) = entry.key.path.rsplit_once('.').unwrap_or(("", entry.key.path));
        if table != section {
            let gap = if section.is_empty() { "" } else { "\n" };
            text.push_str(&format!("{gap}[{table}]\n"));
            section = table;
        }
        let line = match &entry.value {
            Some(value) => format!("{name} = {value}"),
            None => format!("# {name} is not set"),
        };
        let origin = entry.value.as_ref().map_or_else(String::new, |_| format!("# {}", origin(entry)));
        text.push_str(format!("{line:<48} {origin}").trim_end());
        text.push('\n');
    }
    text
}

/// Writes the configuration as an object: path to value and origin.
pub(crate) fn show_json(effective: &Effective) -> String {
    let entries = effective.entries.iter().map(|entry| {
        let value = entry.value.as_ref().map_or(serde_json::Value::Null, super::value::Value::to_json);
        (entry.key.path.to_owned(), json!({ "value": value, "origin": origin(entry) }))
    });
    let object: serde_json::Map<String, serde_json::Value> = entries.collect();
    format!("{:#}\n", serde_json::Value::Object(object))
}

/// Returns where the value of an entry comes from, with the file that a secret was read from.
fn origin(entry: &Entry) -> String {
    match &entry.secret_file {
        Some(file) => format!("{}, from file {file}", entry.origin),
        None => entry.origin.to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use super::super::{file, resolve::resolve};
    use super::*;

    fn effective() -> Effective {
        let text =
            "[postgres]\nurl = \"postgres://app:hunter2@db/x\"\npassword = \"hunter2\"\n[nats]\ntoken_file = \"/t\"\n";
        let given = file::read("w.toml", text).unwrap();
        resolve(&given, &|_| Ok("hunter2".to_owned()), &mut Vec::new())
    }

    #[test]
    fn values_are_shown_with_their_origin_and_secrets_are_not() {
        let text = show(&effective());
        assert!(!text.contains("hunter2"), "{text}");
        let line = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap().to_owned();
        let words = |start: &str| line(start).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words("url"), "url = \"postgres://app:<hidden>@db/x\" # w.toml:2");
        assert_eq!(words("token"), "token = <hidden> # w.toml:5, from file /t");
        assert_eq!(words("slot"), "slot = \"waljet\" # default");
        assert_eq!(line("# host"), "# host is not set");
        assert!(text.contains("\n[outbox.columns]\nid = \"id\" "));
    }

    #[test]
    fn json_has_the_same_and_no_secrets() {
        let text = show_json(&effective());
        assert!(!text.contains("hunter2"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["window.max_events"], json!({ "value": 1024, "origin": "default" }));
        assert_eq!(json["postgres.host"]["value"], serde_json::Value::Null);
        assert_eq!(json["postgres.password"], json!({ "value": "<hidden>", "origin": "w.toml:3" }));
    }
}
