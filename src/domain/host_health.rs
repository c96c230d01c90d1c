//! Whether this host can run tasks at all. A task that finds the host at fault (no folder, no process, no disk) goes back to
//! the queue, which costs it one of its retries. So claiming pauses at the first such fault, for longer each time, and goes
//! on only when the host was looked at and found fit (I33): with one task at first, and with one more for each that works, since
//! a host may be fit for a few and not for all.

use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;

/// The pauses of claiming. The longest is how often a sick host that looks fit costs a task one of its retries.
pub const FAULT_BACKOFF: backoff::Policy =
    backoff::Policy { first: Duration::from_secs(5), max: Duration::from_secs(300) };

/// A payload that has run for so long has found in the host what it needs, though it has not ended.
pub const HEALTHY_AFTER: Duration = Duration::from_secs(30);

/// How the host was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProbeResult {
    /// It can do what a task needs.
    Healthy,
    /// It cannot.
    Unhealthy,
}

/// Whether a fault is worth a word to the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultReport {
    /// The host was not known to be at fault.
    First,
    /// It was.
    Repeated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing is known against it, since then.
    Healthy {
        since: Instant,
    },
    Paused {
        until: Instant,
    },
    Probing,
}

/// How a host is tried that failed a task and was found fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostTrial {
    /// Since when it has been found fit. What was started before says nothing.
    pub since: Instant,
    /// How many tasks it may have at once.
    pub tasks: u32,
}

/// What is known of the host.
#[derive(Debug)]
pub struct HostHealth {
    state: State,
    backoff: Backoff,
    /// How many tasks at once; `None` is as many as there are slots.
    trial_tasks: Option<u32>,
}

impl HostHealth {
    /// A host about which nothing is known.
    #[must_use]
    pub const fn new() -> Self {
        Self { state: State::Healthy { since: Instant::ORIGIN }, backoff: Backoff::NEW, trial_tasks: None }
    }

    /// A task found the host at fault. The faults of several tasks at once are one.
    pub fn on_fault(&mut self, now: Instant, jitter: &mut Jitter) -> FaultReport {
        let news = if self.is_suspect() { FaultReport::Repeated } else { FaultReport::First };
        if matches!(self.state, State::Healthy { .. }) {
            self.pause(now, jitter);
        }
        self.trial_tasks = Some(1);
        news
    }

    /// A payload that was started at `started` ran to its own end, or for [`HEALTHY_AFTER`], on a host of `capacity` slots.
    pub fn on_success(&mut self, started: Instant, capacity: u32) {
        // One that was started before the fault says nothing of the host as it is since then.
        let State::Healthy { since } = self.state else { return };
        if started < since {
            return;
        }
        self.trial_tasks = self.trial_tasks.map(|tasks| tasks.saturating_add(1)).filter(|tasks| *tasks <= capacity);
        if self.trial_tasks.is_none() {
            self.backoff.reset();
        }
    }

    /// Whether the host is to be looked at now; the answer goes to [`HostHealth::on_probed`].
    pub fn start_probe(&mut self, now: Instant) -> bool {
        let due = matches!(self.state, State::Paused { until } if now >= until);
        if due {
            self.state = State::Probing;
        }
        due
    }

    /// The host was looked at.
    pub fn on_probed(&mut self, condition: ProbeResult, now: Instant, jitter: &mut Jitter) {
        match (self.state, condition) {
            (State::Probing, ProbeResult::Healthy) => self.state = State::Healthy { since: now },
            (State::Probing, ProbeResult::Unhealthy) => self.pause(now, jitter),
            (State::Healthy { .. } | State::Paused { .. }, _) => {}
        }
    }

    /// Whether nothing may be claimed.
    #[must_use]
    pub const fn is_unhealthy(&self) -> bool {
        !matches!(self.state, State::Healthy { .. })
    }

    /// Whether there was a fault that the tasks since then have not disproved.
    #[must_use]
    pub const fn is_suspect(&self) -> bool {
        self.trial_tasks.is_some()
    }

    /// The trial that the host is on, if it is on one.
    #[must_use]
    pub const fn trial(&self) -> Option<HostTrial> {
        match (self.state, self.trial_tasks) {
            (State::Healthy { since }, Some(tasks)) => Some(HostTrial { since, tasks }),
            _ => None,
        }
    }

    /// When it is to be looked at.
    #[must_use]
    pub const fn next_deadline(&self) -> Option<Instant> {
        match self.state {
            State::Paused { until } => Some(until),
            State::Healthy { .. } | State::Probing => None,
        }
    }

    fn pause(&mut self, now: Instant, jitter: &mut Jitter) {
        self.state = State::Paused { until: now.plus(self.backoff.wait(FAULT_BACKOFF, None, jitter)) };
    }
}

impl Default for HostHealth {
    fn default() -> Self {
        Self::new()
    }
}
