//! What the stored checkpoint is for: a slot that somebody moved is noticed, and nothing is written that need not be.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use waljet_pgoutput::Lsn;
use waljet_pipeline::testing::{
    Broker, BrokerFaults, Database, Fence, MemoryCheckpoints, SourceFaults, Transaction, monitor, options,
};
use waljet_pipeline::{
    Action, Checkpoints, Confirmed, Fault, Monitor, Pipeline, PipelineOptions, Replace, ReplayWindow, Stopped,
    WindowOptions,
};

/// One event every 100 ms.
fn transaction(number: u64) -> Transaction {
    Transaction {
        at: Duration::from_millis(number * 100),
        commit_lsn: Lsn(number * 1000),
        end_lsn: Lsn(number * 1000 + 50),
        changes: vec![Some(format!("event-{number}"))],
    }
}

struct Setup {
    broker: Broker,
    database: Database,
    checkpoints: MemoryCheckpoints,
}

impl Setup {
    fn new(events: u64) -> Self {
        // The broker's memory of ids is no help: each is forgotten at once.
        let broker = Broker::new(Fence::ExpectedSequence, BrokerFaults::default(), Duration::from_millis(1), 1);
        let transactions = (1..=events).map(transaction).collect();
        let database = Database::new(transactions, broker.clone(), SourceFaults::default(), 1);
        Self { broker, database, checkpoints: MemoryCheckpoints::new(0.0, 1) }
    }

    fn monitor() -> Arc<Monitor> {
        monitor(WindowOptions::default())
    }

    /// Runs a relay for a while; `Err` where it ended by itself.
    async fn relay(&self, monitor: Arc<Monitor>, accept_gap: bool, length: Duration) -> Result<Stopped, Fault> {
        self.relay_with(monitor, PipelineOptions { accept_gap, ..options() }, length).await
    }

    async fn relay_with(
        &self,
        monitor: Arc<Monitor>,
        options: PipelineOptions,
        length: Duration,
    ) -> Result<Stopped, Fault> {
        let (source, sink, store) = (self.database.source(), self.broker.sink(), self.checkpoints.clone());
        let pipeline = Pipeline::new(source, sink, store, options, monitor, 1);
        let (stop, stopped) = watch::channel(false);
        let end = async {
            tokio::time::sleep(length).await;
            stop.send_replace(true);
            std::future::pending().await
        };
        tokio::select! {
            result = pipeline.run(stopped) => result,
            never = end => never,
        }
    }

    /// As `run`, with a replay window.
    async fn run_holding(&self, window: ReplayWindow, accept_gap: bool, length: Duration) -> Result<u64, Fault> {
        let monitor = Self::monitor();
        let options = PipelineOptions { accept_gap, replay_window: window, ..options() };
        self.relay_with(Arc::clone(&monitor), options, length).await?;
        Ok(monitor.metrics.skipped.get() + monitor.metrics.duplicate.get())
    }

    async fn run(&self, length: Duration) -> Result<Stopped, Fault> {
        self.relay(Self::monitor(), false, length).await
    }

    /// As `run`, and killed at the end of it.
    async fn run_and_kill(&self, length: Duration) {
        let (source, sink, store) = (self.database.source(), self.broker.sink(), self.checkpoints.clone());
        let pipeline = Pipeline::new(source, sink, store, options(), Self::monitor(), 1);
        let (_stop, stopped) = watch::channel(false);
        assert!(tokio::time::timeout(length, pipeline.run(stopped)).await.is_err(), "it ended by itself");
    }
}

#[tokio::test(start_paused = true)]
async fn a_slot_that_was_moved_while_no_relay_ran_is_a_gap_until_it_is_accepted() {
    let setup = Setup::new(50);
    setup.run(Duration::from_secs(2)).await.unwrap();
    let before = setup.broker.stored().len();
    setup.database.advance(Lsn(30_050));
    for _ in 0..2 {
        let fault = setup.run(Duration::from_secs(5)).await.unwrap_err();
        assert_eq!(fault.action, Action::Gap, "{fault}");
        assert_eq!(setup.broker.stored().len(), before, "published over a gap");
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    setup.relay(Setup::monitor(), true, Duration::from_secs(5)).await.unwrap();
    assert_eq!(setup.broker.stored().last().unwrap(), "event-50");
    assert!(setup.broker.stored().len() < 50, "the slot was moved over events");
    setup.run(Duration::from_secs(1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_slot_that_was_moved_before_the_first_event_is_a_gap() {
    let setup = Setup::new(1);
    setup.run(Duration::from_millis(50)).await.unwrap();
    assert_eq!(setup.broker.stored().len(), 0);
    tokio::time::sleep(Duration::from_secs(1)).await;
    setup.database.advance(Lsn(1_050));
    let fault = setup.run(Duration::from_secs(5)).await.unwrap_err();
    assert_eq!(fault.action, Action::Gap, "{fault}");
}

#[tokio::test(start_paused = true)]
async fn the_slot_is_never_past_what_is_stored_and_a_relay_that_is_killed_goes_on() {
    let setup = Setup::new(100);
    for round in 0..40 {
        setup.run_and_kill(Duration::from_millis(137 + round * 7)).await;
        let stored = setup.checkpoints.stored().unwrap().confirmed.lsn;
        assert!(setup.database.slot_confirmed() <= stored, "{stored}");
    }
    setup.run(Duration::from_secs(20)).await.unwrap();
    assert_eq!(setup.broker.stored().len(), 100);
    assert_eq!(setup.database.violations(), Vec::<String>::new());
    assert_eq!(setup.database.slot_confirmed(), Lsn(100_050));
}

#[tokio::test(start_paused = true)]
async fn it_is_written_once_in_an_interval_and_not_at_all_when_idle() {
    let setup = Setup::new(100);
    setup.run(Duration::from_secs(12)).await.unwrap();
    let writes = setup.checkpoints.writes();
    assert!((8..=13).contains(&writes), "{writes} writes in 10 s of events");
    setup.run(Duration::from_secs(600)).await.unwrap();
    assert_eq!(setup.checkpoints.writes(), writes);
}

#[tokio::test(start_paused = true)]
async fn a_little_wal_of_others_is_followed_once_it_is_quiet_and_ever_more_seldom() {
    let mut setup = Setup::new(5);
    // Each far less than is worth a write at once, for ten minutes.
    let foreign = (0..100).map(|n| Transaction {
        at: Duration::from_secs(60 + n * 6),
        commit_lsn: Lsn(10_000 + n * 100),
        end_lsn: Lsn(10_050 + n * 100),
        changes: vec![None],
    });
    let transactions = (1..=5).map(transaction).chain(foreign).collect();
    setup.database = Database::new(transactions, setup.broker.clone(), SourceFaults::default(), 1);
    let running = setup.relay(Setup::monitor(), false, Duration::from_secs(1_200));
    let script = async {
        tokio::time::sleep(Duration::from_secs(50)).await;
        let before = setup.checkpoints.writes();
        tokio::time::sleep(Duration::from_secs(14)).await;
        assert_eq!(setup.database.slot_confirmed(), Lsn(10_050));
        assert_eq!(setup.checkpoints.writes(), before + 1);
        tokio::time::sleep(Duration::from_secs(1_000)).await;
        assert_eq!(setup.database.slot_confirmed(), Lsn(10_050 + 99 * 100));
        assert!(setup.checkpoints.writes() <= before + 10, "{} writes", setup.checkpoints.writes() - before);
    };
    let (result, ()) = tokio::join!(running, script);
    assert!(result.unwrap().drained);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_holds_the_slot_and_not_the_events_and_is_not_silent() {
    let setup = Setup::new(50);
    let monitor = Setup::monitor();
    let running = setup.relay(Arc::clone(&monitor), false, Duration::from_secs(60));
    let script = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        setup.checkpoints.fail();
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(setup.broker.stored().len(), 50);
        assert!(setup.database.slot_confirmed() < Lsn(10_000));
        let status = monitor.status();
        let reason = status.reason.unwrap_or_default();
        assert!(!status.ready && reason.starts_with("checkpoint: the store does not answer"), "{reason}");
        setup.checkpoints.heal();
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(setup.database.slot_confirmed(), Lsn(50_050));
        assert!(monitor.status().ready);
    };
    let (result, ()) = tokio::join!(running, script);
    assert!(result.unwrap().drained);
}

#[tokio::test(start_paused = true)]
async fn a_position_whose_answer_was_lost_is_not_taken_for_another_relays_and_nothing_is_stored_twice() {
    let setup = Setup::new(100);
    let running = setup.relay(Setup::monitor(), false, Duration::from_secs(30));
    let script = async {
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(1_500)).await;
            setup.checkpoints.lose_answers(true);
            tokio::time::sleep(Duration::from_millis(1_500)).await;
            // The checkpoint is past what this process knows to be stored, and behind what is in the stream.
            setup.database.disconnect();
            setup.checkpoints.lose_answers(false);
        }
    };
    let (result, ()) = tokio::join!(running, script);
    assert!(result.unwrap().drained);
    let stored = setup.broker.stored();
    let expected: Vec<String> = (1..=100).map(|number| format!("event-{number}")).collect();
    assert_eq!(stored, expected);
    assert_eq!(setup.database.violations(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_comes_back_behind_another_one_stores_nothing_twice() {
    let setup = Setup::new(100);
    let running = setup.relay(Setup::monitor(), false, Duration::from_secs(30));
    let script = async {
        tokio::time::sleep(Duration::from_millis(2_950)).await;
        // Another relay had the slot for a moment and left its checkpoint behind what the first one stored.
        let mut other = setup.checkpoints.stored().unwrap();
        other.confirmed.lsn = Lsn(other.confirmed.lsn.0 + 1_000);
        setup.checkpoints.save(&other, Replace::Earlier).await.unwrap();
        setup.database.disconnect();
    };
    let (result, ()) = tokio::join!(running, script);
    assert!(result.unwrap().drained);
    assert_eq!(setup.broker.stored().len(), 100);
    assert_eq!(setup.database.violations(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn slot_and_checkpoint_follow_the_database_to_a_new_timeline() {
    let setup = Setup::new(50);
    let running = setup.relay(Setup::monitor(), false, Duration::from_secs(600));
    let script = async {
        tokio::time::sleep(Duration::from_millis(2_950)).await;
        setup.database.promote();
        tokio::time::sleep(Duration::from_secs(7)).await;
        assert_eq!(setup.database.slot_confirmed(), Lsn(50_050));
        let Confirmed { history, lsn } = setup.checkpoints.stored().unwrap().confirmed;
        assert_eq!((history.timeline, lsn), (2, Lsn(50_050)));
        // And is not written for ever.
        let writes = setup.checkpoints.writes();
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert_eq!(setup.checkpoints.writes(), writes);
    };
    let (result, ()) = tokio::join!(running, script);
    assert!(result.unwrap().drained);
    assert_eq!(setup.broker.stored().len(), 50);
    assert_eq!(setup.database.violations(), Vec::<String>::new());
    setup.run(Duration::from_secs(1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_stayed_on_the_old_primary_says_nothing_about_the_new_ones_events() {
    let setup = Setup::new(50);
    let running = setup.relay(Setup::monitor(), false, Duration::from_secs(60));
    let script = async {
        tokio::time::sleep(Duration::from_millis(1_950)).await;
        setup.database.promote();
        tokio::time::sleep(Duration::from_millis(1_000)).await;
        // Of the timeline that was left, and past the place where it was.
        let mut other = setup.checkpoints.stored().unwrap();
        other.confirmed.history.timeline = 1;
        other.confirmed.lsn = Lsn(45_050);
        setup.checkpoints.save(&other, Replace::Anything).await.unwrap();
        setup.database.disconnect();
        // For the stream to be opened again, too.
        tokio::time::sleep(Duration::from_millis(500)).await;
        setup.broker.fill_for(Duration::from_secs(1));
    };
    let (result, ()) = tokio::join!(running, script);
    assert!(result.unwrap().drained);
    assert_eq!(setup.broker.stored().len(), 50);
    assert_eq!(setup.database.violations(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn the_operators_word_is_kept_until_it_is_stored() {
    let setup = Setup::new(50);
    setup.run(Duration::from_secs(2)).await.unwrap();
    setup.database.advance(Lsn(30_050));
    tokio::time::sleep(Duration::from_secs(3)).await;
    // Which notes it, too.
    setup.run(Duration::from_secs(1)).await.unwrap_err();
    let running = setup.relay(Setup::monitor(), true, Duration::from_secs(30));
    let script = async {
        // The store answers and takes nothing, so that the first attempt to store the word fails.
        setup.checkpoints.refuse_writes(true);
        tokio::time::sleep(Duration::from_secs(3)).await;
        setup.checkpoints.refuse_writes(false);
    };
    let (result, ()) = tokio::join!(running, script);
    assert!(result.unwrap().drained);
    assert_eq!(setup.broker.stored().last().unwrap(), "event-50");
    setup.run(Duration::from_secs(1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_replay_window_holds_the_slot_back_and_the_next_relay_begins_at_the_checkpoint() {
    let setup = Setup::new(300);
    let window = ReplayWindow { age: Duration::from_secs(10), max_bytes: None };
    let mut began = 0;
    for round in 1..=3_u64 {
        let again = setup.run_holding(window, false, Duration::from_secs(7)).await.unwrap();
        assert_eq!(again, 0, "events came again in round {round}");
        let stored = setup.checkpoints.stored().unwrap().confirmed.lsn;
        let held = stored.bytes_since(setup.database.slot_confirmed());
        // An event every 100 ms, each of 1,000 bytes.
        assert!(held >= 7_000.max(90_000_u64.min(round * 60_000)), "{held} bytes are held back at {stored}");
        assert!(setup.broker.stored().len() > began, "nothing was stored in round {round}");
        began = setup.broker.stored().len();
    }
    let names: Vec<String> = (1..=began).map(|number| format!("event-{number}")).collect();
    assert_eq!(setup.broker.stored(), names);
    // And without a window all of it is given back.
    setup.run(Duration::from_secs(2)).await.unwrap();
    let stored = setup.checkpoints.stored().unwrap().confirmed.lsn;
    assert_eq!(setup.database.slot_confirmed(), stored);
}

#[tokio::test(start_paused = true)]
async fn a_replay_window_is_bounded_by_bytes_and_moves_while_nothing_happens() {
    let setup = Setup::new(50);
    let window = ReplayWindow { age: Duration::from_secs(20), max_bytes: Some(10_000) };
    setup.run_holding(window, false, Duration::from_secs(10)).await.unwrap();
    let stored = setup.checkpoints.stored().unwrap().confirmed.lsn;
    assert_eq!(stored.bytes_since(setup.database.slot_confirmed()), 10_000);
    setup.run_holding(window, false, Duration::from_secs(30)).await.unwrap();
    assert_eq!(setup.database.slot_confirmed(), setup.checkpoints.stored().unwrap().confirmed.lsn);
}

#[tokio::test(start_paused = true)]
async fn the_operators_word_for_a_gap_does_not_publish_the_window_again() {
    let setup = Setup::new(50);
    let window = ReplayWindow { age: Duration::from_secs(60), max_bytes: None };
    setup.run_holding(window, false, Duration::from_secs(6)).await.unwrap();
    assert_eq!(setup.broker.stored().len(), 50);
    let again = setup.run_holding(window, true, Duration::from_secs(6)).await.unwrap();
    assert_eq!((again, setup.broker.stored().len()), (0, 50));
    // Where the slot was moved, it is all there is to go by.
    setup.database.advance(Lsn(60_000));
    let fault = setup.run_holding(window, false, Duration::from_secs(6)).await.unwrap_err();
    assert_eq!(fault.action, Action::Gap);
    setup.run_holding(window, true, Duration::from_secs(6)).await.unwrap();
}
