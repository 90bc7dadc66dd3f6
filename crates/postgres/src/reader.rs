//! The task that owns the stream's socket.
//!
//! It reads as long as there is room, and speaks to the server whether or not there is: a consumer that
//! stands still stops the reading, never the status.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use pgwire_replication::protocol::BackendMessage;
use pgwire_replication::protocol::framing::{write_copy_data, write_copy_done};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};
use waljet_pgoutput::{Lsn, PrimaryKeepalive, ReplicationMessage, StandbyStatusUpdate, Timestamp};
use waljet_pipeline::{Action, Fault, Frame};

use crate::batch::{Batch, Budget};
use crate::error::{self, CONNECTION_LOST, PUBLICATION_MISSING, SILENT, ServerError, UNAVAILABLE};
use crate::watch::Proof;
use crate::wire::{Frames, unwritten};

/// The least time between two statuses for positions that moved.
const PROGRESS_GAP: Duration = Duration::from_millis(100);
/// The least time between two answers to reply requests: a server that stops asks again at once.
const ANSWER_GAP: Duration = Duration::from_millis(20);
/// So many reply requests within a second are the sound of a server that wants to stop.
const INSISTENT: u32 = 10;
/// What a stopping server is given to send the rest.
const STOP_GRACE: Duration = Duration::from_millis(500);
/// The least time before an unchanged keepalive is given out again.
const REPEAT_GAP: Duration = Duration::from_secs(1);
/// How long a status may take to be written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long each of the two steps of closing may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// What a frame costs besides its bytes.
const FRAME_OVERHEAD: usize = 64;

/// What the task is told at its start.
#[derive(Clone, Debug)]
pub(crate) struct ReaderOptions {
    /// Where the stream starts; nothing before it is received any more.
    pub(crate) start: Lsn,
    /// The longest time between two statuses.
    pub(crate) feedback_interval: Duration,
    /// After this long without a byte the server is asked for one.
    pub(crate) ping_after: Duration,
    /// After this long without a byte the connection is given up.
    pub(crate) dead_after: Duration,
}

/// A last position, and where to say that the server was told.
#[derive(Debug)]
pub(crate) struct Closing {
    /// The position.
    pub(crate) flushed: Lsn,
    /// Told once the connection is closed.
    pub(crate) done: oneshot::Sender<Result<(), Fault>>,
}

/// The task.
pub(crate) struct Reader<S> {
    stream: S,
    frames: Frames,
    options: ReaderOptions,
    budget: Arc<Budget>,
    batches: mpsc::Sender<Result<Batch, Fault>>,
    flushed: watch::Receiver<Lsn>,
    proof: watch::Receiver<Proof>,
    closing: oneshot::Receiver<Closing>,
    pending: Batch,
    ended: Option<Fault>,
    positions: Positions,
    clock: Clock,
}

/// What was received, told and asked.
#[derive(Debug, Default)]
struct Positions {
    received: Lsn,
    /// The last keepalive's position.
    keepalive: Lsn,
    /// The last one that was given out.
    given: Lsn,
    /// The last one that was told as flushed.
    told: Lsn,
    reply_wanted: bool,
}

/// When what happened last.
#[derive(Debug)]
struct Clock {
    heard: Instant,
    spoke: Instant,
    pinged: Option<Instant>,
    given: Instant,
    asked_since: Instant,
    asked: u32,
    stop_at: Option<Instant>,
}

/// The ends that the consumer holds.
pub(crate) struct ReaderEnds {
    pub(crate) batches: mpsc::Sender<Result<Batch, Fault>>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) flushed: watch::Receiver<Lsn>,
    pub(crate) proof: watch::Receiver<Proof>,
    pub(crate) closing: oneshot::Receiver<Closing>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Reader<S> {
    pub(crate) fn new(stream: S, frames: Frames, options: ReaderOptions, ends: ReaderEnds) -> Self {
        let now = Instant::now();
        Self {
            stream,
            frames,
            budget: ends.budget,
            batches: ends.batches,
            flushed: ends.flushed,
            proof: ends.proof,
            closing: ends.closing,
            pending: Batch::default(),
            ended: None,
            positions: Positions { received: options.start, ..Positions::default() },
            clock: Clock {
                heard: now,
                // The first status goes out at once: it tells the server that somebody is there.
                spoke: now.checked_sub(options.feedback_interval).unwrap_or(now),
                pinged: None,
                given: now,
                asked_since: now,
                asked: 0,
                stop_at: None,
            },
            options,
        }
    }

    /// Runs until the connection ends or nobody listens any more.
    pub(crate) async fn run(mut self) {
        match self.stream_frames().await {
            Ok(Some(closing)) => {
                let result = self.close(closing.flushed).await;
                // Nobody waits for it any more: then there is nothing to tell either.
                let _ = closing.done.send(result);
            }
            Ok(None) => {}
            Err(fault) => {
                let _ = self.batches.send(Err(fault)).await;
            }
        }
    }

    /// Returns when told to close (`Some`), when the consumer is gone (`None`) or on a fault.
    async fn stream_frames(&mut self) -> Result<Option<Closing>, Fault> {
        // Messages may have come together with the answer to START_REPLICATION.
        self.take_frames();
        let batches = self.batches.clone();
        loop {
            if self.pending.frames.is_empty()
                && let Some(fault) = self.ended.take()
            {
                return Err(fault);
            }
            if self.ended.is_none() {
                self.speak().await?;
            }
            let full = !self.budget.has_room();
            let may_read = self.pending.frames.is_empty() && !full && self.ended.is_none();
            let wake = self.next_wake(may_read);
            tokio::select! {
                biased;
                // 1. Closing comes before all: whoever closes has stopped taking frames.
                closing = &mut self.closing => return Ok(closing.ok()),
                // 2. A position to report must not wait behind a busy stream.
                changed = self.flushed.changed() => if changed.is_err() { return Ok(None) },
                // 3. A proof makes a keepalive that was received before count.
                changed = self.proof.changed() => match changed {
                    Ok(()) => self.give_keepalive(),
                    Err(_) => return Ok(None),
                },
                // 4. What was read is handed over before more is read.
                permit = batches.reserve(), if !self.pending.frames.is_empty() => match permit {
                    Ok(permit) => {
                        let batch = std::mem::take(&mut self.pending);
                        self.budget.take(batch.bytes);
                        permit.send(Ok(batch));
                    }
                    Err(_) => return Ok(None),
                },
                // 5. The socket, while there is room.
                read = self.frames.fill(&mut self.stream), if may_read => self.take_read(read),
                // 6. Room again: time spent without reading says nothing about the server.
                () = self.budget.freed(), if full => self.clock.heard = Instant::now(),
                // 7. The timer of status, answer, liveness and grace; looked at above on every turn, too.
                () = sleep_until(wake) => {}
            }
            if !may_read {
                self.clock.heard = Instant::now();
            }
        }
    }

    fn take_read(&mut self, read: std::io::Result<usize>) {
        match read {
            Ok(0) => self.end(error::lost("read from the server", std::io::ErrorKind::UnexpectedEof.into())),
            Err(fault) => self.end(error::lost("read from the server", fault)),
            Ok(_) => {
                self.clock.heard = Instant::now();
                self.clock.pinged = None;
                self.take_frames();
            }
        }
    }

    /// Takes all messages that are complete, up to one that ends the stream.
    fn take_frames(&mut self) {
        while self.ended.is_none() {
            match self.frames.next() {
                Ok(Some(message)) => {
                    if let Err(fault) = self.take_message(message) {
                        self.end(fault);
                    }
                }
                Ok(None) => return,
                Err(fault) => self.end(fault),
            }
        }
    }

    fn take_message(&mut self, message: BackendMessage) -> Result<(), Fault> {
        match message.tag {
            b'd' => match ReplicationMessage::decode(message.payload).map_err(error::protocol)? {
                ReplicationMessage::XLogData(data) => {
                    self.positions.received = self.positions.received.max(data.wal_end);
                    self.pending.bytes += data.data.len() + FRAME_OVERHEAD;
                    self.pending.frames.push(Frame::Change { wal_end: data.wal_end, data: data.data });
                    Ok(())
                }
                ReplicationMessage::PrimaryKeepalive(keepalive) => {
                    self.take_keepalive(&keepalive);
                    Ok(())
                }
            },
            b'N' => {
                let notice = ServerError::parse(&message.payload);
                if notice.sqlstate == "55000" {
                    return Err(self.refused(notice));
                }
                tracing::debug!(severity = notice.severity, notice = %notice, "notice in the stream");
                Ok(())
            }
            b'E' => Err(self.refused(ServerError::parse(&message.payload))),
            b'c' | b'C' | b'Z' => Err(Fault::new(UNAVAILABLE, Action::Retry, "the server ended the stream")),
            b'S' | b'A' => Ok(()),
            tag => Err(error::protocol(format_args!("it sent a message of type {:?} in the stream", char::from(tag)))),
        }
    }

    /// Makes the fault of an error in the stream. The server looks the publication up as it was at that place
    /// in the WAL, so creating it now does not help: what was written there can only be given up or brought
    /// from the table, which is for a person to say.
    fn refused(&self, error: ServerError) -> Fault {
        let fault = error.into_fault(&format!("receive changes after {}", self.positions.received));
        if fault.code != PUBLICATION_MISSING {
            return fault;
        }
        Fault { action: Action::Gap, ..fault }.hint(
            "create the publication if it is gone (waljet init); then move the slot past what was written without it \
             (waljet slot advance --to LSN --yes; SELECT pg_current_wal_lsn() tells an LSN) and bring those rows from \
             the table",
        )
    }

    fn take_keepalive(&mut self, keepalive: &PrimaryKeepalive) {
        let moved = keepalive.wal_end > self.positions.keepalive;
        self.positions.received = self.positions.received.max(keepalive.wal_end);
        self.positions.keepalive = self.positions.keepalive.max(keepalive.wal_end);
        if keepalive.reply_requested {
            self.positions.reply_wanted = true;
            self.count_request(moved);
        }
        self.give_keepalive();
    }

    /// A server that stops asks again and again until all that it sent is confirmed, which may never be.
    fn count_request(&mut self, moved: bool) {
        let now = Instant::now();
        if moved || now.duration_since(self.clock.asked_since) > Duration::from_secs(1) {
            self.clock.asked_since = now;
            self.clock.asked = 0;
        }
        self.clock.asked += 1;
        if self.clock.asked >= INSISTENT && self.positions.told < self.positions.keepalive {
            self.stop_soon(now);
        }
    }

    fn stop_soon(&mut self, now: Instant) {
        self.clock.stop_at.get_or_insert(now + STOP_GRACE);
    }

    /// Gives the last keepalive out, as far as it is proven, behind all that was received before.
    fn give_keepalive(&mut self) {
        let proof = *self.proof.borrow_and_update();
        let now = Instant::now();
        if proof.stopping {
            self.stop_soon(now);
        } else if self.clock.asked < INSISTENT {
            self.clock.stop_at = None;
        }
        let wal_end = self.positions.keepalive.min(proof.proven);
        let again = wal_end == self.positions.given && now.duration_since(self.clock.given) >= REPEAT_GAP;
        if wal_end == Lsn::ZERO || !(wal_end > self.positions.given || again) {
            return;
        }
        self.positions.given = wal_end;
        self.clock.given = now;
        if let Some(Frame::Keepalive { wal_end: last }) = self.pending.frames.last_mut() {
            *last = wal_end;
            return;
        }
        self.pending.bytes += FRAME_OVERHEAD;
        self.pending.frames.push(Frame::Keepalive { wal_end });
    }

    fn end(&mut self, fault: Fault) {
        self.ended.get_or_insert(fault);
    }

    /// The position to tell: what was reported, never past what was received.
    fn flushed(&mut self) -> Lsn {
        (*self.flushed.borrow_and_update()).min(self.positions.received)
    }

    /// Sends a status if one is due, and gives a dead or stopping server up.
    async fn speak(&mut self) -> Result<(), Fault> {
        let now = Instant::now();
        if self.clock.stop_at.is_some_and(|stop_at| now >= stop_at) {
            // Said so that the server need not find out; it does not wait for an answer.
            let _ = timeout(PROGRESS_GAP, self.say_goodbye()).await;
            return Err(Fault::new(UNAVAILABLE, Action::Retry, "the server is shutting down"));
        }
        let silent = now.duration_since(self.clock.heard);
        if silent >= self.options.dead_after {
            let message = format!("the server sent nothing for {} s", silent.as_secs_f32());
            return Err(Fault::new(SILENT, Action::Retry, message));
        }
        let since = now.duration_since(self.clock.spoke);
        let progress = self.flushed() > self.positions.told;
        let due = since >= self.options.feedback_interval
            || (progress && since >= PROGRESS_GAP)
            || (self.positions.reply_wanted && (progress || since >= ANSWER_GAP));
        if !due {
            return Ok(());
        }
        let ping = silent >= self.options.ping_after
            && self.clock.pinged.is_none_or(|pinged| now.duration_since(pinged) >= self.options.ping_after);
        if ping {
            self.clock.pinged = Some(now);
        }
        self.send_status(ping).await
    }

    async fn send_status(&mut self, reply_requested: bool) -> Result<(), Fault> {
        let flushed = self.flushed();
        debug_assert!(flushed <= self.positions.received);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let status = StandbyStatusUpdate {
            written: self.positions.received,
            flushed,
            applied: flushed,
            client_time: Timestamp::from_unix_micros(i64::try_from(now.as_micros()).unwrap_or(i64::MAX)),
            reply_requested,
        };
        let mut payload = BytesMut::new();
        status.encode(&mut payload);
        timeout(WRITE_TIMEOUT, write_copy_data(&mut self.stream, &payload))
            .await
            .map_err(|_| error::timed_out("write a status", WRITE_TIMEOUT))?
            .map_err(unwritten)?;
        self.positions.told = self.positions.told.max(flushed);
        self.positions.reply_wanted = false;
        self.clock.spoke = Instant::now();
        Ok(())
    }

    fn next_wake(&mut self, may_read: bool) -> Instant {
        let clock = &self.clock;
        let mut wake = clock.spoke + self.options.feedback_interval;
        if self.positions.reply_wanted {
            wake = wake.min(clock.spoke + ANSWER_GAP);
        }
        if may_read {
            wake = wake.min(clock.heard + self.options.dead_after);
        }
        wake = clock.stop_at.map_or(wake, |stop_at| wake.min(stop_at));
        let progress_at = clock.spoke + PROGRESS_GAP;
        if self.flushed() > self.positions.told { wake.min(progress_at) } else { wake }
    }

    /// Tells the last position, waits until the server has heard it, and ends the stream.
    async fn close(&mut self, flushed: Lsn) -> Result<(), Fault> {
        if let Some(fault) = self.ended.take() {
            return Err(fault);
        }
        let last = flushed.max(*self.flushed.borrow());
        self.flushed = watch::channel(last).1;
        self.send_status(true).await?;
        let heard = timeout(CLOSE_TIMEOUT, self.drain(b'k')).await;
        let _ = timeout(CLOSE_TIMEOUT, self.say_goodbye()).await;
        match heard {
            Ok(result) => result,
            Err(_) => Err(error::timed_out("have the last position confirmed", CLOSE_TIMEOUT)),
        }
    }

    async fn say_goodbye(&mut self) -> Result<(), Fault> {
        write_copy_done(&mut self.stream).await.map_err(unwritten)?;
        // Unread input at the close would reset the connection, and the status with it.
        self.drain(b'Z').await?;
        let terminate = [b'X', 0, 0, 0, 4];
        self.stream.write_all(&terminate).await.map_err(|error| error::lost("end the session", error))
    }

    /// Reads and drops messages up to a keepalive (`k`) or a message of the given type.
    async fn drain(&mut self, until: u8) -> Result<(), Fault> {
        loop {
            while let Some(message) = self.frames.next()? {
                let keepalive = message.tag == b'd' && message.payload.first() == Some(&b'k');
                if message.tag == until || (until == b'k' && keepalive) {
                    return Ok(());
                }
                if message.tag == b'E' {
                    return Err(ServerError::parse(&message.payload).into_fault("close the stream"));
                }
            }
            match self.frames.fill(&mut self.stream).await {
                Ok(0) => return Err(Fault::new(CONNECTION_LOST, Action::Retry, "the server closed the connection")),
                Ok(_) => {}
                Err(error) => return Err(error::lost("close the stream", error)),
            }
        }
    }
}

#[cfg(test)]
#[path = "reader_tests.rs"]
mod tests;
