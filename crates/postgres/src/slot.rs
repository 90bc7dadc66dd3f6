//! Replication slots: read, create, advance, drop.

use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};
use tokio::time::sleep;
use tokio_postgres::SimpleQueryRow;
use waljet_pgoutput::Lsn;
use waljet_pipeline::{Action, Fault};

use crate::connect::ConnectOptions;
use crate::control::{Control, flag, optional, text};
use crate::error::{
    self, SLOT_ACTIVE, SLOT_ADVANCE, SLOT_BLOCKED, SLOT_DATABASE, SLOT_INVALIDATED, SLOT_MISSING, SLOT_NAME,
    SLOT_PLUGIN, SLOT_TWO_PHASE, UNSUPPORTED,
};
use crate::sql::{quote_ident, quote_literal};

/// How long the creation of a slot waits for older transactions by default.
pub const DEFAULT_CREATE_WAIT: Duration = Duration::from_secs(10);

/// A row of `pg_replication_slots`, with what the slot costs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SlotState {
    /// The name.
    pub name: String,
    /// The output plugin; none for a physical slot.
    pub plugin: Option<String>,
    /// The database that it decodes.
    pub database: Option<String>,
    /// Whether it is dropped with its session.
    pub temporary: bool,
    /// Whether transactions come when they are prepared.
    pub two_phase: bool,
    /// The session that reads it.
    pub active_pid: Option<i32>,
    /// Up to where the reader has confirmed.
    #[serde(serialize_with = "as_text")]
    pub confirmed_flush: Option<Lsn>,
    /// From where WAL is kept for it.
    #[serde(serialize_with = "as_text")]
    pub restart_lsn: Option<Lsn>,
    /// `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: Option<String>,
    /// WAL that is kept for it.
    pub retained_bytes: Option<u64>,
    /// How much more WAL may be written before it is in danger; only with `max_slot_wal_keep_size`.
    pub safe_wal_size: Option<i64>,
    /// Why it was invalidated (PostgreSQL 17 and later).
    pub invalidation_reason: Option<String>,
    /// Whether it is copied to standbys (17 and later).
    pub failover: Option<bool>,
    /// Whether it is such a copy (17 and later).
    pub synced: Option<bool>,
    /// Since when nobody reads it (17 and later).
    pub inactive_since: Option<String>,
}

/// What an advance did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advanced {
    /// Where the slot stood.
    pub from: Lsn,
    /// Where it stands now; events of transactions in between are not sent any more.
    pub to: Lsn,
}

/// Serialises a position in its text form.
pub(crate) fn as_text<S: Serializer>(lsn: &Option<Lsn>, serializer: S) -> Result<S::Ok, S::Error> {
    lsn.map(|lsn| lsn.to_string()).serialize(serializer)
}

impl SlotState {
    /// Reads a row of [`select`].
    pub(crate) fn from_row(row: &SimpleQueryRow) -> Self {
        let parsed = |column| optional(row, column).and_then(|text| text.parse().ok());
        let yes = |column| optional(row, column).map(|text| matches!(text.as_str(), "true" | "t"));
        Self {
            name: text(row, "slot_name").to_owned(),
            plugin: optional(row, "plugin"),
            database: optional(row, "database"),
            temporary: flag(row, "temporary"),
            two_phase: flag(row, "two_phase"),
            active_pid: optional(row, "active_pid").and_then(|text| text.parse().ok()),
            confirmed_flush: parsed("confirmed_flush_lsn"),
            restart_lsn: parsed("restart_lsn"),
            wal_status: optional(row, "wal_status"),
            retained_bytes: optional(row, "retained_bytes").and_then(|text| text.parse().ok()),
            safe_wal_size: optional(row, "safe_wal_size").and_then(|text| text.parse().ok()),
            invalidation_reason: optional(row, "invalidation_reason"),
            failover: yes("failover"),
            synced: yes("synced"),
            inactive_since: optional(row, "inactive_since"),
        }
    }

    /// Returns why the slot cannot be streamed from, whoever reads it now.
    pub(crate) fn unusable(&self, database: &str) -> Option<Fault> {
        let name = &self.name;
        let drop = format!("SELECT pg_drop_replication_slot({});", quote_literal(name));
        if self.plugin.as_deref() != Some("pgoutput") {
            let found = self.plugin.as_deref().unwrap_or("no plugin (a physical slot)");
            let message = format!("slot {name:?}: expected the plugin pgoutput, found {found}");
            return Some(
                Fault::new(SLOT_PLUGIN, Action::Halt, message).hint(format!("choose another postgres.slot, or {drop}")),
            );
        }
        if self.database.as_deref() != Some(database) {
            let found = self.database.as_deref().unwrap_or("none");
            let message = format!("slot {name:?}: expected the database {database:?}, found {found:?}");
            return Some(
                Fault::new(SLOT_DATABASE, Action::Halt, message)
                    .hint("choose another postgres.slot, or connect to that database"),
            );
        }
        if let Some(fault) = self.invalidated() {
            return Some(fault);
        }
        if self.two_phase {
            let message =
                format!("slot {name:?} sends transactions when they are prepared, even if they are rolled back later");
            return Some(Fault::new(SLOT_TWO_PHASE, Action::Halt, message).hint(format!("{drop} and waljet init")));
        }
        None
    }

    /// Returns the fault of a slot whose WAL is gone.
    pub(crate) fn invalidated(&self) -> Option<Fault> {
        let reason = match (&self.invalidation_reason, self.wal_status.as_deref()) {
            (Some(reason), _) => reason.as_str(),
            (None, Some("lost")) => "wal_status is lost",
            _ => return None,
        };
        let name = &self.name;
        let at = self.confirmed_flush.map_or_else(|| "an unrecorded position".to_owned(), |lsn| lsn.to_string());
        let message = format!("slot {name:?} was invalidated ({reason}); events committed since {at} are not in it");
        let hint = format!(
            "SELECT pg_drop_replication_slot({}); then waljet slot create, and bring the missing events from the table",
            quote_literal(name)
        );
        Some(Fault::new(SLOT_INVALIDATED, Action::Gap, message).hint(hint))
    }
}

/// Makes the query for slots; columns that a version lacks come as NULL.
pub(crate) fn select(condition: &str) -> String {
    format!(
        "SELECT s.slot_name, s.plugin, s.database, s.temporary, s.two_phase, s.active_pid, s.confirmed_flush_lsn, \
         s.restart_lsn, s.wal_status, s.safe_wal_size, \
         pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, \
         s.restart_lsn)::bigint AS retained_bytes, \
         to_jsonb(s)->>'invalidation_reason' AS invalidation_reason, to_jsonb(s)->>'failover' AS failover, \
         to_jsonb(s)->>'synced' AS synced, to_jsonb(s)->>'inactive_since' AS inactive_since \
         FROM pg_replication_slots s WHERE {condition} ORDER BY 1"
    )
}

/// Makes the condition for one slot.
pub(crate) fn named(name: &str) -> String {
    format!("s.slot_name = {}", quote_literal(name))
}

/// Verifies that a text can name a slot: PostgreSQL takes nothing else.
///
/// # Errors
///
/// It is empty, too long, or holds another character.
pub fn validate_name(name: &str) -> Result<(), Fault> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    if (1..=63).contains(&name.len()) && name.bytes().all(allowed) {
        return Ok(());
    }
    let message = format!("expected a slot name of 1 to 63 lower-case letters, digits and underscores, found {name:?}");
    Err(Fault::new(SLOT_NAME, Action::Halt, message).hint("mend postgres.slot"))
}

/// Reads one slot.
///
/// # Errors
///
/// The server could not be asked.
pub async fn show(options: &ConnectOptions, name: &str) -> Result<Option<SlotState>, Fault> {
    read(&Control::connect(options).await?, name).await
}

/// Reads all slots of the server.
///
/// # Errors
///
/// The server could not be asked.
pub async fn list(options: &ConnectOptions) -> Result<Vec<SlotState>, Fault> {
    let rows = Control::connect(options).await?.rows("read the slots", &select("true")).await?;
    Ok(rows.iter().map(SlotState::from_row).collect())
}

pub(crate) async fn read(control: &Control, name: &str) -> Result<Option<SlotState>, Fault> {
    let rows = control.rows(&format!("read slot {name:?}"), &select(&named(name))).await?;
    Ok(rows.first().map(SlotState::from_row))
}

/// Creates a `pgoutput` slot, waiting at most `wait` for transactions that are older than it.
///
/// # Errors
///
/// The slot exists, or such a transaction did not end: the fault names it, and no slot is left behind.
pub async fn create(
    options: &ConnectOptions,
    name: &str,
    failover: Failover,
    wait: Duration,
) -> Result<SlotState, Fault> {
    validate_name(name)?;
    let control = Control::connect(options).await?;
    create_with(&control, options, name, failover, wait).await
}

/// Whether a slot is copied to standbys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failover {
    /// It stays on this server.
    Off,
    /// Standbys copy it (PostgreSQL 17 and later).
    On,
}

pub(crate) async fn create_with(
    control: &Control,
    options: &ConnectOptions,
    name: &str,
    failover: Failover,
    wait: Duration,
) -> Result<SlotState, Fault> {
    if failover == Failover::On && control.version < 170_000 {
        let message = format!("failover slots need PostgreSQL 17, found {}", control.version_text);
        return Err(Fault::new(UNSUPPORTED, Action::Halt, message));
    }
    let context = format!("create slot {name:?}");
    let pid = text(&control.row("read the session's pid", "SELECT pg_backend_pid() AS pid").await?, "pid").to_owned();
    let millis = wait.as_millis().max(1);
    // The timer of a message starts before the first statement in it, so this needs a message of its own.
    control.rows(&context, &format!("SET statement_timeout = {millis}; SET lock_timeout = {millis}")).await?;
    let sql = create_statement(name, failover);
    let creating = control.rows_within(&context, &sql, wait + Duration::from_secs(5));
    tokio::pin!(creating);
    // Who blocks it is only to be seen while it waits.
    let mut blocker = None;
    let look = tokio::select! {
        created = &mut creating => Some(created),
        () = sleep(wait / 2) => None,
    };
    let created = match look {
        Some(created) => created,
        None => {
            let (found, created) = tokio::join!(find_blocker(options, &pid), &mut creating);
            blocker = found;
            created
        }
    };
    control.rows(&context, "RESET statement_timeout; RESET lock_timeout").await?;
    if let Err(fault) = created {
        return Err(match blocker {
            Some((who, end)) => Fault::new(
                SLOT_BLOCKED,
                Action::Halt,
                format!("could not {context} within {} s: {who} was open before", wait.as_secs_f32()),
            )
            .hint(end)
            .cause(fault),
            None => fault,
        });
    }
    read(control, name).await?.ok_or_else(|| missing(name))
}

/// Makes the command that creates a slot in a replication session, with a snapshot of what is committed before it.
pub(crate) fn export_command(name: &str, failover: Failover, version: u32) -> String {
    let name = quote_ident(name);
    match failover {
        Failover::On => format!("CREATE_REPLICATION_SLOT {name} LOGICAL pgoutput (SNAPSHOT 'export', FAILOVER true)"),
        Failover::Off if version >= 150_000 => {
            format!("CREATE_REPLICATION_SLOT {name} LOGICAL pgoutput (SNAPSHOT 'export')")
        }
        Failover::Off => format!("CREATE_REPLICATION_SLOT {name} LOGICAL pgoutput EXPORT_SNAPSHOT"),
    }
}

/// Makes the statement that creates a slot.
pub(crate) fn create_statement(name: &str, failover: Failover) -> String {
    let more = if failover == Failover::On { ", failover => true" } else { "" };
    format!("SELECT pg_create_logical_replication_slot({}, 'pgoutput', false, false{more})", quote_literal(name))
}

async fn find_blocker(options: &ConnectOptions, pid: &str) -> Option<(String, String)> {
    let sql = format!(
        "SELECT b.pid, a.application_name, a.xact_start, \
         (SELECT p.gid FROM pg_prepared_xacts p ORDER BY p.prepared LIMIT 1) AS gid \
         FROM unnest(pg_blocking_pids({pid})) AS b(pid) LEFT JOIN pg_stat_activity a ON a.pid = b.pid LIMIT 1"
    );
    let control = Control::connect(options).await.ok()?;
    let row = control.rows("look for what blocks the slot", &sql).await.ok()?.into_iter().next()?;
    let pid = text(&row, "pid");
    // A prepared transaction has no session.
    if pid == "0" {
        let gid = text(&row, "gid");
        return Some((
            format!("the prepared transaction {gid:?}"),
            format!("COMMIT PREPARED or ROLLBACK PREPARED {}", quote_literal(gid)),
        ));
    }
    let of = optional(&row, "application_name").filter(|name| !name.is_empty());
    let who =
        of.map_or_else(|| format!("a transaction of pid {pid}"), |name| format!("a transaction of pid {pid} ({name})"));
    Some((who, format!("wait for it, or SELECT pg_terminate_backend({pid});")))
}

/// Drops a slot.
///
/// # Errors
///
/// The slot does not exist, or somebody reads it: the fault names who.
pub async fn drop(options: &ConnectOptions, name: &str) -> Result<(), Fault> {
    let control = Control::connect(options).await?;
    let state = read(&control, name).await?.ok_or_else(|| missing(name))?;
    if let Some(pid) = state.active_pid {
        return Err(active(&control, name, pid, Action::Halt).await);
    }
    let sql = format!("SELECT pg_drop_replication_slot({})", quote_literal(name));
    control.rows(&format!("drop slot {name:?}"), &sql).await.map(|_| ())
}

/// Moves a slot's confirmed position forward; transactions before it are not sent any more.
///
/// # Errors
///
/// The slot does not exist or is active, or stands past `to` already.
pub async fn advance(options: &ConnectOptions, name: &str, to: Lsn) -> Result<Advanced, Fault> {
    let control = Control::connect(options).await?;
    advance_with(&control, name, to).await
}

pub(crate) async fn advance_with(control: &Control, name: &str, to: Lsn) -> Result<Advanced, Fault> {
    let state = read(control, name).await?.ok_or_else(|| missing(name))?;
    let from = state.confirmed_flush.unwrap_or(Lsn::ZERO);
    if let Some(pid) = state.active_pid {
        return Err(active(control, name, pid, Action::Halt).await);
    }
    if to < from {
        let message = format!("slot {name:?} cannot be moved back from {from} to {to}");
        return Err(Fault::new(SLOT_ADVANCE, Action::Halt, message)
            .hint("choose a position past the current one; a slot never sends again what was confirmed"));
    }
    let sql = format!("SELECT end_lsn FROM pg_replication_slot_advance({}, '{to}')", quote_literal(name));
    let row = control.row(&format!("advance slot {name:?}"), &sql).await?;
    let to = text(&row, "end_lsn").parse().map_err(error::protocol)?;
    Ok(Advanced { from, to })
}

/// A relay that waits for the slot looks again after this at the latest, so that it takes over soon.
const TAKE_OVER: Duration = Duration::from_millis(500);

/// Makes the fault of a slot that somebody else reads.
pub(crate) async fn active(control: &Control, name: &str, pid: i32, action: Action) -> Fault {
    let sql = format!("SELECT application_name, client_addr FROM pg_stat_replication WHERE pid = {pid}");
    let row = control.rows("read who uses the slot", &sql).await.ok().and_then(|rows| rows.into_iter().next());
    let of = row.as_ref().and_then(|row| optional(row, "application_name")).filter(|name| !name.is_empty());
    let who = of.map_or_else(|| format!("pid {pid}"), |name| format!("pid {pid} ({name})"));
    Fault::new(SLOT_ACTIVE, action, format!("slot {name:?} is read by {who}"))
        .hint(format!("stop that reader, or SELECT pg_terminate_backend({pid});"))
        .retry_within(TAKE_OVER)
}

/// Makes the fault of a slot that does not exist.
pub(crate) fn missing(name: &str) -> Fault {
    Fault::new(SLOT_MISSING, Action::Halt, format!("slot {name:?} does not exist"))
        .hint("waljet init creates it; if the relay ran before, events since its last position must be brought by hand")
}

/// Waits until nobody reads the slot, at most until `deadline`.
pub(crate) async fn released(control: &Control, name: &str, deadline: Instant) -> Result<SlotState, Fault> {
    loop {
        let state = read(control, name).await?.ok_or_else(|| missing(name))?;
        if state.active_pid.is_none() || Instant::now() >= deadline {
            return Ok(state);
        }
        sleep(Duration::from_millis(50)).await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a missing fault fails the test")]
mod tests {
    use super::*;

    fn slot() -> SlotState {
        SlotState {
            name: "w".into(),
            plugin: Some("pgoutput".into()),
            database: Some("shop".into()),
            temporary: false,
            two_phase: false,
            active_pid: None,
            confirmed_flush: Some(Lsn(16)),
            restart_lsn: Some(Lsn(8)),
            wal_status: Some("reserved".into()),
            retained_bytes: Some(0),
            safe_wal_size: None,
            invalidation_reason: None,
            failover: None,
            synced: None,
            inactive_since: None,
        }
    }

    #[test]
    fn each_reason_against_a_slot_has_its_code() {
        let why = |slot: SlotState| slot.unusable("shop").map(|fault| fault.code);
        assert_eq!(why(slot()), None);
        assert_eq!(why(SlotState { plugin: None, ..slot() }), Some(SLOT_PLUGIN));
        assert_eq!(why(SlotState { plugin: Some("test_decoding".into()), ..slot() }), Some(SLOT_PLUGIN));
        assert_eq!(why(SlotState { database: Some("x".into()), ..slot() }), Some(SLOT_DATABASE));
        assert_eq!(why(SlotState { two_phase: true, ..slot() }), Some(SLOT_TWO_PHASE));
        assert_eq!(why(SlotState { wal_status: Some("lost".into()), ..slot() }), Some(SLOT_INVALIDATED));
    }

    #[test]
    fn an_invalidated_slot_is_a_gap_that_names_reason_and_position() {
        let fault = SlotState { invalidation_reason: Some("idle_timeout".into()), ..slot() }.unusable("shop").unwrap();
        assert_eq!(fault.action, Action::Gap);
        assert_eq!(
            fault.message,
            "slot \"w\" was invalidated (idle_timeout); events committed since 0/10 are not in it"
        );
    }

    #[test]
    fn names_that_postgresql_would_refuse_are_refused_before() {
        assert!(validate_name("relay_1").is_ok());
        for name in ["", "Relay", "a-b", "a b", &"x".repeat(64)] {
            assert_eq!(validate_name(name).unwrap_err().code, SLOT_NAME, "{name:?}");
        }
    }
}
