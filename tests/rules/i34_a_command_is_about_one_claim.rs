//! I34: a command ends one claim and no other, in any state of that claim, and decides its outcome unless that was sent already.

use journeyman_domain::claim::{
    CancelCause, CancelCommand, CancelResult, ClaimAction, ClaimEnd, ClaimEvent, LossReason, POLL_WAIT_MAX,
};
use journeyman_domain::id::LocalToken;
use journeyman_domain::lease::Granted;
use journeyman_domain::outcome::{ExceptionReason, ExecuteFailure, Outcome, PrepareFailure};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{Effect, Event};

use crate::rules::support::{
    Bench, COMPLETED, FAILED, GRACE, LEASE, MARGIN, One, PREPARED, RELEASE, RELEASE_CLAIM, REPORTED, RETRY, Reclaims,
    SHUTDOWN, UNANSWERED, UPLOADED, acts, at, secs,
};

const ORDERS: [CancelCommand; 2] = [CancelCommand::Release, CancelCommand::Cancel];
const INTERNAL: Outcome = Outcome::Exception(ExceptionReason::InternalError);

fn ordered(one: &mut One, order: CancelCommand) -> (CancelResult, Vec<ClaimAction>) {
    let obeyed = one.machine.preview_cancel(order);
    (obeyed, one.happens(ClaimEvent::Command(order)))
}

fn reports(acts: &[ClaimAction]) -> Vec<Outcome> {
    acts.iter()
        .filter_map(|act| if let ClaimAction::Report { outcome, .. } = act { Some(*outcome) } else { None })
        .collect()
}

#[test]
fn i34_what_runs_is_told_to_end_and_reported_once_nothing_of_it_is_left() {
    for (order, outcome) in [(CancelCommand::Release, SHUTDOWN), (CancelCommand::Cancel, INTERNAL)] {
        for mut one in [One::preparing(), One::executing()] {
            let (obeyed, acts) = ordered(&mut one, order);
            assert_eq!(obeyed, CancelResult::Stopping(outcome));
            assert_eq!(acts, [ClaimAction::Kill { cause: CancelCause::Command(order), grace: GRACE }]);
            assert_eq!(ordered(&mut one, order), (CancelResult::Stopping(outcome), Vec::new()), "it is told once");
            let acts = one.happens(COMPLETED);
            assert_eq!(reports(&acts), [outcome], "I21: what it said does not count");
            let acts = one.happens(REPORTED);
            assert_eq!(acts, [ClaimAction::Upload], "the log follows");
            assert_eq!(ordered(&mut one, order), (CancelResult::AlreadyReported(outcome), Vec::new()));
            assert_eq!(one.happens(UPLOADED), [ClaimAction::Close(ClaimEnd::Reported(outcome))]);
        }
    }
}

#[test]
fn i34_a_claim_that_is_being_asked_for_is_reported_when_it_is_granted_and_never_prepared() {
    let granted = ClaimEvent::Claimed(Ok(Granted { sent_at: at(0), length: LEASE }));
    let mut one = One::requested();
    assert_eq!(ordered(&mut one, CancelCommand::Release), (CancelResult::ReportWhenGranted(SHUTDOWN), Vec::new()));
    let acts = one.happens(granted);
    assert_eq!(reports(&acts), [SHUTDOWN]);
    assert!(!acts.contains(&ClaimAction::Prepare), "{acts:?}");

    let mut one = One::requested();
    assert_eq!(ordered(&mut one, CancelCommand::Cancel), (CancelResult::ReportWhenGranted(INTERNAL), Vec::new()));
    assert_eq!(one.happens(granted), [ClaimAction::Upload], "its log says why nothing was run");
    assert_eq!(reports(&one.happens(UPLOADED)), [INTERNAL]);
}

#[test]
fn i34_a_claim_that_was_not_answered_is_let_go_for_a_hand_back_and_asked_for_again_to_be_canceled() {
    let mut one = One::requested();
    one.happens(UNANSWERED);
    assert_eq!(
        ordered(&mut one, CancelCommand::Release),
        (CancelResult::NotRequested, vec![ClaimAction::Close(ClaimEnd::NotGranted)])
    );

    let mut one = One::requested();
    ordered(&mut one, CancelCommand::Release);
    assert_eq!(one.happens(UNANSWERED), [ClaimAction::Close(ClaimEnd::NotGranted)]);

    let mut one = One::requested();
    one.happens(UNANSWERED);
    ordered(&mut one, CancelCommand::Cancel);
    assert_eq!(one.pass_to(at(60), Reclaims::Silent), [ClaimAction::Request]);
}

#[test]
fn i34_what_has_ended_and_is_being_stored_is_reported_at_once() {
    for (order, before, after) in [
        (CancelCommand::Release, Ok(Ok(())), SHUTDOWN),
        (CancelCommand::Release, Ok(Err(ExecuteFailure::Failed)), SHUTDOWN),
        (
            CancelCommand::Release,
            Ok(Err(ExecuteFailure::Intermittent)),
            Outcome::Exception(ExceptionReason::IntermittentTask),
        ),
        (CancelCommand::Release, Ok(Err(ExecuteFailure::Internal)), INTERNAL),
        (CancelCommand::Release, Err(PrepareFailure::Malformed), Outcome::Exception(ExceptionReason::MalformedPayload)),
        (CancelCommand::Cancel, Ok(Ok(())), INTERNAL),
        (CancelCommand::Cancel, Ok(Err(ExecuteFailure::Failed)), Outcome::Failed),
        (CancelCommand::Cancel, Ok(Err(ExecuteFailure::Intermittent)), INTERNAL),
        (CancelCommand::Cancel, Err(PrepareFailure::HostFault), INTERNAL),
        (CancelCommand::Cancel, Err(PrepareFailure::Malformed), Outcome::Exception(ExceptionReason::MalformedPayload)),
    ] {
        let mut one = match before {
            Ok(verdict) => {
                let mut one = One::executing();
                one.happens(ClaimEvent::Ended(verdict));
                one
            }
            Err(unprepared) => {
                let mut one = One::preparing();
                one.happens(ClaimEvent::Prepared(Err(unprepared)));
                one
            }
        };
        let (obeyed, acts) = ordered(&mut one, order);
        assert_eq!((obeyed, reports(&acts)), (CancelResult::Reporting(after), vec![after]), "{order:?} of {before:?}");
        assert_eq!(one.happens(REPORTED), []);
        assert_eq!(one.happens(UPLOADED), [ClaimAction::Close(ClaimEnd::Reported(after))]);
    }
}

#[test]
fn i34_i09_an_outcome_that_was_sent_stays_what_it_is() {
    for order in ORDERS {
        let mut one = One::reporting();
        assert_eq!(ordered(&mut one, order), (CancelResult::AlreadyReported(Outcome::Completed), Vec::new()));
        one.happens(ClaimEvent::Reported(Err(RETRY)));
        assert_eq!(
            ordered(&mut one, order),
            (CancelResult::AlreadyReported(Outcome::Completed), Vec::new()),
            "nor between two tries"
        );
        let acts = one.pass_to(at(60), Reclaims::Granted);
        assert_eq!(reports(&acts), [Outcome::Completed]);
        one.happens(REPORTED);
    }
}

#[test]
fn i34_a_lost_claim_is_reported_for_no_order() {
    for order in ORDERS {
        let mut one = One::executing();
        one.happens(ClaimEvent::Reclaimed(Err(Refusal::Gone)));
        assert_eq!(ordered(&mut one, order), (CancelResult::Lost(LossReason::Revoked), Vec::new()));
        assert_eq!(one.happens(FAILED), [ClaimAction::Close(ClaimEnd::Lost(LossReason::Revoked))]);

        let mut one = One::executing();
        ordered(&mut one, order);
        let acts = one.happens(ClaimEvent::Reclaimed(Err(Refusal::Gone)));
        assert!(
            matches!(acts[..], [ClaimAction::Kill { cause: CancelCause::ClaimLost(LossReason::Revoked), .. }]),
            "{acts:?}"
        );
        assert_eq!(one.happens(FAILED), [ClaimAction::Close(ClaimEnd::Lost(LossReason::Revoked))]);
    }
}

#[test]
fn i34_i22_a_canceled_task_is_not_handed_back_by_a_worker_that_has_to_go_and_the_hosts_end_keeps_its_time() {
    for deadline in [None, Some(at(8))] {
        let mut one = One::executing();
        one.happens(ClaimEvent::Command(CancelCommand::Cancel));
        let acts = one.happens(ClaimEvent::Release { deadline });
        assert!(matches!(acts[..], [ClaimAction::Kill { cause: CancelCause::Shutdown, .. }]), "{acts:?}");
        assert_eq!(reports(&one.happens(FAILED)), [INTERNAL]);
    }
    let mut one = One::executing();
    one.happens(ClaimEvent::PollStarted);
    one.happens(RELEASE_CLAIM);
    assert_eq!(one.happens(FAILED), [], "it waits for a poll that would bring it back");
    let (obeyed, acts) = ordered(&mut one, CancelCommand::Cancel);
    assert_eq!(
        (obeyed, reports(&acts)),
        (CancelResult::Reporting(INTERNAL), vec![INTERNAL]),
        "this task is not retried"
    );
}

#[test]
fn i34_i23_neighbours_run_on_and_its_slot_is_used_again() {
    let mut bench = Bench::messages(2, 1);
    let seen = [bench.seen("m1", "A"), bench.seen("m2", "B")];
    let [one, other] = seen.each_ref().map(|seen| seen.token);
    bench.hit(seen.to_vec());
    for claim in [one, other] {
        bench.claimed(claim, Ok(LEASE));
        bench.deleted(claim, Ok(()));
        bench.tell(claim, PREPARED);
    }
    let order = CancelCommand::Release;
    let effects = bench.tell(one, ClaimEvent::Command(order));
    assert_eq!(effects, [Effect::Claim(one, ClaimAction::Kill { cause: CancelCause::Command(order), grace: GRACE })]);
    let effects = bench.tell(one, FAILED);
    assert!(
        matches!(effects[..], [Effect::Claim(claim, ClaimAction::Report { outcome: SHUTDOWN, .. })] if claim == one),
        "{effects:?}"
    );
    bench.tell(one, REPORTED);
    let effects = bench.tell(one, UPLOADED);
    assert!(matches!(effects.last(), Some(Effect::Poll { max: 1, .. })), "its slot is asked for again: {effects:?}");
    let effects = bench.tell(LocalToken(99), ClaimEvent::Command(order));
    assert_eq!(effects, [], "a claim that is not held has no effect");
    let effects = bench.completes(other);
    assert!(acts!(effects, ClaimAction::Report { outcome: Outcome::Completed, .. }));
}

#[test]
fn i34_i22_what_is_being_ended_by_an_order_is_told_of_the_hosts_end() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "A");
    bench.happens(Event::TerminationNotice { deadline: Some(at(120)) });
    bench.pass(secs(60));
    bench.tell(claim, ClaimEvent::Command(CancelCommand::Release));
    let effects = bench.pass(secs(60) - MARGIN);
    assert!(acts!(effects, ClaimAction::Kill { cause: CancelCause::Shutdown, .. }), "{effects:?}");
}

#[test]
fn i34_what_a_paused_worker_hands_back_waits_for_the_poll_that_would_bring_it_back() {
    for (paused, resumed) in [(true, false), (true, true), (false, false)] {
        let mut bench = Bench::claims(2);
        let (claim, _) = bench.granted("A");
        bench.tell(claim, PREPARED);
        if paused {
            bench.happens(Event::Pause { until: None });
        }
        bench.tell(claim, ClaimEvent::Command(CancelCommand::Release));
        if resumed {
            bench.happens(Event::Resume);
        }
        let effects = bench.tell(claim, FAILED);
        assert_eq!(
            acts!(effects, ClaimAction::Report { outcome: SHUTDOWN, .. }),
            !paused,
            "one that asks on has nothing to wait for: {effects:?}"
        );
        let effects = bench.empty();
        assert_eq!(acts!(effects, ClaimAction::Report { outcome: SHUTDOWN, .. }), paused, "{effects:?}");
    }
}

#[test]
fn i34_a_cancel_decides_about_a_release_whose_wait_for_a_poll_has_just_ended() {
    let mut bench = Bench::claims(2);
    let (claim, _) = bench.granted("A");
    bench.tell(claim, PREPARED);
    bench.happens(RELEASE);
    assert!(!acts!(bench.tell(claim, FAILED), ClaimAction::Report { .. }), "it waits for the poll");
    // The timer is late, and the command comes first.
    bench.now = bench.now.plus(POLL_WAIT_MAX);
    let effects = bench.tell(claim, ClaimEvent::Command(CancelCommand::Cancel));
    assert!(acts!(effects, ClaimAction::Report { outcome: INTERNAL, .. }), "{effects:?}");
}
