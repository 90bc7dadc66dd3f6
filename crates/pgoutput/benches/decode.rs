//! Decoding throughput by kind of message, in messages and bytes a second.

use std::hint::black_box;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use waljet_pgoutput::{
    Begin, Column, Commit, Decoder, Insert, Lsn, Message, Oid, PrimaryKeepalive, ProtocolVersion, Relation,
    ReplicaIdentity, ReplicationMessage, Streaming, Timestamp, Value, Xid,
};

/// The columns of the outbox table, with the length that each value has in a typical row.
const COLUMNS: [(&str, u32, usize); 11] = [
    ("id", 2950, 36),
    ("aggregate_type", 25, 5),
    ("aggregate_id", 25, 12),
    ("event_type", 25, 7),
    ("payload", 3802, 300),
    ("headers", 3802, 92),
    ("tenant_id", 25, 0),
    ("schema_version", 23, 1),
    ("created_at", 1184, 29),
    ("seq", 20, 7),
    ("xid", 5069, 7),
];

/// Sets of messages that are measured together.
fn cases() -> Vec<(&'static str, Vec<Message>)> {
    let value = |(_, _, length): (&str, u32, usize)| match length {
        0 => Value::Null,
        length => Value::Text(vec![b'x'; length].into()),
    };
    let insert = Insert { xid: None, relation: Oid(16_385), new: COLUMNS.into_iter().map(value).collect() };
    let column = |(name, type_oid, _): (&'static str, u32, usize)| Column {
        key: name == "id",
        name: name.into(),
        type_oid: Oid(type_oid),
        type_modifier: -1,
    };
    let relation = Relation {
        xid: None,
        oid: Oid(16_385),
        schema: "public".into(),
        name: "outbox".into(),
        replica_identity: ReplicaIdentity::Default,
        columns: COLUMNS.into_iter().map(column).collect(),
    };
    let (lsn, time) = (Lsn(0x16_B374_D848), Timestamp(741_000_000_000_000));
    let begin = Begin { final_lsn: lsn, commit_time: time, xid: Xid(753) };
    let commit = Commit { flags: 0, commit_lsn: lsn, end_lsn: Lsn(lsn.0 + 48), commit_time: time };
    vec![
        ("insert", vec![Message::Insert(insert)]),
        ("relation", vec![Message::Relation(relation)]),
        ("begin and commit", vec![Message::Begin(begin), Message::Commit(commit)]),
    ]
}

/// Measures the messages, each from a buffer that others share, as it is behind a connection's read buffer.
fn messages(criterion: &mut Criterion) {
    let mut decoder = Decoder::new(ProtocolVersion::V1, Streaming::Off);
    for (name, messages) in cases() {
        let data: Vec<Bytes> = messages.iter().map(|message| message.to_bytes().unwrap_or_default()).collect();
        let bytes = data.iter().map(Bytes::len).sum::<usize>() as u64;
        let elements = data.len() as u64;
        let mut group = criterion.benchmark_group(name);
        group.throughput(Throughput::ElementsAndBytes { elements, bytes });
        group.bench_function("decode", |bencher| {
            bencher.iter(|| {
                for data in &data {
                    black_box(decoder.decode(black_box(data).clone())).ok();
                }
            });
        });
        group.finish();
    }
}

/// Measures what an idle connection is made of.
fn keepalive(criterion: &mut Criterion) {
    let keepalive = PrimaryKeepalive { wal_end: Lsn(1), server_time: Timestamp(2), reply_requested: true };
    let mut payload = BytesMut::new();
    ReplicationMessage::PrimaryKeepalive(keepalive).encode(&mut payload);
    let payload = payload.freeze();
    let mut group = criterion.benchmark_group("keepalive");
    group.throughput(Throughput::ElementsAndBytes { elements: 1, bytes: payload.len() as u64 });
    group.bench_function("decode", |bencher| {
        bencher.iter_batched(
            || payload.clone(),
            |payload| black_box(ReplicationMessage::decode(payload)),
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

/// Keeps a whole run under ten seconds.
fn quick() -> Criterion {
    Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1))
}

criterion_group! { name = benches; config = quick(); targets = messages, keepalive }
criterion_main!(benches);
