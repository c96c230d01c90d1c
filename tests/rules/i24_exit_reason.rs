//! I24: the exit reason is the first cause of the exit; a release outranks a drain.

use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{Alert, Effect, Event, ExitReason};

use crate::rules::support::{Bench, CLAIMS, DRAIN, MESSAGES, RELEASE, at, has, policy, secs};

fn exit_after(events: Vec<Event>) -> Option<ExitReason> {
    let mut bench = Bench::messages(1, 1);
    let mut effects: Vec<Effect> = events.into_iter().flat_map(|event| bench.happens(event)).collect();
    effects.extend(bench.empty());
    effects.into_iter().find_map(|effect| if let Effect::Exit(exit) = effect { Some(exit) } else { None })
}

#[test]
fn i24_each_order_has_its_exit_and_the_stronger_one_wins() {
    let hand_back = || RELEASE;
    assert_eq!(exit_after(vec![]), None);
    assert_eq!(exit_after(vec![DRAIN]), Some(ExitReason::Drained));
    assert_eq!(exit_after(vec![hand_back()]), Some(ExitReason::Released));
    assert_eq!(exit_after(vec![hand_back(), DRAIN]), Some(ExitReason::Released));
    assert_eq!(exit_after(vec![DRAIN, hand_back(), Event::Abort]), Some(ExitReason::Aborted));
}

#[test]
fn b13_a_second_signal_without_tasks_is_still_a_drain() {
    assert_eq!(exit_after(vec![DRAIN, RELEASE]), Some(ExitReason::Drained));
    let mut bench = Bench::claims(2);
    let (claim, _) = bench.granted("T");
    bench.happens(DRAIN);
    bench.happens(RELEASE);
    bench.empty();
    assert_eq!(bench.stops(claim).last(), Some(&Effect::Exit(ExitReason::Released)), "a task was released");
    // The drain's own limit passes while its last poll is open.
    let limited = journeyman_domain::worker::WorkerPolicy { drain_deadline: Some(secs(5)), ..policy(1) };
    let mut bench = Bench::opened_with(limited, &[MESSAGES]);
    bench.happens(DRAIN);
    bench.pass(secs(5));
    assert_eq!(bench.empty(), [Effect::Exit(ExitReason::Drained)]);
}

#[test]
fn i24_the_hosts_end_outranks_what_was_ordered_before_and_after_it() {
    let goes = |deadline| Event::TerminationNotice { deadline };
    for end in [goes(None), goes(Some(at(60)))] {
        for order in [DRAIN, RELEASE] {
            assert_eq!(exit_after(vec![end.clone(), order.clone()]), Some(ExitReason::HostTerminating));
            assert_eq!(exit_after(vec![order, end.clone()]), Some(ExitReason::HostTerminating));
        }
        assert_eq!(exit_after(vec![end, Event::Abort]), Some(ExitReason::Aborted));
    }
}

#[test]
fn i24_a_wrong_configuration_stays_the_cause_whatever_is_ordered_later() {
    let notice = Event::TerminationNotice { deadline: Some(at(60)) };
    for order in [DRAIN, Event::Release { deadline: Some(at(60)) }, RELEASE, notice] {
        let mut bench = Bench::messages(2, 1);
        let (first, second) = (bench.seen("m1", "T1"), bench.seen("m2", "T2"));
        let claims = [first.token, second.token];
        bench.hit(vec![first, second]);
        bench.claimed(claims[0], Err(Refusal::Rejected));
        bench.happens(order);
        let effects = bench.claimed(claims[1], Err(Refusal::Rejected));
        assert_eq!(effects.last(), Some(&Effect::Exit(ExitReason::Misconfigured)));
    }
}

#[test]
fn i24_credentials_that_are_refused_again_and_again_end_the_worker() {
    for manner in [MESSAGES, CLAIMS] {
        let mut bench = Bench::new(policy(1), &[manner]);
        let mut effects = bench.tick();
        let mut denied = 0;
        while !has!(effects, Effect::Exit(_)) {
            assert!(denied < 50);
            if effects.contains(&Effect::Open(journeyman_domain::id::SourceId(0))) {
                denied += 1;
                let source = journeyman_domain::id::SourceId(0);
                effects = bench.happens(Event::Opened { source, sent_at: bench.now, answer: Err(Refusal::Denied) });
            } else {
                effects = bench.pass(secs(1));
            }
        }
        assert_eq!(denied, 5);
        assert_eq!(effects.last(), Some(&Effect::Exit(ExitReason::CredentialsRejected)));
        assert!(bench.now > at(10), "and it waits in between: {:?}", bench.now);
    }
}

#[test]
fn i24_claims_that_are_denied_again_and_again_end_the_worker_and_a_grant_starts_the_count_anew() {
    let mut bench = Bench::messages(1, 1);
    let mut counts = Vec::new();
    for n in 0..12 {
        let (claim, _) = bench.receive(&format!("m{n}"), &format!("T{n}"));
        let answer = if n == 3 { Err(Refusal::Gone) } else { Err(Refusal::Denied) };
        let effects = bench.claimed(claim, answer);
        let polled = has!(effects, Effect::Poll { .. });
        for effect in effects {
            if let Effect::Alert(Alert::Denied { consecutive: in_a_row, .. }) = effect {
                counts.push(in_a_row);
            }
        }
        bench.deleted(claim, Ok(()));
        if bench.worker.is_stopping() {
            break;
        }
        if polled {
            continue;
        }
        bench.pass_until(|effect| matches!(effect, Effect::Poll { .. }));
    }
    assert_eq!(counts, [1, 2, 3, 1, 2, 3, 4, 5]);
    assert!(bench.worker.is_stopping());
}

#[test]
fn i24_a_batch_of_claims_denied_together_counts_once() {
    let mut bench = Bench::messages(8, 1);
    let seen: Vec<_> = (0..8).map(|n| bench.seen(&format!("m{n}"), &format!("T{n}"))).collect();
    let held: Vec<_> = seen.iter().map(|seen| seen.token).collect();
    bench.hit(seen);
    for claim in held {
        bench.claimed(claim, Err(Refusal::Denied));
    }
    assert!(!bench.worker.is_stopping());
}

#[test]
fn i24_a_recovery_that_is_not_granted_ends_nothing() {
    for refusal in [Refusal::Denied, Refusal::Rejected, Refusal::Gone] {
        let mut bench = Bench::opened_with(policy(1), &[CLAIMS]);
        let mut effects = bench.recovered(0, Err(refusal));
        effects.extend(bench.pass(secs(2)));
        assert!(has!(effects, Effect::Poll { .. }), "{refusal:?}: {effects:?}");
        assert!(!bench.worker.is_stopping());
    }
}

#[test]
fn i24_requests_that_are_wrong_from_the_start_end_the_worker_and_later_ones_do_not() {
    // Opening, and polling where the poll is what claims.
    let mut bench = Bench::new(policy(1), &[MESSAGES]);
    bench.tick();
    let source = journeyman_domain::id::SourceId(0);
    let rejected = Event::Opened { source, sent_at: at(0), answer: Err(Refusal::Rejected) };
    assert_eq!(bench.happens(rejected), [Effect::Exit(ExitReason::Misconfigured)]);

    let mut bench = Bench::claims(1);
    assert_eq!(bench.polled(0, Err(Refusal::Rejected)), [Effect::Exit(ExitReason::Misconfigured)]);

    let mut bench = Bench::claims(1);
    bench.empty();
    bench.pass(secs(1));
    bench.polled(0, Err(Refusal::Rejected));
    assert!(!bench.worker.is_stopping(), "one was accepted before");
}

#[test]
fn i24_a_drain_that_takes_too_long_keeps_its_cause() {
    let limited = journeyman_domain::worker::WorkerPolicy { drain_deadline: Some(secs(5)), ..policy(2) };
    let mut bench = Bench::new(limited, &[MESSAGES; 2]);
    bench.tick();
    bench.opened(0, 1);
    bench.opened(1, 1);
    let claim = bench.executing("m1", "T");
    bench.polled(1, Err(Refusal::Rejected));
    assert!(bench.worker.is_stopping());
    bench.pass(secs(5));
    bench.empty();
    let effects = bench.stops(claim);
    assert_eq!(effects.last(), Some(&Effect::Exit(ExitReason::Misconfigured)));
}

#[test]
fn i24_urls_that_were_given_start_the_count_of_refusals_anew() {
    let mut bench = Bench::new(policy(1), &[MESSAGES]);
    let source = journeyman_domain::id::SourceId(0);
    bench.tick();
    let mut counts = Vec::new();
    for answer in [false, false, true, false] {
        if answer {
            bench.opened(0, 1);
            bench.polled(0, Err(Refusal::Stale));
            continue;
        }
        let effects = bench.happens(Event::Opened { source, sent_at: bench.now, answer: Err(Refusal::Denied) });
        let count = |effect: &Effect| match effect {
            Effect::Alert(Alert::Denied { consecutive: in_a_row, .. }) => Some(*in_a_row),
            _ => None,
        };
        counts.extend(effects.iter().find_map(count));
        bench.pass_until(|effect| *effect == Effect::Open(source));
    }
    assert_eq!(counts, [1, 2, 1]);
}
