//! Values: as they are written, and as they are meant.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use serde_json::json;

use super::key::Kind;
use super::units::{format_bytes, format_duration, parse_bytes, parse_duration};
use crate::secret::{HIDDEN, Secret, redact_url};

/// A value as it is written.
#[derive(Clone)]
pub(crate) enum Raw {
    /// Text without a type, from a flag, the environment, a file that holds a secret, or a default.
    Untyped(String),
    /// A TOML string.
    Text(String),
    /// A TOML boolean.
    Bool(bool),
    /// A TOML integer.
    Integer(i64),
    /// A TOML array of strings or integers, as text.
    List(Vec<String>),
    /// Something that no key takes, by its name.
    Other(&'static str),
}

impl Raw {
    /// Returns how the value is shown in a message about `kind`.
    pub(crate) fn shown(&self, kind: Kind) -> String {
        let quoted = |text: &str| match kind {
            Kind::Url | Kind::Urls => format!("{:?}", redact_list(text)),
            _ => format!("{text:?}"),
        };
        match self {
            _ if kind.is_secret() => "a value that is not shown".to_owned(),
            Self::Untyped(text) | Self::Text(text) => quoted(text),
            Self::Bool(value) => value.to_string(),
            Self::Integer(value) => value.to_string(),
            Self::List(items) => format!("[{}]", items.iter().map(|item| quoted(item)).collect::<Vec<_>>().join(", ")),
            Self::Other(name) => (*name).to_owned(),
        }
    }

    /// Returns the text of a string.
    fn text(&self) -> Option<&str> {
        match self {
            Self::Untyped(text) | Self::Text(text) => Some(text),
            Self::Bool(_) | Self::Integer(_) | Self::List(_) | Self::Other(_) => None,
        }
    }

    /// Returns the items of a list: of an array, or of a text with commas.
    fn items(&self) -> Option<Vec<String>> {
        let items: Vec<String> = match self {
            Self::List(items) => items.clone(),
            Self::Integer(value) => vec![value.to_string()],
            _ => self.text()?.split(',').map(|item| item.trim().to_owned()).collect(),
        };
        (!items.is_empty() && items.iter().all(|item| !item.trim().is_empty())).then_some(items)
    }
}

/// A value as it is meant.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Value {
    /// A text, name, word, path or column.
    Text(String),
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Integer(u64),
    /// A time.
    Duration(Duration),
    /// A size in bytes.
    Bytes(u64),
    /// Several texts.
    List(Vec<String>),
    /// URLs, whose passwords are not printed.
    Urls(Vec<String>),
    /// A table.
    Table(Table),
    /// A text that is not printed.
    Secret(Secret),
}

/// A table by schema and name, exactly as the catalog has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    /// The schema.
    pub(crate) schema: String,
    /// The table.
    pub(crate) name: String,
}

impl Value {
    /// Reads a value of a kind; `None` where it is not one.
    pub(crate) fn parse(kind: Kind, raw: &Raw) -> Option<Self> {
        let text = || raw.text().filter(|text| !text.trim().is_empty() && !text.contains('\0'));
        let name = |max| text().filter(|text| text.len() <= max).map(|text| Self::Text(text.to_owned()));
        match kind {
            Kind::Text | Kind::Path => name(usize::MAX),
            Kind::Name | Kind::Column => name(63),
            Kind::OptionalColumn => {
                raw.text().filter(|text| text.is_empty()).map(|_| Self::Text(String::new())).or_else(|| name(63))
            }
            Kind::Slot => name(63).filter(|_| raw.text().is_some_and(|text| text.bytes().all(is_slot_byte))),
            Kind::Table => text().and_then(parse_table).map(Self::Table),
            Kind::Bool => match raw {
                Raw::Bool(value) => Some(Self::Bool(*value)),
                Raw::Untyped(text) => text.trim().parse().ok().map(Self::Bool),
                Raw::Text(_) | Raw::Integer(_) | Raw::List(_) | Raw::Other(_) => None,
            },
            Kind::Integer { min, max } => {
                let value: u64 = match raw {
                    Raw::Integer(value) => u64::try_from(*value).ok()?,
                    Raw::Untyped(text) => text.trim().parse().ok()?,
                    Raw::Text(_) | Raw::Bool(_) | Raw::List(_) | Raw::Other(_) => return None,
                };
                (min..=max).contains(&value).then_some(Self::Integer(value))
            }
            Kind::Duration { min, max } => {
                let value = parse_duration(text()?)?;
                (parse_duration(min)? <= value && value <= parse_duration(max)?).then_some(Self::Duration(value))
            }
            Kind::Bytes { min, max } => {
                let value = match raw {
                    Raw::Integer(value) => u64::try_from(*value).ok()?,
                    _ => parse_bytes(text()?)?,
                };
                (parse_bytes(min)? <= value && value <= parse_bytes(max)?).then_some(Self::Bytes(value))
            }
            Kind::Choice { values, .. } => {
                text().filter(|text| values.contains(text)).map(|text| Self::Text(text.to_owned()))
            }
            Kind::List => raw.items().map(Self::List),
            Kind::Ports => {
                let items = raw.items()?;
                let valid = |item: &String| item.parse::<u16>().is_ok_and(|port| port > 0);
                items.iter().all(valid).then_some(Self::List(items))
            }
            Kind::Urls => raw.items().map(Self::Urls),
            Kind::Url => text().map(|text| Self::Urls(vec![text.trim().to_owned()])),
            Kind::Listen => {
                text().filter(|text| *text == "off" || is_address(text)).map(|text| Self::Text(text.to_owned()))
            }
            Kind::Secret => text().map(|text| Self::Secret(Secret::new(text))),
        }
    }

    /// Returns the value for `config show --json`.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Bool(value) => json!(value),
            Self::Integer(value) => json!(value),
            Self::List(items) => json!(items),
            Self::Urls(urls) => json!(urls.iter().map(|url| redact_url(url)).collect::<Vec<_>>()),
            Self::Secret(_) => json!(HIDDEN),
            Self::Text(text) => json!(text),
            Self::Duration(duration) => json!(format_duration(*duration)),
            Self::Bytes(bytes) => json!(format_bytes(*bytes)),
            Self::Table(table) => json!(table.to_string()),
        }
    }
}

impl fmt::Display for Value {
    /// Prints the value as TOML, without secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |items: &[String]| items.iter().map(|item| format!("{item:?}")).collect::<Vec<_>>().join(", ");
        match self {
            Self::Bool(value) => write!(f, "{value}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Duration(duration) => write!(f, "\"{}\"", format_duration(*duration)),
            Self::Bytes(bytes) => write!(f, "\"{}\"", format_bytes(*bytes)),
            Self::Table(table) => write!(f, "{:?}", table.to_string()),
            Self::Secret(_) => f.write_str(HIDDEN),
            Self::Urls(urls) => {
                let urls: Vec<_> = urls.iter().map(|url| redact_url(url)).collect();
                if let [url] = urls.as_slice() { write!(f, "{url:?}") } else { write!(f, "[{}]", list(&urls)) }
            }
            Self::List(items) => {
                if let [item] = items.as_slice() {
                    write!(f, "{item:?}")
                } else {
                    write!(f, "[{}]", list(items))
                }
            }
        }
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |text: &str| {
            if text.contains(['.', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
        };
        write!(f, "{}.{}", part(&self.schema), part(&self.name))
    }
}

/// Hides the passwords of URLs separated by commas.
fn redact_list(text: &str) -> String {
    text.split(',').map(redact_url).collect::<Vec<_>>().join(",")
}

/// Returns whether PostgreSQL allows the byte in the name of a slot.
fn is_slot_byte(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_'
}

/// Returns whether `text` is `host:port`; a name is resolved when it is bound.
fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host_fits = match bracketed {
        Some(address) => address.parse::<IpAddr>().is_ok_and(|address| address.is_ipv6()),
        None => !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'.' || b == b'-'),
    };
    host_fits && port.parse::<u16>().is_ok()
}

/// Reads `name`, `schema.name` or `"schema"."name"`; the schema is `public` where none is named.
fn parse_table(text: &str) -> Option<Table> {
    let (first, rest) = parse_identifier(text)?;
    let table = match rest.strip_prefix('.') {
        None => Table { schema: "public".to_owned(), name: first },
        Some(rest) => {
            let (name, rest) = parse_identifier(rest)?;
            rest.is_empty().then_some(Table { schema: first, name })?
        }
    };
    let fits = |text: &str| (1..=63).contains(&text.len());
    (fits(&table.schema) && fits(&table.name) && (rest.is_empty() || rest.starts_with('.'))).then_some(table)
}

/// Splits off one identifier, quoted or up to the next dot, case as it is.
fn parse_identifier(text: &str) -> Option<(String, &str)> {
    let Some(body) = text.strip_prefix('"') else {
        let end = text.find('.').unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        return (!name.contains(['"', ' '])).then(|| (name.to_owned(), rest));
    };
    let mut name = String::new();
    let mut chars = body.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' if chars.next_if(|(_, next)| *next == '"').is_some() => name.push('"'),
            '"' => return Some((name, &body[at + 1..])),
            c => name.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn untyped(kind: Kind, text: &str) -> Option<String> {
        Value::parse(kind, &Raw::Untyped(text.to_owned())).map(|value| value.to_string())
    }

    #[test]
    fn tables_are_read_by_schema_and_name_with_their_case() {
        let read = |text: &str| untyped(Kind::Table, text);
        assert_eq!(read("outbox").as_deref(), Some("\"public.outbox\""));
        assert_eq!(read("app.OutBox").as_deref(), Some("\"app.OutBox\""));
        assert_eq!(
            Value::parse(Kind::Table, &Raw::Text("\"a.b\".\"c\"\"d\"".into())),
            Some(Value::Table(Table { schema: "a.b".into(), name: "c\"d".into() }))
        );
        for text in ["", ".", "a.", ".b", "a.b.c", "\"a", "a b.c", "\"a\"x.b"] {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(read(&"x".repeat(64)), None);
    }

    #[test]
    fn slots_take_only_what_postgresql_takes() {
        assert!(untyped(Kind::Slot, "relay_1").is_some());
        for text in ["Relay", "relay-1", "", &"x".repeat(64)] {
            assert_eq!(untyped(Kind::Slot, text), None, "{text}");
        }
    }

    #[test]
    fn numbers_stay_in_their_range_and_keep_their_type() {
        let kind = Kind::Integer { min: 1, max: 10 };
        assert_eq!(untyped(kind, "10").as_deref(), Some("10"));
        for raw in [Raw::Integer(0), Raw::Integer(11), Raw::Integer(-1), Raw::Text("5".into()), Raw::Bool(true)] {
            assert_eq!(Value::parse(kind, &raw), None, "{}", raw.shown(kind));
        }
        assert_eq!(Value::parse(Kind::Bytes { min: "1", max: "8MiB" }, &Raw::Integer(5)), Some(Value::Bytes(5)));
        assert_eq!(untyped(Kind::Duration { min: "1s", max: "1m" }, "999ms"), None);
        assert_eq!(Value::parse(Kind::Bool, &Raw::Text("true".into())), None);
        assert_eq!(untyped(Kind::Bool, "true").as_deref(), Some("true"));
        assert_eq!(untyped(Kind::Ports, "5432,65536"), None);
    }

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for text in ["127.0.0.1:9464", "[::1]:0", "localhost:80", "off"] {
            assert!(untyped(Kind::Listen, text).is_some(), "{text}");
        }
        for text in ["9464", ":9464", "127.0.0.1", "::1:80", "a b:1", "host:99999", "on"] {
            assert_eq!(untyped(Kind::Listen, text), None, "{text}");
        }
    }

    #[test]
    fn no_form_of_printing_shows_a_secret() {
        let secret = Value::Secret(Secret::new("hunter2"));
        let url = Value::Urls(vec!["nats://u:hunter2@h:1".into(), "nats://hunter2@h:2".into()]);
        let raw = Raw::Untyped("nats://a:hunter2@h,nats://b:hunter2@h".into());
        let text = format!(
            "{secret} {secret:?} {} {url} {url:?} {} {} {}",
            secret.to_json(),
            url.to_json(),
            raw.shown(Kind::Urls),
            raw.shown(Kind::Secret)
        );
        assert!(!text.contains("hunter2"), "{text}");
    }
}
