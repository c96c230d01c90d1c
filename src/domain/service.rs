//! A service beside the tasks, which a handler forwards them to: asked after, and, where the worker starts it, ended when it
//! does not answer and started again, later each time it did not last.

use alloc::collections::VecDeque;
use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;

/// The pauses between two starts.
pub const PAUSE: backoff::Policy = backoff::Policy { first: Duration::from_secs(1), max: Duration::from_secs(60) };

/// A service that was well for so long starts again with the shortest pause.
pub const STEADY: Duration = Duration::from_secs(60);

/// Whether tasks can be forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Serving {
    /// They can.
    Up,
    /// They cannot at present, and none is claimed for it.
    Down,
}

/// Who starts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeping {
    /// This worker.
    Here,
    /// Somebody else: it is only asked after.
    Elsewhere,
}

/// What counts as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Who starts it.
    pub keeping: Keeping,
    /// How long a start may take until it answers.
    pub start_within: Duration,
    /// How often it is asked after while it does not answer well.
    pub ask_starting: Duration,
    /// How often it is asked after once it is well.
    pub ask_well: Duration,
    /// How many times in a row it may not answer well.
    pub misses_max: u32,
}

/// How it answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// As it should.
    Well,
    /// Otherwise, or not at all.
    Ill,
    /// Not in time, while it was at work: that says nothing.
    Busy,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Its process runs.
    Started,
    /// It could not be started.
    NotStarted,
    /// Its process has ended.
    Ended,
    /// It was asked after.
    Answered(Health),
    /// A task could not be forwarded: nobody was there to take it.
    Unreachable,
    /// It broke off, and did not answer well when it was looked at.
    BrokeOff,
    /// Time passed.
    Tick,
}

/// Why it is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// It did not answer well within [`Policy::start_within`].
    NeverWell,
    /// It did not answer well [`Policy::misses_max`] times in a row.
    NoLongerWell,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Start its process; the answer is [`Event::Started`] or [`Event::NotStarted`].
    Start,
    /// Ask after it; the answer is [`Event::Answered`].
    Ask,
    /// End its process; the answer is [`Event::Ended`].
    End(Why),
    /// Tasks may be forwarded.
    Up,
    /// Tasks may not be forwarded.
    Down,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting {
        start_at: Instant,
    },
    Starting,
    Warming {
        until: Option<Instant>,
        ask_at: Option<Instant>,
    },
    Well {
        since: Instant,
        ask_at: Option<Instant>,
        misses: u32,
    },
    /// It was well, and may be on its way out.
    Doubted {
        ask_at: Option<Instant>,
        misses: u32,
    },
    Ending,
}

/// The service.
#[derive(Debug)]
pub struct Service {
    policy: Policy,
    state: State,
    row: Backoff,
    jitter: Jitter,
    effects: VecDeque<Effect>,
}

impl Service {
    /// One that is to be started, or asked after, at once.
    #[must_use]
    pub const fn new(policy: Policy, seed: u64, now: Instant) -> Self {
        let state = match policy.keeping {
            Keeping::Here => State::Waiting { start_at: now },
            Keeping::Elsewhere => State::Warming { until: None, ask_at: Some(now) },
        };
        Self { policy, state, row: Backoff::NEW, jitter: Jitter::seeded(seed), effects: VecDeque::new() }
    }

    /// How often in a row it did not last.
    #[must_use]
    pub const fn failures(&self) -> u32 {
        self.row.tries()
    }

    /// When it is started next; `None` unless that is waited for.
    #[must_use]
    pub const fn starts_at(&self) -> Option<Instant> {
        match self.state {
            State::Waiting { start_at } => Some(start_at),
            State::Starting | State::Warming { .. } | State::Well { .. } | State::Doubted { .. } | State::Ending => {
                None
            }
        }
    }

    /// Takes in what happened. What does not fit the state is of a process that is gone, and changes nothing.
    pub fn handle(&mut self, event: Event, now: Instant) {
        match (self.state, event) {
            (State::Starting, Event::Started) => self.warm(now, now),
            (State::Starting, Event::NotStarted)
            | (State::Warming { .. } | State::Doubted { .. } | State::Ending, Event::Ended) => {
                self.rest(now);
            }
            (State::Well { since, .. }, Event::Ended) => {
                self.down(since, now);
                self.rest(now);
            }
            (State::Well { since, .. }, Event::Unreachable) => {
                self.down(since, now);
                self.warm(now, now);
            }
            (State::Well { since, misses, .. }, Event::BrokeOff) => {
                self.down(since, now);
                self.state = State::Doubted { ask_at: Some(now), misses };
            }
            (State::Doubted { misses, .. }, Event::Answered(health @ (Health::Ill | Health::Busy))) => {
                self.doubted(misses, health, now);
            }
            (State::Warming { .. } | State::Doubted { .. }, Event::Answered(Health::Well)) => {
                self.effects.push_back(Effect::Up);
                self.state = State::Well { since: now, ask_at: Some(now.plus(self.policy.ask_well)), misses: 0 };
            }
            (State::Warming { until, .. }, Event::Answered(Health::Ill | Health::Busy)) => {
                self.state = State::Warming { until, ask_at: Some(now.plus(self.policy.ask_starting)) };
            }
            (State::Well { since, misses, .. }, Event::Answered(health)) => self.asked(since, misses, health, now),
            (
                State::Waiting { .. } | State::Starting | State::Warming { .. } | State::Doubted { .. } | State::Ending,
                _,
            )
            | (State::Well { .. }, Event::Started | Event::NotStarted | Event::Tick) => {}
        }
        self.due(now);
    }

    fn asked(&mut self, since: Instant, misses: u32, health: Health, now: Instant) {
        let (misses, again) = match health {
            Health::Well => (0, self.policy.ask_well),
            Health::Busy => (misses, self.policy.ask_well),
            Health::Ill => (misses + 1, self.policy.ask_starting),
        };
        if misses < self.policy.misses_max {
            self.state = State::Well { since, ask_at: Some(now.plus(again)), misses };
            return;
        }
        self.down(since, now);
        self.given_up(now);
    }

    fn doubted(&mut self, misses: u32, health: Health, now: Instant) {
        let misses = if health == Health::Ill { misses + 1 } else { misses };
        if misses < self.policy.misses_max {
            self.state = State::Doubted { ask_at: Some(now.plus(self.policy.ask_starting)), misses };
        } else {
            self.given_up(now);
        }
    }

    /// It did not answer well often enough in a row.
    fn given_up(&mut self, now: Instant) {
        match self.policy.keeping {
            Keeping::Here => self.end(Why::NoLongerWell),
            Keeping::Elsewhere => self.warm(now, now.plus(self.policy.ask_starting)),
        }
    }

    /// What to do next.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// When [`Event::Tick`] is wanted.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.state {
            State::Waiting { start_at } => Some(start_at),
            State::Warming { until, ask_at } => [until, ask_at].into_iter().flatten().min(),
            State::Well { ask_at, .. } | State::Doubted { ask_at, .. } => ask_at,
            State::Starting | State::Ending => None,
        }
    }

    fn due(&mut self, now: Instant) {
        match &mut self.state {
            State::Waiting { start_at } if now >= *start_at => {
                self.state = State::Starting;
                self.effects.push_back(Effect::Start);
            }
            State::Warming { until, .. } if until.is_some_and(|until| now >= until) => self.end(Why::NeverWell),
            State::Warming { ask_at, .. } | State::Well { ask_at, .. } | State::Doubted { ask_at, .. }
                if ask_at.is_some_and(|at| now >= at) =>
            {
                *ask_at = None;
                self.effects.push_back(Effect::Ask);
            }
            State::Waiting { .. }
            | State::Starting
            | State::Warming { .. }
            | State::Well { .. }
            | State::Doubted { .. }
            | State::Ending => {}
        }
    }

    /// It was well, and is not.
    fn down(&mut self, since: Instant, now: Instant) {
        if now.since(since) >= STEADY {
            self.row.reset();
        }
        self.effects.push_back(Effect::Down);
    }

    /// It is expected to answer.
    fn warm(&mut self, now: Instant, ask_at: Instant) {
        let until = match self.policy.keeping {
            Keeping::Here => Some(now.plus(self.policy.start_within)),
            Keeping::Elsewhere => None,
        };
        self.state = State::Warming { until, ask_at: Some(ask_at) };
    }

    fn end(&mut self, why: Why) {
        self.state = State::Ending;
        self.effects.push_back(Effect::End(why));
    }

    fn rest(&mut self, now: Instant) {
        let pause = self.row.wait(PAUSE, None, &mut self.jitter);
        self.state = State::Waiting { start_at: now.plus(pause) };
    }
}
