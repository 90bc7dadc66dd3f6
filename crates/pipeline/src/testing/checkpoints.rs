//! A store of checkpoints in memory that fails by a seed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::checkpoint::{Checkpoint, Checkpoints, Replace};
use crate::{Action, Code, Fault};

/// A store that outlives the pipelines that use it.
#[derive(Clone, Debug)]
pub struct MemoryCheckpoints(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    stored: Option<Checkpoint>,
    failing: f64,
    answers_lost: bool,
    writes_refused: bool,
    writes: u64,
    random: fastrand::Rng,
}

impl MemoryCheckpoints {
    /// Makes an empty store, of whose requests so many fail; half of the writes that fail were taken all the same.
    #[must_use]
    pub fn new(failing: f64, seed: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            stored: None,
            failing,
            answers_lost: false,
            writes_refused: false,
            writes: 0,
            random: fastrand::Rng::with_seed(seed),
        })))
    }

    /// Ends all faults.
    pub fn heal(&self) {
        self.lock().failing = 0.0;
    }

    /// Makes every request fail.
    pub fn fail(&self) {
        self.lock().failing = 1.0;
    }

    /// Sets whether writes are taken and their answers lost.
    pub fn lose_answers(&self, lost: bool) {
        self.lock().answers_lost = lost;
    }

    /// Sets whether writes fail, and are not taken.
    pub fn refuse_writes(&self, refused: bool) {
        self.lock().writes_refused = refused;
    }

    /// What is stored.
    #[must_use]
    pub fn stored(&self) -> Option<Checkpoint> {
        self.lock().stored.clone()
    }

    /// How often something was written.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.lock().writes
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn fails(&mut self) -> bool {
        let failing = self.failing;
        self.random.f64() < failing
    }

    fn write(&mut self, checkpoint: &Checkpoint, replace: Replace) {
        let permitted = |stored: &Checkpoint| replace.permits(stored.confirmed, checkpoint.confirmed);
        if self.stored.as_ref().is_none_or(permitted) {
            self.stored = Some(checkpoint.clone());
        }
        self.writes += 1;
    }
}

fn failed() -> Fault {
    Fault::new(Code("simulated"), Action::Retry, "the store does not answer")
}

impl Checkpoints for MemoryCheckpoints {
    fn name(&self) -> &'static str {
        "memory"
    }

    async fn load(&self) -> Result<Option<Checkpoint>, Fault> {
        tokio::time::sleep(Duration::from_millis(3)).await;
        let mut state = self.lock();
        if state.fails() { Err(failed()) } else { Ok(state.stored.clone()) }
    }

    async fn save(&self, checkpoint: &Checkpoint, replace: Replace) -> Result<(), Fault> {
        tokio::time::sleep(Duration::from_millis(3)).await;
        let mut state = self.lock();
        if state.writes_refused {
            return Err(failed());
        }
        let fails = state.fails();
        if !fails || state.random.bool() {
            state.write(checkpoint, replace);
        }
        if fails || state.answers_lost { Err(failed()) } else { Ok(()) }
    }
}
