//! A random run on three brokers, whose members are killed, frozen and restarted.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use waljet_integration::{leader_first, options, pause, status, step_down};
use waljet_testbed::{NatsCluster, NatsOptions, Pair, Rig, Workload, WorkloadOptions, wait_for};

use super::schedule::Schedule;
use super::tally::Tally;
use super::{LIMIT, length, say, told_seed, turn};

/// What is done to the cluster.
#[derive(Debug, Clone, Copy)]
enum Fault {
    KillLeader,
    FreezeLeader,
    StepDown,
    KillFollower,
    FreezeFollower,
    RollingRestart,
    KillRelay,
}

use Fault::{FreezeFollower, FreezeLeader, KillFollower, KillLeader, KillRelay, RollingRestart, StepDown};

/// Starts three brokers and a relay whose stream they all store.
pub(super) async fn start(mode: &str) -> Result<(NatsCluster, Rig)> {
    let pair = Pair::newest()?;
    let cluster = NatsCluster::start(NatsOptions::new(&pair), 3).await?;
    let mut rig = Rig::start(options(&pair)?).await?;
    rig.use_broker(&cluster.url())?;
    rig.set("publisher.mode", mode)?;
    rig.set("publisher.ack_timeout", "2s")?;
    rig.set("nats.duplicate_window", "1s")?;
    rig.set_raw("nats.replicas", "3")?;
    rig.up().await?;
    let running = status(&rig).await?["sink"]["mode"].as_str().unwrap_or_default().to_owned();
    ensure!(running == mode, "the mode is {running}");
    Ok((cluster, rig))
}

async fn happen(fault: Fault, cluster: &NatsCluster, rig: &mut Rig, random: &mut fastrand::Rng) -> Result<()> {
    let nodes = leader_first(cluster).await?;
    let (leader, follower) = (nodes[0], nodes[1]);
    match fault {
        KillLeader | KillFollower => {
            let node = if matches!(fault, KillLeader) { leader } else { follower };
            node.kill().await?;
            pause(random, 6_000).await;
            node.start_again().await?;
        }
        FreezeLeader | FreezeFollower => {
            let node = if matches!(fault, FreezeLeader) { leader } else { follower };
            node.freeze().await?;
            pause(random, 8_000).await;
            node.thaw().await?;
        }
        StepDown => {
            step_down(&cluster.url()).await?;
        }
        RollingRestart => {
            for node in cluster.nodes() {
                node.restart().await?;
                cluster.wait_ready().await?;
            }
        }
        KillRelay => rig.relay()?.start_again()?,
    }
    // With two of three away there would be nothing to test.
    cluster.wait_ready().await
}

async fn members_die(mode: &str) -> Result<()> {
    let (length, soak) = length();
    let _turn = turn(soak).await;
    let run = format!("{mode} on three brokers");
    let mut random = fastrand::Rng::with_seed(told_seed(&run)?);
    let mut tally = Tally::new(&run);
    let (cluster, mut rig) = start(mode).await?;
    let workload = WorkloadOptions { rate: Some(300.0), ..WorkloadOptions::new(rig.postgres.url()) };
    let workload = Workload::start(WorkloadOptions { seed: random.u64(..), ..workload }).await?;
    let all = vec![KillLeader, FreezeLeader, StepDown, KillFollower, FreezeFollower, RollingRestart, KillRelay];
    let mut schedule = Schedule::new(&[], all);
    let mut led = leader_first(&cluster).await?[0].name().to_owned();
    let end = Instant::now() + length;
    while Instant::now() < end {
        pause(&mut random, 1_500).await;
        let Some(fault) = schedule.next(&mut random) else { break };
        tally.count(match fault {
            KillLeader => "leader killed",
            FreezeLeader => "leader frozen",
            StepDown => "leader stepped down",
            KillFollower => "follower killed",
            FreezeFollower => "follower frozen",
            RollingRestart => "rolling restarts",
            KillRelay => "relay killed",
        });
        if let (KillRelay, Ok(status)) = (fault, status(&rig).await) {
            tally.take(&status);
        }
        happen(fault, &cluster, &mut rig, &mut random).await.with_context(|| format!("{fault:?}"))?;
        let leads = leader_first(&cluster).await?[0].name().to_owned();
        if leads != led {
            tally.count("leader changes");
            led = leads;
        }
    }
    wait_for("the relay to be ready", LIMIT, async || rig.ready().await.map(|()| true)).await?;
    workload.stop().await;
    rig.settle(LIMIT).await?;
    tally.take(&status(&rig).await?);
    let books = rig.books().await?;
    say(&tally.report(&rig.log(), &books));
    ensure!(books.committed > 100, "there was hardly any load: {books}");
    ensure!(tally.faults() > 0, "nothing was done");
    books.check()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_fast_mode_the_books_balance_while_members_of_a_cluster_die() -> Result<()> {
    members_die("fast").await
}

#[tokio::test(flavor = "multi_thread")]
async fn in_chain_mode_the_books_balance_while_members_of_a_cluster_die() -> Result<()> {
    members_die("chain").await
}
