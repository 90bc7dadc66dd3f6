//! From checked values to what is meant.

use std::path::PathBuf;
use std::time::Duration;

use waljet_jetstream::{Auth, LaneOptions, ModeChoice, NatsOptions, StreamOptions, TlsOptions};
use waljet_pipeline::{Columns, HeaderOptions, OutboxOptions, ReplayWindow, RetryOptions, WindowOptions};

use waljet_postgres::{SourceOptions, TableName};

use super::check;
use super::resolve::Effective;
use super::value::{Table, Value};
use super::{CatchUpOptions, CheckpointOptions, CheckpointStore, Config, Log};

/// Builds the result from values that have been checked.
pub(super) fn build(effective: &Effective) -> Config {
    let values = Values(effective);
    let outbox = build_outbox(&values);
    let route = check::route(effective).expect("the template was checked");
    Config {
        source: build_source(effective, &values, &outbox),
        headers: HeaderOptions {
            aggregate_type: values.bool("headers.aggregate_type"),
            event_type: values.bool("headers.event_type"),
            schema_version: values.bool("headers.schema_version"),
            tenant_id: values.bool("headers.tenant_id"),
            content_type: values.text_if("headers.content_type"),
        },
        nats: build_nats(&values),
        stream: StreamOptions {
            stream: values.text("nats.stream"),
            subject_space: route.subject_space(),
            replicas: values.size("nats.replicas"),
            duplicate_window: values.duration("nats.duplicate_window"),
            max_age: Some(values.duration("nats.max_age")).filter(|age| !age.is_zero()),
            max_bytes: Some(values.number("nats.max_bytes")).filter(|bytes| *bytes > 0),
            row_headers: outbox.columns.headers.is_some(),
            atomic: values.text("publisher.mode") == "atomic",
            ..StreamOptions::default()
        },
        lane: LaneOptions {
            mode: match values.text("publisher.mode").as_str() {
                "atomic" => ModeChoice::Atomic,
                "fast" => ModeChoice::Fast,
                "chain" => ModeChoice::Chain,
                "lanes" => ModeChoice::Lanes,
                "serial" => ModeChoice::Serial,
                _ => ModeChoice::Auto,
            },
            window: values.size("window.max_events"),
            ack_timeout: values.duration("publisher.ack_timeout"),
            ..LaneOptions::default()
        },
        window: WindowOptions {
            max_events: values.size("window.max_events"),
            max_bytes: values.size("window.max_bytes"),
        },
        checkpoint: CheckpointOptions {
            store: match values.text("checkpoint.store").as_str() {
                "nats" => CheckpointStore::Nats,
                "none" => CheckpointStore::None,
                _ => CheckpointStore::Postgres,
            },
            interval: values.duration("checkpoint.interval"),
        },
        catch_up: CatchUpOptions {
            by_itself: values.text("postgres.on_gap") == "catch-up",
            sequence: values.text_if("outbox.columns.sequence"),
            xid: values.text_if("outbox.columns.xid"),
        },
        replay_window: ReplayWindow {
            age: values.duration("replay.window"),
            max_bytes: Some(values.number("replay.max_bytes")).filter(|bytes| *bytes > 0),
        },
        retry: RetryOptions { min: values.duration("retry.initial"), max: values.duration("retry.max") },
        outbox,
        route,
        admin_listen: values.text_if("admin.listen").filter(|listen| listen != "off"),
        log: Log { format: values.text("log.format"), level: values.text("log.level") },
        drain_timeout: values.duration("shutdown.drain_timeout"),
    }
}

/// Builds `[postgres]`.
fn build_source(effective: &Effective, values: &Values<'_>, outbox: &OutboxOptions) -> SourceOptions {
    let connect = check::connect(effective).expect("the connection options were checked");
    let table = TableName::new(&outbox.schema, &outbox.table);
    let columns = &outbox.columns;
    let optional = [&columns.headers, &columns.tenant_id, &columns.schema_version].into_iter().flatten();
    let required = columns.required().map(str::to_owned);
    SourceOptions {
        columns: required.into_iter().chain(optional.cloned()).collect(),
        ..SourceOptions::new(connect, values.text("postgres.slot"), values.text("postgres.publication"), table)
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
fn build_nats(values: &Values<'_>) -> NatsOptions {
    NatsOptions {
        servers: values.urls("nats.url"),
        auth: build_auth(values),
        tls: TlsOptions {
            required: values.bool("nats.tls.required"),
            first: values.bool("nats.tls.first"),
            ca_file: values.path("nats.tls.ca"),
            cert_file: values.path("nats.tls.cert"),
            key_file: values.path("nats.tls.key"),
        },
        domain: values.text_if("nats.domain"),
        api_prefix: values.text_if("nats.api_prefix"),
        inbox_prefix: values.text_if("nats.inbox_prefix"),
        ..NatsOptions::default()
    }
}

/// Takes the one way to log in that is set.
fn build_auth(values: &Values<'_>) -> Auth {
    let secret = |path| values.secret(path);
    if let Some(file) = values.path("nats.credentials") {
        return Auth::Credentials(file);
    }
    if let Some(token) = secret("nats.token") {
        return Auth::Token(token);
    }
    match (values.text_if("nats.user"), secret("nats.password"), secret("nats.nkey"), secret("nats.jwt")) {
        (Some(user), Some(password), _, _) => Auth::UserPassword { user, password },
        (_, _, Some(seed), Some(jwt)) => Auth::Jwt { jwt, seed },
        (_, _, Some(seed), None) => Auth::NKey(seed),
        _ => Auth::None,
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

    fn secret(&self, path: &str) -> Option<waljet_jetstream::Secret> {
        if let Some(Value::Secret(secret)) = self.0.value(path) { Some(secret.expose().into()) } else { None }
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

    fn urls(&self, path: &str) -> Vec<String> {
        if let Some(Value::Urls(urls)) = self.0.value(path) { urls.clone() } else { Vec::new() }
    }
}
