//! When a worker exits by itself, and when it does not claim although it has free slots: paused, or the host is short
//! of a resource.
//!
//! A limit takes effect between polls only. A worker that has reached one starts no poll any more, executes what the
//! polls in flight return, and drains after the last of them. So no claim is caught between the decision and the
//! exit.

use core::time::Duration;

use super::{Alert, Effect, ExitReason, Mode, Worker};
use crate::id::SourceId;
use crate::service_supervisor::ServiceAvailability;
use crate::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExitPolicy {
    /// After holding no claim for this long. Paused time does not count.
    pub exit_when_idle: Option<Duration>,
    pub max_tasks: Option<u64>,
    /// After running for this long.
    pub max_uptime: Option<Duration>,
}

/// Resources required for claiming. Zero is no bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MinResources {
    /// Bytes free in the file system of the work directory.
    pub disk: u64,
    /// Bytes of available memory.
    pub memory: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostResources {
    /// `None` where it cannot be measured.
    pub disk: Option<u64>,
    /// `None` where it cannot be measured.
    pub memory: Option<u64>,
}

/// Why the worker does not poll although slots are free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClaimingBlocked {
    Paused {
        /// `None` is until resumed.
        until: Option<Instant>,
    },
    LowDisk {
        /// Bytes.
        free: u64,
        /// Bytes.
        min: u64,
    },
    LowMemory {
        /// Bytes.
        free: u64,
        /// Bytes.
        min: u64,
    },
    HostUnhealthy {
        /// The time of the next probe of the host; `None` while it is being probed.
        until: Option<Instant>,
    },
    /// The sidecars of all sources are down.
    ServiceDown,
}

/// What the worker does about claiming, for the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimingState {
    /// Polling, or waiting for the next poll.
    Polling,
    AtCapacity,
    Blocked(ClaimingBlocked),
    /// A limit is reached; the worker exits when its polls are answered.
    Exiting(ExitReason),
    Draining {
        since: Instant,
        /// The time at which the remaining claims are released.
        deadline: Option<Instant>,
    },
    Releasing {
        deadline: Option<Instant>,
    },
    Exited,
}

#[derive(Debug, Default)]
pub(super) struct ClaimingConditions {
    idle_since: Option<Instant>,
    /// The manager of the pool needs this worker, idle or not.
    pub(super) needed_until: Option<Instant>,
    /// The credentials expire, and are not renewed.
    pub(super) leave_by: Option<Instant>,
    pub(super) granted_count: u64,
    paused: Option<Option<Instant>>,
    shortage: Option<ClaimingBlocked>,
    work_dir_lost: bool,
    exiting: Option<ExitReason>,
}

impl MinResources {
    fn shortage(&self, resources: HostResources) -> Option<ClaimingBlocked> {
        match resources {
            HostResources { disk: Some(free), .. } if free < self.disk => {
                Some(ClaimingBlocked::LowDisk { free, min: self.disk })
            }
            HostResources { memory: Some(free), .. } if free < self.memory => {
                Some(ClaimingBlocked::LowMemory { free, min: self.memory })
            }
            HostResources { .. } => None,
        }
    }
}

impl Worker {
    pub fn claiming(&self) -> ClaimingState {
        match self.mode {
            Mode::Draining { since } => ClaimingState::Draining { since, deadline: self.drain_ends_at(since) },
            Mode::Releasing { deadline } => ClaimingState::Releasing { deadline },
            Mode::Exited => ClaimingState::Exited,
            Mode::Running => match (self.conditions.exiting, self.claiming_blocked()) {
                (Some(exit), _) => ClaimingState::Exiting(exit),
                (None, Some(hold)) => ClaimingState::Blocked(hold),
                (None, None) if self.all_services_down() => ClaimingState::Blocked(ClaimingBlocked::ServiceDown),
                (None, None) if self.is_full() => ClaimingState::AtCapacity,
                (None, None) => ClaimingState::Polling,
            },
        }
    }

    fn all_services_down(&self) -> bool {
        !self.sources.is_empty() && self.sources.iter().all(|source| source.availability == ServiceAvailability::Down)
    }

    fn is_full(&self) -> bool {
        self.slots.free() == 0 && self.sources.iter().all(|source| source.reserved_slots.is_empty())
    }

    pub(super) const fn pause(&mut self, until: Option<Instant>) {
        self.conditions.paused = Some(until);
    }

    pub(super) const fn resume(&mut self) {
        self.conditions.paused = None;
        self.conditions.idle_since = None;
    }

    pub(super) fn on_resources_measured(&mut self, resources: HostResources) {
        self.conditions.shortage = self.policy.min_resources.shortage(resources);
    }

    /// I27: nothing is started that the next process would not know of. Running claims are finished; the next worker
    /// creates the directory again.
    pub(super) fn on_work_dir_lost(&mut self) {
        if !core::mem::replace(&mut self.conditions.work_dir_lost, true) {
            self.effects.push_back(Effect::Alert(Alert::WorkDirLost));
        }
    }

    fn claiming_blocked(&self) -> Option<ClaimingBlocked> {
        let paused = self.conditions.paused.map(|until| ClaimingBlocked::Paused { until });
        let unfit = self
            .host_health
            .is_unhealthy()
            .then(|| ClaimingBlocked::HostUnhealthy { until: self.host_health.next_deadline() });
        paused.or(self.conditions.shortage).or(unfit)
    }

    pub(super) fn claim_allowance(&self) -> u32 {
        self.policy.exit_policy.max_tasks.map_or(u32::MAX, |max| {
            let requested =
                self.claims.values().filter(|entry| entry.slot.is_some() && !entry.state.is_granted()).count();
            let taken = self.conditions.granted_count.saturating_add((self.reserved_slots() + requested) as u64);
            u32::try_from(max.saturating_sub(taken)).unwrap_or(u32::MAX)
        })
    }

    fn reserved_slots(&self) -> usize {
        self.sources.iter().map(|source| source.reserved_slots.len()).sum()
    }

    pub(super) fn advance_running(&mut self, now: Instant) {
        let began = self.started_at.unwrap_or(now);
        if self.conditions.paused.flatten().is_some_and(|until| now >= until) {
            self.resume();
        }
        if self.host_health.start_probe(now) {
            self.effects.push_back(Effect::ProbeHost);
        }
        // A source that rejects the credentials cannot tell whether tasks are pending.
        let refused = self.sources.iter().any(|source| source.poller.denied);
        if !self.claims.is_empty() || self.conditions.paused.is_some() || refused {
            self.conditions.idle_since = None;
        }
        let idle = if self.claims.is_empty() { Some(*self.conditions.idle_since.get_or_insert(now)) } else { None };
        let exit = self.policy.exit_policy;
        let over = |since: Instant, span: Option<Duration>| span.is_some_and(|span| now >= since.plus(span));
        let too_old = over(began, exit.max_uptime);
        let lost = self.conditions.work_dir_lost;
        self.conditions.exiting = if lost {
            Some(ExitReason::WorkDirLost)
        } else if too_old || exit.max_tasks.is_some_and(|most| self.conditions.granted_count >= most) {
            Some(ExitReason::LimitReached)
        } else if self.conditions.paused.is_none()
            && self.conditions.needed_until.is_none_or(|until| now >= until)
            && idle.is_some_and(|since| over(since, exit.exit_when_idle))
        {
            Some(ExitReason::Idle)
        } else {
            None
        };
        match self.conditions.exiting {
            // The last task before `max_tasks` is not limited in time.
            Some(exit) if self.is_between_polls() && (lost || too_old || self.claims.is_empty()) => {
                self.drain(exit, now);
                self.advance(now);
            }
            None if self.claiming_blocked().is_none() => self.start_polls(now),
            Some(_) | None => {}
        }
    }

    /// True if no call in flight may still grant a claim.
    fn is_between_polls(&self) -> bool {
        self.sources.iter().all(|source| !source.poller.is_polling())
            && self.claims.values().all(|entry| entry.state.is_granted() || entry.slot.is_none())
    }

    /// The time at which claiming changes by itself.
    pub(super) fn next_running_deadline(&self) -> Option<Instant> {
        if self.conditions.exiting.is_some() {
            return None;
        }
        let uptime = self.started_at.zip(self.policy.exit_policy.max_uptime).map(|(began, span)| began.plus(span));
        let idle = self.conditions.idle_since.filter(|_| self.conditions.paused.is_none() && self.claims.is_empty());
        let idle = idle.zip(self.policy.exit_policy.exit_when_idle).map(|(since, span)| since.plus(span));
        let idle = idle.map(|at| self.conditions.needed_until.map_or(at, |until| at.max(until)));
        [uptime, idle, self.conditions.paused.flatten(), self.host_health.next_deadline()].into_iter().flatten().min()
    }

    /// Whether grants are kept. A poll in flight when the worker stopped or ran short of a resource may still grant
    /// claims; they are released, which costs a retry. A pause keeps them, except those of a connection-scoped
    /// source, whose release costs nothing.
    pub(super) fn accepts_grants(&self, source: SourceId, now: Instant) -> bool {
        let poller = &self.sources[source.index()].poller;
        let paused = self.conditions.paused.is_some() && poller.capabilities.connection_scoped;
        let fit =
            self.conditions.shortage.is_none() && !self.conditions.work_dir_lost && !self.host_health.is_unhealthy();
        self.mode == Mode::Running && fit && !paused && !poller.is_access_denied(now)
    }

    /// Unclaimed messages are left alone, which costs no retry.
    pub(super) fn accepts_messages(&self, source: SourceId, now: Instant) -> bool {
        self.accepts_grants(source, now) && self.conditions.paused.is_none()
    }

    pub(super) fn may_poll(&self) -> bool {
        self.is_claiming() && self.slots.free() > 0 && self.claim_allowance() > 0
    }

    /// True if polls follow as slots become free.
    pub(super) fn is_claiming(&self) -> bool {
        self.mode == Mode::Running && self.conditions.exiting.is_none() && self.claiming_blocked().is_none()
    }
}
