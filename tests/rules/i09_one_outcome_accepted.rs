//! I9: the worker stops sending after the first definite answer to its report.

use journeyman::domain::claim::{Act, End, Happening, Loss};
use journeyman::domain::outcome::Outcome;
use journeyman::domain::refusal::Refusal;

use crate::support::{LEASE, One, RETRY, Reclaims, at, secs};

#[test]
fn i09_each_definite_answer_closes_the_claim_and_nothing_follows() {
    for (answer, end) in [
        (Ok(()), End::Reported(Outcome::Completed)),
        (Err(Refusal::Gone), End::Superseded(Outcome::Completed)),
        (Err(Refusal::Rejected), End::Unreportable(Outcome::Completed)),
    ] {
        let mut one = One::reporting();
        assert_eq!(one.happens(Happening::Reported(answer)), [Act::Close(end)]);
        assert_eq!(one.machine.next_deadline(), None);
        assert_eq!(one.pass_to(at(10 * LEASE.as_secs()), Reclaims::Granted), []);
        assert_eq!(one.happens(Happening::Reported(Err(RETRY))), []);
    }
}

#[test]
fn i09_an_answer_that_settles_nothing_repeats_the_same_outcome() {
    for refusal in [RETRY, Refusal::Throttled { after: None }, Refusal::Denied, Refusal::Stale] {
        let mut one = One::reporting();
        let acts = one.happens(Happening::Reported(Err(refusal)));
        assert!(!acts.iter().any(|act| matches!(act, Act::Report { .. })), "{acts:?}");
        let acts = one.pass_to(at(20), Reclaims::Granted);
        let reports: Vec<_> = acts.iter().filter(|act| matches!(act, Act::Report { .. })).collect();
        assert!(matches!(reports[..], [Act::Report { outcome: Outcome::Completed, .. }]), "{acts:?}");
    }
}

#[test]
fn i09_the_waits_between_reports_do_not_count_the_requests_before_the_grant() {
    let mut one = One::requested();
    for _ in 0..4 {
        one.happens(Happening::Unanswered { after: None });
        one.pass_to(one.now.plus(secs(10)), Reclaims::Silent);
    }
    one.happens(Happening::Granted { sent_at: one.now, length: LEASE });
    one.happens(Happening::Prepared(Err(journeyman::domain::outcome::Unprepared::Malformed)));
    one.happens(Happening::Settled(journeyman::domain::claim::Settled::Clean));
    one.happens(Happening::Reported(Err(RETRY)));
    let wait = one.machine.next_deadline().expect("it is repeated").since(one.now);
    assert!(wait <= journeyman::domain::claim::REPORT_RETRY.first, "{wait:?}");
}

#[test]
fn i09_a_service_that_asks_for_patience_gets_it() {
    let mut one = One::reporting();
    one.happens(Happening::Reported(Err(Refusal::Throttled { after: Some(secs(120)) })));
    assert_eq!(one.pass_to(at(119), Reclaims::Granted), []);
    assert!(matches!(one.pass_to(at(120), Reclaims::Granted)[..], [Act::Report { .. }]));
}

#[test]
fn i09_refused_credentials_are_renewed_by_a_reclaim_before_the_report_is_repeated() {
    for refusal in [Refusal::Denied, Refusal::Stale] {
        let mut one = One::reporting();
        let acts = one.happens(Happening::Reported(Err(refusal)));
        assert!(matches!(acts[..], [Act::Reclaim { .. }]), "{acts:?}");
    }
}

#[test]
fn i09_a_second_answer_is_ignored() {
    let mut one = One::reporting();
    one.happens(Happening::Reported(Err(RETRY)));
    assert_eq!(one.happens(Happening::Reported(Err(Refusal::Gone))), [], "no report is on its way");
}

#[test]
fn i09_a_loss_after_a_report_that_was_not_answered_is_not_said_to_have_reported_nothing() {
    let mut one = One::reporting();
    one.happens(Happening::Reported(Err(RETRY)));
    // The report was accepted and its answer lost: the queue says of the next reclaim that the run is over.
    let acts = one.happens(Happening::Reclaimed { sent_at: at(0), answer: Err(Refusal::Gone) });
    let end = End::Unconfirmed { outcome: Outcome::Completed, loss: Loss::Refused };
    assert_eq!(acts, [Act::Close(end)]);
}
