//! Settles requests that no handler sees, and those after their last attempt.

use tokio::time::sleep;

use crate::domain::delivery_attempts::AttemptAction;
use crate::domain::outcome::{ExceptionReason, Outcome};
use crate::domain::refusal::Refusal;
use crate::limits::AMQP_REPLY_RETRY_DELAY;
use crate::source::CallError;
use crate::task::ReplyStatus;

use super::claim::{RequestClaim, SettlePlan};
use super::config::OnAttemptsExhausted;
use super::counters::AmqpSourceCounters;
use super::delivery;
use super::reply_format;

/// How to settle a request that no handler sees.
pub(super) enum Disposition {
    Expired,
    TooLarge,
    Step(AttemptAction),
    /// The worker takes no requests at present.
    ReturnUnclaimed(SettlePlan),
}

impl Disposition {
    pub(super) async fn apply(
        self,
        claim: RequestClaim,
        counters: &AmqpSourceCounters,
        on_exhausted: OnAttemptsExhausted,
    ) -> Result<(), CallError> {
        loop {
            match self.apply_once(&claim, counters, on_exhausted.clone()).await {
                // Requeued, it would be delivered again at once.
                Err(CallError { refusal: Refusal::Retry { .. }, .. }) if claim.is_reply_refused().await => {
                    sleep(AMQP_REPLY_RETRY_DELAY).await;
                }
                ended => return ended,
            }
        }
    }

    async fn apply_once(
        &self,
        claim: &RequestClaim,
        counters: &AmqpSourceCounters,
        on_exhausted: OnAttemptsExhausted,
    ) -> Result<(), CallError> {
        const INTERNAL: Outcome = Outcome::Exception(ExceptionReason::InternalError);
        // Counted once settled: a worker that exits before requeues the request.
        match self {
            Self::Expired => {
                let reply = reply_format::error_reply("expired", "the request expired before it could start", None);
                claim.settle(INTERNAL, SettlePlan::Reply(reply)).await?;
                counters.expired.increment();
            }
            Self::TooLarge => {
                let message = format!("the request has {} bytes, more than this worker accepts", claim.body_bytes());
                claim
                    .settle(INTERNAL, SettlePlan::Reply(reply_format::error_reply("too_large", &message, None)))
                    .await?;
                counters.too_large.increment();
            }
            Self::Step(AttemptAction::Republish { attempt }) => {
                claim.settle(INTERNAL, SettlePlan::Republish { attempts: *attempt }).await?;
                counters.attempts_recorded.increment();
            }
            Self::Step(AttemptAction::Exhausted { attempts }) => {
                let reason = format!(
                    "the request was delivered {attempts} times, by the count of its queue or its header {}, and no worker settled it",
                    delivery::ATTEMPTS_HEADER
                );
                give_up(claim, on_exhausted, reason, *attempts).await?;
                tracing::error!(
                    alert = "attempts-exhausted", claim.run = %claim.run,
                    "[alert operator] giving up a request after {attempts} attempts; see the logs of its workers for the cause"
                );
                counters.attempts_exhausted.increment();
            }
            Self::ReturnUnclaimed(plan) => {
                claim.settle(Outcome::Exception(ExceptionReason::WorkerShutdown), plan.clone()).await?
            }
            Self::Step(AttemptAction::Try { .. }) => {}
        }
        Ok(())
    }
}

/// Settles a request after its last attempt.
pub(super) async fn give_up(
    claim: &RequestClaim,
    on_exhausted: OnAttemptsExhausted,
    reason: String,
    attempts: u32,
) -> Result<(), CallError> {
    const INTERNAL: Outcome = Outcome::Exception(ExceptionReason::InternalError);
    // The handler's error of the last attempt says more than the number of attempts.
    let own_reply = claim.replies().final_reply().filter(|reply| reply.status != ReplyStatus::OK);
    let reply = own_reply.unwrap_or_else(|| reply_format::error_reply("attempts_exhausted", &reason, Some(attempts)));
    let reply = SettlePlan::Reply(reply);
    match on_exhausted {
        OnAttemptsExhausted::Reply => claim.settle(INTERNAL, reply).await,
        OnAttemptsExhausted::DeadLetter => claim.settle(INTERNAL, SettlePlan::DeadLetter).await,
        OnAttemptsExhausted::PoisonQueue(queue) => {
            claim.store_poison_copy(&queue, &reason, attempts).await?;
            claim.settle(INTERNAL, reply).await
        }
    }
}
