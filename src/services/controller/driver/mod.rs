//! Drivers start, list and stop the workers of a pool. Only a list proves that a worker runs or has exited ([`reconciler`]): a
//! call may time out after it took effect.

mod docker;
mod exec;
mod kubernetes;
mod object_name;
mod reconciler;
mod run_program;
mod subprocess;
mod systemd;
mod worker_logs;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use crate::controller::config::{PoolConfig, PoolDriver};
use crate::controller::state_store::StateStore;
use journeyman_domain::group::Key;
use journeyman_domain::group::restart_backoff::WorkerEnd;
use journeyman_domain::limits::{
    CONTROLLER_RECONCILE_INTERVAL, DRIVER_CALL_TIMEOUT, DRIVER_CALLS_MAX, DRIVER_LIST_SLOW, DRIVER_POLL_INTERVAL,
    DRIVER_STARTS_QUEUED_MAX,
};
use journeyman_domain::time::Instant;
use journeyman_platform::host::clock::{Clock, or_pending};
use journeyman_platform::tasks::supervised;

use docker::DockerDriver;
use exec::ExecDriver;
use kubernetes::KubernetesDriver;
pub(super) use reconciler::KnownWorker;
use reconciler::Reconciler;
use subprocess::SubprocessDriver;
use systemd::SystemdDriver;

#[derive(Clone)]
pub(super) struct WorkerSpec {
    pub(super) id: String,
    pub(super) key: Key,
    pub(super) variables: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ListedWorker {
    pub(super) id: String,
    pub(super) key: Key,
    pub(super) state: WorkerState,
    /// What it waits for.
    pub(super) detail: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WorkerState {
    Running,
    Stopping,
    Pending,
    Exited(WorkerExit),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerIdSource {
    Controller,
    Platform,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct WorkerExit {
    pub(super) reason: String,
    pub(super) log: Option<String>,
    pub(super) log_tail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopMode {
    Terminate,
    Kill,
    Remove,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DriverError(pub(super) String);

impl From<io::Error> for DriverError {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

/// Why a worker was not started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StartError {
    /// The driver cannot be asked, or refuses the controller: no worker has failed.
    Driver(DriverError),
    /// This worker cannot run.
    Worker(String),
}

impl From<DriverError> for StartError {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

impl From<io::Error> for StartError {
    fn from(error: io::Error) -> Self {
        Self::Driver(error.into())
    }
}

trait Driver: Send + Sync + 'static {
    fn list(&self) -> impl Future<Output = Result<Vec<ListedWorker>, DriverError>> + Send;

    /// The worker may run although this failed.
    fn start(&self, spec: WorkerSpec) -> impl Future<Output = Result<(), StartError>> + Send;

    /// Succeeds for a worker that does not exist.
    fn stop(&self, id: String, key: Key, mode: StopMode) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Brings what the platform starts workers of this key from up to date with the configuration.
    fn update(&self, _spec: WorkerSpec) -> impl Future<Output = Result<(), DriverError>> + Send {
        async { Ok(()) }
    }

    /// Waits for a hint that the list has changed. Cancel safe.
    fn changed(&self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
}

enum DriverCall {
    /// These stop requests are of workers that are gone.
    List {
        forgotten: Vec<String>,
    },
    Start(WorkerSpec),
    Stop(String, Key, StopMode),
    Update(WorkerSpec),
}

enum DriverCallResult {
    Listed(Result<WorkerList, DriverError>),
    Started { id: String, result: Result<(), StartError> },
    Stopped { id: String, mode: StopMode, result: Result<(), DriverError>, recorded: Result<(), DriverError> },
    Updated { spec: WorkerSpec, result: Result<(), DriverError> },
}

struct WorkerList {
    workers: Vec<ListedWorker>,
    stop_requests: BTreeSet<String>,
}

/// A [`Driver`] of any kind.
trait AnyDriver: Send + Sync {
    fn call(self: Arc<Self>, call: DriverCall, store: Arc<StateStore>) -> BoxFuture<'static, DriverCallResult>;

    fn changed(&self) -> BoxFuture<'_, ()>;
}

impl<D: Driver> AnyDriver for D {
    fn call(self: Arc<Self>, call: DriverCall, store: Arc<StateStore>) -> BoxFuture<'static, DriverCallResult> {
        Box::pin(async move {
            match call {
                DriverCall::List { forgotten } => {
                    let listing = async {
                        let workers = self.list().await?;
                        let update = move |store: &StateStore| {
                            forgotten.iter().try_for_each(|id| store.remove_stop_request(id))?;
                            store.stop_requests()
                        };
                        Ok(WorkerList { workers, stop_requests: store.run(update).await? })
                    };
                    DriverCallResult::Listed(with_timeout(listing).await)
                }
                DriverCall::Start(spec) => {
                    let id = spec.id.clone();
                    DriverCallResult::Started { id, result: with_timeout(self.start(spec)).await }
                }
                DriverCall::Stop(id, key, mode) => {
                    let result = with_timeout(self.stop(id.clone(), key, mode)).await;
                    // A second TERM makes a worker release what it runs, so the next controller must not repeat it.
                    let recorded = if mode == StopMode::Terminate && result.is_ok() {
                        let id = id.clone();
                        let record = store.run(move |store| store.add_stop_request(&id));
                        with_timeout(async { Ok(record.await.map(drop)?) }).await
                    } else {
                        Ok(())
                    };
                    DriverCallResult::Stopped { id, mode, result, recorded }
                }
                DriverCall::Update(spec) => {
                    let result = with_timeout(self.update(spec.clone())).await;
                    DriverCallResult::Updated { spec, result }
                }
            }
        })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        Box::pin(Driver::changed(self))
    }
}

#[derive(Debug)]
pub(super) enum DriverEvent {
    Started(String),
    StartFailed {
        id: String,
        error: StartError,
    },
    /// A list takes so long.
    ListSlow(Duration),
    Listed(Result<Vec<WorkerChange>, DriverError>),
}

/// What a panic of a driver is logged as.
const DRIVER: &str = "a driver";

/// A difference to the previous list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WorkerChange {
    /// Not started under this activation, or named by its platform.
    Discovered { id: String, key: Key },
    Exited {
        id: String,
        key: Key,
        exit: WorkerExit,
        requested: bool,
        /// `None` if this controller never saw it run.
        end: Option<WorkerEnd>,
    },
}

/// A driver, which is called while the controller holds the pool.
pub(super) struct DriverHandle {
    driver: Arc<dyn AnyDriver>,
    pub(super) store: Arc<StateStore>,
    clock: Clock,
    list_interval: Duration,
    pub(super) reconciler: Reconciler,
    /// Stop requests that the next list removes.
    forgotten: Vec<String>,
    active: Option<ActiveDriver>,
}

struct ActiveDriver {
    /// Calls in progress; aborted on drop.
    calls: JoinSet<DriverCallResult>,
    starts: VecDeque<WorkerSpec>,
    updated_keys: BTreeSet<Key>,
    updates: Vec<WorkerSpec>,
    /// A failed update is repeated after the next list.
    is_update_due: bool,
    list_ticks: Interval,
    /// The time at which the list in progress began.
    listing_since: Option<Instant>,
    /// The time at which it is reported as slow, unless that was done.
    slow_at: Option<Instant>,
    last_list_duration: Duration,
}

impl DriverHandle {
    /// `None` if the pool has no driver.
    pub(super) fn open(name: &str, pool: &PoolConfig, clock: Clock) -> io::Result<Option<Self>> {
        if pool.driver == PoolDriver::Noop || pool.driver == PoolDriver::Subprocess && pool.command.is_empty() {
            return Ok(None);
        }
        let folder = pool_dir(name, pool);
        let store = Arc::new(StateStore::open(&folder)?);
        let no_table = || io::Error::other(format!("[pool.{name}] has no table for its driver"));
        let driver: Arc<dyn AnyDriver> = match pool.driver {
            PoolDriver::Noop => return Ok(None),
            PoolDriver::Subprocess => {
                Arc::new(SubprocessDriver::new(name, pool.command.clone(), folder, Arc::clone(&store)))
            }
            PoolDriver::Exec => Arc::new(ExecDriver { program: pool.exec.clone(), pool: name.to_owned() }),
            PoolDriver::Docker => {
                let config = pool.docker.clone().ok_or_else(no_table)?;
                Arc::new(DockerDriver::new(config, pool.command.clone(), name.to_owned()))
            }
            PoolDriver::Kubernetes => {
                let cluster = pool.kubernetes.clone().ok_or_else(no_table)?;
                let driver = KubernetesDriver::new(name.to_owned(), pool.clone(), cluster);
                Arc::new(driver.map_err(|DriverError(why)| io::Error::other(why))?)
            }
            PoolDriver::Systemd => {
                let config = pool.systemd.clone().ok_or_else(no_table)?;
                Arc::new(SystemdDriver { config, pool: name.to_owned(), folder, store: Arc::clone(&store) })
            }
        };
        let is_by_pods = pool.driver == PoolDriver::Kubernetes && !pool.is_scaled_by_keda();
        let id_source = if is_by_pods { WorkerIdSource::Platform } else { WorkerIdSource::Controller };
        let is_local = pool.driver == PoolDriver::Subprocess;
        let list_interval = if is_local { CONTROLLER_RECONCILE_INTERVAL } else { DRIVER_POLL_INTERVAL };
        let reconciler = Reconciler::new(pool.termination_grace.0, id_source);
        Ok(Some(Self { driver, store, clock, list_interval, reconciler, forgotten: Vec::new(), active: None }))
    }

    pub(super) fn activate(&mut self) {
        self.reconciler.restart();
        let mut list_ticks = interval(self.list_interval);
        list_ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.active = Some(ActiveDriver {
            calls: JoinSet::new(),
            starts: VecDeque::new(),
            updated_keys: BTreeSet::new(),
            updates: Vec::new(),
            is_update_due: false,
            list_ticks,
            listing_since: None,
            slow_at: None,
            last_list_duration: Duration::ZERO,
        });
    }

    /// The workers are shown as they were last listed.
    pub(super) fn deactivate(&mut self) {
        self.active = None;
    }

    /// Ignored if too many starts are queued: the next plan decides anew.
    pub(super) fn start(&mut self, spec: WorkerSpec) {
        let Some(active) = self.active.as_mut() else { return };
        if active.starts.len() < DRIVER_STARTS_QUEUED_MAX {
            self.reconciler.on_start_requested(&spec, self.clock.now());
            active.starts.push_back(spec);
        }
    }

    /// Once for each key of an activation.
    pub(super) fn update(&mut self, spec: WorkerSpec) {
        let Some(active) = self.active.as_mut() else { return };
        if active.updated_keys.insert(spec.key.clone()) {
            active.updates.push(spec);
        }
    }

    /// False if the driver is not active, or there is no such worker.
    pub(super) fn stop(&mut self, id: &str) -> bool {
        let is_stopped = self.active.is_some() && self.reconciler.workers().any(|(known, _)| known == id);
        if is_stopped {
            self.reconciler.request_stop(id);
        }
        is_stopped
    }

    /// Pending while the driver is not active. Cancel safe.
    pub(super) async fn next_event(&mut self) -> DriverEvent {
        loop {
            self.start_calls();
            let (clock, now) = (self.clock, self.clock.now());
            let Some(active) = &mut self.active else { return std::future::pending().await };
            tokio::select! {
                biased;
                () = self.driver.changed() => active.list_ticks.reset_immediately(),
                Some(done) = active.calls.join_next() => {
                    if let Ok(done) = done && let Some(event) = self.on_call_result(done) {
                        return event;
                    }
                }
                () = or_pending(active.slow_at.map(|at| clock.sleep_until(at))) => {
                    active.slow_at = None;
                    let since = active.listing_since.unwrap_or(now);
                    return DriverEvent::ListSlow(clock.now().since(since));
                }
                _ = active.list_ticks.tick(), if active.listing_since.is_none() => {
                    let now = clock.now();
                    active.listing_since = Some(now);
                    // Lists that are always slow are reported once.
                    active.slow_at = Some(now.plus(DRIVER_LIST_SLOW.max(active.last_list_duration * 2)));
                    self.reconciler.on_list_started();
                    let call = DriverCall::List { forgotten: std::mem::take(&mut self.forgotten) };
                    let calling = Arc::clone(&self.driver).call(call, Arc::clone(&self.store));
                    active.calls.spawn(supervised(DRIVER, calling));
                }
            }
        }
    }

    fn start_calls(&mut self) {
        let Some(active) = &mut self.active else { return };
        while active.calls.len() < DRIVER_CALLS_MAX {
            let call = if let Some((id, key, mode)) = self.reconciler.next_stop(self.clock.now()) {
                DriverCall::Stop(id, key, mode)
            } else if let Some(spec) = active.starts.pop_front() {
                DriverCall::Start(spec)
            } else if active.is_update_due
                && let Some(spec) = active.updates.pop()
            {
                DriverCall::Update(spec)
            } else {
                break;
            };
            let calling = Arc::clone(&self.driver).call(call, Arc::clone(&self.store));
            active.calls.spawn(supervised(DRIVER, calling));
        }
    }

    fn on_call_result(&mut self, result: DriverCallResult) -> Option<DriverEvent> {
        let active = self.active.as_mut()?;
        match result {
            DriverCallResult::Listed(found) => {
                let since = active.listing_since.take();
                active.last_list_duration = since.map_or(Duration::ZERO, |at| self.clock.now().since(at));
                active.slow_at = None;
                active.is_update_due = found.is_ok();
                let changes = found.map(|WorkerList { workers, stop_requests }| {
                    let changes = self.reconciler.on_listed(workers, &stop_requests, self.clock.now());
                    let is_gone = |id: &String| self.reconciler.worker(id).is_none();
                    self.forgotten = stop_requests.into_iter().filter(is_gone).collect();
                    changes
                });
                Some(DriverEvent::Listed(changes))
            }
            DriverCallResult::Started { id, result: Ok(()) } => {
                self.reconciler.on_started(&id);
                Some(DriverEvent::Started(id))
            }
            DriverCallResult::Started { id, result: Err(error) } => {
                self.reconciler.on_start_failed(&id);
                Some(DriverEvent::StartFailed { id, error })
            }
            DriverCallResult::Updated { spec, result } => {
                if let Err(DriverError(why)) = result {
                    tracing::warn!(key = %spec.key, "cannot update the configuration of the workers, retrying: {why}");
                    active.updates.push(spec);
                    active.is_update_due = false;
                }
                None
            }
            DriverCallResult::Stopped { id, mode, result, recorded } => {
                let is_new = self.reconciler.on_stopped(&id, mode, result.is_ok(), self.clock.now());
                match (mode, result.and(recorded)) {
                    (_, Err(DriverError(why))) if is_new => {
                        tracing::warn!(worker = id, "cannot stop the worker, retrying: {why}");
                    }
                    (StopMode::Kill, Ok(())) if is_new => {
                        tracing::warn!(worker = id, "the worker did not exit within `termination_grace`; killing it");
                    }
                    (StopMode::Terminate | StopMode::Kill | StopMode::Remove, _) => {}
                }
                None
            }
        }
    }
}

/// Each pool has its own directory: everything in it is taken for workers of the pool.
fn pool_dir(name: &str, pool: &PoolConfig) -> PathBuf {
    // A name may be `..`.
    pool.state_dir.0.join(urlencoding::encode(name).replace('.', "%2E"))
}

async fn with_timeout<T, E: From<DriverError>>(call: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    match timeout(DRIVER_CALL_TIMEOUT, call).await {
        Ok(result) => result,
        Err(_) => Err(DriverError(format!("timed out after {DRIVER_CALL_TIMEOUT:?}")).into()),
    }
}

#[cfg(test)]
mod conformance_tests;
