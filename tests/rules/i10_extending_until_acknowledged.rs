//! I10: extending goes on until the outcome is acknowledged, not merely sent.

use journeyman::domain::claim::{Act, End, HURRY_MAX, Happening, Settled};
use journeyman::domain::outcome::Verdict;

use crate::support::{LEASE, One, RETRY, Reclaims, at};

fn reclaims(acts: &[Act]) -> usize {
    acts.iter().filter(|act| matches!(act, Act::Reclaim { .. })).count()
}

#[test]
fn i10_a_claim_is_extended_in_every_step_up_to_the_answer() {
    let ending = || {
        let mut one = One::executing();
        one.happens(Happening::HandBack { deadline: None });
        one
    };
    for mut one in [One::preparing(), One::executing(), ending(), One::settling(), One::reporting()] {
        let step = one.machine.step();
        let acts = one.pass_to(at(5 * LEASE.as_secs()), Reclaims::Granted);
        assert!(reclaims(&acts) >= 6, "{step}: {acts:?}");
        assert!(!one.machine.closed(), "{step}");
    }
}

#[test]
fn i10_a_report_without_an_answer_is_repeated_for_as_long_as_the_claim_can_be_extended() {
    let mut one = One::reporting();
    let mut reports = 0;
    for _ in 0..1000 {
        one.happens(Happening::Reported(Err(RETRY)));
        let next = one.machine.next_deadline().expect("held");
        let acts = one.pass_to(next, Reclaims::Granted);
        reports += acts.iter().filter(|act| matches!(act, Act::Report { .. })).count();
    }
    assert!(one.now > at(2 * LEASE.as_secs()) && reports > 200, "{reports} by {:?}", one.now);
}

#[test]
fn i10_nothing_is_extended_once_the_answer_is_there() {
    let mut one = One::executing();
    one.happens(Happening::HandBack { deadline: None });
    one.happens(Happening::Ended(Verdict::Failed));
    assert_eq!(one.happens(Happening::Reported(Ok(()))), [Act::Settle]);
    let soon = one.now.plus(HURRY_MAX / 2);
    assert_eq!(one.pass_to(soon, Reclaims::Granted), []);
    assert!(matches!(one.happens(Happening::Settled(Settled::Clean))[..], [Act::Close(_)]));
}

#[test]
fn i10_what_is_stored_after_the_report_has_its_time() {
    let mut one = One::executing();
    one.happens(Happening::HandBack { deadline: None });
    one.happens(Happening::Ended(Verdict::Failed));
    assert_eq!(one.happens(Happening::Reported(Ok(()))), [Act::Settle]);
    let acts = one.pass_to(at(5 * LEASE.as_secs()), Reclaims::Granted);
    assert!(matches!(acts[..], [Act::Close(End::Reported(_))]), "{acts:?}");
}

#[test]
fn i10_a_late_answer_to_a_reclaim_moves_nothing_once_the_claim_is_over() {
    let extended = Happening::Reclaimed { sent_at: at(1), answer: Ok(LEASE) };
    let mut trailing = One::executing();
    trailing.happens(Happening::HandBack { deadline: None });
    trailing.happens(Happening::Ended(Verdict::Failed));
    trailing.happens(Happening::Reported(Ok(())));
    assert_eq!(trailing.happens(extended), []);

    let mut lost = One::executing();
    lost.happens(Happening::Checked(Ok(true)));
    assert_eq!(lost.happens(extended), []);
}
