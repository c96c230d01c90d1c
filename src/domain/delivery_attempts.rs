//! Limits how often a redelivered message is tried.
//!
//! A worker that crashes requeues what it held; a message that caused the crash crashes the next worker too. Quorum
//! queues count deliveries in a header; classic queues only set `redelivered`. For these the count is kept in a
//! header of a copy that replaces the message before each further attempt.
//!
//! Every request that a lost worker held is redelivered, so the count alone does not tell the cause from its victims.
//! A request that was redelivered therefore starts alone. So does one whose service closed the connection.

use core::num::NonZeroU32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryHistory {
    /// Our own header.
    pub header_count: Option<u32>,
    /// `x-delivery-count` or `x-acquired-count`, or the publisher's forgery of it.
    pub broker_count: Option<u32>,
    pub kind: DeliveryKind,
    /// Of the message that this one is a copy of, by our own header. A request whose service ended counts as redelivered.
    pub original: DeliveryKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryKind {
    First,
    Redelivered,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Republishing {
    Accepted,
    /// The queue is full and has just rejected a copy.
    Refused,
}

/// What to do with a delivery; `attempt` counts the previous ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptAction {
    Try {
        attempt: u32,
    },
    /// Replace the message with a copy that carries the count, and try that.
    Republish {
        attempt: u32,
    },
    Exhausted {
        attempts: u32,
    },
}

/// Which requests a worker holds while it runs this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// Any others.
    Shared,
    /// Only those that started before it, at first.
    AtFirst,
    /// No other.
    Alone,
}

impl DeliveryHistory {
    /// Whether it may have ended a worker or its service. A request whose handler asked for another attempt has not.
    pub const fn is_suspect(self) -> bool {
        matches!((self.kind, self.original), (DeliveryKind::Redelivered, _) | (_, DeliveryKind::Redelivered))
    }

    /// With a limit of `max` attempts, the last one is [`Isolation::Alone`]: if its worker dies, no other request was the cause.
    pub fn isolation(self, max: Option<NonZeroU32>) -> Isolation {
        match max {
            Some(max) if self.is_suspect() && self.attempts().saturating_add(1) >= max.get() => Isolation::Alone,
            Some(_) if self.is_suspect() => Isolation::AtFirst,
            Some(_) | None => Isolation::Shared,
        }
    }

    pub fn attempts(self) -> u32 {
        let more = match (self.broker_count, self.kind) {
            (_, DeliveryKind::First) => 0,
            // It was delivered before, whatever the headers say.
            (None | Some(0), DeliveryKind::Redelivered) => 1,
            (Some(counted), DeliveryKind::Redelivered) => counted,
        };
        self.header_count.unwrap_or(0).saturating_add(more)
    }

    /// Decides with a limit of `max` attempts; `None` is unlimited. A message whose copy the full queue rejects is
    /// tried uncounted: it is at the head of the queue, which would otherwise never drain.
    pub fn next_action(self, max: Option<NonZeroU32>, copies: Republishing) -> AttemptAction {
        let attempt = self.attempts();
        let Some(max) = max else { return AttemptAction::Try { attempt } };
        if attempt >= max.get() {
            return AttemptAction::Exhausted { attempts: attempt };
        }
        if matches!(copies, Republishing::Refused) {
            return AttemptAction::Try { attempt };
        }
        match (self.broker_count, self.kind, self.header_count) {
            // Without the copy the hundredth redelivery would look like the first.
            (None | Some(0), DeliveryKind::Redelivered, _) => AttemptAction::Republish { attempt },
            // A count on a first delivery comes from the publisher and would stay for ever where the queue does not
            // count. The copy drops it.
            (Some(1..), DeliveryKind::First, None) => AttemptAction::Republish { attempt },
            (_, DeliveryKind::First, _) | (Some(1..), DeliveryKind::Redelivered, _) => AttemptAction::Try { attempt },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Option<NonZeroU32> = NonZeroU32::new(3);

    fn seen(noted: u32, counted: Option<u32>, arrival: DeliveryKind) -> DeliveryHistory {
        DeliveryHistory {
            header_count: Some(noted).filter(|noted| *noted > 0),
            broker_count: counted,
            kind: arrival,
            original: DeliveryKind::First,
        }
    }

    #[test]
    fn a_queue_that_does_not_count_is_counted_for() {
        let mut noted = 0;
        let mut tries = 0;
        // Each round: delivered, the worker crashes, redelivered, replaced by a copy.
        loop {
            match seen(noted, None, DeliveryKind::First).next_action(MAX, Republishing::Accepted) {
                AttemptAction::Try { attempt } => assert_eq!(attempt, tries),
                other @ (AttemptAction::Republish { .. } | AttemptAction::Exhausted { .. }) => {
                    panic!("a first delivery is tried, not {other:?}")
                }
            }
            tries += 1;
            match seen(noted, None, DeliveryKind::Redelivered).next_action(MAX, Republishing::Accepted) {
                AttemptAction::Republish { attempt } => noted = attempt,
                AttemptAction::Exhausted { attempts } => break assert_eq!((attempts, tries), (3, 3)),
                AttemptAction::Try { .. } => panic!("a return is noted"),
            }
        }
    }

    #[test]
    fn a_message_of_a_queue_that_counts_deliveries_is_not_copied() {
        assert_eq!(
            seen(0, None, DeliveryKind::First).next_action(MAX, Republishing::Accepted),
            AttemptAction::Try { attempt: 0 }
        );
        assert_eq!(
            seen(0, Some(1), DeliveryKind::Redelivered).next_action(MAX, Republishing::Accepted),
            AttemptAction::Try { attempt: 1 }
        );
        assert_eq!(
            seen(0, Some(2), DeliveryKind::Redelivered).next_action(MAX, Republishing::Accepted),
            AttemptAction::Try { attempt: 2 }
        );
        assert_eq!(
            seen(0, Some(3), DeliveryKind::Redelivered).next_action(MAX, Republishing::Accepted),
            AttemptAction::Exhausted { attempts: 3 }
        );
        assert_eq!(
            seen(1, Some(2), DeliveryKind::Redelivered).next_action(MAX, Republishing::Accepted),
            AttemptAction::Exhausted { attempts: 3 }
        );
    }

    #[test]
    fn a_count_from_the_publisher_is_removed_by_a_copy_before_the_first_attempt() {
        assert_eq!(
            seen(0, Some(1), DeliveryKind::First).next_action(MAX, Republishing::Accepted),
            AttemptAction::Republish { attempt: 0 }
        );
        assert_eq!(
            seen(0, Some(u32::MAX), DeliveryKind::First).next_action(MAX, Republishing::Accepted),
            AttemptAction::Republish { attempt: 0 }
        );
        assert_eq!(
            seen(3, Some(1), DeliveryKind::First).next_action(MAX, Republishing::Accepted),
            AttemptAction::Exhausted { attempts: 3 }
        );
        // A queue that counted this way would be copied for ever.
        let copy = DeliveryHistory { header_count: Some(0), ..seen(0, Some(1), DeliveryKind::First) };
        assert_eq!(copy.next_action(MAX, Republishing::Accepted), AttemptAction::Try { attempt: 0 });
        assert_eq!(
            seen(0, Some(7), DeliveryKind::First).next_action(None, Republishing::Accepted),
            AttemptAction::Try { attempt: 0 }
        );
    }

    #[test]
    fn a_count_of_zero_is_ignored() {
        assert_eq!(
            seen(0, Some(0), DeliveryKind::First).next_action(MAX, Republishing::Accepted),
            AttemptAction::Try { attempt: 0 }
        );
        assert_eq!(
            seen(0, Some(0), DeliveryKind::Redelivered).next_action(MAX, Republishing::Accepted),
            AttemptAction::Republish { attempt: 1 }
        );
        assert_eq!(
            seen(2, Some(0), DeliveryKind::Redelivered).next_action(MAX, Republishing::Accepted),
            AttemptAction::Exhausted { attempts: 3 }
        );
    }

    #[test]
    fn forged_counts_neither_overflow_nor_allow_more_attempts() {
        for arrival in [DeliveryKind::First, DeliveryKind::Redelivered] {
            for counted in [None, Some(0), Some(u32::MAX)] {
                assert_eq!(
                    seen(u32::MAX, counted, arrival).next_action(MAX, Republishing::Accepted),
                    AttemptAction::Exhausted { attempts: u32::MAX }
                );
            }
        }
        assert_eq!(seen(1, Some(u32::MAX), DeliveryKind::Redelivered).attempts(), u32::MAX);
    }

    #[test]
    fn a_message_that_cannot_be_copied_is_tried_uncounted_within_its_limit() {
        let refused = |seen: DeliveryHistory| seen.next_action(MAX, Republishing::Refused);
        assert_eq!(refused(seen(1, None, DeliveryKind::Redelivered)), AttemptAction::Try { attempt: 2 });
        assert_eq!(refused(seen(2, None, DeliveryKind::Redelivered)), AttemptAction::Exhausted { attempts: 3 });
        assert_eq!(refused(seen(0, Some(1), DeliveryKind::First)), AttemptAction::Try { attempt: 0 });
    }

    #[test]
    fn a_message_without_a_limit_is_tried_for_ever_and_never_copied() {
        assert_eq!(
            seen(u32::MAX, None, DeliveryKind::Redelivered).next_action(None, Republishing::Accepted),
            AttemptAction::Try { attempt: u32::MAX }
        );
    }

    #[derive(Debug, Clone, Copy)]
    struct Message {
        name: usize,
        history: DeliveryHistory,
    }

    /// The names of the requests that are given up, where workers take up to `capacity` of `queue`. `kills` of a request says whether
    /// it ends its worker once it has run beside what the worker takes in its first minute.
    fn given_up(
        mut queue: Vec<Message>,
        capacity: usize,
        counts: bool,
        kills: impl Fn(usize) -> Option<bool>,
    ) -> Vec<usize> {
        let mut given_up = Vec::new();
        while !queue.is_empty() {
            let mut held: Vec<Message> = Vec::new();
            let mut copies = Vec::new();
            let mut isolated = false;
            while held.len() < capacity && !isolated && !queue.is_empty() {
                let next = queue.remove(0);
                match (next.history.next_action(MAX, Republishing::Accepted), next.history.isolation(MAX)) {
                    (AttemptAction::Exhausted { .. }, _) => given_up.push(next.name),
                    (AttemptAction::Republish { attempt }, _) => copies.push(copy(next, attempt)),
                    (AttemptAction::Try { .. }, Isolation::Shared) => held.push(next),
                    (AttemptAction::Try { attempt }, Isolation::Alone) if !held.is_empty() => {
                        copies.push(copy(next, attempt))
                    }
                    (AttemptAction::Try { .. }, Isolation::Alone) => (held, isolated) = (vec![next], true),
                    // Those that it may run beside started earlier, and more come after its first minute.
                    (AttemptAction::Try { .. }, Isolation::AtFirst) => {
                        held.push(next);
                        isolated = !kills(next.name).unwrap_or(true);
                    }
                }
            }
            queue.append(&mut copies);
            if held.iter().any(|one| kills(one.name).is_some()) {
                for one in &mut held {
                    one.history.kind = DeliveryKind::Redelivered;
                    one.history.broker_count = counts.then(|| one.history.broker_count.unwrap_or(0) + 1);
                }
                held.append(&mut queue);
                queue = held;
            }
        }
        given_up
    }

    fn copy(message: Message, attempt: u32) -> Message {
        let original = if message.history.is_suspect() { DeliveryKind::Redelivered } else { DeliveryKind::First };
        let history =
            DeliveryHistory { header_count: Some(attempt), broker_count: None, kind: DeliveryKind::First, original };
        Message { history, ..message }
    }

    proptest::proptest! {
        #[test]
        fn a2_only_requests_that_end_their_worker_are_given_up(
            poison in proptest::collection::btree_map(0_usize..40, proptest::bool::ANY, 1..4),
            capacity in 1_usize..10,
            counts in proptest::bool::ANY,
        ) {
            let queue = (0..40).map(|name| Message { name, history: seen(0, None, DeliveryKind::First) }).collect();
            let mut given_up = given_up(queue, capacity, counts, |name| poison.get(&name).copied());
            given_up.sort_unstable();
            proptest::prop_assert_eq!(given_up, poison.into_keys().collect::<Vec<_>>());
        }
    }
}
