//! Outcomes left by a previous process: the claim is requested again, the outcome reported if it is granted, and
//! dropped otherwise (I28). Takes no slot, and no poll waits for it.

use alloc::vec::Vec;

use super::{Effect, RecoveredClaim, Worker};
use crate::domain::claim::{ClaimAction, ClaimEnd, ClaimState};
use crate::domain::time::Instant;

impl Worker {
    pub(super) fn on_claims_recovered(&mut self, list: Vec<RecoveredClaim>, now: Instant) {
        for RecoveredClaim { token, source, run, outcome } in list {
            // A run is reported once, even if it was journaled twice.
            if self.claims_by_run.contains_key(&self.run_key(source, &run)) {
                self.effects.push_back(Effect::Claim(token, ClaimAction::Close(ClaimEnd::NotGranted)));
                continue;
            }
            let mut actions = Vec::new();
            let state = ClaimState::recovered(self.claim_policy(source), outcome, &mut actions);
            self.insert_claim(token, source, run, None, state);
            self.perform(token, actions, now);
        }
    }
}
