//! I12: a message is deleted only after a definite answer to its claim request.

use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{Effect, ExitReason};

use crate::rules::support::{Bench, LEASE, RETRY, claims, deletes, has, secs};

/// The answer to the claim, on a worker that has had one granted before.
fn answered(answer: Result<std::time::Duration, Refusal>) -> (Vec<Effect>, Bench) {
    let mut bench = Bench::messages(2, 1);
    let (first, second) = (bench.seen("m0", "T0"), bench.seen("m1", "T1"));
    let (before, claim) = (first.token, second.token);
    bench.hit(vec![first, second]);
    bench.claimed(before, Ok(LEASE));
    bench.deleted(before, Ok(()));
    let effects = bench.claimed(claim, answer);
    (effects, bench)
}

#[test]
fn i12_granted_or_refused_for_a_reason_in_the_task_deletes() {
    for answer in [Ok(LEASE), Err(Refusal::Gone), Err(Refusal::Rejected)] {
        let (effects, bench) = answered(answer);
        assert_eq!(deletes(&effects), 1, "{answer:?}: {effects:?}");
        assert!(!bench.worker.is_stopping(), "{answer:?}");
    }
}

#[test]
fn i12_trouble_of_ours_keeps_the_message() {
    for refusal in [Refusal::Denied, Refusal::Throttled { retry_after: None }] {
        let (effects, _) = answered(Err(refusal));
        assert_eq!(deletes(&effects), 0, "{refusal:?}: {effects:?}");
        assert!(has!(effects, Effect::DropMessage(_)), "{effects:?}");
    }
}

#[test]
fn i12_no_definite_answer_keeps_the_message_and_asks_again() {
    for refusal in [RETRY, Refusal::Stale] {
        let (effects, mut bench) = answered(Err(refusal));
        assert_eq!((deletes(&effects), claims(&effects)), (0, 0), "{refusal:?}: {effects:?}");
        assert_eq!(claims(&bench.pass(secs(1))), 1, "{refusal:?}");
    }
}

#[test]
fn i12_a_bad_request_before_any_claim_was_granted_deletes_nothing_and_ends_the_worker() {
    let mut bench = Bench::messages(2, 1);
    let (first, second) = (bench.seen("m0", "T0"), bench.seen("m1", "T1"));
    let tokens = [first.token, second.token];
    let mut effects = bench.hit(vec![first, second]);
    for token in tokens {
        effects.extend(bench.claimed(token, Err(Refusal::Rejected)));
    }
    assert_eq!(deletes(&effects), 0, "{effects:?}");
    assert_eq!(effects.last(), Some(&Effect::Exit(ExitReason::Misconfigured)));
}

#[test]
fn i12_a_bad_request_counts_for_its_own_source_alone() {
    let mut bench = Bench::new(crate::rules::support::policy(4), &[crate::rules::support::MESSAGES; 2]);
    bench.tick();
    bench.opened(0, 1);
    bench.opened(1, 1);
    let claim = bench.preparing("m0", "T0");
    bench.deleted(claim, Ok(()));
    let seen = bench.seen("m1", "T1");
    let other = seen.token;
    let polled = journeyman_domain::worker::PollResult { messages: vec![seen], claims: Vec::new() };
    bench.polled(1, Ok(polled));
    let effects = bench.claimed(other, Err(Refusal::Rejected));
    assert_eq!(deletes(&effects), 0, "{effects:?}");
    assert!(bench.worker.is_stopping());
}

#[test]
fn i12_a_run_that_was_granted_here_and_is_over_settles_its_message_without_another_claim() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    bench.completes(claim);
    let (token, effects) = bench.receive("m2", "T");
    assert_eq!(claims(&effects), 0, "{effects:?}");
    assert!(effects.contains(&Effect::Delete(token)), "{effects:?}");
}
