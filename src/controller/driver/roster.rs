//! Who is there, as the lists of a driver say: what has changed since the last one, and who is to be told to go.
//!
//! A worker that was started is missed only by a list that began after its start was done; one that nobody here has started
//! is taken in. No clock, no call: the task around it makes those.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::{Assignment, Change, End, Found, Names, Standing, Stop};
use crate::domain::group::Key;
use crate::domain::time::Instant;

struct Worker {
    key: Key,
    /// The first list that has to show it; `None` while it is being started.
    from: Option<u64>,
    is_promise: bool,
    leaving: Option<Leaving>,
}

struct Leaving {
    kill_at: Instant,
    /// It has been told.
    asked: bool,
    /// The list after which it was last told, or was to be.
    tried: Option<u64>,
    calling: bool,
    /// How it was told last, and whether that worked.
    last: Option<(Stop, bool)>,
}

/// What is left of one that has ended.
#[derive(Clone, Copy)]
struct Burial {
    calling: bool,
    /// The first list that says whether it is still to be forgotten.
    from: u64,
    has_failed: bool,
}

pub(super) struct Roster {
    grace: Duration,
    names: Names,
    /// Whether what is left of those who have ended is to be forgotten: whoever has the pool reads first how they ended.
    in_charge: bool,
    /// How many lists have begun.
    looks: u64,
    workers: BTreeMap<String, Worker>,
    /// Those that have ended, of whom something is left.
    remains: VecDeque<(String, Key)>,
    /// Those of them, those that a call is under way for, and those of whom a list may still speak.
    burying: BTreeMap<String, Burial>,
}

impl Roster {
    pub(super) const fn new(grace: Duration, names: Names) -> Self {
        Self {
            grace,
            names,
            in_charge: false,
            looks: 0,
            workers: BTreeMap::new(),
            remains: VecDeque::new(),
            burying: BTreeMap::new(),
        }
    }

    /// Whether this controller has the pool. Whoever was to be told meanwhile is told now, and has all of its time.
    pub(super) fn is_in_charge(&mut self, in_charge: bool, now: Instant) {
        if in_charge && !self.in_charge {
            let leaving = self.workers.values_mut().filter_map(|worker| worker.leaving.as_mut());
            for leaving in leaving.filter(|leaving| !leaving.asked) {
                leaving.kill_at = now.plus(self.grace);
            }
        }
        self.in_charge = in_charge;
    }

    /// Whether one is there, as far as is known, or something of it is.
    pub(super) fn knows(&self, id: &str) -> bool {
        self.workers.contains_key(id) || self.burying.contains_key(id)
    }

    /// One is about to be started.
    pub(super) fn starts(&mut self, assignment: &Assignment) {
        let is_promise = self.names == Names::Theirs;
        let worker = Worker { key: assignment.key.clone(), from: None, is_promise, leaving: None };
        self.workers.insert(assignment.id.clone(), worker);
    }

    /// It was.
    pub(super) fn started(&mut self, id: &str) {
        if let Some(worker) = self.workers.get_mut(id) {
            worker.from = Some(self.looks + 1);
        }
    }

    /// It was not, as far as is known. If it is there after all, a list shows it.
    pub(super) fn refused(&mut self, id: &str) {
        self.workers.remove(id);
        // What may be left of it is no news.
        let burial = Burial { calling: false, from: self.looks + 1, has_failed: false };
        self.burying.insert(id.to_owned(), burial);
    }

    /// One is to go. Its time begins now.
    pub(super) fn leaves(&mut self, id: &str, now: Instant) {
        let kill_at = now.plus(self.grace);
        if let Some(worker) = self.workers.get_mut(id) {
            worker.leaving.get_or_insert(Leaving { kill_at, asked: false, tried: None, calling: false, last: None });
        }
    }

    /// Somebody who is to be told now, and how. Each is told once, and once more after each list that still shows it where that
    /// did not work or where its time is over. Only who has the pool tells anybody anything.
    pub(super) fn due(&mut self, now: Instant) -> Option<(String, Key, Stop)> {
        if !self.in_charge {
            return None;
        }
        if let Some((id, key)) = self.remains.pop_front() {
            return Some((id, key, Stop::Forget));
        }
        let looks = self.looks;
        self.workers.iter_mut().filter(|(_, worker)| worker.from.is_some()).find_map(|(id, worker)| {
            let leaving = worker.leaving.as_mut()?;
            let over = now >= leaving.kill_at;
            if leaving.calling || leaving.tried == Some(looks) || (leaving.asked && !over) {
                return None;
            }
            (leaving.calling, leaving.tried) = (true, Some(looks));
            Some((id.clone(), worker.key.clone(), if over { Stop::Force } else { Stop::Ask }))
        })
    }

    /// One was told, or could not be. Whether that is news: it is tried again after each list.
    pub(super) fn stopped(&mut self, id: &str, stop: Stop, done: bool) -> bool {
        match stop {
            Stop::Forget => {
                let Some(burial) = self.burying.get_mut(id) else { return !done };
                let is_news = burial.has_failed == done;
                *burial = Burial { calling: false, from: self.looks + 1, has_failed: !done };
                is_news
            }
            Stop::Ask | Stop::Force => {
                let leaving = self.workers.get_mut(id).and_then(|worker| worker.leaving.as_mut());
                leaving.is_some_and(|leaving| {
                    leaving.calling = false;
                    leaving.asked |= done;
                    leaving.last.replace((stop, done)) != Some((stop, done))
                })
            }
        }
    }

    /// A list begins.
    pub(super) const fn looks(&mut self) {
        self.looks += 1;
    }

    /// The list that began last.
    pub(super) fn seen(&mut self, found: Vec<Found>, now: Instant) -> Vec<Change> {
        let (mut changes, mut there, mut over) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        for Found { id, key, standing } in found {
            match standing {
                Standing::There | Standing::Going | Standing::Promised => {
                    there.insert(id.clone());
                    let is_promise = standing == Standing::Promised;
                    let worker = self.workers.entry(id.clone()).or_insert_with(|| {
                        let (id, known) = (id.clone(), key.clone());
                        changes.push(if is_promise {
                            Change::Promised { id, key: known }
                        } else {
                            Change::Found { id, key: known }
                        });
                        Worker { key, from: Some(self.looks), is_promise, leaving: None }
                    });
                    if standing == Standing::Going {
                        let kill_at = now.plus(self.grace);
                        let leaving = worker.leaving.get_or_insert_with(|| {
                            changes.push(Change::Going { id });
                            Leaving { kill_at, asked: true, tried: None, calling: false, last: None }
                        });
                        // What was asked has come through, whatever was answered.
                        leaving.asked = true;
                    }
                }
                Standing::Ended(end) => {
                    // Of one that is just being started a list speaks that has begun when that was done: before, a container is
                    // there that does not run.
                    let is_early = |worker: &Worker| worker.from.is_none_or(|from| from > self.looks);
                    if self.workers.get(&id).is_some_and(is_early) {
                        there.insert(id);
                        continue;
                    }
                    over.insert(id.clone());
                    let known = self.workers.remove(&id);
                    let is_new = self.in_charge && self.buries(&id, &key);
                    // One that was promised may have come and gone between two lists, and any while nobody looked.
                    let is_news = is_new && known.is_none();
                    if is_news && self.names == Names::Theirs {
                        changes.push(Change::Found { id: id.clone(), key: key.clone() });
                    }
                    if is_news || known.is_some() {
                        let told = known.is_some_and(|worker| worker.leaving.is_some());
                        changes.push(Change::Ended { id, key, end, told });
                    }
                }
            }
        }
        let missed = |(id, worker): &(&String, &Worker)| {
            !there.contains(*id) && worker.from.is_some_and(|from| from <= self.looks)
        };
        let gone: Vec<String> = self.workers.iter().filter(missed).map(|(id, _)| id.clone()).collect();
        for id in gone {
            let Some(worker) = self.workers.remove(&id) else { continue };
            if worker.is_promise {
                changes.push(Change::Kept { id });
                continue;
            }
            let told = worker.leaving.is_some();
            let end = End { how: "it is not there any more".to_owned(), ..End::default() };
            changes.push(Change::Ended { id, key: worker.key, end, told });
        }
        let looks = self.looks;
        self.burying.retain(|id, burial| burial.calling || looks < burial.from || over.contains(id));
        changes
    }

    /// What is left of one that has ended is to be forgotten. Whether it was not before.
    fn buries(&mut self, id: &str, key: &Key) -> bool {
        let before = self.burying.get(id).copied();
        if before.is_none_or(|burial| !burial.calling && self.looks >= burial.from) {
            self.remains.push_back((id.to_owned(), key.clone()));
            let has_failed = before.is_some_and(|burial| burial.has_failed);
            self.burying.insert(id.to_owned(), Burial { calling: true, from: 0, has_failed });
        }
        before.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    fn roster(names: Names) -> Roster {
        Roster { in_charge: true, ..Roster::new(GRACE, names) }
    }

    fn key() -> Key {
        Key::new("k").unwrap()
    }

    fn assignment(id: &str) -> Assignment {
        Assignment { id: id.to_owned(), key: key(), variables: BTreeMap::new() }
    }

    fn there(id: &str) -> Found {
        Found { id: id.to_owned(), key: key(), standing: Standing::There }
    }

    fn ended(id: &str, how: &str) -> Found {
        Found { standing: Standing::Ended(end(how)), ..there(id) }
    }

    fn end(how: &str) -> End {
        End { how: how.to_owned(), ..End::default() }
    }

    fn listed(roster: &mut Roster, found: &[Found]) -> Vec<Change> {
        roster.looks();
        roster.seen(found.to_vec(), at(0))
    }

    fn due(roster: &mut Roster, seconds: u64) -> Option<(String, Stop)> {
        roster.due(at(seconds)).map(|(id, _, stop)| (id, stop))
    }

    #[test]
    fn one_that_was_started_is_missed_only_by_a_list_that_began_afterwards() {
        let mut roster = roster(Names::Ours);
        roster.starts(&assignment("a"));
        assert_eq!(listed(&mut roster, &[]), []);
        roster.looks();
        roster.started("a");
        assert_eq!(roster.seen(Vec::new(), at(0)), []);
        assert_eq!(listed(&mut roster, &[there("a")]), []);
        let gone = Change::Ended { id: "a".to_owned(), key: key(), end: end("it is not there any more"), told: false };
        assert_eq!(listed(&mut roster, &[]), [gone]);
        assert_eq!(listed(&mut roster, &[]), []);
    }

    #[test]
    fn one_that_was_started_while_a_list_was_made_has_not_ended_by_that_list() {
        let mut roster = roster(Names::Ours);
        roster.starts(&assignment("a"));
        roster.looks();
        roster.started("a");
        assert_eq!(roster.seen(vec![ended("a", "it was never started")], at(0)), []);
        assert_eq!(due(&mut roster, 0), None, "nothing of it is to be forgotten");
        let gone = Change::Ended { id: "a".to_owned(), key: key(), end: end("3"), told: false };
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), [gone]);
    }

    #[test]
    fn one_that_nobody_here_has_started_is_taken_in_once_also_where_its_start_seemed_to_fail() {
        let mut roster = roster(Names::Ours);
        roster.starts(&assignment("a"));
        roster.refused("a");
        let found = |id: &str| Change::Found { id: id.to_owned(), key: key() };
        assert_eq!(listed(&mut roster, &[there("a"), there("b")]), [found("a"), found("b")]);
        assert_eq!(listed(&mut roster, &[there("a"), there("b")]), []);
    }

    #[test]
    fn one_that_is_told_to_go_is_asked_once_and_forced_after_its_grace_for_as_long_as_it_is_there() {
        let mut roster = roster(Names::Ours);
        listed(&mut roster, &[there("a")]);
        assert_eq!(due(&mut roster, 0), None);
        roster.leaves("a", at(0));
        roster.leaves("a", at(50));
        let (ask, force) = (Some(("a".to_owned(), Stop::Ask)), Some(("a".to_owned(), Stop::Force)));
        assert_eq!(due(&mut roster, 0), ask);
        roster.stopped("a", Stop::Ask, false);
        assert_eq!(due(&mut roster, 0), None, "after the next list");
        listed(&mut roster, &[there("a")]);
        assert_eq!(due(&mut roster, 1), ask);
        assert_eq!(due(&mut roster, 1), None, "it is under way");
        roster.stopped("a", Stop::Ask, true);
        listed(&mut roster, &[there("a")]);
        assert_eq!(due(&mut roster, 59), None);
        for is_news in [true, false] {
            assert_eq!(due(&mut roster, 60), force);
            assert_eq!(roster.stopped("a", Stop::Force, true), is_news, "it is said once that it is killed");
            listed(&mut roster, &[there("a")]);
        }
        let gone = Change::Ended { id: "a".to_owned(), key: key(), end: end("killed"), told: true };
        assert_eq!(listed(&mut roster, &[ended("a", "killed")]), [gone]);
    }

    #[test]
    fn one_that_goes_already_is_not_asked_again_and_is_forced_after_its_grace() {
        let mut roster = roster(Names::Ours);
        let going = || Found { standing: Standing::Going, ..there("a") };
        let changes = [Change::Found { id: "a".to_owned(), key: key() }, Change::Going { id: "a".to_owned() }];
        assert_eq!(listed(&mut roster, &[going()]), changes);
        assert_eq!(listed(&mut roster, &[going()]), []);
        assert_eq!(due(&mut roster, 59), None);
        assert_eq!(due(&mut roster, 60), Some(("a".to_owned(), Stop::Force)));
        let gone = Change::Ended { id: "a".to_owned(), key: key(), end: end("it is not there any more"), told: true };
        assert_eq!(listed(&mut roster, &[]), [gone]);
    }

    #[test]
    fn one_that_is_called_by_others_is_a_promise_until_it_is_there_by_its_own_name() {
        let mut roster = roster(Names::Theirs);
        let promised = |id: &str| Found { standing: Standing::Promised, ..there(id) };
        roster.starts(&assignment("a"));
        roster.started("a");
        let first = [Change::Promised { id: "d~0".to_owned(), key: key() }, Change::Kept { id: "a".to_owned() }];
        assert_eq!(listed(&mut roster, &[promised("d~0")]), first);
        assert_eq!(listed(&mut roster, &[promised("d~0")]), []);
        let then = [Change::Found { id: "pod".to_owned(), key: key() }, Change::Kept { id: "d~0".to_owned() }];
        assert_eq!(listed(&mut roster, &[there("pod")]), then);
        let gone =
            Change::Ended { id: "pod".to_owned(), key: key(), end: end("it is not there any more"), told: false };
        assert_eq!(listed(&mut roster, &[]), [gone]);
    }

    #[test]
    fn what_is_left_of_one_that_has_ended_is_forgotten_until_no_list_shows_it() {
        let mut roster = roster(Names::Ours);
        let forget = Some(("a".to_owned(), Stop::Forget));
        // It ended while nobody looked, which is told once.
        let gone = Change::Ended { id: "a".to_owned(), key: key(), end: end("3"), told: false };
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), std::slice::from_ref(&gone));
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), []);
        assert_eq!((due(&mut roster, 0), due(&mut roster, 0)), (forget.clone(), None));
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), []);
        assert_eq!(due(&mut roster, 0), None, "it is under way");
        assert!(roster.stopped("a", Stop::Forget, false));
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), []);
        assert_eq!(due(&mut roster, 0), forget);
        assert!(!roster.stopped("a", Stop::Forget, false), "that was said");
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), []);
        assert_eq!(due(&mut roster, 0), forget);
        roster.looks();
        roster.stopped("a", Stop::Forget, true);
        assert_eq!(roster.seen(vec![ended("a", "3")], at(0)), [], "it began before that was done");
        assert_eq!(due(&mut roster, 0), None);
        assert_eq!(listed(&mut roster, &[]), []);
        assert_eq!(due(&mut roster, 0), None);
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), [gone], "another one of that name");
    }

    #[test]
    fn what_is_left_of_one_that_has_ended_is_left_to_whoever_has_the_pool() {
        let mut roster = Roster { in_charge: false, ..roster(Names::Ours) };
        listed(&mut roster, &[there("a")]);
        let ended = [ended("a", "3")];
        let gone = Change::Ended { id: "a".to_owned(), key: key(), end: end("3"), told: false };
        assert_eq!(listed(&mut roster, &ended), std::slice::from_ref(&gone));
        assert_eq!((listed(&mut roster, &ended), due(&mut roster, 0)), (vec![], None));
        roster.is_in_charge(true, at(0));
        assert_eq!(listed(&mut roster, &ended), [gone], "to whoever has the pool");
        assert_eq!(due(&mut roster, 0), Some(("a".to_owned(), Stop::Forget)));
    }

    #[test]
    fn what_is_left_of_one_that_could_not_be_started_goes_without_a_word() {
        let mut roster = roster(Names::Ours);
        roster.starts(&assignment("a"));
        roster.refused("a");
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), []);
        assert_eq!(due(&mut roster, 0), Some(("a".to_owned(), Stop::Forget)));
        roster.stopped("a", Stop::Forget, true);
        assert_eq!(listed(&mut roster, &[]), []);
        assert!(roster.burying.is_empty());
    }

    #[test]
    fn one_that_was_to_be_told_while_somebody_else_had_the_pool_is_asked_first_and_has_its_time() {
        let mut roster = roster(Names::Ours);
        listed(&mut roster, &[there("a")]);
        roster.is_in_charge(false, at(0));
        roster.leaves("a", at(0));
        assert_eq!(due(&mut roster, 100), None);
        roster.is_in_charge(true, at(100));
        assert_eq!(due(&mut roster, 100), Some(("a".to_owned(), Stop::Ask)));
        roster.stopped("a", Stop::Ask, true);
        roster.is_in_charge(true, at(150));
        listed(&mut roster, &[there("a")]);
        assert_eq!(due(&mut roster, 159), None);
        assert_eq!(due(&mut roster, 160), Some(("a".to_owned(), Stop::Force)));
    }

    #[test]
    fn one_that_is_being_started_is_told_to_go_once_it_was() {
        let mut roster = roster(Names::Ours);
        roster.starts(&assignment("a"));
        roster.leaves("a", at(0));
        assert_eq!(due(&mut roster, 0), None);
        assert_eq!(listed(&mut roster, &[ended("a", "at once")]), []);
        roster.started("a");
        assert_eq!(due(&mut roster, 0), Some(("a".to_owned(), Stop::Ask)));
    }
}
