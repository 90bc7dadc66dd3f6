//! The stored checkpoint as a key of a JetStream bucket, for roles that may not write to the database.
//!
//! A bucket is a stream with one subject for each key. It is read and written by plain API requests: the
//! client's own functions for buckets cannot read the answers of servers before 2.10.

use std::time::Duration;

use async_nats::{Client, HeaderMap, Request};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::Mutex;
use waljet_pgoutput::{Lsn, Timestamp};
use waljet_pipeline::error::CHECKPOINT_MISSING;
use waljet_pipeline::{
    Action, Check, Checkpoint, Checkpoints, Confirmed, Fault, History, Replace, StreamMark, Visible,
};

use crate::api::{Api, ApiError};
use crate::error;
use crate::options::{NatsOptions, StreamOptions};
use crate::provision::{Done, Outcome};

/// The bucket, as `nats kv` names it.
pub const CHECKPOINT_BUCKET: &str = "waljet";

/// The stream that a bucket is.
const STREAM: &str = "KV_waljet";

/// How long a write waits for its acknowledgement.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a write is tried again when another relay's came in between.
const ATTEMPTS: usize = 8;

/// Keeps checkpoints in a JetStream bucket.
#[derive(Debug)]
pub struct CheckpointBucket {
    nats: NatsOptions,
    key: String,
    client: Mutex<Option<Client>>,
}

/// The value of a key; numbers that JavaScript could not hold are text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    system_id: String,
    timeline: u32,
    confirmed_lsn: String,
    #[serde(default)]
    stream: Option<String>,
    #[serde(default)]
    stream_created: Option<String>,
    #[serde(default)]
    stream_sequence: u64,
    #[serde(default)]
    snapshot: Option<String>,
    #[serde(default)]
    snapshot_after: Option<String>,
    #[serde(default)]
    gap: Option<String>,
    #[serde(default)]
    at_unix_micros: i64,
}

impl CheckpointBucket {
    /// Makes a store for the checkpoint of the slot that feeds a stream.
    #[must_use]
    pub fn new(nats: NatsOptions, stream: &str, slot: &str) -> Self {
        Self { nats, key: format!("{stream}.{slot}"), client: Mutex::new(None) }
    }

    /// Creates the bucket where it is missing.
    ///
    /// # Errors
    ///
    /// Any fault of the connection, and the broker's reason for not creating it.
    pub async fn init(&self, options: &StreamOptions) -> Result<Done, Fault> {
        let api = self.api().await?.1;
        let what = format!("bucket {CHECKPOINT_BUCKET:?}");
        let settings = json!({
            "name": STREAM,
            "subjects": [format!("$KV.{CHECKPOINT_BUCKET}.>")],
            "storage": "file",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "num_replicas": options.replicas,
            "allow_rollup_hdrs": true,
            "deny_delete": true,
            "allow_direct": true,
        });
        match api.stream_info(STREAM).await {
            Ok(_) => return Ok(Done { what, outcome: Outcome::Existed }),
            Err(ApiError::Broker { err_code: 10059, .. }) => {}
            Err(error) => return Err(error.fault("look for the bucket", STREAM)),
        }
        api.create_stream(STREAM, &settings).await.map_err(|error| error.fault("create the bucket", STREAM))?;
        Ok(Done { what, outcome: Outcome::Created })
    }

    /// Looks whether the checkpoint can be read.
    pub async fn check(&self) -> Check {
        let place = format!("key {:?} of bucket {CHECKPOINT_BUCKET:?}", self.key);
        match self.load().await {
            Ok(Some(found)) => Check::good("checkpoint", format!("{place} stands at {}", found.confirmed.lsn)),
            Ok(None) => Check::good("checkpoint", format!("{place} does not exist yet")),
            Err(fault) if fault.code == CHECKPOINT_MISSING => {
                Check::warning("checkpoint", fault.summary(), fault.hint.unwrap_or_default())
            }
            Err(fault) => Check::fault("checkpoint", fault),
        }
    }

    fn subject(&self) -> String {
        format!("$KV.{CHECKPOINT_BUCKET}.{}", self.key)
    }

    async fn api(&self) -> Result<(Client, Api), Fault> {
        let mut client = self.client.lock().await;
        let client = match &*client {
            Some(client) => client.clone(),
            None => client.insert(crate::connect(&self.nats).await?).clone(),
        };
        let api = Api::on_client(&client, self.nats.js_prefix(), self.nats.connect_timeout);
        Ok((client, api))
    }

    /// Reads the key with its sequence, 0 where there is none.
    async fn read(&self, api: &Api) -> Result<(u64, Option<Checkpoint>), Fault> {
        let value = match api.last_value(STREAM, &self.subject()).await {
            Ok(value) => value,
            Err(ApiError::Broker { err_code: 10059, .. }) => return Err(missing()),
            Err(error) => return Err(error.fault("read the checkpoint", STREAM)),
        };
        let Some((sequence, value)) = value else { return Ok((0, None)) };
        // A key that was deleted has an empty value.
        if value.is_empty() {
            return Ok((sequence, None));
        }
        let record = serde_json::from_slice::<Record>(&value).ok().and_then(|record| record.checkpoint());
        let unreadable = || {
            let what = format!("the value of key {:?} in bucket {CHECKPOINT_BUCKET:?} is no checkpoint", self.key);
            Fault::new(error::UNEXPECTED_ANSWER, Action::Retry, what)
                .hint(format!("nats kv del {CHECKPOINT_BUCKET} {} removes it", self.key))
        };
        Ok((sequence, Some(record.ok_or_else(unreadable)?)))
    }

    /// Writes the key if it still has the sequence that was read. `false` where it does not.
    async fn write(&self, client: &Client, sequence: u64, record: &Record) -> Result<bool, Fault> {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Expected-Last-Subject-Sequence", sequence.to_string().as_str());
        let body = serde_json::to_vec(record).unwrap_or_default();
        let request = Request::new().payload(body.into()).headers(headers).timeout(Some(WRITE_TIMEOUT));
        let failed = |cause: Box<dyn std::error::Error + Send + Sync>| {
            Fault::new(error::TIMEOUT, Action::Retry, "store the checkpoint")
                .cause(cause)
                .hint(format!("check that the user may publish to {:?}", self.subject()))
        };
        let answer = client.send_request(self.subject(), request).await.map_err(|cause| failed(cause.into()))?;
        let answer: serde_json::Value =
            serde_json::from_slice(&answer.payload).map_err(|cause| failed(cause.into()))?;
        match answer["error"]["err_code"].as_u64() {
            // Another sequence than expected; in clusters under races, too.
            Some(10071 | 10164) => Ok(false),
            Some(code) => {
                let description = answer["error"]["description"].as_str().unwrap_or_default();
                Err(error::broker_fault(code, description, "store the checkpoint", STREAM))
            }
            None => Ok(true),
        }
    }

    async fn replace(&self, checkpoint: &Checkpoint, replace: Replace) -> Result<(), Fault> {
        let (client, api) = self.api().await?;
        for _ in 0..ATTEMPTS {
            let (sequence, stored) = self.read(&api).await?;
            if stored.is_some_and(|stored| !replace.permits(stored.confirmed, checkpoint.confirmed)) {
                return Ok(());
            }
            if self.write(&client, sequence, &Record::of(checkpoint)).await? {
                return Ok(());
            }
        }
        Err(Fault::new(error::FENCE, Action::Retry, "store the checkpoint: its key moves faster than it is written"))
    }

    /// Forgets a connection over which a request failed: credentials may have been changed.
    async fn settle<T>(&self, result: Result<T, Fault>) -> Result<T, Fault> {
        if result.is_err() {
            *self.client.lock().await = None;
        }
        result
    }
}

impl Checkpoints for CheckpointBucket {
    fn name(&self) -> &'static str {
        "nats"
    }

    async fn load(&self) -> Result<Option<Checkpoint>, Fault> {
        let result = async {
            let api = self.api().await?.1;
            Ok(self.read(&api).await?.1)
        };
        let result = result.await;
        self.settle(result).await
    }

    async fn save(&self, checkpoint: &Checkpoint, replace: Replace) -> Result<(), Fault> {
        let result = self.replace(checkpoint, replace).await;
        self.settle(result).await
    }
}

impl Record {
    fn of(checkpoint: &Checkpoint) -> Self {
        let Confirmed { history: History { system_id, timeline }, lsn } = checkpoint.confirmed;
        let stream = checkpoint.stream.as_ref();
        Self {
            system_id: system_id.to_string(),
            timeline,
            confirmed_lsn: lsn.to_string(),
            stream: stream.map(|stream| stream.stream.clone()),
            stream_created: stream.map(|stream| stream.created.clone()),
            stream_sequence: stream.map_or(0, |stream| stream.last_sequence),
            snapshot: checkpoint.visible.as_ref().map(|visible| visible.snapshot.clone()),
            snapshot_after: checkpoint.visible.as_ref().map(|visible| visible.after.to_string()),
            gap: checkpoint.gap.clone(),
            at_unix_micros: checkpoint.at.unix_micros(),
        }
    }

    fn checkpoint(&self) -> Option<Checkpoint> {
        let history = History { system_id: self.system_id.parse().ok()?, timeline: self.timeline };
        let lsn: Lsn = self.confirmed_lsn.parse().ok()?;
        let stream = self.stream.clone().zip(self.stream_created.clone());
        let last_sequence = self.stream_sequence;
        let after = self.snapshot_after.as_ref().and_then(|after| after.parse().ok());
        Some(Checkpoint {
            confirmed: Confirmed { history, lsn },
            stream: stream.map(|(stream, created)| StreamMark { stream, created, last_sequence }),
            visible: self.snapshot.clone().zip(after).map(|(snapshot, after)| Visible { snapshot, after }),
            gap: self.gap.clone(),
            at: Timestamp::from_unix_micros(self.at_unix_micros),
        })
    }
}

fn missing() -> Fault {
    let what = format!("the bucket {CHECKPOINT_BUCKET:?} does not exist");
    Fault::new(CHECKPOINT_MISSING, Action::Halt, what).hint("waljet init")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_survives_writing_and_reading() {
        let history = History { system_id: u64::MAX, timeline: 2 };
        let stream = StreamMark { stream: "S".into(), created: "2026-01-01T00:00:00Z".into(), last_sequence: 7 };
        let confirmed = Confirmed { history, lsn: Lsn(0x16B_3748) };
        let at = Timestamp::from_unix_micros(1_700_000_000_000_000);
        let visible = Some(Visible { snapshot: "7:9:8".into(), after: Lsn(3) });
        for stream in [Some(stream), None] {
            let checkpoint = Checkpoint { confirmed, stream, visible: visible.clone(), gap: Some("why".into()), at };
            assert_eq!(Record::of(&checkpoint).checkpoint(), Some(checkpoint));
        }
    }

    #[test]
    fn a_value_that_is_none_is_not_taken_for_one() {
        let record = Record { confirmed_lsn: "x".into(), ..Record::of(&example()) };
        assert_eq!(record.checkpoint(), None);
    }

    fn example() -> Checkpoint {
        let history = History { system_id: 1, timeline: 1 };
        Checkpoint {
            confirmed: Confirmed { history, lsn: Lsn(1) },
            stream: None,
            visible: None,
            gap: None,
            at: Timestamp(0),
        }
    }
}
