//! I17: an unreadable message never stops the poller: it is reported once and deleted, and its batch is processed.

use std::time::Duration;

use journeyman_domain::claim::ClaimAction;
use journeyman_domain::id::SourceId;
use journeyman_domain::worker::{Alert, Effect, PollResult};

use crate::rules::support::{Bench, claims, has, polls};

#[test]
fn i17_the_rest_of_the_batch_is_claimed_and_the_unreadable_message_deleted() {
    let mut bench = Bench::messages(3, 1);
    let (first, mut bad, last) = (bench.seen("m1", "T1"), bench.seen("bad", "T2"), bench.seen("m3", "T3"));
    bad.run = None;
    let token = bad.token;
    let effects = bench.hit(vec![first, bad, last]);
    assert_eq!(claims(&effects), 2);
    let said = Effect::Alert(Alert::Undecodable { id: "bad".into(), count: 1 });
    assert_eq!(effects.iter().filter(|effect| **effect == said).count(), 1, "{effects:?}");
    assert!(effects.contains(&Effect::Delete(token)));
    assert_eq!(polls(&effects), 1, "it holds no slot");
    assert_eq!(bench.deleted(token, Ok(())), [Effect::DropMessage(token)]);
}

#[test]
fn i17_claims_that_cannot_be_read_are_said_looked_for_and_not_asked_for_at_full_speed() {
    let mut bench = Bench::claims(2);
    let (mut lost, mut waits, mut effects) = (0, Vec::new(), Vec::new());
    let mut asked_at = bench.now;
    while lost < 6 {
        let mut bad = bench.seen("T/0", "T");
        bad.run = None;
        let token = bad.token;
        let answer = bench.hit(vec![bad]);
        let said = Effect::Alert(Alert::UnreadableClaim { source: SourceId(0), id: "T/0".into() });
        assert!(answer.contains(&said) && answer.contains(&Effect::DropMessage(token)), "{answer:?}");
        lost += 1;
        effects.extend(answer);
        while polls(&effects) == 0 {
            if has!(effects, Effect::Recover { .. }) {
                effects = bench.recovered(0, Ok(Vec::new()));
            } else {
                effects = bench.pass(Duration::from_millis(100));
            }
        }
        waits.push(bench.now.since(asked_at));
        asked_at = bench.now;
        effects.clear();
    }
    assert!(waits.is_sorted_by(|one, next| *next * 2 > *one) && waits[5] > Duration::from_secs(6), "{waits:?}");
}

#[test]
fn i17_what_could_not_be_read_is_looked_for_though_the_rest_of_the_answer_could() {
    let mut bench = Bench::claims(3);
    let mut bad = bench.seen("U/0", "U");
    bad.run = None;
    let grant = bench.grant("T");
    let claim = grant.token;
    let effects = bench.polled(0, Ok(PollResult { messages: vec![bad], claims: vec![grant] }));
    assert!(effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)), "{effects:?}");
    assert!(has!(effects, Effect::Recover { .. }), "{effects:?}");
}
