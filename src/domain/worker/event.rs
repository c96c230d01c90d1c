//! What goes into the worker and what comes out of it.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use crate::domain::claim::{self, ClaimEnd, KillCause, UploadStatus};
use crate::domain::host_health::ProbeResult;
use crate::domain::id::{LocalToken, PriorityQueue, Run, SourceId};
use crate::domain::outcome::{Outcome, PrepareFailure, Verdict};
use crate::domain::refusal::Refusal;
use crate::domain::service_supervisor::ServiceAvailability;
use crate::domain::time::Instant;
use crate::domain::unread_polls::ClaimWindow;

use super::{HostResources, WorkerPolicy};

/// A message that can be claimed, as the rules see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedMessage {
    /// Names this reception.
    pub token: LocalToken,
    /// Names the entry, at every reception.
    pub id: Box<str>,
    /// How often it was received.
    pub dequeue_count: u32,
    /// The run it is about; `None` where it cannot be read.
    pub run: Option<Run>,
}

/// A claim that a poll or a recovery brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantedClaim {
    /// Names it from here on.
    pub token: LocalToken,
    /// The run.
    pub run: Run,
    /// The length of the lease, from when the request was sent.
    pub length: Duration,
}

/// A run that an earlier life of this worker has left unreported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveredClaim {
    /// Names it from here on.
    pub token: LocalToken,
    /// The source that has claimed it.
    pub source: SourceId,
    /// The run.
    pub run: Run,
    /// What is to be reported.
    pub outcome: Outcome,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// An earlier life of this worker has left these unreported. To be told before the first [`Event::Tick`].
    ClaimsRecovered(Vec<RecoveredClaim>),
    /// An earlier life of this worker sent this source a poll that claims, and is not known to have read its answer. To be told
    /// before the first [`Event::Tick`].
    UnreadPoll {
        /// The source.
        source: SourceId,
        /// How long ago.
        age: Duration,
    },
    /// The answer to [`Effect::TakeOver`].
    TakenOver {
        /// The claim.
        claim: LocalToken,
        /// When it was asked for.
        sent_at: Instant,
        /// The length of the lease.
        answer: Result<Duration, Refusal>,
    },
    /// The answer to [`Effect::Open`].
    Opened {
        /// The source.
        source: SourceId,
        /// When it was asked.
        sent_at: Instant,
        /// How many lanes there are and how long they stay usable.
        answer: Result<OpenedQueues, Refusal>,
    },
    /// The answer to [`Effect::Poll`].
    Polled {
        /// The source.
        source: SourceId,
        /// The lane.
        queue: PriorityQueue,
        /// When it was asked.
        sent_at: Instant,
        /// What it brought.
        answer: Result<PollResult, Refusal>,
    },
    /// The answer to [`Effect::Recover`].
    Recovered {
        /// The source.
        source: SourceId,
        /// When it was asked.
        sent_at: Instant,
        /// What it brought.
        answer: Result<RecoveryResult, Refusal>,
    },
    /// The answer to [`Effect::Claim`].
    Claimed {
        /// The claim.
        claim: LocalToken,
        /// When it was asked.
        sent_at: Instant,
        /// The length of the lease.
        answer: Result<Duration, Refusal>,
    },
    /// The answer to [`Effect::Delete`].
    Deleted {
        /// The message.
        message: LocalToken,
        /// What came of it.
        answer: Result<(), Refusal>,
    },
    /// The answer to [`Effect::Prepare`].
    Prepared {
        /// The claim.
        claim: LocalToken,
        /// Whether it can be started.
        answer: Result<(), PrepareFailure>,
    },
    /// The payload was prepared and started, both for [`Effect::Prepare`]. It is told at the latest before [`Event::Ended`].
    Started {
        /// The claim.
        claim: LocalToken,
    },
    /// The answer to [`Effect::Execute`], or to [`Effect::Kill`]: no process of the payload is left.
    Ended {
        /// The claim.
        claim: LocalToken,
        /// How it ended.
        verdict: Verdict,
    },
    /// Processes of this claim's payload may still be there, although they were killed. Comes before [`Event::Ended`].
    CleanupPending {
        /// The claim.
        claim: LocalToken,
    },
    /// Nothing is left of an occupied claim's payload any more, whether the claim is over or not.
    CleanupDone {
        /// The claim.
        claim: LocalToken,
    },
    /// The answer to [`Effect::Upload`].
    Uploaded {
        /// The claim.
        claim: LocalToken,
        /// How log and artifacts fared.
        status: UploadStatus,
    },
    /// The answer to [`Effect::Report`].
    Reported {
        /// The claim.
        claim: LocalToken,
        /// What came of it.
        answer: Result<(), Refusal>,
    },
    /// The answer to [`Effect::Reclaim`].
    Reclaimed {
        /// The claim.
        claim: LocalToken,
        /// When it was asked.
        sent_at: Instant,
        /// The new length.
        answer: Result<Duration, Refusal>,
    },
    /// The answer to [`Effect::CheckStatus`].
    StatusChecked {
        /// The claim.
        claim: LocalToken,
        /// Whether somebody else resolved the run.
        answer: Result<bool, Refusal>,
    },
    /// What is to become of one claim, whatever becomes of the others.
    Command {
        /// The claim.
        claim: LocalToken,
        /// What.
        command: claim::CancelCommand,
    },
    /// The source found out by itself that this claim is not ours any more.
    Lost {
        /// The claim.
        claim: LocalToken,
    },
    /// Something may have become pending at this source.
    Wake(SourceId),
    /// Ask for nothing until then, or until [`Event::Resume`]; what is held goes on.
    Pause {
        /// Until when, if that is known.
        until: Option<Instant>,
    },
    /// Ask again.
    Resume,
    /// Whether what runs this source's tasks can take any. It can, unless said otherwise.
    ServiceAvailabilityChanged {
        /// The source.
        source: SourceId,
        /// Whether it can.
        availability: ServiceAvailability,
    },
    /// The answer to [`Effect::ProbeHost`].
    HostProbed(ProbeResult),
    /// What the host has left.
    ResourcesMeasured(HostResources),
    /// The work folder is not this worker's any more: what is written down there, no later life reads.
    WorkDirLost,
    /// The rules changed.
    Reconfigured(Box<WorkerPolicy>),
    /// Stop claiming, finish what is held, exit.
    Drain,
    /// As [`Event::Drain`], and what is left then is handed back, whatever was said before of how long a drain may take.
    DrainBy {
        /// When.
        deadline: Instant,
    },
    /// Stop claiming, hand back what is held, exit, by `deadline` if there is one.
    Release {
        /// When the host goes.
        deadline: Option<Instant>,
    },
    /// The host goes. Nothing new is claimed, what has not started is handed back, and what runs may go on as the policy
    /// says. The earliest deadline counts, and nothing takes it back.
    TerminationNotice {
        /// When; where that is not known everything is handed back at once.
        deadline: Option<Instant>,
    },
    /// The host may have to go before long: drain, and exit as for a host that goes.
    TerminationRisk,
    /// Exit without waiting for anything.
    Abort,
    /// Time passed.
    Tick,
}

/// The lanes of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenedQueues {
    /// How many.
    pub count: u16,
    /// How long they stay usable from when they were asked for.
    pub usable_for: Option<Duration>,
}

/// What a recovery brought.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecoveryResult {
    /// Claims that were taken over.
    pub claims: Vec<GrantedClaim>,
    /// Why others could not be; `None` where there are none.
    pub error: Option<Refusal>,
    /// How many more go by our name, claimed when no poll of ours can have claimed them. They are left alone.
    pub foreign_claims: usize,
}

/// What a poll brought.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PollResult {
    /// Messages, in the order received.
    pub messages: Vec<ReceivedMessage>,
    /// Claims.
    pub claims: Vec<GrantedClaim>,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Find the lanes of a source.
    Open(SourceId),
    /// Ask a lane for at most `max` entries. Never dropped while it is under way.
    Poll {
        /// The source.
        source: SourceId,
        /// The lane.
        queue: PriorityQueue,
        /// How many slots were taken for it.
        max: u8,
    },
    /// Find claims whose reply was lost, other than those `held`.
    Recover {
        /// The source.
        source: SourceId,
        /// What is held already, or ended here.
        known_runs: Vec<Run>,
        /// When polls may have claimed what nobody read the answer of. What was claimed at any other time is not ours.
        windows: Vec<ClaimWindow>,
    },
    /// Claim the run that this message is about. The claim goes by the message's token.
    Claim(LocalToken),
    /// Ask for a claim of an earlier life once more, and for the right to report it.
    TakeOver(LocalToken),
    /// Delete a message.
    Delete(LocalToken),
    /// This message is not needed any more.
    DropMessage(LocalToken),
    /// Let the handler prepare.
    Prepare(LocalToken),
    /// Start the payload.
    Execute(LocalToken),
    /// End the payload.
    Kill {
        /// The claim.
        claim: LocalToken,
        /// Why.
        cause: KillCause,
        /// How long it has before it is killed. The earliest of several orders counts.
        grace: Duration,
    },
    /// Finish the log, store log and artifacts.
    Upload(LocalToken),
    /// Send the outcome.
    Report {
        /// The claim.
        claim: LocalToken,
        /// The outcome.
        outcome: Outcome,
        /// How long the call may take.
        timeout: Duration,
    },
    /// Extend the lease.
    Reclaim {
        /// The claim.
        claim: LocalToken,
        /// How long the call may take.
        timeout: Duration,
    },
    /// Ask whether the run is still wanted.
    CheckStatus(LocalToken),
    /// Tell the handler how long its lease is.
    UpdateLease {
        /// The claim.
        claim: LocalToken,
        /// When the claim is given up if it is not extended again.
        expires_at: Instant,
    },
    /// The claim is over; drop what is under way for it.
    Close {
        /// The claim.
        claim: LocalToken,
        /// The run.
        run: Run,
        /// The last word.
        end: ClaimEnd,
    },
    /// Find out whether the host can run tasks.
    ProbeHost,
    /// Tell the operator.
    Alert(Alert),
    /// Exit. Nothing follows.
    Exit(ExitReason),
}

/// Something that an operator should see and that is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Alert {
    /// A message was received more often than the limit (I15: once a message).
    DequeueCount {
        /// The message.
        message: LocalToken,
        /// The message's own name.
        id: Box<str>,
        /// How often.
        count: u32,
    },
    /// A message could not be read and is deleted (I17).
    Undecodable {
        /// The message.
        message: LocalToken,
        /// The message's own name.
        id: Box<str>,
        /// How often it was received.
        count: u32,
    },
    /// A poll made a claim whose answer could not be read. It is looked for by a recovery, or runs out.
    UnreadableClaim {
        /// The source.
        source: SourceId,
        /// What could be read of its name.
        id: Box<str>,
    },
    /// A delete failed (I14).
    DeleteFailed {
        /// The message.
        message: LocalToken,
        /// The message's own name.
        id: Box<str>,
        /// How often it was received.
        count: u32,
        /// Whether it is tried again.
        retry: DeleteRetry,
    },
    /// The queue refuses our credentials.
    Denied {
        /// The source.
        source: SourceId,
        /// How often in a row.
        consecutive: u32,
    },
    /// The source has given no definite answer for a while.
    SourceUnavailable {
        /// The source.
        source: SourceId,
        /// How often in a row.
        consecutive: u32,
    },
    /// The queue asks us to slow down.
    Throttled {
        /// The source.
        source: SourceId,
    },
    /// A task could not be run because of the host (once, until one has run again). Claiming pauses.
    HostUnhealthy {
        /// The run, which is handed back.
        run: Run,
    },
    /// The work folder was removed or replaced (once). This worker finishes what it holds, and leaves.
    WorkDirLost,
    /// A run was already in progress elsewhere when our lease was over.
    OverlapPossible {
        /// The run.
        run: Run,
    },
    /// A payload may still be there although it was killed; its slot is not used until it is gone.
    CleanupPending {
        /// The run.
        run: Run,
    },
    /// A claim came by a call that was under way when this worker could take no more; it is handed back.
    LateGrant {
        /// The run.
        run: Run,
    },
    /// A claim of an earlier life of this worker was found; it is handed back.
    RecoveredClaim {
        /// The run.
        run: Run,
    },
    /// The service counts claims under our name that are not ours: another worker lives under it, or an earlier life had another
    /// work folder. They are left alone.
    DuplicateWorkerId {
        /// The source.
        source: SourceId,
        /// How many.
        claims: usize,
    },
    /// A poll brought a claim without a free slot; it is handed back.
    UnexpectedGrant {
        /// The run.
        run: Run,
    },
}

/// Whether a failed call is made again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeleteRetry {
    /// It is.
    Yes,
    /// That was the last time.
    No,
}

impl ExitReason {
    /// In words, for a log.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Drained => "drained",
            Self::Released => "handed back",
            Self::Idle => "idle",
            Self::LimitReached => "limit reached",
            Self::WorkDirLost => "work folder lost",
            Self::DrainDeadline => "drain deadline",
            Self::HostTerminating => "host goes",
            Self::CredentialsRejected => "credentials refused",
            Self::Misconfigured => "misconfigured",
            Self::Aborted => "aborted",
            Self::ProcessesLeft => "processes left",
        }
    }
}

/// Why the worker exits (I24): the first cause counts, but that a hand back outranks a drain, and the host's end both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExitReason {
    /// It was drained and everything held was finished.
    Drained,
    /// It was told to go and handed back what it held.
    Released,
    /// It had nothing to do for as long as it stays then.
    Idle,
    /// It has had as many tasks, or as much time, as it was to have.
    LimitReached,
    /// Its work folder was removed or replaced under it.
    WorkDirLost,
    /// The drain took too long, and the rest was handed back.
    DrainDeadline,
    /// The host is taken away; what it held was finished or handed back.
    HostTerminating,
    /// The queue never accepted our credentials.
    CredentialsRejected,
    /// The queue says that our requests are wrong.
    Misconfigured,
    /// It was told to exit at once.
    Aborted,
    /// Processes of a payload are still there although they were killed. Outranks every other cause but that it was told to
    /// exit at once.
    ProcessesLeft,
}
