//! Every history of one slot and three sources, within bounds: one always has a task, one gets a task at any time, one never does.
//!
//! Who polls and whose poll is closed is decided by the project's own [`turns`]. What the model adds is time, the services, and wrong
//! workers that must be caught. One tick is half a second.

use std::time::Duration;

use journeyman_domain::time::Instant;
use journeyman_domain::turns::{self, Demand, OPEN_POLL_MIN, QUIET_TURN, Turn};
use stateright::{Checker, HasDiscoveries, Model, Property};

const TICK: Duration = Duration::from_millis(500);
const BUSY: usize = 0;
const QUIET: usize = 1;
/// A service ends a poll after this.
const POLL_TICKS: u8 = 40;
const TASK_TICKS: u8 = 2;
/// A service answers, and a poll is closed, within this.
const ANSWER_TICKS: u8 = 1;
const HORIZON: u8 = 75;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ours,
    /// A mutant: it closes no poll.
    Hog,
    /// A mutant: no source is ever overdue.
    Greedy,
}

#[derive(Clone, Copy)]
struct World {
    worker: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    now: u8,
    sources: [Source; 3],
    /// The slot is taken by a task that began then.
    running_since: Option<u8>,
    /// No task runs since then.
    unused_since: u8,
    has_arrived: bool,
    is_quiet_served: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Source {
    pending_since: Option<u8>,
    poll: Poll,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Poll {
    None { since: u8, demand: Demand },
    Open { since: u8, closing_since: Option<u8> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    Tick,
    Arrive,
    Grant(usize),
    Empty(usize),
    End,
}

fn at(ticks: u8) -> Instant {
    Instant::at(TICK * u32::from(ticks))
}

fn ticks(span: Duration) -> u8 {
    u8::try_from(span.as_millis() / TICK.as_millis()).expect("few")
}

/// How long a poll may hold the slot once a busy source wants it.
fn poll_max() -> u8 {
    ticks(OPEN_POLL_MIN) + ANSWER_TICKS + 1
}

impl World {
    fn turn(self, source: Source, now: u8) -> Turn {
        match source.poll {
            Poll::None { demand: Demand::Quiet, .. } if self.worker == Kind::Greedy => {
                Turn::Waiting { since: at(now), demand: Demand::Quiet }
            }
            Poll::None { since, demand } => Turn::Waiting { since: at(since), demand },
            Poll::Open { since, closing_since } => {
                Turn::Holding { since: at(since), is_closing: closing_since.is_some() }
            }
        }
    }

    /// What the worker does at once.
    fn settle(self, state: &mut State) {
        let turns = |state: &State| state.sources.map(|source| self.turn(source, state.now));
        let is_open = state.sources.iter().any(|source| matches!(source.poll, Poll::Open { .. }));
        let free = u32::from(!is_open && state.running_since.is_none());
        for share in turns::shares(&turns(state), free, 32, at(state.now)) {
            if share.slots > 0 {
                state.sources[share.source].poll = Poll::Open { since: state.now, closing_since: None };
            }
        }
        let closing = turns::next_closing(&turns(state)).filter(|one| one.at <= at(state.now));
        if let Some(closing) = closing.filter(|_| self.worker != Kind::Hog)
            && let Poll::Open { closing_since, .. } = &mut state.sources[closing.source].poll
        {
            *closing_since = Some(state.now);
        }
    }
}

impl Model for World {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let source = |pending_since| Source { pending_since, poll: Poll::None { since: 0, demand: Demand::Quiet } };
        let sources = [source(Some(0)), source(None), source(None)];
        let (running_since, unused_since) = (None, 0);
        let mut first =
            State { now: 0, sources, running_since, unused_since, has_arrived: false, is_quiet_served: false };
        self.settle(&mut first);
        vec![first]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let mut is_due = state.running_since.is_some_and(|since| state.now >= since + TASK_TICKS);
        for (index, source) in state.sources.iter().enumerate() {
            let Poll::Open { since, closing_since } = source.poll else { continue };
            if let Some(pending) = source.pending_since {
                steps.push(Step::Grant(index));
                is_due |= state.now >= since.max(pending) + ANSWER_TICKS;
            }
            if closing_since.is_some() || state.now >= since + POLL_TICKS {
                steps.push(Step::Empty(index));
                is_due |= closing_since.is_none_or(|closing| state.now >= closing + ANSWER_TICKS);
            }
        }
        if state.running_since.is_some_and(|since| state.now > since) {
            steps.push(Step::End);
        }
        if !state.has_arrived {
            steps.push(Step::Arrive);
        }
        if !is_due && state.now < HORIZON {
            steps.push(Step::Tick);
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        match step {
            Step::Tick => state.now += 1,
            Step::Arrive => {
                state.has_arrived = true;
                state.sources[QUIET].pending_since = Some(state.now);
            }
            Step::Grant(index) => {
                let source = &mut state.sources[index];
                source.pending_since = (index == BUSY).then_some(state.now);
                source.poll = Poll::None { since: state.now, demand: Demand::Busy };
                state.running_since = Some(state.now);
                state.is_quiet_served |= index == QUIET;
            }
            Step::Empty(index) => {
                state.sources[index].poll = Poll::None { since: state.now, demand: Demand::Quiet };
            }
            Step::End => (state.running_since, state.unused_since) = (None, state.now),
        }
        self.settle(&mut state);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            // The other quiet source may have its turn before.
            Property::always(QUIET_WAITS, |_, state: &State| {
                let waited = state.sources[QUIET].pending_since.map_or(0, |since| state.now - since);
                waited <= ticks(QUIET_TURN) + poll_max() + TASK_TICKS + ANSWER_TICKS
            }),
            Property::always(BUSY_WAITS, |_, state: &State| {
                let unused = if state.running_since.is_some() { 0 } else { state.now - state.unused_since };
                unused <= 2 * poll_max() + ANSWER_TICKS
            }),
            Property::sometimes(SERVED, |_, state: &State| state.is_quiet_served),
        ]
    }
}

const QUIET_WAITS: &str = "a task of the quiet source waits for its turn only";
const BUSY_WAITS: &str = "the slot is not kept from the busy source";
const SERVED: &str = "the quiet source is served";

fn explored(worker: Kind) -> Vec<&'static str> {
    let checker = World { worker }.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    println!("one slot: {} unique states to depth {}", checker.unique_state_count(), checker.max_depth());
    let mut found: Vec<_> = checker.discoveries().into_iter().map(|(name, path)| (name, path.into_actions())).collect();
    found.sort_unstable_by_key(|(name, _)| *name);
    for (name, steps) in &found {
        println!("{name}: {steps:?}");
    }
    found.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn a3_neither_a_busy_source_nor_a_quiet_one_starves_in_any_history() {
    assert_eq!(explored(Kind::Ours), [SERVED]);
}

#[test]
fn a3_a_worker_that_closes_no_poll_is_caught() {
    assert!(explored(Kind::Hog).contains(&BUSY_WAITS));
}

#[test]
fn a3_a_worker_whose_busy_source_always_goes_first_is_caught() {
    assert!(explored(Kind::Greedy).contains(&QUIET_WAITS));
}
