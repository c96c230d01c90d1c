//! A claim that its queue ends: a deadline, a cancel, another worker. The payload is stopped, and the end says why.

use std::time::Duration;

use journeyman_domain::claim::{
    CancelCause, ClaimAction, ClaimEnd, ClaimEvent, ClaimPolicy, LOSS_CHECK_MAX, LossReason, RunTerms,
    UPLOAD_AFTER_REPORT_MAX,
};
use journeyman_domain::outcome::Outcome;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::time::Instant;

use crate::rules::support::{
    COMPLETED, FAILED, GRACE, LEASE, One, PREPARED, RELEASE_CLAIM, RETRY, Reclaims, UPLOADED, at, claim_policy, secs,
};

const CANCELED: ClaimEvent = ClaimEvent::StatusChecked(Ok(Some(LossReason::Canceled)));
const TAKEN: ClaimEvent = ClaimEvent::StatusChecked(Ok(Some(LossReason::Revoked)));

fn policy() -> ClaimPolicy {
    ClaimPolicy { reports_cancellation: true, ..claim_policy() }
}

/// A claim whose payload runs, of a queue that tells why it ends one.
fn running() -> One {
    let mut one = One::preparing_under(policy());
    one.happens(PREPARED);
    one
}

/// The claim of [`running`], after a reclaim was refused as not ours.
fn refused() -> One {
    let mut one = running();
    let acts = one.happens(REFUSAL);
    let kill = ClaimAction::Kill { cause: CancelCause::ClaimLost(LossReason::Revoked), grace: GRACE };
    assert_eq!(acts, [kill, ClaimAction::CheckStatus], "the payload is killed at once, whatever the status says");
    one
}

const REFUSAL: ClaimEvent = ClaimEvent::Reclaimed(Err(Refusal::Gone));

const fn lost(loss: LossReason) -> ClaimAction {
    ClaimAction::Close(ClaimEnd::Lost(loss))
}

fn with_deadline(mut one: One, deadline: Instant) -> One {
    one.happens(ClaimEvent::Terms(RunTerms { deadline: Some(deadline), retries_left: Some(1) }));
    one
}

#[test]
fn b6_the_deadline_of_a_task_ends_it() {
    for one in [One::preparing(), One::executing()] {
        let mut one = with_deadline(one, at(300));
        assert_eq!(one.pass_to(at(299), Reclaims::Granted), []);
        let kill = ClaimAction::Kill { cause: CancelCause::ClaimLost(LossReason::DeadlineExceeded), grace: GRACE };
        assert_eq!(one.pass_to(at(300), Reclaims::Granted), [kill]);
        assert_eq!(one.happens(FAILED), [ClaimAction::Upload], "its log says so");
        assert_eq!(one.happens(UPLOADED), [lost(LossReason::DeadlineExceeded)], "the queue resolves the run");
    }
}

#[test]
fn d3_a_deadline_that_is_lifted_ends_nothing() {
    let mut one = with_deadline(One::executing(), at(300));
    one.happens(ClaimEvent::Terms(RunTerms { deadline: None, retries_left: Some(1) }));
    assert_eq!(one.pass_to(at(600), Reclaims::Granted), []);
}

#[test]
fn b6_a_payload_that_ended_before_the_deadline_is_reported_after_it_and_no_longer_reclaimed() {
    let mut one = with_deadline(One::settling(), at(300));
    let acts = one.pass_to(at(1_000), Reclaims::Refused(Refusal::Gone));
    assert_eq!(acts, [], "the queue would refuse a reclaim");
    let acts = one.happens(UPLOADED);
    assert!(matches!(acts[..], [ClaimAction::Report { outcome: Outcome::Completed, .. }]), "{acts:?}");
}

#[test]
fn b9_a_cancel_that_a_reclaim_sees_ends_as_one_that_the_status_poll_sees() {
    // The status is known before the payload has ended, and after.
    for status_first in [true, false] {
        let mut one = refused();
        let mut acts = Vec::new();
        for event in if status_first { [CANCELED, FAILED] } else { [FAILED, CANCELED] } {
            acts = one.happens(event);
        }
        assert_eq!(acts, [ClaimAction::Upload], "{status_first}");
        assert_eq!(one.happens(UPLOADED), [lost(LossReason::Canceled)]);
    }
    let mut one = running();
    assert!(matches!(one.happens(CANCELED)[..], [ClaimAction::Kill { .. }]));
    assert_eq!(one.happens(FAILED), [ClaimAction::Upload]);
    assert_eq!(one.happens(UPLOADED), [lost(LossReason::Canceled)]);
}

#[test]
fn b9_a_cancel_after_the_payload_has_ended_is_no_superseded_report() {
    // While its artifacts are uploaded, which may go on.
    let mut one = running();
    one.happens(COMPLETED);
    assert_eq!(one.happens(REFUSAL), [ClaimAction::CheckStatus]);
    assert_eq!(one.happens(CANCELED), []);
    assert_eq!(one.happens(UPLOADED), [lost(LossReason::Canceled)]);
    // While it is reported.
    let mut one = running();
    one.happens(COMPLETED);
    one.happens(UPLOADED);
    assert_eq!(one.happens(ClaimEvent::Reported(Err(Refusal::Gone))), [ClaimAction::CheckStatus]);
    assert_eq!(one.happens(CANCELED), [lost(LossReason::Canceled)]);
}

#[test]
fn b9_a_claim_that_another_worker_has_is_lost_and_an_answer_is_not_waited_for_long() {
    for (answer, waits) in [(TAKEN, false), (ClaimEvent::StatusChecked(Err(RETRY)), false), (ClaimEvent::Tick, true)] {
        let mut one = refused();
        assert_eq!(one.happens(FAILED), []);
        if waits {
            assert_eq!(one.pass_to(one.now.plus(LOSS_CHECK_MAX), Reclaims::Silent), [lost(LossReason::Revoked)]);
        } else {
            assert_eq!(one.happens(answer), [lost(LossReason::Revoked)], "{answer:?}");
        }
    }
    let mut one = running();
    one.happens(COMPLETED);
    one.happens(UPLOADED);
    one.happens(ClaimEvent::Reported(Err(Refusal::Gone)));
    let resolved = ClaimAction::Close(ClaimEnd::AlreadyResolved(Outcome::Completed));
    assert_eq!(one.happens(TAKEN), [resolved]);
}

#[test]
fn b14_the_log_of_a_canceled_task_is_stored_while_its_credentials_last_and_no_longer() {
    let mut one = running();
    one.happens(CANCELED);
    one.happens(FAILED);
    let acts = one.pass_to(at(0).plus(UPLOAD_AFTER_REPORT_MAX), Reclaims::Silent);
    assert_eq!(acts, [lost(LossReason::Canceled)], "it does not hold its slot for ever");

    let mut one = running();
    let end = at(0).plus(LEASE);
    one.now = end.minus(secs(40));
    one.happens(CANCELED);
    assert_eq!(one.happens(FAILED), [ClaimAction::Upload]);
    assert_eq!(one.pass_to(end.minus(Duration::from_nanos(1)), Reclaims::Silent), []);
    assert_eq!(one.pass_to(end, Reclaims::Silent), [lost(LossReason::Canceled)]);

    let mut one = running();
    one.happens(CANCELED);
    one.happens(FAILED);
    assert_eq!(one.happens(RELEASE_CLAIM), []);
    let acts = one.pass_to(at(15), Reclaims::Silent);
    assert_eq!(acts, [lost(LossReason::Canceled)], "a worker that stops waits less long");
}
