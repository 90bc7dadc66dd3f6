//! nats-servers through their lives, alone and as a cluster.

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    time::Duration,
};

use waljet_testbed::{Nats, NatsCluster, NatsOptions, Pair, http_get, wait_for};

use crate::process::{is_alive, state};

const SECOND: Duration = Duration::from_secs(1);

/// Reads the line that a server greets its clients with, and sends a request that it answers.
fn pongs(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(SECOND / 4)).ok()?;
    stream.write_all(b"CONNECT {\"verbose\":false}\r\nPING\r\n").ok()?;
    let mut lines = BufReader::new(stream).lines();
    let info = lines.next()?.ok()?;
    (lines.next()?.ok()? == "PONG").then_some(info)
}

fn options() -> NatsOptions {
    NatsOptions::new(&Pair::newest().unwrap())
}

#[tokio::test]
async fn it_keeps_port_and_store_over_every_kind_of_end() {
    let nats = Nats::start(options()).await.unwrap();
    assert!(pongs(nats.port()).unwrap().contains("\"jetstream\":true"));
    let first = nats.pid().unwrap();
    nats.stop().await.unwrap();
    assert_eq!((nats.pid(), pongs(nats.port())), (None, None));
    assert!(nats.kill().await.is_err(), "nothing to kill");
    nats.start_again().await.unwrap();
    nats.kill().await.unwrap();
    nats.start_again().await.unwrap();
    nats.restart().await.unwrap();
    assert!(pongs(nats.port()).is_some() && nats.store_dir().join("jetstream").exists());
    assert_ne!(nats.pid().unwrap(), first);
    let (pid, store) = (nats.pid().unwrap(), nats.store_dir().to_owned());
    drop(nats);
    assert!(!is_alive(pid) && !store.exists());
}

#[tokio::test]
async fn a_frozen_server_answers_nobody_and_goes_on_when_thawed() {
    let nats = Nats::start(options()).await.unwrap();
    nats.freeze().await.unwrap();
    assert_eq!((state(nats.pid().unwrap()), pongs(nats.port())), (Some('T'), None));
    nats.thaw().await.unwrap();
    wait_for("an answer", 5 * SECOND, async || pongs(nats.port())).await.unwrap();
    nats.freeze().await.unwrap();
}

#[tokio::test]
async fn a_reload_is_in_effect_or_refused() {
    let nats = Nats::start(NatsOptions { jetstream: None, ..options() }).await.unwrap();
    assert!(!pongs(nats.port()).unwrap().contains("\"jetstream\":true"));
    nats.reload("max_payload: 4096").await.unwrap();
    assert!(pongs(nats.port()).unwrap().contains("\"max_payload\":4096"));
    let error = nats.reload("max_payload: {").await.unwrap_err().to_string();
    assert!(error.contains("refused the configuration"), "{error}");
}

#[tokio::test]
async fn three_servers_form_a_cluster_that_survives_its_leader() {
    let cluster = NatsCluster::start(options(), 3).await.unwrap();
    assert_eq!(cluster.url().split(',').count(), 3);
    let leader = cluster.meta_leader().await.unwrap();
    leader.kill().await.unwrap();
    let elected = async || {
        let now = cluster.meta_leader().await?;
        anyhow::Ok(now.pid().is_some().then(|| now.name().to_owned()))
    };
    let next = wait_for("another leader", 20 * SECOND, elected).await.unwrap();
    assert_ne!(next, leader.name());
    leader.start_again().await.unwrap();
    cluster.wait_ready().await.unwrap();
    let healthy = async || http_get(leader.monitor_port(), "/healthz").map(|answer| answer.status == 200);
    wait_for("the old leader to be healthy", 10 * SECOND, healthy).await.unwrap();
}
