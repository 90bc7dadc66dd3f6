//! The sink: generations over connections, each begun with a look at the stream's tail.

use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use waljet_pipeline::{Ack, Action, Code, Fault, Opened, OutboundMessage, Position, PublisherMode, Rejection, Sink};

use crate::api::{Api, StreamInfo, inbox_filter};
use crate::connect::{Connection, Reconnect};
use crate::encode;
use crate::explain::explain;
use crate::generation::{Ending, Generation};
use crate::limits::{self, Limits};
use crate::mode::Modes;
use crate::options::{LaneOptions, MAX_WINDOW, NatsOptions, StreamOptions};
use crate::readback::read_back;
use crate::snapshot::SinkWatch;
use crate::tail::{self, Tail};
use crate::{error, subject};

/// How often a wait for acknowledgements looks whether the connection still stands, should its events be lost.
const LOOK: Duration = Duration::from_millis(500);
/// How long a look at the stream may take before the fault is told without its result.
const EXPLAIN: Duration = Duration::from_secs(1);
/// How long the server's word on a permission may take after a fence.
const GRACE: Duration = Duration::from_millis(20);
/// A leader that has just been elected may not have applied all that it knows: how often to look again.
const LOOKS_BACK: u32 = 10;

/// A lane to one JetStream stream.
///
/// In chain mode each message names the sequence that must be the stream's last, so that the broker refuses whatever
/// follows a message that was lost. In serial mode there is nothing to overtake with.
#[derive(Debug)]
pub struct JetStreamSink {
    nats: NatsOptions,
    stream: StreamOptions,
    lane: LaneOptions,
    connection: Option<Connection>,
    /// Addresses that the cluster named, beside the configured ones.
    known_servers: Vec<String>,
    generation: Option<Generation>,
    /// How many generations there were; part of their reply subjects.
    generations: u64,
    modes: Modes,
    seen: Option<Seen>,
    watch: watch::Sender<SinkWatch>,
}

/// The stream as an earlier generation of this process saw it.
#[derive(Debug)]
struct Seen {
    created: String,
    last_sequence: u64,
}

impl JetStreamSink {
    /// Makes a sink; it connects when it is opened.
    #[must_use]
    pub fn new(nats: NatsOptions, stream: StreamOptions, lane: LaneOptions) -> Self {
        let lane = LaneOptions { window: lane.window.clamp(1, MAX_WINDOW), ..lane };
        let (watch, _) = watch::channel(SinkWatch { stream: stream.stream.clone(), ..SinkWatch::default() });
        Self {
            modes: Modes::new(lane.mode),
            nats,
            stream,
            lane,
            connection: None,
            known_servers: Vec::new(),
            generation: None,
            generations: 0,
            seen: None,
            watch,
        }
    }

    /// Returns the snapshot for operators. Only a new generation, a lost connection and a new connection count as a
    /// change; the last sequence moves on silently.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<SinkWatch> {
        self.watch.subscribe()
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

    fn api(&self, limit: Duration) -> Option<Api> {
        self.connection.as_ref().map(|connection| Api::new(connection, self.nats.js_prefix(), limit))
    }

    fn disconnect(&mut self) {
        self.connection = None;
        self.watch.send_if_modified(|watch| std::mem::replace(&mut watch.connected, false));
    }

    /// Leaves the current generation.
    fn leave(&mut self) {
        if let (Some(generation), Some(seen)) = (self.generation.take(), &mut self.seen) {
            seen.last_sequence = seen.last_sequence.max(generation.last_sequence);
        }
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

    /// Begins a generation.
    async fn begin(&mut self, from: &Position) -> Result<Opened, Fault> {
        let api = self.connected().await?;
        let (info, tail) = self.look(&api).await?;
        if tail.foreign {
            self.foreign_publisher();
        }
        let StreamOptions { stream, subject_space, .. } = &self.stream;
        let stored = read_back(&api, stream, subject_space, &info, &tail, from).await?;
        let shared = info.config.subjects.iter().any(|filter| !subject::covers(&self.stream.subject_space, filter));
        let mode = self.modes.next(shared, Instant::now());
        let connection = self.connection.as_ref().ok_or_else(no_generation)?;
        self.generations += 1;
        let prefix = format!("{}.{}.", connection.client.new_inbox(), self.generations);
        let acks = connection.client.subscribe(format!("{prefix}*")).await.map_err(|cause| {
            Fault::new(error::DISCONNECTED, Action::Retry, "subscribe to acknowledgements").cause(cause)
        })?;
        let base = info.state.last_seq;
        let max_in_flight = if mode == PublisherMode::Chain { self.lane.window } else { 1 };
        self.generation = Some(Generation {
            acks,
            prefix,
            mode,
            base,
            limits: Limits::of(connection, &info),
            max_in_flight,
            next_token: 0,
            next_ack: 0,
            in_flight: std::collections::VecDeque::with_capacity(max_in_flight),
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

    /// Notes another publisher; warns where that is news.
    fn foreign_publisher(&mut self) {
        self.modes.foreign(Instant::now());
        let news = self.watch.send_if_modified(|watch| !std::mem::replace(&mut watch.foreign_publisher, true));
        if news {
            tracing::warn!(stream = %self.stream.stream, "another publisher writes to the stream");
        }
    }

    /// Tells why the generation ended, and leaves it.
    ///
    /// # Cancel safety
    ///
    /// The ending stays until it is told.
    async fn tell(&mut self) -> Rejection {
        let looked_up =
            match self.generation.as_ref().and_then(|generation| generation.ending.as_ref().map(|e| (generation, e))) {
                Some((generation, Ending::Silent { token, silence })) => {
                    let about = generation.subject(token.unwrap_or(generation.next_ack)).to_owned();
                    let (token, silence) = (*token, *silence);
                    match self.api(EXPLAIN) {
                        Some(api) => Some((token, explain(&api, &self.stream.stream, &about, silence).await)),
                        None => None,
                    }
                }
                _ => None,
            };
        if let Some(fault) = self.permission_behind_fence().await {
            self.end(&fault);
            return Rejection { token: None, fault };
        }
        let Some(generation) = &mut self.generation else {
            return Rejection { token: None, fault: no_generation() };
        };
        let (token, fault) = match (looked_up, &mut generation.ending) {
            (Some((token, fault)), _) => (token, fault),
            (None, Some(Ending::Known { token, fault, fence })) => {
                if *fence {
                    self.modes.fence(generation.stored);
                    self.watch.send_modify(|watch| watch.fence_failures += 1);
                }
                (*token, fault.take().unwrap_or_else(no_generation))
            }
            (None, _) => (None, no_generation()),
        };
        self.end(&fault);
        Rejection { token, fault }
    }

    /// Finds the refused permission behind a fence: the message that the server would not take is the one missing.
    async fn permission_behind_fence(&mut self) -> Option<Fault> {
        let (generation, connection) = (self.generation.as_ref()?, self.connection.as_mut()?);
        let Some(Ending::Known { fence: true, .. }) = &generation.ending else { return None };
        let before = generation.violations_before;
        let space = &self.stream.subject_space;
        // The server's word came first but takes another way through the client.
        let news = timeout(GRACE, connection.news.wait_for(|news| news.violations > before)).await.ok()?.ok()?;
        let violation = news.violation.as_ref()?;
        (violation.permission == "publish" && subject::covers(space, &violation.subject))
            .then(|| violation.fault(space))
    }

    /// Leaves the generation, and the connection too where it cannot be trusted any more.
    fn end(&mut self, fault: &Fault) {
        self.leave();
        if FRESH_CONNECTION.contains(&fault.code) {
            self.disconnect();
        }
    }

    /// Refuses a message, unless the limit that it exceeds was changed since the generation began: the server tells
    /// limits to new connections only, so that a look at them needs one.
    async fn refused(&mut self, fault: Fault) -> Fault {
        let known = self.generation.as_ref().map(|generation| generation.limits);
        if fault.code != error::MESSAGE_TOO_LARGE {
            return fault;
        }
        let now = limits::now(&self.nats, &self.known_servers, &self.stream.stream).await;
        if now.is_none() || now == known {
            return fault;
        }
        let fault = Fault::new(fault.code, Action::Retry, format!("{}, and was changed since", fault.message));
        self.leave();
        self.disconnect();
        fault
    }

    /// Ends the generation from `send`.
    fn fail(&mut self, fault: Fault) -> Fault {
        self.end(&fault);
        fault
    }
}

/// After these, commands may be stuck in the client or bytes in the socket, or a refused subscription would stay mute.
const FRESH_CONNECTION: [Code; 6] = [
    error::DISCONNECTED,
    error::TIMEOUT,
    error::ACK_TIMEOUT,
    error::PERMISSION,
    error::STREAM_LEADERLESS,
    error::STREAM_NO_ACK,
];

impl Sink for JetStreamSink {
    async fn open(&mut self, from: &Position) -> Result<Opened, Fault> {
        self.leave();
        let opened = self.begin(from).await;
        if let Err(fault) = &opened {
            self.end(fault);
        }
        opened
    }

    async fn send(&mut self, token: u64, message: &OutboundMessage) -> Result<(), Fault> {
        let Some(connection) = &self.connection else { return Err(self.fail(no_generation())) };
        let lost = connection.news.borrow().lost;
        let client = connection.client.clone();
        let Some(generation) = &mut self.generation else { return Err(no_generation()) };
        if generation.ending.is_some() {
            let fault = self.tell().await.fault;
            // A refusal of an earlier message is none of this one: it will come again for the right one.
            let action = if fault.action == Action::Refuse { Action::Retry } else { fault.action };
            return Err(Fault { action, ..fault });
        }
        if lost {
            return Err(self.fail(disconnected()));
        }
        if token != generation.next_token || generation.in_flight.len() >= generation.max_in_flight {
            let (due, under_way, most) = (generation.next_token, generation.in_flight.len(), generation.max_in_flight);
            let what =
                format!("token {token} was sent where {due} was due, with {under_way} of {most} messages under way");
            return Err(self.fail(Fault::new(error::MISUSE, Action::Halt, what)));
        }
        let reply = format!("{}{token}", generation.prefix);
        let expected = (generation.mode == PublisherMode::Chain).then(|| generation.base + token);
        let headers = match encode::headers(message, expected, reply.len(), generation.limits) {
            Ok(headers) => headers,
            Err(fault) => return Err(self.refused(fault).await),
        };
        let subject = async_nats::Subject::from(message.subject.as_str());
        // Noted first: from here on nobody knows whether it was sent.
        generation.sending(subject.clone());
        let publish = client.publish_with_reply_and_headers(subject, reply, headers, message.payload.clone());
        match timeout(self.lane.ack_timeout, publish).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(cause)) => Err(self.fail(disconnected().cause(cause))),
            Err(_) => {
                let what = format!("hand a message to the connection: it takes none for {:?}", self.lane.ack_timeout);
                Err(self.fail(Fault::new(error::ACK_TIMEOUT, Action::Retry, what)))
            }
        }
    }

    async fn flush(&mut self) -> Result<(), Fault> {
        // The client writes out and flushes by itself as soon as its queue is empty; its own `flush` would only wait
        // for that. What remains is to notice that there is nobody to write to.
        if self.generation.is_none() {
            return Err(no_generation());
        }
        if self.connection.as_ref().is_none_or(|connection| connection.news.borrow().lost) {
            return Err(self.fail(disconnected()));
        }
        Ok(())
    }

    async fn ack(&mut self) -> Result<Ack, Rejection> {
        loop {
            let Some(generation) = &mut self.generation else {
                return Err(Rejection { token: None, fault: no_generation() });
            };
            if generation.ending.is_some() {
                return Err(self.tell().await);
            }
            // 1. What came in already, without the price of timers.
            let came = generation.acks.next().now_or_never();
            let message = match came {
                Some(message) => message,
                None => {
                    let idle = generation.in_flight.is_empty() && generation.mode == PublisherMode::Serial;
                    if idle && self.modes.wants_chain(Instant::now()) {
                        let fault = Fault::new(
                            error::MODE_CHANGE,
                            Action::Retry,
                            "no other publisher is seen any more: back to chain mode",
                        );
                        generation.ending = Some(Ending::known(None, fault));
                        continue;
                    }
                    match self.wait().await {
                        Some(message) => message,
                        None => continue,
                    }
                }
            };
            let Some(generation) = &mut self.generation else { continue };
            // The client gave up: there is no connection any more.
            let Some(message) = message else {
                generation.ending = Some(Ending::known(None, disconnected()));
                continue;
            };
            let before = generation.last_sequence;
            if let Some(ack) = generation.take(&message, &self.stream.stream) {
                if generation.mode == PublisherMode::Serial && !ack.duplicate {
                    if ack.sequence == before + 1 {
                        self.modes.clean_ack();
                    } else {
                        self.foreign_publisher();
                    }
                }
                // Silently: waking readers for each acknowledgement would cost more than they gain.
                self.watch.send_if_modified(|watch| {
                    watch.last_sequence = watch.last_sequence.max(ack.sequence);
                    false
                });
                return Ok(ack);
            }
        }
    }
}

impl JetStreamSink {
    /// Waits for an answer. `None` after anything else happened: a fault is then noted as the ending.
    ///
    /// # Cancel safety
    ///
    /// An answer is either returned or stays in the subscription.
    async fn wait(&mut self) -> Option<Option<async_nats::Message>> {
        let (Some(generation), Some(connection)) = (&mut self.generation, &mut self.connection) else {
            self.generation = None;
            return None;
        };
        let deadline = generation.deadline(self.lane.ack_timeout);
        let look = Instant::now() + LOOK;
        tokio::select! {
            biased;
            // 1. Answers first: what was acknowledged before the end counts.
            message = generation.acks.next() => return Some(message),
            // 2. The server's word on connection and permissions.
            changed = connection.news.changed() => {
                if changed.is_err() {
                    generation.ending = Some(Ending::known(None, disconnected()));
                }
            }
            // 3. The oldest message's deadline, or a look at the connection should its event be lost.
            () = sleep_until(deadline.map_or(look, |deadline| deadline.min(look))) => {}
        }
        let news = connection.news.borrow().clone();
        if let Some(violation) = news.violation.filter(|_| news.violations > generation.violations_before) {
            generation.violations_before = news.violations;
            let needed = match violation.permission {
                "publish" if subject::covers(&self.stream.subject_space, &violation.subject) => {
                    Some(self.stream.subject_space.clone())
                }
                "subscribe" => Some(inbox_filter(&violation.subject)),
                _ => None,
            };
            if let Some(needed) = needed {
                generation.ending = Some(Ending::known(None, violation.fault(&needed)));
                return None;
            }
        }
        if !connection.is_intact() {
            generation.ending = Some(Ending::known(None, disconnected()));
        } else if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            let silence = crate::explain::Silence::Timeout(self.lane.ack_timeout);
            generation.ending = Some(Ending::Silent { token: None, silence });
        }
        None
    }
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

/// The fault of a lost connection.
fn disconnected() -> Fault {
    Fault::new(error::DISCONNECTED, Action::Retry, "the connection to the server was lost")
}

/// The fault of a call without a generation.
fn no_generation() -> Fault {
    Fault::new(error::MISUSE, Action::Retry, "the lane is not open")
}
