//! From configuration to a relay: source, pipeline and sink put together, and the views of them.

use std::sync::Arc;
use std::time::SystemTime;

use prometheus::Registry;
use serde::Serialize;
use tokio::sync::watch;
use waljet_jetstream::{JetStreamSink, LaneOptions, Matching, SinkWatch};
use waljet_pgoutput::Timestamp;
use waljet_pipeline::{Checkpoints, Fault, Metrics, Monitor, Pipeline, PipelineOptions, Source, Status};
use waljet_postgres::{PublicationWatch, ReplicationSource, SourceWatch};

use crate::admin::Snapshot;
use crate::checkpoint::Store;
use crate::config::Config;
use crate::error::{START, halt};
use crate::metrics::RelayMetrics;

/// A relay that is ready to run.
pub(crate) struct Relay<S, C> {
    /// Moves the events.
    pub(crate) pipeline: Pipeline<S, JetStreamSink, C>,
    /// Tells how it is doing.
    pub(crate) views: Arc<Views>,
}

/// Whether to go on where the stream and the database do not fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gap {
    /// Stop.
    Refuse,
    /// Go on: the operator's word.
    Accept,
}

/// Puts a relay together; connects to nothing.
///
/// # Errors
///
/// The metrics could not be registered.
pub(crate) fn assemble(config: &Config, gap: Gap) -> Result<Relay<ReplicationSource, Store>, Fault> {
    let source = ReplicationSource::new(config.source.clone());
    let (watch, store) = (source.watch(), Store::new(config, source.control()));
    assemble_with(config, Ends { source, watch, store, matching: Matching::Place }, gap)
}

/// The ends of a relay that may be others than usual.
pub(crate) struct Ends<S, C> {
    /// Where events come from.
    pub(crate) source: S,
    /// The source's own snapshots.
    pub(crate) watch: watch::Receiver<SourceWatch>,
    /// Where checkpoints are kept.
    pub(crate) store: C,
    /// How events are recognized in the stream.
    pub(crate) matching: Matching,
}

/// Puts a relay together from its ends; connects to nothing.
///
/// # Errors
///
/// The metrics could not be registered.
pub(crate) fn assemble_with<S: Source, C: Checkpoints>(
    config: &Config,
    ends: Ends<S, C>,
    gap: Gap,
) -> Result<Relay<S, C>, Fault> {
    let registry = Registry::new();
    let fault = |error| halt(START, "register the metrics").cause(error);
    let metrics = Metrics::register(&registry).map_err(fault)?;
    let relay_metrics = RelayMetrics::register(&registry).map_err(fault)?;
    let monitor = Arc::new(Monitor::new(metrics, config.window));
    let lane = LaneOptions { matching: ends.matching, ..config.lane };
    let sink = JetStreamSink::new(config.nats.clone(), config.stream.clone(), lane);
    let views = Views {
        monitor: Arc::clone(&monitor),
        source: ends.watch,
        sink: sink.watch(),
        metrics: relay_metrics,
        registry,
    };
    let options = PipelineOptions {
        outbox: config.outbox.clone(),
        route: config.route.clone(),
        headers: config.headers.clone(),
        window: config.window,
        checkpoint_interval: config.checkpoint.interval,
        replay_window: config.replay_window,
        retry: config.retry,
        drain_timeout: config.drain_timeout,
        accept_gap: gap == Gap::Accept,
        clock: now,
    };
    let pipeline = Pipeline::new(ends.source, sink, ends.store, options, monitor, fastrand::u64(..));
    Ok(Relay { pipeline, views: Arc::new(views) })
}

/// Reads the wall clock.
pub(crate) fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_unix_micros(i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
}

/// All that tells how a relay is doing.
pub(crate) struct Views {
    monitor: Arc<Monitor>,
    source: watch::Receiver<SourceWatch>,
    sink: watch::Receiver<SinkWatch>,
    metrics: RelayMetrics,
    /// Holds all metrics.
    pub(crate) registry: Registry,
}

/// The whole state, as `/status` and `waljet status --json` have it; the keys are a contract.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    #[serde(flatten)]
    pipeline: Status,
    postgres: SourceWatch,
    nats: SinkWatch,
    dead_letters: u64,
}

impl Views {
    /// How many events are in the stream so far, by this run.
    pub(crate) fn settled(&self) -> u64 {
        let events = self.monitor.status().events;
        events.stored + events.duplicate + events.skipped
    }

    /// Says that the process is alive.
    pub(crate) fn turn(&self) {
        self.monitor.turn();
    }

    /// The sink's own snapshots.
    pub(crate) fn sink_watch(&self) -> watch::Receiver<SinkWatch> {
        self.sink.clone()
    }

    /// Counts a lost connection to NATS.
    pub(crate) fn count_lost_sink(&self) {
        self.monitor.metrics.reconnects.with_label_values(&["nats"]).inc();
    }

    /// Takes a snapshot and sets the gauges from it.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut status = self.monitor.status();
        let postgres = self.source.borrow().clone();
        if let Some((reason, hint)) = source_stands_still(&postgres, now()).filter(|_| status.ready) {
            (status.ready, status.reason, status.hint) = (false, Some(reason), hint);
        }
        // With a full window nothing is received, and the lag grows all the same.
        if let (Some(end), Some(confirmed)) = (postgres.wal_end, status.source.confirmed_lsn) {
            status.lag_bytes = status.lag_bytes.max(end.bytes_since(confirmed));
        }
        self.monitor.metrics.set(&status);
        self.metrics.set(postgres.slot.as_ref());
        let dead = (!status.live).then(|| "the pipeline's loop does not turn".to_owned());
        let hint = status.hint.as_ref().map(|hint| format!("; hint: {hint}")).unwrap_or_default();
        let not_ready = status.reason.as_ref().map(|reason| format!("{reason}{hint}"));
        let report = Report {
            version: env!("CARGO_PKG_VERSION"),
            pipeline: status,
            postgres,
            nats: self.sink.borrow().clone(),
            dead_letters: 0,
        };
        // A plain structure of numbers and texts always has a JSON form.
        let status = serde_json::to_value(&report).unwrap_or_default();
        Snapshot { dead, not_ready, status }
    }
}

/// The database is asked about once a second; after this without an answer it counts as silent.
const SILENT_AFTER: u64 = 10;

/// Says why nothing comes from the source although it is connected, and what mends it.
fn source_stands_still(source: &SourceWatch, now: Timestamp) -> Option<(String, Option<String>)> {
    // Rows are being skipped, and the position stands still.
    if let PublicationWatch::Fault { code, message, hint } = &source.publication {
        return Some((format!("source: {message} [{code}]"), hint.clone()));
    }
    let now = u64::try_from(now.unix_micros() / 1_000_000).unwrap_or(0);
    let silent = now.saturating_sub(source.refreshed_unix_seconds?);
    (silent >= SILENT_AFTER).then(|| {
        let why = source.control_fault.as_ref().map(|fault| format!(": {fault}")).unwrap_or_default();
        (format!("source: the database has not answered for {silent} s{why}"), None)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may fail by panicking")]
mod tests {
    use super::*;
    use crate::config::parsed;

    #[tokio::test]
    async fn a_relay_that_has_not_run_yet_is_not_ready_and_says_so_in_all_views() {
        let relay = assemble(&parsed("[postgres]\nurl = \"postgres://a@b/c\"\n"), Gap::Refuse).unwrap();
        let snapshot = relay.views.snapshot();
        assert_eq!(snapshot.dead, None);
        assert_eq!(snapshot.not_ready.as_deref(), Some("source: not connected yet"));
        assert_eq!(snapshot.status["ready"], false);
        assert_eq!(snapshot.status["nats"]["stream"], "OUTBOX");
        assert_eq!(snapshot.status["window"]["max_events"], 1024);
    }

    #[test]
    fn a_database_that_does_not_answer_or_skips_rows_is_a_reason() {
        let at = |seconds: i64| Timestamp::from_unix_micros(seconds * 1_000_000);
        let watch = SourceWatch { refreshed_unix_seconds: Some(100), ..SourceWatch::default() };
        assert_eq!(source_stands_still(&watch, at(109)), None);
        let silent = SourceWatch { control_fault: Some("connection closed".to_owned()), ..watch.clone() };
        let reason = "source: the database has not answered for 10 s: connection closed".to_owned();
        assert_eq!(source_stands_still(&silent, at(110)), Some((reason, None)));
        let publication =
            PublicationWatch::Fault { code: "c".to_owned(), message: "m".to_owned(), hint: Some("h".to_owned()) };
        let skips = SourceWatch { publication, ..watch };
        assert_eq!(source_stands_still(&skips, at(100)), Some(("source: m [c]".to_owned(), Some("h".to_owned()))));
    }

    #[test]
    fn every_metric_of_the_contract_is_told() {
        let relay = assemble(&parsed("[postgres]\nurl = \"postgres://a@b/c\"\n"), Gap::Refuse).unwrap();
        relay.views.snapshot();
        let names: Vec<String> = relay.views.registry.gather().iter().map(|family| family.name().to_owned()).collect();
        for name in [
            "waljet_build_info",
            "waljet_commit_to_ack_seconds",
            "waljet_confirmed_lsn",
            "waljet_dead_letters",
            "waljet_events_total",
            "waljet_in_flight_bytes",
            "waljet_in_flight_events",
            "waljet_lag_bytes",
            "waljet_oldest_unacked_seconds",
            "waljet_publish_to_ack_seconds",
            "waljet_ready",
            "waljet_reconnects_total",
            "waljet_received_lsn",
            "waljet_slot_retained_bytes",
            "waljet_slot_safe_bytes",
        ] {
            assert!(names.iter().any(|found| found == name), "{name} is missing among {names:?}");
        }
    }
}
