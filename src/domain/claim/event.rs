//! Events and actions of one claim, and how it ends.

use core::fmt;
use core::time::Duration;

use crate::lease::{Granted, Lease};
use crate::named_enum;
use crate::outcome::{ExceptionReason, Outcome, PrepareFailure, Verdict};
use crate::refusal::Refusal;
use crate::time::Instant;

named_enum! {
    /// Why a claim ended without a report.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum LossReason {
        /// The queue says that it is not ours, is resolved, or no longer exists.
        Revoked = "revoked by the queue",
        /// The task was canceled.
        Canceled = "canceled",
        /// The task's deadline has passed. The queue resolves the run.
        DeadlineExceeded = "deadline exceeded",
        /// No reclaim succeeded in time.
        LeaseExpired = "lease expired",
        /// The grant arrived too late to be used.
        GrantedTooLate = "granted too late",
        /// The worker had to exit before the report.
        ShutdownDeadline = "shutdown deadline",
    }
}

impl fmt::Display for LossReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClaimEnd {
    Reported(Outcome),
    /// The queue has another outcome already (409 and the like).
    AlreadyResolved(Outcome),
    /// The queue rejects the report as invalid; the run will expire.
    ReportRejected(Outcome),
    /// Nothing was reported, and nothing will be.
    Lost(LossReason),
    /// A report was sent, and the claim was lost before its answer. Where the queue said that the claim is over, this
    /// report most likely ended it.
    Unconfirmed {
        outcome: Outcome,
        loss: LossReason,
    },
    NotGranted,
}

impl ClaimEnd {
    /// The outcome that was decided here, whether or not the queue accepted it.
    pub const fn outcome(self) -> Option<Outcome> {
        match self {
            Self::Reported(outcome)
            | Self::AlreadyResolved(outcome)
            | Self::ReportRejected(outcome)
            | Self::Unconfirmed { outcome, .. } => Some(outcome),
            Self::Lost(_) | Self::NotGranted => None,
        }
    }
}

impl fmt::Display for ClaimEnd {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reported(outcome) => outcome.fmt(out),
            Self::AlreadyResolved(outcome) => write!(out, "{outcome}, but the queue had another outcome"),
            Self::ReportRejected(outcome) => write!(out, "{outcome}, but the queue rejected the report"),
            Self::Unconfirmed { outcome, loss } => write!(out, "{outcome}, but the queue did not confirm it: {loss}"),
            Self::Lost(LossReason::Canceled) => out.write_str("canceled"),
            Self::Lost(loss) => write!(out, "claim lost: {loss}"),
            Self::NotGranted => out.write_str("not granted"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UploadStatus {
    Complete,
    /// An artifact that the task declares does not exist.
    ArtifactMissing,
    UploadFailed,
}

/// Why a payload has to end early. Of several causes the greatest applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CancelCause {
    /// The worker shuts down. Reported as `worker-shutdown`.
    Shutdown,
    /// An operator stopped it on this worker.
    Command(CancelCommand),
    /// The claim is over. Nothing is reported.
    ClaimLost(LossReason),
}

impl CancelCause {
    /// Describes the cause for the task's log.
    pub const fn message(self) -> &'static str {
        match self {
            Self::Shutdown => "stopped: the worker is shutting down",
            Self::Command(CancelCommand::Release) => "stopped: released by an operator",
            Self::Command(CancelCommand::Cancel) => "stopped: canceled by an operator",
            Self::ClaimLost(_) => "stopped: the task was canceled, its deadline has passed, or its claim was lost",
        }
    }
}

named_enum! {
    /// An operator's command about one claim. Of several the greatest applies.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum CancelCommand {
        /// Stop it and report `worker-shutdown`, which the queue retries.
        Release = "release",
        /// Stop it and report `internal-error`, which the queue does not retry. The queue accepts `canceled` from no
        /// worker, and `failed` would mean that the payload ended by itself (I21).
        Cancel = "cancel",
    }
}

impl CancelCommand {
    pub const fn past_tense(self) -> &'static str {
        match self {
            Self::Release => "released",
            Self::Cancel => "canceled",
        }
    }

    /// The outcome of a payload stopped by this command.
    pub const fn outcome(self) -> Outcome {
        Outcome::Exception(match self {
            Self::Release => ExceptionReason::WorkerShutdown,
            Self::Cancel => ExceptionReason::InternalError,
        })
    }

    /// Replaces the outcome of a payload that has ended. A release does not hide `completed` or `failed` from a
    /// retry; a cancel keeps what is not retried anyway, except a success whose artifacts are not uploaded yet.
    pub const fn override_outcome(self, outcome: Outcome) -> Outcome {
        match (self, outcome) {
            (Self::Release, Outcome::Completed | Outcome::Failed)
            | (
                Self::Cancel,
                Outcome::Completed
                | Outcome::Exception(ExceptionReason::WorkerShutdown | ExceptionReason::IntermittentTask),
            ) => self.outcome(),
            (Self::Release | Self::Cancel, outcome) => outcome,
        }
    }

    /// Whether the outcome has the wanted effect: retried for a release, not retried for a cancel.
    pub const fn is_satisfied_by(self, outcome: Outcome) -> bool {
        let done_elsewhere = matches!(
            outcome,
            Outcome::Exception(ExceptionReason::WorkerShutdown | ExceptionReason::IntermittentTask) | Outcome::Deferred
        );
        match self {
            Self::Release => done_elsewhere,
            Self::Cancel => !done_elsewhere,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CancelResult {
    /// The payload is being stopped; this is reported once its processes are gone.
    Stopping(Outcome),
    /// The payload has ended; this is reported at once, and uploads continue after it.
    Reporting(Outcome),
    /// The claim is being requested; this is reported once it is granted.
    ReportWhenGranted(Outcome),
    /// The claim was not granted and is not requested again.
    NotRequested,
    /// No effect: this was reported already.
    AlreadyReported(Outcome),
    /// No effect: the claim is lost, and its payload is being stopped.
    Lost(LossReason),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimAction {
    /// Send the claim request.
    Request,
    /// Request a claim of a previous process again, in order to report it.
    TakeOver,
    Prepare,
    Execute,
    /// Prepare, and execute what was prepared. Answered by [`ClaimEvent::Ended`], or by a failed [`ClaimEvent::Prepared`].
    Start,
    /// Send SIGTERM, and SIGKILL after `grace`. Answered by [`ClaimEvent::Ended`] when all processes are gone.
    Kill {
        cause: CancelCause,
        grace: Duration,
    },
    /// Finish the log, upload log and artifacts.
    Upload,
    Report {
        outcome: Outcome,
        timeout: Duration,
    },
    Reclaim {
        timeout: Duration,
    },
    /// Ask whether, and why, the run is no longer ours.
    CheckStatus,
    /// Tell the handler, and uploads, the new lease.
    UpdateLease(Lease),
    /// The claim is over; drop every call in flight for it.
    Close(ClaimEnd),
}

/// What the queue says of a run when it grants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RunTerms {
    /// The time at which the queue resolves the task as `deadline-exceeded`.
    pub deadline: Option<Instant>,
    /// How often the task is run again if this run is released; `None` is unknown.
    pub retries_left: Option<u32>,
}

impl RunTerms {
    /// True if a release may end the task unrun.
    pub fn is_last_run(self) -> bool {
        self.retries_left.unwrap_or(0) == 0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimEvent {
    /// Precedes [`ClaimEvent::Claimed`] of a grant.
    Terms(RunTerms),
    /// The claim request was answered.
    Claimed(Result<Granted, Refusal>),
    Prepared(Result<(), PrepareFailure>),
    /// The payload ended, or its preparation was aborted; none of its processes is left.
    Ended(Verdict),
    Uploaded(UploadStatus),
    Reported(Result<(), Refusal>),
    Reclaimed(Result<Granted, Refusal>),
    /// Why the run is no longer this worker's; `None` while it is.
    StatusChecked(Result<Option<LossReason>, Refusal>),
    /// The source reports that the claim is no longer ours.
    Lost,
    /// The worker stops, at the latest by `deadline`.
    Release {
        /// `None` is unknown.
        deadline: Option<Instant>,
    },
    Command(CancelCommand),
    /// A poll is in flight that would return this task as soon as it is released: release it afterwards.
    PollStarted,
    PollEnded,
    Tick,
}
