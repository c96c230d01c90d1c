//! Supervises a sidecar: health checks, and for one that the worker starts also stop and restart with backoff.

use alloc::collections::VecDeque;
use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;

pub const RESTART_BACKOFF: backoff::Policy =
    backoff::Policy { first: Duration::from_secs(1), max: Duration::from_secs(60) };

/// A service healthy for this long restarts with the shortest pause.
pub const STABLE_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ServiceAvailability {
    Up,
    /// No tasks are claimed for it.
    Down,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ManagedBy {
    Worker,
    /// It is only checked.
    External,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServicePolicy {
    pub managed_by: ManagedBy,
    /// The time from the start to the first healthy answer.
    pub startup_timeout: Duration,
    /// Between checks while it is not healthy.
    pub startup_check_interval: Duration,
    /// Between checks once it is healthy.
    pub health_interval: Duration,
    /// Consecutive failed checks before it counts as down.
    pub failures_max: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthCheckResult {
    Healthy,
    Unhealthy,
    /// No answer in time while it worked on a task, which says nothing.
    Busy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    Started,
    StartFailed,
    Exited,
    HealthChecked(HealthCheckResult),
    /// The connection of a task was refused, or broke before the answer.
    Unreachable,
    Tick,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// It did not answer well within [`ServicePolicy::startup_timeout`].
    StartupTimeout,
    /// It did not answer well [`ServicePolicy::failures_max`] times in a row.
    Unhealthy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Answered by [`Event::Started`] or [`Event::StartFailed`].
    Start,
    /// Answered by [`Event::HealthChecked`].
    CheckHealth,
    /// Answered by [`Event::Exited`].
    Stop(StopReason),
    Up,
    Down,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    BackingOff { start_at: Instant },
    Starting,
    AwaitingHealthy { deadline: Option<Instant>, check_at: Option<Instant> },
    Healthy { since: Instant, check_at: Option<Instant>, failures: u32 },
    Stopping,
}

#[derive(Debug)]
pub struct ServiceSupervisor {
    policy: ServicePolicy,
    state: State,
    backoff: Backoff,
    jitter: Jitter,
    effects: VecDeque<Effect>,
}

impl ServiceSupervisor {
    pub const fn new(policy: ServicePolicy, seed: u64, now: Instant) -> Self {
        let state = match policy.managed_by {
            ManagedBy::Worker => State::BackingOff { start_at: now },
            ManagedBy::External => State::AwaitingHealthy { deadline: None, check_at: Some(now) },
        };
        Self { policy, state, backoff: Backoff::NEW, jitter: Jitter::seeded(seed), effects: VecDeque::new() }
    }

    pub const fn consecutive_failures(&self) -> u32 {
        self.backoff.tries()
    }

    /// An event that does not fit the state belongs to an earlier process and changes nothing.
    pub fn handle(&mut self, event: Event, now: Instant) {
        match (self.state, event) {
            (State::Starting, Event::Started) => self.await_healthy(now, now),
            (State::Starting, Event::StartFailed)
            | (State::AwaitingHealthy { .. } | State::Stopping, Event::Exited) => {
                self.back_off(now);
            }
            (State::Healthy { since, .. }, Event::Exited) => {
                self.mark_down(since, now);
                self.back_off(now);
            }
            (State::Healthy { since, .. }, Event::Unreachable) => {
                self.mark_down(since, now);
                self.await_healthy(now, now);
            }
            (State::AwaitingHealthy { .. }, Event::HealthChecked(HealthCheckResult::Healthy)) => {
                self.effects.push_back(Effect::Up);
                self.state =
                    State::Healthy { since: now, check_at: Some(now.plus(self.policy.health_interval)), failures: 0 };
            }
            (
                State::AwaitingHealthy { deadline, .. },
                Event::HealthChecked(HealthCheckResult::Unhealthy | HealthCheckResult::Busy),
            ) => {
                self.state =
                    State::AwaitingHealthy { deadline, check_at: Some(now.plus(self.policy.startup_check_interval)) };
            }
            (State::Healthy { since, failures, .. }, Event::HealthChecked(health)) => {
                self.on_health_checked(since, failures, health, now)
            }
            (State::BackingOff { .. } | State::Starting | State::AwaitingHealthy { .. } | State::Stopping, _)
            | (State::Healthy { .. }, Event::Started | Event::StartFailed | Event::Tick) => {}
        }
        self.perform_due(now);
    }

    fn on_health_checked(&mut self, since: Instant, failures: u32, health: HealthCheckResult, now: Instant) {
        let (failures, again) = match health {
            HealthCheckResult::Healthy => (0, self.policy.health_interval),
            HealthCheckResult::Busy => (failures, self.policy.health_interval),
            HealthCheckResult::Unhealthy => (failures + 1, self.policy.startup_check_interval),
        };
        if failures < self.policy.failures_max {
            self.state = State::Healthy { since, check_at: Some(now.plus(again)), failures };
            return;
        }
        self.mark_down(since, now);
        match self.policy.managed_by {
            ManagedBy::Worker => self.stop(StopReason::Unhealthy),
            ManagedBy::External => self.await_healthy(now, now.plus(self.policy.startup_check_interval)),
        }
    }

    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        match self.state {
            State::BackingOff { start_at } => Some(start_at),
            State::AwaitingHealthy { deadline, check_at } => [deadline, check_at].into_iter().flatten().min(),
            State::Healthy { check_at, .. } => check_at,
            State::Starting | State::Stopping => None,
        }
    }

    fn perform_due(&mut self, now: Instant) {
        match &mut self.state {
            State::BackingOff { start_at } if now >= *start_at => {
                self.state = State::Starting;
                self.effects.push_back(Effect::Start);
            }
            State::AwaitingHealthy { deadline, .. } if deadline.is_some_and(|deadline| now >= deadline) => {
                self.stop(StopReason::StartupTimeout)
            }
            State::AwaitingHealthy { check_at, .. } | State::Healthy { check_at, .. }
                if check_at.is_some_and(|at| now >= at) =>
            {
                *check_at = None;
                self.effects.push_back(Effect::CheckHealth);
            }
            State::BackingOff { .. }
            | State::Starting
            | State::AwaitingHealthy { .. }
            | State::Healthy { .. }
            | State::Stopping => {}
        }
    }

    fn mark_down(&mut self, since: Instant, now: Instant) {
        if now.since(since) >= STABLE_AFTER {
            self.backoff.reset();
        }
        self.effects.push_back(Effect::Down);
    }

    fn await_healthy(&mut self, now: Instant, check_at: Instant) {
        let deadline = match self.policy.managed_by {
            ManagedBy::Worker => Some(now.plus(self.policy.startup_timeout)),
            ManagedBy::External => None,
        };
        self.state = State::AwaitingHealthy { deadline, check_at: Some(check_at) };
    }

    fn stop(&mut self, why: StopReason) {
        self.state = State::Stopping;
        self.effects.push_back(Effect::Stop(why));
    }

    fn back_off(&mut self, now: Instant) {
        let pause = self.backoff.wait(RESTART_BACKOFF, None, &mut self.jitter);
        self.state = State::BackingOff { start_at: now.plus(pause) };
    }
}
