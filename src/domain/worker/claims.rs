//! Claims between the queue's answers and the machine that keeps each one.

use alloc::collections::btree_map::Entry;
use alloc::vec::Vec;
use core::time::Duration;

use super::{Alert, ClaimEntry, ClaimTimer, Effect, ExitReason, GrantedClaim, HostProof, OverlapAlert, RunKey, Worker};
use crate::domain::claim::{self, ClaimAction, ClaimEnd, ClaimEvent, ClaimState};
use crate::domain::host_health::FaultReport;
use crate::domain::id::{LocalToken, Run, ServiceId, SourceId};
use crate::domain::outcome::Verdict;
use crate::domain::refusal::Refusal;
use crate::domain::service_supervisor::ServiceAvailability;
use crate::domain::slots::Slot;
use crate::domain::time::Instant;

/// Where a claim that nobody sent a message about comes from.
pub(super) enum ClaimOrigin {
    /// A poll of ours, with one of the slots that were taken for it, if one was left.
    Poll(Option<Slot>),
    /// An earlier life of this worker.
    PreviousProcess,
}

impl Worker {
    pub(super) fn on_granted_claim(
        &mut self,
        source: SourceId,
        brought: GrantedClaim,
        sent_at: Instant,
        origin: ClaimOrigin,
        now: Instant,
    ) {
        let GrantedClaim { token, run, length } = brought;
        let (slot, alert) = match origin {
            ClaimOrigin::Poll(Some(slot)) => (Some(slot), None),
            ClaimOrigin::Poll(None) => (None, Some(Alert::UnexpectedGrant { run: run.clone() })),
            ClaimOrigin::PreviousProcess => (None, Some(Alert::RecoveredClaim { run: run.clone() })),
        };
        let work = self.run_key(source, &run);
        if self.claims_by_run.contains_key(&work) || self.is_ended(&work) {
            self.slots.release(slot);
            self.effects.push_back(Effect::DropMessage(token));
            return;
        }
        let hand_back = slot.is_none() || !self.accepts_grants(source);
        let late = || hand_back.then(|| Alert::LateGrant { run: run.clone() });
        self.effects.extend(alert.or_else(late).map(Effect::Alert));
        if !hand_back {
            self.lifecycle.count_granted();
        }
        self.insert_claim(token, source, run, slot, ClaimState::from_grant(self.claim_policy(source)));
        if hand_back {
            // Told before the grant, so that the payload is never prepared.
            self.handle_claim_event(token, ClaimEvent::Release { deadline: self.release_deadline() }, now);
        }
        self.handle_claim_event(token, ClaimEvent::Granted { sent_at, length }, now);
    }

    /// A run that this source speaks of, apart from those of other deployments.
    pub(super) fn run_key(&self, source: SourceId, run: &Run) -> RunKey {
        let feed = self.sources.get(usize::from(source.0));
        let deployment = feed.map_or(ServiceId(u16::MAX), |feed| feed.service);
        RunKey { service: deployment, run: run.clone() }
    }

    /// Whether a run was ours and is over here, whatever the queue makes of it.
    pub(super) fn is_ended(&self, work: &RunKey) -> bool {
        self.resolved_runs.contains(work) || self.abandoned_runs.contains(work)
    }

    /// The rules for claims of this source.
    pub(super) fn claim_policy(&self, source: SourceId) -> claim::ClaimPolicy {
        let tells =
            self.sources.get(usize::from(source.0)).is_some_and(|feed| feed.poller.capabilities().reports_cancellation);
        claim::ClaimPolicy {
            status_poll_interval: self.policy.claim.status_poll_interval.filter(|_| tells),
            ..self.policy.claim
        }
    }

    /// Takes a claim in hand.
    pub(super) fn insert_claim(
        &mut self,
        token: LocalToken,
        source: SourceId,
        run: Run,
        slot: Option<Slot>,
        machine: ClaimState,
    ) {
        let work = self.run_key(source, &run);
        self.claims_by_run.insert(work, token);
        self.claims.insert(
            token,
            ClaimEntry {
                source,
                run,
                slot,
                state: machine,
                overlap_alert: OverlapAlert::Pending,
                started_at: None,
                proof: HostProof::Pending,
                messages: Vec::new(),
                next_deadline: None,
            },
        );
    }

    pub(super) fn on_claimed(
        &mut self,
        claim: LocalToken,
        sent_at: Instant,
        answer: Result<Duration, Refusal>,
        now: Instant,
    ) {
        let Some(held) = self.claims.get(&claim) else { return };
        let source = held.source;
        let Some(feed) = self.sources.get_mut(usize::from(source.0)) else { return };
        match answer {
            Ok(length) => {
                feed.has_accepted_claim = true;
                feed.poller.on_claim_accepted();
                self.lifecycle.count_granted();
                self.delete_messages_of(claim);
                if !self.accepts_grants(source) {
                    let run = self.claims.get(&claim).map(|held| held.run.clone());
                    self.effects.extend(run.map(|run| Effect::Alert(Alert::LateGrant { run })));
                    let deadline = self.release_deadline();
                    self.handle_claim_event(claim, ClaimEvent::Release { deadline }, now);
                }
                self.handle_claim_event(claim, ClaimEvent::Granted { sent_at, length }, now);
            }
            // I12: a definite answer about the task settles the message.
            Err(Refusal::Gone) => {
                feed.poller.on_claim_accepted();
                self.delete_messages_of(claim);
                self.close_claim(claim, ClaimEnd::NotGranted);
            }
            Err(Refusal::Rejected) if feed.has_accepted_claim => {
                self.delete_messages_of(claim);
                self.close_claim(claim, ClaimEnd::NotGranted);
            }
            Err(Refusal::Rejected) => {
                self.close_claim(claim, ClaimEnd::NotGranted);
                self.drain(ExitReason::Misconfigured, now);
            }
            Err(refusal @ (Refusal::Denied | Refusal::Throttled { .. })) => {
                let denied = feed.poller.on_claim_refused(refusal, now, &mut self.jitter);
                self.close_claim(claim, ClaimEnd::NotGranted);
                if refusal == Refusal::Denied {
                    self.on_denied(source, denied, now);
                } else {
                    self.effects.push_back(Effect::Alert(Alert::Throttled { source }));
                }
            }
            Err(Refusal::Retry { .. } | Refusal::Stale) => {
                let after = match answer {
                    Err(Refusal::Retry { retry_after: after }) => after,
                    Ok(_) | Err(_) => None,
                };
                let before = feed.poller.consecutive_claim_failures();
                feed.poller.on_claim_refused(Refusal::Retry { retry_after: after }, now, &mut self.jitter);
                let in_a_row = feed.poller.consecutive_claim_failures();
                if in_a_row > before {
                    self.alert_repeated_failures(source, in_a_row);
                }
                self.handle_claim_event(claim, ClaimEvent::RequestFailed { retry_after: after }, now);
            }
        }
    }

    pub(super) fn delete_messages_of(&mut self, claim: LocalToken) {
        let messages = self.claims.get_mut(&claim).map(|held| core::mem::take(&mut held.messages)).unwrap_or_default();
        for message in messages {
            self.delete_message(message);
        }
    }

    pub(super) fn handle_claim_event(&mut self, claim: LocalToken, happening: ClaimEvent, now: Instant) {
        let Some(held) = self.claims.get_mut(&claim) else { return };
        let mut acts = Vec::new();
        held.state.handle(happening, now, &mut self.jitter, &mut acts);
        self.perform(claim, acts, now);
        self.set_timer(claim);
    }

    fn set_timer(&mut self, claim: LocalToken) {
        let Some(held) = self.claims.get_mut(&claim) else { return };
        let due = held.state.next_deadline();
        if due == held.next_deadline {
            return;
        }
        if let Some(at) = core::mem::replace(&mut held.next_deadline, due) {
            self.timers.remove(&ClaimTimer { at, claim });
        }
        self.timers.extend(due.map(|at| ClaimTimer { at, claim }));
    }

    /// Wakes the claims whose time has come.
    pub(super) fn fire_claim_timers(&mut self, now: Instant) {
        while let Some(timer) = self.timers.first().copied().filter(|timer| now >= timer.at) {
            self.timers.pop_first();
            if let Some(held) = self.claims.get_mut(&timer.claim) {
                held.next_deadline = None;
            }
            self.handle_claim_event(timer.claim, ClaimEvent::Tick, now);
        }
    }

    pub(super) fn perform(&mut self, claim: LocalToken, acts: Vec<ClaimAction>, now: Instant) {
        for act in acts {
            let effect = match act {
                ClaimAction::Request if self.claims.get(&claim).is_some_and(|held| held.state.is_recovered()) => {
                    Effect::TakeOver(claim)
                }
                ClaimAction::Request => Effect::Claim(claim),
                ClaimAction::Prepare => Effect::Prepare(claim),
                ClaimAction::Execute => {
                    if let Some(held) = self.claims.get_mut(&claim) {
                        held.started_at = Some(now);
                    }
                    Effect::Execute(claim)
                }
                ClaimAction::Kill { cause, grace } => {
                    self.alert_overlap(claim, now);
                    Effect::Kill { claim, cause, grace }
                }
                ClaimAction::Upload => Effect::Upload(claim),
                ClaimAction::Report { outcome, timeout } => Effect::Report { claim, outcome, timeout },
                ClaimAction::Reclaim { timeout } => Effect::Reclaim { claim, timeout },
                ClaimAction::CheckStatus => Effect::CheckStatus(claim),
                ClaimAction::UpdateLease { expires_at: lease_ends } => {
                    Effect::UpdateLease { claim, expires_at: lease_ends }
                }
                ClaimAction::Close(end) => {
                    self.close_claim(claim, end);
                    continue;
                }
            };
            self.effects.push_back(effect);
        }
    }

    /// I34. Where nothing more is asked for, what is handed back waits for the poll under way, which would bring it back; where
    /// the next poll would do so as well, there is nothing to wait for.
    pub(super) fn on_cancel_command(&mut self, claim: LocalToken, order: claim::CancelCommand, now: Instant) {
        let Some(source) = self.claims.get(&claim).map(|held| held.source) else { return };
        let polled = self.sources.get(usize::from(source.0)).is_some_and(|feed| feed.poller.is_long_polling());
        if polled && !self.is_claiming() {
            self.awaited_polls.insert(source);
            self.handle_claim_event(claim, ClaimEvent::PollStarted, now);
        }
        self.handle_claim_event(claim, ClaimEvent::Command(order), now);
    }

    /// What the end of a payload says of the host.
    pub(super) fn assess_host(&mut self, claim: LocalToken, verdict: Verdict, now: Instant) {
        match verdict {
            Verdict::HostFault => self.on_host_fault(claim, now),
            Verdict::ServiceDown => self.on_service_down(claim, now),
            Verdict::Completed | Verdict::Failed | Verdict::Intermittent => self.record_host_success(claim),
            Verdict::Unavailable | Verdict::Internal => {}
        }
    }

    /// The host could run a payload.
    pub(super) fn record_host_success(&mut self, claim: LocalToken) {
        let capacity = self.slots.capacity();
        let Some(held) = self.claims.get_mut(&claim) else { return };
        if let (Some(started), HostProof::Pending) = (held.started_at, held.proof) {
            held.proof = HostProof::Counted;
            self.host_health.on_success(started, capacity);
        }
    }

    /// The claim is handed back, and nothing is claimed for a while.
    pub(super) fn on_host_fault(&mut self, claim: LocalToken, now: Instant) {
        let Some(held) = self.claims.get(&claim) else { return };
        let (source, run) = (held.source, held.run.clone());
        if self.host_health.on_fault(now, &mut self.jitter) == FaultReport::First {
            self.effects.push_back(Effect::Alert(Alert::HostUnhealthy { run }));
        }
        if self.sources.get(usize::from(source.0)).is_some_and(|feed| feed.poller.is_long_polling()) {
            self.handle_claim_event(claim, ClaimEvent::PollStarted, now);
        }
    }

    /// The claim is handed back, since what runs its source's tasks is not there. A poll that is still under way would bring it
    /// back to where nobody can run it.
    pub(super) fn on_service_down(&mut self, claim: LocalToken, now: Instant) {
        let Some(source) = self.claims.get(&claim).map(|held| held.source) else { return };
        let Some(feed) = self.sources.get(usize::from(source.0)) else { return };
        if feed.availability == ServiceAvailability::Down && feed.poller.is_long_polling() {
            self.awaited_polls.insert(source);
            self.handle_claim_event(claim, ClaimEvent::PollStarted, now);
        }
    }

    /// I7: a payload still alive after its lease (a suspended host, a kill that took too long) may have run beside
    /// another worker's.
    pub(super) fn alert_overlap(&mut self, claim: LocalToken, now: Instant) {
        let Some(held) = self.claims.get_mut(&claim) else { return };
        let late = held.state.lease().is_some_and(|lease| now >= lease.granted_until());
        if late && held.overlap_alert == OverlapAlert::Pending {
            held.overlap_alert = OverlapAlert::Raised;
            self.effects.push_back(Effect::Alert(Alert::OverlapPossible { run: held.run.clone() }));
        }
    }

    pub(super) fn on_cleanup_pending(&mut self, claim: LocalToken) {
        let Some(held) = self.claims.get(&claim) else { return };
        if let Entry::Vacant(vacant) = self.cleanup_pending.entry(claim) {
            vacant.insert(None);
            self.effects.push_back(Effect::Alert(Alert::CleanupPending { run: held.run.clone() }));
        }
    }

    pub(super) fn close_claim(&mut self, claim: LocalToken, end: ClaimEnd) {
        let Some(held) = self.claims.remove(&claim) else { return };
        let work = self.run_key(held.source, &held.run);
        self.claims_by_run.remove(&work);
        if let Some(at) = held.next_deadline {
            self.timers.remove(&ClaimTimer { at, claim });
        }
        if held.state.is_granted() || held.state.is_recovered() {
            match end {
                ClaimEnd::Reported(_) | ClaimEnd::AlreadyResolved(_) => self.resolved_runs.insert(&work),
                ClaimEnd::ReportRejected(_)
                | ClaimEnd::Lost(_)
                | ClaimEnd::Unconfirmed { .. }
                | ClaimEnd::NotGranted => self.abandoned_runs.insert(&work),
            };
        }
        match self.cleanup_pending.get_mut(&claim) {
            // I26: nothing else is run in the place of what may still be there.
            Some(kept) => *kept = held.slot,
            None => self.slots.release(held.slot),
        }
        self.effects.push_back(Effect::Close { claim, run: held.run, end });
        // The messages were not settled: they become visible again.
        for message in held.messages {
            self.drop_message(message);
        }
    }
}
