//! Whether the request queue accepts copies, which a full queue with `reject-publish` does not.

use parking_lot::Mutex;

use tokio::time::Instant;

use crate::domain::delivery_attempts::Republishing;
use crate::limits::AMQP_QUEUE_FULL_TTL;

#[derive(Debug, Default)]
pub(super) struct Backpressure {
    copy_refused_at: Mutex<Option<Instant>>,
}

impl Backpressure {
    /// The result of the last copy, forgotten after a while.
    pub(super) fn last_copy_result(&self) -> Republishing {
        let refused = *self.copy_refused_at.lock();
        if refused.is_some_and(|at| at.elapsed() < AMQP_QUEUE_FULL_TTL) {
            Republishing::Refused
        } else {
            Republishing::Accepted
        }
    }

    pub(super) fn record(&self, copies: Republishing) {
        let at = (copies == Republishing::Refused).then(Instant::now);
        let before = std::mem::replace(&mut *self.copy_refused_at.lock(), at);
        if at.is_some() && before.is_none() {
            tracing::warn!(
                "the request queue refuses copies: it is probably full; attempts are not recorded meanwhile"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_refused_copy_counts_for_a_while_and_until_one_is_accepted() {
        let backpressure = Backpressure::default();
        assert_eq!(backpressure.last_copy_result(), Republishing::Accepted);
        backpressure.record(Republishing::Refused);
        assert_eq!(backpressure.last_copy_result(), Republishing::Refused);
        tokio::time::advance(AMQP_QUEUE_FULL_TTL).await;
        assert_eq!(backpressure.last_copy_result(), Republishing::Accepted);
        backpressure.record(Republishing::Refused);
        backpressure.record(Republishing::Accepted);
        assert_eq!(backpressure.last_copy_result(), Republishing::Accepted);
    }
}
