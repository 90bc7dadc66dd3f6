//! The table of all keys. Reading, checking, `config show` and `docs/config.md` all come from it.

use super::key::{Key, Kind};

/// Keys and sections that a later version will know, and what for.
pub(crate) const LATER: &[(&str, &str)] = &[
    ("dead_letter.store", "storing dead letters"),
    ("outbox.message_prefix", "taking logical messages"),
    ("cloudevents", "CloudEvents"),
];

/// Makes a key that is unset by default.
const fn unset(path: &'static str, kind: Kind, doc: &'static str) -> Key {
    Key { path, kind, default: None, doc }
}

/// Makes a key with a default.
const fn key(path: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Key {
    Key { path, kind, default: Some(default), doc }
}

/// Makes a kind of one of a few words.
const fn choice(values: &'static [&'static str]) -> Kind {
    Kind::Choice { values, later: &[] }
}

/// All keys, in the order of the reference.
pub(crate) const KEYS: &[Key] = &[
    unset(
        "postgres.url",
        Kind::Url,
        "The database: a `postgres://` URL or a connection string of `key=value` pairs; several hosts separated by commas.",
    ),
    unset("postgres.host", Kind::List, "The host, or several to be tried in this order, instead of `postgres.url`."),
    unset(
        "postgres.port",
        Kind::Ports,
        "The port of the host, one for all hosts or one for each; 5432 where it is not set.",
    ),
    unset("postgres.user", Kind::Text, "The role to log in as; it needs REPLICATION."),
    unset("postgres.password", Kind::Secret, "The role's password."),
    unset(
        "postgres.dbname",
        Kind::Text,
        "The database that holds the outbox table; the name of the role where it is not set.",
    ),
    unset(
        "postgres.sslmode",
        choice(&["disable", "prefer", "require", "verify-ca", "verify-full"]),
        "Whether the connection is encrypted and how the server's certificate is verified.",
    ),
    unset(
        "postgres.sslrootcert",
        Kind::Path,
        "The certificates of the authorities that the server's certificate may come from.",
    ),
    unset("postgres.sslcert", Kind::Path, "The client's certificate."),
    unset("postgres.sslkey", Kind::Path, "The client's key."),
    key("postgres.slot", Kind::Slot, "waljet", "The logical replication slot; only one relay can use it at a time."),
    key("postgres.publication", Kind::Name, "waljet", "The publication that holds the outbox table."),
    key(
        "postgres.on_gap",
        choice(&["halt", "catch-up"]),
        "halt",
        "What happens when events may be missing between the stream and what the slot can send: `halt` stops the relay with exit code 4; `catch-up` publishes the missing ones from the outbox table, where the slot is what was lost, and goes on with a new slot.",
    ),
    key(
        "outbox.table",
        Kind::Table,
        "public.outbox",
        "The outbox table, by schema and name, case as in the catalog; quote a part that holds a dot.",
    ),
    key(
        "outbox.preset",
        choice(&["waljet", "debezium"]),
        "waljet",
        "Which column names apply where `outbox.columns` sets none.",
    ),
    unset("outbox.columns.id", Kind::Column, "The event id, sent as `Nats-Msg-Id`."),
    unset("outbox.columns.aggregate_type", Kind::Column, "The first half of the ordering key."),
    unset("outbox.columns.aggregate_id", Kind::Column, "The second half of the ordering key."),
    unset("outbox.columns.event_type", Kind::Column, "What happened."),
    unset(
        "outbox.columns.payload",
        Kind::Column,
        "The message body: json, jsonb, text or bytea, passed on byte for byte.",
    ),
    unset("outbox.columns.headers", Kind::OptionalColumn, "A JSON object whose string members become headers."),
    unset("outbox.columns.tenant_id", Kind::OptionalColumn, "The tenant."),
    unset("outbox.columns.schema_version", Kind::OptionalColumn, "The version of the payload's schema."),
    unset(
        "outbox.columns.sequence",
        Kind::OptionalColumn,
        "A column that grows with each insert: the order of events that come from the table, in a catch-up or a backfill.",
    ),
    unset(
        "outbox.columns.xid",
        Kind::OptionalColumn,
        "The transaction of the row, of type xid8: what tells the rows that a catch-up has to look at. Without it, all ids of the table are compared with all ids of the stream.",
    ),
    key(
        "route.subject",
        Kind::Text,
        "outbox.{aggregate_type}.{event_type}",
        "The template of the subject; in braces: `id`, `aggregate_type`, `aggregate_id`, `event_type`, `tenant_id`, `schema_version`.",
    ),
    key(
        "route.unsafe_token",
        choice(&["escape", "refuse"]),
        "escape",
        "What becomes of a value that cannot stand in a subject: percent-encoded, or the event is refused.",
    ),
    key("headers.aggregate_type", Kind::Bool, "false", "Sends `Aggregate-Type`."),
    key("headers.event_type", Kind::Bool, "false", "Sends `Event-Type`."),
    key("headers.schema_version", Kind::Bool, "false", "Sends `Schema-Version`."),
    key("headers.tenant_id", Kind::Bool, "false", "Sends `Tenant-Id`."),
    unset("headers.content_type", Kind::Text, "Sends `Content-Type` with this value."),
    key(
        "nats.url",
        Kind::Urls,
        "nats://127.0.0.1:4222",
        "The servers: `nats://` or `tls://` URLs, several as a list or separated by commas.",
    ),
    key(
        "nats.stream",
        Kind::Text,
        "OUTBOX",
        "The stream; `waljet init` creates it where it is missing, `waljet run` verifies it.",
    ),
    key(
        "nats.replicas",
        Kind::Integer { min: 1, max: 5 },
        "1",
        "How many servers hold the stream that `waljet init` creates.",
    ),
    key(
        "nats.duplicate_window",
        Kind::Duration { min: "100ms", max: "7d" },
        "2m",
        "How long the created stream knows the ids of its events.",
    ),
    key(
        "nats.max_age",
        Kind::Duration { min: "0s", max: "3650d" },
        "0s",
        "How long the created stream keeps events; 0s for ever.",
    ),
    key(
        "nats.max_bytes",
        Kind::Bytes { min: "0", max: "1024TiB" },
        "0",
        "How large the created stream may become; 0 for no limit of its own.",
    ),
    unset("nats.credentials", Kind::Path, "A credentials file (`.creds`) with JWT and key."),
    unset("nats.nkey", Kind::Secret, "The seed of an NKey (`SU…`)."),
    unset("nats.jwt", Kind::Secret, "A user JWT, whose key is `nats.nkey`."),
    unset("nats.token", Kind::Secret, "An authentication token."),
    unset("nats.user", Kind::Text, "The user to log in as."),
    unset("nats.password", Kind::Secret, "The user's password."),
    unset("nats.domain", Kind::Text, "The JetStream domain that the stream is in."),
    unset("nats.api_prefix", Kind::Text, "The prefix of the JetStream API where it is imported under another subject."),
    unset(
        "nats.inbox_prefix",
        Kind::Text,
        "The prefix of reply subjects where the user may not subscribe to `_INBOX.>`.",
    ),
    key("nats.tls.required", Kind::Bool, "false", "Refuses a connection without TLS."),
    key(
        "nats.tls.first",
        Kind::Bool,
        "false",
        "Starts TLS before the server says anything, for servers with `handshake_first`.",
    ),
    unset(
        "nats.tls.ca",
        Kind::Path,
        "The certificates of the authorities that the servers' certificates may come from.",
    ),
    unset("nats.tls.cert", Kind::Path, "The client's certificate."),
    unset("nats.tls.key", Kind::Path, "The client's key."),
    key(
        "publisher.mode",
        choice(&["auto", "fast", "chain", "lanes", "serial", "atomic"]),
        "auto",
        "How order is kept: `fast` in batches of the broker's own (nats-server 2.14, stream with `allow_batched`), `chain` pipelined with an expected last sequence, `lanes` one event of each ordering key at a time, `serial` one event at a time; `auto` takes the first of them that keeps the order. `atomic`, which `auto` never takes, stores all events of a transaction at once (nats-server 2.12.1, stream with `allow_atomic`, at most 1,000 events).",
    ),
    key(
        "publisher.ack_timeout",
        Kind::Duration { min: "100ms", max: "10m" },
        "5s",
        "How long the relay waits for an acknowledgement before it sends again.",
    ),
    key(
        "window.max_events",
        Kind::Integer { min: 1, max: 4096 },
        "1024",
        "How many events may be unacknowledged at once.",
    ),
    key(
        "window.max_bytes",
        Kind::Bytes { min: "64KiB", max: "4GiB" },
        "8MiB",
        "How many bytes of events may be unacknowledged at once.",
    ),
    key(
        "checkpoint.store",
        choice(&["postgres", "nats", "none"]),
        "postgres",
        "Where the relay keeps how far it has come, so that the next start notices a slot or a stream that was changed meanwhile: `postgres` in the table `waljet.checkpoint`, `nats` in the JetStream bucket `waljet`, under stream and slot, for roles that may not write and for standbys; `none` nowhere.",
    ),
    key(
        "checkpoint.interval",
        Kind::Duration { min: "10ms", max: "1m" },
        "1s",
        "The shortest time between two writes of the checkpoint; PostgreSQL is told of a position once it is written.",
    ),
    key(
        "replay.window",
        Kind::Duration { min: "0s", max: "30d" },
        "0s",
        "How long WAL stays available behind the confirmed position, to publish events of that time again: the slot is held back by so much, and the server keeps that WAL. 0s for no longer than it has to.",
    ),
    key(
        "replay.max_bytes",
        Kind::Bytes { min: "0", max: "1024TiB" },
        "4GiB",
        "How much WAL is kept for `replay.window` at most, whatever the time; 0 for no limit but that of the disk.",
    ),
    key(
        "retry.initial",
        Kind::Duration { min: "1ms", max: "1m" },
        "50ms",
        "The longest first pause after a failure; it doubles with each further one.",
    ),
    key("retry.max", Kind::Duration { min: "10ms", max: "10m" }, "5s", "The longest pause between two attempts."),
    key(
        "dead_letter.order",
        Kind::Choice { values: &["halt"], later: &["park", "pass"] },
        "halt",
        "What happens to events that follow one that can never be stored: the relay stops there.",
    ),
    key(
        "admin.listen",
        Kind::Listen,
        "127.0.0.1:9464",
        "Where `/livez`, `/readyz`, `/status` and `/metrics` are served, or \"off\"; they are not protected, so keep them off public addresses.",
    ),
    key(
        "log.format",
        choice(&["auto", "text", "json"]),
        "auto",
        "Lines for a person or for a machine; `auto` is text on a terminal and JSON elsewhere.",
    ),
    key(
        "log.level",
        Kind::Text,
        "info",
        "A level, or a filter such as `info,waljet_postgres=debug`; the variable RUST_LOG goes first.",
    ),
    key(
        "shutdown.drain_timeout",
        Kind::Duration { min: "0s", max: "10m" },
        "4s",
        "How long a stop waits for acknowledgements; stay below what your process manager waits before it kills.",
    ),
];
