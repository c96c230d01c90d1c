//! I10: a claim is reclaimed until its outcome is acknowledged, not only sent.

use journeyman_domain::claim::{ClaimAction, ClaimEnd, ClaimEvent, LossReason};
use journeyman_domain::lease::Granted;

use crate::rules::support::{FAILED, LEASE, One, RELEASE_CLAIM, REPORTED, RETRY, Reclaims, at};

fn reclaims(acts: &[ClaimAction]) -> usize {
    acts.iter().filter(|act| matches!(act, ClaimAction::Reclaim { .. })).count()
}

#[test]
fn i10_a_claim_is_extended_in_every_step_up_to_the_answer() {
    let ending = || {
        let mut one = One::executing();
        one.happens(RELEASE_CLAIM);
        one
    };
    for mut one in [One::preparing(), One::executing(), ending(), One::settling(), One::reporting()] {
        let step = one.machine.state_name();
        let acts = one.pass_to(at(5 * LEASE.as_secs()), Reclaims::Granted);
        assert!(reclaims(&acts) >= 6, "{step}: {acts:?}");
        assert!(!acts.iter().any(|act| matches!(act, ClaimAction::Kill { .. })), "I2: {step}: {acts:?}");
        assert!(!one.machine.is_closed(), "{step}");
    }
}

#[test]
fn i10_a_report_without_an_answer_is_repeated_for_as_long_as_the_claim_can_be_extended() {
    let mut one = One::reporting();
    let mut reports = 0;
    for _ in 0..1000 {
        one.happens(ClaimEvent::Reported(Err(RETRY)));
        let next = one.machine.next_deadline().expect("held");
        let acts = one.pass_to(next, Reclaims::Granted);
        reports += acts.iter().filter(|act| matches!(act, ClaimAction::Report { .. })).count();
    }
    assert!(one.now > at(2 * LEASE.as_secs()) && reports > 200, "{reports} by {:?}", one.now);
}

#[test]
fn i10_what_is_stored_after_the_report_has_its_time() {
    let mut one = One::executing();
    one.happens(RELEASE_CLAIM);
    one.happens(FAILED);
    assert_eq!(one.happens(REPORTED), [ClaimAction::Upload]);
    let acts = one.pass_to(at(5 * LEASE.as_secs()), Reclaims::Granted);
    assert!(matches!(acts[..], [ClaimAction::Close(ClaimEnd::Reported(_))]), "{acts:?}");
}

#[test]
fn i10_a_late_answer_to_a_reclaim_moves_nothing_once_the_claim_is_over() {
    let extended = ClaimEvent::Reclaimed(Ok(Granted { sent_at: at(1), length: LEASE }));
    let mut trailing = One::executing();
    trailing.happens(RELEASE_CLAIM);
    trailing.happens(FAILED);
    trailing.happens(REPORTED);
    assert_eq!(trailing.happens(extended), []);

    let mut lost = One::executing();
    lost.happens(ClaimEvent::StatusChecked(Ok(Some(LossReason::Canceled))));
    assert_eq!(lost.happens(extended), []);
}
