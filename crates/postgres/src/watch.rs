//! What is watched beside the stream: the slot, the server, and the proof that nothing was skipped.
//!
//! PostgreSQL skips rows without a word when the publication does not hold their table at that place in
//! the WAL, and keepalives pass over them. So a keepalive's position counts only as far as the catalogue
//! proves it. Each reading takes the WAL position *first* and then, with a newer snapshot, a fingerprint
//! of all catalogue rows that decide what is sent. Of two readings with the same good fingerprint, the later
//! proves its position: a change committed in between would show as another `xmin` or `oid`, and one
//! whose commit is in the WAL but not visible yet (it may wait for a synchronous standby) shows as the
//! `xmax` of a row, which makes the reading one of doubt. What happened to the publication before the first
//! reading of a process cannot be known; readings go on across connections.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use tokio::sync::watch;
use tokio::time::sleep;
use waljet_pgoutput::Lsn;
use waljet_pipeline::{Fault, Horizon, Visible};

use crate::control::{Control, SharedControl, text};
use crate::error::UNAVAILABLE;
use crate::publication::{self, Membership};
use crate::slot::{self, SlotState, as_text};
use crate::source::SourceOptions;

/// How soon a first or a changed fingerprint is read again, so that a start does not wait for its proof.
const CONFIRM_AFTER: Duration = Duration::from_millis(200);

/// After so long a commit in the WAL is visible. Longer only where a synchronous standby hangs.
const SETTLES_IN: Duration = Duration::from_secs(60);

/// How often the end of the WAL is noted for that.
const MOST_EVERY: Duration = Duration::from_secs(1);

/// A snapshot for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SourceWatch {
    /// The server's version, such as `18.1`.
    pub server_version: Option<String>,
    /// Up to where the server has written WAL.
    #[serde(serialize_with = "as_text")]
    pub wal_end: Option<Lsn>,
    /// The slot; none where it does not exist or was not read yet.
    pub slot: Option<SlotState>,
    /// Whether the publication sends the table's rows.
    pub publication: PublicationWatch,
    /// Up to where nothing was skipped, as far as the catalogue proves it.
    #[serde(serialize_with = "as_text")]
    pub proven: Option<Lsn>,
    /// Why the control connection is not there.
    pub control_fault: Option<String>,
    /// When this was read, in seconds since 1970.
    pub refreshed_unix_seconds: Option<u64>,
}

/// What the catalogue says about the publication.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum PublicationWatch {
    /// It was not read yet.
    #[default]
    Unread,
    /// It sends the table's rows.
    Good,
    /// It does not, and rows that are written now are skipped for good.
    Fault {
        /// The fault's code.
        code: String,
        /// What is wrong.
        message: String,
        /// The statement that mends it.
        hint: Option<String>,
    },
}

/// What the reader is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Proof {
    /// Up to where nothing was skipped.
    pub(crate) proven: Lsn,
    /// Whether the server is on its way down.
    pub(crate) stopping: bool,
}

/// One reading of the catalogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    /// The WAL position before it.
    pub(crate) wal_end: Lsn,
    /// The fingerprint.
    pub(crate) fingerprint: String,
    /// Whether a transaction may change it that is committed already.
    pub(crate) in_doubt: bool,
    /// Whether rows of the table come.
    pub(crate) good: bool,
}

/// What a reading amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing was skipped up to here.
    Proven(Lsn),
    /// Too early to tell.
    Waiting,
    /// Rows are being skipped; the first reading that says so.
    Broken,
    /// Rows are still being skipped.
    StillBroken,
    /// The catalogue changed: rows between these positions may have been skipped.
    Changed(Lsn, Lsn),
}

/// The readings so far, kept across connections.
#[derive(Clone, Debug, Default)]
pub(crate) struct Evidence {
    last: Option<String>,
    broken: bool,
    proven: Lsn,
}

impl Evidence {
    /// Up to where nothing was skipped.
    pub(crate) fn proven(&self) -> Lsn {
        self.proven
    }

    /// Weighs a reading against the one before.
    pub(crate) fn weigh(&mut self, reading: &Reading) -> Verdict {
        if reading.in_doubt {
            return Verdict::Waiting;
        }
        if !reading.good {
            let first = !std::mem::replace(&mut self.broken, true);
            return if first { Verdict::Broken } else { Verdict::StillBroken };
        }
        let was_broken = std::mem::take(&mut self.broken);
        let before = self.last.replace(reading.fingerprint.clone());
        match before {
            Some(before) if before == reading.fingerprint && !was_broken => {
                self.proven = self.proven.max(reading.wal_end);
                Verdict::Proven(self.proven)
            }
            Some(_) => Verdict::Changed(self.proven, reading.wal_end),
            None if was_broken => Verdict::Changed(self.proven, reading.wal_end),
            None => Verdict::Waiting,
        }
    }
}

/// Reads the catalogue beside the stream until it is dropped.
pub(crate) struct Watcher {
    pub(crate) options: Arc<SourceOptions>,
    pub(crate) control: Option<Arc<Control>>,
    pub(crate) shared: SharedControl,
    pub(crate) evidence: watch::Sender<Evidence>,
    pub(crate) proof: watch::Sender<Proof>,
    pub(crate) state: watch::Sender<SourceWatch>,
    pub(crate) horizon: watch::Sender<Option<Horizon>>,
    /// Where the WAL ended lately, with the times of the readings; a reading a second at most.
    pub(crate) ends: VecDeque<(Instant, Lsn)>,
}

impl Watcher {
    pub(crate) async fn run(mut self) {
        let Some(endpoint) = self.control.as_ref().map(|control| control.endpoint.clone()) else { return };
        let mut failing = false;
        loop {
            let pause = match self.look().await {
                Ok(pause) => {
                    failing = false;
                    pause
                }
                Err(fault) => {
                    if !failing {
                        tracing::warn!(error = fault.summary(), "control connection lost");
                    }
                    failing = true;
                    self.state.send_modify(|state| state.control_fault = Some(fault.summary()));
                    self.control = None;
                    match Control::connect_to(&self.options.connect, &endpoint).await {
                        Ok(control) => {
                            self.proof.send_modify(|proof| proof.stopping = false);
                            let control = Arc::new(control);
                            self.shared.put(Arc::clone(&control));
                            self.control = Some(control);
                            Duration::ZERO
                        }
                        Err(fault) => {
                            if is_down(&fault) {
                                self.proof.send_modify(|proof| proof.stopping = true);
                            }
                            self.state.send_modify(|state| state.control_fault = Some(fault.summary()));
                            self.options.watch_interval
                        }
                    }
                }
            };
            sleep(pause).await;
        }
    }

    /// Reads once and returns how long to wait before the next time.
    async fn look(&mut self) -> Result<Duration, Fault> {
        let Some(control) = &self.control else {
            return Err(crate::error::lost("watch the server", io::ErrorKind::NotConnected.into()));
        };
        let (reading, membership, snapshot) = read(control, &self.options, &self.state).await?;
        let visible = Visible { snapshot, after: self.settled(reading.wal_end) };
        self.horizon.send_replace(Some(Horizon { lsn: reading.wal_end, visible }));
        let mut verdict = Verdict::Waiting;
        self.evidence.send_modify(|evidence| verdict = evidence.weigh(&reading));
        let fault = membership.fault(&self.options.publication, &self.options.table);
        match verdict {
            Verdict::Proven(to) => {
                self.proof.send_if_modified(|proof| std::mem::replace(&mut proof.proven, to) != to);
            }
            Verdict::Broken => {
                if let Some(fault) = &fault {
                    tracing::error!(
                        code = fault.code.0,
                        error = fault.summary(),
                        hint = fault.hint.as_deref().unwrap_or_default(),
                        wal_end = %reading.wal_end,
                        "rows are skipped by the server"
                    );
                }
            }
            Verdict::Changed(from, to) => {
                tracing::warn!(
                    publication = self.options.publication,
                    %from,
                    %to,
                    "publication changed: rows committed between these positions may have been skipped by the server"
                );
            }
            Verdict::Waiting | Verdict::StillBroken => {}
        }
        let proven = self.evidence.borrow().proven;
        self.state.send_modify(|state| {
            state.proven = (proven > Lsn::ZERO).then_some(proven);
            state.publication = fault.map_or(PublicationWatch::Good, |fault| PublicationWatch::Fault {
                code: fault.code.to_string(),
                message: fault.message,
                hint: fault.hint,
            });
        });
        let soon = matches!(verdict, Verdict::Waiting | Verdict::Changed(..));
        Ok(if soon { CONFIRM_AFTER.min(self.options.watch_interval) } else { self.options.watch_interval })
    }
}

impl Watcher {
    /// Takes a reading of the end of the WAL and returns one that is so old that what was committed before it is visible: a commit
    /// shows only once it is on the disk, and on a synchronous standby where there is one.
    fn settled(&mut self, wal_end: Lsn) -> Lsn {
        let now = Instant::now();
        if self.ends.back().is_none_or(|(at, _)| *at + MOST_EVERY <= now) {
            self.ends.push_back((now, wal_end));
        }
        while self.ends.get(1).is_some_and(|(at, _)| *at + SETTLES_IN <= now) {
            self.ends.pop_front();
        }
        self.ends.front().filter(|(at, _)| *at + SETTLES_IN <= now).map_or(Lsn::ZERO, |(_, lsn)| *lsn)
    }
}

/// Reads what is visible, the WAL position, the catalogue and the slot, in that order and in one round trip.
pub(crate) async fn read(
    control: &Control,
    options: &SourceOptions,
    state: &watch::Sender<SourceWatch>,
) -> Result<(Reading, Membership, String), Fault> {
    let sql = format!(
        "SELECT pg_current_snapshot() AS snapshot; SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END AS wal_end; {}; {}",
        publication::select(control.version, &options.publication, &options.table),
        slot::select(&slot::named(&options.slot)),
    );
    let rows = control.rows("watch the server", &sql).await?;
    let [visible, first, second, rest @ ..] = rows.as_slice() else {
        return Err(crate::error::protocol("it left out rows when it was watched"));
    };
    let snapshot = text(visible, "snapshot").to_owned();
    let wal_end = text(first, "wal_end").parse().map_err(crate::error::protocol)?;
    let membership = Membership::from_row(second, &options.table);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    state.send_modify(|state| {
        state.server_version = Some(control.version_text.clone());
        state.wal_end = Some(wal_end);
        state.slot = rest.first().map(SlotState::from_row);
        state.control_fault = None;
        state.refreshed_unix_seconds = Some(now);
    });
    let reading = Reading {
        wal_end,
        fingerprint: membership.fingerprint.clone(),
        in_doubt: membership.in_doubt,
        good: membership.fault(&options.publication, &options.table).is_none(),
    };
    Ok((reading, membership, snapshot))
}

/// Whether a failed connection says that the server is stopping or gone, rather than far away.
fn is_down(fault: &Fault) -> bool {
    let refused =
        |error: &io::Error| matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound);
    fault.code == UNAVAILABLE
        || fault.cause.as_deref().and_then(|cause| cause.downcast_ref::<io::Error>()).is_some_and(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(wal_end: u64, fingerprint: &str) -> Reading {
        Reading { wal_end: Lsn(wal_end), fingerprint: fingerprint.into(), in_doubt: false, good: true }
    }

    #[test]
    fn the_second_of_two_equal_readings_proves_its_position() {
        let mut evidence = Evidence::default();
        assert_eq!(evidence.weigh(&reading(10, "a")), Verdict::Waiting);
        assert_eq!(evidence.weigh(&reading(20, "a")), Verdict::Proven(Lsn(20)));
        assert_eq!(evidence.weigh(&reading(30, "a")), Verdict::Proven(Lsn(30)));
    }

    #[test]
    fn a_table_dropped_and_added_between_two_readings_shows_the_window() {
        let mut evidence = Evidence::default();
        evidence.weigh(&reading(10, "a"));
        evidence.weigh(&reading(20, "a"));
        assert_eq!(evidence.weigh(&reading(30, "b")), Verdict::Changed(Lsn(20), Lsn(30)));
        assert_eq!(evidence.weigh(&reading(40, "b")), Verdict::Proven(Lsn(40)));
    }

    #[test]
    fn nothing_is_proven_while_the_publication_is_broken_and_it_heals_by_itself() {
        let mut evidence = Evidence::default();
        evidence.weigh(&reading(10, "a"));
        evidence.weigh(&reading(20, "a"));
        let broken = Reading { good: false, ..reading(30, "") };
        assert_eq!(evidence.weigh(&broken), Verdict::Broken);
        assert_eq!(evidence.weigh(&Reading { wal_end: Lsn(40), ..broken }), Verdict::StillBroken);
        assert_eq!(evidence.proven, Lsn(20));
        // Even the same fingerprint proves nothing at once: what lay in between was skipped.
        assert_eq!(evidence.weigh(&reading(50, "a")), Verdict::Changed(Lsn(20), Lsn(50)));
        assert_eq!(evidence.weigh(&reading(60, "a")), Verdict::Proven(Lsn(60)));
    }

    #[test]
    fn a_change_that_is_committed_but_not_visible_holds_the_proof() {
        let mut evidence = Evidence::default();
        evidence.weigh(&reading(10, "a"));
        let doubt = Reading { in_doubt: true, ..reading(20, "a") };
        assert_eq!(evidence.weigh(&doubt), Verdict::Waiting);
        assert_eq!(evidence.weigh(&reading(30, "a")), Verdict::Proven(Lsn(30)));
    }

    #[test]
    fn a_proof_never_goes_back() {
        let mut evidence = Evidence::default();
        evidence.weigh(&reading(30, "a"));
        assert_eq!(evidence.weigh(&reading(40, "a")), Verdict::Proven(Lsn(40)));
        assert_eq!(evidence.weigh(&reading(35, "a")), Verdict::Proven(Lsn(40)));
    }
}
