//! Outcomes left by a previous process: the claim is requested again, the outcome reported if it is granted, and
//! dropped otherwise (I28). Takes no slot, and no poll waits for it.

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
            // A run is reported once, even if it was journaled twice.
            if self.claims_by_run.contains_key(&self.run_key(source, &run)) {
                self.effects.push_back(Effect::Close { claim: token, run, end: ClaimEnd::NotGranted });
                continue;
            }
            let mut actions = Vec::new();
            let state = ClaimState::recovered(self.claim_policy(source), outcome, &mut actions);
            self.insert_claim(token, source, run, None, state);
            self.perform(token, actions, now);
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
                // I12: the messages are settled with the claim.
                self.delete_messages_of(claim);
                self.handle_claim_event(claim, ClaimEvent::Granted { sent_at, length }, now);
            }
            // I9: no report unless the queue has granted the claim again.
            Err(Refusal::Gone) => {
                self.delete_messages_of(claim);
                self.close_claim(claim, ClaimEnd::Lost(LossReason::Revoked));
            }
            // The request is not allowed, which says nothing else about the credentials.
            Err(Refusal::Rejected | Refusal::Denied) => self.close_claim(claim, ClaimEnd::Lost(LossReason::Revoked)),
            Err(Refusal::Retry { retry_after: after } | Refusal::Throttled { retry_after: after }) => {
                self.handle_claim_event(claim, ClaimEvent::RequestFailed { retry_after: after }, now);
            }
            Err(Refusal::Stale) => self.handle_claim_event(claim, ClaimEvent::RequestFailed { retry_after: None }, now),
        }
    }
}
