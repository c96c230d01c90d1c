//! Drivers start, list and stop the workers of a pool. Only a list proves that a worker runs or has exited ([`reconciler`]): a
//! call may time out after it took effect.

mod docker;
mod exec;
mod kubernetes;
mod reconciler;
mod run_program;
mod stop_requests;
mod subprocess;
mod systemd;
mod worker_logs;
mod worker_records;

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::domain::group::Key;
use crate::host::clock::Clock;
use crate::limits::{DRIVER_CALL_TIMEOUT, DRIVER_CALLS_MAX, DRIVER_COMMANDS_QUEUED_MAX, DRIVER_EVENTS_QUEUED_MAX};

pub use docker::DockerConfig;
pub use exec::ExecConfig;
pub use kubernetes::{KubernetesConfig, Scaling};
pub use subprocess::SubprocessConfig;
pub use systemd::SystemdConfig;

use docker::DockerDriver;
use exec::ExecDriver;
use kubernetes::KubernetesDriver;
use reconciler::Reconciler;
use stop_requests::StopRequests;
use subprocess::SubprocessDriver;
use systemd::SystemdDriver;

#[derive(Debug, Clone)]
pub enum DriverKind {
    None,
    Subprocess(SubprocessConfig),
    Exec(ExecConfig),
    Systemd(SystemdConfig),
    Docker(DockerConfig),
    Kubernetes(Box<KubernetesConfig>),
}

#[derive(Debug, Clone)]
pub struct DriverConfig {
    pub pool: String,
    pub kind: DriverKind,
    pub env: BTreeMap<String, String>,
    pub folder: PathBuf,
    pub termination_grace: Duration,
}

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

    fn set_active(&self, _in_charge: bool) {}

    fn list(&self) -> impl Future<Output = Result<Vec<ListedWorker>, DriverError>> + Send;

    fn start(&self, assignment: WorkerSpec) -> impl Future<Output = Result<(), DriverError>> + Send;

    fn stop(&self, id: String, key: Key, stop: StopMode) -> impl Future<Output = Result<(), DriverError>> + Send;
}

enum DriverCommand {
    Start(WorkerSpec),
    Stop(String),
    List(u64),
}

#[derive(Debug)]
pub(super) enum DriverEvent {
    Started(String),
    StartFailed { id: String, error: DriverError },
    Listed { number: u64, changes: Result<Vec<WorkerChange>, DriverError> },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WorkerChange {
    Discovered { id: String, key: Key },
    Pending { id: String, key: Key },
    PendingResolved { id: String },
    Stopping { id: String },
    Exited { id: String, key: Key, exit: WorkerExit, requested: bool },
}

pub(super) struct DriverHandle {
    commands: mpsc::Sender<DriverCommand>,
    events: mpsc::Receiver<DriverEvent>,
    lists_requested: u64,
    active: watch::Sender<bool>,
}

impl DriverHandle {
    pub(super) fn start(&self, assignment: WorkerSpec) -> bool {
        self.commands.try_send(DriverCommand::Start(assignment)).is_ok()
    }

    pub(super) fn stop(&self, id: &str) -> bool {
        self.commands.try_send(DriverCommand::Stop(id.to_owned())).is_ok()
    }

    pub(super) fn set_active(&self, in_charge: bool) {
        self.active.send_replace(in_charge);
    }

    pub(super) fn request_list(&mut self) -> u64 {
        self.lists_requested += 1;
        // With a full channel the next periodic list answers instead.
        self.commands.try_send(DriverCommand::List(self.lists_requested)).ok();
        self.lists_requested
    }

    pub(super) async fn next_event(&mut self) -> Option<DriverEvent> {
        self.events.recv().await
    }
}

pub(super) fn start_driver(
    posting: &DriverConfig,
    clock: Clock,
    tasks: &mut JoinSet<()>,
) -> io::Result<Option<DriverHandle>> {
    let DriverConfig { pool, kind: means, folder, termination_grace: grace, .. } = posting.clone();
    if !matches!(means, DriverKind::None) {
        std::fs::create_dir_all(&folder)?;
    }
    let told = StopRequests::new(&folder);
    Ok(Some(match means {
        DriverKind::None => return Ok(None),
        DriverKind::Subprocess(program) => {
            let driver = SubprocessDriver::new(&pool, program, folder);
            spawn_driver(driver, told, grace, clock, tasks)
        }
        DriverKind::Exec(commands) => spawn_driver(ExecDriver { commands, pool }, told, grace, clock, tasks),
        DriverKind::Docker(containers) => spawn_driver(DockerDriver::new(containers, pool), told, grace, clock, tasks),
        DriverKind::Kubernetes(cluster) => {
            let driver =
                KubernetesDriver::new(*cluster, pool, grace).map_err(|DriverError(why)| io::Error::other(why))?;
            spawn_driver(driver, told, grace, clock, tasks)
        }
        DriverKind::Systemd(template) => {
            spawn_driver(SystemdDriver::new(template, pool, folder), told, grace, clock, tasks)
        }
    }))
}

fn spawn_driver(
    driver: impl Driver,
    told: StopRequests,
    grace: Duration,
    clock: Clock,
    tasks: &mut JoinSet<()>,
) -> DriverHandle {
    let (orders, ordered) = mpsc::channel(DRIVER_COMMANDS_QUEUED_MAX);
    let (teller, news) = mpsc::channel(DRIVER_EVENTS_QUEUED_MAX);
    let (in_charge, charge) = watch::channel(false);
    let roster = Reconciler::new(grace, driver.worker_id_source());
    tasks.spawn(run_driver(Arc::new(driver), (roster, told), clock, charge, (ordered, teller)));
    DriverHandle { commands: orders, events: news, lists_requested: 0, active: in_charge }
}

enum DriverCallResult {
    Listed { number: u64, found: Result<Vec<ListedWorker>, DriverError> },
    Started { id: String, result: Result<(), DriverError> },
    Stopped { id: String, stop: StopMode, result: Result<(), DriverError> },
}

async fn run_driver<D: Driver>(
    driver: Arc<D>,
    (mut roster, mut told): (Reconciler, StopRequests),
    clock: Clock,
    charge: watch::Receiver<bool>,
    (mut orders, news): (mpsc::Receiver<DriverCommand>, mpsc::Sender<DriverEvent>),
) {
    let mut calls: JoinSet<DriverCallResult> = JoinSet::new();
    let mut look = interval(D::LIST_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut asked, mut answered, mut under_way) = (0, 0, None);
    loop {
        let busy = calls.len() >= DRIVER_CALLS_MAX;
        tokio::select! {
            biased;
            Some(done) = calls.join_next() => {
                let said = match done {
                    Ok(DriverCallResult::Listed { number, found }) => {
                        under_way = None;
                        answered = number;
                        let in_charge = *charge.borrow();
                        // Another controller may have stopped some meanwhile.
                        told.reload();
                        roster.set_active(in_charge, clock.now());
                        let changes = found.map(|mut found| {
                            told.mark_stopping(&mut found);
                            let mut changes = roster.on_listed(found, clock.now());
                            told.mark_requested(&mut changes);
                            if in_charge {
                                told.retain(|id| roster.is_known(id));
                            }
                            changes
                        });
                        Some(DriverEvent::Listed { number, changes })
                    }
                    Ok(DriverCallResult::Started { id, result: Ok(()) }) => {
                        roster.on_started(&id);
                        Some(DriverEvent::Started(id))
                    }
                    Ok(DriverCallResult::Started { id, result: Err(error) }) => {
                        roster.on_start_failed(&id);
                        Some(DriverEvent::StartFailed { id, error })
                    }
                    Ok(DriverCallResult::Stopped { id, stop, result }) => {
                        let is_news = roster.on_stopped(&id, stop, result.is_ok());
                        match (stop, result) {
                            (_, Err(DriverError(why))) if is_news => {
                                tracing::warn!(worker = id, "cannot stop the worker, retrying: {why}");
                            }
                            (StopMode::Terminate, Ok(())) => told.add(&id),
                            (StopMode::Kill, Ok(())) if is_news => {
                                tracing::warn!(worker = id, "the worker did not exit within `termination_grace`; killing it");
                            }
                            (StopMode::Kill | StopMode::Remove, Ok(())) | (_, Err(_)) => {}
                        }
                        None
                    }
                    Err(error) => match error.try_into_panic() {
                        // A panic in a driver is a bug: the controller dies with it.
                        Ok(panic) => std::panic::resume_unwind(panic),
                        Err(_) => return,
                    },
                };
                if let Some(said) = said
                    && news.send(said).await.is_err()
                {
                    return;
                }
            }
            order = orders.recv(), if !busy => match order {
                None => return,
                Some(DriverCommand::Start(assignment)) => {
                    roster.on_start_requested(&assignment);
                    let driver = Arc::clone(&driver);
                    calls.spawn(async move {
                        let id = assignment.id.clone();
                        DriverCallResult::Started { id, result: with_timeout(driver.start(assignment)).await }
                    });
                }
                Some(DriverCommand::Stop(id)) => roster.request_stop(&id, clock.now()),
                Some(DriverCommand::List(number)) => asked = number,
            },
            _ = look.tick() => {
                if under_way.is_none() {
                    driver.set_active(*charge.borrow());
                    under_way = Some(spawn_list(&driver, &mut roster, asked, &mut calls));
                }
            }
        }
        if under_way.is_none() && asked > answered {
            driver.set_active(*charge.borrow());
            under_way = Some(spawn_list(&driver, &mut roster, asked, &mut calls));
        }
        if !*charge.borrow() {
            roster.set_active(false, clock.now());
        }
        while calls.len() < DRIVER_CALLS_MAX
            && let Some((id, key, stop)) = roster.next_stop(clock.now())
        {
            let driver = Arc::clone(&driver);
            calls.spawn(async move {
                let result = with_timeout(driver.stop(id.clone(), key, stop)).await;
                DriverCallResult::Stopped { id, stop, result }
            });
        }
    }
}

fn spawn_list<D: Driver>(
    driver: &Arc<D>,
    roster: &mut Reconciler,
    number: u64,
    calls: &mut JoinSet<DriverCallResult>,
) -> u64 {
    roster.on_list_started();
    let driver = Arc::clone(driver);
    calls.spawn(async move { DriverCallResult::Listed { number, found: with_timeout(driver.list()).await } });
    number
}

async fn with_timeout<T>(call: impl Future<Output = Result<T, DriverError>>) -> Result<T, DriverError> {
    match timeout(DRIVER_CALL_TIMEOUT, call).await {
        Ok(result) => result,
        Err(_) => Err(DriverError(format!("timed out after {DRIVER_CALL_TIMEOUT:?}"))),
    }
}

#[cfg(test)]
mod conformance_tests;
