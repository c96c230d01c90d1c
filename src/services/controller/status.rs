//! Status of a pool, as JSON. Times are seconds; the keys are stable. No request body and no credential appears in it.

use std::fmt;

use serde::{Deserialize, Serialize};

use journeyman_domain::named_enum;

pub use journeyman_domain::group::scale::WorkerActivity;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PoolStatus {
    pub name: String,
    pub role: Role,
    pub seconds_in_role: f64,
    pub broker: BrokerStatus,
    /// Limit for all groups together; absent if unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_total: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<PauseStatus>,
    /// False if the pool has no driver: its workers are not counted then.
    pub starts_workers: bool,
    /// The driver cannot be asked, or refuses to start workers: since when, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_error: Option<ErrorStatus>,
    pub workers: WorkerCounts,
    pub groups: Vec<GroupStatus>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub external_demands: Vec<DemandStatus>,
    /// Requests that the controller holds because their key has no bound queue.
    pub orphans_held: u64,
    pub counters: CounterValues,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<ErrorStatus>,
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterValues {
    pub orphans_forwarded: u64,
    /// Requests that the controller answered with an error.
    pub dead_letters: u64,
    /// Those of them that were moved to the poison queue.
    pub poison_requests: u64,
    pub queue_operation_failures: u64,
    pub activity_reports: u64,
    pub workers_started: u64,
    /// Exits without a stop request, and failed starts.
    pub workers_failed: u64,
    pub broker_disconnects: u64,
}

named_enum! {
    pub enum Role {
        Disconnected = "disconnected",
        /// Another controller holds the lock of the pool.
        Standby = "standby",
        /// Holds the lock and declares the topology.
        Starting = "starting",
        Active = "active",
    }
}

impl PoolStatus {
    /// Why it starts and stops no workers; `None` while it is active.
    pub fn inactive_reason(&self) -> Option<String> {
        let reason = self.role.inactive_reason()?;
        Some(match &self.broker.error {
            Some(error) => format!("{reason}, tried {} times: {error}", self.broker.consecutive_failures),
            None => reason.to_owned(),
        })
    }

    pub fn failing_groups(&self) -> usize {
        self.groups.iter().filter(|group| group.failing).count()
    }
}

impl Role {
    pub const fn inactive_reason(self) -> Option<&'static str> {
        match self {
            Self::Disconnected => Some("the broker cannot be reached"),
            Self::Standby => Some("standby: another controller holds this pool"),
            Self::Starting => Some("declaring the exchanges and queues of the pool"),
            Self::Active => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerStatus {
    /// Without user and password.
    pub address: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Failed connection attempts in a row.
    pub consecutive_failures: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorStatus {
    pub message: String,
    pub seconds_ago: f64,
}

/// Workers by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerCounts {
    /// Not ready yet.
    pub starting: u32,
    /// Ready, without a request.
    pub idle: u32,
    /// The workers that have a request.
    pub busy: u32,
    /// Asked to stop.
    pub stopping: u32,
}

impl WorkerCounts {
    pub const fn total(self) -> u32 {
        self.starting + self.idle + self.busy + self.stopping
    }

    pub const fn by_state(self) -> [(&'static str, u32); 4] {
        let Self { starting, idle, busy, stopping } = self;
        [("starting", starting), ("idle", idle), ("busy", busy), ("stopping", stopping)]
    }
}

impl fmt::Display for WorkerCounts {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let present = self.by_state().into_iter().filter(|(_, count)| *count > 0);
        let texts: Vec<String> = present.map(|(state, count)| format!("{count} {state}")).collect();
        out.write_str(if texts.is_empty() { "none".to_owned() } else { texts.join(", ") }.as_str())
    }
}

impl FromIterator<WorkerActivity> for WorkerCounts {
    fn from_iter<I: IntoIterator<Item = WorkerActivity>>(activities: I) -> Self {
        let mut counts = Self::default();
        for activity in activities {
            match activity {
                WorkerActivity::Starting => counts.starting += 1,
                WorkerActivity::Idle => counts.idle += 1,
                WorkerActivity::Busy => counts.busy += 1,
                WorkerActivity::Stopping => counts.stopping += 1,
            }
        }
        counts
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupStatus {
    pub key: String,
    pub phase: GroupPhase,
    /// Time to the next phase if no demand comes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_phase_seconds: Option<f64>,
    /// Requests ready in the queue; absent until it is inspected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<u32>,
    /// Requests that workers hold, as counted by the broker, or else the number of busy workers times `concurrency`; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unacknowledged: Option<u32>,
    pub workers: WorkerCounts,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub worker_list: Vec<WorkerStatus>,
    /// Desired number of workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<u32>,
    /// Each bound that changed `wanted`, in order.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// What the queue waits for; absent if it is as the phase requires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_for: Option<String>,
    /// Time until the next start after failures; absent if none is delayed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_backoff_seconds: Option<f64>,
    /// Pause of the group or of its pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<PauseStatus>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_override: Option<ScaleStatus>,
    /// Workers in a row that failed to start or exited soon.
    pub consecutive_failures: u32,
    /// These failures are enough for an alert.
    pub failing: bool,
    /// Last exit that was not requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_exit: Option<ErrorStatus>,
}

impl GroupStatus {
    /// The phase that follows without demand.
    pub const fn next_phase(&self) -> &'static str {
        match self.phase {
            GroupPhase::Active => "unbound",
            GroupPhase::Unbound => "deleting",
            GroupPhase::Deleting => "deleted",
        }
    }
}

/// Last counts of a Taskcluster queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DemandStatus {
    pub name: String,
    /// Key of the group that serves it.
    pub key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<u32>,
    /// Absent without the scope `queue:claimed-list`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed: Option<u32>,
    /// Why the counts are old.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PauseStatus {
    /// User and note.
    pub by: String,
    /// Absent if it lasts until it is resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remaining_seconds: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScaleStatus {
    /// Absent for the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<u32>,
    /// Absent for the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// User and note.
    pub by: String,
    pub remaining_seconds: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// `WORKER_ID`.
    pub id: String,
    pub state: WorkerActivity,
    /// Since it was started or adopted.
    pub age_seconds: f64,
    /// What it waits for, such as an image, or the rollout that replaces it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

named_enum! {
    pub enum GroupPhase {
        /// Its queue is bound.
        Active = "active",
        /// Its queue is unbound: new requests become orphans, its workers drain the queue.
        Unbound = "unbound",
        /// Its workers are stopped, then its queue is deleted.
        Deleting = "deleting",
    }
}
