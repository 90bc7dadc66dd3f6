//! The preflight of the broker's end: one line a check, with the remedy.

use std::time::Duration;

use async_nats::{HeaderMap, Request, RequestErrorKind};
use serde::Deserialize;
use waljet_pipeline::{Action, Check, Fault};

use crate::api::{Api, ApiError, StreamInfo, inbox_filter};
use crate::connect::{Connection, Reconnect, listed};
use crate::options::{DEFAULT_DUPLICATE_WINDOW, NatsOptions, StreamOptions};
use crate::provision::version;
use crate::{atomic, error, fast, subject};

/// The first version whose stream state and message reads are as the sink needs them.
const OLDEST: (u64, u64, u64) = (2, 9, 0);
/// A name that no stream has, so that a probe is never stored.
const NO_SUCH_STREAM: &str = "waljet-check-no-such-stream";
/// How long a probe may take.
const PROBE: Duration = Duration::from_secs(3);

/// Checks the broker's end. The first check that finds a fault which hides the rest is the last one.
pub async fn check(nats: &NatsOptions, options: &StreamOptions) -> Vec<Check> {
    let mut checks = Vec::new();
    let connection = match Connection::open(nats, &[], Reconnect::Barely).await {
        Ok(connection) => connection,
        Err(fault) => return vec![Check::fault("nats server", fault)],
    };
    let server = connection.client.server_info();
    let named = format!("{} of {}", server.server_name, listed(nats));
    checks.push(Check::good("nats server", format!("{named}, max_payload {} bytes", server.max_payload)));
    checks.push(match version(&server.version) {
        Some(found) if found < OLDEST => {
            let what = format!("nats-server is {}, expected 2.9 or newer", server.version);
            Check::fault(
                "nats server version",
                Fault::new(error::SERVER_VERSION, Action::Halt, what).hint("upgrade nats-server"),
            )
        }
        _ => Check::good("nats server version", server.version.clone()),
    });
    let api = Api::new(&connection, nats.js_prefix(), nats.connect_timeout);
    match jetstream(&api, &nats.js_prefix()).await {
        Ok(check) => checks.extend(check),
        Err(check) => {
            checks.push(check);
            return checks;
        }
    }
    let name = format!("stream {:?}", options.stream);
    let info = match api.stream_info(&options.stream).await {
        Ok(info) => info,
        Err(failed) => {
            checks.push(Check::fault(name, failed.fault("look for the stream", &options.stream)));
            checks.extend(overlaps(&api, options).await);
            return checks;
        }
    };
    let state = &info.state;
    checks.push(Check::good(
        name,
        format!("{} messages, {} bytes, last sequence {}", state.messages, state.bytes, state.last_seq),
    ));
    checks.extend(subjects(&info, options, nats.inbox_prefix.as_deref()));
    checks.extend(overlaps(&api, options).await);
    checks.push(mode(&server.version, &info, options));
    checks.extend(settings(&info, options));
    if !info.config.no_ack && !info.config.sealed {
        checks.push(permission(connection, options).await);
    }
    checks
}

/// Finds an account without JetStream. A user who may not ask for the account's numbers may still publish.
async fn jetstream(api: &Api, prefix: &str) -> Result<Option<Check>, Check> {
    let fault = match api.account().await {
        Ok(()) => return Ok(Some(Check::good("jetstream", format!("answers on {prefix}")))),
        Err(ApiError::Other(fault)) if fault.code == error::PERMISSION => return Ok(None),
        Err(ApiError::Broker { err_code, description }) => {
            error::broker_fault(err_code, &description, "ask for JetStream", "")
        }
        Err(ApiError::Other(fault)) => fault,
    };
    let hint = format!(
        "enable JetStream: jetstream {{}} in the server's configuration, jetstream: enabled for the account; \
         requests went to {prefix} (nats.domain)"
    );
    Err(Check::fault("jetstream", fault.hint(hint)))
}

/// Compares what the stream takes with what events are routed to.
fn subjects(info: &StreamInfo, options: &StreamOptions, inbox_prefix: Option<&str>) -> Vec<Check> {
    let (stream, space, filters) = (&options.stream, &options.subject_space, &info.config.subjects);
    let taken = filters.join(", ");
    let inboxes = format!("{}.>", inbox_prefix.unwrap_or("_INBOX"));
    let mut checks = Vec::new();
    if let Some(wide) = filters.iter().find(|filter| subject::overlap(filter, &inboxes) || *filter == ">") {
        let what = format!("stream {stream:?} takes {wide:?}, replies of the broker among it");
        let fault = Fault::new(error::STREAM_CAPTURES_REPLIES, Action::Halt, what);
        checks.push(Check::fault(
            "stream subjects",
            fault.hint(format!("nats stream edit {stream} --subjects={space:?}")),
        ));
    } else if filters.iter().any(|filter| subject::covers(filter, space)) {
        checks.push(Check::good("stream subjects", format!("{taken} covers {space}")));
    } else {
        let what = format!("stream {stream:?} takes {taken}, expected {space}");
        let fault = Fault::new(error::STREAM_SUBJECTS, Action::Halt, what);
        checks.push(Check::fault(
            "stream subjects",
            fault.hint(format!("nats stream edit {stream} --subjects={space:?}")),
        ));
    }
    checks
}

/// Finds other streams on the same subjects.
async fn overlaps(api: &Api, options: &StreamOptions) -> Option<Check> {
    let mut others = api.streams_on(&options.subject_space).await.ok()?;
    others.retain(|name| *name != options.stream);
    if others.is_empty() {
        return None;
    }
    let what = format!("subjects of {:?} belong to stream {}", options.subject_space, others.join(", "));
    let fault = Fault::new(error::STREAM_OVERLAP, Action::Halt, what);
    Some(Check::fault(
        "other streams",
        fault.hint(format!(
            "nats stream edit {} with other subjects, or another prefix in route.subject",
            others.join(", ")
        )),
    ))
}

/// Tells the mode that `publisher.mode = "auto"` takes, and whether the stream is fit for atomic mode where that is chosen.
fn mode(server: &str, info: &StreamInfo, options: &StreamOptions) -> Check {
    let (stream, space, name) = (&options.stream, &options.subject_space, "publisher mode");
    let others = info.config.subjects.iter().map(String::as_str).filter(|filter| !subject::covers(space, filter));
    let others: Vec<&str> = others.collect();
    if options.atomic {
        return match atomic::hindrance(server, info, stream) {
            None if others.is_empty() => Check::good(name, "atomic: each transaction in one batch"),
            None => Check::warning(
                name,
                format!("atomic, one transaction at a time: stream {stream:?} also takes {}", others.join(", ")),
                format!(
                    "give the outbox a stream of its own, or narrow this one: nats stream edit {stream} --subjects={space:?}"
                ),
            ),
            Some((why, hint)) => {
                let what = format!("publisher.mode is atomic: {why}");
                Check::fault(name, Fault::new(error::STREAM_NOT_ATOMIC, Action::Retry, what).hint(hint))
            }
        };
    }
    match fast::hindrance(server, info, stream) {
        None => Check::good(name, "auto is fast: batches that the broker keeps in order"),
        Some((why, _)) if others.is_empty() => Check::good(name, format!("auto is chain: {why}")),
        Some((why, hint)) => Check::warning(
            name,
            format!(
                "auto is lanes, one event of each key at a time: stream {stream:?} also takes {}, and {why}",
                others.join(", ")
            ),
            format!(
                "{hint}; or give the outbox a stream of its own, or narrow this one: nats stream edit {stream} \
                 --subjects={space:?}"
            ),
        ),
    }
}

/// Looks at the settings that decide whether an event can be stored, found again and recognised.
fn settings(info: &StreamInfo, options: &StreamOptions) -> Vec<Check> {
    let (stream, config) = (&options.stream, &info.config);
    let mut checks = Vec::new();
    let halt =
        |code, what: &str, hint: String| Fault::new(code, Action::Halt, format!("stream {stream:?} {what}")).hint(hint);
    if config.sealed {
        let hint = format!("create another stream and set nats.stream; nats stream info {stream}");
        checks.push(Check::fault(
            "stream sealed",
            halt(error::STREAM_SEALED, "is sealed and takes no message ever again", hint),
        ));
    }
    if config.no_ack {
        let hint = format!("nats stream edit {stream} --ack");
        checks.push(Check::fault(
            "stream acknowledgements",
            halt(error::STREAM_NO_ACK, "does not acknowledge (no_ack)", hint),
        ));
    }
    if config.mirror.is_some() {
        let hint = "set nats.stream to the mirror's origin".to_owned();
        checks
            .push(Check::fault("stream mirror", halt(error::STREAM_MIRROR, "is a mirror and takes no messages", hint)));
    }
    let mut warn = |name: &str, what: String, hint: String| checks.push(Check::warning(name, what, hint));
    if config.retention == "interest" && info.state.consumer_count == 0 {
        warn(
            "stream retention",
            "retention is interest, and no consumer has an interest in it: events are acknowledged and dropped at once"
                .into(),
            format!(
                "create the consumers first, or create stream {stream:?} with retention limits (waljet init --print)"
            ),
        );
    } else if !config.retention.is_empty() && config.retention != "limits" {
        warn(
            "stream retention",
            format!(
                "retention is {}: consumed events are removed, and with them what a restart reads back",
                config.retention
            ),
            format!("create stream {stream:?} with retention limits (waljet init --print)"),
        );
    }
    if config.storage == "memory" {
        warn(
            "stream storage",
            "storage is memory: a restart of the server loses events".into(),
            "create the stream with storage file".into(),
        );
    }
    if config.persist_mode.as_deref() == Some("async") {
        warn(
            "stream persistence",
            "messages are acknowledged before they are written".into(),
            "create the stream without persist_mode async".into(),
        );
    }
    let window = nanos(config.duplicate_window);
    if window < DEFAULT_DUPLICATE_WINDOW {
        warn(
            "duplicate window",
            format!("the broker remembers message ids for {window:?}, less than a restart may take"),
            format!("nats stream edit {stream} --dupe-window=2m"),
        );
    }
    if config.max_age > 0 && nanos(config.max_age) < options.duplicate_window {
        warn(
            "stream age",
            format!("messages are kept for {:?} only, and their ids with them", nanos(config.max_age)),
            format!("nats stream edit {stream} --max-age=TIME"),
        );
    }
    let limited = config.max_bytes > 0 || config.max_msgs > 0;
    if limited && config.discard != "new" {
        warn(
            "stream discard",
            "at its limit the stream drops its oldest events, read or not".into(),
            format!("nats stream edit {stream} --discard=new, which makes new events wait in the database"),
        );
    }
    if config.max_msgs_per_subject > 0 {
        let most = config.max_msgs_per_subject;
        warn(
            "stream messages per subject",
            if config.discard_new_per_subject && config.discard == "new" {
                format!("each subject takes {most} events only, and what follows waits, on other subjects too")
            } else {
                format!("only the last {most} events of each subject are kept")
            },
            format!("nats stream edit {stream} --max-msgs-per-subject=-1"),
        );
    }
    if config.subject_transform.is_some() {
        warn(
            "subject transform",
            "the stream stores events under other subjects than they are routed to".into(),
            "read them by their new subjects; the transform should keep the literal prefix".into(),
        );
    }
    if config.sources.is_some() {
        warn(
            "stream sources",
            "the stream also takes messages from other streams".into(),
            "give the outbox a stream of its own".into(),
        );
    }
    if config.allow_rollup_hdrs && options.row_headers {
        warn(
            "stream rollup",
            "the stream allows rollup headers, which remove messages; waljet refuses them in rows, other publishers may not".into(),
            format!("nats stream edit {stream} --no-allow-rollup"),
        );
    }
    let replicas = config.num_replicas.max(1);
    checks.push(if replicas == 1 {
        let hint =
            "three replicas (nats stream edit --replicas=3), or sync_interval: always in the server's jetstream block";
        Check::warning(
            "stream replicas",
            "one server stores the stream: a power loss can take acknowledged events with it",
            hint,
        )
    } else {
        let leader = info.cluster.as_ref().and_then(|cluster| cluster.leader.clone());
        Check::good("stream replicas", format!("{replicas}, led by {}", leader.as_deref().unwrap_or("nobody")))
    });
    checks
}

/// Publishes something that the broker must refuse to store: that it does refuse it proves the permission.
async fn permission(mut connection: Connection, options: &StreamOptions) -> Check {
    let about = subject::probe(&options.subject_space);
    let name = "permission to publish";
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Expected-Stream", NO_SUCH_STREAM);
    let request = Request::new().headers(headers).timeout(Some(PROBE));
    let seen = connection.news.borrow_and_update().violations;
    let answer = connection.client.send_request(about.clone(), request);
    let refused = connection.news.wait_for(|news| news.lost || news.violations > seen);
    let answer = tokio::select! {
        biased;
        answer = answer => answer,
        news = refused => {
            let violation = news.ok().and_then(|news| news.violation.clone());
            return match violation {
                Some(violation) if violation.permission == "subscribe" => {
                    Check::fault(name, violation.fault(&inbox_filter(&violation.subject)))
                }
                Some(violation) => Check::fault(name, violation.fault(&options.subject_space)),
                None => {
                    let what = format!("publish to {about:?}: the connection was lost");
                    Check::fault(name, Fault::new(error::DISCONNECTED, Action::Retry, what))
                }
            };
        }
    };
    let fault = match answer {
        Ok(message) => match proof(&message.payload) {
            Proof::Allowed => return Check::good(name, format!("{} (probed with {about})", options.subject_space)),
            Proof::Error(err_code, description) => {
                error::broker_fault(err_code, &description, &format!("publish to {about:?}"), &options.stream)
            }
            Proof::Other => Fault::new(
                error::UNEXPECTED_ANSWER,
                Action::Halt,
                format!("publish to {about:?}: the answer did not come from JetStream"),
            )
            .hint("find who else answers on the subject: nats server report connections"),
        },
        Err(error) if error.kind() == RequestErrorKind::NoResponders => Fault::new(
            error::STREAM_LEADERLESS,
            Action::Retry,
            format!("publish to {about:?}: no stream takes it at the moment"),
        )
        .hint(format!("nats stream info {}", options.stream)),
        Err(error) => Fault::new(error::TIMEOUT, Action::Retry, format!("publish to {about:?}: no answer"))
            .hint(format!("allow the user to publish to {:?} and to subscribe to its inbox", options.subject_space))
            .cause(error),
    };
    Check::fault(name, fault)
}

/// What an answer to the probe proves.
#[derive(Debug, PartialEq, Eq)]
enum Proof {
    /// JetStream saw it and stored nothing.
    Allowed,
    /// JetStream has another reason.
    Error(u64, String),
    /// Somebody else answered.
    Other,
}

/// Reads the answer to the probe.
fn proof(payload: &[u8]) -> Proof {
    #[derive(Deserialize)]
    struct Answer {
        error: Option<Reason>,
    }
    #[derive(Deserialize)]
    struct Reason {
        #[serde(default)]
        err_code: u64,
        #[serde(default)]
        description: String,
    }
    match serde_json::from_slice(payload) {
        Ok(Answer { error: Some(Reason { err_code: 10060 | 10071, .. }) }) => Proof::Allowed,
        Ok(Answer { error: Some(Reason { err_code, description }) }) => Proof::Error(err_code, description),
        _ => Proof::Other,
    }
}

/// Converts the API's nanoseconds.
fn nanos(value: i64) -> Duration {
    Duration::from_nanos(u64::try_from(value).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::StreamConfig;
    use waljet_pipeline::{Code, Finding};

    fn info(config: StreamConfig) -> StreamInfo {
        let duplicate_window = if config.duplicate_window == 0 { 120_000_000_000 } else { config.duplicate_window };
        let subjects = if config.subjects.is_empty() { vec!["outbox.>".into()] } else { config.subjects };
        StreamInfo {
            config: StreamConfig { duplicate_window, subjects, num_replicas: 3, ..config },
            ..StreamInfo::default()
        }
    }

    fn codes(checks: &[Check]) -> Vec<Code> {
        checks
            .iter()
            .filter_map(|check| if let Finding::Fault(fault) = &check.finding { Some(fault.code) } else { None })
            .collect()
    }

    fn warnings(config: StreamConfig) -> Vec<String> {
        let checks = settings(&info(config), &StreamOptions::default());
        checks
            .into_iter()
            .filter(|check| matches!(check.finding, Finding::Warning { .. }))
            .map(|check| check.name)
            .collect()
    }

    #[test]
    fn a_stream_on_other_subjects_is_a_fault_and_a_wider_one_is_not() {
        let of = |subjects: &[&str]| codes(&super::subjects(&on(subjects, false), &StreamOptions::default(), None));
        assert_eq!(of(&["outbox.>"]), []);
        assert_eq!(of(&["outbox.>", "other.>"]), []);
        assert_eq!(of(&["outbox.*"]), [error::STREAM_SUBJECTS]);
        assert_eq!(of(&["elsewhere"]), [error::STREAM_SUBJECTS]);
        assert_eq!(of(&[">"]), [error::STREAM_CAPTURES_REPLIES]);
        assert_eq!(of(&["outbox.>", "_INBOX.>"]), [error::STREAM_CAPTURES_REPLIES]);
    }

    fn on(subjects: &[&str], allow_batched: bool) -> StreamInfo {
        let subjects = subjects.iter().map(|s| (*s).into()).collect();
        info(StreamConfig { subjects, allow_batched, ..StreamConfig::default() })
    }

    #[test]
    fn the_mode_follows_server_and_stream() {
        let of = |server, subjects: &[&str], allow_batched| match mode(
            server,
            &on(subjects, allow_batched),
            &StreamOptions::default(),
        )
        .finding
        {
            Finding::Good(text) => text,
            Finding::Warning { message, .. } => message,
            Finding::Fault(fault) => fault.message,
        };
        assert!(of("2.15.1", &["outbox.>"], true).starts_with("auto is fast"));
        assert!(of("2.15.1", &["outbox.>", "other.>"], true).starts_with("auto is fast"));
        assert!(of("2.15.1", &["outbox.>"], false).starts_with("auto is chain"));
        assert!(of("2.9.10", &["outbox.>"], false).starts_with("auto is chain"));
        assert!(of("2.9.10", &["outbox.>", "other.>"], false).starts_with("auto is lanes"));
    }

    #[test]
    fn each_setting_that_may_surprise_is_named() {
        let default = StreamConfig::default;
        assert!(warnings(default()).is_empty());
        assert_eq!(warnings(StreamConfig { retention: "workqueue".into(), ..default() }), ["stream retention"]);
        assert_eq!(warnings(StreamConfig { storage: "memory".into(), ..default() }), ["stream storage"]);
        assert_eq!(warnings(StreamConfig { duplicate_window: 1_000_000_000, ..default() }), ["duplicate window"]);
        assert_eq!(warnings(StreamConfig { max_age: 1_000_000_000, ..default() }), ["stream age"]);
        assert_eq!(warnings(StreamConfig { max_bytes: 1, ..default() }), ["stream discard"]);
        assert!(warnings(StreamConfig { max_bytes: 1, discard: "new".into(), ..default() }).is_empty());
        assert_eq!(warnings(StreamConfig { allow_rollup_hdrs: true, ..default() }), ["stream rollup"]);
    }

    #[test]
    fn a_stream_that_cannot_store_is_a_fault() {
        let of = |config| codes(&settings(&info(config), &StreamOptions::default()));
        assert_eq!(of(StreamConfig { sealed: true, ..StreamConfig::default() }), [error::STREAM_SEALED]);
        assert_eq!(of(StreamConfig { no_ack: true, ..StreamConfig::default() }), [error::STREAM_NO_ACK]);
        let mirror = Some(serde_json::json!({ "name": "origin" }));
        assert_eq!(of(StreamConfig { mirror, ..StreamConfig::default() }), [error::STREAM_MIRROR]);
    }

    #[test]
    fn only_the_brokers_refusal_proves_the_permission() {
        assert_eq!(proof(br#"{"error":{"code":400,"err_code":10060,"description":"x"},"stream":"S"}"#), Proof::Allowed);
        assert_eq!(
            proof(br#"{"error":{"code":503,"err_code":10008,"description":"x"}}"#),
            Proof::Error(10008, "x".into())
        );
        assert_eq!(proof(br#"{"stream":"S","seq":1}"#), Proof::Other);
        assert_eq!(proof(b"hello"), Proof::Other);
    }
}
