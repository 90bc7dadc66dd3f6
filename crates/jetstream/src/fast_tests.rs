//! Scripted answers to batches.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may stop at the first surprise")]

use super::*;
use crate::api::StreamConfig;
use waljet_pipeline::Code;

const BASE: u64 = 100;

fn batches(window: usize, replicated: bool) -> Batches {
    rules(Rules { id: "id".into(), window, replicated, shared: false, duplicate_window: ROOMY_WINDOW })
}

fn rules(rules: Rules) -> Batches {
    Batches::new(rules)
}

fn position(ordinal: u64) -> Position {
    format!("1:1:0/10:{ordinal}").parse().unwrap()
}

/// Lets `count` messages wait.
fn push(batches: &mut Batches, count: u64) {
    for ordinal in batches.next..batches.next + count {
        batches.push(Queued {
            subject: "outbox.a".into(),
            headers: HeaderMap::new(),
            payload: Bytes::new(),
            position: position(ordinal),
        });
    }
}

/// Begins a batch and returns its reply subjects.
fn begin(batches: &mut Batches) -> Vec<String> {
    let batch = batches.begin(BASE, Instant::now()).unwrap_or_default();
    batch.into_iter().map(|message| message.reply).collect()
}

fn take(batches: &mut Batches, reply: &str, answer: Answer) -> Turn {
    batches.take(reply, answer, Instant::now())
}

/// The end of a batch of which all came in.
fn over(count: u64, sequence: u64) -> Answer {
    Answer::BatchOver { count, sequence, duplicate: false }
}

fn stored(turn: Turn) -> (u64, u64) {
    match turn {
        Turn::Stored(ack) => (ack.token, ack.sequence),
        other => panic!("{other:?}"),
    }
}

fn failure(turn: Turn) -> Code {
    match turn {
        Turn::Failed(fault) => {
            assert_eq!(fault.action, Action::Retry);
            fault.code
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_batch_begins_goes_on_and_commits_with_its_last_message() {
    let mut batches = batches(1024, false);
    push(&mut batches, 3);
    let replies = begin(&mut batches);
    assert_eq!(replies, ["id-1.256.fail.1.0.$FI", "id-1.256.fail.2.1.$FI", "id-1.256.fail.3.2.$FI"]);
    assert!(replies.iter().all(|reply| reply.len() <= batches.reply_len()));
}

#[test]
fn a_batch_names_the_sequence_it_begins_at_and_every_one_where_ids_are_forgotten_soon() {
    let short = Duration::from_secs(1);
    for (shared, duplicate_window, named) in [
        (false, ROOMY_WINDOW, [Some("100"), None, None]),
        (false, short, [Some("100"), Some("101"), Some("102")]),
        (true, short, [None; 3]),
    ] {
        let mut batches = rules(Rules { id: "id".into(), window: 16, replicated: false, shared, duplicate_window });
        push(&mut batches, 3);
        for (message, named) in batches.begin(BASE, Instant::now()).unwrap().iter().zip(named) {
            assert_eq!(message.headers.get("Nats-Expected-Last-Sequence").map(|value| value.as_str()), named);
        }
    }
}

#[test]
fn a_lone_message_is_a_batch_of_its_own() {
    let mut batches = batches(1024, false);
    push(&mut batches, 1);
    assert_eq!(begin(&mut batches), ["id-1.256.fail.1.2.$FI"]);
    assert_eq!(stored(take(&mut batches, "id-1.256.fail.1.2.$FI", over(1, 101))), (0, 101));
}

#[test]
fn the_next_batch_waits_for_the_end_of_the_one_before() {
    let mut batches = batches(1024, false);
    push(&mut batches, 2);
    assert_eq!(begin(&mut batches).len(), 2);
    push(&mut batches, 3);
    assert!(begin(&mut batches).is_empty());
    assert!(matches!(take(&mut batches, "id-1.256.fail.1.0.$FI", Answer::BatchFlow { count: 0 }), Turn::On));
    assert!(begin(&mut batches).is_empty());
    assert_eq!(stored(take(&mut batches, "id-1.256.fail.2.2.$FI", over(2, 102))), (1, 102));
    assert_eq!(begin(&mut batches), ["id-2.256.fail.1.0.$FI", "id-2.256.fail.2.1.$FI", "id-2.256.fail.3.2.$FI"]);
    assert_eq!(stored(take(&mut batches, "id-2.256.fail.3.2.$FI", over(3, 105))), (4, 105));
    assert!(begin(&mut batches).is_empty() && batches.deadline(Duration::ZERO).is_none());
}

#[test]
fn acknowledgements_within_a_batch_are_cumulative_where_one_server_stores_it() {
    let mut batches = batches(16, false);
    push(&mut batches, 16);
    begin(&mut batches);
    assert_eq!(stored(take(&mut batches, "id-1.4.fail.4.1.$FI", Answer::BatchFlow { count: 4 })).0, 3);
    assert_eq!(stored(take(&mut batches, "id-1.4.fail.12.1.$FI", Answer::BatchFlow { count: 12 })).0, 11);
    // Asked again, the broker says it again.
    assert!(matches!(take(&mut batches, "id-1.4.fail.16.4.$FI", Answer::BatchFlow { count: 12 }), Turn::On));
    assert_eq!(stored(take(&mut batches, "id-1.4.fail.16.2.$FI", over(16, 116))).0, 15);
}

#[test]
fn several_servers_confirm_only_a_whole_batch_and_half_a_window_fills_one() {
    let mut batches = batches(8, true);
    push(&mut batches, 3);
    assert!(!batches.is_full());
    push(&mut batches, 3);
    assert!(batches.is_full());
    assert_eq!(begin(&mut batches).len(), 4);
    assert!(matches!(take(&mut batches, "id-1.2.fail.2.1.$FI", Answer::BatchFlow { count: 2 }), Turn::On));
    assert_eq!(stored(take(&mut batches, "id-1.2.fail.4.2.$FI", over(4, 104))), (3, 104));
    assert_eq!(begin(&mut batches), ["id-2.2.fail.1.0.$FI", "id-2.2.fail.2.2.$FI"]);
}

#[test]
fn a_batch_with_copies_in_it_is_proven_by_its_last_message_or_not_at_all() {
    let found = |ordinal| Stored { sequence: 103, position: Some(position(ordinal)), ..Stored::default() };
    for (found, proven) in [(Some(found(3)), true), (Some(found(2)), false), (None, false)] {
        let mut batches = batches(8, true);
        push(&mut batches, 4);
        begin(&mut batches);
        assert!(matches!(take(&mut batches, "id-1.2.fail.4.2.$FI", over(4, 103)), Turn::Prove(103)));
        assert!(begin(&mut batches).is_empty() && batches.ask_at().is_none());
        let turn = batches.prove(found.as_ref());
        if proven {
            assert_eq!(stored(turn), (3, 103));
        } else {
            assert_eq!(failure(turn), error::DUPLICATE_IN_PROCESS);
        }
    }
}

#[test]
fn a_batch_of_copies_only_proves_nothing_on_several_servers() {
    let mut batches = batches(8, true);
    push(&mut batches, 4);
    begin(&mut batches);
    assert_eq!(failure(take(&mut batches, "id-1.2.fail.4.2.$FI", over(4, 0))), error::DUPLICATE_IN_PROCESS);
    let mut batches = self::batches(8, false);
    push(&mut batches, 4);
    begin(&mut batches);
    assert_eq!(stored(take(&mut batches, "id-1.2.fail.4.2.$FI", over(4, 0))), (3, BASE));
}

#[test]
fn beside_other_publishers_the_sequence_proves_nothing_by_itself() {
    let mut batches = batches(8, true);
    push(&mut batches, 8);
    begin(&mut batches);
    assert!(matches!(take(&mut batches, "id-1.2.fail.4.2.$FI", over(4, 105)), Turn::Prove(105)));
    assert!(batches.take_foreign() && !batches.take_foreign());
    batches.prove(Some(&Stored { sequence: 105, position: Some(position(3)), ..Stored::default() }));
    assert_eq!(begin(&mut batches).len(), 4);
    assert!(matches!(take(&mut batches, "id-2.2.fail.4.2.$FI", over(4, BASE + 4)), Turn::Prove(_)));
}

#[test]
fn a_batch_that_took_fewer_sequences_than_messages_had_copies_in_it() {
    let copies = |sequence| {
        let mut batches = batches(8, false);
        push(&mut batches, 3);
        let replies = begin(&mut batches);
        match take(&mut batches, &replies[2], over(3, sequence)) {
            Turn::Stored(ack) => ack.duplicate,
            other => panic!("{other:?}"),
        }
    };
    assert!(!copies(BASE + 3));
    assert!(copies(BASE + 2));
    assert!(copies(0));
}

#[test]
fn a_lone_copy_is_acknowledged_as_one() {
    let mut batches = batches(8, true);
    push(&mut batches, 1);
    begin(&mut batches);
    let answer = Answer::BatchOver { count: 1, sequence: 77, duplicate: true };
    match take(&mut batches, "id-1.2.fail.1.2.$FI", answer) {
        Turn::Stored(ack) => assert_eq!(ack, Ack { token: 0, sequence: 77, duplicate: true }),
        other => panic!("{other:?}"),
    }
}

#[test]
fn whatever_ends_a_batch_early_ends_the_generation() {
    for answer in [Answer::BatchGap { expected: 3, found: 4 }, over(2, 102), over(0, 0)] {
        let mut batches = batches(16, false);
        push(&mut batches, 4);
        begin(&mut batches);
        assert_eq!(failure(take(&mut batches, "id-1.4.fail.4.2.$FI", answer)), error::BATCH);
    }
}

#[test]
fn a_server_that_takes_messages_one_by_one_is_found_out() {
    let mut batches = batches(16, false);
    push(&mut batches, 4);
    begin(&mut batches);
    let answer = Answer::Stored { sequence: 101, duplicate: false };
    assert_eq!(failure(take(&mut batches, "id-1.4.fail.1.0.$FI", answer)), error::STREAM_NO_BATCHES);
}

#[test]
fn an_error_is_about_the_message_that_its_reply_subject_names() {
    let mut batches = batches(16, false);
    push(&mut batches, 2);
    begin(&mut batches);
    stored(take(&mut batches, "id-1.4.fail.2.2.$FI", over(2, 102)));
    push(&mut batches, 5);
    begin(&mut batches);
    let error = Answer::Error { err_code: 10054, description: "message size exceeds maximum allowed".into() };
    match take(&mut batches, "id-2.4.fail.3.1.$FI", error.clone()) {
        Turn::Other(token, answer) => assert_eq!((token, answer), (Some(4), error)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_belongs_to_no_batch_is_unknown_and_what_belongs_to_an_earlier_one_is_past() {
    let mut batches = batches(16, false);
    push(&mut batches, 2);
    begin(&mut batches);
    stored(take(&mut batches, "id-1.4.fail.2.2.$FI", over(2, 102)));
    let error = || Answer::Error { err_code: 10208, description: "batch publish ID unknown".into() };
    assert!(matches!(take(&mut batches, "id-1.4.fail.2.4.$FI", error()), Turn::On));
    push(&mut batches, 2);
    begin(&mut batches);
    assert!(matches!(take(&mut batches, "id-1.4.fail.2.4.$FI", error()), Turn::On));
    for reply in ["id-2.4.fail.3.1.$FI", "id-3.4.fail.1.1.$FI", "id-2.4.fail.0.1.$FI", "xx-2.4.fail.1.1.$FI", "7", ""] {
        let turn = take(&mut batches, reply, Answer::BatchFlow { count: 1 });
        assert!(matches!(turn, Turn::Other(None, Answer::Unknown)), "{reply}: {turn:?}");
    }
    let turn = take(&mut batches, "id-2.4.fail.2.2.$FI", over(3, 105));
    assert!(matches!(turn, Turn::Other(_, Answer::BatchOver { .. })), "{turn:?}");
}

#[test]
fn a_silent_batch_is_asked_after_again_and_again_and_progress_moves_its_deadline() {
    let start = Instant::now();
    let limit = Duration::from_secs(5);
    let mut batches = batches(16, false);
    assert!(batches.ask_at().is_none() && batches.ask(start).is_none());
    push(&mut batches, 16);
    batches.begin(BASE, start).unwrap();
    assert_eq!((batches.ask_at(), batches.deadline(limit)), (Some(start + ASK_AFTER), Some(start + limit)));
    let (subject, reply) = batches.ask(start + ASK_AFTER).unwrap();
    assert_eq!((subject.as_str(), reply.as_str()), ("outbox.a", "id-1.4.fail.16.4.$FI"));
    assert_eq!(batches.ask_at(), Some(start + ASK_AFTER * 2));
    let later = start + Duration::from_secs(3);
    batches.take("id-1.4.fail.16.4.$FI", Answer::BatchFlow { count: 0 }, later);
    assert_eq!(batches.deadline(limit), Some(start + limit));
    batches.take("id-1.4.fail.4.1.$FI", Answer::BatchFlow { count: 4 }, later);
    assert_eq!(batches.deadline(limit), Some(later + limit));
}

#[test]
fn batches_need_server_and_stream() {
    let info = |allow_batched| StreamInfo {
        config: StreamConfig { allow_batched, ..StreamConfig::default() },
        ..StreamInfo::default()
    };
    let missing = |server, allowed| hindrance(server, &info(allowed), "S").map(|(why, hint)| format!("{why}; {hint}"));
    assert_eq!(missing("2.14.0", true), None);
    assert_eq!(missing("2.15.1", true), None);
    assert!(missing("2.9.10", true).unwrap().contains("2.9.10"));
    assert!(missing("", true).is_some());
    assert!(missing("2.15.1", false).unwrap().contains("allow_batched"));
}

#[test]
fn a_stream_that_refuses_by_subject_is_sent_no_batches() {
    let of = |discard: &str, discard_new_per_subject, max_msgs_per_subject| {
        let discard = discard.to_owned();
        let more = StreamConfig { discard, discard_new_per_subject, max_msgs_per_subject, ..StreamConfig::default() };
        let config = StreamConfig { allow_batched: true, ..more };
        hindrance("2.15.1", &StreamInfo { config, ..StreamInfo::default() }, "S").is_some()
    };
    assert!(of("new", true, 2));
    assert!(!of("new", false, 2));
    assert!(!of("old", true, 2));
    assert!(!of("new", true, -1));
}
