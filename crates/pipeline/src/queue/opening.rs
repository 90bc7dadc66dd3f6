//! A new connection to the database, and a new generation of the sink: what each is compared with, and where to begin.

use tracing::{debug, info, warn};
use waljet_pgoutput::Lsn;

use super::Queue;
use crate::grouping::Grouping;
use crate::{Action, Checkpoint, Fault, History, Identity, Opened, Position, Stored, StreamMark, error};

impl Queue {
    /// Compares a new connection with what was given out over the ones before.
    pub(super) fn connected(&mut self, identity: Identity, stored: Option<Box<Checkpoint>>) -> Result<(), Fault> {
        let before = self.identity.as_ref().map(|identity| identity.history.system_id);
        let now = identity.history.system_id;
        if let Some(before) = before.filter(|before| *before != now) {
            let message = format!("expected the database of system identifier {before}, found {now}");
            return Err(Fault::new(error::OTHER_CLUSTER, Action::Gap, message)
                .hint("find out what was done to the database; then go on with: waljet run --accept-gap"));
        }
        let handed_over = identity.handed_over;
        if handed_over {
            self.last_admitted = None;
        }
        if let Some(last) = self.last_admitted.filter(|last| !identity.covers(last)) {
            let Identity { history, wal_end, .. } = identity;
            let message =
                format!("the event at {last} is not part of the database's history {history} up to {wal_end}");
            return Err(Fault::new(error::DATABASE_CHANGED, Action::Gap, message)
                .hint("the server lost transactions whose events may be published; compare the table with the stream, then go on with: waljet run --accept-gap"));
        }
        if handed_over {
            info!(slot_confirmed = %identity.slot_confirmed, "the slot had another reader meanwhile: beginning where it stands");
            let (events, bytes) = self.window.clear();
            self.budget.release(events, bytes);
            self.reopen = true;
            self.tail_unchecked = true;
        }
        if self.identity.is_none() || handed_over {
            self.replay.begin_at(identity.wal_end);
        }
        // One of a timeline that was left before it says nothing about this server's events.
        let known = stored.as_ref().map(|stored| stored.confirmed).filter(|known| identity.includes(*known));
        self.checkpoint = self.checkpoint.max(known.map(|known| known.lsn));
        self.identity = Some(identity);
        let stream = stored.and_then(|stored| stored.stream);
        // What this process saw itself is newer, unless another relay had the slot since.
        self.stream = if handed_over { stream.or(self.stream.take()) } else { self.stream.take().or(stream) };
        Ok(())
    }

    /// The position of the first event that is not known to be stored.
    pub(crate) fn resume_from(&self) -> Position {
        let identity = self.identity.as_ref();
        let confirmed = self.window.confirmed().max(identity.map(|identity| identity.slot_confirmed));
        let start = Position {
            history: identity.map_or(History { system_id: 0, timeline: 0 }, |identity| identity.history),
            commit_lsn: confirmed.unwrap_or(Lsn::ZERO),
            ordinal: 0,
        };
        self.window.oldest().map_or(start, |entry| entry.position)
    }

    pub(crate) fn begin(&mut self, opened: Opened) -> Result<(), Fault> {
        let first = std::mem::take(&mut self.tail_unchecked);
        if first {
            self.check_tail(&opened)?;
            // The word was for what was found until now.
            self.accept_gap = false;
        }
        let stored = opened.stored.ids.len();
        let Opened { stream, mode, last_sequence, .. } = &opened;
        self.replay.open(stream, &opened.read_back);
        let tail = opened.tail.map(|tail| tail.to_string()).unwrap_or_default();
        if first || self.logged.is_some() {
            info!(%stream, %mode, last_sequence, tail, stored, "stream open");
        } else {
            debug!(%stream, %mode, last_sequence, tail, stored, "stream open");
        }
        self.monitor.sink_opened(&opened);
        let mark =
            StreamMark { stream: stream.clone(), created: opened.created.clone(), last_sequence: *last_sequence };
        match &mut self.stream {
            Some(known) => known.learn(&mark),
            None => self.stream = Some(mark),
        }
        self.progress.send_modify(|progress| progress.stream.clone_from(&self.stream));
        self.cursor = self.window.front();
        self.reopen = false;
        self.held = None;
        self.keys.clear();
        self.sent.clear();
        self.first_token = 0;
        self.in_flight = 0;
        self.sent_again = false;
        self.mode = opened.mode;
        self.max_in_flight = opened.max_in_flight.max(1);
        self.stored = Stored { before: self.checkpoint, ..opened.stored };
        self.grouping = Grouping::new(opened.max_batch.min(self.max_in_flight));
        if self.deadline.is_some() {
            self.withdraw();
        }
        Ok(())
    }

    fn check_tail(&self, opened: &Opened) -> Result<(), Fault> {
        let (Some(tail), Some(identity)) = (&opened.tail, &self.identity) else { return Ok(()) };
        if identity.covers(tail) {
            return Ok(());
        }
        let Identity { history, wal_end, .. } = identity;
        let stream = &opened.stream;
        let message = format!(
            "the last event in stream {stream:?} is at {tail}, which is not part of the database's history {history} up to {wal_end}"
        );
        if self.accept_gap {
            warn!(error = message, "gap accepted by the operator");
            return Ok(());
        }
        Err(Fault::new(error::STREAM_AHEAD, Action::Gap, message)
            .hint("use another stream for this database, or accept the gap with: waljet run --accept-gap"))
    }
}
