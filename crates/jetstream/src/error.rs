//! Every fault of the sink, and the one table that says what an answer of the broker obliges.

use waljet_pipeline::{Action, Code, Fault};

/// The server could not be reached.
pub const UNREACHABLE: Code = Code("nats-unreachable");
/// The server refused the credentials.
pub const AUTHENTICATION: Code = Code("nats-authentication");
/// The TLS handshake failed.
pub const TLS: Code = Code("nats-tls");
/// A server address, a credentials file or a certificate file cannot be used.
pub const OPTIONS: Code = Code("nats-options");
/// The connection was lost.
pub const DISCONNECTED: Code = Code("nats-disconnected");
/// The user lacks a permission.
pub const PERMISSION: Code = Code("nats-permission");
/// The server is older than what the sink needs.
pub const SERVER_VERSION: Code = Code("nats-server-version");
/// JetStream does not answer.
pub const JETSTREAM_UNAVAILABLE: Code = Code("jetstream-unavailable");
/// The broker did not answer in time.
pub const TIMEOUT: Code = Code("nats-timeout");
/// The broker gave an answer that was not understood.
pub const UNEXPECTED_ANSWER: Code = Code("nats-unexpected-answer");
/// The broker answered with an error that has no code of its own here.
pub const BROKER: Code = Code("nats-broker-error");
/// There is no stream of the configured name.
pub const STREAM_MISSING: Code = Code("stream-missing");
/// The stream has no leader.
pub const STREAM_LEADERLESS: Code = Code("stream-without-leader");
/// The stream does not take the subjects.
pub const STREAM_SUBJECTS: Code = Code("stream-subjects");
/// The subjects belong to another stream.
pub const STREAM_OVERLAP: Code = Code("stream-overlap");
/// The stream takes replies of the broker.
pub const STREAM_CAPTURES_REPLIES: Code = Code("stream-captures-replies");
/// The stream does not acknowledge.
pub const STREAM_NO_ACK: Code = Code("stream-no-ack");
/// The stream is sealed.
pub const STREAM_SEALED: Code = Code("stream-sealed");
/// The stream is a mirror.
pub const STREAM_MIRROR: Code = Code("stream-mirror");
/// The stream is full.
pub const STREAM_FULL: Code = Code("stream-full");
/// The stream could not be created.
pub const STREAM_CREATE: Code = Code("stream-create");
/// The stream was recreated, or lost messages.
pub const STREAM_WENT_BACK: Code = Code("stream-went-back");
/// An account or a server has no room left.
pub const RESOURCES: Code = Code("jetstream-resources");
/// The broker drops what it cannot take in.
pub const OVERLOADED: Code = Code("jetstream-overloaded");
/// The stream's last sequence is not the predicted one.
pub const FENCE: Code = Code("publish-fence");
/// A batch ended before its last message.
pub const BATCH: Code = Code("publish-batch");
/// The stream takes no batches.
pub const STREAM_NO_BATCHES: Code = Code("stream-without-batches");
/// The stream takes no atomic batches.
pub const STREAM_NOT_ATOMIC: Code = Code("stream-without-atomic-batches");
/// An atomic batch holds an id that the stream has, or has it twice.
pub const BATCH_DUPLICATE: Code = Code("publish-batch-duplicate");
/// A copy of the message is being stored.
pub const DUPLICATE_IN_PROCESS: Code = Code("publish-in-process");
/// An acknowledgement did not come in time.
pub const ACK_TIMEOUT: Code = Code("publish-ack-timeout");
/// An acknowledgement came out of order.
pub const ACK_ORDER: Code = Code("publish-ack-order");
/// An acknowledgement came from another stream.
pub const ACK_STREAM: Code = Code("publish-ack-stream");
/// The way of publishing changes.
pub const MODE_CHANGE: Code = Code("publish-mode-change");
/// The message exceeds a size limit.
pub const MESSAGE_TOO_LARGE: Code = Code("message-too-large");
/// The headers exceed a size limit.
pub const HEADERS_TOO_LARGE: Code = Code("headers-too-large");
/// The subject exceeds a size limit.
pub const SUBJECT_TOO_LONG: Code = Code("subject-too-long");
/// A header cannot be sent.
pub const HEADER_INVALID: Code = Code("header-invalid");
/// The sink was used against its contract.
pub const MISUSE: Code = Code("sink-misuse");

/// All codes of this crate, each with what it means and what to do.
pub const CODES: &[(Code, &str)] = &[
    (
        UNREACHABLE,
        "No NATS server of `nats.url` could be reached. Start it, or correct the address; waljet goes on trying.",
    ),
    (
        AUTHENTICATION,
        "The NATS server refused the credentials. Correct user, password, token, nkey or credentials file; they are read again at each attempt.",
    ),
    (
        TLS,
        "The TLS handshake with the NATS server failed. Compare `nats.tls` (CA file, client certificate, `first`) with the server's `tls` block, and the host name in `nats.url` with its certificate.",
    ),
    (
        OPTIONS,
        "A NATS server address, a credentials file or a certificate file cannot be used. Correct the setting that the message names.",
    ),
    (
        DISCONNECTED,
        "The connection to the NATS server was lost. waljet connects again, reads what the stream holds and goes on from there.",
    ),
    (
        PERMISSION,
        "The NATS user lacks a permission. Add the subject that the message names to the user's `publish` or `subscribe` permissions; waljet goes on by itself.",
    ),
    (SERVER_VERSION, "The NATS server is too old. Upgrade it to 2.9 or newer."),
    (
        JETSTREAM_UNAVAILABLE,
        "JetStream does not answer: it is off, not enabled for the account, or its cluster has no leader. Enable it (`jetstream {}` in the server's configuration, and for the account), or wait for the election; check `nats.domain` too.",
    ),
    (
        TIMEOUT,
        "The NATS server did not answer a request in time. It is overloaded, paused or cut off; waljet goes on trying.",
    ),
    (
        UNEXPECTED_ANSWER,
        "The NATS server gave an answer that was not understood. Check that nothing but JetStream answers on the subject, and report it with the server's version.",
    ),
    (
        BROKER,
        "The NATS server answered with an error. The message holds its text and its error code; waljet goes on trying.",
    ),
    (
        STREAM_MISSING,
        "There is no stream of the configured name in this account and domain. Create it with `waljet init`.",
    ),
    (
        STREAM_LEADERLESS,
        "The stream has no leader: too few of its replicas are running. Start the missing servers; `nats stream info` shows the replicas.",
    ),
    (
        STREAM_SUBJECTS,
        "The stream does not take the subjects that events are routed to. Add them with `nats stream edit`, or change `route.subject`.",
    ),
    (
        STREAM_OVERLAP,
        "Another stream takes subjects that events are routed to, and no two streams may share a subject. Edit its subjects, or choose another prefix in `route.subject`.",
    ),
    (
        STREAM_CAPTURES_REPLIES,
        "The stream's subjects match replies of the broker (`>` or an inbox), so that acknowledgements would be stored as messages. Narrow its subjects with `nats stream edit`.",
    ),
    (
        STREAM_NO_ACK,
        "The stream was created with `no_ack`, so that storing is never acknowledged. Set it off with `nats stream edit --ack`.",
    ),
    (STREAM_SEALED, "The stream is sealed: it takes no message ever again. Create another one and set `nats.stream`."),
    (STREAM_MIRROR, "The stream is a mirror: it takes messages from its origin only. Set `nats.stream` to the origin."),
    (
        STREAM_FULL,
        "The stream is at its limit and refuses new messages. Raise the limit with `nats stream edit`, or let consumers or `nats stream purge` make room; waljet goes on by itself.",
    ),
    (STREAM_CREATE, "The stream could not be created. The message holds the broker's reason."),
    (
        STREAM_WENT_BACK,
        "The stream was deleted and created again, or holds less than it had acknowledged. Events may be missing: compare the table with the stream, publish what is missing by hand, then go on with `waljet run --accept-gap`.",
    ),
    (
        RESOURCES,
        "The account, the server or the disk has no room left for the stream. Raise the account's or the server's JetStream limits, or free space; waljet goes on by itself.",
    ),
    (
        OVERLOADED,
        "The broker takes in more than it can store and dropped messages. waljet slows down and sends them again.",
    ),
    (
        FENCE,
        "The stream's last sequence was not the predicted one: something was lost on the way, or another publisher writes to the stream. waljet reads the stream's tail and goes on from there. If it keeps happening, give the outbox a stream of its own.",
    ),
    (
        BATCH,
        "The broker ended a batch before its last message: something was lost on the way, or the stream has another leader. waljet reads what the stream holds and goes on from there. In mode `auto`, three times in a row without progress lead to `chain` or `serial` for ten minutes.",
    ),
    (
        STREAM_NO_BATCHES,
        "`publisher.mode` is `fast`, but the stream takes no fast-ingest batches: they need nats-server 2.14 or newer, and `allow_batched` in the stream's settings. Upgrade or edit the stream, waljet goes on by itself; or set `publisher.mode` to `auto`.",
    ),
    (
        STREAM_NOT_ATOMIC,
        "`publisher.mode` is `atomic`, but the stream takes no atomic batches: they need nats-server 2.12.1 or newer, and `allow_atomic` in the stream's settings. Upgrade or edit the stream, waljet goes on by itself; or set `publisher.mode` to `auto`.",
    ),
    (
        BATCH_DUPLICATE,
        "The broker refused a transaction's batch because it knows the id of one of its events, or because two of them have the same. waljet reads the stream back: what is stored is skipped. Where it is not stored, the ids of two events are the same, and the transaction's events are published one by one, with the header `Waljet-Atomic: split`; the broker drops the second event of an id. Make the ids unique.",
    ),
    (
        DUPLICATE_IN_PROCESS,
        "A copy of the message that was sent earlier is still being stored. waljet sends it again until its outcome is known.",
    ),
    (
        ACK_TIMEOUT,
        "The broker did not acknowledge a message in time, which does not say whether it is stored. waljet reads the stream's tail and goes on from there.",
    ),
    (
        ACK_ORDER,
        "Acknowledgements came out of order, so that one may be lost. waljet reads the stream's tail and goes on from there.",
    ),
    (
        ACK_STREAM,
        "A message was acknowledged by another stream than the configured one. Remove the subject from that stream with `nats stream edit`.",
    ),
    (MODE_CHANGE, "The publisher changes between `fast`, `chain` and `serial` by itself. Nothing is to be done."),
    (
        MESSAGE_TOO_LARGE,
        "Headers and payload together exceed the server's `max_payload` or the stream's `max_msg_size`. Raise the limit, and the event is published within 30 s by itself; or write smaller events.",
    ),
    (HEADERS_TOO_LARGE, "The headers exceed the 65,535 bytes that JetStream takes. Write fewer or shorter headers."),
    (
        SUBJECT_TOO_LONG,
        "Subject and reply subject exceed what the protocol takes in one line (4,096 bytes). Shorten `route.subject` or `nats.inbox_prefix`.",
    ),
    (
        HEADER_INVALID,
        "A header's name or value cannot be sent: an empty name, a space, a colon, a control character, a line break or a name that NATS keeps for itself.",
    ),
    (MISUSE, "waljet called the sink against its contract. This is a defect: report it with the message."),
];

/// What an answer of the broker obliges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It may heal.
    Retry(Code),
    /// The stream is not where the message expected it: look again, then send again.
    Fence,
    /// This message can never be stored.
    Refuse(Code),
}

/// Classifies an error by JetStream's own error code.
///
/// The `code` beside it (400, 503) says nothing: a full account is a 400. Whatever is not listed may heal, so that
/// doubt never loses an event.
pub(crate) fn classify(err_code: u64) -> Verdict {
    match err_code {
        10054 => Verdict::Refuse(MESSAGE_TOO_LARGE),
        10097 => Verdict::Refuse(HEADERS_TOO_LARGE),
        10070 | 10071 | 10164 => Verdict::Fence,
        10002 | 10023 | 10028 | 10047 => Verdict::Retry(RESOURCES),
        10004 | 10006 | 10008 | 10009 | 10039 | 10076 => Verdict::Retry(JETSTREAM_UNAVAILABLE),
        10059 => Verdict::Retry(STREAM_MISSING),
        10060 => Verdict::Retry(STREAM_SUBJECTS),
        10077 => Verdict::Retry(STREAM_FULL),
        10109 => Verdict::Retry(STREAM_SEALED),
        10118 => Verdict::Retry(STREAM_LEADERLESS),
        10158 => Verdict::Retry(DUPLICATE_IN_PROCESS),
        10167 | 10210 | 10211 => Verdict::Retry(OVERLOADED),
        10174 => Verdict::Retry(STREAM_NOT_ATOMIC),
        10201 => Verdict::Retry(BATCH_DUPLICATE),
        10205 => Verdict::Retry(STREAM_NO_BATCHES),
        10176 | 10199 | 10208 => Verdict::Retry(BATCH),
        _ => Verdict::Retry(BROKER),
    }
}

/// Returns what mends a fault of `code` that concerns `stream`, as a command or a setting.
pub(crate) fn remedy(code: Code, stream: &str) -> Option<String> {
    Some(match code {
        STREAM_MISSING => "waljet init".to_owned(),
        STREAM_FULL => format!("nats stream edit {stream} --max-bytes=SIZE, or nats stream purge {stream} --keep=N"),
        STREAM_SEALED => format!("create another stream: a sealed one takes no message ever again (nats stream info {stream})"),
        STREAM_SUBJECTS => format!("nats stream edit {stream} --subjects=SUBJECT,..."),
        STREAM_LEADERLESS => format!("start the missing servers; see nats stream info {stream}"),
        RESOURCES => "nats account info shows the limits; raise max_file of the server or of the account, or free space".to_owned(),
        JETSTREAM_UNAVAILABLE => {
            "enable JetStream on the server and for the account, or wait for the cluster's leader; see nats server check jetstream".to_owned()
        }
        MESSAGE_TOO_LARGE => format!("raise max_payload of the server and: nats stream edit {stream} --max-msg-size=SIZE"),
        HEADERS_TOO_LARGE => "write fewer or shorter headers".to_owned(),
        STREAM_NO_BATCHES => format!("nats stream edit {stream} --interactive, and set allow_batched: true"),
        STREAM_NOT_ATOMIC => format!("nats stream edit {stream} --interactive, and set allow_atomic: true"),
        _ => return None,
    })
}

/// Makes the fault for an error answer of the broker that is about `what`.
pub(crate) fn broker_fault(err_code: u64, description: &str, what: &str, stream: &str) -> Fault {
    let (code, action) = match classify(err_code) {
        Verdict::Retry(code) => (code, Action::Retry),
        Verdict::Fence => (FENCE, Action::Retry),
        Verdict::Refuse(code) => (code, Action::Refuse),
    };
    let fault = Fault::new(code, action, format!("{what}: the broker answered {description:?} (error {err_code})"));
    match remedy(code, stream) {
        Some(hint) => fault.hint(hint),
        None => fault,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_code_of_the_broker_has_its_verdict() {
        let table = [
            (10002, Verdict::Retry(RESOURCES)),
            (10004, Verdict::Retry(JETSTREAM_UNAVAILABLE)),
            (10006, Verdict::Retry(JETSTREAM_UNAVAILABLE)),
            (10008, Verdict::Retry(JETSTREAM_UNAVAILABLE)),
            (10009, Verdict::Retry(JETSTREAM_UNAVAILABLE)),
            (10023, Verdict::Retry(RESOURCES)),
            (10028, Verdict::Retry(RESOURCES)),
            (10039, Verdict::Retry(JETSTREAM_UNAVAILABLE)),
            (10047, Verdict::Retry(RESOURCES)),
            (10054, Verdict::Refuse(MESSAGE_TOO_LARGE)),
            (10059, Verdict::Retry(STREAM_MISSING)),
            (10060, Verdict::Retry(STREAM_SUBJECTS)),
            (10070, Verdict::Fence),
            (10071, Verdict::Fence),
            (10076, Verdict::Retry(JETSTREAM_UNAVAILABLE)),
            (10077, Verdict::Retry(STREAM_FULL)),
            (10097, Verdict::Refuse(HEADERS_TOO_LARGE)),
            (10109, Verdict::Retry(STREAM_SEALED)),
            (10118, Verdict::Retry(STREAM_LEADERLESS)),
            (10158, Verdict::Retry(DUPLICATE_IN_PROCESS)),
            (10164, Verdict::Fence),
            (10167, Verdict::Retry(OVERLOADED)),
            (10174, Verdict::Retry(STREAM_NOT_ATOMIC)),
            (10176, Verdict::Retry(BATCH)),
            (10199, Verdict::Retry(BATCH)),
            (10201, Verdict::Retry(BATCH_DUPLICATE)),
            (10205, Verdict::Retry(STREAM_NO_BATCHES)),
            (10208, Verdict::Retry(BATCH)),
            (10210, Verdict::Retry(OVERLOADED)),
            (10211, Verdict::Retry(OVERLOADED)),
        ];
        for (err_code, verdict) in table {
            assert_eq!(classify(err_code), verdict, "{err_code}");
        }
        let listed: Vec<u64> = table.iter().map(|(err_code, _)| *err_code).collect();
        for err_code in (0..=500).chain(10_000..=10_400).filter(|code| !listed.contains(code)) {
            assert_eq!(classify(err_code), Verdict::Retry(BROKER), "{err_code}");
        }
    }

    #[test]
    fn codes_are_unique_and_described() {
        for (index, (code, text)) in CODES.iter().enumerate() {
            assert!(text.ends_with('.') && text.len() > 30, "{code}");
            assert!(!CODES[..index].iter().any(|(other, _)| other == code), "{code} is listed twice");
            assert!(code.0.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{code}");
        }
    }

    #[test]
    fn a_full_stream_is_retried_and_a_large_message_refused() {
        assert_eq!(broker_fault(10077, "maximum bytes exceeded", "publish", "S").action, Action::Retry);
        assert_eq!(broker_fault(10054, "message size exceeds maximum allowed", "publish", "S").action, Action::Refuse);
        assert_eq!(broker_fault(1, "x", "publish", "S").code, BROKER);
    }
}
