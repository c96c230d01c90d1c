//! Which lane is attempted next: endpoints take turns, then the lanes of an endpoint, within the limits of attempts under way.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;

use super::Reply;
use super::breaker::{Breaker, Pass};
use crate::domain::time::Instant;

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

/// An attempt that may begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextAttempt {
    pub endpoint: Arc<str>,
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

#[derive(Debug)]
struct Endpoint {
    origin: Arc<str>,
    waiting: VecDeque<LaneId>,
    under_way: usize,
    rests_until: Option<Instant>,
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
        let entry = self.endpoints.entry(Arc::clone(endpoint)).or_insert_with(|| Endpoint {
            origin: Arc::clone(origin),
            waiting: VecDeque::new(),
            under_way: 0,
            rests_until: None,
        });
        if entry.waiting.is_empty() {
            self.turns.push_back(Arc::clone(endpoint));
        }
        entry.waiting.push_back(lane);
    }

    /// Drops the waiting lanes of an endpoint that is disabled, and returns them.
    pub fn remove(&mut self, endpoint: &str) -> VecDeque<LaneId> {
        self.turns.retain(|one| &**one != endpoint);
        self.endpoints.get_mut(endpoint).map(|entry| core::mem::take(&mut entry.waiting)).unwrap_or_default()
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
        if endpoint.under_way >= self.limits.per_endpoint || endpoint.rests_until.is_some_and(|until| now < until) {
            return None;
        }
        let origin = self.origins.entry(Arc::clone(&endpoint.origin)).or_default();
        if origin.under_way >= self.limits.per_origin {
            return None;
        }
        let &lane = endpoint.waiting.front()?;
        let pass = origin.breaker.begin(now)?;
        endpoint.waiting.pop_front();
        endpoint.under_way += 1;
        origin.under_way += 1;
        self.under_way += 1;
        Some(NextAttempt { endpoint: Arc::clone(name), lane, pass })
    }

    /// An attempt has ended.
    pub fn end(&mut self, endpoint: &str, pass: Pass, reply: Reply, now: Instant) {
        self.end_with(endpoint, |breaker| breaker.on_reply(pass, reply, now));
    }

    /// An attempt was not made.
    pub fn forget(&mut self, endpoint: &str, pass: Pass) {
        self.end_with(endpoint, |breaker| breaker.forget(pass));
    }

    fn end_with(&mut self, endpoint: &str, tell: impl FnOnce(&mut Breaker)) {
        let Some(entry) = self.endpoints.get_mut(endpoint) else { return };
        entry.under_way = entry.under_way.saturating_sub(1);
        self.under_way = self.under_way.saturating_sub(1);
        let origin = self.origins.entry(Arc::clone(&entry.origin)).or_default();
        origin.under_way = origin.under_way.saturating_sub(1);
        tell(&mut origin.breaker);
    }

    /// When a lane that waits for a rest to end may be tried.
    pub fn next_deadline(&self) -> Option<Instant> {
        let of = |name: &Arc<str>| {
            let endpoint = self.endpoints.get(name)?;
            let probe = self.origins.get(&endpoint.origin).and_then(|origin| origin.breaker.next_probe());
            endpoint.rests_until.max(probe)
        };
        self.turns.iter().filter_map(of).min()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;
    use core::time::Duration;

    use super::*;
    use crate::domain::lane::ErrorClass;

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

    #[test]
    fn endpoints_take_turns_and_their_lanes_keep_their_order() {
        let mut dispatcher = dispatcher(LIMITS, &[("a", "x", 3), ("b", "y", 1), ("c", "z", 3)]);
        let begun = begin_all(&mut dispatcher, Instant::ORIGIN);
        assert_eq!(begun, named(&[("a", 1), ("b", 4), ("c", 5), ("a", 2)]));
        dispatcher.end("a", Pass::Free, WELL, Instant::ORIGIN);
        dispatcher.end("b", Pass::Free, WELL, Instant::ORIGIN);
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
            for NextAttempt { endpoint, pass, .. } in begun {
                let is_dead = &*endpoint == "dead";
                dispatcher.end(&endpoint, pass, if is_dead { dead } else { WELL }, now);
                *(if is_dead { &mut tries } else { &mut delivered }) += 1;
            }
            now = now.plus(Duration::from_secs(1));
        }
        assert_eq!(delivered, 50);
        assert!((10..=15).contains(&tries), "ten at once, then probes after 5, 15 and 35 s: {tries}");
        assert_eq!(dispatcher.next_deadline(), Some(Instant::at(Duration::from_secs(75))));
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
