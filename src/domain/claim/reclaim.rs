//! Reclaims and status checks while the lease matters (I4, I5, I10).

use alloc::vec::Vec;
use core::time::Duration;

use super::{AfterStop, ClaimAction, ClaimState, LossReason, ReclaimSchedule, Stage};
use crate::domain::jitter::Jitter;
use crate::domain::lease::{self, Lease};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;

impl ClaimState {
    pub(super) fn on_reclaimed(
        &mut self,
        sent_at: Instant,
        answer: Result<Duration, Refusal>,
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
                Ok(length) => self.on_granted(sent_at, length, now, jitter, actions),
                Err(refusal) => self.on_claim_refused(refusal, now, jitter, actions),
            };
        }
        match answer {
            Ok(_) if self.loss.is_some() => {}
            Ok(length) => {
                let extended = lease.or_later(Lease::granted(sent_at, length, self.policy.termination_grace));
                if extended == lease {
                    // An extension that gains nothing is retried like an indefinite answer, not at once.
                    self.retry_reclaim(lease, None, now, jitter);
                    return;
                }
                self.reclaim_retry.reset();
                self.lease = Some(extended);
                self.reclaim = ReclaimSchedule::Due(extended.reclaim_at(jitter).max(now));
                actions.push(ClaimAction::update_lease(extended));
            }
            Err(Refusal::Gone) => self.on_lost(LossReason::Revoked, actions),
            // I5: only a definite loss or the local deadline ends the run.
            Err(refusal) => self.retry_reclaim(lease, refusal.retry_after(), now, jitter),
        }
    }

    pub(super) fn on_status_checked(
        &mut self,
        answer: Result<bool, Refusal>,
        now: Instant,
        actions: &mut Vec<ClaimAction>,
    ) {
        self.status_check_at = match answer {
            // Status checks are optional; the reclaim will tell.
            Err(Refusal::Denied | Refusal::Rejected) => None,
            Ok(_) | Err(Refusal::Retry { .. } | Refusal::Throttled { .. } | Refusal::Gone | Refusal::Stale) => {
                self.policy.status_poll_interval.map(|every| now.plus(every))
            }
        };
        if answer == Ok(true) {
            self.on_lost(LossReason::Canceled, actions);
        }
    }

    pub(super) fn retry_reclaim(&mut self, lease: Lease, after: Option<Duration>, now: Instant, jitter: &mut Jitter) {
        let wait = self.reclaim_retry.wait(lease.retry_policy(), None, jitter);
        // A service that asks for a longer wait than the lease allows is followed only as far as the lease goes (I4).
        let longest = lease.expires_at().since(now) / lease::RECLAIM_ATTEMPTS_MIN;
        self.reclaim = ReclaimSchedule::Due(now.plus(wait.max(after.unwrap_or_default().min(longest))));
    }

    /// From the grant to the answered report (I10).
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

    pub(super) fn reclaim_due(&self) -> Option<Instant> {
        match self.reclaim {
            ReclaimSchedule::Due(at) if self.is_leased() => Some(at),
            ReclaimSchedule::Due(_) | ReclaimSchedule::InFlight => None,
        }
    }

    pub(super) fn expiry_due(&self) -> Option<Instant> {
        self.lease.filter(|_| self.is_leased()).map(|lease| lease.expires_at())
    }

    pub(super) fn status_check_due(&self) -> Option<Instant> {
        self.status_check_at.filter(|_| matches!(self.stage, Stage::Preparing | Stage::Executing))
    }
}
