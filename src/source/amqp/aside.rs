//! Requests that no handler sees, and those that were tried too often.

use tokio::time::sleep;

use crate::domain::attempts::Step;
use crate::domain::outcome::{Outcome, Reason};
use crate::domain::refusal::Refusal;
use crate::limits::AMQP_REFUSED_REST;
use crate::source::{Refused, Status};

use super::answer;
use super::part::{Part, Plan};
use super::settings::Exhausted;
use super::tally::Tally;
use super::task;

/// Why no handler sees a request.
pub(super) enum Aside {
    Expired,
    TooLarge,
    Step(Step),
    /// Nobody wants requests at present.
    Unwanted(Plan),
}

impl Aside {
    pub(super) async fn deal(self, part: Part, tally: &Tally, exhausted: Exhausted) -> Result<(), Refused> {
        loop {
            match self.try_once(&part, tally, exhausted.clone()).await {
                // Given back it would be here again at once.
                Err(Refused { refusal: Refusal::Retry { .. }, .. }) if part.is_refused().await => {
                    sleep(AMQP_REFUSED_REST).await;
                }
                ended => return ended,
            }
        }
    }

    async fn try_once(&self, part: &Part, tally: &Tally, exhausted: Exhausted) -> Result<(), Refused> {
        const INTERNAL: Outcome = Outcome::Exception(Reason::InternalError);
        // Counted when it is done: a worker that leaves before gives the request back.
        match self {
            Self::Expired => {
                let reply = answer::error("expired", "its time was over before it could be started", None);
                part.settle(INTERNAL, Plan::Answer(reply)).await?;
                tally.expired.add();
            }
            Self::TooLarge => {
                let message = format!("the request has {} bytes, which is more than this worker takes", part.bytes());
                part.settle(INTERNAL, Plan::Answer(answer::error("too_large", &message, None))).await?;
                tally.too_large.add();
            }
            Self::Step(Step::Note { attempt }) => {
                part.settle(INTERNAL, Plan::Again { attempts: *attempt }).await?;
                tally.noted.add();
            }
            Self::Step(Step::GiveUp { attempts }) => {
                let reason = format!(
                    "it was tried {attempts} times, as its queue and its header {} count, and each time its worker did not come to an end",
                    task::ATTEMPTS
                );
                give_up(part, exhausted, reason, *attempts).await?;
                tracing::error!(
                    alert = "exhausted", claim.run = %part.run,
                    "[alert operator] a request was tried {attempts} times and is given up; what it does to its workers their logs say"
                );
                tally.exhausted.add();
            }
            Self::Unwanted(plan) => part.settle(Outcome::Exception(Reason::WorkerShutdown), plan.clone()).await?,
            Self::Step(Step::Try { .. }) => {}
        }
        Ok(())
    }
}

/// The end of a request that was tried too often.
pub(super) async fn give_up(part: &Part, exhausted: Exhausted, reason: String, attempts: u32) -> Result<(), Refused> {
    const INTERNAL: Outcome = Outcome::Exception(Reason::InternalError);
    // What a handler said of the last try is worth more than that it was the last.
    let said = part.replies().last().filter(|reply| reply.status != Status::OK);
    let answer = said.unwrap_or_else(|| answer::error("attempts_exhausted", &reason, Some(attempts)));
    let answer = Plan::Answer(answer);
    match exhausted {
        Exhausted::Answered => part.settle(INTERNAL, answer).await,
        Exhausted::DeadLettered => part.settle(INTERNAL, Plan::DeadLetter).await,
        Exhausted::Kept(queue) => {
            part.keep(&queue, &reason, attempts).await?;
            part.settle(INTERNAL, answer).await
        }
    }
}
