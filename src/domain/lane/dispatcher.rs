//! Which lane is attempted next: endpoints take turns, then the lanes of an endpoint, within the limits of attempts under way.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use core::time::Duration;

use super::Reply;
use super::breaker::{Breaker, Pass};
use crate::time::Instant;

/// The attempts at an endpoint that has not answered yet.
const ATTEMPTS_AT_FIRST: usize = 4;

/// A lane in its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub i64);

/// How many attempts may be under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttemptLimits {
    pub in_all: usize,
    pub per_endpoint: usize,
    pub per_origin: usize,
}

/// The limits of one endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EndpointLimits {
    /// That may be under way.
    pub attempts_max: usize,
    pub rate: Option<Rate>,
}

/// So many attempts at most begin within each `per`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// The number of attempts, 1 or more.
    pub attempts: usize,
    pub per: Duration,
}

/// An attempt that may begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextAttempt {
    pub endpoint: Arc<str>,
    pub origin: Arc<str>,
    pub lane: LaneId,
    pub pass: Pass,
}

#[derive(Debug)]
pub struct Dispatcher {
    limits: AttemptLimits,
    endpoints: BTreeMap<Arc<str>, Endpoint>,
    origins: BTreeMap<Arc<str>, Origin>,
    /// The endpoints with waiting lanes, the next one first.
    turns: VecDeque<Arc<str>>,
    under_way: usize,
}

#[derive(Debug, Default)]
struct Endpoint {
    origin: Arc<str>,
    waiting: VecDeque<LaneId>,
    under_way: usize,
    rests_until: Option<Instant>,
    limits: EndpointLimits,
    /// How many attempts may be under way for now: an answer makes it one more, an attempt without one halves it. So endpoints that
    /// are silent do not have all attempts until they time out.
    window: usize,
    /// The times at which the last attempts have begun, as many as the rate counts.
    begun: VecDeque<Instant>,
}

impl Endpoint {
    fn has_room(&self) -> bool {
        self.under_way < self.limits.attempts_max.min(self.window)
    }

    /// The time at which its rate lets the next attempt begin.
    fn next_by_rate(&self) -> Option<Instant> {
        let rate = self.limits.rate?;
        let first = self.begun.len().checked_sub(rate.attempts)?;
        Some(self.begun.get(first)?.plus(rate.per))
    }

    fn count_attempt(&mut self, now: Instant) {
        let Some(rate) = self.limits.rate else { return };
        self.begun.push_back(now);
        while self.begun.len() > rate.attempts {
            self.begun.pop_front();
        }
    }
}

#[derive(Debug, Default)]
struct Origin {
    breaker: Breaker,
    under_way: usize,
}

impl Dispatcher {
    pub const fn new(limits: AttemptLimits) -> Self {
        Self { limits, endpoints: BTreeMap::new(), origins: BTreeMap::new(), turns: VecDeque::new(), under_way: 0 }
    }

    /// Adds a lane whose head is due. Each lane is added once, and again after its attempt has ended.
    pub fn add(&mut self, endpoint: &Arc<str>, origin: &Arc<str>, lane: LaneId) {
        let entry = self.entry(endpoint, origin);
        entry.waiting.push_back(lane);
        if entry.waiting.len() == 1 {
            self.turns.push_back(Arc::clone(endpoint));
        }
    }

    /// Sets the origin and the limits of an endpoint. One without limits of its own has those of all endpoints.
    pub fn limit(&mut self, endpoint: &Arc<str>, origin: &Arc<str>, limits: EndpointLimits) {
        let entry = self.entry(endpoint, origin);
        entry.origin = Arc::clone(origin);
        entry.limits = limits;
    }

    fn entry(&mut self, endpoint: &Arc<str>, origin: &Arc<str>) -> &mut Endpoint {
        let limits = EndpointLimits { attempts_max: self.limits.per_endpoint, rate: None };
        self.endpoints.entry(Arc::clone(endpoint)).or_insert_with(|| Endpoint {
            origin: Arc::clone(origin),
            limits,
            window: ATTEMPTS_AT_FIRST,
            ..Endpoint::default()
        })
    }

    /// Drops the waiting lanes of an endpoint that is disabled, and returns them.
    pub fn remove(&mut self, endpoint: &str) -> VecDeque<LaneId> {
        self.turns.retain(|one| &**one != endpoint);
        self.endpoints.get_mut(endpoint).map(|entry| core::mem::take(&mut entry.waiting)).unwrap_or_default()
    }

    /// Drops an endpoint that is gone, unless something of it waits or is under way. Returns whether it is dropped.
    pub fn drop_idle(&mut self, endpoint: &str) -> bool {
        let is_idle = |entry: &Endpoint| entry.waiting.is_empty() && entry.under_way == 0;
        let is_dropped = self.endpoints.get(endpoint).is_none_or(is_idle);
        if is_dropped {
            self.endpoints.remove(endpoint);
        }
        is_dropped
    }

    pub fn waiting(&self, endpoint: &str) -> usize {
        self.endpoints.get(endpoint).map_or(0, |entry| entry.waiting.len())
    }

    /// The endpoint is not tried before.
    pub fn rest(&mut self, endpoint: &str, until: Option<Instant>) {
        if let Some(entry) = self.endpoints.get_mut(endpoint) {
            entry.rests_until = until;
        }
    }

    /// Begins the next attempt, if one may begin.
    pub fn begin(&mut self, now: Instant) -> Option<NextAttempt> {
        if self.under_way >= self.limits.in_all {
            return None;
        }
        for _ in 0..self.turns.len() {
            let name = self.turns.pop_front()?;
            let begun = self.begin_of(&name, now);
            if self.waiting(&name) > 0 {
                self.turns.push_back(name);
            }
            if begun.is_some() {
                return begun;
            }
        }
        None
    }

    fn begin_of(&mut self, name: &Arc<str>, now: Instant) -> Option<NextAttempt> {
        let endpoint = self.endpoints.get_mut(name)?;
        let rests_until = endpoint.rests_until.max(endpoint.next_by_rate());
        if !endpoint.has_room() || rests_until.is_some_and(|until| now < until) {
            return None;
        }
        let origin = self.origins.entry(Arc::clone(&endpoint.origin)).or_default();
        if origin.under_way >= self.limits.per_origin {
            return None;
        }
        let &lane = endpoint.waiting.front()?;
        let pass = origin.breaker.begin(now)?;
        endpoint.waiting.pop_front();
        endpoint.count_attempt(now);
        endpoint.under_way += 1;
        origin.under_way += 1;
        self.under_way += 1;
        Some(NextAttempt { endpoint: Arc::clone(name), origin: Arc::clone(&endpoint.origin), lane, pass })
    }

    /// An attempt has ended.
    pub fn end(&mut self, attempt: &NextAttempt, reply: Reply, now: Instant) {
        if let Some(endpoint) = self.endpoints.get_mut(&attempt.endpoint) {
            endpoint.window = match reply {
                Reply::Answered { .. } => (endpoint.window + 1).min(endpoint.limits.attempts_max),
                Reply::Failed(_) => (endpoint.window / 2).max(1),
            };
        }
        self.end_with(attempt, |breaker| breaker.on_reply(attempt.pass, reply, now));
    }

    /// An attempt was not made.
    pub fn forget(&mut self, attempt: &NextAttempt) {
        self.end_with(attempt, |breaker| breaker.forget(attempt.pass));
    }

    fn end_with(&mut self, attempt: &NextAttempt, tell: impl FnOnce(&mut Breaker)) {
        let Some(endpoint) = self.endpoints.get_mut(&attempt.endpoint) else { return };
        endpoint.under_way = endpoint.under_way.saturating_sub(1);
        self.under_way = self.under_way.saturating_sub(1);
        let origin = self.origins.entry(Arc::clone(&attempt.origin)).or_default();
        origin.under_way = origin.under_way.saturating_sub(1);
        tell(&mut origin.breaker);
    }

    pub fn probe_at_once(&mut self, origin: &str, now: Instant) {
        if let Some(origin) = self.origins.get_mut(origin) {
            origin.breaker.probe_at_once(now);
        }
    }

    /// The time at which an origin that does not work is probed.
    pub fn probe_at(&self, origin: &str) -> Option<Instant> {
        self.origins.get(origin)?.breaker.open_until()
    }

    /// The time at which a lane that waits for a rest to end may be tried.
    pub fn next_deadline(&self) -> Option<Instant> {
        let of = |name: &Arc<str>| {
            let endpoint = self.endpoints.get(name)?;
            // The end of an attempt is awaited anyway.
            if !endpoint.has_room() {
                return None;
            }
            let probe = self.origins.get(&endpoint.origin).and_then(|origin| origin.breaker.next_probe());
            endpoint.rests_until.max(endpoint.next_by_rate()).max(probe)
        };
        self.turns.iter().filter_map(of).min()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;
    use core::time::Duration;

    use super::*;
    use crate::lane::ErrorClass;

    const WELL: Reply = Reply::Answered { status: 200, retry_after: None, control: None };
    const LIMITS: AttemptLimits = AttemptLimits { in_all: 4, per_endpoint: 2, per_origin: 3 };

    fn dispatcher(limits: AttemptLimits, lanes: &[(&str, &str, usize)]) -> Dispatcher {
        let mut dispatcher = Dispatcher::new(limits);
        let mut id = 0;
        for (endpoint, origin, count) in lanes {
            for _ in 0..*count {
                id += 1;
                dispatcher.add(&Arc::from(*endpoint), &Arc::from(*origin), LaneId(id));
            }
        }
        dispatcher
    }

    fn begin_all(dispatcher: &mut Dispatcher, now: Instant) -> Vec<(Arc<str>, i64)> {
        core::iter::from_fn(|| dispatcher.begin(now)).map(|next| (next.endpoint, next.lane.0)).collect()
    }

    fn named(all: &[(&str, i64)]) -> Vec<(Arc<str>, i64)> {
        all.iter().map(|(endpoint, lane)| (Arc::from(*endpoint), *lane)).collect()
    }

    fn free(endpoint: &str, origin: &str) -> NextAttempt {
        NextAttempt { endpoint: Arc::from(endpoint), origin: Arc::from(origin), lane: LaneId(0), pass: Pass::Free }
    }

    #[test]
    fn endpoints_take_turns_and_their_lanes_keep_their_order() {
        let mut dispatcher = dispatcher(LIMITS, &[("a", "x", 3), ("b", "y", 1), ("c", "z", 3)]);
        let begun = begin_all(&mut dispatcher, Instant::ORIGIN);
        assert_eq!(begun, named(&[("a", 1), ("b", 4), ("c", 5), ("a", 2)]));
        dispatcher.end(&free("a", "x"), WELL, Instant::ORIGIN);
        dispatcher.end(&free("b", "y"), WELL, Instant::ORIGIN);
        assert_eq!(begin_all(&mut dispatcher, Instant::ORIGIN), named(&[("c", 6), ("a", 3)]));
        assert_eq!(dispatcher.waiting("c"), 1);
    }

    #[test]
    fn attempts_are_limited_for_an_endpoint_an_origin_and_in_all() {
        for (lanes, begun) in [
            (&[("a", "x", 9)][..], 2),
            (&[("a", "x", 9), ("b", "x", 9)], 3),
            (&[("a", "x", 9), ("b", "y", 9), ("c", "z", 9)], 4),
        ] {
            let mut dispatcher = dispatcher(LIMITS, lanes);
            assert_eq!(begin_all(&mut dispatcher, Instant::ORIGIN).len(), begun, "{lanes:?}");
            assert_eq!(dispatcher.under_way, begun);
        }
    }

    #[test]
    fn p5_a_dead_endpoint_with_many_lanes_takes_no_turn_of_others() {
        let limits = AttemptLimits { in_all: 100, per_endpoint: 10, per_origin: 10 };
        let mut dispatcher = dispatcher(limits, &[("dead", "x", 1000), ("well", "y", 50)]);
        let dead = Reply::Failed(ErrorClass::Connect);
        let (mut now, mut tries, mut delivered) = (Instant::ORIGIN, 0, 0);
        for _ in 0..60 {
            let begun: Vec<_> = core::iter::from_fn(|| dispatcher.begin(now)).collect();
            for next in begun {
                let is_dead = &*next.endpoint == "dead";
                dispatcher.end(&next, if is_dead { dead } else { WELL }, now);
                *(if is_dead { &mut tries } else { &mut delivered }) += 1;
            }
            now = now.plus(Duration::from_secs(1));
        }
        assert_eq!(delivered, 50);
        assert_eq!(tries, 4 + 1 + 3, "four at once, one more, then probes after 5, 15 and 35 s");
        assert_eq!(dispatcher.next_deadline(), Some(Instant::at(Duration::from_secs(76))));
    }

    #[test]
    fn p5_endpoints_that_are_silent_leave_attempts_for_others() {
        let limits = AttemptLimits { in_all: 64, per_endpoint: 32, per_origin: 32 };
        let mut dispatcher = dispatcher(limits, &[("a", "1", 99), ("b", "2", 99), ("c", "3", 99), ("well", "w", 99)]);
        let mut now = Instant::ORIGIN;
        let mut delivered = 0;
        for _ in 0..9 {
            let begun: Vec<_> = core::iter::from_fn(|| dispatcher.begin(now)).collect();
            for next in begun.iter().filter(|next| &*next.endpoint == "well") {
                dispatcher.end(next, WELL, now);
                delivered += 1;
            }
            now = now.plus(Duration::from_millis(10));
        }
        assert_eq!((delivered, dispatcher.under_way), (99, 3 * ATTEMPTS_AT_FIRST), "4, 8, 16, 32 and so on");
    }

    #[test]
    fn an_endpoint_has_limits_of_its_own() {
        let limits = AttemptLimits { in_all: 9, per_endpoint: 9, per_origin: 9 };
        let mut dispatcher = dispatcher(limits, &[("a", "x", 9), ("b", "x", 3)]);
        dispatcher.limit(&Arc::from("a"), &Arc::from("x"), EndpointLimits { attempts_max: 1, rate: None });
        assert_eq!(begin_all(&mut dispatcher, Instant::ORIGIN), named(&[("a", 1), ("b", 10), ("b", 11), ("b", 12)]));
        assert_eq!(dispatcher.next_deadline(), None);
        dispatcher.end(&free("a", "x"), WELL, Instant::ORIGIN);
        assert_eq!(begin_all(&mut dispatcher, Instant::ORIGIN), named(&[("a", 2)]));
    }

    #[test]
    fn a_rate_limits_the_attempts_of_an_endpoint_within_any_time_of_its_length() {
        let limits = AttemptLimits { in_all: 99, per_endpoint: 99, per_origin: 99 };
        let mut dispatcher = dispatcher(limits, &[("a", "x", 50)]);
        let rate = Some(Rate { attempts: 3, per: Duration::from_secs(1) });
        dispatcher.limit(&Arc::from("a"), &Arc::from("x"), EndpointLimits { attempts_max: 99, rate });
        let mut begun: VecDeque<u64> = VecDeque::new();
        for ms in (0..4_000).step_by(100) {
            let now = Instant::at(Duration::from_millis(ms));
            // The first ones end at different times.
            let wanted = if ms < 1_000 { 1 } else { 9 };
            let next: Vec<_> = (0..wanted).map_while(|_| dispatcher.begin(now)).collect();
            next.iter().for_each(|next| dispatcher.end(next, WELL, now));
            begun.extend(next.iter().map(|_| ms));
        }
        assert_eq!(begun, [0, 100, 200, 1_000, 1_100, 1_200, 2_000, 2_100, 2_200, 3_000, 3_100, 3_200]);
        assert_eq!(dispatcher.next_deadline(), Some(Instant::at(Duration::from_secs(4))));
    }

    #[test]
    fn f2_an_endpoint_that_is_gone_is_dropped_once_nothing_of_it_is_under_way() {
        let mut dispatcher = dispatcher(LIMITS, &[("a", "x", 1)]);
        assert!(!dispatcher.drop_idle("a"));
        let next = dispatcher.begin(Instant::ORIGIN).unwrap();
        assert!(!dispatcher.drop_idle("a"));
        dispatcher.end(&next, WELL, Instant::ORIGIN);
        assert!(dispatcher.drop_idle("a") && dispatcher.endpoints.is_empty());
    }

    #[test]
    fn an_endpoint_that_rests_is_due_when_its_rest_ends() {
        let mut dispatcher = dispatcher(LIMITS, &[("a", "x", 1)]);
        let until = Instant::at(Duration::from_secs(9));
        dispatcher.rest("a", Some(until));
        assert_eq!((dispatcher.begin(Instant::ORIGIN), dispatcher.next_deadline()), (None, Some(until)));
        assert!(dispatcher.begin(until).is_some());
        assert_eq!(dispatcher.next_deadline(), None);
        dispatcher.add(&Arc::from("a"), &Arc::from("x"), LaneId(2));
        assert_eq!((dispatcher.remove("a").len(), dispatcher.begin(until)), (1, None));
    }
}
