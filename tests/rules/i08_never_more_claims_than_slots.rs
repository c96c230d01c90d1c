//! I8: a slot is reserved before a claim is requested, and released exactly once.

use journeyman_domain::claim::ClaimAction;
use journeyman_domain::id::SourceId;
use journeyman_domain::worker::{Alert, Effect, PollResult};

use crate::rules::support::{Bench, CLAIMS, MESSAGES, RETRY, claims, deletes, policy, polls, run, secs};

#[test]
fn i08_a_poll_asks_for_the_free_slots_and_for_no_more_than_32() {
    let max = |capacity| {
        let mut bench = Bench::new(policy(capacity), &[MESSAGES]);
        bench.tick();
        match bench.opened(0, 1)[..] {
            [Effect::Poll { max, .. }] => max,
            _ => 0,
        }
    };
    assert_eq!((max(0), max(1), max(31), max(32), max(33), max(1000)), (0, 1, 31, 32, 32, 32));
}

#[test]
fn i08_more_messages_than_slots_are_left_to_others() {
    let mut bench = Bench::messages(2, 1);
    let seen: Vec<_> = (0..5).map(|n| bench.seen(&format!("m{n}"), &format!("T{n}"))).collect();
    let effects = bench.hit(seen);
    assert_eq!(claims(&effects), 2);
    assert_eq!(effects.iter().filter(|effect| matches!(effect, Effect::DropMessage(_))).count(), 3);
    assert_eq!(polls(&effects), 0, "no slot, no poll");
}

#[test]
fn i08_a_claim_that_is_never_answered_definitely_is_given_up_after_six_requests() {
    let mut bench = Bench::messages(1, 1);
    let seen = bench.seen("m1", "T");
    let claim = seen.token;
    let mut effects = bench.hit(vec![seen]);
    let mut requests = claims(&effects);
    while claims(&effects) > 0 {
        effects = bench.claimed(claim, Err(RETRY));
        effects.extend(bench.pass(secs(15)));
        assert_eq!(deletes(&effects), 0, "I12: no answer is definite");
        requests += claims(&effects);
    }
    assert_eq!(requests, 6);
    assert!(effects.contains(&Effect::DropMessage(claim)), "others may claim it: {effects:?}");
    assert_eq!(bench.worker.claims().count(), 0);
}

#[test]
fn i08_two_sources_share_the_slots_and_take_turns() {
    let mut bench = Bench::new(policy(1), &[CLAIMS, CLAIMS]);
    bench.tick();
    for source in 0..2 {
        bench.opened(source, 1);
        bench.recovered(source, Ok(Vec::new()));
    }
    let mut asked = Vec::new();
    let mut source = 0;
    for _ in 0..6 {
        bench.now = bench.now.plus(secs(20));
        for effect in bench.polled(source, Ok(PollResult::default())) {
            if let Effect::Poll { source: SourceId(next), .. } = effect {
                asked.push(next);
                source = next;
            }
        }
    }
    assert_eq!(asked, [1, 0, 1, 0, 1, 0]);
}

#[test]
fn i08_a_claim_that_nobody_asked_for_is_handed_back_and_not_started() {
    let mut bench = Bench::claims(1);
    let (first, second) = (bench.grant("T1"), bench.grant("T2"));
    let token = second.token;
    let effects = bench.brought(vec![first, second]);
    assert!(effects.contains(&Effect::Alert(Alert::UnexpectedGrant { run: run("T2") })), "{effects:?}");
    assert!(!effects.contains(&Effect::Claim(token, ClaimAction::Prepare)));
    assert!(
        effects
            .iter()
            .any(|effect| matches!(effect, Effect::Claim(claim, ClaimAction::Report { .. }) if *claim == token))
    );
}
