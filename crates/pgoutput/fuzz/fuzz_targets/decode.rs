//! Any bytes, in any state, give a message or an error.

#![no_main]

mod context;

use libfuzzer_sys::fuzz_target;
use waljet_pgoutput::{ReplicationMessage, StandbyStatusUpdate};

fuzz_target!(|input: &[u8]| {
    let Some((mut decoder, data)) = context::split(input) else { return };
    if let Err(error) = decoder.decode(data.clone()) {
        assert!(error.offset <= data.len(), "{error}");
    }
    ReplicationMessage::decode(data.clone()).ok();
    StandbyStatusUpdate::decode(data).ok();
});
