//! The binary as a script meets it: what it prints where, and how it ends. No server runs.
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use std::io::Read;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

/// A port on which nobody listens: it was free a moment ago.
fn closed_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Makes a command in an empty folder, with an environment that says nothing.
fn waljet(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_waljet"));
    command.args(args.split_whitespace()).current_dir(env!("CARGO_TARGET_TMPDIR")).env_clear();
    command
}

/// Configures a command by its environment alone, with servers that are not there.
fn unreachable(args: &str) -> Command {
    let mut command = waljet(args);
    command
        .env("WALJET_POSTGRES__URL", format!("postgres://app:hunter2@127.0.0.1:{}/shop", closed_port()))
        .env("WALJET_NATS__URL", format!("nats://app:hunter2@127.0.0.1:{}", closed_port()))
        .env("WALJET_ADMIN__LISTEN", "off");
    command
}

/// Returns the exit code, standard output and standard error.
fn ended(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn the_version_is_data() {
    let version = format!("waljet {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(ended(&mut waljet("version")), (0, version.clone(), String::new()));
    assert_eq!(ended(&mut waljet("--version")), (0, version, String::new()));
}

#[test]
fn a_wrong_command_line_is_usage() {
    for args in ["", "frobnicate", "slot advance", "slot advance --to nowhere", "run --frobnicate"] {
        let (code, out, err) = ended(&mut waljet(args));
        assert_eq!((code, out.as_str()), (2, ""), "{args}: {err}");
        assert!(err.contains("Usage: waljet") || err.contains("error: "), "{args}: {err}");
    }
}

#[test]
fn all_faults_of_the_configuration_are_told_at_once_and_end_with_2() {
    let mut command = waljet("config validate");
    command
        .env("WALJET_POSTGRES__SLTO", "a")
        .env("WALJET_WINDOW__MAX_EVENTS", "0")
        .env("WALJET_DEAD_LETTER__ORDER", "park");
    let (code, out, err) = ended(&mut command);
    assert_eq!((code, out.as_str()), (2, ""));
    for part in [
        "WALJET_POSTGRES__SLTO: no such key [config-unknown-key]\nhint: did you mean WALJET_POSTGRES__SLOT?",
        "window.max_events (environment WALJET_WINDOW__MAX_EVENTS): expected a whole number from 1 to 4096, found \"0\" [config-value]",
        "\"park\" is not in this version",
        "postgres.url is not set",
    ] {
        assert!(err.contains(part), "{part:?} is missing in {err}");
    }
}

#[test]
fn every_command_that_needs_a_configuration_ends_with_2_without_one() {
    for args in ["run", "init", "check", "status", "slot show", "config validate"] {
        let (code, out, err) = ended(&mut waljet(args));
        assert_eq!((code, out.as_str()), (2, ""), "{args}: {err}");
        assert!(
            err.contains(
                "error: postgres.url is not set: where the database is [config-missing]\nhint: set postgres.url"
            ),
            "{err}"
        );
    }
}

#[test]
fn a_file_that_is_named_has_to_be_there() {
    let (code, _, err) = ended(&mut unreachable("config validate --config nowhere.toml"));
    assert_eq!(code, 2);
    assert!(err.contains("\"nowhere.toml\" cannot be read [config-file]\ncause: No such file"), "{err}");
}

#[test]
fn the_environment_alone_is_a_configuration() {
    let (code, out, err) = ended(&mut unreachable("config validate"));
    assert_eq!((code, out.as_str(), err.as_str()), (0, "", "the configuration is valid\n"));
}

#[test]
fn no_command_shows_a_secret() {
    for args in ["config show", "config show --json", "check", "check --json", "status", "slot show", "init"] {
        let (_, out, err) = ended(unreachable(args).env("RUST_LOG", "trace"));
        assert!(!out.contains("hunter2") && !err.contains("hunter2"), "{args}: {out}{err}");
    }
}

#[test]
fn check_ends_with_3_where_no_server_answers_and_names_both() {
    let (code, out, err) = ended(&mut unreachable("check"));
    assert_eq!((code, err.as_str()), (3, ""));
    assert!(out.contains("FAULT  postgres  connection") && out.contains("[postgres-unreachable]"), "{out}");
    assert!(out.contains("FAULT  nats      nats server") && out.contains("[nats-unreachable]"), "{out}");
    assert!(!out.contains('\u{1b}'), "{out:?}");

    let (code, out, _) = ended(&mut unreachable("check --json"));
    let checks: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 3);
    assert_eq!(checks[0]["end"], "postgres");
    assert_eq!(checks[0]["result"], "fault");
    assert_eq!(checks[1]["code"], "nats-unreachable");
}

#[test]
fn status_says_what_it_could_not_ask_and_ends_with_1() {
    let (code, out, err) = ended(&mut unreachable("status"));
    assert_eq!(code, 1);
    assert!(out.starts_with("from    the servers, since admin.listen is \"off\"\n"), "{out}");
    assert!(err.contains("[postgres-unreachable]") && err.contains("[nats-unreachable]"), "{err}");
}

#[test]
fn what_init_would_do_is_printed_without_a_server() {
    let (code, out, err) = ended(&mut unreachable("init --print --partitioned"));
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("PARTITION BY RANGE"), "{out}");
    assert!(out.contains("--   \"name\": \"OUTBOX\""), "{out}");
}

#[test]
fn run_names_an_address_that_is_taken() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, _, err) = ended(unreachable("run").env("WALJET_ADMIN__LISTEN", &address));
    assert_eq!(code, 1);
    assert!(err.contains(&format!("error: listen on {address} for the admin endpoint [admin-listen]")), "{err}");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let mut child = waljet("config reference").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!((child.wait().unwrap().code(), err.as_str()), (Some(0), ""));
}
