//! The codes of the faults that the pipeline finds itself.

use crate::Code;

/// A replication message is not what the protocol describes.
pub const UNDECODABLE: Code = Code("undecodable-message");
/// Replication messages came in an order that the protocol does not allow.
pub const PROTOCOL: Code = Code("broken-protocol");
/// An event can never be published as it is.
pub const EVENT_REFUSED: Code = Code("event-refused");
/// The stream holds events that are not part of the database's history.
pub const STREAM_AHEAD: Code = Code("stream-not-of-this-database");
/// The address leads to another cluster than before.
pub const OTHER_CLUSTER: Code = Code("other-cluster");
/// The server's history lacks events that were published.
pub const DATABASE_CHANGED: Code = Code("database-changed");
/// The server did not take the last position before the relay stopped.
pub const NOT_DRAINED: Code = Code("not-drained");
/// The outbox table has another name than it had.
pub const OUTBOX_RENAMED: Code = Code("outbox-renamed");
/// Reading the stream back does not come to an end.
pub const READ_BACK: Code = Code("read-back-stuck");
/// The stream does not tell whether events are stored.
pub const READ_BACK_INCOMPLETE: Code = Code("read-back-incomplete");
/// Two events seem to have the same id.
pub const SAME_ID: Code = Code("same-id");

/// The checkpoint cannot be stored.
pub const CHECKPOINT_UNSAVED: Code = Code("checkpoint-unsaved");
/// The store of the checkpoint is not there, or not permitted.
pub const CHECKPOINT_MISSING: Code = Code("checkpoint-missing");
/// A gap was found by an earlier run and is not accepted.
pub const GAP_PENDING: Code = Code("gap-pending");

/// All codes of this crate, with what they mean and what to do.
pub const CODES: &[(Code, &str)] = &[
    (
        UNDECODABLE,
        "A message of the replication stream is not what the manual describes for its protocol version. Nothing past \
         it is confirmed, and the relay connects again with growing pauses. Report it with the PostgreSQL version.",
    ),
    (
        PROTOCOL,
        "The messages of the replication stream came in an order that the protocol does not allow, such as a row \
         outside a transaction. Nothing past it is confirmed, and the relay connects again with growing pauses. Check \
         that nothing but PostgreSQL answers at the address, and report it with the PostgreSQL version.",
    ),
    (
        EVENT_REFUSED,
        "An event can never be published as it is: a required column is empty, a header is reserved or malformed, its \
         subject would not be one, or it is larger than the broker takes. Nothing is skipped: the relay stands still \
         at this event, says so in readiness, and looks again every 30 s. If the broker's limit is the reason, raise \
         `max_payload` (or the stream's `max_msg_size`); if the configuration is, correct it and restart; if the row \
         itself is, stop the relay, publish by hand what consumers need, and go past the transaction with \
         `waljet slot advance`.",
    ),
    (
        STREAM_AHEAD,
        "The last event in the stream does not belong to the history of the database that the relay is connected to: \
         another cluster, a timeline that was left before the event, or WAL that the server no longer has, as after a \
         restore or a failover that lost transactions. Find out which events the stream has and the database lacks. \
         Then either use another stream, or go on with `waljet run --accept-gap`.",
    ),
    (
        OTHER_CLUSTER,
        "The server has another system identifier than the one that the relay read from before: another cluster answers \
         at the address. Nothing was told to its slot. Correct `postgres.url`, or find out what was done to the database; \
         then go on with `waljet run --accept-gap`.",
    ),
    (
        DATABASE_CHANGED,
        "While the relay ran, the server behind the address became one whose history lacks events that were published. \
         Find out what happened to the database, compare the table with the stream, then go on with \
         `waljet run --accept-gap`.",
    ),
    (
        OUTBOX_RENAMED,
        "The outbox table was renamed, or moved to another schema, while the relay ran, and rows of it came under the new \
         name. Nothing past them is confirmed. Set `outbox.table` to the new name and start the relay again, or rename \
         the table back: rows that were written under the new name then still need the new name to be taken up.",
    ),
    (
        READ_BACK,
        "What the stream holds past the position that publishing resumes from was read, and it says nothing about the \
         events at that position, so reading the same again would go on for ever. Nothing is published meanwhile. Report \
         it, with the `Waljet-Position` headers of the messages around that position.",
    ),
    (
        READ_BACK_INCOMPLETE,
        "A warning. What is stored past the confirmed position is read back from the stream before anything is sent, and \
         the stream no longer holds all that would have to be read: it was purged, its messages aged out, were deleted, \
         rolled up or consumed from a work queue, or too many of them carry no position that can be read. The events are \
         sent, for losing them would be worse; those that the stream was given before, longer ago than its duplicate \
         window, are in it twice by then or reach consumers twice, under the same `Nats-Msg-Id`. \
         `waljet_read_back_unsure_events_total` counts the events in question; the first of them is in the log. To keep it \
         from happening, let the stream keep its messages for longer than the relay or its slot may be behind.",
    ),
    (
        SAME_ID,
        "The stream had a message with an event's id before the event was sent for the first time. Most likely two rows \
         of the outbox have the same id: the broker stores only the first of them within its duplicate window. Make the \
         id unique; a primary key on it does.",
    ),
    (
        CHECKPOINT_UNSAVED,
        "The checkpoint cannot be stored. Events flow on, and PostgreSQL is told of no position past the last one that was \
         stored, so that it keeps WAL. It is tried again for ever. The cause names what stands in the way, such as a \
         revoked privilege or a full disk.",
    ),
    (
        CHECKPOINT_MISSING,
        "The relay goes on without a stored checkpoint, since its table or bucket is not there or the role may not use it. \
         What happens to the slot or the stream while the relay is not running then goes unnoticed. `waljet init` creates \
         it; a role that may not write to the database can keep it in JetStream with `checkpoint.store = \"nats\"`, and \
         `checkpoint.store = \"none\"` does without.",
    ),
    (
        GAP_PENDING,
        "An earlier run of the relay found that events may be missing, and nobody has said that it may go on. The message \
         repeats what was found. Compare the table with the stream, publish what is missing by hand, then go on with \
         `waljet run --accept-gap`.",
    ),
    (
        NOT_DRAINED,
        "When the relay was told to stop, some events were not acknowledged within `shutdown.drain_timeout`. Nothing \
         is lost: they were not confirmed and are looked up in the stream at the next start.",
    ),
];
