//! The messages of `pgoutput` (PostgreSQL manual, section 54.9, "Logical Replication Message Formats").
//!
//! Names are bytes, since a database in `SQL_ASCII` may hold any. They, and every other `Bytes` here,
//! are slices of the received buffer when they come from the decoder.
//!
//! Messages that a later protocol version added carry that version in their description. Between
//! [`StreamStart`] and `StreamStop`, versions 2 and up put the transaction's id before the rest of
//! each message; it is the `xid` of the variants that have an optional one.

use std::fmt;

use bytes::Bytes;

use crate::{Kind, Lsn, Tuple};

/// Bit 0 of a column's flags.
pub(crate) const COLUMN_KEY: u8 = 1;
/// Bit 0 of the flags of [`LogicalMessage`].
pub(crate) const MESSAGE_TRANSACTIONAL: u8 = 1;
/// Bit 0 of the options of [`Truncate`].
pub(crate) const TRUNCATE_CASCADE: u8 = 1;
/// Bit 1 of the options of [`Truncate`].
pub(crate) const TRUNCATE_RESTART_IDENTITY: u8 = 2;

/// The object identifier of a relation or a type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Oid(pub u32);

impl fmt::Display for Oid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A transaction id as the wire has it, without the epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xid(pub u32);

impl fmt::Display for Xid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// PostgreSQL's clock: microseconds since 2000-01-01 00:00:00 UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// Microseconds from 1970-01-01 to 2000-01-01, both 00:00:00 UTC.
    const EPOCH_UNIX_MICROS: i64 = 946_684_800_000_000;

    /// Converts from microseconds since 1970-01-01 00:00:00 UTC, stopping at the type's limits.
    #[must_use]
    pub const fn from_unix_micros(micros: i64) -> Self {
        Self(micros.saturating_sub(Self::EPOCH_UNIX_MICROS))
    }

    /// Converts to microseconds since 1970-01-01 00:00:00 UTC, stopping at the type's limits.
    #[must_use]
    pub const fn unix_micros(self) -> i64 {
        self.0.saturating_add(Self::EPOCH_UNIX_MICROS)
    }
}

/// One `pgoutput` message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A committed transaction begins.
    Begin(Begin),
    /// The transaction that began last is complete.
    Commit(Commit),
    /// Where a transaction first came from, when another subscriber wrote it.
    Origin(Origin),
    /// The columns of a table, sent before its first row and again after it changed.
    Relation(Relation),
    /// A type that is not built in, sent before the relation that uses it.
    Type(Type),
    /// A row came in.
    Insert(Insert),
    /// A row changed.
    Update(Update),
    /// A row went.
    Delete(Delete),
    /// Tables were emptied.
    Truncate(Truncate),
    /// What `pg_logical_emit_message` wrote.
    Message(LogicalMessage),
    /// Version 2: a block of a transaction that still runs begins.
    StreamStart(StreamStart),
    /// Version 2: the block ends.
    StreamStop,
    /// Version 2: a streamed transaction is committed.
    StreamCommit(StreamCommit),
    /// Version 2: a streamed transaction, or a part of it, is rolled back.
    StreamAbort(StreamAbort),
    /// Version 3: a transaction begins that will be prepared.
    BeginPrepare(BeginPrepare),
    /// Version 3: the transaction is prepared.
    Prepare(Prepare),
    /// Version 3: a prepared transaction is committed.
    CommitPrepared(CommitPrepared),
    /// Version 3: a prepared transaction is rolled back.
    RollbackPrepared(RollbackPrepared),
    /// Version 3: a streamed transaction is prepared.
    StreamPrepare(Prepare),
}

impl Message {
    /// Returns which kind of message it is.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Begin(_) => Kind::Begin,
            Self::Commit(_) => Kind::Commit,
            Self::Origin(_) => Kind::Origin,
            Self::Relation(_) => Kind::Relation,
            Self::Type(_) => Kind::Type,
            Self::Insert(_) => Kind::Insert,
            Self::Update(_) => Kind::Update,
            Self::Delete(_) => Kind::Delete,
            Self::Truncate(_) => Kind::Truncate,
            Self::Message(_) => Kind::Message,
            Self::StreamStart(_) => Kind::StreamStart,
            Self::StreamStop => Kind::StreamStop,
            Self::StreamCommit(_) => Kind::StreamCommit,
            Self::StreamAbort(_) => Kind::StreamAbort,
            Self::BeginPrepare(_) => Kind::BeginPrepare,
            Self::Prepare(_) => Kind::Prepare,
            Self::CommitPrepared(_) => Kind::CommitPrepared,
            Self::RollbackPrepared(_) => Kind::RollbackPrepared,
            Self::StreamPrepare(_) => Kind::StreamPrepare,
        }
    }
}

/// The start of a transaction that is committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begin {
    /// Where the transaction's commit record starts: the `commit_lsn` of its [`Commit`].
    pub final_lsn: Lsn,
    /// When it was committed.
    pub commit_time: Timestamp,
    /// The transaction's id.
    pub xid: Xid,
}

/// The end of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// Reserved by the protocol, 0 today.
    pub flags: u8,
    /// Where the commit record starts.
    pub commit_lsn: Lsn,
    /// Where the commit record ends: the position to confirm.
    pub end_lsn: Lsn,
    /// When it was committed.
    pub commit_time: Timestamp,
}

/// The replication origin of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The commit's position on the origin server.
    pub commit_lsn: Lsn,
    /// The origin's name.
    pub name: Bytes,
}

/// A table's name and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relation {
    /// The streamed transaction it belongs to.
    pub xid: Option<Xid>,
    /// What later messages call the table.
    pub oid: Oid,
    /// The schema as sent: empty for `pg_catalog`, so that encoding restores the bytes. See
    /// [`schema_name`](Self::schema_name).
    pub schema: Bytes,
    /// The table's name.
    pub name: Bytes,
    /// Which columns identify a row in updates and deletes.
    pub replica_identity: ReplicaIdentity,
    /// The published columns in row order.
    pub columns: Vec<Column>,
}

impl Relation {
    /// Returns the schema's name, `pg_catalog` where an empty one was sent.
    #[must_use]
    pub fn schema_name(&self) -> &[u8] {
        schema_name(&self.schema)
    }
}

/// `pg_class.relreplident`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaIdentity {
    /// `d`: the primary key.
    Default,
    /// `n`: nothing.
    Nothing,
    /// `f`: all columns.
    Full,
    /// `i`: a chosen index.
    Index,
}

/// One column of a [`Relation`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Whether the column is part of the replica identity. Bit 0 of the wire's flags.
    pub key: bool,
    /// The column's name.
    pub name: Bytes,
    /// The column's type.
    pub type_oid: Oid,
    /// The type modifier (`atttypmod`), -1 for none.
    pub type_modifier: i32,
}

/// A type that is not built in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Type {
    /// The streamed transaction it belongs to.
    pub xid: Option<Xid>,
    /// The type's identifier.
    pub oid: Oid,
    /// The schema as sent: empty for `pg_catalog`, so that encoding restores the bytes. See
    /// [`schema_name`](Self::schema_name).
    pub schema: Bytes,
    /// The type's name.
    pub name: Bytes,
}

impl Type {
    /// Returns the schema's name, `pg_catalog` where an empty one was sent.
    #[must_use]
    pub fn schema_name(&self) -> &[u8] {
        schema_name(&self.schema)
    }
}

/// PostgreSQL leaves out the name of the schema that most types are in, to save bytes.
fn schema_name(sent: &Bytes) -> &[u8] {
    if sent.is_empty() { b"pg_catalog" } else { sent }
}

/// A new row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Insert {
    /// The streamed transaction it belongs to.
    pub xid: Option<Xid>,
    /// The table.
    pub relation: Oid,
    /// The row.
    pub new: Tuple,
}

/// What is sent of a row before its change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OldTuple {
    /// `K`: the columns of the replica identity, all others null.
    Key(Tuple),
    /// `O`: the whole row.
    Full(Tuple),
}

/// A changed row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// The streamed transaction it belongs to.
    pub xid: Option<Xid>,
    /// The table.
    pub relation: Oid,
    /// The row before, where the replica identity asks for it.
    pub old: Option<OldTuple>,
    /// The row after.
    pub new: Tuple,
}

/// A removed row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delete {
    /// The streamed transaction it belongs to.
    pub xid: Option<Xid>,
    /// The table.
    pub relation: Oid,
    /// The row before.
    pub old: OldTuple,
}

/// Emptied tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Truncate {
    /// The streamed transaction it belongs to.
    pub xid: Option<Xid>,
    /// Whether `CASCADE` was given. Bit 0 of the wire's options.
    pub cascade: bool,
    /// Whether `RESTART IDENTITY` was given. Bit 1 of the wire's options.
    pub restart_identity: bool,
    /// The tables.
    pub relations: Vec<Oid>,
}

/// What `pg_logical_emit_message` wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogicalMessage {
    /// The streamed transaction it belongs to.
    pub xid: Option<Xid>,
    /// Whether it is part of a transaction; otherwise it came at once, whatever became of its writer.
    pub transactional: bool,
    /// Its position.
    pub lsn: Lsn,
    /// Who it is for.
    pub prefix: Bytes,
    /// Its content. A slice of the received buffer.
    pub content: Bytes,
}

/// The start of a block of a transaction that still runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamStart {
    /// The transaction.
    pub xid: Xid,
    /// Whether this is its first block.
    pub first_segment: bool,
}

/// The commit of a streamed transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamCommit {
    /// The transaction.
    pub xid: Xid,
    /// Reserved by the protocol, 0 today.
    pub flags: u8,
    /// Where the commit record starts.
    pub commit_lsn: Lsn,
    /// Where the commit record ends.
    pub end_lsn: Lsn,
    /// When it was committed.
    pub commit_time: Timestamp,
}

/// The rollback of a streamed transaction or of one of its subtransactions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamAbort {
    /// The transaction.
    pub xid: Xid,
    /// The part that is rolled back; equal to `xid` for the whole.
    pub subxid: Xid,
    /// Version 4 with `streaming = parallel`: where the abort record starts, and when it was written.
    pub abort: Option<(Lsn, Timestamp)>,
}

/// The start of a transaction that will be prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BeginPrepare {
    /// Where the prepare record starts.
    pub prepare_lsn: Lsn,
    /// Where the prepare record ends.
    pub end_lsn: Lsn,
    /// When it was prepared.
    pub prepare_time: Timestamp,
    /// The transaction's id.
    pub xid: Xid,
    /// The name given to `PREPARE TRANSACTION`.
    pub gid: Bytes,
}

/// A prepared transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepare {
    /// Reserved by the protocol, 0 today.
    pub flags: u8,
    /// Where the prepare record starts.
    pub prepare_lsn: Lsn,
    /// Where the prepare record ends.
    pub end_lsn: Lsn,
    /// When it was prepared.
    pub prepare_time: Timestamp,
    /// The transaction's id.
    pub xid: Xid,
    /// The name given to `PREPARE TRANSACTION`.
    pub gid: Bytes,
}

/// The commit of a prepared transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitPrepared {
    /// Reserved by the protocol, 0 today.
    pub flags: u8,
    /// Where the commit record starts.
    pub commit_lsn: Lsn,
    /// Where the commit record ends.
    pub end_lsn: Lsn,
    /// When it was committed.
    pub commit_time: Timestamp,
    /// The transaction's id.
    pub xid: Xid,
    /// The name given to `PREPARE TRANSACTION`.
    pub gid: Bytes,
}

/// The rollback of a prepared transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RollbackPrepared {
    /// Reserved by the protocol, 0 today.
    pub flags: u8,
    /// Where the prepare record ended.
    pub prepare_end_lsn: Lsn,
    /// Where the rollback record ends.
    pub rollback_end_lsn: Lsn,
    /// When it was prepared.
    pub prepare_time: Timestamp,
    /// When it was rolled back.
    pub rollback_time: Timestamp,
    /// The transaction's id.
    pub xid: Xid,
    /// The name given to `PREPARE TRANSACTION`.
    pub gid: Bytes,
}
