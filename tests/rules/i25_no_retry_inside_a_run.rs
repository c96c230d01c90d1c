//! I25: the number of retries is the queue's: a payload is never executed twice within one run.

use journeyman_domain::claim::{ClaimAction, ClaimEnd, ClaimEvent};
use journeyman_domain::id::SourceId;
use journeyman_domain::journal;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{ENDED_RUNS_MAX, Effect, Event, RecoveredClaim};

use crate::rules::support::{
    Bench, FAILED, LEASE, MESSAGES, PREPARED, RELEASE, RETRY, SHUTDOWN, acts, claims, has, policy, run, secs,
};

#[test]
fn i25_a_run_that_was_given_up_here_is_not_taken_up_again_by_its_message() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    bench.pass(LEASE - secs(50));
    bench.tell(claim, FAILED);
    assert_eq!(bench.worker.claims().count(), 0);
    // The queue would still grant it to us: by its clock the claim is not over yet.
    let seen = bench.seen("m1", "T");
    assert_eq!(claims(&bench.hit(vec![seen])), 0);
}

#[test]
fn i25_a_run_whose_reclaims_got_no_answer_is_left_to_the_next_process() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    assert!(has!(bench.pass(LEASE), Effect::Claim(_, ClaimAction::Reclaim { .. })));
    // The reclaim may have extended the lease: a message would bring the run to the next process too.
    let ends = bench.tell(claim, FAILED).into_iter().find_map(|effect| match effect {
        Effect::Claim(_, ClaimAction::Close(end)) => Some(end),
        _ => None,
    });
    assert!(journal::is_left_to_next_process(ends.expect("it is over")), "{ends:?}");
}

#[test]
fn i25_a_run_of_a_previous_process_is_not_forgotten_while_the_credentials_are_refused() {
    let mut bench = Bench::new(policy(1), &[MESSAGES]);
    let token = bench.token();
    let left = RecoveredClaim { token, source: SourceId(0), run: run("T"), outcome: SHUTDOWN };
    bench.happens(Event::ClaimsRecovered(vec![left]));
    let denied = ClaimEvent::Claimed(Err(Refusal::Denied));
    assert!(!acts!(bench.tell(token, denied), ClaimAction::Close(_)), "a message would bring the run again");
    assert!(acts!(bench.pass(secs(2)), ClaimAction::TakeOver));
    bench.tell(token, denied);
    // It is left to the next process.
    assert!(acts!(bench.happens(RELEASE), ClaimAction::Close(ClaimEnd::NotGranted)));
}

#[test]
fn i25_a_run_that_ended_here_is_not_taken_up_again_by_a_poll_or_a_recovery() {
    let mut bench = Bench::claims(1);
    let (claim, _) = bench.granted("T");
    bench.tell(claim, PREPARED);
    let effects = bench.completes(claim);
    assert!(has!(effects, Effect::Poll { .. }), "{effects:?}");
    let again = bench.grant("T");
    let token = again.token;
    assert!(bench.brought(vec![again]).contains(&Effect::DropMessage(token)));

    let effects = bench.polled(0, Err(RETRY));
    assert_eq!(effects, []);
    let recover = bench.pass(secs(2));
    let asked = recover
        .iter()
        .find_map(|effect| if let Effect::Recover { known_runs: held, .. } = effect { Some(held) } else { None });
    assert_eq!(asked.map(Vec::len), Some(1), "it says what it needs not be told: {recover:?}");
}

#[test]
fn i25_a_claim_that_was_never_granted_may_be_asked_for_again() {
    let mut bench = Bench::messages(1, 1);
    let (claim, _) = bench.receive("m1", "T");
    bench.claimed(claim, Err(Refusal::Throttled { retry_after: None }));
    bench.pass_until(|effect| matches!(effect, Effect::Poll { .. }));
    let again = bench.seen("m1", "T");
    assert_eq!(claims(&bench.hit(vec![again])), 1);
}

#[test]
fn i25_the_memory_of_ended_runs_is_bounded() {
    let mut bench = Bench::claims(1);
    for n in 0..=ENDED_RUNS_MAX {
        let (claim, _) = bench.granted(&format!("T{n}"));
        bench.tell(claim, ClaimEvent::Lost);
        bench.tell(claim, ClaimEvent::Ended(Err(journeyman_domain::outcome::ExecuteFailure::Internal)));
    }
    bench.polled(0, Err(RETRY));
    let recover = bench.pass(secs(2));
    let asked = recover
        .iter()
        .find_map(|effect| if let Effect::Recover { known_runs: held, .. } = effect { Some(held.len()) } else { None });
    assert_eq!(asked, Some(ENDED_RUNS_MAX));
}

#[test]
fn i25_a_run_that_was_given_up_is_remembered_though_thousands_have_been_reported_since() {
    let mut bench = Bench::claims(1);
    let (claim, _) = bench.granted("Lost");
    bench.tell(claim, ClaimEvent::Reclaimed(Err(Refusal::Gone)));
    bench.tell(claim, ClaimEvent::Ended(Err(journeyman_domain::outcome::ExecuteFailure::Internal)));
    for n in 0..=ENDED_RUNS_MAX {
        let (claim, _) = bench.granted(&format!("T{n}"));
        bench.tell(claim, PREPARED);
        bench.completes(claim);
    }
    let again = bench.grant("Lost");
    let token = again.token;
    assert!(bench.brought(vec![again]).contains(&Effect::DropMessage(token)));
}
