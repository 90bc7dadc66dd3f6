//! The stored checkpoint as a row of `waljet.checkpoint`, over the control connection that the source has, too.

use std::sync::Arc;

use tokio_postgres::SimpleQueryRow;
use waljet_pgoutput::Timestamp;
use waljet_pipeline::error::CHECKPOINT_MISSING;
use waljet_pipeline::{
    Action, Check, Checkpoint, Checkpoints, Confirmed, Fault, History, Replace, StreamMark, Visible,
};

use crate::connect::ConnectOptions;
use crate::control::{Control, SharedControl, flag, optional, text};
use crate::error::{self, ServerError};
use crate::sql::{quote_ident, quote_literal};

/// The table, as `migrations/0003` creates it.
pub const CHECKPOINT_TABLE: &str = "waljet.checkpoint";

/// The WAL that one save makes: 280 bytes were seen, and an event with its commit takes more than what is left.
const OWN_WAL: u64 = 384;

/// Keeps checkpoints in the source database.
#[derive(Clone, Debug)]
pub struct CheckpointTable {
    connect: ConnectOptions,
    slot: String,
    control: SharedControl,
}

impl CheckpointTable {
    /// Makes a store for the checkpoint of a slot. `control` is the source's, so that a relay has one control connection.
    #[must_use]
    pub fn new(connect: ConnectOptions, slot: impl Into<String>, control: SharedControl) -> Self {
        Self { connect, slot: slot.into(), control }
    }

    async fn read(&self, control: &Control) -> Result<Option<Checkpoint>, Fault> {
        // What is there is the row of the relay that reads the primary's slot.
        if control.standby {
            return Err(read_only());
        }
        let sql = format!(
            "SELECT system_id, timeline, confirmed_lsn, stream, stream_created, stream_sequence, snapshot, snapshot_after, gap, \
             (extract(epoch FROM updated_at) * 1000000)::bigint AS at FROM {CHECKPOINT_TABLE} WHERE slot = {}",
            quote_literal(&self.slot)
        );
        let rows = control.rows("read the checkpoint", &sql).await.map_err(|fault| self.missing(fault))?;
        rows.first().map(checkpoint).transpose()
    }

    /// Looks whether the checkpoint can be read and written.
    pub async fn check(&self) -> Check {
        match self.look().await {
            Ok(Some(found)) => {
                Check::good("checkpoint", format!("{CHECKPOINT_TABLE} stands at {}", found.confirmed.lsn))
            }
            Ok(None) => Check::good("checkpoint", format!("{CHECKPOINT_TABLE} has none for slot {:?} yet", self.slot)),
            Err(fault) if fault.code == CHECKPOINT_MISSING => {
                Check::warning("checkpoint", fault.summary(), fault.hint.unwrap_or_default())
            }
            Err(fault) => Check::fault("checkpoint", fault),
        }
    }

    async fn look(&self) -> Result<Option<Checkpoint>, Fault> {
        let control = Control::connect(&self.connect).await?;
        let found = self.read(&control).await?;
        let sql = format!(
            "SELECT has_table_privilege('{CHECKPOINT_TABLE}', 'INSERT') AND has_table_privilege('{CHECKPOINT_TABLE}', 'UPDATE') \
             AS granted"
        );
        let row = control.row("look at the checkpoint's table", &sql).await?;
        if flag(&row, "granted") { Ok(found) } else { Err(self.not_granted()) }
    }

    /// Turns what the server says of a table that cannot be used into what it means here.
    fn missing(&self, fault: Fault) -> Fault {
        let state = fault.cause.as_deref().and_then(|cause| cause.downcast_ref::<ServerError>());
        match state.map(|error| error.sqlstate.as_str()) {
            Some("42P01" | "3F000") => {
                let what = format!("the table {CHECKPOINT_TABLE} does not exist");
                Fault::new(CHECKPOINT_MISSING, Action::Halt, what).hint("waljet init")
            }
            Some("42501") => self.not_granted(),
            Some("25006") => read_only(),
            _ => fault,
        }
    }

    fn not_granted(&self) -> Fault {
        let role = self.connect.config().get_user().unwrap_or("the_role");
        let what = format!("the role {role:?} may not read and write {CHECKPOINT_TABLE}");
        let role = quote_ident(role);
        Fault::new(CHECKPOINT_MISSING, Action::Halt, what).hint(format!(
            "GRANT USAGE ON SCHEMA waljet TO {role}; GRANT SELECT, INSERT, UPDATE ON {CHECKPOINT_TABLE} TO {role};"
        ))
    }

    fn statement(&self, checkpoint: &Checkpoint, replace: Replace) -> String {
        let literal = |text: Option<&str>| text.map_or_else(|| "NULL".to_owned(), quote_literal);
        let Confirmed { history: History { system_id, timeline }, lsn } = checkpoint.confirmed;
        let (stream, visible) = (checkpoint.stream.as_ref(), checkpoint.visible.as_ref());
        let sequence = stream.map_or_else(|| "NULL".to_owned(), |stream| stream.last_sequence.to_string());
        let only = match replace {
            Replace::Anything => "",
            Replace::Earlier => {
                " WHERE old.system_id = EXCLUDED.system_id \
                 AND (old.timeline, old.confirmed_lsn) <= (EXCLUDED.timeline, EXCLUDED.confirmed_lsn)"
            }
        };
        format!(
            "INSERT INTO {CHECKPOINT_TABLE} AS old (slot, system_id, timeline, confirmed_lsn, stream, stream_created, \
             stream_sequence, snapshot, snapshot_after, gap, updated_at) VALUES ({slot}, {system_id}, {timeline}, '{lsn}', {name}, \
             {created}, {sequence}, {snapshot}, {after}, {gap}, now()) ON CONFLICT (slot) DO UPDATE SET system_id = EXCLUDED.system_id, timeline = EXCLUDED.timeline, \
             confirmed_lsn = EXCLUDED.confirmed_lsn, stream = EXCLUDED.stream, stream_created = EXCLUDED.stream_created, \
             stream_sequence = EXCLUDED.stream_sequence, snapshot = EXCLUDED.snapshot, \
             snapshot_after = EXCLUDED.snapshot_after, gap = EXCLUDED.gap, updated_at = EXCLUDED.updated_at{only}",
            slot = quote_literal(&self.slot),
            name = literal(stream.map(|stream| stream.stream.as_str())),
            created = literal(stream.map(|stream| stream.created.as_str())),
            snapshot = literal(visible.map(|visible| visible.snapshot.as_str())),
            after = visible.map_or_else(|| "NULL".to_owned(), |visible| format!("'{}'", visible.after)),
            gap = literal(checkpoint.gap.as_deref()),
        )
    }
}

impl Checkpoints for CheckpointTable {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn own_wal(&self) -> u64 {
        OWN_WAL
    }

    async fn load(&self) -> Result<Option<Checkpoint>, Fault> {
        // A new connection: the old one may lead to a server that is no longer the one to read from.
        let control = Arc::new(Control::connect(&self.connect).await?);
        self.control.put_unused(Arc::clone(&control));
        self.read(&control).await
    }

    async fn save(&self, checkpoint: &Checkpoint, replace: Replace) -> Result<(), Fault> {
        let control = match self.control.current() {
            Some(control) => control,
            None => {
                let control = Arc::new(Control::connect(&self.connect).await?);
                self.control.put(Arc::clone(&control));
                control
            }
        };
        let statement = self.statement(checkpoint, replace);
        control.rows("store the checkpoint", &statement).await.map_err(|fault| self.missing(fault))?;
        Ok(())
    }
}

fn checkpoint(row: &SimpleQueryRow) -> Result<Checkpoint, Fault> {
    let parse = |column: &str| -> Result<u64, Fault> { text(row, column).parse().map_err(error::protocol) };
    let timeline = text(row, "timeline").parse().map_err(error::protocol)?;
    let history = History { system_id: parse("system_id")?, timeline };
    let lsn = text(row, "confirmed_lsn").parse().map_err(error::protocol)?;
    let stream = match (optional(row, "stream"), optional(row, "stream_created")) {
        (Some(stream), Some(created)) => {
            Some(StreamMark { stream, created, last_sequence: parse("stream_sequence").unwrap_or(0) })
        }
        _ => None,
    };
    let visible = match (optional(row, "snapshot"), optional(row, "snapshot_after")) {
        (Some(snapshot), Some(after)) => Some(Visible { snapshot, after: after.parse().map_err(error::protocol)? }),
        _ => None,
    };
    let at = Timestamp::from_unix_micros(text(row, "at").parse().map_err(error::protocol)?);
    Ok(Checkpoint { confirmed: Confirmed { history, lsn }, stream, visible, gap: optional(row, "gap"), at })
}

/// A standby takes no writes, and a slot on it is no slot of the primary's.
fn read_only() -> Fault {
    let what = format!("the server is a standby, and {CHECKPOINT_TABLE} cannot be written there");
    Fault::new(CHECKPOINT_MISSING, Action::Halt, what).hint("set checkpoint.store = \"nats\"")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed parse fails the test")]
mod tests {
    use waljet_pgoutput::Lsn;

    use super::*;

    fn table() -> CheckpointTable {
        CheckpointTable::new(ConnectOptions::parse("host=h user=o'brien").unwrap(), "w", SharedControl::default())
    }

    fn example() -> Checkpoint {
        let history = History { system_id: u64::MAX, timeline: 2 };
        let stream = StreamMark { stream: "O'S".into(), created: "2026-01-01T00:00:00Z".into(), last_sequence: 7 };
        let confirmed = Confirmed { history, lsn: Lsn(0x16B_3748) };
        Checkpoint { confirmed, stream: Some(stream), visible: None, gap: None, at: Timestamp(0) }
    }

    #[test]
    fn what_is_written_is_quoted_and_never_goes_back_unless_it_may() {
        let sql = table().statement(&example(), Replace::Earlier);
        assert!(
            sql.contains(
                "'w', 18446744073709551615, 2, '0/16B3748', 'O''S', '2026-01-01T00:00:00Z', 7, NULL, NULL, NULL"
            ),
            "{sql}"
        );
        assert!(sql.ends_with("<= (EXCLUDED.timeline, EXCLUDED.confirmed_lsn)"), "{sql}");
        let sql = table().statement(&Checkpoint { stream: None, ..example() }, Replace::Anything);
        assert!(sql.contains("'0/16B3748', NULL, NULL, NULL, NULL, NULL, NULL, now()"), "{sql}");
        assert!(!sql.contains("WHERE"), "{sql}");
    }

    #[test]
    fn a_missing_grant_is_named_with_the_statement_that_gives_it() {
        let hint = table().not_granted().hint.unwrap();
        assert!(hint.ends_with("ON waljet.checkpoint TO \"o'brien\";"), "{hint}");
    }
}
