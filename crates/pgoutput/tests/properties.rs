//! What holds for every message, and for any bytes.

#![allow(clippy::unwrap_used, reason = "a message that cannot be encoded should stop the test")]

use bytes::{Bytes, BytesMut};
use proptest::collection::vec;
use proptest::prelude::*;
use waljet_pgoutput::{
    Begin, BeginPrepare, Column, Commit, CommitPrepared, Decoder, Delete, Insert, Kind, LogicalMessage, Lsn, Message,
    Oid, OldTuple, Origin, Prepare, PrimaryKeepalive, ProtocolVersion, Relation, ReplicaIdentity, ReplicationMessage,
    RollbackPrepared, StandbyStatusUpdate, StreamAbort, StreamCommit, StreamStart, Streaming, Timestamp, Truncate,
    Tuple, Type, Update, Value, XLogData, Xid,
};

/// What a message's layout depends on.
#[derive(Clone, Copy, Debug)]
struct Context {
    version: ProtocolVersion,
    streaming: Streaming,
    in_stream: bool,
}

impl Context {
    /// Makes a decoder that is in this context.
    fn decoder(self) -> Decoder {
        let mut decoder = Decoder::new(self.version, self.streaming);
        if self.in_stream {
            let start = Message::StreamStart(StreamStart { xid: Xid(1), first_segment: true });
            decoder.decode(start.to_bytes().unwrap()).unwrap();
        }
        decoder
    }

    fn allows(self, kind: Kind) -> bool {
        kind.since() <= self.version
            && (self.streaming != Streaming::Off || !kind.needs_streaming())
            && if self.in_stream { kind.is_part_of_stream() } else { kind != Kind::StreamStop }
    }
}

/// Every context that a server can be asked for.
fn context() -> impl Strategy<Value = Context> {
    let mut contexts = Vec::new();
    for version in ProtocolVersion::ALL {
        for streaming in [Streaming::Off, Streaming::On, Streaming::Parallel] {
            for in_stream in [false, true] {
                let least = match streaming {
                    Streaming::Off => ProtocolVersion::V1,
                    Streaming::On => ProtocolVersion::V2,
                    Streaming::Parallel => ProtocolVersion::V4,
                };
                if version >= least && !(in_stream && streaming == Streaming::Off) {
                    contexts.push(Context { version, streaming, in_stream });
                }
            }
        }
    }
    prop::sample::select(contexts)
}

fn lsn() -> impl Strategy<Value = Lsn> {
    any::<u64>().prop_map(Lsn)
}

fn time() -> impl Strategy<Value = Timestamp> {
    any::<i64>().prop_map(Timestamp)
}

fn xid() -> impl Strategy<Value = Xid> {
    any::<u32>().prop_map(Xid)
}

fn oid() -> impl Strategy<Value = Oid> {
    any::<u32>().prop_map(Oid)
}

/// Bytes without a zero byte, which ends a string on the wire.
fn name() -> impl Strategy<Value = Bytes> {
    vec(1..=u8::MAX, 0..12).prop_map(Bytes::from)
}

fn content() -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..40).prop_map(Bytes::from)
}

fn tuple() -> impl Strategy<Value = Tuple> {
    let value = prop_oneof![
        Just(Value::Null),
        Just(Value::UnchangedToast),
        content().prop_map(Value::Text),
        content().prop_map(Value::Binary),
    ];
    vec(value, 0..12).prop_map(Tuple)
}

fn old_tuple() -> impl Strategy<Value = OldTuple> {
    prop_oneof![tuple().prop_map(OldTuple::Key), tuple().prop_map(OldTuple::Full)]
}

fn relation(xid: Option<Xid>) -> impl Strategy<Value = Message> {
    let column = (any::<bool>(), name(), oid(), any::<i32>()).prop_map(|(key, name, type_oid, type_modifier)| Column {
        key,
        name,
        type_oid,
        type_modifier,
    });
    let replica_identity = prop::sample::select(vec![
        ReplicaIdentity::Default,
        ReplicaIdentity::Nothing,
        ReplicaIdentity::Full,
        ReplicaIdentity::Index,
    ]);
    (oid(), name(), name(), replica_identity, vec(column, 0..6)).prop_map(
        move |(oid, schema, name, replica_identity, columns)| {
            Message::Relation(Relation { xid, oid, schema, name, replica_identity, columns })
        },
    )
}

/// The messages that have a transaction id inside a block.
fn change(xid: Option<Xid>) -> impl Strategy<Value = Message> {
    prop_oneof![
        relation(xid),
        (oid(), name(), name()).prop_map(move |(oid, schema, name)| Message::Type(Type { xid, oid, schema, name })),
        (oid(), tuple()).prop_map(move |(relation, new)| Message::Insert(Insert { xid, relation, new })),
        (oid(), prop::option::of(old_tuple()), tuple()).prop_map(move |(relation, old, new)| Message::Update(Update {
            xid,
            relation,
            old,
            new
        })),
        (oid(), old_tuple()).prop_map(move |(relation, old)| Message::Delete(Delete { xid, relation, old })),
        (any::<bool>(), any::<bool>(), vec(oid(), 0..5)).prop_map(move |(cascade, restart_identity, relations)| {
            Message::Truncate(Truncate { xid, cascade, restart_identity, relations })
        }),
        (any::<bool>(), lsn(), name(), content()).prop_map(move |(transactional, lsn, prefix, content)| {
            Message::Message(LogicalMessage { xid, transactional, lsn, prefix, content })
        }),
    ]
}

fn prepare() -> impl Strategy<Value = Prepare> {
    (any::<u8>(), lsn(), lsn(), time(), xid(), name()).prop_map(
        |(flags, prepare_lsn, end_lsn, prepare_time, xid, gid)| Prepare {
            flags,
            prepare_lsn,
            end_lsn,
            prepare_time,
            xid,
            gid,
        },
    )
}

/// The messages that look the same inside and outside a block.
fn boundary(context: Context) -> impl Strategy<Value = Message> {
    let tells_more = context.streaming == Streaming::Parallel;
    let abort = (lsn(), time()).prop_map(move |abort| tells_more.then_some(abort));
    prop_oneof![
        (lsn(), time(), xid()).prop_map(|(final_lsn, commit_time, xid)| Message::Begin(Begin {
            final_lsn,
            commit_time,
            xid
        })),
        (any::<u8>(), lsn(), lsn(), time()).prop_map(|(flags, commit_lsn, end_lsn, commit_time)| Message::Commit(
            Commit { flags, commit_lsn, end_lsn, commit_time }
        )),
        (lsn(), name()).prop_map(|(commit_lsn, name)| Message::Origin(Origin { commit_lsn, name })),
        (xid(), any::<bool>())
            .prop_map(|(xid, first_segment)| Message::StreamStart(StreamStart { xid, first_segment })),
        Just(Message::StreamStop),
        (xid(), any::<u8>(), lsn(), lsn(), time()).prop_map(|(xid, flags, commit_lsn, end_lsn, commit_time)| {
            Message::StreamCommit(StreamCommit { xid, flags, commit_lsn, end_lsn, commit_time })
        }),
        (xid(), xid(), abort).prop_map(|(xid, subxid, abort)| Message::StreamAbort(StreamAbort { xid, subxid, abort })),
        (lsn(), lsn(), time(), xid(), name()).prop_map(|(prepare_lsn, end_lsn, prepare_time, xid, gid)| {
            Message::BeginPrepare(BeginPrepare { prepare_lsn, end_lsn, prepare_time, xid, gid })
        }),
        prepare().prop_map(Message::Prepare),
        prepare().prop_map(Message::StreamPrepare),
        (any::<u8>(), lsn(), lsn(), time(), xid(), name()).prop_map(
            |(flags, commit_lsn, end_lsn, commit_time, xid, gid)| {
                Message::CommitPrepared(CommitPrepared { flags, commit_lsn, end_lsn, commit_time, xid, gid })
            }
        ),
        (any::<u8>(), lsn(), lsn(), time(), time(), xid(), name()).prop_map(
            |(flags, prepare_end_lsn, rollback_end_lsn, prepare_time, rollback_time, xid, gid)| {
                Message::RollbackPrepared(RollbackPrepared {
                    flags,
                    prepare_end_lsn,
                    rollback_end_lsn,
                    prepare_time,
                    rollback_time,
                    xid,
                    gid,
                })
            }
        ),
    ]
}

/// A context and a message that may come in it.
fn message() -> impl Strategy<Value = (Context, Message)> {
    context().prop_flat_map(|context| {
        let changes = xid().prop_flat_map(move |xid| change(context.in_stream.then_some(xid)));
        let message = prop_oneof![changes, boundary(context)];
        let allowed = message.prop_filter("comes in this context", move |message| context.allows(message.kind()));
        (Just(context), allowed)
    })
}

/// Returns all names, values and content of a message.
fn slices(message: &Message) -> Vec<&Bytes> {
    fn tuple(tuple: &Tuple) -> Vec<&Bytes> {
        tuple.iter().filter_map(Value::as_bytes).collect()
    }
    fn old_tuple(old: &OldTuple) -> Vec<&Bytes> {
        match old {
            OldTuple::Key(old) | OldTuple::Full(old) => tuple(old),
        }
    }
    match message {
        Message::Origin(Origin { name, .. }) => vec![name],
        Message::Relation(Relation { schema, name, columns, .. }) => {
            columns.iter().map(|column| &column.name).chain([schema, name]).collect()
        }
        Message::Type(Type { schema, name, .. }) => vec![schema, name],
        Message::Insert(Insert { new, .. }) => tuple(new),
        Message::Update(Update { old, new, .. }) => old.iter().flat_map(old_tuple).chain(tuple(new)).collect(),
        Message::Delete(Delete { old, .. }) => old_tuple(old),
        Message::Message(LogicalMessage { prefix, content, .. }) => vec![prefix, content],
        Message::BeginPrepare(BeginPrepare { gid, .. })
        | Message::Prepare(Prepare { gid, .. })
        | Message::StreamPrepare(Prepare { gid, .. })
        | Message::CommitPrepared(CommitPrepared { gid, .. })
        | Message::RollbackPrepared(RollbackPrepared { gid, .. }) => vec![gid],
        Message::Begin(_)
        | Message::Commit(_)
        | Message::Truncate(_)
        | Message::StreamStart(_)
        | Message::StreamStop
        | Message::StreamCommit(_)
        | Message::StreamAbort(_) => vec![],
    }
}

fn replication_message() -> impl Strategy<Value = ReplicationMessage> {
    prop_oneof![
        (lsn(), lsn(), time(), content()).prop_map(|(wal_start, wal_end, server_time, data)| {
            ReplicationMessage::XLogData(XLogData { wal_start, wal_end, server_time, data })
        }),
        (lsn(), time(), any::<bool>()).prop_map(|(wal_end, server_time, reply_requested)| {
            ReplicationMessage::PrimaryKeepalive(PrimaryKeepalive { wal_end, server_time, reply_requested })
        }),
    ]
}

proptest! {
    #[test]
    fn decoding_what_was_encoded_gives_the_message_back((context, message) in message()) {
        let data = message.to_bytes().unwrap();
        let mut decoder = context.decoder();
        prop_assert_eq!(decoder.decode(data), Ok(message.clone()));
        let expected = match message.kind() {
            Kind::StreamStart => true,
            Kind::StreamStop => false,
            _ => context.in_stream,
        };
        prop_assert_eq!(decoder.in_stream(), expected);
    }

    #[test]
    fn a_message_that_is_cut_or_followed_by_a_byte_is_refused((context, message) in message()) {
        let data = message.to_bytes().unwrap();
        for end in 0..data.len() {
            let error = context.decoder().decode(data.slice(..end)).unwrap_err();
            prop_assert!(error.offset <= end);
        }
        let longer = Bytes::from([&data[..], b"\0"].concat());
        prop_assert!(context.decoder().decode(longer).is_err());
    }

    #[test]
    fn names_and_values_are_slices_of_what_was_received((context, message) in message()) {
        let data = message.to_bytes().unwrap();
        let range = data.as_ptr_range();
        let decoded = context.decoder().decode(data).unwrap();
        // An empty slice has no bytes that could have been copied.
        for slice in slices(&decoded).into_iter().filter(|slice| !slice.is_empty()) {
            let found = slice.as_ptr_range();
            prop_assert!(range.start <= found.start && found.end <= range.end);
        }
    }

    #[test]
    fn any_bytes_give_a_message_or_an_error(context in context(), data in vec(any::<u8>(), 0..200)) {
        let _ = context.decoder().decode(data.clone().into());
        let _ = ReplicationMessage::decode(data.clone().into());
        let _ = StandbyStatusUpdate::decode(data.into());
    }

    #[test]
    fn a_message_with_changed_bytes_gives_a_message_or_an_error(
        (context, message) in message(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut data = message.to_bytes().unwrap().to_vec();
        for (index, byte) in changes {
            let index = index.index(data.len());
            data[index] = byte;
        }
        if let Ok(decoded) = context.decoder().decode(data.into()) {
            let again = decoded.to_bytes().unwrap();
            prop_assert_eq!(context.decoder().decode(again), Ok(decoded));
        }
    }

    #[test]
    fn a_replication_message_survives_encoding_and_decoding(message in replication_message()) {
        let mut out = BytesMut::new();
        message.encode(&mut out);
        prop_assert_eq!(ReplicationMessage::decode(out.freeze()), Ok(message));
    }

    #[test]
    fn a_status_update_survives_encoding_and_decoding(
        (written, flushed, applied, client_time, reply_requested) in (lsn(), lsn(), lsn(), time(), any::<bool>())
    ) {
        let update = StandbyStatusUpdate { written, flushed, applied, client_time, reply_requested };
        let mut out = BytesMut::new();
        update.encode(&mut out);
        prop_assert_eq!(StandbyStatusUpdate::decode(out.freeze()), Ok(update));
    }
}
