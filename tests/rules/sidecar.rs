//! The sidecar of a source: the worker claims for it only while it is up.

use std::time::Duration;

use journeyman_domain::service_supervisor::{
    Effect, Event, HealthCheckResult, ManagedBy, RESTART_BACKOFF, STABLE_AFTER, ServiceAvailability, ServicePolicy,
    ServiceSupervisor, StopReason,
};
use journeyman_domain::time::Instant;

use journeyman_domain::claim::{ClaimAction, ClaimEvent};
use journeyman_domain::id::SourceId;
use journeyman_domain::outcome::{ExceptionReason, Outcome, PrepareFailure};
use journeyman_domain::poll::Capabilities;
use journeyman_domain::worker::{ClaimingBlocked, ClaimingState, Effect as WorkerEffect, Event as WorkerEvent};

use crate::rules::support::{Bench as WorkerBench, CLAIMS, MESSAGES, UPLOADED, policy, polls, secs};

const POLICY: ServicePolicy = ServicePolicy {
    managed_by: ManagedBy::Worker,
    startup_timeout: Duration::from_secs(30),
    startup_check_interval: Duration::from_millis(100),
    health_interval: Duration::from_secs(5),
    failures_max: 3,
};

struct Bench {
    service: ServiceSupervisor,
    now: Instant,
}

impl Bench {
    fn new() -> (Self, Vec<Effect>) {
        let now = Instant::ORIGIN.plus(secs(1000));
        let mut bench = Self { service: ServiceSupervisor::new(POLICY, 7, now), now };
        let effects = bench.happens(Event::Tick);
        (bench, effects)
    }

    /// One that is well.
    fn well() -> Self {
        let (mut bench, effects) = Self::new();
        assert_eq!(effects, [Effect::Start]);
        assert_eq!(bench.happens(Event::Started), [Effect::CheckHealth]);
        assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Healthy)), [Effect::Up]);
        bench
    }

    fn happens(&mut self, event: Event) -> Vec<Effect> {
        self.service.handle(event, self.now);
        std::iter::from_fn(|| self.service.next_effect()).collect()
    }

    /// Lets the time pass until something is to be done; how long that was, and what.
    fn passes(&mut self) -> (Duration, Vec<Effect>) {
        let from = self.now;
        self.now = self.service.next_deadline().expect("something is due");
        (self.now.since(from), self.happens(Event::Tick))
    }
}

#[test]
fn a_service_is_started_at_once_and_up_when_it_answers() {
    let (mut bench, effects) = Bench::new();
    assert_eq!(effects, [Effect::Start]);
    assert_eq!(bench.service.next_deadline(), None, "nothing but the answer is waited for");
    assert_eq!(bench.happens(Event::Started), [Effect::CheckHealth]);
    assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Unhealthy)), []);
    assert_eq!(bench.passes(), (POLICY.startup_check_interval, vec![Effect::CheckHealth]));
    assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Healthy)), [Effect::Up]);
    assert_eq!(bench.passes(), (POLICY.health_interval, vec![Effect::CheckHealth]));
    assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Healthy)), []);
}

#[test]
fn one_that_never_answers_is_ended_and_started_again() {
    let (mut bench, _) = Bench::new();
    let from = bench.now;
    assert_eq!(bench.happens(Event::Started), [Effect::CheckHealth]);
    let ended = loop {
        match bench.passes().1.as_slice() {
            [Effect::CheckHealth] => assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Unhealthy)), []),
            [Effect::Stop(why)] => break *why,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((ended, bench.now.since(from)), (StopReason::StartupTimeout, POLICY.startup_timeout));
    assert_eq!(bench.service.next_deadline(), None, "its end is waited for");
    assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Healthy)), [], "too late");
    assert_eq!(bench.happens(Event::Exited), []);
    let (pause, effects) = bench.passes();
    assert_eq!(effects, [Effect::Start]);
    assert!(pause <= RESTART_BACKOFF.first * 2, "{pause:?}");
}

#[test]
fn a_question_that_is_out_does_not_keep_a_start_beyond_its_time() {
    let (mut bench, _) = Bench::new();
    assert_eq!(bench.happens(Event::Started), [Effect::CheckHealth]);
    assert_eq!(bench.passes(), (POLICY.startup_timeout, vec![Effect::Stop(StopReason::StartupTimeout)]));
}

#[test]
fn one_that_answers_ill_a_few_times_stays_and_more_often_in_a_row_is_ended() {
    let mut bench = Bench::well();
    for health in [
        HealthCheckResult::Unhealthy,
        HealthCheckResult::Unhealthy,
        HealthCheckResult::Healthy,
        HealthCheckResult::Unhealthy,
        HealthCheckResult::Unhealthy,
    ] {
        assert_eq!(bench.passes().1, [Effect::CheckHealth]);
        assert_eq!(bench.happens(Event::HealthChecked(health)), []);
    }
    assert_eq!(bench.passes().1, [Effect::CheckHealth]);
    let effects = bench.happens(Event::HealthChecked(HealthCheckResult::Unhealthy));
    assert_eq!(effects, [Effect::Down, Effect::Stop(StopReason::Unhealthy)]);
}

#[test]
fn one_that_does_not_last_is_started_at_longer_and_longer_intervals_and_one_that_lasted_is_not() {
    let mut bench = Bench::well();
    let mut pauses = Vec::new();
    for _ in 0..12 {
        assert_eq!(bench.happens(Event::Exited), [Effect::Down]);
        let (pause, effects) = bench.passes();
        assert_eq!(effects, [Effect::Start]);
        pauses.push(pause);
        bench.happens(Event::Started);
        bench.happens(Event::HealthChecked(HealthCheckResult::Healthy));
    }
    assert!(pauses[0] <= RESTART_BACKOFF.first * 2 && pauses[11] > RESTART_BACKOFF.first * 8, "{pauses:?}");
    assert!(pauses.iter().all(|pause| *pause <= RESTART_BACKOFF.max), "{pauses:?}");
    bench.now = bench.now.plus(STABLE_AFTER);
    assert_eq!(bench.happens(Event::Exited), [Effect::Down]);
    assert!(bench.passes().0 <= RESTART_BACKOFF.first * 2);
}

#[test]
fn one_that_cannot_be_started_is_tried_again() {
    let (mut bench, _) = Bench::new();
    for _ in 0..5 {
        assert_eq!(bench.happens(Event::StartFailed), []);
        assert_eq!(bench.passes().1, [Effect::Start]);
    }
}

#[test]
fn one_that_nobody_answers_for_is_asked_after_at_once_and_ended_unless_it_comes_back() {
    let mut bench = Bench::well();
    assert_eq!(bench.happens(Event::Unreachable), [Effect::Down, Effect::CheckHealth]);
    assert_eq!(bench.happens(Event::Unreachable), [], "one question at a time");
    assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Healthy)), [Effect::Up]);
    assert_eq!(bench.happens(Event::Unreachable), [Effect::Down, Effect::CheckHealth]);
    assert_eq!(bench.passes(), (POLICY.startup_timeout, vec![Effect::Stop(StopReason::StartupTimeout)]));
}

#[test]
fn silence_of_one_that_is_at_work_says_nothing() {
    let mut bench = Bench::well();
    for _ in 0..10 {
        assert_eq!(bench.passes(), (POLICY.health_interval, vec![Effect::CheckHealth]));
        assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Busy)), []);
    }
    // Nor does it make up for what was said before.
    for health in [HealthCheckResult::Unhealthy, HealthCheckResult::Unhealthy, HealthCheckResult::Busy] {
        assert_eq!(bench.passes().1, [Effect::CheckHealth]);
        assert_eq!(bench.happens(Event::HealthChecked(health)), []);
    }
    assert_eq!(bench.passes().1, [Effect::CheckHealth]);
    assert_eq!(
        bench.happens(Event::HealthChecked(HealthCheckResult::Unhealthy)),
        [Effect::Down, Effect::Stop(StopReason::Unhealthy)]
    );
}

#[test]
fn one_that_somebody_else_starts_is_asked_after_for_ever_and_never_ended() {
    let now = Instant::ORIGIN.plus(secs(1000));
    let service = ServiceSupervisor::new(ServicePolicy { managed_by: ManagedBy::External, ..POLICY }, 7, now);
    let mut bench = Bench { service, now };
    assert_eq!(bench.happens(Event::Tick), [Effect::CheckHealth]);
    for _ in 0..1000 {
        assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Unhealthy)), []);
        assert_eq!(bench.passes(), (POLICY.startup_check_interval, vec![Effect::CheckHealth]));
    }
    assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Healthy)), [Effect::Up]);
    for misses in 1..=POLICY.failures_max {
        assert_eq!(bench.passes().1, [Effect::CheckHealth]);
        let down = if misses == POLICY.failures_max { vec![Effect::Down] } else { vec![] };
        assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Unhealthy)), down);
    }
    assert_eq!(bench.passes(), (POLICY.startup_check_interval, vec![Effect::CheckHealth]));
    assert_eq!(bench.happens(Event::HealthChecked(HealthCheckResult::Healthy)), [Effect::Up]);
}

/// A worker with a source of claims; its service is down from the start.
fn unserved(manners: &[Capabilities]) -> WorkerBench {
    let mut bench = WorkerBench::new(policy(2), manners);
    bench.worker.set_availability(SourceId(0), ServiceAvailability::Down);
    bench
}

fn serving(serving: ServiceAvailability) -> WorkerEvent {
    WorkerEvent::ServiceAvailabilityChanged { source: SourceId(0), availability: serving }
}

#[test]
fn nothing_is_asked_of_a_source_whose_service_is_not_there_but_what_an_earlier_life_has_left() {
    let mut bench = unserved(&[MESSAGES]);
    assert_eq!(bench.pass(secs(60)), []);
    assert_eq!(bench.worker.claiming(), ClaimingState::Blocked(ClaimingBlocked::ServiceDown));
    assert_eq!(bench.happens(serving(ServiceAvailability::Up)), [WorkerEffect::Open(SourceId(0))]);
    assert_eq!(bench.worker.claiming(), ClaimingState::Polling);

    // One that can be asked for lost claims is, so that they go back at once.
    let mut bench = unserved(&[CLAIMS]);
    assert_eq!(bench.tick(), [WorkerEffect::Open(SourceId(0))]);
    assert!(matches!(bench.opened(0, 1)[..], [WorkerEffect::Recover { .. }]));
    assert_eq!(bench.recovered(0, Ok(Vec::new())), []);
    assert_eq!(bench.pass(secs(60)), []);
    let effects = bench.happens(serving(ServiceAvailability::Up));
    assert!(matches!(effects[..], [WorkerEffect::Poll { .. }]), "{effects:?}");
}

#[test]
fn other_sources_are_asked_while_one_has_no_service() {
    let mut bench = unserved(&[MESSAGES, MESSAGES]);
    assert_eq!(bench.tick(), [WorkerEffect::Open(SourceId(1))]);
    assert_eq!(bench.worker.claiming(), ClaimingState::Polling);
    let mut effects = bench.opened(1, 1);
    effects.extend(bench.pass(secs(10)));
    let polled = |effect: &WorkerEffect| matches!(effect, WorkerEffect::Poll { source: SourceId(1), .. });
    assert!(polls(&effects) == 1 && effects.iter().any(polled), "{effects:?}");
}

#[test]
fn what_cannot_be_forwarded_is_handed_back_once_no_poll_would_bring_it_back() {
    let mut bench = WorkerBench::claims(2);
    let grant = bench.grant("T1");
    let claim = grant.token;
    // The next poll is under way when its sidecar goes down.
    let effects = bench.brought(vec![grant]);
    assert!(effects.contains(&WorkerEffect::Claim(claim, ClaimAction::Prepare)) && polls(&effects) == 1, "{effects:?}");
    bench.happens(serving(ServiceAvailability::Down));
    let mut effects = bench.tell(claim, ClaimEvent::Prepared(Err(PrepareFailure::ServiceDown)));
    effects.extend(bench.tell(claim, UPLOADED));
    let reported = |effects: &[WorkerEffect]| {
        let outcome = |effect: &WorkerEffect| match effect {
            WorkerEffect::Claim(_, ClaimAction::Report { outcome, .. }) => Some(*outcome),
            _ => None,
        };
        effects.iter().find_map(outcome)
    };
    assert_eq!(reported(&effects), None, "it would come straight back: {effects:?}");
    let effects = bench.empty();
    assert_eq!(reported(&effects), Some(Outcome::Exception(ExceptionReason::WorkerShutdown)), "{effects:?}");
    assert_eq!(polls(&effects), 0);
    let alerts =
        effects.iter().filter(|effect| matches!(effect, WorkerEffect::Alert(_) | WorkerEffect::ProbeHost)).count();
    assert_eq!(alerts, 0, "the host is not to blame: {effects:?}");
}
