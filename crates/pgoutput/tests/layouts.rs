//! Each message, byte by byte as the manual lays it out (section 54.9), written without the encoder.

#![allow(clippy::unwrap_used, reason = "a message that cannot be decoded should stop the test")]

use bytes::Bytes;
use waljet_pgoutput::{
    Begin, BeginPrepare, Column, Commit, CommitPrepared, DecodeFault, Decoder, Delete, Insert, LogicalMessage, Lsn,
    Message, Oid, OldTuple, Origin, Prepare, ProtocolVersion, Relation, ReplicaIdentity, RollbackPrepared, StreamAbort,
    StreamCommit, StreamStart, Streaming, Timestamp, Truncate, Tuple, Type, Update, Value, Xid,
};

/// A position, `12/3456789A`, and its bytes.
const LSN: (Lsn, [u8; 8]) = (Lsn(0x12_3456_789A), [0, 0, 0, 0x12, 0x34, 0x56, 0x78, 0x9a]);
/// A later position, and its bytes.
const END: (Lsn, [u8; 8]) = (Lsn(0x12_3456_78D0), [0, 0, 0, 0x12, 0x34, 0x56, 0x78, 0xd0]);
/// A time before 2000, and its bytes.
const TIME: (Timestamp, [u8; 8]) = (Timestamp(-2), [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe]);
/// A time after 2000, and its bytes.
const LATER: (Timestamp, [u8; 8]) = (Timestamp(0x0002_A300_0000_0000), [0, 2, 0xa3, 0, 0, 0, 0, 0]);
/// A transaction id, and its bytes.
const XID: (Xid, [u8; 4]) = (Xid(0x8000_0301), [0x80, 0, 3, 1]);
/// A table's identifier, and its bytes.
const OID: (Oid, [u8; 4]) = (Oid(0x4001), [0, 0, 0x40, 1]);
/// The message that puts a decoder inside a block.
const STREAM_START: &[u8] = b"S\x80\0\x03\x01\x01";

fn decode(decoder: &mut Decoder, parts: &[&[u8]]) -> Message {
    decoder.decode(parts.concat().into()).unwrap()
}

/// Decodes with version 1.
fn v1(parts: &[&[u8]]) -> Message {
    decode(&mut Decoder::new(ProtocolVersion::V1, Streaming::Off), parts)
}

/// Decodes with version 4 and parallel streaming.
fn v4(parts: &[&[u8]]) -> Message {
    decode(&mut Decoder::new(ProtocolVersion::V4, Streaming::Parallel), parts)
}

/// Decodes inside a block of a streamed transaction.
fn in_stream(parts: &[&[u8]]) -> Message {
    let mut decoder = Decoder::new(ProtocolVersion::V2, Streaming::On);
    decode(&mut decoder, &[STREAM_START]);
    decode(&mut decoder, parts)
}

/// Returns where a refused message is at fault, and how.
fn fault(version: ProtocolVersion, streaming: Streaming, data: &'static [u8]) -> (&'static str, usize, DecodeFault) {
    let error = Decoder::new(version, streaming).decode(Bytes::from_static(data)).unwrap_err();
    (error.field, error.offset, error.fault)
}

fn text(text: &'static str) -> Value {
    Value::Text(text.into())
}

#[test]
fn begin() {
    let expected = Begin { final_lsn: LSN.0, commit_time: TIME.0, xid: XID.0 };
    assert_eq!(v1(&[b"B", &LSN.1, &TIME.1, &XID.1]), Message::Begin(expected));
}

#[test]
fn commit() {
    let expected = Commit { flags: 7, commit_lsn: LSN.0, end_lsn: END.0, commit_time: TIME.0 };
    assert_eq!(v1(&[b"C\x07", &LSN.1, &END.1, &TIME.1]), Message::Commit(expected));
}

#[test]
fn origin() {
    let expected = Origin { commit_lsn: LSN.0, name: "elsewhere".into() };
    assert_eq!(v1(&[b"O", &LSN.1, b"elsewhere\0"]), Message::Origin(expected.clone()));
    assert_eq!(in_stream(&[b"O", &LSN.1, b"elsewhere\0"]), Message::Origin(expected));
}

#[test]
fn relation() {
    let body: &[&[u8]] = &[
        &OID.1,
        b"public\0outbox\0i\0\x02",
        b"\x01id\0\0\0\x0b\x86\xff\xff\xff\xff",
        b"\0name\0\0\0\x04\x13\0\0\0\x44",
    ];
    let column = |key, name: &'static str, type_oid, type_modifier| Column {
        key,
        name: name.into(),
        type_oid: Oid(type_oid),
        type_modifier,
    };
    let expected = |xid| {
        Message::Relation(Relation {
            xid,
            oid: OID.0,
            schema: "public".into(),
            name: "outbox".into(),
            replica_identity: ReplicaIdentity::Index,
            columns: vec![column(true, "id", 2950, -1), column(false, "name", 1043, 68)],
        })
    };
    assert_eq!(v1(&[b"R", &body.concat()]), expected(None));
    assert_eq!(in_stream(&[b"R", &XID.1, &body.concat()]), expected(Some(XID.0)));
}

#[test]
fn every_replica_identity() {
    for (byte, expected) in [
        (b'd', ReplicaIdentity::Default),
        (b'n', ReplicaIdentity::Nothing),
        (b'f', ReplicaIdentity::Full),
        (b'i', ReplicaIdentity::Index),
    ] {
        let message = v1(&[b"R\0\0\0\x01\0t\0", &[byte], b"\0\0"]);
        let Message::Relation(relation) = message else { unreachable!("{message:?}") };
        assert_eq!(relation.replica_identity, expected);
        assert_eq!(relation.schema_name(), b"pg_catalog");
    }
}

#[test]
fn typ() {
    let expected =
        |xid| Message::Type(Type { xid, oid: OID.0, schema: "public".into(), name: Bytes::from_static(b"mood\xff") });
    assert_eq!(v1(&[b"Y", &OID.1, b"public\0mood\xff\0"]), expected(None));
    assert_eq!(in_stream(&[b"Y", &XID.1, &OID.1, b"public\0mood\xff\0"]), expected(Some(XID.0)));
}

#[test]
fn insert() {
    let tuple = b"N\0\x05nut\0\0\0\x02hit\0\0\0\0b\0\0\0\x03\0\x01\x02";
    let binary = Value::Binary(Bytes::from_static(&[0, 1, 2]));
    let new = Tuple(vec![Value::Null, Value::UnchangedToast, text("hi"), text(""), binary]);
    let expected = |xid| Message::Insert(Insert { xid, relation: OID.0, new: new.clone() });
    assert_eq!(v1(&[b"I", &OID.1, tuple]), expected(None));
    assert_eq!(in_stream(&[b"I", &XID.1, &OID.1, tuple]), expected(Some(XID.0)));
}

#[test]
fn update_with_and_without_the_row_before() {
    let new = Tuple(vec![text("b"), Value::Null]);
    let old = Tuple(vec![text("a"), Value::Null]);
    let update = |xid, old| Message::Update(Update { xid, relation: OID.0, old, new: new.clone() });
    let (old_bytes, new_bytes) = (b"\0\x02t\0\0\0\x01an", b"N\0\x02t\0\0\0\x01bn");
    assert_eq!(v1(&[b"U", &OID.1, new_bytes]), update(None, None));
    let key = Some(OldTuple::Key(old.clone()));
    assert_eq!(v1(&[b"U", &OID.1, b"K", old_bytes, new_bytes]), update(None, key.clone()));
    assert_eq!(in_stream(&[b"U", &XID.1, &OID.1, b"K", old_bytes, new_bytes]), update(Some(XID.0), key));
    assert_eq!(v1(&[b"U", &OID.1, b"O", old_bytes, new_bytes]), update(None, Some(OldTuple::Full(old))));
}

#[test]
fn delete() {
    let tuple = Tuple(vec![text("a")]);
    let delete = |xid, old| Message::Delete(Delete { xid, relation: OID.0, old });
    let key = OldTuple::Key(tuple.clone());
    assert_eq!(v1(&[b"D", &OID.1, b"K\0\x01t\0\0\0\x01a"]), delete(None, key.clone()));
    assert_eq!(in_stream(&[b"D", &XID.1, &OID.1, b"K\0\x01t\0\0\0\x01a"]), delete(Some(XID.0), key));
    assert_eq!(v1(&[b"D", &OID.1, b"O\0\x01t\0\0\0\x01a"]), delete(None, OldTuple::Full(tuple)));
}

#[test]
fn truncate() {
    for (options, cascade, restart_identity) in [(0, false, false), (1, true, false), (2, false, true), (3, true, true)]
    {
        let expected =
            |xid| Message::Truncate(Truncate { xid, cascade, restart_identity, relations: vec![OID.0, Oid(5)] });
        let body = [b"\0\0\0\x02", &[options][..], &OID.1, b"\0\0\0\x05"].concat();
        assert_eq!(v1(&[b"T", &body]), expected(None));
        assert_eq!(in_stream(&[b"T", &XID.1, &body]), expected(Some(XID.0)));
    }
}

#[test]
fn logical_message() {
    for (flags, transactional) in [(0, false), (1, true)] {
        let expected = |xid| {
            let (prefix, content) = ("outbox".into(), Bytes::from_static(b"\0\xff"));
            Message::Message(LogicalMessage { xid, transactional, lsn: LSN.0, prefix, content })
        };
        let body = [&[flags][..], &LSN.1, b"outbox\0\0\0\0\x02\0\xff"].concat();
        assert_eq!(v1(&[b"M", &body]), expected(None));
        assert_eq!(in_stream(&[b"M", &XID.1, &body]), expected(Some(XID.0)));
    }
}

#[test]
fn stream_start_and_stop() {
    let mut decoder = Decoder::new(ProtocolVersion::V2, Streaming::On);
    let start = |first_segment| Message::StreamStart(StreamStart { xid: XID.0, first_segment });
    assert_eq!(decode(&mut decoder, &[b"S", &XID.1, b"\x01"]), start(true));
    assert!(decoder.in_stream());
    assert_eq!(decode(&mut decoder, &[b"E"]), Message::StreamStop);
    assert!(!decoder.in_stream());
    assert_eq!(decode(&mut decoder, &[b"S", &XID.1, b"\0"]), start(false));
}

#[test]
fn stream_commit() {
    let expected = StreamCommit { xid: XID.0, flags: 0, commit_lsn: LSN.0, end_lsn: END.0, commit_time: TIME.0 };
    assert_eq!(v4(&[b"c", &XID.1, b"\0", &LSN.1, &END.1, &TIME.1]), Message::StreamCommit(expected));
}

#[test]
fn stream_abort_with_and_without_place_and_time() {
    let expected = |abort| Message::StreamAbort(StreamAbort { xid: XID.0, subxid: Xid(9), abort });
    let short: &[&[u8]] = &[b"A", &XID.1, b"\0\0\0\x09"];
    for version in [ProtocolVersion::V2, ProtocolVersion::V3, ProtocolVersion::V4] {
        assert_eq!(decode(&mut Decoder::new(version, Streaming::On), short), expected(None));
    }
    let long = [short.concat(), LSN.1.to_vec(), TIME.1.to_vec()].concat();
    assert_eq!(v4(&[&long]), expected(Some((LSN.0, TIME.0))));
}

#[test]
fn begin_prepare() {
    let expected =
        BeginPrepare { prepare_lsn: LSN.0, end_lsn: END.0, prepare_time: TIME.0, xid: XID.0, gid: "gid 1".into() };
    assert_eq!(v4(&[b"b", &LSN.1, &END.1, &TIME.1, &XID.1, b"gid 1\0"]), Message::BeginPrepare(expected));
}

#[test]
fn prepare_and_stream_prepare() {
    let (xid, gid) = (XID.0, Bytes::from("gid 1"));
    let prepare = Prepare { flags: 0, prepare_lsn: LSN.0, end_lsn: END.0, prepare_time: TIME.0, xid, gid };
    let body = [b"\0", &LSN.1[..], &END.1, &TIME.1, &XID.1, b"gid 1\0"].concat();
    assert_eq!(v4(&[b"P", &body]), Message::Prepare(prepare.clone()));
    assert_eq!(v4(&[b"p", &body]), Message::StreamPrepare(prepare));
}

#[test]
fn commit_prepared() {
    let (xid, gid) = (XID.0, Bytes::from("gid 1"));
    let expected = CommitPrepared { flags: 0, commit_lsn: LSN.0, end_lsn: END.0, commit_time: TIME.0, xid, gid };
    let message = v4(&[b"K\0", &LSN.1, &END.1, &TIME.1, &XID.1, b"gid 1\0"]);
    assert_eq!(message, Message::CommitPrepared(expected));
}

#[test]
fn rollback_prepared() {
    let expected = RollbackPrepared {
        flags: 0,
        prepare_end_lsn: LSN.0,
        rollback_end_lsn: END.0,
        prepare_time: TIME.0,
        rollback_time: LATER.0,
        xid: XID.0,
        gid: "gid 1".into(),
    };
    let message = v4(&[b"r\0", &LSN.1, &END.1, &TIME.1, &LATER.1, &XID.1, b"gid 1\0"]);
    assert_eq!(message, Message::RollbackPrepared(expected));
}

#[test]
fn a_message_that_was_not_asked_for_is_refused() {
    use ProtocolVersion::{V1, V2, V4};

    let refused = |version, streaming, data| {
        let (field, offset, fault) = fault(version, streaming, data);
        assert_eq!((field, offset), ("kind", 0));
        assert!(matches!(fault, DecodeFault::OutOfPlace { .. }), "{fault:?}");
    };
    refused(V1, Streaming::On, STREAM_START);
    refused(V4, Streaming::Off, STREAM_START);
    refused(V2, Streaming::On, b"b");
    refused(V4, Streaming::On, b"E");
}

#[test]
fn a_message_of_another_transaction_is_refused_inside_a_block() {
    let mut decoder = Decoder::new(ProtocolVersion::V4, Streaming::Parallel);
    decode(&mut decoder, &[STREAM_START]);
    for kind in *b"BCScAbPKrp" {
        let error = decoder.decode(vec![kind].into()).unwrap_err();
        assert!(matches!(error.fault, DecodeFault::OutOfPlace { .. }), "{error}");
    }
    assert!(decoder.in_stream());
}

#[test]
fn a_refused_message_leaves_the_decoder_as_it_was() {
    let mut decoder = Decoder::new(ProtocolVersion::V2, Streaming::On);
    assert!(decoder.decode(Bytes::from_static(b"S\0\0\0\x01\x01extra")).is_err());
    assert!(!decoder.in_stream());
}

#[test]
fn bits_without_a_meaning_are_passed_over() {
    let message = v1(&[b"T\0\0\0\0\xfe"]);
    let Message::Truncate(truncate) = message else { unreachable!("{message:?}") };
    assert_eq!((truncate.cascade, truncate.restart_identity), (false, true));
    let message = v1(&[b"M\xfe", &LSN.1, b"\0\0\0\0\0"]);
    let Message::Message(message) = message else { unreachable!("{message:?}") };
    assert!(!message.transactional);
}

#[test]
fn an_error_names_the_field_and_its_byte() {
    let v1 = |data| fault(ProtocolVersion::V1, Streaming::Off, data);
    let unknown = |expected, found| DecodeFault::Unknown { expected, found };
    assert_eq!(v1(b""), ("kind", 0, DecodeFault::TooShort { expected: 1, found: 0 }));
    assert_eq!(v1(b"X"), ("kind", 0, unknown("the byte of a message kind", b'X')));
    assert_eq!(v1(b"I\0\0"), ("relation", 1, DecodeFault::TooShort { expected: 4, found: 2 }));
    assert_eq!(v1(b"I\0\0\0\x01K"), ("tuple kind", 5, unknown("N", b'K')));
    assert_eq!(v1(b"I\0\0\0\x01N\0\x01x"), ("value kind", 8, unknown("n, u, t or b", b'x')));
    let negative = DecodeFault::Negative { found: -1 };
    assert_eq!(v1(b"I\0\0\0\x01N\0\x01t\xff\xff\xff\xff"), ("text value", 9, negative));
    let short = DecodeFault::TooShort { expected: 5, found: 1 };
    assert_eq!(v1(b"I\0\0\0\x01N\0\x01t\0\0\0\x05a"), ("text value", 13, short));
    assert_eq!(v1(b"I\0\0\0\x01N\0\x01nn"), ("end", 9, DecodeFault::Trailing { found: 1 }));
    assert_eq!(v1(b"Y\0\0\0\x01public"), ("schema", 5, DecodeFault::Unterminated { found: 6 }));
    assert_eq!(v1(b"R\0\0\0\x01\0\0x\0\0"), ("replica identity", 7, unknown("d, n, f or i", b'x')));
    assert_eq!(v1(b"U\0\0\0\x01x"), ("first tuple kind", 5, unknown("K, O or N", b'x')));
    assert_eq!(v1(b"U\0\0\0\x01K\0\0x"), ("second tuple kind", 8, unknown("N", b'x')));
    assert_eq!(v1(b"D\0\0\0\x01N"), ("tuple kind", 5, unknown("K or O", b'N')));
}

#[test]
fn a_count_that_the_bytes_cannot_bear_out_is_refused_at_once() {
    let v1 = |data| fault(ProtocolVersion::V1, Streaming::Off, data);
    let short = |expected, found| DecodeFault::TooShort { expected, found };
    assert_eq!(v1(b"T\x7f\xff\xff\xff\0\0"), ("relations", 6, short(0x1_ffff_fffc, 1)));
    assert_eq!(v1(b"I\0\0\0\x01N\xff\xffnnn"), ("values", 8, short(65_535, 3)));
    assert_eq!(v1(b"R\0\0\0\x01\0\0d\xff\xff\0"), ("columns", 10, short(655_350, 1)));
}
