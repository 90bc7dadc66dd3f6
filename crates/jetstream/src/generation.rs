//! A generation: messages under way, their acknowledgements in order, and what ends it.

use std::collections::VecDeque;
use std::time::Duration;

use async_nats::{Message, Subject, Subscriber};
use tokio::time::Instant;
use waljet_pipeline::{Ack, Action, Fault, PublisherMode};

use crate::ack::{self, Answer};
use crate::api;
use crate::atomic::{self, Units};
use crate::encode::ExpectedLast;
use crate::error::{self, Verdict};
use crate::explain::{Explaining, Silence};
use crate::fast::{Batches, Turn};
use crate::limits::Limits;
use crate::writing::Writing;

/// Behind the prefix, where the message at a batch's end comes in.
pub(crate) const PROOF: &str = "proof";

/// The digits of the largest token.
const MAX_TOKEN_LEN: usize = u64::MAX.ilog10() as usize + 1;

/// Messages under way since one `open`.
#[derive(Debug)]
pub(crate) struct Generation {
    /// Where acknowledgements come in; nobody else's do, and none of an earlier generation.
    pub(crate) acks: Subscriber,
    /// The reply subject up to the token.
    pub(crate) prefix: String,
    pub(crate) mode: PublisherMode,
    /// In fast mode, the batches.
    pub(crate) batches: Option<Batches>,
    /// In atomic mode, what goes together.
    pub(crate) units: Option<Units>,
    /// What is being handed to the connection beside `send`.
    pub(crate) writing: Writing,
    /// The stream's last sequence at the start, from which later ones are predicted.
    pub(crate) base: u64,
    pub(crate) limits: Limits,
    pub(crate) max_in_flight: usize,
    /// The next message's token.
    pub(crate) next_token: u64,
    /// The oldest unacknowledged message's token.
    pub(crate) next_ack: u64,
    /// Messages under way, the oldest first; in lanes mode with what is acknowledged already among them.
    pub(crate) in_flight: VecDeque<Option<InFlight>>,
    /// How many messages are under way.
    pub(crate) under_way: usize,
    /// Messages that this generation stored, without duplicates.
    pub(crate) stored: u64,
    /// The sequence of the last acknowledgement.
    pub(crate) last_sequence: u64,
    /// Refusals of the server that are older than this generation.
    pub(crate) violations_before: u64,
    /// Why it ended. Kept until it has been told, so that a cancelled call loses nothing.
    pub(crate) ending: Option<Ending>,
}

/// A message under way.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) subject: Subject,
    pub(crate) sent_at: Instant,
}

/// Why a generation ended.
#[derive(Debug)]
pub(crate) enum Ending {
    /// This fault; taken out when it is told.
    Known { token: Option<u64>, fault: Option<Fault>, fence: bool },
    /// The reason is to be looked up.
    Silent { token: Option<u64>, silence: Silence, explaining: Option<Explaining> },
}

impl Ending {
    pub(crate) fn known(token: Option<u64>, fault: Fault) -> Self {
        Self::Known { token, fault: Some(fault), fence: false }
    }

    pub(crate) fn silent(token: Option<u64>, silence: Silence) -> Self {
        Self::Silent { token, silence, explaining: None }
    }
}

/// What an answer leads to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Nothing, or the end of the generation.
    Nothing,
    /// An acknowledgement.
    Ack(Ack),
    /// The stream's message of this sequence is to be read.
    Prove(u64),
}

impl Generation {
    /// Returns what the headers of messages say that are sent in batches, and how long their reply subjects may become; `None`
    /// where each message goes alone.
    pub(crate) fn batched(&self) -> Option<(ExpectedLast, usize)> {
        let prefix = self.prefix.len();
        match (&self.batches, &self.units) {
            (Some(batches), _) => Some((ExpectedLast::Later, prefix + batches.reply_len())),
            (None, Some(_)) => Some((ExpectedLast::Batched, prefix + MAX_TOKEN_LEN)),
            (None, None) => None,
        }
    }

    /// Notes a message that is about to be handed to the connection, or to wait for its batch.
    pub(crate) fn sending(&mut self, subject: Subject) {
        self.in_flight.push_back(Some(InFlight { subject, sent_at: Instant::now() }));
        self.under_way += 1;
        self.next_token += 1;
    }

    /// Returns when the oldest message has waited too long.
    pub(crate) fn deadline(&self, ack_timeout: Duration) -> Option<Instant> {
        match (&self.batches, &self.units) {
            (Some(batches), _) => batches.deadline(ack_timeout),
            (_, Some(units)) => units.deadline(ack_timeout),
            _ => self.in_flight.iter().flatten().next().map(|oldest| oldest.sent_at + ack_timeout),
        }
    }

    /// Takes in an answer: an acknowledgement, or else the end of the generation.
    pub(crate) fn take(&mut self, message: &Message, stream: &str) -> Taken {
        if self.batches.is_some() {
            return self.take_of_batch(message, stream);
        }
        let (token, answer) = ack::read(message, &self.prefix, stream);
        let Some(token) = token.filter(|token| *token < self.next_token) else {
            self.ending = Some(Ending::known(None, unexpected("an answer came for a message that was not sent")));
            return Taken::Nothing;
        };
        let silent = message.payload.is_empty() && message.status.is_none();
        match self.units.as_mut().map(|units| units.take(token, &answer, silent, Instant::now())) {
            None | Some(atomic::Turn::Alone) => {}
            Some(atomic::Turn::On) => return Taken::Nothing,
            Some(atomic::Turn::Stored(ack)) => return self.acknowledged(ack),
            Some(atomic::Turn::Failed(fault)) => {
                self.ending = Some(Ending::known(None, fault));
                return Taken::Nothing;
            }
        }
        match answer {
            // Old clusters answer so, with a sequence of their guess, for an id that is only being stored.
            Answer::Stored { sequence, duplicate: true } if sequence > self.last_sequence => {
                let what = format!(
                    "publish to {:?}: the broker has its id at {sequence}, which was not seen to be stored",
                    self.subject(token)
                );
                self.ending = Some(Ending::known(None, Fault::new(error::DUPLICATE_IN_PROCESS, Action::Retry, what)));
            }
            Answer::Stored { sequence, duplicate: false } if sequence <= self.base => {
                let what =
                    format!("stream {stream:?} stored a message at {sequence}, and its last one was {}", self.base);
                self.ending = Some(Ending::known(None, Fault::new(error::ACK_STREAM, Action::Retry, what)));
            }
            Answer::Stored { sequence, duplicate } if self.mode == PublisherMode::Lanes => {
                return self.acknowledged_alone(Ack { token, sequence, duplicate });
            }
            Answer::Stored { sequence, duplicate } if token == self.next_ack => {
                return self.acknowledged(Ack { token, sequence, duplicate });
            }
            Answer::Stored { .. } => {
                let fault = Fault::new(
                    error::ACK_ORDER,
                    Action::Retry,
                    format!("acknowledgement {token} came where {} was due", self.next_ack),
                );
                self.ending = Some(Ending::known(None, fault));
            }
            other => self.ending = Some(self.ended(Some(token), other, stream)),
        }
        Taken::Nothing
    }

    /// Takes in an answer in fast mode.
    fn take_of_batch(&mut self, message: &Message, stream: &str) -> Taken {
        let (Some(batches), Some(reply)) = (&mut self.batches, message.subject.strip_prefix(self.prefix.as_str()))
        else {
            self.ending = Some(Ending::known(None, unexpected("an answer came for a message that was not sent")));
            return Taken::Nothing;
        };
        let turn = if reply == PROOF {
            match api::stored(&message.payload) {
                Ok(found) => batches.prove(found.as_ref()),
                Err(error) => Turn::Failed(error.fault("read the end of a batch", stream)),
            }
        } else {
            batches.take(reply, ack::answer(message, stream), Instant::now())
        };
        match turn {
            Turn::On => {}
            Turn::Stored(ack) => return self.acknowledged(ack),
            Turn::Prove(sequence) => return Taken::Prove(sequence),
            Turn::Failed(fault) => self.ending = Some(Ending::known(None, fault)),
            Turn::Other(token, answer) => self.ending = Some(self.ended(token, answer, stream)),
        }
        Taken::Nothing
    }

    /// Makes an ending of an answer that is no acknowledgement.
    fn ended(&self, token: Option<u64>, answer: Answer, stream: &str) -> Ending {
        let subject = token.map_or("", |token| self.subject(token));
        match answer {
            Answer::Elsewhere { stream: other } => {
                let fault = Fault::new(
                    error::ACK_STREAM,
                    Action::Retry,
                    format!("publish to {subject:?}: stream {other:?} acknowledged it, expected {stream:?}"),
                );
                let hint = format!("take the subject away from the other stream: nats stream edit {other}");
                Ending::known(token, fault.hint(hint))
            }
            Answer::Error { err_code, description } => {
                let fault = error::broker_fault(err_code, &description, &format!("publish to {subject:?}"), stream);
                let fence = error::classify(err_code) == Verdict::Fence;
                Ending::Known { token, fault: Some(fault), fence }
            }
            Answer::Status(503) => Ending::silent(token, Silence::NoResponders),
            Answer::Status(429) => {
                let fault =
                    Fault::new(error::OVERLOADED, Action::Retry, "the broker dropped messages that came in too fast");
                Ending::known(token, fault.hint("lower window.max_events"))
            }
            Answer::Status(status) => {
                Ending::known(token, unexpected(&format!("the broker answered with status {status}")))
            }
            Answer::Stored { .. } | Answer::BatchOver { .. } | Answer::BatchFlow { .. } | Answer::BatchGap { .. } => {
                Ending::known(token, unexpected("an answer belongs to another way of publishing"))
            }
            Answer::Unknown => Ending::known(token, unexpected("an answer is no acknowledgement")),
        }
    }

    /// Returns the subject of a message under way.
    pub(crate) fn subject(&self, token: u64) -> &str {
        let at = token.checked_sub(self.next_ack).and_then(|at| usize::try_from(at).ok());
        at.and_then(|at| self.in_flight.get(at)?.as_ref()).map_or("", |sent| sent.subject.as_str())
    }

    /// Takes off what is stored.
    fn acknowledged(&mut self, ack: Ack) -> Taken {
        while self.next_ack <= ack.token && self.in_flight.pop_front().is_some() {
            self.next_ack += 1;
            self.under_way -= 1;
            self.stored += u64::from(!ack.duplicate);
        }
        self.last_sequence = self.last_sequence.max(ack.sequence);
        if let Some(units) = &mut self.units {
            units.acknowledged(ack.token, self.last_sequence, Instant::now());
        }
        Taken::Ack(ack)
    }
}

impl Generation {
    /// Takes off one message that is stored, whatever is before it.
    fn acknowledged_alone(&mut self, ack: Ack) -> Taken {
        let at = ack.token.checked_sub(self.next_ack).and_then(|at| usize::try_from(at).ok());
        if at.and_then(|at| self.in_flight.get_mut(at)).and_then(Option::take).is_none() {
            self.ending = Some(Ending::known(None, unexpected("a message was acknowledged twice")));
            return Taken::Nothing;
        }
        self.under_way -= 1;
        self.stored += u64::from(!ack.duplicate);
        while self.in_flight.front().is_some_and(Option::is_none) {
            self.in_flight.pop_front();
            self.next_ack += 1;
        }
        self.last_sequence = self.last_sequence.max(ack.sequence);
        Taken::Ack(ack)
    }
}

/// The fault of an answer that JetStream does not give.
fn unexpected(why: &str) -> Fault {
    Fault::new(error::UNEXPECTED_ANSWER, Action::Retry, why)
        .hint("check with nats stream ls --subjects and nats server report connections who else answers on the subject")
}
