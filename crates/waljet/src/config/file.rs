//! The layer of the configuration file: TOML, flattened to dotted paths with their lines.

use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};
use waljet_pipeline::Fault;

use super::key::{Key, is_section};
use super::origin::{Given, Origin};
use super::value::Raw;
use crate::error::{CONFIG_SYNTAX, halt};

/// Reads the text of the file at `path` into values; tables are gone through, whatever they are called.
pub(crate) fn read(path: &str, text: &str) -> Result<Vec<Given>, Fault> {
    let table = DeTable::parse(text).map_err(|error| syntax_fault(path, text, &error))?;
    let mut given = Vec::new();
    flatten(&Layer { path, text }, "", table.get_ref(), &mut given);
    Ok(given)
}

/// The file that is being read.
struct Layer<'a> {
    path: &'a str,
    text: &'a str,
}

/// The TOML reader's own message quotes the line, which may hold a secret: only its reason is shown.
fn syntax_fault(path: &str, text: &str, error: &toml::de::Error) -> Fault {
    let place = error.span().map_or_else(String::new, |span| {
        let before = text.get(..span.start).unwrap_or(text);
        let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
        format!(":{}:{column}", line_at(text, span.start))
    });
    halt(CONFIG_SYNTAX, format!("{path}{place} is not TOML: {}", error.message()))
}

/// Adds what is in `table` to `given`.
fn flatten(layer: &Layer<'_>, prefix: &str, table: &DeTable<'_>, given: &mut Vec<Given>) {
    for (name, value) in table {
        let path = if prefix.is_empty() { name.get_ref().to_string() } else { format!("{prefix}.{}", name.get_ref()) };
        let line = line_at(layer.text, name.span().start);
        match value.get_ref() {
            // An unknown section is one fault, not one for each of its keys.
            DeValue::Table(inner) if is_section(&path) => flatten(layer, &path, inner, given),
            value => {
                given.push(Given { raw: raw(value), origin: Origin::File { path: layer.path.to_owned(), line }, path });
            }
        }
    }
    // By line, so that faults come in the order of the file.
    given.sort_by_key(|given| (Key::find(&given.path).is_none(), line_of(&given.origin)));
}

/// Takes a TOML value as it is.
fn raw(value: &DeValue<'_>) -> Raw {
    match value {
        DeValue::String(text) => Raw::Text(text.to_string()),
        DeValue::Boolean(value) => Raw::Bool(*value),
        DeValue::Integer(value) => integer(value).map_or(Raw::Other("a number out of range"), Raw::Integer),
        DeValue::Array(items) => {
            let texts: Option<Vec<String>> = items.iter().map(item).collect();
            texts.map_or(Raw::Other("an array of other things"), Raw::List)
        }
        DeValue::Float(_) => Raw::Other("a decimal number"),
        DeValue::Datetime(_) => Raw::Other("a date"),
        DeValue::Table(_) => Raw::Other("a table"),
    }
}

/// Takes an item of an array as text.
fn item(value: &Spanned<DeValue<'_>>) -> Option<String> {
    match value.get_ref() {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(value) => integer(value).map(|value| value.to_string()),
        _ => None,
    }
}

/// Reads a TOML integer of any base.
fn integer(value: &DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(value.as_str(), value.radix()).ok()
}

/// Returns the line, from 1, of a byte of the text.
fn line_at(text: &str, at: usize) -> usize {
    text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count() + 1
}

/// Returns the line of an origin in a file.
fn line_of(origin: &Origin) -> usize {
    if let Origin::File { line, .. } = origin { *line } else { 0 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use super::*;

    #[test]
    fn tables_become_paths_with_lines() {
        let text = "[postgres]\nslot = \"a\"\n\n[outbox]\ncolumns = { id = \"uid\" }\n[nats.tls]\nrequired = true\n";
        let given = read("w.toml", text).unwrap();
        let lines: Vec<_> = given.iter().map(|given| format!("{} {}", given.path, given.origin)).collect();
        assert_eq!(lines, ["postgres.slot w.toml:2", "outbox.columns.id w.toml:5", "nats.tls.required w.toml:7"]);
    }

    #[test]
    fn an_unknown_section_is_given_once() {
        let given = read("w.toml", "[kafka]\nbrokers = \"a\"\ntopic = \"b\"\n").unwrap();
        assert_eq!(given.len(), 1);
        assert_eq!(given[0].path, "kafka");
    }

    #[test]
    fn a_syntax_fault_names_the_place_and_shows_nothing_of_the_line() {
        let fault = read("w.toml", "[nats]\npassword = \"hunter2\nstream = \"x\"\n").err().unwrap();
        assert!(fault.message.starts_with("w.toml:2:"), "{}", fault.message);
        assert!(!fault.message.contains("hunter2"), "{}", fault.message);
    }
}
