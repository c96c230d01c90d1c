//! Requests whose answer is refused by its queue again and again: when they are given up, and who hears of it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::id::Run;
use crate::limits::AMQP_UNANSWERED_ALERT_INTERVAL;

use super::counters::AmqpSourceCounters;
use super::lock;

pub(super) struct RefusedReplies {
    retry_max: Duration,
    counters: Arc<AmqpSourceCounters>,
    /// When it was last said.
    last_alert_at: Mutex<Option<Instant>>,
}

impl RefusedReplies {
    pub(super) fn new(retry_max: Duration, counters: Arc<AmqpSourceCounters>) -> Self {
        Self { retry_max, counters, last_alert_at: Mutex::default() }
    }

    /// Whether an answer that was first refused then is not sent again.
    pub(super) fn is_retry_over(&self, since: Instant) -> bool {
        since.elapsed() >= self.retry_max
    }

    pub(super) fn give_up(&self, run: &Run, queue: &str) {
        self.counters.replies_given_up.increment();
        if self.is_alert_due() {
            tracing::error!(
                alert = "reply-given-up", claim.run = %run, reply.queue = queue,
                "[alert operator] the queue {queue} has refused the answer to a request for {:?}, which is acknowledged without one: \
                 is that queue full, and does anybody read it? others may follow without a word",
                self.retry_max
            );
        }
    }

    fn is_alert_due(&self) -> bool {
        let (now, mut said) = (Instant::now(), lock(&self.last_alert_at));
        let is_due = said.is_none_or(|last| now.duration_since(last) >= AMQP_UNANSWERED_ALERT_INTERVAL);
        if is_due {
            *said = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_sent_again_for_a_while_and_its_loss_is_said_once_a_minute() {
        let unanswered = RefusedReplies::new(Duration::from_secs(60), Arc::default());
        let (since, mut said) = (Instant::now(), 0);
        for second in 0..180 {
            assert_eq!(unanswered.is_retry_over(since), second >= 60);
            said += u32::from(unanswered.is_alert_due());
            advance(Duration::from_secs(1)).await;
        }
        assert_eq!(said, 3);
    }
}
