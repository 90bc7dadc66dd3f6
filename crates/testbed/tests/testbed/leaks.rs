//! Servers must not outlive whoever started them, however that one ends.

use std::{
    env, fs,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use waljet_testbed::{Nats, NatsOptions, Pair, Postgres, PostgresOptions, wait_for};

use crate::process::{is_alive, with_argument};

/// Tells the test below, in a process of its own, how to end.
const ENDING: &str = "WALJET_TESTBED_ENDING";

/// Not a test of its own: it is what the next one runs.
#[tokio::test]
#[allow(clippy::disallowed_methods, reason = "to end without closing anything is the point")]
async fn start_servers_and_end_badly() {
    let Ok(ending) = env::var(ENDING) else { return };
    let pair = Pair::newest().unwrap();
    let postgres = Postgres::start(PostgresOptions::new(&pair)).await.unwrap();
    let nats = Nats::start(NatsOptions::new(&pair)).await.unwrap();
    let (postmaster, server) = (postgres.pid().unwrap(), nats.pid().unwrap());
    let mut out = std::io::stdout();
    writeln!(out, "\nservers {postmaster} {server} {}", postgres.data_dir().display()).unwrap();
    out.flush().unwrap();
    match ending.as_str() {
        "panic" => panic!("as planned"),
        "exit" => std::process::exit(3),
        "abort" => std::process::abort(),
        "frozen" => {
            postgres.freeze().await.unwrap();
            nats.freeze().await.unwrap();
            std::process::abort();
        }
        // To be killed.
        _ => tokio::time::sleep(Duration::from_secs(60)).await,
    }
}

#[tokio::test]
async fn no_server_outlives_its_parent() {
    for ending in ["panic", "exit", "abort", "kill", "frozen"] {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "leaks::start_servers_and_end_badly", "--nocapture"])
            .env(ENDING, ending)
            .env_remove("WALJET_KEEP")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.find_map(|line| line.unwrap().strip_prefix("servers ").map(str::to_owned)).unwrap();
        let fields: Vec<&str> = line.split(' ').collect();
        let pids: [u32; 2] = [fields[0].parse().unwrap(), fields[1].parse().unwrap()];
        let data = PathBuf::from(fields[2]);
        if ending == "kill" {
            assert!(pids.iter().all(|pid| is_alive(*pid)), "the parent still waits");
            child.kill().unwrap();
        }
        child.wait().unwrap();
        let gone = async || !pids.iter().any(|pid| is_alive(*pid));
        wait_for(&format!("the servers to end after {ending}"), Duration::from_secs(10), gone).await.unwrap();
        let mark = data.to_string_lossy();
        assert!(with_argument(&mark).is_empty(), "{ending}");
        // The next process that makes a folder removes this one.
        let swept = data.parent().unwrap();
        assert!(ending != "panic" || !swept.exists(), "a panic unwinds, so the folder is removed at once");
        if swept.exists() {
            fs::remove_dir_all(swept).unwrap();
        }
    }
}
