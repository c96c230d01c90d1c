//! I14: every failed delete is reported with message and dequeue count, and retried a limited number of times.

use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{Alert, DELETE_ATTEMPTS_MAX, Effect};

use crate::rules::support::{Bench, LEASE, RETRY, deletes, has, secs};

fn failing(refusal: Refusal) -> (u32, Vec<Effect>) {
    let mut bench = Bench::messages(1, 1);
    let mut seen = bench.seen("m1", "T");
    seen.dequeue_count = 7;
    let claim = seen.token;
    bench.hit(vec![seen]);
    let mut effects = bench.claimed(claim, Ok(LEASE));
    let (mut sent, mut all) = (0, Vec::new());
    while deletes(&effects) > 0 {
        sent += 1;
        effects = bench.deleted(claim, Err(refusal));
        all.extend(effects.clone());
        for _ in 0..20 {
            effects = bench.pass(secs(1));
            if deletes(&effects) > 0 {
                break;
            }
        }
    }
    assert_eq!(bench.worker.claims().count(), 1, "a failed delete never fails the task");
    (sent, all)
}

#[test]
fn i14_a_failing_delete_is_repeated_six_times_and_every_failure_is_said() {
    for refusal in [RETRY, Refusal::Throttled { retry_after: None }, Refusal::Denied, Refusal::Stale] {
        let (sent, effects) = failing(refusal);
        assert_eq!(sent, DELETE_ATTEMPTS_MAX, "{refusal:?}");
        let said: Vec<_> = effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Alert(Alert::DeleteFailed { id, count, retried }) => Some((&**id, *count, *retried)),
                _ => None,
            })
            .collect();
        let mut expected = vec![("m1", 7, true); DELETE_ATTEMPTS_MAX as usize - 1];
        expected.push(("m1", 7, false));
        assert_eq!(said, expected, "{refusal:?}");
        assert!(has!(effects, Effect::DropMessage(_)), "{refusal:?}");
    }
}

#[test]
fn i14_a_delete_that_can_never_work_is_said_and_not_repeated() {
    let (sent, effects) = failing(Refusal::Rejected);
    assert_eq!(sent, 1);
    assert!(matches!(effects[..], [Effect::Alert(Alert::DeleteFailed { retried: false, .. }), Effect::DropMessage(_)]));
}

#[test]
fn i14_a_message_that_is_already_gone_is_a_success() {
    let (sent, effects) = failing(Refusal::Gone);
    assert_eq!(sent, 1);
    assert!(matches!(effects[..], [Effect::DropMessage(_)]), "{effects:?}");
}
