//! I17: a message that cannot be read never stops the poller; it is said once and deleted, and costs its batch nothing.

use journeyman::domain::worker::{Alert, Effect};

use crate::support::{Bench, claims, polls};

#[test]
fn i17_the_rest_of_the_batch_is_claimed_and_the_unreadable_message_deleted() {
    let mut bench = Bench::messages(3, 1);
    let (first, mut bad, last) = (bench.seen("m1", "T1"), bench.seen("bad", "T2"), bench.seen("m3", "T3"));
    bad.run = None;
    let token = bad.token;
    let effects = bench.hit(vec![first, bad, last]);
    assert_eq!(claims(&effects), 2);
    let said = Effect::Alert(Alert::Undecodable { message: token, id: "bad".into(), count: 1 });
    assert_eq!(effects.iter().filter(|effect| **effect == said).count(), 1, "{effects:?}");
    assert!(effects.contains(&Effect::Delete(token)));
    assert_eq!(polls(&effects), 1, "it holds no slot");
    assert_eq!(bench.deleted(token, Ok(())), [Effect::Forget(token)]);
}

#[test]
fn i17_a_batch_of_nothing_else_does_not_stop_the_poller() {
    let mut bench = Bench::messages(2, 1);
    let mut seen: Vec<_> = (0..32).map(|n| bench.seen(&format!("m{n}"), "T")).collect();
    seen.iter_mut().for_each(|seen| seen.run = None);
    let effects = bench.hit(seen);
    assert_eq!(polls(&effects), 1, "{effects:?}");
    assert_eq!(bench.worker.claims().count(), 0);
}
