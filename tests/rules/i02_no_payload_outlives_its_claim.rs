//! I2: a payload is stopped early enough to end before its claim does.

use journeyman_domain::claim::{CancelCause, ClaimAction, ClaimEnd, ClaimEvent, LossReason};
use journeyman_domain::lease::clock_error;
use journeyman_domain::refusal::Refusal;

use crate::rules::support::{FAILED, GRACE, LEASE, One, RELEASE_CLAIM, RETRY, Reclaims, at};

#[test]
fn i02_a_payload_is_killed_when_no_extension_was_granted_in_time() {
    for reclaims in [Reclaims::Silent, Reclaims::Refused(RETRY), Reclaims::Refused(Refusal::Denied)] {
        for mut one in [One::preparing(), One::executing()] {
            let acts = one.pass_to(one.abandon_at(), reclaims);
            let expected = ClaimAction::Kill { cause: CancelCause::ClaimLost(LossReason::LeaseExpired), grace: GRACE };
            assert_eq!(acts.last(), Some(&expected), "{acts:?}");
            let gone_at = one.now.plus(GRACE).plus(clock_error(LEASE));
            assert!(gone_at < one.machine.lease().expect("granted").granted_until());
        }
    }
}

#[test]
fn i02_a_claim_said_to_be_lost_kills_at_once() {
    for mut one in [One::preparing(), One::executing()] {
        let acts = one.happens(ClaimEvent::Reclaimed(Err(Refusal::Gone)));
        assert_eq!(acts, [ClaimAction::Kill { cause: CancelCause::ClaimLost(LossReason::Revoked), grace: GRACE }]);
    }
}

#[test]
fn i02_a_payload_that_ends_on_order_is_hurried_when_the_lease_ends_meanwhile() {
    let mut one = One::executing();
    one.now = one.abandon_at().minus(GRACE / 2);
    let acts = one.happens(RELEASE_CLAIM);
    assert!(acts.contains(&ClaimAction::Kill { cause: CancelCause::Shutdown, grace: GRACE }), "{acts:?}");
    let acts = one.pass_to(one.abandon_at(), Reclaims::Silent);
    assert!(
        acts.contains(&ClaimAction::Kill { cause: CancelCause::ClaimLost(LossReason::LeaseExpired), grace: GRACE }),
        "{acts:?}"
    );
    let end = ClaimEnd::Lost(LossReason::LeaseExpired);
    assert_eq!(one.happens(FAILED), [ClaimAction::Close(end)], "I1: nothing is reported");
}

#[test]
fn i02_a_claim_is_not_closed_before_its_payload_is_gone() {
    let mut one = One::executing();
    one.pass_to(at(10 * LEASE.as_secs()), Reclaims::Silent);
    assert!(!one.machine.is_closed());
    assert_eq!(one.machine.state_name(), "stopping");
}
