//! Drain, release, host termination, exit.

use alloc::vec::Vec;

use super::{Effect, ExitReason, Mode, Worker};
use crate::claim::{ClaimEvent, ClaimState};
use crate::id::{LocalToken, SourceId};
use crate::time::Instant;
use crate::worker_pool::PoolDecision;

impl Worker {
    pub(super) fn drain(&mut self, exit: ExitReason, now: Instant) {
        if self.mode == Mode::Running {
            self.mode = Mode::Draining { since: now };
            self.exit = exit;
            // I22: a claim that is not granted yet is released when it is, and not requested again.
            let asked: Vec<LocalToken> =
                self.claims.iter().filter(|(_, entry)| !entry.state.is_granted()).map(|(claim, _)| *claim).collect();
            for claim in asked {
                self.handle_claim_event(claim, ClaimEvent::Release { deadline: None }, now);
            }
        }
    }

    pub(super) fn on_pool_decided(&mut self, decision: PoolDecision, now: Instant) {
        match decision {
            PoolDecision::NeededUntil(until) => self.conditions.needed_until = Some(until),
            PoolDecision::Leave { exit, deadline } => {
                self.conditions.leave_by = self.conditions.leave_by.or(deadline);
                self.drain(exit, now);
            }
        }
    }

    pub(super) fn hand_over(&mut self, claims: &[LocalToken], now: Instant) {
        if matches!(self.mode, Mode::Draining { .. }) {
            let is_left = |claim, state: &ClaimState| claims.contains(&claim) && state.is_executing();
            self.release_matching(|claim, state| is_left(claim, state) && !state.is_last_run(), None, now);
        }
    }

    pub(super) fn release_all(&mut self, deadline: Option<Instant>, now: Instant) {
        // A drain that waits for its last poll has nothing to release.
        let drained = matches!(self.mode, Mode::Draining { .. }) && self.claims.is_empty();
        if self.exit < ExitReason::HostTerminating && !drained {
            self.exit = ExitReason::Released;
        }
        let deadline = [self.release_deadline(), deadline].into_iter().flatten().min();
        self.mode = Mode::Releasing { deadline };
        self.release_matching(|_, _| true, deadline, now);
    }

    /// The termination time is unknown and may be the next second, so no report waits for our own poll. What that
    /// poll still returns is released as well.
    fn release_all_now(&mut self, now: Instant) {
        self.release_all(None, now);
        let claims: Vec<LocalToken> = self.claims.keys().copied().collect();
        for claim in claims {
            self.handle_claim_event(claim, ClaimEvent::PollEnded, now);
        }
    }

    /// The remaining time is used: unstarted claims lose nothing and are released at once, running ones may finish
    /// until there is just time to stop and report them (I22).
    pub(super) fn on_termination_notice(&mut self, deadline: Option<Instant>, now: Instant) {
        let exit = self.exit.max(ExitReason::HostTerminating);
        let news = match (self.host_terminates_at, deadline) {
            (Some(known), Some(deadline)) => deadline < known,
            (None, _) | (_, None) => true,
        };
        if news {
            self.host_terminates_at = deadline.or(self.host_terminates_at);
            let at_once = self.release_at().is_none_or(|at| now >= at);
            if deadline.is_none() {
                self.release_all_now(now);
            } else if at_once || matches!(self.mode, Mode::Releasing { .. }) {
                self.release_all(deadline, now);
            } else {
                self.drain(exit, now);
                // A release would end the task of a last run, and there is time for it.
                self.release_matching(|_, state| !state.is_started() && !state.is_last_run(), deadline, now);
            }
        }
        self.exit = exit;
    }

    /// The time at which running payloads are stopped for a known termination.
    fn release_at(&self) -> Option<Instant> {
        self.host_terminates_at.and_then(|deadline| {
            self.policy.on_termination_notice.release_at(deadline, self.policy.claim.termination_grace)
        })
    }

    pub(super) fn drain_ends_at(&self, since: Instant) -> Option<Instant> {
        let limit = self.drain_deadline.or_else(|| self.policy.drain_deadline.map(|span| since.plus(span)));
        [limit, self.release_at(), self.conditions.leave_by].into_iter().flatten().min()
    }

    fn release_matching(
        &mut self,
        which: impl Fn(LocalToken, &ClaimState) -> bool,
        deadline: Option<Instant>,
        now: Instant,
    ) {
        let those = self.claims.iter().filter(|(claim, entry)| which(**claim, &entry.state));
        let claims: Vec<(LocalToken, SourceId)> = those.map(|(claim, entry)| (*claim, entry.source)).collect();
        for (claim, source) in claims {
            if self.sources[source.index()].poller.is_long_polling() {
                self.handle_claim_event(claim, ClaimEvent::PollStarted, now);
            }
            self.handle_claim_event(claim, ClaimEvent::Release { deadline }, now);
        }
    }

    /// Claims that waited for the poll are released.
    pub(super) fn on_poll_ended(&mut self, source: SourceId, now: Instant) {
        if !self.awaited_polls.remove(&source) && self.mode == Mode::Running {
            return;
        }
        let of_source = self.claims.iter().filter(|(_, entry)| entry.source == source);
        let claims: Vec<LocalToken> = of_source.map(|(claim, _)| *claim).collect();
        for claim in claims {
            self.handle_claim_event(claim, ClaimEvent::PollEnded, now);
        }
    }

    pub(super) const fn release_deadline(&self) -> Option<Instant> {
        match self.mode {
            Mode::Releasing { deadline } => deadline,
            Mode::Running | Mode::Draining { .. } | Mode::Exited => self.host_terminates_at,
        }
    }

    pub(super) fn exit_with(&mut self, exit: ExitReason) {
        self.mode = Mode::Exited;
        let exit = if self.cleanup_pending.is_empty() || exit == ExitReason::Aborted {
            exit
        } else {
            ExitReason::ProcessesLeft
        };
        self.effects.push_back(Effect::Exit(exit));
    }

    pub(super) fn on_tick(&mut self, now: Instant) {
        self.fire_claim_timers(now);
        self.send_due_deletes(now);
        if let Mode::Draining { since } = self.mode
            && self.drain_ends_at(since).is_some_and(|at| now >= at)
        {
            let cause = self.exit;
            self.release_all(None, now);
            if cause != ExitReason::Drained {
                self.exit = cause;
            }
        }
    }

    pub(super) fn advance(&mut self, now: Instant) {
        match self.mode {
            Mode::Running => self.advance_running(now),
            Mode::Draining { .. } | Mode::Releasing { .. } => {
                self.exit_if_done(now);
            }
            Mode::Exited => {}
        }
    }

    fn exit_if_done(&mut self, now: Instant) {
        self.past_deadline |= self.release_deadline().is_some_and(|deadline| now >= deadline);
        let polling = self.sources.iter().any(|source| source.poller.is_polling());
        if self.claims.is_empty() && (self.past_deadline || (!polling && self.messages.is_empty())) {
            self.exit_with(self.exit);
        }
    }
}
