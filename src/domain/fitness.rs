//! Whether this host can run tasks at all. A task that finds the host at fault (no folder, no process, no disk) goes back to
//! the queue, which costs it one of its retries. So claiming pauses at the first such fault, for longer each time, and goes
//! on only when the host was looked at and found fit (I33).

use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;

/// The pauses of claiming. The longest is how often a sick host that looks fit costs a task one of its retries.
pub const PAUSE: backoff::Policy = backoff::Policy { first: Duration::from_secs(5), max: Duration::from_secs(300) };

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

/// What is known of the host.
#[derive(Debug)]
pub struct Fitness {
    state: State,
    row: Backoff,
}

impl Fitness {
    /// A host about which nothing is known.
    #[must_use]
    pub const fn new() -> Self {
        Self { state: State::Well { since: Instant::ORIGIN }, row: Backoff::NEW }
    }

    /// A task found the host at fault. The faults of several tasks at once are one.
    pub fn fault(&mut self, now: Instant, jitter: &mut Jitter) -> News {
        let news = if self.doubted() { News::Known } else { News::First };
        if matches!(self.state, State::Well { .. }) {
            self.pause(now, jitter);
        }
        news
    }

    /// A task that was started at `started` ran to its own end.
    pub fn worked(&mut self, started: Instant) {
        // One that was started before the fault says nothing of the host as it is since then.
        if let State::Well { since } = self.state
            && started >= since
        {
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

    /// Whether there was a fault that no task has disproved.
    #[must_use]
    pub const fn doubted(&self) -> bool {
        self.unfit() || self.row.tries() > 0
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
