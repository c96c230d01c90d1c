//! I28: what an earlier life of this worker held is handed back or left to expire; its payload is never resumed.

use std::time::Duration;

use journeyman::domain::claim::{End, Loss};
use journeyman::domain::id::SourceId;
use journeyman::domain::outcome::{Outcome, Reason};
use journeyman::domain::poll::RECOVERIES_MAX;
use journeyman::domain::worker::{Alert, Brought, Effect, Event, Found};

use crate::support::{Bench, CLAIMS, RETRY, policy, run, secs};

const SHUTDOWN: Outcome = Outcome::Exception(Reason::WorkerShutdown);

fn started() -> Bench {
    let mut bench = Bench::new(policy(2), &[CLAIMS]);
    bench.tick();
    assert!(matches!(bench.opened(0, 1)[..], [Effect::Recover { .. }]), "asked before the first poll");
    bench
}

#[test]
fn i28_a_claim_found_at_the_start_is_handed_back() {
    let mut bench = started();
    let found = bench.grant("T");
    let claim = found.token;
    let effects = bench.recovered(0, Ok(vec![found]));
    assert!(effects.contains(&Effect::Alert(Alert::LeftOver { run: run("T") })), "{effects:?}");
    let report = |effect: &Effect| matches!(effect, Effect::Report { outcome: SHUTDOWN, .. });
    assert!(effects.iter().any(report), "{effects:?}");
    assert!(!effects.contains(&Effect::Prepare(claim)));
    assert_eq!(bench.worker.free(), 0, "it holds no slot: both wait in the poll");
    let effects = bench.happens(Event::Reported { claim, answer: Ok(()) });
    assert!(matches!(effects[..], [Effect::Close { end: End::Reported(SHUTDOWN), .. }]), "{effects:?}");
}

#[test]
fn i28_one_whose_lease_does_not_allow_it_is_forgotten() {
    let mut bench = started();
    let found = Brought { length: Duration::ZERO, ..bench.grant("T") };
    let effects = bench.recovered(0, Ok(vec![found]));
    let close = |effect: &Effect| matches!(effect, Effect::Close { end: End::Lost(Loss::GrantedLate), .. });
    assert!(effects.iter().any(close), "{effects:?}");
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Report { .. })));
}

#[test]
fn i28_a_claim_whose_reply_was_lost_in_this_life_is_started() {
    let mut bench = started();
    bench.recovered(0, Ok(Vec::new()));
    bench.polled(0, 0, Err(RETRY));
    assert!(bench.pass(secs(2)).iter().any(|effect| matches!(effect, Effect::Recover { .. })));
    let found = bench.grant("T");
    let claim = found.token;
    assert!(bench.recovered(0, Ok(vec![found])).contains(&Effect::Prepare(claim)));
}

#[test]
fn i28_while_the_start_could_not_be_looked_at_everything_found_later_is_an_earlier_lifes() {
    let mut bench = started();
    let mut effects = bench.recovered(0, Err(RETRY));
    // It gives up asking and polls; a poll is lost, and then the queue answers.
    for _ in 0..600 {
        if effects.iter().any(|effect| matches!(effect, Effect::Poll { .. })) {
            break;
        }
        let recovering = effects.iter().any(|effect| matches!(effect, Effect::Recover { .. }));
        effects = if recovering { bench.recovered(0, Err(RETRY)) } else { bench.pass(secs(1)) };
    }
    bench.polled(0, 0, Err(RETRY));
    bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
    let found = bench.grant("T");
    let claim = found.token;
    let effects = bench.recovered(0, Ok(vec![found]));
    assert!(!effects.contains(&Effect::Prepare(claim)), "{effects:?}");
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Report { outcome: SHUTDOWN, .. })), "{effects:?}");
}

fn partly(bench: &mut Bench, claims: Vec<Brought>) -> Vec<Effect> {
    let answer = Ok(Found { claims, missed: Some(RETRY) });
    bench.happens(Event::Recovered { source: SourceId(0), sent_at: bench.now, answer })
}

#[test]
fn i28_what_a_recovery_missed_is_looked_for_again_and_not_for_ever() {
    let mut bench = started();
    let found = bench.grant("T");
    let mut effects = partly(&mut bench, vec![found]);
    let reported = |effect: &Effect| matches!(effect, Effect::Report { outcome: SHUTDOWN, .. });
    assert!(effects.iter().any(reported), "what was found is handed back: {effects:?}");
    let mut tries = 1;
    while !effects.iter().any(|effect| matches!(effect, Effect::Poll { .. })) {
        effects = bench.pass_until(|effect| matches!(effect, Effect::Recover { .. } | Effect::Poll { .. }));
        if effects.iter().any(|effect| matches!(effect, Effect::Recover { .. })) {
            tries += 1;
            effects.extend(partly(&mut bench, Vec::new()));
        }
    }
    assert_eq!(tries, RECOVERIES_MAX);
}

#[test]
fn i28_what_a_first_recovery_missed_is_still_an_earlier_lifes() {
    let mut bench = started();
    partly(&mut bench, Vec::new());
    bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
    let found = bench.grant("T");
    let claim = found.token;
    let effects = bench.recovered(0, Ok(vec![found]));
    assert!(effects.contains(&Effect::Alert(Alert::LeftOver { run: run("T") })), "{effects:?}");
    assert!(!effects.contains(&Effect::Prepare(claim)));
}
