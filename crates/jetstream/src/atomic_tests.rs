//! Scripted answers to atomic batches.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may stop at the first surprise")]

use super::*;
use crate::api::StreamConfig;
use bytes::Bytes;

const BASE: u64 = 100;

fn units(shared: bool) -> Units {
    Units::new(Rules { id: "id".into(), shared, singly: None }, BASE)
}

fn position(commit: u64, ordinal: u64) -> Position {
    format!("1:1:0/{commit:X}:{ordinal}").parse().unwrap()
}

/// Lets a transaction, or the first part of one, wait.
fn push(units: &mut Units, commit: u64, len: u64, whole: bool, complete: bool) {
    for ordinal in 0..len {
        let message = Queued {
            subject: "outbox.a".into(),
            headers: HeaderMap::new(),
            payload: Bytes::new(),
            position: position(commit, ordinal),
        };
        let placement = Placement { first: ordinal == 0, last: complete && ordinal + 1 == len, whole };
        units.push(message, placement);
    }
}

/// What goes out: reply, batch sequence, whether it commits, expected sequence, whether it says split.
type Shown = (String, Option<String>, bool, Option<String>, bool);

fn begin(units: &mut Units) -> Vec<Shown> {
    let value = |headers: &HeaderMap, name: &str| headers.get(name).map(|value| value.as_str().to_owned());
    let shown = |message: Outgoing| {
        let Outgoing { reply, headers, .. } = message;
        let commits = value(&headers, "Nats-Batch-Commit").is_some();
        let split = value(&headers, "Waljet-Atomic").is_some();
        (reply, value(&headers, "Nats-Batch-Sequence"), commits, value(&headers, "Nats-Expected-Last-Sequence"), split)
    };
    units.begin(Instant::now()).into_iter().map(shown).collect()
}

fn take(units: &mut Units, token: u64, answer: &Answer) -> Turn {
    units.take(token, answer, *answer == Answer::Unknown, Instant::now())
}

fn over(count: u64, sequence: u64) -> Answer {
    Answer::BatchOver { count, sequence, duplicate: false }
}

fn some(text: &str) -> Option<String> {
    Some(text.to_owned())
}

#[test]
fn a_transaction_is_one_batch_that_names_its_sequence_and_commits_with_its_last_message() {
    let mut units = units(false);
    push(&mut units, 10, 3, true, true);
    push(&mut units, 20, 1, true, true);
    let expected = [
        ("0".to_owned(), some("1"), false, some("100"), false),
        ("1".to_owned(), some("2"), false, None, false),
        ("2".to_owned(), some("3"), true, None, false),
        // One message needs no batch, and follows without waiting.
        ("3".to_owned(), None, false, some("103"), false),
    ];
    assert_eq!(begin(&mut units), expected);
    assert!(matches!(take(&mut units, 0, &Answer::Unknown), Turn::On));
    assert!(matches!(take(&mut units, 2, &over(3, 103)), Turn::Stored(Ack { token: 2, sequence: 103, .. })));
}

#[test]
fn what_is_not_complete_is_kept_back_and_all_behind_it() {
    let mut units = units(false);
    push(&mut units, 10, 3, true, false);
    assert_eq!(begin(&mut units), []);
}

#[test]
fn a_part_of_a_transaction_says_so() {
    let mut units = units(false);
    push(&mut units, 10, 2, false, true);
    assert!(begin(&mut units).iter().all(|(_, _, _, _, split)| *split));
}

#[test]
fn four_batches_are_under_way_at_most_and_one_beside_another_publisher() {
    for (shared, most) in [(false, 4), (true, 1)] {
        let mut units = units(shared);
        for commit in 1..=6 {
            push(&mut units, commit * 16, 2, true, true);
        }
        assert_eq!(begin(&mut units).len(), most * 2);
        assert_eq!(begin(&mut units), []);
        units.acknowledged(1, BASE + 2, Instant::now());
        let next = begin(&mut units);
        let expected = (!shared).then(|| (BASE + most as u64 * 2).to_string());
        assert_eq!((next.len(), &next[0].3), (2, &expected));
    }
}

#[test]
fn a_batch_that_is_refused_twice_for_its_ids_goes_message_by_message() {
    let mut memory = Memory::default();
    let duplicate = Answer::Error { err_code: 10201, description: String::new() };
    for _ in 0..2 {
        assert_eq!(memory.singly(), None);
        let mut units = units(false);
        push(&mut units, 10, 2, true, true);
        begin(&mut units);
        assert!(matches!(take(&mut units, 1, &duplicate), Turn::Alone));
        memory.ended(&units);
    }
    assert_eq!(memory.singly(), Some(position(10, 0)));
    let mut units = Units::new(Rules { id: "id".into(), shared: false, singly: memory.singly() }, BASE);
    push(&mut units, 10, 2, true, true);
    push(&mut units, 20, 2, true, true);
    assert_eq!(begin(&mut units), [("0".to_owned(), None, false, some("100"), true)]);
    // A duplicate takes no sequence.
    units.acknowledged(0, BASE, Instant::now());
    assert_eq!(begin(&mut units), [("1".to_owned(), None, false, some("100"), true)]);
    units.acknowledged(1, BASE + 1, Instant::now());
    assert_eq!(begin(&mut units)[0].3, some("101"));
    assert_eq!(memory.count(units.take_stored().unwrap()), (0, 1));
}

#[test]
fn a_server_that_takes_smaller_batches_is_believed() {
    for (description, most) in [("atomic publish batch is too large: 50", 50), ("too large", 100)] {
        let mut memory = Memory::default();
        let mut units = units(false);
        push(&mut units, 10, 200, true, true);
        begin(&mut units);
        take(&mut units, 60, &Answer::Error { err_code: 10199, description: description.into() });
        memory.ended(&units);
        assert_eq!(memory.most, most);
    }
}

#[test]
fn a_server_that_acknowledges_messages_of_a_batch_knows_none() {
    let mut units = units(false);
    push(&mut units, 10, 2, true, true);
    begin(&mut units);
    match take(&mut units, 0, &Answer::Stored { sequence: 101, duplicate: false }) {
        Turn::Failed(fault) => assert_eq!((fault.code, fault.action), (error::STREAM_NOT_ATOMIC, Action::Retry)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_stands_against_atomic_batches_is_named_with_its_remedy() {
    let info = |allow_atomic| StreamInfo {
        config: StreamConfig { allow_atomic, ..StreamConfig::default() },
        ..StreamInfo::default()
    };
    let missing = |server, allowed| hindrance(server, &info(allowed), "S").map(|(why, _)| why);
    assert_eq!(missing("2.12.1", true), None);
    assert!(missing("2.12.0", true).unwrap().contains("2.12.1"));
    assert!(missing("2.15.1", false).unwrap().contains("allow_atomic"));
}
