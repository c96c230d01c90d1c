//! Opening, polling and recovering sources.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::claims::ClaimOrigin;
use super::{
    Alert, Effect, ExitReason, FAILURES_BEFORE_ALERT, FAILURES_PER_REPEATED_ALERT, OpenResult, POLL_MAX, PollResult,
    RecoveryResult, RunKey, SourceState, Worker,
};
use crate::id::{LocalToken, Run, SourceId};
use crate::poll::{CLOCK_SKEW_MAX, NextCall, POLL_SPACING, UnreadPoll};
use crate::refusal::Refusal;
use crate::time::Instant;
use crate::turns::{self, Closing, Share, Turn};

impl Worker {
    pub(super) fn on_opened(
        &mut self,
        source: SourceId,
        sent_at: Instant,
        answer: Result<OpenResult, Refusal>,
        now: Instant,
    ) {
        let state = &mut self.sources[source.index()];
        match answer {
            Ok(opened) => {
                state.poller.on_opened(opened.priority_queues, opened.usable_for.map(|span| sent_at.plus(span)), now);
                self.space_polls();
                self.retry_stale_deletes(source, now);
            }
            Err(refusal) => self.on_refusal(source, refusal, now),
        }
    }

    /// The more priority queues are polled, the longer each source sleeps when it has found nothing.
    pub(super) fn space_polls(&mut self) {
        let polls = self.sources.iter().map(|source| source.poller.polls_a_round()).sum();
        let interval = self.policy.poll_interval;
        for SourceState { poller, .. } in &mut self.sources {
            let is_spaced = poller.polls_a_round() > 0;
            poller.set_interval(if is_spaced { interval.max(POLL_SPACING.saturating_mul(polls)) } else { interval });
        }
    }

    pub(super) fn on_polled(&mut self, source: SourceId, answer: Result<PollResult, Refusal>, now: Instant) {
        let state = &mut self.sources[source.index()];
        let mut slots = core::mem::take(&mut state.reserved_slots);
        match answer {
            Ok(result) => {
                let claims = state.poller.capabilities.long_poll;
                state.has_accepted_claim |= claims;
                state.has_polled = true;
                let lost = if claims { result.messages.len() } else { 0 };
                if lost > 0 {
                    state.poller.request_recovery();
                }
                if lost > 0 && result.claims.is_empty() {
                    // Each further poll may cost one more claim: no faster than after any other failure.
                    state.poller.on_refused(Refusal::Retry { retry_after: None }, now, &mut self.jitter);
                } else {
                    state.poller.on_answered(result.messages.len() + result.claims.len(), now, &mut self.jitter);
                }
                // I13: of several receptions of one message in a batch, the last one has the valid receipt.
                let latest: BTreeMap<Box<str>, LocalToken> =
                    result.messages.iter().map(|message| (message.id.clone(), message.token)).collect();
                for message in result.messages {
                    if claims {
                        self.effects.push_back(Effect::Alert(Alert::UnreadableClaim { source, id: message.id }));
                        self.effects.push_back(Effect::DropMessage(message.token));
                    } else if latest.get(&message.id) == Some(&message.token) {
                        self.on_message(source, message, &mut slots, now);
                    } else {
                        self.effects.push_back(Effect::DropMessage(message.token));
                    }
                }
                for grant in result.claims {
                    self.on_granted_claim(source, grant, ClaimOrigin::Poll(slots.pop()), now);
                }
            }
            Err(refusal) => self.on_refusal(source, refusal, now),
        }
        self.slots.release(slots);
        self.on_poll_ended(source, now);
    }

    pub(super) fn on_recovered(&mut self, source: SourceId, answer: Result<RecoveryResult, Refusal>, now: Instant) {
        let state = &mut self.sources[source.index()];
        match answer {
            Ok(RecoveryResult { claims, error: missed, foreign_claims: others }) => {
                // I28: a claim of a previous process may have run already, so it is released, never resumed. A claim
                // from a lost reply of this process has not.
                let began = self.started_at.unwrap_or(now);
                let fresh = matches!(
                    state.poller.unread_poll(),
                    Some(UnreadPoll::Sent(at)) if at >= began.plus(CLOCK_SKEW_MAX)
                );
                if core::mem::replace(&mut state.foreign_claims, others) < others {
                    self.effects.push_back(Effect::Alert(Alert::DuplicateWorkerId { source, claims: others }));
                }
                match missed {
                    None => state.poller.on_answered(claims.len(), now, &mut self.jitter),
                    Some(refusal) => {
                        state.poller.on_refused(refusal, now, &mut self.jitter);
                    }
                }
                for one in claims {
                    let origin = if fresh {
                        ClaimOrigin::Poll(self.slots.reserve(1.min(self.claim_allowance())).pop())
                    } else {
                        ClaimOrigin::PreviousProcess
                    };
                    self.on_granted_claim(source, one, origin, now);
                }
            }
            Err(refusal) => {
                let before = state.poller.consecutive_failures();
                state.poller.on_refused(refusal, now, &mut self.jitter);
                let consecutive = state.poller.consecutive_failures();
                // A recovery that is denied says nothing new of the queue.
                if consecutive > before {
                    self.alert_repeated_failures(source, consecutive);
                }
            }
        }
    }

    fn on_refusal(&mut self, source: SourceId, refusal: Refusal, now: Instant) {
        let state = &mut self.sources[source.index()];
        let denied = state.poller.on_refused(refusal, now, &mut self.jitter);
        match refusal {
            Refusal::Denied => self.on_denied(source, denied, now),
            Refusal::Throttled { .. } => self.effects.push_back(Effect::Alert(Alert::Throttled { source })),
            // A poll that succeeded before shows that our requests are valid; this failure is transient.
            Refusal::Rejected if !state.has_accepted_claim && !state.has_polled => {
                self.drain(ExitReason::Misconfigured, now)
            }
            Refusal::Retry { .. } | Refusal::Full | Refusal::Gone | Refusal::Rejected | Refusal::Stale => {
                let consecutive = state.poller.consecutive_failures();
                self.alert_repeated_failures(source, consecutive);
            }
        }
    }

    /// Alert only on repeated failures.
    pub(super) fn alert_repeated_failures(&mut self, source: SourceId, consecutive: u32) {
        if consecutive == FAILURES_BEFORE_ALERT
            || (consecutive > 0 && consecutive.is_multiple_of(FAILURES_PER_REPEATED_ALERT))
        {
            self.effects.push_back(Effect::Alert(Alert::SourceUnavailable { source, consecutive }));
        }
    }

    pub(super) fn on_denied(&mut self, source: SourceId, consecutive: u32, now: Instant) {
        self.effects.push_back(Effect::Alert(Alert::Denied { source, consecutive }));
        if consecutive >= self.policy.max_auth_failures {
            self.drain(ExitReason::CredentialsRejected, now);
        }
    }

    pub(super) fn start_polls(&mut self, now: Instant) {
        for index in (0..self.sources.len()).filter(|index| self.sources[*index].is_pollable()).collect::<Vec<_>>() {
            self.start_slotless_call(index, now);
        }
        for Share { source, slots } in turns::shares(&self.turns(), self.available_slots(), POLL_MAX, now) {
            self.start_poll(source, slots, now);
        }
        while let Some(closing) = self.next_closing().filter(|closing| now >= closing.at) {
            self.sources[closing.source].poller.on_closing();
            self.effects.push_back(Effect::ClosePoll(SourceId::from_index(closing.source)));
        }
    }

    fn turns(&self) -> Vec<Turn> {
        let turn = |state: &SourceState| {
            let turn = state.poller.turn();
            let is_out = !state.is_pollable() && !matches!(turn, Turn::Holding { .. });
            if is_out { Turn::Out } else { turn }
        };
        self.sources.iter().map(turn).collect()
    }

    fn available_slots(&self) -> u32 {
        self.slots.free().min(self.claim_allowance())
    }

    pub(super) fn next_closing(&self) -> Option<Closing> {
        (self.available_slots() == 0).then(|| turns::next_closing(&self.turns())).flatten()
    }

    /// The open polls for whose slots a source waits.
    pub fn awaited_polls(&self, source: SourceId, now: Instant) -> impl Iterator<Item = (SourceId, usize)> {
        let next = self.sources[source.index()].poller.next_call(now);
        let waits = self.is_claiming() && matches!(next, NextCall::Poll(_)) && self.available_slots() == 0;
        let held = move |state: &SourceState| Some(state.reserved_slots.len()).filter(|held| waits && *held > 0);
        let held = self.sources.iter().map(held).enumerate();
        held.filter_map(|(index, held)| Some((SourceId::from_index(index), held?)))
    }

    fn start_slotless_call(&mut self, index: usize, now: Instant) {
        let source = SourceId::from_index(index);
        let state = &mut self.sources[index];
        match state.poller.next_call(now) {
            NextCall::Open => {
                state.poller.on_open_sent();
                self.effects.push_back(Effect::Open(source));
            }
            NextCall::Recover => {
                state.poller.on_recovery_sent();
                let ours = |key: &&RunKey| key.service == state.service;
                let known = self
                    .claims_by_run
                    .keys()
                    .chain(self.resolved_runs.iter())
                    .chain(self.abandoned_runs.iter())
                    .filter(ours);
                let known_runs: Vec<Run> = known.map(|key| key.run.clone()).collect();
                let unread = state.poller.unread_poll();
                let newer_than = unread.map(|poll| poll.age(now).saturating_add(CLOCK_SKEW_MAX));
                self.effects.push_back(Effect::Recover { source, known_runs, newer_than });
            }
            NextCall::Poll(_) | NextCall::InFlight | NextCall::NotBefore(_) => {}
        }
    }

    fn start_poll(&mut self, index: usize, slots: u32, now: Instant) {
        let state = &mut self.sources[index];
        let NextCall::Poll(queue) = state.poller.next_call(now) else { return };
        if slots == 0 {
            return state.poller.on_no_free_slot();
        }
        state.reserved_slots = self.slots.reserve(slots);
        state.poller.on_poll_sent(queue, now);
        let (source, max) = (SourceId::from_index(index), u8::try_from(slots).unwrap_or(u8::MAX));
        self.effects.push_back(Effect::Poll { source, queue, max });
    }
}
