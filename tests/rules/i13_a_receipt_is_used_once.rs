//! I13: a delete uses the pop receipt of the last reception of its message. (The adapters hold the receipt.)

use journeyman_domain::id::LocalToken;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{Effect, PollResult};

use crate::rules::support::{Bench, LEASE, MESSAGES, RETRY, deletes, policy, secs};

fn deleted(effects: &[Effect]) -> Vec<LocalToken> {
    let token = |effect: &Effect| if let Effect::Delete(token) = effect { Some(*token) } else { None };
    effects.iter().filter_map(token).collect()
}

#[test]
fn i13_a_message_received_again_is_never_deleted_by_its_earlier_receipt() {
    let mut bench = Bench::messages(2, 1);
    let claim = bench.preparing("m1", "T");
    bench.deleted(claim, Err(RETRY));
    let (latest, effects) = bench.receive("m1", "T");
    assert_eq!(deleted(&effects), [latest]);
    assert!(effects.contains(&Effect::DropMessage(claim)), "{effects:?}");
    assert_eq!(deletes(&bench.pass(secs(600))), 0, "the retry of the earlier receipt is off");
    assert_eq!(bench.deleted(claim, Err(RETRY)), [], "nor does a late answer bring it back");
}

#[test]
fn i13_a_claim_that_waits_for_its_answer_takes_the_latest_receipt() {
    let mut bench = Bench::messages(2, 1);
    let (claim, _) = bench.receive("m1", "T");
    let (latest, _) = bench.receive("m1", "T");
    assert_eq!(deleted(&bench.claimed(claim, Ok(LEASE))), [latest]);
}

#[test]
fn i13_an_unreadable_message_received_again_is_deleted_by_its_latest_receipt() {
    let mut bench = Bench::messages(2, 1);
    let (mut first, mut again) = (bench.seen("m1", "T"), bench.seen("m1", "T"));
    first.run = None;
    again.run = None;
    let latest = again.token;
    bench.hit(vec![first]);
    assert_eq!(deleted(&bench.hit(vec![again])), [latest]);
    assert_eq!(bench.deleted(latest, Ok(())), [Effect::DropMessage(latest)]);
}

#[test]
fn i13_messages_of_two_sources_that_share_a_name_are_two_messages() {
    let mut bench = Bench::new(policy(4), &[MESSAGES; 2]);
    bench.tick();
    bench.opened(0, 1);
    bench.opened(1, 1);
    let mine = bench.preparing("1", "T0");
    bench.deleted(mine, Err(RETRY));
    let other = bench.seen("1", "T1");
    let effects = bench.polled(1, Ok(PollResult { messages: vec![other], claims: Vec::new() }));
    assert!(!effects.contains(&Effect::DropMessage(mine)), "{effects:?}");
    assert_eq!(deleted(&bench.pass(secs(1))), [mine]);
}

#[test]
fn i13_a_refused_url_is_fetched_anew_and_then_the_delete_is_repeated() {
    for refusal in [Refusal::Stale, Refusal::Denied] {
        let mut bench = Bench::messages(1, 1);
        let claim = bench.preparing("m1", "T");
        let effects = bench.deleted(claim, Err(refusal));
        assert!(effects.contains(&Effect::Open(journeyman_domain::id::SourceId(0))), "{refusal:?}: {effects:?}");
        bench.opened(0, 1);
        assert_eq!(deleted(&bench.tick()), [claim], "{refusal:?}");
    }
}
