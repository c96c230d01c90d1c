//! The way out (I22, I23): what becomes of a claim whose worker has to go, with a time that is known or without one.

use alloc::vec::Vec;
use core::time::Duration;

use super::{
    Act, After, End, HURRY_MAX, KillCause, Loss, Machine, POLL_OUT_MAX, Poll, REPORT_RESERVE, Stage, TRAIL_MAX,
};
use crate::domain::outcome::{Outcome, Reason};
use crate::domain::time::Instant;

impl Machine {
    pub(super) fn on_hand_back(&mut self, deadline: Option<Instant>, now: Instant, acts: &mut Vec<Act>) {
        let at_once = deadline.is_none().then(|| now.plus(HURRY_MAX));
        let deadline = match (self.hand_back.flatten(), deadline) {
            (Some(known), Some(new)) => Some(known.min(new)),
            (known, new) => known.or(new),
        };
        self.hand_back = Some(deadline);
        match self.stage {
            Stage::Preparing | Stage::Executing => self.end_for_shutdown(deadline, now, acts),
            Stage::Settling { outcome, hurry_at } => {
                let in_time = deadline.map(|deadline| deadline.minus(REPORT_RESERVE));
                let hurry_at = [hurry_at, in_time, at_once].into_iter().flatten().min();
                self.stage = Stage::Settling { outcome, hurry_at };
            }
            Stage::Ending { after: After::Report(_) } => self.end_for_shutdown(deadline, now, acts),
            Stage::Requested { retry_at: Some(_) } => self.close(End::NotGranted, acts),
            Stage::Reporting { outcome, retry_at: Some(at), settle } => {
                let latest = deadline.map_or(at, |deadline| deadline.minus(REPORT_RESERVE).max(now).min(at));
                self.stage = Stage::Reporting { outcome, retry_at: Some(latest), settle };
            }
            Stage::Trailing => {
                self.trail_until = [self.trail_until, at_once].into_iter().flatten().min();
            }
            Stage::Requested { retry_at: None }
            | Stage::Ending { after: After::Nothing(_) }
            | Stage::Reporting { retry_at: None, .. }
            | Stage::Closed => {}
        }
    }

    /// I22: reported before the deadline, or left to expire; never both.
    pub(super) fn end_for_shutdown(&mut self, deadline: Option<Instant>, now: Instant, acts: &mut Vec<Act>) {
        let left = deadline.map_or(Duration::MAX, |deadline| deadline.since(now));
        let (after, grace) = if left > REPORT_RESERVE {
            (After::Report(self.ended_by_us()), self.policy.grace.min(left - REPORT_RESERVE))
        } else {
            (After::Nothing(Loss::NoTime), Duration::ZERO)
        };
        self.stage = Stage::Ending { after };
        acts.push(Act::Kill { cause: KillCause::Shutdown, grace });
    }

    pub(super) fn give_up_at_deadline(&mut self, acts: &mut Vec<Act>) {
        match self.stage {
            Stage::Preparing | Stage::Executing | Stage::Ending { .. } => {
                self.stage = Stage::Ending { after: After::Nothing(Loss::NoTime) };
                self.hand_back = Some(None);
                acts.push(Act::Kill { cause: KillCause::Shutdown, grace: Duration::ZERO });
            }
            Stage::Trailing => self.close_trailing(acts),
            Stage::Requested { .. } | Stage::Settling { .. } | Stage::Reporting { .. } => {
                self.close(End::Lost(Loss::NoTime), acts);
            }
            Stage::Closed => {}
        }
    }

    /// Until when a hand back waits, so that our own poll does not take the task again and cost it another retry. Once only.
    pub(super) fn waits_for_poll(&mut self, outcome: Outcome, now: Instant) -> Option<Instant> {
        let out = self.poll == Poll::Out;
        let longest = now.plus(POLL_OUT_MAX);
        let until = self.hand_back.flatten().map_or(longest, |deadline| deadline.minus(REPORT_RESERVE).min(longest));
        let waits = out && outcome == Outcome::Exception(Reason::WorkerShutdown) && until > now;
        self.poll = if waits { Poll::Awaited } else { Poll::Over };
        waits.then_some(until)
    }

    pub(super) fn on_poll_over(&mut self, now: Instant) {
        let awaited = core::mem::replace(&mut self.poll, Poll::Over) == Poll::Awaited;
        if let Stage::Reporting { outcome, retry_at: Some(_), settle } = self.stage
            && awaited
        {
            self.stage = Stage::Reporting { outcome, retry_at: Some(now), settle };
        }
    }

    pub(super) const fn trail(&mut self, outcome: Outcome, now: Instant) {
        self.reported = Some(outcome);
        let at_once = matches!(self.hand_back, Some(None));
        self.trail_until = Some(now.plus(if at_once { HURRY_MAX } else { TRAIL_MAX }));
        self.stage = Stage::Trailing;
    }

    pub(super) fn out_of_time(&self, now: Instant) -> bool {
        self.hand_back.flatten().is_some_and(|deadline| now >= deadline)
    }
}
