//! The half that faces the broker: empties the window into the stream, generation by generation.
//!
//! ```text
//!            open                  first failure
//!  waiting ───────► generation ──────────────────► waiting (backoff) ─► …
//!                   send from the oldest event that is not known to be stored;
//!                   acknowledgements take events off the front
//! ```

use tokio::time::Instant;

use crate::error::READ_BACK;
use crate::grouping::Turn;
use crate::queue::{Queue, ticks};
use crate::retry::Backoff;
use crate::status::EndState;
use crate::{Action, Fault, Opened, Position, Sink};

/// A lane: a sink and the window in front of it.
#[derive(Debug)]
pub(crate) struct Lane<K> {
    pub(crate) sink: K,
    pub(crate) backoff: Backoff,
    pub(crate) queue: Queue,
}

/// How a generation ended.
enum End {
    /// Nothing more comes and everything is stored, or the time for that is over.
    Finished,
    /// More of the stream has to be read back.
    ReadOn,
    /// What the generation rested on is void: another relay had the slot.
    Void,
    /// A failure.
    Failed(Fault),
}

impl<K: Sink> Lane<K> {
    /// Publishes until no more items come and all are stored, or the drain timeout is over. Returns whether all
    /// are stored.
    ///
    /// # Errors
    ///
    /// A fault that only a person can mend.
    pub(crate) async fn run(&mut self) -> Result<bool, Fault> {
        self.queue.first_connection().await?;
        loop {
            let Some(opened) = self.open().await? else { break };
            let from = self.queue.resume_from();
            self.queue.begin(opened)?;
            let before = self.queue.window.front();
            let end = self.generation().await?;
            if self.queue.window.front() > before {
                self.backoff.reset();
            }
            let end = match end {
                // Reading back from the same place again would go on for ever.
                End::ReadOn if self.queue.resume_from() == from => End::Failed(no_progress(&from)),
                end => end,
            };
            match end {
                End::Finished => break,
                End::ReadOn | End::Void => {}
                End::Failed(fault) if matches!(fault.action, Action::Halt | Action::Gap) => {
                    self.queue.failed(&fault);
                    return Err(fault);
                }
                End::Failed(fault) => {
                    self.queue.failed(&fault);
                    let pause = self.backoff.next_pause(Instant::now(), fault.retry_within);
                    if self.queue.meanwhile(tokio::time::sleep(pause)).await?.is_none() {
                        break;
                    }
                }
            }
        }
        self.queue.replay.tell();
        self.queue.monitor.sink_state(EndState::Closed);
        Ok(self.queue.window.is_empty())
    }

    /// Opens a generation, trying for ever. `None` when there is nothing left to open it for.
    async fn open(&mut self) -> Result<Option<Opened>, Fault> {
        loop {
            if self.queue.finished() {
                return Ok(None);
            }
            self.queue.monitor.sink_state(EndState::Connecting);
            let from = self.queue.resume_from();
            let Some(opened) = self.queue.open(&mut self.sink, &from).await? else { return Ok(None) };
            match opened {
                Ok(opened) => {
                    self.backoff.succeeded(Instant::now());
                    return Ok(Some(opened));
                }
                Err(fault) if matches!(fault.action, Action::Halt | Action::Gap) => {
                    self.queue.failed(&fault);
                    return Err(fault);
                }
                Err(fault) => {
                    self.queue.failed(&fault);
                    let pause = self.backoff.next_pause(Instant::now(), fault.retry_within);
                    if self.queue.meanwhile(tokio::time::sleep(pause)).await?.is_none() {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Sends and takes acknowledgements until the generation ends.
    async fn generation(&mut self) -> Result<End, Fault> {
        let mut tick = ticks();
        loop {
            self.queue.take_ready()?;
            if self.queue.reopen {
                return Ok(End::Void);
            }
            match self.send().await {
                Ok(None) => {}
                Ok(Some(end)) => return Ok(end),
                Err(fault) => return Ok(End::Failed(fault)),
            }
            let queue = &mut self.queue;
            queue.show();
            if queue.finished() {
                return Ok(End::Finished);
            }
            tokio::select! {
                biased;
                // 1. Acknowledgements make room, and a refusal must stop the sending.
                ack = self.sink.ack() => match ack {
                    Ok(ack) => queue.acknowledged(ack),
                    Err(rejection) => return Ok(End::Failed(queue.rejected(rejection))),
                },
                // 2. More to send.
                item = queue.items.recv(), if queue.deadline.is_none() => queue.take(item)?,
                // 3. What is kept back until more of it comes waits in vain where there is no room for more.
                () = queue.budget.starving(), if queue.groups() => {}
                // 4. The loop turns at least this often: for its liveness, and to try refused events again.
                _ = tick.tick() => {
                    queue.monitor.turn();
                    queue.replay.tick();
                }
            }
        }
    }

    /// Sends what is ready and fits in. Returns an end where one is reached.
    async fn send(&mut self) -> Result<Option<End>, Fault> {
        let queue = &mut self.queue;
        let mut any = false;
        while let Some(number) = queue.next() {
            let Some(entry) = queue.window.get(number) else { continue };
            if queue.stored.holds(entry) {
                queue.found_stored(number);
                continue;
            }
            if queue.stored.through.is_some_and(|through| !entry.position.at_or_before(&through)) {
                if queue.is_idle() {
                    return Ok(Some(End::ReadOn));
                }
                queue.hold(number);
                break;
            }
            let placement = match queue.place(number) {
                Turn::Now(placement) => placement,
                Turn::Later => {
                    queue.hold(number);
                    break;
                }
                Turn::Blocked(by) => {
                    queue.blocked(by);
                    queue.hold(number);
                    break;
                }
            };
            let Some(entry) = queue.window.get(number) else { continue };
            let now = Instant::now();
            let message = match (&entry.message, &entry.refusal) {
                (Some(message), None) => message,
                (Some(message), Some(refusal)) if refusal.retry_at <= now => message,
                _ => {
                    queue.blocked(number);
                    break;
                }
            };
            match self.sink.send(queue.next_token(), message, placement).await {
                Ok(()) => {
                    queue.was_sent(number, now);
                    any = true;
                }
                Err(fault) if fault.action == Action::Refuse => {
                    queue.refuse(number, fault);
                    queue.blocked(number);
                    break;
                }
                Err(fault) => return Err(fault),
            }
        }
        if any {
            self.sink.flush().await?;
        }
        Ok(None)
    }
}

fn no_progress(from: &Position) -> Fault {
    let what = format!("the stream was read back from {from}, and what was read says nothing about the events there");
    Fault::new(READ_BACK, Action::Retry, what).hint("report it, with the positions around it in the stream")
}
