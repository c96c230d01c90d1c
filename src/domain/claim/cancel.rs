//! Commands about one claim (I34): they affect that claim only, and an outcome already sent stays.

use alloc::vec::Vec;

use super::{
    AfterStop, CancelCause, CancelCommand, CancelResult, ClaimAction, ClaimEnd, ClaimState, LossReason, Stage,
    UploadStage,
};
use crate::outcome::{ExceptionReason, Outcome};
use crate::time::Instant;

impl ClaimState {
    /// The result that `command` would have.
    pub fn preview_cancel(&self, command: CancelCommand) -> CancelResult {
        let command = self.strongest_command(command);
        match self.stage {
            Stage::Requested { retry_at: Some(_) } if command == CancelCommand::Release => CancelResult::NotRequested,
            Stage::Requested { .. } => CancelResult::ReportWhenGranted(
                self.recovered_outcome.map_or_else(|| command.outcome(), |outcome| command.override_outcome(outcome)),
            ),
            Stage::Preparing | Stage::Executing => CancelResult::Stopping(command.outcome()),
            Stage::Stopping { after: AfterStop::Report(outcome) } => {
                CancelResult::Stopping(command.override_outcome(outcome))
            }
            Stage::Stopping { after: AfterStop::Abandon(loss) } => CancelResult::Lost(loss),
            Stage::Uploading { outcome, .. } => CancelResult::Reporting(command.override_outcome(outcome)),
            // I9: an outcome that waits for a retry was not sent yet.
            Stage::Reporting { outcome, .. } if self.sent_outcome.is_none() => {
                CancelResult::Reporting(command.override_outcome(outcome))
            }
            Stage::Reporting { outcome, .. } => CancelResult::AlreadyReported(outcome),
            Stage::Explaining { .. } | Stage::UploadingAfterReport | Stage::Closed => {
                let lost = CancelResult::Lost(self.loss.unwrap_or(LossReason::ShutdownDeadline));
                self.reported_outcome.map_or(lost, CancelResult::AlreadyReported)
            }
        }
    }

    pub(super) fn on_cancel_command(&mut self, command: CancelCommand, now: Instant, actions: &mut Vec<ClaimAction>) {
        let result = self.preview_cancel(command);
        if !matches!(result, CancelResult::AlreadyReported(_) | CancelResult::Lost(_)) {
            self.command = Some(self.strongest_command(command));
        }
        match (result, self.stage) {
            (CancelResult::NotRequested, _) => self.close(ClaimEnd::NotGranted, actions),
            (CancelResult::Stopping(outcome), Stage::Preparing | Stage::Executing) => {
                self.stage = Stage::Stopping { after: AfterStop::Report(outcome) };
                actions.push(ClaimAction::Kill {
                    cause: CancelCause::Command(command),
                    grace: self.policy.termination_grace,
                });
            }
            (CancelResult::Stopping(outcome), _) => self.stage = Stage::Stopping { after: AfterStop::Report(outcome) },
            (CancelResult::Reporting(outcome), Stage::Uploading { .. }) => {
                self.report(outcome, UploadStage::InProgress, now, actions);
            }
            (CancelResult::Reporting(outcome), Stage::Reporting { retry_at: Some(at), upload, outcome: planned }) => {
                // An outcome that is not retried need not wait for a poll that would return the task.
                let at = if outcome == planned { at } else { now };
                self.stage = Stage::Reporting { outcome, retry_at: Some(at), upload };
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

    /// The outcome of a payload that was stopped.
    pub(super) fn stopped_outcome(&self) -> Outcome {
        self.command.map_or(Outcome::Exception(ExceptionReason::WorkerShutdown), CancelCommand::outcome)
    }

    fn strongest_command(&self, command: CancelCommand) -> CancelCommand {
        self.command.map_or(command, |known| known.max(command))
    }
}
