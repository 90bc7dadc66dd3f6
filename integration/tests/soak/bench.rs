//! The servers, the proxies and the load of a run on one broker.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_nats::jetstream::stream::Config;
use waljet_integration::{edit_stream, options, status};
use waljet_testbed::{Books, Durability, Pair, Program, Proxy, Rig, Workload, WorkloadOptions, connect, wait_for};

use super::LIMIT;
use super::tally::Tally;

/// A relay between proxies, under load.
#[derive(Debug)]
pub(super) struct Bench {
    pub(super) rig: Rig,
    pub(super) database: Proxy,
    pub(super) broker: Proxy,
    pub(super) tally: Tally,
    /// What is logged by relays that take over.
    pub(super) second_log: String,
    workload: Workload,
}

/// The broker's users: the tests are the one without credentials.
pub(super) fn users(permissions: &str, more: &str) -> String {
    format!(
        "authorization {{ users: [
            {{ user: tests, password: tests }}
            {{ user: relay, password: relay, permissions: {{ {permissions} }} }}
        ] }}
        no_auth_user: tests
        {more}"
    )
}

/// What the relay may do while all is well.
pub(super) const ALL: &str = "publish: [\">\"]";

impl Bench {
    pub(super) async fn start(mode: &str, window: Duration, seed: u64) -> Result<Self> {
        let mut options = options(&Pair::newest()?)?;
        // Crashes need what a server promises about commits.
        options.postgres.durability = Durability::Durable;
        options.postgres.settings.push(("wal_sender_timeout".into(), "3s".into()));
        options.nats.extra = users(ALL, "");
        let mut rig = Rig::start(options).await?;
        let (database, broker) = (Proxy::start(rig.postgres.port())?, Proxy::start(rig.nats.port())?);
        rig.set("nats.duplicate_window", &format!("{}ms", window.as_millis()))?;
        rig.set("publisher.mode", mode)?;
        rig.set("publisher.ack_timeout", "1s")?;
        // As somebody who may all, and who is not asked who he is.
        rig.init().await?;
        rig.set("nats.user", "relay")?;
        rig.set("nats.password", "relay")?;
        rig.set("postgres.url", &rig.postgres.url_at(database.port()))?;
        rig.set("nats.url", &rig.nats.url_at(broker.port()))?;
        rig.start_relay()?;
        rig.ready().await?;
        let running = status(&rig).await?["sink"]["mode"].as_str().unwrap_or_default().to_owned();
        ensure!(running == mode, "the mode is {running}");
        // One message at a time is slow, and so is a batch for each transaction; more so on a busy machine.
        let rate = Some(if matches!(mode, "serial" | "atomic") { 60.0 } else { 300.0 });
        let workload =
            Workload::start(WorkloadOptions { rate, seed, ..WorkloadOptions::new(rig.postgres.url()) }).await?;
        let tally = Tally::new(mode);
        Ok(Self { rig, database, broker, tally, second_log: String::new(), workload })
    }

    /// Kills the relay, after asking it what it has done.
    pub(super) async fn kill_relay(&mut self) -> Result<()> {
        // One that cannot answer now does not tell.
        if let Ok(status) = status(&self.rig).await {
            self.tally.take(&status);
        }
        self.rig.relay()?.kill()
    }

    /// Starts a second relay, and waits until it waits.
    pub(super) async fn standby(&mut self) -> Result<Standby> {
        let program = self.rig.second_relay()?;
        let standby = Standby { from: program.log().len(), program };
        // It may find the slot free, when the first relay is away for a moment, and then it is the one that streams.
        let there = async || Ok::<_, anyhow::Error>(standby.says("slot-active") || standby.streams());
        wait_for("the second relay to wait", LIMIT, there).await.with_context(|| standby.log())?;
        Ok(standby)
    }

    /// Changes the stream's configuration, as soon as the broker answers.
    pub(super) async fn stream_config(&self, change: impl Fn(&mut Config)) -> Result<()> {
        stream_config(&self.rig.nats.url(), change).await
    }

    /// How many events are committed, by the table.
    pub(super) async fn committed(&self) -> Result<i64> {
        let client = connect(&self.rig.postgres.url()).await?;
        Ok(client.query_one("SELECT count(*) FROM outbox", &[]).await?.try_get(0)?)
    }

    /// Waits until the relay has recovered, stops the load, waits until all is stored, and reads the books.
    pub(super) async fn end(mut self) -> Result<Books> {
        wait_for("the relay to be ready", LIMIT, async || self.rig.ready().await.map(|()| true)).await?;
        self.workload.stop().await;
        self.rig.settle(LIMIT).await?;
        self.tally.take(&status(&self.rig).await?);
        let books = self.rig.books().await?;
        super::say(&self.tally.report(&(self.rig.log() + &self.second_log), &books));
        ensure!(books.committed > 100, "there was hardly any load: {books}");
        Ok(books)
    }
}

/// Changes the stream's configuration, as soon as the broker answers.
/// Changes the stream, as soon as the broker is there to do so.
pub(super) async fn stream_config(url: &str, change: impl Fn(&mut Config)) -> Result<()> {
    let changed = async || edit_stream(url, &change).await.map(|()| true);
    wait_for("the broker to change the stream", LIMIT, changed).await
}

/// A second relay.
#[derive(Debug)]
pub(super) struct Standby {
    pub(super) program: Program,
    /// Where its part of the log begins.
    from: usize,
}

impl Standby {
    pub(super) fn log(&self) -> String {
        self.program.log().get(self.from..).unwrap_or_default().to_owned()
    }

    fn says(&self, what: &str) -> bool {
        self.log().contains(what)
    }

    pub(super) fn streams(&self) -> bool {
        self.says("replication started")
    }

    /// Waits until it has taken over.
    pub(super) async fn taken_over(&self) -> Result<()> {
        let streams = async || Ok::<_, anyhow::Error>(self.streams());
        wait_for("the second relay to take over", LIMIT, streams).await.with_context(|| self.log())
    }
}
