//! The end of a generation: its reason, and what has to go with it.

use std::time::Duration;

use tokio::time::{Instant, timeout};
use waljet_pipeline::{Action, Code, Fault, PublisherMode, Rejection};

use crate::explain::Explaining;
use crate::generation::Ending;
use crate::sink::{JetStreamSink, no_generation};
use crate::{error, limits, subject};

/// How long a look at the stream may take before the fault is told without its result.
const EXPLAIN: Duration = Duration::from_secs(1);
/// How long the server's word on a permission may take after a fence or a gap.
const GRACE: Duration = Duration::from_millis(20);

/// After these, commands may be stuck in the client or bytes in the socket, or a refused subscription would stay mute.
const FRESH_CONNECTION: [Code; 6] = [
    error::DISCONNECTED,
    error::TIMEOUT,
    error::ACK_TIMEOUT,
    error::PERMISSION,
    error::STREAM_LEADERLESS,
    error::STREAM_NO_ACK,
];

impl JetStreamSink {
    /// Tells why the generation ended, and leaves it.
    ///
    /// # Cancel safety
    ///
    /// The ending stays until it is told.
    pub(crate) async fn tell(&mut self) -> Rejection {
        let looked_up = self.look_up().await;
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
                    // Who came in between is told by the tail, at the next opening. Leaders that change refuse again and again, too, and
                    // a batch that gave up its fence for that could be doubled by what is left of an older one.
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

    /// Finds out why the broker is silent, where that is how the generation ended.
    async fn look_up(&mut self) -> Option<(Option<u64>, Fault)> {
        let api = self.api(EXPLAIN)?;
        let generation = self.generation.as_mut()?;
        let Some(Ending::Silent { token, silence, .. }) = &generation.ending else { return None };
        let (token, silence) = (*token, *silence);
        let about = generation.subject(token.unwrap_or(generation.next_ack)).to_owned();
        let Some(Ending::Silent { explaining, .. }) = &mut generation.ending else { return None };
        let stream = self.stream.stream.clone();
        let explaining = explaining.get_or_insert_with(|| Explaining::begin(api, stream, about, silence));
        Some((token, explaining.done().await))
    }

    /// Finds the refused permission behind a fence or a gap: the message that the server would not take is the one missing.
    async fn permission_behind_fence(&mut self) -> Option<Fault> {
        let (generation, connection) = (self.generation.as_ref()?, self.connection.as_mut()?);
        let Some(Ending::Known { fence, fault, .. }) = &generation.ending else { return None };
        if !fence && fault.as_ref().is_none_or(|fault| fault.code != error::BATCH) {
            return None;
        }
        let before = generation.violations_before;
        let space = &self.stream.subject_space;
        // The server's word came first but takes another way through the client.
        let news = timeout(GRACE, connection.news.wait_for(|news| news.violations > before)).await.ok()?.ok()?;
        let violation = news.violation.as_ref()?;
        (violation.permission == "publish" && subject::covers(space, &violation.subject))
            .then(|| violation.fault(space))
    }

    /// Leaves the generation, and the connection too where it cannot be trusted any more.
    pub(crate) fn end(&mut self, fault: &Fault) {
        if let Some(generation) = self.generation.as_ref().filter(|generation| generation.mode == PublisherMode::Fast) {
            self.modes.batches_ended(fault.code, generation.next_ack, Instant::now());
        }
        if let Some(units) = self.generation.as_ref().and_then(|generation| generation.units.as_ref()) {
            self.atomic.ended(units);
        }
        self.leave();
        if FRESH_CONNECTION.contains(&fault.code) {
            self.disconnect();
        }
    }

    /// Refuses a message, unless the limit that it exceeds was changed since the generation began: the server tells
    /// limits to new connections only, so that a look at them needs one.
    pub(crate) async fn refused(&mut self, fault: Fault) -> Fault {
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
    pub(crate) fn fail(&mut self, fault: Fault) -> Fault {
        self.end(&fault);
        fault
    }

    /// Leaves the current generation.
    pub(crate) fn leave(&mut self) {
        self.generation = None;
    }
}
