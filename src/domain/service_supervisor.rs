//! A service beside the tasks, which a handler forwards them to: asked after, and, where the worker starts it, ended when it
//! does not answer and started again, later each time it did not last.

use alloc::collections::VecDeque;
use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;

/// The pauses between two starts.
pub const RESTART_BACKOFF: backoff::Policy =
    backoff::Policy { first: Duration::from_secs(1), max: Duration::from_secs(60) };

/// A service that was well for so long starts again with the shortest pause.
pub const STABLE_AFTER: Duration = Duration::from_secs(60);

/// Whether tasks can be forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ServiceAvailability {
    /// They can.
    Up,
    /// They cannot at present, and none is claimed for it.
    Down,
}

/// Who starts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ManagedBy {
    /// This worker.
    Worker,
    /// Somebody else: it is only asked after.
    External,
}

/// What counts as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServicePolicy {
    /// Who starts it.
    pub managed_by: ManagedBy,
    /// How long a start may take until it answers.
    pub startup_timeout: Duration,
    /// How often it is asked after while it does not answer well.
    pub startup_check_interval: Duration,
    /// How often it is asked after once it is well.
    pub health_interval: Duration,
    /// How many times in a row it may not answer well.
    pub failures_max: u32,
}

/// How it answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthCheckResult {
    /// As it should.
    Healthy,
    /// Otherwise, or not at all.
    Unhealthy,
    /// Not in time, while it was at work: that says nothing.
    Busy,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Its process runs.
    Started,
    /// It could not be started.
    StartFailed,
    /// Its process has ended.
    Exited,
    /// It was asked after.
    HealthChecked(HealthCheckResult),
    /// A task could not be forwarded: nobody was there to take it.
    Unreachable,
    /// It broke off, and did not answer well when it was looked at.
    ConnectionBroken,
    /// Time passed.
    Tick,
}

/// Why it is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// It did not answer well within [`ServicePolicy::startup_timeout`].
    StartupTimeout,
    /// It did not answer well [`ServicePolicy::failures_max`] times in a row.
    Unhealthy,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Start its process; the answer is [`Event::Started`] or [`Event::StartFailed`].
    Start,
    /// Ask after it; the answer is [`Event::HealthChecked`].
    CheckHealth,
    /// End its process; the answer is [`Event::Exited`].
    Stop(StopReason),
    /// Tasks may be forwarded.
    Up,
    /// Tasks may not be forwarded.
    Down,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    BackingOff {
        start_at: Instant,
    },
    Starting,
    AwaitingHealthy {
        deadline: Option<Instant>,
        check_at: Option<Instant>,
    },
    Healthy {
        since: Instant,
        check_at: Option<Instant>,
        failures: u32,
    },
    /// It was well, and may be on its way out.
    Suspect {
        check_at: Option<Instant>,
        failures: u32,
    },
    Stopping,
}

/// The service.
#[derive(Debug)]
pub struct ServiceSupervisor {
    policy: ServicePolicy,
    state: State,
    backoff: Backoff,
    jitter: Jitter,
    effects: VecDeque<Effect>,
}

impl ServiceSupervisor {
    /// One that is to be started, or asked after, at once.
    #[must_use]
    pub const fn new(policy: ServicePolicy, seed: u64, now: Instant) -> Self {
        let state = match policy.managed_by {
            ManagedBy::Worker => State::BackingOff { start_at: now },
            ManagedBy::External => State::AwaitingHealthy { deadline: None, check_at: Some(now) },
        };
        Self { policy, state, backoff: Backoff::NEW, jitter: Jitter::seeded(seed), effects: VecDeque::new() }
    }

    /// How often in a row it did not last.
    #[must_use]
    pub const fn consecutive_failures(&self) -> u32 {
        self.backoff.tries()
    }

    /// When it is started next; `None` unless that is waited for.
    #[must_use]
    pub const fn starts_at(&self) -> Option<Instant> {
        match self.state {
            State::BackingOff { start_at } => Some(start_at),
            State::Starting
            | State::AwaitingHealthy { .. }
            | State::Healthy { .. }
            | State::Suspect { .. }
            | State::Stopping => None,
        }
    }

    /// Takes in what happened. What does not fit the state is of a process that is gone, and changes nothing.
    pub fn handle(&mut self, event: Event, now: Instant) {
        match (self.state, event) {
            (State::Starting, Event::Started) => self.await_healthy(now, now),
            (State::Starting, Event::StartFailed)
            | (State::AwaitingHealthy { .. } | State::Suspect { .. } | State::Stopping, Event::Exited) => {
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
            (State::Healthy { since, failures: misses, .. }, Event::ConnectionBroken) => {
                self.mark_down(since, now);
                self.state = State::Suspect { check_at: Some(now), failures: misses };
            }
            (
                State::Suspect { failures: misses, .. },
                Event::HealthChecked(health @ (HealthCheckResult::Unhealthy | HealthCheckResult::Busy)),
            ) => {
                self.on_suspect_checked(misses, health, now);
            }
            (
                State::AwaitingHealthy { .. } | State::Suspect { .. },
                Event::HealthChecked(HealthCheckResult::Healthy),
            ) => {
                self.effects.push_back(Effect::Up);
                self.state =
                    State::Healthy { since: now, check_at: Some(now.plus(self.policy.health_interval)), failures: 0 };
            }
            (
                State::AwaitingHealthy { deadline: until, .. },
                Event::HealthChecked(HealthCheckResult::Unhealthy | HealthCheckResult::Busy),
            ) => {
                self.state = State::AwaitingHealthy {
                    deadline: until,
                    check_at: Some(now.plus(self.policy.startup_check_interval)),
                };
            }
            (State::Healthy { since, failures: misses, .. }, Event::HealthChecked(health)) => {
                self.on_health_checked(since, misses, health, now)
            }
            (
                State::BackingOff { .. }
                | State::Starting
                | State::AwaitingHealthy { .. }
                | State::Suspect { .. }
                | State::Stopping,
                _,
            )
            | (State::Healthy { .. }, Event::Started | Event::StartFailed | Event::Tick) => {}
        }
        self.perform_due(now);
    }

    fn on_health_checked(&mut self, since: Instant, misses: u32, health: HealthCheckResult, now: Instant) {
        let (misses, again) = match health {
            HealthCheckResult::Healthy => (0, self.policy.health_interval),
            HealthCheckResult::Busy => (misses, self.policy.health_interval),
            HealthCheckResult::Unhealthy => (misses + 1, self.policy.startup_check_interval),
        };
        if misses < self.policy.failures_max {
            self.state = State::Healthy { since, check_at: Some(now.plus(again)), failures: misses };
            return;
        }
        self.mark_down(since, now);
        self.on_unhealthy(now);
    }

    fn on_suspect_checked(&mut self, misses: u32, health: HealthCheckResult, now: Instant) {
        let misses = if health == HealthCheckResult::Unhealthy { misses + 1 } else { misses };
        if misses < self.policy.failures_max {
            self.state =
                State::Suspect { check_at: Some(now.plus(self.policy.startup_check_interval)), failures: misses };
        } else {
            self.on_unhealthy(now);
        }
    }

    /// It did not answer well often enough in a row.
    fn on_unhealthy(&mut self, now: Instant) {
        match self.policy.managed_by {
            ManagedBy::Worker => self.stop(StopReason::Unhealthy),
            ManagedBy::External => self.await_healthy(now, now.plus(self.policy.startup_check_interval)),
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
            State::BackingOff { start_at } => Some(start_at),
            State::AwaitingHealthy { deadline: until, check_at: ask_at } => [until, ask_at].into_iter().flatten().min(),
            State::Healthy { check_at: ask_at, .. } | State::Suspect { check_at: ask_at, .. } => ask_at,
            State::Starting | State::Stopping => None,
        }
    }

    fn perform_due(&mut self, now: Instant) {
        match &mut self.state {
            State::BackingOff { start_at } if now >= *start_at => {
                self.state = State::Starting;
                self.effects.push_back(Effect::Start);
            }
            State::AwaitingHealthy { deadline: until, .. } if until.is_some_and(|until| now >= until) => {
                self.stop(StopReason::StartupTimeout)
            }
            State::AwaitingHealthy { check_at: ask_at, .. }
            | State::Healthy { check_at: ask_at, .. }
            | State::Suspect { check_at: ask_at, .. }
                if ask_at.is_some_and(|at| now >= at) =>
            {
                *ask_at = None;
                self.effects.push_back(Effect::CheckHealth);
            }
            State::BackingOff { .. }
            | State::Starting
            | State::AwaitingHealthy { .. }
            | State::Healthy { .. }
            | State::Suspect { .. }
            | State::Stopping => {}
        }
    }

    /// It was well, and is not.
    fn mark_down(&mut self, since: Instant, now: Instant) {
        if now.since(since) >= STABLE_AFTER {
            self.backoff.reset();
        }
        self.effects.push_back(Effect::Down);
    }

    /// It is expected to answer.
    fn await_healthy(&mut self, now: Instant, ask_at: Instant) {
        let until = match self.policy.managed_by {
            ManagedBy::Worker => Some(now.plus(self.policy.startup_timeout)),
            ManagedBy::External => None,
        };
        self.state = State::AwaitingHealthy { deadline: until, check_at: Some(ask_at) };
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
