//! Requests that no handler sees, and those that were tried too often.

use tokio::time::sleep;

use crate::domain::delivery_attempts::AttemptAction;
use crate::domain::outcome::{ExceptionReason, Outcome};
use crate::domain::refusal::Refusal;
use crate::limits::AMQP_ANSWER_RETRY_DELAY;
use crate::source::{CallError, ReplyStatus};

use super::claim::{RequestClaim, SettlePlan};
use super::config::OnAttemptsExhausted;
use super::counters::AmqpSourceCounters;
use super::delivery;
use super::reply_format;

/// Why no handler sees a request.
pub(super) enum Disposition {
    Expired,
    TooLarge,
    Step(AttemptAction),
    /// Nobody wants requests at present.
    ReturnUnclaimed(SettlePlan),
}

impl Disposition {
    pub(super) async fn apply(
        self,
        part: RequestClaim,
        tally: &AmqpSourceCounters,
        exhausted: OnAttemptsExhausted,
    ) -> Result<(), CallError> {
        loop {
            match self.apply_once(&part, tally, exhausted.clone()).await {
                // Given back it would be here again at once.
                Err(CallError { refusal: Refusal::Retry { .. }, .. }) if part.is_reply_refused().await => {
                    sleep(AMQP_ANSWER_RETRY_DELAY).await;
                }
                ended => return ended,
            }
        }
    }

    async fn apply_once(
        &self,
        part: &RequestClaim,
        tally: &AmqpSourceCounters,
        exhausted: OnAttemptsExhausted,
    ) -> Result<(), CallError> {
        const INTERNAL: Outcome = Outcome::Exception(ExceptionReason::InternalError);
        // Counted when it is done: a worker that leaves before gives the request back.
        match self {
            Self::Expired => {
                let reply = reply_format::error_reply("expired", "its time was over before it could be started", None);
                part.settle(INTERNAL, SettlePlan::Reply(reply)).await?;
                tally.expired.increment();
            }
            Self::TooLarge => {
                let message =
                    format!("the request has {} bytes, which is more than this worker takes", part.body_bytes());
                part.settle(INTERNAL, SettlePlan::Reply(reply_format::error_reply("too_large", &message, None)))
                    .await?;
                tally.too_large.increment();
            }
            Self::Step(AttemptAction::Republish { attempt }) => {
                part.settle(INTERNAL, SettlePlan::Republish { attempts: *attempt }).await?;
                tally.attempts_recorded.increment();
            }
            Self::Step(AttemptAction::Exhausted { attempts }) => {
                let reason = format!(
                    "it was tried {attempts} times, as its queue and its header {} count, and each time its worker did not come to an end",
                    delivery::ATTEMPTS_HEADER
                );
                give_up(part, exhausted, reason, *attempts).await?;
                tracing::error!(
                    alert = "attempts-exhausted", claim.run = %part.run,
                    "[alert operator] a request was tried {attempts} times and is given up; what it does to its workers their logs say"
                );
                tally.attempts_exhausted.increment();
            }
            Self::ReturnUnclaimed(plan) => {
                part.settle(Outcome::Exception(ExceptionReason::WorkerShutdown), plan.clone()).await?
            }
            Self::Step(AttemptAction::Try { .. }) => {}
        }
        Ok(())
    }
}

/// The end of a request that was tried too often.
pub(super) async fn give_up(
    part: &RequestClaim,
    exhausted: OnAttemptsExhausted,
    reason: String,
    attempts: u32,
) -> Result<(), CallError> {
    const INTERNAL: Outcome = Outcome::Exception(ExceptionReason::InternalError);
    // What a handler said of the last try is worth more than that it was the last.
    let said = part.replies().final_reply().filter(|reply| reply.status != ReplyStatus::OK);
    let answer = said.unwrap_or_else(|| reply_format::error_reply("attempts_exhausted", &reason, Some(attempts)));
    let answer = SettlePlan::Reply(answer);
    match exhausted {
        OnAttemptsExhausted::Reply => part.settle(INTERNAL, answer).await,
        OnAttemptsExhausted::DeadLetter => part.settle(INTERNAL, SettlePlan::DeadLetter).await,
        OnAttemptsExhausted::PoisonQueue(queue) => {
            part.store_poison_copy(&queue, &reason, attempts).await?;
            part.settle(INTERNAL, answer).await
        }
    }
}
