//! Compares the lists of a driver with the expected workers, and decides which stop calls are due.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::{ListedWorker, StopMode, WorkerChange, WorkerExit, WorkerIdSource, WorkerSpec, WorkerState};
use crate::domain::group::Key;
use crate::domain::time::Instant;

struct ExpectedWorker {
    key: Key,
    expected_from_list: Option<u64>,
    is_pending: bool,
    termination: Option<Termination>,
}

struct Termination {
    kill_at: Instant,
    is_requested: bool,
    last_attempt_list: Option<u64>,
    in_progress: bool,
    last_result: Option<(StopMode, bool)>,
}

#[derive(Clone, Copy)]
struct Cleanup {
    in_progress: bool,
    settled_from_list: u64,
    has_failed: bool,
}

pub(super) struct Reconciler {
    termination_grace: Duration,
    id_source: WorkerIdSource,
    active: bool,
    lists_started: u64,
    workers: BTreeMap<String, ExpectedWorker>,
    cleanup_queue: VecDeque<(String, Key)>,
    cleanups: BTreeMap<String, Cleanup>,
}

impl Reconciler {
    pub(super) const fn new(termination_grace: Duration, id_source: WorkerIdSource) -> Self {
        Self {
            termination_grace,
            id_source,
            active: false,
            lists_started: 0,
            workers: BTreeMap::new(),
            cleanup_queue: VecDeque::new(),
            cleanups: BTreeMap::new(),
        }
    }

    pub(super) fn set_active(&mut self, in_charge: bool, now: Instant) {
        if in_charge && !self.active {
            let leaving = self.workers.values_mut().filter_map(|worker| worker.termination.as_mut());
            for leaving in leaving.filter(|leaving| !leaving.is_requested) {
                leaving.kill_at = now.plus(self.termination_grace);
            }
        }
        self.active = in_charge;
    }

    pub(super) fn is_known(&self, id: &str) -> bool {
        self.workers.contains_key(id) || self.cleanups.contains_key(id)
    }

    pub(super) fn on_start_requested(&mut self, assignment: &WorkerSpec) {
        let is_promise = self.id_source == WorkerIdSource::Platform;
        let worker = ExpectedWorker {
            key: assignment.key.clone(),
            expected_from_list: None,
            is_pending: is_promise,
            termination: None,
        };
        self.workers.insert(assignment.id.clone(), worker);
    }

    pub(super) fn on_started(&mut self, id: &str) {
        if let Some(worker) = self.workers.get_mut(id) {
            worker.expected_from_list = Some(self.lists_started + 1);
        }
    }

    pub(super) fn on_start_failed(&mut self, id: &str) {
        self.workers.remove(id);
        // An exited remainder of a failed start is not reported.
        let burial = Cleanup { in_progress: false, settled_from_list: self.lists_started + 1, has_failed: false };
        self.cleanups.insert(id.to_owned(), burial);
    }

    pub(super) fn request_stop(&mut self, id: &str, now: Instant) {
        let kill_at = now.plus(self.termination_grace);
        if let Some(worker) = self.workers.get_mut(id) {
            worker.termination.get_or_insert(Termination {
                kill_at,
                is_requested: false,
                last_attempt_list: None,
                in_progress: false,
                last_result: None,
            });
        }
    }

    pub(super) fn next_stop(&mut self, now: Instant) -> Option<(String, Key, StopMode)> {
        if !self.active {
            return None;
        }
        if let Some((id, key)) = self.cleanup_queue.pop_front() {
            return Some((id, key, StopMode::Remove));
        }
        let looks = self.lists_started;
        self.workers.iter_mut().filter(|(_, worker)| worker.expected_from_list.is_some()).find_map(|(id, worker)| {
            let leaving = worker.termination.as_mut()?;
            let over = now >= leaving.kill_at;
            if leaving.in_progress || leaving.last_attempt_list == Some(looks) || (leaving.is_requested && !over) {
                return None;
            }
            (leaving.in_progress, leaving.last_attempt_list) = (true, Some(looks));
            Some((id.clone(), worker.key.clone(), if over { StopMode::Kill } else { StopMode::Terminate }))
        })
    }

    pub(super) fn on_stopped(&mut self, id: &str, stop: StopMode, done: bool) -> bool {
        match stop {
            StopMode::Remove => {
                let Some(burial) = self.cleanups.get_mut(id) else { return !done };
                let is_news = burial.has_failed == done;
                *burial = Cleanup { in_progress: false, settled_from_list: self.lists_started + 1, has_failed: !done };
                is_news
            }
            StopMode::Terminate | StopMode::Kill => {
                let leaving = self.workers.get_mut(id).and_then(|worker| worker.termination.as_mut());
                leaving.is_some_and(|leaving| {
                    leaving.in_progress = false;
                    leaving.is_requested |= done;
                    leaving.last_result.replace((stop, done)) != Some((stop, done))
                })
            }
        }
    }

    pub(super) const fn on_list_started(&mut self) {
        self.lists_started += 1;
    }

    pub(super) fn on_listed(&mut self, found: Vec<ListedWorker>, now: Instant) -> Vec<WorkerChange> {
        let (mut changes, mut there, mut over) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        for ListedWorker { id, key, state: standing } in found {
            match standing {
                WorkerState::Running | WorkerState::Stopping | WorkerState::Pending => {
                    there.insert(id.clone());
                    let is_promise = standing == WorkerState::Pending;
                    let worker = self.workers.entry(id.clone()).or_insert_with(|| {
                        let (id, known) = (id.clone(), key.clone());
                        changes.push(if is_promise {
                            WorkerChange::Pending { id, key: known }
                        } else {
                            WorkerChange::Discovered { id, key: known }
                        });
                        ExpectedWorker {
                            key,
                            expected_from_list: Some(self.lists_started),
                            is_pending: is_promise,
                            termination: None,
                        }
                    });
                    if standing == WorkerState::Stopping {
                        let kill_at = now.plus(self.termination_grace);
                        let leaving = worker.termination.get_or_insert_with(|| {
                            changes.push(WorkerChange::Stopping { id });
                            Termination {
                                kill_at,
                                is_requested: true,
                                last_attempt_list: None,
                                in_progress: false,
                                last_result: None,
                            }
                        });
                        // The stop took effect whatever the call returned.
                        leaving.is_requested = true;
                    }
                }
                WorkerState::Exited(end) => {
                    // A list that began before the start returned may show a created
                    // container that does not run yet.
                    let is_early = |worker: &ExpectedWorker| {
                        worker.expected_from_list.is_none_or(|from| from > self.lists_started)
                    };
                    if self.workers.get(&id).is_some_and(is_early) {
                        there.insert(id);
                        continue;
                    }
                    over.insert(id.clone());
                    let known = self.workers.remove(&id);
                    let is_new = self.active && self.schedule_cleanup(&id, &key);
                    // A pending worker may have started and exited between two lists.
                    let is_news = is_new && known.is_none();
                    if is_news && self.id_source == WorkerIdSource::Platform {
                        changes.push(WorkerChange::Discovered { id: id.clone(), key: key.clone() });
                    }
                    if is_news || known.is_some() {
                        let told = known.is_some_and(|worker| worker.termination.is_some());
                        changes.push(WorkerChange::Exited { id, key, exit: end, requested: told });
                    }
                }
            }
        }
        let missed = |(id, worker): &(&String, &ExpectedWorker)| {
            !there.contains(*id) && worker.expected_from_list.is_some_and(|from| from <= self.lists_started)
        };
        let gone: Vec<String> = self.workers.iter().filter(missed).map(|(id, _)| id.clone()).collect();
        for id in gone {
            let Some(worker) = self.workers.remove(&id) else { continue };
            if worker.is_pending {
                changes.push(WorkerChange::PendingResolved { id });
                continue;
            }
            let told = worker.termination.is_some();
            let end = WorkerExit { reason: "no longer listed".to_owned(), ..WorkerExit::default() };
            changes.push(WorkerChange::Exited { id, key: worker.key, exit: end, requested: told });
        }
        let looks = self.lists_started;
        self.cleanups.retain(|id, burial| burial.in_progress || looks < burial.settled_from_list || over.contains(id));
        changes
    }

    fn schedule_cleanup(&mut self, id: &str, key: &Key) -> bool {
        let before = self.cleanups.get(id).copied();
        if before.is_none_or(|burial| !burial.in_progress && self.lists_started >= burial.settled_from_list) {
            self.cleanup_queue.push_back((id.to_owned(), key.clone()));
            let has_failed = before.is_some_and(|burial| burial.has_failed);
            self.cleanups.insert(id.to_owned(), Cleanup { in_progress: true, settled_from_list: 0, has_failed });
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

    fn roster(names: WorkerIdSource) -> Reconciler {
        Reconciler { active: true, ..Reconciler::new(GRACE, names) }
    }

    fn key() -> Key {
        Key::new("k").unwrap()
    }

    fn assignment(id: &str) -> WorkerSpec {
        WorkerSpec { id: id.to_owned(), key: key(), variables: BTreeMap::new() }
    }

    fn there(id: &str) -> ListedWorker {
        ListedWorker { id: id.to_owned(), key: key(), state: WorkerState::Running }
    }

    fn ended(id: &str, how: &str) -> ListedWorker {
        ListedWorker { state: WorkerState::Exited(end(how)), ..there(id) }
    }

    fn end(how: &str) -> WorkerExit {
        WorkerExit { reason: how.to_owned(), ..WorkerExit::default() }
    }

    fn listed(roster: &mut Reconciler, found: &[ListedWorker]) -> Vec<WorkerChange> {
        roster.on_list_started();
        roster.on_listed(found.to_vec(), at(0))
    }

    fn due(roster: &mut Reconciler, seconds: u64) -> Option<(String, StopMode)> {
        roster.next_stop(at(seconds)).map(|(id, _, stop)| (id, stop))
    }

    #[test]
    fn one_that_was_started_is_missed_only_by_a_list_that_began_afterwards() {
        let mut roster = roster(WorkerIdSource::Controller);
        roster.on_start_requested(&assignment("a"));
        assert_eq!(listed(&mut roster, &[]), []);
        roster.on_list_started();
        roster.on_started("a");
        assert_eq!(roster.on_listed(Vec::new(), at(0)), []);
        assert_eq!(listed(&mut roster, &[there("a")]), []);
        let gone =
            WorkerChange::Exited { id: "a".to_owned(), key: key(), exit: end("no longer listed"), requested: false };
        assert_eq!(listed(&mut roster, &[]), [gone]);
        assert_eq!(listed(&mut roster, &[]), []);
    }

    #[test]
    fn one_that_was_started_while_a_list_was_made_has_not_ended_by_that_list() {
        let mut roster = roster(WorkerIdSource::Controller);
        roster.on_start_requested(&assignment("a"));
        roster.on_list_started();
        roster.on_started("a");
        assert_eq!(roster.on_listed(vec![ended("a", "created, never started")], at(0)), []);
        assert_eq!(due(&mut roster, 0), None, "nothing of it is to be forgotten");
        let gone = WorkerChange::Exited { id: "a".to_owned(), key: key(), exit: end("3"), requested: false };
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), [gone]);
    }

    #[test]
    fn one_that_nobody_here_has_started_is_taken_in_once_also_where_its_start_seemed_to_fail() {
        let mut roster = roster(WorkerIdSource::Controller);
        roster.on_start_requested(&assignment("a"));
        roster.on_start_failed("a");
        let found = |id: &str| WorkerChange::Discovered { id: id.to_owned(), key: key() };
        assert_eq!(listed(&mut roster, &[there("a"), there("b")]), [found("a"), found("b")]);
        assert_eq!(listed(&mut roster, &[there("a"), there("b")]), []);
    }

    #[test]
    fn one_that_is_told_to_go_is_asked_once_and_forced_after_its_grace_for_as_long_as_it_is_there() {
        let mut roster = roster(WorkerIdSource::Controller);
        listed(&mut roster, &[there("a")]);
        assert_eq!(due(&mut roster, 0), None);
        roster.request_stop("a", at(0));
        roster.request_stop("a", at(50));
        let (ask, force) = (Some(("a".to_owned(), StopMode::Terminate)), Some(("a".to_owned(), StopMode::Kill)));
        assert_eq!(due(&mut roster, 0), ask);
        roster.on_stopped("a", StopMode::Terminate, false);
        assert_eq!(due(&mut roster, 0), None, "after the next list");
        listed(&mut roster, &[there("a")]);
        assert_eq!(due(&mut roster, 1), ask);
        assert_eq!(due(&mut roster, 1), None, "it is under way");
        roster.on_stopped("a", StopMode::Terminate, true);
        listed(&mut roster, &[there("a")]);
        assert_eq!(due(&mut roster, 59), None);
        for is_news in [true, false] {
            assert_eq!(due(&mut roster, 60), force);
            assert_eq!(roster.on_stopped("a", StopMode::Kill, true), is_news, "it is said once that it is killed");
            listed(&mut roster, &[there("a")]);
        }
        let gone = WorkerChange::Exited { id: "a".to_owned(), key: key(), exit: end("killed"), requested: true };
        assert_eq!(listed(&mut roster, &[ended("a", "killed")]), [gone]);
    }

    #[test]
    fn one_that_goes_already_is_not_asked_again_and_is_forced_after_its_grace() {
        let mut roster = roster(WorkerIdSource::Controller);
        let going = || ListedWorker { state: WorkerState::Stopping, ..there("a") };
        let changes = [
            WorkerChange::Discovered { id: "a".to_owned(), key: key() },
            WorkerChange::Stopping { id: "a".to_owned() },
        ];
        assert_eq!(listed(&mut roster, &[going()]), changes);
        assert_eq!(listed(&mut roster, &[going()]), []);
        assert_eq!(due(&mut roster, 59), None);
        assert_eq!(due(&mut roster, 60), Some(("a".to_owned(), StopMode::Kill)));
        let gone =
            WorkerChange::Exited { id: "a".to_owned(), key: key(), exit: end("no longer listed"), requested: true };
        assert_eq!(listed(&mut roster, &[]), [gone]);
    }

    #[test]
    fn one_that_is_called_by_others_is_a_promise_until_it_is_there_by_its_own_name() {
        let mut roster = roster(WorkerIdSource::Platform);
        let promised = |id: &str| ListedWorker { state: WorkerState::Pending, ..there(id) };
        roster.on_start_requested(&assignment("a"));
        roster.on_started("a");
        let first = [
            WorkerChange::Pending { id: "d~0".to_owned(), key: key() },
            WorkerChange::PendingResolved { id: "a".to_owned() },
        ];
        assert_eq!(listed(&mut roster, &[promised("d~0")]), first);
        assert_eq!(listed(&mut roster, &[promised("d~0")]), []);
        let then = [
            WorkerChange::Discovered { id: "pod".to_owned(), key: key() },
            WorkerChange::PendingResolved { id: "d~0".to_owned() },
        ];
        assert_eq!(listed(&mut roster, &[there("pod")]), then);
        let gone =
            WorkerChange::Exited { id: "pod".to_owned(), key: key(), exit: end("no longer listed"), requested: false };
        assert_eq!(listed(&mut roster, &[]), [gone]);
    }

    #[test]
    fn what_is_left_of_one_that_has_ended_is_forgotten_until_no_list_shows_it() {
        let mut roster = roster(WorkerIdSource::Controller);
        let forget = Some(("a".to_owned(), StopMode::Remove));
        let gone = WorkerChange::Exited { id: "a".to_owned(), key: key(), exit: end("3"), requested: false };
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), std::slice::from_ref(&gone));
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), []);
        assert_eq!((due(&mut roster, 0), due(&mut roster, 0)), (forget.clone(), None));
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), []);
        assert_eq!(due(&mut roster, 0), None, "it is under way");
        assert!(roster.on_stopped("a", StopMode::Remove, false));
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), []);
        assert_eq!(due(&mut roster, 0), forget);
        assert!(!roster.on_stopped("a", StopMode::Remove, false), "that was said");
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), []);
        assert_eq!(due(&mut roster, 0), forget);
        roster.on_list_started();
        roster.on_stopped("a", StopMode::Remove, true);
        assert_eq!(roster.on_listed(vec![ended("a", "3")], at(0)), [], "it began before that was done");
        assert_eq!(due(&mut roster, 0), None);
        assert_eq!(listed(&mut roster, &[]), []);
        assert_eq!(due(&mut roster, 0), None);
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), [gone], "another one of that name");
    }

    #[test]
    fn what_is_left_of_one_that_has_ended_is_left_to_whoever_has_the_pool() {
        let mut roster = Reconciler { active: false, ..roster(WorkerIdSource::Controller) };
        listed(&mut roster, &[there("a")]);
        let ended = [ended("a", "3")];
        let gone = WorkerChange::Exited { id: "a".to_owned(), key: key(), exit: end("3"), requested: false };
        assert_eq!(listed(&mut roster, &ended), std::slice::from_ref(&gone));
        assert_eq!((listed(&mut roster, &ended), due(&mut roster, 0)), (vec![], None));
        roster.set_active(true, at(0));
        assert_eq!(listed(&mut roster, &ended), [gone], "to whoever has the pool");
        assert_eq!(due(&mut roster, 0), Some(("a".to_owned(), StopMode::Remove)));
    }

    #[test]
    fn what_is_left_of_one_that_could_not_be_started_goes_without_a_word() {
        let mut roster = roster(WorkerIdSource::Controller);
        roster.on_start_requested(&assignment("a"));
        roster.on_start_failed("a");
        assert_eq!(listed(&mut roster, &[ended("a", "3")]), []);
        assert_eq!(due(&mut roster, 0), Some(("a".to_owned(), StopMode::Remove)));
        roster.on_stopped("a", StopMode::Remove, true);
        assert_eq!(listed(&mut roster, &[]), []);
        assert!(roster.cleanups.is_empty());
    }

    #[test]
    fn one_that_was_to_be_told_while_somebody_else_had_the_pool_is_asked_first_and_has_its_time() {
        let mut roster = roster(WorkerIdSource::Controller);
        listed(&mut roster, &[there("a")]);
        roster.set_active(false, at(0));
        roster.request_stop("a", at(0));
        assert_eq!(due(&mut roster, 100), None);
        roster.set_active(true, at(100));
        assert_eq!(due(&mut roster, 100), Some(("a".to_owned(), StopMode::Terminate)));
        roster.on_stopped("a", StopMode::Terminate, true);
        roster.set_active(true, at(150));
        listed(&mut roster, &[there("a")]);
        assert_eq!(due(&mut roster, 159), None);
        assert_eq!(due(&mut roster, 160), Some(("a".to_owned(), StopMode::Kill)));
    }

    #[test]
    fn one_that_is_being_started_is_told_to_go_once_it_was() {
        let mut roster = roster(WorkerIdSource::Controller);
        roster.on_start_requested(&assignment("a"));
        roster.request_stop("a", at(0));
        assert_eq!(due(&mut roster, 0), None);
        assert_eq!(listed(&mut roster, &[ended("a", "at once")]), []);
        roster.on_started("a");
        assert_eq!(due(&mut roster, 0), Some(("a".to_owned(), StopMode::Terminate)));
    }
}
