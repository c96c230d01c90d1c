//! Whether the request queue has room for copies.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

use crate::domain::attempts::Copies;
use crate::limits::AMQP_FULL_FRESH;

/// What is known of it.
#[derive(Debug, Default)]
pub(super) struct Room {
    refused: Mutex<Option<Instant>>,
}

impl Room {
    /// What its queue has made of the last copy, unless that was long ago.
    pub(super) fn copies(&self) -> Copies {
        let refused = *self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.is_some_and(|at| at.elapsed() < AMQP_FULL_FRESH) { Copies::Refused } else { Copies::Taken }
    }

    /// A copy was refused, or taken.
    pub(super) fn learns(&self, copies: Copies) {
        let at = (copies == Copies::Refused).then(Instant::now);
        let before = std::mem::replace(&mut *self.refused.lock().unwrap_or_else(PoisonError::into_inner), at);
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
        let room = Room::default();
        assert_eq!(room.copies(), Copies::Taken);
        room.learns(Copies::Refused);
        assert_eq!(room.copies(), Copies::Refused);
        tokio::time::advance(AMQP_FULL_FRESH).await;
        assert_eq!(room.copies(), Copies::Taken);
        room.learns(Copies::Refused);
        room.learns(Copies::Taken);
        assert_eq!(room.copies(), Copies::Taken);
    }
}
