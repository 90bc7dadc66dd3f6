//! PostgreSQL servers through their lives.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    os::unix::fs::MetadataExt,
    path::Path,
    process::Command,
    time::Duration,
};

use waljet_testbed::{Auth, Durability, Nats, NatsOptions, Pair, Postgres, PostgresOptions, wait_for};

use crate::process::{is_alive, state};

const SECOND: Duration = Duration::from_secs(1);

/// Sends a start-up message and returns the kind of the first answer: `R` is a request to log in.
fn greets(port: u16) -> Option<char> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(SECOND / 4)).ok()?;
    let body = b"\0\x03\0\0user\0postgres\0database\0postgres\0\0";
    stream.write_all(&(body.len() as u32 + 4).to_be_bytes()).ok()?;
    stream.write_all(body).ok()?;
    let mut kind = [0];
    stream.read_exact(&mut kind).ok()?;
    Some(kind[0] as char)
}

fn options() -> PostgresOptions {
    PostgresOptions::new(&Pair::newest().unwrap())
}

/// Reads the system identifier: the first 8 bytes of the control file.
fn system_identifier(data: &Path) -> [u8; 8] {
    fs::read(data.join("global/pg_control")).unwrap()[..8].try_into().unwrap()
}

#[tokio::test]
async fn it_keeps_port_and_data_over_every_kind_of_end() {
    let postgres = Postgres::start(PostgresOptions { durability: Durability::Durable, ..options() }).await.unwrap();
    let (port, first) = (postgres.port(), postgres.pid().unwrap());
    assert_eq!(greets(port), Some('R'));
    assert!(postgres.start_again().await.is_err(), "it runs already");

    assert!(postgres.stop_fast().await.unwrap() < 10 * SECOND);
    assert_eq!((postgres.pid(), greets(port)), (None, None));
    postgres.start_again().await.unwrap();
    postgres.stop_immediate().await.unwrap();
    postgres.start_again().await.unwrap();
    postgres.kill().await.unwrap();
    assert!(postgres.stop_fast().await.is_err(), "nothing to stop");
    postgres.start_again().await.unwrap();
    postgres.restart().await.unwrap();

    assert_eq!((postgres.port(), greets(port)), (port, Some('R')));
    assert_ne!(postgres.pid().unwrap(), first);
    assert_eq!(postgres.log().matches("was not properly shut down").count(), 2);
}

#[tokio::test]
async fn it_goes_with_everything_when_dropped() {
    let postgres = Postgres::start(options()).await.unwrap();
    let (pid, data) = (postgres.pid().unwrap(), postgres.data_dir().to_owned());
    let segment = fs::read_to_string(data.join("postmaster.pid")).unwrap();
    let segment = segment.lines().nth(6).unwrap().split_whitespace().nth(1).unwrap().to_owned();
    let exists = |id: &str| {
        let table = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
        table.lines().any(|line| line.split_whitespace().nth(1) == Some(id))
    };
    assert!(exists(&segment));
    postgres.kill().await.unwrap();
    drop(postgres);
    assert!(!is_alive(pid) && !data.exists() && !exists(&segment));
}

#[tokio::test]
async fn a_frozen_server_answers_nobody_and_goes_on_when_thawed() {
    let postgres = Postgres::start(options()).await.unwrap();
    postgres.freeze().await.unwrap();
    assert_eq!(state(postgres.pid().unwrap()), Some('T'));
    assert_eq!(greets(postgres.port()), None);
    postgres.thaw().await.unwrap();
    wait_for("an answer", 5 * SECOND, async || greets(postgres.port())).await.unwrap();
    // A frozen server can be killed and dropped like any other.
    postgres.freeze().await.unwrap();
    postgres.kill().await.unwrap();
    postgres.start_again().await.unwrap();
    postgres.freeze().await.unwrap();
}

#[tokio::test]
async fn only_its_own_backends_can_be_frozen() {
    let postgres = Postgres::start(options()).await.unwrap();
    assert!(postgres.freeze_backend(std::process::id()).await.is_err());
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", postgres.pid().unwrap())).unwrap();
    let child = children.split_whitespace().next().unwrap().parse().unwrap();
    postgres.freeze_backend(child).await.unwrap();
    assert_eq!(state(child), Some('T'));
    postgres.thaw_backend(child).await.unwrap();
    postgres.kill_backend(child).await.unwrap();
    let recovered = async || postgres.log().contains("all server processes terminated; reinitializing");
    wait_for("the postmaster to recover", 10 * SECOND, recovered).await.unwrap();
}

#[tokio::test]
async fn settings_reach_a_running_server_and_the_next_start() {
    let mut options = options();
    options.settings.push(("max_connections".into(), "7".into()));
    options.files.push(("marker.key".into(), b"secret".to_vec()));
    let postgres = Postgres::start(options).await.unwrap();
    let marker = fs::metadata(postgres.data_dir().join("marker.key")).unwrap();
    assert_eq!(marker.mode() & 0o777, 0o600);
    assert_eq!(marker.uid(), fs::metadata(postgres.data_dir()).unwrap().uid());
    postgres.set(&[("log_checkpoints", "on"), ("wal_sender_timeout", "3s")]).await.unwrap();
    assert!(postgres.log().contains("parameter \"wal_sender_timeout\" changed to \"3s\""));
    postgres.set_hba(&["host all nobody 127.0.0.1/32 reject"]).await.unwrap();
    postgres.restart().await.unwrap();
    let conf = fs::read_to_string(postgres.data_dir().join("testbed.conf")).unwrap();
    assert!(conf.contains("max_connections = '7'") && conf.contains("wal_sender_timeout = '3s'"));
}

#[tokio::test]
async fn copies_share_the_system_identifier_and_fresh_clusters_do_not() {
    let (one, two) = tokio::join!(Postgres::start(options()), Postgres::start(options()));
    let fresh = Postgres::start(PostgresOptions { fresh_initdb: true, ..options() }).await.unwrap();
    let (one, two) = (system_identifier(one.unwrap().data_dir()), system_identifier(two.unwrap().data_dir()));
    assert_eq!(one, two);
    assert_ne!(one, system_identifier(fresh.data_dir()));
}

#[tokio::test]
async fn passwords_are_asked_for_when_wanted() {
    let postgres = Postgres::start(PostgresOptions { auth: Auth::Scram("pw1".into()), ..options() }).await.unwrap();
    assert_eq!(postgres.url(), format!("postgres://postgres:pw1@127.0.0.1:{}/postgres", postgres.port()));
    let bin = Pair::newest().unwrap().postgres;
    let psql = [bin.join("psql"), "/usr/bin/psql".into()].into_iter().find(|path| path.exists());
    let Some(psql) = psql else { return };
    for (url, passes) in [(postgres.url(), true), (postgres.url().replace("pw1", "pw2"), false)] {
        let done = Command::new(&psql).args([&url, "-Atc", "SELECT 1"]).output().unwrap();
        assert_eq!(done.status.success(), passes, "{}", String::from_utf8_lossy(&done.stderr));
    }
}

#[tokio::test]
async fn a_server_that_cannot_start_says_why() {
    let mut options = options();
    options.settings.push(("shared_buffers".into(), "nonsense".into()));
    let error = Postgres::start(options).await.unwrap_err().to_string();
    assert!(error.contains("exit code 1") && error.contains("shared_buffers"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_and_the_newest_pair_run_at_once_and_four_times() {
    let (oldest, newest) = (Pair::oldest().unwrap(), Pair::newest().unwrap());
    assert!(oldest.postgres_major().unwrap() >= 14);
    assert!(newest.nats_version().unwrap() >= (2, 9, 0));
    let tasks: Vec<_> = [oldest.clone(), newest.clone(), oldest, newest]
        .into_iter()
        .map(|pair| {
            tokio::spawn(async move {
                let (postgres, nats) =
                    tokio::join!(Postgres::start(PostgresOptions::new(&pair)), Nats::start(NatsOptions::new(&pair)));
                (postgres.unwrap(), nats.unwrap())
            })
        })
        .collect();
    let mut pairs = Vec::new();
    for task in tasks {
        pairs.push(task.await.unwrap());
    }
    let pids: Vec<u32> = pairs.iter().flat_map(|(p, n)| [p.pid().unwrap(), n.pid().unwrap()]).collect();
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    assert!(pairs.iter().all(|(postgres, _)| greets(postgres.port()) == Some('R')));
    drop(pairs);
    assert!(!pids.iter().any(|pid| is_alive(*pid)));
}
