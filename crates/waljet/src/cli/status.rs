//! `waljet status`: what the relay is doing, or what both servers know where none runs.

use clap::Args;
use serde_json::{Value, json};
use waljet_pipeline::Fault;
use waljet_postgres::slot;

use super::{Global, runtime};
use crate::admin::client;
use crate::config::Config;
use crate::config::units::human_bytes;
use crate::render::{Exit, Failure, data, table};

/// Show what the relay is doing.
#[derive(Debug, Args)]
pub(crate) struct Status {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Does what was typed.
pub(crate) fn run(global: &Global, args: &Status) -> Result<Exit, Failure> {
    let config = global.load_quietly()?;
    let (status, faults) = runtime()?.block_on(gather(&config));
    data(&if args.json { format!("{status:#}\n") } else { text(&status) })?;
    if faults.is_empty() { Ok(Exit::Done) } else { Err(Failure { exit: Exit::Failed, faults }) }
}

/// Asks the running relay; where none answers, both servers.
async fn gather(config: &Config) -> (Value, Vec<Fault>) {
    let why = match &config.admin_listen {
        None => "admin.listen is \"off\"".to_owned(),
        Some(listen) => match client::status(listen).await {
            Ok(mut status) => {
                status["from"] = json!(format!("the relay at {listen}"));
                return (status, Vec::new());
            }
            Err(error) => format!("no relay answers at {listen}: {error}"),
        },
    };
    let (slot, stream) = tokio::join!(slot::show(&config.source.connect, &config.source.slot), stream_state(config),);
    let mut faults = Vec::new();
    let slot = slot.map_or_else(|fault| kept(fault, &mut faults), |slot| json!(slot));
    let stream = stream.unwrap_or_else(|fault| kept(fault, &mut faults));
    let status = json!({ "from": format!("the servers, since {why}"), "slot": slot, "stream": stream });
    (status, faults)
}

/// Asks the broker for the stream's state and the position of its last event.
async fn stream_state(config: &Config) -> Result<Value, Fault> {
    let (nats, name) = (&config.nats, &config.stream.stream);
    let client = waljet_jetstream::connect(nats).await?;
    let tail = waljet_jetstream::read_tail(&client, nats, name, &config.stream.subject_space).await?;
    Ok(json!({
        "name": name,
        "last_sequence": tail.sequence,
        "last_position": tail.position.map(|position| position.to_string()),
        "server": client.server_info().server_name,
        "server_version": client.server_info().version,
    }))
}

/// Keeps a fault for the end and stands in for what it kept from being read.
fn kept(fault: Fault, faults: &mut Vec<Fault>) -> Value {
    faults.push(fault);
    Value::Null
}

/// Writes the state for a person: one line a thing.
fn text(status: &Value) -> String {
    let mut rows = vec![line("from", plain(&status["from"]))];
    if status["ready"].is_boolean() {
        relay(status, &mut rows);
        slot_lines(&status["postgres"]["slot"], &mut rows);
    } else {
        slot_lines(&status["slot"], &mut rows);
        stream_lines(&status["stream"], &mut rows);
    }
    table(&rows)
}

/// Adds the lines of a running relay.
fn relay(status: &Value, rows: &mut Vec<Vec<String>>) {
    let (source, sink, window, events) = (&status["source"], &status["sink"], &status["window"], &status["events"]);
    let ready = if status["ready"] == true { "yes".to_owned() } else { format!("no: {}", plain(&status["reason"])) };
    rows.push(line("ready", ready));
    rows.extend(status["hint"].as_str().map(|hint| line("hint", hint.to_owned())));
    rows.push(line("version", plain(&status["version"])));
    rows.push(line(
        "postgres",
        format!("{}, server {}", plain(&source["state"]), plain(&status["postgres"]["server_version"])),
    ));
    rows.push(line(
        "nats",
        format!(
            "{}, server {} {}",
            plain(&sink["state"]),
            plain(&status["nats"]["server"]),
            plain(&status["nats"]["server_version"])
        ),
    ));
    rows.push(line(
        "stream",
        format!(
            "{}, mode {}, last sequence {}",
            plain(&status["nats"]["stream"]),
            plain(&sink["mode"]),
            plain(&sink["last_sequence"])
        ),
    ));
    rows.push(line("received", plain(&source["received_lsn"])));
    rows.push(line("confirmed", plain(&source["confirmed_lsn"])));
    rows.push(line(
        "lag",
        format!(
            "{}, oldest unacknowledged {:.1} s",
            bytes(&status["lag_bytes"]),
            window["oldest_unacked_seconds"].as_f64().unwrap_or(0.0)
        ),
    ));
    rows.push(line(
        "in flight",
        format!(
            "{} of {} events, {} of {}",
            plain(&window["events"]),
            plain(&window["max_events"]),
            bytes(&window["bytes"]),
            bytes(&window["max_bytes"])
        ),
    ));
    rows.push(line(
        "events",
        format!(
            "stored {}, duplicate {}, skipped {}",
            plain(&events["stored"]),
            plain(&events["duplicate"]),
            plain(&events["skipped"])
        ),
    ));
    read_back_lines(sink, rows);
    checkpoint_line(&status["checkpoint"], rows);
    rows.push(line("dead letters", plain(&status["dead_letters"])));
}

/// Adds where the checkpoint stands, or why there is none.
fn checkpoint_line(checkpoint: &Value, rows: &mut Vec<Vec<String>>) {
    let (store, fault) = (plain(&checkpoint["store"]), checkpoint["fault"]["message"].as_str());
    let text = match (fault, checkpoint["confirmed_lsn"].as_str()) {
        (Some(fault), Some(lsn)) => format!("{store}, stands at {lsn}: {fault}"),
        (None, Some(lsn)) => format!("{store}, stands at {lsn}"),
        (Some(fault), None) => format!("none: {fault}"),
        (None, None) => format!("{store}, none yet"),
    };
    rows.push(line("checkpoint", text));
}

/// Adds what reading the stream back took, and what it could not tell.
fn read_back_lines(sink: &Value, rows: &mut Vec<Vec<String>>) {
    let (all, last) = (&sink["read_backs"], &sink["read_back"]);
    rows.push(line(
        "read back",
        format!(
            "{} messages in {} read-backs and {:.1} s, {} events found",
            plain(&all["messages"]),
            plain(&all["count"]),
            all["seconds"].as_f64().unwrap_or(0.0),
            plain(&all["found"])
        ),
    ));
    if let Some(missing) = last["missing"].as_str() {
        rows.push(line("not known", format!("{missing}; sent nevertheless: {} events", plain(&all["unsure"]))));
    }
}

/// Adds the line of the slot.
fn slot_lines(slot: &Value, rows: &mut Vec<Vec<String>>) {
    if slot.is_null() {
        rows.push(line("slot", "not there, or not read".to_owned()));
        return;
    }
    let reader =
        slot["active_pid"].as_i64().map_or_else(|| "nobody reads it".to_owned(), |pid| format!("read by PID {pid}"));
    let safe = slot["safe_wal_size"].as_u64().map_or_else(|| "no limit".to_owned(), human_bytes);
    rows.push(line(
        "slot",
        format!(
            "{}, {reader}, confirmed {}, retains {} (safe for {safe}), wal_status {}",
            plain(&slot["name"]),
            plain(&slot["confirmed_flush"]),
            bytes(&slot["retained_bytes"]),
            plain(&slot["wal_status"])
        ),
    ));
}

/// Adds the lines of the stream, as the broker told them.
fn stream_lines(stream: &Value, rows: &mut Vec<Vec<String>>) {
    if stream.is_null() {
        rows.push(line("stream", "not there, or not read".to_owned()));
        return;
    }
    rows.push(line("nats", format!("server {} {}", plain(&stream["server"]), plain(&stream["server_version"]))));
    rows.push(line(
        "stream",
        format!("{}, last event at sequence {}", plain(&stream["name"]), plain(&stream["last_sequence"])),
    ));
    rows.push(line("last event", plain(&stream["last_position"])));
}

fn line(name: &str, text: String) -> Vec<String> {
    vec![name.to_owned(), text]
}

/// Returns a value as plain text.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Returns a number of bytes for a person.
fn bytes(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".to_owned(), human_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_relay_is_shown_with_its_reason_and_remedy() {
        let status = json!({
            "from": "the relay at 127.0.0.1:9464", "version": "0.1.0", "ready": false, "reason": "sink: no stream [stream-missing]",
            "hint": "waljet init",
            "source": { "state": "open", "received_lsn": "0/20", "confirmed_lsn": "0/10", "fault": null },
            "sink": {
                "state": "waiting", "mode": null, "last_sequence": 7, "fault": { "code": "stream-missing" },
                "read_back": { "missing": "messages were removed", "messages": 5, "found": 2, "seconds": 0.5 },
                "read_backs": { "count": 2, "messages": 12, "found": 4, "seconds": 1.25, "unsure": 3 },
            },
            "window": { "events": 3, "bytes": 2048, "max_events": 1024, "max_bytes": 8_388_608, "oldest_unacked_seconds": 1.25 },
            "events": { "stored": 7, "duplicate": 1, "skipped": 0 }, "lag_bytes": 16, "dead_letters": 0,
            "checkpoint": { "store": "postgres", "confirmed_lsn": "0/10", "fault": null },
            "postgres": { "server_version": "18.1", "slot": null },
            "nats": { "server": "n1", "server_version": "2.12.0", "stream": "OUTBOX" },
        });
        let expected = "\
from          the relay at 127.0.0.1:9464
ready         no: sink: no stream [stream-missing]
hint          waljet init
version       0.1.0
postgres      open, server 18.1
nats          waiting, server n1 2.12.0
stream        OUTBOX, mode -, last sequence 7
received      0/20
confirmed     0/10
lag           16 B, oldest unacknowledged 1.2 s
in flight     3 of 1024 events, 2.0 KiB of 8.0 MiB
events        stored 7, duplicate 1, skipped 0
read back     12 messages in 2 read-backs and 1.2 s, 4 events found
not known     messages were removed; sent nevertheless: 3 events
checkpoint    postgres, stands at 0/10
dead letters  0
slot          not there, or not read
";
        assert_eq!(text(&status), expected);
    }

    #[test]
    fn what_the_servers_know_is_shown_where_no_relay_runs() {
        let status = json!({
            "from": "the servers, since admin.listen is \"off\"",
            "slot": {
                "name": "waljet", "active_pid": null, "confirmed_flush": "0/10", "retained_bytes": 4096,
                "safe_wal_size": null, "wal_status": "reserved",
            },
            "stream": { "name": "OUTBOX", "server": "n1", "server_version": "2.12.0", "last_sequence": 5, "last_position": "7:1:0/10:0" },
        });
        let expected = "\
from        the servers, since admin.listen is \"off\"
slot        waljet, nobody reads it, confirmed 0/10, retains 4.0 KiB (safe for no limit), wal_status reserved
nats        server n1 2.12.0
stream      OUTBOX, last event at sequence 5
last event  7:1:0/10:0
";
        assert_eq!(text(&status), expected);
    }
}
