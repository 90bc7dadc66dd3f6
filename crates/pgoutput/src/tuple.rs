//! Row data as `pgoutput` sends it (PostgreSQL manual, section 54.9, `TupleData`).

use bytes::Bytes;

/// The values of one row, in the column order of the last [`Relation`](crate::Relation) message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuple(pub Vec<Value>);

/// One column's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// SQL NULL.
    Null,
    /// A TOASTed value that the change did not touch; PostgreSQL does not send it again.
    UnchangedToast,
    /// The type's text form, in the client encoding. A slice of the received buffer.
    Text(Bytes),
    /// The type's binary send form. A slice of the received buffer.
    Binary(Bytes),
}
