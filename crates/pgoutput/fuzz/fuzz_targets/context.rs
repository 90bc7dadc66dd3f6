//! The first byte of an input chooses what was agreed and where in the stream the decoder is.

use bytes::Bytes;
use waljet_pgoutput::{Decoder, ProtocolVersion, Streaming};

/// Splits an input into a decoder and the bytes that it is to decode.
pub fn split(input: &[u8]) -> Option<(Decoder, Bytes)> {
    let (first, data) = input.split_first()?;
    let version = ProtocolVersion::ALL[usize::from(first & 3)];
    let streaming = match first >> 2 & 3 {
        0 => Streaming::Off,
        1 => Streaming::On,
        _ => Streaming::Parallel,
    };
    let mut decoder = Decoder::new(version, streaming);
    if first & 16 != 0 {
        // Refused where streaming is off; the decoder then stays outside a block.
        decoder.decode(Bytes::from_static(b"S\0\0\0\x01\x01")).ok();
    }
    Some((decoder, Bytes::copy_from_slice(data)))
}
