//! Which mode the next generation works in.

use std::time::Duration;

use tokio::time::Instant;
use waljet_pipeline::{Code, PublisherMode};

use crate::error;
use crate::options::ModeChoice;

/// So many generations in a row that ended at the fence and stored nothing mean that the stream is not ours alone.
const FENCES_BEFORE_SERIAL: u32 = 3;
/// So many undisturbed acknowledgements mean that it is again.
const CLEAN_BEFORE_CHAIN: u32 = 1024;
/// So many batch generations in a row that ended oddly and stored nothing mean that batches do not work here.
const ODD_BEFORE_FALLBACK: u32 = 3;

/// After another publisher was seen, chain mode has to wait for so long without one: each of its messages could push in
/// between two of ours. After batches did not work, they are not tried for as long.
const QUIET: Duration = Duration::from_secs(600);

/// Ends of a batch generation that the broker should not have given cause for.
const ODD: [Code; 4] = [error::BATCH, error::DUPLICATE_IN_PROCESS, error::UNEXPECTED_ANSWER, error::ACK_TIMEOUT];

/// Chooses between atomic, fast, chain, lanes and serial.
#[derive(Debug)]
pub(crate) struct Modes {
    choice: ModeChoice,
    /// Generations in a row that ended at the fence and stored nothing.
    fences: u32,
    /// Whether automatic mode has fallen back from chain to serial.
    fallen_back: bool,
    /// Acknowledgements in serial mode that nobody came between.
    clean: u32,
    /// When another publisher was last seen.
    foreign_at: Option<Instant>,
    /// Batch generations in a row that ended oddly and stored nothing.
    odd: u32,
    /// When automatic mode has fallen back from fast.
    slow_since: Option<Instant>,
    stream: Traits,
}

/// What the stream's settings say about the modes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Traits {
    /// It takes subjects that are not ours, so that somebody else is meant to publish to it.
    pub(crate) shared: bool,
    /// It takes batches.
    pub(crate) batches: bool,
}

impl Modes {
    pub(crate) fn new(choice: ModeChoice) -> Self {
        Self {
            choice,
            fences: 0,
            fallen_back: false,
            clean: 0,
            foreign_at: None,
            odd: 0,
            slow_since: None,
            stream: Traits::default(),
        }
    }

    /// Returns the mode of the next generation.
    pub(crate) fn next(&mut self, stream: Traits, now: Instant) -> PublisherMode {
        self.stream = stream;
        match self.choice {
            ModeChoice::Atomic => PublisherMode::Atomic,
            ModeChoice::Fast => PublisherMode::Fast,
            ModeChoice::Chain => PublisherMode::Chain,
            ModeChoice::Lanes => PublisherMode::Lanes,
            ModeChoice::Serial => PublisherMode::Serial,
            ModeChoice::Auto if self.batches_work(now) => {
                self.slow_since = None;
                PublisherMode::Fast
            }
            ModeChoice::Auto if stream.shared => PublisherMode::Lanes,
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

    /// Notes that a generation ended at the fence. Where that is so often, somebody else must be publishing.
    pub(crate) fn fence(&mut self, stored: u64) {
        self.fences = if stored == 0 { self.fences + 1 } else { 1 };
        if self.fences >= FENCES_BEFORE_SERIAL {
            self.fall_back();
        }
    }

    /// Notes how a batch generation ended, after so many acknowledgements.
    pub(crate) fn batches_ended(&mut self, code: Code, acknowledged: u64, now: Instant) {
        if acknowledged > 0 {
            self.odd = 0;
        }
        if ODD.contains(&code) {
            self.odd += 1;
        }
        if self.odd >= ODD_BEFORE_FALLBACK || code == error::STREAM_NO_BATCHES {
            self.odd = 0;
            self.slow_since = Some(now);
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

    /// Returns the mode for whose sake a generation of mode `now_in` should end.
    pub(crate) fn wants(&self, now_in: PublisherMode, now: Instant) -> Option<PublisherMode> {
        if self.choice != ModeChoice::Auto {
            return None;
        }
        if now_in != PublisherMode::Fast && self.batches_work(now) {
            return Some(PublisherMode::Fast);
        }
        let chain = now_in == PublisherMode::Serial && self.fallen_back && !self.stream.shared && self.is_clean(now);
        chain.then_some(PublisherMode::Chain)
    }

    fn batches_work(&self, now: Instant) -> bool {
        let slow = self.slow_since.is_some_and(|since| now.saturating_duration_since(since) < QUIET);
        self.stream.batches && !slow
    }

    fn is_clean(&self, now: Instant) -> bool {
        let quiet = self.foreign_at.is_none_or(|at| now.saturating_duration_since(at) >= QUIET);
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

    const OWN: Traits = Traits { shared: false, batches: false };
    const SHARED: Traits = Traits { shared: true, batches: false };

    #[test]
    fn three_fruitless_fences_lead_to_serial_and_clean_acks_back_to_chain() {
        let now = Instant::now();
        let mut modes = Modes::new(ModeChoice::Auto);
        for _ in 0..2 {
            modes.fence(0);
            assert_eq!(modes.next(OWN, now), PublisherMode::Chain);
        }
        modes.fence(0);
        assert_eq!(modes.next(OWN, now), PublisherMode::Serial);
        (1..CLEAN_BEFORE_CHAIN).for_each(|_| modes.clean_ack());
        assert_eq!(modes.wants(PublisherMode::Serial, now), None);
        modes.clean_ack();
        assert_eq!(modes.wants(PublisherMode::Serial, now), Some(PublisherMode::Chain));
        assert_eq!(modes.next(OWN, now), PublisherMode::Chain);
        assert_eq!(modes.wants(PublisherMode::Chain, now), None);
    }

    #[test]
    fn a_fence_after_progress_starts_the_count_again() {
        let mut modes = Modes::new(ModeChoice::Auto);
        for _ in 0..10 {
            modes.fence(0);
            modes.fence(5);
            assert_eq!(modes.next(OWN, Instant::now()), PublisherMode::Chain);
        }
    }

    #[test]
    fn a_foreign_publisher_leads_to_serial_until_it_was_quiet_for_long() {
        let now = Instant::now();
        let mut modes = Modes::new(ModeChoice::Auto);
        modes.foreign(now);
        assert_eq!(modes.next(OWN, now), PublisherMode::Serial);
        (0..CLEAN_BEFORE_CHAIN * 2).for_each(|_| modes.clean_ack());
        assert_eq!(modes.wants(PublisherMode::Serial, now), None);
        assert_eq!(modes.wants(PublisherMode::Serial, now + QUIET), Some(PublisherMode::Chain));
        modes.foreign(now + QUIET);
        assert_eq!(modes.wants(PublisherMode::Serial, now + QUIET), None);
    }

    #[test]
    fn a_shared_stream_without_batches_is_written_by_key_and_a_choice_is_kept() {
        let now = Instant::now();
        assert_eq!(Modes::new(ModeChoice::Auto).next(SHARED, now), PublisherMode::Lanes);
        assert_eq!(Modes::new(ModeChoice::Lanes).next(OWN, now), PublisherMode::Lanes);
        let mut chain = Modes::new(ModeChoice::Chain);
        chain.foreign(now);
        assert_eq!(chain.next(Traits { batches: true, ..SHARED }, now), PublisherMode::Chain);
        let mut serial = Modes::new(ModeChoice::Serial);
        (0..5000).for_each(|_| serial.clean_ack());
        assert_eq!(serial.next(Traits { batches: true, ..OWN }, now), PublisherMode::Serial);
        assert_eq!(serial.wants(PublisherMode::Serial, now), None);
        let mut fast = Modes::new(ModeChoice::Fast);
        (0..9).for_each(|_| fast.batches_ended(error::BATCH, 0, now));
        assert_eq!(fast.next(OWN, now), PublisherMode::Fast);
    }

    #[test]
    fn batches_are_taken_where_they_are_known_beside_other_publishers_too() {
        let now = Instant::now();
        for shared in [false, true] {
            let mut modes = Modes::new(ModeChoice::Auto);
            modes.foreign(now);
            assert_eq!(modes.next(Traits { shared, batches: true }, now), PublisherMode::Fast);
        }
    }

    #[test]
    fn batches_that_end_oddly_three_times_without_progress_are_left_for_a_while() {
        let now = Instant::now();
        let with = Traits { batches: true, ..OWN };
        let mut modes = Modes::new(ModeChoice::Auto);
        for _ in 0..10 {
            for acknowledged in [0, 0, 7] {
                modes.batches_ended(error::BATCH, acknowledged, now);
                assert_eq!(modes.next(with, now), PublisherMode::Fast);
            }
            modes.batches_ended(error::DISCONNECTED, 1, now);
        }
        (0..3).for_each(|_| modes.batches_ended(error::ACK_TIMEOUT, 0, now));
        assert_eq!(modes.next(with, now), PublisherMode::Chain);
        assert_eq!(modes.wants(PublisherMode::Chain, now), None);
        assert_eq!(modes.wants(PublisherMode::Chain, now + QUIET), Some(PublisherMode::Fast));
        assert_eq!(modes.next(with, now + QUIET), PublisherMode::Fast);
    }

    #[test]
    fn a_leader_that_knows_no_batches_is_believed_at_once() {
        let now = Instant::now();
        let with = Traits { batches: true, ..OWN };
        let mut modes = Modes::new(ModeChoice::Auto);
        modes.batches_ended(error::STREAM_NO_BATCHES, 0, now);
        assert_eq!(modes.next(with, now), PublisherMode::Chain);
        assert_eq!(modes.next(Traits { shared: true, ..with }, now), PublisherMode::Lanes);
        assert_eq!(modes.next(with, now + QUIET), PublisherMode::Fast);
    }
}
