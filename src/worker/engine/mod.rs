//! The worker's event loop: joins sources, handlers and the rules of [`journeyman_domain::worker`].
//!
//! It decides nothing. One task owns the state machine, performs its effects, and feeds it the results; every call
//! runs in a task of its own and ends as one event.

mod alerts;
mod calls;
mod catch_panic;
mod claim_commands;
mod claim_end;
mod claim_runtime;
#[doc(hidden)]
pub mod config;
#[doc(hidden)]
pub mod counters;
mod discards;
#[doc(hidden)]
pub mod durations;
mod event_loop;
mod handler_runtime;
mod history;
mod host_probe;
#[doc(hidden)]
pub mod live_log;
#[doc(hidden)]
pub mod liveness;
mod log_artifacts;
mod recent_outcomes;
mod restart_recovery;
mod running_calls;
mod sidecars;
#[doc(hidden)]
pub mod snapshot;
#[doc(hidden)]
pub mod status;
mod storage_health;
mod task_lookup;
mod task_view;
#[doc(hidden)]
pub mod timeline;
#[doc(hidden)]
pub mod trace_recorder;
mod uploads;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use crate::handler::DynHandler;
use crate::handler::log::{LogLimits, TaskLog};
use crate::source::Source;
use journeyman_domain::claim;
use journeyman_domain::limits::{
    ABORT_TIMEOUT, AUTH_FAILURES_MAX, DEQUEUE_ALERT, HANDLER_THREADS_MAX, LAUNCHED_DEFAULT, NOTICE_MARGIN,
    POLL_INTERVAL_MIN,
};
use journeyman_domain::time::Instant;
use journeyman_domain::units::format_duration;
use journeyman_domain::worker::{Event, WorkerPolicy};
use journeyman_domain::worker_pool::PoolDecision;

use crate::notify::Announcer;
pub use claim_commands::{ClaimSnapshot, CommandResult};
use counters::{WorkerCounters, WorkerCounts};
pub use journeyman_domain::worker::{
    ClaimingBlocked, ClaimingState, ExitPolicy, ExitReason, MinResources, OnTerminationNotice,
};
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::containment::{self, Containment};
use journeyman_platform::host::termination_notice::{NoticeOrigin, WatchStatus};
use journeyman_platform::tasks::{self, supervised};
use live_log::LiveLogs;
use liveness::Liveness;
pub use status::{ClaimHistory, Note, WorkerStatus};
pub use task_lookup::TaskLookupError;
pub use trace_recorder::TraceRecorder;

const CONTROL_REQUESTS_MAX: usize = 16;

/// Configures a worker, apart from its sources.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Tasks that run at once. Default: 1.
    pub capacity: u32,
    /// Tasks whose work runs elsewhere that are held beside them. Default: 1,000.
    pub launched_max: u32,
    /// Each task gets a directory below this one, which is created if missing. One worker per directory; what a
    /// killed worker left in it is removed.
    pub work_dir: PathBuf,
    /// Time between SIGTERM and SIGKILL for a payload. Default: 10 s.
    pub termination_grace: Duration,
    /// How long a drain may take before the remaining claims are released; `None` is unlimited. Default: 1 h.
    pub drain_deadline: Option<Duration>,
    /// What happens to running tasks after a termination notice. Default: they may finish until 15 s before the
    /// termination.
    pub on_termination_notice: OnTerminationNotice,
    /// The sleep when nothing is pending, for sources without long polls. Default: 1 s.
    pub poll_interval: Duration,
    /// How often to ask whether a running task was canceled. Default: `None`, never.
    pub status_poll_interval: Option<Duration>,
    /// When the worker exits by itself. Default: never.
    pub exit_policy: ExitPolicy,
    /// Resources that the host must have left for claiming. Default: no bounds.
    pub min_resources: MinResources,
    /// The size limits of a task's log.
    pub log: LogLimits,
    /// Each line that a payload prints begins with its time. Default: false.
    pub log_times: bool,
    /// Threads that run handlers. They are separate from those that renew leases, so that a blocking handler costs no
    /// other task its claim. Default: the number of processors, 2 to 16. With [`Clock::tokio`] handlers share the
    /// worker's runtime, whose time they use.
    pub handler_threads: usize,
    /// How the processes of payloads are contained. Default: the strongest backend that the host offers, without
    /// limits.
    pub containment: containment::ContainmentConfig,
    /// Determines all jitter. Default: random.
    pub seed: Option<u64>,
    /// Receives every finished claim. Default: none.
    pub recorder: Option<Arc<dyn TraceRecorder>>,
    /// Serves the logs of running tasks. Default: none.
    #[doc(hidden)]
    pub live_logs: Option<LiveLogs>,
    /// Tells a notifier which claims have ended. Default: none.
    #[doc(hidden)]
    pub announcer: Option<Announcer>,
    /// The worker's clock.
    pub clock: Clock,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            capacity: 1,
            launched_max: LAUNCHED_DEFAULT,
            work_dir: PathBuf::from("journeyman-work"),
            termination_grace: Duration::from_secs(10),
            drain_deadline: Some(Duration::from_secs(60 * 60)),
            on_termination_notice: OnTerminationNotice::Finish { margin: NOTICE_MARGIN },
            poll_interval: Duration::from_secs(1),
            status_poll_interval: None,
            exit_policy: ExitPolicy::default(),
            min_resources: MinResources::default(),
            log: LogLimits::default(),
            log_times: false,
            handler_threads: std::thread::available_parallelism().map_or(2, usize::from).clamp(2, HANDLER_THREADS_MAX),
            containment: containment::ContainmentConfig::default(),
            seed: None,
            recorder: None,
            live_logs: None,
            announcer: None,
            clock: Clock::boot(),
        }
    }
}

impl WorkerConfig {
    fn policy(&self) -> WorkerPolicy {
        WorkerPolicy {
            capacity: self.capacity,
            launched_max: self.launched_max,
            poll_interval: self.poll_interval.max(POLL_INTERVAL_MIN),
            claim: claim::ClaimPolicy {
                termination_grace: self.termination_grace,
                status_poll_interval: self.status_poll_interval,
                reports_cancellation: true,
                starts_in_one_step: false,
                fenced_reports: false,
            },
            dequeue_alert: DEQUEUE_ALERT,
            max_auth_failures: AUTH_FAILURES_MAX,
            drain_deadline: self.drain_deadline,
            exit_policy: self.exit_policy,
            min_resources: self.min_resources,
            on_termination_notice: self.on_termination_notice,
        }
    }
}

/// A source, the handler of its tasks, and their environment.
pub struct SourceBinding {
    /// The source's name in the configuration.
    pub name: String,
    /// The source.
    pub source: Arc<dyn Source>,
    /// The handler that runs its payloads.
    pub handler: Arc<dyn DynHandler>,
    /// Environment variables of its payloads, such as `TASKCLUSTER_ROOT_URL`.
    pub env: Arc<BTreeMap<String, String>>,
}

/// A worker that has not been started.
pub struct Worker {
    /// The configuration that the worker starts with.
    pub config: WorkerConfig,
    sources: Vec<SourceBinding>,
    requests: mpsc::Receiver<ControlRequest>,
    control: Control,
}

/// Sends commands to a worker and reads its counters. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Control {
    requests: mpsc::Sender<ControlRequest>,
    counters: Arc<WorkerCounters>,
    containment: Arc<OnceLock<Containment>>,
    watch_statuses: Arc<OnceLock<watch::Receiver<Vec<WatchStatus>>>>,
    liveness: Arc<Liveness>,
}

/// Runs in the worker's task.
type ControlRequest = Box<dyn FnOnce(&mut event_loop::Engine) + Send>;

/// The answer to a reload of the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReloadResult {
    /// It is in effect.
    Applied,
    /// The previous one stays in effect.
    Rejected,
}

/// A command to the whole worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Stop claiming, for `span` or until [`Command::Resume`]; held claims continue.
    Pause {
        /// `None` is until resumed.
        span: Option<Duration>,
    },
    /// Claim again.
    Resume,
    /// Stop claiming and finish the held claims, within `within` or the configured limit.
    Drain {
        /// The limit.
        within: Option<Duration>,
    },
    /// Stop claiming and report the held claims as `worker-shutdown`.
    Release {
        /// The time until the host terminates, if known.
        within: Option<Duration>,
    },
    /// The host terminates; tasks may run until shortly before. See [`Control::terminate`].
    Terminate {
        /// `None` is unknown: everything is released at once.
        deadline: Option<Instant>,
    },
    /// Exit at once; what runs is killed and its claims are left to expire.
    Abort,
}

impl fmt::Display for Command {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let within = |span: &Option<Duration>| {
            span.map_or_else(String::new, |span| format!(" within {}", format_duration(span)))
        };
        match self {
            Self::Pause { span: None } => out.write_str("pause"),
            Self::Pause { span: Some(span) } => write!(out, "pause for {}", format_duration(*span)),
            Self::Resume => out.write_str("resume"),
            Self::Drain { within: span } => write!(out, "drain{}", within(span)),
            Self::Release { within: span } => write!(out, "release{}", within(span)),
            Self::Terminate { deadline: Some(_) } => out.write_str("host termination at a known time"),
            Self::Terminate { deadline: None } => out.write_str("host termination"),
            Self::Abort => out.write_str("abort"),
        }
    }
}

impl Worker {
    /// Creates a worker with these sources, polled in this order.
    pub fn new(config: WorkerConfig, sources: Vec<SourceBinding>) -> Self {
        let (sender, requests) = mpsc::channel(CONTROL_REQUESTS_MAX);
        let control = Control {
            requests: sender,
            counters: Arc::default(),
            containment: Arc::default(),
            watch_statuses: Arc::default(),
            liveness: Arc::default(),
        };
        Self { config, sources, requests, control }
    }

    /// The sources that show what their queues hold, by name; see [`Source::inspect`].
    #[doc(hidden)]
    pub fn inspected_sources(&self) -> Vec<(String, Arc<dyn Source>)> {
        let inspected = self.sources.iter().filter(|binding| binding.source.inspect().is_some());
        inspected.map(|binding| (binding.name.clone(), Arc::clone(&binding.source))).collect()
    }

    /// The schemas of payloads, by the name of their source.
    #[doc(hidden)]
    pub fn payload_schemas(&self) -> Vec<(String, serde_json::Value)> {
        self.sources.iter().map(|binding| (binding.name.clone(), binding.handler.schema())).collect()
    }

    /// The handle for commands and counters.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Runs until the worker is stopped or cannot continue.
    ///
    /// # Errors
    ///
    /// If the work directory is unusable or used by another worker, if another worker on this host has the same
    /// worker id, if the required containment is unavailable, or if processes of a previous worker cannot be killed;
    /// if a task of the worker panicked, which a handler's panic does not cause. The message says what to do.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: payloads are killed and their claims expire. Use [`Control::drain`].
    pub async fn run(self) -> std::io::Result<ExitReason> {
        let control = self.control();
        let engine = event_loop::Engine::start(self).await?;
        let containment = engine.containment.clone();
        // On a thread of the runtime, so that calls and their results need no wake-up of another thread.
        let mut running = tokio::task::JoinSet::new();
        running.spawn(supervised("the engine", engine.run()));
        let ended = tokio::select! {
            biased;
            ended = running.join_next() => ended,
            () = containment.reap_orphans() => None,
            message = tasks::failure() => {
                // Its payloads end before it does.
                let ending = async { (control.abort().await, running.join_next().await) };
                tokio::time::timeout(ABORT_TIMEOUT, ending).await.ok();
                return Err(std::io::Error::other(message));
            }
        };
        match ended {
            Some(Ok(exit)) => exit,
            Some(Err(_)) | None => Err(std::io::Error::other("the runtime was shut down while the worker ran")),
        }
    }
}

impl Control {
    /// Stops claiming and finishes the held claims.
    pub async fn drain(&self) {
        self.command(Command::Drain { within: None }, Note::of("the program")).await;
    }

    /// Stops claiming and reports the held claims as `worker-shutdown`, within `within` if given.
    pub async fn release(&self, within: Option<Duration>) {
        self.command(Command::Release { within }, Note::of("the program")).await;
    }

    /// The host terminates at `deadline`, on the clock of [`WorkerConfig::clock`]: the worker stops claiming, and
    /// running tasks finish or are released before, as [`WorkerConfig::on_termination_notice`] says. Without a
    /// deadline everything is released at once. The earliest deadline applies.
    pub async fn terminate(&self, deadline: Option<Instant>) {
        self.counters.add(|counts| counts.notices += 1);
        self.command(Command::Terminate { deadline }, Note::of("a notice")).await;
    }

    /// Terminates as [`Control::terminate`] does, counted by the origin of the notice.
    pub async fn terminate_from(&self, origin: NoticeOrigin, deadline: Option<Instant>) {
        self.counters.add(|counts| match origin {
            NoticeOrigin::Aws => counts.notices_aws += 1,
            NoticeOrigin::Gcp => counts.notices_gcp += 1,
            NoticeOrigin::Azure => counts.notices_azure += 1,
            NoticeOrigin::File => counts.notices_file += 1,
        });
        self.terminate(deadline).await;
    }

    /// Publishes the state of the watches for termination notices in the status. May be set once.
    pub fn set_watch_statuses(&self, sights: watch::Receiver<Vec<WatchStatus>>) {
        drop(self.watch_statuses.set(sights));
    }

    /// Counts a configuration reload.
    pub fn count_reload(&self, what: ReloadResult) {
        self.counters.add(|counts| match what {
            ReloadResult::Applied => counts.config_reloads += 1,
            ReloadResult::Rejected => counts.config_reloads_rejected += 1,
        });
    }

    /// Exits at once; payloads are killed and their claims expire.
    pub async fn abort(&self) {
        self.command(Command::Abort, Note::of("the program")).await;
    }

    /// Tells the worker what the manager of its pool has decided.
    #[doc(hidden)]
    pub async fn decide_in_pool(&self, decision: PoolDecision) {
        self.send(move |engine| engine.handle_event(Event::PoolDecided(decision))).await;
    }

    /// Sends a command with the operator's note.
    pub async fn command(&self, command: Command, note: Note) {
        self.send(move |engine| engine.apply_command(command, note)).await;
    }

    /// Applies another configuration. Held claims keep the policy that they began with; work directory, clock,
    /// recorder and seed do not change.
    pub async fn reconfigure(&self, settings: WorkerConfig) {
        self.send(move |engine| engine.reconfigure(settings)).await;
    }

    /// The status; `None` once the worker has exited.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn status(&self) -> Option<WorkerStatus> {
        Some(self.query(event_loop::Engine::snapshot).await?.with_memory().await)
    }

    /// The claims that are held, and those that ended in the last hour; `None` once the worker has exited.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn claim_history(&self) -> Option<Vec<ClaimHistory>> {
        self.query(|engine| engine.claim_history()).await
    }

    /// The log of a held claim, named by `TASK`, `TASK/RUN` or a unique prefix.
    ///
    /// # Errors
    ///
    /// Fails if the name matches no claim, or several.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn log(&self, task: &str) -> Result<TaskLog, TaskLookupError> {
        let task = task.to_owned();
        self.query(move |engine| engine.task_log(&task)).await.unwrap_or(Err(TaskLookupError::WorkerExited))
    }

    /// The details of a claim, named as for [`Control::log`].
    ///
    /// # Errors
    ///
    /// Fails if the name matches no claim, or several.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn claim_detail(&self, task: &str) -> Result<ClaimSnapshot, TaskLookupError> {
        let task = task.to_owned();
        self.query(move |engine| engine.claim_snapshot(&task)).await.unwrap_or(Err(TaskLookupError::WorkerExited))
    }

    /// Stops one claim, named as for [`Control::log`], and returns the result.
    ///
    /// # Errors
    ///
    /// Fails if the name matches no claim, or several.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the command may be carried out.
    pub async fn command_claim(
        &self,
        task: &str,
        command: claim::CancelCommand,
        note: Note,
    ) -> Result<CommandResult, TaskLookupError> {
        let task = task.to_owned();
        let commanded = self.query(move |engine| engine.command_claim(&task, command, note));
        commanded.await.unwrap_or(Err(TaskLookupError::WorkerExited))
    }

    async fn query<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&mut event_loop::Engine) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, answer) = oneshot::channel();
        // The receiver may be gone.
        self.send(move |engine| drop(sender.send(ask(engine)))).await;
        answer.await.ok()
    }

    /// How payloads are contained; `None` before the start.
    pub fn containment(&self) -> Option<&Containment> {
        self.containment.get()
    }

    /// The liveness signals of the worker.
    pub fn liveness(&self) -> Arc<Liveness> {
        Arc::clone(&self.liveness)
    }

    /// The current counters.
    pub fn counts(&self) -> WorkerCounts {
        self.counters.read()
    }

    async fn send(&self, request: impl FnOnce(&mut event_loop::Engine) + Send + 'static) {
        if self.requests.send(Box::new(request)).await.is_err() {
            tracing::debug!("received a command after the worker had exited");
        }
    }
}
