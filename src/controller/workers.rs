//! The workers of a pool: what is known of each, and which are started and stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use secrecy::ExposeSecret as _;
use tokio::sync::watch;

use super::counters::PoolCounters;
use super::dead_letters::WorkerFailures;
use super::driver::{DriverError, DriverEvent, DriverHandle, KnownWorker, WorkerChange, WorkerExit, WorkerSpec};
use super::poison_message::ExitedWorker;
use super::queue_names::QueueNames;
use super::{ControllerConfig, RecordedError, scale_limits};
use crate::config::pool::PoolConfig;
use crate::domain::group::load::Load;
use crate::domain::group::overrides::Overrides;
use crate::domain::group::restart_backoff::{RestartBackoff, WorkerEnd};
use crate::domain::group::scale::{
    GroupInput, GroupWorker, PauseState, ScaleDecision, ScaleLimits, Scaler, WorkerActivity,
};
use crate::domain::group::tracker::Tracker;
use crate::domain::group::{GroupPhase, Key};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::CONTROLLER_WORKER_STABLE_AFTER;

pub(super) struct WorkerSet {
    pool: String,
    driver: Option<DriverHandle>,
    is_listed: bool,
    list_error: Option<String>,
    restarts: BTreeMap<Key, RestartBackoff>,
    scale: Scaler,
    limits: ScaleLimits,
    max_total: Option<u32>,
    names: QueueNames,
    variables: BTreeMap<String, String>,
    /// As stored.
    known_keys: BTreeSet<Key>,
    decisions: BTreeMap<Key, ScaleDecision>,
    failures: watch::Sender<BTreeMap<Key, WorkerFailure>>,
    counters: Arc<PoolCounters>,
}

/// The last failure of a group.
pub(super) struct WorkerFailure {
    pub(super) error: RecordedError,
    pub(super) worker: Option<ExitedWorker>,
}

#[derive(Default)]
pub(super) struct GroupSnapshot<'a> {
    pub(super) workers: Vec<GroupWorker>,
    pub(super) decision: Option<&'a ScaleDecision>,
    pub(super) restarts: Option<&'a RestartBackoff>,
    pub(super) last_exit: Option<RecordedError>,
}

impl WorkerSet {
    pub(super) fn open(settings: &ControllerConfig, tally: Arc<PoolCounters>, clock: Clock) -> io::Result<Self> {
        let driver = DriverHandle::open(&settings.pool, &settings.settings, clock)?;
        let env = settings.settings.env.iter();
        let mut variables: BTreeMap<_, _> = env.map(|(name, value)| (name.clone(), value.0.clone())).collect();
        variables.extend([
            ("WORKER_POOL".to_owned(), settings.pool.clone()),
            ("WORKER_ACTIVITY_EXCHANGE".to_owned(), settings.names.activity_exchange()),
            ("WORKER_AMQP_URI".to_owned(), settings.uri.expose_secret().to_owned()),
        ]);
        Ok(Self {
            pool: settings.pool.clone(),
            is_listed: driver.is_none(),
            list_error: None,
            known_keys: BTreeSet::new(),
            driver,
            restarts: BTreeMap::new(),
            scale: Scaler::default(),
            limits: scale_limits(&settings.settings),
            max_total: settings.settings.max_total,
            names: settings.names.clone(),
            variables,
            decisions: BTreeMap::new(),
            failures: watch::Sender::default(),
            counters: tally,
        })
    }

    /// Nothing is decided before the driver has listed the workers.
    pub(super) fn activate(&mut self) {
        if let Some(driver) = &mut self.driver {
            driver.activate();
            self.is_listed = false;
        }
    }

    /// The connection is lost: another controller may hold the pool.
    pub(super) fn deactivate(&mut self) {
        if let Some(driver) = &mut self.driver {
            driver.deactivate();
        }
    }

    pub(super) fn stand_down(&mut self) {
        if let Some(driver) = &mut self.driver {
            driver.deactivate();
            driver.reconciler.clear();
        }
    }

    pub(super) const fn has_listed(&self) -> bool {
        self.is_listed
    }

    pub(super) async fn next_event(&mut self) -> DriverEvent {
        match &mut self.driver {
            Some(driver) => driver.next_event().await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn counts(&self, keys: &BTreeSet<Key>) -> BTreeMap<Key, u32> {
        let mut counts: BTreeMap<Key, u32> = keys.iter().map(|key| (key.clone(), 0)).collect();
        for key in self.keys() {
            *counts.entry(key.clone()).or_default() += 1;
        }
        counts
    }

    /// The broker does not report requests that arrive in existing queues, so their keys are stored.
    pub(super) fn load_known_keys(&mut self) -> BTreeSet<Key> {
        let loaded = self.driver.as_ref().map_or_else(|| Ok(BTreeSet::new()), |driver| driver.store().known_keys());
        self.known_keys = loaded.unwrap_or_else(|error| {
            tracing::warn!(pool = self.pool, "cannot load the known keys: {error}");
            BTreeSet::new()
        });
        self.known_keys.clone()
    }

    pub(super) fn store_known_keys<'a>(&mut self, keys: impl Iterator<Item = &'a Key> + Clone) {
        // Both are sorted.
        let Some(driver) = self.driver.as_ref().filter(|_| !keys.clone().eq(&self.known_keys)) else { return };
        let keys: BTreeSet<Key> = keys.cloned().collect();
        let update =
            driver.store().update_known_keys(self.known_keys.difference(&keys), keys.difference(&self.known_keys));
        if let Err(error) = update {
            tracing::warn!(pool = self.pool, "cannot store the known keys: {error}");
        }
        self.known_keys = keys;
    }

    pub(super) fn reconfigure(&mut self, settings: &PoolConfig) {
        (self.limits, self.max_total) = (scale_limits(settings), settings.max_total);
    }

    pub(super) const fn starts_workers(&self) -> bool {
        self.driver.is_some()
    }

    pub(super) const fn max_total(&self) -> Option<u32> {
        self.max_total
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.workers().map(|(_, worker)| &worker.key)
    }

    fn workers(&self) -> impl Iterator<Item = (&String, &KnownWorker)> {
        self.driver.iter().flat_map(|driver| driver.reconciler.workers())
    }

    fn workers_mut(&mut self) -> impl Iterator<Item = (&String, &mut KnownWorker)> {
        self.driver.iter_mut().flat_map(|driver| driver.reconciler.workers_mut())
    }

    pub(super) fn snapshot(&self, now: Instant) -> BTreeMap<&Key, GroupSnapshot<'_>> {
        let mut seen: BTreeMap<&Key, GroupSnapshot<'_>> = BTreeMap::new();
        for (key, decision) in &self.decisions {
            seen.entry(key).or_default().decision = Some(decision);
        }
        for (id, worker) in self.workers() {
            seen.entry(&worker.key).or_default().workers.push(group_worker(id, worker, now));
        }
        for (key, group) in &mut seen {
            group.restarts = self.restarts.get(*key);
            group.last_exit = self.failures.borrow().get(*key).map(|failure| failure.error.clone());
        }
        seen
    }

    pub(super) fn drain(&mut self, id: &str) -> bool {
        self.driver.as_mut().is_some_and(|driver| driver.stop(id))
    }

    pub(super) fn on_claimed_count(&mut self, key: &Key, count: u32, now: Instant) {
        let is_ready = |worker: &KnownWorker| worker.key == *key && !worker.is_stopping() && worker.ready_at.is_some();
        let ready = self.workers().filter(|(_, worker)| is_ready(worker)).count();
        let least = count.div_ceil(self.limits.concurrency.max(1));
        let silent = usize::try_from(least).unwrap_or(usize::MAX).saturating_sub(ready);
        let workers = self.workers_mut().map(|(_, worker)| worker);
        for worker in workers.filter(|worker| worker.key == *key && worker.ready_at.is_none()).take(silent) {
            (worker.ready_at, worker.last_report_at) = (Some(now), Some(now));
        }
    }

    pub(super) fn reset_failures(&mut self, key: &Key) -> bool {
        let restarts = self.restarts.get_mut(key).filter(|restarts| restarts.consecutive_failures() > 0);
        restarts.map(RestartBackoff::reset).is_some()
    }

    pub(super) fn on_report(&mut self, id: &str, event: &str, now: Instant) {
        let Some((_, worker)) = self.workers_mut().find(|(known, _)| *known == id) else { return };
        if event != "started" {
            worker.ready_at.get_or_insert(now);
            // A worker reports `ready` again once it holds nothing.
            worker.last_report_at = (event != "ready").then_some(now);
        }
    }

    pub(super) fn failures(&self) -> WorkerFailures {
        self.driver.as_ref().map(|_| self.failures.subscribe())
    }

    pub(super) fn on_driver_event(&mut self, news: DriverEvent, now: Instant) -> Result<Vec<Key>, String> {
        match news {
            DriverEvent::Started(id) => {
                if let Some(key) = self.key_of(&id) {
                    self.counters.workers_started.increment();
                    let (wanted, why) = self.decisions.get(&key).map_or_else(Default::default, describe);
                    tracing::info!(worker = id, %key, "worker started, {wanted} wanted: {why}");
                }
            }
            DriverEvent::StartFailed { id, error: DriverError(why) } => {
                if let Some(key) = self.key_of(&id) {
                    tracing::error!(%key, "failed to start a worker: {why}");
                    self.record_failure(&key, WorkerEnd::NeverReady, format!("failed to start: {why}"), None, now);
                }
            }
            DriverEvent::Listed(Ok(changes)) => {
                self.is_listed = true;
                if self.list_error.take().is_some() {
                    tracing::info!(pool = self.pool, "workers can be listed again");
                }
                return Ok(self.on_changes(changes, now));
            }
            DriverEvent::Listed(Err(DriverError(why))) => {
                let what = format!("cannot list the workers: {why}");
                if self.list_error.replace(why).is_none() {
                    tracing::warn!(pool = self.pool, "{what}; they keep running, retrying");
                    return Err(what);
                }
            }
        }
        Ok(Vec::new())
    }

    fn key_of(&self, id: &str) -> Option<Key> {
        Some(self.driver.as_ref()?.reconciler.worker(id)?.key.clone())
    }

    /// The keys of the workers that were found.
    fn on_changes(&mut self, changes: Vec<WorkerChange>, now: Instant) -> Vec<Key> {
        let (mut keys, mut adopted, mut resolved) = (Vec::new(), 0_usize, 0);
        for change in changes {
            match change {
                WorkerChange::Pending { key, .. } => keys.push(key),
                WorkerChange::PendingResolved { .. } => resolved += 1,
                WorkerChange::Discovered { key, .. } => {
                    keys.push(key);
                    adopted += 1;
                }
                WorkerChange::Stopping { .. } => {}
                WorkerChange::Exited { id, key, exit, requested: true, .. } => {
                    tracing::info!(worker = id, %key, "worker stopped: {}", exit.reason);
                }
                WorkerChange::Exited { id, key, exit, end, .. } => self.on_exit(&id, &key, exit, end, now),
            }
        }
        // Resolved pending workers appear under their platform names.
        let adopted = adopted.saturating_sub(resolved);
        if adopted > 0 {
            tracing::info!(pool = self.pool, workers = adopted, "adopted running workers");
        }
        keys
    }

    fn on_exit(&mut self, id: &str, key: &Key, exit: WorkerExit, end: Option<WorkerEnd>, now: Instant) {
        let WorkerExit { reason, log, log_tail } = exit;
        let message = log.map_or_else(|| reason.clone(), |log| format!("{reason}; log: {log}"));
        let exited = Some(ExitedWorker::new(id, &reason, &log_tail));
        if let Some(end) = end {
            let consecutive_failures = self.record_failure(key, end, message, exited, now);
            tracing::warn!(worker = id, %key, consecutive_failures, "worker exited: {reason}");
        } else {
            // Its lifetime is unknown.
            self.counters.workers_failed.increment();
            self.set_last_failure(key, message, exited, now);
            tracing::warn!(worker = id, %key, "worker of a previous controller exited: {reason}");
        }
    }

    fn record_failure(
        &mut self,
        key: &Key,
        end: WorkerEnd,
        what: String,
        worker: Option<ExitedWorker>,
        now: Instant,
    ) -> u32 {
        self.counters.workers_failed.increment();
        let restarts = restarts_of(&mut self.restarts, key);
        let failing = restarts.is_failing();
        restarts.on_worker_ended(end, now);
        if restarts.is_failing() && !failing {
            let text = "[alert operator] workers of this key keep failing; last failure";
            tracing::error!(alert = "workers-crash-looping", %key, "{text}: {what}");
        }
        let consecutive_failures = restarts.consecutive_failures();
        self.set_last_failure(key, what, worker, now);
        consecutive_failures
    }

    fn set_last_failure(&self, key: &Key, message: String, worker: Option<ExitedWorker>, now: Instant) {
        let failure = WorkerFailure { error: RecordedError { at: now, message }, worker };
        self.failures.send_modify(|failures| drop(failures.insert(key.clone(), failure)));
    }

    pub(super) fn keys_with_idle_workers(&self, now: Instant) -> Option<BTreeSet<&Key>> {
        self.driver.as_ref()?;
        Some(self.keys_by_activity(WorkerActivity::Idle, now).collect())
    }

    pub(super) fn busy_by_key(&self, now: Instant) -> BTreeMap<Key, u32> {
        let mut busy = BTreeMap::new();
        for key in self.keys_by_activity(WorkerActivity::Busy, now) {
            *busy.entry(key.clone()).or_default() += 1;
        }
        busy
    }

    fn keys_by_activity(&self, activity: WorkerActivity, now: Instant) -> impl Iterator<Item = &Key> {
        self.workers().filter(move |(_, worker)| worker.activity(now) == activity).map(|(_, worker)| &worker.key)
    }

    pub(super) fn plan(&mut self, tracker: &Tracker, loads: &BTreeMap<Key, Load>, orders: &Overrides, now: Instant) {
        if !self.is_listed {
            return;
        }
        let mut keys: BTreeSet<Key> = tracker.groups().map(|(key, _)| key.clone()).collect();
        keys.extend(self.keys().cloned());
        self.restarts.retain(|key, restarts| keys.contains(key) || restarts.consecutive_failures() > 0);
        self.failures.send_modify(|failures| failures.retain(|key, _| keys.contains(key)));
        let mut workers: BTreeMap<Key, Vec<GroupWorker>> = BTreeMap::new();
        for (id, worker) in self.workers() {
            workers.entry(worker.key.clone()).or_default().push(group_worker(id, worker, now));
        }
        let groups: Vec<GroupInput> = keys
            .into_iter()
            .map(|key| {
                let phase: Option<GroupPhase> = tracker.desired(&key).map(|wanted| wanted.phase);
                GroupInput {
                    phase,
                    limits: orders.scale_of(&key).map_or(self.limits, |numbers| numbers.apply_to(self.limits)),
                    pause: if orders.pause_of(&key).is_some() { PauseState::Paused } else { PauseState::NotPaused },
                    load: loads.get(&key).copied().unwrap_or_default(),
                    workers: workers.remove(&key).unwrap_or_default(),
                    not_before: self.restarts.get(&key).map_or(Instant::ORIGIN, RestartBackoff::not_before),
                    key,
                }
            })
            .collect();
        let decisions = self.scale.plan(&groups, self.max_total, now);
        for decision in &decisions {
            self.apply_decision(decision);
        }
        self.decisions = decisions.into_iter().map(|decision| (decision.key.clone(), decision)).collect();
    }

    fn apply_decision(&mut self, decision: &ScaleDecision) {
        let (wanted, why) = describe(decision);
        let Some(driver) = &mut self.driver else {
            if self.decisions.get(&decision.key).map_or(0, |last| last.desired) != wanted {
                tracing::info!(key = %decision.key, wanted, "workers are wanted, but this pool has no driver: {why}");
            }
            return;
        };
        for id in &decision.drain {
            if driver.stop(id) {
                tracing::info!(worker = &**id, key = %decision.key, "stopping worker: {why}");
            }
        }
        let key = &decision.key;
        let Some(queue) = self.names.request_queue(key) else { return };
        for _ in 0..decision.start {
            let id = uuid::Uuid::new_v4().to_string();
            let mut variables = self.variables.clone();
            variables.extend([
                ("WORKER_ID".to_owned(), id.clone()),
                ("WORKER_KEY".to_owned(), self.names.encoded_key(key)),
                ("WORKER_REQUESTS_QUEUE".to_owned(), queue.clone()),
            ]);
            driver.start(WorkerSpec { id, key: key.clone(), variables });
        }
    }
}

fn describe(decision: &ScaleDecision) -> (u32, String) {
    (decision.desired, decision.reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}

fn group_worker(id: &str, worker: &KnownWorker, now: Instant) -> GroupWorker {
    GroupWorker { id: id.into(), activity: worker.activity(now), started_at: worker.started_at }
}

fn restarts_of<'a>(restarts: &'a mut BTreeMap<Key, RestartBackoff>, key: &Key) -> &'a mut RestartBackoff {
    let seed = || uuid::Uuid::new_v4().as_u64_pair().0;
    restarts.entry(key.clone()).or_insert_with(|| RestartBackoff::new(CONTROLLER_WORKER_STABLE_AFTER, seed()))
}
