//! What an earlier life of this worker has left to report: asked for once more, reported if it is granted, and forgotten
//! otherwise (I28). It takes no slot, and no poll waits for it.

use alloc::vec::Vec;
use core::time::Duration;

use super::{Effect, RecoveredClaim, Worker};
use crate::domain::claim::{ClaimEnd, ClaimEvent, ClaimState, LossReason};
use crate::domain::id::LocalToken;
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;

impl Worker {
    pub(super) fn on_claims_recovered(&mut self, list: Vec<RecoveredClaim>, now: Instant) {
        for RecoveredClaim { token, source, run, outcome } in list {
            // One run has one end, however often it was written down.
            if self.claims_by_run.contains_key(&self.run_key(source, &run)) {
                self.effects.push_back(Effect::Close { claim: token, run, end: ClaimEnd::NotGranted });
                continue;
            }
            let mut acts = Vec::new();
            let machine = ClaimState::recovered(self.claim_policy(source), outcome, &mut acts);
            self.insert_claim(token, source, run, None, machine);
            self.perform(token, acts, now);
        }
    }

    pub(super) fn on_taken_over(
        &mut self,
        claim: LocalToken,
        sent_at: Instant,
        answer: Result<Duration, Refusal>,
        now: Instant,
    ) {
        match answer {
            Ok(length) => {
                // I12: what led to the claim is settled with it.
                self.delete_messages_of(claim);
                self.handle_claim_event(claim, ClaimEvent::Granted { sent_at, length }, now);
            }
            // I9: nothing is reported that the queue has not granted to us again.
            Err(Refusal::Gone) => {
                self.delete_messages_of(claim);
                self.close_claim(claim, ClaimEnd::Lost(LossReason::Revoked));
            }
            // Not allowed to ask. It says nothing of the credentials otherwise.
            Err(Refusal::Rejected | Refusal::Denied) => self.close_claim(claim, ClaimEnd::Lost(LossReason::Revoked)),
            Err(Refusal::Retry { retry_after: after } | Refusal::Throttled { retry_after: after }) => {
                self.handle_claim_event(claim, ClaimEvent::RequestFailed { retry_after: after }, now);
            }
            Err(Refusal::Stale) => self.handle_claim_event(claim, ClaimEvent::RequestFailed { retry_after: None }, now),
        }
    }
}
