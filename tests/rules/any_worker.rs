//! The whole worker under arbitrary answers in arbitrary order: every slot is released, every claim is settled, every
//! requested wake-up changes something, and a worker that is stopped ends.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use journeyman_domain::claim::{ClaimAction, ClaimEvent, LossReason, RunTerms};
use journeyman_domain::host_health::ProbeResult;
use journeyman_domain::id::{LocalToken, Run, ServiceId, SourceId, TaskId};
use journeyman_domain::jitter::Jitter;
use journeyman_domain::lease::Granted;
use journeyman_domain::outcome::{ExceptionReason, ExecuteFailure, Outcome, PrepareFailure};
use journeyman_domain::poll::Capabilities;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::time::Instant;
use journeyman_domain::worker::{
    Alert, Effect, Event, GrantedClaim, OpenResult, PollResult, ReceivedMessage, RecoveredClaim, RecoveryResult,
    SourceSpec, Worker, WorkerPolicy,
};

use crate::rules::support::{CLAIMS, DRAIN, MESSAGES, UPLOADED, policy};

const CAPACITY: u32 = 3;

/// A call under way.
#[derive(Debug, Clone)]
struct Call {
    effect: Effect,
    sent_at: Instant,
}

/// The world around a worker; `dice` decides everything it does.
struct World {
    worker: Worker,
    dice: Jitter,
    now: Instant,
    calls: Vec<Call>,
    tokens: u64,
    /// Receptions that were not forgotten.
    messages: BTreeSet<LocalToken>,
    /// Claims that were neither forgotten nor closed.
    claims: BTreeSet<LocalToken>,
    /// A deadline was given: what is not settled by then stays so.
    hurried: bool,
    /// Slots that wait in a poll, by source.
    polling: BTreeMap<SourceId, u32>,
    /// Claims that hold no slot.
    slotless: BTreeSet<Run>,
    executed: BTreeSet<Run>,
    /// The outcomes that a previous process had left to report.
    recovered: BTreeSet<Run>,
    exited: bool,
    calm: bool,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = Jitter::seeded(seed);
        let policy = WorkerPolicy {
            drain_deadline: dice.bits().is_multiple_of(2).then_some(Duration::from_secs(40)),
            max_auth_failures: 50,
            ..policy(CAPACITY)
        };
        let mixed = Capabilities { supports_recovery: true, ..MESSAGES };
        let sources = [MESSAGES, CLAIMS, mixed];
        let sources = &sources[..1 + usize::try_from(dice.bits() % 3).expect("small")];
        let place = |manner: &Capabilities| SourceSpec { capabilities: *manner, service: ServiceId(0) };
        let places: Vec<_> = sources.iter().map(place).collect();
        Self {
            worker: Worker::new(policy, &places, seed),
            dice,
            now: Instant::ORIGIN,
            calls: Vec::new(),
            tokens: 0,
            messages: BTreeSet::new(),
            claims: BTreeSet::new(),
            hurried: false,
            polling: BTreeMap::new(),
            slotless: BTreeSet::new(),
            executed: BTreeSet::new(),
            recovered: BTreeSet::new(),
            exited: false,
            calm: false,
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.dice.bits() % n
    }

    fn happens(&mut self, event: Event) -> bool {
        self.worker.handle(event, self.now);
        let mut any = false;
        while let Some(effect) = self.worker.next_effect() {
            any = true;
            self.sees(effect);
        }
        self.slotless.retain(|run| self.worker.claims().any(|view| view.run == run));
        self.slots_add_up();
        any
    }

    fn sees(&mut self, effect: Effect) {
        assert!(!self.exited, "after the exit: {effect:?}");
        match &effect {
            Effect::Poll { source, max, .. } => {
                assert!(*max > 0 && !self.worker.is_stopping(), "{effect:?}");
                assert_eq!(self.polling.insert(*source, u32::from(*max)), None, "two polls at once");
            }
            Effect::Claim(token, ClaimAction::Request) => {
                assert!(self.messages.contains(token) || self.claims.contains(token), "{effect:?} of what is over");
                self.claims.insert(*token);
            }
            Effect::Delete(token) => assert!(self.messages.contains(token), "{effect:?} of what is forgotten"),
            Effect::DropMessage(token) => {
                if !self.messages.remove(token) {
                    assert!(self.claims.remove(token), "{effect:?} twice");
                }
                self.calls.retain(|call| call.effect != Effect::Delete(*token));
                return;
            }
            Effect::Claim(claim, ClaimAction::Close(_)) => {
                assert!(self.claims.remove(claim), "{effect:?} twice");
                self.calls.retain(|call| subject(&call.effect) != Some(*claim));
                return;
            }
            Effect::Alert(Alert::UnexpectedGrant { run } | Alert::RecoveredClaim { run }) => {
                self.slotless.insert(run.clone());
                return;
            }
            Effect::Claim(token, ClaimAction::Execute | ClaimAction::Start) => {
                let run = self.worker.claims().find(|view| view.claim == *token).map(|view| view.run.clone());
                assert!(self.executed.insert(run.expect("a held claim")), "I25: executed twice");
            }
            Effect::Claim(claim, ClaimAction::Kill { .. }) => {
                // The preparation or the payload is what answers.
                let claim = *claim;
                let lives = |call: &Call| {
                    call.effect == Effect::Claim(claim, ClaimAction::Prepare)
                        || call.effect == Effect::Claim(claim, ClaimAction::Execute)
                        || call.effect == Effect::Claim(claim, ClaimAction::Start)
                };
                for call in self.calls.iter_mut().filter(|call| lives(call)) {
                    call.effect = effect.clone();
                }
                return;
            }
            Effect::ClosePoll(source) => return assert!(self.polling.contains_key(source), "no poll is open"),
            Effect::Alert(_) | Effect::Claim(_, ClaimAction::UpdateLease(_)) => return,
            Effect::Exit(_) => {
                self.exited = true;
                return;
            }
            Effect::Claim(token, ClaimAction::Prepare) => {
                let run = self.worker.claims().find(|view| view.claim == *token).map(|view| view.run.clone());
                assert!(
                    !self.recovered.contains(&run.expect("a held claim")),
                    "I28: {effect:?} of a previous process's"
                );
            }
            Effect::Claim(token, ClaimAction::TakeOver) => {
                assert!(self.claims.contains(token), "{effect:?} of what is over")
            }
            Effect::Open(_) | Effect::Recover { .. } | Effect::ProbeHost | Effect::Claim(..) => {}
        }
        self.calls.push(Call { effect, sent_at: self.now });
    }

    /// I8
    fn slots_add_up(&self) {
        if self.exited {
            return;
        }
        let held = self.worker.claims().filter(|view| !self.slotless.contains(view.run)).count();
        let polling: u32 = self.polling.values().sum();
        let held = u32::try_from(held).expect("few");
        assert_eq!(self.worker.free_slots() + polling + held, CAPACITY, "{polling} in polls, {held} held");
    }

    fn refusal(&mut self) -> Refusal {
        let after = (self.below(4) == 0).then(|| Duration::from_secs(self.dice.bits() % 60));
        match self.below(9) {
            0 => Refusal::Gone,
            1 if !self.calm => Refusal::Rejected,
            2 => Refusal::Denied,
            3 => Refusal::Stale,
            4 => Refusal::Throttled { retry_after: after },
            _ => Refusal::Retry { retry_after: after },
        }
    }

    fn answer<T>(&mut self, value: T) -> Result<T, Refusal> {
        if self.calm || self.below(3) > 0 { Ok(value) } else { Err(self.refusal()) }
    }

    fn run(&mut self) -> Run {
        let task = TaskId::parse(&format!("T{}", self.below(30))).expect("a task id");
        Run { task, run: 0 }
    }

    fn token(&mut self) -> LocalToken {
        self.tokens += 1;
        LocalToken(self.tokens)
    }

    fn length(&mut self) -> Duration {
        Duration::from_secs(self.below(120))
    }

    fn poll_result(&mut self, long_poll: bool, max: u64) -> PollResult {
        let mut polled = PollResult::default();
        if self.calm {
            return polled;
        }
        for _ in 0..self.below(max + 2) {
            if long_poll {
                let run = self.run();
                polled.claims.push(self.bring(run));
            } else {
                let run = (self.below(8) > 0).then(|| self.run());
                let id = format!("m{}", self.below(12)).into();
                let token = self.token();
                self.messages.insert(token);
                polled.messages.push(ReceivedMessage {
                    token,
                    id,
                    dequeue_count: 9 + u32::from(self.below(4) > 2),
                    run,
                });
            }
        }
        polled
    }

    fn bring(&mut self, run: Run) -> GrantedClaim {
        let token = self.token();
        self.claims.insert(token);
        let terms = self.terms();
        GrantedClaim { token, run, lease: Granted { sent_at: self.now, length: self.length() }, terms }
    }

    fn terms(&mut self) -> RunTerms {
        let retries_left = [None, Some(0), Some(1), Some(2)][usize::try_from(self.below(4)).expect("small")];
        RunTerms { deadline: None, retries_left }
    }

    /// Half of the workers recover claims of a previous process.
    fn remembers(&mut self) {
        let runs: BTreeSet<Run> = (0..self.below(8).saturating_sub(3)).map(|_| self.run()).collect();
        let mut left = Vec::new();
        for run in runs {
            let GrantedClaim { token, run, .. } = self.bring(run);
            self.slotless.insert(run.clone());
            self.recovered.insert(run.clone());
            let outcome = if self.below(2) == 0 {
                Outcome::Completed
            } else {
                Outcome::Exception(ExceptionReason::WorkerShutdown)
            };
            left.push(RecoveredClaim { token, source: SourceId(0), run, outcome });
        }
        self.happens(Event::ClaimsRecovered(left));
    }

    /// Answers one call, whichever.
    fn reply(&mut self) {
        if self.calls.is_empty() {
            return;
        }
        let index = usize::try_from(self.below(self.calls.len() as u64)).expect("few");
        let Call { effect, sent_at } = self.calls.swap_remove(index);
        let length = self.length();
        let event = match effect {
            Effect::Open(source) => {
                let lanes = OpenResult { priority_queues: 2, usable_for: (self.below(2) == 0).then_some(length) };
                Event::Opened { source, sent_at, answer: self.answer(lanes) }
            }
            Effect::Poll { source, max, .. } => {
                self.polling.remove(&source);
                let polled = self.poll_result(source == SourceId(1), u64::from(max));
                let answer = if polled == PollResult::default() { self.answer(polled) } else { Ok(polled) };
                Event::Polled { source, answer }
            }
            Effect::Recover { source, known_runs: held, .. } => {
                let asked = if self.calm { 0 } else { self.below(3) };
                let mut runs: BTreeSet<_> = (0..asked).map(|_| self.run()).collect();
                runs.retain(|run| !held.contains(run));
                let answer = self.answer(());
                let missed = (!self.calm && self.below(4) == 0).then(|| self.refusal());
                let answer = answer.map(|()| RecoveryResult {
                    claims: runs.into_iter().map(|run| self.bring(run)).collect(),
                    error: missed,
                    foreign_claims: 0,
                });
                Event::Recovered { source, answer }
            }
            Effect::Claim(claim, ClaimAction::Request | ClaimAction::TakeOver) => {
                let terms = self.terms();
                self.happens(Event::Claim(claim, ClaimEvent::Terms(terms)));
                Event::Claim(claim, ClaimEvent::Claimed(self.answer(Granted { sent_at, length })))
            }
            Effect::Delete(message) => Event::Deleted { message, answer: self.answer(()) },
            Effect::Claim(claim, ClaimAction::Prepare) => {
                let unfit = !self.calm && self.below(8) == 0;
                let answer = match self.below(5) {
                    0 if unfit => Err(PrepareFailure::HostFault),
                    0 => Err(PrepareFailure::Malformed),
                    _ => Ok(()),
                };
                Event::Claim(claim, ClaimEvent::Prepared(answer))
            }
            Effect::Claim(claim, ClaimAction::Execute | ClaimAction::Start | ClaimAction::Kill { .. }) => {
                let unfit = !self.calm && self.below(20) == 0;
                Event::Claim(claim, ClaimEvent::Ended(if unfit { Err(ExecuteFailure::HostFault) } else { Ok(()) }))
            }
            Effect::ProbeHost => {
                let unfit = !self.calm && self.below(2) == 0;
                Event::HostProbed(if unfit { ProbeResult::Unhealthy } else { ProbeResult::Healthy })
            }
            Effect::Claim(claim, ClaimAction::Upload) => Event::Claim(claim, UPLOADED),
            Effect::Claim(claim, ClaimAction::Report { .. }) => {
                Event::Claim(claim, ClaimEvent::Reported(self.answer(())))
            }
            Effect::Claim(claim, ClaimAction::Reclaim { .. }) => {
                Event::Claim(claim, ClaimEvent::Reclaimed(self.answer(Granted { sent_at, length })))
            }
            Effect::Claim(claim, ClaimAction::CheckStatus) => {
                let canceled = self.below(4) == 0;
                let loss = canceled.then_some(LossReason::Canceled);
                Event::Claim(claim, ClaimEvent::StatusChecked(self.answer(loss)))
            }
            Effect::DropMessage(_)
            | Effect::ClosePoll(_)
            | Effect::Claim(_, ClaimAction::UpdateLease(_) | ClaimAction::Close(_))
            | Effect::Alert(_)
            | Effect::Exit(_) => {
                return;
            }
        };
        self.happens(event);
    }

    fn wake(&mut self) {
        let Some(due) = self.worker.next_deadline() else { return };
        self.now = self.now.max(due);
        let acted = self.happens(Event::Tick);
        let next = self.worker.next_deadline();
        assert!(next.is_none_or(|next| next > self.now), "due again at once at {:?}, acted: {acted}", self.now);
    }

    fn order(&mut self) {
        let deadline = (self.below(2) == 0).then(|| self.now.plus(Duration::from_secs(self.dice.bits() % 60)));
        let order = self.below(3);
        self.hurried |= matches!(order, 1 | 2) && deadline.is_some();
        let event = match order {
            0 => DRAIN,
            1 => Event::Release { deadline },
            _ => Event::TerminationNotice { deadline },
        };
        self.happens(event);
    }
}

fn subject(effect: &Effect) -> Option<LocalToken> {
    if let Effect::Claim(claim, _) = effect { Some(*claim) } else { None }
}

fn lives(seed: u64) {
    let mut world = World::new(seed);
    world.remembers();
    world.happens(Event::Tick);
    for _ in 0..400 {
        if world.exited {
            return;
        }
        match world.below(20) {
            0..=11 => world.reply(),
            12..=17 => world.wake(),
            18 => {
                world.now = world.now.plus(Duration::from_millis(world.dice.bits() % 20_000));
                world.happens(Event::Tick);
            }
            _ if world.below(12) == 0 => world.order(),
            _ => {}
        }
    }
    // The faults end: everything that is under way is answered, and the worker is stopped.
    world.calm = true;
    world.happens(DRAIN);
    for _ in 0..2_000 {
        if world.exited {
            assert_eq!(world.worker.claims().count(), 0);
            assert_eq!(world.worker.next_deadline(), None);
            assert!(world.hurried || world.messages.is_empty(), "never settled: {:?}", world.messages);
            assert!(world.claims.is_empty(), "never closed: {:?}", world.claims);
            return;
        }
        if world.calls.is_empty() { world.wake() } else { world.reply() }
    }
    panic!("it never exits: {:?}, {:?}", world.worker, world.calls);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_worker_keeps_its_slots_never_spins_and_always_goes(seed in any::<u64>()) {
        lives(seed);
    }
}
