//! I4: the reclaim starts early enough for three attempts, and at once where the lease is too short for that.

use std::time::Duration;

use journeyman_domain::claim::{ClaimAction, ClaimEvent};
use journeyman_domain::lease::Granted;
use journeyman_domain::lease::RECLAIM_ATTEMPTS_MIN;
use journeyman_domain::refusal::Refusal;

use crate::rules::support::{LEASE, One, RETRY, Reclaims, at, claim_policy, secs};

fn granted(length: Duration, now: u64) -> (One, Vec<ClaimAction>) {
    let mut one = One::requested();
    let acts = one.happens_at(at(now), ClaimEvent::Claimed(Ok(Granted { sent_at: at(0), length })));
    (one, acts)
}

fn reclaims(acts: &[ClaimAction]) -> usize {
    acts.iter().filter(|act| matches!(act, ClaimAction::Reclaim { .. })).count()
}

#[test]
fn i04_a_claim_is_reclaimed_at_about_two_thirds_of_its_lease() {
    let mut one = One::executing();
    assert_eq!(reclaims(&one.pass_to(at(LEASE.as_secs() * 61 / 100), Reclaims::Silent)), 0);
    assert_eq!(reclaims(&one.pass_to(at(LEASE.as_secs() * 67 / 100), Reclaims::Silent)), 1);
}

#[test]
fn i04_a_grant_that_comes_late_is_extended_at_once() {
    let (_, acts) = granted(LEASE, LEASE.as_secs() * 8 / 10);
    assert_eq!(reclaims(&acts), 1, "{acts:?}");
}

#[test]
fn i04_three_attempts_fit_even_when_each_one_takes_all_its_time() {
    for length in [secs(1), secs(10), secs(60), secs(210), LEASE, secs(86_400)] {
        let (mut one, _) = granted(length, 0);
        let mut attempts = 0;
        while !one.machine.is_closed() && one.machine.state_name() == "preparing" {
            one.now = one.machine.next_deadline().expect("a held claim wants to be woken");
            for act in one.happens(ClaimEvent::Tick) {
                if let ClaimAction::Reclaim { timeout } = act {
                    attempts += 1;
                    one.now = one.now.plus(timeout).min(one.abandon_at());
                    one.happens(ClaimEvent::Reclaimed(Err(RETRY)));
                }
            }
        }
        assert!(attempts >= RECLAIM_ATTEMPTS_MIN, "{attempts} attempts in {length:?}");
    }
}

#[test]
fn i04_a_service_that_asks_for_patience_is_still_asked_three_times() {
    let mut one = One::executing();
    let retry = Refusal::Retry { retry_after: Some(secs(3600)) };
    let acts = one.pass_to(one.abandon_at(), Reclaims::Refused(retry));
    assert!(reclaims(&acts) >= RECLAIM_ATTEMPTS_MIN as usize, "{acts:?}");
}

#[test]
fn i04_one_reclaim_at_a_time() {
    let mut one = One::executing();
    let acts = one.pass_to(one.abandon_at().minus(secs(1)), Reclaims::Silent);
    assert_eq!(reclaims(&acts), 1);
}

#[test]
fn i04_an_answer_that_does_not_extend_is_asked_again_with_growing_waits() {
    for length in [Duration::ZERO, LEASE / 4, LEASE] {
        let mut one = One::executing();
        one.pass_to(at(700), Reclaims::Silent);
        let mut sent = 0;
        // The queue grants again what it granted before: nothing moves.
        while one.machine.state_name() == "running" {
            assert!(sent < 100, "the same reclaim is sent without end");
            let answer = ClaimEvent::Reclaimed(Ok(Granted { sent_at: at(0), length }));
            sent += reclaims(&one.happens(answer));
            one.now = one.machine.next_deadline().expect("a held claim wants to be woken");
            sent += reclaims(&one.happens(ClaimEvent::Tick));
        }
        assert!(sent >= 3, "{sent}");
    }
}

#[test]
fn i04_the_handler_learns_of_every_extension_and_of_nothing_else() {
    let mut one = One::executing();
    one.now = at(800);
    let acts = one.happens(ClaimEvent::Reclaimed(Ok(Granted { sent_at: at(799), length: LEASE })));
    let [ClaimAction::UpdateLease(lease)] = acts[..] else { panic!("{acts:?}") };
    assert_eq!(lease.expires_at(), one.abandon_at());
    assert!(one.now < lease.report_by() && lease.report_by() < lease.expires_at(), "{acts:?}");
    let acts = one.happens(ClaimEvent::Reclaimed(Ok(Granted { sent_at: at(0), length: LEASE })));
    assert!(!acts.iter().any(|act| matches!(act, ClaimAction::UpdateLease(_))), "{acts:?}");
}

#[test]
fn i04_claims_made_together_do_not_come_back_together() {
    let mut due = std::collections::BTreeSet::new();
    let mut jitter = journeyman_domain::jitter::Jitter::seeded(3);
    for _ in 0..100 {
        let mut acts = Vec::new();
        let mut machine = journeyman_domain::claim::ClaimState::from_grant(claim_policy());
        machine.handle(
            ClaimEvent::Claimed(Ok(Granted { sent_at: at(0), length: LEASE })),
            at(0),
            &mut jitter,
            &mut acts,
        );
        due.insert(machine.next_deadline().expect("granted"));
    }
    let spread = due.last().expect("some").since(*due.first().expect("some"));
    assert!(due.len() > 90 && spread > LEASE / 40, "{} over {spread:?}", due.len());
}
