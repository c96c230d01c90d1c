//! Every history of one task, two workers and their queue, within bounds: messages that are lost, late or overtake each
//! other, a crash, clocks that run slow, kills that take their time.
//!
//! The workers are the project's own: each one is a `claim::ClaimState` in its own time. What the model adds is
//! the world around it: a queue as the protocol describes it, a network without manners, and two wrong ways to use the
//! rules that must be caught.
//!
//! One tick is 15 seconds. A lease of 120 s is 8 ticks, and the rules give it a margin of 2 ticks.

#![allow(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::expect_used,
    reason = "a model says how long it took"
)]

mod groups;
mod lanes;
mod staged;
mod turns;

use std::time::Duration;

use journeyman_domain::claim::{self, ClaimAction, ClaimEvent, ClaimState, UploadStatus};
use journeyman_domain::jitter::Jitter;
use journeyman_domain::lease::{Granted, Lease};
use journeyman_domain::outcome::ExecuteFailure;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::time::Instant;
use stateright::{Checker, HasDiscoveries, Model, Property};

const TICK: Duration = Duration::from_secs(15);
const LEASE: Duration = Duration::from_secs(120);
const LEASE_TICKS: u8 = 8;
const MARGIN_TICKS: u8 = 2;

/// What the world may do, and how the workers use the rules.
#[derive(Clone, Copy)]
struct World {
    workers: usize,
    /// How many ticks a worker's clock may fall behind.
    lag: u8,
    /// How many ticks a payload takes to die at most.
    kill: u8,
    /// How many requests or replies are lost.
    losses: u8,
    /// How many workers die.
    crashes: u8,
    /// The tick at which the model ends.
    horizon: u8,
    reply: Reply,
}

/// How a worker takes a granted claim.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reply {
    /// As the rules say: the lease counts from the request, and is looked at again.
    Judged,
    /// The mutant: as if it had come at once. No re-check.
    Believed,
}

const GOOD: World = World { workers: 2, lag: 0, kill: 0, losses: 0, crashes: 0, horizon: 9, reply: Reply::Judged };

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    now: u8,
    queue: Queue,
    workers: Vec<Worker>,
    mail: Vec<Mail>,
    losses: u8,
    crashes: u8,
    /// An outcome was accepted from a worker that did not hold the run.
    stolen: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Queue {
    Pending,
    Claimed { by: usize, until: u8 },
    Resolved,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Worker {
    machine: Option<ClaimState>,
    /// How many ticks its clock is behind.
    lag: u8,
    payload: Payload,
    /// The earliest end of the run's lease at the queue.
    kept_until: u8,
    claims: u8,
    crashed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Payload {
    None,
    Preparing,
    Alive,
    /// Told to end; dead at this tick at the latest.
    Dying {
        at: u8,
    },
    /// It is `Dying`, and nothing of it ever ran.
    Dropping,
    Settling,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Call {
    Claim,
    Reclaim,
    Report,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Answer {
    /// Granted, for so many ticks from when the queue answered.
    Yes {
        left: u8,
    },
    Gone,
}

/// A request on its way there, or its answer on its way back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Mail {
    worker: usize,
    /// Which of the worker's claims it is about.
    claim: u8,
    call: Call,
    /// The time of the worker.
    sent_at: u8,
    answer: Option<Answer>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    Tick,
    /// A worker's timer fires between this tick and the next.
    Fire(usize),
    Lag(usize),
    Receive(usize),
    Deliver(usize),
    Lose(usize),
    Expire,
    Work(usize),
    Crash(usize),
}

fn at(ticks: u8) -> Instant {
    Instant::at(TICK * u32::from(ticks))
}

impl State {
    fn local(&self, worker: usize) -> u8 {
        self.now - self.workers[worker].lag
    }

    /// Something happens to a worker's claim; what the rules want done is done.
    fn tell(&mut self, world: &World, worker: usize, happening: ClaimEvent, now: u8) {
        self.tell_at(world, worker, happening, at(now));
    }

    /// The time of a worker's timer that fires before the next tick, if one does.
    fn fires(&self, worker: usize) -> Option<Instant> {
        let due = self.workers[worker].machine.as_ref()?.next_deadline()?;
        (due < at(self.local(worker) + 1)).then(|| due.max(at(self.local(worker))))
    }

    fn tell_at(&mut self, world: &World, worker: usize, happening: ClaimEvent, now: Instant) {
        let Some(mut machine) = self.workers[worker].machine.take() else { return };
        let mut acts = Vec::new();
        machine.handle(happening, now, &mut Jitter::seeded(1), &mut acts);
        self.workers[worker].machine = Some(machine);
        for act in acts {
            self.perform(world, worker, act);
        }
    }

    fn perform(&mut self, world: &World, worker: usize, act: ClaimAction) {
        let dead_at = self.now + world.kill;
        let payload = self.workers[worker].payload;
        self.workers[worker].payload = match act {
            ClaimAction::Request | ClaimAction::TakeOver => return self.send(worker, Call::Claim),
            ClaimAction::Reclaim { .. } => return self.send(worker, Call::Reclaim),
            ClaimAction::Report { .. } => return self.send(worker, Call::Report),
            ClaimAction::CheckStatus | ClaimAction::UpdateLease(_) => return,
            ClaimAction::Prepare => Payload::Preparing,
            ClaimAction::Execute | ClaimAction::Start => Payload::Alive,
            ClaimAction::Kill { .. } => match payload {
                Payload::Alive => Payload::Dying { at: dead_at },
                Payload::Preparing => Payload::Dropping,
                Payload::None | Payload::Settling | Payload::Dying { .. } | Payload::Dropping => payload,
            },
            ClaimAction::Upload => Payload::Settling,
            ClaimAction::Close(_) => {
                self.workers[worker].machine = None;
                Payload::None
            }
        };
    }

    fn send(&mut self, worker: usize, call: Call) {
        let mail = Mail { worker, claim: self.workers[worker].claims, call, sent_at: self.local(worker), answer: None };
        self.mail.push(mail);
    }

    /// What the queue answers.
    fn answer(&mut self, mail: Mail) -> Answer {
        let until = self.now + LEASE_TICKS;
        let granted = Answer::Yes { left: LEASE_TICKS };
        match (mail.call, self.queue) {
            (Call::Claim, Queue::Pending) => {
                self.queue = Queue::Claimed { by: mail.worker, until };
                self.workers[mail.worker].kept_until = until;
                granted
            }
            // Idempotent for the same worker, and moves nothing.
            (Call::Claim, Queue::Claimed { by, until }) if by == mail.worker => {
                Answer::Yes { left: until.saturating_sub(self.now) }
            }
            (Call::Reclaim, Queue::Claimed { by, .. }) if by == mail.worker => {
                self.queue = Queue::Claimed { by, until };
                self.workers[mail.worker].kept_until = until;
                granted
            }
            (Call::Report, Queue::Claimed { by, .. }) if by == mail.worker => {
                self.stolen |= self.workers[mail.worker].claims != mail.claim;
                self.queue = Queue::Resolved;
                granted
            }
            (Call::Claim | Call::Reclaim | Call::Report, _) => Answer::Gone,
        }
    }

    /// A call comes back, with an answer or without.
    fn comes_back(&mut self, world: &World, mail: Mail, answer: Option<Answer>) {
        let worker = &self.workers[mail.worker];
        if worker.machine.is_none() || worker.claims != mail.claim {
            return;
        }
        let refused = if answer.is_some() { Refusal::Gone } else { Refusal::Retry { retry_after: None } };
        let granted = match answer {
            Some(Answer::Yes { left }) => Some(Granted { sent_at: at(mail.sent_at), length: TICK * u32::from(left) }),
            Some(Answer::Gone) | None => None,
        };
        let now = self.local(mail.worker);
        let (happening, now) = match (mail.call, granted) {
            (Call::Claim, Some(granted)) if world.reply == Reply::Believed => {
                (ClaimEvent::Claimed(Ok(granted)), mail.sent_at)
            }
            (Call::Claim, Some(granted)) => (ClaimEvent::Claimed(Ok(granted)), now),
            (Call::Claim, None) if answer.is_some() => {
                self.workers[mail.worker].machine = None;
                return;
            }
            (Call::Claim, None) => (ClaimEvent::Claimed(Err(refused)), now),
            (Call::Reclaim, granted) => (ClaimEvent::Reclaimed(granted.ok_or(refused)), now),
            (Call::Report, granted) => (ClaimEvent::Reported(granted.map(|_| ()).ok_or(refused)), now),
        };
        self.tell(world, mail.worker, happening, now);
        if world.reply == Reply::Believed && self.workers[mail.worker].payload == Payload::Preparing {
            self.tell(world, mail.worker, ClaimEvent::Prepared(Ok(())), now);
        }
    }

    /// What the handler of a worker has to say next.
    fn work(&mut self, world: &World, worker: usize) {
        let now = self.local(worker);
        let happening = match self.workers[worker].payload {
            Payload::Preparing => ClaimEvent::Prepared(Ok(())),
            Payload::Alive | Payload::Dying { .. } => ClaimEvent::Ended(Ok(())),
            Payload::Dropping => ClaimEvent::Ended(Err(ExecuteFailure::Internal)),
            Payload::Settling => ClaimEvent::Uploaded(UploadStatus::Complete),
            Payload::None => return,
        };
        self.workers[worker].payload = Payload::None;
        self.tell(world, worker, happening, now);
    }

    fn alive(&self, worker: usize) -> bool {
        matches!(self.workers[worker].payload, Payload::Alive | Payload::Dying { .. })
    }
}

impl Model for World {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let worker = Worker { machine: None, lag: 0, payload: Payload::None, kept_until: 0, claims: 0, crashed: false };
        vec![State {
            now: 0,
            queue: Queue::Pending,
            workers: vec![worker; self.workers],
            mail: Vec::new(),
            losses: self.losses,
            crashes: self.crashes,
            stolen: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let overdue = |worker: &Worker| matches!(worker.payload, Payload::Dying { at } if at <= state.now);
        let fires: Vec<usize> = (0..self.workers).filter(|worker| state.fires(*worker).is_some()).collect();
        if state.now < self.horizon && fires.is_empty() && !state.workers.iter().any(overdue) {
            actions.push(Action::Tick);
        }
        actions.extend(fires.into_iter().map(Action::Fire));
        if let Queue::Claimed { until, .. } = state.queue
            && state.now >= until
        {
            actions.push(Action::Expire);
        }
        for (index, worker) in state.workers.iter().enumerate() {
            if worker.crashed {
                continue;
            }
            // A message reaches any idle worker, each run once.
            if state.queue == Queue::Pending && worker.machine.is_none() && worker.claims < 2 {
                actions.push(Action::Receive(index));
            }
            if worker.machine.is_some() && worker.lag < self.lag && state.now > worker.lag {
                actions.push(Action::Lag(index));
            }
            if worker.payload != Payload::None {
                actions.push(Action::Work(index));
            }
            if state.crashes > 0 && worker.machine.is_some() {
                actions.push(Action::Crash(index));
            }
        }
        for (index, mail) in state.mail.iter().enumerate() {
            actions.push(Action::Deliver(index));
            // The rest of a lease when a lost claim is asked for again is short, and so is its margin: shorter than
            // a tick, and with it than a clock or a kill that is out by whole ticks.
            let losable = mail.call != Call::Claim || self.lag + self.kill == 0;
            if losable && state.losses > 0 && !state.workers[mail.worker].crashed {
                actions.push(Action::Lose(index));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Tick => {
                state.now += 1;
                for worker in 0..self.workers {
                    let now = state.local(worker);
                    let due = state.workers[worker].machine.as_ref().and_then(ClaimState::next_deadline);
                    if due.is_some_and(|due| at(now) >= due) {
                        state.tell(self, worker, ClaimEvent::Tick, now);
                    }
                }
            }
            Action::Fire(worker) => {
                let due = state.fires(worker)?;
                state.tell_at(self, worker, ClaimEvent::Tick, due);
            }
            Action::Lag(worker) => state.workers[worker].lag += 1,
            Action::Receive(worker) => {
                let mut acts = Vec::new();
                let policy = claim::ClaimPolicy {
                    termination_grace: Duration::ZERO,
                    status_poll_interval: None,
                    reports_cancellation: false,
                    starts_in_one_step: false,
                    fenced_reports: false,
                };
                state.workers[worker].claims += 1;
                state.workers[worker].machine = Some(ClaimState::requested(policy, &mut acts));
                acts.into_iter().for_each(|act| state.perform(self, worker, act));
            }
            Action::Deliver(index) => {
                let mail = state.mail.remove(index);
                match mail.answer {
                    None => {
                        let answer = Some(state.answer(mail));
                        state.mail.push(Mail { answer, ..mail });
                    }
                    answer => state.comes_back(self, mail, answer),
                }
            }
            Action::Lose(index) => {
                let mail = state.mail.remove(index);
                state.losses -= 1;
                state.comes_back(self, mail, None);
            }
            Action::Expire => state.queue = Queue::Pending,
            Action::Work(worker) => state.work(self, worker),
            Action::Crash(worker) => {
                state.crashes -= 1;
                let worker = &mut state.workers[worker];
                (worker.machine, worker.payload, worker.crashed) = (None, Payload::None, true);
            }
        }
        // Mail is a set: its order means nothing.
        state.mail.sort_unstable();
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            // I7
            Property::always("one payload at a time", |_, state: &State| {
                (0..state.workers.len()).filter(|worker| state.alive(*worker)).count() <= 1
            }),
            // I2
            Property::always("no payload outlives its claim", |_, state: &State| {
                (0..state.workers.len())
                    .all(|worker| !state.alive(worker) || state.now < state.workers[worker].kept_until)
            }),
            // I9
            Property::always("no outcome but the holder's", |_, state: &State| !state.stolen),
            Property::sometimes("a run is completed", |_, state: &State| state.queue == Queue::Resolved),
            Property::sometimes("a run is taken over", |_, state: &State| {
                state.workers.len() > 1
                    && state.alive(1)
                    && state.workers[0].claims > 0
                    && state.workers[0].kept_until > 0
            }),
            Property::sometimes("a claim is extended", |_, state: &State| {
                state.workers.iter().any(|worker| worker.kept_until > LEASE_TICKS && worker.claims == 1)
            }),
            Property::sometimes("a payload is killed for its lease", |_, state: &State| {
                state.workers.iter().any(|worker| matches!(worker.payload, Payload::Dying { .. }))
            }),
        ]
    }
}

const SAFETY: [&str; 3] = ["one payload at a time", "no payload outlives its claim", "no outcome but the holder's"];

/// Looks at every state, or up to the first violation; answers with what was found.
fn explored(world: World) -> Vec<&'static str> {
    let begun = std::time::Instant::now();
    let checker = world.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let (unique, states, depth) = (checker.unique_state_count(), checker.state_count(), checker.max_depth());
    println!("{unique} unique of {states} states to depth {depth} in {:?}", begun.elapsed());
    for name in SAFETY {
        if let Some(path) = checker.discovery(name) {
            println!("{name}: {:?}", path.into_actions());
        }
    }
    let mut found: Vec<_> = checker.discoveries().into_keys().collect();
    found.sort_unstable();
    found
}

fn violated(world: World) -> Vec<&'static str> {
    explored(world).into_iter().filter(|name| SAFETY.contains(name)).collect()
}

#[test]
fn the_ticks_of_the_model_are_those_of_the_rules() {
    let lease = Lease::new(Granted { sent_at: at(0), length: LEASE }, Duration::ZERO);
    assert_eq!(lease.granted_until(), at(LEASE_TICKS));
    assert_eq!(lease.expires_at(), at(LEASE_TICKS - MARGIN_TICKS));
}

#[test]
fn two_workers_hold_in_every_history_of_slow_clocks() {
    let found = explored(World { lag: 1, ..GOOD });
    let expected =
        ["a claim is extended", "a payload is killed for its lease", "a run is completed", "a run is taken over"];
    assert_eq!(found, expected, "what may happen does, and nothing else");
}

#[test]
fn two_workers_hold_in_every_history_of_slow_kills() {
    assert_eq!(violated(World { kill: 1, ..GOOD }), [""; 0]);
}

#[test]
fn two_workers_hold_in_every_history_with_a_lost_message() {
    assert_eq!(violated(World { losses: 1, horizon: 8, ..GOOD }), [""; 0]);
}

#[test]
fn two_workers_hold_in_every_history_with_a_crash() {
    assert_eq!(violated(World { crashes: 1, ..GOOD }), [""; 0]);
}

#[test]
fn one_worker_holds_through_extensions_and_lost_messages() {
    for (lag, kill) in [(1, 0), (0, 1)] {
        assert_eq!(violated(World { workers: 1, lag, kill, losses: 1, horizon: 14, ..GOOD }), [""; 0]);
    }
}

#[test]
fn a_reply_that_is_not_judged_again_is_caught() {
    assert_eq!(violated(GOOD), [""; 0]);
    assert_ne!(violated(World { reply: Reply::Believed, ..GOOD }), [""; 0]);
}

#[test]
fn a_margin_equal_to_lag_plus_kill_is_caught() {
    for (lag, kill) in [(0, 2), (1, 1), (2, 0)] {
        assert_eq!(lag + kill, MARGIN_TICKS);
        let violated = violated(World { lag, kill, ..GOOD });
        assert!(violated.contains(&"no payload outlives its claim"), "lag {lag}, kill {kill}: {violated:?}");
    }
}
