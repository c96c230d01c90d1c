//! I33: a host that cannot run tasks releases the claim that failed, and claims nothing until a probe succeeds; the pause grows
//! with repeated failures.

use std::time::Duration;

use journeyman_domain::claim::{ClaimAction, ClaimEnd, ClaimEvent};
use journeyman_domain::host_health::{FAULT_BACKOFF, ProbeResult};
use journeyman_domain::id::{LocalToken, SourceId};
use journeyman_domain::outcome::{ExceptionReason, ExecuteFailure, Outcome, PrepareFailure};
use journeyman_domain::worker::{Alert, ClaimingBlocked, ClaimingState, Effect, Event, PollResult};

use crate::rules::support::{
    Bench, LEASE, MESSAGES, PREPARED, REPORTED, SHUTDOWN, UPLOADED, acts, claims, policy, polls, run, secs,
};

fn prepared_on_a_sick_host(bench: &mut Bench, claim: LocalToken) -> Vec<Effect> {
    let mut all = bench.tell(claim, ClaimEvent::Prepared(Err(PrepareFailure::HostFault)));
    all.extend(bench.tell(claim, UPLOADED));
    all
}

fn handed_back(bench: &mut Bench, claim: LocalToken) -> Vec<Effect> {
    let mut all = prepared_on_a_sick_host(bench, claim);
    assert!(acts!(all, ClaimAction::Report { outcome: SHUTDOWN, .. }), "{all:?}");
    all.extend(bench.tell(claim, REPORTED));
    assert!(acts!(all, ClaimAction::Close(ClaimEnd::Reported(SHUTDOWN))), "{all:?}");
    all
}

fn unfit(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| matches!(effect, Effect::Alert(Alert::HostUnhealthy { .. }))).count()
}

#[test]
fn i33_a_fault_of_the_host_is_handed_back_and_nothing_is_claimed_until_a_look_finds_it_fit() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.preparing("m1", "T");
    bench.deleted(claim, Ok(()));
    let effects = handed_back(&mut bench, claim);
    assert!(effects.contains(&Effect::Alert(Alert::HostUnhealthy { run: run("T") })), "{effects:?}");
    assert_eq!(polls(&effects), 0);
    assert!(matches!(
        bench.worker.claiming(),
        ClaimingState::Blocked(ClaimingBlocked::HostUnhealthy { until: Some(_) })
    ));
    let mut looks = 0;
    for _ in 0..10 {
        let effects = bench.pass_until(|effect| *effect == Effect::ProbeHost);
        assert_eq!(polls(&effects), 0);
        looks += 1;
        assert_eq!(polls(&bench.pass(secs(600))), 0, "nothing while the answer is out");
        assert_eq!(bench.happens(Event::HostProbed(ProbeResult::Unhealthy)), []);
    }
    assert_eq!(looks, 10);
    bench.pass_until(|effect| *effect == Effect::ProbeHost);
    assert_eq!(polls(&bench.happens(Event::HostProbed(ProbeResult::Healthy))), 1);
}

#[test]
fn i33_a_host_that_looks_fit_and_is_not_costs_a_retry_at_longer_and_longer_intervals() {
    let mut bench = Bench::messages(1, 1);
    let (mut faults, mut alerts) = (0, 0);
    let until = bench.now.plus(secs(3600));
    while bench.now < until {
        let claim = bench.preparing(&format!("m{faults}"), &format!("T{faults}"));
        bench.deleted(claim, Ok(()));
        alerts += unfit(&handed_back(&mut bench, claim));
        faults += 1;
        bench.pass_until(|effect| *effect == Effect::ProbeHost);
        assert_eq!(polls(&bench.happens(Event::HostProbed(ProbeResult::Healthy))), 1);
    }
    assert!((10..=30).contains(&faults), "{faults} in an hour");
    assert_eq!(alerts, 1, "said once");
    // A task that runs ends the row, and the next fault is news.
    let claim = bench.executing("good", "Good");
    bench.completes(claim);
    let claim = bench.preparing("bad", "Bad");
    bench.deleted(claim, Ok(()));
    let at = bench.now;
    assert_eq!(unfit(&handed_back(&mut bench, claim)), 1);
    bench.pass_until(|effect| *effect == Effect::ProbeHost);
    assert!(bench.now.since(at) <= FAULT_BACKOFF.first + secs(1));
}

#[test]
fn i33_faults_of_several_tasks_at_once_are_one() {
    let mut bench = Bench::messages(8, 1);
    let seen: Vec<_> = (0..8).map(|n| bench.seen(&format!("m{n}"), &format!("T{n}"))).collect();
    let tokens: Vec<_> = seen.iter().map(|seen| seen.token).collect();
    bench.hit(seen);
    for claim in &tokens {
        bench.claimed(*claim, Ok(LEASE));
        bench.tell(*claim, PREPARED);
    }
    let mut alerts = 0;
    for claim in &tokens {
        alerts += unfit(&bench.tell(*claim, ClaimEvent::Ended(Err(ExecuteFailure::HostFault))));
    }
    assert_eq!(alerts, 1);
    let at = bench.now;
    bench.pass_until(|effect| *effect == Effect::ProbeHost);
    assert!(bench.now.since(at) <= FAULT_BACKOFF.first + secs(1), "one wait, not eight");
}

#[test]
fn i33_a_task_from_before_the_fault_proves_nothing() {
    let mut bench = Bench::messages(2, 1);
    let long = bench.executing("m0", "Long");
    let claim = bench.preparing("m1", "T1");
    handed_back(&mut bench, claim);
    bench.pass_until(|effect| *effect == Effect::ProbeHost);
    bench.happens(Event::HostProbed(ProbeResult::Healthy));
    bench.completes(long);
    let claim = bench.preparing("m2", "T2");
    assert_eq!(unfit(&handed_back(&mut bench, claim)), 0, "the same row");
}

#[test]
fn i33_a_healthy_probe_restores_the_full_capacity() {
    let mut bench = Bench::claims(4);
    let (claim, _) = bench.granted("Sick");
    prepared_on_a_sick_host(&mut bench, claim);
    bench.polled(0, Ok(PollResult::default()));
    bench.tell(claim, REPORTED);
    bench.pass_until(|effect| *effect == Effect::ProbeHost);
    let effects = bench.happens(Event::HostProbed(ProbeResult::Healthy));
    let max = effects.iter().find_map(|effect| match effect {
        Effect::Poll { max, .. } => Some(*max),
        _ => None,
    });
    assert_eq!(max, Some(4), "{effects:?}");
}

#[test]
fn i33_messages_that_come_to_an_unfit_host_are_left_to_others() {
    let mut bench = Bench::messages(2, 1);
    let claim = bench.preparing("m1", "T1");
    // The other slot waits in a poll.
    handed_back(&mut bench, claim);
    let (token, effects) = bench.receive("m2", "T2");
    assert_eq!(claims(&effects), 0);
    assert!(effects.contains(&Effect::DropMessage(token)), "{effects:?}");
}

#[test]
fn i33_what_is_handed_back_waits_for_the_poll_that_would_bring_it_straight_back() {
    let mut bench = Bench::claims(2);
    let (claim, effects) = bench.granted("T");
    assert_eq!(polls(&effects), 1, "the other slot waits in the next poll: {effects:?}");
    let effects = prepared_on_a_sick_host(&mut bench, claim);
    assert!(!acts!(effects, ClaimAction::Report { .. }), "{effects:?}");
    bench.now = bench.now.plus(Duration::from_secs(2));
    let effects = bench.polled(0, Ok(PollResult::default()));
    assert!(acts!(effects, ClaimAction::Report { outcome: SHUTDOWN, .. }), "{effects:?}");
    assert_eq!(polls(&effects), 0);
}

/// A poll of the first source brings a task that may not be run.
fn refused(bench: &mut Bench, name: &str) -> Vec<Effect> {
    let claim = bench.executing(name, name);
    let mut effects = bench.tell(claim, ClaimEvent::Ended(Err(ExecuteFailure::AccessDenied)));
    effects.extend(bench.tell(claim, UPLOADED));
    const UNAVAILABLE: Outcome = Outcome::Exception(ExceptionReason::ResourceUnavailable);
    assert!(acts!(effects, ClaimAction::Report { outcome: UNAVAILABLE, .. }), "{effects:?}");
    effects.extend(bench.tell(claim, REPORTED));
    effects
}

/// Lets time pass until the first source is polled, and answers how often the other one was meanwhile, which has no tasks.
fn polls_of_the_other(bench: &mut Bench, mut effects: Vec<Effect>) -> u32 {
    let mut others = 0;
    loop {
        while let Some(effect) = effects.pop() {
            match effect {
                Effect::Poll { source: SourceId(0), .. } => return others,
                Effect::Poll { .. } => {
                    others += 1;
                    effects.extend(bench.polled(1, Ok(PollResult::default())));
                }
                _ => {}
            }
        }
        effects = bench.pass(secs(1));
    }
}

#[test]
fn e2_a_source_whose_tasks_are_refused_waits_longer_and_longer_and_the_other_goes_on() {
    let mut bench = Bench::opened_with(policy(1), &[MESSAGES, MESSAGES]);
    bench.opened(1, 1);
    let mut others = 0;
    for (name, alerts) in [("T1", 1), ("T2", 0), ("T3", 0)] {
        let effects = refused(&mut bench, name);
        let alert = Effect::Alert(Alert::AccessDenied { source: SourceId(0) });
        assert_eq!(effects.iter().filter(|effect| **effect == alert).count(), alerts, "{effects:?}");
        assert_eq!((unfit(&effects), bench.worker.claiming()), (0, ClaimingState::Polling), "the host is well");
        let more = polls_of_the_other(&mut bench, effects);
        assert!(more > others, "{more} polls after {others}");
        others = more;
    }
    let claim = bench.executing("T4", "T4");
    let effects = bench.completes(claim);
    polls_of_the_other(&mut bench, effects);
    let effects = refused(&mut bench, "T5");
    assert!(effects.contains(&Effect::Alert(Alert::AccessDenied { source: SourceId(0) })), "one has run: {effects:?}");
}

#[test]
fn e2_what_comes_while_a_source_is_refused_is_left_to_others() {
    let mut bench = Bench::claims(2);
    let (claim, _) = bench.granted("T1");
    bench.tell(claim, PREPARED);
    // The other slot waits in a poll.
    bench.tell(claim, ClaimEvent::Ended(Err(ExecuteFailure::AccessDenied)));
    let (_, effects) = bench.granted("T2");
    assert!(acts!(effects, ClaimAction::Report { outcome: SHUTDOWN, .. }), "{effects:?}");
}
