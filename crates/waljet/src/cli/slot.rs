//! `waljet slot`: shows, creates, drops and advances the replication slot.

use clap::Subcommand;
use serde_json::json;
use waljet_pgoutput::Lsn;
use waljet_postgres::error::SLOT_MISSING;
use waljet_postgres::slot::{self, DEFAULT_CREATE_WAIT};
use waljet_postgres::{ConnectOptions, Failover, SharedControl, SlotState};

use super::{Global, runtime};
use crate::checkpoint::Store;
use crate::config::units::human_bytes;
use crate::error::{CONFIRMATION, halt};
use crate::render::{Exit, Failure, data, note, table};

/// Show, create, drop or advance the replication slot.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print the slot's state and how much WAL the server keeps for it
    Show {
        /// Print all slots of the server
        #[arg(long)]
        all: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Create the slot; events that are committed from then on are in it
    Create {
        /// Let standbys copy the slot (PostgreSQL 17 and later)
        #[arg(long)]
        failover: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Drop the slot: events that were not confirmed can never be read from it again
    Drop {
        /// Drop it, rather than only show what would be lost
        #[arg(long)]
        yes: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Move the slot's confirmed position forward: events before it are never published
    Advance {
        /// The new position, such as 16/B374D848
        #[arg(long, value_name = "LSN")]
        to: Lsn,
        /// Move it, rather than only show what would be lost
        #[arg(long)]
        yes: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Does what was typed.
pub(crate) fn run(global: &Global, command: &Command) -> Result<Exit, Failure> {
    let config = global.load_quietly()?;
    let (connect, name) = (&config.source.connect, config.source.slot.as_str());
    runtime()?.block_on(async {
        match command {
            Command::Show { all: true, json } => print(&slot::list(connect).await?, Form::of(*json))?,
            Command::Show { all: false, json } => print(&[existing(connect, name).await?], Form::of(*json))?,
            Command::Create { failover, json } => {
                let failover = if *failover { Failover::On } else { Failover::Off };
                let state = slot::create(connect, name, failover, DEFAULT_CREATE_WAIT).await?;
                print(&[state], Form::of(*json))?;
            }
            Command::Drop { yes, json } => {
                let state = existing(connect, name).await?;
                print(std::slice::from_ref(&state), Form::of(*json))?;
                confirmed(*yes, &format!("dropping slot {name:?} loses what was committed {}", range(&state, None)))?;
                slot::drop(connect, name).await?;
                note(&format!("dropped slot {name:?}"));
            }
            Command::Advance { to, yes, json } => {
                let state = existing(connect, name).await?;
                print(std::slice::from_ref(&state), Form::of(*json))?;
                let loses = format!("advancing slot {name:?} loses what was committed {}", range(&state, Some(*to)));
                confirmed(*yes, &loses)?;
                let advanced = slot::advance(connect, name, *to).await?;
                note(&format!("advanced slot {name:?} from {} to {}", advanced.from, advanced.to));
                Store::new(&config, SharedControl::default()).moved(advanced.to).await?;
            }
        }
        Ok(Exit::Done)
    })
}

/// How states are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Text,
    Json,
}

impl Form {
    fn of(json: bool) -> Self {
        if json { Self::Json } else { Self::Text }
    }
}

/// Reads the slot, which has to be there.
async fn existing(connect: &ConnectOptions, name: &str) -> Result<SlotState, Failure> {
    let missing = || {
        halt(SLOT_MISSING, format!("slot {name:?} does not exist")).hint("waljet init or waljet slot create creates it")
    };
    slot::show(connect, name).await?.ok_or_else(|| missing().into())
}

/// Refuses to lose data without `--yes`.
fn confirmed(yes: bool, loses: &str) -> Result<(), Failure> {
    if yes {
        return Ok(());
    }
    let fault = halt(CONFIRMATION, format!("nothing was done: {loses}"));
    Err(Failure::usage([fault.hint("add --yes to do it all the same")]))
}

/// Says which part of the WAL would not be read any more.
fn range(state: &SlotState, to: Option<Lsn>) -> String {
    let from = state.confirmed_flush.unwrap_or(Lsn::ZERO);
    let end = to.or(state.restart_lsn.zip(state.retained_bytes).map(|(start, bytes)| Lsn(start.0 + bytes)));
    match end {
        Some(end) => {
            format!("from {from} to {end} ({} of WAL) and was not published", human_bytes(end.bytes_since(from)))
        }
        None => format!("from {from} on and was not published"),
    }
}

/// Writes states as a table or as JSON: one object, or an array where not exactly one was asked for.
fn print(states: &[SlotState], form: Form) -> Result<(), Failure> {
    if form == Form::Json {
        let value = if let [state] = states { json!(state) } else { json!(states) };
        return data(&format!("{value:#}\n"));
    }
    let mut rows =
        vec![["slot", "database", "active", "confirmed", "retained", "safe", "wal_status"].map(str::to_owned).to_vec()];
    rows.extend(states.iter().map(row));
    data(&table(&rows))
}

/// Returns the cells of one slot.
fn row(state: &SlotState) -> Vec<String> {
    let unknown = || "-".to_owned();
    let invalidated = state.invalidation_reason.as_ref().map(|reason| format!(" ({reason})"));
    vec![
        state.name.clone(),
        state.database.clone().unwrap_or_else(unknown),
        state.active_pid.map_or_else(|| "no".to_owned(), |pid| format!("PID {pid}")),
        state.confirmed_flush.map_or_else(unknown, |lsn| lsn.to_string()),
        state.retained_bytes.map_or_else(unknown, human_bytes),
        state
            .safe_wal_size
            .map_or_else(|| "no limit".to_owned(), |bytes| human_bytes(u64::try_from(bytes).unwrap_or(0))),
        format!("{}{}", state.wal_status.as_deref().unwrap_or("-"), invalidated.unwrap_or_default()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> SlotState {
        SlotState {
            name: "waljet".into(),
            plugin: Some("pgoutput".into()),
            database: Some("shop".into()),
            temporary: false,
            two_phase: false,
            active_pid: Some(12),
            confirmed_flush: Some(Lsn(0x1000)),
            restart_lsn: Some(Lsn(0x800)),
            wal_status: Some("reserved".into()),
            retained_bytes: Some(0x1000),
            safe_wal_size: None,
            invalidation_reason: None,
            failover: None,
            synced: None,
            inactive_since: None,
        }
    }

    #[test]
    fn a_slot_is_one_row() {
        assert_eq!(row(&state()), ["waljet", "shop", "PID 12", "0/1000", "4.0 KiB", "no limit", "reserved"]);
        let lost =
            SlotState { wal_status: Some("lost".into()), invalidation_reason: Some("wal_removed".into()), ..state() };
        assert_eq!(row(&lost)[6], "lost (wal_removed)");
    }

    #[test]
    fn what_would_be_lost_is_named_by_positions_and_bytes() {
        assert_eq!(range(&state(), None), "from 0/1000 to 0/1800 (2.0 KiB of WAL) and was not published");
        assert_eq!(range(&state(), Some(Lsn(0x1400))), "from 0/1000 to 0/1400 (1.0 KiB of WAL) and was not published");
    }

    #[test]
    fn nothing_is_lost_without_yes() {
        assert_eq!(confirmed(false, "x").err().map(|failure| failure.exit), Some(Exit::Usage));
        assert!(confirmed(true, "x").is_ok());
    }
}
