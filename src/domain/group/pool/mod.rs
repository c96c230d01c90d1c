//! The groups of one pool and their request queues: what is wanted, what the broker is known to have, and the next
//! step for each queue where the two differ.
//!
//! One step per key is in flight at a time, and what was learned over a connection is forgotten with it. A queue is
//! deleted only if it was unbound for the whole stop delay, no worker of the group is left, and the broker reported
//! it empty and without consumers; one that holds requests makes its group active again (I31).

mod depth;
mod wait;

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use core::time::Duration;

pub use depth::{DepthSample, NextTaker};
pub use wait::QueueWait;

use super::tracker::{self, Tracker};
use super::{GroupPhase, Key};
use crate::backoff::{self, Backoff};
use crate::jitter::Jitter;
use crate::time::Instant;

/// Before a failed step is retried.
pub const STEP_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(200), max: Duration::from_secs(30) };

/// Between inspections of a queue that still has consumers.
pub const INSPECT_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QueueStep {
    /// Declare and bind. Answered by [`StepResult::Done`].
    Bind,
    /// Unbind, if it exists. Answered by [`StepResult::Done`].
    Unbind,
    /// Inspect. Answered by [`StepResult::Contents`] or [`StepResult::NotFound`].
    Inspect,
    /// Delete. Answered by [`StepResult::Done`], or [`StepResult::Contents`] where the broker refuses since it is not
    /// empty.
    Delete,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StepResult {
    Done,
    NotFound,
    Contents {
        /// Requests not held by any worker.
        ready: u32,
        consumers: u32,
    },
    Failed,
    /// The broker does not allow it, and would not the next moment.
    Refused,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The broker is reachable, and the pool's exchanges exist.
    Connected,
    Disconnected,
    /// A request, a queue with requests that wait or are held, a report of a worker, or a queue that was found. Counts for
    /// `extra` longer than usual.
    Demand {
        key: Key,
        extra: Duration,
    },
    /// A request of this key was returned although its queue is believed to be bound.
    Unroutable(Key),
    StepFinished {
        key: Key,
        step: QueueStep,
        result: StepResult,
    },
    /// The number of workers of a key, in any state.
    Workers {
        key: Key,
        count: u32,
    },
    /// The requests that wait in the queue of a key.
    Depth {
        key: Key,
        ready: u32,
    },
    Tick,
}

/// A step to run now.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Effect {
    pub key: Key,
    pub step: QueueStep,
}

impl Event {
    pub const fn demand(key: Key) -> Self {
        Self::Demand { key, extra: Duration::ZERO }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
enum BindingState {
    #[default]
    Unknown,
    Absent,
    Bound,
    Unbound {
        since: Instant,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct GroupQueue {
    binding: BindingState,
    in_flight: Option<QueueStep>,
    backoff: Backoff,
    not_before: Instant,
    /// The result of the last inspection, unless something changed since.
    inspection: Option<InspectionState>,
    workers: u32,
    depth: Option<DepthSample>,
    /// Since the depth was counted.
    is_changed: bool,
    target: Option<GroupPhase>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum InspectionState {
    Empty,
    /// Something changed during the inspection: its answer is void.
    Stale,
}

impl GroupQueue {
    /// The next step towards the target, and its time.
    fn next_step(&self, stop_delay: Duration) -> Option<(QueueStep, Instant)> {
        let now_or = |at: Instant| at.max(self.not_before);
        match (self.target, self.binding) {
            (Some(GroupPhase::Active), BindingState::Bound) => None,
            (Some(GroupPhase::Active), _) => Some((QueueStep::Bind, self.not_before)),
            (Some(GroupPhase::Unbound) | None, BindingState::Unknown | BindingState::Bound) => {
                Some((QueueStep::Unbind, self.not_before))
            }
            (Some(GroupPhase::Unbound) | None, BindingState::Absent)
            | (Some(GroupPhase::Unbound), BindingState::Unbound { .. }) => None,
            // Not while workers exist: they may hold requests that no count shows.
            (None, BindingState::Unbound { .. }) if self.workers > 0 => None,
            (None, BindingState::Unbound { since }) => match self.inspection {
                None | Some(InspectionState::Stale) => Some((QueueStep::Inspect, now_or(since.plus(stop_delay)))),
                Some(InspectionState::Empty) => Some((QueueStep::Delete, self.not_before)),
            },
        }
    }

    fn is_done(&self) -> bool {
        self.target.is_none() && self.binding == BindingState::Absent && self.in_flight.is_none() && self.workers == 0
    }

    fn start_step(&mut self, stop_delay: Duration, now: Instant) -> Option<QueueStep> {
        if self.in_flight.is_some() {
            return None;
        }
        let (step, _) = self.next_step(stop_delay).filter(|(_, at)| *at <= now)?;
        self.in_flight = Some(step);
        if step == QueueStep::Inspect {
            self.inspection = None;
        }
        Some(step)
    }

    fn invalidate_inspection(&mut self) {
        self.inspection = (self.in_flight == Some(QueueStep::Inspect)).then_some(InspectionState::Stale);
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pool {
    policy: tracker::TrackerPolicy,
    tracker: Tracker,
    queues: BTreeMap<Key, GroupQueue>,
    is_connected: bool,
    jitter: Jitter,
    effects: VecDeque<Effect>,
}

impl Pool {
    pub fn new(policy: tracker::TrackerPolicy, seed: u64) -> Self {
        Self {
            policy,
            tracker: Tracker::new(policy),
            queues: BTreeMap::new(),
            is_connected: false,
            jitter: Jitter::seeded(seed),
            effects: VecDeque::new(),
        }
    }

    /// An event about one key costs a look-up of that one; the others are visited on ticks.
    pub fn handle(&mut self, event: Event, now: Instant) {
        let key = match event {
            Event::Connected | Event::Disconnected => {
                self.reset_connection();
                self.is_connected = event == Event::Connected;
                None
            }
            Event::Demand { key, extra } => {
                self.tracker.on_demand(key.clone(), extra, now);
                if let Some(queue) = self.queues.get_mut(&key) {
                    queue.is_changed = true;
                }
                Some(key)
            }
            Event::Unroutable(key) => {
                if let Some(queue) = self.queues.get_mut(&key)
                    && queue.binding == BindingState::Bound
                {
                    queue.binding = BindingState::Unknown;
                }
                Some(key)
            }
            Event::StepFinished { key, step, result } => {
                self.on_step_finished(&key, step, result, now);
                Some(key)
            }
            Event::Workers { key, count } => {
                if count > 0 {
                    self.queues.entry(key.clone()).or_default();
                }
                if let Some(queue) = self.queues.get_mut(&key)
                    && queue.workers != count
                {
                    // A worker may have requeued a request after the inspection.
                    queue.workers = count;
                    queue.invalidate_inspection();
                    queue.is_changed = true;
                }
                Some(key)
            }
            Event::Depth { key, ready } => {
                if let Some(queue) = self.queues.get_mut(&key) {
                    (queue.depth, queue.is_changed) = (Some(DepthSample { ready, at: now }), false);
                }
                Some(key)
            }
            Event::Tick => None,
        };
        if let Some(key) = key {
            self.advance_key(&key, now);
        } else {
            self.tracker.tick(now);
            self.advance_all(now);
        }
    }

    /// Delays that have begun keep their old length.
    pub const fn reconfigure(&mut self, policy: tracker::TrackerPolicy) {
        self.policy = policy;
        self.tracker.reconfigure(policy);
    }

    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let steps = self.queues.values().filter(|queue| self.is_connected && queue.in_flight.is_none());
        let steps = steps.filter_map(|queue| queue.next_step(self.policy.stop_delay)).map(|(_, at)| at);
        steps.chain(self.tracker.next_deadline()).min()
    }

    pub const fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// Every key with something to do, wanted or not, in order.
    pub fn keys(&self) -> impl Iterator<Item = &Key> + Clone {
        self.queues.keys()
    }

    /// True if a request published now reaches the queue of its key.
    pub fn is_bound(&self, key: &Key) -> bool {
        let bound = |queue: &GroupQueue| queue.binding == BindingState::Bound && queue.in_flight.is_none();
        self.queues.get(key).is_some_and(bound)
    }

    pub fn consecutive_failures(&self, key: &Key) -> u32 {
        self.queues.get(key).map_or(0, |queue| queue.backoff.tries())
    }

    fn reset_connection(&mut self) {
        // Steps that were not sent belong to the connection as well.
        self.effects.clear();
        for queue in self.queues.values_mut() {
            (queue.binding, queue.in_flight, queue.inspection) = (BindingState::Unknown, None, None);
            queue.depth = None;
            queue.backoff.reset();
            queue.not_before = Instant::ORIGIN;
        }
    }

    fn on_step_finished(&mut self, key: &Key, step: QueueStep, answer: StepResult, now: Instant) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        if queue.in_flight != Some(step) {
            return;
        }
        queue.in_flight = None;
        if let StepResult::Failed | StepResult::Refused = answer {
            // Unknown: the step may have been carried out all the same.
            (queue.binding, queue.inspection) = (BindingState::Unknown, None);
            let wait = queue.backoff.wait(STEP_RETRY, None, &mut self.jitter);
            queue.not_before = now.plus(if answer == StepResult::Refused { STEP_RETRY.max } else { wait });
            return;
        }
        queue.backoff.reset();
        queue.not_before = now;
        match (step, answer) {
            (QueueStep::Bind, _) => (queue.binding, queue.inspection) = (BindingState::Bound, None),
            (QueueStep::Unbind, StepResult::NotFound)
            | (QueueStep::Inspect, StepResult::NotFound | StepResult::Done) => {
                queue.binding = BindingState::Absent;
            }
            (QueueStep::Unbind, _) => (queue.binding, queue.inspection) = (BindingState::Unbound { since: now }, None),
            (QueueStep::Delete, StepResult::Done | StepResult::NotFound) => queue.binding = BindingState::Absent,
            (QueueStep::Inspect, StepResult::Contents { ready: 0, consumers: 0 }) => {
                let in_vain = queue.inspection == Some(InspectionState::Stale);
                queue.inspection = (!in_vain).then_some(InspectionState::Empty);
            }
            (
                QueueStep::Inspect | QueueStep::Delete,
                StepResult::Contents { ready: 0, .. } | StepResult::Failed | StepResult::Refused,
            ) => {
                queue.inspection = None;
                queue.not_before = now.plus(INSPECT_INTERVAL);
            }
            // It holds requests: its group is active again.
            (QueueStep::Inspect | QueueStep::Delete, StepResult::Contents { .. }) => {
                queue.inspection = None;
                self.tracker.on_demand(key.clone(), Duration::ZERO, now);
            }
        }
    }

    fn advance_all(&mut self, now: Instant) {
        let keys: BTreeSet<Key> =
            self.tracker.groups().map(|(key, _)| key).chain(self.queues.keys()).cloned().collect();
        for key in keys {
            self.advance_key(&key, now);
        }
    }

    fn advance_key(&mut self, key: &Key, now: Instant) {
        let target = self.tracker.desired(key).map(|wanted| wanted.phase);
        if target.is_some() {
            self.queues.entry(key.clone()).or_default();
        }
        let Some(queue) = self.queues.get_mut(key) else { return };
        if queue.target != target {
            queue.target = target;
            queue.depth = queue.depth.filter(|_| target.is_some());
            queue.invalidate_inspection();
        }
        if self.is_connected
            && let Some(step) = queue.start_step(self.policy.stop_delay, now)
        {
            self.effects.push_back(Effect { key: key.clone(), step });
        }
        if queue.is_done() {
            self.queues.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const POLICY: tracker::TrackerPolicy =
        tracker::TrackerPolicy { unbind_delay: Duration::from_secs(10), stop_delay: Duration::from_secs(5) };

    pub(super) fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    fn key() -> Key {
        Key::new("a").unwrap()
    }

    fn demand() -> Event {
        Event::Demand { key: key(), extra: Duration::ZERO }
    }

    fn answered(step: QueueStep, answer: StepResult) -> Event {
        Event::StepFinished { key: key(), step, result: answer }
    }

    fn connected() -> Pool {
        let mut pool = Pool::new(POLICY, 1);
        pool.handle(Event::Connected, at(0));
        pool
    }

    fn steps(pool: &mut Pool) -> Vec<QueueStep> {
        core::iter::from_fn(|| pool.next_effect()).map(|effect| effect.step).collect()
    }

    /// Bound at 0, unbound at 10, and not wanted at 15.
    fn over() -> Pool {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(answered(QueueStep::Bind, StepResult::Done), at(0));
        pool.handle(Event::Tick, at(10));
        pool.handle(answered(QueueStep::Unbind, StepResult::Done), at(10));
        steps(&mut pool);
        pool
    }

    #[test]
    fn a_queue_is_bound_on_demand_unbound_in_a_calm_and_deleted_when_it_is_empty() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        assert_eq!((steps(&mut pool), pool.is_bound(&key())), (vec![QueueStep::Bind], false));
        pool.handle(answered(QueueStep::Bind, StepResult::Done), at(1));
        assert!(pool.is_bound(&key()));
        assert_eq!((pool.next_deadline(), pool.wait_of(&key())), (Some(at(10)), None));
        pool.handle(Event::Tick, at(10));
        assert_eq!((steps(&mut pool), pool.is_bound(&key())), (vec![QueueStep::Unbind], false));
        pool.handle(answered(QueueStep::Unbind, StepResult::Done), at(12));
        pool.handle(Event::Tick, at(15));
        assert_eq!(steps(&mut pool), [], "it was unbound at 12, and not at 10");
        assert_eq!(pool.next_deadline(), Some(at(17)));
        pool.handle(Event::Tick, at(17));
        assert_eq!(steps(&mut pool), [QueueStep::Inspect]);
        pool.handle(answered(QueueStep::Inspect, StepResult::Contents { ready: 0, consumers: 0 }), at(17));
        assert_eq!(steps(&mut pool), [QueueStep::Delete]);
        pool.handle(answered(QueueStep::Delete, StepResult::Done), at(17));
        assert_eq!((pool.next_deadline(), pool.keys().count()), (None, 0));
    }

    #[test]
    fn a_queue_that_holds_requests_is_not_deleted_and_its_group_is_active_again() {
        for refused_by in [QueueStep::Inspect, QueueStep::Delete] {
            let mut pool = over();
            pool.handle(Event::Tick, at(15));
            if refused_by == QueueStep::Delete {
                pool.handle(answered(QueueStep::Inspect, StepResult::Contents { ready: 0, consumers: 0 }), at(15));
            }
            assert_eq!(steps(&mut pool).last(), Some(&refused_by));
            pool.handle(answered(refused_by, StepResult::Contents { ready: 3, consumers: 0 }), at(16));
            assert_eq!(steps(&mut pool), [QueueStep::Bind]);
        }
    }

    #[test]
    fn a_queue_is_not_deleted_while_anybody_consumes_or_a_worker_is_there() {
        let mut pool = over();
        pool.handle(Event::Workers { key: key(), count: 1 }, at(11));
        pool.handle(Event::Tick, at(60));
        assert_eq!((steps(&mut pool), pool.next_deadline()), (vec![], None));
        pool.handle(Event::Workers { key: key(), count: 0 }, at(60));
        assert_eq!(steps(&mut pool), [QueueStep::Inspect]);
        pool.handle(answered(QueueStep::Inspect, StepResult::Contents { ready: 0, consumers: 1 }), at(60));
        assert_eq!((steps(&mut pool), pool.next_deadline()), (vec![], Some(at(61))));
        pool.handle(Event::Tick, at(61));
        assert_eq!(steps(&mut pool), [QueueStep::Inspect]);
    }

    #[test]
    fn a_group_whose_queue_is_empty_while_its_workers_hold_requests_is_neither_unbound_nor_stopped() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(answered(QueueStep::Bind, StepResult::Done), at(0));
        steps(&mut pool);
        for second in 1..1_000 {
            pool.handle(Event::Tick, at(second));
            pool.handle(demand(), at(second));
            assert!(pool.is_bound(&key()) && steps(&mut pool).is_empty(), "after {second} s");
        }
        pool.handle(Event::Tick, at(1_009));
        assert_eq!(steps(&mut pool), [QueueStep::Unbind], "what was held is answered");
        // The queue of an unneeded group whose request a worker still holds stays.
        pool.handle(answered(QueueStep::Unbind, StepResult::Done), at(1_009));
        pool.handle(Event::Tick, at(1_014));
        pool.handle(demand(), at(1_014));
        pool.handle(answered(QueueStep::Inspect, StepResult::Contents { ready: 0, consumers: 0 }), at(1_014));
        assert_eq!(steps(&mut pool), [QueueStep::Inspect, QueueStep::Bind]);
    }

    #[test]
    fn a_look_says_nothing_where_a_worker_went_meanwhile() {
        let mut pool = over();
        pool.handle(Event::Tick, at(15));
        pool.handle(Event::Workers { key: key(), count: 1 }, at(15));
        pool.handle(Event::Workers { key: key(), count: 0 }, at(15));
        assert_eq!(steps(&mut pool), [QueueStep::Inspect]);
        pool.handle(answered(QueueStep::Inspect, StepResult::Contents { ready: 0, consumers: 0 }), at(15));
        assert_eq!(steps(&mut pool), [QueueStep::Inspect], "what it held has come back since");
    }

    #[test]
    fn demand_during_a_deletion_makes_the_queue_anew() {
        let mut pool = over();
        pool.handle(Event::Tick, at(15));
        pool.handle(answered(QueueStep::Inspect, StepResult::Contents { ready: 0, consumers: 0 }), at(15));
        pool.handle(demand(), at(15));
        assert_eq!(steps(&mut pool), [QueueStep::Inspect, QueueStep::Delete]);
        assert!(!pool.is_bound(&key()));
        pool.handle(answered(QueueStep::Delete, StepResult::Done), at(16));
        assert_eq!(steps(&mut pool), [QueueStep::Bind]);
    }

    #[test]
    fn demand_between_the_look_and_the_deletion_keeps_the_queue() {
        let mut pool = over();
        pool.handle(Event::Tick, at(15));
        steps(&mut pool);
        pool.handle(demand(), at(15));
        pool.handle(answered(QueueStep::Inspect, StepResult::Contents { ready: 0, consumers: 0 }), at(15));
        assert_eq!(steps(&mut pool), [QueueStep::Bind]);
    }

    #[test]
    fn what_was_known_is_forgotten_with_the_connection() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(Event::Disconnected, at(1));
        assert_eq!((steps(&mut pool), pool.next_deadline()), (vec![], Some(at(10))));
        assert!(!pool.is_bound(&key()));
        pool.handle(Event::Connected, at(2));
        assert_eq!(steps(&mut pool), [QueueStep::Bind]);
    }

    #[test]
    fn a_queue_that_could_not_be_unbound_waits_its_whole_delay_from_when_it_was() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(answered(QueueStep::Bind, StepResult::Done), at(0));
        pool.handle(Event::Tick, at(10));
        pool.handle(Event::Disconnected, at(10));
        pool.handle(Event::Tick, at(100));
        pool.handle(Event::Connected, at(100));
        assert_eq!(steps(&mut pool), [QueueStep::Unbind], "what the connection before was to do went with it");
        pool.handle(answered(QueueStep::Unbind, StepResult::Done), at(100));
        assert_eq!(pool.next_deadline(), Some(at(105)));
    }

    #[test]
    fn a_step_that_failed_is_tried_again_later_and_holds_up_no_other_key() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(answered(QueueStep::Bind, StepResult::Failed), at(0));
        pool.handle(Event::Demand { key: Key::new("b").unwrap(), extra: Duration::ZERO }, at(0));
        assert_eq!(steps(&mut pool), [QueueStep::Bind, QueueStep::Bind]);
        let again = pool.next_deadline().unwrap();
        assert!(again > at(0) && again <= Instant::at(STEP_RETRY.first), "{again:?}");
        pool.handle(Event::Tick, again);
        assert_eq!(steps(&mut pool), [QueueStep::Bind]);
    }

    #[test]
    fn c1_a_queue_that_is_refused_is_declared_again_after_the_longest_wait() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(answered(QueueStep::Bind, StepResult::Refused), at(0));
        steps(&mut pool);
        pool.handle(demand(), at(1));
        let again = Instant::at(STEP_RETRY.max);
        assert_eq!((steps(&mut pool), pool.is_bound(&key())), (vec![], false));
        pool.handle(demand(), again);
        assert_eq!(steps(&mut pool), [QueueStep::Bind]);
    }

    #[test]
    fn a_queue_that_a_request_did_not_find_is_made_again() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(answered(QueueStep::Bind, StepResult::Done), at(0));
        steps(&mut pool);
        pool.handle(Event::Unroutable(key()), at(1));
        assert_eq!((steps(&mut pool), pool.is_bound(&key())), (vec![QueueStep::Bind], false));
    }

    #[test]
    fn workers_of_a_key_that_nobody_wants_are_seen_and_their_queue_is_looked_after() {
        let mut pool = connected();
        pool.handle(Event::Workers { key: key(), count: 2 }, at(0));
        assert_eq!(steps(&mut pool), [QueueStep::Unbind]);
        pool.handle(answered(QueueStep::Unbind, StepResult::NotFound), at(0));
        pool.handle(Event::Workers { key: key(), count: 0 }, at(1));
        assert!(pool.queues.is_empty());
    }
}
