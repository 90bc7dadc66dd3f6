//! Every metric of the pipeline: names, labels and help.
//!
//! Gauges are set from a [`Status`] when they are read, so that they cannot disagree with it.

use prometheus::{
    Counter, Error, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
};

use crate::{ReadBack, ReadBacks, Status};

/// 1 ms to 60 s: a local broker answers within the first bucket, an election takes some seconds.
const SECONDS: [f64; 15] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// The metrics of one pipeline.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Events that the stream took.
    pub stored: IntCounter,
    /// Events that the broker had already, by its own word.
    pub duplicate: IntCounter,
    /// Events that were found stored when the stream was read back, or given out twice by the source.
    pub skipped: IntCounter,
    /// Changes of the outbox table that are not inserts, by operation.
    pub ignored: IntCounterVec,
    /// Generations that ended, by the code of the fault.
    pub publish_retries: IntCounterVec,
    /// Connections that were lost, by end.
    pub reconnects: IntCounterVec,
    /// Events that were sent although the stream no longer told whether it had them.
    pub read_back_unsure: IntCounter,
    read_backs: IntCounter,
    read_back_messages: IntCounter,
    read_back_found: IntCounter,
    read_back_seconds: Counter,
    /// From commit to acknowledgement.
    pub commit_to_ack: Histogram,
    /// From sending to acknowledgement.
    pub publish_to_ack: Histogram,
    in_flight_events: IntGauge,
    in_flight_bytes: IntGauge,
    received_lsn: IntGauge,
    confirmed_lsn: IntGauge,
    lag_bytes: IntGauge,
    oldest_unacked: Gauge,
    ready: IntGauge,
}

impl Metrics {
    /// Makes the metrics and registers them.
    ///
    /// # Errors
    ///
    /// The registry holds one of the names already.
    pub fn register(registry: &Registry) -> Result<Self, Error> {
        let counters = |name, help, label| {
            let counters = IntCounterVec::new(Opts::new(name, help), &[label])?;
            registry.register(Box::new(counters.clone()))?;
            Ok::<_, Error>(counters)
        };
        let counter = |name, help| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, Error>(counter)
        };
        let gauge = |name, help| {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, Error>(gauge)
        };
        let histogram = |name, help| {
            let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(SECONDS.to_vec()))?;
            registry.register(Box::new(histogram.clone()))?;
            Ok::<_, Error>(histogram)
        };
        let events = counters("waljet_events_total", "Events by what became of them.", "outcome")?;
        events.with_label_values(&["dead_lettered"]);
        let reconnects = counters("waljet_reconnects_total", "Connections that were lost, by end.", "end")?;
        for end in ["postgres", "nats"] {
            reconnects.with_label_values(&[end]);
        }
        let oldest_unacked = Gauge::new(
            "waljet_oldest_unacked_seconds",
            "Age of the oldest event that is not acknowledged, since it was received; 0 where there is none.",
        )?;
        registry.register(Box::new(oldest_unacked.clone()))?;
        let read_back_seconds =
            Counter::new("waljet_read_back_seconds_total", "How long reading the stream back took.")?;
        registry.register(Box::new(read_back_seconds.clone()))?;
        Ok(Self {
            stored: events.with_label_values(&["stored"]),
            duplicate: events.with_label_values(&["duplicate"]),
            skipped: events.with_label_values(&["skipped"]),
            ignored: counters(
                "waljet_ignored_total",
                "Changes of the outbox table that are no events, by operation.",
                "operation",
            )?,
            publish_retries: counters(
                "waljet_publish_retries_total",
                "Times that publishing began anew after a failure, by the failure's code.",
                "reason",
            )?,
            reconnects,
            read_back_unsure: counter(
                "waljet_read_back_unsure_events_total",
                "Events that were sent although the stream no longer told whether it had them.",
            )?,
            read_backs: counter("waljet_read_backs_total", "Times that messages of the stream were read back.")?,
            read_back_messages: counter(
                "waljet_read_back_messages_total",
                "Messages of the stream that were read back.",
            )?,
            read_back_found: counter(
                "waljet_read_back_found_total",
                "Event ids at or past the position resumed from that were read back.",
            )?,
            read_back_seconds,
            commit_to_ack: histogram(
                "waljet_commit_to_ack_seconds",
                "From the commit of a transaction to the acknowledgement of each of its events.",
            )?,
            publish_to_ack: histogram(
                "waljet_publish_to_ack_seconds",
                "From sending a message to its acknowledgement by the stream.",
            )?,
            in_flight_events: gauge("waljet_in_flight_events", "Events received and not acknowledged yet.")?,
            in_flight_bytes: gauge("waljet_in_flight_bytes", "Bytes of events received and not acknowledged yet.")?,
            received_lsn: gauge("waljet_received_lsn", "Position up to which WAL was received, in bytes.")?,
            confirmed_lsn: gauge("waljet_confirmed_lsn", "Position confirmed to PostgreSQL as flushed, in bytes.")?,
            lag_bytes: gauge("waljet_lag_bytes", "WAL between the received and the confirmed position.")?,
            oldest_unacked,
            ready: gauge("waljet_ready", "1 where /readyz says ready, otherwise 0.")?,
        })
    }

    /// Counts a read-back.
    pub(crate) fn read_back(&self, read_back: &ReadBack) {
        self.read_backs.inc_by(u64::from(read_back.messages > 0));
        self.read_back_messages.inc_by(read_back.messages);
        self.read_back_found.inc_by(read_back.found);
        self.read_back_seconds.inc_by(read_back.took.as_secs_f64());
    }

    /// Sums up all read-backs.
    pub(crate) fn read_backs(&self) -> ReadBacks {
        ReadBacks {
            count: self.read_backs.get(),
            messages: self.read_back_messages.get(),
            found: self.read_back_found.get(),
            seconds: self.read_back_seconds.get(),
            unsure: self.read_back_unsure.get(),
        }
    }

    /// Sets the gauges.
    pub fn set(&self, status: &Status) {
        let int = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.in_flight_events.set(int(status.window.events as u64));
        self.in_flight_bytes.set(int(status.window.bytes as u64));
        self.received_lsn.set(int(status.source.received_lsn.map_or(0, |lsn| lsn.0)));
        self.confirmed_lsn.set(int(status.source.confirmed_lsn.map_or(0, |lsn| lsn.0)));
        self.lag_bytes.set(int(status.lag_bytes));
        self.oldest_unacked.set(status.window.oldest_unacked_seconds);
        self.ready.set(i64::from(status.ready));
    }
}
