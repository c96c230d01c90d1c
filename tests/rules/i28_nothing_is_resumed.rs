//! I28: a claim of a previous process of this worker is released or expires; its payload is never resumed.

use std::time::Duration;

use journeyman::domain::claim::{CancelCommand, ClaimEnd, LossReason, TAKEOVER_ATTEMPTS_MAX};
use journeyman::domain::id::{LocalToken, SourceId};
use journeyman::domain::outcome::{ExceptionReason, Outcome};
use journeyman::domain::poll::{LATE_RECOVERY_ATTEMPTS_MAX, LATE_RECOVERY_RETRY, RECOVERY_ATTEMPTS_MAX};
use journeyman::domain::refusal::Refusal;
use journeyman::domain::time::Instant;
use journeyman::domain::unread_polls::{CLOCK_SKEW_MAX, ClaimWindow, UNREAD_POLLS_MAX};
use journeyman::domain::worker::{Alert, Effect, Event, GrantedClaim, PollResult, RecoveredClaim, RecoveryResult};

use crate::support::{Bench, CLAIMS, LEASE, MESSAGES, RETRY, policy, run, secs};

const SHUTDOWN: Outcome = Outcome::Exception(ExceptionReason::WorkerShutdown);

/// A previous process may have been killed during a poll.
fn started() -> Bench {
    let mut bench = Bench::new(policy(2), &[CLAIMS]);
    bench.happens(Event::UnreadPoll { source: SourceId(0), age: secs(5) });
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
    assert!(effects.contains(&Effect::Alert(Alert::RecoveredClaim { run: run("T") })), "{effects:?}");
    let report = |effect: &Effect| matches!(effect, Effect::Report { outcome: SHUTDOWN, .. });
    assert!(effects.iter().any(report), "{effects:?}");
    assert!(!effects.contains(&Effect::Prepare(claim)));
    assert_eq!(bench.worker.free_slots(), 0, "it holds no slot: both wait in the poll");
    let effects = bench.happens(Event::Reported { claim, answer: Ok(()) });
    assert!(matches!(effects[..], [Effect::Close { end: ClaimEnd::Reported(SHUTDOWN), .. }]), "{effects:?}");
}

#[test]
fn i28_one_whose_lease_does_not_allow_it_is_forgotten() {
    let mut bench = started();
    let found = GrantedClaim { length: Duration::ZERO, ..bench.grant("T") };
    let effects = bench.recovered(0, Ok(vec![found]));
    let close =
        |effect: &Effect| matches!(effect, Effect::Close { end: ClaimEnd::Lost(LossReason::GrantedTooLate), .. });
    assert!(effects.iter().any(close), "{effects:?}");
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Report { .. })));
}

#[test]
fn i28_a_claim_whose_reply_was_lost_in_this_life_is_started() {
    let mut bench = started();
    bench.recovered(0, Ok(Vec::new()));
    // Until the clocks can tell the lives apart.
    for _ in 0..=CLOCK_SKEW_MAX.as_secs() {
        bench.polled(0, 0, Ok(PollResult { messages: Vec::new(), claims: Vec::new() }));
        bench.pass_until(|effect| matches!(effect, Effect::Poll { .. }));
    }
    bench.polled(0, 0, Err(RETRY));
    assert!(bench.pass(secs(2)).iter().any(|effect| matches!(effect, Effect::Recover { .. })));
    let found = bench.grant("T");
    let claim = found.token;
    assert!(bench.recovered(0, Ok(vec![found])).contains(&Effect::Prepare(claim)));
}

#[test]
fn i28_a_claim_whose_reply_was_lost_too_soon_for_the_clocks_to_tell_is_handed_back() {
    let mut bench = started();
    bench.recovered(0, Ok(Vec::new()));
    bench.polled(0, 0, Err(RETRY));
    assert!(bench.pass(secs(2)).iter().any(|effect| matches!(effect, Effect::Recover { .. })));
    let found = bench.grant("T");
    let claim = found.token;
    let effects = bench.recovered(0, Ok(vec![found]));
    assert!(!effects.contains(&Effect::Prepare(claim)), "{effects:?}");
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

fn partly(bench: &mut Bench, claims: Vec<GrantedClaim>) -> Vec<Effect> {
    let answer = Ok(RecoveryResult { claims, error: Some(RETRY), foreign_claims: 0 });
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
    assert_eq!(tries, RECOVERY_ATTEMPTS_MAX);
}

/// Refuses every recovery and answers every poll; when it was asked for recoveries.
fn asked_while_polling(bench: &mut Bench, first: Vec<Effect>, span: Duration) -> Vec<Instant> {
    let (until, mut effects, mut at) = (bench.now.plus(span), first, Vec::new());
    while bench.now < until {
        effects = if effects.iter().any(|effect| matches!(effect, Effect::Recover { .. })) {
            at.push(bench.now);
            bench.recovered(0, Err(RETRY))
        } else if effects.iter().any(|effect| matches!(effect, Effect::Poll { .. })) {
            bench.empty(0)
        } else {
            bench.pass(secs(1))
        };
    }
    at
}

#[test]
fn i28_what_could_not_be_looked_for_is_asked_for_ever_more_slowly_beside_polling_and_not_for_ever() {
    let mut bench = started();
    let first = bench.recovered(0, Err(RETRY));
    let at = asked_while_polling(&mut bench, first, secs(3 * 3600));
    // The first one was refused above.
    let (quick, later) = at.split_at(usize::try_from(RECOVERY_ATTEMPTS_MAX - 1).expect("few"));
    assert_eq!(later.len(), usize::try_from(LATE_RECOVERY_ATTEMPTS_MAX).expect("few"));
    let given_up = *quick.last().expect("it was tried");
    assert!(later[0].since(given_up) >= LATE_RECOVERY_RETRY.first / 2);
    let waits: Vec<_> = later.windows(2).map(|pair| pair[1].since(pair[0])).collect();
    assert!(waits.iter().all(|wait| *wait <= LATE_RECOVERY_RETRY.max + secs(30)), "{waits:?}");
    assert!(waits.last() > waits.first(), "{waits:?}");
}

#[test]
fn i28_what_a_late_recovery_finds_is_handed_back_and_nothing_is_asked_for_after_it() {
    let mut bench = started();
    let mut effects = bench.recovered(0, Err(RETRY));
    for _ in 1..RECOVERY_ATTEMPTS_MAX {
        if !effects.iter().any(|effect| matches!(effect, Effect::Recover { .. })) {
            bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
        }
        effects = bench.recovered(0, Err(RETRY));
    }
    while !effects.iter().any(|effect| matches!(effect, Effect::Recover { .. })) {
        let polls = effects.iter().any(|effect| matches!(effect, Effect::Poll { .. }));
        effects = if polls { bench.empty(0) } else { bench.pass(secs(1)) };
    }
    let found = bench.grant("T");
    let effects = bench.recovered(0, Ok(vec![found]));
    assert!(effects.iter().any(|effect| matches!(effect, Effect::Report { outcome: SHUTDOWN, .. })), "{effects:?}");
    assert_eq!(asked_while_polling(&mut bench, effects, secs(3600)), []);
}

#[test]
fn i28_what_a_first_recovery_missed_is_still_an_earlier_lifes() {
    let mut bench = started();
    partly(&mut bench, Vec::new());
    bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
    let found = bench.grant("T");
    let claim = found.token;
    let effects = bench.recovered(0, Ok(vec![found]));
    assert!(effects.contains(&Effect::Alert(Alert::RecoveredClaim { run: run("T") })), "{effects:?}");
    assert!(!effects.contains(&Effect::Prepare(claim)));
}

// What goes by our name and is not ours.

fn asked(effects: &[Effect]) -> Option<Vec<ClaimWindow>> {
    let asked =
        |effect: &Effect| if let Effect::Recover { windows: asked, .. } = effect { Some(asked.clone()) } else { None };
    effects.iter().find_map(asked)
}

#[test]
fn i28_only_what_was_claimed_while_an_unread_poll_may_have_claimed_is_asked_for() {
    let mut bench = Bench::new(policy(2), &[CLAIMS]);
    bench.tick();
    assert_eq!(asked(&bench.opened(0, 1)), Some(vec![]), "nothing has asked for anything");
    bench.recovered(0, Ok(Vec::new()));
    // Answered, however: no claim can be lost.
    for refusal in [Refusal::Throttled { retry_after: None }, Refusal::Denied] {
        bench.polled(0, 0, Err(refusal));
        let effects = bench.pass_until(|effect| matches!(effect, Effect::Poll { .. }));
        assert_eq!(asked(&effects), None, "{refusal:?}");
    }
    bench.now = bench.now.plus(secs(10));
    bench.polled(0, 0, Err(RETRY));
    let effects = bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
    let windows = asked(&effects).expect("asked");
    let [window] = windows[..] else { panic!("{windows:?}") };
    let holds = |ago: u64| window.contains(secs(ago), Duration::ZERO);
    assert!(holds(5) && holds(10) && !holds(20), "{window:?}");
    // That is done with, once it was answered.
    bench.recovered(0, Ok(Vec::new()));
    bench.polled(0, 0, Err(RETRY));
    assert_eq!(
        asked(&bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }))).map(|all| all.len()),
        Some(1)
    );
}

#[test]
fn i28_polls_whose_claims_could_not_be_looked_for_are_remembered_and_not_without_end() {
    let mut bench = started();
    let mut effects = bench.recovered(0, Err(Refusal::Denied));
    for lost in 1..UNREAD_POLLS_MAX + 4 {
        assert!(effects.iter().any(|effect| matches!(effect, Effect::Poll { .. })), "{effects:?}");
        bench.polled(0, 0, Err(RETRY));
        effects = bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
        let windows = asked(&effects).expect("asked");
        // Those of the previous process as well, while slots are free.
        assert_eq!(windows.len(), (lost + 1).min(UNREAD_POLLS_MAX));
        effects = bench.recovered(0, Err(Refusal::Denied));
        effects.extend(bench.pass(secs(60)));
    }
}

#[test]
fn i28_claims_of_a_namesake_are_told_of_once_and_again_when_they_become_more() {
    let mut bench = started();
    let told = |effects: &[Effect]| {
        let claims = |effect: &Effect| match effect {
            Effect::Alert(Alert::DuplicateWorkerId { claims, .. }) => Some(*claims),
            _ => None,
        };
        effects.iter().find_map(claims)
    };
    for (others, expected) in [(2, Some(2)), (2, None), (1, None), (3, Some(3)), (0, None), (1, Some(1))] {
        let answer = Ok(RecoveryResult { claims: Vec::new(), error: None, foreign_claims: others });
        let effects = bench.happens(Event::Recovered { source: SourceId(0), sent_at: bench.now, answer });
        assert_eq!(told(&effects), expected, "{others}");
        assert_eq!(bench.worker.sources().next().map(|source| source.foreign_claims), Some(others));
        bench.polled(0, 0, Err(RETRY));
        bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
    }
}

// What was written down.

fn left(bench: &mut Bench, name: &str, outcome: Outcome) -> LocalToken {
    let token = bench.token();
    let left = RecoveredClaim { token, source: SourceId(0), run: run(name), outcome };
    let effects = bench.happens(Event::ClaimsRecovered(vec![left]));
    assert!(effects.contains(&Effect::TakeOver(token)), "asked for first of all: {effects:?}");
    token
}

fn taken(bench: &mut Bench, claim: LocalToken, answer: Result<Duration, Refusal>) -> Vec<Effect> {
    bench.happens(Event::TakenOver { claim, sent_at: bench.now, answer })
}

#[test]
fn i28_what_was_written_down_is_asked_for_once_more_and_reported_as_it_was_left() {
    for outcome in [SHUTDOWN, Outcome::Completed, Outcome::Failed] {
        for manner in [CLAIMS, MESSAGES] {
            let mut bench = Bench::new(policy(2), &[manner]);
            let claim = left(&mut bench, "T", outcome);
            assert_eq!(bench.worker.free_slots(), 2, "it holds no slot");
            let effects = taken(&mut bench, claim, Ok(LEASE));
            assert!(!effects.contains(&Effect::Prepare(claim)), "{effects:?}");
            let reports =
                effects.iter().any(|effect| matches!(effect, Effect::Report { outcome: sent, .. } if *sent == outcome));
            assert!(reports, "{effects:?}");
            let effects = bench.happens(Event::Reported { claim, answer: Ok(()) });
            assert!(
                effects.contains(&Effect::Close { claim, run: run("T"), end: ClaimEnd::Reported(outcome) }),
                "{effects:?}"
            );
        }
    }
}

#[test]
fn i28_what_the_queue_does_not_grant_again_is_not_reported_and_says_nothing_of_our_credentials() {
    for refusal in [Refusal::Gone, Refusal::Denied, Refusal::Rejected] {
        let mut bench = Bench::new(policy(2), &[CLAIMS]);
        for number in 0..20 {
            let claim = left(&mut bench, &format!("T{number}"), Outcome::Completed);
            let effects = taken(&mut bench, claim, Err(refusal));
            let lost =
                |effect: &Effect| matches!(effect, Effect::Close { end: ClaimEnd::Lost(LossReason::Revoked), .. });
            assert!(effects.iter().any(lost), "{effects:?}");
            assert!(
                !effects.iter().any(|effect| matches!(effect, Effect::Report { .. } | Effect::Alert(_))),
                "{effects:?}"
            );
        }
        assert!(!bench.worker.is_stopping(), "{refusal:?}");
    }
}

#[test]
fn i28_a_message_about_what_was_written_down_leads_to_no_second_claim() {
    for answer in [Ok(LEASE), Err(Refusal::Gone)] {
        let mut bench = Bench::new(policy(2), &[MESSAGES]);
        let claim = left(&mut bench, "T", SHUTDOWN);
        bench.tick();
        bench.opened(0, 1);
        let seen = bench.seen("m", "T");
        let message = seen.token;
        let effects = bench.hit(vec![seen]);
        assert!(!effects.iter().any(|effect| matches!(effect, Effect::Claim(_) | Effect::Delete(_))), "{effects:?}");
        let effects = taken(&mut bench, claim, answer);
        assert!(effects.contains(&Effect::Delete(message)), "I12: {answer:?} settles it: {effects:?}");
    }
    // Without an answer the worker gives up, and the lease expires.
    let mut bench = Bench::new(policy(2), &[MESSAGES]);
    let claim = left(&mut bench, "T", SHUTDOWN);
    taken(&mut bench, claim, Err(Refusal::Denied));
    bench.tick();
    bench.opened(0, 1);
    let seen = bench.seen("m", "T");
    let effects = bench.hit(vec![seen]);
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Claim(_))), "{effects:?}");
}

#[test]
fn i28_an_answer_that_settles_nothing_is_asked_for_again_for_as_long_as_a_lease_lasts() {
    let mut bench = Bench::new(policy(2), &[MESSAGES]);
    let claim = left(&mut bench, "T", SHUTDOWN);
    let (began, mut asked) = (bench.now, 1);
    let mut effects = taken(&mut bench, claim, Err(RETRY));
    while !effects.iter().any(|effect| matches!(effect, Effect::Close { end: ClaimEnd::NotGranted, .. })) {
        let again = |effect: &Effect| *effect == Effect::TakeOver(claim);
        effects = bench.pass_until(|effect| *effect == Effect::TakeOver(claim));
        asked += effects.iter().filter(|effect| again(effect)).count();
        effects = taken(&mut bench, claim, Err(RETRY));
    }
    let took = bench.now.since(began);
    assert_eq!(asked, usize::try_from(TAKEOVER_ATTEMPTS_MAX).expect("few"));
    assert!((secs(600)..secs(1400)).contains(&took), "{took:?}");
}

#[test]
fn i28_a_worker_that_has_to_go_does_not_wait_for_what_an_earlier_one_left() {
    for order in [Event::Drain, Event::Release { deadline: None }] {
        let mut bench = Bench::new(policy(2), &[MESSAGES]);
        let claim = left(&mut bench, "T", SHUTDOWN);
        taken(&mut bench, claim, Err(RETRY));
        let effects = bench.happens(order);
        let closed = |effect: &Effect| matches!(effect, Effect::Close { end: ClaimEnd::NotGranted, .. });
        assert!(effects.iter().any(closed), "{effects:?}");
        assert!(effects.iter().any(|effect| matches!(effect, Effect::Exit(_))), "{effects:?}");
    }
    // What is on its way is reported all the same.
    let mut bench = Bench::new(policy(2), &[MESSAGES]);
    let claim = left(&mut bench, "T", Outcome::Completed);
    bench.happens(Event::Release { deadline: None });
    let effects = taken(&mut bench, claim, Ok(LEASE));
    let decided = |effect: &Effect| matches!(effect, Effect::Report { outcome: Outcome::Completed, .. });
    assert!(effects.iter().any(decided), "{effects:?}");
}

#[test]
fn i28_an_order_about_what_was_left_decides_what_is_reported_of_it() {
    for (left_as, order, reported) in [
        (SHUTDOWN, CancelCommand::Cancel, CancelCommand::Cancel.outcome()),
        (SHUTDOWN, CancelCommand::Release, SHUTDOWN),
        (Outcome::Completed, CancelCommand::Cancel, CancelCommand::Cancel.override_outcome(Outcome::Completed)),
    ] {
        let mut bench = Bench::new(policy(2), &[CLAIMS]);
        let claim = left(&mut bench, "T", left_as);
        bench.happens(Event::Command { claim, command: order });
        let effects = taken(&mut bench, claim, Ok(LEASE));
        let report = |effect: &Effect| matches!(effect, Effect::Report { outcome, .. } if *outcome == reported);
        assert!(effects.iter().any(report), "{left_as:?}, {order:?}: {effects:?}");
    }
}
