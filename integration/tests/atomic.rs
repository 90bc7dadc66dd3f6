//! Mode `atomic`: a transaction is in the stream whole or not at all, for whoever reads at any time.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::{self, stream::Config, stream::DiscardPolicy};
use futures_util::StreamExt;
use tokio::task::JoinHandle;
use waljet_integration::{
    edit_stream, jetstream_at, leader_first, nap, newest, not_ready_for, oldest, options, progress, status, step_down,
};
use waljet_testbed::{
    Direction, Mode, NatsCluster, NatsOptions, Pair, Proxy, Rig, STREAM, Workload, WorkloadOptions, connect,
    large_transaction, wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

/// A message of the stream.
#[derive(Debug)]
struct Message {
    sequence: u64,
    id: String,
    /// The batch it was stored in, and whether it was the last of it.
    batch: Option<(String, bool)>,
    split: bool,
}

/// Reads what is in the stream from a sequence on, and no more.
async fn read(url: &str, from: u64) -> Result<Vec<Message>> {
    let stream = jetstream_at(url).await?.get_stream(STREAM).await?;
    let config = pull::Config {
        ack_policy: AckPolicy::None,
        headers_only: true,
        deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: from },
        ..pull::Config::default()
    };
    let consumer = stream.create_consumer(config).await?;
    let mut all = Vec::new();
    loop {
        let mut fetched = consumer.fetch().max_messages(5_000).messages().await?;
        let before = all.len();
        while let Some(message) = fetched.next().await {
            let message = message.map_err(|error| anyhow::anyhow!(error))?;
            let sequence = message.info().map_err(|error| anyhow::anyhow!(error))?.stream_sequence;
            let header = |name| message.headers.as_ref().and_then(|headers| headers.get(name)).map(|v| v.as_str());
            all.push(Message {
                sequence,
                id: header("Nats-Msg-Id").unwrap_or_default().to_owned(),
                batch: header("Nats-Batch-Id").map(|id| (id.to_owned(), header("Nats-Batch-Commit").is_some())),
                split: header("Waljet-Atomic") == Some("split"),
            });
        }
        if all.len() - before < 5_000 {
            return Ok(all);
        }
    }
}

/// A consumer that reads all the time and takes note of where it had to wait inside of a transaction.
struct Watcher {
    stop: Arc<AtomicBool>,
    /// How often it had read all that there was.
    looks: Arc<AtomicU64>,
    task: JoinHandle<Vec<String>>,
}

impl Watcher {
    fn start(url: String) -> Self {
        let (stop, looks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, looked) = (Arc::clone(&stop), Arc::clone(&looks));
        let task = tokio::spawn(async move {
            let (mut torn, mut next) = (Vec::new(), 1);
            while !stopped.load(Ordering::Relaxed) {
                // A server that was killed does not answer, and reading goes on where it was.
                let read = tokio::time::timeout(Duration::from_secs(2), read(&url, next)).await;
                let last = match read {
                    Ok(Ok(messages)) => messages.into_iter().last(),
                    _ => None,
                };
                if let Some(last) = last {
                    next = last.sequence + 1;
                    looked.fetch_add(1, Ordering::Relaxed);
                    if !last.split && last.batch.as_ref().is_some_and(|(_, commits)| !commits) {
                        torn.push(format!("{last:?}"));
                    }
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            torn
        });
        Self { stop, looks, task }
    }

    async fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let torn = self.task.await?;
        let looks = self.looks.load(Ordering::Relaxed);
        ensure!(looks > 5, "the watcher has hardly looked: {looks} times");
        ensure!(torn.is_empty(), "a part of a transaction was visible: {torn:?}");
        Ok(())
    }
}

/// Compares the stream's batches with the table's transactions. Returns how many are whole and how many split.
async fn transactions(rig: &Rig, url: &str) -> Result<(usize, usize)> {
    let client = connect(&rig.postgres.url()).await?;
    let rows = client.query("SELECT id::text, xid::text FROM outbox", &[]).await?;
    let mut committed: HashMap<String, HashSet<String>> = HashMap::new();
    let mut of = HashMap::new();
    for row in rows {
        let (id, xid): (String, String) = (row.try_get(0)?, row.try_get(1)?);
        committed.entry(xid.clone()).or_default().insert(id.clone());
        of.insert(id, xid);
    }
    let messages = read(url, 1).await?;
    let ours: Vec<&Message> = messages.iter().filter(|message| of.contains_key(&message.id)).collect();
    let mut split = HashSet::new();
    let mut whole = 0;
    for stored in ours.chunk_by(|a, b| a.batch.is_some() && batch(a) == batch(b)) {
        let xid = &of[&stored[0].id];
        if stored[0].split {
            split.insert(xid.clone());
            continue;
        }
        let ids: HashSet<String> = stored.iter().map(|message| message.id.clone()).collect();
        ensure!(ids == committed[xid], "of the {} events of a transaction {ids:?} were stored", committed[xid].len());
        whole += 1;
    }
    Ok((whole, split.len()))
}

fn batch(message: &Message) -> Option<&str> {
    message.batch.as_ref().map(|(id, _)| id.as_str())
}

/// A relay that gives up an acknowledgement soon, and a broker that forgets ids as soon.
async fn hasty(mut rig: Rig) -> Result<Rig> {
    rig.set("publisher.ack_timeout", "1s")?;
    rig.set("nats.duplicate_window", "1s")?;
    atomic(rig).await
}

async fn atomic(mut rig: Rig) -> Result<Rig> {
    rig.set("publisher.mode", "atomic")?;
    rig.up().await?;
    assert_eq!(status(&rig).await?["sink"]["mode"], "atomic");
    Ok(rig)
}

async fn load(rig: &Rig) -> Result<Workload> {
    // A batch costs the broker a file of its own, and a busy machine more.
    Workload::start(WorkloadOptions { rate: Some(60.0), ..WorkloadOptions::new(rig.postgres.url()) }).await
}

/// Stops the load and judges: everything once and in order, every transaction whole.
async fn judge(rig: &Rig, url: &str, workload: Workload, watcher: Watcher) -> Result<()> {
    workload.stop().await;
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    println!("{books}");
    ensure!(books.committed > 100, "there was hardly any load: {books}");
    books.check()?;
    let (whole, split) = transactions(rig, url).await?;
    println!("{whole} transactions whole, {split} split");
    ensure!(whole > 30 && split == 0, "{whole} transactions whole, {split} split");
    watcher.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_atomic_mode_every_transaction_is_whole_whatever_breaks() -> Result<()> {
    let mut rig = newest().await?;
    let proxy = Proxy::start(rig.nats.port())?;
    rig.set("nats.url", &rig.nats.url_at(proxy.port()))?;
    let mut rig = hasty(rig).await?;
    let watcher = Watcher::start(rig.nats.url());
    let workload = load(&rig).await?;
    for _ in 0..2 {
        progress(&rig).await?;
        rig.nats.kill().await?;
        rig.nats.start_again().await?;
        progress(&rig).await?;
        rig.relay()?.start_again()?;
        progress(&rig).await?;
        proxy.reset_connections()?;
    }
    progress(&rig).await?;
    proxy.set(Mode::Cut { direction: Direction::ToServer, after: 20_000 })?;
    nap(500).await;
    // Acknowledgements that are lost: what became of the batches is read back, for their ids are forgotten by then.
    proxy.set(Mode::Pass)?;
    progress(&rig).await?;
    proxy.set(Mode::Stall(Direction::ToClient))?;
    nap(1_500).await;
    proxy.reset_connections()?;
    proxy.set(Mode::Pass)?;
    progress(&rig).await?;
    let client = connect(&rig.postgres.url()).await?;
    let committed: i64 = client.query_one("SELECT count(*) FROM outbox", &[]).await?.get(0);
    let full = |config: &mut Config| (config.max_messages, config.discard) = (committed + 300, DiscardPolicy::New);
    edit_stream(&rig.nats.url(), full).await?;
    let full =
        wait_for("the stream to be full", LIMIT, async || Ok::<_, anyhow::Error>(rig.log().contains("stream-full")));
    full.await.with_context(|| rig.log())?;
    edit_stream(&rig.nats.url(), |config| config.max_messages = -1).await?;
    let url = rig.nats.url();
    judge(&rig, &url, workload, watcher).await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_atomic_mode_every_transaction_is_whole_while_leaders_die() -> Result<()> {
    let pair = Pair::newest()?;
    let cluster = NatsCluster::start(NatsOptions::new(&pair), 3).await?;
    let mut rig = Rig::start(options(&pair)?).await?;
    rig.use_broker(&cluster.url())?;
    rig.set_raw("nats.replicas", "3")?;
    let rig = hasty(rig).await?;
    let watcher = Watcher::start(cluster.url());
    let workload = load(&rig).await?;
    progress(&rig).await?;
    step_down(&cluster.url()).await?;
    progress(&rig).await?;
    let node = leader_first(&cluster).await?[0];
    node.kill().await?;
    progress(&rig).await?;
    node.start_again().await?;
    cluster.wait_ready().await?;
    progress(&rig).await?;
    judge(&rig, &cluster.url(), workload, watcher).await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_atomic_mode_a_transaction_over_the_limit_is_split_in_order_and_says_so() -> Result<()> {
    let rig = atomic(newest().await?).await?;
    let watcher = Watcher::start(rig.nats.url());
    let url = rig.postgres.url();
    for events in [7, 1_000, 2_500, 1] {
        large_transaction(&url, events, 10).await?;
    }
    rig.settle(LIMIT).await?;
    let books = rig.books().await?;
    ensure!(books.committed == 3_508 && books.lost + books.doubled == 0, "{books}");
    let messages = read(&rig.nats.url(), 1).await?;
    let (before, after): (Vec<_>, Vec<_>) =
        messages.iter().filter(|message| message.split).partition(|message| message.sequence <= 1_007);
    ensure!(before.is_empty() && after.len() == 2_500, "{} and {} say so", before.len(), after.len());
    let parts: Vec<_> = after.chunk_by(|a, b| batch(a) == batch(b)).map(<[_]>::len).collect();
    ensure!(parts == [1_000, 1_000, 500], "{parts:?}");
    let client = connect(&url).await?;
    let sql = "SELECT id::text FROM outbox ORDER BY xid, seq";
    let ids: Vec<String> = client.query(sql, &[]).await?.iter().map(|row| row.get(0)).collect();
    ensure!(messages.iter().map(|message| &message.id).eq(ids.iter()), "the order is another one");
    ensure!(transactions(&rig, &rig.nats.url()).await? == (3, 1));
    let sink = status(&rig).await?["nats"].clone();
    ensure!(sink["whole_transactions"] == 3 && sink["split_transactions"] == 1, "{sink}");
    watcher.stop.store(true, Ordering::Relaxed);
    ensure!(watcher.task.await?.is_empty(), "a part of a transaction was visible");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn in_atomic_mode_a_transaction_over_the_window_is_split() -> Result<()> {
    let mut rig = newest().await?;
    rig.set_raw("window.max_events", "100")?;
    let rig = atomic(rig).await?;
    let url = rig.postgres.url();
    for events in [100, 250, 3] {
        large_transaction(&url, events, 10).await?;
    }
    rig.settle(LIMIT).await?;
    ensure!(transactions(&rig, &rig.nats.url()).await? == (2, 1));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn in_atomic_mode_an_id_that_is_used_twice_stops_nothing() -> Result<()> {
    let rig = newest().await?;
    let rig = {
        let mut rig = rig;
        rig.set("publisher.mode", "atomic")?;
        rig
    };
    let mut rig = rig;
    rig.up().await?;
    let client = connect(&rig.postgres.url()).await?;
    client.batch_execute("ALTER TABLE outbox DROP CONSTRAINT outbox_pkey").await?;
    let insert = |ids: &[&str]| {
        let rows: Vec<String> = ids.iter().map(|id| format!("('{id}', 'order', '1', 'happened', '{{}}')")).collect();
        format!("INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES {}", rows.join(","))
    };
    let id = |n: u32| format!("00000000-0000-0000-0000-{n:012}");
    let (one, two, three, four, five, six) = (id(1), id(2), id(3), id(4), id(5), id(6));
    // In one transaction, and that of an earlier one.
    for ids in [[&one, &two, &one], [&three, &two, &four], [&five, &six, &five]] {
        client.batch_execute(&insert(&ids.map(String::as_str))).await?;
    }
    large_transaction(&rig.postgres.url(), 5, 10).await?;
    let all = async || Ok::<_, anyhow::Error>(rig.stored().await? >= 11);
    wait_for("every event to be stored", LIMIT, all).await?;
    let messages = read(&rig.nats.url(), 1).await?;
    let split: Vec<&str> = messages.iter().filter(|message| message.split).map(|message| message.id.as_str()).collect();
    ensure!(split == [&one, &two, &three, &four, &five, &six], "{split:?}");
    ensure!(messages.len() == 11, "{} messages", messages.len());
    ensure!(rig.log().contains("publish-batch-duplicate"), "it does not say why");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn in_atomic_mode_transactions_are_whole_beside_another_publisher() -> Result<()> {
    let mut rig = newest().await?;
    rig.set("publisher.mode", "atomic")?;
    rig.init().await?;
    edit_stream(&rig.nats.url(), |config| config.subjects.push("other.>".into())).await?;
    rig.start_relay()?;
    rig.ready().await?;
    let workload = load(&rig).await?;
    let other = jetstream::new(async_nats::connect(rig.nats.url()).await?);
    let mut foreign = 0;
    // Until they have come between many of the relay's.
    while foreign < 300 || rig.stored().await? < foreign + 100 {
        for subject in ["other.x", "outbox.other.x"] {
            other.publish(subject, "".into()).await?.await?;
            foreign += 1;
        }
    }
    workload.stop().await;
    let all = async || {
        let books = rig.books().await?;
        Ok::<_, anyhow::Error>(books.lost == 0 && books.doubled + books.reordered == 0 && books.foreign == foreign)
    };
    wait_for("every event to be stored", LIMIT, all).await?;
    let (whole, split) = transactions(&rig, &rig.nats.url()).await?;
    ensure!(whole > 5 && split == 0, "{whole} transactions whole, {split} split");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn atomic_mode_waits_for_a_stream_that_allows_it() -> Result<()> {
    let mut rig = newest().await?;
    rig.init().await?;
    rig.set("publisher.mode", "atomic")?;
    rig.start_relay()?;
    not_ready_for(&rig, "stream-without-atomic-batches").await?;
    let check = rig.waljet(&["check"]).await?;
    let said = String::from_utf8_lossy(&check.stdout).into_owned();
    ensure!(check.status.code() == Some(3) && said.contains("allow_atomic"), "{said}");
    edit_stream(&rig.nats.url(), |config| config.allow_atomic_publish = true).await?;
    rig.ready().await?;
    large_transaction(&rig.postgres.url(), 5, 10).await?;
    rig.settle(LIMIT).await
}

#[tokio::test(flavor = "multi_thread")]
async fn atomic_mode_says_that_the_broker_is_too_old() -> Result<()> {
    let mut rig = oldest().await?;
    rig.set("publisher.mode", "atomic")?;
    rig.init().await?;
    rig.start_relay()?;
    not_ready_for(&rig, "stream-without-atomic-batches").await?;
    let check = rig.waljet(&["check"]).await?;
    let said = String::from_utf8_lossy(&check.stdout).into_owned();
    ensure!(check.status.code() == Some(3) && said.contains("expected 2.12.1 or newer"), "{said}");
    ensure!(said.contains("upgrade nats-server"), "{said}");
    Ok(())
}
