//! Which mode the next generation works in.

use waljet_pipeline::PublisherMode;

use crate::options::ModeChoice;

/// So many generations in a row that ended at the fence and stored nothing mean that the stream is not ours alone.
const FENCES_BEFORE_SERIAL: u32 = 3;
/// So many undisturbed acknowledgements mean that it is again.
const CLEAN_BEFORE_CHAIN: u32 = 1024;

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
    /// Whether the stream takes subjects that are not ours, so that somebody else is meant to publish to it.
    shared: bool,
}

impl Modes {
    pub(crate) fn new(choice: ModeChoice) -> Self {
        Self { choice, fences: 0, fallen_back: false, clean: 0, shared: false }
    }

    /// Returns the mode of the next generation.
    pub(crate) fn next(&mut self, shared: bool) -> PublisherMode {
        self.shared = shared;
        match self.choice {
            ModeChoice::Chain => PublisherMode::Chain,
            ModeChoice::Serial => PublisherMode::Serial,
            ModeChoice::Auto if shared => PublisherMode::Serial,
            ModeChoice::Auto => {
                if self.is_clean() {
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
    pub(crate) fn foreign(&mut self) {
        self.fall_back();
    }

    /// Notes an acknowledgement in serial mode, and whether it followed the one before.
    pub(crate) fn serial_ack(&mut self, follows: bool) {
        self.clean = if follows { self.clean.saturating_add(1) } else { 0 };
    }

    /// Returns whether a serial generation should end for the sake of a chain.
    pub(crate) fn wants_chain(&self) -> bool {
        self.choice == ModeChoice::Auto && self.fallen_back && !self.shared && self.is_clean()
    }

    fn is_clean(&self) -> bool {
        self.clean >= CLEAN_BEFORE_CHAIN
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
        let mut modes = Modes::new(ModeChoice::Auto);
        for _ in 0..2 {
            modes.fence(0);
            assert_eq!(modes.next(false), PublisherMode::Chain);
        }
        modes.fence(0);
        assert_eq!(modes.next(false), PublisherMode::Serial);
        for _ in 1..CLEAN_BEFORE_CHAIN {
            modes.serial_ack(true);
        }
        assert!(!modes.wants_chain());
        modes.serial_ack(true);
        assert!(modes.wants_chain());
        assert_eq!(modes.next(false), PublisherMode::Chain);
        assert!(!modes.wants_chain());
    }

    #[test]
    fn a_fence_after_progress_starts_the_count_again() {
        let mut modes = Modes::new(ModeChoice::Auto);
        for _ in 0..10 {
            modes.fence(0);
            modes.fence(5);
            assert_eq!(modes.next(false), PublisherMode::Chain);
        }
    }

    #[test]
    fn a_foreign_publisher_leads_to_serial_at_once_and_keeps_it_there() {
        let mut modes = Modes::new(ModeChoice::Auto);
        modes.foreign();
        assert_eq!(modes.next(false), PublisherMode::Serial);
        for at in 0..CLEAN_BEFORE_CHAIN * 2 {
            modes.serial_ack(at % 1000 != 0);
        }
        assert!(!modes.wants_chain());
    }

    #[test]
    fn a_shared_stream_is_written_one_by_one_and_a_choice_is_kept() {
        assert_eq!(Modes::new(ModeChoice::Auto).next(true), PublisherMode::Serial);
        let mut chain = Modes::new(ModeChoice::Chain);
        chain.foreign();
        assert_eq!(chain.next(true), PublisherMode::Chain);
        let mut serial = Modes::new(ModeChoice::Serial);
        (0..5000).for_each(|_| serial.serial_ack(true));
        assert!(!serial.wants_chain());
        assert_eq!(serial.next(false), PublisherMode::Serial);
    }
}
