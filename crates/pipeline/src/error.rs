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
/// The database behind the address is another one than before.
pub const DATABASE_CHANGED: Code = Code("database-changed");
/// The server did not take the last position before the relay stopped.
pub const NOT_DRAINED: Code = Code("not-drained");
/// The outbox table has another name than it had.
pub const OUTBOX_RENAMED: Code = Code("outbox-renamed");
/// Reading the stream back does not come to an end.
pub const READ_BACK: Code = Code("read-back-stuck");
/// Two events seem to have the same id.
pub const SAME_ID: Code = Code("same-id");

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
        DATABASE_CHANGED,
        "While the relay ran, the server behind the address became another cluster, or one whose history lacks events \
         that were published. Find out what happened to the database, then start the relay again; it compares the \
         stream with the database first.",
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
        SAME_ID,
        "The stream had a message with an event's id before the event was sent for the first time. Most likely two rows \
         of the outbox have the same id: the broker stores only the first of them within its duplicate window. Make the \
         id unique; a primary key on it does.",
    ),
    (
        NOT_DRAINED,
        "When the relay was told to stop, some events were not acknowledged within `shutdown.drain_timeout`. Nothing \
         is lost: they were not confirmed and are looked up in the stream at the next start.",
    ),
];
