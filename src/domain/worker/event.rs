//! Events and effects of the worker.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use crate::claim::{ClaimAction, ClaimEvent, RunTerms};
use crate::host_health::ProbeResult;
use crate::id::{LocalToken, PriorityQueue, Run, SourceId};
use crate::lease::Granted;
use crate::named_enum;
use crate::outcome::Outcome;
use crate::refusal::Refusal;
use crate::service_supervisor::ServiceAvailability;
use crate::time::Instant;
use crate::worker_pool::PoolDecision;

use super::{HostResources, WorkerPolicy};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedMessage {
    /// One reception.
    pub token: LocalToken,
    /// The same at every reception.
    pub id: Box<str>,
    /// How often it was received.
    pub dequeue_count: u32,
    /// `None` where the message cannot be read.
    pub run: Option<Run>,
}

/// A claim returned by a poll or a recovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantedClaim {
    pub token: LocalToken,
    pub run: Run,
    pub lease: Granted,
    pub terms: RunTerms,
}

/// A run that a previous process left unreported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveredClaim {
    pub token: LocalToken,
    pub source: SourceId,
    pub run: Run,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The caller sends it before the first [`Event::Tick`].
    ClaimsRecovered(Vec<RecoveredClaim>),
    /// A previous process did not read the answer of a claiming poll of this age. To be sent before the first
    /// [`Event::Tick`].
    UnreadPoll {
        source: SourceId,
        age: Duration,
    },
    Opened {
        source: SourceId,
        sent_at: Instant,
        answer: Result<OpenResult, Refusal>,
    },
    Polled {
        source: SourceId,
        answer: Result<PollResult, Refusal>,
    },
    Recovered {
        source: SourceId,
        answer: Result<RecoveryResult, Refusal>,
    },
    Deleted {
        message: LocalToken,
        answer: Result<(), Refusal>,
    },
    /// An event of one claim. One that comes after the end of the claim is ignored.
    Claim(LocalToken, ClaimEvent),
    /// The work of the claim runs elsewhere from now on. Ignored after the end of the claim.
    Launched {
        claim: LocalToken,
    },
    /// Processes of the payload may have survived SIGKILL. Precedes [`ClaimEvent::Ended`].
    CleanupPending {
        claim: LocalToken,
    },
    /// The remaining processes of a claim are gone, whether the claim is over or not.
    CleanupDone {
        claim: LocalToken,
    },
    /// Stop polling until then, or until [`Event::Resume`]; claims continue.
    Pause {
        until: Option<Instant>,
    },
    Resume,
    ServiceAvailabilityChanged {
        source: SourceId,
        availability: ServiceAvailability,
    },
    HostProbed(ProbeResult),
    ResourcesMeasured(HostResources),
    /// The work directory was removed or replaced: what is journaled there is lost to the next process.
    WorkDirLost,
    Reconfigured(Box<WorkerPolicy>),
    /// Stop claiming, finish the claims, exit. A `deadline`, at which the remaining claims are released, overrides the
    /// configured one.
    Drain {
        deadline: Option<Instant>,
    },
    /// Another worker can go on with the work of these claims. One that drains releases them, unless that would end their task.
    HandOver(Vec<LocalToken>),
    /// Stop claiming, release the claims, exit, by `deadline` if there is one.
    Release {
        deadline: Option<Instant>,
    },
    /// The host terminates. No new claims, unstarted claims are released, running ones continue as the policy says.
    /// The earliest deadline applies and is never revoked.
    TerminationNotice {
        /// `None`: unknown, release everything at once.
        deadline: Option<Instant>,
    },
    /// The manager of the pool has answered.
    PoolDecided(PoolDecision),
    /// Exit without waiting.
    Abort,
    Tick,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenResult {
    /// Queue 0 is polled first.
    pub priority_queues: u16,
    /// The lease counts from the time at which the call was sent; `None` is unlimited.
    pub usable_for: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecoveryResult {
    pub claims: Vec<GrantedClaim>,
    /// Why further claims could not be taken over.
    pub error: Option<Refusal>,
    /// Claims under our worker id that no poll of ours can have made. They are left alone.
    pub foreign_claims: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PollResult {
    /// The messages in the order received.
    pub messages: Vec<ReceivedMessage>,
    pub claims: Vec<GrantedClaim>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// List the priority queues of a source.
    Open(SourceId),
    /// Poll for at most `max` entries. Never dropped in flight.
    Poll {
        source: SourceId,
        queue: PriorityQueue,
        /// Slots reserved for it.
        max: u8,
    },
    /// Have the open poll of a source answered, if no claim is lost by it: another one wants its slots.
    ClosePoll(SourceId),
    /// List the claims of lost replies.
    Recover {
        source: SourceId,
        /// Runs held or ended here.
        known_runs: Vec<Run>,
        /// Claims up to this age are ours; `None` is that none is.
        newer_than: Option<Duration>,
    },
    /// Perform an action of a claim. A claim of a message has the message's token.
    Claim(LocalToken, ClaimAction),
    Delete(LocalToken),
    DropMessage(LocalToken),
    ProbeHost,
    Alert(Alert),
    /// Nothing follows.
    Exit(ExitReason),
}

/// An event for the operator, which is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Alert {
    /// Redelivered more often than the limit (I15: once a message).
    DequeueCount {
        id: Box<str>,
        count: u32,
    },
    /// The message could not be read and is deleted (I17).
    Undecodable {
        id: Box<str>,
        count: u32,
    },
    /// A poll made a claim, and its answer could not be read. A recovery finds it, or it expires.
    UnreadableClaim {
        source: SourceId,
        id: Box<str>,
    },
    /// I14.
    DeleteFailed {
        id: Box<str>,
        count: u32,
        /// The delete is sent again.
        retried: bool,
    },
    Denied {
        source: SourceId,
        consecutive: u32,
    },
    SourceUnavailable {
        source: SourceId,
        consecutive: u32,
    },
    Throttled {
        source: SourceId,
    },
    /// A task failed because of the host (raised once, until a task has run again). Claiming pauses.
    HostUnhealthy {
        run: Run,
    },
    /// What runs the tasks of a source refuses this worker (raised once, until one has run). The others go on.
    AccessDenied {
        source: SourceId,
    },
    /// The work directory was removed or replaced (raised once). The worker finishes its claims and exits.
    WorkDirLost,
    /// A payload ran past its lease (I7).
    OverlapPossible {
        run: Run,
    },
    /// Processes may have survived SIGKILL; the slot stays taken until they are gone.
    CleanupPending {
        run: Run,
    },
    /// A claim was granted by a call in flight when the worker stopped accepting; it is released.
    LateGrant {
        run: Run,
    },
    /// As [`Alert::LateGrant`] or [`Alert::RecoveredClaim`], but it has no retries left, so it runs.
    LastRun {
        run: Run,
    },
    /// A claim of a previous process was found; it is released.
    RecoveredClaim {
        run: Run,
    },
    /// Claims under our worker id are not ours: another worker uses the id, or a previous process had another work
    /// directory. They are left alone.
    DuplicateWorkerId {
        source: SourceId,
        claims: usize,
    },
    /// A poll returned more claims than it had slots; the surplus is released.
    UnexpectedGrant {
        run: Run,
    },
}

named_enum! {
    /// Why the worker exits (I24): the first cause applies, but a release outranks a drain, and a termination both.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum ExitReason {
        Drained = "drained",
        /// Claims were released, by a command or because the drain took too long.
        Released = "released",
        /// No claim for `exit_when_idle`.
        Idle = "idle",
        /// `max_tasks` or `max_uptime` was reached.
        LimitReached = "limit reached",
        WorkDirLost = "work directory lost",
        /// The manager of the pool does not need this worker.
        NotNeeded = "not needed",
        /// The manager of the pool renews the credentials no more.
        RegistrationRefused = "registration refused",
        HostTerminating = "host terminating",
        /// The queue never accepted the credentials.
        CredentialsRejected = "credentials rejected",
        /// The queue rejects our requests as invalid.
        Misconfigured = "misconfigured",
        Aborted = "aborted",
        /// Outranks every other cause but [`ExitReason::Aborted`].
        ProcessesLeft = "processes survived SIGKILL",
    }
}
