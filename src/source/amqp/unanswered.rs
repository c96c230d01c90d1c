//! Requests whose answer is refused by its queue again and again: when they are given up, and who hears of it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::id::Run;
use crate::limits::AMQP_UNANSWERED_SAID_EVERY;

use super::lock;
use super::tally::Tally;

pub(super) struct Unanswered {
    most: Duration,
    tally: Arc<Tally>,
    /// When it was last said.
    said: Mutex<Option<Instant>>,
}

impl Unanswered {
    pub(super) fn new(most: Duration, tally: Arc<Tally>) -> Self {
        Self { most, tally, said: Mutex::default() }
    }

    /// Whether an answer that was first refused then is not sent again.
    pub(super) fn is_over(&self, since: Instant) -> bool {
        since.elapsed() >= self.most
    }

    pub(super) fn give_up(&self, run: &Run, queue: &str) {
        self.tally.unanswered.add();
        if self.is_to_be_said() {
            tracing::error!(
                alert = "unanswered", claim.run = %run, answer.queue = queue,
                "[alert operator] the queue {queue} has refused the answer to a request for {:?}, which is acknowledged without one: \
                 is that queue full, and does anybody read it? others may follow without a word",
                self.most
            );
        }
    }

    fn is_to_be_said(&self) -> bool {
        let (now, mut said) = (Instant::now(), lock(&self.said));
        let is_due = said.is_none_or(|last| now.duration_since(last) >= AMQP_UNANSWERED_SAID_EVERY);
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
        let unanswered = Unanswered::new(Duration::from_secs(60), Arc::default());
        let (since, mut said) = (Instant::now(), 0);
        for second in 0..180 {
            assert_eq!(unanswered.is_over(since), second >= 60);
            said += u32::from(unanswered.is_to_be_said());
            advance(Duration::from_secs(1)).await;
        }
        assert_eq!(said, 3);
    }
}
