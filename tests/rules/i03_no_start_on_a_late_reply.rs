//! I3: a claim reply that is processed at or after `abandon_at` never starts the payload.

use std::time::Duration;

use journeyman::domain::claim::{ClaimAction, ClaimEnd, ClaimEvent, LossReason};
use journeyman::domain::lease::Lease;

use crate::support::{GRACE, LEASE, One, PREPARED, RELEASE_CLAIM, Reclaims, at};

fn abandon_at() -> journeyman::domain::time::Instant {
    Lease::granted(at(0), LEASE, GRACE).expires_at()
}

#[test]
fn i03_a_grant_that_arrives_too_late_is_given_up_without_a_word() {
    let mut one = One::requested();
    let acts = one.happens_at(abandon_at(), ClaimEvent::Claimed { sent_at: at(0), answer: Ok(LEASE) });
    assert_eq!(acts, [ClaimAction::Close(ClaimEnd::Lost(LossReason::GrantedTooLate))]);
}

#[test]
fn i03_a_grant_that_arrives_just_in_time_is_prepared() {
    let mut one = One::requested();
    let now = abandon_at().minus(Duration::from_nanos(1));
    let acts = one.happens_at(now, ClaimEvent::Claimed { sent_at: at(0), answer: Ok(LEASE) });
    assert!(acts.contains(&ClaimAction::Prepare), "{acts:?}");
}

#[test]
fn i03_the_lease_counts_from_when_the_request_was_sent() {
    let mut one = One::requested();
    one.happens_at(at(100), ClaimEvent::Claimed { sent_at: at(40), answer: Ok(LEASE) });
    assert_eq!(one.abandon_at(), abandon_at().plus(Duration::from_secs(40)));
}

#[test]
fn i03_a_payload_that_is_prepared_too_late_is_never_started() {
    let mut one = One::preparing();
    let acts = one.happens_at(abandon_at(), PREPARED);
    assert_eq!(acts, [ClaimAction::Close(ClaimEnd::Lost(LossReason::LeaseExpired))]);
}

#[test]
fn i03_a_payload_that_is_prepared_just_in_time_is_started() {
    let mut one = One::preparing();
    let acts = one.happens_at(abandon_at().minus(Duration::from_nanos(1)), PREPARED);
    assert_eq!(acts.first(), Some(&ClaimAction::Execute));
}

#[test]
fn i03_a_lease_without_length_is_given_up_at_once() {
    let mut one = One::requested();
    let acts = one.happens(ClaimEvent::Claimed { sent_at: at(0), answer: Ok(Duration::ZERO) });
    assert_eq!(acts, [ClaimAction::Close(ClaimEnd::Lost(LossReason::GrantedTooLate))]);
}

#[test]
fn i03_a_late_grant_is_not_handed_back_either() {
    let mut one = One::requested();
    one.happens(RELEASE_CLAIM);
    let acts = one.happens_at(abandon_at(), ClaimEvent::Claimed { sent_at: at(0), answer: Ok(LEASE) });
    assert_eq!(acts, [ClaimAction::Close(ClaimEnd::Lost(LossReason::GrantedTooLate))]);
    assert_eq!(one.pass_to(at(10_000), Reclaims::Silent), []);
}
