//! Every history of one piece of staged work whose looks are messages, within bounds: checks that come in any order and twice,
//! workers that die between any two calls, answers that are lost, work that ends or is evicted at any moment.
//!
//! The rules are the project's own [`StagedState`]. What the model adds is the world around it, and two wrong ways to use them
//! that must be caught.

use std::collections::BTreeMap;
use std::time::Duration;

use journeyman_domain::jitter::Jitter;
use journeyman_domain::staged::{
    FailureClass, Progress, StagedAction, StagedAnswer, StagedEnd, StagedEvent, StagedPolicy, StagedRecord,
    StagedState, Stamp,
};
use journeyman_domain::time::Instant;
use stateright::{Checker, HasDiscoveries, Model, Property};

const RETRIES: u32 = 1;

/// What the world may do.
#[derive(Clone, Copy)]
struct World {
    /// How many checks are taken until the model ends.
    takes: u8,
    /// How many workers die, and how many answers are lost.
    crashes: u8,
    losses: u8,
    copies: u8,
    worker: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ours,
    /// A mutant: it acknowledges a check before the next one is stored.
    AcknowledgesFirst,
    /// A mutant: it launches without looking for an earlier launch.
    Blind,
}

const GOOD: World = World { takes: 7, crashes: 2, losses: 1, copies: 1, worker: Kind::Ours };
const LOST: &str = "the work is not lost";
const ONCE: &str = "one launch at a time";
const TRUE: &str = "what is reported is so";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Status {
    Runs,
    Done,
    Evicted,
    Removed,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    checks: Vec<StagedRecord>,
    /// By the number of the launch, with the number of the look that was scheduled last.
    work: BTreeMap<u32, (Status, u64)>,
    reported: Option<bool>,
    takes: u8,
    crashes: u8,
    losses: u8,
    copies: u8,
    has_overlapped: bool,
    has_lied: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Step {
    /// A worker takes a check. It dies before this action, if at all, and the answer to this call is lost.
    Take {
        check: usize,
        dies_at: Option<u8>,
        lost_at: Option<u8>,
    },
    Copy(usize),
    Ends(u32, Status),
}

/// Actions of one take at most, which an answer that is lost makes longer.
const ACTIONS_MAX: u8 = 5;

impl World {
    fn take(&self, state: &mut State, check: usize, dies_at: Option<u8>, lost_at: Option<u8>) {
        let record = state.checks[check].clone();
        if self.worker == Kind::AcknowledgesFirst {
            state.checks.remove(check);
        }
        let policy = StagedPolicy {
            phases: BTreeMap::new(),
            infrastructure_retries: RETRIES,
            capacity_retries: 0,
            check_interval: Duration::from_secs(30),
        };
        let mut actions = Vec::new();
        let mut rules = StagedState::new(policy, record, Jitter::seeded(1), &mut actions);
        for number in 0.. {
            if dies_at == Some(number) {
                return;
            }
            let record = rules.record().clone();
            let answer = match actions.pop().expect("the rules say what is next") {
                StagedAction::Adopt => self.adopt(state, &record),
                StagedAction::Start => launch(state, record.launch),
                StagedAction::Verify => look(state, &record),
                StagedAction::Cancel => {
                    remove(state, record.launch);
                    StagedAnswer::Canceled
                }
                StagedAction::Rest(_) => {
                    state.checks.push(record.clone());
                    if let Some((_, mark)) = state.work.get_mut(&record.launch) {
                        *mark = (*mark).max(record.seq);
                    }
                    break;
                }
                StagedAction::End(end) => {
                    report(state, &end);
                    break;
                }
            };
            let answer = if lost_at == Some(number) { StagedAnswer::Unknown } else { answer };
            rules.handle(StagedEvent::Answered(answer), Instant::ORIGIN, &mut actions);
        }
        if self.worker != Kind::AcknowledgesFirst && dies_at != Some(ACTIONS_MAX) {
            state.checks.remove(check);
        }
    }

    fn adopt(&self, state: &mut State, record: &StagedRecord) -> StagedAnswer {
        let there = state.work.iter().rev().find(|(_, (status, _))| *status != Status::Removed);
        match there.map(|(launch, (_, mark))| (*launch, *mark)) {
            Some(_) if self.worker == Kind::Blind => StagedAnswer::Absent,
            Some((launch, mark)) if launch > record.launch || mark > record.seq => StagedAnswer::Superseded,
            Some((launch, _)) if launch < record.launch => {
                remove(state, launch);
                StagedAnswer::Unknown
            }
            Some((launch, _)) => started(state, launch),
            None => StagedAnswer::Absent,
        }
    }
}

fn started(state: &State, launch: u32) -> StagedAnswer {
    let answer = seen(state.work[&launch].0);
    let StagedAnswer::Progress(progress) = answer else { return answer };
    StagedAnswer::Started { handle: "w".into(), progress }
}

fn seen(status: Status) -> StagedAnswer {
    match status {
        Status::Runs => {
            let observed_at = Stamp(0);
            StagedAnswer::Progress(Progress { phase: "running".into(), since: None, observed_at, check_in: None })
        }
        Status::Done => StagedAnswer::Done,
        Status::Evicted => StagedAnswer::Failed { class: FailureClass::Infrastructure, reason: "evicted".into() },
        Status::Removed => StagedAnswer::Lost { reason: "it is gone".into() },
    }
}

fn look(state: &State, record: &StagedRecord) -> StagedAnswer {
    let is_later =
        |(launch, (status, _)): (&u32, &(Status, u64))| *launch > record.launch && *status != Status::Removed;
    match state.work.get(&record.launch) {
        _ if state.work.iter().any(is_later) => StagedAnswer::Superseded,
        Some((status, mark)) if *status != Status::Removed && *mark > record.seq => StagedAnswer::Superseded,
        Some((status, _)) => seen(*status),
        None => seen(Status::Removed),
    }
}

fn launch(state: &mut State, launch: u32) -> StagedAnswer {
    if state.reported.is_some() {
        return StagedAnswer::Canceled;
    }
    if state.work.get(&launch).is_some_and(|(status, _)| *status != Status::Removed) {
        return started(state, launch);
    }
    state.has_overlapped |= state.work.values().any(|(status, _)| *status == Status::Runs);
    state.work.insert(launch, (Status::Runs, 0));
    started(state, launch)
}

fn remove(state: &mut State, launch: u32) {
    if let Some((status, _)) = state.work.get_mut(&launch) {
        *status = Status::Removed;
    }
}

fn report(state: &mut State, end: &StagedEnd) {
    let is_done = match end {
        StagedEnd::Done => true,
        StagedEnd::Failed { .. } => false,
        StagedEnd::Canceled | StagedEnd::Superseded => return,
    };
    if state.reported.is_none() {
        state.has_lied |= is_done != state.work.values().any(|(status, _)| *status == Status::Done);
        state.reported = Some(is_done);
    }
}

impl Model for World {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let World { takes, crashes, losses, copies, .. } = *self;
        let (checks, work) = (vec![StagedRecord::default()], BTreeMap::new());
        vec![State {
            checks,
            work,
            reported: None,
            takes,
            crashes,
            losses,
            copies,
            has_overlapped: false,
            has_lied: false,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for (launch, (status, _)) in &state.work {
            if *status == Status::Runs {
                steps.extend([Status::Done, Status::Evicted].map(|end| Step::Ends(*launch, end)));
            }
        }
        if state.takes == 0 {
            return;
        }
        for check in 0..state.checks.len() {
            if state.copies > 0 {
                steps.push(Step::Copy(check));
            }
            let deaths = if state.crashes > 0 { ACTIONS_MAX + 1 } else { 0 };
            let losses = if state.losses > 0 { ACTIONS_MAX } else { 0 };
            for dies_at in (0..deaths).map(Some).chain([None]) {
                for lost_at in (0..losses).map(Some).chain([None]) {
                    steps.push(Step::Take { check, dies_at, lost_at });
                }
            }
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut state = state.clone();
        match step {
            Step::Take { check, dies_at, lost_at } => {
                state.takes -= 1;
                state.crashes -= u8::from(dies_at.is_some());
                state.losses -= u8::from(lost_at.is_some());
                self.take(&mut state, check, dies_at, lost_at);
            }
            Step::Copy(check) => {
                state.copies -= 1;
                state.checks.push(state.checks[check].clone());
            }
            Step::Ends(launch, status) => state.work.get_mut(&launch)?.0 = status,
        }
        state.checks.sort_unstable_by_key(|record| (record.launch, record.seq));
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(LOST, |_, state: &State| state.reported.is_some() || !state.checks.is_empty()),
            Property::always(ONCE, |_, state: &State| !state.has_overlapped),
            Property::always(TRUE, |_, state: &State| !state.has_lied),
            Property::sometimes("it is done at the second launch", |_, state: &State| {
                state.reported == Some(true) && state.work.contains_key(&RETRIES)
            }),
            Property::sometimes("it is given up", |_, state: &State| state.reported == Some(false)),
        ]
    }
}

fn explored(world: World) -> Vec<&'static str> {
    let checker = world.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    println!("staged work: {} unique states to depth {}", checker.unique_state_count(), checker.max_depth());
    let mut found: Vec<_> = checker.discoveries().into_iter().map(|(name, path)| (name, path.into_actions())).collect();
    found.sort_unstable_by_key(|(name, _)| *name);
    for (name, steps) in &found {
        println!("{name}: {steps:?}");
    }
    found.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn staged_work_is_lost_launched_twice_or_misjudged_in_no_history() {
    assert_eq!(explored(GOOD), ["it is done at the second launch", "it is given up"]);
}

#[test]
fn a_worker_that_acknowledges_before_the_next_check_is_stored_is_caught() {
    let found = explored(World { worker: Kind::AcknowledgesFirst, ..GOOD });
    assert!(found.contains(&LOST), "{found:?}");
}

#[test]
fn a_worker_that_launches_without_looking_is_caught() {
    let found = explored(World { worker: Kind::Blind, losses: 2, ..GOOD });
    assert!(found.contains(&ONCE), "{found:?}");
}

#[test]
fn e5_a_canceled_start_that_names_work_and_ends_otherwise_is_followed_by_a_cancel() {
    let policy = StagedPolicy {
        phases: BTreeMap::new(),
        infrastructure_retries: RETRIES,
        capacity_retries: 0,
        check_interval: Duration::from_secs(30),
    };
    let retry = StagedAnswer::Retry { after: Duration::ZERO, class: FailureClass::Capacity, reason: "full".into() };
    for answer in [retry, StagedAnswer::Lost { reason: "gone".into() }] {
        let mut actions = Vec::new();
        let mut rules = StagedState::new(policy.clone(), StagedRecord::default(), Jitter::seeded(1), &mut actions);
        for event in [
            StagedEvent::Answered(StagedAnswer::Absent),
            StagedEvent::CancelRequested,
            StagedEvent::Answered(StagedAnswer::Announced { handle: "h7".into(), answer: Box::new(answer) }),
            StagedEvent::Answered(StagedAnswer::Canceled),
        ] {
            rules.handle(event, Instant::ORIGIN, &mut actions);
        }
        let end = StagedAction::End(StagedEnd::Canceled);
        assert_eq!(actions, [StagedAction::Adopt, StagedAction::Start, StagedAction::Cancel, end]);
    }
}
