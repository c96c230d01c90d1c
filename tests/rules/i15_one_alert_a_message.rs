//! I15: a message received more often than the limit raises one alert, not one for each poll.

use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{ALERTED_MESSAGES_MAX, Alert, Effect, PollResult};

use crate::rules::support::{Bench, MESSAGES, policy, secs};

fn alerts(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| matches!(effect, Effect::Alert(Alert::DequeueCount { .. }))).count()
}

fn received(bench: &mut Bench, id: &str, count: u32) -> usize {
    let mut seen = bench.seen(id, "T");
    seen.dequeue_count = count;
    let claim = seen.token;
    let said = alerts(&bench.hit(vec![seen]));
    bench.claimed(claim, Err(Refusal::Throttled { retry_after: None }));
    bench.pass(secs(300));
    said
}

#[test]
fn i15_the_alert_is_raised_above_the_limit_and_once() {
    let mut bench = Bench::messages(2, 1);
    assert_eq!(received(&mut bench, "m1", 10), 0);
    assert_eq!(received(&mut bench, "m1", 11), 1);
    assert_eq!(received(&mut bench, "m1", 12), 0);
    assert_eq!(received(&mut bench, "m2", 200), 1);
}

#[test]
fn i15_messages_of_two_sources_that_share_a_name_raise_one_alert_each() {
    let mut bench = Bench::new(policy(4), &[MESSAGES; 2]);
    bench.tick();
    bench.opened(0, 1);
    bench.opened(1, 1);
    for source in 0..2 {
        let mut seen = bench.seen("1", &format!("T{source}"));
        seen.dequeue_count = 11;
        let effects = bench.polled(source, Ok(PollResult { messages: vec![seen], claims: Vec::new() }));
        assert_eq!(alerts(&effects), 1, "source {source}");
    }
}

#[test]
fn i15_the_memory_of_alerts_is_bounded() {
    let mut bench = Bench::messages(1, 1);
    let again = |bench: &mut Bench, id: usize| {
        let mut seen = bench.seen(&id.to_string(), "T");
        seen.dequeue_count = 11;
        seen.run = None;
        let token = seen.token;
        let said = alerts(&bench.hit(vec![seen]));
        bench.deleted(token, Ok(()));
        said
    };
    for id in 0..ALERTED_MESSAGES_MAX {
        assert_eq!(again(&mut bench, id), 1);
    }
    assert_eq!(again(&mut bench, 0), 0, "the oldest is still remembered");
    assert_eq!(again(&mut bench, ALERTED_MESSAGES_MAX), 1);
    assert_eq!(again(&mut bench, 0), 1, "one more than the memory holds pushes the oldest out");
    assert_eq!(again(&mut bench, 2), 0, "and only the oldest");
}
