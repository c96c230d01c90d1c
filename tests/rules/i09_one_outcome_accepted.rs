//! I9: the worker stops sending after the first definite answer to its report.

use journeyman_domain::claim::{ClaimAction, ClaimEnd, ClaimEvent};
use journeyman_domain::lease::Granted;
use journeyman_domain::outcome::Outcome;
use journeyman_domain::refusal::Refusal;

use crate::rules::support::{LEASE, One, RETRY, Reclaims, UNANSWERED, UPLOADED, at, secs};

#[test]
fn i09_each_definite_answer_closes_the_claim_and_nothing_follows() {
    for (answer, end) in [
        (Ok(()), ClaimEnd::Reported(Outcome::Completed)),
        (Err(Refusal::Gone), ClaimEnd::AlreadyResolved(Outcome::Completed)),
        (Err(Refusal::Rejected), ClaimEnd::ReportRejected(Outcome::Completed)),
    ] {
        let mut one = One::reporting();
        assert_eq!(one.happens(ClaimEvent::Reported(answer)), [ClaimAction::Close(end)]);
        assert_eq!(one.machine.next_deadline(), None);
        assert_eq!(one.pass_to(at(10 * LEASE.as_secs()), Reclaims::Granted), []);
        assert_eq!(one.happens(ClaimEvent::Reported(Err(RETRY))), []);
    }
}

#[test]
fn i09_an_answer_that_settles_nothing_repeats_the_same_outcome() {
    for refusal in [RETRY, Refusal::Throttled { retry_after: None }, Refusal::Denied, Refusal::Stale] {
        let mut one = One::reporting();
        let acts = one.happens(ClaimEvent::Reported(Err(refusal)));
        assert!(!acts.iter().any(|act| matches!(act, ClaimAction::Report { .. })), "{acts:?}");
        let acts = one.pass_to(at(20), Reclaims::Granted);
        let reports: Vec<_> = acts.iter().filter(|act| matches!(act, ClaimAction::Report { .. })).collect();
        assert!(matches!(reports[..], [ClaimAction::Report { outcome: Outcome::Completed, .. }]), "{acts:?}");
    }
}

#[test]
fn i09_the_waits_between_reports_do_not_count_the_requests_before_the_grant() {
    let mut one = One::requested();
    for _ in 0..4 {
        one.happens(UNANSWERED);
        one.pass_to(one.now.plus(secs(10)), Reclaims::Silent);
    }
    one.happens(ClaimEvent::Claimed(Ok(Granted { sent_at: one.now, length: LEASE })));
    one.happens(ClaimEvent::Prepared(Err(journeyman_domain::outcome::PrepareFailure::Malformed)));
    one.happens(UPLOADED);
    one.happens(ClaimEvent::Reported(Err(RETRY)));
    let wait = one.machine.next_deadline().expect("it is repeated").since(one.now);
    assert!(wait <= journeyman_domain::claim::REPORT_RETRY.first, "{wait:?}");
}

#[test]
fn i09_a_service_that_asks_for_patience_gets_it() {
    let mut one = One::reporting();
    one.happens(ClaimEvent::Reported(Err(Refusal::Throttled { retry_after: Some(secs(120)) })));
    assert_eq!(one.pass_to(at(120), Reclaims::Granted), []);
    assert!(matches!(one.pass_to(at(125), Reclaims::Granted)[..], [ClaimAction::Report { .. }]));
}

#[test]
fn i09_refused_credentials_are_renewed_by_a_reclaim_before_the_report_is_repeated() {
    for refusal in [Refusal::Denied, Refusal::Stale] {
        let mut one = One::reporting();
        let acts = one.happens(ClaimEvent::Reported(Err(refusal)));
        assert!(matches!(acts[..], [ClaimAction::Reclaim { .. }]), "{acts:?}");
    }
}

#[test]
fn i09_a_second_answer_is_ignored() {
    let mut one = One::reporting();
    one.happens(ClaimEvent::Reported(Err(RETRY)));
    assert_eq!(one.happens(ClaimEvent::Reported(Err(Refusal::Gone))), [], "no report is on its way");
}
