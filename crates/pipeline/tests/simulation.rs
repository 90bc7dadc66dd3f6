//! Seeded runs of the whole pipeline against a faulty database and a faulty broker, under a wall clock that jumps.
//!
//! `WALJET_SIM_SEEDS=100000` runs more of them, `WALJET_SIM_SEED=7` repeats one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use waljet_pgoutput::{Lsn, Timestamp};
use waljet_pipeline::testing::{
    Broker, BrokerFaults, Database, Fence, MemoryCheckpoints, SourceFaults, Together, Transaction, key, monitor,
    options,
};
use waljet_pipeline::{Pipeline, PipelineOptions, ReplayWindow, WindowOptions};

const SEEDS: u64 = 100;

/// What one run came to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Books {
    lost: usize,
    doubled: usize,
    reordered: usize,
    /// Transactions that a reader may see a part of.
    torn: usize,
    violations: Vec<String>,
}

/// What a window always has room for in the runs with batches.
const ROOM: usize = 5;

/// A wall clock that is set at every look, years back and forth: nothing that is stored or confirmed may rest on it.
fn stepping_clock() -> Timestamp {
    thread_local! { static LOOKS: Cell<i64> = const { Cell::new(0) } }
    let looks = LOOKS.replace(LOOKS.get() + 1);
    let years = (looks * 7_919) % 200 - 100;
    Timestamp(years * 365 * 86_400 * 1_000_000)
}

fn random_options(random: &mut fastrand::Rng, fence: Fence) -> PipelineOptions {
    PipelineOptions {
        window: match fence {
            Fence::Atomic | Fence::Torn => {
                WindowOptions { max_events: random.usize(ROOM..100), max_bytes: random.usize(5_000..100_000) }
            }
            _ => WindowOptions { max_events: random.usize(1..100), max_bytes: random.usize(1..100_000) },
        },
        drain_timeout: Duration::from_secs(4),
        checkpoint_interval: Duration::from_millis(random.u64(1..3_000)),
        replay_window: if random.bool() {
            let max_bytes = random.bool().then(|| random.u64(0..20_000));
            ReplayWindow { age: Duration::from_millis(random.u64(1..20_000)), max_bytes }
        } else {
            ReplayWindow::default()
        },
        clock: stepping_clock,
        ..options()
    }
}

/// Transactions of mixed size over about 30 s, some with rows of another table, some with nothing else.
fn transactions(random: &mut fastrand::Rng) -> Vec<Transaction> {
    let mut lsn = 1_000;
    let mut at = Duration::ZERO;
    let mut number = 0;
    let mut transaction = |_| {
        at += Duration::from_millis(random.u64(0..600));
        let size = if random.u8(..) < 8 { random.usize(50..300) } else { random.usize(0..5) };
        let changes = (0..size)
            .map(|_| {
                number += 1;
                (random.u8(..) > 40).then(|| format!("event-{number}"))
            })
            .collect();
        let commit_lsn = Lsn(lsn + random.u64(1..500));
        lsn = commit_lsn.0 + random.u64(1..100);
        Transaction { at, commit_lsn, end_lsn: Lsn(lsn), changes }
    };
    (0..100).map(&mut transaction).collect()
}

fn faults(random: &mut fastrand::Rng, fence: Fence) -> (BrokerFaults, SourceFaults) {
    let mut chance = |limit: f64| if random.bool() { random.f64() * limit } else { 0.0 };
    let broker = BrokerFaults {
        message_lost: chance(0.02),
        ack_lost: chance(0.02),
        disconnect: chance(0.02),
        refused: chance(0.5),
        full: chance(0.01),
        // A chain of expected sequences says nothing about what others write in between.
        foreign: if is_shared(fence) { chance(0.1) } else { 0.0 },
    };
    let source = SourceFaults { lost: chance(0.02), refused: chance(0.5) };
    (broker, source)
}

/// Whether others write to the stream.
fn is_shared(fence: Fence) -> bool {
    matches!(fence, Fence::OneInFlight | Fence::OnePerKey)
}

async fn run(seed: u64, fence: Fence) -> Books {
    let mut random = fastrand::Rng::with_seed(seed);
    let (broker_faults, source_faults) = faults(&mut random, fence);
    let window = match fence {
        // Longer than any message can be on its way.
        Fence::OneInFlight | Fence::OnePerKey => Duration::from_secs(20),
        Fence::ExpectedSequence | Fence::Blind | Fence::Missing | Fence::Atomic | Fence::Torn => {
            Duration::from_millis(random.u64(100..20_000))
        }
    };
    let broker = Broker::new(fence, broker_faults, window, random.u64(..));
    let transactions = transactions(&mut random);
    let committed: Vec<Vec<String>> =
        transactions.iter().map(|tx| tx.changes.iter().flatten().cloned().collect()).collect();
    let database = Database::new(transactions, broker.clone(), source_faults, random.u64(..));

    let failing = if random.bool() { random.f64() * 0.98 } else { 0.0 };
    let checkpoints = MemoryCheckpoints::new(failing, random.u64(..));

    // Faults and crashes for a while, then none of either until everything should have arrived.
    let troubled = Instant::now() + Duration::from_secs(60);
    let mut given_up = Instant::now() + Duration::from_secs(600);
    loop {
        let monitor = monitor(WindowOptions::default());
        let (source, sink, store) = (database.source(), broker.sink(), checkpoints.clone());
        let pipeline = Pipeline::new(
            source,
            sink,
            store,
            random_options(&mut random, fence),
            Arc::clone(&monitor),
            random.u64(..),
        );
        let (stop, stopped) = watch::channel(false);
        let healed = Instant::now() >= troubled;
        let life = Duration::from_millis(if healed { 60_000 } else { random.u64(10..15_000) });
        let clean = random.bool();
        // A server that crashes forgets what it was told, and the relay may live on.
        let forget = (!healed && random.bool()).then(|| Duration::from_millis(random.u64(1..8_000)));
        let back_to = Lsn(random.u64(1..database.slot_confirmed().0.max(2)));
        let heal_after = Duration::from_millis(random.u64(0..10_000));
        let end = async {
            if healed {
                // In the middle of a life: what a process has of its troubles must not outlast them.
                tokio::time::sleep(heal_after).await;
                database.heal();
                broker.heal();
                checkpoints.heal();
            }
            if let Some(after) = forget.filter(|after| *after < life) {
                tokio::time::sleep(after).await;
                database.forget(back_to);
                database.disconnect();
            }
            tokio::time::sleep(life.saturating_sub(forget.unwrap_or_default())).await;
            if clean {
                stop.send_replace(true);
                tokio::time::sleep(Duration::from_secs(10)).await;
            }
        };
        tokio::select! {
            result = pipeline.run(stopped) => { result.unwrap(); }
            () = end => {}
        }
        if random.u8(..) < 60 {
            database.forget(Lsn(random.u64(1..database.slot_confirmed().0.max(2))));
        }
        if healed {
            given_up = given_up.min(Instant::now());
        }
        if Instant::now() >= given_up {
            break;
        }
    }
    let mut books = books(&database.ledger(), &broker.stored(), database.violations(), fence);
    if matches!(fence, Fence::Atomic | Fence::Torn) {
        books.torn = torn(&committed, &broker.stored_together());
    }
    books
}

/// Counts what is stored together and is a part of a transaction: where it does not say so, or need not be one.
fn torn(committed: &[Vec<String>], stored: &[Together]) -> usize {
    let whole: HashMap<&String, &Vec<String>> =
        committed.iter().flat_map(|ids| ids.iter().map(move |id| (id, ids))).collect();
    let torn = |together: &&Together| {
        let transaction = whole[&together.ids[0]];
        if together.split { transaction.len() <= ROOM } else { together.ids != *transaction }
    };
    stored.iter().filter(torn).count()
}

fn books(committed: &[String], stored: &[String], violations: Vec<String>, fence: Fence) -> Books {
    let places: HashMap<_, _> = committed.iter().zip(0..).collect();
    let mut seen = HashSet::new();
    let mut last: HashMap<String, usize> = HashMap::new();
    let mut reordered = 0;
    for id in stored.iter().filter(|id| seen.insert(*id)) {
        let order = if fence == Fence::OnePerKey { key(id) } else { String::new() };
        let before = last.insert(order, places[id]);
        reordered += usize::from(before.is_some_and(|before| before > places[id]));
    }
    let (lost, doubled) = (committed.len() - seen.len(), stored.len() - seen.len());
    Books { lost, doubled, reordered, torn: 0, violations }
}

fn simulate(seed: u64, fence: Fence) -> Books {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(run(seed, fence))
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

fn check(fence: Fence) {
    let seeds = match number("WALJET_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("WALJET_SIM_SEEDS").unwrap_or(SEEDS),
    };
    for seed in seeds {
        let books = simulate(seed, fence);
        assert_eq!(books, Books::default(), "repeat with WALJET_SIM_SEED={seed}");
    }
}

#[test]
fn whatever_fails_every_event_is_stored_once_and_in_order() {
    check(Fence::ExpectedSequence);
}

#[test]
fn beside_another_publisher_one_message_at_a_time_is_stored_once_and_in_order() {
    check(Fence::OneInFlight);
}

#[test]
fn beside_another_publisher_one_message_of_each_key_is_stored_once_and_in_the_order_of_its_key() {
    check(Fence::OnePerKey);
}

#[test]
fn in_batches_every_transaction_is_stored_once_and_whole_or_says_that_it_is_not() {
    check(Fence::Atomic);
}

#[test]
fn a_stream_that_stores_parts_of_batches_is_found_out() {
    let found = (0..50).filter(|seed| simulate(*seed, Fence::Torn).torn > 0).count();
    assert!(found > 10, "only {found} of 50 runs with torn batches went wrong: the simulation sees too little");
}

#[test]
fn a_stream_that_lets_messages_overtake_is_found_out() {
    let found = (0..50).filter(|seed| simulate(*seed, Fence::Missing) != Books::default()).count();
    assert!(found > 10, "only {found} of 50 runs without a fence went wrong: the simulation sees too little");
}

#[test]
fn a_stream_that_is_not_read_back_is_found_out() {
    let found = (0..50).filter(|seed| simulate(*seed, Fence::Blind).doubled > 0).count();
    assert!(
        found > 10,
        "only {found} of 50 runs without reading back doubled an event: the simulation sees too little"
    );
}

#[test]
fn a_run_repeats_from_its_seed() {
    assert_eq!(simulate(3, Fence::Missing), simulate(3, Fence::Missing));
}
