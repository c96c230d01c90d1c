//! I22: at shutdown every claim is either resolved `worker-shutdown` in time or expires, and no claim is added.

use std::time::Duration;

use journeyman_domain::claim::{
    CancelCause, ClaimAction, ClaimEnd, ClaimEvent, LossReason, POLL_WAIT_MAX, RunTerms, SHUTDOWN_UPLOAD_MAX,
};
use journeyman_domain::lease::Granted;
use journeyman_domain::outcome::Outcome;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{Alert, Effect, Event, ExitReason, GrantedClaim};

use crate::rules::support::{
    Bench, COMPLETED, DRAIN, FAILED, GRACE, LAST_RUN, LEASE, LEFT_TO_EXPIRE, One, PREPARED, RELEASE, RELEASE_CLAIM,
    REPORTED, RETRY, Reclaims, SHUTDOWN, UPLOADED, acts, at, claims, has, policy, polls, run, secs,
};

fn notice(secs: u64) -> ClaimEvent {
    ClaimEvent::Release { deadline: Some(at(secs)) }
}

#[test]
fn i22_without_time_for_a_report_the_claim_is_left_to_expire() {
    let mut one = One::executing();
    assert_eq!(one.happens(notice(3)), [ClaimAction::Kill { cause: CancelCause::Shutdown, grace: Duration::ZERO }]);
    assert_eq!(one.happens(COMPLETED), [LEFT_TO_EXPIRE]);
}

#[test]
fn i22_a_payload_that_ends_too_late_is_not_reported() {
    let mut one = One::executing();
    one.happens(notice(20));
    let acts = one.pass_to(at(20), Reclaims::Silent);
    assert_eq!(acts, [ClaimAction::Kill { cause: CancelCause::Shutdown, grace: Duration::ZERO }]);
    assert_eq!(one.happens(COMPLETED), [LEFT_TO_EXPIRE]);
}

#[test]
fn i22_nothing_is_reported_at_the_deadline_itself() {
    let mut one = One::executing();
    one.happens(notice(20));
    let acts = one.happens_at(at(20), COMPLETED);
    assert_eq!(acts, [LEFT_TO_EXPIRE]);

    let mut one = One::settling();
    one.happens(notice(20));
    let acts = one.happens_at(at(20), UPLOADED);
    assert_eq!(acts, [LEFT_TO_EXPIRE]);

    let mut one = One::requested();
    one.happens(notice(20));
    let acts = one.happens_at(at(20), ClaimEvent::Claimed(Ok(Granted { sent_at: at(1), length: LEASE })));
    assert_eq!(acts, [LEFT_TO_EXPIRE]);
}

#[test]
fn i22_a_finished_payload_keeps_its_outcome_if_its_artifacts_are_stored_in_time() {
    let mut one = One::settling();
    one.happens(notice(60));
    let acts = one.happens_at(at(56), UPLOADED);
    assert!(matches!(acts[..], [ClaimAction::Report { outcome: Outcome::Completed, .. }]), "{acts:?}");
}

#[test]
fn i22_artifacts_that_are_not_stored_in_time_turn_a_success_into_a_hand_back() {
    let mut one = One::settling();
    one.happens(notice(60));
    assert_eq!(one.pass_to(at(56), Reclaims::Silent), []);
    let acts = one.pass_to(at(57), Reclaims::Silent);
    assert!(matches!(acts[..], [ClaimAction::Report { outcome: SHUTDOWN, .. }]), "{acts:?}");
    assert_eq!(one.happens(REPORTED), [], "what is being stored may go on until the host goes");
    assert_eq!(one.happens(UPLOADED), [ClaimAction::Close(ClaimEnd::Reported(SHUTDOWN))]);
}

#[test]
fn i22_an_order_without_a_time_after_a_notice_with_one_leaves_no_more_than_it_would_alone() {
    let mut one = One::settling();
    one.happens(notice(3600));
    one.now = at(10);
    one.happens(RELEASE_CLAIM);
    let acts = one.pass_to(at(10).plus(SHUTDOWN_UPLOAD_MAX), Reclaims::Granted);
    assert!(matches!(acts[..], [ClaimAction::Report { outcome: SHUTDOWN, .. }]), "{acts:?}");
}

#[test]
fn i22_a_log_that_is_not_stored_by_the_deadline_does_not_hold_the_worker() {
    let mut one = One::executing();
    one.happens(notice(60));
    one.happens(FAILED);
    assert_eq!(one.happens(REPORTED), [ClaimAction::Upload]);
    assert_eq!(one.pass_to(at(60), Reclaims::Silent), [ClaimAction::Close(ClaimEnd::Reported(SHUTDOWN))]);
}

#[test]
fn i22_an_unanswered_report_is_given_up_at_the_deadline() {
    let mut one = One::reporting();
    one.happens(notice(60));
    let end = ClaimEnd::Unconfirmed { outcome: Outcome::Completed, loss: LossReason::ShutdownDeadline };
    assert_eq!(one.pass_to(at(60), Reclaims::Silent), [ClaimAction::Close(end)]);
}

#[test]
fn i22_the_earlier_of_two_deadlines_counts() {
    let mut one = One::settling();
    one.happens(notice(60));
    one.happens(notice(30));
    one.happens(RELEASE_CLAIM);
    one.happens(notice(90));
    let acts = one.pass_to(at(30), Reclaims::Silent);
    assert!(
        matches!(
            acts[..],
            [
                ClaimAction::Report { .. },
                ClaimAction::Close(ClaimEnd::Unconfirmed { loss: LossReason::ShutdownDeadline, .. })
            ]
        ),
        "{acts:?}"
    );
    assert_eq!(one.now, at(30));
}

#[test]
fn i22_a_grant_that_arrives_on_the_way_out_is_handed_back_and_never_prepared() {
    for order in [DRAIN, RELEASE, Event::Release { deadline: Some(at(60)) }] {
        let mut bench = Bench::messages(1, 1);
        let (claim, _) = bench.receive("m1", "T");
        assert_eq!(bench.happens(order.clone()), []);
        let effects = bench.claimed(claim, Ok(LEASE));
        assert!(effects.contains(&Effect::Delete(claim)), "{order:?}: {effects:?}");
        assert!(
            has!(effects, Effect::Claim(token, ClaimAction::Report { outcome: SHUTDOWN, .. }) if *token == claim),
            "{order:?}: {effects:?}"
        );
        assert!(!effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)));
        bench.deleted(claim, Ok(()));
        let effects = bench.tell(claim, REPORTED);
        assert!(matches!(effects.last(), Some(Effect::Exit(_))), "{order:?}: {effects:?}");
    }
}

#[test]
fn i22_a_claim_request_without_an_answer_is_not_sent_again_on_the_way_out() {
    for order in [DRAIN, RELEASE] {
        // It waits for its next attempt when the order comes.
        let mut bench = Bench::messages(1, 1);
        let (claim, _) = bench.receive("m1", "T");
        bench.claimed(claim, Err(RETRY));
        let mut effects = bench.happens(order.clone());
        effects.extend(bench.pass(secs(60)));
        assert_eq!(claims(&effects), 0, "{order:?}: {effects:?}");
        assert!(effects.contains(&Effect::Claim(claim, ClaimAction::Close(ClaimEnd::NotGranted))), "{effects:?}");
        assert!(effects.contains(&Effect::DropMessage(claim)), "{effects:?}");
        assert!(matches!(effects.last(), Some(Effect::Exit(_))), "{order:?}: {effects:?}");

        // It is on its way when the order comes.
        let mut bench = Bench::messages(1, 1);
        let (claim, _) = bench.receive("m1", "T");
        bench.happens(order.clone());
        let mut effects = bench.claimed(claim, Err(RETRY));
        effects.extend(bench.pass(secs(60)));
        assert_eq!(claims(&effects), 0, "{order:?}: {effects:?}");
        assert!(matches!(effects.last(), Some(Effect::Exit(_))), "{order:?}: {effects:?}");
    }
}

#[test]
fn i22_nothing_is_polled_or_claimed_after_the_order() {
    let notice = Event::TerminationNotice { deadline: Some(at(120)) };
    for order in [DRAIN, RELEASE, notice] {
        let mut bench = Bench::messages(4, 2);
        let claim = bench.executing("m1", "T");
        let mut effects = bench.happens(order.clone());
        let seen = bench.seen("m2", "T2");
        effects.extend(bench.hit(vec![seen]));
        effects.extend(bench.pass(secs(60)));
        assert_eq!((claims(&effects), polls(&effects)), (0, 0), "{order:?}: {effects:?}");
        assert!(bench.worker.claims().any(|view| view.claim == claim));
    }
}

#[test]
fn i22_a_drain_lets_payloads_finish_and_reports_their_outcome() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    assert_eq!(bench.happens(DRAIN), []);
    assert_eq!(bench.pass(secs(600)), []);
    let effects = bench.completes(claim);
    assert!(acts!(effects, ClaimAction::Report { outcome: Outcome::Completed, .. }));
    assert_eq!(effects.last(), Some(&Effect::Exit(ExitReason::Drained)));
}

#[test]
fn i22_a_drain_that_takes_too_long_hands_back() {
    let mut bench = Bench::opened_with(
        journeyman_domain::worker::WorkerPolicy { drain_deadline: Some(secs(300)), ..policy(1) },
        &[crate::rules::support::MESSAGES],
    );
    let claim = bench.executing("m1", "T");
    bench.happens(DRAIN);
    assert_eq!(bench.pass(secs(299)), []);
    let effects = bench.pass(secs(1));
    assert_eq!(effects, [Effect::Claim(claim, ClaimAction::Kill { cause: CancelCause::Shutdown, grace: GRACE })]);
    let effects = bench.stops(claim);
    assert_eq!(effects.last(), Some(&Effect::Exit(ExitReason::Released)));
}

#[test]
fn i22_a_long_poll_under_way_is_waited_for_and_what_it_brings_is_handed_back() {
    let notice = Event::TerminationNotice { deadline: Some(at(120)) };
    for (order, exit) in [(DRAIN, ExitReason::Drained), (notice, ExitReason::HostTerminating)] {
        let mut bench = Bench::claims(2);
        assert_eq!(bench.happens(order), []);
        let (claim, effects) = bench.granted("T");
        let late = Effect::Alert(Alert::LateGrant { run: run("T") });
        assert!(effects.contains(&late), "{effects:?}");
        assert!(acts!(effects, ClaimAction::Report { outcome: SHUTDOWN, .. }), "{effects:?}");
        assert_eq!(bench.tell(claim, REPORTED).last(), Some(&Effect::Exit(exit)));
    }
}

#[test]
fn b7_a_claim_without_retries_runs_although_the_worker_drains() {
    for (retries_left, runs) in [(Some(0), true), (None, true), (Some(1), false)] {
        let terms = RunTerms { deadline: None, retries_left };
        // A long poll grants it.
        let mut bench = Bench::claims(2);
        bench.happens(DRAIN);
        let grant = GrantedClaim { terms, ..bench.grant("T") };
        let claim = grant.token;
        let effects = bench.brought(vec![grant]);
        assert_eq!(
            effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)),
            runs,
            "{retries_left:?}: {effects:?}"
        );
        assert_eq!(has!(effects, Effect::Alert(Alert::LastRun { .. })), runs, "{effects:?}");
        if runs {
            bench.tell(claim, PREPARED);
            assert_eq!(bench.completes(claim).last(), Some(&Effect::Exit(ExitReason::Drained)));
        }
        // The claim of a message was on its way.
        let mut bench = Bench::messages(1, 1);
        let (claim, _) = bench.receive("m1", "T");
        bench.happens(DRAIN);
        bench.tell(claim, ClaimEvent::Terms(terms));
        let effects = bench.tell(claim, ClaimEvent::Claimed(Ok(Granted { sent_at: bench.now, length: LEASE })));
        assert_eq!(
            effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)),
            runs,
            "{retries_left:?}: {effects:?}"
        );
    }
}

#[test]
fn b7_a_claim_without_retries_is_released_where_there_is_no_time() {
    for order in [RELEASE, Event::TerminationNotice { deadline: None }] {
        let mut bench = Bench::claims(2);
        bench.happens(order.clone());
        let grant = GrantedClaim { terms: LAST_RUN, ..bench.grant("T") };
        let effects = bench.brought(vec![grant]);
        assert!(acts!(effects, ClaimAction::Report { outcome: SHUTDOWN, .. }), "{order:?}: {effects:?}");
    }
}

#[test]
fn i22_past_the_deadline_the_worker_waits_for_the_payload_only_and_without_spinning() {
    let mut bench = Bench::messages(2, 1);
    let claim = bench.executing("m1", "T");
    bench.happens(Event::Release { deadline: Some(at(30)) });
    let effects = bench.pass(secs(30));
    assert!(!has!(effects, Effect::Exit(_)), "{effects:?}");
    assert!(bench.worker.next_deadline().is_none_or(|next| next > bench.now), "nothing is due");
    let effects = bench.tell(claim, FAILED);
    assert_eq!(
        effects.last(),
        Some(&Effect::Exit(ExitReason::Released)),
        "a poll under way does not hold it: {effects:?}"
    );
}

#[test]
fn i22_what_a_poll_brings_past_the_deadline_is_left_to_expire() {
    let mut bench = Bench::claims(2);
    let (executing, _) = bench.granted("T1");
    bench.tell(executing, PREPARED);
    bench.happens(Event::Release { deadline: Some(at(30)) });
    bench.pass(secs(30));
    let (claim, effects) = bench.granted("T2");
    let late = Effect::Alert(Alert::LateGrant { run: run("T2") });
    assert_eq!(effects, [late, Effect::Claim(claim, LEFT_TO_EXPIRE)]);
}

#[test]
fn i22_an_abort_exits_at_once_and_nothing_follows() {
    let mut bench = Bench::messages(2, 1);
    let claim = bench.executing("m1", "T");
    assert_eq!(bench.happens(Event::Abort), [Effect::Exit(ExitReason::Aborted)]);
    assert_eq!(bench.worker.next_deadline(), None);
    for event in [Event::Claim(claim, FAILED), DRAIN, RELEASE, Event::Abort, Event::Tick] {
        assert_eq!(bench.happens(event), []);
    }
}

#[test]
fn i22_a_definite_answer_during_the_way_out_still_settles_its_message() {
    let mut bench = Bench::messages(1, 1);
    let (claim, _) = bench.receive("m1", "T");
    bench.happens(RELEASE);
    let effects = bench.claimed(claim, Err(Refusal::Gone));
    assert!(effects.contains(&Effect::Delete(claim)), "{effects:?}");
    assert_eq!(bench.deleted(claim, Ok(())).last(), Some(&Effect::Exit(ExitReason::Released)));
}

#[test]
fn i22_artifacts_stored_while_the_hurried_report_is_under_way_leave_nothing_to_wait_for() {
    let mut one = One::settling();
    one.happens(notice(60));
    one.pass_to(at(57), Reclaims::Silent);
    assert_eq!(one.happens(UPLOADED), []);
    assert_eq!(one.happens(REPORTED), [ClaimAction::Close(ClaimEnd::Reported(SHUTDOWN))]);
}

#[test]
fn i22_a_hand_back_waits_for_no_poll_into_the_last_seconds_even_if_these_are_named_later() {
    let mut one = One::executing();
    one.happens(ClaimEvent::PollStarted);
    one.happens(RELEASE_CLAIM);
    assert_eq!(one.happens(FAILED), []);
    let deadline = one.now.plus(secs(10));
    one.happens(ClaimEvent::PollStarted);
    assert_eq!(one.happens(ClaimEvent::Release { deadline: Some(deadline) }), []);
    let acts = one.pass_to(deadline.minus(secs(1)), Reclaims::Silent);
    assert!(matches!(acts[..], [ClaimAction::Report { .. }]), "{acts:?}");
}

#[test]
fn i22_a_hand_back_waits_for_no_poll_longer_than_its_limit() {
    let mut one = One::executing();
    one.happens(ClaimEvent::PollStarted);
    one.happens(RELEASE_CLAIM);
    assert_eq!(one.happens(FAILED), []);
    let acts = one.pass_to(one.now.plus(POLL_WAIT_MAX), Reclaims::Silent);
    assert!(matches!(acts[..], [ClaimAction::Report { .. }]), "{acts:?}");
}

#[test]
fn i22_a_drain_with_an_end_of_its_own_counts_from_when_it_was_said_and_may_give_more_time() {
    let mut bench = Bench::opened_with(
        journeyman_domain::worker::WorkerPolicy { drain_deadline: Some(secs(300)), ..policy(1) },
        &[crate::rules::support::MESSAGES],
    );
    let claim = bench.executing("m1", "T1");
    bench.empty();
    bench.happens(DRAIN);
    bench.pass(secs(200));
    let deadline = bench.now.plus(secs(600));
    assert_eq!(bench.happens(Event::Drain { deadline: Some(deadline) }), []);
    assert!(
        !has!(bench.pass(secs(599)), Effect::Claim(told, ClaimAction::Kill { .. }) if *told == claim),
        "the time that was given last counts"
    );
    assert!(has!(bench.pass(secs(2)), Effect::Claim(told, ClaimAction::Kill { .. }) if *told == claim));
}

#[test]
fn e6_a_drain_releases_what_another_worker_can_go_on_with_unless_it_is_a_last_run() {
    let mut bench = Bench::messages(3, 1);
    let [launched, last] = [("m1", "T1"), ("m2", "T2")].map(|(id, name)| bench.executing(id, name));
    bench.tell(last, ClaimEvent::Terms(LAST_RUN));
    assert_eq!(bench.happens(Event::HandOver(vec![launched, last])), [], "it does not drain");
    bench.happens(DRAIN);
    let effects = bench.happens(Event::HandOver(vec![launched, last]));
    let stop = ClaimAction::Kill { cause: CancelCause::Shutdown, grace: GRACE };
    assert_eq!(effects, [Effect::Claim(launched, stop)]);
    let effects = bench.tell(launched, FAILED);
    assert!(acts!(effects, ClaimAction::Report { outcome: SHUTDOWN, .. }), "{effects:?}");
    let effects = bench.completes(last);
    assert!(acts!(effects, ClaimAction::Close(ClaimEnd::Reported(Outcome::Completed))), "{effects:?}");
}
