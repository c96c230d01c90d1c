//! Whether this host can run tasks at all. A task that finds the host at fault (no folder, no process, no disk) goes back to
//! the queue, which costs it one of its retries. So claiming pauses at the first such fault, for longer each time, and goes
//! on only when the host was looked at and found fit (I33): with one task at first, and with one more for each that works, since
//! a host may be fit for a few and not for all.

use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;

/// The pauses of claiming. The longest is how often a sick host that looks fit costs a task one of its retries.
pub const PAUSE: backoff::Policy = backoff::Policy { first: Duration::from_secs(5), max: Duration::from_secs(300) };

/// A payload that has run for so long has found in the host what it needs, though it has not ended.
pub const PROVEN_AFTER: Duration = Duration::from_secs(30);

/// How the host was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Condition {
    /// It can do what a task needs.
    Fit,
    /// It cannot.
    Unfit,
}

/// Whether a fault is worth a word to the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// The host was not known to be at fault.
    First,
    /// It was.
    Known,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing is known against it, since then.
    Well {
        since: Instant,
    },
    Paused {
        until: Instant,
    },
    LookedAt,
}

/// How a host is tried that failed a task and was found fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trial {
    /// Since when it has been found fit. What was started before says nothing.
    pub since: Instant,
    /// How many tasks it may have at once.
    pub tasks: u32,
}

/// What is known of the host.
#[derive(Debug)]
pub struct Fitness {
    state: State,
    row: Backoff,
    /// How many tasks at once; `None` is as many as there are slots.
    tasks: Option<u32>,
}

impl Fitness {
    /// A host about which nothing is known.
    #[must_use]
    pub const fn new() -> Self {
        Self { state: State::Well { since: Instant::ORIGIN }, row: Backoff::NEW, tasks: None }
    }

    /// A task found the host at fault. The faults of several tasks at once are one.
    pub fn fault(&mut self, now: Instant, jitter: &mut Jitter) -> News {
        let news = if self.doubted() { News::Known } else { News::First };
        if matches!(self.state, State::Well { .. }) {
            self.pause(now, jitter);
        }
        self.tasks = Some(1);
        news
    }

    /// A payload that was started at `started` ran to its own end, or for [`PROVEN_AFTER`], on a host of `capacity` slots.
    pub fn worked(&mut self, started: Instant, capacity: u32) {
        // One that was started before the fault says nothing of the host as it is since then.
        let State::Well { since } = self.state else { return };
        if started < since {
            return;
        }
        self.tasks = self.tasks.map(|tasks| tasks.saturating_add(1)).filter(|tasks| *tasks <= capacity);
        if self.tasks.is_none() {
            self.row.reset();
        }
    }

    /// Whether the host is to be looked at now; the answer goes to [`Fitness::looked`].
    pub fn look(&mut self, now: Instant) -> bool {
        let due = matches!(self.state, State::Paused { until } if now >= until);
        if due {
            self.state = State::LookedAt;
        }
        due
    }

    /// The host was looked at.
    pub fn looked(&mut self, condition: Condition, now: Instant, jitter: &mut Jitter) {
        match (self.state, condition) {
            (State::LookedAt, Condition::Fit) => self.state = State::Well { since: now },
            (State::LookedAt, Condition::Unfit) => self.pause(now, jitter),
            (State::Well { .. } | State::Paused { .. }, _) => {}
        }
    }

    /// Whether nothing may be claimed.
    #[must_use]
    pub const fn unfit(&self) -> bool {
        !matches!(self.state, State::Well { .. })
    }

    /// Whether there was a fault that the tasks since then have not disproved.
    #[must_use]
    pub const fn doubted(&self) -> bool {
        self.tasks.is_some()
    }

    /// The trial that the host is on, if it is on one.
    #[must_use]
    pub const fn trial(&self) -> Option<Trial> {
        match (self.state, self.tasks) {
            (State::Well { since }, Some(tasks)) => Some(Trial { since, tasks }),
            _ => None,
        }
    }

    /// When it is to be looked at.
    #[must_use]
    pub const fn next_deadline(&self) -> Option<Instant> {
        match self.state {
            State::Paused { until } => Some(until),
            State::Well { .. } | State::LookedAt => None,
        }
    }

    fn pause(&mut self, now: Instant, jitter: &mut Jitter) {
        self.state = State::Paused { until: now.plus(self.row.wait(PAUSE, None, jitter)) };
    }
}

impl Default for Fitness {
    fn default() -> Self {
        Self::new()
    }
}
