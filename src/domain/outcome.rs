//! What a handler may return, and what is reported.

use core::fmt;

use serde::{Deserialize, Serialize};

/// Why a run ends as an exception, in the words of the Taskcluster queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExceptionReason {
    /// The worker stops, or its host cannot run the task; the queue retries it.
    WorkerShutdown,
    /// No task code ran.
    MalformedPayload,
    /// Something the payload declares is unavailable after the worker's own retries.
    ResourceUnavailable,
    /// A fault of the worker or the handler.
    InternalError,
    /// The task asked for a retry; the queue retries it.
    IntermittentTask,
}

impl ExceptionReason {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::WorkerShutdown => "worker-shutdown",
            Self::MalformedPayload => "malformed-payload",
            Self::ResourceUnavailable => "resource-unavailable",
            Self::InternalError => "internal-error",
            Self::IntermittentTask => "intermittent-task",
        }
    }
}

/// The queue accepts exactly one for each claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Completed,
    Failed,
    Exception(ExceptionReason),
}

impl fmt::Display for Outcome {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completed => out.write_str("completed"),
            Self::Failed => out.write_str("failed"),
            Self::Exception(reason) => write!(out, "exception ({})", reason.as_str()),
        }
    }
}

/// The results of `prepare` other than success. No task code has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PrepareFailure {
    Malformed,
    Unavailable,
    Internal,
    /// The host is at fault; another host may succeed.
    HostFault,
    /// The sidecar that runs the payload is down; another worker, or this one later, may succeed.
    ServiceDown,
}

impl PrepareFailure {
    #[must_use]
    pub const fn outcome(self) -> Outcome {
        Outcome::Exception(match self {
            Self::Malformed => ExceptionReason::MalformedPayload,
            Self::Unavailable => ExceptionReason::ResourceUnavailable,
            Self::Internal => ExceptionReason::InternalError,
            Self::HostFault | Self::ServiceDown => ExceptionReason::WorkerShutdown,
        })
    }
}

/// The results of `execute`. `malformed` is not among them (I21).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    Completed,
    Failed,
    Intermittent,
    Unavailable,
    Internal,
    /// The host is at fault; another host may succeed.
    HostFault,
    /// The sidecar that runs the payload is down; another worker, or this one later, may succeed.
    ServiceDown,
}

impl Verdict {
    #[must_use]
    pub const fn outcome(self) -> Outcome {
        match self {
            Self::Completed => Outcome::Completed,
            Self::Failed => Outcome::Failed,
            Self::Intermittent => Outcome::Exception(ExceptionReason::IntermittentTask),
            Self::Unavailable => Outcome::Exception(ExceptionReason::ResourceUnavailable),
            Self::Internal => Outcome::Exception(ExceptionReason::InternalError),
            Self::HostFault | Self::ServiceDown => Outcome::Exception(ExceptionReason::WorkerShutdown),
        }
    }
}

/// Whether all processes of a payload are proven gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cleanup {
    Complete,
    Incomplete,
}
