//! I26: a payload with processes that may remain keeps its slot, is reported once, and decides the exit reason.

use journeyman_domain::claim::{ClaimAction, ClaimEvent};
use journeyman_domain::id::LocalToken;
use journeyman_domain::outcome::{ExceptionReason, ExecuteFailure, Outcome};
use journeyman_domain::worker::{Alert, Effect, Event, ExitReason};

use crate::rules::support::{Bench, DRAIN, REPORTED, UPLOADED, acts, exits, has, run};

/// Ends a claim; processes of its payload may remain.
fn ends_occupied(bench: &mut Bench, claim: LocalToken) -> Vec<Effect> {
    let mut effects = bench.happens(Event::CleanupPending { claim });
    effects.extend(bench.tell(claim, ClaimEvent::Ended(Err(ExecuteFailure::Internal))));
    effects.extend(bench.tell(claim, UPLOADED));
    effects.extend(bench.tell(claim, REPORTED));
    effects
}

#[test]
fn i26_a_slot_is_not_used_while_something_may_be_in_its_place() {
    let mut bench = Bench::messages(2, 1);
    let claim = bench.executing("m1", "T");
    bench.happens(DRAIN);
    bench.empty();
    assert_eq!(bench.worker.free_slots(), 1);
    let effects = ends_occupied(&mut bench, claim);
    let alert = Effect::Alert(Alert::CleanupPending { run: run("T") });
    assert_eq!(effects.iter().filter(|effect| **effect == alert).count(), 1, "{effects:?}");
    let internal = Outcome::Exception(ExceptionReason::InternalError);
    assert!(has!(effects, Effect::Claim(_, ClaimAction::Report { outcome, .. }) if *outcome == internal));
    assert!(acts!(effects, ClaimAction::Close(_)), "{effects:?}");
    assert_eq!((bench.worker.free_slots(), bench.worker.cleanup_pending().count()), (1, 1));
}

#[test]
fn i26_a_slot_comes_back_when_nothing_is_left() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    ends_occupied(&mut bench, claim);
    let polls = |effects: &[Effect]| effects.iter().filter(|effect| matches!(effect, Effect::Poll { .. })).count();
    assert_eq!(polls(&bench.pass(crate::rules::support::secs(3600))), 0, "there is no slot to ask with");
    let effects = bench.happens(Event::CleanupDone { claim });
    assert_eq!((polls(&effects), bench.worker.cleanup_pending().count()), (1, 0), "{effects:?}");
}

#[test]
fn i26_what_is_gone_before_its_claim_is_over_keeps_nothing() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    bench.happens(Event::CleanupPending { claim });
    bench.happens(Event::CleanupDone { claim });
    let effects = bench.completes(claim);
    assert!(has!(effects, Effect::Poll { .. }), "{effects:?}");
}

#[test]
fn i26_the_exit_says_that_something_is_left_unless_it_had_to_be_at_once() {
    for (last, expected) in [(DRAIN, ExitReason::ProcessesLeft), (Event::Abort, ExitReason::Aborted)] {
        let mut bench = Bench::messages(1, 1);
        let claim = bench.executing("m1", "T");
        ends_occupied(&mut bench, claim);
        let effects = bench.happens(last);
        assert_eq!(exits(&effects), Some(expected), "{effects:?}");
    }
}
