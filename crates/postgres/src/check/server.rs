//! Version, role and settings of the server.

use std::collections::HashMap;
use std::time::Duration;

use waljet_pipeline::{Action, Check, Fault};

use super::verdict;
use crate::control::{Control, flag, text};
use crate::error::{PRIVILEGE, STANDBY, VERSION, WAL_LEVEL};
use crate::source::SourceOptions;
use crate::sql::quote_ident;

/// The oldest version that is relied on: from 14 on, logical decoding keeps the connection alive through
/// transactions that it skips.
const OLDEST: u32 = 140_000;
/// The first version that decodes on a standby.
const STANDBY_DECODES: u32 = 160_000;
/// Below this the server hangs up at small hitches.
const SHORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The settings that are looked at, as `pg_settings` has them.
pub(super) struct Settings {
    values: HashMap<String, String>,
    /// Slots that exist.
    pub(super) slots: i64,
    /// WAL senders that run.
    pub(super) senders: i64,
}

impl Settings {
    /// Returns a setting as a number, in the unit that `pg_settings` gives it in.
    pub(super) fn number(&self, name: &str) -> Option<i64> {
        self.values.get(name)?.parse().ok()
    }

    fn text(&self, name: &str) -> &str {
        self.values.get(name).map(String::as_str).unwrap_or_default()
    }

    async fn read(control: &Control) -> Result<Self, Fault> {
        let sql = "SELECT name, setting FROM pg_settings WHERE name IN ('wal_level', 'max_replication_slots', \
                   'max_wal_senders', 'wal_sender_timeout', 'max_slot_wal_keep_size', 'idle_replication_slot_timeout', \
                   'synchronous_standby_names') \
                   UNION ALL SELECT '#slots', count(*)::text FROM pg_replication_slots \
                   UNION ALL SELECT '#senders', count(*)::text FROM pg_stat_replication";
        let rows = control.rows("read settings", sql).await?;
        let pair = |row| (text(row, "name").to_owned(), text(row, "setting").to_owned());
        let mut settings = Self { values: rows.iter().map(pair).collect(), slots: 0, senders: 0 };
        settings.slots = settings.number("#slots").unwrap_or_default();
        settings.senders = settings.number("#senders").unwrap_or_default();
        Ok(settings)
    }
}

pub(super) async fn check(
    control: &Control,
    options: &SourceOptions,
    checks: &mut Vec<Check>,
) -> Result<Settings, Fault> {
    checks.push(version(control));
    checks.push(standby(control));
    let settings = Settings::read(control).await?;
    checks.push(wal_level(&settings));
    checks.push(privilege(control, options).await?);
    checks.push(sender_timeout(&settings));
    checks.extend(synchronous(&settings, options));
    Ok(settings)
}

fn version(control: &Control) -> Check {
    let found = &control.version_text;
    let fault = (control.version < OLDEST).then(|| {
        Fault::new(VERSION, Action::Halt, format!("expected PostgreSQL 14 or later, found {found}"))
            .hint("upgrade the server")
    });
    verdict("server version", fault, found)
}

fn standby(control: &Control) -> Check {
    const NAME: &str = "primary";
    match (control.standby, control.version >= STANDBY_DECODES) {
        (false, _) => Check::good(NAME, "the server is a primary"),
        (true, true) => Check::warning(
            NAME,
            "the server is a standby: the slot is lost if the primary lowers wal_level or removes rows that it needs",
            "connect to the primary, or set hot_standby_feedback = on",
        ),
        (true, false) => Check::fault(
            NAME,
            Fault::new(
                STANDBY,
                Action::Halt,
                format!("the server is a standby, and version {} does not decode there", control.version_text),
            )
            .hint("connect to the primary"),
        ),
    }
}

fn wal_level(settings: &Settings) -> Check {
    let found = settings.text("wal_level");
    let fault = (found != "logical").then(|| {
        Fault::new(WAL_LEVEL, Action::Halt, format!("wal_level: expected logical, found {found}"))
            .hint("ALTER SYSTEM SET wal_level = 'logical'; then restart the server")
    });
    verdict("wal_level", fault, found)
}

async fn privilege(control: &Control, options: &SourceOptions) -> Result<Check, Fault> {
    let sql = "SELECT r.rolreplication OR r.rolsuper AS may, r.rolname AS name FROM pg_roles r WHERE r.rolname = current_user";
    let row = control.row("read the role's privileges", sql).await?;
    let role = text(&row, "name");
    if flag(&row, "may") {
        return Ok(Check::good("role", format!("{role} may use replication")));
    }
    // Managed services keep the attribute to themselves and hand out a role instead.
    let hint = format!("ALTER ROLE {0} REPLICATION; on Amazon RDS: GRANT rds_replication TO {0};", quote_ident(role));
    let managed =
        "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_replication' AND pg_has_role(oid, 'MEMBER')) AS may";
    if flag(&control.row("read the role's privileges", managed).await?, "may") {
        return Ok(Check::good("role", format!("{role} may use replication, as a member of rds_replication")));
    }
    let message = format!("role {:?} lacks the REPLICATION attribute", options.connect.user());
    Ok(Check::fault("role", Fault::new(PRIVILEGE, Action::Halt, message).hint(hint)))
}

fn sender_timeout(settings: &Settings) -> Check {
    const NAME: &str = "wal_sender_timeout";
    let timeout =
        Duration::from_millis(settings.number(NAME).and_then(|millis| u64::try_from(millis).ok()).unwrap_or_default());
    if timeout.is_zero() {
        return Check::warning(
            NAME,
            "off: the server never notices a dead relay, and its slot stays taken",
            "ALTER SYSTEM SET wal_sender_timeout = '60s'; SELECT pg_reload_conf();",
        );
    }
    if timeout < SHORT_TIMEOUT {
        return Check::warning(
            NAME,
            format!("{} s: a small hitch ends the connection", timeout.as_secs_f32()),
            "ALTER SYSTEM SET wal_sender_timeout = '60s'; SELECT pg_reload_conf();",
        );
    }
    Check::good(NAME, format!("{} s", timeout.as_secs_f32()))
}

/// A relay that the primary waits for at each commit would hold up all writers while the broker is away.
fn synchronous(settings: &Settings, options: &SourceOptions) -> Option<Check> {
    let names = settings.text("synchronous_standby_names");
    let ours = options.connect.application_name();
    if !waits_for(names, ours) {
        return None;
    }
    Some(Check::warning(
        "synchronous_standby_names",
        format!("{names:?} matches this relay's application_name {ours:?}: commits may wait for it"),
        "name the standbys one by one, or give the relay another application_name in its URL",
    ))
}

fn waits_for(names: &str, ours: &str) -> bool {
    let separators = |c: char| c == ',' || c == '(' || c == ')' || c.is_whitespace();
    names
        .split(separators)
        .map(|name| name.trim_matches('"'))
        .any(|name| name == "*" || name.eq_ignore_ascii_case(ours))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_synchronous_standby_name_that_means_the_relay_is_found() {
        assert!(waits_for("*", "waljet"));
        assert!(waits_for("FIRST 1 (s1, \"Waljet\")", "waljet"));
        assert!(waits_for("ANY 2 (*)", "waljet"));
        assert!(!waits_for("FIRST 1 (s1, s2)", "waljet"));
        assert!(!waits_for("", "waljet"));
    }
}
