//! Beginning a generation: the connection, a look at the stream, what it holds already, and the mode.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;
use waljet_pipeline::{Action, Fault, Opened, Position, PublisherMode};

use crate::api::{Api, StreamInfo};
use crate::connect::{Connection, Reconnect};
use crate::fast::{self, Batches, Rules};
use crate::generation::Generation;
use crate::limits::Limits;
use crate::mode::Traits;
use crate::options::{ModeChoice, StreamOptions};
use crate::readback::read_back;
use crate::sink::{JetStreamSink, LOOK, no_generation};
use crate::snapshot::SinkWatch;
use crate::tail::{self, Tail};
use crate::writing::Writing;
use crate::{error, subject};

/// A leader that has just been elected may not have applied all that it knows: how often to look again.
const LOOKS_BACK: u32 = 10;

/// The stream as an earlier generation of this process saw it.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) created: String,
    pub(crate) last_sequence: u64,
}

impl JetStreamSink {
    /// Begins a generation.
    pub(crate) async fn begin(&mut self, from: &Position) -> Result<Opened, Fault> {
        let api = self.connected().await?;
        let (info, tail) = self.look(&api).await?;
        if tail.foreign {
            self.foreign_publisher();
        }
        let StreamOptions { stream, subject_space, .. } = &self.stream;
        let stored = read_back(&api, stream, subject_space, &info, &tail, from).await?;
        let shared = shared(&info, subject_space);
        let mode = self.choose(&info, shared)?;
        let connection = self.connection.as_ref().ok_or_else(no_generation)?;
        self.generations += 1;
        let inbox = connection.client.new_inbox();
        let prefix = format!("{inbox}.{}.", self.generations);
        let batches = (mode == PublisherMode::Fast).then(|| {
            Batches::new(Rules {
                id: inbox.rsplit('.').next().unwrap_or_default().to_owned(),
                window: self.lane.window,
                replicated: info.config.num_replicas > 1,
                shared: shared || self.watch.borrow().foreign_publisher,
                duplicate_window: Duration::from_nanos(info.config.duplicate_window.try_into().unwrap_or(0)),
            })
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
        self.seen = Some(Seen { created: info.created, last_sequence: base });
        Ok(Opened {
            stream: self.stream.stream.clone(),
            mode,
            last_sequence: base,
            tail: tail.position,
            stored,
            max_in_flight,
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

    /// Reads state and tail, and compares them with what this process saw before.
    async fn look(&self, api: &Api) -> Result<(StreamInfo, Tail), Fault> {
        let (name, space) = (&self.stream.stream, &self.stream.subject_space);
        let (mut info, mut tail) = tail::info_and_tail(api, name, space).await?;
        if let Some(seen) = &self.seen {
            let mut looks = 0;
            while info.created == seen.created && info.state.last_seq < seen.last_sequence && looks < LOOKS_BACK {
                looks += 1;
                tokio::time::sleep(LOOK).await;
                (info, tail) = tail::info_and_tail(api, name, space).await?;
            }
            seen.compare(name, &info)?;
        }
        Ok((info, tail))
    }

    /// Chooses the mode.
    fn choose(&mut self, info: &StreamInfo, shared: bool) -> Result<PublisherMode, Fault> {
        let version = self.watch.borrow().server_version.clone().unwrap_or_default();
        let hindrance = fast::hindrance(&version, info, &self.stream.stream);
        let traits = Traits { shared, batches: hindrance.is_none() };
        match hindrance {
            Some((why, hint)) if self.lane.mode == ModeChoice::Fast => {
                let what = format!("publish in batches (publisher.mode = \"fast\"): {why}");
                Err(Fault::new(error::STREAM_NO_BATCHES, Action::Retry, what).hint(hint))
            }
            _ => Ok(self.modes.next(traits, Instant::now())),
        }
    }
}

/// Returns whether the stream takes subjects outside of ours.
fn shared(info: &StreamInfo, space: &str) -> bool {
    info.config.subjects.iter().any(|filter| !subject::covers(space, filter))
}

impl Seen {
    /// Finds a stream that is not the one that was seen, or holds less than it had.
    fn compare(&self, stream: &str, info: &StreamInfo) -> Result<(), Fault> {
        let what = if info.created != self.created {
            format!("stream {stream:?} was recreated: it was created at {}, now at {}", self.created, info.created)
        } else if info.state.last_seq < self.last_sequence {
            format!(
                "stream {stream:?} went back: its last sequence was {}, now it is {}",
                self.last_sequence, info.state.last_seq
            )
        } else {
            return Ok(());
        };
        Err(Fault::new(error::STREAM_WENT_BACK, Action::Gap, what).hint(
            "events that were acknowledged may be gone: compare the table with the stream, publish what is missing by hand, \
             then start the relay again",
        ))
    }
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
