//! I23: between the notice and the last report the worker waits only for the payloads to end; reports are sent in parallel.

use journeyman_domain::claim::{ClaimAction, ClaimEnd, ClaimEvent, REPORT_RESERVE, SHUTDOWN_UPLOAD_MAX};
use journeyman_domain::outcome::{ExceptionReason, Outcome, PrepareFailure};
use journeyman_domain::worker::{Effect, Event};

use crate::rules::support::{
    Bench, FAILED, GRACE, LEASE, MARGIN, One, PREPARED, RELEASE_CLAIM, REPORTED, Reclaims, at, secs,
};

fn thirty_two(bench: &mut Bench) -> Vec<journeyman_domain::id::LocalToken> {
    let seen: Vec<_> = (0..32).map(|n| bench.seen(&format!("m{n}"), &format!("T{n}"))).collect();
    let held: Vec<_> = seen.iter().map(|seen| seen.token).collect();
    bench.hit(seen);
    for claim in &held {
        bench.claimed(*claim, Ok(LEASE));
        bench.deleted(*claim, Ok(()));
        bench.tell(*claim, PREPARED);
    }
    held
}

#[test]
fn i23_at_the_end_of_a_notice_all_payloads_are_told_at_once_and_have_their_grace_and_their_report() {
    let mut bench = Bench::messages(32, 1);
    let held = thirty_two(&mut bench);
    bench.happens(Event::TerminationNotice { deadline: Some(at(120)) });
    let effects = bench.pass(secs(120) - MARGIN);
    let kills = effects
        .iter()
        .filter(|effect| matches!(effect, Effect::Claim(_, ClaimAction::Kill { grace: GRACE, .. })))
        .count();
    assert_eq!((kills, bench.now), (32, at(120).minus(MARGIN)));
    bench.now = bench.now.plus(GRACE);
    assert!(at(120).since(bench.now) >= REPORT_RESERVE, "those that use all of it can still be reported");
    for claim in held {
        let effects = bench.tell(claim, FAILED);
        assert!(matches!(effects[..], [Effect::Claim(_, ClaimAction::Report { .. })]), "{effects:?}");
    }
}

#[test]
fn i23_storing_that_never_ends_holds_no_report_up_though_nobody_says_when_the_host_goes() {
    let mut one = One::settling();
    assert_eq!(one.happens(RELEASE_CLAIM), []);
    one.now = at(9);
    assert_eq!(one.happens(RELEASE_CLAIM), [], "told again, it gets no more time");
    let acts = one.pass_to(at(0).plus(SHUTDOWN_UPLOAD_MAX), Reclaims::Granted);
    let shutdown = Outcome::Exception(ExceptionReason::WorkerShutdown);
    assert!(matches!(acts[..], [ClaimAction::Report { outcome, .. }] if outcome == shutdown), "{acts:?}");
    assert_eq!(one.happens(REPORTED), []);
    let acts = one.pass_to(one.now.plus(SHUTDOWN_UPLOAD_MAX), Reclaims::Silent);
    assert_eq!(acts, [ClaimAction::Close(ClaimEnd::Reported(shutdown))]);
}

#[test]
fn i23_an_exception_that_cannot_be_stored_in_time_stays_what_it_is() {
    let mut one = One::preparing();
    assert_eq!(one.happens(ClaimEvent::Prepared(Err(PrepareFailure::Malformed))), [ClaimAction::Upload]);
    one.happens(RELEASE_CLAIM);
    let acts = one.pass_to(at(0).plus(SHUTDOWN_UPLOAD_MAX), Reclaims::Granted);
    let malformed = Outcome::Exception(ExceptionReason::MalformedPayload);
    assert!(matches!(acts[..], [ClaimAction::Report { outcome, .. }] if outcome == malformed), "{acts:?}");
}
