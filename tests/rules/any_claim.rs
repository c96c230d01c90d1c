//! A claim under arbitrary events in arbitrary order, valid or not.

use std::time::Duration;

use proptest::prelude::*;

use journeyman_domain::claim::{
    CancelCommand, ClaimAction, ClaimEnd, ClaimEvent, ClaimPolicy, ClaimState, LossReason, RunTerms, UploadStatus,
};
use journeyman_domain::jitter::Jitter;
use journeyman_domain::lease::Granted;
use journeyman_domain::outcome::{ExceptionReason, ExecuteFailure, Outcome, PrepareFailure};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::time::Instant;

use crate::rules::support::UNANSWERED;

fn refusals() -> impl Strategy<Value = Refusal> {
    let after = || proptest::option::of((0_u64..400).prop_map(Duration::from_secs));
    prop_oneof![
        after().prop_map(|retry_after| Refusal::Retry { retry_after }),
        after().prop_map(|retry_after| Refusal::Throttled { retry_after }),
        Just(Refusal::Gone),
        Just(Refusal::Rejected),
        Just(Refusal::Denied),
        Just(Refusal::Stale),
    ]
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Wait(Duration),
    /// Passes time to the machine's next deadline.
    Wake,
    Happens(ClaimEvent),
    Extended(u64),
    HandBack(Option<u64>),
}

fn steps() -> impl Strategy<Value = Step> {
    let verdicts = prop_oneof![
        Just(Ok(())),
        Just(Err(ExecuteFailure::Failed)),
        Just(Err(ExecuteFailure::Intermittent)),
        Just(Err(ExecuteFailure::Unavailable)),
        Just(Err(ExecuteFailure::Internal)),
        Just(Err(ExecuteFailure::HostFault)),
        Just(Err(ExecuteFailure::ServiceDown)),
    ];
    let unprepared = prop_oneof![
        Just(PrepareFailure::Malformed),
        Just(PrepareFailure::Unavailable),
        Just(PrepareFailure::Internal),
        Just(PrepareFailure::HostFault),
        Just(PrepareFailure::ServiceDown)
    ];
    let settled = prop_oneof![
        Just(UploadStatus::Complete),
        Just(UploadStatus::ArtifactMissing),
        Just(UploadStatus::UploadFailed)
    ];
    prop_oneof![
        3 => (0_u64..400_000).prop_map(|millis| Step::Wait(Duration::from_millis(millis))),
        6 => Just(Step::Wake),
        1 => refusals().prop_map(|refusal| Step::Happens(ClaimEvent::Claimed(Err(refusal)))),
        3 => Just(Step::Happens(ClaimEvent::Prepared(Ok(())))),
        1 => unprepared.prop_map(|why| Step::Happens(ClaimEvent::Prepared(Err(why)))),
        3 => verdicts.prop_map(|verdict| Step::Happens(ClaimEvent::Ended(verdict))),
        3 => settled.prop_map(|settled| Step::Happens(ClaimEvent::Uploaded(settled))),
        1 => Just(Step::Happens(ClaimEvent::Reported(Ok(())))),
        3 => refusals().prop_map(|refusal| Step::Happens(ClaimEvent::Reported(Err(refusal)))),
        3 => (0_u64..1300).prop_map(Step::Extended),
        2 => refusals().prop_map(|refusal| Step::Happens(ClaimEvent::Reclaimed(Err(refusal)))),
        1 => prop_oneof![Just(None), Just(Some(LossReason::Canceled)), Just(Some(LossReason::Revoked))]
            .prop_map(|loss| Step::Happens(ClaimEvent::StatusChecked(Ok(loss)))),
        1 => (0_u64..2_000).prop_map(|secs| {
            let deadline = Some(Instant::ORIGIN.plus(Duration::from_secs(secs)));
            Step::Happens(ClaimEvent::Terms(RunTerms { deadline, retries_left: None }))
        }),
        1 => refusals().prop_map(|refusal| Step::Happens(ClaimEvent::StatusChecked(Err(refusal)))),
        1 => proptest::option::of(0_u64..300).prop_map(Step::HandBack),
        1 => prop_oneof![Just(CancelCommand::Release), Just(CancelCommand::Cancel)].prop_map(|order| Step::Happens(ClaimEvent::Command(order))),
        1 => Just(Step::Happens(ClaimEvent::Claimed(Ok(Granted { sent_at: Instant::ORIGIN, length: Duration::from_secs(600) })))),
    ]
}

/// What a claim was seen to do, judged act by act.
#[derive(Default)]
struct Judge {
    executed: bool,
    killed: bool,
    lost: bool,
    unprepared: bool,
    ordered: Option<CancelCommand>,
    reported: Option<Outcome>,
    closed: Option<ClaimEnd>,
}

impl Judge {
    fn sees(&mut self, act: ClaimAction, machine: &ClaimState, now: Instant) {
        assert_eq!(self.closed, None, "nothing follows a close: {act:?}");
        let usable = machine.lease().is_some_and(|lease| now < lease.expires_at());
        match act {
            ClaimAction::Execute | ClaimAction::Start => {
                assert!(usable, "I3: started after its lease was given up");
                assert!(!self.executed, "I6: started twice");
                assert!(!self.killed && !self.lost && !self.unprepared, "started although it was not to be");
                self.executed = true;
            }
            ClaimAction::Report { outcome, .. } => {
                assert!(usable, "I1: reported after its lease was given up");
                assert!(!self.lost, "I1: reported after it was lost");
                assert!(
                    self.reported.is_none_or(|before| before == outcome),
                    "I9: {outcome} after {:?}",
                    self.reported
                );
                assert!(self.ordered.is_none_or(|order| order.override_outcome(outcome) == outcome), "I34: {outcome}");
                self.reported = Some(outcome);
                match outcome {
                    Outcome::Completed | Outcome::Failed => {
                        assert!(self.executed && !self.killed, "I21: {outcome} of what did not run to its end");
                    }
                    Outcome::Exception(ExceptionReason::MalformedPayload) => {
                        assert!(!self.executed, "I21: task code ran")
                    }
                    Outcome::Exception(_) | Outcome::Deferred => {}
                }
            }
            ClaimAction::Kill { grace, .. } => {
                let lease = machine.lease().expect("nothing lives before the grant");
                assert!(grace <= lease.grace().max(Duration::from_secs(10)));
                self.killed = true;
            }
            ClaimAction::Prepare => assert!(usable && !self.killed && !self.executed),
            ClaimAction::Close(end) => self.closed = Some(end),
            ClaimAction::Request
            | ClaimAction::TakeOver
            | ClaimAction::Upload
            | ClaimAction::Reclaim { .. }
            | ClaimAction::CheckStatus
            | ClaimAction::UpdateLease(_) => {}
        }
    }
}

/// The longest row of wakes at one instant that is not a loop.
const WAKES_MAX: usize = 6;

fn lives(length: u64, late: u64, starts_in_one_step: bool, steps: Vec<Step>) {
    let policy = ClaimPolicy {
        termination_grace: Duration::from_secs(10),
        status_poll_interval: Some(Duration::from_secs(7)),
        reports_cancellation: true,
        starts_in_one_step,
        fenced_reports: false,
    };
    let (mut jitter, mut acts, mut judge) = (Jitter::seeded(length), Vec::new(), Judge::default());
    let mut machine = ClaimState::requested(policy, &mut acts);
    acts.clear();
    let mut now = Instant::ORIGIN;
    let mut happens = |machine: &mut ClaimState, judge: &mut Judge, happening, now| {
        if let ClaimEvent::Reclaimed(Err(Refusal::Gone)) | ClaimEvent::StatusChecked(Ok(Some(_))) = happening {
            judge.lost |= machine.is_granted();
        }
        if let ClaimEvent::Command(order) = happening
            && judge.reported.is_none()
        {
            judge.ordered = judge.ordered.max(Some(order));
        }
        if let ClaimEvent::Prepared(Err(_)) = happening {
            judge.unprepared |= machine.state_name() == "preparing";
            judge.executed &= !(starts_in_one_step && machine.state_name() == "running");
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
    happens(&mut machine, &mut judge, ClaimEvent::Claimed(Ok(Granted { sent_at: Instant::ORIGIN, length })), now);
    for step in steps {
        match step {
            Step::Wait(span) => {
                now = now.plus(span);
                happens(&mut machine, &mut judge, ClaimEvent::Tick, now);
            }
            Step::Wake => {
                if let Some(due) = machine.next_deadline() {
                    now = now.max(due);
                    let before = machine.clone();
                    let acted = happens(&mut machine, &mut judge, ClaimEvent::Tick, now);
                    assert!(acted || machine != before, "a wake that was asked for changes something");
                    let next = machine.next_deadline();
                    assert!(next.is_none_or(|next| next > now), "due again at once: {machine:?}");
                }
            }
            Step::Happens(happening) => {
                happens(&mut machine, &mut judge, happening, now);
            }
            Step::Extended(secs) => {
                let granted = Granted { sent_at: now, length: Duration::from_secs(secs) };
                happens(&mut machine, &mut judge, ClaimEvent::Reclaimed(Ok(granted)), now);
            }
            Step::HandBack(within) => {
                let deadline = within.map(|secs| now.plus(Duration::from_secs(secs)));
                happens(&mut machine, &mut judge, ClaimEvent::Release { deadline }, now);
            }
        }
    }
    // Nothing is extended any more, and what is under way is answered: it must come to its end.
    for _ in 0..WAKES_MAX * 20 {
        if machine.is_closed() {
            break;
        }
        let asks = match machine.state_name() {
            "claiming" => UNANSWERED,
            "stopping" => ClaimEvent::Ended(Err(ExecuteFailure::Internal)),
            "closing" => ClaimEvent::StatusChecked(Ok(None)),
            "uploading" | "uploading-after-report" => ClaimEvent::Uploaded(UploadStatus::Complete),
            _ => ClaimEvent::Tick,
        };
        now = machine.next_deadline().map_or(now, |due| due.max(now));
        happens(&mut machine, &mut judge, ClaimEvent::Tick, now);
        if machine.next_deadline().is_none() || asks == UNANSWERED {
            let answer = if machine.state_name() == "reporting" {
                ClaimEvent::Reported(Err(Refusal::Retry { retry_after: None }))
            } else {
                asks
            };
            happens(&mut machine, &mut judge, answer, now);
        }
    }
    assert!(machine.is_closed(), "stuck: {machine:?}");
    assert!(judge.closed.is_some());
    assert_eq!(machine.next_deadline(), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_claim_keeps_the_rules_whatever_happens_and_comes_to_its_end(
        length in prop_oneof![Just(0_u64), 1_u64..30, 30_u64..1300],
        late in 0_u64..40,
        starts_in_one_step in any::<bool>(),
        steps in proptest::collection::vec(steps(), 0..60),
    ) {
        lives(length, late, starts_in_one_step, steps);
    }
}
