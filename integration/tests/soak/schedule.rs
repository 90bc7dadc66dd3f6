//! When which fault comes: a pack of all faults is shuffled, dealt, and shuffled again.
//!
//! So even a short run meets many different ones, and a long one meets each equally often.

/// A shuffled pack of faults.
#[derive(Debug)]
pub(super) struct Schedule<F> {
    faults: Vec<F>,
    pack: Vec<F>,
}

impl<F: Copy> Schedule<F> {
    /// Makes a schedule that starts with `first` and goes on with a pack of `faults`.
    pub(super) fn new(first: &[F], faults: Vec<F>) -> Self {
        Self { pack: first.iter().rev().copied().collect(), faults }
    }

    /// Deals the next one.
    pub(super) fn next(&mut self, random: &mut fastrand::Rng) -> Option<F> {
        if self.pack.is_empty() {
            self.pack.clone_from(&self.faults);
            random.shuffle(&mut self.pack);
        }
        self.pack.pop()
    }
}

#[test]
fn a_schedule_repeats_from_its_seed_and_leaves_none_out() {
    let deal = |seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut schedule = Schedule::new(&[7], (0..20).collect());
        (0..21).filter_map(|_| schedule.next(&mut random)).collect::<Vec<_>>()
    };
    assert_eq!(deal(3), deal(3));
    assert_ne!(deal(3), deal(4));
    let mut dealt = deal(3).split_off(1);
    dealt.sort_unstable();
    assert_eq!((deal(3)[0], dealt), (7, (0..20).collect()));
}
