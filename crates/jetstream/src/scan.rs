//! Reading the headers of a range of the stream, in its order.
//!
//! An ordered consumer without acknowledgements reads them, headers only. A stream that removes what was consumed
//! takes no such consumer, or would count it among those that have to consume: there each message is asked for, of the leader.

use std::ops::{ControlFlow, RangeInclusive};

use futures_util::StreamExt;
use serde_json::json;
use tokio::time::{Duration, Instant, timeout};
use waljet_pipeline::{Action, Fault, IdDigest, headers};

use crate::api::{Api, ApiError, Stored, StreamInfo};
use crate::error;

/// Messages asked for at once: with headers as large as they may be, 64 MiB.
const BATCH: u64 = 1024;

/// A consumer that nobody asks is gone after this.
const CONSUMER_LIFE: Duration = Duration::from_secs(30);

/// The stream gives nothing for this long: the read has failed.
const SILENCE: Duration = Duration::from_secs(5);

/// How often a long read tells how far it is.
const PROGRESS: Duration = Duration::from_secs(3);

/// The answer to a pull that finds nothing in its time, and that of one that would not wait.
const NOTHING_MORE: [u16; 2] = [404, 408];

/// Reads of one stream, and how many messages they were.
#[derive(Debug)]
pub(crate) struct Scan<'a> {
    api: &'a Api,
    stream: &'a str,
    space: &'a str,
    /// Whether the stream removes what was consumed.
    consumed: bool,
    messages: u64,
    told: Instant,
}

impl<'a> Scan<'a> {
    /// Begins to read messages of `stream` below `space`.
    pub(crate) fn new(api: &'a Api, stream: &'a str, space: &'a str, info: &StreamInfo) -> Self {
        let retention = info.config.retention.as_str();
        let consumed = !matches!(retention, "" | "limits");
        Self { api, stream, space, consumed, messages: 0, told: Instant::now() }
    }

    /// How many messages were read so far.
    pub(crate) fn messages(&self) -> u64 {
        self.messages
    }

    /// Reads the first message at or behind a sequence.
    pub(crate) async fn next(&mut self, sequence: u64) -> Result<Option<Stored>, Fault> {
        let next = self.api.next_message(self.stream, self.space, sequence).await.map_err(|e| self.failed(e))?;
        self.messages += u64::from(next.is_some());
        Ok(next)
    }

    /// Reads a range, until `take` has seen enough.
    ///
    /// # Errors
    ///
    /// Any fault of a request; what was read then says nothing about the rest.
    pub(crate) async fn read(
        &mut self,
        range: RangeInclusive<u64>,
        mut take: impl FnMut(&Stored) -> ControlFlow<()> + Send,
    ) -> Result<(), Fault> {
        // The consumer may be served by a replica that is behind, and then has less than there is. Only the leader's last message shows
        // that all was read.
        let last = self.api.last_message(self.stream, self.space).await.map_err(|e| self.failed(e))?;
        let Some(last) = last.filter(|_| !self.consumed) else {
            // 2.9 does not find it where it was deleted.
            return self.read_singly(range, take).await;
        };
        if last.sequence < *range.start() {
            return Ok(());
        }
        let end = last.sequence.min(*range.end());
        let config = consumer_config(self.space, *range.start());
        let (consumer, pending) = self.api.create_consumer(self.stream, &config).await.map_err(|e| self.failed(e))?;
        let result = self.pull(&consumer, pending, end, &mut take).await;
        // Left behind, it would go by itself after a while.
        let _ = self.api.delete_consumer(self.stream, &consumer).await;
        result
    }

    async fn read_singly(
        &mut self,
        range: RangeInclusive<u64>,
        mut take: impl FnMut(&Stored) -> ControlFlow<()> + Send,
    ) -> Result<(), Fault> {
        let (mut sequence, end) = range.into_inner();
        while let Some(message) = self.next(sequence).await?.filter(|message| message.sequence <= end) {
            self.tell(message.sequence, end);
            if take(&message).is_break() {
                break;
            }
            sequence = message.sequence + 1;
        }
        Ok(())
    }

    async fn pull(
        &mut self,
        consumer: &str,
        mut pending: u64,
        end: u64,
        take: &mut (impl FnMut(&Stored) -> ControlFlow<()> + Send),
    ) -> Result<(), Fault> {
        loop {
            // With none pending the replica is behind: what it lacks will come.
            let (most, expires) = (if pending == 0 { BATCH } else { pending.min(BATCH) }, SILENCE);
            let size = usize::try_from(most).unwrap_or(usize::MAX);
            let mut batch = self.api.next_messages(self.stream, consumer, size, expires).await?;
            let mut any = false;
            for _ in 0..most {
                let Ok(Some(message)) = timeout(expires + SILENCE, batch.next()).await else {
                    return Err(self.silent(end));
                };
                if let Some(status) = message.status {
                    if NOTHING_MORE.contains(&status.as_u16()) {
                        break;
                    }
                    let what = format!("read back stream {:?}: the consumer ended with {status}", self.stream);
                    return Err(Fault::new(error::UNEXPECTED_ANSWER, Action::Retry, what));
                }
                let Some((sequence, left)) = message.reply.as_deref().and_then(place) else {
                    let what = format!("read back stream {:?}: a message names no sequence", self.stream);
                    return Err(Fault::new(error::UNEXPECTED_ANSWER, Action::Retry, what));
                };
                // Another publisher may have written on.
                if sequence > end {
                    return Ok(());
                }
                (any, pending) = (true, left);
                self.messages += 1;
                self.tell(sequence, end);
                let header = |name| message.headers.as_ref().and_then(|headers| headers.get(name)).map(|v| v.as_str());
                let id = header(headers::MSG_ID).map(IdDigest::of);
                if take(&Stored::new(sequence, id, header(headers::POSITION))).is_break() || sequence == end {
                    return Ok(());
                }
            }
            if !any {
                return Err(self.silent(end));
            }
        }
    }

    /// Tells how far a long read is.
    fn tell(&mut self, sequence: u64, end: u64) {
        if self.told.elapsed() >= PROGRESS {
            self.told = Instant::now();
            let (stream, messages) = (self.stream, self.messages);
            tracing::info!(%stream, messages, sequence, end, "reading the stream back");
        }
    }

    fn failed(&self, error: ApiError) -> Fault {
        error.fault("read back the stream", self.stream)
    }

    fn silent(&self, end: u64) -> Fault {
        let what = format!("read back stream {:?}: it gave nothing more before sequence {end}", self.stream);
        Fault::new(error::TIMEOUT, Action::Retry, what)
    }
}

fn consumer_config(space: &str, start: u64) -> serde_json::Value {
    json!({
        "deliver_policy": "by_start_sequence", "opt_start_seq": start,
        "ack_policy": "none", "replay_policy": "instant", "filter_subject": space,
        "headers_only": true, "mem_storage": true, "num_replicas": 1,
        "inactive_threshold": u64::try_from(CONSUMER_LIFE.as_nanos()).unwrap_or(u64::MAX),
    })
}

/// Returns the stream sequence, and how many messages follow for the consumer, of
/// `$JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer sequence>.<time>.<pending>`, where two more
/// tokens, domain and account, may stand before the stream and one behind.
fn place(reply: &str) -> Option<(u64, u64)> {
    let tokens: Vec<&str> = reply.split('.').collect();
    let at = match tokens.len() {
        9 => 5,
        11.. => 7,
        _ => return None,
    };
    Some((tokens.get(at)?.parse().ok()?, tokens.get(at + 3)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_found_in_both_forms_of_the_reply_subject() {
        assert_eq!(place("$JS.ACK.S.c.1.42.7.1700000000000000000.3"), Some((42, 3)));
        assert_eq!(place("$JS.ACK._.acc.S.c.1.42.7.1700000000000000000.3"), Some((42, 3)));
        assert_eq!(place("$JS.ACK._.acc.S.c.1.42.7.1700000000000000000.3.token"), Some((42, 3)));
        assert_eq!(place("$JS.ACK.S"), None);
    }
}
