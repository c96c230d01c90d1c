//! Test benches that drive the machines: time is a number, effects are a list.

use std::time::Duration;

use journeyman_domain::claim::{self, ClaimAction, ClaimEvent, ClaimState, RunTerms};
use journeyman_domain::id::{LocalToken, PriorityQueue, Run, ServiceId, SourceId, TaskId};
use journeyman_domain::jitter::Jitter;
use journeyman_domain::lease::Granted;
use journeyman_domain::outcome::{ExceptionReason, ExecuteFailure, Outcome};
use journeyman_domain::poll::Capabilities;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::time::Instant;
use journeyman_domain::worker::{
    Effect, Event, ExitPolicy, ExitReason, GrantedClaim, MinResources, OnTerminationNotice, OpenResult, PollResult,
    ReceivedMessage, RecoveryResult, SourceSpec, Worker, WorkerPolicy,
};

pub(crate) const LEASE: Duration = Duration::from_secs(1200);
pub(crate) const GRACE: Duration = Duration::from_secs(10);
pub(crate) const SHUTDOWN: Outcome = Outcome::Exception(ExceptionReason::WorkerShutdown);
/// More than [`GRACE`] and the time for a report.
pub(crate) const MARGIN: Duration = Duration::from_secs(15);
pub(crate) const RETRY: Refusal = Refusal::Retry { retry_after: None };
pub(crate) const PREPARED: ClaimEvent = ClaimEvent::Prepared(Ok(()));
pub(crate) const COMPLETED: ClaimEvent = ClaimEvent::Ended(Ok(()));
pub(crate) const FAILED: ClaimEvent = ClaimEvent::Ended(Err(ExecuteFailure::Failed));
pub(crate) const UPLOADED: ClaimEvent = ClaimEvent::Uploaded(claim::UploadStatus::Complete);
pub(crate) const REPORTED: ClaimEvent = ClaimEvent::Reported(Ok(()));
pub(crate) const RELEASE_CLAIM: ClaimEvent = ClaimEvent::Release { deadline: None };
/// The task is run again if it is released.
pub(crate) const RETRIED: RunTerms = RunTerms { deadline: None, retries_left: Some(5) };
/// The task ends if it is released.
pub(crate) const LAST_RUN: RunTerms = RunTerms { deadline: None, retries_left: Some(0) };
pub(crate) const DRAIN: Event = Event::Drain { deadline: None };
pub(crate) const RELEASE: Event = Event::Release { deadline: None };
pub(crate) const LEFT_TO_EXPIRE: ClaimAction =
    ClaimAction::Close(claim::ClaimEnd::Lost(claim::LossReason::ShutdownDeadline));
/// A claim request without a definite answer.
pub(crate) const UNANSWERED: ClaimEvent = ClaimEvent::Claimed(Err(RETRY));

/// Messages first, then claims; nothing optional.
pub(crate) const MESSAGES: Capabilities = Capabilities {
    long_poll: false,
    supports_recovery: false,
    reports_cancellation: false,
    connection_scoped: false,
    fenced_reports: false,
};
/// Claims straight from the poll, and all options.
pub(crate) const CLAIMS: Capabilities =
    Capabilities { long_poll: true, supports_recovery: true, reports_cancellation: true, ..MESSAGES };

pub(crate) fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) fn at(secs: u64) -> Instant {
    Instant::at(Duration::from_secs(secs))
}

pub(crate) fn run(name: &str) -> Run {
    Run { task: TaskId::parse(name).expect("a test's task id"), run: 0 }
}

pub(crate) fn claim_policy() -> claim::ClaimPolicy {
    claim::ClaimPolicy {
        termination_grace: GRACE,
        status_poll_interval: None,
        reports_cancellation: false,
        starts_in_one_step: false,
        fenced_reports: false,
    }
}

pub(crate) fn policy(capacity: u32) -> WorkerPolicy {
    WorkerPolicy {
        capacity,
        launched_max: 2,
        poll_interval: secs(1),
        claim: claim_policy(),
        dequeue_alert: 10,
        max_auth_failures: 5,
        drain_deadline: None,
        exit_policy: ExitPolicy::default(),
        min_resources: MinResources::default(),
        on_termination_notice: OnTerminationNotice::Finish { margin: MARGIN },
    }
}

/// One claim on the bench.
pub(crate) struct One {
    pub(crate) machine: ClaimState,
    pub(crate) now: Instant,
    jitter: Jitter,
}

impl One {
    /// A claim that was asked for at 0 s.
    pub(crate) fn requested() -> Self {
        let mut acts = Vec::new();
        let machine = ClaimState::requested(claim_policy(), &mut acts);
        assert_eq!(acts, [ClaimAction::Request]);
        Self { machine, now: at(0), jitter: Jitter::seeded(1) }
    }

    /// A claim granted at once for [`LEASE`], being prepared.
    pub(crate) fn preparing() -> Self {
        Self::preparing_under(claim_policy())
    }

    pub(crate) fn preparing_under(policy: claim::ClaimPolicy) -> Self {
        let mut one = Self { machine: ClaimState::from_grant(policy), now: at(0), jitter: Jitter::seeded(1) };
        let acts = one.happens(ClaimEvent::Claimed(Ok(Granted { sent_at: at(0), length: LEASE })));
        assert!(acts.contains(&ClaimAction::Prepare), "{acts:?}");
        one
    }

    pub(crate) fn executing() -> Self {
        let mut one = Self::preparing();
        assert_eq!(one.happens(PREPARED), [ClaimAction::Execute]);
        one
    }

    pub(crate) fn settling() -> Self {
        let mut one = Self::executing();
        assert_eq!(one.happens(COMPLETED), [ClaimAction::Upload]);
        one
    }

    pub(crate) fn reporting() -> Self {
        let mut one = Self::settling();
        let acts = one.happens(UPLOADED);
        assert!(matches!(acts[..], [ClaimAction::Report { .. }]), "{acts:?}");
        one
    }

    pub(crate) fn happens(&mut self, happening: ClaimEvent) -> Vec<ClaimAction> {
        let mut acts = Vec::new();
        self.machine.handle(happening, self.now, &mut self.jitter, &mut acts);
        acts
    }

    pub(crate) fn happens_at(&mut self, now: Instant, happening: ClaimEvent) -> Vec<ClaimAction> {
        self.now = now;
        self.happens(happening)
    }

    /// Lets time pass, waking the machine whenever it asks for it; reclaims are granted when asked for if `extended`.
    pub(crate) fn pass_to(&mut self, until: Instant, reclaims: Reclaims) -> Vec<ClaimAction> {
        let mut all = Vec::new();
        loop {
            let next = self.machine.next_deadline().unwrap_or(until).min(until).max(self.now);
            let acts = self.happens_at(next, ClaimEvent::Tick);
            let reclaim = acts.iter().any(|act| matches!(act, ClaimAction::Reclaim { .. }));
            all.extend(acts);
            let answer = match reclaims {
                Reclaims::Granted => Some(Ok(Granted { sent_at: next, length: LEASE })),
                Reclaims::Refused(refusal) => Some(Err(refusal)),
                Reclaims::Silent => None,
            };
            if let Some(answer) = answer.filter(|_| reclaim) {
                all.extend(self.happens(ClaimEvent::Reclaimed(answer)));
            }
            if next >= until {
                return all;
            }
        }
    }

    pub(crate) fn abandon_at(&self) -> Instant {
        self.machine.lease().expect("a granted claim").expires_at()
    }
}

/// What the queue says to every reclaim.
#[derive(Clone, Copy)]
pub(crate) enum Reclaims {
    Granted,
    Refused(Refusal),
    Silent,
}

/// A whole worker on the bench.
pub(crate) struct Bench {
    pub(crate) worker: Worker,
    pub(crate) now: Instant,
    tokens: u64,
}

impl Bench {
    pub(crate) fn new(policy: WorkerPolicy, sources: &[Capabilities]) -> Self {
        let places: Vec<_> =
            sources.iter().map(|manner| SourceSpec { capabilities: *manner, service: ServiceId(0) }).collect();
        Self::of(policy, &places)
    }

    /// Sources of these deployments.
    pub(crate) fn of(policy: WorkerPolicy, places: &[SourceSpec]) -> Self {
        Self { worker: Worker::new(policy, places, 7), now: at(0), tokens: 0 }
    }

    /// One source, opened.
    pub(crate) fn opened_with(policy: WorkerPolicy, sources: &[Capabilities]) -> Self {
        let mut bench = Self::new(policy, sources);
        bench.tick();
        bench.opened(0, 1);
        bench
    }

    /// One source of messages with so many priority queues, opened; its first poll is under way.
    pub(crate) fn messages(capacity: u32, queues: u16) -> Self {
        let mut bench = Self::new(policy(capacity), &[MESSAGES]);
        assert_eq!(bench.tick(), [Effect::Open(SourceId(0))]);
        let polls = bench.opened(0, queues);
        assert!(matches!(polls[..], [Effect::Poll { queue: PriorityQueue(0), .. }]), "{polls:?}");
        bench
    }

    /// One source of claims, opened and asked for the claims of a previous process; its first poll is under way.
    pub(crate) fn claims(capacity: u32) -> Self {
        let mut bench = Self::new(policy(capacity), &[CLAIMS]);
        bench.tick();
        let recover = bench.opened(0, 1);
        assert!(matches!(recover[..], [Effect::Recover { .. }]), "{recover:?}");
        let polls = bench.recovered(0, Ok(Vec::new()));
        assert!(matches!(polls[..], [Effect::Poll { .. }]), "{polls:?}");
        bench
    }

    pub(crate) fn token(&mut self) -> LocalToken {
        self.tokens += 1;
        LocalToken(self.tokens)
    }

    pub(crate) fn happens(&mut self, event: Event) -> Vec<Effect> {
        self.worker.handle(event, self.now);
        std::iter::from_fn(|| self.worker.next_effect()).collect()
    }

    pub(crate) fn tell(&mut self, claim: LocalToken, event: ClaimEvent) -> Vec<Effect> {
        self.happens(Event::Claim(claim, event))
    }

    /// A payload that is being stopped ends, its outcome is reported, and its log uploaded.
    pub(crate) fn stops(&mut self, claim: LocalToken) -> Vec<Effect> {
        self.tell(claim, FAILED);
        self.tell(claim, REPORTED);
        self.tell(claim, UPLOADED)
    }

    pub(crate) fn tick(&mut self) -> Vec<Effect> {
        self.happens(Event::Tick)
    }

    /// Lets `span` pass, waking the worker whenever it asks for it.
    pub(crate) fn pass(&mut self, span: Duration) -> Vec<Effect> {
        let until = self.now.plus(span);
        let mut all = Vec::new();
        for _ in 0..2_000 {
            self.now = self.worker.next_deadline().unwrap_or(until).min(until).max(self.now);
            all.extend(self.tick());
            if self.now >= until {
                return all;
            }
        }
        panic!("the worker wakes itself without end at {:?}", self.now);
    }

    /// Lets time pass second by second until such an effect appears, for ten minutes at most.
    pub(crate) fn pass_until(&mut self, wanted: impl Fn(&Effect) -> bool) -> Vec<Effect> {
        for _ in 0..600 {
            let effects = self.pass(secs(1));
            if effects.iter().any(&wanted) {
                return effects;
            }
        }
        panic!("it did not happen in ten minutes");
    }

    pub(crate) fn opened(&mut self, source: u16, queues: u16) -> Vec<Effect> {
        let answer = Ok(OpenResult { priority_queues: queues, usable_for: None });
        self.happens(Event::Opened { source: SourceId(source), sent_at: self.now, answer })
    }

    pub(crate) fn polled(&mut self, source: u16, answer: Result<PollResult, Refusal>) -> Vec<Effect> {
        self.happens(Event::Polled { source: SourceId(source), answer })
    }

    pub(crate) fn empty(&mut self) -> Vec<Effect> {
        self.polled(0, Ok(PollResult::default()))
    }

    pub(crate) fn hit(&mut self, messages: Vec<ReceivedMessage>) -> Vec<Effect> {
        self.polled(0, Ok(PollResult { messages, claims: Vec::new() }))
    }

    pub(crate) fn brought(&mut self, claims: Vec<GrantedClaim>) -> Vec<Effect> {
        self.polled(0, Ok(PollResult { messages: Vec::new(), claims }))
    }

    pub(crate) fn recovered(&mut self, source: u16, answer: Result<Vec<GrantedClaim>, Refusal>) -> Vec<Effect> {
        let answer = answer.map(|claims| RecoveryResult { claims, error: None, foreign_claims: 0 });
        self.happens(Event::Recovered { source: SourceId(source), answer })
    }

    pub(crate) fn seen(&mut self, id: &str, name: &str) -> ReceivedMessage {
        ReceivedMessage { token: self.token(), id: id.into(), dequeue_count: 1, run: Some(run(name)) }
    }

    pub(crate) fn grant(&mut self, name: &str) -> GrantedClaim {
        GrantedClaim {
            token: self.token(),
            run: run(name),
            lease: Granted { sent_at: self.now, length: LEASE },
            terms: RETRIED,
        }
    }

    /// A poll receives a message about a run; a claim that follows has the same token.
    pub(crate) fn receive(&mut self, id: &str, name: &str) -> (LocalToken, Vec<Effect>) {
        let seen = self.seen(id, name);
        (seen.token, self.hit(vec![seen]))
    }

    /// A poll returns a claim.
    pub(crate) fn granted(&mut self, name: &str) -> (LocalToken, Vec<Effect>) {
        let grant = self.grant(name);
        (grant.token, self.brought(vec![grant]))
    }

    /// A recovery returns a claim.
    pub(crate) fn recovers(&mut self, name: &str) -> (LocalToken, Vec<Effect>) {
        let grant = self.grant(name);
        (grant.token, self.recovered(0, Ok(vec![grant])))
    }

    pub(crate) fn claimed(&mut self, claim: LocalToken, answer: Result<Duration, Refusal>) -> Vec<Effect> {
        if answer.is_ok() {
            assert_eq!(self.tell(claim, ClaimEvent::Terms(RETRIED)), []);
        }
        self.tell(claim, ClaimEvent::Claimed(answer.map(|length| Granted { sent_at: self.now, length })))
    }

    pub(crate) fn deleted(&mut self, message: LocalToken, answer: Result<(), Refusal>) -> Vec<Effect> {
        self.happens(Event::Deleted { message, answer })
    }

    /// A message is received and its claim granted; answers with the claim, which is being prepared.
    pub(crate) fn preparing(&mut self, id: &str, name: &str) -> LocalToken {
        let (claim, effects) = self.receive(id, name);
        assert!(effects.contains(&Effect::Claim(claim, ClaimAction::Request)), "{effects:?}");
        let effects = self.claimed(claim, Ok(LEASE));
        assert!(effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)), "{effects:?}");
        claim
    }

    /// As [`Bench::preparing`], and its message is gone and its payload runs.
    pub(crate) fn executing(&mut self, id: &str, name: &str) -> LocalToken {
        let claim = self.preparing(id, name);
        self.deleted(claim, Ok(()));
        let effects = self.tell(claim, PREPARED);
        assert!(effects.contains(&Effect::Claim(claim, ClaimAction::Execute)), "{effects:?}");
        claim
    }

    /// Goes from an executing claim to its accepted report.
    pub(crate) fn completes(&mut self, claim: LocalToken) -> Vec<Effect> {
        let mut all = self.tell(claim, COMPLETED);
        all.extend(self.tell(claim, UPLOADED));
        all.extend(self.tell(claim, REPORTED));
        all
    }
}

/// True if one of the effects is such an action of a claim.
macro_rules! acts {
    ($effects:expr, $($action:tt)+) => {
        $effects.iter().any(|effect| matches!(effect, Effect::Claim(_, $($action)+)))
    };
}
pub(crate) use acts;

/// True if one of the effects matches.
macro_rules! has {
    ($effects:expr, $($pattern:tt)+) => {
        $effects.iter().any(|effect| matches!(effect, $($pattern)+))
    };
}
pub(crate) use has;

pub(crate) fn exits(effects: &[Effect]) -> Option<ExitReason> {
    effects.iter().find_map(|effect| if let Effect::Exit(exit) = effect { Some(*exit) } else { None })
}

/// How many claim requests are among them.
pub(crate) fn claims(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| matches!(effect, Effect::Claim(_, ClaimAction::Request))).count()
}

/// How many deletes are among them.
pub(crate) fn deletes(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| matches!(effect, Effect::Delete(_))).count()
}

/// How many polls are among them.
pub(crate) fn polls(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| matches!(effect, Effect::Poll { .. })).count()
}
