//! What a stream no longer holds of what a read-back would have to know.
//!
//! ```text
//!   removed   kept, before `from`   kept, past `from`
//!   ········  ────────────────────  ─────·──────·────   what was removed behind the last event before `from`
//!                                        ▲      ▲       may have been an event past it
//! ```

use waljet_pipeline::{Fault, Missing};

use crate::api::{Api, StreamInfo};
use crate::readback::Collected;

/// The server lists removed sequences in one answer: so many are asked for at most.
const LISTED: u64 = 100_000;

impl Collected {
    /// Finds out whether an event past the place that publishing resumes from may have been stored and removed.
    ///
    /// # Errors
    ///
    /// Any fault of a request.
    pub(crate) async fn missing(&self, api: &Api, stream: &str, info: &StreamInfo) -> Result<Option<Missing>, Fault> {
        if self.forgotten {
            return Ok(Some(Missing::Unplaced));
        }
        if self.before.is_none() && front_removed(info) {
            return Ok(Some(self.first.map_or(Missing::Everything, Missing::Before)));
        }
        let behind = self.before.unwrap_or(0);
        let between = match info.state.num_deleted {
            0 => false,
            1..=LISTED => {
                let failed = |error: crate::api::ApiError| error.fault("read which messages were removed", stream);
                api.removed(stream).await.map_err(failed)?.iter().any(|sequence| *sequence > behind)
            }
            // That many are removed one by one only where the stream does it by itself.
            _ => !matches!(info.config.retention.as_str(), "" | "limits") || info.config.max_msgs_per_subject > 0,
        };
        Ok(between.then_some(if self.before.is_none() && self.first.is_none() {
            Missing::Everything
        } else {
            Missing::Between
        }))
    }
}

/// Returns whether the stream held messages before its first one.
fn front_removed(info: &StreamInfo) -> bool {
    let begin = info.config.first_seq.max(1);
    let state = &info.state;
    state.first_seq > begin || (state.messages == 0 && state.last_seq >= begin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{StreamConfig, StreamState};

    fn removed(begin: u64, first_seq: u64, last_seq: u64) -> bool {
        let messages = (last_seq + 1).saturating_sub(first_seq.max(1));
        front_removed(&StreamInfo {
            config: StreamConfig { first_seq: begin, ..StreamConfig::default() },
            state: StreamState { messages, first_seq, last_seq, ..StreamState::default() },
            ..StreamInfo::default()
        })
    }

    #[test]
    fn a_stream_that_is_new_misses_nothing_and_one_that_was_purged_does() {
        assert!(!removed(0, 0, 0));
        assert!(!removed(0, 1, 0));
        assert!(!removed(0, 1, 9));
        assert!(removed(0, 2, 9));
        assert!(removed(0, 10, 9));
        // Created to begin with sequence 100: nothing was there before.
        assert!(!removed(100, 100, 99));
        assert!(!removed(100, 100, 105));
        assert!(removed(100, 106, 105));
    }
}
