//! I5: a transient error of a reclaim never ends a run; a definite refusal always does.

use journeyman_domain::claim::{ClaimAction, ClaimEvent};
use journeyman_domain::lease::Granted;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{Alert, Effect};

use crate::rules::support::{Bench, COMPLETED, LEASE, One, PREPARED, RETRY, Reclaims, at, secs};

const NOT_DEFINITE: [Refusal; 5] =
    [RETRY, Refusal::Throttled { retry_after: None }, Refusal::Denied, Refusal::Rejected, Refusal::Stale];

#[test]
fn i05_a_run_survives_trouble_up_to_its_lease_and_an_extension_heals_it() {
    for refusal in NOT_DEFINITE {
        let mut one = One::executing();
        let acts = one.pass_to(one.abandon_at().minus(secs(1)), Reclaims::Refused(refusal));
        assert!(acts.iter().all(|act| matches!(act, ClaimAction::Reclaim { .. })), "{refusal:?}: {acts:?}");
        assert!(acts.len() > 3, "{refusal:?}: {acts:?}");
        one.happens(ClaimEvent::Reclaimed(Ok(Granted { sent_at: one.now, length: LEASE })));
        let later = one.now.plus(LEASE / 2);
        assert!(one.pass_to(later, Reclaims::Silent).is_empty());
    }
}

#[test]
fn i05_a_refused_look_at_the_run_ends_nothing() {
    for refusal in NOT_DEFINITE.into_iter().chain([Refusal::Gone]) {
        let mut one = One::executing();
        assert_eq!(one.happens(ClaimEvent::StatusChecked(Err(refusal))), []);
    }
    let mut one = One::executing();
    assert_eq!(one.happens(ClaimEvent::StatusChecked(Ok(None))), []);
}

#[test]
fn i05_a_run_is_looked_at_as_often_as_asked_for_and_only_while_it_can_be_stopped() {
    let policy = journeyman_domain::claim::ClaimPolicy {
        status_poll_interval: Some(secs(5)),
        ..crate::rules::support::claim_policy()
    };
    let mut one = One::preparing_under(policy);
    assert_eq!(one.pass_to(at(4), Reclaims::Silent), []);
    assert_eq!(one.pass_to(at(5), Reclaims::Silent), [ClaimAction::CheckStatus]);
    assert_eq!(one.pass_to(at(60), Reclaims::Silent), [], "one look at a time");
    one.happens(ClaimEvent::StatusChecked(Ok(None)));
    assert_eq!(one.happens(PREPARED), [ClaimAction::Execute]);
    assert_eq!(one.pass_to(at(65), Reclaims::Silent), [ClaimAction::CheckStatus]);
    one.happens(ClaimEvent::StatusChecked(Ok(None)));
    one.happens(COMPLETED);
    assert_eq!(one.pass_to(at(300), Reclaims::Silent), []);
}

#[test]
fn i05_the_waits_between_reclaims_start_over_after_a_success() {
    let mut one = One::executing();
    one.pass_to(at(1000), Reclaims::Refused(RETRY));
    one.happens(ClaimEvent::Reclaimed(Ok(Granted { sent_at: at(1000), length: LEASE })));
    one.pass_to(at(2000), Reclaims::Silent);
    one.happens(ClaimEvent::Reclaimed(Err(RETRY)));
    let wait = one.machine.next_deadline().expect("held").since(one.now);
    assert!(wait <= one.machine.lease().expect("granted").retry_policy().first, "{wait:?}");
}

fn said(effects: &[Effect]) -> Vec<u32> {
    let said = |effect: &Effect| match effect {
        Effect::Alert(Alert::SourceUnavailable { consecutive: in_a_row, .. }) => Some(*in_a_row),
        _ => None,
    };
    effects.iter().filter_map(said).collect()
}

#[test]
fn i05_polls_that_fail_without_end_are_told_of_and_tried_on() {
    let mut bench = Bench::messages(1, 1);
    let (mut all, mut effects) = (Vec::new(), Vec::new());
    for _ in 0..250 {
        effects.extend(bench.polled(0, Err(RETRY)));
        all.extend(said(&effects));
        effects = bench.pass_until(|effect| matches!(effect, Effect::Poll { .. }));
    }
    assert_eq!(all, [10, 100, 200]);
    assert!(bench.now > at(3600), "calmly: {:?}", bench.now);
    assert!(!bench.worker.is_stopping());
    bench.empty();
    bench.pass_until(|effect| matches!(effect, Effect::Poll { .. }));
    let again = (0..10).flat_map(|_| {
        let effects = bench.polled(0, Err(RETRY));
        bench.pass_until(|effect| matches!(effect, Effect::Poll { .. }));
        said(&effects)
    });
    assert_eq!(again.collect::<Vec<_>>(), [10], "one answer ends the row");
}

#[test]
fn i05_claims_that_fail_without_end_are_told_of_too() {
    let mut bench = Bench::messages(1, 1);
    let mut all = Vec::new();
    for n in 0..8 {
        let (claim, _) = bench.receive(&format!("m{n}"), &format!("T{n}"));
        while bench.worker.claims().count() > 0 {
            all.extend(said(&bench.claimed(claim, Err(RETRY))));
            bench.pass(secs(10));
        }
        bench.pass(secs(60));
    }
    assert_eq!(all, [10], "once a row, however many claims were in it");
}
