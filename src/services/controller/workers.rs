//! The workers of a pool: what is known of each, and which are started and stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::sync::Arc;

use secrecy::ExposeSecret as _;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::dead_letters::WorkerFailures;
use super::driver::{
    DriverError, DriverEvent, DriverHandle, KnownWorker, StartError, WorkerChange, WorkerExit, WorkerSpec,
};
use super::poison_message::ExitedWorker;
use super::state_store::StateStore;
use super::{ControllerConfig, RecordedError, SharedCounters, scale_limits};
use journeyman_domain::group::Key;
use journeyman_domain::group::load::Load;
use journeyman_domain::group::overrides::Overrides;
use journeyman_domain::group::restart_backoff::{RestartBackoff, WorkerEnd};
use journeyman_domain::group::scale::{GroupInput, GroupWorker, ScaleDecision, Scaler, WorkerActivity};
use journeyman_domain::group::tracker::Tracker;
use journeyman_domain::limits::{CONTROLLER_WORKER_STABLE_AFTER, DRIVER_CALL_TIMEOUT};
use journeyman_domain::time::Instant;
use journeyman_platform::host::clock::Clock;
use journeyman_platform::tasks::supervised;

pub(super) struct WorkerSet {
    pool: String,
    driver: Option<DriverHandle>,
    pub(super) is_listed: bool,
    is_list_failing: bool,
    refused_starts: RestartBackoff,
    pub(super) restarts: BTreeMap<Key, RestartBackoff>,
    scaler: Scaler,
    variables: BTreeMap<String, String>,
    /// The keys that are stored, or being stored.
    pub(super) known_keys: BTreeSet<Key>,
    storing: JoinSet<()>,
    pub(super) decisions: BTreeMap<Key, ScaleDecision>,
    pub(super) failures: watch::Sender<Failures>,
    counters: SharedCounters,
}

#[derive(Default)]
pub(super) struct Failures {
    pub(super) groups: BTreeMap<Key, WorkerFailure>,
    /// The driver is unavailable: since when, and why.
    pub(super) driver: Option<RecordedError>,
}

/// The last failure of a group.
pub(super) struct WorkerFailure {
    pub(super) error: RecordedError,
    pub(super) worker: Option<ExitedWorker>,
}

impl WorkerSet {
    pub(super) fn open(settings: &ControllerConfig, counters: SharedCounters, clock: Clock) -> io::Result<Self> {
        let driver = DriverHandle::open(&settings.pool, &settings.settings, clock)?;
        let env = settings.settings.env.iter();
        let mut variables: BTreeMap<_, _> = env.map(|(name, value)| (name.clone(), value.0.clone())).collect();
        variables.extend([
            ("WORKER_POOL".to_owned(), settings.pool.clone()),
            ("WORKER_ACTIVITY_EXCHANGE".to_owned(), settings.names.activity_exchange()),
        ]);
        Ok(Self {
            pool: settings.pool.clone(),
            is_listed: driver.is_none(),
            is_list_failing: false,
            refused_starts: restart_backoff(),
            known_keys: BTreeSet::new(),
            storing: JoinSet::new(),
            driver,
            restarts: BTreeMap::new(),
            scaler: Scaler::default(),
            variables,
            decisions: BTreeMap::new(),
            failures: watch::Sender::default(),
            counters,
        })
    }

    /// Nothing is decided before the driver has listed the workers.
    pub(super) fn activate(&mut self) {
        if let Some(driver) = &mut self.driver {
            driver.activate();
            self.is_listed = false;
        }
        self.on_driver_available();
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
        self.on_driver_available();
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
    pub(super) fn load_known_keys(&self) -> impl Future<Output = BTreeSet<Key>> + use<> {
        let store = self.driver.as_ref().map(|driver| Arc::clone(&driver.store));
        let pool = self.pool.clone();
        async move {
            let Some(store) = store else { return BTreeSet::new() };
            let loaded = timeout(DRIVER_CALL_TIMEOUT, store.run(StateStore::known_keys)).await;
            loaded.map_err(io::Error::from).flatten().unwrap_or_else(|error| {
                tracing::warn!(pool, "cannot load the known keys: {error}");
                BTreeSet::new()
            })
        }
    }

    /// Changes wait for the one that is being stored.
    pub(super) fn store_known_keys<'a>(&mut self, keys: impl Iterator<Item = &'a Key> + Clone) {
        // Both are sorted.
        let Some(driver) = self.driver.as_ref().filter(|_| !keys.clone().eq(&self.known_keys)) else { return };
        while self.storing.try_join_next().is_some() {}
        if !self.storing.is_empty() {
            return;
        }
        let keys: BTreeSet<Key> = keys.cloned().collect();
        let removed: Vec<Key> = self.known_keys.difference(&keys).cloned().collect();
        let added: Vec<Key> = keys.difference(&self.known_keys).cloned().collect();
        let update = driver.store.run(move |store| store.update_known_keys(&removed, &added));
        let pool = self.pool.clone();
        self.storing.spawn(supervised("a pool's known keys", async move {
            if let Err(error) = update.await {
                tracing::warn!(pool, "cannot store the known keys: {error}");
            }
        }));
        self.known_keys = keys;
    }

    pub(super) const fn starts_workers(&self) -> bool {
        self.driver.is_some()
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

    pub(super) fn by_key(&self, now: Instant) -> BTreeMap<Key, Vec<GroupWorker>> {
        let mut by_key = BTreeMap::<Key, Vec<GroupWorker>>::new();
        for (id, worker) in self.workers() {
            let worker_of_group =
                GroupWorker { id: id.as_str().into(), activity: worker.activity(now), started_at: worker.started_at };
            by_key.entry(worker.key.clone()).or_default().push(worker_of_group);
        }
        by_key
    }

    /// Busy workers of each key. A worker that became busy after its queue was inspected holds a request that the
    /// inspection counted as ready.
    pub(super) fn busy_by_key(
        &self,
        inspected_at: impl Fn(&Key) -> Option<Instant>,
        now: Instant,
    ) -> BTreeMap<Key, u32> {
        let mut by_key = BTreeMap::new();
        for (_, worker) in self.workers().filter(|(_, worker)| worker.activity(now) == WorkerActivity::Busy) {
            if worker.busy_since <= inspected_at(&worker.key) {
                *by_key.entry(worker.key.clone()).or_default() += 1;
            }
        }
        by_key
    }

    /// What a worker waits for.
    pub(super) fn detail(&self, id: &str) -> Option<String> {
        self.driver.as_ref()?.reconciler.worker(id)?.detail.clone()
    }

    pub(super) fn drain(&mut self, id: &str) -> bool {
        self.driver.as_mut().is_some_and(|driver| driver.stop(id))
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
            let is_busy = event != "ready";
            worker.busy_since = is_busy.then(|| worker.busy_since.unwrap_or(now));
            worker.last_report_at = is_busy.then_some(now);
        }
    }

    /// Without a broker there are no reports.
    pub(super) fn assume_ready(&mut self, now: Instant) {
        for (_, worker) in self.workers_mut() {
            worker.ready_at.get_or_insert(now);
        }
    }

    pub(super) fn failures(&self) -> WorkerFailures {
        self.driver.as_ref().map(|_| self.failures.subscribe())
    }

    pub(super) fn on_driver_event(&mut self, news: DriverEvent, now: Instant) -> Result<Vec<Key>, String> {
        match news {
            DriverEvent::Started(id) => {
                if !self.is_list_failing {
                    self.on_driver_available();
                }
                if let Some(key) = self.key_of(&id) {
                    self.counters.lock().values.workers_started += 1;
                    let (wanted, why) = self.decisions.get(&key).map_or_else(Default::default, describe);
                    tracing::info!(worker = id, %key, "worker started, {wanted} wanted: {why}");
                }
            }
            DriverEvent::StartFailed { id, error: StartError::Worker(why) } if !self.is_list_failing => {
                if let Some(key) = self.key_of(&id) {
                    tracing::error!(%key, "failed to start a worker: {why}");
                    let message = format!("failed to start: {why}");
                    self.record_failure(&key, Some(WorkerEnd::NeverReady), message, None, now);
                }
            }
            DriverEvent::StartFailed {
                error: StartError::Worker(why) | StartError::Driver(DriverError(why)), ..
            } => {
                // Starts that failed together count once.
                if now >= self.refused_starts.not_before() {
                    self.refused_starts.on_worker_ended(WorkerEnd::NeverReady, now);
                }
                return self.on_driver_unavailable(format!("cannot start a worker: {why}"), now);
            }
            DriverEvent::Listed(Ok(changes)) => {
                if std::mem::take(&mut self.is_list_failing) {
                    self.on_driver_available();
                }
                return Ok(self.on_changes(changes, now));
            }
            DriverEvent::Listed(Err(DriverError(why))) => {
                self.is_list_failing = true;
                return self.on_driver_unavailable(format!("cannot list the workers: {why}"), now);
            }
            DriverEvent::ListSlow(waited) => {
                self.is_list_failing = true;
                let why = format!("cannot list the workers: no reply for {} s", waited.as_secs());
                return self.on_driver_unavailable(why, now);
            }
        }
        Ok(Vec::new())
    }

    fn on_driver_unavailable(&mut self, message: String, now: Instant) -> Result<Vec<Key>, String> {
        let error = RecordedError { at: now, message: message.clone() };
        let mut is_first = false;
        self.failures.send_modify(|failures| {
            is_first = failures.driver.is_none();
            failures.driver.get_or_insert(error).message.clone_from(&message);
        });
        if !is_first {
            return Ok(Vec::new());
        }
        let text =
            "[alert operator] the driver is unavailable, so no worker is started; workers keep running, retrying";
        tracing::error!(alert = "driver-unavailable", pool = self.pool, "{text}: {message}");
        Err(message)
    }

    fn on_driver_available(&mut self) {
        self.is_list_failing = false;
        self.refused_starts.reset();
        if self.failures.borrow().driver.is_some() {
            self.failures.send_modify(|failures| failures.driver = None);
            tracing::info!(pool = self.pool, "the driver is available again");
        }
    }

    fn key_of(&self, id: &str) -> Option<Key> {
        Some(self.driver.as_ref()?.reconciler.worker(id)?.key.clone())
    }

    /// The keys of the workers that were found.
    fn on_changes(&mut self, changes: Vec<WorkerChange>, now: Instant) -> Vec<Key> {
        let mut keys = Vec::new();
        for change in changes {
            match change {
                WorkerChange::Discovered { key, .. } => keys.push(key),
                WorkerChange::Exited { id, key, exit, requested: true, .. } => {
                    tracing::info!(worker = id, %key, "worker stopped: {}", exit.reason);
                }
                WorkerChange::Exited { id, key, exit, end, .. } => self.on_exit(&id, &key, exit, end, now),
            }
        }
        if !std::mem::replace(&mut self.is_listed, true) && !keys.is_empty() {
            tracing::info!(pool = self.pool, workers = keys.len(), "adopted running workers");
        }
        keys
    }

    fn on_exit(&mut self, id: &str, key: &Key, exit: WorkerExit, end: Option<WorkerEnd>, now: Instant) {
        let WorkerExit { reason, log, log_tail } = exit;
        let message = log.map_or_else(|| reason.clone(), |log| format!("{reason}; log: {log}"));
        let exited = Some(ExitedWorker::new(id, &reason, &log_tail));
        let consecutive_failures = self.record_failure(key, end, message, exited, now);
        tracing::warn!(worker = id, %key, consecutive_failures, "worker exited: {reason}");
    }

    fn record_failure(
        &mut self,
        key: &Key,
        end: Option<WorkerEnd>,
        message: String,
        worker: Option<ExitedWorker>,
        now: Instant,
    ) -> u32 {
        self.counters.lock().values.workers_failed += 1;
        let restarts = self.restarts.entry(key.clone()).or_insert_with(restart_backoff);
        let was_failing = restarts.is_failing();
        // How long a worker of a previous controller ran is unknown.
        if let Some(end) = end {
            restarts.on_worker_ended(end, now);
        }
        if restarts.is_failing() && !was_failing {
            let text = "[alert operator] workers of this key keep failing; last failure";
            tracing::error!(alert = "workers-crash-looping", %key, "{text}: {message}");
        }
        let consecutive_failures = restarts.consecutive_failures();
        let failure = WorkerFailure { error: RecordedError { at: now, message }, worker };
        self.failures.send_modify(|failures| drop(failures.groups.insert(key.clone(), failure)));
        consecutive_failures
    }

    pub(super) fn plan(
        &mut self,
        config: &ControllerConfig,
        tracker: &Tracker,
        loads: &BTreeMap<Key, Load>,
        overrides: &Overrides,
        now: Instant,
    ) {
        if !self.is_listed {
            return;
        }
        let mut keys: BTreeSet<Key> = tracker.groups().map(|(key, _)| key.clone()).collect();
        keys.extend(self.keys().cloned());
        self.restarts.retain(|key, restarts| keys.contains(key) || restarts.consecutive_failures() > 0);
        self.failures.send_modify(|failures| failures.groups.retain(|key, _| keys.contains(key)));
        let (mut workers, limits) = (self.by_key(now), scale_limits(&config.settings));
        let is_driver_unavailable = self.is_list_failing || now < self.refused_starts.not_before();
        let groups: Vec<GroupInput> = keys
            .into_iter()
            .map(|key| GroupInput {
                phase: tracker.desired(&key).map(|wanted| wanted.phase),
                limits: overrides.scale_of(&key).map_or(limits, |scale| scale.apply_to(limits)),
                is_paused: overrides.pause_of(&key).is_some(),
                load: loads.get(&key).copied().unwrap_or_default(),
                workers: workers.remove(&key).unwrap_or_default(),
                not_before: self.restarts.get(&key).map_or(Instant::ORIGIN, RestartBackoff::not_before),
                is_driver_unavailable,
                key,
            })
            .collect();
        let decisions = self.scaler.plan(&groups, config.settings.max_total, now);
        for decision in &decisions {
            self.apply_decision(config, decision);
        }
        self.decisions = decisions.into_iter().map(|decision| (decision.key.clone(), decision)).collect();
    }

    fn apply_decision(&mut self, config: &ControllerConfig, decision: &ScaleDecision) {
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
        let Some(queue) = config.names.request_queue(key) else { return };
        let new_spec = || {
            let (id, mut variables) = (uuid::Uuid::new_v4().to_string(), self.variables.clone());
            variables.extend([
                // The URI is the one read last: its password may have been renewed.
                ("WORKER_AMQP_URI".to_owned(), config.broker.uri().expose_secret().to_owned()),
                ("WORKER_ID".to_owned(), id.clone()),
                ("WORKER_KEY".to_owned(), config.names.encoded_key(key)),
                ("WORKER_REQUESTS_QUEUE".to_owned(), queue.clone()),
            ]);
            WorkerSpec { id, key: key.clone(), variables }
        };
        for _ in 0..decision.start {
            driver.start(new_spec());
        }
        if driver.reconciler.workers().any(|(_, worker)| worker.key == *key) {
            driver.update(new_spec());
        }
    }
}

fn restart_backoff() -> RestartBackoff {
    RestartBackoff::new(CONTROLLER_WORKER_STABLE_AFTER, uuid::Uuid::new_v4().as_u64_pair().0)
}

fn describe(decision: &ScaleDecision) -> (u32, String) {
    (decision.desired, decision.reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}
