//! The status of a worker: what it does, why it does not claim, what it holds, and what comes next.
//!
//! Times are in seconds. The status holds no payload, credential or signed URL.

use std::fmt;
use std::path::PathBuf;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use journeyman_domain::named_enum;
use journeyman_platform::host::termination_notice::WatchStatus;

use super::counters::{OutcomeCounts, SourceCounts, WorkerCounts};
use super::durations::TaskDurations;
use super::trace_recorder::SpanCounts;

/// The status of a worker. `journeyman status -o json` prints it; its keys are stable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// What the worker is doing.
    pub state: LifecycleState,
    /// Why the worker does not claim; absent while it claims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked_message: Option<String>,
    /// The same as one word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked_reason: Option<BlockedReason>,
    /// The operator who gave the current command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// Since the start.
    pub uptime_seconds: f64,
    /// Tasks that run at once.
    pub capacity: u32,
    /// Held claims whose work runs elsewhere, beside these.
    #[serde(default)]
    pub launched: u32,
    /// The sources, in the order of the configuration.
    pub sources: Vec<SourceStatus>,
    /// The held claims, the shortest lease first.
    pub claims: Vec<ClaimStatus>,
    /// Ended runs that keep their slots until their processes end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cleanup_pending: Vec<String>,
    /// Ended claims of the last hour.
    pub last_hour: OutcomeCounts,
    /// The claims that ended last, the latest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recent_results: Vec<RecentResult>,
    /// Counters since the start.
    pub counts: WorkerCounts,
    /// The host's resources.
    pub host: HostStatus,
    /// The containment backend.
    #[serde(default)]
    pub containment: String,
    /// The first termination notice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notice: Option<NoticeStatus>,
    /// The watches for termination notices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub watches: Vec<WatchStatus>,
    /// What was recovered from a previous process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovered: Option<RecoverySummary>,
    /// Exported and dropped spans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spans: Option<SpanCounts>,
    /// The sidecars of handlers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sidecars: Vec<SidecarSummary>,
    /// The activity reports to a controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activity: Option<ActivityStatus>,
    /// The next call, and when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// Conditions to look into.
    pub hints: Vec<String>,
}

impl WorkerStatus {
    /// How many slots are busy, and how many tasks run elsewhere.
    pub fn occupancy(&self) -> String {
        let launched = if self.launched > 0 { format!(", {} elsewhere", self.launched) } else { String::new() };
        format!("{}/{} busy{launched}", self.claims.len().saturating_sub(self.launched as usize), self.capacity)
    }
}

/// The status of a sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarSummary {
    /// Its handler.
    pub name: String,
    /// Tasks can be forwarded to it.
    pub up: bool,
    /// What it does, or why it is down.
    pub message: String,
    /// Restarts since the start of the worker.
    pub restarts: u64,
    /// Its log file, if the worker starts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<PathBuf>,
}

/// What was recovered from a previous process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RecoverySummary {
    /// Runs with remaining processes, which were killed.
    pub killed: usize,
    /// Runs reported with the outcome that the previous process had decided.
    pub reported: usize,
    /// Runs released.
    pub released: usize,
    /// Runs that had expired or been resolved, or cannot be reported.
    pub expired: usize,
    /// Runs still being requested or reported.
    pub pending: usize,
    /// Corrupt parts of the journal; their claims expire.
    #[serde(default)]
    pub journal_errors: usize,
}

impl fmt::Display for RecoverySummary {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { killed, reported, released, expired, pending, journal_errors } = self;
        let runs = if *killed == 1 { "run" } else { "runs" };
        write!(out, "{killed} {runs} killed, {reported} reported, {released} released, {expired} expired")?;
        if *pending > 0 {
            write!(out, ", {pending} pending")?;
        }
        if *journal_errors > 0 { out.write_str("; the journal was corrupt") } else { Ok(()) }
    }
}

named_enum! {
    /// What a worker is doing.
    pub enum LifecycleState {
        /// Claiming and executing.
        Running = "running",
        /// Executing, but not claiming.
        Paused = "paused",
        /// The worker is at a limit of its own, about to exit.
        Exiting = "exiting",
        /// Finishing its claims.
        Draining = "draining",
        /// Releasing its claims.
        Releasing = "releasing",
        /// Exited.
        Exited = "exited",
    }
}

named_enum! {
    /// Why a worker does not claim.
    pub enum BlockedReason {
        /// Every slot is taken.
        Full = "full",
        /// Paused by an operator.
        Paused = "paused",
        /// Too little free disk space.
        Disk = "disk",
        /// Too little free memory.
        Memory = "memory",
        /// The host could not run a task.
        HostUnhealthy = "host-unhealthy",
        /// The sidecars of all sources are down.
        SidecarDown = "sidecar-down",
        /// About to exit: see the state.
        Stopping = "stopping",
    }
}

impl BlockedReason {
    /// True if an operator has to act.
    pub const fn is_problem(self) -> bool {
        matches!(self, Self::Disk | Self::Memory | Self::HostUnhealthy | Self::SidecarDown)
    }
}

/// A termination notice.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct NoticeStatus {
    /// Since it was received.
    pub seconds_ago: f64,
    /// From then to the end of the last claim; absent if none has ended since.
    pub last_claim_ended_after_seconds: Option<f64>,
}

/// An operator's name and reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// A user, a signal or a notice.
    pub by: String,
    /// The reason.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
}

impl Note {
    /// A note without a reason.
    pub fn of(by: &str) -> Self {
        Self { by: by.to_owned(), text: String::new() }
    }
}

/// The activity reports to a controller.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActivityStatus {
    /// The exchange that they are published to.
    pub exchange: String,
    /// Reports confirmed by the broker.
    pub reports: u64,
    /// Failed attempts to connect or publish.
    pub failures: u64,
    /// The current failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The status of a source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceStatus {
    /// Its name in the configuration.
    pub name: String,
    /// Kind, address and queue.
    pub description: String,
    /// What it does.
    pub state: String,
    /// Its last calls were refused.
    pub failing: bool,
    /// Since the last answered poll.
    pub polled_seconds_ago: Option<f64>,
    /// Since the last poll that returned something.
    pub last_received_seconds_ago: Option<f64>,
    /// The time until the next poll, if it is waiting.
    pub next_poll_in_seconds: Option<f64>,
    /// Which open polls hold the slots that its next poll waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked_message: Option<String>,
    /// The last refusal, if no poll was answered since.
    pub error: Option<SourceError>,
    /// The last failed upload, if no artifact was stored since, and the time since the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_error: Option<SourceError>,
    /// Counters since the start.
    #[serde(default)]
    pub counts: SourceCounts,
    /// The metrics alone show it.
    #[serde(skip)]
    pub durations: TaskDurations,
    /// Claims under this worker's id that are not its own; another worker may use the id.
    #[serde(default)]
    pub foreign_claims: usize,
    /// Until when the service gives this worker no tasks (RFC 3339), because an operator has put it into quarantine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantined_until: Option<String>,
    /// How far the host's clock is ahead of the service's at the last answer; negative if behind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_skew_seconds: Option<i64>,
    /// The source's own counters.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, u64>,
}

impl SourceStatus {
    /// True if it answers polls.
    pub const fn is_up(&self) -> bool {
        self.polled_seconds_ago.is_some() && !self.failing
    }
}

/// A refused call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceError {
    /// What failed, and what to do.
    pub message: String,
    /// Since the refusal.
    pub seconds_ago: f64,
    /// Consecutive refusals.
    pub consecutive: u32,
}

/// The status of a claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimStatus {
    /// The task.
    pub task: String,
    /// The run, from 0.
    pub run: u32,
    /// The task's name in its metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The source's name.
    pub source: String,
    /// The stage of the claim.
    pub state: String,
    /// The handler's last progress message.
    pub progress: Option<String>,
    /// Since the grant.
    pub held_seconds: f64,
    /// The time until the claim expires unless extended.
    pub lease_left_seconds: Option<f64>,
    /// The length of the lease from the last request.
    pub lease_seconds: Option<f64>,
    /// Since the last reclaim.
    pub reclaimed_seconds_ago: Option<f64>,
    /// Size of the log.
    pub log_bytes: u64,
    /// Memory used by its processes; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The trace of `TRACEPARENT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
}

/// A claim that has ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecentResult {
    /// The task.
    pub task: String,
    /// The run, from 0.
    pub run: u32,
    /// The task's name in its metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The source's name.
    pub source: String,
    /// The outcome that was reported, or why none was.
    pub outcome: String,
    /// Why the task did not complete, in the words of its log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The time from the grant to the end.
    pub held_seconds: f64,
    /// Since the end.
    pub seconds_ago: f64,
}

/// The details of a claim. `journeyman claims show -o json` prints them; the keys are stable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimDetail {
    /// The status of the claim.
    #[serde(flatten)]
    pub claim: ClaimStatus,
    /// The task group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Kind, address and queue of the source.
    pub source_description: String,
    /// The handler.
    pub handler: String,
    /// How often the message was received; absent without a message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dequeue_count: Option<u32>,
    /// Reclaims so far.
    pub reclaims: u32,
    /// The time until the next reclaim.
    pub reclaim_in_seconds: Option<f64>,
    /// The containment backend.
    pub containment: String,
    /// Its control group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// Its processes.
    pub processes: Vec<i32>,
    /// The most memory that its processes have used; absent without a control group that counts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_peak_bytes: Option<u64>,
    /// The CPU time that its processes have used; absent without a control group that counts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_seconds: Option<f64>,
    /// Its directory, if it was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work_dir: Option<PathBuf>,
    /// Its phases, in order.
    pub phases: Vec<PhaseStatus>,
    /// The last command about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_command: Option<ClaimCommandStatus>,
}

/// A phase of a claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseStatus {
    /// `claim`, `prepare`, `run`, `end`, `upload` or `report`.
    pub phase: String,
    /// Since it began.
    pub seconds_ago: f64,
    /// Its length; absent while it lasts.
    pub duration_seconds: Option<f64>,
}

/// A claim that is held, or that ended in the last hour. `GET /history.json` of a worker's page lists them; the keys are stable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimHistory {
    /// The task.
    pub task: String,
    /// The run, from 0.
    pub run: u32,
    /// The task's name in its metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The outcome that was reported, or why none was; absent while the claim is held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// The handler's last progress message; absent once the claim has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<String>,
    /// Its phases, in order.
    pub phases: Vec<PhaseStatus>,
    /// Since each of its last reclaims.
    pub reclaimed_seconds_ago: Vec<f64>,
}

/// A command about a claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimCommandStatus {
    /// `release` or `cancel`.
    pub command: String,
    /// The operator and the reason.
    pub note: Note,
    /// Since the command.
    pub seconds_ago: f64,
}

/// The host's resources and the configured minimums.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// Free bytes on the disk of the work directory.
    pub disk_free: Option<u64>,
    /// The minimum in bytes.
    pub disk_min: u64,
    /// Available bytes of memory.
    pub memory_free: Option<u64>,
    /// The minimum in bytes.
    pub memory_min: u64,
}
