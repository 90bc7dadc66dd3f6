//! A stream that takes long to be read back, and one that no longer tells what it was given.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use waljet_pgoutput::Lsn;
use waljet_pipeline::testing::{
    Broker, BrokerFaults, Database, Fence, SimulatedSink, SourceFaults, Transaction, monitor, options,
};
use waljet_pipeline::{
    Ack, Fault, Missing, NoCheckpoints, Opened, OutboundMessage, Pipeline, Placement, Position, ReadBack, Rejection,
    Sink, StreamMark, WindowOptions,
};

/// Far longer than a loop that does not turn counts as alive.
const LONG: Duration = Duration::from_secs(300);

/// A sink that takes long to open, and then misses what the stream held.
struct Slow(SimulatedSink);

impl Sink for Slow {
    async fn open(&mut self, from: &Position, seen: Option<&StreamMark>) -> Result<Opened, Fault> {
        tokio::time::sleep(LONG).await;
        let opened = self.0.open(from, seen).await?;
        let read_back =
            ReadBack { messages: 7, found: 0, took: LONG, missing: Some(Missing::Everything), ..opened.read_back };
        Ok(Opened { read_back, ..opened })
    }

    async fn send(&mut self, token: u64, message: &OutboundMessage, place: Placement) -> Result<(), Fault> {
        self.0.send(token, message, place).await
    }

    async fn flush(&mut self) -> Result<(), Fault> {
        self.0.flush().await
    }

    async fn ack(&mut self) -> Result<Ack, Rejection> {
        self.0.ack().await
    }
}

#[tokio::test(start_paused = true)]
async fn the_relay_is_alive_while_it_reads_back_and_then_shows_what_that_took() {
    let broker = Broker::new(Fence::ExpectedSequence, BrokerFaults::default(), Duration::from_secs(120), 1);
    let transaction = Transaction {
        at: Duration::from_millis(1),
        commit_lsn: Lsn(100),
        end_lsn: Lsn(150),
        changes: vec![Some("event-1".to_owned())],
    };
    let database = Database::new(vec![transaction], broker.clone(), SourceFaults::default(), 1);
    let monitor = monitor(WindowOptions::default());
    let pipeline =
        Pipeline::new(database.source(), Slow(broker.sink()), NoCheckpoints, options(), Arc::clone(&monitor), 1);
    let (stop, stopped) = watch::channel(false);
    let script = async {
        for _ in 0..LONG.as_secs() - 5 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let status = monitor.status();
            assert!(status.live && !status.ready, "{status:?}");
        }
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(broker.stored(), ["event-1"]);
        let sink = monitor.status().sink;
        assert_eq!((sink.read_backs.count, sink.read_backs.messages), (1, 7));
        assert!(sink.read_backs.seconds >= LONG.as_secs_f64(), "{sink:?}");
        assert_eq!(sink.read_back.unwrap().missing, Some(Missing::Everything));
        stop.send_replace(true);
    };
    let (result, ()) = tokio::join!(pipeline.run(stopped), script);
    assert!(result.unwrap().drained);
}
