//! How often a message may be tried that its queue hands out again and again.
//!
//! A worker that dies takes its word with it: what it held comes back, and if that is what killed it, it kills the next one.
//! Some queues count (a quorum queue, in a header), others only say that this is not the first time. There we count
//! ourselves, in a header of a copy that takes the message's place, before it is tried again.

use core::num::NonZeroU32;

/// What is known of earlier deliveries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryHistory {
    /// What our own header says; `None` where it is missing.
    pub header_count: Option<u32>,
    /// What the queue has counted of this very message, or its author pretends that it has; `None` where nobody did.
    pub broker_count: Option<u32>,
    /// How it comes.
    pub kind: DeliveryKind,
}

/// Whether a queue hands something out for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryKind {
    /// It does, as far as it knows.
    First,
    /// It was handed out before.
    Redelivered,
}

/// Whether a copy can take a message's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Republishing {
    /// As far as is known.
    Accepted,
    /// Its queue, which is full, has refused one a moment ago.
    Refused,
}

/// What to do with a delivery. `attempt` is how many came before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptAction {
    /// Try it.
    Try {
        /// The attempt, from 0.
        attempt: u32,
    },
    /// Put a copy in its place whose header says so, and try that.
    Republish {
        /// What the copy's header says.
        attempt: u32,
    },
    /// It has had its chances.
    Exhausted {
        /// How often it was tried.
        attempts: u32,
    },
}

impl DeliveryHistory {
    /// How often it was tried before.
    #[must_use]
    pub const fn attempts(self) -> u32 {
        let more = match (self.broker_count, self.kind) {
            (_, DeliveryKind::First) => 0,
            // It did not come back for the first time, whatever is said.
            (None | Some(0), DeliveryKind::Redelivered) => 1,
            (Some(counted), DeliveryKind::Redelivered) => counted,
        };
        let noted = match self.header_count {
            Some(noted) => noted,
            None => 0,
        };
        noted.saturating_add(more)
    }

    /// What to do, where a message is tried `max` times; `None` is without end. What cannot be noted is tried without: it stands
    /// before all others of a full queue, which would never become empty.
    #[must_use]
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
            // Without the copy it would look the same at its hundredth return as at its first.
            (None | Some(0), DeliveryKind::Redelivered, _) => AttemptAction::Republish { attempt },
            // A count of what was never handed out is its author's, and would stay for ever where the queue does not count: a copy
            // is without it. One copy, should a queue of some make count so.
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
        // Each turn: it is handed out, its worker dies, it is handed out again, and a copy takes its place.
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
    fn a_queue_that_counts_is_believed_and_no_copy_is_made() {
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
        // One attempt before the copy that it counts.
        assert_eq!(
            seen(1, Some(2), DeliveryKind::Redelivered).next_action(MAX, Republishing::Accepted),
            AttemptAction::Exhausted { attempts: 3 }
        );
    }

    #[test]
    fn a_count_that_came_with_a_message_is_taken_off_before_it_is_tried() {
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
        // Were a queue to count so, there would be no end of copies.
        let copy = DeliveryHistory { header_count: Some(0), broker_count: Some(1), kind: DeliveryKind::First };
        assert_eq!(copy.next_action(MAX, Republishing::Accepted), AttemptAction::Try { attempt: 0 });
        assert_eq!(
            seen(0, Some(7), DeliveryKind::First).next_action(None, Republishing::Accepted),
            AttemptAction::Try { attempt: 0 }
        );
    }

    #[test]
    fn a_count_of_nothing_is_no_count() {
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
    fn whatever_numbers_an_author_writes_they_neither_overflow_nor_try_more_often() {
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
    fn what_cannot_be_noted_is_tried_without_a_note_as_long_as_it_has_chances() {
        let refused = |seen: DeliveryHistory| seen.next_action(MAX, Republishing::Refused);
        assert_eq!(refused(seen(1, None, DeliveryKind::Redelivered)), AttemptAction::Try { attempt: 2 });
        assert_eq!(refused(seen(2, None, DeliveryKind::Redelivered)), AttemptAction::Exhausted { attempts: 3 });
        assert_eq!(refused(seen(0, Some(1), DeliveryKind::First)), AttemptAction::Try { attempt: 0 });
    }

    #[test]
    fn without_a_limit_it_is_tried_for_ever_and_never_copied() {
        assert_eq!(
            seen(u32::MAX, None, DeliveryKind::Redelivered).next_action(None, Republishing::Accepted),
            AttemptAction::Try { attempt: u32::MAX }
        );
    }
}
