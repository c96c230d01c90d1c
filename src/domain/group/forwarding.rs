//! Forwards requests to the queues of their keys, in turns and with a limit per key, so that a queue whose broker
//! node does not confirm delays no other.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use super::Key;
use crate::domain::time::Instant;

/// Requests of one key published before the first is confirmed.
pub const IN_FLIGHT_MAX: usize = 32;
/// A queue without a confirmation for this long is silent.
pub const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct ForwardQueue<T> {
    keys: BTreeMap<Key, KeyQueue<T>>,
    /// Keys that may publish next, each once.
    due: VecDeque<Key>,
    next_number: u64,
}

#[derive(Debug)]
struct KeyQueue<T> {
    waiting: VecDeque<T>,
    /// When each was published, by its number.
    in_flight: BTreeMap<u64, Instant>,
}

impl<T> KeyQueue<T> {
    fn is_due(&self) -> bool {
        !self.waiting.is_empty() && self.in_flight.len() < IN_FLIGHT_MAX
    }

    fn confirm_deadline(&self) -> Option<Instant> {
        self.in_flight.first_key_value().map(|(_, at)| at.plus(CONFIRM_TIMEOUT))
    }
}

impl<T> Default for ForwardQueue<T> {
    fn default() -> Self {
        Self { keys: BTreeMap::new(), due: VecDeque::new(), next_number: 0 }
    }
}

impl<T> ForwardQueue<T> {
    pub fn push(&mut self, key: Key, one: T) {
        let of_key = self
            .keys
            .entry(key.clone())
            .or_insert_with(|| KeyQueue { waiting: VecDeque::new(), in_flight: BTreeMap::new() });
        let was_due = of_key.is_due();
        of_key.waiting.push_back(one);
        if !was_due && of_key.is_due() {
            self.due.push_back(key);
        }
    }

    /// The next request, by turns of the keys, and its number. Numbers never decrease.
    pub fn next(&mut self, now: Instant) -> Option<(u64, T)> {
        let key = self.due.pop_front()?;
        let of_key = self.keys.get_mut(&key)?;
        let one = of_key.waiting.pop_front()?;
        let number = self.next_number;
        self.next_number += 1;
        of_key.in_flight.insert(number, now);
        if of_key.is_due() {
            self.due.push_back(key);
        }
        Some((number, one))
    }

    /// The broker has confirmed or rejected one.
    pub fn on_confirmed(&mut self, key: &Key, number: u64) {
        let Some(of_key) = self.keys.get_mut(key) else { return };
        let was_due = of_key.is_due();
        of_key.in_flight.remove(&number);
        if !was_due && of_key.is_due() {
            self.due.push_back(key.clone());
        }
        if of_key.in_flight.is_empty() && of_key.waiting.is_empty() {
            self.keys.remove(key);
        }
    }

    /// When the first queue counts as silent unless it confirms.
    #[must_use]
    pub fn confirm_deadline(&self) -> Option<Instant> {
        self.keys.values().filter_map(KeyQueue::confirm_deadline).min()
    }

    /// Takes out what waits for silent queues.
    pub fn drain_timed_out(&mut self, now: Instant) -> Vec<T> {
        let silent = self.keys.values_mut().filter(|of_key| of_key.confirm_deadline().is_some_and(|at| at <= now));
        let taken: Vec<T> = silent.flat_map(|of_key| of_key.waiting.drain(..)).collect();
        let keys = &self.keys;
        self.due.retain(|key| keys.get(key).is_some_and(KeyQueue::is_due));
        taken
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: Instant = Instant::at(Duration::ZERO);

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    fn all(forwarding: &mut ForwardQueue<&'static str>) -> Vec<&'static str> {
        core::iter::from_fn(|| forwarding.next(NOW)).map(|(_, one)| one).collect()
    }

    #[test]
    fn keys_take_turns_and_none_has_more_on_its_way_than_may_be() {
        let mut forwarding = ForwardQueue::default();
        for _ in 0..IN_FLIGHT_MAX + 2 {
            forwarding.push(key("a"), "a");
        }
        forwarding.push(key("b"), "b");
        let sent = all(&mut forwarding);
        assert_eq!(sent[..3], ["a", "b", "a"]);
        assert_eq!(sent.len(), IN_FLIGHT_MAX + 1);
        forwarding.on_confirmed(&key("a"), 0);
        assert_eq!(forwarding.next(NOW), Some((IN_FLIGHT_MAX as u64 + 1, "a")));
        assert_eq!(forwarding.next(NOW), None);
    }

    #[test]
    fn what_waits_for_a_silent_queue_is_taken_out_and_what_is_on_its_way_is_not() {
        let mut forwarding = ForwardQueue::default();
        for _ in 0..=IN_FLIGHT_MAX {
            forwarding.push(key("a"), "a");
        }
        forwarding.push(key("b"), "b");
        assert_eq!(all(&mut forwarding).len(), IN_FLIGHT_MAX + 1);
        forwarding.on_confirmed(&key("b"), 1);
        assert_eq!(forwarding.confirm_deadline(), Some(NOW.plus(CONFIRM_TIMEOUT)));
        let before = NOW.plus(CONFIRM_TIMEOUT).minus(Duration::from_millis(1));
        assert_eq!(forwarding.drain_timed_out(before), [""; 0]);
        assert_eq!(forwarding.drain_timed_out(NOW.plus(CONFIRM_TIMEOUT)), ["a"]);
        // Later requests wait as well, until the broker confirms.
        forwarding.push(key("a"), "late");
        assert_eq!(forwarding.next(NOW), None);
        forwarding.on_confirmed(&key("a"), 0);
        assert_eq!(forwarding.next(NOW).map(|(_, one)| one), Some("late"));
    }

    proptest! {
        #[test]
        fn each_is_sent_once_or_taken_out_once_and_nothing_stays_behind(
            steps in prop::collection::vec((0_u8..4, 0_usize..5, 0_u64..4_000), 0..400),
        ) {
            let keys: Vec<Key> = ["a", "b", "c", "d", "e"].map(key).into();
            let (mut forwarding, mut now, mut added) = (ForwardQueue::default(), NOW, 0_usize);
            let (mut on_their_way, mut out) = (BTreeMap::<u64, usize>::new(), vec![0; 400]);
            for (step, of, later) in steps {
                now = now.plus(Duration::from_millis(later));
                match step {
                    0 | 1 => {
                        forwarding.push(keys[of].clone(), (of, added));
                        added += 1;
                    }
                    2 => while let Some((number, (of, one))) = forwarding.next(now) {
                        out[one] += 1;
                        on_their_way.insert(number, of);
                        prop_assert!(on_their_way.values().filter(|other| **other == of).count() <= IN_FLIGHT_MAX);
                    },
                    _ if of == 0 => forwarding.drain_timed_out(now).into_iter().for_each(|(_, one)| out[one] += 1),
                    _ => if let Some((number, of)) = on_their_way.pop_first() {
                        forwarding.on_confirmed(&keys[of], number);
                    },
                }
            }
            while !on_their_way.is_empty() || forwarding.confirm_deadline().is_some() || !forwarding.due.is_empty() {
                while let Some((number, (of, one))) = forwarding.next(now) {
                    out[one] += 1;
                    on_their_way.insert(number, of);
                }
                while let Some((number, of)) = on_their_way.pop_first() {
                    forwarding.on_confirmed(&keys[of], number);
                }
            }
            prop_assert!(out[..added].iter().all(|times| *times == 1));
            prop_assert!(forwarding.keys.is_empty());
        }
    }
}
