//! When a worker exits and when it polls: the exit is decided between polls, and no claim is lost between the decision and the
//! exit (I22, I24).

use std::time::Duration;

use journeyman_domain::claim::{ClaimAction, ClaimEnd};
use journeyman_domain::id::SourceId;
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::poll::Capabilities;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{
    Alert, ClaimingBlocked, ClaimingState, Effect, Event, ExitPolicy, ExitReason, HostResources, MinResources,
    PollResult, WorkerPolicy,
};
use journeyman_domain::worker_pool::PoolDecision;

use crate::rules::support::{
    Bench, CLAIMS, FAILED, LEASE, MESSAGES, PREPARED, RELEASE, REPORTED, UPLOADED, acts, at, claims, exits, has,
    policy, polls, run, secs,
};

fn exiting_by(capacity: u32, exit_policy: ExitPolicy) -> Bench {
    let mut bench = Bench::opened_with(WorkerPolicy { exit_policy, ..policy(capacity) }, &[CLAIMS]);
    bench.recovered(0, Ok(Vec::new()));
    bench
}

const IDLE: ExitPolicy =
    ExitPolicy { exit_when_idle: Some(Duration::from_secs(60)), max_tasks: None, max_uptime: None };

#[test]
fn i24_an_idle_worker_leaves_when_its_poll_is_back_and_not_before() {
    let mut bench = exiting_by(1, IDLE);
    let effects = bench.pass(secs(90));
    assert_eq!(exits(&effects), None, "its poll is under way");
    assert_eq!(bench.worker.claiming(), ClaimingState::Exiting(ExitReason::Idle));
    assert_eq!(exits(&bench.empty()), Some(ExitReason::Idle));
}

#[test]
fn i22_a_claim_that_the_last_poll_of_an_idle_worker_brings_is_executed_and_the_worker_stays() {
    let mut bench = exiting_by(1, IDLE);
    bench.pass(secs(90));
    let (claim, effects) = bench.granted("T1");
    assert!(effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)), "{effects:?}");
    assert!(!bench.worker.is_stopping());
    bench.tell(claim, PREPARED);
    let effects = bench.completes(claim);
    assert_eq!(polls(&effects), 1, "idleness begins anew: {effects:?}");
    assert_eq!(exits(&bench.pass(secs(59))), None);
}

#[test]
fn i24_an_idle_worker_of_several_sources_leaves_when_all_polls_are_back() {
    let mut bench = Bench::new(WorkerPolicy { exit_policy: IDLE, ..policy(4) }, &[CLAIMS, CLAIMS]);
    bench.tick();
    for source in 0..2 {
        bench.opened(source, 1);
        assert_eq!(polls(&bench.recovered(source, Ok(Vec::new()))), 1, "they share the slots");
    }
    bench.pass(secs(61));
    let effects = bench.polled(0, Ok(PollResult::default()));
    assert_eq!((polls(&effects), exits(&effects)), (0, None), "no poll is started, the other one is out: {effects:?}");
    assert_eq!(exits(&bench.polled(1, Ok(PollResult::default()))), Some(ExitReason::Idle));
}

#[test]
fn i24_a_worker_whose_credentials_are_refused_is_not_idle() {
    let mut bench = exiting_by(1, IDLE);
    let mut effects = bench.polled(0, Err(Refusal::Denied));
    for _ in 0..100 {
        if let Some(exit) = exits(&effects) {
            return assert_eq!(
                exit,
                ExitReason::CredentialsRejected,
                "a person has to come, and a new host would fare no better"
            );
        }
        effects = bench.pass_until(|effect| matches!(effect, Effect::Poll { .. } | Effect::Exit(_)));
        if polls(&effects) > 0 {
            effects.extend(bench.polled(0, Err(Refusal::Denied)));
        }
    }
    panic!("it never gives up");
}

#[test]
fn i24_a_worker_that_was_refused_one_claim_is_idle_when_a_poll_brings_nothing_since() {
    let mut bench = Bench::opened_with(WorkerPolicy { exit_policy: IDLE, ..policy(1) }, &[MESSAGES]);
    let (asked, _) = bench.receive("m", "T");
    bench.claimed(asked, Err(Refusal::Denied));
    let again = |effect: &Effect| matches!(effect, Effect::Poll { .. } | Effect::Exit(_));
    assert_eq!(exits(&bench.pass_until(again)), None);
    // Another worker has taken it.
    let mut effects = bench.empty();
    for _ in 0..100 {
        if let Some(exit) = exits(&effects) {
            return assert_eq!(exit, ExitReason::Idle);
        }
        effects = bench.pass_until(again);
        if polls(&effects) > 0 {
            effects.extend(bench.empty());
        }
    }
    panic!("it stays for ever");
}

#[test]
fn i22_what_a_poll_brings_that_was_under_way_when_the_host_ran_short_goes_back_at_once_and_is_told_of() {
    let resources = HostResources { disk: Some(1), memory: None };
    let least = MinResources { disk: 2, memory: 0 };
    {
        let held_off = Event::ResourcesMeasured(resources);
        let mut bench = Bench::opened_with(WorkerPolicy { min_resources: least, ..policy(2) }, &[CLAIMS]);
        bench.recovered(0, Ok(Vec::new()));
        bench.happens(held_off.clone());
        let (claim, effects) = bench.granted("T");
        let handed_back = Outcome::Exception(ExceptionReason::WorkerShutdown);
        assert!(
            has!(effects, Effect::Claim(_, ClaimAction::Report { outcome, .. }) if *outcome == handed_back),
            "{held_off:?}: {effects:?}"
        );
        assert!(effects.contains(&Effect::Alert(Alert::LateGrant { run: run("T") })), "{effects:?}");
        assert!(!effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)), "{held_off:?}");
        bench.tell(claim, REPORTED);
        assert!(!bench.worker.is_stopping() && bench.worker.free_slots() == 2, "it is the worker that it was");
    }
}

#[test]
fn what_a_poll_brings_that_was_under_way_at_a_pause_is_run_where_it_is_claimed_and_left_where_it_is_not() {
    let mut bench = Bench::claims(2);
    bench.happens(Event::Pause { until: None });
    let (claim, effects) = bench.granted("T");
    assert!(effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)), "{effects:?}");
    // What ends with its connection is redelivered without an attempt.
    let mut bench = Bench::opened_with(policy(2), &[Capabilities { connection_scoped: true, ..CLAIMS }]);
    bench.happens(Event::Pause { until: None });
    let (claim, effects) = bench.granted("T");
    assert!(!effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)), "{effects:?}");
    // Releasing a message costs no retry.
    let resources = HostResources { disk: Some(1), memory: None };
    let least = MinResources { disk: 2, memory: 0 };
    for held_off in
        [Event::Pause { until: None }, Event::Pause { until: Some(at(900)) }, Event::ResourcesMeasured(resources)]
    {
        let mut bench = Bench::opened_with(WorkerPolicy { min_resources: least, ..policy(2) }, &[MESSAGES]);
        bench.happens(held_off.clone());
        let (_, effects) = bench.receive("m", "T");
        assert_eq!(
            (claims(&effects), effects.iter().filter(|effect| matches!(effect, Effect::DropMessage(_))).count()),
            (0, 1),
            "{held_off:?}"
        );
    }
}

#[test]
fn a_claim_that_was_asked_for_before_a_pause_is_run_as_what_was_held_is_and_no_other_is_asked_for() {
    let mut bench = Bench::opened_with(policy(2), &[MESSAGES]);
    let before = bench.preparing("m1", "T");
    let seen = bench.seen("m2", "U");
    let asked = seen.token;
    assert_eq!(claims(&bench.hit(vec![seen])), 1);
    bench.happens(Event::Pause { until: None });
    let effects = bench.claimed(asked, Ok(LEASE));
    assert!(effects.contains(&Effect::Claim(asked, ClaimAction::Prepare)), "{effects:?}");
    assert_eq!(polls(&effects), 0, "{effects:?}");
    assert!(bench.tell(before, PREPARED).contains(&Effect::Claim(before, ClaimAction::Execute)));
}

#[test]
fn i24_a_paused_worker_is_not_idle() {
    let mut bench = exiting_by(1, IDLE);
    bench.happens(Event::Pause { until: None });
    bench.empty();
    let effects = bench.pass(secs(600));
    assert_eq!((polls(&effects), exits(&effects)), (0, None));
    assert_eq!(bench.worker.claiming(), ClaimingState::Blocked(ClaimingBlocked::Paused { until: None }));
    assert_eq!(polls(&bench.happens(Event::Resume)), 1);
    assert_eq!(exits(&bench.pass(secs(59))), None);
    bench.pass(secs(2));
    assert_eq!(exits(&bench.empty()), Some(ExitReason::Idle));
}

#[test]
fn i24_a_pause_with_an_end_ends_by_itself_and_what_is_held_goes_on_meanwhile() {
    let mut bench = Bench::messages(2, 1);
    let claim = bench.executing("m1", "T1");
    bench.happens(Event::Pause { until: Some(at(100)) });
    bench.empty();
    let effects = bench.pass(secs(99));
    assert_eq!(polls(&effects), 0, "{effects:?}");
    assert!(acts!(bench.completes(claim), ClaimAction::Close(_)));
    assert_eq!(polls(&bench.pass(secs(2))), 1);
    assert_eq!(bench.worker.claiming(), ClaimingState::Polling);
}

#[test]
fn i08_never_more_claims_than_max_tasks_are_asked_for_and_the_last_ones_are_finished() {
    let exit_policy = ExitPolicy { max_tasks: Some(3), ..ExitPolicy::default() };
    let drain_deadline = Some(secs(10));
    let mut bench = Bench::new(WorkerPolicy { exit_policy, drain_deadline, ..policy(2) }, &[MESSAGES]);
    bench.tick();
    let effects = bench.opened(0, 1);
    assert!(effects.contains(&Effect::Poll {
        source: SourceId(0),
        queue: journeyman_domain::id::PriorityQueue(0),
        max: 2
    }));
    let first = bench.executing("m1", "T1");
    let second = bench.executing("m2", "T2");
    bench.completes(first);
    let effects = bench.empty();
    assert_eq!(exits(&effects), None);
    let asked = bench.pass(secs(1));
    assert!(has!(asked, Effect::Poll { max: 1, .. }), "{asked:?}");
    bench.completes(second);
    let third = bench.executing("m3", "T3");
    bench.empty();
    assert_eq!(bench.worker.claiming(), ClaimingState::Exiting(ExitReason::LimitReached));
    let effects = bench.pass(secs(60));
    assert_eq!((polls(&effects), exits(&effects)), (0, None), "the last task takes as long as it takes");
    assert_eq!(exits(&bench.completes(third)), Some(ExitReason::LimitReached));
}

#[test]
fn i08_a_claim_that_was_refused_does_not_count_as_a_task() {
    let exit_policy = ExitPolicy { max_tasks: Some(1), ..ExitPolicy::default() };
    let mut bench = Bench::opened_with(WorkerPolicy { exit_policy, ..policy(4) }, &[MESSAGES]);
    let seen = bench.seen("m1", "T1");
    let claim = seen.token;
    assert_eq!(claims(&bench.hit(vec![seen])), 1);
    let effects = bench.claimed(claim, Err(Refusal::Gone));
    assert!(!bench.worker.is_stopping());
    assert_eq!(polls(&effects), 1, "{effects:?}");
}

#[test]
fn i22_a_worker_that_has_been_up_long_enough_drains_when_its_poll_is_back() {
    let exit_policy = ExitPolicy { max_uptime: Some(secs(100)), ..ExitPolicy::default() };
    let mut bench = exiting_by(2, exit_policy);
    let (grant, late) = (bench.grant("T1"), bench.grant("T2"));
    let (claim, last) = (grant.token, late.token);
    bench.brought(vec![grant]);
    bench.tell(claim, PREPARED);
    bench.pass(secs(101));
    assert!(!bench.worker.is_stopping(), "its poll may still bring a claim");
    let effects = bench.brought(vec![late]);
    assert!(
        effects.contains(&Effect::Claim(last, ClaimAction::Prepare)),
        "and what it brings is executed: {effects:?}"
    );
    assert!(bench.worker.is_stopping());
    bench.tell(last, PREPARED);
    assert_eq!(exits(&bench.completes(claim)), None);
    assert_eq!(exits(&bench.completes(last)), Some(ExitReason::LimitReached));
}

#[test]
fn i27_a_worker_whose_folder_was_removed_begins_nothing_more_and_leaves_when_what_runs_is_over() {
    let mut bench = exiting_by(2, ExitPolicy::default());
    let (grant, late) = (bench.grant("T1"), bench.grant("T2"));
    let (claim, back) = (grant.token, late.token);
    bench.brought(vec![grant]);
    bench.tell(claim, PREPARED);
    let said = Effect::Alert(Alert::WorkDirLost);
    assert!(bench.happens(Event::WorkDirLost).contains(&said));
    assert!(!bench.happens(Event::WorkDirLost).contains(&said), "once");
    assert_eq!(bench.worker.claiming(), ClaimingState::Exiting(ExitReason::WorkDirLost));
    assert!(!bench.worker.is_stopping(), "its poll may still bring a claim");
    let effects = bench.brought(vec![late]);
    assert!(!acts!(effects, ClaimAction::Prepare), "{effects:?}");
    assert!(bench.worker.is_stopping());
    bench.tell(back, REPORTED);
    assert_eq!(exits(&bench.completes(claim)), Some(ExitReason::WorkDirLost));
}

#[test]
fn i24_a_hand_back_outranks_a_limit() {
    let mut bench = exiting_by(1, ExitPolicy { max_tasks: Some(1), ..ExitPolicy::default() });
    let (claim, _) = bench.granted("T1");
    bench.tell(claim, PREPARED);
    bench.happens(RELEASE);
    bench.tell(claim, FAILED);
    let effects = bench.tell(claim, REPORTED);
    let closed = Effect::Claim(claim, ClaimAction::Upload);
    assert!(effects.contains(&closed), "{effects:?}");
    let effects = bench.tell(claim, UPLOADED);
    let end = ClaimEnd::Reported(Outcome::Exception(ExceptionReason::WorkerShutdown));
    assert!(has!(effects, Effect::Claim(_, ClaimAction::Close(seen)) if *seen == end), "{effects:?}");
    assert_eq!(exits(&effects), Some(ExitReason::Released));
}

#[test]
fn a_host_that_is_short_of_disk_or_memory_asks_for_nothing_until_it_is_not() {
    let least = MinResources { disk: 1000, memory: 500 };
    let mut bench = Bench::new(WorkerPolicy { min_resources: least, ..policy(1) }, &[MESSAGES]);
    bench.happens(Event::ResourcesMeasured(HostResources { disk: Some(999), memory: Some(1) }));
    assert_eq!(bench.worker.claiming(), ClaimingState::Blocked(ClaimingBlocked::LowDisk { free: 999, min: 1000 }));
    assert_eq!(bench.pass(secs(600)), []);
    bench.happens(Event::ResourcesMeasured(HostResources { disk: Some(1000), memory: Some(499) }));
    assert_eq!(bench.worker.claiming(), ClaimingState::Blocked(ClaimingBlocked::LowMemory { free: 499, min: 500 }));
    assert_eq!(bench.tick(), []);
    assert_eq!(
        bench.happens(Event::ResourcesMeasured(HostResources { disk: None, memory: None })),
        [Effect::Open(SourceId(0))]
    );
}

#[test]
fn i08_fewer_slots_take_effect_as_tasks_end_and_more_at_once() {
    let mut bench = Bench::messages(2, 1);
    let first = bench.executing("m1", "T1");
    bench.executing("m2", "T2");
    bench.happens(Event::Reconfigured(Box::new(policy(1))));
    assert_eq!(polls(&bench.completes(first)), 0, "one of one slots is in use");
    assert_eq!(bench.worker.claiming(), ClaimingState::AtCapacity);
    let effects = bench.happens(Event::Reconfigured(Box::new(policy(3))));
    assert!(has!(effects, Effect::Poll { max: 2, .. }), "{effects:?}");
}

#[test]
fn a_task_that_is_launched_elsewhere_gives_its_slot_back_within_a_limit_of_its_own() {
    let mut bench = Bench::claims(1);
    let mut launch = |name: &str| {
        let (claim, _) = bench.granted(name);
        bench.tell(claim, PREPARED);
        let effects = bench.happens(Event::Launched { claim });
        (claim, polls(&effects), bench.worker.free_slots())
    };
    let (first, polled, _) = launch("T1");
    assert_eq!(polled, 1);
    let (_, polled, _) = launch("T2");
    assert_eq!(polled, 1);
    let (third, polled, free) = launch("T3");
    assert_eq!((polled, free), (0, 0), "the policy allows two");
    assert_eq!(bench.worker.launched(), 2);
    bench.happens(Event::Launched { claim: first });
    let effects = bench.completes(first);
    assert_eq!((polls(&effects), bench.worker.free_slots()), (0, 0), "it had no slot any more");
    let effects = bench.completes(third);
    assert_eq!(polls(&effects), 1, "{effects:?}");
}

fn needed_until(seconds: u64) -> Event {
    Event::PoolDecided(PoolDecision::NeededUntil(at(seconds)))
}

#[test]
fn i24_an_idle_worker_that_its_pool_needs_stays_until_that_was_long_ago() {
    let mut bench = exiting_by(1, IDLE);
    bench.happens(needed_until(300));
    bench.pass(secs(90));
    assert_eq!(bench.worker.claiming(), ClaimingState::Polling);
    bench.happens(needed_until(600));
    bench.pass(secs(450));
    assert_eq!(bench.worker.claiming(), ClaimingState::Polling);
    bench.pass(secs(100));
    assert_eq!(bench.worker.claiming(), ClaimingState::Exiting(ExitReason::Idle));
    assert_eq!(exits(&bench.empty()), Some(ExitReason::Idle));
}

#[test]
fn i24_a_worker_that_its_pool_does_not_need_finishes_its_claim_and_leaves() {
    let mut bench = exiting_by(1, IDLE);
    let (claim, _) = bench.granted("T");
    bench.tell(claim, PREPARED);
    bench.happens(Event::PoolDecided(PoolDecision::Leave { exit: ExitReason::NotNeeded, deadline: None }));
    let effects = bench.completes(claim);
    assert_eq!((polls(&effects), exits(&effects)), (0, Some(ExitReason::NotNeeded)));
}

#[test]
fn i24_a_worker_whose_credentials_are_not_renewed_releases_its_claims_when_they_expire() {
    let mut bench = exiting_by(1, IDLE);
    let (claim, _) = bench.granted("T");
    bench.tell(claim, PREPARED);
    let deadline = Some(at(100));
    bench.happens(Event::PoolDecided(PoolDecision::Leave { exit: ExitReason::RegistrationRefused, deadline }));
    assert!(!has!(bench.pass(secs(90)), Effect::Claim(_, ClaimAction::Kill { .. })), "they last");
    let effects = bench.pass(secs(20));
    assert!(has!(effects, Effect::Claim(_, ClaimAction::Kill { .. })), "{effects:?}");
    assert_eq!(bench.worker.claiming(), ClaimingState::Releasing { deadline: None });
}
