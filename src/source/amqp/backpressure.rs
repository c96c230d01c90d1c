//! Whether the request queue has room for copies.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

use crate::domain::delivery_attempts::Republishing;
use crate::limits::AMQP_QUEUE_FULL_TTL;

/// What is known of it.
#[derive(Debug, Default)]
pub(super) struct Backpressure {
    copy_refused_at: Mutex<Option<Instant>>,
}

impl Backpressure {
    /// What its queue has made of the last copy, unless that was long ago.
    pub(super) fn last_copy_result(&self) -> Republishing {
        let refused = *self.copy_refused_at.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.is_some_and(|at| at.elapsed() < AMQP_QUEUE_FULL_TTL) {
            Republishing::Refused
        } else {
            Republishing::Accepted
        }
    }

    /// A copy was refused, or taken.
    pub(super) fn record(&self, copies: Republishing) {
        let at = (copies == Republishing::Refused).then(Instant::now);
        let before = std::mem::replace(&mut *self.copy_refused_at.lock().unwrap_or_else(PoisonError::into_inner), at);
        if at.is_some() && before.is_none() {
            tracing::warn!(
                "the queue of requests takes no copies: it is full as a rule, and as long as it is, how often a request was tried is \
                 not noted"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn that_a_copy_was_refused_counts_for_a_while_and_until_one_is_taken() {
        let room = Backpressure::default();
        assert_eq!(room.last_copy_result(), Republishing::Accepted);
        room.record(Republishing::Refused);
        assert_eq!(room.last_copy_result(), Republishing::Refused);
        tokio::time::advance(AMQP_QUEUE_FULL_TTL).await;
        assert_eq!(room.last_copy_result(), Republishing::Accepted);
        room.record(Republishing::Refused);
        room.record(Republishing::Accepted);
        assert_eq!(room.last_copy_result(), Republishing::Accepted);
    }
}
