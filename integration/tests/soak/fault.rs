//! The faults of a run on one broker. Each leaves everything running again.

use std::time::Duration;

use anyhow::Result;
use async_nats::jetstream::stream::DiscardPolicy;
use waljet_integration::pause;
use waljet_testbed::{Direction, Mode};

use super::bench::{ALL, Bench, users};

/// Which connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Link {
    Database,
    Broker,
}

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    KillRelay,
    RestartRelay,
    FreezeRelay,
    KillBroker,
    RestartBroker,
    FreezeBroker,
    KillDatabase,
    StopDatabaseImmediate,
    StopDatabaseFast,
    FreezeDatabase,
    Cut(Link),
    Reset(Link),
    Refuse(Link),
    Delay(Link),
    Stall(Link),
    HalfOpen(Link),
    Fill,
    Permission,
    /// The broker takes only messages smaller than any event. The relay looks again after 30 s.
    Payload,
    Takeover,
    /// The relay is frozen until another one has taken over, and wakes up.
    Zombie,
    /// Relay and database are away for longer than the duplicate window, and the slot goes back.
    Outage(Duration),
}

use Fault::{
    Cut, Delay, Fill, FreezeBroker, FreezeDatabase, FreezeRelay, HalfOpen, KillBroker, KillDatabase, KillRelay, Outage,
    Payload, Permission, Refuse, Reset, RestartBroker, RestartRelay, Stall, StopDatabaseFast, StopDatabaseImmediate,
    Takeover, Zombie,
};

/// Returns the faults of a run.
pub(super) fn all(soak: bool, outage: Duration) -> Vec<Fault> {
    let mut all = vec![
        KillRelay,
        RestartRelay,
        FreezeRelay,
        KillBroker,
        RestartBroker,
        FreezeBroker,
        KillDatabase,
        StopDatabaseImmediate,
        StopDatabaseFast,
        FreezeDatabase,
        Fill,
        Permission,
        Takeover,
        Zombie,
    ];
    for link in [Link::Database, Link::Broker] {
        all.extend([Cut(link), Reset(link), Refuse(link), Delay(link), Stall(link), HalfOpen(link)]);
    }
    if soak {
        // These take their time.
        all.extend([Payload, Outage(outage)]);
    }
    all
}

impl Fault {
    /// What it counts as.
    fn name(self) -> &'static str {
        match self {
            KillRelay => "relay killed",
            RestartRelay => "relay restarted",
            FreezeRelay => "relay frozen",
            KillBroker => "broker killed",
            RestartBroker => "broker restarted",
            FreezeBroker => "broker frozen",
            KillDatabase => "database killed",
            StopDatabaseImmediate => "database stopped at once",
            StopDatabaseFast => "database restarted",
            FreezeDatabase => "database frozen",
            Cut(_) => "cuts",
            Reset(_) => "resets",
            Refuse(_) => "refusals",
            Delay(_) => "delays",
            Stall(_) => "stalls",
            HalfOpen(_) => "half-open",
            Fill => "fills",
            Permission => "permission reloads",
            Payload => "max_payload reloads",
            Takeover => "takeovers",
            Zombie => "takeovers from a frozen relay",
            Outage(_) => "outages past the duplicate window",
        }
    }

    /// Does it, and undoes it after a while.
    pub(super) async fn happen(self, bench: &mut Bench, random: &mut fastrand::Rng) -> Result<()> {
        bench.tally.count(self.name());
        match self {
            KillRelay | RestartRelay | FreezeRelay | Takeover | Zombie => relay(self, bench, random).await,
            KillBroker | RestartBroker | FreezeBroker | Fill | Permission | Payload => {
                broker(self, bench, random).await
            }
            KillDatabase | StopDatabaseImmediate | StopDatabaseFast | FreezeDatabase | Outage(_) => {
                database(self, bench, random).await
            }
            Cut(at) | Reset(at) | Refuse(at) | Delay(at) | Stall(at) | HalfOpen(at) => {
                link(self, at, bench, random).await
            }
        }
    }
}

async fn relay(fault: Fault, bench: &mut Bench, random: &mut fastrand::Rng) -> Result<()> {
    match fault {
        RestartRelay => {
            bench.rig.relay()?.signal(libc::SIGTERM)?;
            // It drains for as long as it is configured to, which may be longer than anybody waits.
            pause(random, 2_000).await;
            bench.rig.relay()?.start_again()
        }
        FreezeRelay => {
            bench.rig.relay()?.signal(libc::SIGSTOP)?;
            pause(random, 5_000).await;
            bench.rig.relay()?.signal(libc::SIGCONT)
        }
        Takeover | Zombie => {
            let mut standby = bench.standby().await?;
            if fault == Takeover {
                bench.kill_relay().await?;
            } else {
                bench.rig.relay()?.signal(libc::SIGSTOP)?;
            }
            standby.taken_over().await?;
            pause(random, 1_000).await;
            if fault == Zombie {
                bench.rig.relay()?.signal(libc::SIGCONT)?;
                pause(random, 1_000).await;
            }
            standby.program.kill()?;
            bench.second_log.push_str(&standby.log());
            if fault == Takeover { bench.rig.relay()?.start_again() } else { Ok(()) }
        }
        _ => {
            bench.kill_relay().await?;
            bench.rig.relay()?.start_again()
        }
    }
}

async fn broker(fault: Fault, bench: &mut Bench, random: &mut fastrand::Rng) -> Result<()> {
    match fault {
        KillBroker => {
            bench.rig.nats.kill().await?;
            pause(random, 2_000).await;
            bench.rig.nats.start_again().await
        }
        FreezeBroker => {
            bench.rig.nats.freeze().await?;
            pause(random, 3_000).await;
            bench.rig.nats.thaw().await
        }
        Fill => {
            // Above what can be stored by then: a limit below what the stream holds would make room by itself.
            let most = bench.committed().await? + random.i64(0..100);
            bench.stream_config(|config| (config.max_messages, config.discard) = (most, DiscardPolicy::New)).await?;
            pause(random, 4_000).await;
            bench.stream_config(|config| config.max_messages = -1).await
        }
        Permission => {
            bench.rig.nats.reload(&users("publish: { deny: [\"outbox.>\"] }", "")).await?;
            pause(random, 3_000).await;
            bench.rig.nats.reload(&users(ALL, "")).await
        }
        Payload => {
            bench.rig.nats.reload(&users(ALL, "max_payload: 200")).await?;
            pause(random, 4_000).await;
            bench.rig.nats.reload(&users(ALL, "max_payload: 1MB")).await
        }
        _ => bench.rig.nats.restart().await,
    }
}

async fn database(fault: Fault, bench: &mut Bench, random: &mut fastrand::Rng) -> Result<()> {
    match fault {
        KillDatabase => bench.rig.postgres.kill().await?,
        StopDatabaseImmediate => bench.rig.postgres.stop_immediate().await?,
        FreezeDatabase => {
            bench.rig.postgres.freeze().await?;
            pause(random, 5_000).await;
            return bench.rig.postgres.thaw().await;
        }
        Outage(length) => {
            bench.kill_relay().await?;
            bench.rig.postgres.kill().await?;
            tokio::time::sleep(length).await;
            bench.rig.postgres.start_again().await?;
            return bench.rig.relay()?.start_again();
        }
        _ => return bench.rig.postgres.restart().await,
    }
    pause(random, 500).await;
    bench.rig.postgres.start_again().await
}

async fn link(fault: Fault, at: Link, bench: &Bench, random: &mut fastrand::Rng) -> Result<()> {
    let proxy = if at == Link::Database { &bench.database } else { &bench.broker };
    let direction = [Direction::Both, Direction::ToServer, Direction::ToClient][random.usize(0..3)];
    let mode = match fault {
        Cut(_) => Mode::Cut { direction, after: random.u64(1..50_000) },
        Refuse(_) => Mode::Refuse,
        Delay(_) => Mode::Delay(Duration::from_millis(random.u64(1..300))),
        Stall(_) => Mode::Stall(direction),
        HalfOpen(_) => Mode::HalfOpen,
        _ => return proxy.reset_connections(),
    };
    proxy.set(mode)?;
    pause(random, 4_000).await;
    proxy.set(Mode::Pass)
}
