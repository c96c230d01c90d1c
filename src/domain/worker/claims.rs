//! Connects the queue's answers to the state of each claim.

use alloc::vec::Vec;

use super::{
    Alert, ClaimEntry, ClaimTimer, Effect, ExitReason, GrantedClaim, Mode, PendingCleanup, RecoveredClaim, RunKey,
    Worker,
};
use crate::claim::{self, CancelCommand, ClaimAction, ClaimEnd, ClaimEvent, ClaimState};
use crate::id::{LocalToken, Run, SourceId};
use crate::outcome::{ExecuteFailure, PrepareFailure};
use crate::poll::Capabilities;
use crate::refusal::Refusal;
use crate::service_supervisor::ServiceAvailability;
use crate::slots::Slot;
use crate::time::Instant;

pub(super) enum ClaimOrigin {
    Poll(Option<Slot>),
    PreviousProcess,
}

impl Worker {
    /// Outcomes left by a previous process: the claim is requested again, the outcome reported if it is granted, and
    /// dropped otherwise (I28). Takes no slot, and no poll waits for it.
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

    pub(super) fn on_granted_claim(
        &mut self,
        source: SourceId,
        grant: GrantedClaim,
        origin: ClaimOrigin,
        now: Instant,
    ) {
        let GrantedClaim { token, run, lease, terms } = grant;
        let last_run = terms.is_last_run() && !matches!(self.mode, Mode::Releasing { .. });
        let (slot, alert) = match origin {
            ClaimOrigin::Poll(Some(slot)) => (Some(slot), None),
            ClaimOrigin::Poll(None) => (None, Some(Alert::UnexpectedGrant { run: run.clone() })),
            ClaimOrigin::PreviousProcess => (None, Some(Alert::RecoveredClaim { run: run.clone() })),
        };
        let slot = slot.or_else(|| if last_run { self.slots.reserve(1).pop() } else { None });
        let key = self.run_key(source, &run);
        if self.claims_by_run.contains_key(&key) || self.is_ended(&key) {
            self.slots.release(slot);
            self.effects.push_back(Effect::DropMessage(token));
            return;
        }
        let unwanted = alert.is_some() || !self.accepts_grants(source, now);
        let release = slot.is_none() || (unwanted && !last_run);
        let alert = match alert {
            _ if unwanted && !release => Some(Alert::LastRun { run: run.clone() }),
            None if release => Some(Alert::LateGrant { run: run.clone() }),
            alert => alert,
        };
        self.effects.extend(alert.map(Effect::Alert));
        if !release {
            self.conditions.granted_count += 1;
        }
        self.insert_claim(token, source, run, slot, ClaimState::from_grant(self.claim_policy(source)));
        self.handle_claim_event(token, ClaimEvent::Terms(terms), now);
        if release {
            // Before the grant, so that the payload is never prepared.
            self.handle_claim_event(token, ClaimEvent::Release { deadline: self.release_deadline() }, now);
        }
        self.handle_claim_event(token, ClaimEvent::Claimed(Ok(lease)), now);
    }

    pub(super) fn run_key(&self, source: SourceId, run: &Run) -> RunKey {
        RunKey { service: self.sources[source.index()].service, run: run.clone() }
    }

    /// True if the run was ours and is over here, whatever the queue says.
    pub(super) fn is_ended(&self, key: &RunKey) -> bool {
        self.resolved_runs.contains(key) || self.abandoned_runs.contains(key)
    }

    pub(super) fn claim_policy(&self, source: SourceId) -> claim::ClaimPolicy {
        let Capabilities { reports_cancellation, connection_scoped, fenced_reports, .. } =
            self.sources[source.index()].poller.capabilities;
        claim::ClaimPolicy {
            status_poll_interval: self.policy.claim.status_poll_interval.filter(|_| reports_cancellation),
            reports_cancellation,
            starts_in_one_step: connection_scoped,
            fenced_reports,
            ..self.policy.claim
        }
    }

    pub(super) fn insert_claim(
        &mut self,
        token: LocalToken,
        source: SourceId,
        run: Run,
        slot: Option<Slot>,
        state: ClaimState,
    ) {
        let key = self.run_key(source, &run);
        self.claims_by_run.insert(key, token);
        self.claims.insert(
            token,
            ClaimEntry {
                source,
                run,
                slot,
                is_launched: false,
                state,
                overlap_alerted: false,
                started_at: None,
                messages: Vec::new(),
                next_deadline: None,
            },
        );
    }

    pub(super) fn entry(&mut self, claim: LocalToken) -> &mut ClaimEntry {
        let Some(entry) = self.claims.get_mut(&claim) else { unreachable!("{claim:?} is not open") };
        entry
    }

    /// A call may return after the end of its claim; that is ignored.
    pub(super) fn on_claim_event(&mut self, claim: LocalToken, event: ClaimEvent, now: Instant) {
        let Some(entry) = self.claims.get(&claim) else { return };
        let (source, recovered) = (entry.source, entry.state.is_recovered());
        match event {
            // I12: a definite answer settles the messages.
            ClaimEvent::Claimed(Ok(_) | Err(Refusal::Gone)) if recovered => self.delete_messages_of(claim),
            // I25: a message would bring the run again. Its claim takes no other scope, so the refusal is transient.
            ClaimEvent::Claimed(Err(Refusal::Denied)) if recovered && self.has_messages(source) => {
                let answer = Err(Refusal::Retry { retry_after: None });
                return self.handle_claim_event(claim, ClaimEvent::Claimed(answer), now);
            }
            ClaimEvent::Claimed(_) if recovered => {}
            ClaimEvent::Claimed(Ok(_)) => self.on_grant(claim, source, now),
            ClaimEvent::Claimed(Err(refusal)) => self.on_claim_refused(claim, source, refusal, now),
            ClaimEvent::Prepared(Err(PrepareFailure::HostFault)) => self.on_host_fault(claim, source, now),
            ClaimEvent::Prepared(Err(PrepareFailure::ServiceDown)) => self.on_service_down(claim, source, now),
            ClaimEvent::Ended(verdict) => {
                self.alert_overlap(claim, now);
                match verdict {
                    Err(ExecuteFailure::HostFault) => self.on_host_fault(claim, source, now),
                    Err(ExecuteFailure::AccessDenied) => {
                        if self.sources[source.index()].poller.on_access_denied(now, &mut self.jitter) {
                            self.effects.push_back(Effect::Alert(Alert::AccessDenied { source }));
                        }
                    }
                    Err(ExecuteFailure::ServiceDown) => self.on_service_down(claim, source, now),
                    Ok(()) | Err(ExecuteFailure::Failed | ExecuteFailure::Intermittent | ExecuteFailure::Deferred) => {
                        self.record_success(claim, source)
                    }
                    Err(ExecuteFailure::Unavailable | ExecuteFailure::Internal) => {}
                }
            }
            // I34: while no further poll follows, a release waits for the poll in flight, which would return the
            // task. Where the next poll would return it too, waiting is useless.
            ClaimEvent::Command(CancelCommand::Release) if !self.is_claiming() => {
                self.await_own_poll(claim, source, now)
            }
            ClaimEvent::Command(_)
            | ClaimEvent::Prepared(_)
            | ClaimEvent::Uploaded(_)
            | ClaimEvent::Reported(_)
            | ClaimEvent::Reclaimed(_)
            | ClaimEvent::StatusChecked(_)
            | ClaimEvent::Lost
            | ClaimEvent::Release { .. }
            | ClaimEvent::PollStarted
            | ClaimEvent::PollEnded
            | ClaimEvent::Terms(_)
            | ClaimEvent::Tick => {}
        }
        self.handle_claim_event(claim, event, now);
    }

    /// True if polls return messages, and not claims.
    fn has_messages(&self, source: SourceId) -> bool {
        !self.sources[source.index()].poller.capabilities.long_poll
    }

    fn on_grant(&mut self, claim: LocalToken, source: SourceId, now: Instant) {
        let state = &mut self.sources[source.index()];
        state.has_accepted_claim = true;
        state.poller.on_claim_accepted();
        self.conditions.granted_count += 1;
        self.delete_messages_of(claim);
        if self.accepts_grants(source, now) {
            return;
        }
        let releasing = matches!(self.mode, Mode::Releasing { .. });
        let entry = self.entry(claim);
        let run = entry.run.clone();
        if entry.state.is_last_run() && !releasing {
            entry.state.forget_release();
            self.effects.push_back(Effect::Alert(Alert::LastRun { run }));
        } else {
            self.effects.push_back(Effect::Alert(Alert::LateGrant { run }));
            self.handle_claim_event(claim, ClaimEvent::Release { deadline: self.release_deadline() }, now);
        }
    }

    fn on_claim_refused(&mut self, claim: LocalToken, source: SourceId, refusal: Refusal, now: Instant) {
        let state = &mut self.sources[source.index()];
        match refusal {
            // I12: a definite answer about the task settles the message.
            Refusal::Gone => {
                state.poller.on_claim_accepted();
                self.delete_messages_of(claim);
            }
            Refusal::Rejected if state.has_accepted_claim => self.delete_messages_of(claim),
            Refusal::Rejected => self.drain(ExitReason::Misconfigured, now),
            Refusal::Denied => {
                let denied = state.poller.on_claim_refused(refusal, now, &mut self.jitter);
                self.on_denied(source, denied, now);
            }
            Refusal::Throttled { .. } => {
                state.poller.on_claim_refused(refusal, now, &mut self.jitter);
                self.effects.push_back(Effect::Alert(Alert::Throttled { source }));
            }
            Refusal::Retry { .. } | Refusal::Full | Refusal::Stale => {
                let before = state.poller.consecutive_claim_failures();
                state.poller.on_claim_refused(refusal, now, &mut self.jitter);
                let consecutive = state.poller.consecutive_claim_failures();
                if consecutive > before {
                    self.alert_repeated_failures(source, consecutive);
                }
            }
        }
    }

    pub(super) fn delete_messages_of(&mut self, claim: LocalToken) {
        for message in core::mem::take(&mut self.entry(claim).messages) {
            self.delete_message(message);
        }
    }

    /// An earlier event of a series may have closed the claim.
    pub(super) fn handle_claim_event(&mut self, claim: LocalToken, event: ClaimEvent, now: Instant) {
        let Some(entry) = self.claims.get_mut(&claim) else { return };
        let mut actions = Vec::new();
        entry.state.handle(event, now, &mut self.jitter, &mut actions);
        self.perform(claim, actions, now);
        if self.claims.contains_key(&claim) {
            self.set_timer(claim);
        }
    }

    fn set_timer(&mut self, claim: LocalToken) {
        let entry = self.entry(claim);
        let due = entry.state.next_deadline();
        if due == entry.next_deadline {
            return;
        }
        if let Some(at) = core::mem::replace(&mut entry.next_deadline, due) {
            self.timers.remove(&ClaimTimer { at, claim });
        }
        self.timers.extend(due.map(|at| ClaimTimer { at, claim }));
    }

    pub(super) fn fire_claim_timers(&mut self, now: Instant) {
        while let Some(timer) = self.timers.first().copied().filter(|timer| now >= timer.at) {
            self.timers.pop_first();
            self.entry(timer.claim).next_deadline = None;
            self.handle_claim_event(timer.claim, ClaimEvent::Tick, now);
        }
    }

    pub(super) fn perform(&mut self, claim: LocalToken, actions: Vec<ClaimAction>, now: Instant) {
        for action in actions {
            if matches!(action, ClaimAction::Execute | ClaimAction::Start) {
                self.entry(claim).started_at = Some(now);
            }
            if matches!(action, ClaimAction::Kill { .. }) {
                self.alert_overlap(claim, now);
            }
            self.effects.push_back(Effect::Claim(claim, action));
            if let ClaimAction::Close(end) = action {
                self.close_claim(claim, end);
            }
        }
    }

    /// A release waits for a poll in flight, which would return the task to this worker.
    fn await_own_poll(&mut self, claim: LocalToken, source: SourceId, now: Instant) {
        if self.sources[source.index()].poller.is_long_polling() {
            self.awaited_polls.insert(source);
            self.handle_claim_event(claim, ClaimEvent::PollStarted, now);
        }
    }

    fn record_success(&mut self, claim: LocalToken, source: SourceId) {
        if let Some(started) = self.claims[&claim].started_at {
            self.host_health.on_success(started);
            self.sources[source.index()].poller.on_ran(started);
        }
    }

    fn on_host_fault(&mut self, claim: LocalToken, source: SourceId, now: Instant) {
        if self.host_health.on_fault(now, &mut self.jitter) {
            let run = self.claims[&claim].run.clone();
            self.effects.push_back(Effect::Alert(Alert::HostUnhealthy { run }));
        }
        self.await_own_poll(claim, source, now);
    }

    /// A poll in flight would return the claim to this worker, which cannot run it.
    fn on_service_down(&mut self, claim: LocalToken, source: SourceId, now: Instant) {
        if self.sources[source.index()].availability == ServiceAvailability::Down {
            self.await_own_poll(claim, source, now);
        }
    }

    /// I7: a payload alive after its lease (a suspended host, a slow kill) may have overlapped with another worker's.
    fn alert_overlap(&mut self, claim: LocalToken, now: Instant) {
        let entry = self.entry(claim);
        let late = entry.state.lease().is_some_and(|lease| now >= lease.granted_until());
        if late && !core::mem::replace(&mut entry.overlap_alerted, true) {
            let run = entry.run.clone();
            self.effects.push_back(Effect::Alert(Alert::OverlapPossible { run }));
        }
    }

    /// Its slot is free for another task, unless too many are launched already: then it keeps it.
    pub(super) fn on_launched(&mut self, claim: LocalToken) {
        if self.launched >= self.policy.launched_max {
            return;
        }
        let Some(slot) = self.claims.get_mut(&claim).and_then(|entry| {
            entry.is_launched = entry.slot.is_some();
            entry.slot.take()
        }) else {
            return;
        };
        self.launched += 1;
        self.slots.release([slot]);
    }

    pub(super) fn on_cleanup_pending(&mut self, claim: LocalToken) {
        let run = self.claims[&claim].run.clone();
        self.effects.push_back(Effect::Alert(Alert::CleanupPending { run: run.clone() }));
        let before = self.cleanup_pending.insert(claim, PendingCleanup { run, slot: None });
        assert!(before.is_none(), "{claim:?} ended twice");
    }

    fn close_claim(&mut self, claim: LocalToken, end: ClaimEnd) {
        let Some(entry) = self.claims.remove(&claim) else { unreachable!("{claim:?} is closed twice") };
        let key = self.run_key(entry.source, &entry.run);
        self.claims_by_run.remove(&key);
        if let Some(at) = entry.next_deadline {
            self.timers.remove(&ClaimTimer { at, claim });
        }
        if entry.state.is_granted() || entry.state.is_recovered() {
            let is_resolved = matches!(end, ClaimEnd::Reported(_) | ClaimEnd::AlreadyResolved(_));
            if is_resolved { &mut self.resolved_runs } else { &mut self.abandoned_runs }.insert(&key);
        }
        self.launched -= u32::from(entry.is_launched);
        match self.cleanup_pending.get_mut(&claim) {
            // I26: the slot is not reused while processes may remain.
            Some(pending) => pending.slot = entry.slot,
            None => self.slots.release(entry.slot),
        }
        // Unsettled messages become visible again.
        for message in entry.messages {
            self.drop_message(message);
        }
    }
}
