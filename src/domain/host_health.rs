//! Whether this host can run tasks. A task that fails because of the host (no work directory, no process, no disk) is
//! released, which costs it one of its retries. So claiming pauses at the first host fault, for longer each time, and
//! resumes only after the host was probed and found healthy (I33).

use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;

/// The longest wait is how often a broken host that passes the probe costs a task one of its retries.
pub const FAULT_BACKOFF: backoff::Policy =
    backoff::Policy { first: Duration::from_secs(5), max: Duration::from_secs(300) };

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProbeResult {
    Healthy,
    Unhealthy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Healthy { since: Instant },
    Paused { until: Instant },
    Probing,
}

#[derive(Debug)]
pub struct HostHealth {
    state: State,
    backoff: Backoff,
}

impl HostHealth {
    /// Counts simultaneous faults of several tasks as one. Returns whether it is the first fault.
    pub fn on_fault(&mut self, now: Instant, jitter: &mut Jitter) -> bool {
        let first = self.backoff.tries() == 0;
        if matches!(self.state, State::Healthy { .. }) {
            self.pause(now, jitter);
        }
        first
    }

    /// A payload started at `started` ended by itself: the next fault is a new one.
    pub fn on_success(&mut self, started: Instant) {
        // A payload started before the last fault says nothing about the host since then.
        if matches!(self.state, State::Healthy { since } if started >= since) {
            self.backoff.reset();
        }
    }

    /// Whether to probe the host now; the answer goes to [`HostHealth::on_probed`].
    pub fn start_probe(&mut self, now: Instant) -> bool {
        let due = matches!(self.state, State::Paused { until } if now >= until);
        if due {
            self.state = State::Probing;
        }
        due
    }

    pub fn on_probed(&mut self, condition: ProbeResult, now: Instant, jitter: &mut Jitter) {
        match (self.state, condition) {
            (State::Probing, ProbeResult::Healthy) => self.state = State::Healthy { since: now },
            (State::Probing, ProbeResult::Unhealthy) => self.pause(now, jitter),
            (State::Healthy { .. } | State::Paused { .. }, _) => {}
        }
    }

    pub const fn is_unhealthy(&self) -> bool {
        !matches!(self.state, State::Healthy { .. })
    }

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
        Self { state: State::Healthy { since: Instant::ORIGIN }, backoff: Backoff::NEW }
    }
}
