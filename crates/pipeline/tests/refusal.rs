//! An event that cannot be published stands in the way, visibly, until it can.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use waljet_pgoutput::Lsn;
use waljet_pipeline::testing::{Broker, BrokerFaults, Database, Fence, SourceFaults, Transaction, monitor, options};
use waljet_pipeline::{EndState, NoCheckpoints, Pipeline, WindowOptions};

fn transaction(number: u64) -> Transaction {
    Transaction {
        at: Duration::from_millis(number),
        commit_lsn: Lsn(number * 100),
        end_lsn: Lsn(number * 100 + 50),
        changes: vec![Some(format!("event-{number}"))],
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_over_a_limit_blocks_what_is_behind_it_until_the_limit_is_raised() {
    let broker = Broker::new(Fence::ExpectedSequence, BrokerFaults::default(), Duration::from_secs(120), 1);
    let database = Database::new((1..=5).map(transaction).collect(), broker.clone(), SourceFaults::default(), 1);
    let monitor = monitor(WindowOptions::default());
    broker.too_large(Some("event-3"));
    let pipeline = Pipeline::new(database.source(), broker.sink(), NoCheckpoints, options(), Arc::clone(&monitor), 1);
    let (stop, stopped) = watch::channel(false);
    let script = async {
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(broker.stored(), ["event-1", "event-2"]);
        assert_eq!(database.slot_confirmed(), Lsn(250));
        let status = monitor.status();
        assert_eq!(status.sink.state, EndState::Blocked);
        assert_eq!(status.reason.as_deref(), Some("sink: the message is too large [message-too-large]"));

        broker.too_large(None);
        tokio::time::sleep(Duration::from_secs(35)).await;
        assert_eq!(broker.stored().len(), 5);
        assert_eq!(database.slot_confirmed(), Lsn(550));
        let status = monitor.status();
        assert!(status.ready, "{status:?}");
        stop.send_replace(true);
    };
    let (result, ()) = tokio::join!(pipeline.run(stopped), script);
    assert!(result.unwrap().drained);
    assert_eq!(database.violations(), Vec::<String>::new());
}
