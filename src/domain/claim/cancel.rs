//! Orders about one claim (I34): they touch no other, and an outcome that was sent stays what it is.

use alloc::vec::Vec;

use super::{
    AfterStop, CancelCommand, CancelResult, ClaimAction, ClaimEnd, ClaimState, KillCause, LossReason, Stage,
    UploadStage,
};
use crate::domain::outcome::{ExceptionReason, Outcome};
use crate::domain::time::Instant;

impl ClaimState {
    /// What would come of an order now.
    #[must_use]
    pub fn preview_cancel(&self, order: CancelCommand) -> CancelResult {
        let order = self.strongest_command(order);
        match self.stage {
            Stage::Requested { retry_at: Some(_) } if order == CancelCommand::Release => CancelResult::NotRequested,
            Stage::Requested { .. } => CancelResult::ReportWhenGranted(
                self.recovered_outcome.map_or_else(|| order.outcome(), |left| order.override_outcome(left)),
            ),
            Stage::Preparing | Stage::Executing => CancelResult::Stopping(order.outcome()),
            Stage::Stopping { after: AfterStop::Report(outcome) } => {
                CancelResult::Stopping(order.override_outcome(outcome))
            }
            Stage::Stopping { after: AfterStop::Abandon(loss) } => CancelResult::Lost(loss),
            Stage::Uploading { outcome, .. } => CancelResult::Reporting(order.override_outcome(outcome)),
            // I9: one that waits for its turn was not sent yet.
            Stage::Reporting { outcome, .. } if self.sent_outcome.is_none() => {
                CancelResult::Reporting(order.override_outcome(outcome))
            }
            Stage::Reporting { outcome, .. } => CancelResult::AlreadyReported(outcome),
            Stage::UploadingAfterReport | Stage::Closed => {
                let lost = CancelResult::Lost(self.loss.unwrap_or(LossReason::ShutdownDeadline));
                self.reported_outcome.map_or(lost, CancelResult::AlreadyReported)
            }
        }
    }

    pub(super) fn on_cancel_command(&mut self, order: CancelCommand, now: Instant, acts: &mut Vec<ClaimAction>) {
        let obeyed = self.preview_cancel(order);
        if !matches!(obeyed, CancelResult::AlreadyReported(_) | CancelResult::Lost(_)) {
            self.command = Some(self.strongest_command(order));
        }
        match (obeyed, self.stage) {
            (CancelResult::NotRequested, _) => self.close(ClaimEnd::NotGranted, acts),
            (CancelResult::Stopping(outcome), Stage::Preparing | Stage::Executing) => {
                self.stage = Stage::Stopping { after: AfterStop::Report(outcome) };
                acts.push(ClaimAction::Kill { cause: KillCause::Command(order), grace: self.policy.termination_grace });
            }
            (CancelResult::Stopping(outcome), _) => self.stage = Stage::Stopping { after: AfterStop::Report(outcome) },
            (CancelResult::Reporting(outcome), Stage::Uploading { .. }) => {
                self.report(outcome, UploadStage::InProgress, now, acts);
            }
            (
                CancelResult::Reporting(outcome),
                Stage::Reporting { retry_at: Some(at), upload: settle, outcome: planned },
            ) => {
                // What is not run again need not wait for a poll that would bring it back.
                let at = if outcome == planned { at } else { now };
                self.stage = Stage::Reporting { outcome, retry_at: Some(at), upload: settle };
            }
            (
                CancelResult::Reporting(_)
                | CancelResult::ReportWhenGranted(_)
                | CancelResult::AlreadyReported(_)
                | CancelResult::Lost(_),
                _,
            ) => {}
        }
    }

    /// What is reported of a payload that did not end by itself.
    pub(super) fn stopped_outcome(&self) -> Outcome {
        self.command.map_or(Outcome::Exception(ExceptionReason::WorkerShutdown), CancelCommand::outcome)
    }

    fn strongest_command(&self, order: CancelCommand) -> CancelCommand {
        self.command.map_or(order, |known| known.max(order))
    }
}
