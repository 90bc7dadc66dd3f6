//! A [`Message`] to its bytes: the inverse of [`decode`](crate::decode), for tests and scripted sources.
//!
//! The layouts are listed there. Encoding needs no context, since a message itself says whether it holds
//! a transaction id or where it was aborted; whether that suits the connection is the caller's concern.

use bytes::{BufMut, Bytes, BytesMut};

use crate::error::{EncodeError, EncodeFault};
use crate::message::{COLUMN_KEY, MESSAGE_TRANSACTIONAL, TRUNCATE_CASCADE, TRUNCATE_RESTART_IDENTITY};
use crate::{
    Begin, BeginPrepare, Commit, CommitPrepared, Delete, Insert, LogicalMessage, Message, OldTuple, Origin, Prepare,
    Relation, ReplicaIdentity, RollbackPrepared, StreamAbort, StreamCommit, StreamStart, Timestamp, Truncate, Tuple,
    Type, Update, Value, Xid,
};

impl Message {
    /// Appends the message's bytes to `out`.
    ///
    /// # Errors
    ///
    /// A name has a zero byte inside, or a count or length is too large for its field. `out` is then as it
    /// was before.
    pub fn encode(&self, out: &mut BytesMut) -> Result<(), EncodeError> {
        let start = out.len();
        let mut writer = Writer { message: self.kind().name(), out };
        let result = writer.message(self);
        if result.is_err() {
            out.truncate(start);
        }
        result
    }

    /// Returns the message's bytes.
    ///
    /// # Errors
    ///
    /// Those of [`encode`](Self::encode).
    pub fn to_bytes(&self) -> Result<Bytes, EncodeError> {
        let mut out = BytesMut::new();
        self.encode(&mut out)?;
        Ok(out.freeze())
    }
}

/// Appends the fields of one message.
struct Writer<'a> {
    /// The message's name, for errors.
    message: &'static str,
    out: &'a mut BytesMut,
}

impl Writer<'_> {
    fn message(&mut self, message: &Message) -> Result<(), EncodeError> {
        self.out.put_u8(message.kind().byte());
        match message {
            Message::Begin(begin) => self.begin(begin),
            Message::Commit(commit) => self.commit(commit),
            Message::Origin(origin) => return self.origin(origin),
            Message::Relation(relation) => return self.relation(relation),
            Message::Type(typ) => return self.typ(typ),
            Message::Insert(insert) => return self.insert(insert),
            Message::Update(update) => return self.update(update),
            Message::Delete(delete) => return self.delete(delete),
            Message::Truncate(truncate) => return self.truncate(truncate),
            Message::Message(message) => return self.logical_message(message),
            Message::StreamStart(start) => self.stream_start(start),
            Message::StreamStop => {}
            Message::StreamCommit(commit) => self.stream_commit(commit),
            Message::StreamAbort(abort) => self.stream_abort(abort),
            Message::BeginPrepare(begin) => return self.begin_prepare(begin),
            Message::Prepare(prepare) | Message::StreamPrepare(prepare) => return self.prepare(prepare),
            Message::CommitPrepared(commit) => return self.commit_prepared(commit),
            Message::RollbackPrepared(rollback) => return self.rollback_prepared(rollback),
        }
        Ok(())
    }

    fn begin(&mut self, begin: &Begin) {
        self.out.put_u64(begin.final_lsn.0);
        self.timestamp(begin.commit_time);
        self.out.put_u32(begin.xid.0);
    }

    fn commit(&mut self, commit: &Commit) {
        self.out.put_u8(commit.flags);
        self.out.put_u64(commit.commit_lsn.0);
        self.out.put_u64(commit.end_lsn.0);
        self.timestamp(commit.commit_time);
    }

    fn origin(&mut self, origin: &Origin) -> Result<(), EncodeError> {
        self.out.put_u64(origin.commit_lsn.0);
        self.string("name", &origin.name)
    }

    fn relation(&mut self, relation: &Relation) -> Result<(), EncodeError> {
        self.stream_xid(relation.xid);
        self.out.put_u32(relation.oid.0);
        self.string("schema", &relation.schema)?;
        self.string("name", &relation.name)?;
        self.out.put_u8(match relation.replica_identity {
            ReplicaIdentity::Default => b'd',
            ReplicaIdentity::Nothing => b'n',
            ReplicaIdentity::Full => b'f',
            ReplicaIdentity::Index => b'i',
        });
        self.count("column count", relation.columns.len())?;
        for column in &relation.columns {
            self.out.put_u8(if column.key { COLUMN_KEY } else { 0 });
            self.string("column name", &column.name)?;
            self.out.put_u32(column.type_oid.0);
            self.out.put_i32(column.type_modifier);
        }
        Ok(())
    }

    fn typ(&mut self, typ: &Type) -> Result<(), EncodeError> {
        self.stream_xid(typ.xid);
        self.out.put_u32(typ.oid.0);
        self.string("schema", &typ.schema)?;
        self.string("name", &typ.name)
    }

    fn insert(&mut self, insert: &Insert) -> Result<(), EncodeError> {
        self.stream_xid(insert.xid);
        self.out.put_u32(insert.relation.0);
        self.tuple(b'N', &insert.new)
    }

    fn update(&mut self, update: &Update) -> Result<(), EncodeError> {
        self.stream_xid(update.xid);
        self.out.put_u32(update.relation.0);
        if let Some(old) = &update.old {
            self.old_tuple(old)?;
        }
        self.tuple(b'N', &update.new)
    }

    fn delete(&mut self, delete: &Delete) -> Result<(), EncodeError> {
        self.stream_xid(delete.xid);
        self.out.put_u32(delete.relation.0);
        self.old_tuple(&delete.old)
    }

    fn old_tuple(&mut self, old: &OldTuple) -> Result<(), EncodeError> {
        match old {
            OldTuple::Key(tuple) => self.tuple(b'K', tuple),
            OldTuple::Full(tuple) => self.tuple(b'O', tuple),
        }
    }

    fn tuple(&mut self, kind: u8, tuple: &Tuple) -> Result<(), EncodeError> {
        self.out.put_u8(kind);
        self.count("value count", tuple.len())?;
        for value in tuple {
            match value {
                Value::Null => self.out.put_u8(b'n'),
                Value::UnchangedToast => self.out.put_u8(b'u'),
                Value::Text(text) => {
                    self.out.put_u8(b't');
                    self.sized("text value", text)?;
                }
                Value::Binary(binary) => {
                    self.out.put_u8(b'b');
                    self.sized("binary value", binary)?;
                }
            }
        }
        Ok(())
    }

    fn truncate(&mut self, truncate: &Truncate) -> Result<(), EncodeError> {
        self.stream_xid(truncate.xid);
        self.size("relation count", truncate.relations.len())?;
        let cascade = if truncate.cascade { TRUNCATE_CASCADE } else { 0 };
        let restart_identity = if truncate.restart_identity { TRUNCATE_RESTART_IDENTITY } else { 0 };
        self.out.put_u8(cascade | restart_identity);
        for relation in &truncate.relations {
            self.out.put_u32(relation.0);
        }
        Ok(())
    }

    fn logical_message(&mut self, message: &LogicalMessage) -> Result<(), EncodeError> {
        self.stream_xid(message.xid);
        self.out.put_u8(if message.transactional { MESSAGE_TRANSACTIONAL } else { 0 });
        self.out.put_u64(message.lsn.0);
        self.string("prefix", &message.prefix)?;
        self.sized("content", &message.content)
    }

    fn stream_start(&mut self, start: &StreamStart) {
        self.out.put_u32(start.xid.0);
        self.out.put_u8(u8::from(start.first_segment));
    }

    fn stream_commit(&mut self, commit: &StreamCommit) {
        self.out.put_u32(commit.xid.0);
        self.out.put_u8(commit.flags);
        self.out.put_u64(commit.commit_lsn.0);
        self.out.put_u64(commit.end_lsn.0);
        self.timestamp(commit.commit_time);
    }

    fn stream_abort(&mut self, abort: &StreamAbort) {
        self.out.put_u32(abort.xid.0);
        self.out.put_u32(abort.subxid.0);
        if let Some((lsn, time)) = abort.abort {
            self.out.put_u64(lsn.0);
            self.timestamp(time);
        }
    }

    fn begin_prepare(&mut self, begin: &BeginPrepare) -> Result<(), EncodeError> {
        self.out.put_u64(begin.prepare_lsn.0);
        self.out.put_u64(begin.end_lsn.0);
        self.timestamp(begin.prepare_time);
        self.out.put_u32(begin.xid.0);
        self.string("gid", &begin.gid)
    }

    fn prepare(&mut self, prepare: &Prepare) -> Result<(), EncodeError> {
        self.out.put_u8(prepare.flags);
        self.out.put_u64(prepare.prepare_lsn.0);
        self.out.put_u64(prepare.end_lsn.0);
        self.timestamp(prepare.prepare_time);
        self.out.put_u32(prepare.xid.0);
        self.string("gid", &prepare.gid)
    }

    fn commit_prepared(&mut self, commit: &CommitPrepared) -> Result<(), EncodeError> {
        self.out.put_u8(commit.flags);
        self.out.put_u64(commit.commit_lsn.0);
        self.out.put_u64(commit.end_lsn.0);
        self.timestamp(commit.commit_time);
        self.out.put_u32(commit.xid.0);
        self.string("gid", &commit.gid)
    }

    fn rollback_prepared(&mut self, rollback: &RollbackPrepared) -> Result<(), EncodeError> {
        self.out.put_u8(rollback.flags);
        self.out.put_u64(rollback.prepare_end_lsn.0);
        self.out.put_u64(rollback.rollback_end_lsn.0);
        self.timestamp(rollback.prepare_time);
        self.timestamp(rollback.rollback_time);
        self.out.put_u32(rollback.xid.0);
        self.string("gid", &rollback.gid)
    }

    fn stream_xid(&mut self, xid: Option<Xid>) {
        if let Some(xid) = xid {
            self.out.put_u32(xid.0);
        }
    }

    fn timestamp(&mut self, time: Timestamp) {
        self.out.put_i64(time.0);
    }

    fn string(&mut self, field: &'static str, string: &Bytes) -> Result<(), EncodeError> {
        if let Some(found) = string.iter().position(|byte| *byte == 0) {
            return Err(self.error(field, EncodeFault::ZeroByte { found }));
        }
        self.out.put_slice(string);
        self.out.put_u8(0);
        Ok(())
    }

    fn sized(&mut self, field: &'static str, bytes: &Bytes) -> Result<(), EncodeError> {
        self.size(field, bytes.len())?;
        self.out.put_slice(bytes);
        Ok(())
    }

    /// Appends the number of columns, an `Int16` that the manual does not call signed.
    fn count(&mut self, field: &'static str, found: usize) -> Result<(), EncodeError> {
        let limit = usize::from(u16::MAX);
        let count = u16::try_from(found).map_err(|_| self.error(field, EncodeFault::TooMany { limit, found }))?;
        self.out.put_u16(count);
        Ok(())
    }

    fn size(&mut self, field: &'static str, found: usize) -> Result<(), EncodeError> {
        let limit = i32::MAX as usize;
        let size = i32::try_from(found).map_err(|_| self.error(field, EncodeFault::TooMany { limit, found }))?;
        self.out.put_i32(size);
        Ok(())
    }

    fn error(&self, field: &'static str, fault: EncodeFault) -> EncodeError {
        EncodeError { message: self.message, field, fault }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Oid;

    fn refused(message: &Message, field: &'static str, fault: EncodeFault) {
        let mut out = BytesMut::from(&b"before"[..]);
        let error = EncodeError { message: message.kind().name(), field, fault };
        assert_eq!(message.encode(&mut out), Err(error));
        assert_eq!(out, "before");
    }

    #[test]
    fn a_name_with_a_zero_byte_is_refused_and_nothing_is_appended() {
        let name = Bytes::from_static(b"ab\0c");
        let message = Message::Type(Type { xid: None, oid: Oid(1), schema: Bytes::new(), name });
        refused(&message, "name", EncodeFault::ZeroByte { found: 2 });
    }

    #[test]
    fn a_row_with_more_columns_than_an_int16_counts_is_refused() {
        let new = Tuple(vec![Value::Null; 65_536]);
        let message = Message::Insert(Insert { xid: None, relation: Oid(1), new });
        refused(&message, "value count", EncodeFault::TooMany { limit: 65_535, found: 65_536 });
    }
}
