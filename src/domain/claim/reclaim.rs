//! Reclaims and status checks while the lease matters (I4, I5, I10).

use alloc::vec::Vec;
use core::time::Duration;

use super::{
    AfterStop, ClaimAction, ClaimEnd, ClaimState, LOSS_CHECK_MAX, LossReason, SHUTDOWN_UPLOAD_MAX, Stage,
    StatusSchedule, UPLOAD_AFTER_REPORT_MAX, UploadStage,
};
use crate::jitter::Jitter;
use crate::lease::{self, Granted, Lease};
use crate::refusal::Refusal;
use crate::time::Instant;

impl ClaimState {
    pub(super) fn on_reclaimed(
        &mut self,
        answer: Result<Granted, Refusal>,
        now: Instant,
        jitter: &mut Jitter,
        actions: &mut Vec<ClaimAction>,
    ) {
        let Some(lease) = self.lease else { return };
        if matches!(self.stage, Stage::UploadingAfterReport) {
            return;
        }
        if matches!(self.stage, Stage::Requested { .. }) {
            return match answer {
                Ok(granted) => self.on_granted(granted, now, jitter, actions),
                Err(refusal) => self.on_claim_refused(refusal, now, jitter, actions),
            };
        }
        match answer {
            Ok(_) if self.loss.is_some() => {}
            Ok(granted) => {
                let extended = lease.or_later(self.new_lease(granted));
                if extended == lease {
                    // An extension that gains nothing is retried like an indefinite answer, not at once.
                    self.retry_reclaim(lease, None, now, jitter);
                    return;
                }
                self.reclaim_retry.reset();
                self.lease = Some(extended);
                self.next_reclaim = Some(extended.reclaim_at(jitter).max(now));
                actions.push(ClaimAction::UpdateLease(extended));
            }
            Err(Refusal::Gone) => self.on_reclaim_gone(now, actions),
            // I5: only a definite loss or the local deadline ends the run.
            Err(refusal) => self.retry_reclaim(lease, refusal.retry_after(), now, jitter),
        }
    }

    pub(super) fn on_status_checked(
        &mut self,
        answer: Result<Option<LossReason>, Refusal>,
        now: Instant,
        actions: &mut Vec<ClaimAction>,
    ) {
        match answer {
            // Status checks are optional; the reclaim will tell.
            Err(Refusal::Denied | Refusal::Rejected) => self.status_check = StatusSchedule::Never,
            Ok(_) | Err(_) => self.schedule_status_check(now),
        }
        let known = answer.ok().flatten();
        match (self.stage, known) {
            (Stage::Explaining { upload, .. }, Some(loss @ (LossReason::Canceled | LossReason::DeadlineExceeded))) => {
                self.loss = Some(loss);
                // The queue has refused it.
                self.sent_outcome = None;
                self.end_lost(ClaimEnd::Lost(loss), upload, now, actions);
            }
            (Stage::Explaining { end, upload }, _) => self.end_lost(end, upload, now, actions),
            (Stage::Stopping { after: AfterStop::Abandon(LossReason::Revoked) }, Some(loss)) => {
                self.loss = Some(loss);
                self.stage = Stage::Stopping { after: AfterStop::Abandon(loss) };
            }
            (_, Some(loss)) => self.on_lost(loss, actions),
            (_, None) => {}
        }
    }

    pub(super) fn schedule_status_check(&mut self, now: Instant) {
        let at = self.policy.status_poll_interval.map(|every| now.plus(every));
        self.status_check = at.map_or(StatusSchedule::Never, StatusSchedule::Due);
    }

    pub(super) fn check_status(&mut self, actions: &mut Vec<ClaimAction>) {
        if core::mem::replace(&mut self.status_check, StatusSchedule::InFlight) != StatusSchedule::InFlight {
            actions.push(ClaimAction::CheckStatus);
        }
    }

    /// The claim is over: a payload is killed at once, and the status tells whether the task was canceled.
    fn on_reclaim_gone(&mut self, now: Instant, actions: &mut Vec<ClaimAction>) {
        let end = ClaimEnd::Lost(LossReason::Revoked);
        match self.stage {
            Stage::Uploading { .. } => self.explain(end, UploadStage::InProgress, now, actions),
            Stage::Reporting { retry_at: Some(_), upload, .. } => self.explain(end, upload, now, actions),
            Stage::Preparing | Stage::Executing if self.policy.reports_cancellation => {
                self.on_lost(LossReason::Revoked, actions);
                self.check_status(actions);
            }
            Stage::Requested { .. }
            | Stage::Preparing
            | Stage::Executing
            | Stage::Stopping { .. }
            | Stage::Reporting { retry_at: None, .. }
            | Stage::Explaining { .. }
            | Stage::UploadingAfterReport
            | Stage::Closed => self.on_lost(LossReason::Revoked, actions),
        }
    }

    pub(super) fn explain(&mut self, end: ClaimEnd, upload: UploadStage, now: Instant, actions: &mut Vec<ClaimAction>) {
        if !self.policy.reports_cancellation {
            return self.close(end, actions);
        }
        self.loss.get_or_insert(LossReason::Revoked);
        self.stage = Stage::Explaining { end, upload };
        self.upload_deadline = Some(now.plus(LOSS_CHECK_MAX));
        self.check_status(actions);
    }

    /// The log of a canceled task is stored while its credentials still allow it.
    pub(super) fn end_lost(
        &mut self,
        end: ClaimEnd,
        upload: UploadStage,
        now: Instant,
        actions: &mut Vec<ClaimAction>,
    ) {
        let explained = matches!(end, ClaimEnd::Lost(LossReason::Canceled | LossReason::DeadlineExceeded));
        let credentials_end = self.lease.map_or(now, |lease| lease.granted_until());
        if end == ClaimEnd::Lost(LossReason::Revoked) && self.status_check == StatusSchedule::InFlight {
            self.explain(end, upload, now, actions);
        } else if explained && upload != UploadStage::Done && now < credentials_end {
            let longest = if self.release.is_some() { SHUTDOWN_UPLOAD_MAX } else { UPLOAD_AFTER_REPORT_MAX };
            self.upload_deadline = Some(now.plus(longest).min(credentials_end));
            self.stage = Stage::UploadingAfterReport;
            if upload == UploadStage::AfterReport {
                actions.push(ClaimAction::Upload);
            }
        } else {
            self.close(end, actions);
        }
    }

    pub(super) fn retry_reclaim(&mut self, lease: Lease, after: Option<Duration>, now: Instant, jitter: &mut Jitter) {
        let wait = self.reclaim_retry.wait(lease.retry_policy(), None, jitter);
        // A service that asks for a longer wait than the lease allows is followed only as far as the lease goes (I4).
        let longest = lease.expires_at().since(now) / lease::RECLAIM_ATTEMPTS_MIN;
        self.next_reclaim = Some(now.plus(wait.max(after.unwrap_or_default().min(longest))));
    }

    /// True from the grant to the answered report (I10).
    pub(super) const fn is_leased(&self) -> bool {
        let ends_with_report = matches!(
            self.stage,
            Stage::Preparing
                | Stage::Executing
                | Stage::Stopping { after: AfterStop::Report(_) }
                | Stage::Uploading { .. }
                | Stage::Reporting { .. }
        );
        ends_with_report && self.loss.is_none()
    }

    pub fn reclaim_due(&self) -> Option<Instant> {
        // The queue refuses a reclaim after the task's deadline, but still accepts the report.
        let is_in_time = |at: &Instant| self.deadline().is_none_or(|deadline| *at < deadline);
        self.next_reclaim.filter(|at| self.is_leased() && is_in_time(at))
    }

    fn deadline(&self) -> Option<Instant> {
        self.terms.and_then(|terms| terms.deadline)
    }

    /// The deadline ends a payload. One that has ended before is reported.
    pub(super) fn deadline_due(&self) -> Option<Instant> {
        self.deadline().filter(|_| matches!(self.stage, Stage::Preparing | Stage::Executing))
    }

    pub(super) fn expiry_due(&self) -> Option<Instant> {
        self.ends_at().filter(|_| self.is_leased())
    }

    pub(super) fn status_check_due(&self) -> Option<Instant> {
        match self.status_check {
            StatusSchedule::Due(at) if matches!(self.stage, Stage::Preparing | Stage::Executing) => Some(at),
            StatusSchedule::Never | StatusSchedule::Due(_) | StatusSchedule::InFlight => None,
        }
    }
}
