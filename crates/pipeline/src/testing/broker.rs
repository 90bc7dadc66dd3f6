//! A broker with one stream that loses, delays and refuses by a seed, and a sink that publishes into it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::{
    Ack, Action, Code, Fault, IdDigest, Opened, OutboundMessage, Placement, Position, PublisherMode, ReadBack,
    Rejection, Sink, Stored, StreamMark,
};

/// How often a broker fails.
#[derive(Clone, Copy, Debug, Default)]
pub struct BrokerFaults {
    /// Chance that a message never arrives.
    pub message_lost: f64,
    /// Chance that an acknowledgement never arrives.
    pub ack_lost: f64,
    /// Chance that a connection breaks at a message, which may arrive all the same.
    pub disconnect: f64,
    /// Chance that a generation cannot be opened.
    pub refused: f64,
    /// Chance, at a message, that the stream takes nothing for a while.
    pub full: f64,
    /// Chance that another publisher writes to the stream.
    pub foreign: f64,
}

/// Whether the simulated stream checks the expected sequence. Without it, the simulation must find faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// Each message names the sequence that must be the last. Only sound where nobody else writes.
    ExpectedSequence,
    /// One message at a time. Sound beside other publishers, within the duplicate window.
    OneInFlight,
    /// One message of each ordering key at a time. Sound beside other publishers, within the duplicate window.
    OnePerKey,
    /// As [`ExpectedSequence`](Self::ExpectedSequence), but the stream is not read back.
    Blind,
    /// Plain pipelining.
    Missing,
    /// As [`ExpectedSequence`](Self::ExpectedSequence), in batches that are stored whole or not at all.
    Atomic,
    /// As [`Atomic`](Self::Atomic), but what of a batch came before a lost message is stored.
    Torn,
}

/// A broker with one stream.
#[derive(Clone, Debug)]
pub struct Broker(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    fence: Fence,
    faults: BrokerFaults,
    random: fastrand::Rng,
    /// How many events one read-back returns at most.
    read_back: usize,
    duplicate_window: Duration,
    stream: Vec<Record>,
    seen: HashMap<String, (Instant, u64)>,
    wire: Vec<InFlight>,
    acks: Vec<(u64, Instant, Result<Ack, Rejection>)>,
    full_until: Instant,
    generations: u64,
    /// The event that is too large.
    too_large: Option<String>,
}

#[derive(Clone, Debug)]
struct Record {
    id: String,
    position: Option<Position>,
    /// What was stored together has the same number.
    batch: u64,
    /// Whether it says that its transaction is not stored whole.
    split: bool,
}

#[derive(Debug)]
struct InFlight {
    generation: u64,
    /// The token of the last message.
    token: u64,
    expected: u64,
    arrives: Instant,
    /// One message, or a batch; `None` where one was lost.
    messages: Vec<Option<Message>>,
}

#[derive(Debug)]
struct Message {
    id: String,
    position: Position,
    split: bool,
}

/// Events of one transaction in the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Together {
    /// Their ids.
    pub ids: Vec<String>,
    /// Whether they say that their transaction is not stored whole.
    pub split: bool,
}

impl Broker {
    /// Makes a broker with an empty stream.
    #[must_use]
    pub fn new(fence: Fence, faults: BrokerFaults, duplicate_window: Duration, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let read_back = random.usize(1..60);
        Self(Arc::new(Mutex::new(State {
            fence,
            faults,
            random,
            read_back,
            duplicate_window,
            stream: Vec::new(),
            seen: HashMap::new(),
            wire: Vec::new(),
            acks: Vec::new(),
            full_until: Instant::now(),
            generations: 0,
            too_large: None,
        })))
    }

    /// Connects a new sink.
    #[must_use]
    pub fn sink(&self) -> SimulatedSink {
        SimulatedSink {
            broker: self.clone(),
            generation: None,
            last_sequence: 0,
            in_flight: 0,
            heard: Instant::now(),
            batch: Vec::new(),
        }
    }

    /// Ends all faults.
    pub fn heal(&self) {
        let mut state = self.lock();
        state.faults = BrokerFaults::default();
        state.full_until = Instant::now();
    }

    /// Sets which event is refused for its size, if any.
    pub fn too_large(&self, id: Option<&str>) {
        self.lock().too_large = id.map(str::to_owned);
    }

    /// Makes the stream take nothing for so long.
    pub fn fill_for(&self, time: Duration) {
        self.lock().full_until = Instant::now() + time;
    }

    /// Returns whether the stream holds an event.
    #[must_use]
    pub fn holds(&self, id: &str) -> bool {
        self.lock().stream.iter().any(|record| record.id == id)
    }

    /// The ids of the events in the stream, in its order, without what others wrote.
    #[must_use]
    pub fn stored(&self) -> Vec<String> {
        let state = self.lock();
        state.stream.iter().filter(|record| record.position.is_some()).map(|record| record.id.clone()).collect()
    }

    /// The events in the stream as they were stored: together or one by one.
    #[must_use]
    pub fn stored_together(&self) -> Vec<Together> {
        let state = self.lock();
        let ours: Vec<_> = state.stream.iter().filter(|record| record.position.is_some()).collect();
        let together = ours.chunk_by(|a, b| (a.batch, a.split) == (b.batch, b.split));
        together
            .map(|records| Together {
                ids: records.iter().map(|record| record.id.clone()).collect(),
                split: records.iter().any(|record| record.split),
            })
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn fault(code: &'static str) -> Fault {
    Fault::new(Code(code), Action::Retry, code)
}

impl State {
    fn chance(&mut self, chance: f64) -> bool {
        chance > 0.0 && self.random.f64() < chance
    }

    /// Lets everything arrive that is due, in the order of arrival.
    fn deliver(&mut self) {
        let now = Instant::now();
        self.wire.sort_by_key(|message| (message.arrives, message.generation, message.token));
        let due = self.wire.partition_point(|message| message.arrives <= now);
        let arrived: Vec<_> = self.wire.drain(..due).collect();
        for message in arrived {
            let (generation, token) = (message.generation, message.token);
            // When it arrived, which may be long ago: nobody looks while the relay is down or waits.
            let arrived = message.arrives;
            let answer = self.store(message).map_err(|fault| Rejection { token: Some(token), fault });
            let lost = self.faults.ack_lost;
            if !self.chance(lost) {
                self.acks.push((generation, arrived + Duration::from_millis(1), answer));
            }
            let foreign = self.faults.foreign;
            if self.chance(foreign) {
                let id = format!("foreign-{}", self.stream.len());
                let batch = self.stream.len() as u64;
                self.stream.push(Record { id, position: None, batch, split: false });
            }
        }
    }

    fn store(&mut self, message: InFlight) -> Result<Ack, Fault> {
        let now = message.arrives;
        if now < self.full_until {
            return Err(fault("stream-full"));
        }
        let fenced = matches!(self.fence, Fence::ExpectedSequence | Fence::Blind | Fence::Atomic | Fence::Torn);
        if fenced && message.expected != self.stream.len() as u64 {
            return Err(fault("wrong-last-sequence"));
        }
        let InFlight { token, messages, .. } = message;
        let sent = messages.len();
        let came: Vec<_> = messages.into_iter().map_while(|message| message).collect();
        if came.len() < sent && self.fence != Fence::Torn {
            return Err(fault("batch-incomplete"));
        }
        let window = self.duplicate_window;
        let known = |id: &str| self.seen.get(id).filter(|(at, _)| now.duration_since(*at) < window);
        if let Some((_, sequence)) = came.iter().find_map(|message| known(&message.id)) {
            let ack = Ack { token, sequence: *sequence, duplicate: true };
            return if sent == 1 { Ok(ack) } else { Err(fault("batch-duplicate")) };
        }
        let batch = self.stream.len() as u64;
        let torn = came.len() < sent;
        for Message { id, position, split } in came {
            self.stream.push(Record { id: id.clone(), position: Some(position), batch, split });
            self.seen.insert(id, (now, self.stream.len() as u64));
        }
        if torn {
            return Err(fault("batch-incomplete"));
        }
        Ok(Ack { token, sequence: self.stream.len() as u64, duplicate: false })
    }

    /// When the next message or acknowledgement is due.
    fn next_event(&self) -> Instant {
        let arrivals = self.wire.iter().map(|message| message.arrives);
        let acks = self.acks.iter().map(|(_, at, _)| *at);
        arrivals.chain(acks).min().unwrap_or_else(|| Instant::now() + Duration::from_secs(3600))
    }

    fn stored(&self, from: &Position) -> Stored {
        let ours = self.stream.iter().filter_map(|record| Some((&record.id, record.position?)));
        let mut past: Vec<_> = ours.filter(|(_, position)| from.at_or_before(position)).collect();
        // Keys overtake each other; what one read-back returns has to be all up to a position.
        past.sort_by_key(|(_, position)| (position.commit_lsn, position.ordinal));
        let mut past = past.into_iter();
        let mut stored = Stored::default();
        if self.fence == Fence::Blind {
            return stored;
        }
        let mut last = None;
        for (id, position) in past.by_ref().take(self.read_back) {
            stored.ids.insert(IdDigest::of(id));
            last = Some(position);
        }
        stored.through = past.next().and(last);
        stored
    }
}

/// A sink of a [`Broker`].
#[derive(Debug)]
pub struct SimulatedSink {
    broker: Broker,
    generation: Option<u64>,
    last_sequence: u64,
    /// Messages, or batches.
    in_flight: usize,
    heard: Instant,
    /// What is kept back until the last of it has come; `None` for what will be lost.
    batch: Vec<Option<Message>>,
}

/// How many messages the simulated broker stores together.
const MAX_BATCH: usize = 24;

/// The simulated acknowledgement deadline.
const ACK_TIMEOUT: Duration = Duration::from_secs(5);

impl SimulatedSink {
    fn deadline(&self) -> Instant {
        let idle = Duration::from_secs(3600);
        self.heard + if self.in_flight > 0 { ACK_TIMEOUT } else { idle }
    }
}

impl Sink for SimulatedSink {
    async fn open(&mut self, from: &Position, _: Option<&StreamMark>) -> Result<Opened, Fault> {
        self.generation = None;
        tokio::time::sleep(Duration::from_millis(5)).await;
        let mut state = self.broker.lock();
        let refused = state.faults.refused;
        if state.chance(refused) {
            return Err(fault("no-responders"));
        }
        state.deliver();
        state.generations += 1;
        self.generation = Some(state.generations);
        self.last_sequence = state.stream.len() as u64;
        self.in_flight = 0;
        self.batch.clear();
        self.heard = Instant::now();
        let stored = state.stored(from);
        let found = stored.ids.len() as u64;
        Ok(Opened {
            stream: "SIM".to_owned(),
            created: "2026-01-01T00:00:00Z".to_owned(),
            mode: match state.fence {
                Fence::OneInFlight => PublisherMode::Serial,
                Fence::OnePerKey => PublisherMode::Lanes,
                Fence::ExpectedSequence | Fence::Blind | Fence::Missing => PublisherMode::Chain,
                Fence::Atomic | Fence::Torn => PublisherMode::Atomic,
            },
            last_sequence: self.last_sequence,
            tail: state.stream.iter().rev().find_map(|record| record.position),
            stored,
            read_back: ReadBack { messages: found, found, ..ReadBack::default() },
            max_in_flight: if state.fence == Fence::OneInFlight { 1 } else { 32 },
            max_batch: if matches!(state.fence, Fence::Atomic | Fence::Torn) { MAX_BATCH } else { 1 },
        })
    }

    async fn send(&mut self, token: u64, message: &OutboundMessage, placement: Placement) -> Result<(), Fault> {
        let Some(generation) = self.generation else { return Err(fault("no-generation")) };
        let mut state = self.broker.lock();
        if state.too_large.as_ref() == Some(&message.id) {
            return Err(Fault::new(Code("message-too-large"), Action::Refuse, "the message is too large"));
        }
        let faults = state.faults;
        if state.chance(faults.full) {
            let seconds = state.random.u64(1..4);
            state.full_until = Instant::now() + Duration::from_secs(seconds);
        }
        let broken = state.chance(faults.disconnect);
        let Placement { last, whole, .. } = placement;
        let (id, position) = (message.id.clone(), message.position);
        let came = !state.chance(faults.message_lost);
        self.batch.push(came.then_some(Message { id, position, split: !whole }));
        // A batch that does not end with its last message is never answered, and never stored.
        if last && (came || state.fence == Fence::Torn) {
            // What was sent on a connection that breaks may still arrive, even much later.
            let delay = if broken { state.random.u64(0..8_000) } else { 1 };
            let messages = std::mem::take(&mut self.batch);
            state.wire.push(InFlight {
                generation,
                token,
                expected: self.last_sequence + token + 1 - messages.len() as u64,
                arrives: Instant::now() + Duration::from_millis(delay),
                messages,
            });
        } else if last {
            self.batch.clear();
        }
        if last {
            if self.in_flight == 0 {
                self.heard = Instant::now();
            }
            self.in_flight += 1;
        }
        if broken {
            self.generation = None;
            return Err(fault("disconnected"));
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    async fn ack(&mut self) -> Result<Ack, Rejection> {
        loop {
            let Some(generation) = self.generation else {
                return Err(Rejection { token: None, fault: fault("no-generation") });
            };
            {
                let mut state = self.broker.lock();
                state.deliver();
                let now = Instant::now();
                state.acks.retain(|(of, _, _)| *of >= generation);
                if let Some(index) = state.acks.iter().position(|(of, at, _)| *of == generation && *at <= now) {
                    let (_, _, answer) = state.acks.remove(index);
                    self.heard = now;
                    self.in_flight = self.in_flight.saturating_sub(1);
                    if answer.is_err() {
                        self.generation = None;
                    }
                    return answer;
                }
            }
            if Instant::now() >= self.deadline() {
                self.generation = None;
                return Err(Rejection { token: None, fault: fault("ack-timeout") });
            }
            let wake = self.broker.lock().next_event().min(self.deadline());
            tokio::time::sleep_until(wake).await;
        }
    }
}
