//! What a handler may return, and what is reported.

use core::fmt;

use serde::{Deserialize, Serialize};

use crate::named_enum;

named_enum! {
    /// Why a run ends as an exception, in the words of the Taskcluster queue.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum ExceptionReason {
        /// The worker stops, or its host cannot run the task; the queue retries it.
        WorkerShutdown = "worker-shutdown",
        /// No task code ran.
        MalformedPayload = "malformed-payload",
        /// Something the payload declares is unavailable after the worker's own retries.
        ResourceUnavailable = "resource-unavailable",
        /// A fault of the worker or the handler.
        InternalError = "internal-error",
        /// The task asked for a retry; the queue retries it.
        IntermittentTask = "intermittent-task",
    }
}

/// The queue accepts exactly one for each claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Completed,
    Failed,
    Exception(ExceptionReason),
    /// It has not ended: it runs elsewhere, and a scheduled message has it looked at.
    Deferred,
}

impl fmt::Display for Outcome {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completed => out.write_str("completed"),
            Self::Failed => out.write_str("failed"),
            Self::Exception(reason) => write!(out, "exception ({})", reason.as_str()),
            Self::Deferred => out.write_str("deferred"),
        }
    }
}

/// Why `prepare` failed. No task code has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PrepareFailure {
    /// The payload can never run.
    Malformed,
    /// A resource that the payload declares is not available.
    Unavailable,
    /// A fault of the worker or the handler.
    Internal,
    /// The host is out of disk, memory, processes or files; another host may succeed. The worker claims nothing until
    /// its host check passes.
    HostFault,
    /// The sidecar that runs the payload is down; another worker, or this one later, may succeed.
    ServiceDown,
}

impl PrepareFailure {
    pub const fn outcome(self) -> Outcome {
        Outcome::Exception(match self {
            Self::Malformed => ExceptionReason::MalformedPayload,
            Self::Unavailable => ExceptionReason::ResourceUnavailable,
            Self::Internal => ExceptionReason::InternalError,
            Self::HostFault | Self::ServiceDown => ExceptionReason::WorkerShutdown,
        })
    }

    /// Describes the failure in the task's log.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Malformed => "the payload is malformed; no task code was run",
            Self::Unavailable => "not started, a declared resource is unavailable",
            Self::Internal => "not started, internal error of the worker",
            Self::HostFault => "not started and released, fault of this host",
            Self::ServiceDown => "not started and released",
        }
    }
}

/// Why `execute` failed. A payload that was started is not malformed (I21).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExecuteFailure {
    /// The task's own code failed.
    Failed,
    /// The task failed in a way that it declared worth a retry.
    Intermittent,
    /// A resource that the payload declares was not available.
    Unavailable,
    /// A fault of the worker or the handler.
    Internal,
    /// The same fault as [`PrepareFailure::HostFault`].
    HostFault,
    /// What runs payloads for this worker refuses it, whatever the payload. The source is left alone for a while.
    AccessDenied,
    /// The sidecar was down and ran nothing, as in [`PrepareFailure::ServiceDown`].
    ServiceDown,
    /// Not ended: it runs elsewhere, and a scheduled message has it looked at. Only where the source can schedule one.
    Deferred,
}

/// The result of `execute`.
pub type Verdict = Result<(), ExecuteFailure>;

impl ExecuteFailure {
    pub const fn outcome(self) -> Outcome {
        match self {
            Self::Failed => Outcome::Failed,
            Self::Intermittent => Outcome::Exception(ExceptionReason::IntermittentTask),
            Self::Unavailable | Self::AccessDenied => Outcome::Exception(ExceptionReason::ResourceUnavailable),
            Self::Internal => Outcome::Exception(ExceptionReason::InternalError),
            Self::HostFault | Self::ServiceDown => Outcome::Exception(ExceptionReason::WorkerShutdown),
            Self::Deferred => Outcome::Deferred,
        }
    }

    /// Describes the failure in the task's log.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Intermittent => "failed, and asks for a retry",
            Self::Unavailable => "not completed, a resource is unavailable",
            Self::Internal => "not completed, internal error of the worker",
            Self::HostFault => "not completed and released, fault of this host",
            Self::AccessDenied => "not completed, this worker may not run it",
            Self::ServiceDown => "released",
            Self::Deferred => "not ended",
        }
    }
}

/// Tells if all processes of a payload are proven gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cleanup {
    Complete,
    Incomplete,
}
