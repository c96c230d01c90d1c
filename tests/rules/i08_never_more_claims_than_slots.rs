//! I8: a slot is reserved before a claim is requested, and released exactly once.

use journeyman_domain::claim::ClaimAction;
use journeyman_domain::id::SourceId;
use journeyman_domain::turns::{OPEN_POLL_MIN, QUIET_TURN};
use journeyman_domain::worker::{Alert, Effect, PollResult};

use crate::rules::support::{Bench, CLAIMS, MESSAGES, PREPARED, RETRY, claims, deletes, policy, polls, run, secs};

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

/// Two sources of claims, of which the first has a poll open that holds the only slot.
fn one_slot_for_two() -> Bench {
    let mut bench = Bench::new(policy(1), &[CLAIMS, CLAIMS]);
    bench.tick();
    for source in 0..2 {
        bench.opened(source, 1);
        bench.recovered(source, Ok(Vec::new()));
    }
    bench
}

#[test]
fn a3_the_open_poll_of_an_idle_source_is_closed_for_another_which_then_goes_first() {
    let mut bench = one_slot_for_two();
    let holds: Vec<_> = bench.worker.awaited_polls(SourceId(1), bench.now).collect();
    assert_eq!(holds, [(SourceId(0), 1)], "the status says so");
    assert_eq!(bench.worker.awaited_polls(SourceId(0), bench.now).count(), 0);
    assert_eq!(bench.pass(OPEN_POLL_MIN), [Effect::ClosePoll(SourceId(0))], "the other one has never polled");
    let effects = bench.polled(0, Ok(PollResult::default()));
    assert!(matches!(effects[..], [Effect::Poll { source: SourceId(1), max: 1, .. }]), "{effects:?}");
    // It brings a task, runs it, and has the slot again at once.
    for task in ["T1", "T2", "T3"] {
        let grant = bench.grant(task);
        let claim = grant.token;
        assert_eq!(polls(&bench.polled(1, Ok(PollResult { messages: Vec::new(), claims: vec![grant] }))), 0);
        bench.tell(claim, PREPARED);
        let effects = bench.completes(claim);
        assert!(effects.iter().any(|effect| matches!(effect, Effect::Poll { source: SourceId(1), .. })), "{effects:?}");
    }
    assert_eq!(bench.pass(OPEN_POLL_MIN), [], "the other one waits for its turn");
    let effects = bench.pass(QUIET_TURN);
    assert_eq!(effects, [Effect::ClosePoll(SourceId(1))], "no task is left");
    // Each of two idle sources has its turn.
    bench.polled(1, Ok(PollResult::default()));
    assert_eq!(bench.pass(QUIET_TURN.saturating_sub(secs(1))), []);
    assert_eq!(bench.pass(secs(2)), [Effect::ClosePoll(SourceId(0))]);
}

#[test]
fn a3_a_poll_that_took_the_slot_in_its_turn_gives_it_back_to_the_busy_source() {
    let mut bench = one_slot_for_two();
    bench.pass(OPEN_POLL_MIN);
    bench.polled(0, Ok(PollResult::default()));
    let grant = bench.grant("T1");
    let claim = grant.token;
    bench.polled(1, Ok(PollResult { messages: Vec::new(), claims: vec![grant] }));
    bench.tell(claim, PREPARED);
    assert_eq!(bench.pass(QUIET_TURN), [], "nothing is closed for a slot that a task has");
    let effects = bench.completes(claim);
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Poll { source: SourceId(0), .. })), "{effects:?}");
    assert_eq!(bench.pass(OPEN_POLL_MIN), [Effect::ClosePoll(SourceId(0))]);
    // A task that came in that moment is not lost, and keeps the slot.
    let grant = bench.grant("T2");
    let effects = bench.polled(0, Ok(PollResult { messages: Vec::new(), claims: vec![grant] }));
    assert_eq!(polls(&effects), 0, "{effects:?}");
    assert_eq!(bench.worker.claims().count(), 1);
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
