//! How a claim is held while it matters: extended, and asked after (I4, I5, I10).

use alloc::vec::Vec;
use core::time::Duration;

use super::{Act, After, Extension, Loss, Machine, Stage};
use crate::domain::jitter::Jitter;
use crate::domain::lease::{self, Lease};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;

impl Machine {
    pub(super) fn on_reclaimed(
        &mut self,
        sent_at: Instant,
        answer: Result<Duration, Refusal>,
        now: Instant,
        jitter: &mut Jitter,
        acts: &mut Vec<Act>,
    ) {
        let Some(lease) = self.lease else { return };
        if matches!(self.stage, Stage::Trailing) {
            return;
        }
        match answer {
            Ok(_) if self.lost.is_some() => {}
            Ok(length) => {
                let extended = lease.or_later(Lease::granted(sent_at, length, self.lease_policy()));
                if extended == lease {
                    // Nothing was gained: asked again like after any other answer that settles nothing, not at once.
                    self.retry_extension(lease, None, now, jitter);
                    return;
                }
                self.extension_retry.reset();
                self.lease = Some(extended);
                self.extension = Extension::Due(extended.reclaim_at(jitter).max(now));
                acts.push(Act::Extended { lease_ends: extended.abandon_at() });
            }
            Err(Refusal::Gone) => self.lose(Loss::Refused, acts),
            // I5: nothing but a definite loss ends the run; the local deadline does the rest.
            Err(Refusal::Retry { after } | Refusal::Throttled { after }) => {
                self.retry_extension(lease, after, now, jitter);
            }
            Err(Refusal::Denied | Refusal::Rejected | Refusal::Stale) => {
                self.retry_extension(lease, None, now, jitter);
            }
        }
    }

    pub(super) fn on_checked(&mut self, answer: Result<bool, Refusal>, now: Instant, acts: &mut Vec<Act>) {
        self.check_at = match answer {
            // Not allowed to ask: a convenience we do without. The reclaim will tell.
            Err(Refusal::Denied | Refusal::Rejected) => None,
            Ok(_) | Err(Refusal::Retry { .. } | Refusal::Throttled { .. } | Refusal::Gone | Refusal::Stale) => {
                self.policy.check_every.map(|every| now.plus(every))
            }
        };
        if answer == Ok(true) {
            self.lose(Loss::Canceled, acts);
        }
    }

    pub(super) fn retry_extension(&mut self, lease: Lease, after: Option<Duration>, now: Instant, jitter: &mut Jitter) {
        let wait = self.extension_retry.wait(lease.retry(), None, jitter);
        // A service that asks for more patience than the lease has is heard only as far as the lease goes (I4).
        let patience = lease.abandon_at().since(now) / lease::ATTEMPTS_MIN;
        self.extension = Extension::Due(now.plus(wait.max(after.unwrap_or_default().min(patience))));
    }

    pub(super) const fn lease_policy(&self) -> lease::Policy {
        lease::Policy { grace: self.policy.grace }
    }

    /// Whether the lease still matters: from the grant to the answered report (I10).
    pub(super) const fn leased(&self) -> bool {
        match self.stage {
            Stage::Requested { .. } | Stage::Trailing | Stage::Closed | Stage::Ending { after: After::Nothing(_) } => {
                false
            }
            Stage::Preparing
            | Stage::Executing
            | Stage::Ending { after: After::Report(_) }
            | Stage::Settling { .. }
            | Stage::Reporting { .. } => self.lost.is_none(),
        }
    }

    pub(super) fn extension_due(&self) -> Option<Instant> {
        match self.extension {
            Extension::Due(at) if self.leased() => Some(at),
            Extension::Due(_) | Extension::UnderWay => None,
        }
    }

    pub(super) fn abandon_due(&self) -> Option<Instant> {
        self.lease.filter(|_| self.leased()).map(|lease| lease.abandon_at())
    }

    pub(super) fn check_due(&self) -> Option<Instant> {
        match self.stage {
            Stage::Preparing | Stage::Executing => self.check_at,
            Stage::Requested { .. }
            | Stage::Ending { .. }
            | Stage::Settling { .. }
            | Stage::Reporting { .. }
            | Stage::Trailing
            | Stage::Closed => None,
        }
    }
}
