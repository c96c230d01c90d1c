//! Every history of one worker group, within bounds: requests that come at any moment, a worker that takes, answers or dies,
//! reports that are late or lost, a controller that dies, and a broker that does what it is told in its own time.
//!
//! The controller is the project's own [`Pool`]. What the model adds is the world around it, and two controllers that must
//! be caught: one that does not look before it deletes, and one that begins while what another one has sent is on its way.

use std::time::Duration;

use journeyman_domain::group::pool::{Event, Pool, QueueStep, StepResult};
use journeyman_domain::group::{Key, tracker};
use journeyman_domain::time::Instant;
use stateright::{Checker, HasDiscoveries, Model, Property};

const TICK: Duration = Duration::from_secs(1);
const POLICY: tracker::TrackerPolicy =
    tracker::TrackerPolicy { unbind_delay: Duration::from_secs(2), stop_delay: Duration::from_secs(1) };

/// What the world may do.
#[derive(Clone, Copy)]
struct World {
    requests: u8,
    /// How often the controller dies.
    deaths: u8,
    /// How often a worker dies.
    crashes: u8,
    /// The tick at which the model ends.
    horizon: u8,
    controller: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ours,
    /// A mutant: a queue is taken for empty without a look.
    Blind,
    /// A mutant: it does not wait for its predecessor's connection to be gone.
    Hasty,
}

const SAFETY: &str = "no request is lost";

/// Requests by number, one bit each.
type Requests = u8;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    now: u8,
    /// `None` while it is dead.
    pool: Option<Pool>,
    epoch: u64,
    /// What the controller has sent about the queue, in order.
    wire: Vec<(u64, QueueStep)>,
    answers: Vec<(QueueStep, StepResult)>,
    queue: Option<Queue>,
    orphans: Requests,
    /// Which orphan the controller has in hand.
    taken: Requests,
    /// Which was published once more and has not arrived.
    flying: Requests,
    worker: Option<Worker>,
    /// Reports on their way.
    reports: u8,
    sent: Requests,
    answered: Requests,
    deaths: u8,
    crashes: u8,
    deleted: bool,
    revived: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Queue {
    bound: bool,
    ready: Requests,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Worker {
    held: Requests,
    going: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    Pass,
    Publish(u8),
    TakeOrphan(u8),
    Forward,
    Arrive,
    /// The first of what was sent over this connection.
    Obey(u64),
    Hear,
    Report,
    LoseReport,
    WorkerStarts,
    WorkerTakes(u8),
    WorkerAnswers,
    WorkerDies,
    WorkerGoes,
    Die,
    Begin,
}

fn key() -> Key {
    Key::new("a").expect("it is short")
}

impl State {
    fn at(&self) -> Instant {
        Instant::at(TICK * u32::from(self.now))
    }

    fn tell(&mut self, event: Event) {
        let now = self.at();
        let Some(pool) = &mut self.pool else { return };
        pool.handle(event, now);
        while let Some(effect) = pool.next_effect() {
            self.wire.push((self.epoch, effect.step));
        }
    }

    fn demand(&mut self) {
        self.tell(Event::Demand { key: key(), extra: Duration::ZERO });
    }

    fn workers(&mut self) {
        let count = u32::from(self.worker.is_some());
        self.tell(Event::Workers { key: key(), count });
    }

    fn is_wanted(&self) -> bool {
        self.pool.as_ref().is_some_and(|pool| pool.tracker().desired(&key()).is_some())
    }

    fn is_bound(&self) -> bool {
        self.pool.as_ref().is_some_and(|pool| pool.is_bound(&key()))
    }

    /// As the request exchange has it, with the orphans for an alternate.
    fn route(&mut self, request: Requests) {
        match &mut self.queue {
            Some(queue) if queue.bound => queue.ready |= request,
            Some(_) | None => self.orphans |= request,
        }
    }

    fn obey(&mut self, step: QueueStep, kind: Kind) {
        let consumers = u32::from(self.worker.as_ref().is_some_and(|worker| !worker.going));
        let answer = match (step, &mut self.queue) {
            (QueueStep::Bind, queue) => {
                queue.get_or_insert(Queue { bound: false, ready: 0 }).bound = true;
                StepResult::Done
            }
            (_, None) => StepResult::NotFound,
            (QueueStep::Unbind, Some(queue)) => {
                queue.bound = false;
                StepResult::Done
            }
            (QueueStep::Inspect, Some(_)) if kind == Kind::Blind => StepResult::Contents { ready: 0, consumers: 0 },
            (QueueStep::Inspect, Some(queue)) => StepResult::Contents { ready: queue.ready.count_ones(), consumers },
            // A quorum queue answers so, whatever is in it.
            (QueueStep::Delete, Some(_)) => {
                (self.queue, self.deleted) = (None, true);
                StepResult::Done
            }
        };
        self.answers.push((step, answer));
    }

    /// Every request that can still be answered, or was.
    fn known(&self) -> Requests {
        let ready = self.queue.as_ref().map_or(0, |queue| queue.ready);
        let held = self.worker.as_ref().map_or(0, |worker| worker.held);
        ready | held | self.orphans | self.flying | self.answered
    }
}

fn bits(requests: Requests) -> impl Iterator<Item = Requests> {
    (0..8).map(|bit| 1 << bit).filter(move |bit| requests & bit != 0)
}

impl Model for World {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut state = State {
            now: 0,
            pool: Some(Pool::new(POLICY, 1)),
            epoch: 1,
            wire: Vec::new(),
            answers: Vec::new(),
            queue: None,
            orphans: 0,
            taken: 0,
            flying: 0,
            worker: None,
            reports: 0,
            sent: 0,
            answered: 0,
            deaths: 0,
            crashes: 0,
            deleted: false,
            revived: false,
        };
        state.tell(Event::Connected);
        vec![state]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let alive = state.pool.is_some();
        if state.now < self.horizon {
            actions.push(Action::Pass);
        }
        if state.sent.count_ones() < self.requests.into() {
            actions.push(Action::Publish(1 << state.sent.count_ones()));
        }
        if alive && state.taken == 0 {
            actions.extend(bits(state.orphans).map(Action::TakeOrphan));
        }
        if state.taken != 0 && state.flying == 0 && state.is_bound() {
            actions.push(Action::Forward);
        }
        if state.flying != 0 {
            actions.push(Action::Arrive);
        }
        let first = state.wire.first().map(|(epoch, _)| *epoch);
        let other = state.wire.iter().map(|(epoch, _)| *epoch).find(|epoch| Some(*epoch) != first);
        actions.extend(first.into_iter().chain(other).map(Action::Obey));
        if !state.answers.is_empty() {
            actions.push(Action::Hear);
        }
        if state.reports > 0 {
            actions.extend([Action::Report, Action::LoseReport]);
        }
        match &state.worker {
            None if state.is_wanted() => actions.push(Action::WorkerStarts),
            None => {}
            Some(worker) => {
                if worker.held != 0 {
                    actions.push(Action::WorkerAnswers);
                } else if !worker.going
                    && let Some(queue) = &state.queue
                {
                    actions.extend(bits(queue.ready).map(Action::WorkerTakes));
                }
                if alive && (worker.going && worker.held == 0 || !worker.going && !state.is_wanted()) {
                    actions.push(Action::WorkerGoes);
                }
                if state.crashes < self.crashes {
                    actions.push(Action::WorkerDies);
                }
            }
        }
        if alive && state.deaths < self.deaths {
            actions.push(Action::Die);
        }
        if !alive && (state.wire.is_empty() || self.controller == Kind::Hasty) {
            actions.push(Action::Begin);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Pass => {
                state.now += 1;
                state.tell(Event::Tick);
            }
            Action::Publish(request) => {
                state.sent |= request;
                state.route(request);
            }
            Action::TakeOrphan(request) => {
                state.taken = request;
                state.demand();
            }
            Action::Forward => state.flying = state.taken,
            Action::Arrive => {
                // Confirmed and acknowledged, unless the controller is not there any more: then it is there twice.
                let request = std::mem::take(&mut state.flying);
                if state.taken == request {
                    (state.orphans, state.taken) = (state.orphans & !request, 0);
                }
                state.route(request);
            }
            Action::Obey(epoch) => {
                let at = state.wire.iter().position(|(sent_over, _)| *sent_over == epoch)?;
                let (_, step) = state.wire.remove(at);
                state.obey(step, self.controller);
            }
            Action::Hear => {
                let (step, answer) = state.answers.remove(0);
                let was_wanted = state.is_wanted();
                state.tell(Event::StepFinished { key: key(), step, result: answer });
                state.revived |= !was_wanted && state.is_wanted();
            }
            Action::Report => {
                state.reports -= 1;
                state.demand();
            }
            Action::LoseReport => state.reports -= 1,
            Action::WorkerStarts => {
                state.worker = Some(Worker { held: 0, going: false });
                state.workers();
            }
            Action::WorkerTakes(request) => {
                state.queue.as_mut()?.ready &= !request;
                state.worker.as_mut()?.held = request;
                state.reports = 1;
            }
            Action::WorkerAnswers => state.answered |= std::mem::take(&mut state.worker.as_mut()?.held),
            Action::WorkerDies => {
                let held = state.worker.take()?.held;
                if let Some(queue) = &mut state.queue {
                    queue.ready |= held;
                }
                state.crashes += 1;
                state.workers();
            }
            Action::WorkerGoes => {
                let worker = state.worker.as_mut()?;
                if worker.going {
                    state.worker = None;
                    state.workers();
                } else {
                    worker.going = true;
                }
            }
            Action::Die => {
                (state.pool, state.taken) = (None, 0);
                state.answers.clear();
                state.deaths += 1;
            }
            Action::Begin => {
                state.epoch += 1;
                state.pool = Some(Pool::new(POLICY, 1));
                state.tell(Event::Connected);
                if state.queue.is_some() {
                    state.tell(Event::demand(key()));
                }
                state.workers();
            }
        }
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(SAFETY, |_, state: &State| state.sent & !state.known() == 0),
            Property::sometimes("a queue is deleted", |_, state: &State| state.deleted),
            Property::sometimes("a queue that holds requests stays", |_, state: &State| state.revived),
            Property::sometimes("an orphan is answered after a death", |_, state: &State| {
                state.deaths > 0 && state.answered != 0 && state.deleted
            }),
        ]
    }
}

const GOOD: World = World { requests: 2, deaths: 0, crashes: 0, horizon: 6, controller: Kind::Ours };

/// Looks at every state; answers with what was found.
fn explored(world: World) -> Vec<&'static str> {
    let checker = world.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    println!("groups: {} unique states to depth {}", checker.unique_state_count(), checker.max_depth());
    if let Some(path) = checker.discovery(SAFETY) {
        println!("{SAFETY}: {:?}", path.into_actions());
    }
    let mut found: Vec<_> = checker.discoveries().into_keys().collect();
    found.sort_unstable();
    found
}

#[test]
fn i31_no_request_is_lost_in_any_history_of_a_group() {
    assert_eq!(explored(GOOD), ["a queue is deleted", "a queue that holds requests stays"]);
}

#[test]
fn i31_no_request_is_lost_in_any_history_of_a_group_whose_worker_dies() {
    let found = explored(World { crashes: 1, ..GOOD });
    assert_eq!(found, ["a queue is deleted", "a queue that holds requests stays"]);
}

#[test]
fn i31_no_request_is_lost_in_any_history_of_a_group_whose_controller_dies() {
    let found = explored(World { deaths: 1, requests: 1, horizon: 7, ..GOOD });
    assert!(found.contains(&"an orphan is answered after a death") && !found.contains(&SAFETY), "{found:?}");
}

#[test]
fn i31_no_request_is_lost_in_any_history_of_a_group_whose_worker_and_controller_die() {
    let found = explored(World { deaths: 1, crashes: 1, horizon: 5, ..GOOD });
    assert!(!found.contains(&SAFETY), "{found:?}");
}

#[test]
fn i31_a_controller_that_deletes_without_a_look_is_caught() {
    assert!(explored(World { controller: Kind::Blind, ..GOOD }).contains(&SAFETY));
}

#[test]
fn i31_a_controller_that_does_not_wait_for_the_one_before_is_caught() {
    assert!(explored(World { controller: Kind::Hasty, deaths: 1, ..GOOD }).contains(&SAFETY));
}
