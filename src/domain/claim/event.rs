//! What happens to a claim, what it wants done, and the words for how it ends.

use core::time::Duration;

use crate::domain::outcome::{Outcome, Reason, Unprepared, Verdict};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;

/// Why a claim ended without a report of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Loss {
    /// The queue said that it is not ours, or no longer there.
    Refused,
    /// The run was found resolved by somebody else.
    Canceled,
    /// No extension was granted in time.
    LeaseOver,
    /// It was granted too late to be acted on.
    GrantedLate,
    /// The worker had to go before it could be reported.
    NoTime,
}

/// The last word about a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum End {
    /// The queue accepted this outcome.
    Reported(Outcome),
    /// The queue has another answer already (409 and the like).
    Superseded(Outcome),
    /// The queue refuses our report as such; the run will expire.
    Unreportable(Outcome),
    /// Given up; nothing was reported, and nothing is from then on.
    Lost(Loss),
    /// A report was sent, and the claim was given up before an answer to it came. Where the queue had said that the claim is
    /// over, it was most likely this report that ended it.
    Unconfirmed {
        /// What was reported.
        outcome: Outcome,
        /// Why it was given up.
        loss: Loss,
    },
    /// It was never granted.
    NotGranted,
}

/// How the log and the artifacts fared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Settled {
    /// All is stored.
    Clean,
    /// Something that the task declares is not there.
    Missing,
    /// Something could not be stored.
    Unstored,
}

/// Why a payload is told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KillCause {
    /// The claim is lost; nothing will be reported.
    ClaimLost(Loss),
    /// The worker has to go.
    Shutdown,
    /// Those who run the worker said so.
    Ordered(Order),
}

/// What those who run the worker want to become of one claim. Of several orders the last of this list counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Order {
    /// Somebody else is to do it: it is ended and reported `worker-shutdown`, which the queue retries.
    HandBack,
    /// Nobody is to do it: it is ended and reported `internal-error`, which the queue does not retry. `canceled` is a word
    /// that the queue takes from no worker, and `failed` would say that the payload ended by itself (I21).
    Cancel,
}

impl Order {
    /// What is reported of a payload that is ended for it.
    #[must_use]
    pub const fn outcome(self) -> Outcome {
        Outcome::Exception(match self {
            Self::HandBack => Reason::WorkerShutdown,
            Self::Cancel => Reason::InternalError,
        })
    }

    /// What is reported of one that was to be reported otherwise. What cannot do better elsewhere is not handed back, and
    /// what is not run again anyway keeps its name; only a success whose artifacts are not stored yet is none.
    #[must_use]
    pub const fn instead_of(self, outcome: Outcome) -> Outcome {
        match (self, outcome) {
            (Self::HandBack, Outcome::Completed | Outcome::Failed)
            | (
                Self::Cancel,
                Outcome::Completed | Outcome::Exception(Reason::WorkerShutdown | Reason::IntermittentTask),
            ) => self.outcome(),
            (Self::HandBack | Self::Cancel, outcome) => outcome,
        }
    }

    /// Whether this outcome does what was wanted: that somebody else does it, or that nobody does.
    #[must_use]
    pub const fn is_met_by(self, outcome: Outcome) -> bool {
        let done_elsewhere = matches!(outcome, Outcome::Exception(Reason::WorkerShutdown | Reason::IntermittentTask));
        match self {
            Self::HandBack => done_elsewhere,
            Self::Cancel => !done_elsewhere,
        }
    }
}

/// What comes of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Obeyed {
    /// Its payload is ended, and this is reported when nothing is left of it.
    Ending(Outcome),
    /// Its payload has ended; this is reported at once, and what is not stored by then is stored after.
    Reporting(Outcome),
    /// It is being asked for; this is reported as soon as it is granted.
    WhenGranted(Outcome),
    /// It was not granted, and is not asked for again.
    NotAsked,
    /// Nothing: this was reported already.
    TooLate(Outcome),
    /// Nothing: it is ours no more, and what is left of its payload is being ended.
    Lost(Loss),
}

/// What a claim wants done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Send the claim request.
    Request,
    /// Let the handler prepare the payload. It may be started at once as well, see [`Happening::Started`].
    Prepare,
    /// Start the payload that was prepared.
    Execute,
    /// Tell the payload to end, and kill what is left after `grace`. Answered by [`Happening::Ended`] when it is proven gone.
    Kill {
        /// Why.
        cause: KillCause,
        /// How long it has.
        grace: Duration,
    },
    /// Finish the log, store log and artifacts.
    Settle,
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
    Check,
    /// The lease moved; tell the handler.
    Extended {
        /// When the claim runs out if it is not extended again.
        lease_ends: Instant,
    },
    /// It is over. Whatever is still in progress for this claim is dropped.
    Close(End),
}

/// What happened to a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Happening {
    /// The request was granted; `sent_at` is from before it was sent.
    Granted {
        /// When the request was sent.
        sent_at: Instant,
        /// The length of the lease.
        length: Duration,
    },
    /// The request had no definite answer.
    Unanswered {
        /// How long the service asked us to wait.
        after: Option<Duration>,
    },
    /// Prepared, or not.
    Prepared(Result<(), Unprepared>),
    /// Prepared, and started at once by whoever prepared it, before [`Act::Extended`]'s time was over (I3).
    Started,
    /// The payload ended, or what was being prepared is gone; no process of it is left.
    Ended(Verdict),
    /// Log and artifacts are dealt with.
    Settled(Settled),
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
    Checked(Result<bool, Refusal>),
    /// The source found out by itself that the claim is not ours any more.
    Lost,
    /// The worker has to go, at the latest by `deadline`.
    HandBack {
        /// When the host goes; `None` is not known.
        deadline: Option<Instant>,
    },
    /// Those who run the worker want it ended, whatever becomes of the worker.
    Ordered(Order),
    /// A poll is under way that would bring this very task back as soon as it is handed back: hand it back after.
    PollOut,
    /// That poll is over.
    PollOver,
    /// Time passed.
    Tick,
}
