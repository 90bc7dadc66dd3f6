//! What was decoded encodes to bytes that decode to the same again.

#![no_main]

mod context;

use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;
use waljet_pgoutput::{ReplicationMessage, StandbyStatusUpdate};

fuzz_target!(|input: &[u8]| {
    let Some((decoder, data)) = context::split(input) else { return };
    if let Ok(message) = decoder.clone().decode(data.clone()) {
        let again = message.to_bytes().expect("what was decoded has a wire form");
        assert_eq!(again.len(), data.len());
        assert_eq!(decoder.clone().decode(again), Ok(message));
    }
    let mut out = BytesMut::new();
    if let Ok(message) = ReplicationMessage::decode(data.clone()) {
        message.encode(&mut out);
        assert_eq!(out, data);
    }
    out.clear();
    if let Ok(update) = StandbyStatusUpdate::decode(data.clone()) {
        update.encode(&mut out);
        assert_eq!(out, data);
    }
});
