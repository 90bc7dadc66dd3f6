//! The one backoff: exponential, full jitter, capped, reset after a stable while.

use std::time::Duration;

use tokio::time::Instant;

use crate::RetryOptions;

/// A success that holds this long makes the next failure a first one.
const STABLE: Duration = Duration::from_secs(10);

/// Counts attempts and says how long to wait before the next.
#[derive(Debug)]
pub struct Backoff {
    options: RetryOptions,
    attempts: u32,
    succeeded: Option<Instant>,
    random: u64,
}

impl Backoff {
    /// Starts with no attempt made. `seed` decides the jitter, so that a simulation repeats.
    #[must_use]
    pub fn new(options: RetryOptions, seed: u64) -> Self {
        Self { options, attempts: 0, succeeded: None, random: seed | 1 }
    }

    /// Returns the pause before the next attempt: between nothing and a limit that doubles each time, but not
    /// longer than `within`.
    pub fn next_pause(&mut self, now: Instant, within: Option<Duration>) -> Duration {
        if self.succeeded.take().is_some_and(|since| now.duration_since(since) >= STABLE) {
            self.attempts = 0;
        }
        let most = within.unwrap_or(self.options.max).min(self.options.max);
        let limit = self.options.min.saturating_mul(1 << self.attempts.min(20)).min(most);
        self.attempts = self.attempts.saturating_add(1);
        limit.mul_f64(self.fraction())
    }

    /// Notes that an attempt went well.
    pub fn succeeded(&mut self, now: Instant) {
        self.succeeded.get_or_insert(now);
    }

    /// Makes the next failure a first one: something moved on.
    pub fn reset(&mut self) {
        self.attempts = 0;
    }

    /// Returns how many attempts have failed since the last stable while.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// A number from 0 to 1 by xorshift: jitter needs no better, and a seed makes it repeat.
    fn fraction(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: RetryOptions = RetryOptions { min: Duration::from_millis(50), max: Duration::from_secs(5) };

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_up_to_the_cap_and_never_pass_it() {
        let mut backoff = Backoff::new(OPTIONS, 7);
        let pauses: Vec<_> = (0..40).map(|_| backoff.next_pause(Instant::now(), None)).collect();
        assert!(pauses.iter().all(|pause| *pause <= OPTIONS.max));
        assert!(pauses[0] <= OPTIONS.min);
        assert!(pauses[20..].iter().any(|pause| *pause > Duration::from_secs(2)), "{pauses:?}");
        let within = Duration::from_millis(500);
        assert!((0..40).all(|_| backoff.next_pause(Instant::now(), Some(within)) <= within));
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_success_that_holds_makes_the_next_failure_a_first_one() {
        let mut backoff = Backoff::new(OPTIONS, 7);
        for _ in 0..10 {
            backoff.next_pause(Instant::now(), None);
        }
        backoff.succeeded(Instant::now());
        tokio::time::advance(Duration::from_secs(1)).await;
        backoff.next_pause(Instant::now(), None);
        assert_eq!(backoff.attempts(), 11);

        backoff.succeeded(Instant::now());
        tokio::time::advance(STABLE).await;
        assert!(backoff.next_pause(Instant::now(), None) <= OPTIONS.min);
        assert_eq!(backoff.attempts(), 1);
    }
}
