//! Every fault of this crate, and the one table from SQLSTATE to what it obliges.

use std::error::Error;
use std::fmt;
use std::io;

use pgwire_replication::protocol::ErrorFields;
use waljet_pgoutput::Lsn;
use waljet_pipeline::error::OTHER_CLUSTER;
use waljet_pipeline::{Action, Code, Confirmed, Fault, History, Identity};

/// The connection options cannot be read.
pub const CONNECT_OPTIONS: Code = Code("postgres-options");
/// No address answered.
pub const UNREACHABLE: Code = Code("postgres-unreachable");
/// The server starts, stops or recovers.
pub const UNAVAILABLE: Code = Code("postgres-unavailable");
/// The connection ended.
pub const CONNECTION_LOST: Code = Code("postgres-connection-lost");
/// Nothing was heard for too long.
pub const SILENT: Code = Code("postgres-silent");
/// A connection pooler stands in between.
pub const POOLER: Code = Code("postgres-pooler");
/// TLS could not be agreed on or not be verified.
pub const TLS: Code = Code("postgres-tls");
/// The server did not accept the role or its password.
pub const AUTHENTICATION: Code = Code("postgres-authentication");
/// The server asks for a method that waljet does not speak.
pub const AUTHENTICATION_METHOD: Code = Code("postgres-authentication-method");
/// The role may not do this.
pub const PRIVILEGE: Code = Code("postgres-privilege");
/// The database does not exist.
pub const DATABASE_MISSING: Code = Code("postgres-database-missing");
/// The server's version is not supported.
pub const VERSION: Code = Code("postgres-version");
/// The server is a standby that cannot decode.
pub const STANDBY: Code = Code("postgres-standby");
/// `wal_level` is too low.
pub const WAL_LEVEL: Code = Code("postgres-wal-level");
/// All connections or WAL senders are in use.
pub const TOO_MANY_CONNECTIONS: Code = Code("postgres-too-many-connections");
/// All replication slots are in use.
pub const SLOTS_EXHAUSTED: Code = Code("postgres-slots-exhausted");
/// The server cannot do this.
pub const UNSUPPORTED: Code = Code("postgres-unsupported");
/// The server sent what the protocol does not allow here.
pub const PROTOCOL: Code = Code("postgres-protocol");
/// Any other error of the server.
pub const SERVER: Code = Code("postgres-server-error");
/// The slot's name is not one.
pub const SLOT_NAME: Code = Code("slot-name");
/// The slot does not exist.
pub const SLOT_MISSING: Code = Code("slot-missing");
/// Somebody else reads the slot.
pub const SLOT_ACTIVE: Code = Code("slot-active");
/// The slot is not a `pgoutput` slot.
pub const SLOT_PLUGIN: Code = Code("slot-plugin");
/// The slot belongs to another database.
pub const SLOT_DATABASE: Code = Code("slot-database");
/// The slot decodes prepared transactions.
pub const SLOT_TWO_PHASE: Code = Code("slot-two-phase");
/// The slot lost its WAL.
pub const SLOT_INVALIDATED: Code = Code("slot-invalidated");
/// The slot stands past what this relay confirmed.
pub const SLOT_MOVED: Code = Code("slot-moved");
/// An old transaction holds up the creation of the slot.
pub const SLOT_BLOCKED: Code = Code("slot-blocked");
/// A slot cannot be moved back.
pub const SLOT_ADVANCE: Code = Code("slot-advance");
/// A catch-up from the table did not come to its end.
pub const CATCH_UP: Code = Code("catch-up-unfinished");
/// The server has less WAL than was confirmed.
pub const WAL_BEHIND: Code = Code("wal-behind");
/// WAL that the slot needs is gone.
pub const WAL_REMOVED: Code = Code("wal-removed");
/// The last position could not be confirmed.
pub const UNCONFIRMED: Code = Code("close-unconfirmed");
/// The table does not exist.
pub const TABLE_MISSING: Code = Code("table-missing");
/// The table's kind or persistence keeps it out of the WAL.
pub const TABLE_KIND: Code = Code("table-kind");
/// Mapped columns do not exist.
pub const COLUMN_MISSING: Code = Code("column-missing");
/// A mapped column is not sent or not of use.
pub const COLUMN_UNPUBLISHED: Code = Code("column-unpublished");
/// The publication does not exist.
pub const PUBLICATION_MISSING: Code = Code("publication-missing");
/// The publication does not hold the table.
pub const PUBLICATION_TABLE: Code = Code("publication-table");
/// The publication does not publish inserts.
pub const PUBLICATION_INSERT: Code = Code("publication-insert");
/// The publication sends the rows under another table's name.
pub const PUBLICATION_ROOT: Code = Code("publication-root");

/// Every code of this crate: what it means and what to do.
pub const CODES: &[(Code, &str)] = &[
    (CONNECT_OPTIONS, "The connection URL or a connection setting cannot be read. Mend the named part of [postgres]."),
    (
        UNREACHABLE,
        "No address of the server answered in time. waljet tries again for ever; verify host, port and firewall.",
    ),
    (UNAVAILABLE, "The server is starting, stopping or recovering. waljet tries again for ever."),
    (
        CONNECTION_LOST,
        "The connection to the server ended. waljet connects again and goes on from the last confirmed position.",
    ),
    (SILENT, "The server sent nothing for a whole wal_sender_timeout although it was asked to. waljet connects again."),
    (
        POOLER,
        "A connection pooler answered, and poolers do not pass replication. Give the address of PostgreSQL itself.",
    ),
    (
        TLS,
        "TLS was refused, or the server's certificate could not be verified. Mend sslmode, sslrootcert or the certificate; nothing is sent unverified.",
    ),
    (
        AUTHENTICATION,
        "The server did not accept the role, its password or this client's address. Verify them, and pg_hba.conf.",
    ),
    (
        AUTHENTICATION_METHOD,
        "pg_hba.conf asks for a method that waljet does not speak. Use scram-sha-256, cert, md5, password, peer or trust for this role.",
    ),
    (PRIVILEGE, "The role lacks a privilege. The hint holds the statement that grants it."),
    (DATABASE_MISSING, "The database does not exist. Verify its name in the URL."),
    (VERSION, "The server is older than PostgreSQL 14, which cannot be relied on. Upgrade the server."),
    (
        STANDBY,
        "The server is a standby that cannot decode its WAL logically. Connect to the primary, or list all hosts in the URL.",
    ),
    (WAL_LEVEL, "wal_level is not logical. Set it and restart the server."),
    (
        TOO_MANY_CONNECTIONS,
        "All connections or WAL senders of the server are in use. Raise max_connections or max_wal_senders, or end idle ones; waljet tries again.",
    ),
    (
        SLOTS_EXHAUSTED,
        "All replication slots are in use. Drop an unused one or raise max_replication_slots; waljet tries again.",
    ),
    (UNSUPPORTED, "The server cannot do what was asked of it. Its message says what."),
    (
        PROTOCOL,
        "The server sent something that the replication protocol does not allow at that place. waljet connects again; if it lasts, something stands between waljet and PostgreSQL.",
    ),
    (
        SERVER,
        "The server reported an error that has no code of its own here. waljet tries again; the server's message and SQLSTATE say what it is.",
    ),
    (
        SLOT_NAME,
        "A slot's name may hold lower-case letters, digits and underscores only, at most 63. Choose another one.",
    ),
    (
        SLOT_MISSING,
        "The replication slot does not exist. If the relay never ran, `waljet init` creates it. If it did, events committed since its last position are in no slot, and `waljet run` ends with exit code 4: compare the table with the stream, bring what is missing by hand, then `waljet slot create` and `waljet run --accept-gap`.",
    ),
    (
        SLOT_ACTIVE,
        "Another session reads the slot. End it, or wait: the server notices a dead reader within wal_sender_timeout.",
    ),
    (
        SLOT_PLUGIN,
        "The slot is physical, or uses another output plugin than pgoutput. Choose another slot name, or drop the slot.",
    ),
    (SLOT_DATABASE, "The slot belongs to another database. Connect to that one, or choose another slot name."),
    (
        SLOT_TWO_PHASE,
        "The slot sends transactions when they are prepared, even if they are rolled back later. Recreate it with two_phase off.",
    ),
    (
        SLOT_INVALIDATED,
        "The server removed WAL that the slot still needed and invalidated the slot: events are missing from it. Compare the table with the stream, bring what is missing by hand, then `waljet slot drop --yes`, `waljet slot create` and `waljet run --accept-gap`.",
    ),
    (
        SLOT_MOVED,
        "The slot's confirmed position lies past what a relay of this slot confirmed, as the stored checkpoint has it: somebody else read or advanced it, or it was dropped and created again. Events in between were not published: find out who did it, bring them from the table, then go on with `waljet run --accept-gap`.",
    ),
    (
        SLOT_BLOCKED,
        "A slot can only be created once every transaction that was open before has ended, and one did not. End it and try again; no slot was left behind.",
    ),
    (SLOT_ADVANCE, "A slot's confirmed position only moves forward. Choose a position past the current one."),
    (
        CATCH_UP,
        "A catch-up from the outbox table was begun and did not come to its end: what the lost slot would have sent is not all in \
         the stream. Begin it anew with `waljet run --catch-up`, or by starting the relay where `postgres.on_gap` is \
         \"catch-up\"; what is stored by then is not sent again.",
    ),
    (
        WAL_BEHIND,
        "The server has less WAL than this relay confirmed: it was restored from a backup or lost WAL in a failover. Going on would skip the events written since. Compare the table with the stream, then go on with `waljet run --accept-gap`.",
    ),
    (
        WAL_REMOVED,
        "A WAL file that the slot needs is gone. Events are missing; recreate the slot and bring them from the table.",
    ),
    (
        UNCONFIRMED,
        "The server did not take the last position before the connection was closed. Some events will be sent again and be found to be duplicates.",
    ),
    (
        TABLE_MISSING,
        "The outbox table does not exist in this database. `waljet init` creates it, or mend outbox.table.",
    ),
    (
        TABLE_KIND,
        "The relation is a view, a foreign table, unlogged or temporary: its rows do not reach the WAL. Use an ordinary or a partitioned table.",
    ),
    (COLUMN_MISSING, "Columns that the mapping names are not in the table. Mend [outbox.columns] or the table."),
    (
        COLUMN_UNPUBLISHED,
        "A mapped column is generated, or left out by the publication's column list, and so is never sent. Mend the publication or the mapping.",
    ),
    (
        PUBLICATION_MISSING,
        "The publication does not exist, or did not exist at the place in the WAL that the slot stands at. Rows written meanwhile are skipped by the server for good.",
    ),
    (
        PUBLICATION_TABLE,
        "The publication does not hold the outbox table, so its rows are skipped by the server without a word. Add the table.",
    ),
    (PUBLICATION_INSERT, "The publication does not publish inserts. Set publish = 'insert'."),
    (
        PUBLICATION_ROOT,
        "The publication sends the rows under the name of another table of the partition tree. Set publish_via_partition_root, or name that table in outbox.table.",
    ),
];

/// What a SQLSTATE obliges. Whatever is not in the table is retried: doubt never loses data.
fn classify(sqlstate: &str, message: &str) -> (Code, Action) {
    match sqlstate {
        "08P01" if message.contains("unsupported startup parameter") => (POOLER, Action::Halt),
        "08P01" => (PROTOCOL, Action::Retry),
        "0A000" => (UNSUPPORTED, Action::Halt),
        "28000" if message.contains("permission denied") || message.contains("must be superuser") => {
            (PRIVILEGE, Action::Halt)
        }
        "28000" | "28P01" => (AUTHENTICATION, Action::Halt),
        "3D000" => (DATABASE_MISSING, Action::Halt),
        "42501" => (PRIVILEGE, Action::Halt),
        "42704" if message.starts_with("publication ") => (PUBLICATION_MISSING, Action::Halt),
        "42704" => (SLOT_MISSING, Action::Halt),
        "42P01" => (TABLE_MISSING, Action::Halt),
        "53300" => (TOO_MANY_CONNECTIONS, Action::Retry),
        "53400" => (SLOTS_EXHAUSTED, Action::Retry),
        "55000" if message.contains("wal_level") => (WAL_LEVEL, Action::Halt),
        "55000" if message.contains("skipped loading publication") => (PUBLICATION_MISSING, Action::Halt),
        "55000" if message.contains("recovery") => (STANDBY, Action::Halt),
        "55000" if message.contains("output plugin") => (SLOT_PLUGIN, Action::Halt),
        "55000" => (SLOT_INVALIDATED, Action::Gap),
        "55006" => (SLOT_ACTIVE, Action::Retry),
        "57P01" | "57P02" | "57P03" => (UNAVAILABLE, Action::Retry),
        "58P01" => (WAL_REMOVED, Action::Gap),
        _ if sqlstate.starts_with("08") => (CONNECTION_LOST, Action::Retry),
        _ => (SERVER, Action::Retry),
    }
}

/// An error or a notice as the server reported it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerError {
    /// The severity: `ERROR`, `FATAL`, `WARNING`.
    pub severity: String,
    /// The five letters that say which error it is.
    pub sqlstate: String,
    /// The primary message.
    pub message: String,
    /// More about it.
    pub detail: Option<String>,
    /// What the server suggests.
    pub hint: Option<String>,
}

impl ServerError {
    /// Reads the payload of an `ErrorResponse` or `NoticeResponse`.
    pub(crate) fn parse(payload: &[u8]) -> Self {
        let fields = ErrorFields::parse(payload);
        Self {
            severity: fields.severity.unwrap_or_default(),
            sqlstate: fields.code.unwrap_or_default(),
            message: fields.message.unwrap_or_default(),
            detail: fields.detail,
            hint: fields.hint,
        }
    }

    /// Makes the fault of a failed step. `context` is a verb and its object: `read slot state`.
    pub(crate) fn into_fault(self, context: &str) -> Fault {
        let (code, action) = classify(&self.sqlstate, &self.message);
        let hint = own_hint(code).map(str::to_owned).or_else(|| self.hint.clone());
        let fault = Fault::new(code, action, format!("could not {context}")).cause(self);
        match hint {
            Some(hint) => fault.hint(hint),
            None => fault,
        }
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (SQLSTATE {})", self.message, self.sqlstate)?;
        if let Some(detail) = &self.detail {
            write!(f, "; {detail}")?;
        }
        Ok(())
    }
}

impl Error for ServerError {}

fn own_hint(code: Code) -> Option<&'static str> {
    Some(match code {
        AUTHENTICATION => {
            "correct role and password (postgres.url, or postgres.user and postgres.password), or let this client in by pg_hba.conf"
        }
        DATABASE_MISSING => "correct the database in postgres.url, or postgres.dbname; or create it",
        POOLER => "connect to PostgreSQL directly, not to a pooler",
        PRIVILEGE => "ALTER ROLE … REPLICATION; or grant what the message names",
        WAL_LEVEL => "ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
        TOO_MANY_CONNECTIONS => "raise max_connections or max_wal_senders, or end idle sessions",
        SLOTS_EXHAUSTED => {
            "drop an unused slot (SELECT slot_name, active FROM pg_replication_slots), or raise max_replication_slots"
        }
        SLOT_MISSING => {
            "waljet init creates it; if the relay ran before, events since its last position must be brought by hand"
        }
        SLOT_INVALIDATED => "the slot can only be dropped; see SELECT slot_name, wal_status FROM pg_replication_slots",
        STANDBY => "connect to the primary",
        PUBLICATION_MISSING => {
            "waljet init creates it; rows between the slot's position and its creation are skipped by the server"
        }
        _ => return None,
    })
}

/// Makes the fault of a failed call of the SQL client.
pub(crate) fn from_client(context: &str, error: tokio_postgres::Error) -> Fault {
    if let Some(db) = error.as_db_error() {
        let server = ServerError {
            severity: db.severity().to_owned(),
            sqlstate: db.code().code().to_owned(),
            message: db.message().to_owned(),
            detail: db.detail().map(str::to_owned),
            hint: db.hint().map(str::to_owned),
        };
        return server.into_fault(context);
    }
    let could_not = format!("could not {context}");
    // The client has no kinds for these, only texts.
    let why = Error::source(&error).map(ToString::to_string).unwrap_or_default();
    if why.contains("unsupported authentication method") || why.contains("unsupported SASL mechanism") {
        return Fault::new(AUTHENTICATION_METHOD, Action::Halt, could_not)
            .cause(error)
            .hint("use scram-sha-256 or cert in the pg_hba.conf line for this role");
    }
    let text = error.to_string();
    if text.starts_with("authentication error") || text.starts_with("invalid configuration") {
        return Fault::new(AUTHENTICATION, Action::Halt, could_not)
            .cause(error)
            .hint("verify user, password and channel_binding of [postgres]");
    }
    Fault::new(CONNECTION_LOST, Action::Retry, could_not).cause(error)
}

/// Makes the fault of a slot that stands past what its relay confirmed.
#[must_use]
pub fn slot_moved(slot: &str, stands: Lsn, confirmed: Lsn) -> Fault {
    let message = format!(
        "slot {slot:?} stands at {stands}, and was confirmed up to {confirmed} by its relay: somebody else read it, moved it or made it \
         anew, and what was committed in between may not be published"
    );
    Fault::new(SLOT_MOVED, Action::Gap, message).hint(
        "find out who did it (or whether the relay ran with another checkpoint.store meanwhile); waljet run --catch-up publishes what \
         is missing from the table; or compare the table with the stream from there on, then go on with: waljet run --accept-gap",
    )
}

/// Makes the fault of an address that leads to another cluster than the one that was read from.
#[must_use]
pub fn other_cluster(before: u64, now: u64) -> Fault {
    let message = format!("expected the cluster of system identifier {before}, found {now}");
    Fault::new(OTHER_CLUSTER, Action::Gap, message).hint(
        "correct postgres.url, or find out what was done to the database; then go on with: waljet run --accept-gap",
    )
}

/// Makes the fault of a position that is not part of the server's history.
#[must_use]
pub fn wal_behind(confirmed: Confirmed, server: &Identity) -> Fault {
    let Confirmed { history, lsn } = confirmed;
    let Identity { history: History { timeline, .. }, wal_end, .. } = server;
    let message = format!(
        "{lsn} was confirmed on timeline {}, and the server is on timeline {timeline} with WAL up to {wal_end}: it was restored, or \
         lost WAL in a failover",
        history.timeline
    );
    Fault::new(WAL_BEHIND, Action::Gap, message)
        .hint("compare the table with the stream; then go on with what the server has: waljet run --accept-gap")
}

/// Makes the fault of a failed read or write.
pub(crate) fn lost(context: &str, error: io::Error) -> Fault {
    Fault::new(CONNECTION_LOST, Action::Retry, format!("could not {context}")).cause(error)
}

/// Makes the fault of a step that took too long.
pub(crate) fn timed_out(context: &str, limit: std::time::Duration) -> Fault {
    Fault::new(SILENT, Action::Retry, format!("could not {context} within {} s", limit.as_secs_f32()))
}

/// Makes the fault of bytes that have no place where they came.
pub(crate) fn protocol(found: impl fmt::Display) -> Fault {
    Fault::new(PROTOCOL, Action::Retry, format!("the server broke the protocol: {found}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sqlstate_obliges_what_the_table_says() {
        let table = [
            ("08P01", "unsupported startup parameter: replication", POOLER, Action::Halt),
            ("08P01", "invalid message", PROTOCOL, Action::Retry),
            ("08006", "gone", CONNECTION_LOST, Action::Retry),
            ("0A000", "cannot use different column lists", UNSUPPORTED, Action::Halt),
            ("28000", "no pg_hba.conf entry", AUTHENTICATION, Action::Halt),
            ("28P01", "password authentication failed", AUTHENTICATION, Action::Halt),
            ("28000", "permission denied to start WAL sender", PRIVILEGE, Action::Halt),
            ("3D000", "database \"x\" does not exist", DATABASE_MISSING, Action::Halt),
            ("42501", "must be superuser or replication role", PRIVILEGE, Action::Halt),
            ("42704", "publication \"x\" does not exist", PUBLICATION_MISSING, Action::Halt),
            ("42704", "replication slot \"x\" does not exist", SLOT_MISSING, Action::Halt),
            ("42P01", "relation \"x\" does not exist", TABLE_MISSING, Action::Halt),
            ("53300", "sorry, too many clients already", TOO_MANY_CONNECTIONS, Action::Retry),
            ("53400", "all replication slots are in use", SLOTS_EXHAUSTED, Action::Retry),
            ("55000", "logical decoding requires wal_level >= logical", WAL_LEVEL, Action::Halt),
            ("55000", "skipped loading publication \"x\"", PUBLICATION_MISSING, Action::Halt),
            ("55000", "logical decoding cannot be used while in recovery", STANDBY, Action::Halt),
            ("55000", "can no longer get changes from replication slot \"x\"", SLOT_INVALIDATED, Action::Gap),
            ("55006", "replication slot \"x\" is active for PID 7", SLOT_ACTIVE, Action::Retry),
            ("57P01", "terminating connection", UNAVAILABLE, Action::Retry),
            ("57P02", "crash of another process", UNAVAILABLE, Action::Retry),
            ("57P03", "the database system is starting up", UNAVAILABLE, Action::Retry),
            ("58P01", "requested WAL segment has already been removed", WAL_REMOVED, Action::Gap),
            ("XX000", "anything else", SERVER, Action::Retry),
            ("", "", SERVER, Action::Retry),
        ];
        for (sqlstate, message, code, action) in table {
            assert_eq!(classify(sqlstate, message), (code, action), "{sqlstate} {message}");
        }
    }

    #[test]
    fn every_code_is_listed_once_with_a_text() {
        let mut codes: Vec<_> = CODES.iter().map(|(code, _)| code.0).collect();
        codes.sort_unstable();
        let listed = codes.len();
        codes.dedup();
        assert_eq!(codes.len(), listed);
        assert!(CODES.iter().all(|(_, text)| text.ends_with('.')));
    }

    #[test]
    fn a_fault_keeps_what_the_server_said() {
        let error = ServerError {
            severity: "ERROR".into(),
            sqlstate: "55006".into(),
            message: "replication slot \"w\" is active for PID 7".into(),
            detail: Some("more".into()),
            hint: Some("wait".into()),
        };
        let fault = error.into_fault("start replication");
        let expected = "could not start replication: replication slot \"w\" is active for PID 7 (SQLSTATE 55006); more";
        assert_eq!(fault.summary(), expected);
        assert_eq!(fault.hint.as_deref(), Some("wait"));
    }
}
