//! A claim under everything that may happen to it, in any order, sensible or not.

use std::time::Duration;

use proptest::prelude::*;

use journeyman::domain::claim::{Act, End, Happening, Machine, Order, Policy, Settled};
use journeyman::domain::jitter::Jitter;
use journeyman::domain::outcome::{Outcome, Reason, Unprepared, Verdict};
use journeyman::domain::refusal::Refusal;
use journeyman::domain::time::Instant;

fn refusals() -> impl Strategy<Value = Refusal> {
    let after = || proptest::option::of((0_u64..400).prop_map(Duration::from_secs));
    prop_oneof![
        after().prop_map(|after| Refusal::Retry { after }),
        after().prop_map(|after| Refusal::Throttled { after }),
        Just(Refusal::Gone),
        Just(Refusal::Rejected),
        Just(Refusal::Denied),
        Just(Refusal::Stale),
    ]
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Wait(Duration),
    /// To the machine's next deadline.
    Wake,
    Happens(Happening),
    Extended(u64),
    HandBack(Option<u64>),
}

fn steps() -> impl Strategy<Value = Step> {
    let verdicts = prop_oneof![
        Just(Verdict::Completed),
        Just(Verdict::Failed),
        Just(Verdict::Intermittent),
        Just(Verdict::Unavailable),
        Just(Verdict::Internal),
        Just(Verdict::Host),
        Just(Verdict::Away),
    ];
    let unprepared = prop_oneof![
        Just(Unprepared::Malformed),
        Just(Unprepared::Unavailable),
        Just(Unprepared::Internal),
        Just(Unprepared::Host),
        Just(Unprepared::Away)
    ];
    let settled = prop_oneof![Just(Settled::Clean), Just(Settled::Missing), Just(Settled::Unstored)];
    prop_oneof![
        3 => (0_u64..400_000).prop_map(|millis| Step::Wait(Duration::from_millis(millis))),
        6 => Just(Step::Wake),
        1 => proptest::option::of((0_u64..400).prop_map(Duration::from_secs)).prop_map(|after| Step::Happens(Happening::Unanswered { after })),
        3 => Just(Step::Happens(Happening::Prepared(Ok(())))),
        1 => Just(Step::Happens(Happening::Started)),
        1 => unprepared.prop_map(|why| Step::Happens(Happening::Prepared(Err(why)))),
        3 => verdicts.prop_map(|verdict| Step::Happens(Happening::Ended(verdict))),
        3 => settled.prop_map(|settled| Step::Happens(Happening::Settled(settled))),
        1 => Just(Step::Happens(Happening::Reported(Ok(())))),
        3 => refusals().prop_map(|refusal| Step::Happens(Happening::Reported(Err(refusal)))),
        3 => (0_u64..1300).prop_map(Step::Extended),
        2 => refusals().prop_map(|refusal| Step::Happens(Happening::Reclaimed { sent_at: Instant::ORIGIN, answer: Err(refusal) })),
        1 => any::<bool>().prop_map(|canceled| Step::Happens(Happening::Checked(Ok(canceled)))),
        1 => refusals().prop_map(|refusal| Step::Happens(Happening::Checked(Err(refusal)))),
        1 => proptest::option::of(0_u64..300).prop_map(Step::HandBack),
        1 => prop_oneof![Just(Order::HandBack), Just(Order::Cancel)].prop_map(|order| Step::Happens(Happening::Ordered(order))),
        1 => Just(Step::Happens(Happening::Granted { sent_at: Instant::ORIGIN, length: Duration::from_secs(600) })),
    ]
}

/// What a claim was seen to do, judged act by act.
#[derive(Default)]
struct Judge {
    executed: bool,
    killed: bool,
    lost: bool,
    unprepared: bool,
    ordered: Option<Order>,
    reported: Option<Outcome>,
    closed: Option<End>,
}

impl Judge {
    fn sees(&mut self, act: Act, machine: &Machine, now: Instant) {
        assert_eq!(self.closed, None, "nothing follows a close: {act:?}");
        let usable = machine.lease().is_some_and(|lease| now < lease.abandon_at());
        match act {
            Act::Execute => {
                assert!(usable, "I3: started after its lease was given up");
                assert!(!self.executed, "I6: started twice");
                assert!(!self.killed && !self.lost && !self.unprepared, "started although it was not to be");
                self.executed = true;
            }
            Act::Report { outcome, .. } => {
                assert!(usable, "I1: reported after its lease was given up");
                assert!(!self.lost, "I1: reported after it was lost");
                assert!(
                    self.reported.is_none_or(|before| before == outcome),
                    "I9: {outcome} after {:?}",
                    self.reported
                );
                assert!(self.ordered.is_none_or(|order| order.instead_of(outcome) == outcome), "I34: {outcome}");
                self.reported = Some(outcome);
                match outcome {
                    Outcome::Completed | Outcome::Failed => {
                        assert!(self.executed && !self.killed, "I21: {outcome} of what did not run to its end");
                    }
                    Outcome::Exception(Reason::MalformedPayload) => assert!(!self.executed, "I21: task code ran"),
                    Outcome::Exception(_) => {}
                }
            }
            Act::Kill { grace, .. } => {
                let lease = machine.lease().expect("nothing lives before the grant");
                assert!(grace <= lease.grace().max(Duration::from_secs(10)));
                self.killed = true;
            }
            Act::Prepare => assert!(usable && !self.killed && !self.executed),
            Act::Close(end) => self.closed = Some(end),
            Act::Request | Act::Settle | Act::Reclaim { .. } | Act::Check | Act::Extended { .. } => {}
        }
    }
}

/// The longest row of wakes at one instant that is not a loop.
const WAKES_MAX: usize = 6;

fn lives(length: u64, late: u64, steps: Vec<Step>) {
    let policy = Policy { grace: Duration::from_secs(10), check_every: Some(Duration::from_secs(7)) };
    let (mut jitter, mut acts, mut judge) = (Jitter::seeded(length), Vec::new(), Judge::default());
    let mut machine = Machine::requested(policy, &mut acts);
    acts.clear();
    let mut now = Instant::ORIGIN;
    let mut happens = |machine: &mut Machine, judge: &mut Judge, happening, now| {
        if let Happening::Reclaimed { answer: Err(Refusal::Gone), .. } | Happening::Checked(Ok(true)) = happening {
            judge.lost |= machine.granted();
        }
        if let Happening::Ordered(order) = happening
            && judge.reported.is_none()
        {
            judge.ordered = judge.ordered.max(Some(order));
        }
        if let Happening::Prepared(Err(_)) = happening {
            judge.unprepared |= machine.step() == "preparing";
        }
        if happening == Happening::Started && machine.step() == "preparing" {
            let ours = machine.lease().is_some_and(|lease| now < lease.abandon_at());
            if !ours {
                // Nobody starts what is not ours any more.
                return false;
            }
            assert!(!judge.executed, "I6: started twice");
            judge.executed = true;
        }
        machine.handle(happening, now, &mut jitter, &mut acts);
        let any = !acts.is_empty();
        for act in acts.drain(..) {
            judge.sees(act, machine, now);
        }
        any
    };
    let length = Duration::from_secs(length);
    now = now.plus(Duration::from_secs(late));
    happens(&mut machine, &mut judge, Happening::Granted { sent_at: Instant::ORIGIN, length }, now);
    for step in steps {
        match step {
            Step::Wait(span) => {
                now = now.plus(span);
                happens(&mut machine, &mut judge, Happening::Tick, now);
            }
            Step::Wake => {
                if let Some(due) = machine.next_deadline() {
                    now = now.max(due);
                    let before = machine.clone();
                    let acted = happens(&mut machine, &mut judge, Happening::Tick, now);
                    assert!(acted || machine != before, "a wake that was asked for changes something");
                    let next = machine.next_deadline();
                    assert!(next.is_none_or(|next| next > now), "due again at once: {machine:?}");
                }
            }
            Step::Happens(happening) => {
                happens(&mut machine, &mut judge, happening, now);
            }
            Step::Extended(secs) => {
                let answer = Ok(Duration::from_secs(secs));
                happens(&mut machine, &mut judge, Happening::Reclaimed { sent_at: now, answer }, now);
            }
            Step::HandBack(within) => {
                let deadline = within.map(|secs| now.plus(Duration::from_secs(secs)));
                happens(&mut machine, &mut judge, Happening::HandBack { deadline }, now);
            }
        }
    }
    // Nothing is extended any more, and what is under way is answered: it must come to its end.
    for _ in 0..WAKES_MAX * 20 {
        if machine.closed() {
            break;
        }
        let asks = match machine.step() {
            "claiming" => Happening::Unanswered { after: None },
            "ending" => Happening::Ended(Verdict::Internal),
            "storing" | "storing log" => Happening::Settled(Settled::Clean),
            _ => Happening::Tick,
        };
        now = machine.next_deadline().map_or(now, |due| due.max(now));
        happens(&mut machine, &mut judge, Happening::Tick, now);
        if machine.next_deadline().is_none() || asks == (Happening::Unanswered { after: None }) {
            let answer = if machine.step() == "reporting" {
                Happening::Reported(Err(Refusal::Retry { after: None }))
            } else {
                asks
            };
            happens(&mut machine, &mut judge, answer, now);
        }
    }
    assert!(machine.closed(), "stuck: {machine:?}");
    assert!(judge.closed.is_some());
    assert_eq!(machine.next_deadline(), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_claim_keeps_the_rules_whatever_happens_and_comes_to_its_end(
        length in prop_oneof![Just(0_u64), 1_u64..30, 30_u64..1300],
        late in 0_u64..40,
        steps in proptest::collection::vec(steps(), 0..60),
    ) {
        lives(length, late, steps);
    }
}
