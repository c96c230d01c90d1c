//! A controller as a person may look at it: which groups there are and why, and what keeps one from working.
//!
//! Times are seconds, spans count from the moment of the view. Nothing in here is a secret: no request, no credential.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Everything, at one moment. The keys are stable: `journeyman controller status -o json` shows them as they are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ControllerStatus {
    /// Since it started.
    pub uptime_seconds: f64,
    /// In the order of their names.
    pub pools: Vec<PoolStatus>,
}

/// A pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PoolStatus {
    /// As people call it.
    pub name: String,
    /// What this process is to it.
    pub role: Role,
    /// Since when.
    pub seconds_in_role: f64,
    /// Its broker.
    pub broker: BrokerStatus,
    /// The last change of what is wanted.
    pub generation: u64,
    /// Every change up to this one has been carried out.
    pub observed_generation: u64,
    /// How many workers all groups may have together; absent where any number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_total: Option<u32>,
    /// That nobody is started or told to go, where somebody has said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<PauseStatus>,
    /// Whether workers are started here; somebody else does otherwise, and they are not counted.
    pub starts_workers: bool,
    /// The workers of all groups.
    pub workers: WorkerCounts,
    /// In the order of their keys.
    pub groups: Vec<GroupStatus>,
    /// What else its workers are for: queues of elsewhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub external_demands: Vec<DemandStatus>,
    /// Requests in hand that came under a key without a queue.
    pub orphans_held: u64,
    /// What has been counted since the start.
    pub counters: CounterValues,
    /// The last thing that went wrong, where something did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<ErrorStatus>,
}

/// What a controller is to a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// It has the broker no longer, or not yet.
    Disconnected,
    /// Another one has the pool.
    Standby,
    /// It has the pool, and makes its exchanges and queues.
    Starting,
    /// It controls the pool.
    Active,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Disconnected, Self::Standby, Self::Starting, Self::Active];

    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Disconnected => "disconnected",
            Self::Standby => "standby",
            Self::Starting => "starting",
            Self::Active => "active",
        }
    }

    /// Why groups are left as they are; `None` where they are not.
    #[must_use]
    pub const fn inactive_reason(self) -> Option<&'static str> {
        match self {
            Self::Disconnected => Some("the broker cannot be reached"),
            Self::Standby => Some("it stands by: another controller has this pool"),
            Self::Starting => Some("it makes the pool's exchanges and queues"),
            Self::Active => None,
        }
    }
}

/// A broker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BrokerStatus {
    /// Its address, without user and password.
    pub address: String,
    /// Whether there is a connection.
    pub connected: bool,
    /// Why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// How often in a row there was none.
    pub consecutive_failures: u32,
}

/// Something that went wrong.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorStatus {
    /// What.
    pub message: String,
    /// How long ago.
    pub seconds_ago: f64,
}

/// Workers by what they do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WorkerCounts {
    /// Were started and are not ready yet.
    pub starting: u32,
    /// Are ready and hold nothing.
    pub idle: u32,
    /// Hold requests, or nobody knows.
    pub busy: u32,
    /// Were told to go.
    pub stopping: u32,
}

impl WorkerCounts {
    /// All of them.
    #[must_use]
    pub const fn total(self) -> u32 {
        self.starting + self.idle + self.busy + self.stopping
    }
}

/// A group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GroupStatus {
    /// Its key.
    pub key: String,
    /// What is wanted of it.
    pub phase: GroupPhase,
    /// Until the next phase, if nothing more is heard of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_phase_seconds: Option<f64>,
    /// The change that led to what is wanted.
    pub generation: u64,
    /// Whether that has been carried out.
    pub is_settled: bool,
    /// Requests that no worker holds; absent where nobody has looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<u32>,
    /// Requests that its workers hold, as the broker counts them, or else how many of its workers hold any; absent where nobody
    /// knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unacknowledged: Option<u32>,
    /// Its workers.
    pub workers: WorkerCounts,
    /// The same ones by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub worker_list: Vec<WorkerStatus>,
    /// How many it is to have; absent where that was not decided here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<u32>,
    /// Why so many: each bound that changed the number, in the order in which they did.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// What its queue waits for; absent where it is as it is to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_for: Option<String>,
    /// Until that is over, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_seconds: Option<f64>,
    /// Until a worker may be started again after others that did not last; absent where one may at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_backoff_seconds: Option<f64>,
    /// That nobody is started or told to go, here or in the whole pool, where somebody has said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<PauseStatus>,
    /// Other numbers than those of the configuration, where somebody has said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_override: Option<ScaleStatus>,
    /// How many workers in a row did not last.
    pub consecutive_failures: u32,
    /// Whether that were so many that somebody has to look.
    pub failing: bool,
    /// How its last worker ended that was not told to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_exit: Option<ErrorStatus>,
}

/// A queue of elsewhere, as it was counted last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DemandStatus {
    /// As people call it.
    pub name: String,
    /// The group that is for it.
    pub key: String,
    /// Tasks that nobody has claimed; absent where nobody has said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<u32>,
    /// Tasks that are claimed; absent where we may not know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed: Option<u32>,
    /// Why there are no newer counts, where that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A pause.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PauseStatus {
    /// Who said so, and why.
    pub by: String,
    /// Until it is over; absent where somebody has to say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remaining_seconds: Option<f64>,
}

/// Other numbers of workers, for a time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScaleStatus {
    /// So many at least; absent for that of the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<u32>,
    /// So many at most; absent for that of the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// Who said so, and why.
    pub by: String,
    /// Until it is over.
    pub remaining_seconds: f64,
}

/// A worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct WorkerStatus {
    /// Its name, `WORKER_ID`.
    pub id: String,
    /// What it does.
    pub state: WorkerActivity,
    /// Since it was started, or found.
    pub age_seconds: f64,
}

/// What a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WorkerActivity {
    /// It was started and is not ready yet.
    Starting,
    /// It is ready and holds nothing.
    Idle,
    /// It holds requests, or nobody knows.
    Busy,
    /// It was told to go.
    Stopping,
}

impl WorkerActivity {
    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Idle => "idle",
            Self::Busy => "busy",
            Self::Stopping => "stopping",
        }
    }
}

/// What is wanted of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GroupPhase {
    /// Requests go straight to its queue.
    Active,
    /// Requests go to the orphans; its workers finish what is in its queue.
    Unbound,
    /// Its workers are told to end, and then its queue is deleted.
    Deleting,
}

impl GroupPhase {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Active, Self::Unbound, Self::Deleting];

    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Unbound => "unbound",
            Self::Deleting => "deleting",
        }
    }
}

/// What has been counted of a pool since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CounterValues {
    /// Orphans that were forwarded to their queue.
    pub orphans_forwarded: u64,
    /// Requests that were answered in a worker's place, dead letters and orphans without a queue.
    pub dead_letters: u64,
    /// Those of them that were put aside as poison.
    pub poison_requests: u64,
    /// Steps about queues that were carried out.
    pub queue_operations: u64,
    /// Steps about queues that failed.
    pub queue_operation_failures: u64,
    /// Reports of workers.
    pub activity_reports: u64,
    /// Workers that were started.
    pub workers_started: u64,
    /// Workers that ended without being told to, or could not be started.
    pub workers_failed: u64,
    /// How often the broker was lost.
    pub broker_disconnects: u64,
}

/// A span of the view.
pub(super) fn seconds_to_duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
