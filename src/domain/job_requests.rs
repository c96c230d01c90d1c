//! What a worker knows of the requests of a queue, and which one it tries to claim next.
//!
//! No server hands the requests out: each worker lists them itself. As long as few are free, it watches the queue, so that it learns
//! of each at once. While many are free, it claims from its list and is not told of what the others do, which would cost each worker
//! more than its own claims; a lost claim shows that the list is old.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

/// A worker claims the free requests of one precedence from one of the first so many on, as long as no claim is lost to another
/// worker. If all began with the first, most would lose it.
pub const PICK_AMONG: usize = 16;
/// The most that the first claim is drawn from.
pub const PICK_AMONG_MAX: usize = 4_096;
/// Free requests beyond which a worker does not watch the queue.
const WATCHED_FREE_MAX: usize = 64;
/// Claims that are lost before the requests are listed again: so many, and one more for so many listed.
const LOST_MAX: usize = 64;
const LISTED_PER_LOST: usize = 128;
/// The age of a list, for this many requests and for fewer.
const LIST_AGE_MAX: Duration = Duration::from_secs(1);
const LISTED_PER_AGE: u32 = 20_000;

/// A request as its node says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenRequest {
    /// The lowest is first.
    pub precedence: i64,
    /// The lowest is first: the transaction that created it, or its time in milliseconds, which are not compared with each other.
    pub created: i64,
    /// It waits for a worker.
    pub is_requested: bool,
}

impl SeenRequest {
    /// What the name of a task tells, such as `p0000000200-019ad1e2c0de7…`: its precedence, and its time in a UUID of version 7.
    fn of_name(name: &str) -> Option<Self> {
        let (precedence, unique) = name.strip_prefix('p')?.split_once('-')?;
        let is_one =
            precedence.len() == 10 && precedence.bytes().all(|byte| byte.is_ascii_digit()) && unique.len() == 32;
        let created = i64::from_str_radix(unique.get(..12)?, 16).ok()?;
        Some(Self { precedence: precedence.parse().ok()?, created, is_requested: true }).filter(|_| is_one)
    }
}

/// The name of a task that is read from a list without its node. A precedence of more digits, or below zero, needs the node.
pub fn task_name(precedence: i64, unique: &str) -> String {
    match precedence {
        0..=9_999_999_999 => alloc::format!("p{precedence:010}-{unique}"),
        _ => unique.into(),
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    precedence: i64,
    created: i64,
    id: Box<str>,
}

impl Place {
    fn new(id: &str, seen: SeenRequest) -> Self {
        Self { precedence: seen.precedence, created: seen.created, id: id.into() }
    }
}

/// The requests of a queue.
#[derive(Debug, Default)]
pub struct JobRequests {
    seen: BTreeMap<Box<str>, SeenRequest>,
    locked: BTreeSet<Box<str>>,
    /// Requested and not locked.
    free: BTreeSet<Place>,
    /// Not offered for a while.
    deferred: BTreeSet<Box<str>>,
    /// Changed since they were read.
    unread: BTreeSet<Box<str>>,
    /// Claims are spread over so many more than [`PICK_AMONG`].
    spread: usize,
    /// The place of the last pick, and how many more follow it in their order.
    run: Option<(Place, usize)>,
    /// Claims that were lost since the requests were listed.
    lost: usize,
}

impl JobRequests {
    /// The requests were listed, and the locks, where a lock says that a request runs. Those that this worker holds are not offered.
    /// Returns which have to be read: unknown ones, and with `again` all that did not wait for a worker.
    pub fn on_list(
        &mut self,
        mut names: Vec<String>,
        locked: impl IntoIterator<Item = String>,
        is_held: impl Fn(&str) -> bool,
        again: bool,
    ) -> Vec<Box<str>> {
        self.lost = 0;
        self.locked = locked.into_iter().map(String::into_boxed_str).collect();
        names.sort_unstable();
        let is_listed = |id: &str| names.binary_search_by(|name| name.as_str().cmp(id)).is_ok();
        self.seen.retain(|id, _| is_listed(id));
        let Self { free, locked, .. } = self;
        free.retain(|place| is_listed(&place.id) && !locked.contains(&place.id));
        let mut unread = Vec::new();
        for name in names {
            let known = self.seen.get(name.as_str()).copied();
            match known.or_else(|| SeenRequest::of_name(&name)) {
                Some(seen) if seen.is_requested => {
                    // What is seen is free already, unless a claim was tried.
                    if known.is_none() {
                        self.seen.insert(name.as_str().into(), seen);
                    }
                    if !is_held(&name) {
                        self.offer(&name);
                    }
                }
                Some(_) if !again => {}
                Some(_) | None => unread.push(name.into_boxed_str()),
            }
        }
        unread
    }

    /// True if the requests have to be listed again, as long as they are not watched.
    pub fn needs_list(&self, age: Duration) -> bool {
        let listed = self.seen.len();
        let age_max = LIST_AGE_MAX * u32::try_from(listed).unwrap_or(u32::MAX).div_ceil(LISTED_PER_AGE).max(1);
        self.free.is_empty() || self.lost >= LOST_MAX + listed / LISTED_PER_LOST || age >= age_max
    }

    /// True if more are free than a worker watches.
    pub fn are_many(&self) -> bool {
        self.free.len() > WATCHED_FREE_MAX
    }

    /// A request was read.
    pub fn on_request(&mut self, id: &str, seen: SeenRequest) {
        self.take(id);
        self.seen.insert(id.into(), seen);
        self.offer(id);
    }

    /// A request was created.
    pub fn on_request_created(&mut self, id: &str) {
        match SeenRequest::of_name(id) {
            Some(seen) => self.on_request(id, seen),
            None => _ = self.unread.insert(id.into()),
        }
    }

    /// A request was changed. It is not offered before it is read.
    pub fn on_request_changed(&mut self, id: &str) {
        self.forget(id);
        self.unread.insert(id.into());
    }

    /// The requests that have to be read now.
    pub fn take_unread(&mut self) -> BTreeSet<Box<str>> {
        core::mem::take(&mut self.unread)
    }

    /// A request was deleted, or what is known of it holds no more.
    pub fn forget(&mut self, id: &str) {
        self.take(id);
        self.seen.remove(id);
        self.unread.remove(id);
    }

    /// A worker, which may be this one, has locked a request.
    pub fn on_locked(&mut self, id: &str) {
        self.take(id);
        self.locked.insert(id.into());
    }

    /// A request is not locked any more.
    pub fn on_unlocked(&mut self, id: &str) {
        self.locked.remove(id);
        self.offer(id);
    }

    /// Precedence and age of the first free request, to compare queues by.
    pub fn first_place(&self) -> Option<(i64, i64)> {
        self.free.first().map(|place| (place.precedence, place.created))
    }

    /// Takes one of the first free requests, which is then not offered again until something about it is seen: the one after the
    /// last pick, or another start at random. `below` returns a random number below its argument.
    pub fn pick(&mut self, below: impl FnOnce(usize) -> usize) -> Option<Box<str>> {
        let first = self.free.first()?;
        let among = PICK_AMONG + self.spread;
        let (next, left) = match &self.run {
            Some((last, left @ 1..)) => (self.free.range(last..).next(), left - 1),
            Some(_) | None => (self.free.iter().nth(below(among.min(self.free.len()))), among - 1),
        };
        let place = next.filter(|place| place.precedence == first.precedence).unwrap_or(first).clone();
        self.free.remove(&place);
        self.run = Some((place.clone(), left));
        Some(place.id)
    }

    /// It cannot be claimed, so that no list offers it; unless it was offered again since the claim began.
    pub fn set_aside(&mut self, id: &str) {
        let is_free = self.seen.get(id).is_some_and(|seen| self.free.contains(&Place::new(id, *seen)));
        if !is_free {
            self.seen.insert(id.into(), SeenRequest { precedence: 0, created: 0, is_requested: false });
        }
    }

    /// Something else has to happen before it can be claimed: it is not offered before [`JobRequests::end_deferral`].
    pub fn defer(&mut self, id: &str) {
        self.take(id);
        self.deferred.insert(id.into());
    }

    /// It may be offered again.
    pub fn end_deferral(&mut self, id: &str) {
        self.deferred.remove(id);
        self.offer(id);
    }

    /// A claim was won: the others are fewer than it seemed, perhaps.
    pub fn on_claim_won(&mut self) {
        self.spread = self.spread.saturating_sub(1);
    }

    /// Another worker was first, and perhaps with the next ones as well. Claims are spread until about one in sixteen is lost.
    pub fn on_claim_lost(&mut self) {
        self.spread = (self.spread + PICK_AMONG).min(PICK_AMONG_MAX - PICK_AMONG);
        self.lost += 1;
        self.run = None;
    }

    /// Offers a request that waits and is not locked.
    pub fn offer(&mut self, id: &str) {
        let seen = self.seen.get(id).filter(|seen| seen.is_requested);
        if let Some(seen) = seen.filter(|_| !self.locked.contains(id) && !self.deferred.contains(id)) {
            self.free.insert(Place::new(id, *seen));
        }
    }

    fn take(&mut self, id: &str) {
        if let Some(seen) = self.seen.get(id) {
            self.free.remove(&Place::new(id, *seen));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requested(precedence: i64, created: i64) -> SeenRequest {
        SeenRequest { precedence, created, is_requested: true }
    }

    fn list(queue: &mut JobRequests, names: &[&str], locked: &[&str], again: bool) -> Vec<Box<str>> {
        let strings = |names: &[&str]| names.iter().map(|name| String::from(*name)).collect::<Vec<_>>();
        queue.on_list(strings(names), strings(locked), |_| false, again)
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
        assert_eq!(queue.pick(|among| among - 2).as_deref(), Some("b"));
        assert_eq!(queue.pick(|among| among - 1).as_deref(), Some("a"));
        assert_eq!(queue.pick(|among| among - 1).as_deref(), Some("c"));
    }

    #[test]
    fn a_name_of_a_task_tells_its_place_and_any_other_is_read() {
        let unique = |time: &str| alloc::format!("{time}{:020}", 0);
        let late = task_name(100, &unique("019ad1e2c0df"));
        let early = task_name(100, &unique("019ad1e2c0de"));
        let low = task_name(9_999_999_999, &unique("019ad1e2c0dd"));
        let others = ["p200-a", "0f0e", &task_name(-1, "a"), &task_name(10_000_000_000, "b"), "p00000002xx-0", "pé"];
        let mut queue = JobRequests::default();
        let names: Vec<&str> = [late.as_str(), &early, &low].into_iter().chain(others).collect();
        let mut unread: Vec<_> = list(&mut queue, &names, &[], false).into_iter().map(String::from).collect();
        unread.sort_unstable();
        let mut expected = others;
        expected.sort_unstable();
        assert_eq!(unread, expected);
        let order: Vec<_> = core::iter::from_fn(|| queue.pick(|_| 0)).collect();
        assert_eq!(order.iter().map(AsRef::as_ref).collect::<Vec<&str>>(), [early.as_str(), &late, &low]);
    }

    #[test]
    fn a_changed_request_is_offered_once_it_is_read() {
        let mut queue = JobRequests::default();
        let unread = |queue: &mut JobRequests| queue.take_unread().into_iter().collect::<Vec<_>>();
        queue.on_request("a", requested(100, 1));
        queue.on_request_changed("a");
        assert_eq!(queue.pick(|_| 0), None, "what was read is out of date");
        assert_eq!(unread(&mut queue), ["a".into()]);
        queue.on_request("a", requested(100, 1));
        assert_eq!(queue.pick(|_| 0).as_deref(), Some("a"));
        queue.on_request_changed("a");
        queue.forget("a");
        assert!(unread(&mut queue).is_empty());
    }

    #[test]
    fn a_list_offers_what_is_free_reads_what_is_new_and_forgets_what_is_gone() {
        let mut queue = JobRequests::default();
        assert_eq!(list(&mut queue, &["c", "b", "a"], &["b"], false), ["a".into(), "b".into(), "c".into()]);
        queue.on_request("a", requested(100, 1));
        queue.on_request("b", requested(100, 2));
        queue.on_request("c", SeenRequest { is_requested: false, ..requested(100, 3) });
        assert_eq!(queue.pick(|_| 0).as_deref(), Some("a"));
        assert_eq!(queue.pick(|_| 0), None, "the others are locked and running");
        assert!(list(&mut queue, &["a", "b", "c"], &["a"], false).is_empty());
        assert_eq!(queue.pick(|_| 0).as_deref(), Some("b"), "its lock is gone");
        assert_eq!(list(&mut queue, &["c"], &[], true), ["c".into()], "it may wait for a worker by now");
        assert_eq!(queue.pick(|_| 0), None);
        assert!(
            queue
                .on_list(
                    alloc::vec!["c".into(), "p0000000001-019ad1e2c0de00000000000000000000".into()],
                    [],
                    |_| true,
                    false
                )
                .is_empty()
        );
        assert_eq!(queue.pick(|_| 0), None, "this worker holds it");
    }

    #[test]
    fn a_list_is_old_after_lost_claims_after_a_while_and_when_nothing_is_left_of_it() {
        let mut queue = JobRequests::default();
        assert!(queue.needs_list(Duration::ZERO));
        for number in 0..40_000_i64 {
            queue.on_request(&alloc::format!("{number}"), requested(100, number));
            assert_eq!(queue.are_many(), number >= 64);
        }
        let (young, old) = (Duration::from_millis(1_999), Duration::from_secs(2));
        assert!(!queue.needs_list(young) && queue.needs_list(old));
        let lost = (0..).take_while(|_| {
            queue.on_claim_lost();
            !queue.needs_list(young)
        });
        assert_eq!(lost.count() + 1, 64 + 40_000 / 128);
        let names: Vec<String> = (0..40_000).map(|number| alloc::format!("{number}")).collect();
        queue.on_list(names, [], |_| false, false);
        assert!(!queue.needs_list(young));
    }

    #[test]
    fn picks_follow_each_other_until_one_is_lost_and_are_spread_while_claims_are_lost() {
        let mut queue = JobRequests::default();
        for number in 0..8_000_i64 {
            queue.on_request(&alloc::format!("{number}"), requested(100, number));
        }
        let pick = |queue: &mut JobRequests| {
            let mut among = None;
            let id = queue.pick(|below| {
                among = Some(below);
                below - 1
            });
            (id.unwrap().parse::<usize>().unwrap(), among)
        };
        assert_eq!(pick(&mut queue), (15, Some(PICK_AMONG)));
        for after in 16..31 {
            assert_eq!(pick(&mut queue), (after, None));
        }
        assert_eq!(pick(&mut queue), (31, Some(PICK_AMONG)), "the first have their turn");
        queue.on_claim_lost();
        assert_eq!(pick(&mut queue).1, Some(2 * PICK_AMONG));
        (0..1_000).for_each(|_| queue.on_claim_lost());
        assert_eq!(pick(&mut queue).1, Some(PICK_AMONG_MAX));
        (0..5_000).for_each(|_| queue.on_claim_won());
        queue.on_claim_lost();
        assert_eq!(pick(&mut queue).1, Some(2 * PICK_AMONG));
    }

    #[test]
    fn a_locked_or_running_request_is_free_again_once_it_is_neither() {
        let mut queue = JobRequests::default();
        queue.on_locked("a");
        queue.on_request("a", requested(100, 1));
        assert_eq!(queue.pick(|_| 0), None);
        queue.on_unlocked("a");
        queue.on_request("a", SeenRequest { is_requested: false, ..requested(100, 1) });
        assert_eq!(queue.pick(|_| 0), None);
        queue.on_request("a", requested(100, 1));
        assert_eq!(queue.pick(|_| 0).as_deref(), Some("a"));
        assert_eq!(queue.pick(|_| 0), None, "it is offered once");
        queue.offer("a");
        queue.forget("a");
        assert_eq!(queue.pick(|_| 0), None);
    }

    #[test]
    fn what_was_set_aside_is_not_offered_by_a_list_before_it_is_read() {
        let mut queue = JobRequests::default();
        let name = task_name(1, &alloc::format!("019ad1e2c0de{:020}", 0));
        list(&mut queue, &[&name], &[], false);
        let id = queue.pick(|_| 0).unwrap();
        queue.set_aside(&id);
        assert!(list(&mut queue, &[&name], &[], false).is_empty());
        assert_eq!(queue.pick(|_| 0), None);
        assert_eq!(list(&mut queue, &[&name], &[], true).first(), Some(&id));
        queue.on_request(&id, requested(1, 1));
        queue.set_aside(&id);
        assert_eq!(queue.pick(|_| 0), Some(id), "it was offered again meanwhile");
    }

    #[test]
    fn a_deferred_request_is_free_again_once_its_deferral_ends() {
        let mut queue = JobRequests::default();
        queue.on_request("a", requested(100, 1));
        queue.defer("a");
        queue.on_unlocked("a");
        list(&mut queue, &["a"], &[], true);
        queue.on_request("a", requested(100, 1));
        assert_eq!(queue.pick(|_| 0), None);
        queue.end_deferral("a");
        assert_eq!(queue.pick(|_| 0).as_deref(), Some("a"));
    }
}
