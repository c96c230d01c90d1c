//! The order of polls against the protocol: "the worker must poll the queues in order they are given"; without a message
//! "the worker should try the next"; "at end of the array, the worker should sleep a second or so, and start polling from
//! the start". After a message or an error this worker starts from the start too (I16).

use std::time::Duration;

use proptest::prelude::*;

use journeyman_domain::claim::ClaimAction;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::time::Instant;
use journeyman_domain::worker::{Effect, PollResult, ReceivedMessage};

use crate::rules::support::{Bench, secs};

/// What a poll is answered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Said {
    Empty,
    /// So many messages, of which the first so many are about tasks that are gone; the others cannot be read.
    Messages {
        gone: u8,
        unreadable: u8,
    },
    Refused(Refusal),
}

#[derive(Debug, Clone, Copy)]
struct Step {
    said: Said,
    /// How long the answer took.
    took: Duration,
}

/// One poll of the history: what was asked, when, and what came.
struct Poll {
    queue: u16,
    sent: Instant,
    answered: Instant,
    step: Step,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let refusal = prop_oneof![
        3 => Just(Refusal::Retry { retry_after: None }),
        1 => Just(Refusal::Throttled { retry_after: None }),
        1 => Just(Refusal::Gone),
        1 => Just(Refusal::Stale),
    ];
    let said = prop_oneof![
        12 => Just(Said::Empty),
        2 => (0_u8..3, 0_u8..3)
            .prop_filter("something came", |(gone, unreadable)| gone + unreadable > 0)
            .prop_map(|(gone, unreadable)| Said::Messages { gone, unreadable }),
        1 => refusal.prop_map(Said::Refused),
    ];
    let step = (said, 0_u64..3_000).prop_map(|(said, took)| Step { said, took: Duration::from_millis(took) });
    proptest::collection::vec(step, 1..80)
}

/// The queue that is asked next, from the history alone: as many as were found empty in a row, round and round.
fn next_queue(history: &[Poll], queues: u16) -> u16 {
    let empty = history.iter().rev().take_while(|poll| poll.step.said == Said::Empty).count();
    u16::try_from(empty % usize::from(queues)).expect("fewer than queues")
}

/// How long after the last answer it is asked, at least and at most.
fn pause(history: &[Poll], queues: u16) -> Option<[Duration; 2]> {
    let last = history.last()?;
    Some(match last.step.said {
        Said::Messages { .. } => [Duration::ZERO; 2],
        Said::Empty if next_queue(history, queues) > 0 => [Duration::ZERO; 2],
        Said::Empty => [secs(1) * 4 / 5, secs(1)],
        Said::Refused(Refusal::Stale) => [Duration::ZERO, secs(30)],
        Said::Refused(_) => [Duration::from_millis(250), secs(120)],
    })
}

fn asked(effects: &[Effect]) -> Option<u16> {
    effects.iter().find_map(|effect| if let Effect::Poll { queue, .. } = effect { Some(queue.0) } else { None })
}

/// Answers opens and settles messages until a poll is asked for.
fn until_asked(bench: &mut Bench, queues: u16, mut effects: Vec<Effect>) -> u16 {
    for _ in 0..10_000 {
        let mut more = Vec::new();
        for effect in &effects {
            match effect {
                Effect::Open(_) => more.extend(bench.opened(0, queues)),
                Effect::Claim(claim, ClaimAction::Request) => more.extend(bench.claimed(*claim, Err(Refusal::Gone))),
                Effect::Delete(message) => more.extend(bench.deleted(*message, Ok(()))),
                _ => {}
            }
        }
        if let Some(queue) = asked(&effects) {
            while !more.is_empty() {
                assert_eq!(asked(&more), None, "a second poll at once");
                let done = std::mem::take(&mut more);
                for effect in done {
                    if let Effect::Delete(message) = effect {
                        more.extend(bench.deleted(message, Ok(())));
                    }
                }
            }
            return queue;
        }
        effects = if more.is_empty() {
            bench.now = bench.worker.next_deadline().expect("it sleeps, and wakes").max(bench.now);
            bench.tick()
        } else {
            more
        };
    }
    panic!("it asks for nothing any more");
}

fn seen(bench: &mut Bench, number: usize, gone: u8, unreadable: u8) -> Vec<ReceivedMessage> {
    let mut all: Vec<_> = (0..gone + unreadable)
        .map(|place| bench.seen(&format!("m{number}-{place}"), &format!("T{number}-{place}")))
        .collect();
    all.iter_mut().skip(usize::from(gone)).for_each(|message| message.run = None);
    all
}

fn lives(queues: u16, steps: Vec<Step>) {
    let mut bench = Bench::messages(8, queues);
    let mut history: Vec<Poll> = Vec::new();
    let mut queue = 0;
    for (number, step) in steps.into_iter().enumerate() {
        let sent = bench.now;
        assert_eq!(queue, next_queue(&history, queues), "poll {number}");
        if let Some([least, most]) = pause(&history, queues) {
            let waited = sent.since(history.last().expect("an earlier poll").answered);
            assert!(
                waited >= least && waited <= most,
                "poll {number} {waited:?} after {:?}",
                history.last().map(|poll| poll.step)
            );
        }
        bench.now = bench.now.plus(step.took);
        let answer = match step.said {
            Said::Empty => Ok(PollResult::default()),
            Said::Messages { gone, unreadable } => {
                Ok(PollResult { messages: seen(&mut bench, number, gone, unreadable), claims: Vec::new() })
            }
            Said::Refused(refusal) => Err(refusal),
        };
        history.push(Poll { queue, sent, answered: bench.now, step });
        let effects = bench.polled(0, answer);
        queue = until_asked(&mut bench, queues, effects);
    }
    assert!(history.iter().all(|poll| poll.queue < queues && poll.answered >= poll.sent));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn i16_lanes_are_asked_in_the_protocols_order_whatever_came(queues in 1_u16..8, steps in steps()) {
        lives(queues, steps);
    }
}
