//! From checked values to what is meant.

use std::path::PathBuf;
use std::time::Duration;

use waljet_pipeline::{Columns, HeaderOptions, OutboxOptions, RetryOptions, WindowOptions};

use super::check;
use super::resolve::Effective;
use super::value::{Table, Value};
use super::{Config, Log, Nats, NatsTls, Postgres, Publisher, Stream};
use crate::secret::Secret;

/// Builds the result from values that have been checked.
pub(super) fn build(effective: &Effective) -> Config {
    let values = Values(effective);
    Config {
        postgres: Postgres {
            conninfo: check::conninfo(effective),
            password_file: effective
                .entry("postgres.password")
                .and_then(|entry| entry.secret_file.as_ref())
                .map(PathBuf::from),
            slot: values.text("postgres.slot"),
            publication: values.text("postgres.publication"),
        },
        outbox: build_outbox(&values),
        route: check::route(effective).expect("the template was checked"),
        headers: HeaderOptions {
            aggregate_type: values.bool("headers.aggregate_type"),
            event_type: values.bool("headers.event_type"),
            schema_version: values.bool("headers.schema_version"),
            tenant_id: values.bool("headers.tenant_id"),
            content_type: values.text_if("headers.content_type"),
        },
        nats: build_nats(&values),
        stream: Stream {
            replicas: values.number("nats.replicas"),
            storage: values.text("stream.storage"),
            duplicate_window: values.duration("nats.duplicate_window"),
            max_age: Some(values.duration("nats.max_age")).filter(|age| !age.is_zero()),
            max_bytes: Some(values.number("nats.max_bytes")).filter(|bytes| *bytes > 0),
        },
        publisher: Publisher {
            mode: values.text("publisher.mode"),
            ack_timeout: values.duration("publisher.ack_timeout"),
        },
        window: WindowOptions {
            max_events: values.size("window.max_events"),
            max_bytes: values.size("window.max_bytes"),
        },
        retry: RetryOptions { min: values.duration("retry.initial"), max: values.duration("retry.max") },
        admin_listen: values.text_if("admin.listen").filter(|listen| listen != "off"),
        log: Log { format: values.text("log.format"), level: values.text("log.level") },
        drain_timeout: values.duration("shutdown.drain_timeout"),
    }
}

/// Builds `[outbox]`; the preset has filled in the columns.
fn build_outbox(values: &Values<'_>) -> OutboxOptions {
    let Table { schema, name } = values.table("outbox.table");
    let columns = Columns {
        id: values.text("outbox.columns.id"),
        aggregate_type: values.text("outbox.columns.aggregate_type"),
        aggregate_id: values.text("outbox.columns.aggregate_id"),
        event_type: values.text("outbox.columns.event_type"),
        payload: values.text("outbox.columns.payload"),
        headers: values.text_if("outbox.columns.headers"),
        tenant_id: values.text_if("outbox.columns.tenant_id"),
        schema_version: values.text_if("outbox.columns.schema_version"),
    };
    OutboxOptions { schema, table: name, columns }
}

/// Builds `[nats]`.
fn build_nats(values: &Values<'_>) -> Nats {
    Nats {
        urls: values.urls("nats.url"),
        stream: values.text("nats.stream"),
        credentials: values.path("nats.credentials"),
        nkey: values.secret("nats.nkey"),
        jwt: values.secret("nats.jwt"),
        token: values.secret("nats.token"),
        user: values.text_if("nats.user"),
        password: values.secret("nats.password"),
        tls: NatsTls {
            required: values.bool("nats.tls.required"),
            first: values.bool("nats.tls.first"),
            ca: values.path("nats.tls.ca"),
            cert: values.path("nats.tls.cert"),
            key: values.path("nats.tls.key"),
        },
        domain: values.text_if("nats.domain"),
        api_prefix: values.text_if("nats.api_prefix"),
        inbox_prefix: values.text("nats.inbox_prefix"),
    }
}

/// Takes checked values by path. A value that is not of the kind that its key has would be a mistake in
/// this file, which the test that builds a configuration from defaults finds.
struct Values<'a>(&'a Effective);

impl Values<'_> {
    fn text_if(&self, path: &str) -> Option<String> {
        match self.0.value(path)? {
            Value::Text(text) if !text.is_empty() => Some(text.clone()),
            _ => None,
        }
    }

    fn text(&self, path: &str) -> String {
        self.text_if(path).expect("the key has a default of this kind")
    }

    fn path(&self, path: &str) -> Option<PathBuf> {
        self.text_if(path).map(PathBuf::from)
    }

    fn secret(&self, path: &str) -> Option<Secret> {
        if let Some(Value::Secret(secret)) = self.0.value(path) { Some(secret.clone()) } else { None }
    }

    fn bool(&self, path: &str) -> bool {
        matches!(self.0.value(path), Some(Value::Bool(true)))
    }

    fn number(&self, path: &str) -> u64 {
        let (Some(Value::Integer(number)) | Some(Value::Bytes(number))) = self.0.value(path) else {
            unreachable!("{path} has a default of this kind")
        };
        *number
    }

    fn size(&self, path: &str) -> usize {
        usize::try_from(self.number(path)).unwrap_or(usize::MAX)
    }

    fn duration(&self, path: &str) -> Duration {
        let Some(Value::Duration(duration)) = self.0.value(path) else {
            unreachable!("{path} has a default of this kind")
        };
        *duration
    }

    fn table(&self, path: &str) -> Table {
        let Some(Value::Table(table)) = self.0.value(path) else { unreachable!("{path} has a default of this kind") };
        table.clone()
    }

    fn urls(&self, path: &str) -> Vec<Secret> {
        let Some(Value::Urls(urls)) = self.0.value(path) else { return Vec::new() };
        urls.iter().map(Secret::new).collect()
    }
}
