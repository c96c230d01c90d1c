//! I11: the rules hold no lock and await nothing, so a report and a reclaim in flight together cannot block each other.

use std::time::Duration;

use journeyman_domain::claim::{ClaimAction, ClaimEnd, ClaimEvent};
use journeyman_domain::lease::Granted;
use journeyman_domain::outcome::Outcome;
use journeyman_domain::refusal::Refusal;

use crate::rules::support::{LEASE, One, REPORTED, RETRY, UPLOADED, at};

fn both_under_way() -> One {
    let mut one = One::settling();
    let due = at(LEASE.as_secs() * 7 / 10);
    let acts = one.happens_at(due, UPLOADED);
    assert!(matches!(acts[..], [ClaimAction::Report { .. }, ClaimAction::Reclaim { .. }]), "{acts:?}");
    one
}

#[test]
fn i11_report_and_reclaim_may_be_answered_in_either_order() {
    let extended = |one: &One| ClaimEvent::Reclaimed(Ok(Granted { sent_at: one.now, length: LEASE }));
    let mut one = both_under_way();
    assert_eq!(one.happens(REPORTED), [ClaimAction::Close(ClaimEnd::Reported(Outcome::Completed))]);
    assert_eq!(one.happens(extended(&one)), []);

    let mut one = both_under_way();
    assert!(matches!(one.happens(extended(&one))[..], [ClaimAction::UpdateLease(_)]));
    assert_eq!(one.happens(REPORTED), [ClaimAction::Close(ClaimEnd::Reported(Outcome::Completed))]);
}

#[test]
fn i11_a_reclaim_that_our_own_report_made_pointless_loses_nothing() {
    let mut one = both_under_way();
    assert_eq!(one.happens(ClaimEvent::Reclaimed(Err(Refusal::Gone))), []);
    assert_eq!(one.happens(REPORTED), [ClaimAction::Close(ClaimEnd::Reported(Outcome::Completed))]);
}

#[test]
fn i11_a_silent_reclaim_does_not_keep_a_report_from_being_repeated() {
    let mut one = both_under_way();
    one.happens(ClaimEvent::Reported(Err(RETRY)));
    let next = one.machine.next_deadline().expect("held");
    assert!(next <= one.now.plus(Duration::from_millis(250)));
    assert!(matches!(one.happens_at(next, ClaimEvent::Tick)[..], [ClaimAction::Report { .. }]));
}
