//! The loop that joins sources, handlers and the rules.
//!
//! It decides nothing: it carries out the effects of [`crate::domain::worker`] one by one and brings back what
//! happened. One task owns the machine; every call runs beside it and ends as one event.

mod alerts;
mod calls;
mod catch_panic;
mod claim_commands;
mod claim_end;
mod claim_runtime;
mod close_sources;
pub mod counters;
mod engine;
mod handler_runtime;
mod host_probe;
pub mod liveness;
mod log_artifacts;
mod poll_journal;
mod prompt;
mod recent_outcomes;
mod restart_recovery;
mod sidecars;
pub mod snapshot;
pub mod status;
mod task_lookup;
pub mod timeline;
pub mod trace_recorder;
mod uploads;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::domain::termination_notice::Provider;
use crate::domain::time::Instant;
use crate::domain::worker::WorkerPolicy;
use crate::domain::{claim, poll};
use crate::handler::DynHandler;
use crate::handler::log::{LogLimits, TaskLog};
use crate::limits::{HANDLER_THREADS_MAX, NOTICE_MARGIN, POLL_INTERVAL_MIN};
use crate::source::Source;

pub use crate::domain::worker::{
    ClaimingBlocked, ClaimingState, ExitPolicy, ExitReason, MinResources, OnTerminationNotice,
};
use crate::host::clock::Clock;
use crate::host::containment::{self, Containment};
use crate::host::termination_notice::{NoticeOrigin, WatchStatus};
pub use claim_commands::{ClaimSnapshot, CommandResult};
use counters::{WorkerCounters, WorkerCounts, count};
use liveness::Liveness;
pub(crate) use restart_recovery::kill_leftovers_in;
pub use status::{Note, WorkerStatus};
pub use task_lookup::TaskLookupError;
pub use trace_recorder::TraceRecorder;

/// How many orders to a worker may wait.
const CONTROL_REQUESTS_MAX: usize = 16;

/// What a worker is made of besides its sources.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// How many tasks run at once. 1 unless set.
    pub capacity: u32,
    /// Below this folder each task gets its own; created where it is missing. One worker a folder, and what a killed worker
    /// left in it is removed.
    pub work_dir: PathBuf,
    /// How long a payload may take to end after it was told to. 10 s.
    pub termination_grace: Duration,
    /// How long a drain may take before what is left is handed back. 1 h; `None` is as long as it takes.
    pub drain_deadline: Option<Duration>,
    /// What becomes of running tasks once it is known when the host goes. They may finish until 15 s before.
    pub on_termination_notice: OnTerminationNotice,
    /// The sleep when nothing is pending, for sources without long polls. 1 s.
    pub poll_interval: Duration,
    /// How often to ask whether a running task is still wanted. `None`, which is never, unless set.
    pub status_poll_interval: Option<Duration>,
    /// A message received more often than this raises an alert. 10.
    pub dequeue_alert: u32,
    /// How many refusals of the worker's credentials in a row end it. 10.
    pub max_auth_failures: u32,
    /// When it leaves by itself. Never.
    pub exit_policy: ExitPolicy,
    /// What the host must have left for claiming to go on. No bounds.
    pub min_resources: MinResources,
    /// The caps of a task's log.
    pub log: LogLimits,
    /// How many threads run handlers. They are apart from those that keep leases, so that a handler that blocks costs no other
    /// task its claim. As many as the machine has processors, 2 to 16. With [`Clock::tokio`] handlers share the worker's
    /// runtime, whose time they go by.
    pub handler_threads: usize,
    /// How payloads are held together. The best that the host offers, without limits.
    pub containment: containment::ContainmentConfig,
    /// Decides every jitter. Different for every worker unless set.
    pub seed: Option<u64>,
    /// Takes in what becomes of every claim. Nobody does unless set.
    pub recorder: Option<Arc<dyn TraceRecorder>>,
    /// The clock.
    pub clock: Clock,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            capacity: 1,
            work_dir: PathBuf::from("journeyman-work"),
            termination_grace: Duration::from_secs(10),
            drain_deadline: Some(Duration::from_secs(60 * 60)),
            on_termination_notice: OnTerminationNotice::Finish { margin: NOTICE_MARGIN },
            poll_interval: Duration::from_secs(1),
            status_poll_interval: None,
            dequeue_alert: 10,
            max_auth_failures: 10,
            exit_policy: ExitPolicy::default(),
            min_resources: MinResources::default(),
            log: LogLimits::default(),
            handler_threads: std::thread::available_parallelism().map_or(2, usize::from).clamp(2, HANDLER_THREADS_MAX),
            containment: containment::ContainmentConfig::default(),
            seed: None,
            recorder: None,
            clock: Clock::boot(),
        }
    }
}

impl WorkerConfig {
    fn policy(&self) -> WorkerPolicy {
        WorkerPolicy {
            capacity: self.capacity,
            poll: poll::PollPolicy { interval: self.poll_interval.max(POLL_INTERVAL_MIN) },
            claim: claim::ClaimPolicy {
                termination_grace: self.termination_grace,
                status_poll_interval: self.status_poll_interval,
            },
            dequeue_alert: self.dequeue_alert,
            max_auth_failures: self.max_auth_failures,
            drain_deadline: self.drain_deadline,
            exit_policy: self.exit_policy,
            min_resources: self.min_resources,
            on_termination_notice: self.on_termination_notice,
        }
    }
}

/// What to know where sources that hold their polls open outnumber the slots.
fn too_few_slots_warning(capacity: u32, long_polls: usize) -> Option<String> {
    let slots = usize::try_from(capacity).unwrap_or(usize::MAX);
    (slots < long_polls).then(|| {
        format!(
            "{long_polls} sources hold their polls open and there are {slots} slots for them, so they are asked in turn: a task \
             may wait 20 s for each other source; a `capacity` of {long_polls} or a worker for each source avoids it"
        )
    })
}

/// A source, what its tasks are run by, and what their environment holds.
pub struct SourceBinding {
    /// The source's name in the configuration.
    pub name: String,
    /// The source.
    pub source: Arc<dyn Source>,
    /// What runs its payloads.
    pub handler: Arc<dyn DynHandler>,
    /// What every payload of it finds in its environment, such as `TASKCLUSTER_ROOT_URL`.
    pub env: BTreeMap<String, String>,
}

/// A worker that has not been started.
pub struct Worker {
    config: WorkerConfig,
    sources: Vec<SourceBinding>,
    requests: mpsc::Receiver<ControlRequest>,
    control: Control,
}

/// Gives orders to a worker and reads its counters. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Control {
    requests: mpsc::Sender<ControlRequest>,
    wake: Arc<Notify>,
    counters: Arc<WorkerCounters>,
    containment: Arc<OnceLock<Containment>>,
    watch_statuses: Arc<OnceLock<watch::Receiver<Vec<WatchStatus>>>>,
    liveness: Arc<Liveness>,
}

#[derive(Debug)]
enum ControlRequest {
    Apply(Command, Note),
    Reconfigure(Box<WorkerConfig>),
    Status(oneshot::Sender<snapshot::StatusSnapshot>),
    Log(String, oneshot::Sender<Result<TaskLog, TaskLookupError>>),
    ClaimDetail(String, oneshot::Sender<Result<ClaimSnapshot, TaskLookupError>>),
    CommandClaim {
        name: String,
        order: claim::CancelCommand,
        note: Note,
        sender: oneshot::Sender<Result<CommandResult, TaskLookupError>>,
    },
}

/// What became of a configuration that was read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReloadResult {
    /// It is in effect.
    Applied,
    /// The old one stays.
    Rejected,
}

/// Something that a worker can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Claim nothing for so long, or until told otherwise; what is held goes on.
    Pause {
        /// For how long, if that is known.
        span: Option<Duration>,
    },
    /// Claim again.
    Resume,
    /// No new claims; what is held is finished, within `within` or as the settings say.
    Drain {
        /// How long it may take.
        within: Option<Duration>,
    },
    /// No new claims; what is held is handed back as `worker-shutdown`.
    Release {
        /// How long the host stays, where that is known.
        within: Option<Duration>,
    },
    /// The host goes then; what runs may go on until shortly before. See [`Control::terminate`].
    Terminate {
        /// When; where that is not known everything is handed back at once.
        deadline: Option<Instant>,
    },
    /// Exit at once; what runs is killed and its claims are left to expire.
    Abort,
}

impl fmt::Display for Command {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let within = |span: &Option<Duration>| {
            span.map_or_else(String::new, |span| format!(" within {}", snapshot::format_duration(span)))
        };
        match self {
            Self::Pause { span: None } => out.write_str("pause"),
            Self::Pause { span: Some(span) } => write!(out, "pause for {}", snapshot::format_duration(*span)),
            Self::Resume => out.write_str("resume"),
            Self::Drain { within: span } => write!(out, "drain{}", within(span)),
            Self::Release { within: span } => write!(out, "hand back{}", within(span)),
            Self::Terminate { deadline: Some(_) } => out.write_str("the host goes at a known time"),
            Self::Terminate { deadline: None } => out.write_str("the host goes"),
            Self::Abort => out.write_str("exit at once"),
        }
    }
}

impl Worker {
    /// A worker with these settings and sources, in this order.
    #[must_use]
    pub fn new(config: WorkerConfig, sources: Vec<SourceBinding>) -> Self {
        let (sender, requests) = mpsc::channel(CONTROL_REQUESTS_MAX);
        let control = Control {
            requests: sender,
            wake: Arc::default(),
            counters: Arc::default(),
            containment: Arc::default(),
            watch_statuses: Arc::default(),
            liveness: Arc::default(),
        };
        Self { config, sources, requests, control }
    }

    /// The same, and what becomes of its claims is told to this one.
    #[must_use]
    pub fn with_trace_recorder(mut self, recorder: Arc<dyn TraceRecorder>) -> Self {
        self.config.recorder = Some(recorder);
        self
    }

    /// What gives it orders.
    #[must_use]
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Works until it is told to stop, or cannot go on.
    ///
    /// # Errors
    ///
    /// Where the work folder cannot be had, or another worker uses it, or claims by the same name; where the host cannot hold payloads together as it is
    /// to, or an earlier life of this worker is not over. The text says what to do.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: what runs is killed and its claims are left to expire. Use [`Control::drain`].
    pub async fn run(self) -> std::io::Result<ExitReason> {
        let engine = engine::Engine::start(self)?;
        let containment = engine.containment();
        // On one of the runtime's own threads, where the calls that it starts and hears from are a queue away and not a
        // wake-up of another thread.
        let mut running = tokio::task::JoinSet::new();
        running.spawn(engine.run());
        let ended = tokio::select! {
            biased;
            ended = running.join_next() => ended,
            () = containment.reap_orphans() => None,
        };
        match ended {
            Some(Ok(exit)) => exit,
            Some(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Some(Err(_)) | None => Err(std::io::Error::other("the runtime was shut down under the worker")),
        }
    }
}

impl Control {
    /// No new claims; what is held is finished.
    pub async fn drain(&self) {
        self.command(Command::Drain { within: None }, Note::of("the program")).await;
    }

    /// No new claims; what is held is handed back as `worker-shutdown`, within `within` where that is known.
    pub async fn release(&self, within: Option<Duration>) {
        self.command(Command::Release { within }, Note::of("the program")).await;
    }

    /// The host goes at `deadline`, on the clock of [`WorkerConfig::clock`]: no new claims, and what runs finishes or is handed
    /// back before, as [`WorkerConfig::on_termination_notice`] says. Without a deadline everything is handed back at once. Of several
    /// deadlines the earliest counts.
    pub async fn terminate(&self, deadline: Option<Instant>) {
        count(&self.counters.notices);
        self.command(Command::Terminate { deadline }, Note::of("a notice")).await;
    }

    /// As [`Control::terminate`], and counted by where the notice came from.
    pub async fn terminate_from(&self, origin: NoticeOrigin, deadline: Option<Instant>) {
        count(match origin {
            NoticeOrigin::Cloud(Provider::Aws) => &self.counters.notices_aws,
            NoticeOrigin::Cloud(Provider::Gcp) => &self.counters.notices_gcp,
            NoticeOrigin::Cloud(Provider::Azure) => &self.counters.notices_azure,
            NoticeOrigin::File => &self.counters.notices_file,
        });
        self.terminate(deadline).await;
    }

    /// Shows to those who look how the metadata service of this host is heard. The first to be named counts.
    pub fn set_watch_statuses(&self, sights: watch::Receiver<Vec<WatchStatus>>) {
        drop(self.watch_statuses.set(sights));
    }

    /// Counts a configuration that was read again.
    pub fn count_reload(&self, what: ReloadResult) {
        count(match what {
            ReloadResult::Applied => &self.counters.config_reloads,
            ReloadResult::Rejected => &self.counters.config_reloads_rejected,
        });
    }

    /// Exits at once; what runs is killed and its claims are left to expire.
    pub async fn abort(&self) {
        self.command(Command::Abort, Note::of("the program")).await;
    }

    /// Gives an order, and says who gave it.
    pub async fn command(&self, command: Command, note: Note) {
        self.send(ControlRequest::Apply(command, note)).await;
    }

    /// From here on, work with these settings. What is held keeps the rules that it was claimed under; folder, clock, recorder
    /// and seed stay as they were.
    pub async fn reconfigure(&self, settings: WorkerConfig) {
        self.send(ControlRequest::Reconfigure(Box::new(settings))).await;
    }

    /// How the worker looks now; `None` once it has exited.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn status(&self) -> Option<WorkerStatus> {
        let (sender, looked) = oneshot::channel();
        self.send(ControlRequest::Status(sender)).await;
        Some(looked.await.ok()?.with_memory_usage().await)
    }

    /// The log of a task that is held: `TASK` or `TASK/RUN`, or the beginning of one of them.
    ///
    /// # Errors
    ///
    /// Where that is the name of none, or of several.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn log(&self, task: &str) -> Result<TaskLog, TaskLookupError> {
        self.request(|sender| ControlRequest::Log(task.to_owned(), sender)).await
    }

    /// All that is known of a task, named as for [`Control::log`].
    ///
    /// # Errors
    ///
    /// Where that is the name of none, or of several.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn claim_detail(&self, task: &str) -> Result<ClaimSnapshot, TaskLookupError> {
        self.request(|sender| ControlRequest::ClaimDetail(task.to_owned(), sender)).await
    }

    /// Ends one task, named as for [`Control::log`], and says what comes of it.
    ///
    /// # Errors
    ///
    /// Where that is the name of none, or of several.
    ///
    /// # Cancel safety
    ///
    /// Once it was polled, the order may be carried out.
    pub async fn command_claim(
        &self,
        task: &str,
        order: claim::CancelCommand,
        note: Note,
    ) -> Result<CommandResult, TaskLookupError> {
        self.request(|sender| ControlRequest::CommandClaim { name: task.to_owned(), order, note, sender }).await
    }

    async fn request<T>(
        &self,
        order: impl FnOnce(oneshot::Sender<Result<T, TaskLookupError>>) -> ControlRequest,
    ) -> Result<T, TaskLookupError> {
        let (sender, answer) = oneshot::channel();
        self.send(order(sender)).await;
        answer.await.unwrap_or(Err(TaskLookupError::WorkerExited))
    }

    /// Something became pending: poll now.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// How payloads are held together; `None` before the worker was started.
    #[must_use]
    pub fn containment(&self) -> Option<&Containment> {
        self.containment.get()
    }

    /// What the worker leaves for those who report that it is alive.
    #[must_use]
    pub fn liveness(&self) -> Arc<Liveness> {
        Arc::clone(&self.liveness)
    }

    /// The counters.
    #[must_use]
    pub fn counts(&self) -> WorkerCounts {
        self.counters.read()
    }

    async fn send(&self, order: ControlRequest) {
        if self.requests.send(order).await.is_err() {
            tracing::debug!("an order came after the worker had exited");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_that_have_to_wait_for_each_other_are_told_of() {
        assert_eq!(too_few_slots_warning(2, 2), None);
        assert_eq!(too_few_slots_warning(1, 0), None);
        let told = too_few_slots_warning(1, 2).unwrap();
        assert!(told.contains("20 s") && told.contains("`capacity` of 2"), "{told}");
    }
}
