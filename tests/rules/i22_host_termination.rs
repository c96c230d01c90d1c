//! I22 before the host terminates: the whole notice is used, and every outcome is reported before it is over.

use std::time::Duration;

use journeyman_domain::claim::{
    CancelCause, ClaimAction, ClaimEnd, ClaimEvent, LossReason, REPORT_ATTEMPTS_MIN, REPORT_RESERVE,
};
use journeyman_domain::id::LocalToken;
use journeyman_domain::outcome::{ExecuteFailure, Outcome};
use journeyman_domain::worker::{Effect, Event, ExitReason, GrantedClaim, OnTerminationNotice, WorkerPolicy};

use crate::rules::support::{
    Bench, CLAIMS, DRAIN, FAILED, GRACE, LAST_RUN, LEASE, MARGIN, MESSAGES, One, PREPARED, RELEASE, REPORTED, RETRY,
    SHUTDOWN, UPLOADED, acts, at, has, policy, polls, secs,
};

fn goes_at(seconds: u64) -> Event {
    Event::TerminationNotice { deadline: Some(at(seconds)) }
}

fn killed(effects: &[Effect], claim: LocalToken) -> bool {
    has!(effects, Effect::Claim(token, ClaimAction::Kill { .. }) if *token == claim)
}

fn reported(effects: &[Effect], claim: LocalToken) -> Option<Outcome> {
    effects.iter().find_map(|effect| match effect {
        Effect::Claim(token, ClaimAction::Report { outcome, .. }) if *token == claim => Some(*outcome),
        _ => None,
    })
}

#[test]
fn i22_a_running_payload_goes_on_until_the_margin_before_the_host_goes() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    assert_eq!(bench.happens(goes_at(120)), []);
    assert_eq!(bench.pass(secs(120) - MARGIN - secs(1)), [], "none of the notice is wasted");
    let effects = bench.pass(secs(1));
    assert_eq!(effects, [Effect::Claim(claim, ClaimAction::Kill { cause: CancelCause::Shutdown, grace: GRACE })]);
    let effects = bench.tell(claim, FAILED);
    assert_eq!(reported(&effects, claim), Some(SHUTDOWN));
    bench.tell(claim, REPORTED);
    bench.empty();
    let effects = bench.tell(claim, UPLOADED);
    assert_eq!(effects.last(), Some(&Effect::Exit(ExitReason::HostTerminating)));
}

#[test]
fn i22_a_payload_that_finishes_within_the_notice_keeps_its_outcome_and_the_worker_goes_early() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    bench.empty();
    bench.happens(goes_at(120));
    bench.pass(secs(60));
    let effects = bench.completes(claim);
    assert_eq!(reported(&effects, claim), Some(Outcome::Completed));
    assert_eq!(effects.last(), Some(&Effect::Exit(ExitReason::HostTerminating)), "at 60 s and not at 120 s");
}

#[test]
fn i22_a_grace_longer_than_the_margin_has_its_time_nevertheless() {
    let noticed = OnTerminationNotice::Finish { margin: Duration::ZERO };
    let mut bench = Bench::opened_with(WorkerPolicy { on_termination_notice: noticed, ..policy(1) }, &[MESSAGES]);
    let claim = bench.executing("m1", "T");
    bench.happens(goes_at(120));
    assert_eq!(bench.pass(secs(120) - GRACE - REPORT_RESERVE - secs(1)), []);
    assert_eq!(
        bench.pass(secs(1)),
        [Effect::Claim(claim, ClaimAction::Kill { cause: CancelCause::Shutdown, grace: GRACE })]
    );
}

#[test]
fn i22_running_payloads_are_released_at_once_if_the_notice_is_short_or_has_no_time_or_the_policy_says_so() {
    let unknown = Event::TerminationNotice { deadline: None };
    let finish = policy(1).on_termination_notice;
    for (on_termination_notice, notice, grace) in [
        (finish, goes_at(8), secs(8) - REPORT_RESERVE),
        (finish, unknown, GRACE),
        (OnTerminationNotice::Release, goes_at(120), GRACE),
    ] {
        let mut bench = Bench::opened_with(WorkerPolicy { on_termination_notice, ..policy(1) }, &[MESSAGES]);
        let claim = bench.executing("m1", "T");
        let kill = ClaimAction::Kill { cause: CancelCause::Shutdown, grace };
        assert_eq!(bench.happens(notice), [Effect::Claim(claim, kill)]);
        bench.empty();
        assert_eq!(bench.stops(claim).last(), Some(&Effect::Exit(ExitReason::HostTerminating)));
    }
}

#[test]
fn i22_what_has_not_started_is_handed_back_at_the_notice_and_never_started() {
    let mut bench = Bench::messages(3, 1);
    let (preparing, asked) = (bench.seen("m1", "T1"), bench.seen("m2", "T2"));
    let (first, second) = (preparing.token, asked.token);
    bench.hit(vec![preparing, asked]);
    bench.claimed(first, Ok(LEASE));
    assert!(killed(&bench.happens(goes_at(120)), first));
    // Prepared meanwhile: the payload is not started all the same.
    let effects = bench.tell(first, PREPARED);
    assert!(!effects.contains(&Effect::Claim(first, ClaimAction::Execute)), "{effects:?}");
    let effects = bench.tell(first, ClaimEvent::Ended(Err(ExecuteFailure::Internal)));
    assert_eq!(reported(&effects, first), Some(SHUTDOWN));
    let effects = bench.claimed(second, Ok(LEASE));
    assert_eq!(reported(&effects, second), Some(SHUTDOWN), "{effects:?}");
    assert!(!effects.contains(&Effect::Claim(second, ClaimAction::Prepare)));
}

#[test]
fn b7_what_has_not_started_and_has_no_retries_starts_within_the_notice() {
    let mut bench = Bench::claims(2);
    let grant = GrantedClaim { terms: LAST_RUN, ..bench.grant("T1") };
    let first = grant.token;
    bench.brought(vec![grant]);
    assert!(!killed(&bench.happens(goes_at(120)), first));
    assert_eq!(bench.tell(first, PREPARED), [Effect::Claim(first, ClaimAction::Execute)]);
    let grant = GrantedClaim { terms: LAST_RUN, ..bench.grant("T2") };
    let second = grant.token;
    assert!(bench.brought(vec![grant]).contains(&Effect::Claim(second, ClaimAction::Prepare)));
    let effects = bench.pass(secs(120) - MARGIN);
    assert!(killed(&effects, first) && killed(&effects, second), "until there is no time left: {effects:?}");
}

#[test]
fn i22_what_has_not_started_waits_for_the_long_poll_that_would_take_it_again() {
    let mut bench = Bench::opened_with(policy(4), &[CLAIMS]);
    bench.recovered(0, Ok(Vec::new()));
    let (claim, effects) = bench.granted("T");
    assert_eq!(polls(&effects), 1, "the next poll is under way: {effects:?}");
    bench.happens(goes_at(120));
    let effects = bench.tell(claim, ClaimEvent::Ended(Err(ExecuteFailure::Internal)));
    assert_eq!(reported(&effects, claim), None, "it would come straight back: {effects:?}");
    let effects = bench.empty();
    assert_eq!(reported(&effects, claim), Some(SHUTDOWN), "{effects:?}");
}

#[test]
fn i22_the_earliest_notice_counts_whatever_the_others_say() {
    for notices in [[60, 120, 60], [120, 60, 90]] {
        let mut bench = Bench::messages(1, 1);
        let claim = bench.executing("m1", "T");
        for seconds in notices {
            assert_eq!(bench.happens(goes_at(seconds)), [], "{notices:?}");
        }
        assert_eq!(bench.pass(secs(60) - MARGIN - secs(1)), [], "{notices:?}");
        assert!(killed(&bench.pass(secs(1)), claim), "{notices:?}");
    }
}

#[test]
fn i22_a_notice_shortens_a_drain_and_a_hand_back_under_way() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    bench.happens(DRAIN);
    assert_eq!(bench.happens(goes_at(60)), []);
    assert!(killed(&bench.pass(secs(60) - MARGIN), claim));

    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    bench.happens(RELEASE);
    let effects = bench.happens(goes_at(8));
    let grace = secs(8) - REPORT_RESERVE;
    assert_eq!(effects, [Effect::Claim(claim, ClaimAction::Kill { cause: CancelCause::Shutdown, grace })]);
}

#[test]
fn i22_a_signal_within_the_notice_changes_nothing_and_a_second_one_hands_back() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    bench.happens(goes_at(120));
    assert_eq!(bench.happens(DRAIN), [], "systemd tells everybody when the host goes");
    assert_eq!(bench.pass(secs(30)), []);
    assert!(killed(&bench.happens(RELEASE), claim));
    bench.tell(claim, FAILED);
    bench.tell(claim, ClaimEvent::Reported(Err(RETRY)));
    let effects = bench.pass(secs(90));
    assert!(
        acts!(effects, ClaimAction::Close(ClaimEnd::Unconfirmed { loss: LossReason::ShutdownDeadline, .. })),
        "the host still goes at its time: {effects:?}"
    );
}

#[test]
fn i22_a_drain_deadline_before_the_hosts_end_still_counts() {
    let mut bench = Bench::opened_with(WorkerPolicy { drain_deadline: Some(secs(30)), ..policy(1) }, &[MESSAGES]);
    let claim = bench.executing("m1", "T");
    bench.happens(goes_at(600));
    assert_eq!(bench.pass(secs(29)), []);
    assert!(killed(&bench.pass(secs(1)), claim));
}

#[test]
fn i22_every_report_fits_before_the_host_goes_even_if_a_call_hangs() {
    let mut one = One::executing();
    one.happens(ClaimEvent::Release { deadline: Some(at(15)) });
    one.now = at(6);
    let acts = one.happens(FAILED);
    let [ClaimAction::Report { outcome: SHUTDOWN, timeout }] = acts[..] else { panic!("{acts:?}") };
    assert_eq!(timeout, secs(9) / REPORT_ATTEMPTS_MIN);
    one.now = at(6).plus(timeout);
    assert_eq!(one.happens(ClaimEvent::Reported(Err(RETRY))), []);
    let acts = one.pass_to(at(11), crate::rules::support::Reclaims::Silent);
    assert!(matches!(acts[..], [ClaimAction::Report { outcome: SHUTDOWN, .. }]), "{acts:?}");
}

#[test]
fn i22_a_host_that_goes_at_an_unknown_time_waits_for_no_poll() {
    for before in [None, Some(RELEASE)] {
        let mut bench = Bench::claims(2);
        let grant = bench.grant("T");
        let claim = grant.token;
        assert_eq!(polls(&bench.brought(vec![grant])), 1, "the other slot waits in the next poll");
        bench.tell(claim, PREPARED);
        let waits = before.is_some();
        if let Some(before) = before {
            bench.happens(before);
            let ended = bench.tell(claim, FAILED);
            assert!(!acts!(ended, ClaimAction::Report { .. }), "the worker may wait: {ended:?}");
        }
        let mut effects = bench.happens(Event::TerminationNotice { deadline: None });
        if !waits {
            effects = bench.tell(claim, FAILED);
        }
        assert!(acts!(effects, ClaimAction::Report { .. }), "the host may be gone the next second: {effects:?}");
    }
}
