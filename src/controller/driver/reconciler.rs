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

impl Termination {
    const fn new(kill_at: Instant) -> Self {
        Self { kill_at, is_requested: false, last_attempt_list: None, in_progress: false, last_result: None }
    }
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
            lists_started: 0,
            workers: BTreeMap::new(),
            cleanup_queue: VecDeque::new(),
            cleanups: BTreeMap::new(),
        }
    }

    pub(super) fn is_known(&self, id: &str) -> bool {
        self.workers.contains_key(id) || self.cleanups.contains_key(id)
    }

    pub(super) fn on_start_requested(&mut self, spec: &WorkerSpec) {
        let is_pending = self.id_source == WorkerIdSource::Platform;
        let worker = ExpectedWorker { key: spec.key.clone(), expected_from_list: None, is_pending, termination: None };
        self.workers.insert(spec.id.clone(), worker);
    }

    pub(super) fn on_started(&mut self, id: &str) {
        if let Some(worker) = self.workers.get_mut(id) {
            worker.expected_from_list = Some(self.lists_started + 1);
        }
    }

    pub(super) fn on_start_failed(&mut self, id: &str) {
        self.workers.remove(id);
        // An exited remainder of a failed start is not reported.
        let cleanup = Cleanup { in_progress: false, settled_from_list: self.lists_started + 1, has_failed: false };
        self.cleanups.insert(id.to_owned(), cleanup);
    }

    pub(super) fn request_stop(&mut self, id: &str, now: Instant) {
        let kill_at = now.plus(self.termination_grace);
        if let Some(worker) = self.workers.get_mut(id) {
            worker.termination.get_or_insert_with(|| Termination::new(kill_at));
        }
    }

    pub(super) fn next_stop(&mut self, now: Instant) -> Option<(String, Key, StopMode)> {
        if let Some((id, key)) = self.cleanup_queue.pop_front() {
            return Some((id, key, StopMode::Remove));
        }
        let lists = self.lists_started;
        self.workers.iter_mut().filter(|(_, worker)| worker.expected_from_list.is_some()).find_map(|(id, worker)| {
            let termination = worker.termination.as_mut()?;
            let over = now >= termination.kill_at;
            if termination.in_progress
                || termination.last_attempt_list == Some(lists)
                || (termination.is_requested && !over)
            {
                return None;
            }
            (termination.in_progress, termination.last_attempt_list) = (true, Some(lists));
            Some((id.clone(), worker.key.clone(), if over { StopMode::Kill } else { StopMode::Terminate }))
        })
    }

    pub(super) fn on_stopped(&mut self, id: &str, stop: StopMode, done: bool) -> bool {
        match stop {
            StopMode::Remove => {
                let Some(cleanup) = self.cleanups.get_mut(id) else { return !done };
                let is_news = cleanup.has_failed == done;
                *cleanup = Cleanup { in_progress: false, settled_from_list: self.lists_started + 1, has_failed: !done };
                is_news
            }
            StopMode::Terminate | StopMode::Kill => {
                let termination = self.workers.get_mut(id).and_then(|worker| worker.termination.as_mut());
                termination.is_some_and(|termination| {
                    termination.in_progress = false;
                    termination.is_requested |= done;
                    termination.last_result.replace((stop, done)) != Some((stop, done))
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
                    let is_pending = standing == WorkerState::Pending;
                    let worker = self.workers.entry(id.clone()).or_insert_with(|| {
                        let (id, known) = (id.clone(), key.clone());
                        changes.push(if is_pending {
                            WorkerChange::Pending { id, key: known }
                        } else {
                            WorkerChange::Discovered { id, key: known }
                        });
                        ExpectedWorker {
                            key,
                            expected_from_list: Some(self.lists_started),
                            is_pending,
                            termination: None,
                        }
                    });
                    if standing == WorkerState::Stopping {
                        let kill_at = now.plus(self.termination_grace);
                        let termination = worker.termination.get_or_insert_with(|| {
                            changes.push(WorkerChange::Stopping { id });
                            Termination::new(kill_at)
                        });
                        // The stop took effect whatever the call returned.
                        termination.is_requested = true;
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
                    let is_new = self.schedule_cleanup(&id, &key);
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
        let lists = self.lists_started;
        self.cleanups
            .retain(|id, cleanup| cleanup.in_progress || lists < cleanup.settled_from_list || over.contains(id));
        changes
    }

    fn schedule_cleanup(&mut self, id: &str, key: &Key) -> bool {
        let before = self.cleanups.get(id).copied();
        if before.is_none_or(|cleanup| !cleanup.in_progress && self.lists_started >= cleanup.settled_from_list) {
            self.cleanup_queue.push_back((id.to_owned(), key.clone()));
            let has_failed = before.is_some_and(|cleanup| cleanup.has_failed);
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

    fn reconciler(names: WorkerIdSource) -> Reconciler {
        Reconciler::new(GRACE, names)
    }

    fn key() -> Key {
        Key::new("k").unwrap()
    }

    fn spec(id: &str) -> WorkerSpec {
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

    fn listed(reconciler: &mut Reconciler, found: &[ListedWorker]) -> Vec<WorkerChange> {
        reconciler.on_list_started();
        reconciler.on_listed(found.to_vec(), at(0))
    }

    fn due(reconciler: &mut Reconciler, seconds: u64) -> Option<(String, StopMode)> {
        reconciler.next_stop(at(seconds)).map(|(id, _, stop)| (id, stop))
    }

    #[test]
    fn a_started_worker_is_missed_only_by_a_list_that_began_afterwards() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        reconciler.on_start_requested(&spec("a"));
        assert_eq!(listed(&mut reconciler, &[]), []);
        reconciler.on_list_started();
        reconciler.on_started("a");
        assert_eq!(reconciler.on_listed(Vec::new(), at(0)), []);
        assert_eq!(listed(&mut reconciler, &[there("a")]), []);
        let gone =
            WorkerChange::Exited { id: "a".to_owned(), key: key(), exit: end("no longer listed"), requested: false };
        assert_eq!(listed(&mut reconciler, &[]), [gone]);
        assert_eq!(listed(&mut reconciler, &[]), []);
    }

    #[test]
    fn a_list_that_began_before_the_start_returned_does_not_report_its_exit() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        reconciler.on_start_requested(&spec("a"));
        reconciler.on_list_started();
        reconciler.on_started("a");
        assert_eq!(reconciler.on_listed(vec![ended("a", "created, never started")], at(0)), []);
        assert_eq!(due(&mut reconciler, 0), None, "nothing of it is to be forgotten");
        let gone = WorkerChange::Exited { id: "a".to_owned(), key: key(), exit: end("3"), requested: false };
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), [gone]);
    }

    #[test]
    fn an_unknown_worker_is_adopted_once_even_if_its_start_seemed_to_fail() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        reconciler.on_start_requested(&spec("a"));
        reconciler.on_start_failed("a");
        let found = |id: &str| WorkerChange::Discovered { id: id.to_owned(), key: key() };
        assert_eq!(listed(&mut reconciler, &[there("a"), there("b")]), [found("a"), found("b")]);
        assert_eq!(listed(&mut reconciler, &[there("a"), there("b")]), []);
    }

    #[test]
    fn a_worker_is_asked_to_stop_once_and_killed_after_its_grace_until_it_is_gone() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        listed(&mut reconciler, &[there("a")]);
        assert_eq!(due(&mut reconciler, 0), None);
        reconciler.request_stop("a", at(0));
        reconciler.request_stop("a", at(50));
        let (ask, force) = (Some(("a".to_owned(), StopMode::Terminate)), Some(("a".to_owned(), StopMode::Kill)));
        assert_eq!(due(&mut reconciler, 0), ask);
        reconciler.on_stopped("a", StopMode::Terminate, false);
        assert_eq!(due(&mut reconciler, 0), None, "after the next list");
        listed(&mut reconciler, &[there("a")]);
        assert_eq!(due(&mut reconciler, 1), ask);
        assert_eq!(due(&mut reconciler, 1), None, "it is under way");
        reconciler.on_stopped("a", StopMode::Terminate, true);
        listed(&mut reconciler, &[there("a")]);
        assert_eq!(due(&mut reconciler, 59), None);
        for is_news in [true, false] {
            assert_eq!(due(&mut reconciler, 60), force);
            assert_eq!(reconciler.on_stopped("a", StopMode::Kill, true), is_news, "it is said once that it is killed");
            listed(&mut reconciler, &[there("a")]);
        }
        let gone = WorkerChange::Exited { id: "a".to_owned(), key: key(), exit: end("killed"), requested: true };
        assert_eq!(listed(&mut reconciler, &[ended("a", "killed")]), [gone]);
    }

    #[test]
    fn a_stopping_worker_is_not_asked_again_and_is_killed_after_its_grace() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        let going = || ListedWorker { state: WorkerState::Stopping, ..there("a") };
        let changes = [
            WorkerChange::Discovered { id: "a".to_owned(), key: key() },
            WorkerChange::Stopping { id: "a".to_owned() },
        ];
        assert_eq!(listed(&mut reconciler, &[going()]), changes);
        assert_eq!(listed(&mut reconciler, &[going()]), []);
        assert_eq!(due(&mut reconciler, 59), None);
        assert_eq!(due(&mut reconciler, 60), Some(("a".to_owned(), StopMode::Kill)));
        let gone =
            WorkerChange::Exited { id: "a".to_owned(), key: key(), exit: end("no longer listed"), requested: true };
        assert_eq!(listed(&mut reconciler, &[]), [gone]);
    }

    #[test]
    fn a_worker_named_by_the_platform_is_pending_until_it_is_listed_under_its_name() {
        let mut reconciler = reconciler(WorkerIdSource::Platform);
        let promised = |id: &str| ListedWorker { state: WorkerState::Pending, ..there(id) };
        reconciler.on_start_requested(&spec("a"));
        reconciler.on_started("a");
        let first = [
            WorkerChange::Pending { id: "d~0".to_owned(), key: key() },
            WorkerChange::PendingResolved { id: "a".to_owned() },
        ];
        assert_eq!(listed(&mut reconciler, &[promised("d~0")]), first);
        assert_eq!(listed(&mut reconciler, &[promised("d~0")]), []);
        let then = [
            WorkerChange::Discovered { id: "pod".to_owned(), key: key() },
            WorkerChange::PendingResolved { id: "d~0".to_owned() },
        ];
        assert_eq!(listed(&mut reconciler, &[there("pod")]), then);
        let gone =
            WorkerChange::Exited { id: "pod".to_owned(), key: key(), exit: end("no longer listed"), requested: false };
        assert_eq!(listed(&mut reconciler, &[]), [gone]);
    }

    #[test]
    fn an_exited_worker_is_removed_until_no_list_shows_it() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        let forget = Some(("a".to_owned(), StopMode::Remove));
        let gone = WorkerChange::Exited { id: "a".to_owned(), key: key(), exit: end("3"), requested: false };
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), std::slice::from_ref(&gone));
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), []);
        assert_eq!((due(&mut reconciler, 0), due(&mut reconciler, 0)), (forget.clone(), None));
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), []);
        assert_eq!(due(&mut reconciler, 0), None, "it is under way");
        assert!(reconciler.on_stopped("a", StopMode::Remove, false));
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), []);
        assert_eq!(due(&mut reconciler, 0), forget);
        assert!(!reconciler.on_stopped("a", StopMode::Remove, false), "that was said");
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), []);
        assert_eq!(due(&mut reconciler, 0), forget);
        reconciler.on_list_started();
        reconciler.on_stopped("a", StopMode::Remove, true);
        assert_eq!(reconciler.on_listed(vec![ended("a", "3")], at(0)), [], "it began before that was done");
        assert_eq!(due(&mut reconciler, 0), None);
        assert_eq!(listed(&mut reconciler, &[]), []);
        assert_eq!(due(&mut reconciler, 0), None);
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), [gone], "another one of that name");
    }

    #[test]
    fn the_remainder_of_a_failed_start_is_removed_without_a_report() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        reconciler.on_start_requested(&spec("a"));
        reconciler.on_start_failed("a");
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), []);
        assert_eq!(due(&mut reconciler, 0), Some(("a".to_owned(), StopMode::Remove)));
        reconciler.on_stopped("a", StopMode::Remove, true);
        assert_eq!(listed(&mut reconciler, &[]), []);
        assert!(reconciler.cleanups.is_empty());
    }

    #[test]
    fn a_starting_worker_is_asked_to_stop_once_it_has_started() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        reconciler.on_start_requested(&spec("a"));
        reconciler.request_stop("a", at(0));
        assert_eq!(due(&mut reconciler, 0), None);
        assert_eq!(listed(&mut reconciler, &[ended("a", "at once")]), []);
        reconciler.on_started("a");
        assert_eq!(due(&mut reconciler, 0), Some(("a".to_owned(), StopMode::Terminate)));
    }
}
