//! The payload of one `CopyData` message (PostgreSQL manual, section 54.4, "Streaming Replication Protocol").
//!
//! ```text
//! from the server
//!   XLogData               w  wal_start:8 wal_end:8 server_time:8 data
//!   Primary keepalive      k  wal_end:8 server_time:8 reply_requested:1
//! to the server
//!   Standby status update  r  written:8 flushed:8 applied:8 client_time:8 reply_requested:1
//! ```

use bytes::{BufMut, Bytes, BytesMut};

use crate::error::DecodeError;
use crate::reader::Reader;
use crate::{Lsn, Timestamp};

/// What the server sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicationMessage {
    /// A piece of the stream.
    XLogData(XLogData),
    /// A sign of life.
    PrimaryKeepalive(PrimaryKeepalive),
}

/// A piece of the stream: with `pgoutput`, exactly one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XLogData {
    /// The position that the data is about; 0 for some messages of `pgoutput`, such as Relation.
    pub wal_start: Lsn,
    /// The same again: logical decoding has no other use for it.
    pub wal_end: Lsn,
    /// The server's clock when it sent this.
    pub server_time: Timestamp,
    /// The message, for [`Decoder::decode`](crate::Decoder::decode). A slice of the received buffer.
    pub data: Bytes,
}

/// A sign of life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrimaryKeepalive {
    /// Up to where the server has decoded and sent what there was to send.
    pub wal_end: Lsn,
    /// The server's clock when it sent this.
    pub server_time: Timestamp,
    /// Whether the server will close the connection unless it hears a [`StandbyStatusUpdate`] soon.
    pub reply_requested: bool,
}

/// What the client answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandbyStatusUpdate {
    /// The end of what was received.
    pub written: Lsn,
    /// The end of what is safe: the slot moves here, and what lies before is not sent again.
    pub flushed: Lsn,
    /// The end of what was applied.
    pub applied: Lsn,
    /// The client's clock.
    pub client_time: Timestamp,
    /// Whether the server should answer at once with a [`PrimaryKeepalive`].
    pub reply_requested: bool,
}

impl ReplicationMessage {
    /// Decodes the payload of one `CopyData` message.
    ///
    /// # Errors
    ///
    /// The bytes are not exactly one such message.
    pub fn decode(payload: Bytes) -> Result<Self, DecodeError> {
        let mut reader = Reader::new("CopyData", payload);
        match reader.u8("kind")? {
            b'w' => {
                reader.name("XLogData");
                Ok(Self::XLogData(XLogData {
                    wal_start: reader.lsn("wal start")?,
                    wal_end: reader.lsn("wal end")?,
                    server_time: reader.timestamp("server time")?,
                    data: reader.rest(),
                }))
            }
            b'k' => {
                reader.name("Primary keepalive");
                let keepalive = PrimaryKeepalive {
                    wal_end: reader.lsn("wal end")?,
                    server_time: reader.timestamp("server time")?,
                    reply_requested: reader.bool("reply requested")?,
                };
                reader.finish()?;
                Ok(Self::PrimaryKeepalive(keepalive))
            }
            found => Err(reader.unknown("kind", "w or k", found)),
        }
    }

    /// Appends the payload's bytes to `out`.
    pub fn encode(&self, out: &mut BytesMut) {
        match self {
            Self::XLogData(XLogData { wal_start, wal_end, server_time, data }) => {
                out.reserve(1 + 3 * size_of::<u64>() + data.len());
                out.put_u8(b'w');
                out.put_u64(wal_start.0);
                out.put_u64(wal_end.0);
                out.put_i64(server_time.0);
                out.put_slice(data);
            }
            Self::PrimaryKeepalive(PrimaryKeepalive { wal_end, server_time, reply_requested }) => {
                out.put_u8(b'k');
                out.put_u64(wal_end.0);
                out.put_i64(server_time.0);
                out.put_u8(u8::from(*reply_requested));
            }
        }
    }
}

impl StandbyStatusUpdate {
    /// Decodes the payload of one `CopyData` message, as a scripted server does.
    ///
    /// # Errors
    ///
    /// The bytes are not exactly one such message.
    pub fn decode(payload: Bytes) -> Result<Self, DecodeError> {
        let mut reader = Reader::new("Standby status update", payload);
        match reader.u8("kind")? {
            b'r' => {}
            found => return Err(reader.unknown("kind", "r", found)),
        }
        let update = Self {
            written: reader.lsn("written")?,
            flushed: reader.lsn("flushed")?,
            applied: reader.lsn("applied")?,
            client_time: reader.timestamp("client time")?,
            reply_requested: reader.bool("reply requested")?,
        };
        reader.finish()?;
        Ok(update)
    }

    /// Appends the payload's bytes to `out`.
    pub fn encode(&self, out: &mut BytesMut) {
        out.put_u8(b'r');
        out.put_u64(self.written.0);
        out.put_u64(self.flushed.0);
        out.put_u64(self.applied.0);
        out.put_i64(self.client_time.0);
        out.put_u8(u8::from(self.reply_requested));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that gets an error where it wants a value should stop")]
mod tests {
    use super::*;

    const XLOG_DATA: &[u8] = b"w\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\xff\xff\xff\xff\xff\xff\xff\xffE";
    const KEEPALIVE: &[u8] = b"k\0\0\0\x16\xb3\x74\xd8\x48\0\0\0\0\0\0\0\x05\x01";
    const STATUS: &[u8] = b"r\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x04\0";

    fn encoded(message: &ReplicationMessage) -> BytesMut {
        let mut out = BytesMut::new();
        message.encode(&mut out);
        out
    }

    #[test]
    fn xlog_data_holds_the_rest_of_the_payload_without_a_copy() {
        let payload = Bytes::from_static(XLOG_DATA);
        let message = ReplicationMessage::decode(payload.clone()).unwrap();
        let data = payload.slice(25..);
        let ReplicationMessage::XLogData(found) = &message else { unreachable!("{message:?}") };
        assert_eq!(found.data.as_ptr(), data.as_ptr());
        let expected = XLogData { wal_start: Lsn(1), wal_end: Lsn(2), server_time: Timestamp(-1), data };
        assert_eq!(*found, expected);
        assert_eq!(encoded(&message), XLOG_DATA);
    }

    #[test]
    fn a_keepalive_tells_the_position_and_whether_to_answer() {
        let message = ReplicationMessage::decode(Bytes::from_static(KEEPALIVE)).unwrap();
        let expected =
            PrimaryKeepalive { wal_end: Lsn(0x16_B374_D848), server_time: Timestamp(5), reply_requested: true };
        assert_eq!(message, ReplicationMessage::PrimaryKeepalive(expected));
        assert_eq!(encoded(&message), KEEPALIVE);
    }

    #[test]
    fn a_status_update_puts_written_before_flushed_before_applied() {
        let update = StandbyStatusUpdate {
            written: Lsn(3),
            flushed: Lsn(2),
            applied: Lsn(1),
            client_time: Timestamp(4),
            reply_requested: false,
        };
        let mut out = BytesMut::new();
        update.encode(&mut out);
        assert_eq!(out, STATUS);
        assert_eq!(StandbyStatusUpdate::decode(out.freeze()), Ok(update));
    }

    #[test]
    fn a_payload_that_is_cut_or_too_long_is_refused() {
        for end in 0..25 {
            assert!(ReplicationMessage::decode(Bytes::from_static(&XLOG_DATA[..end])).is_err(), "{end}");
        }
        for end in 0..KEEPALIVE.len() {
            assert!(ReplicationMessage::decode(Bytes::from_static(&KEEPALIVE[..end])).is_err(), "{end}");
        }
        for end in 0..STATUS.len() {
            assert!(StandbyStatusUpdate::decode(Bytes::from_static(&STATUS[..end])).is_err(), "{end}");
        }
        assert!(ReplicationMessage::decode([KEEPALIVE, b"\0"].concat().into()).is_err());
        assert!(StandbyStatusUpdate::decode([STATUS, b"\0"].concat().into()).is_err());
    }

    #[test]
    fn a_payload_of_another_kind_is_named() {
        let error = ReplicationMessage::decode(Bytes::from_static(b"h")).unwrap_err();
        assert_eq!(error.to_string(), "CopyData message: kind at byte 0: expected w or k, found byte 0x68");
    }
}
