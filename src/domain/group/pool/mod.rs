//! The groups of one pool and their request queues: what is wanted, what the broker is known to have, and the next step
//! for each queue where the two differ.
//!
//! One step a key is under way at a time, and whatever was learned over a connection is forgotten with it. A queue is
//! deleted only when it was unbound for the whole stop delay, no worker of the group is left, and the broker said that it
//! is empty and that nobody consumes from it; one that holds requests makes its group active again (I31).

mod standing;

use alloc::collections::{BTreeMap, VecDeque};
use core::time::Duration;

pub use standing::{Standing, Wait};

use super::tracker::{self, Tracker, Wanted};
use super::{Generation, Key, Phase};
use crate::domain::backoff::{self, Backoff};
use crate::domain::jitter::Jitter;
use crate::domain::time::Instant;

/// The pauses before a step that failed is tried again.
pub const TROUBLE: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(200), max: Duration::from_secs(30) };

/// How soon a queue that is still consumed from is looked at again.
pub const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Something to do about a request queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// Declare it and bind it. The answer is [`Answer::Done`].
    Bind,
    /// Unbind it, if there is one. The answer is [`Answer::Done`].
    Unbind,
    /// Ask what is in it. The answer is [`Answer::Holds`] or [`Answer::Missing`].
    Look,
    /// Delete it. The answer is [`Answer::Done`], or [`Answer::Holds`] where the broker refuses since it is not empty.
    Delete,
}

/// What came of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Answer {
    /// It is so.
    Done,
    /// There is no such queue.
    Missing,
    /// So much is known of it.
    Holds {
        /// Requests that no worker holds.
        ready: u32,
        /// How many consume.
        consumers: u32,
    },
    /// Neither this nor that.
    Failed,
}

/// Names a connection to the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Epoch(pub u64);

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The broker can be reached, and the pool's exchanges are there.
    Connected(Epoch),
    /// It cannot.
    Disconnected,
    /// A queue of this key was found there.
    Found(Key),
    /// A sign of demand for a key, which is good for so much longer than usual.
    Demand {
        /// The key.
        key: Key,
        /// How much longer.
        extra: Duration,
    },
    /// So much is in the queue of a key, and so much of it is held by workers. Either is a sign of demand: an empty queue says
    /// nothing of what its workers do.
    Seen {
        /// The key.
        key: Key,
        /// Requests that no worker holds.
        ready: u32,
        /// Requests that workers hold.
        held: u32,
    },
    /// A request of this key did not find its queue, which is bound as far as is known.
    Strayed(Key),
    /// The answer to a step.
    Answered {
        /// Over which connection.
        epoch: Epoch,
        /// Whose queue.
        key: Key,
        /// The step.
        step: Step,
        /// What came of it.
        answer: Answer,
    },
    /// So many workers of a key are there, in whatever state.
    Workers {
        /// The key.
        key: Key,
        /// How many.
        count: u32,
    },
    /// Time passed.
    Tick,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Effect {
    /// A step for a queue.
    Do {
        /// Over which connection.
        epoch: Epoch,
        /// Whose queue.
        key: Key,
        /// The step.
        step: Step,
    },
    /// A queue that was to go holds requests: its group is active again.
    Revived {
        /// Whose queue.
        key: Key,
        /// How many requests.
        ready: u32,
    },
}

impl Event {
    /// The key that it is about; `None` where it is about all of them.
    const fn of(&self) -> Option<&Key> {
        match self {
            Self::Connected(_) | Self::Disconnected | Self::Tick => None,
            Self::Found(key)
            | Self::Strayed(key)
            | Self::Demand { key, .. }
            | Self::Seen { key, .. }
            | Self::Answered { key, .. }
            | Self::Workers { key, .. } => Some(key),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Known {
    Unknown,
    Absent,
    Bound,
    Unbound { since: Instant },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Queue {
    known: Known,
    under_way: Option<Step>,
    row: Backoff,
    /// Nothing is done before.
    not_before: Instant,
    /// What the broker said of it since anything about it changed.
    looked: Option<Looked>,
    workers: u32,
    /// What the queue is to be, and since which change.
    target: Option<Phase>,
    since: Generation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Looked {
    Empty,
    /// Something changed while it was looked at: what is answered says nothing.
    InVain,
}

impl Queue {
    const fn new(known: Known, since: Generation) -> Self {
        Self {
            known,
            under_way: None,
            row: Backoff::NEW,
            not_before: Instant::ORIGIN,
            looked: None,
            workers: 0,
            target: None,
            since,
        }
    }

    /// What would bring it closer to what it is to be, and when.
    fn step(&self, stop_delay: Duration) -> Option<(Step, Instant)> {
        let now_or = |at: Instant| at.max(self.not_before);
        match (self.target, self.known) {
            (Some(Phase::Active), Known::Bound) => None,
            (Some(Phase::Active), _) => Some((Step::Bind, self.not_before)),
            (Some(Phase::Unbound) | None, Known::Unknown | Known::Bound) => Some((Step::Unbind, self.not_before)),
            (Some(Phase::Unbound) | None, Known::Absent) | (Some(Phase::Unbound), Known::Unbound { .. }) => None,
            // Nobody asks while workers are there: they may hold what no count shows.
            (None, Known::Unbound { .. }) if self.workers > 0 => None,
            (None, Known::Unbound { since }) => match self.looked {
                None | Some(Looked::InVain) => Some((Step::Look, now_or(since.plus(stop_delay)))),
                Some(Looked::Empty) => Some((Step::Delete, self.not_before)),
            },
        }
    }

    /// It is to be this.
    fn want(&mut self, wanted: Option<Wanted>, generation: Generation) {
        let (target, since) = wanted.map_or((None, generation), |wanted| (Some(wanted.phase), wanted.since));
        if self.target != target {
            (self.target, self.since) = (target, since);
            self.doubt();
        }
    }

    /// Whether there is nothing to do about it any more, and nothing to know.
    fn is_over(&self) -> bool {
        self.target.is_none() && self.known == Known::Absent && self.under_way.is_none() && self.workers == 0
    }

    /// Begins its next step, where it is time for that.
    fn begin(&mut self, stop_delay: Duration, now: Instant) -> Option<Step> {
        if self.under_way.is_some() {
            return None;
        }
        let (step, _) = self.step(stop_delay).filter(|(_, at)| *at <= now)?;
        self.under_way = Some(step);
        if step == Step::Look {
            self.looked = None;
        }
        Some(step)
    }

    /// Something about it changed, so that what was seen of it counts no more.
    fn doubt(&mut self) {
        self.looked = (self.under_way == Some(Step::Look)).then_some(Looked::InVain);
    }

    const fn is_settled(&self) -> bool {
        self.under_way.is_none()
            && matches!(
                (self.target, self.known),
                (Some(Phase::Active), Known::Bound)
                    | (Some(Phase::Unbound), Known::Unbound { .. } | Known::Absent)
                    | (None, Known::Absent)
            )
    }
}

/// The groups and queues of one pool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pool {
    policy: tracker::Policy,
    tracker: Tracker,
    queues: BTreeMap<Key, Queue>,
    epoch: Option<Epoch>,
    jitter: Jitter,
    effects: VecDeque<Effect>,
}

impl Pool {
    /// One of which nothing is known.
    #[must_use]
    pub fn new(policy: tracker::Policy, seed: u64, now: Instant) -> Self {
        Self {
            policy,
            tracker: Tracker::new(policy, [], now),
            queues: BTreeMap::new(),
            epoch: None,
            jitter: Jitter::seeded(seed),
            effects: VecDeque::new(),
        }
    }

    /// Takes in what happened. What is about one key costs a look at that one, and the others are looked at when time passes.
    pub fn handle(&mut self, event: Event, now: Instant) {
        let of = event.of().cloned();
        match event {
            Event::Connected(epoch) => {
                self.forget();
                self.epoch = Some(epoch);
            }
            Event::Disconnected => {
                self.forget();
                self.epoch = None;
            }
            Event::Found(key) => {
                self.tracker.require(key, Duration::ZERO, now);
            }
            Event::Demand { key, extra } => {
                self.tracker.require(key, extra, now);
            }
            Event::Seen { key, ready, held } => {
                if ready > 0 || held > 0 {
                    self.tracker.require(key, Duration::ZERO, now);
                }
            }
            Event::Strayed(key) => {
                if let Some(queue) = self.queues.get_mut(&key)
                    && queue.known == Known::Bound
                {
                    queue.known = Known::Unknown;
                }
            }
            Event::Answered { epoch, key, step, answer } => {
                if self.epoch == Some(epoch) {
                    self.answered(&key, step, answer, now);
                }
            }
            Event::Workers { key, count } => {
                let generation = self.tracker.generation();
                if count > 0 {
                    self.queues.entry(key.clone()).or_insert_with(|| Queue::new(Known::Unknown, generation));
                }
                if let Some(queue) = self.queues.get_mut(&key)
                    && queue.workers != count
                {
                    // What one of them has put back was not there when it was looked at.
                    queue.workers = count;
                    queue.doubt();
                }
            }
            Event::Tick => {}
        }
        if let Some(key) = of {
            self.go_on_with(&key, now);
        } else {
            self.tracker.tick(now);
            self.go_on(now);
        }
    }

    /// Other delays. What has begun is counted by the old ones.
    pub const fn reconfigure(&mut self, policy: tracker::Policy) {
        self.policy = policy;
        self.tracker.reconfigure(policy);
    }

    /// The next effect, in order.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// When [`Event::Tick`] has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let steps = self.queues.values().filter(|queue| self.epoch.is_some() && queue.under_way.is_none());
        let steps = steps.filter_map(|queue| queue.step(self.policy.stop_delay)).map(|(_, at)| at);
        steps.chain(self.tracker.next_deadline()).min()
    }

    /// The groups that are wanted.
    #[must_use]
    pub const fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// Every key that there is something to do about, wanted or not, in their order.
    pub fn keys(&self) -> impl Iterator<Item = &Key> + Clone {
        self.queues.keys()
    }

    /// Whether a request that is published now reaches the queue of its key.
    #[must_use]
    pub fn is_bound(&self, key: &Key) -> bool {
        let bound = |queue: &Queue| queue.known == Known::Bound && queue.under_way.is_none();
        self.queues.get(key).is_some_and(bound)
    }

    /// How often in a row a step about the queue of a key has failed.
    #[must_use]
    pub fn failures(&self, key: &Key) -> u32 {
        self.queues.get(key).map_or(0, |queue| queue.row.tries())
    }

    /// Every change up to this one has been carried out.
    #[must_use]
    pub fn reached(&self) -> Generation {
        let unsettled = self.queues.values().filter(|queue| !queue.is_settled()).map(|queue| queue.since).min();
        unsettled.map_or_else(|| self.tracker.generation(), |since| Generation(since.0.saturating_sub(1)))
    }

    fn forget(&mut self) {
        // Steps that were not begun belong to the connection as well.
        self.effects.retain(|effect| !matches!(effect, Effect::Do { .. }));
        for queue in self.queues.values_mut() {
            (queue.known, queue.under_way, queue.looked) = (Known::Unknown, None, None);
            queue.row.reset();
            queue.not_before = Instant::ORIGIN;
        }
    }

    fn answered(&mut self, key: &Key, step: Step, answer: Answer, now: Instant) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        if queue.under_way != Some(step) {
            return;
        }
        queue.under_way = None;
        if answer == Answer::Failed {
            // What it was is not known any more: it may have been done all the same.
            (queue.known, queue.looked) = (Known::Unknown, None);
            queue.not_before = now.plus(queue.row.wait(TROUBLE, None, &mut self.jitter));
            return;
        }
        queue.row.reset();
        queue.not_before = now;
        match (step, answer) {
            (Step::Bind, _) => (queue.known, queue.looked) = (Known::Bound, None),
            (Step::Unbind, Answer::Missing) | (Step::Look, Answer::Missing | Answer::Done) => {
                queue.known = Known::Absent;
            }
            (Step::Unbind, _) => (queue.known, queue.looked) = (Known::Unbound { since: now }, None),
            (Step::Delete, Answer::Done | Answer::Missing) => queue.known = Known::Absent,
            (Step::Look, Answer::Holds { ready: 0, consumers: 0 }) => {
                let in_vain = queue.looked == Some(Looked::InVain);
                queue.looked = (!in_vain).then_some(Looked::Empty);
            }
            (Step::Look | Step::Delete, Answer::Holds { ready: 0, .. } | Answer::Failed) => {
                queue.looked = None;
                queue.not_before = now.plus(LOOK_AGAIN);
            }
            (Step::Look | Step::Delete, Answer::Holds { ready, .. }) => {
                queue.looked = None;
                self.effects.push_back(Effect::Revived { key: key.clone(), ready });
                self.tracker.require(key.clone(), Duration::ZERO, now);
            }
        }
    }

    /// Tells each queue what it is to be, and begins what is to be done about it.
    fn go_on(&mut self, now: Instant) {
        for (key, wanted) in self.tracker.groups() {
            self.queues.entry(key.clone()).or_insert_with(|| Queue::new(Known::Unknown, wanted.since));
        }
        let generation = self.tracker.generation();
        for (key, queue) in &mut self.queues {
            queue.want(self.tracker.wanted(key), generation);
            if let Some(epoch) = self.epoch
                && let Some(step) = queue.begin(self.policy.stop_delay, now)
            {
                self.effects.push_back(Effect::Do { epoch, key: key.clone(), step });
            }
        }
        self.queues.retain(|_, queue| !queue.is_over());
    }

    /// The same for one of them.
    fn go_on_with(&mut self, key: &Key, now: Instant) {
        let wanted = self.tracker.wanted(key);
        if let Some(wanted) = wanted {
            self.queues.entry(key.clone()).or_insert_with(|| Queue::new(Known::Unknown, wanted.since));
        }
        let Some(queue) = self.queues.get_mut(key) else { return };
        queue.want(wanted, self.tracker.generation());
        if let Some(epoch) = self.epoch
            && let Some(step) = queue.begin(self.policy.stop_delay, now)
        {
            self.effects.push_back(Effect::Do { epoch, key: key.clone(), step });
        }
        if self.queues.get(key).is_some_and(Queue::is_over) {
            self.queues.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: tracker::Policy =
        tracker::Policy { unbind_delay: Duration::from_secs(10), stop_delay: Duration::from_secs(5) };

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    fn key() -> Key {
        Key::new("a").unwrap()
    }

    fn demand() -> Event {
        Event::Demand { key: key(), extra: Duration::ZERO }
    }

    fn answered(step: Step, answer: Answer) -> Event {
        Event::Answered { epoch: Epoch(1), key: key(), step, answer }
    }

    fn connected() -> Pool {
        let mut pool = Pool::new(POLICY, 1, at(0));
        pool.handle(Event::Connected(Epoch(1)), at(0));
        pool
    }

    fn steps(pool: &mut Pool) -> Vec<Step> {
        core::iter::from_fn(|| pool.next_effect())
            .filter_map(|effect| match effect {
                Effect::Do { step, .. } => Some(step),
                Effect::Revived { .. } => None,
            })
            .collect()
    }

    /// Bound at 0, unbound at 10, and not wanted at 15.
    fn over() -> Pool {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(answered(Step::Bind, Answer::Done), at(0));
        pool.handle(Event::Tick, at(10));
        pool.handle(answered(Step::Unbind, Answer::Done), at(10));
        steps(&mut pool);
        pool
    }

    #[test]
    fn a_queue_is_bound_on_demand_unbound_in_a_calm_and_deleted_when_it_is_empty() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        assert_eq!((steps(&mut pool), pool.is_bound(&key())), (vec![Step::Bind], false));
        pool.handle(answered(Step::Bind, Answer::Done), at(1));
        assert!(pool.is_bound(&key()));
        assert_eq!(pool.reached(), Generation(1));
        assert_eq!(pool.next_deadline(), Some(at(10)));
        pool.handle(Event::Tick, at(10));
        assert_eq!((steps(&mut pool), pool.is_bound(&key())), (vec![Step::Unbind], false));
        pool.handle(answered(Step::Unbind, Answer::Done), at(12));
        pool.handle(Event::Tick, at(15));
        assert_eq!(steps(&mut pool), [], "it was unbound at 12, and not at 10");
        assert_eq!(pool.next_deadline(), Some(at(17)));
        pool.handle(Event::Tick, at(17));
        assert_eq!(steps(&mut pool), [Step::Look]);
        pool.handle(answered(Step::Look, Answer::Holds { ready: 0, consumers: 0 }), at(17));
        assert_eq!(steps(&mut pool), [Step::Delete]);
        pool.handle(answered(Step::Delete, Answer::Done), at(17));
        assert_eq!((pool.next_deadline(), pool.reached()), (None, Generation(3)));
        assert!(pool.queues.is_empty());
    }

    #[test]
    fn a_queue_that_holds_requests_is_not_deleted_and_its_group_is_active_again() {
        for refused_by in [Step::Look, Step::Delete] {
            let mut pool = over();
            pool.handle(Event::Tick, at(15));
            if refused_by == Step::Delete {
                pool.handle(answered(Step::Look, Answer::Holds { ready: 0, consumers: 0 }), at(15));
            }
            assert_eq!(steps(&mut pool).last(), Some(&refused_by));
            pool.handle(answered(refused_by, Answer::Holds { ready: 3, consumers: 0 }), at(16));
            assert_eq!(pool.next_effect(), Some(Effect::Revived { key: key(), ready: 3 }));
            assert_eq!(steps(&mut pool), [Step::Bind]);
        }
    }

    #[test]
    fn a_queue_is_not_deleted_while_anybody_consumes_or_a_worker_is_there() {
        let mut pool = over();
        pool.handle(Event::Workers { key: key(), count: 1 }, at(11));
        pool.handle(Event::Tick, at(60));
        assert_eq!((steps(&mut pool), pool.next_deadline()), (vec![], None));
        pool.handle(Event::Workers { key: key(), count: 0 }, at(60));
        assert_eq!(steps(&mut pool), [Step::Look]);
        pool.handle(answered(Step::Look, Answer::Holds { ready: 0, consumers: 1 }), at(60));
        assert_eq!((steps(&mut pool), pool.next_deadline()), (vec![], Some(at(61))));
        pool.handle(Event::Tick, at(61));
        assert_eq!(steps(&mut pool), [Step::Look]);
    }

    #[test]
    fn a_group_whose_queue_is_empty_while_its_workers_hold_requests_is_neither_unbound_nor_stopped() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(answered(Step::Bind, Answer::Done), at(0));
        steps(&mut pool);
        for second in 1..1_000 {
            pool.handle(Event::Tick, at(second));
            pool.handle(Event::Seen { key: key(), ready: 0, held: 1 }, at(second));
            assert!(pool.is_bound(&key()) && steps(&mut pool).is_empty(), "after {second} s");
        }
        pool.handle(Event::Seen { key: key(), ready: 0, held: 0 }, at(1_000));
        pool.handle(Event::Tick, at(1_009));
        assert_eq!(steps(&mut pool), [Step::Unbind], "what was held is answered");
        // One that is to go, and of whose requests somebody holds one after all, goes on.
        pool.handle(answered(Step::Unbind, Answer::Done), at(1_009));
        pool.handle(Event::Tick, at(1_014));
        pool.handle(Event::Seen { key: key(), ready: 0, held: 1 }, at(1_014));
        pool.handle(answered(Step::Look, Answer::Holds { ready: 0, consumers: 0 }), at(1_014));
        assert_eq!(steps(&mut pool), [Step::Look, Step::Bind]);
    }

    #[test]
    fn a_look_says_nothing_where_a_worker_went_meanwhile() {
        let mut pool = over();
        pool.handle(Event::Tick, at(15));
        pool.handle(Event::Workers { key: key(), count: 1 }, at(15));
        pool.handle(Event::Workers { key: key(), count: 0 }, at(15));
        assert_eq!(steps(&mut pool), [Step::Look]);
        pool.handle(answered(Step::Look, Answer::Holds { ready: 0, consumers: 0 }), at(15));
        assert_eq!(steps(&mut pool), [Step::Look], "what it held has come back since");
    }

    #[test]
    fn demand_during_a_deletion_makes_the_queue_anew() {
        let mut pool = over();
        pool.handle(Event::Tick, at(15));
        pool.handle(answered(Step::Look, Answer::Holds { ready: 0, consumers: 0 }), at(15));
        pool.handle(demand(), at(15));
        assert_eq!(steps(&mut pool), [Step::Look, Step::Delete]);
        assert!(!pool.is_bound(&key()));
        pool.handle(answered(Step::Delete, Answer::Done), at(16));
        assert_eq!(steps(&mut pool), [Step::Bind]);
    }

    #[test]
    fn demand_between_the_look_and_the_deletion_keeps_the_queue() {
        let mut pool = over();
        pool.handle(Event::Tick, at(15));
        steps(&mut pool);
        pool.handle(demand(), at(15));
        pool.handle(answered(Step::Look, Answer::Holds { ready: 0, consumers: 0 }), at(15));
        assert_eq!(steps(&mut pool), [Step::Bind]);
    }

    #[test]
    fn what_was_known_is_forgotten_with_the_connection() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(Event::Disconnected, at(1));
        assert_eq!((steps(&mut pool), pool.next_deadline()), (vec![], Some(at(10))));
        pool.handle(answered(Step::Bind, Answer::Done), at(1));
        assert!(!pool.is_bound(&key()));
        pool.handle(Event::Connected(Epoch(2)), at(2));
        assert_eq!(steps(&mut pool), [Step::Bind]);
        pool.handle(answered(Step::Bind, Answer::Done), at(2));
        assert!(!pool.is_bound(&key()), "that was said by the connection before");
    }

    #[test]
    fn a_queue_that_could_not_be_unbound_waits_its_whole_delay_from_when_it_was() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(answered(Step::Bind, Answer::Done), at(0));
        pool.handle(Event::Tick, at(10));
        pool.handle(Event::Disconnected, at(10));
        pool.handle(Event::Tick, at(100));
        pool.handle(Event::Connected(Epoch(1)), at(100));
        assert_eq!(steps(&mut pool), [Step::Unbind], "what the connection before was to do went with it");
        pool.handle(answered(Step::Unbind, Answer::Done), at(100));
        assert_eq!(pool.next_deadline(), Some(at(105)));
    }

    #[test]
    fn a_step_that_failed_is_tried_again_later_and_holds_up_no_other_key() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(answered(Step::Bind, Answer::Failed), at(0));
        pool.handle(Event::Demand { key: Key::new("b").unwrap(), extra: Duration::ZERO }, at(0));
        assert_eq!(steps(&mut pool), [Step::Bind, Step::Bind]);
        let again = pool.next_deadline().unwrap();
        assert!(again > at(0) && again <= Instant::at(TROUBLE.first), "{again:?}");
        pool.handle(Event::Tick, again);
        assert_eq!(steps(&mut pool), [Step::Bind]);
    }

    #[test]
    fn a_queue_that_a_request_did_not_find_is_made_again() {
        let mut pool = connected();
        pool.handle(demand(), at(0));
        pool.handle(answered(Step::Bind, Answer::Done), at(0));
        steps(&mut pool);
        pool.handle(Event::Strayed(key()), at(1));
        assert_eq!((steps(&mut pool), pool.is_bound(&key())), (vec![Step::Bind], false));
    }

    #[test]
    fn workers_of_a_key_that_nobody_wants_are_seen_and_their_queue_is_looked_after() {
        let mut pool = connected();
        pool.handle(Event::Workers { key: key(), count: 2 }, at(0));
        assert_eq!(steps(&mut pool), [Step::Unbind]);
        pool.handle(answered(Step::Unbind, Answer::Missing), at(0));
        pool.handle(Event::Workers { key: key(), count: 0 }, at(1));
        assert!(pool.queues.is_empty());
    }
}
