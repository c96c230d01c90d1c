//! I1: no outcome is sent at or after `abandon_at`, nor after a reply that reports the claim lost.

use std::time::Duration;

use journeyman_domain::claim::{ClaimAction, ClaimEnd, ClaimEvent, ClaimPolicy, LATE_REPORT_MAX, LossReason};
use journeyman_domain::outcome::Outcome;
use journeyman_domain::refusal::Refusal;

use crate::rules::support::{COMPLETED, One, PREPARED, RETRY, Reclaims, UPLOADED, claim_policy};

const NANO: Duration = Duration::from_nanos(1);

/// A report of success without an answer, and then a loss: it is not said that nothing was reported.
fn unconfirmed(loss: LossReason) -> ClaimEnd {
    ClaimEnd::Unconfirmed { outcome: Outcome::Completed, loss }
}

#[test]
fn i01_an_outcome_that_is_ready_when_the_lease_is_given_up_is_not_sent() {
    let mut one = One::settling();
    let acts = one.happens_at(one.abandon_at(), UPLOADED);
    assert_eq!(acts, [ClaimAction::Close(ClaimEnd::Lost(LossReason::LeaseExpired))]);
}

#[test]
fn i01_a_report_on_its_way_when_the_lease_ends_decides_by_its_answer_and_is_not_repeated() {
    for (answer, end) in [
        (Ok(()), ClaimEnd::Reported(Outcome::Completed)),
        (Err(Refusal::Gone), ClaimEnd::AlreadyResolved(Outcome::Completed)),
        (Err(RETRY), unconfirmed(LossReason::LeaseExpired)),
        (Err(Refusal::Denied), unconfirmed(LossReason::LeaseExpired)),
    ] {
        let mut one = One::reporting();
        let acts = one.pass_to(one.abandon_at(), Reclaims::Silent);
        assert!(!acts.iter().any(|act| matches!(act, ClaimAction::Close(_) | ClaimAction::Report { .. })), "{acts:?}");
        assert_eq!(one.happens(ClaimEvent::Reported(answer)), [ClaimAction::Close(end)]);
    }
}

#[test]
fn i01_a_lost_claim_is_never_reported_whatever_stage_it_was_in() {
    let lost = ClaimEvent::Reclaimed(Err(Refusal::Gone));
    let mut settling = One::settling();
    assert_eq!(settling.happens(lost), [ClaimAction::Close(ClaimEnd::Lost(LossReason::Revoked))]);

    let mut waiting = One::reporting();
    waiting.happens(ClaimEvent::Reported(Err(RETRY)));
    assert_eq!(waiting.happens(lost), [ClaimAction::Close(unconfirmed(LossReason::Revoked))]);

    let mut sent = One::reporting();
    assert_eq!(sent.happens(lost), []);
    assert_eq!(sent.happens(ClaimEvent::Reported(Err(RETRY))), [ClaimAction::Close(unconfirmed(LossReason::Revoked))]);

    let mut executing = One::executing();
    assert!(matches!(executing.happens(lost)[..], [ClaimAction::Kill { .. }]));
    assert_eq!(executing.happens(COMPLETED), [ClaimAction::Close(ClaimEnd::Lost(LossReason::Revoked))]);
}

#[test]
fn i01_an_outcome_is_still_sent_just_before_the_lease_is_given_up_and_answered_before_the_queue_gives_the_run_away() {
    let mut one = One::settling();
    let acts = one.happens_at(one.abandon_at().minus(NANO), UPLOADED);
    let deadline = one.machine.lease().expect("granted").granted_until();
    let timeout = acts.iter().find_map(|act| match act {
        ClaimAction::Report { outcome: Outcome::Completed, timeout } => Some(*timeout),
        _ => None,
    });
    assert!(timeout.is_some_and(|timeout| one.now.plus(timeout) < deadline), "{acts:?}");
}

/// A report that the queue refuses by itself, where another worker has the run, may be repeated after the lease.
#[test]
fn d2_a_fenced_report_that_was_sent_in_time_is_repeated_after_the_lease_and_not_for_ever() {
    let policy = ClaimPolicy { fenced_reports: true, ..claim_policy() };
    let reporting = || {
        let mut one = One::preparing_under(policy);
        for (event, expected) in [(PREPARED, ClaimAction::Execute), (COMPLETED, ClaimAction::Upload)] {
            assert_eq!(one.happens(event), [expected]);
        }
        assert!(matches!(one.happens(UPLOADED)[..], [ClaimAction::Report { .. }]));
        one
    };
    let mut one = reporting();
    let ends = one.machine.lease().expect("granted").granted_until();
    let passed_with = |one: &mut One, until| {
        let mut acts = one.happens(ClaimEvent::Reported(Err(RETRY)));
        acts.extend(one.pass_to(until, Reclaims::Refused(RETRY)));
        acts.iter().filter(|act| matches!(act, ClaimAction::Report { .. })).count()
    };
    assert_eq!(passed_with(&mut one, ends.plus(LATE_REPORT_MAX / 2)), 1);
    assert_eq!(one.happens(ClaimEvent::Reported(Ok(()))), [ClaimAction::Close(ClaimEnd::Reported(Outcome::Completed))]);

    let mut one = reporting();
    assert_eq!(passed_with(&mut one, ends.plus(LATE_REPORT_MAX)), 1);
    assert_eq!(
        one.happens(ClaimEvent::Reported(Err(RETRY))),
        [ClaimAction::Close(unconfirmed(LossReason::LeaseExpired))]
    );

    // A worker that has to stop does not wait for it.
    let mut one = reporting();
    one.happens(ClaimEvent::Reported(Err(RETRY)));
    let acts = one.happens_at(ends, ClaimEvent::Release { deadline: None });
    assert_eq!(acts, [ClaimAction::Close(unconfirmed(LossReason::LeaseExpired))]);

    // I1: an outcome that was not sent in time is not sent at all.
    let mut one = One::preparing_under(policy);
    one.happens(PREPARED);
    one.happens(COMPLETED);
    let acts = one.happens_at(one.abandon_at(), UPLOADED);
    assert_eq!(acts, [ClaimAction::Close(ClaimEnd::Lost(LossReason::LeaseExpired))]);
}
