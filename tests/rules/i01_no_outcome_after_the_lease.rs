//! I1: no outcome is sent at or after `abandon_at`, nor after a reply that said the claim is lost.

use std::time::Duration;

use journeyman::domain::claim::{Act, End, Happening, Loss, Settled};
use journeyman::domain::outcome::{Outcome, Reason, Verdict};
use journeyman::domain::refusal::Refusal;

use crate::support::{GRACE, LEASE, One, RETRY, Reclaims, at};

const NANO: Duration = Duration::from_nanos(1);

/// A report of success without an answer, and then a loss: it is not said that nothing was reported.
fn unconfirmed(loss: Loss) -> End {
    End::Unconfirmed { outcome: Outcome::Completed, loss }
}

#[test]
fn i01_an_outcome_is_still_sent_just_before_the_lease_is_given_up() {
    let mut one = One::settling();
    let acts = one.happens_at(one.abandon_at().minus(NANO), Happening::Settled(Settled::Clean));
    assert!(acts.iter().any(|act| matches!(act, Act::Report { outcome: Outcome::Completed, .. })), "{acts:?}");
}

#[test]
fn i01_an_outcome_that_is_ready_when_the_lease_is_given_up_is_not_sent() {
    let mut one = One::settling();
    let acts = one.happens_at(one.abandon_at(), Happening::Settled(Settled::Clean));
    assert_eq!(acts, [Act::Close(End::Lost(Loss::LeaseOver))]);
}

#[test]
fn i01_a_report_is_not_repeated_once_the_lease_is_given_up() {
    let mut one = One::reporting();
    one.now = one.abandon_at().minus(NANO);
    assert!(!one.happens(Happening::Reported(Err(RETRY))).iter().any(|act| matches!(act, Act::Report { .. })));
    let acts = one.pass_to(at(LEASE.as_secs()), Reclaims::Silent);
    assert_eq!(acts, [Act::Close(unconfirmed(Loss::LeaseOver))]);
}

#[test]
fn i01_a_report_on_its_way_when_the_lease_ends_decides_by_its_answer_and_is_not_repeated() {
    for (answer, end) in [
        (Ok(()), End::Reported(Outcome::Completed)),
        (Err(Refusal::Gone), End::Superseded(Outcome::Completed)),
        (Err(RETRY), unconfirmed(Loss::LeaseOver)),
        (Err(Refusal::Denied), unconfirmed(Loss::LeaseOver)),
    ] {
        let mut one = One::reporting();
        let acts = one.pass_to(one.abandon_at(), Reclaims::Silent);
        assert!(!acts.iter().any(|act| matches!(act, Act::Close(_) | Act::Report { .. })), "{acts:?}");
        assert_eq!(one.happens(Happening::Reported(answer)), [Act::Close(end)]);
    }
}

#[test]
fn i01_a_lost_claim_is_never_reported_whatever_stage_it_was_in() {
    let lost = Happening::Reclaimed { sent_at: at(0), answer: Err(Refusal::Gone) };
    let mut settling = One::settling();
    assert_eq!(settling.happens(lost), [Act::Close(End::Lost(Loss::Refused))]);

    let mut waiting = One::reporting();
    waiting.happens(Happening::Reported(Err(RETRY)));
    assert_eq!(waiting.happens(lost), [Act::Close(unconfirmed(Loss::Refused))]);

    let mut sent = One::reporting();
    assert_eq!(sent.happens(lost), []);
    assert_eq!(sent.happens(Happening::Reported(Err(RETRY))), [Act::Close(unconfirmed(Loss::Refused))]);

    let mut executing = One::executing();
    assert!(matches!(executing.happens(lost)[..], [Act::Kill { .. }]));
    assert_eq!(executing.happens(Happening::Ended(Verdict::Completed)), [Act::Close(End::Lost(Loss::Refused))]);
}

#[test]
fn i01_a_worker_told_to_go_that_learns_of_its_loss_reports_nothing() {
    let mut one = One::executing();
    one.happens(Happening::HandBack { deadline: None });
    let acts = one.happens(Happening::Reclaimed { sent_at: at(0), answer: Err(Refusal::Gone) });
    assert!(matches!(acts[..], [Act::Kill { .. }]), "{acts:?}");
    assert_eq!(one.happens(Happening::Ended(Verdict::Failed)), [Act::Close(End::Lost(Loss::Refused))]);
}

#[test]
fn i01_a_hand_back_that_ends_after_the_lease_is_not_reported() {
    let mut one = One::executing();
    one.happens(Happening::HandBack { deadline: None });
    let acts = one.pass_to(one.abandon_at(), Reclaims::Silent);
    assert!(matches!(acts.last(), Some(Act::Kill { .. })), "{acts:?}");
    assert_eq!(one.happens(Happening::Ended(Verdict::Failed)), [Act::Close(End::Lost(Loss::LeaseOver))]);
}

#[test]
fn i01_the_answer_to_a_report_comes_before_the_queue_may_give_the_run_away() {
    let mut one = One::settling();
    let acts = one.happens_at(one.abandon_at().minus(NANO), Happening::Settled(Settled::Clean));
    let deadline = one.machine.lease().expect("granted").deadline();
    for act in acts {
        if let Act::Report { timeout, .. } = act {
            assert!(one.now.plus(timeout) < deadline);
        }
    }
}

#[test]
fn i01_a_canceled_run_is_not_reported() {
    let mut one = One::executing();
    assert!(matches!(one.happens(Happening::Checked(Ok(true)))[..], [Act::Kill { grace: GRACE, .. }]));
    assert_eq!(one.happens(Happening::Ended(Verdict::Failed)), [Act::Close(End::Lost(Loss::Canceled))]);
}

#[test]
fn i01_a_hurried_report_says_worker_shutdown_and_nothing_else() {
    let mut one = One::settling();
    assert_eq!(one.happens(Happening::HandBack { deadline: Some(at(60)) }), []);
    let acts = one.pass_to(at(57), Reclaims::Silent);
    let expected = Outcome::Exception(Reason::WorkerShutdown);
    assert!(matches!(acts[..], [Act::Report { outcome, .. }] if outcome == expected), "{acts:?}");
}
