//! The worker as a person may look at it: what it does, why it does not, what it holds, and what comes next.
//!
//! Times are seconds, spans count from the moment of the view. Nothing in here is a secret: no payload, no credential, no
//! signed address.

use std::fmt;
use std::path::PathBuf;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::counters::{SourceCounts, WorkerCounts};
use super::trace_recorder::SpanCounts;

/// Everything, at one moment. The keys are stable: `journeyman status -o json` shows them as they are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// What the worker is doing.
    pub state: LifecycleState,
    /// Why nothing is claimed; absent where claims are asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked_message: Option<String>,
    /// The same in one word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked_reason: Option<BlockedReason>,
    /// Who ordered it, where somebody did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// Since it started.
    pub uptime_seconds: f64,
    /// How many tasks it runs at once.
    pub capacity: u32,
    /// Slots that wait in polls.
    pub slots_polling: u32,
    /// Where claims come from, in the order of the configuration.
    pub sources: Vec<SourceStatus>,
    /// What is held, the shortest lease first.
    pub claims: Vec<ClaimStatus>,
    /// Runs that are over, and whose slots wait since what they started may still be there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cleanup_pending: Vec<String>,
    /// What became of the claims of the last hour.
    pub last_hour: OutcomeCounts,
    /// What has been counted since the start.
    pub counts: WorkerCounts,
    /// What the host has left.
    pub host: HostStatus,
    /// How payloads are held together.
    #[serde(default)]
    pub containment: String,
    /// The first notice that the host goes, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notice: Option<NoticeStatus>,
    /// How those are heard that would say that the host goes: a metadata service, and the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub watches: Vec<NoticeWatchStatus>,
    /// What an earlier life of this worker had left, where it had left something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovered: Option<RecoverySummary>,
    /// What became of the spans of ended claims, where any are recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spans: Option<SpanCounts>,
    /// What handlers keep there beside their tasks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sidecars: Vec<SidecarSummary>,
    /// What becomes of activity reports, where a controller is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activity: Option<ActivityStatus>,
    /// What happens next by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<NextAction>,
    /// What a person could look into.
    pub hints: Vec<String>,
}

/// What a handler keeps there beside its tasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarSummary {
    /// The handler.
    pub name: String,
    /// Whether tasks can be forwarded to it.
    pub up: bool,
    /// What it does, or why it is not there.
    pub message: String,
    /// How often it was started again.
    pub restarts: u64,
    /// Where its log is, where it is started here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<PathBuf>,
}

/// What became of the runs that an earlier life of this worker held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RecoverySummary {
    /// Had processes left, which were killed.
    pub killed: usize,
    /// Were reported as that life had decided.
    pub reported: usize,
    /// Were handed back.
    pub released: usize,
    /// Were resolved or expired by then, or cannot be reported.
    pub expired: usize,
    /// Are still being asked for or reported.
    pub pending: usize,
    /// Faults of its journal: what they hid is left to expire.
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

/// What a worker is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LifecycleState {
    /// Claiming and executing.
    Running,
    /// Executing what it holds, and told to claim nothing.
    Paused,
    /// At a limit of its own, and about to leave.
    Exiting,
    /// Finishing what it holds.
    Draining,
    /// Handing back what it holds.
    Releasing,
    /// Gone.
    Exited,
}

impl LifecycleState {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Running, Self::Paused, Self::Exiting, Self::Draining, Self::Releasing, Self::Exited];

    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Exiting => "exiting",
            Self::Draining => "draining",
            Self::Releasing => "releasing",
            Self::Exited => "exited",
        }
    }
}

/// Why nothing is claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockedReason {
    /// Every slot is taken.
    Full,
    /// Somebody said so.
    Paused,
    /// Too little disk is free.
    Disk,
    /// Too little memory is free.
    Memory,
    /// The host could not run a task.
    HostUnhealthy,
    /// What runs the tasks of every source is not there.
    SidecarDown,
    /// It is about to leave by itself.
    Exiting,
    /// It finishes what it holds.
    Draining,
    /// It hands back what it holds.
    Releasing,
    /// It is gone.
    Exited,
}

impl BlockedReason {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Full,
        Self::Paused,
        Self::Disk,
        Self::Memory,
        Self::HostUnhealthy,
        Self::SidecarDown,
        Self::Exiting,
        Self::Draining,
        Self::Releasing,
        Self::Exited,
    ];

    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Paused => "paused",
            Self::Disk => "disk",
            Self::Memory => "memory",
            Self::HostUnhealthy => "host-unhealthy",
            Self::SidecarDown => "sidecar-down",
            Self::Exiting => "exiting",
            Self::Draining => "draining",
            Self::Releasing => "releasing",
            Self::Exited => "exited",
        }
    }
}

/// A notice that the host goes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct NoticeStatus {
    /// Since it was heard.
    pub seconds_ago: f64,
    /// From then to the latest end of a claim since; absent where none has ended.
    pub last_claim_ended_after_seconds: Option<f64>,
}

/// The watch for notices that the host goes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NoticeWatchStatus {
    /// Whose metadata service is asked, `aws`, `gcp` or `azure`, or the `file`.
    pub provider: String,
    /// Whether it says if there is a notice. Neither this nor trouble: it has not answered yet.
    pub up: bool,
    /// Why a notice may be missed; absent while it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Since it answers, does not, or is asked.
    pub seconds: f64,
}

impl NoticeWatchStatus {
    /// What a person could look into.
    pub(super) fn hint(&self) -> Option<String> {
        let (provider, error) = (&self.provider, self.error.as_ref()?);
        let what = match provider.as_str() {
            "file" => "cannot read the file of `host.termination_file`".to_owned(),
            _ => format!("the metadata service of {provider} does not answer"),
        };
        Some(format!("{what}, so a termination notice may be missed: {error}"))
    }
}

/// Who gave an order, and what they said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Note {
    /// Who: a user, a signal, a notice.
    pub by: String,
    /// What they said.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
}

impl Note {
    /// Somebody who said nothing.
    #[must_use]
    pub fn of(by: &str) -> Self {
        Self { by: by.to_owned(), text: String::new() }
    }
}

/// What becomes of activity reports.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActivityStatus {
    /// The exchange that they go to.
    pub exchange: String,
    /// How many the broker has confirmed.
    pub reports: u64,
    /// How often there was no way to report.
    pub failures: u64,
    /// Why there is none at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A place that claims come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceStatus {
    /// Its name in the configuration.
    pub name: String,
    /// What it is, in words.
    pub description: String,
    /// One word for what it is doing.
    pub state: String,
    /// Whether its last answers were refusals.
    pub failing: bool,
    /// Since the last poll was answered well.
    pub polled_seconds_ago: Option<f64>,
    /// Since it last brought something.
    pub last_received_seconds_ago: Option<f64>,
    /// Until it is asked again, where it rests.
    pub next_poll_in_seconds: Option<f64>,
    /// The last refusal, where nothing went well since.
    pub error: Option<SourceError>,
    /// What has been counted of it since the start.
    #[serde(default)]
    pub counts: SourceCounts,
    /// Claims under this worker's name that are not its own, as it was told last. Another worker may live under it.
    #[serde(default)]
    pub foreign_claims: usize,
    /// How far this host's clock is ahead of the service's, in seconds, as its last answer told; negative where it is behind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_skew_seconds: Option<i64>,
    /// What it has counted itself.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, u64>,
}

/// A refusal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SourceError {
    /// What happened, and what to do.
    pub message: String,
    /// How long ago.
    pub seconds_ago: f64,
    /// How often in a row.
    pub consecutive: u32,
}

/// A claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimStatus {
    /// The task.
    pub task: String,
    /// The attempt.
    pub run: u32,
    /// The source's name.
    pub source: String,
    /// One word for where it stands.
    pub state: String,
    /// What its handler said last of its progress.
    pub progress: Option<String>,
    /// Since it was granted.
    pub held_seconds: f64,
    /// Until its lease is given up if it is not extended.
    pub lease_left_seconds: Option<f64>,
    /// How long its lease is, from when it was last asked for.
    #[serde(default)]
    pub lease_seconds: Option<f64>,
    /// Since the lease was last extended.
    pub reclaimed_seconds_ago: Option<f64>,
    /// Bytes of its log.
    pub log_bytes: u64,
    /// Bytes of memory that its processes take up; absent where it has none that can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The trace that its handler was given, see `TRACEPARENT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
}

/// All that is known of one claim. The keys are stable: `journeyman claims show -o json` shows them as they are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimDetail {
    /// What a list shows of it.
    #[serde(flatten)]
    pub claim: ClaimStatus,
    /// What its author calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The group it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Where it comes from, in words.
    pub source_description: String,
    /// What runs it.
    pub handler: String,
    /// How often its message had been received; absent where it came by no message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dequeue_count: Option<u32>,
    /// How often its lease was extended.
    pub reclaims: u32,
    /// Until its lease is extended next.
    pub reclaim_in_seconds: Option<f64>,
    /// How its processes are held together.
    pub containment: String,
    /// Its control group, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// Its processes.
    pub processes: Vec<i32>,
    /// Its folder, where it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work_dir: Option<PathBuf>,
    /// What it has gone through, in order.
    pub phases: Vec<PhaseStatus>,
    /// The last order about it, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_command: Option<ClaimCommandStatus>,
}

/// A part of a claim's life.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseStatus {
    /// `claim`, `prepare`, `run`, `end`, `upload` or `report`.
    pub phase: String,
    /// Since it began.
    pub seconds_ago: f64,
    /// How long it took; absent while it goes on.
    pub duration_seconds: Option<f64>,
}

/// An order about one claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimCommandStatus {
    /// `release` or `cancel`.
    pub command: String,
    /// Who gave it, and why.
    pub note: Note,
    /// How long ago.
    pub seconds_ago: f64,
}

/// What became of claims.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeCounts {
    /// Reported completed.
    pub completed: u64,
    /// Reported failed.
    pub failed: u64,
    /// Reported as another exception than `worker-shutdown`.
    pub exceptions: u64,
    /// Handed back as `worker-shutdown`.
    pub released: u64,
    /// Canceled, or resolved by somebody else.
    #[serde(default)]
    pub superseded: u64,
    /// Given up without a report that the queue has taken.
    pub lost: u64,
}

/// What the host has left, and what it must have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// Bytes free for the work folder.
    pub disk_free: Option<u64>,
    /// Bytes that there must be.
    pub disk_min: u64,
    /// Bytes of memory that can be had.
    pub memory_free: Option<u64>,
    /// Bytes that there must be.
    pub memory_min: u64,
}

/// Something that happens by itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NextAction {
    /// What.
    pub action: String,
    /// In how long.
    pub in_seconds: f64,
}
