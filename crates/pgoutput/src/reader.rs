//! The checked reader: the only place that takes received bytes apart.
//!
//! | manual      | here                  | on the wire                                        |
//! |-------------|-----------------------|----------------------------------------------------|
//! | `Int`*n*    | `u8`, `u16`, `u64`, … | big-endian                                         |
//! | `String`    | [`Reader::string`]    | the bytes, then a zero byte                        |
//! | `Byte`*n*   | [`Reader::sized`]     | `Int32` with the length, then as many bytes        |
//!
//! Every method names the field, so that an error says what was being read. None can panic: the
//! length is compared before anything is taken off the buffer.

use bytes::{Buf, Bytes};

use crate::error::{DecodeError, DecodeFault};
use crate::{Lsn, Oid, Timestamp, Xid};

/// Takes fields off the front of one message.
pub(crate) struct Reader {
    /// The message's name, for errors.
    message: &'static str,
    /// What is left.
    buffer: Bytes,
    /// How long the message is.
    length: usize,
}

impl Reader {
    /// Starts at the first byte of `buffer`.
    pub(crate) fn new(message: &'static str, buffer: Bytes) -> Self {
        Self { message, length: buffer.len(), buffer }
    }

    /// Sets the message's name, once its first byte is known.
    pub(crate) const fn name(&mut self, message: &'static str) {
        self.message = message;
    }

    /// Reads a byte.
    #[inline]
    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, DecodeError> {
        self.array(field).map(u8::from_be_bytes)
    }

    /// Reads an unsigned `Int16`.
    #[inline]
    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, DecodeError> {
        self.array(field).map(u16::from_be_bytes)
    }

    /// Reads a signed `Int32`.
    #[inline]
    pub(crate) fn i32(&mut self, field: &'static str) -> Result<i32, DecodeError> {
        self.array(field).map(i32::from_be_bytes)
    }

    /// Reads a position.
    #[inline]
    pub(crate) fn lsn(&mut self, field: &'static str) -> Result<Lsn, DecodeError> {
        self.array(field).map(u64::from_be_bytes).map(Lsn)
    }

    /// Reads a time.
    #[inline]
    pub(crate) fn timestamp(&mut self, field: &'static str) -> Result<Timestamp, DecodeError> {
        self.array(field).map(i64::from_be_bytes).map(Timestamp)
    }

    /// Reads a transaction id.
    #[inline]
    pub(crate) fn xid(&mut self, field: &'static str) -> Result<Xid, DecodeError> {
        self.array(field).map(u32::from_be_bytes).map(Xid)
    }

    /// Reads the identifier of a relation or a type.
    #[inline]
    pub(crate) fn oid(&mut self, field: &'static str) -> Result<Oid, DecodeError> {
        self.array(field).map(u32::from_be_bytes).map(Oid)
    }

    /// Reads a byte that the manual defines as 0 or 1 and nothing else.
    #[inline]
    pub(crate) fn bool(&mut self, field: &'static str) -> Result<bool, DecodeError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(self.unknown(field, "0 or 1", found)),
        }
    }

    /// Reads a string; the zero byte at its end is not part of the result.
    pub(crate) fn string(&mut self, field: &'static str) -> Result<Bytes, DecodeError> {
        match self.buffer.iter().position(|byte| *byte == 0) {
            Some(end) => {
                let string = self.buffer.split_to(end);
                self.buffer.advance(1);
                Ok(string)
            }
            None => Err(self.error(field, 0, DecodeFault::Unterminated { found: self.buffer.len() })),
        }
    }

    /// Reads a length and as many bytes.
    #[inline]
    pub(crate) fn sized(&mut self, field: &'static str) -> Result<Bytes, DecodeError> {
        let length = self.size(field)?;
        if length > self.buffer.len() {
            return Err(self.too_short(field, length));
        }
        Ok(self.buffer.split_to(length))
    }

    /// Reads a length or a count, which is not negative.
    #[inline]
    pub(crate) fn size(&mut self, field: &'static str) -> Result<usize, DecodeError> {
        let size = self.i32(field)?;
        usize::try_from(size).map_err(|_| self.error(field, size_of::<i32>(), DecodeFault::Negative { found: size }))
    }

    /// Makes a vector for `count` items that take at least `least` bytes each.
    ///
    /// A count from the wire is a claim; memory is taken only as far as the bytes received bear it out.
    #[inline]
    pub(crate) fn vec<T>(&self, field: &'static str, count: usize, least: usize) -> Result<Vec<T>, DecodeError> {
        let bytes = count.saturating_mul(least);
        if bytes > self.buffer.len() {
            return Err(self.too_short(field, bytes));
        }
        Ok(Vec::with_capacity(count))
    }

    /// Takes all that is left.
    pub(crate) fn rest(self) -> Bytes {
        self.buffer
    }

    /// Ends the message.
    #[inline]
    pub(crate) fn finish(&self) -> Result<(), DecodeError> {
        match self.buffer.len() {
            0 => Ok(()),
            found => Err(self.error("end", 0, DecodeFault::Trailing { found })),
        }
    }

    /// Makes the error for a byte, just read, that has none of the `expected` values.
    pub(crate) fn unknown(&self, field: &'static str, expected: &'static str, found: u8) -> DecodeError {
        self.error(field, 1, DecodeFault::Unknown { expected, found })
    }

    /// Makes the error for a message, of which only the first byte has been read, that may not come here.
    pub(crate) fn out_of_place(&self, expected: &'static str) -> DecodeError {
        self.error("kind", 1, DecodeFault::OutOfPlace { expected })
    }

    #[inline]
    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], DecodeError> {
        let Some(array) = self.buffer.first_chunk::<N>().copied() else {
            return Err(self.too_short(field, N));
        };
        self.buffer.advance(N);
        Ok(array)
    }

    #[cold]
    fn too_short(&self, field: &'static str, expected: usize) -> DecodeError {
        self.error(field, 0, DecodeFault::TooShort { expected, found: self.buffer.len() })
    }

    /// Makes an error for the field that starts `back` bytes before what is left.
    #[cold]
    fn error(&self, field: &'static str, back: usize, fault: DecodeFault) -> DecodeError {
        let offset = self.length - self.buffer.len() - back;
        DecodeError { message: self.message, field, offset, fault }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that gets an error where it wants a value should stop")]
mod tests {
    use super::*;

    fn reader(bytes: &'static [u8]) -> Reader {
        Reader::new("Test", Bytes::from_static(bytes))
    }

    fn error(field: &'static str, offset: usize, fault: DecodeFault) -> DecodeError {
        DecodeError { message: "Test", field, offset, fault }
    }

    #[test]
    fn an_error_tells_where_its_field_starts() {
        let mut reader = reader(b"\x01\xff\xff\xff\xffab");
        assert_eq!(reader.bool("first"), Ok(true));
        assert_eq!(reader.size("size"), Err(error("size", 1, DecodeFault::Negative { found: -1 })));
        assert_eq!(reader.i32("third"), Err(error("third", 5, DecodeFault::TooShort { expected: 4, found: 2 })));
        assert_eq!(reader.finish(), Err(error("end", 5, DecodeFault::Trailing { found: 2 })));
        let fault = DecodeFault::Unknown { expected: "0 or 1", found: b'a' };
        assert_eq!(reader.bool("fourth"), Err(error("fourth", 5, fault)));
    }

    #[test]
    fn an_error_reads_as_one_sentence() {
        let error = reader(b"abc").string("name").unwrap_err();
        assert_eq!(
            error.to_string(),
            "Test message: name at byte 0: expected a string with a zero byte at its end, \
             found no zero byte in 3 bytes"
        );
    }

    #[test]
    fn strings_may_be_empty_and_hold_any_other_byte() {
        let mut reader = reader(b"\0\xff\xfe\0");
        assert_eq!(reader.string("empty").unwrap(), "");
        assert_eq!(reader.string("bytes").unwrap(), &b"\xff\xfe"[..]);
        assert_eq!(reader.finish(), Ok(()));
    }

    #[test]
    fn a_count_takes_no_memory_that_the_bytes_do_not_bear_out() {
        let reader = reader(b"1234567");
        assert_eq!(reader.vec::<u64>("items", 1, 4).unwrap().capacity(), 1);
        let fault = DecodeFault::TooShort { expected: 8, found: 7 };
        assert_eq!(reader.vec::<u64>("items", 2, 4), Err(error("items", 0, fault)));
        assert!(reader.vec::<u64>("items", usize::MAX, 4).is_err());
    }
}
