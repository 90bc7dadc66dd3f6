//! From an event to the subject it is published to.

use std::fmt;

use crate::{InvalidSubject, OutboxEvent, Subject};

/// How subjects are made: a template such as `outbox.{aggregate_type}.{event_type}`.
///
/// Whatever a row holds, the subject lies below the template's literal prefix and has as many tokens as
/// the template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    parts: Vec<Part>,
    unsafe_token: UnsafeToken,
}

/// What becomes of a value that cannot stand in a subject as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnsafeToken {
    /// Dots, wildcards, white space, control characters and `%` become `%XX`, byte by byte, as in URLs.
    #[default]
    Escape,
    /// The event is refused.
    Refuse,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    Field(Field),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Id,
    AggregateType,
    AggregateId,
    EventType,
    TenantId,
    SchemaVersion,
}

const FIELDS: [(&str, Field); 6] = [
    ("id", Field::Id),
    ("aggregate_type", Field::AggregateType),
    ("aggregate_id", Field::AggregateId),
    ("event_type", Field::EventType),
    ("tenant_id", Field::TenantId),
    ("schema_version", Field::SchemaVersion),
];

/// The template cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTemplate {
    /// A brace without its partner.
    #[error("a brace is not closed, or closed without being opened")]
    Brace,
    /// A name that is not a field of an event.
    #[error(
        "expected one of id, aggregate_type, aggregate_id, event_type, tenant_id, schema_version in braces, found {0:?}"
    )]
    Field(String),
    /// The first token is made of data, so that rows could choose any subject.
    #[error("the first token must be literal, such as outbox in outbox.{{event_type}}")]
    Prefix,
    /// The literal parts do not make a subject.
    #[error("{0}")]
    Literal(#[from] InvalidSubject),
}

/// Why an event has no subject. Holds no row value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// A field that the template needs is empty or null.
    #[error("the subject needs {0}, which is empty")]
    Empty(&'static str),
    /// A field holds what cannot stand in a subject, and the configuration says to refuse it.
    #[error("{0} holds a dot, a wildcard, white space, a control character or %, and route.unsafe_token is \"refuse\"")]
    Unsafe(&'static str),
    /// The whole is not a subject.
    #[error(transparent)]
    Subject(#[from] InvalidSubject),
}

impl Route {
    /// Reads a template.
    ///
    /// # Errors
    ///
    /// Says what is wrong with it.
    pub fn new(template: &str, unsafe_token: UnsafeToken) -> Result<Self, InvalidTemplate> {
        let mut parts = Vec::new();
        let mut rest = template;
        while let Some(open) = rest.find(['{', '}']) {
            let (literal, after) = rest.split_at(open);
            let (name, tail) =
                after.strip_prefix('{').and_then(|body| body.split_once('}')).ok_or(InvalidTemplate::Brace)?;
            let field = FIELDS.iter().find(|(known, _)| *known == name);
            let (_, field) = field.ok_or_else(|| InvalidTemplate::Field(name.to_owned()))?;
            if !literal.is_empty() {
                parts.push(Part::Literal(literal.to_owned()));
            }
            parts.push(Part::Field(*field));
            rest = tail;
        }
        if !rest.is_empty() {
            parts.push(Part::Literal(rest.to_owned()));
        }
        let route = Self { parts, unsafe_token };
        Subject::new(route.fill(|_| "x".to_owned()))?;
        match route.parts.as_slice() {
            [Part::Literal(first), ..] if first.contains('.') || route.parts.len() == 1 => Ok(route),
            _ => Err(InvalidTemplate::Prefix),
        }
    }

    /// Returns the subjects that can come out, as a filter: the literal prefix and `>`.
    #[must_use]
    pub fn subject_space(&self) -> String {
        match self.parts.as_slice() {
            [Part::Literal(whole)] => whole.clone(),
            [Part::Literal(first), ..] => {
                let tokens = first.rsplit_once('.').map_or("", |(tokens, _)| tokens);
                format!("{tokens}.>")
            }
            _ => ">".to_owned(),
        }
    }

    /// Returns the subject of an event.
    ///
    /// # Errors
    ///
    /// The event cannot be published with this template.
    pub fn subject(&self, event: &OutboxEvent) -> Result<Subject, RouteError> {
        let mut text = String::with_capacity(96);
        for part in &self.parts {
            match part {
                Part::Literal(literal) => text.push_str(literal),
                Part::Field(field) => self.push_field(&mut text, *field, event)?,
            }
        }
        Ok(Subject::new(text)?)
    }

    fn push_field(&self, text: &mut String, field: Field, event: &OutboxEvent) -> Result<(), RouteError> {
        let (name, value) = match field {
            Field::Id => ("id", Some(&event.id)),
            Field::AggregateType => ("aggregate_type", Some(&event.aggregate_type)),
            Field::AggregateId => ("aggregate_id", Some(&event.aggregate_id)),
            Field::EventType => ("event_type", Some(&event.event_type)),
            Field::TenantId => ("tenant_id", event.tenant_id.as_ref()),
            Field::SchemaVersion => ("schema_version", event.schema_version.as_ref()),
        };
        let value = value.filter(|value| !value.is_empty()).ok_or(RouteError::Empty(name))?;
        match (value.chars().any(is_unsafe), self.unsafe_token) {
            (false, _) => text.push_str(value),
            (true, UnsafeToken::Escape) => escape(text, value),
            (true, UnsafeToken::Refuse) => return Err(RouteError::Unsafe(name)),
        }
        Ok(())
    }

    fn fill(&self, value: impl Fn(Field) -> String) -> String {
        let text = |part: &Part| match part {
            Part::Literal(literal) => literal.clone(),
            Part::Field(field) => value(*field),
        };
        self.parts.iter().map(text).collect()
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |field| FIELDS.iter().find(|(_, known)| *known == field).map_or("", |(name, _)| name);
        f.write_str(&self.fill(|field| format!("{{{}}}", name(field))))
    }
}

fn is_unsafe(c: char) -> bool {
    c.is_whitespace() || c.is_control() || matches!(c, '.' | '*' | '>' | '%')
}

fn escape(text: &mut String, value: &str) {
    use fmt::Write as _;
    for c in value.chars() {
        if is_unsafe(c) {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                // Writing to a String cannot fail.
                let _ = write!(text, "%{byte:02X}");
            }
        } else {
            text.push(c);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn event(aggregate_type: &str, event_type: &str) -> OutboxEvent {
        OutboxEvent {
            id: "1".into(),
            aggregate_type: aggregate_type.into(),
            aggregate_id: "42".into(),
            event_type: event_type.into(),
            payload: None,
            row_headers: Vec::new(),
            tenant_id: None,
            schema_version: None,
        }
    }

    fn route(template: &str) -> Route {
        Route::new(template, UnsafeToken::Escape).unwrap()
    }

    #[test]
    fn the_default_template_makes_three_tokens() {
        let route = route("outbox.{aggregate_type}.{event_type}");
        assert_eq!(route.subject(&event("order", "created")).unwrap().as_str(), "outbox.order.created");
        assert_eq!(route.subject_space(), "outbox.>");
        assert_eq!(route.to_string(), "outbox.{aggregate_type}.{event_type}");
    }

    #[test]
    fn the_space_is_the_literal_tokens_before_the_first_field() {
        assert_eq!(route("a.b.x-{id}.c").subject_space(), "a.b.>");
        assert_eq!(route("fixed.subject").subject_space(), "fixed.subject");
    }

    #[test]
    fn a_template_that_data_could_lead_anywhere_is_refused() {
        let why = |template| Route::new(template, UnsafeToken::Escape).map(|_| ());
        assert_eq!(why("{event_type}.x"), Err(InvalidTemplate::Prefix));
        assert_eq!(why("outbox-{event_type}.x"), Err(InvalidTemplate::Prefix));
        assert_eq!(why("a.{colour}"), Err(InvalidTemplate::Field("colour".into())));
        for template in ["a.{id", "a.id}", "a.{id}}"] {
            assert_eq!(why(template), Err(InvalidTemplate::Brace), "{template}");
        }
        assert_eq!(why("a..{id}"), Err(InvalidTemplate::Literal(InvalidSubject::EmptyToken)));
        assert_eq!(why("$JS.{id}"), Err(InvalidTemplate::Literal(InvalidSubject::Reserved)));
    }

    #[test]
    fn a_value_that_could_add_tokens_or_wildcards_is_escaped_or_refused() {
        let subject = route("o.{aggregate_type}.{event_type}").subject(&event("a.b *>%", "x\ty")).unwrap();
        assert_eq!(subject.as_str(), "o.a%2Eb%20%2A%3E%25.x%09y");
        let strict = Route::new("o.{aggregate_type}", UnsafeToken::Refuse).unwrap();
        assert_eq!(strict.subject(&event("a.b", "x")), Err(RouteError::Unsafe("aggregate_type")));
    }

    #[test]
    fn an_empty_or_missing_value_is_refused_by_its_name() {
        assert_eq!(route("o.{event_type}").subject(&event("a", "")), Err(RouteError::Empty("event_type")));
        assert_eq!(route("o.{tenant_id}").subject(&event("a", "b")), Err(RouteError::Empty("tenant_id")));
    }

    proptest! {
        #[test]
        fn no_value_leaves_the_prefix_or_changes_the_number_of_tokens(kind in ".{1,40}", what in ".{1,40}") {
            let route = route("outbox.{aggregate_type}.{event_type}");
            if let Ok(subject) = route.subject(&event(&kind, &what)) {
                prop_assert!(subject.as_str().starts_with("outbox."));
                prop_assert_eq!(subject.as_str().split('.').count(), 3);
            }
        }

        #[test]
        fn different_values_never_share_a_subject(a in ".{1,20}", b in ".{1,20}") {
            let route = route("o.{aggregate_type}");
            let (x, y) = (route.subject(&event(&a, "e")).unwrap(), route.subject(&event(&b, "e")).unwrap());
            prop_assert_eq!(a == b, x == y);
        }
    }
}
