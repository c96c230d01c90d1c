//! The state of the worker: sources, slots, messages, claims, shutdown.
//!
//! `handle` takes events, `next_effect` returns what to do, `next_deadline` when to send [`Event::Tick`]. Every
//! effect that starts a call is answered by exactly one event; an answer about a claim already closed is ignored.

mod claiming;
mod claims;
mod event;
mod messages;
mod recent_set;
mod shutdown;
mod sources;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use super::backoff::{self, Backoff};
use super::claim::{self, ClaimState};
use super::host_health::HostHealth;
use super::id::{LocalToken, Run, ServiceId, SourceId};
use super::jitter::Jitter;
use super::poll::{self, NextCall, Poller};
use super::service_supervisor::ServiceAvailability;
use super::slots::{Slot, Slots};
use super::time::Instant;

use claiming::ClaimingConditions;
pub use claiming::{ClaimingBlocked, ClaimingState, ExitPolicy, HostResources, MinResources};
pub use event::{
    Alert, Effect, Event, ExitReason, GrantedClaim, OpenResult, PollResult, ReceivedMessage, RecoveredClaim,
    RecoveryResult,
};
use recent_set::RecentSet;

/// The protocol's own limit.
pub const POLL_MAX: u32 = 32;
pub const DELETE_ATTEMPTS_MAX: u32 = 6;
/// Together well within the minutes that a message stays invisible.
pub const DELETE_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(10) };
/// Consecutive failures of a source before the alert; two to three minutes.
pub const FAILURES_BEFORE_ALERT: u32 = 10;
/// Further failures before the alert is repeated; most of an hour.
pub const FAILURES_PER_REPEATED_ALERT: u32 = 100;
pub const ALERTED_MESSAGES_MAX: usize = 4096;
/// Ended runs to remember, so that none is claimed again; abandoned runs likewise.
pub const ENDED_RUNS_MAX: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerPolicy {
    pub capacity: u32,
    /// Tasks whose work runs elsewhere that are held beside `capacity`.
    pub launched_max: u32,
    /// The sleep when nothing is pending.
    pub poll_interval: Duration,
    pub claim: claim::ClaimPolicy,
    /// A dequeue count above this raises an alert.
    pub dequeue_alert: u32,
    /// Consecutive credential rejections that end the worker.
    pub max_auth_failures: u32,
    /// How long a drain may take before the remaining claims are released; `None` is unlimited.
    pub drain_deadline: Option<Duration>,
    pub exit_policy: ExitPolicy,
    pub min_resources: MinResources,
    /// What happens to running payloads once the host's termination is known.
    pub on_termination_notice: OnTerminationNotice,
}

/// What happens to running payloads once the host's termination is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnTerminationNotice {
    /// They may finish; the rest is released `margin` before the termination, or earlier where grace and reports need
    /// more.
    Finish { margin: Duration },
    /// They are released at once.
    Release,
}

impl OnTerminationNotice {
    /// When payloads with `grace` are stopped for a termination at `deadline`; `None` is at once.
    pub fn release_at(self, deadline: Instant, grace: Duration) -> Option<Instant> {
        match self {
            Self::Finish { margin } => Some(deadline.minus(margin.max(grace.saturating_add(claim::REPORT_RESERVE)))),
            Self::Release => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mode {
    Running,
    Draining { since: Instant },
    Releasing { deadline: Option<Instant> },
    Exited,
}

#[derive(Debug)]
struct ClaimEntry {
    source: SourceId,
    run: Run,
    slot: Option<Slot>,
    /// Its work runs elsewhere, and its slot was given back.
    is_launched: bool,
    state: ClaimState,
    /// The alert of I7 was raised.
    overlap_alerted: bool,
    /// The time at which its payload was started.
    started_at: Option<Instant>,
    /// Deleted when the claim request is answered.
    messages: Vec<LocalToken>,
    next_deadline: Option<Instant>,
}

/// A claim with processes that may remain.
#[derive(Debug)]
struct PendingCleanup {
    run: Run,
    /// Set when the claim is closed.
    slot: Option<Slot>,
}

/// The same at every reception. Two sources may use equal ids.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct MessageKey {
    source: SourceId,
    id: Box<str>,
}

#[derive(Debug)]
struct MessageEntry {
    key: MessageKey,
    dequeue_count: u32,
    delete_retry_at: Option<Instant>,
    retry: Backoff,
}

/// Two services may use equal ids for different tasks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct RunKey {
    service: ServiceId,
    run: Run,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceSpec {
    pub capabilities: poll::Capabilities,
    pub service: ServiceId,
}

#[derive(Debug)]
pub struct SourceState {
    service: ServiceId,
    pub poller: Poller,
    pub reserved_slots: Vec<Slot>,
    has_accepted_claim: bool,
    has_polled: bool,
    /// Claims under our worker id that are not ours, as reported last.
    pub foreign_claims: usize,
    pub availability: ServiceAvailability,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ClaimTimer {
    at: Instant,
    claim: LocalToken,
}

#[derive(Debug, Clone, Copy)]
pub struct ClaimView<'a> {
    pub claim: LocalToken,
    pub source: SourceId,
    pub run: &'a Run,
    pub state: &'a ClaimState,
}

#[derive(Debug)]
pub struct Worker {
    policy: WorkerPolicy,
    jitter: Jitter,
    mode: Mode,
    exit: ExitReason,
    started_at: Option<Instant>,
    /// The earliest notice applies.
    host_terminates_at: Option<Instant>,
    /// The release deadline has passed: only payloads are waited for.
    past_deadline: bool,
    conditions: ClaimingConditions,
    /// Set by [`Event::Drain`].
    drain_deadline: Option<Instant>,
    host_health: HostHealth,
    slots: Slots,
    launched: u32,
    sources: Vec<SourceState>,
    claims: BTreeMap<LocalToken, ClaimEntry>,
    claims_by_run: BTreeMap<RunKey, LocalToken>,
    cleanup_pending: BTreeMap<LocalToken, PendingCleanup>,
    messages: BTreeMap<LocalToken, MessageEntry>,
    /// Sources with a poll in flight that delays a command.
    awaited_polls: BTreeSet<SourceId>,
    timers: BTreeSet<ClaimTimer>,
    alerted_messages: RecentSet<MessageKey>,
    /// Runs with an outcome at the queue.
    resolved_runs: RecentSet<RunKey>,
    /// Runs given up here. Separate, since the queue may still count one as ours after thousands of others have
    /// ended.
    abandoned_runs: RecentSet<RunKey>,
    effects: VecDeque<Effect>,
}

impl Worker {
    /// `seed` determines all jitter.
    pub fn new(policy: WorkerPolicy, sources: &[SourceSpec], seed: u64) -> Self {
        let source_state = |spec: &SourceSpec| SourceState {
            service: spec.service,
            poller: Poller::new(policy.poll_interval, spec.capabilities),
            reserved_slots: Vec::new(),
            has_accepted_claim: false,
            has_polled: false,
            foreign_claims: 0,
            availability: ServiceAvailability::Up,
        };
        Self {
            jitter: Jitter::seeded(seed),
            mode: Mode::Running,
            exit: ExitReason::Drained,
            started_at: None,
            host_terminates_at: None,
            past_deadline: false,
            conditions: ClaimingConditions::default(),
            drain_deadline: None,
            host_health: HostHealth::default(),
            slots: Slots::new(policy.capacity),
            launched: 0,
            sources: sources.iter().map(source_state).collect(),
            claims: BTreeMap::new(),
            claims_by_run: BTreeMap::new(),
            cleanup_pending: BTreeMap::new(),
            messages: BTreeMap::new(),
            awaited_polls: BTreeSet::new(),
            timers: BTreeSet::new(),
            alerted_messages: RecentSet::with_capacity(ALERTED_MESSAGES_MAX),
            resolved_runs: RecentSet::with_capacity(ENDED_RUNS_MAX),
            abandoned_runs: RecentSet::with_capacity(ENDED_RUNS_MAX),
            effects: VecDeque::new(),
            policy,
        }
    }

    pub const fn free_slots(&self) -> u32 {
        self.slots.free()
    }

    /// Claims whose work runs elsewhere, which have no slot.
    pub const fn launched(&self) -> u32 {
        self.launched
    }

    pub fn sources(&self) -> &[SourceState] {
        &self.sources
    }

    pub const fn capacity(&self) -> u32 {
        self.slots.capacity()
    }

    /// Ended runs with processes that may remain.
    pub fn cleanup_pending(&self) -> impl Iterator<Item = &Run> {
        let ended = self.cleanup_pending.iter().filter(|(claim, _)| !self.claims.contains_key(claim));
        ended.map(|(_, pending)| &pending.run)
    }

    pub fn claims(&self) -> impl Iterator<Item = ClaimView<'_>> {
        self.claims.keys().map(|claim| self.claim(*claim))
    }

    /// An open claim.
    pub fn claim(&self, claim: LocalToken) -> ClaimView<'_> {
        let ClaimEntry { source, run, state, .. } = &self.claims[&claim];
        ClaimView { claim, source: *source, run, state }
    }

    pub fn is_stopping(&self) -> bool {
        self.mode != Mode::Running
    }

    /// At the start; later [`Event::ServiceAvailabilityChanged`] applies.
    pub fn set_availability(&mut self, source: SourceId, serving: ServiceAvailability) {
        self.sources[source.index()].availability = serving;
    }

    /// Existing claims keep the policy that they began with.
    fn reconfigure(&mut self, policy: WorkerPolicy) {
        self.slots.resize(policy.capacity);
        self.policy = policy;
        self.space_polls();
    }

    /// To be called with [`Event::Tick`] at the start and at each [`Worker::next_deadline`].
    pub fn handle(&mut self, event: Event, now: Instant) {
        if self.mode == Mode::Exited {
            return;
        }
        self.started_at.get_or_insert(now);
        match event {
            Event::ClaimsRecovered(list) => self.on_claims_recovered(list, now),
            Event::UnreadPoll { source, age: ago } => {
                self.sources[source.index()].poller.set_unread_poll_of_previous_process(ago, now);
            }
            Event::Opened { source, sent_at, answer } => self.on_opened(source, sent_at, answer, now),
            Event::Polled { source, answer } => self.on_polled(source, answer, now),
            Event::Recovered { source, answer } => self.on_recovered(source, answer, now),
            Event::Deleted { message, answer } => self.on_deleted(message, answer, now),
            Event::Claim(claim, event) => self.on_claim_event(claim, event, now),
            Event::Launched { claim } => self.on_launched(claim),
            Event::CleanupPending { claim } => self.on_cleanup_pending(claim),
            Event::CleanupDone { claim } => {
                self.slots.release(self.cleanup_pending.remove(&claim).and_then(|pending| pending.slot));
            }
            Event::Pause { until } => self.pause(until),
            Event::Resume => self.resume(),
            Event::ServiceAvailabilityChanged { source, availability } => self.set_availability(source, availability),
            Event::HostProbed(condition) => self.host_health.on_probed(condition, now, &mut self.jitter),
            Event::ResourcesMeasured(resources) => self.on_resources_measured(resources),
            Event::WorkDirLost => self.on_work_dir_lost(),
            Event::Reconfigured(policy) => self.reconfigure(*policy),
            Event::Drain { deadline } => {
                self.drain_deadline = deadline.or(self.drain_deadline);
                self.drain(ExitReason::Drained, now);
            }
            Event::HandOver(claims) => self.hand_over(&claims, now),
            Event::Release { deadline } => self.release_all(deadline, now),
            Event::TerminationNotice { deadline } => self.on_termination_notice(deadline, now),
            Event::PoolDecided(decision) => self.on_pool_decided(decision, now),
            Event::Abort => self.exit_with(ExitReason::Aborted),
            Event::Tick => self.on_tick(now),
        }
        self.advance(now);
    }

    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// The time at which to send [`Event::Tick`].
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.mode == Mode::Exited {
            return None;
        }
        let claims = self.timers.first().map(|timer| timer.at);
        let deletes = self.messages.values().filter_map(|kept| kept.delete_retry_at).min();
        let polls = if self.may_poll() { self.next_poll() } else { self.next_closing_at() };
        let way_out = match self.mode {
            Mode::Draining { since } => self.drain_ends_at(since),
            Mode::Releasing { deadline } => deadline.filter(|_| !self.past_deadline),
            Mode::Running => self.next_running_deadline(),
            Mode::Exited => None,
        };
        [claims, deletes, polls, way_out].into_iter().flatten().min()
    }

    /// A source that could take the slots of an open poll may need another call first.
    fn next_closing_at(&self) -> Option<Instant> {
        let is_held = self.is_claiming() && self.sources.iter().any(|source| source.poller.is_long_polling());
        let calls = self.sources.iter().filter(|source| is_held && source.is_pollable());
        let calls = calls.filter_map(|source| source.poller.next_slotless_call());
        calls.chain(self.next_closing().filter(|_| is_held).map(|closing| closing.at)).min()
    }

    fn next_poll(&self) -> Option<Instant> {
        let due = |source: &SourceState| match source.poller.next_call(Instant::ORIGIN) {
            NextCall::NotBefore(at) => Some(at),
            NextCall::Open | NextCall::Recover | NextCall::Poll(_) => Some(Instant::ORIGIN),
            NextCall::InFlight => None,
        };
        self.sources.iter().filter(|source| source.is_pollable()).filter_map(due).min()
    }
}

impl SourceState {
    /// The time of its next poll, if it waits for that.
    pub fn next_poll_at(&self, now: Instant) -> Option<Instant> {
        match self.poller.next_call(now) {
            NextCall::NotBefore(at) if self.availability == ServiceAvailability::Up => Some(at),
            NextCall::NotBefore(_) | NextCall::Open | NextCall::Recover | NextCall::Poll(_) | NextCall::InFlight => {
                None
            }
        }
    }

    /// While no sidecar can run its tasks, only claims of a previous process are looked after.
    const fn is_pollable(&self) -> bool {
        matches!(self.availability, ServiceAvailability::Up) || self.poller.recovery_due
    }
}
