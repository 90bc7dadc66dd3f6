//! What became of the messages: acknowledged, found stored, refused; and how far that confirms.

use tokio::time::Instant;
use tracing::{debug, error, warn};
use waljet_pgoutput::Timestamp;

use super::{LOG_AGAIN, Queue};
use crate::status::Monitor;
use crate::window::Entry;
use crate::{Ack, Action, Code, Confirmed, Fault, Position, PublisherMode, Rejection, error};

impl Queue {
    /// Holds an event that cannot be published, and shows that the lane stands there.
    pub(crate) fn blocked(&mut self, number: u64) {
        self.hold(number);
        let Some(entry) = self.window.get(number) else { return };
        let Some(refusal) = &entry.refusal else { return };
        let (position, fault) = (entry.position, &refusal.fault);
        self.monitor.sink_blocked(fault);
        if log_now(&mut self.logged, fault.code) {
            let (code, error, hint) = (fault.code, fault.summary(), fault.hint.as_deref().unwrap_or(""));
            error!(%position, %code, error, hint, "event cannot be published; nothing behind it is");
        }
    }

    pub(crate) fn acknowledged(&mut self, ack: Ack) {
        self.monitor.turn();
        if self.mode == PublisherMode::Lanes {
            self.settle(ack.token, ack);
        } else {
            (self.first_token..=ack.token).for_each(|token| self.settle(token, ack));
        }
        while self.sent.front().is_some_and(Option::is_none) {
            self.sent.pop_front();
            self.first_token += 1;
        }
        self.logged = None;
        if let Some(stream) = &mut self.stream {
            stream.last_sequence = stream.last_sequence.max(ack.sequence);
        }
        self.confirm();
    }

    /// Notes that the message of a token is stored, as the acknowledgement of this or a later one says.
    fn settle(&mut self, token: u64, ack: Ack) {
        let Some(number) = self.number(token) else { return };
        if let Some(slot) = self.index(token).and_then(|index| self.sent.get_mut(index)) {
            *slot = None;
            self.in_flight -= 1;
        }
        let duplicate = ack.duplicate && token == ack.token;
        if let Some(entry) = self.window.get(number) {
            observe(&self.monitor, entry, duplicate, (self.clock)());
            self.monitor.acknowledged(ack.sequence, entry.position);
            // The answer to a batch does not say which of its events it is.
            let batch = self.mode == PublisherMode::Fast;
            let news = if batch { !self.sent_again } else { entry.attempts == 1 };
            if duplicate && news && log_now(&mut self.same_id_logged, error::SAME_ID) {
                let Position { commit_lsn, ordinal, .. } = entry.position;
                let sequence = ack.sequence;
                let at_or_before = if batch { " at or shortly before this position" } else { "" };
                warn!(%commit_lsn, ordinal, sequence, code = %error::SAME_ID, "the stream had the id of an event{at_or_before} already; the ids of two events may be the same");
            }
        }
        self.done(number);
    }

    /// Notes that the stream holds an entry already.
    pub(crate) fn found_stored(&mut self, number: u64) {
        self.monitor.metrics.skipped.inc();
        self.replay.skipped();
        self.monitor.progress();
        self.done(number);
        self.confirm();
    }

    fn done(&mut self, number: u64) {
        if let Some(message) = self.window.get(number).and_then(|entry| entry.message.as_ref())
            && self.mode == PublisherMode::Lanes
        {
            self.keys.stored(message.key);
        }
        let (events, bytes) = self.window.done(number);
        self.budget.release(events, bytes);
    }

    fn index(&self, token: u64) -> Option<usize> {
        usize::try_from(token.checked_sub(self.first_token)?).ok()
    }

    fn number(&self, token: u64) -> Option<u64> {
        self.sent.get(self.index(token)?).copied().flatten()
    }

    /// Takes what the broker said, and returns it as a failure of the generation.
    pub(crate) fn rejected(&mut self, rejection: Rejection) -> Fault {
        let Rejection { token, fault } = rejection;
        match (fault.action, token.and_then(|token| self.number(token))) {
            (Action::Refuse, Some(number)) => {
                let again = Fault::new(fault.code, Action::Retry, fault.message.clone());
                self.refuse(number, fault);
                again
            }
            _ => fault,
        }
    }

    pub(crate) fn failed(&mut self, fault: &Fault) {
        self.monitor.sink_fault(fault);
        self.monitor.metrics.publish_retries.with_label_values(&[fault.code.0]).inc();
        let (code, error, hint) = (fault.code, fault.summary(), fault.hint.as_deref().unwrap_or(""));
        let waiting = self.window.len();
        if log_now(&mut self.logged, fault.code) {
            warn!(%code, error, hint, waiting, "publishing failed, beginning anew from the first event not known to be stored");
        } else {
            debug!(%code, error, waiting, "publishing failed again");
        }
        self.show();
    }

    pub(super) fn confirm(&self) {
        let Some(lsn) = self.window.confirmed() else { return };
        let Some(history) = self.identity.as_ref().map(|identity| identity.history) else { return };
        let raised = self.progress.send_if_modified(|progress| {
            let raise = progress.confirmed.is_none_or(|old| old.lsn < lsn);
            if raise {
                progress.confirmed = Some(Confirmed { history, lsn });
                if let (Some(shown), Some(stream)) = (&mut progress.stream, &self.stream) {
                    shown.last_sequence = stream.last_sequence;
                }
            }
            raise
        });
        if raised {
            self.monitor.confirmed(lsn);
        }
    }
}

fn observe(monitor: &Monitor, entry: &Entry, duplicate: bool, now: Timestamp) {
    let metrics = &monitor.metrics;
    let counter = if duplicate { &metrics.duplicate } else { &metrics.stored };
    counter.inc();
    if let Some(sent_at) = entry.sent_at {
        metrics.publish_to_ack.observe(sent_at.elapsed().as_secs_f64());
    }
    if let Some(message) = &entry.message {
        let micros = now.0.saturating_sub(message.commit_time.0);
        metrics.commit_to_ack.observe(micros.max(0) as f64 / 1e6);
    }
}

/// Returns whether a failure of this code is to be logged now, and notes that it is.
pub(super) fn log_now(logged: &mut Option<(Code, Instant)>, code: Code) -> bool {
    let now = Instant::now();
    let recent = logged.is_some_and(|(last, at)| last == code && now.duration_since(at) < LOG_AGAIN);
    if !recent {
        *logged = Some((code, now));
    }
    !recent
}
