//! Which mode the next generation works in.

use std::time::Duration;

use tokio::time::Instant;
use waljet_pipeline::PublisherMode;

use crate::options::ModeChoice;

/// So many generations in a row that ended at the fence and stored nothing mean that the stream is not ours alone.
const FENCES_BEFORE_SERIAL: u32 = 3;
/// So many undisturbed acknowledgements mean that it is again.
const CLEAN_BEFORE_CHAIN: u32 = 1024;

/// After another publisher was seen, chain mode has to wait for so long without one: each of its messages could push in
/// between two of ours.
const QUIET_BEFORE_CHAIN: Duration = Duration::from_secs(600);

/// Chooses between chain and serial.
#[derive(Debug)]
pub(crate) struct Modes {
    choice: ModeChoice,
    /// Generations in a row that ended at the fence and stored nothing.
    fences: u32,
    /// Whether automatic mode has fallen back to serial.
    fallen_back: bool,
    /// Acknowledgements in serial mode that nobody came between.
    clean: u32,
    /// When another publisher was last seen.
    foreign_at: Option<Instant>,
    /// Whether the stream takes subjects that are not ours, so that somebody else is meant to publish to it.
    shared: bool,
}

impl Modes {
    pub(crate) fn new(choice: ModeChoice) -> Self {
        Self { choice, fences: 0, fallen_back: false, clean: 0, foreign_at: None, shared: false }
    }

    /// Returns the mode of the next generation.
    pub(crate) fn next(&mut self, shared: bool, now: Instant) -> PublisherMode {
        self.shared = shared;
        match self.choice {
            ModeChoice::Chain => PublisherMode::Chain,
            ModeChoice::Serial => PublisherMode::Serial,
            ModeChoice::Auto if shared => PublisherMode::Serial,
            ModeChoice::Auto => {
                if self.is_clean(now) {
                    self.fallen_back = false;
                    self.clean = 0;
                    self.fences = 0;
                }
                if self.fallen_back { PublisherMode::Serial } else { PublisherMode::Chain }
            }
        }
    }

    /// Notes that a generation ended at the fence.
    pub(crate) fn fence(&mut self, stored: u64) {
        self.fences = if stored == 0 { self.fences + 1 } else { 1 };
        if self.fences >= FENCES_BEFORE_SERIAL {
            self.fall_back();
        }
    }

    /// Notes that another publisher wrote to the stream.
    pub(crate) fn foreign(&mut self, now: Instant) {
        self.foreign_at = Some(now);
        self.fall_back();
    }

    /// Notes an acknowledgement in serial mode that nobody came between.
    pub(crate) fn clean_ack(&mut self) {
        self.clean = self.clean.saturating_add(1);
    }

    /// Returns whether a serial generation should end for the sake of a chain.
    pub(crate) fn wants_chain(&self, now: Instant) -> bool {
        self.choice == ModeChoice::Auto && self.fallen_back && !self.shared && self.is_clean(now)
    }

    fn is_clean(&self, now: Instant) -> bool {
        let quiet = self.foreign_at.is_none_or(|at| now.saturating_duration_since(at) >= QUIET_BEFORE_CHAIN);
        quiet && self.clean >= CLEAN_BEFORE_CHAIN
    }

    fn fall_back(&mut self) {
        self.fallen_back = true;
        self.clean = 0;
        self.fences = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_fruitless_fences_lead_to_serial_and_clean_acks_back_to_chain() {
        let now = Instant::now();
        let mut modes = Modes::new(ModeChoice::Auto);
        for _ in 0..2 {
            modes.fence(0);
            assert_eq!(modes.next(false, now), PublisherMode::Chain);
        }
        modes.fence(0);
        assert_eq!(modes.next(false, now), PublisherMode::Serial);
        (1..CLEAN_BEFORE_CHAIN).for_each(|_| modes.clean_ack());
        assert!(!modes.wants_chain(now));
        modes.clean_ack();
        assert!(modes.wants_chain(now));
        assert_eq!(modes.next(false, now), PublisherMode::Chain);
        assert!(!modes.wants_chain(now));
    }

    #[test]
    fn a_fence_after_progress_starts_the_count_again() {
        let mut modes = Modes::new(ModeChoice::Auto);
        for _ in 0..10 {
            modes.fence(0);
            modes.fence(5);
            assert_eq!(modes.next(false, Instant::now()), PublisherMode::Chain);
        }
    }

    #[test]
    fn a_foreign_publisher_leads_to_serial_until_it_was_quiet_for_long() {
        let now = Instant::now();
        let mut modes = Modes::new(ModeChoice::Auto);
        modes.foreign(now);
        assert_eq!(modes.next(false, now), PublisherMode::Serial);
        (0..CLEAN_BEFORE_CHAIN * 2).for_each(|_| modes.clean_ack());
        assert!(!modes.wants_chain(now));
        assert!(modes.wants_chain(now + QUIET_BEFORE_CHAIN));
        modes.foreign(now + QUIET_BEFORE_CHAIN);
        assert!(!modes.wants_chain(now + QUIET_BEFORE_CHAIN));
    }

    #[test]
    fn a_shared_stream_is_written_one_by_one_and_a_choice_is_kept() {
        let now = Instant::now();
        assert_eq!(Modes::new(ModeChoice::Auto).next(true, now), PublisherMode::Serial);
        let mut chain = Modes::new(ModeChoice::Chain);
        chain.foreign(now);
        assert_eq!(chain.next(true, now), PublisherMode::Chain);
        let mut serial = Modes::new(ModeChoice::Serial);
        (0..5000).for_each(|_| serial.clean_ack());
        assert!(!serial.wants_chain(now));
        assert_eq!(serial.next(false, now), PublisherMode::Serial);
    }
}
