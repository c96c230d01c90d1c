//! I7: if a payload may have overlapped with one of another worker, that is reported once.

use journeyman_domain::claim::ClaimAction;
use journeyman_domain::worker::{Alert, Effect};

use crate::rules::support::{Bench, FAILED, LEASE, acts, run, secs};

fn overlaps(effects: &[Effect]) -> usize {
    let alert = Effect::Alert(Alert::OverlapPossible { run: run("T") });
    effects.iter().filter(|effect| **effect == alert).count()
}

#[test]
fn i07_a_host_that_slept_through_the_lease_says_so_once() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    bench.now = bench.now.plus(LEASE);
    let effects = bench.tick();
    assert_eq!(overlaps(&effects), 1, "{effects:?}");
    assert!(acts!(effects, ClaimAction::Kill { .. }));
    let effects = bench.tell(claim, FAILED);
    assert_eq!(overlaps(&effects), 0, "{effects:?}");
}

#[test]
fn i07_a_payload_that_takes_longer_to_die_than_its_lease_lasts_is_said() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    assert_eq!(overlaps(&bench.pass(LEASE - secs(1))), 0);
    bench.now = bench.now.plus(secs(1));
    let effects = bench.tell(claim, FAILED);
    assert_eq!(overlaps(&effects), 1, "{effects:?}");
}

#[test]
fn i07_a_payload_that_dies_in_time_raises_nothing() {
    let mut bench = Bench::messages(1, 1);
    let claim = bench.executing("m1", "T");
    let mut effects = bench.pass(LEASE - secs(1));
    effects.extend(bench.tell(claim, FAILED));
    assert_eq!(overlaps(&effects), 0, "{effects:?}");
    assert!(acts!(effects, ClaimAction::Close(_)));
}
