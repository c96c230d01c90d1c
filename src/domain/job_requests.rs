//! What a worker knows of the requests of a queue that it watches, and which one it tries to claim next.
//!
//! The queue has no server that hands its requests out: each worker watches all of them. If all took the first, most would lose it
//! to another, so each takes one of the first few at random.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};

/// Of how many free requests of one precedence one is picked at random, as long as no claim is lost to another worker. Measured with
/// 16 workers of one slot: two to three times the rate of the strict order.
pub const PICK_AMONG: usize = 16;
/// Of how many at most. Measured with 16 workers of 16 slots: four claims were lost for each that was won among 16.
pub const PICK_AMONG_MAX: usize = 1024;

/// A request as its node says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenRequest {
    /// The lowest is first.
    pub precedence: i64,
    /// The transaction that created it; the lowest is first.
    pub created: i64,
    /// It waits for a worker.
    pub is_requested: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    precedence: i64,
    created: i64,
    id: Box<str>,
}

/// The requests of a queue.
#[derive(Debug, Default)]
pub struct JobRequests {
    seen: BTreeMap<Box<str>, SeenRequest>,
    contenders: BTreeMap<Box<str>, BTreeSet<Box<str>>>,
    /// Requested and not locked.
    free: BTreeSet<Place>,
    /// Not offered for a while.
    deferred: BTreeSet<Box<str>>,
    /// Changed since they were read: unlocked ones, and those whose holder may change them again.
    unread: BTreeSet<Box<str>>,
    unread_locked: BTreeSet<Box<str>>,
    /// Claims are spread over so many more than [`PICK_AMONG`].
    spread: usize,
}

impl JobRequests {
    /// Forgets everything but deferrals, to be told anew.
    pub fn clear(&mut self) {
        *self = Self { deferred: core::mem::take(&mut self.deferred), ..Self::default() };
    }

    /// A request was read.
    pub fn on_request(&mut self, id: &str, seen: SeenRequest) {
        self.take(id);
        self.seen.insert(id.into(), seen);
        self.put_back(id);
    }

    /// A request was created or changed. It is not offered before it is read, and not read before its lock is given up.
    pub fn on_request_changed(&mut self, id: &str) {
        self.on_request_deleted(id);
        let is_locked = self.contenders.contains_key(id);
        if is_locked { &mut self.unread_locked } else { &mut self.unread }.insert(id.into());
    }

    /// The requests that have to be read now.
    pub fn take_unread(&mut self) -> BTreeSet<Box<str>> {
        core::mem::take(&mut self.unread)
    }

    /// A request was deleted.
    pub fn on_request_deleted(&mut self, id: &str) {
        self.take(id);
        self.seen.remove(id);
        self.unread.remove(id);
        self.unread_locked.remove(id);
    }

    /// A worker has entered the lock of a request, which may be this one.
    pub fn on_contender(&mut self, id: &str, contender: &str) {
        self.take(id);
        self.contenders.entry(id.into()).or_default().insert(contender.into());
    }

    /// A worker has left the lock of a request.
    pub fn on_contender_left(&mut self, id: &str, contender: &str) {
        if let Some(contenders) = self.contenders.get_mut(id) {
            contenders.remove(contender);
            if contenders.is_empty() {
                self.contenders.remove(id);
                self.unread.extend(self.unread_locked.take(id));
            }
        }
        self.put_back(id);
    }

    /// Precedence and transaction of the first free request, to compare queues by.
    pub fn first_place(&self) -> Option<(i64, i64)> {
        self.free.first().map(|place| (place.precedence, place.created))
    }

    /// Takes one of the first free requests, which is then not offered again until something about it is seen.
    /// `below` returns a random number below its argument.
    pub fn pick(&mut self, below: impl FnOnce(usize) -> usize) -> Option<Box<str>> {
        let precedence = self.free.first()?.precedence;
        let among = PICK_AMONG + self.spread;
        let first = || self.free.iter().take(among).take_while(|place| place.precedence == precedence);
        let place = first().nth(below(first().count()))?.clone();
        self.free.remove(&place);
        Some(place.id)
    }

    /// Something else has to happen before it can be claimed: it is not offered before [`JobRequests::end_deferral`].
    pub fn defer(&mut self, id: &str) {
        self.take(id);
        self.deferred.insert(id.into());
    }

    /// It may be offered again.
    pub fn end_deferral(&mut self, id: &str) {
        self.deferred.remove(id);
        self.put_back(id);
    }

    /// A claim was won: the others are fewer than it seemed, perhaps.
    pub fn on_claim_won(&mut self) {
        self.spread = self.spread.saturating_sub(1);
    }

    /// Another worker was first. Claims are spread until about one in sixteen is lost.
    pub fn on_claim_lost(&mut self) {
        self.spread = (self.spread + PICK_AMONG).min(PICK_AMONG_MAX - PICK_AMONG);
    }

    /// A claim has failed without an answer: it is offered again.
    pub fn put_back(&mut self, id: &str) {
        if self.deferred.contains(id) {
            return;
        }
        if let Some(seen) = self.seen.get(id).filter(|seen| seen.is_requested && !self.contenders.contains_key(id)) {
            self.free.insert(Place { precedence: seen.precedence, created: seen.created, id: id.into() });
        }
    }

    fn take(&mut self, id: &str) {
        if let Some(seen) = self.seen.get(id) {
            self.free.remove(&Place { precedence: seen.precedence, created: seen.created, id: id.into() });
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    fn requested(precedence: i64, created: i64) -> SeenRequest {
        SeenRequest { precedence, created, is_requested: true }
    }

    #[test]
    fn the_lowest_precedence_comes_first_then_the_oldest() {
        let mut queue = JobRequests::default();
        for (id, precedence, created) in [("late", 200, 9), ("low", 300, 1), ("early", 200, 5), ("high", 100, 10)] {
            queue.on_request(id, requested(precedence, created));
        }
        let order: Vec<_> = core::iter::from_fn(|| queue.pick(|_| 0)).collect();
        assert_eq!(order.iter().map(AsRef::as_ref).collect::<Vec<&str>>(), ["high", "early", "late", "low"]);
    }

    #[test]
    fn a_random_pick_never_crosses_a_precedence() {
        let mut queue = JobRequests::default();
        queue.on_request("a", requested(100, 1));
        queue.on_request("b", requested(100, 2));
        queue.on_request("c", requested(200, 3));
        assert_eq!(queue.pick(|among| among - 1).as_deref(), Some("b"));
        assert_eq!(queue.pick(|among| among - 1).as_deref(), Some("a"));
        assert_eq!(queue.pick(|among| among - 1).as_deref(), Some("c"));
    }

    #[test]
    fn a_changed_request_is_read_once_it_is_unlocked_and_offered_once_it_is_read() {
        let mut queue = JobRequests::default();
        let unread = |queue: &mut JobRequests| queue.take_unread().into_iter().collect::<Vec<_>>();
        queue.on_request("a", requested(100, 1));
        queue.on_contender("a", "x");
        queue.on_request_changed("a");
        assert!(unread(&mut queue).is_empty(), "its holder may change it again");
        queue.on_contender_left("a", "x");
        assert_eq!(queue.pick(|_| 0), None, "what was read is out of date");
        assert_eq!(unread(&mut queue), ["a".into()]);
        queue.on_request("a", requested(100, 1));
        assert_eq!(queue.pick(|_| 0).as_deref(), Some("a"));
        queue.on_request_changed("a");
        queue.on_request_deleted("a");
        assert!(unread(&mut queue).is_empty());
    }

    #[test]
    fn picks_are_spread_while_claims_are_lost_and_drawn_together_by_those_that_are_won() {
        let mut queue = JobRequests::default();
        for number in 0..2000_i64 {
            queue.on_request(&alloc::format!("{number}"), requested(100, number));
        }
        let among = |queue: &mut JobRequests| {
            let mut found = 0;
            let id = queue.pick(|below| {
                found = below;
                0
            });
            queue.put_back(&id.unwrap());
            found
        };
        assert_eq!(among(&mut queue), PICK_AMONG);
        queue.on_claim_lost();
        assert_eq!(among(&mut queue), 2 * PICK_AMONG);
        (0..100).for_each(|_| queue.on_claim_lost());
        assert_eq!(among(&mut queue), PICK_AMONG_MAX);
        (0..2000).for_each(|_| queue.on_claim_won());
        assert_eq!(among(&mut queue), PICK_AMONG);
    }

    #[test]
    fn a_locked_or_running_request_is_free_again_once_it_is_neither() {
        let mut queue = JobRequests::default();
        queue.on_contender("a", "x");
        queue.on_request("a", requested(100, 1));
        assert_eq!(queue.pick(|_| 0), None);
        queue.on_contender_left("a", "x");
        queue.on_request("a", SeenRequest { is_requested: false, ..requested(100, 1) });
        assert_eq!(queue.pick(|_| 0), None);
        queue.on_request("a", requested(100, 1));
        assert_eq!(queue.pick(|_| 0).as_deref(), Some("a"));
        assert_eq!(queue.pick(|_| 0), None, "it is offered once");
        queue.put_back("a");
        queue.on_request_deleted("a");
        assert_eq!(queue.pick(|_| 0), None);
    }

    #[test]
    fn a_deferred_request_is_free_again_once_its_deferral_ends() {
        let mut queue = JobRequests::default();
        queue.on_request("a", requested(100, 1));
        queue.defer("a");
        queue.on_contender_left("a", "x");
        queue.clear();
        queue.on_request("a", requested(100, 1));
        assert_eq!(queue.pick(|_| 0), None);
        queue.end_deferral("a");
        assert_eq!(queue.pick(|_| 0).as_deref(), Some("a"));
    }
}
