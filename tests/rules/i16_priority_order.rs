//! I16: priority queues are polled strictly in order: a lower one only after every higher one was empty in the same round.

use std::collections::VecDeque;

use journeyman_domain::id::{PriorityQueue, SourceId};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{Effect, Event, OpenResult, PollResult};

use crate::rules::support::{Bench, CLAIMS, MESSAGES, RETRY, at, policy, polls, secs};

fn lane(effects: &[Effect]) -> Option<u16> {
    effects.iter().find_map(|effect| if let Effect::Poll { queue: lane, .. } = effect { Some(lane.0) } else { None })
}

#[test]
fn i16_after_trouble_the_worker_waits_and_asks_from_the_top() {
    for refusal in [RETRY, Refusal::Throttled { retry_after: None }, Refusal::Gone, Refusal::Rejected, Refusal::Denied]
    {
        let mut bench = Bench::messages(4, 3);
        bench.empty();
        // Accepted before, so that a rejection is not taken for a wrong configuration.
        assert_eq!(lane(&bench.polled(0, Err(refusal))), None, "{refusal:?}");
        let first = bench.pass(secs(5));
        assert!(bench.worker.is_stopping() || lane(&first) == Some(0), "{refusal:?}: {first:?}");
    }
}

#[test]
fn i16_lanes_passed_over_for_want_of_a_slot_are_asked_from_the_top_later() {
    let mut bench = Bench::new(policy(1), &[MESSAGES, CLAIMS]);
    bench.tick();
    bench.opened(0, 2);
    bench.opened(1, 1);
    bench.recovered(1, Ok(Vec::new()));
    // Source 0 says "empty" on lane 0; the only slot goes to source 1, which has waited longer, for ten minutes.
    bench.now = at(1);
    let effects = bench.empty();
    assert!(matches!(effects[..], [Effect::Poll { source: SourceId(1), .. }]), "{effects:?}");
    bench.now = at(600);
    let effects = bench.polled(1, Ok(Default::default()));
    let asked = effects.iter().find(|effect| matches!(effect, Effect::Poll { source: SourceId(0), .. }));
    assert!(matches!(asked, Some(Effect::Poll { queue: PriorityQueue(0), .. })), "{effects:?}");
}

#[test]
fn i16_a_held_poll_has_slept_already() {
    let mut bench = Bench::claims(1);
    bench.now = bench.now.plus(secs(20));
    let event = Event::Polled { source: SourceId(0), answer: Ok(Default::default()) };
    assert_eq!(polls(&bench.happens(event)), 1);
    // One that is answered at once, as a quarantined worker's is, does not spin.
    assert_eq!(polls(&bench.empty()), 0);
    assert_eq!(polls(&bench.pass(secs(1))), 1);
}

#[test]
fn i16_many_quiet_sources_share_so_many_polls_a_second_and_few_poll_every_second() {
    for (sources, polls_a_second) in [(1, 7..=9), (20, 140..=176), (100, 160..=210)] {
        let mut bench = Bench::new(policy(100), &vec![MESSAGES; usize::from(sources)]);
        bench.tick();
        let mut effects: VecDeque<Effect> = (0..sources).flat_map(|source| bench.opened(source, 7)).collect();
        let mut polls = 0;
        while bench.now < at(100) {
            match effects.pop_front() {
                Some(Effect::Poll { source, .. }) => {
                    polls += 1;
                    effects.extend(bench.polled(source.0, Ok(PollResult::default())));
                }
                Some(other) => panic!("{other:?}"),
                None => {
                    bench.now = bench.worker.next_deadline().expect("the next poll");
                    effects.extend(bench.tick());
                }
            }
        }
        assert!(polls_a_second.contains(&(polls / 100)), "{sources} sources: {polls} polls in 100 s");
    }
}

#[test]
fn i16_urls_are_fetched_anew_before_they_end() {
    let mut bench = Bench::new(policy(1), &[MESSAGES]);
    bench.tick();
    let answer = Ok(OpenResult { priority_queues: 1, usable_for: Some(secs(60)) });
    bench.happens(Event::Opened { source: SourceId(0), sent_at: at(0), answer });
    bench.now = at(60);
    assert_eq!(bench.empty(), []);
    assert_eq!(bench.pass(secs(1)), [Effect::Open(SourceId(0))]);
}

#[test]
fn i16_urls_that_never_last_are_not_fetched_in_a_busy_loop() {
    let mut bench = Bench::new(policy(1), &[MESSAGES]);
    let mut effects = bench.tick();
    let (mut opens, mut asked) = (0, 0);
    while bench.now < at(60) {
        assert!(opens + asked < 1000, "{opens} opens and {asked} polls by {:?}", bench.now);
        if effects.contains(&Effect::Open(SourceId(0))) {
            opens += 1;
            let answer = Ok(OpenResult { priority_queues: 1, usable_for: Some(secs(0)) });
            effects = bench.happens(Event::Opened { source: SourceId(0), sent_at: bench.now, answer });
        } else if polls(&effects) > 0 {
            asked += 1;
            effects = bench.empty();
        } else {
            effects = bench.pass(secs(1));
        }
    }
    assert!(asked > 10, "they are used while they last: {asked} polls");
}

#[test]
fn i16_urls_that_are_refused_again_and_again_are_not_fetched_in_a_busy_loop() {
    let mut bench = Bench::messages(1, 1);
    let mut effects = bench.polled(0, Err(Refusal::Stale));
    assert_eq!(effects, [Effect::Open(SourceId(0))], "the first time is routine");
    let mut opens = 1;
    while bench.now < at(60) {
        assert!(opens < 1000, "{opens} opens by {:?}", bench.now);
        if effects.contains(&Effect::Open(SourceId(0))) {
            opens += 1;
            effects = bench.opened(0, 1);
        } else if polls(&effects) > 0 {
            effects = bench.polled(0, Err(Refusal::Stale));
        } else {
            effects = bench.pass(secs(1));
        }
    }
    assert!(opens < 20, "{opens}");
}

#[test]
fn i16_claims_that_are_throttled_slow_the_polls_down_more_and_more() {
    let mut bench = Bench::messages(1, 1);
    let mut waits = Vec::new();
    for n in 0..8 {
        let (claim, _) = bench.receive(&format!("m{n}"), &format!("T{n}"));
        let held_at = bench.now;
        let mut effects = bench.claimed(claim, Err(Refusal::Throttled { retry_after: None }));
        while polls(&effects) == 0 {
            effects = bench.pass(secs(1));
        }
        waits.push(bench.now.since(held_at));
    }
    assert!(waits[0] <= secs(3) && waits[7] >= secs(60), "{waits:?}");
}

#[test]
fn i16_a_claim_that_is_granted_ends_the_slowing_down() {
    let mut bench = Bench::messages(1, 1);
    let throttled = |bench: &mut Bench, id: &str| {
        let (claim, _) = bench.receive(id, id);
        bench.claimed(claim, Err(Refusal::Throttled { retry_after: None }));
        let from = bench.now;
        bench.pass_until(|effect| matches!(effect, Effect::Poll { .. }));
        bench.now.since(from)
    };
    for id in ["m1", "m2", "m3", "m4"] {
        throttled(&mut bench, id);
    }
    let claim = bench.executing("m5", "T5");
    bench.completes(claim);
    assert!(throttled(&mut bench, "m6") <= secs(3));
}

#[test]
fn i16_urls_refused_during_a_poll_are_fetched_anew_after_it() {
    let mut bench = Bench::messages(2, 1);
    let claim = bench.preparing("m1", "T");
    let effects = bench.deleted(claim, Err(Refusal::Stale));
    assert!(!effects.contains(&Effect::Open(SourceId(0))), "a poll is under way: {effects:?}");
    let mut effects = bench.empty();
    effects.extend(bench.pass(secs(1)));
    assert!(effects.contains(&Effect::Open(SourceId(0))), "{effects:?}");
}
