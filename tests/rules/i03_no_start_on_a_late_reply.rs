//! I3: a claim reply that is processed at or after `abandon_at` never starts the payload, unless a reclaim succeeds.

use std::time::Duration;

use journeyman_domain::claim::{CLAIM_ATTEMPTS_MAX, ClaimAction, ClaimEnd, ClaimEvent, LossReason};
use journeyman_domain::lease::{Granted, Lease, RECLAIM_TIMEOUT_MAX};
use journeyman_domain::refusal::Refusal;

use crate::rules::support::{GRACE, LEASE, One, PREPARED, RELEASE_CLAIM, RETRY, Reclaims, SHUTDOWN, at};

const RECLAIM: ClaimAction = ClaimAction::Reclaim { timeout: RECLAIM_TIMEOUT_MAX };
const TOO_LATE: ClaimAction = ClaimAction::Close(ClaimEnd::Lost(LossReason::GrantedTooLate));

/// A claim whose lease, counted from its request at 0 s, is over.
fn late() -> One {
    let mut one = One::requested();
    let acts = one.happens_at(abandon_at(), ClaimEvent::Claimed(Ok(Granted { sent_at: at(0), length: LEASE })));
    assert_eq!(acts, [RECLAIM]);
    one
}

fn abandon_at() -> journeyman_domain::time::Instant {
    Lease::new(Granted { sent_at: at(0), length: LEASE }, GRACE).expires_at()
}

#[test]
fn b1_a_grant_late_in_a_long_poll_is_reclaimed_at_once_and_runs() {
    let mut one = late();
    assert!(!one.machine.is_granted(), "it cannot be trusted yet");
    let acts = one.happens(ClaimEvent::Reclaimed(Ok(Granted { sent_at: abandon_at(), length: LEASE })));
    assert!(acts.contains(&ClaimAction::Prepare), "{acts:?}");
    assert_eq!(one.happens(PREPARED), [ClaimAction::Execute]);
    assert!(one.abandon_at() > abandon_at());
}

#[test]
fn b1_a_late_grant_is_reclaimed_again_after_a_passing_error_and_given_up_after_a_definite_one() {
    let mut one = late();
    let mut attempts = 1;
    let answer = |one: &mut One, refusal| {
        let acts = one.happens(ClaimEvent::Reclaimed(Err(refusal)));
        if acts.is_empty() {
            one.happens_at(one.machine.next_deadline().expect("a retry"), ClaimEvent::Tick)
        } else {
            acts
        }
    };
    while answer(&mut one, RETRY) == [RECLAIM] {
        attempts += 1;
    }
    assert_eq!(attempts, CLAIM_ATTEMPTS_MAX);
    assert!(one.machine.is_closed());
    for refusal in [Refusal::Gone, Refusal::Denied, Refusal::Rejected] {
        assert_eq!(answer(&mut late(), refusal), [TOO_LATE], "{refusal:?}");
    }
}

#[test]
fn b1_a_late_grant_whose_reclaim_is_late_as_well_starts_nothing() {
    let mut one = late();
    let acts = one.happens_at(at(5_000), ClaimEvent::Reclaimed(Ok(Granted { sent_at: abandon_at(), length: LEASE })));
    assert_eq!(acts, [TOO_LATE]);
}

#[test]
fn b1_a_late_grant_that_the_queue_has_revoked_is_dropped() {
    assert_eq!(late().happens(ClaimEvent::Lost), [ClaimAction::Close(ClaimEnd::Lost(LossReason::Revoked))]);
}

#[test]
fn b11_i03_a_grant_with_time_for_one_reclaim_is_prepared_and_one_with_less_is_reclaimed_first() {
    for length in [LEASE, Duration::from_secs(15)] {
        let granted = Granted { sent_at: at(0), length };
        let lease = Lease::new(granted, GRACE);
        let just_in_time = lease.expires_at().minus(lease.attempt_timeout() + Duration::from_nanos(1));
        let acts = One::requested().happens_at(just_in_time, ClaimEvent::Claimed(Ok(granted)));
        assert!(acts.contains(&ClaimAction::Prepare), "{acts:?}");
        let late = just_in_time.plus(Duration::from_nanos(1));
        let acts = One::requested().happens_at(late, ClaimEvent::Claimed(Ok(granted)));
        assert!(matches!(acts[..], [ClaimAction::Reclaim { .. }]), "{acts:?}");
    }
}

#[test]
fn i03_the_lease_counts_from_when_the_request_was_sent() {
    let mut one = One::requested();
    one.happens_at(at(100), ClaimEvent::Claimed(Ok(Granted { sent_at: at(40), length: LEASE })));
    assert_eq!(one.abandon_at(), abandon_at().plus(Duration::from_secs(40)));
}

#[test]
fn i03_a_payload_that_is_prepared_just_in_time_is_started() {
    let mut one = One::preparing();
    let acts = one.happens_at(abandon_at().minus(Duration::from_nanos(1)), PREPARED);
    assert_eq!(acts.first(), Some(&ClaimAction::Execute));
}

#[test]
fn i03_a_lease_without_length_is_given_up() {
    let mut one = One::requested();
    let acts = one.happens(ClaimEvent::Claimed(Ok(Granted { sent_at: at(0), length: Duration::ZERO })));
    assert_eq!(acts, [RECLAIM]);
    assert_eq!(one.happens(ClaimEvent::Reclaimed(Ok(Granted { sent_at: at(0), length: Duration::ZERO }))), [TOO_LATE]);
}

#[test]
fn i03_a_late_grant_is_handed_back_only_after_its_reclaim() {
    let mut one = One::requested();
    one.happens(RELEASE_CLAIM);
    let acts = one.happens_at(abandon_at(), ClaimEvent::Claimed(Ok(Granted { sent_at: at(0), length: LEASE })));
    assert_eq!(acts, [RECLAIM]);
    let acts = one.happens(ClaimEvent::Reclaimed(Ok(Granted { sent_at: abandon_at(), length: LEASE })));
    assert!(matches!(acts[..], [ClaimAction::Report { outcome: SHUTDOWN, .. }]), "{acts:?}");
    let mut one = late();
    one.happens(RELEASE_CLAIM);
    assert_eq!(one.happens(ClaimEvent::Reclaimed(Err(RETRY))), [TOO_LATE]);
    assert_eq!(one.pass_to(at(10_000), Reclaims::Silent), []);
}
