//! The books: what the outbox table committed against what the stream stored.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};
use async_nats::jetstream::{
    self,
    consumer::{AckPolicy, pull},
};
use futures_util::{StreamExt, TryStreamExt};

use crate::addresses;
use crate::workload::connect;

/// What was committed against what is stored. All is well when all but the first two are 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Books {
    /// Events in the outbox table.
    pub committed: u64,
    /// Messages in the stream.
    pub stored: u64,
    /// Events that the stream does not hold.
    pub lost: u64,
    /// Messages whose event the stream holds already.
    pub doubled: u64,
    /// Events that stand behind a later one of their key, or of the whole stream by commit position.
    pub reordered: u64,
    /// Events that stand behind a later one of their key; a part of `reordered`.
    pub reordered_in_key: u64,
    /// Messages of no committed event.
    pub foreign: u64,
}

impl Books {
    /// Reads the table and the stream.
    ///
    /// # Errors
    ///
    /// One of the servers does not answer as it should.
    pub async fn read(postgres: &str, nats: &str, stream: &str) -> Result<Self> {
        Ok(Self::balance(&committed(postgres).await?, &stored(nats, stream).await?))
    }

    /// Returns whether nothing is lost, doubled, reordered or foreign.
    #[must_use]
    pub fn balanced(&self) -> bool {
        (self.lost, self.doubled, self.reordered, self.foreign) == (0, 0, 0, 0)
    }

    /// As [`check`](Self::check), for a relay that keeps the order of each key only.
    ///
    /// # Errors
    ///
    /// Something is lost, doubled, foreign, or reordered within its key.
    pub fn check_by_key(&self) -> Result<()> {
        Self { reordered: self.reordered_in_key, ..self.clone() }.check()
    }

    /// Fails with the numbers where the books do not balance.
    ///
    /// # Errors
    ///
    /// Something is lost, doubled, reordered or foreign.
    pub fn check(&self) -> Result<()> {
        anyhow::ensure!(self.balanced(), "the books do not balance: {self}");
        Ok(())
    }

    fn balance(committed: &HashMap<String, Committed>, stored: &[Stored]) -> Self {
        let mut seen = HashSet::with_capacity(stored.len());
        let mut last_version: HashMap<&str, i64> = HashMap::new();
        let mut last_position = (0, 0);
        let mut books = Self { committed: committed.len() as u64, stored: stored.len() as u64, ..Self::default() };
        for message in stored {
            let Some(event) = committed.get(&message.id) else {
                books.foreign += 1;
                continue;
            };
            if !seen.insert(message.id.as_str()) {
                books.doubled += 1;
                continue;
            }
            let before = last_version.insert(&event.key, event.version);
            let in_key = before.is_none_or(|before| before < event.version);
            let in_stream = message.position.is_none_or(|position| position > last_position);
            books.reordered += u64::from(!in_key || !in_stream);
            books.reordered_in_key += u64::from(!in_key);
            last_position = message.position.unwrap_or(last_position);
        }
        books.lost = books.committed - seen.len() as u64;
        books
    }
}

impl fmt::Display for Books {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { committed, stored, lost, doubled, reordered, foreign, .. } = self;
        write!(
            f,
            "committed {committed}, stored {stored}, lost {lost}, doubled {doubled}, reordered {reordered}, foreign {foreign}"
        )
    }
}

/// An event of the table.
#[derive(Debug, Clone)]
struct Committed {
    key: String,
    version: i64,
}

/// A message of the stream.
#[derive(Debug, Clone)]
struct Stored {
    id: String,
    /// Commit LSN and ordinal.
    position: Option<(u64, u64)>,
}

async fn committed(url: &str) -> Result<HashMap<String, Committed>> {
    let client = connect(url).await?;
    let sql = "SELECT id::text, aggregate_id, (payload->>'version')::bigint FROM outbox";
    let rows = client.query_raw(sql, Vec::<String>::new()).await.context("read the outbox table")?;
    let event = |row: tokio_postgres::Row| {
        Ok((
            row.try_get(0)?,
            Committed { key: row.try_get(1)?, version: row.try_get::<_, Option<i64>>(2)?.unwrap_or(0) },
        ))
    };
    rows.map(|row| event(row?)).try_collect().await.map_err(|error: tokio_postgres::Error| error.into())
}

async fn stored(url: &str, name: &str) -> Result<Vec<Stored>> {
    let client = async_nats::connect(addresses(url)).await.context("connect to NATS")?;
    let context = jetstream::new(client);
    let mut stream = context.get_stream(name).await.with_context(|| format!("read stream {name}"))?;
    let last = stream.info().await.context("read the stream's state")?.state.last_sequence;
    let mut messages = Vec::new();
    if last == 0 {
        return Ok(messages);
    }
    let config = pull::Config { ack_policy: AckPolicy::None, headers_only: true, ..pull::Config::default() };
    let consumer = stream.create_consumer(config).await.context("create a consumer")?;
    loop {
        let mut batch = consumer.fetch().max_messages(5_000).expires(Duration::from_secs(5)).messages().await?;
        let mut any = false;
        while let Some(message) = batch.next().await {
            let message = message.map_err(|error| anyhow::anyhow!(error))?;
            any = true;
            let sequence = message.info().map_err(|error| anyhow::anyhow!(error))?.stream_sequence;
            let header = |name| message.headers.as_ref().and_then(|headers| headers.get(name)).map(|v| v.as_str());
            let id = header("Nats-Msg-Id").unwrap_or_default().to_owned();
            messages.push(Stored { id, position: header("Waljet-Position").and_then(position) });
            if sequence >= last {
                return Ok(messages);
            }
        }
        anyhow::ensure!(any, "the stream ends at {last}, but the consumer gives no more");
    }
}

/// `<system id>:<timeline>:<commit LSN>:<ordinal>`
fn position(text: &str) -> Option<(u64, u64)> {
    let mut parts = text.split(':').skip(2);
    let (high, low) = parts.next()?.split_once('/')?;
    let lsn = u64::from_str_radix(high, 16).ok()? << 32 | u64::from_str_radix(low, 16).ok()?;
    Some((lsn, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(events: &[(&str, &str, i64)]) -> HashMap<String, Committed> {
        let event = |(id, key, version): &(&str, &str, i64)| {
            ((*id).to_owned(), Committed { key: (*key).to_owned(), version: *version })
        };
        events.iter().map(event).collect()
    }

    fn stream(messages: &[(&str, u64)]) -> Vec<Stored> {
        let message = |(id, lsn): &(&str, u64)| Stored { id: (*id).to_owned(), position: Some((*lsn, 0)) };
        messages.iter().map(message).collect()
    }

    #[test]
    fn each_fault_is_counted_as_what_it_is() {
        let table = table(&[("a", "k", 1), ("b", "k", 2), ("c", "other", 1)]);
        let books = |messages| Books::balance(&table, &stream(messages));
        assert!(books(&[("a", 1), ("b", 2), ("c", 3)]).balanced());
        assert_eq!(books(&[("a", 1), ("b", 2)]).lost, 1);
        assert_eq!(books(&[("a", 1), ("b", 2), ("a", 3), ("c", 4)]).doubled, 1);
        assert_eq!(books(&[("b", 1), ("a", 2), ("c", 3)]).reordered, 1);
        assert_eq!(books(&[("a", 1), ("c", 3), ("b", 2)]).reordered, 1);
        assert_eq!(books(&[("a", 1), ("x", 2), ("b", 3), ("c", 4)]).foreign, 1);
    }

    #[test]
    fn a_position_is_read_as_commit_lsn_and_ordinal() {
        assert_eq!(position("7431:1:1/A:3"), Some(((1 << 32) + 10, 3)));
        assert_eq!(position("nonsense"), None);
    }
}
