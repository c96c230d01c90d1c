//! Drivers start, list and stop the workers of a pool. Only a list proves that a worker runs or has exited ([`reconciler`]): a
//! call may time out after it took effect.

mod docker;
mod exec;
mod kubernetes;
mod reconciler;
mod run_program;
mod store;
mod subprocess;
mod systemd;
mod worker_logs;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::config::pool::{PoolConfig, PoolDriver};
use crate::domain::group::Key;
use crate::host::clock::Clock;
use crate::limits::{DRIVER_CALL_TIMEOUT, DRIVER_CALLS_MAX, DRIVER_COMMANDS_QUEUED_MAX, DRIVER_EVENTS_QUEUED_MAX};

use docker::DockerDriver;
use exec::ExecDriver;
use kubernetes::KubernetesDriver;
use reconciler::Reconciler;
use subprocess::SubprocessDriver;
use systemd::SystemdDriver;

pub(super) use store::StateStore;

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

trait Driver: Send + Sync + 'static {
    const LIST_INTERVAL: Duration;

    fn worker_id_source(&self) -> WorkerIdSource {
        WorkerIdSource::Controller
    }

    fn list(&self) -> impl Future<Output = Result<Vec<ListedWorker>, DriverError>> + Send;

    /// The worker may run although this failed.
    fn start(&self, spec: WorkerSpec) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Succeeds for a worker that does not exist.
    fn stop(&self, id: String, key: Key, mode: StopMode) -> impl Future<Output = Result<(), DriverError>> + Send;
}

enum DriverCommand {
    Start(WorkerSpec),
    Stop(String),
    /// List at once, and report it under this number.
    List(u64),
}

#[derive(Debug)]
pub(super) enum DriverEvent {
    Started(String),
    StartFailed { id: String, error: DriverError },
    Listed { number: u64, changes: Result<Vec<WorkerChange>, DriverError> },
}

/// A difference to the previous list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WorkerChange {
    /// Not started under this activation.
    Discovered {
        id: String,
        key: Key,
    },
    /// Starting, under a placeholder id.
    Pending {
        id: String,
        key: Key,
    },
    PendingResolved {
        id: String,
    },
    /// Asked to stop by another controller, or by the platform.
    Stopping {
        id: String,
    },
    Exited {
        id: String,
        key: Key,
        exit: WorkerExit,
        requested: bool,
    },
}

enum AnyDriver {
    Subprocess(Arc<SubprocessDriver>),
    Exec(Arc<ExecDriver>),
    Systemd(Arc<SystemdDriver>),
    Docker(Arc<DockerDriver>),
    Kubernetes(Arc<KubernetesDriver>),
}

/// A driver, whose task runs while the controller holds the pool.
pub(super) struct DriverHandle {
    driver: AnyDriver,
    store: Arc<StateStore>,
    termination_grace: Duration,
    clock: Clock,
    task: Option<DriverTask>,
}

struct DriverTask {
    commands: mpsc::Sender<DriverCommand>,
    events: mpsc::Receiver<DriverEvent>,
    lists_requested: u64,
    /// One task, aborted on drop.
    tasks: JoinSet<()>,
}

impl DriverHandle {
    /// `None` if the pool has no driver.
    pub(super) fn open(name: &str, pool: &PoolConfig, clock: Clock) -> io::Result<Option<Self>> {
        let starts_workers = match pool.driver {
            PoolDriver::Noop => false,
            PoolDriver::Subprocess => !pool.command.is_empty(),
            PoolDriver::Systemd | PoolDriver::Docker | PoolDriver::Kubernetes | PoolDriver::Exec => true,
        };
        if !starts_workers {
            return Ok(None);
        }
        let folder = pool_dir(name, pool);
        let store = Arc::new(StateStore::open(&folder)?);
        let no_table = || io::Error::other(format!("[pool.{name}] has no table for its driver"));
        let driver = match pool.driver {
            PoolDriver::Noop => return Ok(None),
            PoolDriver::Subprocess => {
                let driver = SubprocessDriver::new(name, pool.command.clone(), folder, Arc::clone(&store));
                AnyDriver::Subprocess(Arc::new(driver))
            }
            PoolDriver::Exec => {
                let commands = pool.exec.clone().ok_or_else(no_table)?;
                AnyDriver::Exec(Arc::new(ExecDriver { commands, pool: name.to_owned() }))
            }
            PoolDriver::Docker => {
                let config = pool.docker.clone().ok_or_else(no_table)?;
                AnyDriver::Docker(Arc::new(DockerDriver::new(config, pool.command.clone(), name.to_owned())))
            }
            PoolDriver::Kubernetes => {
                let cluster = pool.kubernetes.clone().ok_or_else(no_table)?;
                let driver = KubernetesDriver::new(name.to_owned(), pool.clone(), cluster);
                AnyDriver::Kubernetes(Arc::new(driver.map_err(|DriverError(why)| io::Error::other(why))?))
            }
            PoolDriver::Systemd => {
                let config = pool.systemd.clone().ok_or_else(no_table)?;
                AnyDriver::Systemd(Arc::new(SystemdDriver::new(config, name.to_owned(), folder, Arc::clone(&store))))
            }
        };
        Ok(Some(Self { driver, store, termination_grace: pool.termination_grace.0, clock, task: None }))
    }

    pub(super) fn store(&self) -> &StateStore {
        &self.store
    }

    pub(super) fn activate(&mut self) {
        self.task = Some(match &self.driver {
            AnyDriver::Subprocess(driver) => self.spawn(driver),
            AnyDriver::Exec(driver) => self.spawn(driver),
            AnyDriver::Systemd(driver) => self.spawn(driver),
            AnyDriver::Docker(driver) => self.spawn(driver),
            AnyDriver::Kubernetes(driver) => self.spawn(driver),
        });
    }

    pub(super) fn deactivate(&mut self) {
        self.task = None;
    }

    fn spawn<D: Driver>(&self, driver: &Arc<D>) -> DriverTask {
        let (commands, received) = mpsc::channel(DRIVER_COMMANDS_QUEUED_MAX);
        let (sender, events) = mpsc::channel(DRIVER_EVENTS_QUEUED_MAX);
        let reconciler = Reconciler::new(self.termination_grace, driver.worker_id_source());
        let worker = DriverLoop {
            driver: Arc::clone(driver),
            reconciler,
            store: Arc::clone(&self.store),
            stop_requests: BTreeSet::new(),
            clock: self.clock,
            calls: JoinSet::new(),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(worker.run(received, sender));
        DriverTask { commands, events, lists_requested: 0, tasks }
    }

    fn send(&self, command: DriverCommand) -> bool {
        self.task.as_ref().is_some_and(|task| task.commands.try_send(command).is_ok())
    }

    /// False if too many commands are queued: the next plan decides anew.
    pub(super) fn start(&self, spec: WorkerSpec) -> bool {
        self.send(DriverCommand::Start(spec))
    }

    /// False as in [`DriverHandle::start`].
    pub(super) fn stop(&self, id: &str) -> bool {
        self.send(DriverCommand::Stop(id.to_owned()))
    }

    /// Returns the number of the list that answers this, or of an earlier one.
    pub(super) fn request_list(&mut self) -> u64 {
        let Some(task) = &mut self.task else { return 0 };
        task.lists_requested += 1;
        // With a full channel the next periodic list answers instead.
        task.commands.try_send(DriverCommand::List(task.lists_requested)).ok();
        task.lists_requested
    }

    /// Cancel safe.
    pub(super) async fn next_event(&mut self) -> DriverEvent {
        let Some(task) = &mut self.task else { return std::future::pending().await };
        if let Some(event) = task.events.recv().await {
            return event;
        }
        // A panic in a driver is a bug: the controller dies with it.
        match task.tasks.join_next().await {
            Some(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Some(Ok(()) | Err(_)) | None => std::future::pending().await,
        }
    }
}

enum DriverCallResult {
    Listed { number: u64, found: Result<Vec<ListedWorker>, DriverError> },
    Started { id: String, result: Result<(), DriverError> },
    Stopped { id: String, mode: StopMode, result: Result<(), DriverError> },
}

struct DriverLoop<D> {
    driver: Arc<D>,
    reconciler: Reconciler,
    store: Arc<StateStore>,
    /// Workers that were asked to stop, also by previous controllers: a second TERM makes a worker release what it runs.
    stop_requests: BTreeSet<String>,
    clock: Clock,
    calls: JoinSet<DriverCallResult>,
}

impl<D: Driver> DriverLoop<D> {
    async fn run(mut self, mut commands: mpsc::Receiver<DriverCommand>, events: mpsc::Sender<DriverEvent>) {
        let mut ticks = interval(D::LIST_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut requested, mut listed, mut is_listing, mut is_due) = (0, 0, false, false);
        loop {
            tokio::select! {
                biased;
                Some(done) = self.calls.join_next() => {
                    let event = match done {
                        Ok(DriverCallResult::Listed { number, found }) => {
                            (is_listing, listed) = (false, number);
                            let changes = found.and_then(|found| self.on_listed(found).map_err(DriverError::from));
                            Some(DriverEvent::Listed { number, changes })
                        }
                        Ok(DriverCallResult::Started { id, result: Ok(()) }) => {
                            self.reconciler.on_started(&id);
                            Some(DriverEvent::Started(id))
                        }
                        Ok(DriverCallResult::Started { id, result: Err(error) }) => {
                            self.reconciler.on_start_failed(&id);
                            Some(DriverEvent::StartFailed { id, error })
                        }
                        Ok(DriverCallResult::Stopped { id, mode, result }) => {
                            self.on_stopped(&id, mode, result);
                            None
                        }
                        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                        Err(_) => return,
                    };
                    if let Some(event) = event
                        && events.send(event).await.is_err()
                    {
                        return;
                    }
                }
                command = commands.recv(), if self.calls.len() < DRIVER_CALLS_MAX => match command {
                    None => return,
                    Some(DriverCommand::Start(spec)) => {
                        self.reconciler.on_start_requested(&spec);
                        let driver = Arc::clone(&self.driver);
                        self.calls.spawn(async move {
                            let id = spec.id.clone();
                            DriverCallResult::Started { id, result: with_timeout(driver.start(spec)).await }
                        });
                    }
                    Some(DriverCommand::Stop(id)) => self.reconciler.request_stop(&id, self.clock.now()),
                    Some(DriverCommand::List(number)) => requested = number,
                },
                _ = ticks.tick() => is_due = true,
            }
            if !is_listing && (is_due || requested > listed) {
                (is_listing, is_due) = (true, false);
                self.reconciler.on_list_started();
                let (driver, number) = (Arc::clone(&self.driver), requested);
                self.calls.spawn(async move {
                    DriverCallResult::Listed { number, found: with_timeout(driver.list()).await }
                });
            }
            while self.calls.len() < DRIVER_CALLS_MAX
                && let Some((id, key, mode)) = self.reconciler.next_stop(self.clock.now())
            {
                let driver = Arc::clone(&self.driver);
                self.calls.spawn(async move {
                    let result = with_timeout(driver.stop(id.clone(), key, mode)).await;
                    DriverCallResult::Stopped { id, mode, result }
                });
            }
        }
    }

    fn on_listed(&mut self, mut found: Vec<ListedWorker>) -> io::Result<Vec<WorkerChange>> {
        self.stop_requests.append(&mut self.store.stop_requests()?);
        for worker in found.iter_mut().filter(|worker| worker.state == WorkerState::Running) {
            if self.stop_requests.contains(&worker.id) {
                worker.state = WorkerState::Stopping;
            }
        }
        let mut changes = self.reconciler.on_listed(found, self.clock.now());
        for change in &mut changes {
            if let WorkerChange::Exited { id, requested, .. } = change {
                *requested |= self.stop_requests.contains(id);
            }
        }
        let reconciler = &self.reconciler;
        for id in self.stop_requests.iter().filter(|id| !reconciler.is_known(id)) {
            self.store.remove_stop_request(id)?;
        }
        self.stop_requests.retain(|id| reconciler.is_known(id));
        Ok(changes)
    }

    fn on_stopped(&mut self, id: &str, mode: StopMode, result: Result<(), DriverError>) {
        let is_new = self.reconciler.on_stopped(id, mode, result.is_ok());
        match (mode, result) {
            (StopMode::Terminate, Ok(())) => {
                self.stop_requests.insert(id.to_owned());
                if let Err(error) = self.store.add_stop_request(id) {
                    tracing::warn!(worker = id, "cannot record the stop request: {error}");
                }
            }
            (_, Err(DriverError(why))) if is_new => {
                tracing::warn!(worker = id, "cannot stop the worker, retrying: {why}");
            }
            (StopMode::Kill, Ok(())) if is_new => {
                tracing::warn!(worker = id, "the worker did not exit within `termination_grace`; killing it");
            }
            (StopMode::Kill | StopMode::Remove, Ok(())) | (_, Err(_)) => {}
        }
    }
}

/// Each pool has its own directory: everything in it is taken for workers of the pool.
fn pool_dir(name: &str, pool: &PoolConfig) -> PathBuf {
    // A name may be `..`.
    pool.state_dir.0.join(urlencoding::encode(name).replace('.', "%2E"))
}

async fn with_timeout<T>(call: impl Future<Output = Result<T, DriverError>>) -> Result<T, DriverError> {
    match timeout(DRIVER_CALL_TIMEOUT, call).await {
        Ok(result) => result,
        Err(_) => Err(DriverError(format!("timed out after {DRIVER_CALL_TIMEOUT:?}"))),
    }
}

#[cfg(test)]
mod conformance_tests;
