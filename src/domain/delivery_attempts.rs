//! Limits how often a redelivered message is tried.
//!
//! A worker that crashes requeues what it held; a message that caused the crash crashes the next worker too. Quorum
//! queues count deliveries in a header; classic queues only set `redelivered`. For these the count is kept in a
//! header of a copy that replaces the message before each further attempt.

use core::num::NonZeroU32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryHistory {
    /// Our own header.
    pub header_count: Option<u32>,
    /// `x-delivery-count`, or the publisher's forgery of it.
    pub broker_count: Option<u32>,
    pub kind: DeliveryKind,
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

impl DeliveryHistory {
    pub const fn attempts(self) -> u32 {
        let more = match (self.broker_count, self.kind) {
            (_, DeliveryKind::First) => 0,
            // It was delivered before, whatever the headers say.
            (None | Some(0), DeliveryKind::Redelivered) => 1,
            (Some(counted), DeliveryKind::Redelivered) => counted,
        };
        let noted = match self.header_count {
            Some(noted) => noted,
            None => 0,
        };
        noted.saturating_add(more)
    }

    /// Decides with a limit of `max` attempts; `None` is unlimited. A message whose copy the full queue rejects is
    /// tried uncounted: it is at the head of the queue, which would otherwise never drain.
    pub const fn next_action(self, max: Option<NonZeroU32>, copies: Republishing) -> AttemptAction {
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
        DeliveryHistory { header_count: Some(noted).filter(|noted| *noted > 0), broker_count: counted, kind: arrival }
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
        let copy = DeliveryHistory { header_count: Some(0), broker_count: Some(1), kind: DeliveryKind::First };
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
}
