//! Orders about one claim (I34): they touch no other, and an outcome that was sent stays what it is.

use alloc::vec::Vec;

use super::{Act, After, End, KillCause, Loss, Machine, Obeyed, Order, Settle, Stage};
use crate::domain::outcome::{Outcome, Reason};
use crate::domain::time::Instant;

impl Machine {
    /// What would come of an order now.
    #[must_use]
    pub fn obeys(&self, order: Order) -> Obeyed {
        let order = self.outranking(order);
        match self.stage {
            Stage::Requested { retry_at: Some(_) } if order == Order::HandBack => Obeyed::NotAsked,
            Stage::Requested { .. } => {
                Obeyed::WhenGranted(self.left.map_or_else(|| order.outcome(), |left| order.instead_of(left)))
            }
            Stage::Preparing | Stage::Executing => Obeyed::Ending(order.outcome()),
            Stage::Ending { after: After::Report(outcome) } => Obeyed::Ending(order.instead_of(outcome)),
            Stage::Ending { after: After::Nothing(loss) } => Obeyed::Lost(loss),
            Stage::Settling { outcome, .. } => Obeyed::Reporting(order.instead_of(outcome)),
            // I9: one that waits for its turn was not sent yet.
            Stage::Reporting { outcome, .. } if self.sent.is_none() => Obeyed::Reporting(order.instead_of(outcome)),
            Stage::Reporting { outcome, .. } => Obeyed::TooLate(outcome),
            Stage::Trailing | Stage::Closed => {
                let lost = Obeyed::Lost(self.lost.unwrap_or(Loss::NoTime));
                self.reported.map_or(lost, Obeyed::TooLate)
            }
        }
    }

    pub(super) fn on_ordered(&mut self, order: Order, now: Instant, acts: &mut Vec<Act>) {
        let obeyed = self.obeys(order);
        if !matches!(obeyed, Obeyed::TooLate(_) | Obeyed::Lost(_)) {
            self.ordered = Some(self.outranking(order));
        }
        match (obeyed, self.stage) {
            (Obeyed::NotAsked, _) => self.close(End::NotGranted, acts),
            (Obeyed::Ending(outcome), Stage::Preparing | Stage::Executing) => {
                self.stage = Stage::Ending { after: After::Report(outcome) };
                acts.push(Act::Kill { cause: KillCause::Ordered(order), grace: self.policy.grace });
            }
            (Obeyed::Ending(outcome), _) => self.stage = Stage::Ending { after: After::Report(outcome) },
            (Obeyed::Reporting(outcome), Stage::Settling { .. }) => {
                self.report(outcome, Settle::UnderWay, now, acts);
            }
            (Obeyed::Reporting(outcome), Stage::Reporting { retry_at: Some(at), settle, outcome: planned }) => {
                // What is not run again need not wait for a poll that would bring it back.
                let at = if outcome == planned { at } else { now };
                self.stage = Stage::Reporting { outcome, retry_at: Some(at), settle };
            }
            (Obeyed::Reporting(_) | Obeyed::WhenGranted(_) | Obeyed::TooLate(_) | Obeyed::Lost(_), _) => {}
        }
    }

    /// What is reported of a payload that did not end by itself.
    pub(super) fn ended_by_us(&self) -> Outcome {
        self.ordered.map_or(Outcome::Exception(Reason::WorkerShutdown), Order::outcome)
    }

    fn outranking(&self, order: Order) -> Order {
        self.ordered.map_or(order, |known| known.max(order))
    }
}
