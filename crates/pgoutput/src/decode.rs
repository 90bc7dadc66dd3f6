//! The data of an [`XLogData`](crate::XLogData) to a [`Message`], for protocol versions 1 to 4.
//!
//! Each message is its kind's byte and then, from left to right (`xid?` is there between Stream Start
//! and Stream Stop only, `abort?` with `streaming = parallel` only):
//!
//! ```text
//! Begin              B  final_lsn:8 commit_time:8 xid:4
//! Message            M  xid?:4 flags:1 lsn:8 prefix:string length:4 content
//! Commit             C  flags:1 commit_lsn:8 end_lsn:8 commit_time:8
//! Origin             O  commit_lsn:8 name:string
//! Relation           R  xid?:4 oid:4 schema:string name:string replica_identity:1 columns:2
//!                       then each column: flags:1 name:string type_oid:4 type_modifier:4
//! Type               Y  xid?:4 oid:4 schema:string name:string
//! Insert             I  xid?:4 relation:4 'N' tuple
//! Update             U  xid?:4 relation:4 [ 'K' tuple | 'O' tuple ] 'N' tuple
//! Delete             D  xid?:4 relation:4 ( 'K' tuple | 'O' tuple )
//! Truncate           T  xid?:4 relations:4 options:1 then each relation: oid:4
//! Stream Start       S  xid:4 first_segment:1
//! Stream Stop        E
//! Stream Commit      c  xid:4 flags:1 commit_lsn:8 end_lsn:8 commit_time:8
//! Stream Abort       A  xid:4 subxid:4 abort?:(lsn:8 time:8)
//! Begin Prepare      b  prepare_lsn:8 end_lsn:8 prepare_time:8 xid:4 gid:string
//! Prepare            P  flags:1 prepare_lsn:8 end_lsn:8 prepare_time:8 xid:4 gid:string
//! Commit Prepared    K  flags:1 commit_lsn:8 end_lsn:8 commit_time:8 xid:4 gid:string
//! Rollback Prepared  r  flags:1 prepare_end_lsn:8 rollback_end_lsn:8 prepare_time:8 rollback_time:8
//!                       xid:4 gid:string
//! Stream Prepare     p  as Prepare
//!
//! tuple                 columns:2 then each column: 'n' | 'u' | 't' length:4 text | 'b' length:4 binary
//! ```
//!
//! What later servers may change is handled in three ways. A reserved byte that the manual gives no bits
//! (`flags` of Commit and the like) is kept as it came. In a byte of which some bits have a meaning
//! (`flags` of a column and of Message, `options` of Truncate) the other bits are passed over, as
//! PostgreSQL's own subscriber does: that is why a server cannot give them a meaning that matters without
//! a new protocol version. All else that the manual does not list is an error, since to guess the layout
//! of what follows would be to invent rows.

use bytes::Bytes;

use crate::error::DecodeError;
use crate::message::{COLUMN_KEY, MESSAGE_TRANSACTIONAL, TRUNCATE_CASCADE, TRUNCATE_RESTART_IDENTITY};
use crate::reader::Reader;
use crate::{
    Begin, BeginPrepare, Column, Commit, CommitPrepared, Delete, Insert, Kind, LogicalMessage, Message, Oid, OldTuple,
    Origin, Prepare, ProtocolVersion, Relation, ReplicaIdentity, RollbackPrepared, StreamAbort, StreamCommit,
    StreamStart, Streaming, Truncate, Tuple, Type, Update, Value, Xid,
};

/// Decodes the messages of one connection, in the order in which they came.
///
/// Whether a message holds a transaction id depends on the messages before it, so each connection
/// needs its own decoder.
///
/// # Examples
///
/// ```
/// use bytes::Bytes;
/// use waljet_pgoutput::{Decoder, Lsn, Message, ProtocolVersion, Streaming, Xid};
///
/// let mut decoder = Decoder::new(ProtocolVersion::V1, Streaming::Off);
/// let data = Bytes::from_static(b"B\0\0\0\x16\xb3\x74\xd8\x48\0\x02\xa3\0\0\0\0\0\0\0\x02\xf1");
/// let Message::Begin(begin) = decoder.decode(data)? else { unreachable!() };
/// assert_eq!(begin.final_lsn, "16/B374D848".parse::<Lsn>()?);
/// assert_eq!(begin.xid, Xid(753));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Decoder {
    version: ProtocolVersion,
    streaming: Streaming,
    in_stream: bool,
}

impl Decoder {
    /// Makes a decoder for a connection that was started with these options.
    ///
    /// A message that needs a later version, or streaming where it is off, is an error: the server was not
    /// asked for it. So a connection without streaming gives nothing but committed rows.
    #[must_use]
    pub const fn new(version: ProtocolVersion, streaming: Streaming) -> Self {
        Self { version, streaming, in_stream: false }
    }

    /// Returns whether the next message is expected inside a block of a streamed transaction.
    #[must_use]
    pub const fn in_stream(&self) -> bool {
        self.in_stream
    }

    /// Decodes one whole message.
    ///
    /// Names, values and content are slices of `data`, which they keep alive.
    ///
    /// # Errors
    ///
    /// The bytes are not exactly one message that may come here. The decoder is then as it was before.
    pub fn decode(&mut self, data: Bytes) -> Result<Message, DecodeError> {
        let mut reader = Reader::new("pgoutput", data);
        let byte = reader.u8("kind")?;
        let Some(kind) = Kind::from_byte(byte) else {
            return Err(reader.unknown("kind", "the byte of a message kind", byte));
        };
        reader.name(kind.name());
        self.admit(kind, &reader)?;
        let message = self.body(kind, &mut reader)?;
        reader.finish()?;
        match kind {
            Kind::StreamStart => self.in_stream = true,
            Kind::StreamStop => self.in_stream = false,
            _ => {}
        }
        Ok(message)
    }

    /// Checks that a message of this kind may come now.
    #[inline]
    fn admit(&self, kind: Kind, reader: &Reader) -> Result<(), DecodeError> {
        if kind.since() > self.version {
            Err(reader.out_of_place("a message of the protocol version that was asked for"))
        } else if kind.needs_streaming() && self.streaming == Streaming::Off {
            Err(reader.out_of_place("a message that comes without streaming"))
        } else if self.in_stream && !kind.is_part_of_stream() {
            Err(reader.out_of_place("a change or Stream Stop after Stream Start"))
        } else if !self.in_stream && kind == Kind::StreamStop {
            Err(reader.out_of_place("Stream Start before Stream Stop"))
        } else {
            Ok(())
        }
    }

    /// Reads what follows the kind.
    #[inline]
    fn body(&self, kind: Kind, reader: &mut Reader) -> Result<Message, DecodeError> {
        let xid = if self.in_stream && kind.has_stream_xid() { Some(reader.xid("xid")?) } else { None };
        Ok(match kind {
            Kind::Insert => Message::Insert(insert(xid, reader)?),
            Kind::Begin => Message::Begin(begin(reader)?),
            Kind::Commit => Message::Commit(commit(reader)?),
            Kind::Origin => Message::Origin(origin(reader)?),
            Kind::Relation => Message::Relation(relation(xid, reader)?),
            Kind::Type => Message::Type(typ(xid, reader)?),
            Kind::Update => Message::Update(update(xid, reader)?),
            Kind::Delete => Message::Delete(delete(xid, reader)?),
            Kind::Truncate => Message::Truncate(truncate(xid, reader)?),
            Kind::Message => Message::Message(logical_message(xid, reader)?),
            Kind::StreamStart => Message::StreamStart(stream_start(reader)?),
            Kind::StreamStop => Message::StreamStop,
            Kind::StreamCommit => Message::StreamCommit(stream_commit(reader)?),
            Kind::StreamAbort => Message::StreamAbort(self.stream_abort(reader)?),
            Kind::BeginPrepare => Message::BeginPrepare(begin_prepare(reader)?),
            Kind::Prepare => Message::Prepare(prepare(reader)?),
            Kind::CommitPrepared => Message::CommitPrepared(commit_prepared(reader)?),
            Kind::RollbackPrepared => Message::RollbackPrepared(rollback_prepared(reader)?),
            Kind::StreamPrepare => Message::StreamPrepare(prepare(reader)?),
        })
    }

    fn stream_abort(&self, reader: &mut Reader) -> Result<StreamAbort, DecodeError> {
        let xid = reader.xid("xid")?;
        let subxid = reader.xid("subxid")?;
        let tells_more = self.streaming == Streaming::Parallel && self.version >= ProtocolVersion::V4;
        let abort = if tells_more { Some((reader.lsn("abort lsn")?, reader.timestamp("abort time")?)) } else { None };
        Ok(StreamAbort { xid, subxid, abort })
    }
}

fn begin(reader: &mut Reader) -> Result<Begin, DecodeError> {
    Ok(Begin {
        final_lsn: reader.lsn("final lsn")?,
        commit_time: reader.timestamp("commit time")?,
        xid: reader.xid("xid")?,
    })
}

fn commit(reader: &mut Reader) -> Result<Commit, DecodeError> {
    Ok(Commit {
        flags: reader.u8("flags")?,
        commit_lsn: reader.lsn("commit lsn")?,
        end_lsn: reader.lsn("end lsn")?,
        commit_time: reader.timestamp("commit time")?,
    })
}

fn origin(reader: &mut Reader) -> Result<Origin, DecodeError> {
    Ok(Origin { commit_lsn: reader.lsn("commit lsn")?, name: reader.string("name")? })
}

fn relation(xid: Option<Xid>, reader: &mut Reader) -> Result<Relation, DecodeError> {
    Ok(Relation {
        xid,
        oid: reader.oid("oid")?,
        schema: reader.string("schema")?,
        name: reader.string("name")?,
        replica_identity: replica_identity(reader)?,
        columns: columns(reader)?,
    })
}

fn replica_identity(reader: &mut Reader) -> Result<ReplicaIdentity, DecodeError> {
    match reader.u8("replica identity")? {
        b'd' => Ok(ReplicaIdentity::Default),
        b'n' => Ok(ReplicaIdentity::Nothing),
        b'f' => Ok(ReplicaIdentity::Full),
        b'i' => Ok(ReplicaIdentity::Index),
        found => Err(reader.unknown("replica identity", "d, n, f or i", found)),
    }
}

fn columns(reader: &mut Reader) -> Result<Vec<Column>, DecodeError> {
    /// Flags, a name's zero byte, type and modifier.
    const LEAST: usize = 1 + 1 + 4 + 4;

    let count = reader.u16("column count")?;
    let mut columns = reader.vec("columns", usize::from(count), LEAST)?;
    for _ in 0..count {
        columns.push(Column {
            key: reader.u8("column flags")? & COLUMN_KEY != 0,
            name: reader.string("column name")?,
            type_oid: reader.oid("column type")?,
            type_modifier: reader.i32("column type modifier")?,
        });
    }
    Ok(columns)
}

fn typ(xid: Option<Xid>, reader: &mut Reader) -> Result<Type, DecodeError> {
    Ok(Type { xid, oid: reader.oid("oid")?, schema: reader.string("schema")?, name: reader.string("name")? })
}

#[inline]
fn insert(xid: Option<Xid>, reader: &mut Reader) -> Result<Insert, DecodeError> {
    let relation = reader.oid("relation")?;
    match reader.u8("tuple kind")? {
        b'N' => Ok(Insert { xid, relation, new: tuple(reader)? }),
        found => Err(reader.unknown("tuple kind", "N", found)),
    }
}

fn update(xid: Option<Xid>, reader: &mut Reader) -> Result<Update, DecodeError> {
    let relation = reader.oid("relation")?;
    let old = match reader.u8("first tuple kind")? {
        b'K' => Some(OldTuple::Key(tuple(reader)?)),
        b'O' => Some(OldTuple::Full(tuple(reader)?)),
        b'N' => return Ok(Update { xid, relation, old: None, new: tuple(reader)? }),
        found => return Err(reader.unknown("first tuple kind", "K, O or N", found)),
    };
    match reader.u8("second tuple kind")? {
        b'N' => Ok(Update { xid, relation, old, new: tuple(reader)? }),
        found => Err(reader.unknown("second tuple kind", "N", found)),
    }
}

fn delete(xid: Option<Xid>, reader: &mut Reader) -> Result<Delete, DecodeError> {
    let relation = reader.oid("relation")?;
    let old = match reader.u8("tuple kind")? {
        b'K' => OldTuple::Key(tuple(reader)?),
        b'O' => OldTuple::Full(tuple(reader)?),
        found => return Err(reader.unknown("tuple kind", "K or O", found)),
    };
    Ok(Delete { xid, relation, old })
}

/// Reads a row. Most of a relay's decoding time is spent here.
#[inline]
fn tuple(reader: &mut Reader) -> Result<Tuple, DecodeError> {
    /// The kind's byte, which is all that a null has.
    const LEAST: usize = 1;

    let count = reader.u16("value count")?;
    let mut values = reader.vec("values", usize::from(count), LEAST)?;
    for _ in 0..count {
        values.push(match reader.u8("value kind")? {
            b't' => Value::Text(reader.sized("text value")?),
            b'n' => Value::Null,
            b'b' => Value::Binary(reader.sized("binary value")?),
            b'u' => Value::UnchangedToast,
            found => return Err(reader.unknown("value kind", "n, u, t or b", found)),
        });
    }
    Ok(Tuple(values))
}

fn truncate(xid: Option<Xid>, reader: &mut Reader) -> Result<Truncate, DecodeError> {
    let count = reader.size("relation count")?;
    let options = reader.u8("options")?;
    let mut relations = reader.vec("relations", count, size_of::<Oid>())?;
    for _ in 0..count {
        relations.push(reader.oid("relation")?);
    }
    Ok(Truncate {
        xid,
        cascade: options & TRUNCATE_CASCADE != 0,
        restart_identity: options & TRUNCATE_RESTART_IDENTITY != 0,
        relations,
    })
}

fn logical_message(xid: Option<Xid>, reader: &mut Reader) -> Result<LogicalMessage, DecodeError> {
    Ok(LogicalMessage {
        xid,
        transactional: reader.u8("flags")? & MESSAGE_TRANSACTIONAL != 0,
        lsn: reader.lsn("lsn")?,
        prefix: reader.string("prefix")?,
        content: reader.sized("content")?,
    })
}

fn stream_start(reader: &mut Reader) -> Result<StreamStart, DecodeError> {
    Ok(StreamStart { xid: reader.xid("xid")?, first_segment: reader.bool("first segment")? })
}

fn stream_commit(reader: &mut Reader) -> Result<StreamCommit, DecodeError> {
    Ok(StreamCommit {
        xid: reader.xid("xid")?,
        flags: reader.u8("flags")?,
        commit_lsn: reader.lsn("commit lsn")?,
        end_lsn: reader.lsn("end lsn")?,
        commit_time: reader.timestamp("commit time")?,
    })
}

fn begin_prepare(reader: &mut Reader) -> Result<BeginPrepare, DecodeError> {
    Ok(BeginPrepare {
        prepare_lsn: reader.lsn("prepare lsn")?,
        end_lsn: reader.lsn("end lsn")?,
        prepare_time: reader.timestamp("prepare time")?,
        xid: reader.xid("xid")?,
        gid: reader.string("gid")?,
    })
}

fn prepare(reader: &mut Reader) -> Result<Prepare, DecodeError> {
    Ok(Prepare {
        flags: reader.u8("flags")?,
        prepare_lsn: reader.lsn("prepare lsn")?,
        end_lsn: reader.lsn("end lsn")?,
        prepare_time: reader.timestamp("prepare time")?,
        xid: reader.xid("xid")?,
        gid: reader.string("gid")?,
    })
}

fn commit_prepared(reader: &mut Reader) -> Result<CommitPrepared, DecodeError> {
    Ok(CommitPrepared {
        flags: reader.u8("flags")?,
        commit_lsn: reader.lsn("commit lsn")?,
        end_lsn: reader.lsn("end lsn")?,
        commit_time: reader.timestamp("commit time")?,
        xid: reader.xid("xid")?,
        gid: reader.string("gid")?,
    })
}

fn rollback_prepared(reader: &mut Reader) -> Result<RollbackPrepared, DecodeError> {
    Ok(RollbackPrepared {
        flags: reader.u8("flags")?,
        prepare_end_lsn: reader.lsn("prepare end lsn")?,
        rollback_end_lsn: reader.lsn("rollback end lsn")?,
        prepare_time: reader.timestamp("prepare time")?,
        rollback_time: reader.timestamp("rollback time")?,
        xid: reader.xid("xid")?,
        gid: reader.string("gid")?,
    })
}
