//! What a handler may say, and what is reported.

use core::fmt;

/// Why a run ends as an exception. The names are those of the Taskcluster queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExceptionReason {
    /// The worker has to go, or its host cannot run the task; the queue retries it.
    WorkerShutdown,
    /// The payload can never work; no task code ran.
    MalformedPayload,
    /// Something the payload declares could not be had, after our own retries.
    ResourceUnavailable,
    /// A fault of the worker or of a handler.
    InternalError,
    /// The task asked to be run again; the queue retries it.
    IntermittentTask,
}

impl ExceptionReason {
    /// The reason as the queue spells it.
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

/// What is reported for a run. Exactly one is accepted for each claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// The task code ran and succeeded.
    Completed,
    /// The task code ran and did not succeed.
    Failed,
    /// Anything else.
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

/// Why a payload was not started: all that `prepare` may say. No task code has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PrepareFailure {
    /// The payload can never work.
    Malformed,
    /// Something it declares cannot be had at present.
    Unavailable,
    /// The handler is at fault.
    Internal,
    /// The host is at fault, so that another one may do better.
    HostFault,
    /// What runs it is not there at present, so that another worker, or this one later, may do better.
    ServiceDown,
}

impl PrepareFailure {
    /// The outcome that this is reported as.
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

/// How a payload that was started ended: all that `execute` may say. `malformed` is not among them (I21).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// It succeeded.
    Completed,
    /// It did not succeed.
    Failed,
    /// It did not succeed and asks to be run again.
    Intermittent,
    /// It could not be run to its end for want of something it declares.
    Unavailable,
    /// The handler broke.
    Internal,
    /// The host could not run it, so that another one may do better.
    HostFault,
    /// What runs it was not there, so that another worker, or this one later, may do better.
    ServiceDown,
}

impl Verdict {
    /// The outcome that this is reported as.
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

/// Whether nothing of a payload is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cleanup {
    /// Nothing is.
    Complete,
    /// Something is, or may be.
    Incomplete,
}
