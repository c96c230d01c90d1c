//! What an earlier life of this worker has left to report: asked for once more, reported if it is granted, and forgotten
//! otherwise (I28). It takes no slot, and no poll waits for it.

use alloc::vec::Vec;
use core::time::Duration;

use super::{Effect, LeftOver, Worker};
use crate::domain::claim::{End, Happening, Loss, Machine};
use crate::domain::id::Token;
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;

impl Worker {
    pub(super) fn on_left_over(&mut self, list: Vec<LeftOver>, now: Instant) {
        for LeftOver { token, source, run, outcome } in list {
            // One run has one end, however often it was written down.
            if self.by_run.contains_key(&self.work(source, &run)) {
                self.effects.push_back(Effect::Close { claim: token, run, end: End::NotGranted });
                continue;
            }
            let mut acts = Vec::new();
            let machine = Machine::left_over(self.claim_policy(source), outcome, &mut acts);
            self.hold(token, source, run, None, machine);
            self.perform(token, acts, now);
        }
    }

    pub(super) fn on_taken_over(
        &mut self,
        claim: Token,
        sent_at: Instant,
        answer: Result<Duration, Refusal>,
        now: Instant,
    ) {
        match answer {
            Ok(length) => {
                // I12: what led to the claim is settled with it.
                self.delete_messages_of(claim);
                self.tell(claim, Happening::Granted { sent_at, length }, now);
            }
            // I9: nothing is reported that the queue has not granted to us again.
            Err(Refusal::Gone) => {
                self.delete_messages_of(claim);
                self.close(claim, End::Lost(Loss::Refused));
            }
            // Not allowed to ask. It says nothing of the credentials otherwise.
            Err(Refusal::Rejected | Refusal::Denied) => self.close(claim, End::Lost(Loss::Refused)),
            Err(Refusal::Retry { after } | Refusal::Throttled { after }) => {
                self.tell(claim, Happening::Unanswered { after }, now);
            }
            Err(Refusal::Stale) => self.tell(claim, Happening::Unanswered { after: None }, now),
        }
    }
}
