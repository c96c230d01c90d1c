//! What happens to a claim, what it wants done, and the words for how it ends.

use core::time::Duration;

use crate::domain::outcome::{ExceptionReason, Outcome, PrepareFailure, Verdict};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;

/// Why a claim ended without a report of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LossReason {
    /// The queue said that it is not ours, or no longer there.
    Revoked,
    /// The run was found resolved by somebody else.
    Canceled,
    /// No extension was granted in time.
    LeaseExpired,
    /// It was granted too late to be acted on.
    GrantedTooLate,
    /// The worker had to go before it could be reported.
    ShutdownDeadline,
}

/// The last word about a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClaimEnd {
    /// The queue accepted this outcome.
    Reported(Outcome),
    /// The queue has another answer already (409 and the like).
    AlreadyResolved(Outcome),
    /// The queue refuses our report as such; the run will expire.
    ReportRejected(Outcome),
    /// Given up; nothing was reported, and nothing is from then on.
    Lost(LossReason),
    /// A report was sent, and the claim was given up before an answer to it came. Where the queue had said that the claim is
    /// over, it was most likely this report that ended it.
    Unconfirmed {
        /// What was reported.
        outcome: Outcome,
        /// Why it was given up.
        loss: LossReason,
    },
    /// It was never granted.
    NotGranted,
}

/// How the log and the artifacts fared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UploadStatus {
    /// All is stored.
    Complete,
    /// Something that the task declares is not there.
    ArtifactMissing,
    /// Something could not be stored.
    UploadFailed,
}

/// Why a payload is told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KillCause {
    /// The claim is lost; nothing will be reported.
    ClaimLost(LossReason),
    /// The worker has to go.
    Shutdown,
    /// Those who run the worker said so.
    Command(CancelCommand),
}

/// What those who run the worker want to become of one claim. Of several orders the last of this list counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CancelCommand {
    /// Somebody else is to do it: it is ended and reported `worker-shutdown`, which the queue retries.
    Release,
    /// Nobody is to do it: it is ended and reported `internal-error`, which the queue does not retry. `canceled` is a word
    /// that the queue takes from no worker, and `failed` would say that the payload ended by itself (I21).
    Cancel,
}

impl CancelCommand {
    /// What is reported of a payload that is ended for it.
    #[must_use]
    pub const fn outcome(self) -> Outcome {
        Outcome::Exception(match self {
            Self::Release => ExceptionReason::WorkerShutdown,
            Self::Cancel => ExceptionReason::InternalError,
        })
    }

    /// What is reported of one that was to be reported otherwise. What cannot do better elsewhere is not handed back, and
    /// what is not run again anyway keeps its name; only a success whose artifacts are not stored yet is none.
    #[must_use]
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

    /// Whether this outcome does what was wanted: that somebody else does it, or that nobody does.
    #[must_use]
    pub const fn is_satisfied_by(self, outcome: Outcome) -> bool {
        let done_elsewhere =
            matches!(outcome, Outcome::Exception(ExceptionReason::WorkerShutdown | ExceptionReason::IntermittentTask));
        match self {
            Self::Release => done_elsewhere,
            Self::Cancel => !done_elsewhere,
        }
    }
}

/// What comes of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CancelResult {
    /// Its payload is ended, and this is reported when nothing is left of it.
    Stopping(Outcome),
    /// Its payload has ended; this is reported at once, and what is not stored by then is stored after.
    Reporting(Outcome),
    /// It is being asked for; this is reported as soon as it is granted.
    ReportWhenGranted(Outcome),
    /// It was not granted, and is not asked for again.
    NotRequested,
    /// Nothing: this was reported already.
    AlreadyReported(Outcome),
    /// Nothing: it is ours no more, and what is left of its payload is being ended.
    Lost(LossReason),
}

/// What a claim wants done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimAction {
    /// Send the claim request.
    Request,
    /// Let the handler prepare the payload. It may be started at once as well, see [`ClaimEvent::Started`].
    Prepare,
    /// Start the payload that was prepared.
    Execute,
    /// Tell the payload to end, and kill what is left after `grace`. Answered by [`ClaimEvent::Ended`] when it is proven gone.
    Kill {
        /// Why.
        cause: KillCause,
        /// How long it has.
        grace: Duration,
    },
    /// Finish the log, store log and artifacts.
    Upload,
    /// Send the outcome.
    Report {
        /// What is reported.
        outcome: Outcome,
        /// How long the call may take.
        timeout: Duration,
    },
    /// Extend the lease.
    Reclaim {
        /// How long the call may take.
        timeout: Duration,
    },
    /// Ask whether the run is still wanted.
    CheckStatus,
    /// The lease moved; tell the handler.
    UpdateLease {
        /// When the claim runs out if it is not extended again.
        expires_at: Instant,
    },
    /// It is over. Whatever is still in progress for this claim is dropped.
    Close(ClaimEnd),
}

/// What happened to a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimEvent {
    /// The request was granted; `sent_at` is from before it was sent.
    Granted {
        /// When the request was sent.
        sent_at: Instant,
        /// The length of the lease.
        length: Duration,
    },
    /// The request had no definite answer.
    RequestFailed {
        /// How long the service asked us to wait.
        retry_after: Option<Duration>,
    },
    /// Prepared, or not.
    Prepared(Result<(), PrepareFailure>),
    /// Prepared, and started at once by whoever prepared it, before [`ClaimAction::UpdateLease`]'s time was over (I3).
    Started,
    /// The payload ended, or what was being prepared is gone; no process of it is left.
    Ended(Verdict),
    /// Log and artifacts are dealt with.
    Uploaded(UploadStatus),
    /// The answer to a report.
    Reported(Result<(), Refusal>),
    /// The answer to a reclaim.
    Reclaimed {
        /// When the request was sent.
        sent_at: Instant,
        /// The new length.
        answer: Result<Duration, Refusal>,
    },
    /// The answer to a check: whether the run was resolved by somebody else.
    StatusChecked(Result<bool, Refusal>),
    /// The source found out by itself that the claim is not ours any more.
    Lost,
    /// The worker has to go, at the latest by `deadline`.
    Release {
        /// When the host goes; `None` is not known.
        deadline: Option<Instant>,
    },
    /// Those who run the worker want it ended, whatever becomes of the worker.
    Command(CancelCommand),
    /// A poll is under way that would bring this very task back as soon as it is handed back: hand it back after.
    PollStarted,
    /// That poll is over.
    PollEnded,
    /// Time passed.
    Tick,
}
