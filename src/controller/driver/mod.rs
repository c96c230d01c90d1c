//! How workers of a pool come into being and go. Each driver is asked the same: who is there, start one, tell one to go.
//!
//! What a driver does may take long, and its answer may be lost. So it works in a task of its own, behind channels with a limit,
//! and is asked again and again who is there: its list alone says that a worker has come or gone ([`reconciler`]). A start whose
//! answer was lost is found by the next list, and what was not told to go is told again.

#[cfg(test)]
mod conformance;
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

/// Who starts the workers of a pool, and how.
#[derive(Debug, Clone)]
pub enum DriverKind {
    /// Nobody here: it is said what would be started.
    None,
    /// Processes of this host.
    Subprocess(SubprocessConfig),
    /// Whatever the site's own commands start.
    Exec(ExecConfig),
    /// Instances of a template unit.
    Systemd(SystemdConfig),
    /// Containers of a daemon.
    Docker(DockerConfig),
    /// Pods of a cluster.
    Kubernetes(Box<KubernetesConfig>),
}

/// What every driver has to know.
#[derive(Debug, Clone)]
pub struct DriverConfig {
    /// Whose workers they are. Those of another pool are none of its business, wherever it meets them.
    pub pool: String,
    /// Who starts them.
    pub kind: DriverKind,
    /// What workers find in their environment besides what they are told of their work.
    pub env: BTreeMap<String, String>,
    /// A folder of the pool's own: logs, and what workers are found again by.
    pub folder: PathBuf,
    /// How long one has between being told to end and being killed.
    pub termination_grace: Duration,
}

/// A worker to start.
#[derive(Clone)]
pub(super) struct WorkerSpec {
    pub(super) id: String,
    pub(super) key: Key,
    /// Its environment. There are secrets in it.
    pub(super) variables: BTreeMap<String, String>,
}

/// A worker that a driver knows of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ListedWorker {
    pub(super) id: String,
    pub(super) key: Key,
    pub(super) state: WorkerState,
}

/// What a driver knows of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WorkerState {
    /// It is there.
    Running,
    /// It is there, and was told to go.
    Stopping,
    /// One was promised that has no name of its own yet: it will come under another one.
    Pending,
    /// It has ended, and is not forgotten yet.
    Exited(WorkerExit),
}

/// Who says what workers are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerIdSource {
    /// Whoever has them started.
    Controller,
    /// Where they are started: one that was started is a promise until it is there under its own name.
    Platform,
}

/// How one has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct WorkerExit {
    /// For people.
    pub(super) reason: String,
    /// Where its log is; `None` where nobody knows.
    pub(super) log: Option<String>,
    /// What it said last; nothing where nobody knows.
    pub(super) log_tail: String,
}

/// How one is told to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopMode {
    /// It may finish what it holds.
    Terminate,
    /// Its time is over.
    Kill,
    /// It has ended: what is left of it may go.
    Remove,
}

/// What did not work, for people. Whatever it is, it is tried again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DriverError(pub(super) String);

impl From<io::Error> for DriverError {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

/// Starts and stops workers. It may be called for several at once, but has one list under way at a time.
trait Driver: Send + Sync + 'static {
    /// How often it is asked who is there.
    const LIST_INTERVAL: Duration;

    /// Who names its workers.
    fn worker_id_source(&self) -> WorkerIdSource {
        WorkerIdSource::Controller
    }

    /// Whether this controller has the pool. One that has not lists, and changes nothing meanwhile.
    fn set_active(&self, _in_charge: bool) {}

    /// Those of this pool.
    fn list(&self) -> impl Future<Output = Result<Vec<ListedWorker>, DriverError>> + Send;

    /// Starts one. It may be there although this failed.
    fn start(&self, assignment: WorkerSpec) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Tells one to go. That one is not there is no trouble.
    fn stop(&self, id: String, key: Key, stop: StopMode) -> impl Future<Output = Result<(), DriverError>> + Send;
}

/// What the staff tells its driver.
enum DriverCommand {
    Start(WorkerSpec),
    Stop(String),
    /// To ask who is there at once, and to say so under this number.
    List(u64),
}

/// What a driver has to say.
#[derive(Debug)]
pub(super) enum DriverEvent {
    /// A worker was started.
    Started(String),
    /// A worker was not started.
    StartFailed { id: String, error: DriverError },
    /// It was asked who is there. It knows of everything until then, or cannot say.
    Listed { number: u64, changes: Result<Vec<WorkerChange>, DriverError> },
}

/// What is other than at the last look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WorkerChange {
    /// One is there that this controller has not started.
    Discovered { id: String, key: Key },
    /// One is promised.
    Pending { id: String, key: Key },
    /// A promise is there no longer: it was kept under another name, or somebody has taken it back.
    PendingResolved { id: String },
    /// One goes that this controller has not told to.
    Stopping { id: String },
    /// One has ended. Whether it was told to.
    Exited { id: String, key: Key, exit: WorkerExit, requested: bool },
}

/// The staff's end of the line.
pub(super) struct DriverHandle {
    commands: mpsc::Sender<DriverCommand>,
    events: mpsc::Receiver<DriverEvent>,
    lists_requested: u64,
    active: watch::Sender<bool>,
}

impl DriverHandle {
    /// Has one started. `false` where too much is to be done already: then it is nobody's until the next plan.
    pub(super) fn start(&self, assignment: WorkerSpec) -> bool {
        self.commands.try_send(DriverCommand::Start(assignment)).is_ok()
    }

    /// Has one told to go. `false` as above.
    pub(super) fn stop(&self, id: &str) -> bool {
        self.commands.try_send(DriverCommand::Stop(id.to_owned())).is_ok()
    }

    /// This controller has the pool, or another one has: then what is left of workers that have ended is left to that.
    pub(super) fn set_active(&self, in_charge: bool) {
        self.active.send_replace(in_charge);
    }

    /// Asks who is there now. The answer has this number, or a later one.
    pub(super) fn request_list(&mut self) -> u64 {
        self.lists_requested += 1;
        // Where there is no room it looks by itself before long, if under an earlier number: whoever waits asks again.
        self.commands.try_send(DriverCommand::List(self.lists_requested)).ok();
        self.lists_requested
    }

    /// What it says next.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(super) async fn next_event(&mut self) -> Option<DriverEvent> {
        self.events.recv().await
    }
}

/// Starts a driver. It works for as long as the set is there; `None` where nobody starts workers.
///
/// # Errors
///
/// Where what it needs on this host cannot be had.
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

/// Asks once who is there, and nothing else: no folder is made, and nobody is told anything.
///
/// # Errors
///
/// Where that is not told.
pub(super) async fn list_once(posting: &DriverConfig) -> Result<Vec<ListedWorker>, DriverError> {
    let DriverConfig { pool, kind: means, folder, termination_grace: grace, .. } = posting.clone();
    let found = match means {
        DriverKind::None => Ok(Vec::new()),
        // One that may not be looked at is none that is not there.
        DriverKind::Subprocess(_) if matches!(folder.try_exists(), Ok(false)) => Ok(Vec::new()),
        DriverKind::Subprocess(program) => with_timeout(SubprocessDriver::for_listing(program, folder).list()).await,
        DriverKind::Exec(commands) => with_timeout(ExecDriver { commands, pool }.list()).await,
        DriverKind::Docker(containers) => with_timeout(DockerDriver::new(containers, pool).list()).await,
        DriverKind::Kubernetes(cluster) => with_timeout(KubernetesDriver::new(*cluster, pool, grace)?.list()).await,
        DriverKind::Systemd(template) => with_timeout(SystemdDriver::new(template, pool, folder).list()).await,
    };
    // What has ended is there no more.
    found.map(|found| found.into_iter().filter(|found| !matches!(found.state, WorkerState::Exited(_))).collect())
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

/// What came of a call.
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
    // The number of a look that somebody waits for, and of the one under way.
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
                        // Another one may have had the pool meanwhile, and have told some.
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
                                tracing::warn!(worker = id, "a worker cannot be told to go, which is tried again: {why}");
                            }
                            (StopMode::Terminate, Ok(())) => told.add(&id),
                            (StopMode::Kill, Ok(())) if is_news => {
                                tracing::warn!(worker = id, "a worker was still there `termination_grace` after it was told to go, and is killed");
                            }
                            (StopMode::Kill | StopMode::Remove, Ok(())) | (_, Err(_)) => {}
                        }
                        None
                    }
                    Err(error) => match error.try_into_panic() {
                        // Whose fault it is ends with it, and the controller with that.
                        Ok(panic) => std::panic::resume_unwind(panic),
                        // Everything ends.
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
        Err(_) => Err(DriverError(format!("not done in {DRIVER_CALL_TIMEOUT:?}"))),
    }
}
