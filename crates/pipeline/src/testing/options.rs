//! The options of a pipeline between a simulated database and a simulated broker.

use std::sync::Arc;

use waljet_pgoutput::Timestamp;

use crate::{
    Columns, DEFAULT_CHECKPOINT_INTERVAL, DEFAULT_DRAIN_TIMEOUT, HeaderOptions, Metrics, Monitor, OutboxOptions,
    PipelineOptions, ReplayWindow, RetryOptions, Route, UnsafeToken, WindowOptions,
};

/// Returns the usual options, for the table that a [`Database`](super::Database) has.
#[must_use]
pub fn options() -> PipelineOptions {
    let columns = Columns { headers: None, ..Columns::waljet() };
    PipelineOptions {
        outbox: OutboxOptions { schema: "public".into(), table: "outbox".into(), columns },
        route: Route::new("outbox.{aggregate_type}.{event_type}", UnsafeToken::Escape)
            .expect("a template made here is one"),
        headers: HeaderOptions::default(),
        window: WindowOptions::default(),
        checkpoint_interval: DEFAULT_CHECKPOINT_INTERVAL,
        replay_window: ReplayWindow::default(),
        retry: RetryOptions::default(),
        drain_timeout: DEFAULT_DRAIN_TIMEOUT,
        accept_gap: false,
        clock: || Timestamp(0),
    }
}

/// Makes a monitor with metrics of its own, for a window of this size.
#[must_use]
pub fn monitor(window: WindowOptions) -> Arc<Monitor> {
    let metrics = Metrics::register(&prometheus::Registry::new()).expect("an empty registry takes them");
    Arc::new(Monitor::new(metrics, window))
}
