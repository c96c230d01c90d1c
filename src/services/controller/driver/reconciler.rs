//! Compares the lists of a driver with the expected workers, and decides which stop calls are due.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{ListedWorker, StopMode, WorkerChange, WorkerExit, WorkerIdSource, WorkerSpec, WorkerState};
use journeyman_domain::group::Key;
use journeyman_domain::group::restart_backoff::WorkerEnd;
use journeyman_domain::group::scale::WorkerActivity;
use journeyman_domain::limits::CONTROLLER_BUSY_TTL;
use journeyman_domain::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StopProgress {
    Requested,
    /// The driver has confirmed the TERM, so that the grace runs.
    Terminated {
        kill_at: Instant,
    },
}

pub(in crate::controller) struct KnownWorker {
    pub(in crate::controller) key: Key,
    pub(in crate::controller) started_at: Instant,
    pub(in crate::controller) ready_at: Option<Instant>,
    pub(in crate::controller) busy_since: Option<Instant>,
    pub(in crate::controller) last_report_at: Option<Instant>,
    /// What it waits for, as last listed.
    pub(in crate::controller) detail: Option<String>,
    /// It is of the previous activation, and not listed since.
    is_previous: bool,
    /// The first list that has to show it; `None` while its start call runs.
    listed_from: Option<u64>,
    is_pending: bool,
    stop: Option<StopProgress>,
    /// Kept until a list no longer shows it.
    is_exited: bool,
    is_removal_due: bool,
    is_stop_call_running: bool,
    /// A stop call is retried after the next list.
    last_stop_list: u64,
    last_stop_result: Option<(StopMode, bool)>,
}

impl KnownWorker {
    const fn new(key: Key, listed_from: Option<u64>, is_pending: bool, now: Instant) -> Self {
        Self {
            key,
            started_at: now,
            ready_at: None,
            busy_since: None,
            last_report_at: None,
            detail: None,
            is_previous: false,
            listed_from,
            is_pending,
            stop: None,
            is_exited: false,
            is_removal_due: false,
            is_stop_call_running: false,
            last_stop_list: 0,
            last_stop_result: None,
        }
    }

    pub(in crate::controller) const fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    fn on_terminated(&mut self, kill_at: Instant) {
        if !matches!(self.stop, Some(StopProgress::Terminated { .. })) {
            self.stop = Some(StopProgress::Terminated { kill_at });
        }
    }

    pub(in crate::controller) fn activity(&self, now: Instant) -> WorkerActivity {
        if self.is_stopping() {
            WorkerActivity::Stopping
        } else if self.ready_at.is_none() {
            WorkerActivity::Starting
        } else if self.last_report_at.is_some_and(|at| now.since(at) < CONTROLLER_BUSY_TTL) {
            WorkerActivity::Busy
        } else {
            WorkerActivity::Idle
        }
    }

    fn end(&self, now: Instant) -> WorkerEnd {
        self.ready_at.map_or(WorkerEnd::NeverReady, |ready| WorkerEnd::AfterReady(now.since(ready)))
    }

    fn stop_mode(&self, now: Instant) -> Option<StopMode> {
        if self.is_exited {
            return self.is_removal_due.then_some(StopMode::Remove);
        }
        match self.stop? {
            StopProgress::Requested => Some(StopMode::Terminate),
            StopProgress::Terminated { kill_at } => (now >= kill_at).then_some(StopMode::Kill),
        }
    }
}

pub(in crate::controller) struct Reconciler {
    termination_grace: Duration,
    id_source: WorkerIdSource,
    lists_started: u64,
    /// No list of this activation has come yet.
    is_first_list: bool,
    workers: BTreeMap<String, KnownWorker>,
}

impl Reconciler {
    pub(super) const fn new(termination_grace: Duration, id_source: WorkerIdSource) -> Self {
        Self { termination_grace, id_source, lists_started: 0, is_first_list: true, workers: BTreeMap::new() }
    }

    pub(in crate::controller) fn worker(&self, id: &str) -> Option<&KnownWorker> {
        self.workers.get(id)
    }

    /// Those that have not exited.
    pub(in crate::controller) fn workers(&self) -> impl Iterator<Item = (&String, &KnownWorker)> {
        self.workers.iter().filter(|(_, worker)| !worker.is_exited)
    }

    pub(in crate::controller) fn workers_mut(&mut self) -> impl Iterator<Item = (&String, &mut KnownWorker)> {
        self.workers.iter_mut().filter(|(_, worker)| !worker.is_exited)
    }

    /// The controller lost the pool meanwhile: the next list shows which workers are left.
    pub(super) fn restart(&mut self) {
        let listed_from = self.lists_started + 1;
        self.is_first_list = true;
        self.workers.retain(|_, worker| !worker.is_exited && !worker.is_pending);
        for worker in self.workers.values_mut() {
            let KnownWorker { started_at, ready_at, busy_since, last_report_at, .. } = *worker;
            let new = KnownWorker::new(worker.key.clone(), Some(listed_from), false, started_at);
            *worker = KnownWorker { ready_at, busy_since, last_report_at, is_previous: true, ..new };
        }
    }

    pub(in crate::controller) fn clear(&mut self) {
        self.workers.clear();
    }

    pub(super) fn on_start_requested(&mut self, spec: &WorkerSpec, now: Instant) {
        let is_pending = self.id_source == WorkerIdSource::Platform;
        self.workers.insert(spec.id.clone(), KnownWorker::new(spec.key.clone(), None, is_pending, now));
    }

    pub(super) fn on_started(&mut self, id: &str) {
        if let Some(worker) = self.workers.get_mut(id) {
            worker.listed_from = Some(self.lists_started + 1);
        }
    }

    pub(super) fn on_start_failed(&mut self, id: &str) {
        self.on_started(id);
        if let Some(worker) = self.workers.get_mut(id) {
            // Its remainder is removed without a report.
            worker.is_exited = true;
        }
    }

    pub(super) fn request_stop(&mut self, id: &str) {
        if let Some(worker) = self.workers.get_mut(id) {
            worker.stop.get_or_insert(StopProgress::Requested);
        }
    }

    pub(super) fn next_stop(&mut self, now: Instant) -> Option<(String, Key, StopMode)> {
        let lists = self.lists_started;
        self.workers.iter_mut().find_map(|(id, worker)| {
            if worker.listed_from.is_none() || worker.is_stop_call_running || worker.last_stop_list == lists {
                return None;
            }
            let mode = worker.stop_mode(now)?;
            (worker.is_stop_call_running, worker.last_stop_list, worker.is_removal_due) = (true, lists, false);
            Some((id.clone(), worker.key.clone(), mode))
        })
    }

    /// True if the result differs from that of the last call.
    pub(super) fn on_stopped(&mut self, id: &str, mode: StopMode, done: bool, now: Instant) -> bool {
        let Some(worker) = self.workers.get_mut(id) else { return false };
        worker.is_stop_call_running = false;
        if done && mode == StopMode::Terminate {
            worker.on_terminated(now.plus(self.termination_grace));
        }
        worker.last_stop_result.replace((mode, done)) != Some((mode, done))
    }

    pub(super) const fn on_list_started(&mut self) {
        self.lists_started += 1;
    }

    /// `stop_requests` are those of this and of previous controllers.
    pub(super) fn on_listed(
        &mut self,
        found: Vec<ListedWorker>,
        stop_requests: &BTreeSet<String>,
        now: Instant,
    ) -> Vec<WorkerChange> {
        let (lists, kill_at) = (self.lists_started, now.plus(self.termination_grace));
        let is_by_platform = self.id_source == WorkerIdSource::Platform;
        let is_first_list = std::mem::replace(&mut self.is_first_list, false);
        let (mut changes, mut shown) = (Vec::new(), BTreeSet::new());
        for ListedWorker { id, key, state, detail } in found {
            shown.insert(id.clone());
            let is_requested = stop_requests.contains(&id);
            let known = self.workers.get_mut(&id);
            if let WorkerState::Exited(exit) = state {
                // A list that began before the start returned may show a container that does not run yet.
                if known.as_ref().is_some_and(|worker| worker.listed_from.is_none_or(|from| from > lists)) {
                    continue;
                }
                let is_unknown = known.is_none();
                // It may have started and exited between two lists.
                if is_unknown && is_by_platform {
                    changes.push(WorkerChange::Discovered { id: id.clone(), key: key.clone() });
                }
                let worker =
                    self.workers.entry(id.clone()).or_insert_with(|| KnownWorker::new(key, Some(lists), false, now));
                worker.is_removal_due = true;
                if !std::mem::replace(&mut worker.is_exited, true) {
                    let requested = is_requested || worker.is_stopping();
                    let was_seen = !is_unknown || is_by_platform && !is_first_list;
                    let end = was_seen.then(|| worker.end(now));
                    changes.push(WorkerChange::Exited { id, key: worker.key.clone(), exit, requested, end });
                }
                continue;
            }
            let (is_pending, mut is_found_ready) = (state == WorkerState::Pending, is_by_platform);
            match known {
                Some(worker) if !worker.is_exited => (worker.is_previous, worker.is_pending) = (false, is_pending),
                Some(_) | None => {
                    is_found_ready |= is_first_list;
                    changes.push(WorkerChange::Discovered { id: id.clone(), key: key.clone() });
                    self.workers.insert(id.clone(), KnownWorker::new(key, Some(lists), is_pending, now));
                }
            }
            let Some(worker) = self.workers.get_mut(&id) else { continue };
            worker.detail = detail;
            // A worker of a previous controller reports `ready` again only after a request; a platform knows when a
            // worker is ready.
            if is_found_ready && !is_pending {
                worker.ready_at.get_or_insert(now);
            }
            if state == WorkerState::Stopping || is_requested {
                // The stop took effect whatever the call returned.
                worker.on_terminated(kill_at);
            }
        }
        let is_gone = |id: &str, worker: &KnownWorker| {
            !shown.contains(id) && worker.listed_from.is_some_and(|from| from <= lists)
        };
        let gone: Vec<String> =
            self.workers.iter().filter(|(id, worker)| is_gone(id, worker)).map(|(id, _)| id.clone()).collect();
        for id in gone {
            let Some(worker) = self.workers.remove(&id) else { continue };
            // A pending worker is listed under another id once it runs.
            if worker.is_exited || worker.is_previous || worker.is_pending {
                continue;
            }
            // A pod that fails stays: one that is gone was deleted.
            let requested = worker.is_stopping() || stop_requests.contains(&id) || is_by_platform;
            let exit = WorkerExit { reason: "no longer listed".to_owned(), ..WorkerExit::default() };
            let end = Some(worker.end(now));
            changes.push(WorkerChange::Exited { id, key: worker.key, exit, requested, end });
        }
        changes
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
        ListedWorker { id: id.to_owned(), key: key(), state: WorkerState::Running, detail: None }
    }

    fn ended(id: &str, how: &str) -> ListedWorker {
        ListedWorker { state: WorkerState::Exited(end(how)), ..there(id) }
    }

    const NEVER_READY: Option<WorkerEnd> = Some(WorkerEnd::NeverReady);
    const AFTER_READY: Option<WorkerEnd> = Some(WorkerEnd::AfterReady(Duration::ZERO));

    fn exited(id: &str, how: &str, requested: bool, end_state: Option<WorkerEnd>) -> WorkerChange {
        WorkerChange::Exited { id: id.to_owned(), key: key(), exit: end(how), requested, end: end_state }
    }

    fn end(how: &str) -> WorkerExit {
        WorkerExit { reason: how.to_owned(), ..WorkerExit::default() }
    }

    fn listed(reconciler: &mut Reconciler, found: &[ListedWorker]) -> Vec<WorkerChange> {
        reconciler.on_list_started();
        reconciler.on_listed(found.to_vec(), &BTreeSet::new(), at(0))
    }

    fn due(reconciler: &mut Reconciler, seconds: u64) -> Option<(String, StopMode)> {
        reconciler.next_stop(at(seconds)).map(|(id, _, stop)| (id, stop))
    }

    #[test]
    fn a_started_worker_is_missed_only_by_a_list_that_began_afterwards() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        reconciler.on_start_requested(&spec("a"), at(0));
        assert_eq!(listed(&mut reconciler, &[]), []);
        reconciler.on_list_started();
        reconciler.on_started("a");
        assert_eq!(reconciler.on_listed(Vec::new(), &BTreeSet::new(), at(0)), []);
        assert_eq!(listed(&mut reconciler, &[there("a")]), []);
        let gone = exited("a", "no longer listed", false, NEVER_READY);
        assert_eq!(listed(&mut reconciler, &[]), [gone]);
        assert_eq!(listed(&mut reconciler, &[]), []);
    }

    #[test]
    fn a_list_that_began_before_the_start_returned_does_not_report_its_exit() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        reconciler.on_start_requested(&spec("a"), at(0));
        reconciler.on_list_started();
        reconciler.on_started("a");
        assert_eq!(reconciler.on_listed(vec![ended("a", "created, never started")], &BTreeSet::new(), at(0)), []);
        assert_eq!(due(&mut reconciler, 0), None, "nothing of it is to be forgotten");
        let gone = exited("a", "3", false, NEVER_READY);
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), [gone]);
    }

    #[test]
    fn an_unknown_worker_is_adopted_once_even_if_its_start_seemed_to_fail() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        reconciler.on_start_requested(&spec("a"), at(0));
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
        reconciler.request_stop("a");
        reconciler.request_stop("a");
        let (ask, force) = (Some(("a".to_owned(), StopMode::Terminate)), Some(("a".to_owned(), StopMode::Kill)));
        assert_eq!(due(&mut reconciler, 0), ask);
        reconciler.on_stopped("a", StopMode::Terminate, false, at(0));
        assert_eq!(due(&mut reconciler, 0), None, "after the next list");
        listed(&mut reconciler, &[there("a")]);
        assert_eq!(due(&mut reconciler, 0), ask);
        assert_eq!(due(&mut reconciler, 0), None, "it is under way");
        reconciler.on_stopped("a", StopMode::Terminate, true, at(0));
        listed(&mut reconciler, &[there("a")]);
        assert_eq!(due(&mut reconciler, 59), None);
        for is_news in [true, false] {
            assert_eq!(due(&mut reconciler, 60), force);
            assert_eq!(
                reconciler.on_stopped("a", StopMode::Kill, true, at(60)),
                is_news,
                "it is said once that it is killed"
            );
            listed(&mut reconciler, &[there("a")]);
        }
        let gone = exited("a", "killed", true, AFTER_READY);
        assert_eq!(listed(&mut reconciler, &[ended("a", "killed")]), [gone]);
    }

    #[test]
    fn a6_the_grace_begins_when_the_term_has_arrived_and_a_worker_without_one_is_not_killed() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        listed(&mut reconciler, &[there("a")]);
        reconciler.request_stop("a");
        // A daemon that hangs: each call fails long after the grace.
        for second in [0, 100, 200] {
            assert_eq!(due(&mut reconciler, second), Some(("a".to_owned(), StopMode::Terminate)));
            reconciler.on_stopped("a", StopMode::Terminate, false, at(second + 60));
            listed(&mut reconciler, &[there("a")]);
        }
        assert_eq!(due(&mut reconciler, 300), Some(("a".to_owned(), StopMode::Terminate)));
        reconciler.on_stopped("a", StopMode::Terminate, true, at(340));
        listed(&mut reconciler, &[there("a")]);
        assert_eq!(due(&mut reconciler, 399), None, "it has its whole grace");
        assert_eq!(due(&mut reconciler, 400), Some(("a".to_owned(), StopMode::Kill)));
    }

    #[test]
    fn a3_c13_a_worker_that_was_found_is_never_busy_before_it_reports() {
        let activity = |reconciler: &Reconciler, id: &str| reconciler.worker(id).map(|worker| worker.activity(at(0)));
        for source in [WorkerIdSource::Controller, WorkerIdSource::Platform] {
            let mut reconciler = reconciler(source);
            let pending = ListedWorker { state: WorkerState::Pending, ..there("pending") };
            listed(&mut reconciler, &[there("adopted"), pending]);
            assert_eq!(activity(&reconciler, "adopted"), Some(WorkerActivity::Idle));
            assert_eq!(activity(&reconciler, "pending"), Some(WorkerActivity::Starting));
            listed(&mut reconciler, &[there("adopted"), there("pending"), there("later")]);
            // Its start seemed to fail, or the platform started it: only a platform knows when it is ready.
            let is_ready = source == WorkerIdSource::Platform;
            let expected = if is_ready { WorkerActivity::Idle } else { WorkerActivity::Starting };
            assert_eq!(activity(&reconciler, "pending"), Some(expected));
            assert_eq!(activity(&reconciler, "later"), Some(expected));
        }
    }

    #[test]
    fn a3_a_worker_of_a_platform_that_ends_before_it_was_ready_counts_as_failed() {
        let mut reconciler = reconciler(WorkerIdSource::Platform);
        assert_eq!(listed(&mut reconciler, &[]), []);
        let found = WorkerChange::Discovered { id: "a".to_owned(), key: key() };
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), [found, exited("a", "3", false, NEVER_READY)]);
    }

    #[test]
    fn a_stopping_worker_is_not_asked_again_and_is_killed_after_its_grace() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        let going = || ListedWorker { state: WorkerState::Stopping, ..there("a") };
        let found = WorkerChange::Discovered { id: "a".to_owned(), key: key() };
        assert_eq!(listed(&mut reconciler, &[going()]), [found]);
        assert!(reconciler.worker("a").is_some_and(KnownWorker::is_stopping));
        assert_eq!(listed(&mut reconciler, &[going()]), []);
        assert_eq!(due(&mut reconciler, 59), None);
        assert_eq!(due(&mut reconciler, 60), Some(("a".to_owned(), StopMode::Kill)));
        let gone = exited("a", "no longer listed", true, AFTER_READY);
        assert_eq!(listed(&mut reconciler, &[]), [gone]);
    }

    #[test]
    fn a_worker_named_by_the_platform_is_pending_until_it_is_listed_under_its_name() {
        let mut reconciler = reconciler(WorkerIdSource::Platform);
        let promised = |id: &str| ListedWorker { state: WorkerState::Pending, ..there(id) };
        reconciler.on_start_requested(&spec("a"), at(0));
        reconciler.on_started("a");
        let found = |id: &str| WorkerChange::Discovered { id: id.to_owned(), key: key() };
        assert_eq!(listed(&mut reconciler, &[promised("d~0")]), [found("d~0")]);
        assert_eq!(listed(&mut reconciler, &[promised("d~0")]), []);
        assert_eq!(listed(&mut reconciler, &[there("pod")]), [found("pod")]);
        assert_eq!(reconciler.workers().count(), 1, "a promise that was kept is not an exit");
        let gone = exited("pod", "no longer listed", true, AFTER_READY);
        assert_eq!(listed(&mut reconciler, &[]), [gone], "it was deleted");
    }

    #[test]
    fn an_exited_worker_is_removed_until_no_list_shows_it() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        let forget = Some(("a".to_owned(), StopMode::Remove));
        let gone = exited("a", "3", false, None);
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), std::slice::from_ref(&gone));
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), []);
        assert_eq!((due(&mut reconciler, 0), due(&mut reconciler, 0)), (forget.clone(), None));
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), []);
        assert_eq!(due(&mut reconciler, 0), None, "it is under way");
        assert!(reconciler.on_stopped("a", StopMode::Remove, false, at(0)));
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), []);
        assert_eq!(due(&mut reconciler, 0), forget);
        assert!(!reconciler.on_stopped("a", StopMode::Remove, false, at(0)), "that was said");
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), []);
        assert_eq!(due(&mut reconciler, 0), forget);
        reconciler.on_stopped("a", StopMode::Remove, true, at(0));
        assert_eq!(listed(&mut reconciler, &[]), []);
        assert_eq!(due(&mut reconciler, 0), None);
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), [gone], "another one of that name");
    }

    #[test]
    fn the_remainder_of_a_failed_start_is_removed_without_a_report() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        reconciler.on_start_requested(&spec("a"), at(0));
        reconciler.on_start_failed("a");
        assert_eq!(listed(&mut reconciler, &[ended("a", "3")]), []);
        assert_eq!(due(&mut reconciler, 0), Some(("a".to_owned(), StopMode::Remove)));
        reconciler.on_stopped("a", StopMode::Remove, true, at(0));
        assert_eq!(listed(&mut reconciler, &[]), []);
        assert!(reconciler.worker("a").is_none());
    }

    #[test]
    fn a_starting_worker_is_asked_to_stop_once_it_has_started() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        reconciler.on_start_requested(&spec("a"), at(0));
        reconciler.request_stop("a");
        assert_eq!(due(&mut reconciler, 0), None);
        assert_eq!(listed(&mut reconciler, &[ended("a", "at once")]), []);
        reconciler.on_started("a");
        assert_eq!(due(&mut reconciler, 0), Some(("a".to_owned(), StopMode::Terminate)));
    }

    #[test]
    fn a_worker_of_the_previous_activation_keeps_its_age_and_is_not_reported() {
        let mut reconciler = reconciler(WorkerIdSource::Controller);
        for id in ["a", "b"] {
            reconciler.on_start_requested(&spec(id), at(0));
            reconciler.on_started(id);
        }
        assert_eq!(listed(&mut reconciler, &[there("a"), there("b")]), []);
        reconciler.request_stop("a");
        reconciler.restart();
        reconciler.on_list_started();
        assert_eq!(reconciler.on_listed(vec![there("a")], &BTreeSet::new(), at(9)), []);
        let left: Vec<_> = reconciler.workers().map(|(id, worker)| (&**id, worker.started_at)).collect();
        assert_eq!(left, [("a", at(0))], "another controller may have stopped the other one");
        assert_eq!(due(&mut reconciler, 9), None, "the store has the stop requests");
        assert_eq!(listed(&mut reconciler, &[]), [exited("a", "no longer listed", false, NEVER_READY)]);
    }
}
