//! From a row of the outbox table to an event.

use bytes::Bytes;
use waljet_pgoutput::{Oid, Relation, Tuple, Value};

use crate::headers::{self, HeaderError};
use crate::{Columns, OutboxOptions, RouteError};

/// One event, as its row has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxEvent {
    /// The event id.
    pub id: String,
    /// The first half of the ordering key.
    pub aggregate_type: String,
    /// The second half of the ordering key.
    pub aggregate_id: String,
    /// What happened.
    pub event_type: String,
    /// The payload; `None` for SQL NULL.
    pub payload: Option<Bytes>,
    /// The members of the headers column.
    pub row_headers: Vec<(String, String)>,
    /// The tenant, where there is one.
    pub tenant_id: Option<String>,
    /// The version of the payload's schema, where there is one.
    pub schema_version: Option<String>,
}

/// Why a row is not an event that can be published. Holds no row value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// The row has fewer columns than its relation.
    #[error("the row has no value for column {0:?}")]
    Missing(String),
    /// A column that every event needs is NULL or empty.
    #[error("column {0:?} is null or empty")]
    Empty(String),
    /// PostgreSQL did not send the value.
    #[error("column {0:?} holds an unchanged TOAST value, which an insert never does")]
    UnchangedToast(String),
    /// The bytes are not text.
    #[error("column {0:?} is not valid UTF-8")]
    NotUtf8(String),
    /// The value cannot be a header.
    #[error("column {0:?} has a control character")]
    ControlCharacter(String),
    /// A `bytea` value that is not in the `hex` output form.
    #[error("column {0:?} is a bytea value that is not in the form \\x and hexadecimal digits")]
    NotHex(String),
    /// The headers column.
    #[error("column {0:?}: {1}")]
    Headers(String, #[source] HeaderError),
    /// The relation lacks a mapped column.
    #[error("table {table} has no column {column:?}; it has {found}")]
    NoColumn {
        /// The table.
        table: String,
        /// What was looked for.
        column: String,
        /// What is there.
        found: String,
    },
    /// The subject.
    #[error(transparent)]
    Route(#[from] RouteError),
}

/// `bytea` in `pg_type`.
const BYTEA: Oid = Oid(17);

/// Where the fields of an event stand in the rows of one relation.
#[derive(Clone, Debug)]
pub struct Mapping {
    names: Columns,
    id: usize,
    aggregate_type: usize,
    aggregate_id: usize,
    event_type: usize,
    payload: usize,
    payload_is_bytea: bool,
    headers: Option<usize>,
    tenant_id: Option<usize>,
    schema_version: Option<usize>,
}

impl Mapping {
    /// Returns whether a relation is the outbox table.
    #[must_use]
    pub fn is_outbox(options: &OutboxOptions, relation: &Relation) -> bool {
        relation.schema == options.schema.as_bytes() && relation.name == options.table.as_bytes()
    }

    /// Finds the mapped columns by their names. Optional ones that the relation lacks are left out.
    ///
    /// # Errors
    ///
    /// [`EventError::NoColumn`] for the first required column that is not there.
    pub fn new(options: &OutboxOptions, relation: &Relation) -> Result<Self, EventError> {
        let find = |name: &str| relation.columns.iter().position(|column| column.name == name.as_bytes());
        let required = |name: &str| {
            find(name).ok_or_else(|| EventError::NoColumn {
                table: format!("{}.{}", options.schema, options.table),
                column: name.to_owned(),
                found: column_names(relation),
            })
        };
        let names = &options.columns;
        let payload = required(&names.payload)?;
        Ok(Self {
            id: required(&names.id)?,
            aggregate_type: required(&names.aggregate_type)?,
            aggregate_id: required(&names.aggregate_id)?,
            event_type: required(&names.event_type)?,
            payload,
            payload_is_bytea: relation.columns.get(payload).is_some_and(|column| column.type_oid == BYTEA),
            headers: names.headers.as_deref().and_then(find),
            tenant_id: names.tenant_id.as_deref().and_then(find),
            schema_version: names.schema_version.as_deref().and_then(find),
            names: names.clone(),
        })
    }

    /// Makes the event of a row.
    ///
    /// # Errors
    ///
    /// The row can never be published.
    pub fn event(&self, row: &Tuple) -> Result<OutboxEvent, EventError> {
        Ok(OutboxEvent {
            // Blanks around it do not survive being read back from a header.
            id: required_text(row, self.id, &self.names.id)?.trim().to_owned(),
            aggregate_type: required_text(row, self.aggregate_type, &self.names.aggregate_type)?,
            aggregate_id: required_text(row, self.aggregate_id, &self.names.aggregate_id)?,
            event_type: required_text(row, self.event_type, &self.names.event_type)?,
            payload: self.payload(row)?,
            row_headers: self.row_headers(row)?,
            tenant_id: optional_text(row, self.tenant_id, self.names.tenant_id.as_deref())?,
            schema_version: optional_text(row, self.schema_version, self.names.schema_version.as_deref())?,
        })
    }

    fn payload(&self, row: &Tuple) -> Result<Option<Bytes>, EventError> {
        let name = &self.names.payload;
        match value(row, self.payload, name)? {
            Some(bytes) if self.payload_is_bytea => decode_hex(bytes, name).map(Some),
            other => Ok(other.cloned()),
        }
    }

    fn row_headers(&self, row: &Tuple) -> Result<Vec<(String, String)>, EventError> {
        let (Some(index), Some(name)) = (self.headers, self.names.headers.as_deref()) else {
            return Ok(Vec::new());
        };
        let Some(json) = value(row, index, name)? else { return Ok(Vec::new()) };
        headers::parse_row_headers(json).map_err(|error| EventError::Headers(name.to_owned(), error))
    }
}

fn column_names(relation: &Relation) -> String {
    let names: Vec<_> = relation.columns.iter().map(|column| String::from_utf8_lossy(&column.name)).collect();
    names.join(", ")
}

/// The bytes of a column; `None` for NULL.
fn value<'a>(row: &'a Tuple, index: usize, name: &str) -> Result<Option<&'a Bytes>, EventError> {
    match row.0.get(index) {
        None => Err(EventError::Missing(name.to_owned())),
        Some(Value::UnchangedToast) => Err(EventError::UnchangedToast(name.to_owned())),
        Some(Value::Null) => Ok(None),
        Some(Value::Text(bytes) | Value::Binary(bytes)) => Ok(Some(bytes)),
    }
}

/// A text that may stand in a header.
fn text(bytes: &[u8], name: &str) -> Result<String, EventError> {
    let text = std::str::from_utf8(bytes).map_err(|_| EventError::NotUtf8(name.to_owned()))?;
    if headers::is_value(text) { Ok(text.to_owned()) } else { Err(EventError::ControlCharacter(name.to_owned())) }
}

fn required_text(row: &Tuple, index: usize, name: &str) -> Result<String, EventError> {
    match value(row, index, name)? {
        Some(bytes) if !bytes.trim_ascii().is_empty() => text(bytes, name),
        _ => Err(EventError::Empty(name.to_owned())),
    }
}

fn optional_text(row: &Tuple, index: Option<usize>, name: Option<&str>) -> Result<Option<String>, EventError> {
    let (Some(index), Some(name)) = (index, name) else { return Ok(None) };
    value(row, index, name)?.map(|bytes| text(bytes, name)).transpose()
}

/// The bytes of a `bytea` in its `hex` output form, which the session pins.
fn decode_hex(text: &[u8], name: &str) -> Result<Bytes, EventError> {
    let digit = |byte: &u8| (*byte as char).to_digit(16).map(|digit| digit as u8);
    let pair = |pair: &[u8]| match pair {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    };
    text.strip_prefix(b"\\x")
        .and_then(|digits| digits.chunks(2).map(pair).collect::<Option<Vec<u8>>>())
        .map(Bytes::from)
        .ok_or_else(|| EventError::NotHex(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use waljet_pgoutput::{Column, ReplicaIdentity};

    use super::*;

    const TEXT: u32 = 25;

    fn options() -> OutboxOptions {
        OutboxOptions { schema: "public".into(), table: "outbox".into(), columns: Columns::waljet() }
    }

    fn relation(columns: &[(&'static str, u32)]) -> Relation {
        let column = |(name, oid): &(&'static str, u32)| Column {
            key: false,
            name: Bytes::from_static(name.as_bytes()),
            type_oid: Oid(*oid),
            type_modifier: -1,
        };
        Relation {
            xid: None,
            oid: Oid(1),
            schema: Bytes::from_static(b"public"),
            name: Bytes::from_static(b"outbox"),
            replica_identity: ReplicaIdentity::Default,
            columns: columns.iter().map(column).collect(),
        }
    }

    fn row(values: &[Option<&'static str>]) -> Tuple {
        let value = |value: &Option<&'static str>| match value {
            Some(text) => Value::Text(Bytes::from_static(text.as_bytes())),
            None => Value::Null,
        };
        Tuple(values.iter().map(value).collect())
    }

    const MINIMAL: [(&str, u32); 5] =
        [("payload", TEXT), ("id", TEXT), ("event_type", TEXT), ("aggregate_id", TEXT), ("aggregate_type", TEXT)];

    #[test]
    fn columns_are_found_by_name_in_any_order_and_optional_ones_may_be_absent() {
        let mapping = Mapping::new(&options(), &relation(&MINIMAL)).unwrap();
        let event = mapping.event(&row(&[Some("{}"), Some("e1"), Some("created"), Some("42"), Some("order")])).unwrap();
        assert_eq!((event.id.as_str(), event.aggregate_id.as_str()), ("e1", "42"));
        assert_eq!(event.payload.as_deref(), Some(&b"{}"[..]));
        assert!(event.row_headers.is_empty() && event.tenant_id.is_none());
    }

    #[test]
    fn a_missing_column_is_named_with_those_that_are_there() {
        let error = Mapping::new(&options(), &relation(&MINIMAL[1..])).unwrap_err();
        let text = "table public.outbox has no column \"payload\"; it has id, event_type, aggregate_id, aggregate_type";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn a_null_payload_differs_from_an_empty_one_and_from_json_null() {
        let mapping = Mapping::new(&options(), &relation(&MINIMAL)).unwrap();
        let payload = |text| mapping.event(&row(&[text, Some("1"), Some("e"), Some("a"), Some("t")])).unwrap().payload;
        assert_eq!(payload(None), None);
        assert_eq!(payload(Some("")), Some(Bytes::new()));
        assert_eq!(payload(Some("null")), Some(Bytes::from_static(b"null")));
    }

    #[test]
    fn a_bytea_payload_is_sent_as_its_bytes() {
        let mut columns = MINIMAL;
        columns[0].1 = 17;
        let mapping = Mapping::new(&options(), &relation(&columns)).unwrap();
        let payload = |text| mapping.event(&row(&[Some(text), Some("1"), Some("e"), Some("a"), Some("t")]));
        assert_eq!(payload("\\x00ff5C27").unwrap().payload, Some(Bytes::from_static(b"\x00\xff\x5c\x27")));
        assert_eq!(payload("\\x").unwrap().payload, Some(Bytes::new()));
        for text in ["\\x0", "\\xzz", "00ff", "\\000"] {
            assert_eq!(payload(text), Err(EventError::NotHex("payload".into())), "{text}");
        }
    }

    #[test]
    fn a_row_that_cannot_be_an_event_is_refused_by_column() {
        let mapping = Mapping::new(&options(), &relation(&MINIMAL)).unwrap();
        let why = |id: Value| {
            let text = |text: &'static str| Value::Text(Bytes::from_static(text.as_bytes()));
            mapping.event(&Tuple(vec![text("{}"), id, text("e"), text("a"), text("t")])).unwrap_err()
        };
        assert_eq!(why(Value::Null), EventError::Empty("id".into()));
        assert_eq!(why(Value::Text(Bytes::new())), EventError::Empty("id".into()));
        assert_eq!(why(Value::UnchangedToast), EventError::UnchangedToast("id".into()));
        assert_eq!(why(Value::Text(Bytes::from_static(b"\xe9"))), EventError::NotUtf8("id".into()));
        assert_eq!(why(Value::Text(Bytes::from_static(b"a\nb"))), EventError::ControlCharacter("id".into()));
        assert_eq!(mapping.event(&Tuple(Vec::new())), Err(EventError::Missing("id".into())));
    }
}
