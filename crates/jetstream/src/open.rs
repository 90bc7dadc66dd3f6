//! Beginning a generation: the connection, a look at the stream, what it holds already, and the mode.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;
use waljet_pipeline::{Action, Fault, Opened, Position, PublisherMode, ReadBack, StreamMark};

use crate::api::{Api, StreamInfo};
use crate::atomic::{self, Units};
use crate::connect::{Connection, Reconnect};
use crate::fast::{self, Batches, Rules};
use crate::generation::Generation;
use crate::limits::Limits;
use crate::mode::Traits;
use crate::options::{Matching, ModeChoice, StreamOptions};
use crate::readback::read_back;
use crate::sink::{JetStreamSink, LOOK, no_generation};
use crate::snapshot::SinkWatch;
use crate::tail::{self, Tail};
use crate::writing::Writing;
use crate::{error, subject};

/// A leader that has just been elected may not have applied all that it knows: how often to look again.
const LOOKS_BACK: u32 = 10;

impl JetStreamSink {
    /// Begins a generation.
    pub(crate) async fn begin(&mut self, from: &Position, seen: Option<&StreamMark>) -> Result<Opened, Fault> {
        let api = self.connected().await?;
        let began = Instant::now();
        let (info, tail) = self.look(&api, seen).await?;
        if tail.foreign {
            self.foreign_publisher();
        }
        let StreamOptions { stream, subject_space, .. } = &self.stream;
        // By id, what is sent next may be stored anywhere from where the first generation began.
        let from = match self.lane.matching {
            Matching::Place => from,
            Matching::Id => &*self.first_from.get_or_insert(*from),
        };
        let (stored, read_back) =
            read_back(&api, stream, subject_space, &info, &tail, from, self.lane.matching).await?;
        let shared = shared(&info, subject_space);
        let mode = self.choose(&info, shared)?;
        let connection = self.connection.as_ref().ok_or_else(no_generation)?;
        self.generations += 1;
        let inbox = connection.client.new_inbox();
        let prefix = format!("{inbox}.{}.", self.generations);
        let id = inbox.rsplit('.').next().unwrap_or_default();
        let others = shared || self.watch.borrow().foreign_publisher;
        let batches = (mode == PublisherMode::Fast).then(|| {
            Batches::new(Rules {
                id: id.to_owned(),
                window: self.lane.window,
                replicated: info.config.num_replicas > 1,
                shared: others,
                duplicate_window: Duration::from_nanos(info.config.duplicate_window.try_into().unwrap_or(0)),
            })
        });
        let units = (mode == PublisherMode::Atomic).then(|| {
            let rules = atomic::Rules { id: id.to_owned(), shared: others, singly: self.atomic.singly() };
            Units::new(rules, info.state.last_seq)
        });
        let acks = connection.client.subscribe(format!("{prefix}>")).await.map_err(|cause| {
            Fault::new(error::DISCONNECTED, Action::Retry, "subscribe to acknowledgements").cause(cause)
        })?;
        let base = info.state.last_seq;
        let max_in_flight = if mode == PublisherMode::Serial { 1 } else { self.lane.window };
        self.generation = Some(Generation {
            acks,
            prefix,
            mode,
            batches,
            units,
            writing: Writing::default(),
            base,
            limits: Limits::of(connection, &info),
            max_in_flight,
            next_token: 0,
            next_ack: 0,
            in_flight: VecDeque::with_capacity(max_in_flight),
            under_way: 0,
            stored: 0,
            last_sequence: base,
            violations_before: connection.news.borrow().violations,
            ending: None,
        });
        self.watch.send_modify(|watch| show(watch, &info, mode));
        Ok(Opened {
            stream: self.stream.stream.clone(),
            mode,
            created: info.created,
            last_sequence: base,
            tail: tail.position,
            stored,
            read_back: ReadBack { took: began.elapsed(), ..read_back },
            max_in_flight,
            max_batch: if mode == PublisherMode::Atomic { self.atomic.most } else { 1 },
        })
    }

    /// Returns a connection that stands.
    async fn connected(&mut self) -> Result<Api, Fault> {
        if self.connection.as_ref().is_none_or(|connection| !connection.is_intact()) {
            self.disconnect();
            let connection = Connection::open(&self.nats, &self.known_servers, Reconnect::Barely).await?;
            let info = connection.client.server_info();
            self.known_servers = info.connect_urls.iter().filter(|url| !self.lists(url)).cloned().collect();
            self.watch.send_modify(|watch| {
                watch.connected = true;
                watch.server = Some(info.server_name);
                watch.server_version = Some(info.version);
            });
            self.connection = Some(connection);
        }
        self.api(self.nats.connect_timeout).ok_or_else(no_generation)
    }

    fn lists(&self, url: &str) -> bool {
        self.nats.servers.iter().any(|server| crate::options::shown(server) == crate::options::shown(url))
    }

    pub(crate) fn api(&self, limit: Duration) -> Option<Api> {
        self.connection.as_ref().map(|connection| Api::new(connection, self.nats.js_prefix(), limit))
    }

    pub(crate) fn disconnect(&mut self) {
        self.connection = None;
        self.watch.send_if_modified(|watch| std::mem::replace(&mut watch.connected, false));
    }

    /// Reads state and tail, and compares them with what was seen before.
    async fn look(&self, api: &Api, seen: Option<&StreamMark>) -> Result<(StreamInfo, Tail), Fault> {
        let (name, space) = (&self.stream.stream, &self.stream.subject_space);
        let (mut info, mut tail) = tail::info_and_tail(api, name, space).await?;
        // A mark of another stream says that the configuration was changed, and nothing about this one.
        if let Some(seen) = seen.filter(|seen| seen.stream == *name) {
            let mut looks = 0;
            while info.created == seen.created && info.state.last_seq < seen.last_sequence && looks < LOOKS_BACK {
                looks += 1;
                tokio::time::sleep(LOOK).await;
                (info, tail) = tail::info_and_tail(api, name, space).await?;
            }
            compare(seen, &info)?;
        }
        Ok((info, tail))
    }

    /// Chooses the mode.
    fn choose(&mut self, info: &StreamInfo, shared: bool) -> Result<PublisherMode, Fault> {
        let version = self.watch.borrow().server_version.clone().unwrap_or_default();
        let hindrance = fast::hindrance(&version, info, &self.stream.stream);
        let traits = Traits { shared, batches: hindrance.is_none() };
        let missing = match self.lane.mode {
            ModeChoice::Fast => hindrance.map(|why| (error::STREAM_NO_BATCHES, "fast", why)),
            ModeChoice::Atomic => {
                let hindrance = atomic::hindrance(&version, info, &self.stream.stream);
                hindrance.map(|why| (error::STREAM_NOT_ATOMIC, "atomic", why))
            }
            _ => None,
        };
        match missing {
            Some((code, mode, (why, hint))) => {
                let what = format!("publish in batches (publisher.mode = {mode:?}): {why}");
                Err(Fault::new(code, Action::Retry, what).hint(hint))
            }
            None => Ok(self.modes.next(traits, Instant::now())),
        }
    }
}

/// Returns whether the stream takes subjects outside of ours.
fn shared(info: &StreamInfo, space: &str) -> bool {
    info.config.subjects.iter().any(|filter| !subject::covers(space, filter))
}

/// Finds a stream that is not the one that was seen, or holds less than it had.
fn compare(seen: &StreamMark, info: &StreamInfo) -> Result<(), Fault> {
    let StreamMark { stream, created, last_sequence } = seen;
    // Nothing of a stream that was empty can be missing.
    if *last_sequence == 0 {
        return Ok(());
    }
    let what = if info.created != *created {
        format!("stream {stream:?} was recreated: it was created at {created}, now at {}", info.created)
    } else if info.state.last_seq < *last_sequence {
        let now = info.state.last_seq;
        format!("stream {stream:?} went back: its last sequence was {last_sequence}, now it is {now}")
    } else {
        return Ok(());
    };
    Err(Fault::new(error::STREAM_WENT_BACK, Action::Gap, what).hint(
        "events that were acknowledged may be gone: compare the table with the stream, publish what is missing by hand, \
         then go on with: waljet run --accept-gap",
    ))
}

/// Shows a new generation.
fn show(watch: &mut SinkWatch, info: &StreamInfo, mode: PublisherMode) {
    watch.connected = true;
    watch.mode = Some(mode);
    watch.last_sequence = info.state.last_seq;
    watch.messages = info.state.messages;
    watch.bytes = info.state.bytes;
    watch.duplicate_window_seconds = u64::try_from(info.config.duplicate_window).unwrap_or(0) / 1_000_000_000;
    watch.replicas = info.config.num_replicas;
    watch.leader = info.cluster.as_ref().and_then(|cluster| cluster.leader.clone());
}
