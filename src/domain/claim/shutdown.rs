//! Shutdown (I22, I23): what happens to a claim of a worker that stops, with or without a known deadline.

use alloc::vec::Vec;
use core::time::Duration;

use super::{
    AfterStop, CancelCause, ClaimAction, ClaimEnd, ClaimState, LossReason, POLL_WAIT_MAX, PollBarrier, REPORT_RESERVE,
    SHUTDOWN_UPLOAD_MAX, Stage, UPLOAD_AFTER_REPORT_MAX,
};
use crate::outcome::{ExceptionReason, Outcome};
use crate::time::Instant;

impl ClaimState {
    pub(super) fn on_release(&mut self, deadline: Option<Instant>, now: Instant, actions: &mut Vec<ClaimAction>) {
        let at_once = deadline.is_none().then(|| now.plus(SHUTDOWN_UPLOAD_MAX));
        let deadline = match (self.release.flatten(), deadline) {
            (Some(known), Some(new)) => Some(known.min(new)),
            (known, new) => known.or(new),
        };
        self.release = Some(deadline);
        match self.stage {
            Stage::Preparing | Stage::Executing => self.stop_for_shutdown(deadline, now, actions),
            Stage::Uploading { outcome, deadline: hurry_at } => {
                let in_time = deadline.map(|deadline| deadline.minus(REPORT_RESERVE));
                let hurry_at = [hurry_at, in_time, at_once].into_iter().flatten().min();
                self.stage = Stage::Uploading { outcome, deadline: hurry_at };
            }
            Stage::Stopping { after: AfterStop::Report(_) } => self.stop_for_shutdown(deadline, now, actions),
            Stage::Requested { retry_at: Some(_) } => self.close(ClaimEnd::NotGranted, actions),
            Stage::Reporting { outcome, retry_at: Some(at), upload } => {
                let latest = deadline.map_or(at, |deadline| deadline.minus(REPORT_RESERVE).max(now).min(at));
                self.stage = Stage::Reporting { outcome, retry_at: Some(latest), upload };
            }
            Stage::UploadingAfterReport => {
                self.upload_deadline = [self.upload_deadline, at_once].into_iter().flatten().min();
            }
            Stage::Requested { retry_at: None }
            | Stage::Stopping { after: AfterStop::Abandon(_) }
            | Stage::Reporting { retry_at: None, .. }
            | Stage::Explaining { .. }
            | Stage::Closed => {}
        }
    }

    /// I22: reported before the deadline, or left to expire; never both.
    pub(super) fn stop_for_shutdown(
        &mut self,
        deadline: Option<Instant>,
        now: Instant,
        actions: &mut Vec<ClaimAction>,
    ) {
        let left = deadline.map_or(Duration::MAX, |deadline| deadline.since(now));
        let (after, grace) = if left > REPORT_RESERVE {
            (AfterStop::Report(self.stopped_outcome()), self.policy.termination_grace.min(left - REPORT_RESERVE))
        } else {
            (AfterStop::Abandon(LossReason::ShutdownDeadline), Duration::ZERO)
        };
        self.stage = Stage::Stopping { after };
        actions.push(ClaimAction::Kill { cause: CancelCause::Shutdown, grace });
    }

    pub(super) fn abandon_at_deadline(&mut self, actions: &mut Vec<ClaimAction>) {
        match self.stage {
            Stage::Preparing | Stage::Executing | Stage::Stopping { .. } => {
                self.stage = Stage::Stopping { after: AfterStop::Abandon(LossReason::ShutdownDeadline) };
                self.release = Some(None);
                actions.push(ClaimAction::Kill { cause: CancelCause::Shutdown, grace: Duration::ZERO });
            }
            Stage::UploadingAfterReport => self.finish_upload(actions),
            Stage::Explaining { end, .. } => self.close(end, actions),
            Stage::Requested { .. } | Stage::Uploading { .. } | Stage::Reporting { .. } => {
                self.close(ClaimEnd::Lost(LossReason::ShutdownDeadline), actions);
            }
            Stage::Closed => {}
        }
    }

    /// How long a release waits, so that our own poll does not claim the task again and cost it another retry. Once
    /// only.
    pub(super) fn wait_for_poll(&mut self, outcome: Outcome, now: Instant) -> Option<Instant> {
        let out = self.poll_barrier == PollBarrier::InFlight;
        let longest = now.plus(POLL_WAIT_MAX);
        let until = self.release.flatten().map_or(longest, |deadline| deadline.minus(REPORT_RESERVE).min(longest));
        let waits = out && outcome == Outcome::Exception(ExceptionReason::WorkerShutdown) && until > now;
        self.poll_barrier = if waits { PollBarrier::Waiting } else { PollBarrier::Clear };
        waits.then_some(until)
    }

    pub(super) fn on_poll_ended(&mut self, now: Instant) {
        let awaited = core::mem::replace(&mut self.poll_barrier, PollBarrier::Clear) == PollBarrier::Waiting;
        if let Stage::Reporting { outcome, retry_at: Some(_), upload } = self.stage
            && awaited
        {
            self.stage = Stage::Reporting { outcome, retry_at: Some(now), upload };
        }
    }

    pub(super) const fn upload_after_report(&mut self, outcome: Outcome, now: Instant) {
        self.reported_outcome = Some(outcome);
        let at_once = matches!(self.release, Some(None));
        self.upload_deadline = Some(now.plus(if at_once { SHUTDOWN_UPLOAD_MAX } else { UPLOAD_AFTER_REPORT_MAX }));
        self.stage = Stage::UploadingAfterReport;
    }

    pub(super) fn is_past_deadline(&self, now: Instant) -> bool {
        self.release.flatten().is_some_and(|deadline| now >= deadline)
    }
}
