//! I28: a claim of a previous process of this worker is released or expires; its payload is never resumed.

use std::time::Duration;

use journeyman_domain::claim::{CancelCommand, ClaimAction, ClaimEnd, ClaimEvent, LossReason, TAKEOVER_ATTEMPTS_MAX};
use journeyman_domain::id::{LocalToken, SourceId};
use journeyman_domain::lease::Granted;
use journeyman_domain::outcome::Outcome;
use journeyman_domain::poll::{CLOCK_SKEW_MAX, RECOVERY_ATTEMPTS_MAX};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{Alert, Effect, Event, GrantedClaim, PollResult, RecoveredClaim, RecoveryResult};

use crate::rules::support::{
    Bench, CLAIMS, DRAIN, LAST_RUN, LEASE, MESSAGES, RELEASE, REPORTED, RETRY, SHUTDOWN, acts, has, policy, run, secs,
};

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
    let (claim, effects) = bench.recovers("T");
    assert!(effects.contains(&Effect::Alert(Alert::RecoveredClaim { run: run("T") })), "{effects:?}");
    assert!(acts!(effects, ClaimAction::Report { outcome: SHUTDOWN, .. }), "{effects:?}");
    assert!(!effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)));
    assert_eq!(bench.worker.free_slots(), 0, "it holds no slot: both wait in the poll");
    let effects = bench.tell(claim, REPORTED);
    assert!(matches!(effects[..], [Effect::Claim(_, ClaimAction::Close(ClaimEnd::Reported(SHUTDOWN)))]), "{effects:?}");
}

#[test]
fn b7_a_claim_of_a_lost_reply_runs_if_a_release_would_end_its_task() {
    let mut bench = started();
    let found = GrantedClaim { terms: LAST_RUN, ..bench.grant("T") };
    let claim = found.token;
    let effects = bench.recovered(0, Ok(vec![found]));
    assert!(effects.contains(&Effect::Alert(Alert::LastRun { run: run("T") })), "{effects:?}");
    assert!(effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)), "{effects:?}");
    // Without a free slot it is handed back after all.
    let mut bench = started();
    let found: Vec<_> = ["T1", "T2", "T3"].map(|name| GrantedClaim { terms: LAST_RUN, ..bench.grant(name) }).into();
    let effects = bench.recovered(0, Ok(found));
    let count = |wanted: fn(&ClaimAction) -> bool| {
        effects.iter().filter(|effect| matches!(effect, Effect::Claim(_, act) if wanted(act))).count()
    };
    assert_eq!(count(|act| *act == ClaimAction::Prepare), 2, "{effects:?}");
    assert_eq!(count(|act| matches!(act, ClaimAction::Report { outcome: SHUTDOWN, .. })), 1, "{effects:?}");
}

#[test]
fn i28_one_whose_lease_does_not_allow_it_is_forgotten() {
    let mut bench = started();
    let found = GrantedClaim { lease: Granted { sent_at: bench.now, length: Duration::ZERO }, ..bench.grant("T") };
    let effects = bench.recovered(0, Ok(vec![found]));
    assert!(!acts!(effects, ClaimAction::Report { .. }));
    let claim = effects.iter().find_map(|effect| match effect {
        Effect::Claim(claim, ClaimAction::Reclaim { .. }) => Some(*claim),
        _ => None,
    });
    let effects = bench.tell(claim.expect("it is reclaimed"), ClaimEvent::Reclaimed(Err(Refusal::Gone)));
    assert!(acts!(effects, ClaimAction::Close(ClaimEnd::Lost(LossReason::GrantedTooLate))), "{effects:?}");
}

#[test]
fn i28_a_claim_whose_reply_was_lost_in_this_life_is_started() {
    let mut bench = started();
    bench.recovered(0, Ok(Vec::new()));
    // The clocks have to tell the processes apart.
    for _ in 0..=CLOCK_SKEW_MAX.as_secs() {
        bench.polled(0, Ok(PollResult { messages: Vec::new(), claims: Vec::new() }));
        bench.pass_until(|effect| matches!(effect, Effect::Poll { .. }));
    }
    bench.polled(0, Err(RETRY));
    assert!(has!(bench.pass(secs(2)), Effect::Recover { .. }));
    let found = bench.grant("T");
    let claim = found.token;
    assert!(bench.recovered(0, Ok(vec![found])).contains(&Effect::Claim(claim, ClaimAction::Prepare)));
}

#[test]
fn i28_a_claim_whose_reply_was_lost_too_soon_for_the_clocks_to_tell_is_handed_back() {
    let mut bench = started();
    bench.recovered(0, Ok(Vec::new()));
    bench.polled(0, Err(RETRY));
    assert!(has!(bench.pass(secs(2)), Effect::Recover { .. }));
    let (claim, effects) = bench.recovers("T");
    assert!(!effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)), "{effects:?}");
}

#[test]
fn i28_while_the_start_could_not_be_looked_at_everything_found_later_is_an_earlier_lifes() {
    let mut bench = started();
    let mut effects = bench.recovered(0, Err(RETRY));
    // It gives up asking and polls; a poll is lost, and then the queue answers.
    for _ in 0..600 {
        if has!(effects, Effect::Poll { .. }) {
            break;
        }
        let recovering = has!(effects, Effect::Recover { .. });
        effects = if recovering { bench.recovered(0, Err(RETRY)) } else { bench.pass(secs(1)) };
    }
    bench.polled(0, Err(RETRY));
    bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
    let (claim, effects) = bench.recovers("T");
    assert!(!effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)), "{effects:?}");
    assert!(acts!(effects, ClaimAction::Report { outcome: SHUTDOWN, .. }), "{effects:?}");
}

fn partly(bench: &mut Bench, claims: Vec<GrantedClaim>) -> Vec<Effect> {
    let answer = Ok(RecoveryResult { claims, error: Some(RETRY), foreign_claims: 0 });
    bench.happens(Event::Recovered { source: SourceId(0), answer })
}

#[test]
fn i28_what_a_recovery_missed_is_looked_for_again_and_not_for_ever() {
    let mut bench = started();
    let found = bench.grant("T");
    let mut effects = partly(&mut bench, vec![found]);
    assert!(
        acts!(effects, ClaimAction::Report { outcome: SHUTDOWN, .. }),
        "what was found is handed back: {effects:?}"
    );
    let mut tries = 1;
    while !has!(effects, Effect::Poll { .. }) {
        effects = bench.pass_until(|effect| matches!(effect, Effect::Recover { .. } | Effect::Poll { .. }));
        if has!(effects, Effect::Recover { .. }) {
            tries += 1;
            effects.extend(partly(&mut bench, Vec::new()));
        }
    }
    assert_eq!(tries, RECOVERY_ATTEMPTS_MAX);
}

#[test]
fn i28_what_a_first_recovery_missed_is_still_an_earlier_lifes() {
    let mut bench = started();
    partly(&mut bench, Vec::new());
    bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
    let (claim, effects) = bench.recovers("T");
    assert!(effects.contains(&Effect::Alert(Alert::RecoveredClaim { run: run("T") })), "{effects:?}");
    assert!(!effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)));
}

// What goes by our name and is not ours.

fn newer_than(effects: &[Effect]) -> Option<Option<Duration>> {
    effects
        .iter()
        .find_map(|effect| if let Effect::Recover { newer_than, .. } = effect { Some(*newer_than) } else { None })
}

#[test]
fn i28_only_claims_newer_than_the_oldest_unread_poll_are_taken() {
    let mut bench = Bench::new(policy(2), &[CLAIMS]);
    bench.tick();
    assert_eq!(newer_than(&bench.opened(0, 1)), Some(None), "no poll was sent");
    bench.recovered(0, Ok(Vec::new()));
    // An answered poll, whatever the answer, loses no claim.
    for refusal in [Refusal::Throttled { retry_after: None }, Refusal::Denied] {
        bench.polled(0, Err(refusal));
        let effects = bench.pass_until(|effect| matches!(effect, Effect::Poll { .. }));
        assert_eq!(newer_than(&effects), None, "{refusal:?}");
    }
    let mut oldest = bench.now;
    for (lost, recovered) in [(1, Err(Refusal::Denied)), (2, Ok(Vec::new())), (3, Ok(Vec::new()))] {
        bench.now = bench.now.plus(secs(10));
        bench.polled(0, Err(RETRY));
        let effects = bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
        let age = newer_than(&effects).expect("it recovers").expect("a poll was lost");
        // The bench notices polls up to a second late.
        assert!(age.abs_diff(bench.now.since(oldest) + CLOCK_SKEW_MAX) <= secs(2), "{lost}: {age:?}");
        let answered = recovered.is_ok();
        let effects = bench.recovered(0, recovered);
        if !has!(effects, Effect::Poll { .. }) {
            bench.pass_until(|effect| matches!(effect, Effect::Poll { .. }));
        }
        oldest = if answered { bench.now } else { oldest };
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
        let effects = bench.happens(Event::Recovered { source: SourceId(0), answer });
        assert_eq!(told(&effects), expected, "{others}");
        assert_eq!(bench.worker.sources().first().map(|source| source.foreign_claims), Some(others));
        bench.polled(0, Err(RETRY));
        bench.pass_until(|effect| matches!(effect, Effect::Recover { .. }));
    }
}

// What was written down.

fn left(bench: &mut Bench, name: &str, outcome: Outcome) -> LocalToken {
    let token = bench.token();
    let left = RecoveredClaim { token, source: SourceId(0), run: run(name), outcome };
    let effects = bench.happens(Event::ClaimsRecovered(vec![left]));
    assert!(effects.contains(&Effect::Claim(token, ClaimAction::TakeOver)), "asked for first of all: {effects:?}");
    token
}

fn taken(bench: &mut Bench, claim: LocalToken, answer: Result<Duration, Refusal>) -> Vec<Effect> {
    bench.tell(claim, ClaimEvent::Claimed(answer.map(|length| Granted { sent_at: bench.now, length })))
}

#[test]
fn i28_what_was_written_down_is_asked_for_once_more_and_reported_as_it_was_left() {
    for outcome in [SHUTDOWN, Outcome::Completed, Outcome::Failed] {
        for manner in [CLAIMS, MESSAGES] {
            let mut bench = Bench::new(policy(2), &[manner]);
            let claim = left(&mut bench, "T", outcome);
            assert_eq!(bench.worker.free_slots(), 2, "it holds no slot");
            let effects = taken(&mut bench, claim, Ok(LEASE));
            assert!(!effects.contains(&Effect::Claim(claim, ClaimAction::Prepare)), "{effects:?}");
            let reports =
                has!(effects, Effect::Claim(_, ClaimAction::Report { outcome: sent, .. }) if *sent == outcome);
            assert!(reports, "{effects:?}");
            let effects = bench.tell(claim, REPORTED);
            assert!(
                effects.contains(&Effect::Claim(claim, ClaimAction::Close(ClaimEnd::Reported(outcome)))),
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
            assert!(acts!(effects, ClaimAction::Close(ClaimEnd::Lost(LossReason::Revoked))), "{effects:?}");
            assert!(
                !effects
                    .iter()
                    .any(|effect| matches!(effect, Effect::Claim(_, ClaimAction::Report { .. }) | Effect::Alert(_))),
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
        let (message, effects) = bench.receive("m", "T");
        assert!(!has!(effects, Effect::Claim(_, ClaimAction::Request) | Effect::Delete(_)), "{effects:?}");
        let effects = taken(&mut bench, claim, answer);
        assert!(effects.contains(&Effect::Delete(message)), "I12: {answer:?} settles it: {effects:?}");
    }
    // Without an answer the worker gives up, and the lease expires.
    let mut bench = Bench::new(policy(2), &[MESSAGES]);
    let claim = left(&mut bench, "T", SHUTDOWN);
    taken(&mut bench, claim, Err(Refusal::Rejected));
    bench.tick();
    bench.opened(0, 1);
    let (_, effects) = bench.receive("m", "T");
    assert!(!acts!(effects, ClaimAction::Request), "{effects:?}");
}

#[test]
fn i28_an_answer_that_settles_nothing_is_asked_for_again_for_as_long_as_a_lease_lasts() {
    let mut bench = Bench::new(policy(2), &[MESSAGES]);
    let claim = left(&mut bench, "T", SHUTDOWN);
    let (began, mut asked) = (bench.now, 1);
    let mut effects = taken(&mut bench, claim, Err(RETRY));
    while !acts!(effects, ClaimAction::Close(ClaimEnd::NotGranted)) {
        let again = |effect: &Effect| *effect == Effect::Claim(claim, ClaimAction::TakeOver);
        effects = bench.pass_until(|effect| *effect == Effect::Claim(claim, ClaimAction::TakeOver));
        asked += effects.iter().filter(|effect| again(effect)).count();
        effects = taken(&mut bench, claim, Err(RETRY));
    }
    let took = bench.now.since(began);
    assert_eq!(asked, usize::try_from(TAKEOVER_ATTEMPTS_MAX).expect("few"));
    assert!((secs(600)..secs(1400)).contains(&took), "{took:?}");
}

#[test]
fn i28_a_worker_that_has_to_go_does_not_wait_for_what_an_earlier_one_left() {
    for order in [DRAIN, RELEASE] {
        let mut bench = Bench::new(policy(2), &[MESSAGES]);
        let claim = left(&mut bench, "T", SHUTDOWN);
        taken(&mut bench, claim, Err(RETRY));
        let effects = bench.happens(order);
        assert!(acts!(effects, ClaimAction::Close(ClaimEnd::NotGranted)), "{effects:?}");
        assert!(has!(effects, Effect::Exit(_)), "{effects:?}");
    }
    // What is on its way is reported all the same.
    let mut bench = Bench::new(policy(2), &[MESSAGES]);
    let claim = left(&mut bench, "T", Outcome::Completed);
    bench.happens(RELEASE);
    let effects = taken(&mut bench, claim, Ok(LEASE));
    assert!(acts!(effects, ClaimAction::Report { outcome: Outcome::Completed, .. }), "{effects:?}");
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
        bench.tell(claim, ClaimEvent::Command(order));
        let effects = taken(&mut bench, claim, Ok(LEASE));
        assert!(
            has!(effects, Effect::Claim(_, ClaimAction::Report { outcome, .. }) if *outcome == reported),
            "{left_as:?}, {order:?}: {effects:?}"
        );
    }
}
