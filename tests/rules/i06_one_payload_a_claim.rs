//! I6: at most one live payload a claim, and at most one claim in progress for a run in one worker.

use journeyman_domain::claim::{ClaimAction, ClaimEvent};
use journeyman_domain::id::{ServiceId, SourceId};
use journeyman_domain::lease::Granted;
use journeyman_domain::worker::{Effect, Event, PollResult, SourceSpec};

use crate::rules::support::{
    Bench, CLAIMS, COMPLETED, FAILED, LEASE, MESSAGES, One, PREPARED, REPORTED, RETRY, UPLOADED, at, claims, deletes,
    has, policy, run,
};

#[test]
fn i06_a_second_answer_to_anything_starts_nothing() {
    let mut one = One::executing();
    assert_eq!(one.happens(PREPARED), []);
    assert_eq!(one.happens(ClaimEvent::Claimed(Ok(Granted { sent_at: at(0), length: LEASE }))), []);
    let mut one = One::settling();
    assert_eq!(one.happens(PREPARED), []);
    assert_eq!(one.happens(FAILED), []);
}

#[test]
fn i06_two_messages_about_one_run_in_one_batch_make_one_claim_and_both_are_deleted() {
    let mut bench = Bench::messages(4, 1);
    let (first, second) = (bench.seen("m1", "T"), bench.seen("m2", "T"));
    let (claim, other) = (first.token, second.token);
    assert_eq!(claims(&bench.hit(vec![first, second])), 1);
    let effects = bench.claimed(claim, Ok(LEASE));
    assert!(effects.contains(&Effect::Delete(claim)) && effects.contains(&Effect::Delete(other)), "{effects:?}");
}

#[test]
fn i06_the_same_message_twice_in_one_batch_makes_one_claim_and_one_delete() {
    let mut bench = Bench::messages(4, 1);
    let (first, again) = (bench.seen("m1", "T"), bench.seen("m1", "T"));
    let (earlier, latest) = (first.token, again.token);
    let effects = bench.hit(vec![first, again]);
    assert_eq!(claims(&effects), 1);
    assert!(
        effects.contains(&Effect::Claim(latest, ClaimAction::Request))
            && effects.contains(&Effect::DropMessage(earlier)),
        "{effects:?}"
    );
    let effects = bench.claimed(latest, Ok(LEASE));
    assert!(effects.contains(&Effect::Delete(latest)), "{effects:?}");
    assert_eq!(deletes(&effects), 1);
    assert_eq!(bench.worker.free_slots(), 0, "three slots wait in the next poll, one is held");
}

#[test]
fn i06_a_message_about_a_run_in_hand_is_settled_by_the_claim_at_every_step() {
    let mut bench = Bench::messages(1, 1);
    let seen = bench.seen("m1", "T");
    let claim = seen.token;
    let mut steps = vec![bench.hit(vec![seen])];
    let again = |bench: &mut Bench, id: &str| {
        // The only slot is held, so that this message came with an answer that was on its way.
        let (token, effects) = bench.receive(id, "T");
        assert_eq!(claims(&effects), 0, "{effects:?}");
        (token, effects.contains(&Effect::Delete(token)))
    };
    let (waiting, deleted) = again(&mut bench, "m2");
    assert!(!deleted, "nothing definite is known yet");
    let granted = bench.claimed(claim, Ok(LEASE));
    assert!(granted.contains(&Effect::Delete(waiting)), "{granted:?}");
    steps.push(granted);
    for (id, event) in [
        ("m3", Event::Claim(claim, PREPARED)),
        ("m4", Event::Claim(claim, COMPLETED)),
        ("m5", Event::Claim(claim, UPLOADED)),
    ] {
        assert!(again(&mut bench, id).1, "before {event:?}");
        steps.push(bench.happens(event));
    }
    assert!(again(&mut bench, "m6").1);
    steps.push(bench.tell(claim, REPORTED));
    let executed =
        steps.iter().flatten().filter(|effect| matches!(effect, Effect::Claim(_, ClaimAction::Execute))).count();
    assert_eq!(executed, 1);
}

#[test]
fn i06_a_run_in_hand_that_a_poll_or_a_recovery_brings_again_is_not_taken_twice() {
    let mut bench = Bench::claims(3);
    let (first, twin) = (bench.grant("T"), bench.grant("T"));
    let (kept, dropped) = (first.token, twin.token);
    let effects = bench.brought(vec![first, twin]);
    assert!(
        effects.contains(&Effect::Claim(kept, ClaimAction::Prepare)) && effects.contains(&Effect::DropMessage(dropped)),
        "{effects:?}"
    );
    assert_eq!(bench.worker.claims().count(), 1);
}

#[test]
fn i06_a_run_that_one_source_holds_is_not_claimed_through_another() {
    let mut bench = Bench::opened_with(policy(4), &[MESSAGES, CLAIMS]);
    bench.opened(1, 1);
    bench.recovered(1, Ok(Vec::new()));
    let claim = bench.preparing("m1", "T");
    let twin = bench.grant("T");
    let token = twin.token;
    let polled = PollResult { messages: Vec::new(), claims: vec![twin] };
    let effects = bench.polled(1, Ok(polled));
    assert!(effects.contains(&Effect::DropMessage(token)), "{effects:?}");
    let held: Vec<_> = bench.worker.claims().map(|view| (view.claim, view.run.clone())).collect();
    assert_eq!(held, [(claim, run("T"))]);
}

/// A source of messages and one of claims, each of its own deployment, both opened; the second was asked for what was left.
fn strangers() -> Bench {
    let place = |manner, deployment| SourceSpec { capabilities: manner, service: ServiceId(deployment) };
    let mut bench = Bench::of(policy(12), &[place(MESSAGES, 0), place(CLAIMS, 1)]);
    bench.tick();
    bench.opened(0, 1);
    bench.opened(1, 1);
    bench.recovered(1, Ok(Vec::new()));
    bench
}

#[test]
fn i06_a_run_of_another_deployment_is_another_run_whatever_its_name() {
    let mut bench = strangers();
    let ours = bench.executing("m1", "T");
    let same_id = bench.grant("T");
    let theirs = same_id.token;
    let polled = |claims| Ok(PollResult { messages: Vec::new(), claims });
    let effects = bench.polled(1, polled(vec![same_id]));
    assert!(effects.contains(&Effect::Claim(theirs, ClaimAction::Prepare)), "{effects:?}");
    // Nor is it taken for one that has ended here.
    bench.completes(ours);
    let seen = bench.seen("m2", "U");
    let second = seen.token;
    assert!(bench.hit(vec![seen]).contains(&Effect::Claim(second, ClaimAction::Request)));
    bench.claimed(second, Ok(LEASE));
    let ended = bench.grant("U");
    let token = ended.token;
    assert!(bench.polled(1, polled(vec![ended])).contains(&Effect::Claim(token, ClaimAction::Prepare)));
}

#[test]
fn i06_a_recovery_is_told_of_the_runs_of_its_own_deployment() {
    let mut bench = strangers();
    let ours = bench.executing("m1", "Ended");
    bench.completes(ours);
    bench.preparing("m2", "Held");
    let grant = bench.grant("Theirs");
    bench.polled(1, Ok(PollResult { messages: Vec::new(), claims: vec![grant] }));
    bench.polled(1, Err(RETRY));
    let effects = bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
    assert!(
        has!(effects, Effect::Recover { source: SourceId(1), known_runs, .. } if *known_runs == [run("Theirs")]),
        "{effects:?}"
    );
}
