//! What waits between the reader and the consumer, and how much of it may wait.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;
use waljet_pipeline::Frame;

/// Frames that were read together.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// The frames.
    pub(crate) frames: Vec<Frame>,
    /// What they count against the budget.
    pub(crate) bytes: usize,
}

/// How many bytes wait to be taken. A single larger message is let in alone.
#[derive(Debug)]
pub(crate) struct Budget {
    used: AtomicUsize,
    freed: Notify,
    limit: usize,
}

impl Budget {
    /// Makes an unused budget.
    pub(crate) fn new(limit: usize) -> Self {
        Self { used: AtomicUsize::new(0), freed: Notify::new(), limit }
    }

    /// Gives room back.
    pub(crate) fn release(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::AcqRel);
        self.freed.notify_one();
    }

    /// Takes room.
    pub(crate) fn take(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Whether more may be read.
    pub(crate) fn has_room(&self) -> bool {
        self.used.load(Ordering::Acquire) < self.limit
    }

    /// Waits until room was given back since the last call.
    ///
    /// # Cancel safety
    ///
    /// Room that is given back during a cancelled call ends the next one.
    pub(crate) async fn freed(&self) {
        self.freed.notified().await;
    }
}
