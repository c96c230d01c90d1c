//! Replies that their queue keeps refusing: how long they are retried, and the alert when they are given up.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::domain::id::Run;
use crate::limits::AMQP_REPLY_GIVEN_UP_ALERT_INTERVAL;

use super::counters::AmqpSourceCounters;

pub(super) struct RefusedReplies {
    retry_max: Duration,
    counters: Arc<AmqpSourceCounters>,
    last_alert_at: Mutex<Option<Instant>>,
}

impl RefusedReplies {
    pub(super) fn new(retry_max: Duration, counters: Arc<AmqpSourceCounters>) -> Self {
        Self { retry_max, counters, last_alert_at: Mutex::default() }
    }

    pub(super) fn is_retry_over(&self, since: Instant) -> bool {
        since.elapsed() >= self.retry_max
    }

    pub(super) fn give_up(&self, run: &Run, queue: &str) {
        self.counters.replies_given_up.increment();
        if self.is_alert_due() {
            tracing::error!(
                alert = "reply-given-up", claim.run = %run, reply.queue = queue,
                "[alert operator] the reply queue {queue} has refused a reply for {:?}; its request is acknowledged without one: \
                 is the queue full, and does a client consume from it? (reported once a minute at most)",
                self.retry_max
            );
        }
    }

    fn is_alert_due(&self) -> bool {
        let (now, mut last_alert_at) = (Instant::now(), self.last_alert_at.lock());
        let is_due = last_alert_at.is_none_or(|last| now.duration_since(last) >= AMQP_REPLY_GIVEN_UP_ALERT_INTERVAL);
        if is_due {
            *last_alert_at = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn a_refused_reply_is_retried_for_a_while_and_its_loss_is_reported_once_a_minute() {
        let replies = RefusedReplies::new(Duration::from_secs(60), Arc::default());
        let (since, mut alerts) = (Instant::now(), 0);
        for second in 0..180 {
            assert_eq!(replies.is_retry_over(since), second >= 60);
            alerts += u32::from(replies.is_alert_due());
            advance(Duration::from_secs(1)).await;
        }
        assert_eq!(alerts, 3);
    }
}
