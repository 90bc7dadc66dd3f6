//! The slot, and whether there is room for it.

use waljet_pipeline::{Action, Check, Fault};

use super::server::Settings;
use crate::control::Control;
use crate::error::{SLOTS_EXHAUSTED, TOO_MANY_CONNECTIONS};
use crate::slot::{self, SlotState};
use crate::source::SourceOptions;

/// Below this a pause of the relay, such as an upgrade, may cost the slot.
const SHORT_IDLE_SECONDS: i64 = 24 * 60 * 60;

pub(super) async fn check(
    control: &Control,
    options: &SourceOptions,
    settings: &Settings,
) -> Result<Vec<Check>, Fault> {
    let name = format!("slot {:?}", options.slot);
    if let Err(fault) = slot::validate_name(&options.slot) {
        return Ok(vec![Check::fault(name, fault)]);
    }
    let mut checks = Vec::new();
    match slot::read(control, &options.slot).await? {
        None => {
            checks.push(Check::fault(name, slot::missing(&options.slot)));
            checks.extend(room_for_slot(settings));
        }
        Some(state) => checks.extend(existing(control, options, name, &state).await),
    }
    checks.extend(room_for_sender(settings));
    checks.extend(retention(settings));
    Ok(checks)
}

async fn existing(control: &Control, options: &SourceOptions, name: String, state: &SlotState) -> Vec<Check> {
    if let Some(fault) = state.unusable(options.connect.dbname()) {
        return vec![Check::fault(name, fault)];
    }
    if let Some(pid) = state.active_pid {
        return vec![Check::fault(name, slot::active(control, &options.slot, pid, Action::Retry).await)];
    }
    let at = state.confirmed_flush.map(|lsn| lsn.to_string()).unwrap_or_default();
    let retained = state.retained_bytes.unwrap_or_default();
    let mut checks = vec![Check::good(name.clone(), format!("at {at}, retains {retained} bytes of WAL"))];
    if state.temporary {
        checks.push(Check::warning(name.clone(), "is temporary and goes with its session", "drop it, and waljet init"));
    }
    if let Some(status @ ("extended" | "unreserved")) = state.wal_status.as_deref() {
        let safe = state.safe_wal_size.unwrap_or_default();
        checks.push(Check::warning(
            name,
            format!("wal_status is {status}: it is lost after {safe} more bytes of WAL"),
            "start the relay, or raise max_slot_wal_keep_size",
        ));
    }
    checks
}

fn room_for_slot(settings: &Settings) -> Option<Check> {
    let limit = settings.number("max_replication_slots")?;
    (settings.slots >= limit).then(|| {
        let message = format!("all {limit} replication slots are in use");
        let fault = Fault::new(SLOTS_EXHAUSTED, Action::Retry, message);
        Check::fault(
            "max_replication_slots",
            fault.hint(format!(
                "drop an unused slot, or ALTER SYSTEM SET max_replication_slots = {}; and restart",
                limit + 5
            )),
        )
    })
}

fn room_for_sender(settings: &Settings) -> Option<Check> {
    let limit = settings.number("max_wal_senders")?;
    (settings.senders >= limit).then(|| {
        let message = format!("all {limit} WAL senders are in use");
        let fault = Fault::new(TOO_MANY_CONNECTIONS, Action::Retry, message);
        Check::fault(
            "max_wal_senders",
            fault.hint(format!("ALTER SYSTEM SET max_wal_senders = {}; and restart", limit + 5)),
        )
    })
}

/// Limits that take the WAL from a slot that lags.
fn retention(settings: &Settings) -> Vec<Check> {
    let mut checks = Vec::new();
    match settings.number("max_slot_wal_keep_size") {
        Some(megabytes) if megabytes >= 0 => checks.push(Check::warning(
            "max_slot_wal_keep_size",
            format!("{megabytes} MB: a relay that lags further loses the slot, and events with it"),
            "size it for the longest outage that has to be survived, and alert on the slot's safe_wal_size",
        )),
        _ => checks.push(Check::good("max_slot_wal_keep_size", "no limit; alert on the WAL that the slot retains")),
    }
    if let Some(seconds) = settings.number("idle_replication_slot_timeout").filter(|seconds| *seconds > 0) {
        let message = format!("{seconds} s: a relay that is away longer loses the slot, and events with it");
        checks.push(if seconds < SHORT_IDLE_SECONDS {
            Check::warning(
                "idle_replication_slot_timeout",
                message,
                "ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_reload_conf();",
            )
        } else {
            Check::good("idle_replication_slot_timeout", message)
        });
    }
    checks
}
