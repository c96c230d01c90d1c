//! Claims between the queue's answers and the machine that keeps each one.

use alloc::collections::btree_map::Entry;
use alloc::vec::Vec;
use core::time::Duration;

use super::{Alert, Brought, Effect, Exit, Held, Overlap, Proof, Timer, Work, Worker};
use crate::domain::claim::{self, Act, End, Happening, Machine};
use crate::domain::fitness::News;
use crate::domain::id::{Deployment, Run, SourceId, Token};
use crate::domain::outcome::Verdict;
use crate::domain::refusal::Refusal;
use crate::domain::service::Serving;
use crate::domain::slots::Slot;
use crate::domain::time::Instant;

/// Where a claim that nobody sent a message about comes from.
pub(super) enum Origin {
    /// A poll of ours, with one of the slots that were taken for it, if one was left.
    Poll(Option<Slot>),
    /// An earlier life of this worker.
    EarlierLife,
}

impl Worker {
    pub(super) fn on_brought(
        &mut self,
        source: SourceId,
        brought: Brought,
        sent_at: Instant,
        origin: Origin,
        now: Instant,
    ) {
        let Brought { token, run, length } = brought;
        let (slot, alert) = match origin {
            Origin::Poll(Some(slot)) => (Some(slot), None),
            Origin::Poll(None) => (None, Some(Alert::Unasked { run: run.clone() })),
            Origin::EarlierLife => (None, Some(Alert::LeftOver { run: run.clone() })),
        };
        let work = self.work(source, &run);
        if self.by_run.contains_key(&work) || self.is_over(&work) {
            self.slots.give(slot);
            self.effects.push_back(Effect::Forget(token));
            return;
        }
        let hand_back = slot.is_none() || !self.takes(source);
        let late = || hand_back.then(|| Alert::Late { run: run.clone() });
        self.effects.extend(alert.or_else(late).map(Effect::Alert));
        if !hand_back {
            self.staying.granted();
        }
        self.hold(token, source, run, slot, Machine::brought(self.claim_policy(source)));
        if hand_back {
            // Told before the grant, so that the payload is never prepared.
            self.tell(token, Happening::HandBack { deadline: self.hand_back_deadline() }, now);
        }
        self.tell(token, Happening::Granted { sent_at, length }, now);
    }

    /// A run that this source speaks of, apart from those of other deployments.
    pub(super) fn work(&self, source: SourceId, run: &Run) -> Work {
        let feed = self.feeds.get(usize::from(source.0));
        let deployment = feed.map_or(Deployment(u16::MAX), |feed| feed.deployment);
        Work { deployment, run: run.clone() }
    }

    /// Whether a run was ours and is over here, whatever the queue makes of it.
    pub(super) fn is_over(&self, work: &Work) -> bool {
        self.ended.contains(work) || self.given_up.contains(work)
    }

    /// The rules for claims of this source.
    pub(super) fn claim_policy(&self, source: SourceId) -> claim::Policy {
        let tells = self.feeds.get(usize::from(source.0)).is_some_and(|feed| feed.poller.manner().tells_canceled);
        claim::Policy { check_every: self.policy.claim.check_every.filter(|_| tells), ..self.policy.claim }
    }

    /// Takes a claim in hand.
    pub(super) fn hold(&mut self, token: Token, source: SourceId, run: Run, slot: Option<Slot>, machine: Machine) {
        let work = self.work(source, &run);
        self.by_run.insert(work, token);
        self.held.insert(
            token,
            Held {
                source,
                run,
                slot,
                machine,
                overlap: Overlap::Unsaid,
                started: None,
                proof: Proof::Owed,
                messages: Vec::new(),
                due: None,
            },
        );
    }

    pub(super) fn on_claimed(
        &mut self,
        claim: Token,
        sent_at: Instant,
        answer: Result<Duration, Refusal>,
        now: Instant,
    ) {
        let Some(held) = self.held.get(&claim) else { return };
        let source = held.source;
        let Some(feed) = self.feeds.get_mut(usize::from(source.0)) else { return };
        match answer {
            Ok(length) => {
                feed.accepted = true;
                feed.poller.accepted();
                self.staying.granted();
                self.delete_messages_of(claim);
                if !self.takes(source) {
                    let run = self.held.get(&claim).map(|held| held.run.clone());
                    self.effects.extend(run.map(|run| Effect::Alert(Alert::Late { run })));
                    let deadline = self.hand_back_deadline();
                    self.tell(claim, Happening::HandBack { deadline }, now);
                }
                self.tell(claim, Happening::Granted { sent_at, length }, now);
            }
            // I12: a definite answer about the task settles the message.
            Err(Refusal::Gone) => {
                feed.poller.accepted();
                self.delete_messages_of(claim);
                self.close(claim, End::NotGranted);
            }
            Err(Refusal::Rejected) if feed.accepted => {
                self.delete_messages_of(claim);
                self.close(claim, End::NotGranted);
            }
            Err(Refusal::Rejected) => {
                self.close(claim, End::NotGranted);
                self.drain(Exit::Misconfigured, now);
            }
            Err(refusal @ (Refusal::Denied | Refusal::Throttled { .. })) => {
                let denied = feed.poller.hold(refusal, now, &mut self.jitter);
                self.close(claim, End::NotGranted);
                if refusal == Refusal::Denied {
                    self.on_denied(source, denied, now);
                } else {
                    self.effects.push_back(Effect::Alert(Alert::Throttled { source }));
                }
            }
            Err(Refusal::Retry { .. } | Refusal::Stale) => {
                let after = match answer {
                    Err(Refusal::Retry { after }) => after,
                    Ok(_) | Err(_) => None,
                };
                let before = feed.poller.claim_troubles();
                feed.poller.hold(Refusal::Retry { after }, now, &mut self.jitter);
                let in_a_row = feed.poller.claim_troubles();
                if in_a_row > before {
                    self.say_trouble(source, in_a_row);
                }
                self.tell(claim, Happening::Unanswered { after }, now);
            }
        }
    }

    pub(super) fn delete_messages_of(&mut self, claim: Token) {
        let messages = self.held.get_mut(&claim).map(|held| core::mem::take(&mut held.messages)).unwrap_or_default();
        for message in messages {
            self.delete(message);
        }
    }

    pub(super) fn tell(&mut self, claim: Token, happening: Happening, now: Instant) {
        let Some(held) = self.held.get_mut(&claim) else { return };
        let mut acts = Vec::new();
        held.machine.handle(happening, now, &mut self.jitter, &mut acts);
        self.perform(claim, acts, now);
        self.set_timer(claim);
    }

    fn set_timer(&mut self, claim: Token) {
        let Some(held) = self.held.get_mut(&claim) else { return };
        let due = held.machine.next_deadline();
        if due == held.due {
            return;
        }
        if let Some(at) = core::mem::replace(&mut held.due, due) {
            self.timers.remove(&Timer { at, claim });
        }
        self.timers.extend(due.map(|at| Timer { at, claim }));
    }

    /// Wakes the claims whose time has come.
    pub(super) fn tick_claims(&mut self, now: Instant) {
        while let Some(timer) = self.timers.first().copied().filter(|timer| now >= timer.at) {
            self.timers.pop_first();
            if let Some(held) = self.held.get_mut(&timer.claim) {
                held.due = None;
            }
            self.tell(timer.claim, Happening::Tick, now);
        }
    }

    pub(super) fn perform(&mut self, claim: Token, acts: Vec<Act>, now: Instant) {
        for act in acts {
            let effect = match act {
                Act::Request if self.held.get(&claim).is_some_and(|held| held.machine.is_left_over()) => {
                    Effect::TakeOver(claim)
                }
                Act::Request => Effect::Claim(claim),
                Act::Prepare => Effect::Prepare(claim),
                Act::Execute => {
                    if let Some(held) = self.held.get_mut(&claim) {
                        held.started = Some(now);
                    }
                    Effect::Execute(claim)
                }
                Act::Kill { cause, grace } => {
                    self.note_overlap(claim, now);
                    Effect::Kill { claim, cause, grace }
                }
                Act::Settle => Effect::Settle(claim),
                Act::Report { outcome, timeout } => Effect::Report { claim, outcome, timeout },
                Act::Reclaim { timeout } => Effect::Reclaim { claim, timeout },
                Act::Check => Effect::Check(claim),
                Act::Extended { lease_ends } => Effect::Extended { claim, lease_ends },
                Act::Close(end) => {
                    self.close(claim, end);
                    continue;
                }
            };
            self.effects.push_back(effect);
        }
    }

    /// I34. Where nothing more is asked for, what is handed back waits for the poll under way, which would bring it back; where
    /// the next poll would do so as well, there is nothing to wait for.
    pub(super) fn on_ordered(&mut self, claim: Token, order: claim::Order, now: Instant) {
        let Some(source) = self.held.get(&claim).map(|held| held.source) else { return };
        let polled = self.feeds.get(usize::from(source.0)).is_some_and(|feed| feed.poller.waiting_for_work());
        if polled && !self.asks() {
            self.awaited.insert(source);
            self.tell(claim, Happening::PollOut, now);
        }
        self.tell(claim, Happening::Ordered(order), now);
    }

    /// What the end of a payload says of the host.
    pub(super) fn judge_host(&mut self, claim: Token, verdict: Verdict, now: Instant) {
        match verdict {
            Verdict::Host => self.on_host_fault(claim, now),
            Verdict::Away => self.on_away(claim, now),
            Verdict::Completed | Verdict::Failed | Verdict::Intermittent => self.prove(claim),
            Verdict::Unavailable | Verdict::Internal => {}
        }
    }

    /// The host could run a payload.
    pub(super) fn prove(&mut self, claim: Token) {
        let capacity = self.slots.capacity();
        let Some(held) = self.held.get_mut(&claim) else { return };
        if let (Some(started), Proof::Owed) = (held.started, held.proof) {
            held.proof = Proof::Given;
            self.fitness.worked(started, capacity);
        }
    }

    /// The claim is handed back, and nothing is claimed for a while.
    pub(super) fn on_host_fault(&mut self, claim: Token, now: Instant) {
        let Some(held) = self.held.get(&claim) else { return };
        let (source, run) = (held.source, held.run.clone());
        if self.fitness.fault(now, &mut self.jitter) == News::First {
            self.effects.push_back(Effect::Alert(Alert::HostUnfit { run }));
        }
        if self.feeds.get(usize::from(source.0)).is_some_and(|feed| feed.poller.waiting_for_work()) {
            self.tell(claim, Happening::PollOut, now);
        }
    }

    /// The claim is handed back, since what runs its source's tasks is not there. A poll that is still under way would bring it
    /// back to where nobody can run it.
    pub(super) fn on_away(&mut self, claim: Token, now: Instant) {
        let Some(source) = self.held.get(&claim).map(|held| held.source) else { return };
        let Some(feed) = self.feeds.get(usize::from(source.0)) else { return };
        if feed.serving == Serving::Down && feed.poller.waiting_for_work() {
            self.awaited.insert(source);
            self.tell(claim, Happening::PollOut, now);
        }
    }

    /// I7: a payload still alive after its lease (a suspended host, a kill that took too long) may have run beside
    /// another worker's.
    pub(super) fn note_overlap(&mut self, claim: Token, now: Instant) {
        let Some(held) = self.held.get_mut(&claim) else { return };
        let late = held.machine.lease().is_some_and(|lease| now >= lease.deadline());
        if late && held.overlap == Overlap::Unsaid {
            held.overlap = Overlap::Said;
            self.effects.push_back(Effect::Alert(Alert::OverlapPossible { run: held.run.clone() }));
        }
    }

    pub(super) fn on_occupied(&mut self, claim: Token) {
        let Some(held) = self.held.get(&claim) else { return };
        if let Entry::Vacant(vacant) = self.occupied.entry(claim) {
            vacant.insert(None);
            self.effects.push_back(Effect::Alert(Alert::Occupied { run: held.run.clone() }));
        }
    }

    pub(super) fn close(&mut self, claim: Token, end: End) {
        let Some(held) = self.held.remove(&claim) else { return };
        let work = self.work(held.source, &held.run);
        self.by_run.remove(&work);
        if let Some(at) = held.due {
            self.timers.remove(&Timer { at, claim });
        }
        if held.machine.granted() || held.machine.is_left_over() {
            match end {
                End::Reported(_) | End::Superseded(_) => self.ended.insert(&work),
                End::Unreportable(_) | End::Lost(_) | End::Unconfirmed { .. } | End::NotGranted => {
                    self.given_up.insert(&work)
                }
            };
        }
        match self.occupied.get_mut(&claim) {
            // I26: nothing else is run in the place of what may still be there.
            Some(kept) => *kept = held.slot,
            None => self.slots.give(held.slot),
        }
        self.effects.push_back(Effect::Close { claim, run: held.run, end });
        // The messages were not settled: they become visible again.
        for message in held.messages {
            self.forget(message);
        }
    }
}
