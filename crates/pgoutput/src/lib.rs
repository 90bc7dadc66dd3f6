//! The wire formats of PostgreSQL logical replication: bytes to messages and back, without I/O.
//!
//! This crate must not see a socket, a clock or a runtime, so that it can be fuzzed and measured
//! alone. The modules, in the order in which the bytes of one change pass them:
//!
//! 1. [`replication`]: the payload of one `CopyData` message is an [`XLogData`] or a
//!    [`PrimaryKeepalive`]; the answer is a [`StandbyStatusUpdate`].
//! 2. [`protocol`]: what was agreed when replication started decides which [`Kind`]s of messages come.
//! 3. [`decode`]: the data of an `XLogData` is one `pgoutput` [`Message`], for protocol versions
//!    1 to 4. A [`Decoder`] remembers what the messages of one connection leave unsaid.
//! 4. [`message`] and [`tuple`](mod@tuple): what such a message holds. Column values are slices of the
//!    received buffer.
//! 5. [`encode`]: the inverse of decoding, for tests and scripted sources.
//! 6. [`error`]: which byte of which field was not what it should be.
//!
//! Positions are [`Lsn`]s and times are [`Timestamp`]s throughout.

#![forbid(unsafe_code)]

pub mod decode;
pub mod encode;
pub mod error;
pub mod lsn;
pub mod message;
pub mod protocol;
mod reader;
pub mod replication;
pub mod tuple;

pub use decode::Decoder;
pub use error::{DecodeError, DecodeFault, EncodeError, EncodeFault};
pub use lsn::{Lsn, ParseLsnError};
pub use message::{
    Begin, BeginPrepare, Column, Commit, CommitPrepared, Delete, Insert, LogicalMessage, Message, Oid, OldTuple,
    Origin, Prepare, Relation, ReplicaIdentity, RollbackPrepared, StreamAbort, StreamCommit, StreamStart, Timestamp,
    Truncate, Type, Update, Xid,
};
pub use protocol::{Kind, ProtocolVersion, Streaming};
pub use replication::{PrimaryKeepalive, ReplicationMessage, StandbyStatusUpdate, XLogData};
pub use tuple::{Tuple, Value};
