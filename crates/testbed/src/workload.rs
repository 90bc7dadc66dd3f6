//! An orders service that writes its rows and its outbox in one transaction, as an application would.
//!
//! What it committed is read from the outbox table afterwards ([`Books`](crate::Books)): when a server dies under
//! a commit, only the table knows whether it happened.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::task::JoinSet;
use tokio_postgres::{Client, NoTls};

/// How long a worker waits before it connects again.
const RECONNECT: Duration = Duration::from_millis(100);

/// How the service works.
#[derive(Debug, Clone)]
pub struct WorkloadOptions {
    /// The database.
    pub url: String,
    /// Connections that work at once.
    pub workers: usize,
    /// Orders, each of which is an ordering key.
    pub keys: usize,
    /// Transactions to try in all, rolled back ones included; `None` goes on until stopped.
    pub transactions: Option<u64>,
    /// Transactions a second over all workers; `None` as fast as it goes.
    pub rate: Option<f64>,
    /// Decides which transactions are rolled back and how large they are.
    pub seed: u64,
}

impl WorkloadOptions {
    /// Returns four workers on 50 keys that go on until stopped.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), workers: 4, keys: 50, transactions: None, rate: None, seed: 1 }
    }
}

/// What the service has done so far. A commit whose answer was lost counts as failed, whatever became of it.
#[derive(Debug, Default)]
pub struct Counters {
    /// Transactions that were committed.
    pub committed: AtomicU64,
    /// Events in them.
    pub events: AtomicU64,
    /// Transactions that were rolled back on purpose.
    pub rolled_back: AtomicU64,
    /// Committed transactions in which a savepoint with an event was rolled back.
    pub savepoints: AtomicU64,
    /// Transactions that ended in an error, such as a server that died.
    pub failed: AtomicU64,
}

impl Counters {
    /// Reads one counter.
    #[must_use]
    pub fn get(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }

    fn add(counter: &AtomicU64, number: u64) {
        counter.fetch_add(number, Ordering::Relaxed);
    }
}

/// The running service.
#[derive(Debug)]
pub struct Workload {
    counters: Arc<Counters>,
    shared: Arc<Shared>,
    workers: JoinSet<()>,
}

#[derive(Debug)]
struct Shared {
    options: WorkloadOptions,
    stop: AtomicBool,
    started: AtomicU64,
}

impl Workload {
    /// Makes the table of orders and starts the workers.
    ///
    /// # Errors
    ///
    /// The database does not answer, or the outbox table is missing.
    pub async fn start(options: WorkloadOptions) -> Result<Self> {
        let client = connect(&options.url).await?;
        client.batch_execute(&orders_sql(options.keys)).await.context("create the table of orders")?;
        let counters = Arc::new(Counters::default());
        let shared = Arc::new(Shared { options, stop: AtomicBool::new(false), started: AtomicU64::new(0) });
        let mut workers = JoinSet::new();
        for number in 0..shared.options.workers {
            let (shared, counters) = (Arc::clone(&shared), Arc::clone(&counters));
            workers.spawn(async move { shared.work(number as u64, &counters).await });
        }
        Ok(Self { counters, shared, workers })
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Waits until all transactions are done; without a number of them, only [`stop`](Self::stop) ends it.
    pub async fn finish(mut self) -> Arc<Counters> {
        while self.workers.join_next().await.is_some() {}
        self.counters
    }

    /// Lets each worker end its transaction and stops.
    pub async fn stop(self) -> Arc<Counters> {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.finish().await
    }
}

/// Commits one transaction with this many events of one key, which no worker uses.
///
/// # Errors
///
/// The database does not take it.
pub async fn large_transaction(url: &str, events: u32, payload_bytes: u32) -> Result<()> {
    let client = connect(url).await?;
    client
        .execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'order', 'large', 'imported',
                    jsonb_build_object('version', n, 'filler', repeat('x', $2))
             FROM generate_series(1::bigint, $1) AS n",
            &[&i64::from(events), &(payload_bytes as i32)],
        )
        .await
        .context("commit the large transaction")?;
    Ok(())
}

/// Connects, and lets the connection run until the client is dropped.
///
/// # Errors
///
/// The database does not answer.
pub async fn connect(url: &str) -> Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.context("connect to PostgreSQL")?;
    tokio::spawn(async move {
        // Its end shows on the client, too.
        let _ = connection.await;
    });
    Ok(client)
}

fn orders_sql(keys: usize) -> String {
    format!(
        "CREATE TABLE IF NOT EXISTS orders (id int PRIMARY KEY, version bigint NOT NULL DEFAULT 0);
         INSERT INTO orders SELECT n FROM generate_series(1, {keys}) AS n ON CONFLICT DO NOTHING;"
    )
}

/// Raises an order's version by the number of events, one event for each version.
const CHANGE: &str = "
    WITH changed AS (UPDATE orders SET version = version + $2 WHERE id = $1 RETURNING version)
    INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers)
    SELECT 'order', $1::text, CASE WHEN n = 1 THEN 'created' ELSE 'changed' END,
           jsonb_build_object('order', $1, 'version', version - $2 + n),
           jsonb_build_object('traceparent', '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01')
    FROM changed, generate_series(1::bigint, $2) AS n ORDER BY n";

/// An event that must never be seen.
const PHANTOM: &str = "
    INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
    VALUES ('order', 'phantom', 'rolled-back', '{}')";

impl Shared {
    async fn work(&self, number: u64, counters: &Counters) {
        let mut random = fastrand::Rng::with_seed(self.options.seed.wrapping_mul(1_000_003).wrapping_add(number));
        let pause = self.options.rate.map(|rate| Duration::from_secs_f64(self.options.workers as f64 / rate));
        while !self.done() {
            let Ok(client) = connect(&self.options.url).await else {
                tokio::time::sleep(RECONNECT).await;
                continue;
            };
            while !self.done() && self.begin_next() {
                let next = pause.map(|pause| tokio::time::Instant::now() + pause);
                if self.transaction(&client, &mut random, counters).await.is_err() {
                    Counters::add(&counters.failed, 1);
                    break;
                }
                if let Some(next) = next {
                    tokio::time::sleep_until(next).await;
                }
            }
        }
    }

    fn done(&self) -> bool {
        let all = self.options.transactions.is_some_and(|all| self.started.load(Ordering::Relaxed) >= all);
        all || self.stop.load(Ordering::Relaxed)
    }

    fn begin_next(&self) -> bool {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        self.options.transactions.is_none_or(|all| number < all)
    }

    /// One transaction: mostly one to five events, now and then fifty; a tenth is rolled back, a tenth has a
    /// savepoint that is.
    async fn transaction(&self, client: &Client, random: &mut fastrand::Rng, counters: &Counters) -> Result<()> {
        let events = if random.u8(0..50) == 0 { 50 } else { random.i64(1..=5) };
        let key = random.i32(1..=self.options.keys as i32);
        let kind = random.u8(0..10);
        let change = client.prepare(CHANGE).await?;
        client.batch_execute("BEGIN").await?;
        client.execute(&change, &[&key, &events]).await?;
        if kind == 1 {
            client.batch_execute(&format!("SAVEPOINT s; {PHANTOM}; ROLLBACK TO SAVEPOINT s")).await?;
        }
        if kind == 0 {
            client.batch_execute("ROLLBACK").await?;
            Counters::add(&counters.rolled_back, 1);
            return Ok(());
        }
        client.batch_execute("COMMIT").await?;
        Counters::add(&counters.committed, 1);
        Counters::add(&counters.events, events as u64);
        Counters::add(&counters.savepoints, u64::from(kind == 1));
        Ok(())
    }
}
