//! What is agreed when replication starts, and the kinds of messages that follow from it.

use std::fmt;

/// The option `proto_version` of `START_REPLICATION`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ProtocolVersion {
    /// PostgreSQL 10 and later.
    V1 = 1,
    /// PostgreSQL 14 and later: transactions can be streamed while they still run.
    V2 = 2,
    /// PostgreSQL 15 and later: transactions can be sent when they are prepared.
    V3 = 3,
    /// PostgreSQL 16 and later: streamed transactions can be applied in parallel.
    V4 = 4,
}

impl ProtocolVersion {
    /// All versions, oldest first.
    pub const ALL: [Self; 4] = [Self::V1, Self::V2, Self::V3, Self::V4];

    /// Returns the number that the option has.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }
}

impl fmt::Display for ProtocolVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(f)
    }
}

/// The option `streaming` of `START_REPLICATION`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Streaming {
    /// Only committed transactions are sent.
    #[default]
    Off,
    /// Version 2: large transactions are sent while they still run.
    On,
    /// Version 4: as `On`, and [`StreamAbort`](crate::StreamAbort) says where and when.
    Parallel,
}

impl Streaming {
    /// Returns the text that the option has.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Parallel => "parallel",
        }
    }
}

impl fmt::Display for Streaming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The kind of a [`Message`](crate::Message), with the byte that it starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// [`Begin`](crate::Begin).
    Begin = b'B',
    /// [`Commit`](crate::Commit).
    Commit = b'C',
    /// [`Origin`](crate::Origin).
    Origin = b'O',
    /// [`Relation`](crate::Relation).
    Relation = b'R',
    /// [`Type`](crate::Type).
    Type = b'Y',
    /// [`Insert`](crate::Insert).
    Insert = b'I',
    /// [`Update`](crate::Update).
    Update = b'U',
    /// [`Delete`](crate::Delete).
    Delete = b'D',
    /// [`Truncate`](crate::Truncate).
    Truncate = b'T',
    /// [`LogicalMessage`](crate::LogicalMessage).
    Message = b'M',
    /// [`StreamStart`](crate::StreamStart).
    StreamStart = b'S',
    /// [`Message::StreamStop`](crate::Message::StreamStop).
    StreamStop = b'E',
    /// [`StreamCommit`](crate::StreamCommit).
    StreamCommit = b'c',
    /// [`StreamAbort`](crate::StreamAbort).
    StreamAbort = b'A',
    /// [`BeginPrepare`](crate::BeginPrepare).
    BeginPrepare = b'b',
    /// [`Prepare`](crate::Prepare).
    Prepare = b'P',
    /// [`CommitPrepared`](crate::CommitPrepared).
    CommitPrepared = b'K',
    /// [`RollbackPrepared`](crate::RollbackPrepared).
    RollbackPrepared = b'r',
    /// [`Message::StreamPrepare`](crate::Message::StreamPrepare).
    StreamPrepare = b'p',
}

impl Kind {
    /// All kinds, in the order of the manual.
    pub const ALL: [Self; 19] = [
        Self::Begin,
        Self::Message,
        Self::Commit,
        Self::Origin,
        Self::Relation,
        Self::Type,
        Self::Insert,
        Self::Update,
        Self::Delete,
        Self::Truncate,
        Self::StreamStart,
        Self::StreamStop,
        Self::StreamCommit,
        Self::StreamAbort,
        Self::BeginPrepare,
        Self::Prepare,
        Self::CommitPrepared,
        Self::RollbackPrepared,
        Self::StreamPrepare,
    ];

    /// Returns the byte that messages of this kind start with.
    #[must_use]
    pub const fn byte(self) -> u8 {
        self as u8
    }

    /// Returns the kind of messages that start with `byte`.
    #[must_use]
    pub const fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            b'B' => Self::Begin,
            b'C' => Self::Commit,
            b'O' => Self::Origin,
            b'R' => Self::Relation,
            b'Y' => Self::Type,
            b'I' => Self::Insert,
            b'U' => Self::Update,
            b'D' => Self::Delete,
            b'T' => Self::Truncate,
            b'M' => Self::Message,
            b'S' => Self::StreamStart,
            b'E' => Self::StreamStop,
            b'c' => Self::StreamCommit,
            b'A' => Self::StreamAbort,
            b'b' => Self::BeginPrepare,
            b'P' => Self::Prepare,
            b'K' => Self::CommitPrepared,
            b'r' => Self::RollbackPrepared,
            b'p' => Self::StreamPrepare,
            _ => return None,
        })
    }

    /// Returns the manual's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Begin => "Begin",
            Self::Commit => "Commit",
            Self::Origin => "Origin",
            Self::Relation => "Relation",
            Self::Type => "Type",
            Self::Insert => "Insert",
            Self::Update => "Update",
            Self::Delete => "Delete",
            Self::Truncate => "Truncate",
            Self::Message => "Message",
            Self::StreamStart => "Stream Start",
            Self::StreamStop => "Stream Stop",
            Self::StreamCommit => "Stream Commit",
            Self::StreamAbort => "Stream Abort",
            Self::BeginPrepare => "Begin Prepare",
            Self::Prepare => "Prepare",
            Self::CommitPrepared => "Commit Prepared",
            Self::RollbackPrepared => "Rollback Prepared",
            Self::StreamPrepare => "Stream Prepare",
        }
    }

    /// Returns the first protocol version that has messages of this kind.
    #[must_use]
    pub const fn since(self) -> ProtocolVersion {
        match self {
            Self::StreamStart | Self::StreamStop | Self::StreamCommit | Self::StreamAbort => ProtocolVersion::V2,
            Self::BeginPrepare
            | Self::Prepare
            | Self::CommitPrepared
            | Self::RollbackPrepared
            | Self::StreamPrepare => ProtocolVersion::V3,
            Self::Begin
            | Self::Commit
            | Self::Origin
            | Self::Relation
            | Self::Type
            | Self::Insert
            | Self::Update
            | Self::Delete
            | Self::Truncate
            | Self::Message => ProtocolVersion::V1,
        }
    }

    /// Returns whether messages of this kind come only where streaming was asked for.
    #[must_use]
    pub const fn needs_streaming(self) -> bool {
        matches!(
            self,
            Self::StreamStart | Self::StreamStop | Self::StreamCommit | Self::StreamAbort | Self::StreamPrepare
        )
    }

    /// Returns whether messages of this kind may come between Stream Start and Stream Stop.
    #[must_use]
    pub const fn is_part_of_stream(self) -> bool {
        self.has_stream_xid() || matches!(self, Self::Origin | Self::StreamStop)
    }

    /// Returns whether messages of this kind carry the transaction's id between Stream Start and Stream Stop.
    #[must_use]
    pub const fn has_stream_xid(self) -> bool {
        matches!(
            self,
            Self::Relation | Self::Type | Self::Insert | Self::Update | Self::Delete | Self::Truncate | Self::Message
        )
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_found_by_its_byte_and_no_other_byte_is_a_kind() {
        for kind in Kind::ALL {
            assert_eq!(Kind::from_byte(kind.byte()), Some(kind));
        }
        assert_eq!((0..=u8::MAX).filter_map(Kind::from_byte).count(), Kind::ALL.len());
    }

    #[test]
    fn options_print_as_the_server_reads_them() {
        assert_eq!(ProtocolVersion::ALL.map(|version| version.to_string()).join(" "), "1 2 3 4");
        assert_eq!(
            [Streaming::Off, Streaming::On, Streaming::Parallel].map(Streaming::as_str),
            ["off", "on", "parallel"]
        );
    }
}
