//! The sink: generations over connections, each begun with a look at the stream's tail.

use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use waljet_pipeline::{
    Ack, Action, Fault, Opened, OutboundMessage, Placement, Position, PublisherMode, Rejection, Sink, StreamMark,
};

use crate::api::inbox_filter;
use crate::atomic::{Memory, Units};
use crate::connect::Connection;
use crate::encode::{self, ExpectedLast};
use crate::error;
use crate::explain::Silence;
use crate::fast::{Batches, Queued};
use crate::generation::{Ending, Generation, PROOF, Taken};
use crate::mode::Modes;
use crate::options::{LaneOptions, MAX_WINDOW, NatsOptions, StreamOptions};
use crate::snapshot::SinkWatch;
use crate::subject;
use crate::writing::Stuck;

/// How often a wait for acknowledgements looks whether the connection still stands, should its events be lost.
pub(crate) const LOOK: Duration = Duration::from_millis(500);

/// A lane to one JetStream stream.
///
/// In fast mode messages go in batches of the broker's own, in which it refuses whatever follows a message that was
/// lost. In chain mode each message names the sequence that must be the stream's last, to the same effect. In serial
/// mode there is nothing to overtake with. In atomic mode the events of a transaction go in one batch that is stored whole.
#[derive(Debug)]
pub struct JetStreamSink {
    pub(crate) nats: NatsOptions,
    pub(crate) stream: StreamOptions,
    pub(crate) lane: LaneOptions,
    pub(crate) connection: Option<Connection>,
    /// Addresses that the cluster named, beside the configured ones.
    pub(crate) known_servers: Vec<String>,
    /// Where the first generation began, for events that are recognized by their id.
    pub(crate) first_from: Option<Position>,
    pub(crate) generation: Option<Generation>,
    /// How many generations there were; part of their reply subjects.
    pub(crate) generations: u64,
    pub(crate) modes: Modes,
    /// What atomic mode learnt.
    pub(crate) atomic: Memory,
    pub(crate) watch: watch::Sender<SinkWatch>,
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
            first_from: None,
            generation: None,
            generations: 0,
            atomic: Memory::default(),
            watch,
        }
    }

    /// Returns the snapshot for operators. Only a new generation, a lost connection and a new connection count as a
    /// change; the last sequence moves on silently.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<SinkWatch> {
        self.watch.subscribe()
    }
}

impl Sink for JetStreamSink {
    async fn open(&mut self, from: &Position, seen: Option<&StreamMark>) -> Result<Opened, Fault> {
        self.leave();
        let opened = self.begin(from, seen).await;
        if let Err(fault) = &opened {
            self.end(fault);
        }
        opened
    }

    async fn send(&mut self, token: u64, message: &OutboundMessage, placement: Placement) -> Result<(), Fault> {
        let Some(connection) = &self.connection else { return Err(self.fail(no_generation())) };
        let lost = connection.news.borrow().lost;
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
        if token != generation.next_token || generation.under_way >= generation.max_in_flight {
            let (due, under_way, most) = (generation.next_token, generation.under_way, generation.max_in_flight);
            let what =
                format!("token {token} was sent where {due} was due, with {under_way} of {most} messages under way");
            return Err(self.fail(Fault::new(error::MISUSE, Action::Halt, what)));
        }
        if generation.batched().is_some() {
            return self.send_in_batch(message, placement).await;
        }
        self.send_alone(token, message).await
    }

    async fn flush(&mut self) -> Result<(), Fault> {
        // The client writes out and flushes by itself as soon as its queue is empty; its own `flush` would only wait
        // for that. What remains is to send what waits for its batch, and to notice that there is nobody to write to.
        if self.generation.is_none() {
            return Err(no_generation());
        }
        if self.connection.as_ref().is_none_or(|connection| connection.news.borrow().lost) {
            return Err(self.fail(disconnected()));
        }
        self.begin_batch();
        self.written().await.map_err(|fault| self.fail(fault))
    }

    async fn ack(&mut self) -> Result<Ack, Rejection> {
        loop {
            self.begin_batch();
            let written = self.written().await;
            let Some(generation) = &mut self.generation else {
                return Err(Rejection { token: None, fault: no_generation() });
            };
            if let Err(fault) = written {
                generation.ending.get_or_insert(Ending::known(None, fault));
            }
            if generation.ending.is_some() {
                return Err(self.tell().await);
            }
            // 1. What came in already, without the price of timers.
            let came = generation.acks.next().now_or_never();
            let message = match came {
                Some(message) => message,
                None => {
                    let idle = generation.under_way == 0;
                    if let Some(mode) = self.modes.wants(generation.mode, Instant::now()).filter(|_| idle) {
                        let what = format!("what stood against mode {mode} is over: back to it");
                        let fault = Fault::new(error::MODE_CHANGE, Action::Retry, what);
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
            match generation.take(&message, &self.stream.stream) {
                Taken::Nothing => {}
                Taken::Prove(sequence) => self.prove(sequence),
                Taken::Ack(ack) => {
                    self.acknowledged(&ack, before);
                    return Ok(ack);
                }
            }
        }
    }
}

impl JetStreamSink {
    /// Hands one message to the connection.
    async fn send_alone(&mut self, token: u64, message: &OutboundMessage) -> Result<(), Fault> {
        let (Some(connection), Some(generation)) = (&self.connection, &mut self.generation) else {
            return Err(no_generation());
        };
        let reply = format!("{}{token}", generation.prefix);
        let expected = match generation.mode {
            PublisherMode::Chain => ExpectedLast::Sequence(generation.base + token),
            _ => ExpectedLast::Not,
        };
        let headers = match encode::headers(message, expected, reply.len(), generation.limits) {
            Ok(headers) => headers,
            Err(fault) => return Err(self.refused(fault).await),
        };
        let subject = async_nats::Subject::from(message.subject.as_str());
        // Noted first: from here on nobody knows whether it was sent.
        generation.sending(subject.clone());
        let client = connection.client.clone();
        let publish = client.publish_with_reply_and_headers(subject, reply, headers, message.payload.clone());
        match timeout(self.lane.ack_timeout, publish).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(cause)) => Err(self.fail(disconnected().cause(cause))),
            Err(_) => Err(self.fail(stuck(self.lane.ack_timeout))),
        }
    }

    /// Lets one message wait for what it is sent together with; a batch of mode `fast` begins when it is full.
    async fn send_in_batch(&mut self, message: &OutboundMessage, placement: Placement) -> Result<(), Fault> {
        let Some(generation) = &self.generation else { return Err(no_generation()) };
        let Some((expected, reply_len)) = generation.batched() else { return Err(no_generation()) };
        let headers = match encode::headers(message, expected, reply_len, generation.limits) {
            Ok(headers) => headers,
            Err(fault) => return Err(self.refused(fault).await),
        };
        let subject = async_nats::Subject::from(message.subject.as_str());
        let (payload, position) = (message.payload.clone(), message.position);
        let Some(generation) = &mut self.generation else { return Err(no_generation()) };
        generation.sending(subject.clone());
        let queued = Queued { subject, headers, payload, position };
        let full = match (&mut generation.batches, &mut generation.units) {
            (Some(batches), _) => {
                batches.push(queued);
                batches.is_full()
            }
            (None, Some(units)) => {
                units.push(queued, placement);
                false
            }
            (None, None) => return Err(no_generation()),
        };
        if full {
            self.begin_batch();
            self.written().await.map_err(|fault| self.fail(fault))?;
        }
        Ok(())
    }

    /// Begins the next batch where one waits and none is under way, or what may go together.
    fn begin_batch(&mut self) {
        let (Some(connection), Some(generation)) = (&self.connection, &mut self.generation) else { return };
        let (base, now) = (generation.last_sequence, Instant::now());
        if generation.ending.is_some() {
            return;
        }
        let batch = match (&mut generation.batches, &mut generation.units) {
            (Some(batches), _) => batches.begin(base, now),
            (_, Some(units)) => Some(units.begin(now)),
            _ => None,
        };
        let Some(batch) = batch.filter(|batch| !batch.is_empty()) else { return };
        let (client, prefix) = (connection.client.clone(), generation.prefix.clone());
        generation.writing.begin(async move {
            for message in batch {
                let reply = format!("{prefix}{}", message.reply);
                client.publish_with_reply_and_headers(message.subject, reply, message.headers, message.payload).await?;
            }
            Ok(())
        });
    }

    /// Waits until what was begun is handed to the connection.
    ///
    /// # Cancel safety
    ///
    /// A cancelled call goes on with the next one.
    async fn written(&mut self) -> Result<(), Fault> {
        let Some(generation) = &mut self.generation else { return Ok(()) };
        let limit = self.lane.ack_timeout;
        generation.writing.done(limit).await.map_err(|why| match why {
            Stuck::Lost(cause) => disconnected().cause(cause),
            Stuck::Full => stuck(limit),
        })
    }

    /// Asks for the message at the end of a batch.
    fn prove(&mut self, sequence: u64) {
        let (Some(connection), Some(generation)) = (&self.connection, &mut self.generation) else { return };
        let subject = format!("{}.STREAM.MSG.GET.{}", self.nats.js_prefix(), self.stream.stream);
        let (client, reply) = (connection.client.clone(), format!("{}{PROOF}", generation.prefix));
        let query = serde_json::json!({ "seq": sequence }).to_string();
        generation.writing.begin(async move { client.publish_with_reply(subject, reply, query.into()).await });
    }

    /// Asks how far the batch is.
    fn ask(&mut self) {
        let (Some(connection), Some(generation)) = (&self.connection, &mut self.generation) else { return };
        let asked = generation.batches.as_mut().and_then(|batches| batches.ask(Instant::now()));
        let Some((subject, reply)) = asked else { return };
        let (client, reply) = (connection.client.clone(), format!("{}{reply}", generation.prefix));
        generation.writing.begin(async move { client.publish_with_reply(subject, reply, bytes::Bytes::new()).await });
    }

    /// Looks at an acknowledgement for signs of another publisher, and shows it.
    fn acknowledged(&mut self, ack: &Ack, before: u64) {
        let Some(generation) = &mut self.generation else { return };
        let foreign = match (&mut generation.batches, generation.mode) {
            (Some(batches), _) => batches.take_foreign(),
            (None, PublisherMode::Serial) if !ack.duplicate => ack.sequence != before + 1,
            (None, _) => false,
        };
        let stored = generation.units.as_mut().and_then(Units::take_stored);
        if foreign {
            self.foreign_publisher();
        } else if generation.mode == PublisherMode::Serial && !ack.duplicate {
            self.modes.clean_ack();
        }
        let (whole, split) = stored.map_or((0, 0), |stored| self.atomic.count(stored));
        // Silently: waking readers for each acknowledgement would cost more than they gain.
        self.watch.send_if_modified(|watch| {
            watch.last_sequence = watch.last_sequence.max(ack.sequence);
            watch.whole_transactions += whole;
            watch.split_transactions += split;
            false
        });
    }

    /// Notes another publisher; warns where that is news.
    pub(crate) fn foreign_publisher(&mut self) {
        self.modes.foreign(Instant::now());
        let news = self.watch.send_if_modified(|watch| !std::mem::replace(&mut watch.foreign_publisher, true));
        if news {
            tracing::warn!(stream = %self.stream.stream, "another publisher writes to the stream");
        }
    }

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
        let ask = generation.batches.as_ref().and_then(Batches::ask_at);
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
            // 3. The oldest message's deadline, a batch to ask after, or a look at the connection should its event be
            // lost.
            () = sleep_until([deadline, ask].into_iter().flatten().fold(look, Instant::min)) => {}
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
            let silence = Silence::Timeout(self.lane.ack_timeout);
            generation.ending = Some(Ending::silent(None, silence));
        } else if ask.is_some_and(|ask| ask <= Instant::now()) {
            self.ask();
        }
        None
    }
}

/// The fault of a lost connection.
fn disconnected() -> Fault {
    Fault::new(error::DISCONNECTED, Action::Retry, "the connection to the server was lost")
}

/// The fault of a connection that takes nothing.
fn stuck(limit: Duration) -> Fault {
    let what = format!("hand a message to the connection: it takes none for {limit:?}");
    Fault::new(error::ACK_TIMEOUT, Action::Retry, what)
}

/// The fault of a call without a generation.
pub(crate) fn no_generation() -> Fault {
    Fault::new(error::MISUSE, Action::Retry, "the lane is not open")
}
