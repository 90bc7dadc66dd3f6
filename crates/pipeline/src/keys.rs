//! Which entries of the window may be sent when each ordering key has one message in flight at most.

use std::collections::{HashMap, VecDeque};

use crate::OrderingKey;

/// The keys that have a message in flight, with what waits behind it.
///
/// An entry is offered once, in window order; it is either free to go or waits, and is given out when the
/// entry before it is acknowledged.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    busy: HashMap<OrderingKey, VecDeque<u64>>,
    ready: VecDeque<u64>,
}

impl Keys {
    /// Returns whether an entry may be sent now; otherwise it waits for its key.
    pub(crate) fn offer(&mut self, key: OrderingKey, number: u64) -> bool {
        match self.busy.get_mut(&key) {
            Some(waiting) => {
                waiting.push_back(number);
                false
            }
            None => {
                self.busy.insert(key, VecDeque::new());
                true
            }
        }
    }

    /// Notes that a key's message is stored: the next one of the key is ready, or the key is free.
    pub(crate) fn stored(&mut self, key: OrderingKey) {
        match self.busy.get_mut(&key).and_then(VecDeque::pop_front) {
            Some(next) => self.ready.push_back(next),
            None => drop(self.busy.remove(&key)),
        }
    }

    /// Takes an entry whose turn has come.
    pub(crate) fn next_ready(&mut self) -> Option<u64> {
        self.ready.pop_front()
    }

    /// Forgets everything, for a new generation.
    pub(crate) fn clear(&mut self) {
        self.busy.clear();
        self.ready.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_of_a_key_is_in_flight_and_the_others_follow_in_order() {
        let (a, b) = (OrderingKey::of("order", "a"), OrderingKey::of("order", "b"));
        let mut keys = Keys::default();
        assert!(keys.offer(a, 0) && !keys.offer(a, 1) && keys.offer(b, 2) && !keys.offer(a, 3));
        keys.stored(a);
        assert_eq!((keys.next_ready(), keys.next_ready()), (Some(1), None));
        assert!(!keys.offer(a, 4));
        for expected in [3, 4] {
            keys.stored(a);
            assert_eq!(keys.next_ready(), Some(expected));
        }
        keys.stored(a);
        keys.stored(b);
        assert!(keys.offer(a, 5) && keys.offer(b, 6));
        assert_eq!(keys.next_ready(), None);
    }
}
