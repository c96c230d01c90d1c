//! The life of one claim, from the request to the last word about it.
//!
//! This machine knows the lease, the stages and the order of things. It does not know messages, slots or sources;
//! [`super::worker`] does. What it wants done it appends to a list of [`ClaimAction`]s.

mod cancel;
mod event;
mod reclaim;
mod shutdown;

use alloc::vec::Vec;
use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::lease::{self, Lease};
use super::outcome::{ExceptionReason, Outcome, PrepareFailure, Verdict};
use super::refusal::Refusal;
use super::time::Instant;

pub use event::{CancelCommand, CancelResult, ClaimAction, ClaimEnd, ClaimEvent, KillCause, LossReason, UploadStatus};

/// How often a claim request without a definite answer is sent in all. The message stays invisible for minutes; these take half of one.
pub const CLAIM_ATTEMPTS_MAX: u32 = 6;
/// The waits between them.
pub const CLAIM_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(10) };
/// How often an earlier life's claim is asked for in all where no answer is definite: for about as long as a lease lasts.
pub const TAKEOVER_ATTEMPTS_MAX: u32 = 45;
/// The waits between them.
pub const TAKEOVER_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(30) };
/// The waits between reports without a definite answer.
pub const REPORT_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(250), max: Duration::from_secs(15) };
/// How long a hand back waits for a poll at most. The service holds one for 20 s; behind a slow proxy it is not worth the wait.
pub const POLL_WAIT_MAX: Duration = Duration::from_secs(25);
/// How long log and artifacts may take after the report, unless the worker has to go.
pub const UPLOAD_AFTER_REPORT_MAX: Duration = Duration::from_secs(60);
/// How long log and artifacts may still take once the worker has to go and nobody says when: before the report, and after it.
pub const SHUTDOWN_UPLOAD_MAX: Duration = Duration::from_secs(15);
/// What is set aside of a termination's notice for sending the reports.
pub const REPORT_RESERVE: Duration = Duration::from_secs(3);

/// How many reports that are not answered must fit before a termination's deadline.
pub const REPORT_ATTEMPTS_MIN: u32 = 3;

/// What the rules of a claim depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClaimPolicy {
    /// How long a payload may take to end after it was told to.
    pub termination_grace: Duration,
    /// How often to ask whether a run is still wanted; `None` is never.
    pub status_poll_interval: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    Requested { retry_at: Option<Instant> },
    Preparing,
    Executing,
    Stopping { after: AfterStop },
    Uploading { outcome: Outcome, deadline: Option<Instant> },
    Reporting { outcome: Outcome, retry_at: Option<Instant>, upload: UploadStage },
    UploadingAfterReport,
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum AfterStop {
    Report(Outcome),
    Abandon(LossReason),
}

/// Where log and artifacts stand while the outcome is being reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum UploadStage {
    Done,
    InProgress,
    AfterReport,
}

/// Whether a poll is under way that would bring back what is handed back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum PollBarrier {
    InFlight,
    Waiting,
    Clear,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ReclaimSchedule {
    Due(Instant),
    InFlight,
}

/// One claim. Two that are equal behave the same from here on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClaimState {
    policy: ClaimPolicy,
    stage: Stage,
    lease: Option<Lease>,
    reclaim: ReclaimSchedule,
    reclaim_retry: Backoff,
    retry: Backoff,
    status_check_at: Option<Instant>,
    loss: Option<LossReason>,
    release: Option<Option<Instant>>,
    command: Option<CancelCommand>,
    poll_barrier: PollBarrier,
    /// What was reported, answered or not.
    sent_outcome: Option<Outcome>,
    reported_outcome: Option<Outcome>,
    upload_deadline: Option<Instant>,
    /// What an earlier life of the worker has left to report. Nothing else is done about such a claim.
    recovered_outcome: Option<Outcome>,
}

impl ClaimState {
    /// A claim that is being asked for; its first act is the request.
    #[must_use]
    pub fn requested(policy: ClaimPolicy, acts: &mut Vec<ClaimAction>) -> Self {
        acts.push(ClaimAction::Request);
        Self::in_stage(policy, Stage::Requested { retry_at: None })
    }

    /// A claim that a poll or a recovery brought; tell it [`ClaimEvent::Granted`] next.
    #[must_use]
    pub const fn from_grant(policy: ClaimPolicy) -> Self {
        Self::in_stage(policy, Stage::Requested { retry_at: None })
    }

    /// A claim of an earlier life, of which `outcome` is to be reported once it is granted again; its first act is the request
    /// for that. Its payload is never prepared (I28).
    #[must_use]
    pub fn recovered(policy: ClaimPolicy, outcome: Outcome, acts: &mut Vec<ClaimAction>) -> Self {
        Self { recovered_outcome: Some(outcome), ..Self::requested(policy, acts) }
    }

    const fn in_stage(policy: ClaimPolicy, stage: Stage) -> Self {
        Self {
            policy,
            stage,
            lease: None,
            reclaim: ReclaimSchedule::InFlight,
            reclaim_retry: Backoff::NEW,
            retry: Backoff::NEW,
            status_check_at: None,
            loss: None,
            release: None,
            command: None,
            poll_barrier: PollBarrier::Clear,
            sent_outcome: None,
            reported_outcome: None,
            upload_deadline: None,
            recovered_outcome: None,
        }
    }

    /// Whether it is an earlier life's.
    #[must_use]
    pub const fn is_recovered(&self) -> bool {
        self.recovered_outcome.is_some()
    }

    /// Whether the queue has granted it.
    #[must_use]
    pub const fn is_granted(&self) -> bool {
        self.lease.is_some()
    }

    /// Whether its payload has been started.
    #[must_use]
    pub const fn is_started(&self) -> bool {
        !matches!(self.stage, Stage::Requested { .. } | Stage::Preparing)
    }

    /// Whether it is over.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        matches!(self.stage, Stage::Closed)
    }

    /// The lease, once granted.
    #[must_use]
    pub const fn lease(&self) -> Option<Lease> {
        self.lease
    }

    /// When the lease is extended next, if nothing comes between.
    #[must_use]
    pub fn next_reclaim(&self) -> Option<Instant> {
        self.reclaim_due()
    }

    /// One word for a person: what the claim is doing.
    #[must_use]
    pub const fn state_name(&self) -> &'static str {
        match self.stage {
            Stage::Requested { .. } => "claiming",
            Stage::Preparing => "preparing",
            Stage::Executing => "running",
            Stage::Stopping { .. } => "ending",
            Stage::Uploading { .. } => "storing",
            Stage::Reporting { .. } => "reporting",
            Stage::UploadingAfterReport => "storing log",
            Stage::Closed => "closed",
        }
    }

    /// Takes in what happened and appends what to do about it.
    pub fn handle(&mut self, happening: ClaimEvent, now: Instant, jitter: &mut Jitter, acts: &mut Vec<ClaimAction>) {
        if self.is_closed() {
            return;
        }
        match happening {
            ClaimEvent::Granted { sent_at, length } => self.on_granted(sent_at, length, now, jitter, acts),
            ClaimEvent::RequestFailed { retry_after: after } => self.on_request_failed(after, now, jitter, acts),
            ClaimEvent::Prepared(answer) => self.on_prepared(answer, now, acts),
            ClaimEvent::Started if self.stage == Stage::Preparing => self.stage = Stage::Executing,
            // It was told to end meanwhile, and will.
            ClaimEvent::Started => {}
            ClaimEvent::Ended(verdict) => self.on_ended(verdict, now, acts),
            ClaimEvent::Uploaded(settled) => self.on_uploaded(settled, now, acts),
            ClaimEvent::Reported(answer) => self.on_reported(answer, now, jitter, acts),
            ClaimEvent::Reclaimed { sent_at, answer } => self.on_reclaimed(sent_at, answer, now, jitter, acts),
            ClaimEvent::StatusChecked(answer) => self.on_status_checked(answer, now, acts),
            ClaimEvent::Lost => self.on_lost(LossReason::Revoked, acts),
            ClaimEvent::Release { deadline } => self.on_release(deadline, now, acts),
            ClaimEvent::Command(order) => self.on_cancel_command(order, now, acts),
            ClaimEvent::PollStarted if self.poll_barrier == PollBarrier::Clear => {
                self.poll_barrier = PollBarrier::InFlight
            }
            ClaimEvent::PollStarted => {}
            ClaimEvent::PollEnded => self.on_poll_ended(now),
            ClaimEvent::Tick => {}
        }
        self.on_timers(now, acts);
    }

    /// When it next wants [`ClaimEvent::Tick`].
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let stage = match self.stage {
            Stage::Requested { retry_at } | Stage::Reporting { retry_at, .. } => retry_at,
            Stage::Uploading { deadline: hurry_at, .. } => hurry_at,
            Stage::UploadingAfterReport => self.upload_deadline,
            Stage::Preparing | Stage::Executing | Stage::Stopping { .. } | Stage::Closed => None,
        };
        let given_up = self.release.flatten().filter(|_| !self.is_closed());
        [stage, self.reclaim_due(), self.expiry_due(), self.status_check_due(), given_up].into_iter().flatten().min()
    }

    fn on_granted(
        &mut self,
        sent_at: Instant,
        length: Duration,
        now: Instant,
        jitter: &mut Jitter,
        acts: &mut Vec<ClaimAction>,
    ) {
        if self.is_granted() {
            return;
        }
        let lease = Lease::granted(sent_at, length, self.lease_policy());
        self.lease = Some(lease);
        self.retry.reset();
        if !lease.is_usable(now) {
            // I3: the payload is never started, and I1 forbids even a report.
            self.close(ClaimEnd::Lost(LossReason::GrantedTooLate), acts);
            return;
        }
        self.reclaim = ReclaimSchedule::Due(lease.reclaim_at(jitter));
        if let Some(left) = self.recovered_outcome {
            // I34: an order is about what was not accepted yet.
            let outcome = self.command.map_or(left, |order| order.override_outcome(left));
            self.report(outcome, UploadStage::Done, now, acts);
        } else if self.release.is_some() || self.command == Some(CancelCommand::Release) {
            self.report(self.stopped_outcome(), UploadStage::Done, now, acts);
        } else if let Some(order) = self.command {
            // By way of the log, which says why nothing of it was run.
            self.start_upload(order.outcome(), acts);
        } else {
            self.status_check_at = self.policy.status_poll_interval.map(|every| now.plus(every));
            self.stage = Stage::Preparing;
            acts.push(ClaimAction::UpdateLease { expires_at: lease.expires_at() });
            acts.push(ClaimAction::Prepare);
        }
    }

    fn on_request_failed(
        &mut self,
        after: Option<Duration>,
        now: Instant,
        jitter: &mut Jitter,
        acts: &mut Vec<ClaimAction>,
    ) {
        if let Stage::Requested { .. } = self.stage {
            let (most, retry) = match self.recovered_outcome {
                Some(_) => (TAKEOVER_ATTEMPTS_MAX, TAKEOVER_RETRY),
                None => (CLAIM_ATTEMPTS_MAX, CLAIM_RETRY),
            };
            // I22: on the way out no request is sent any more, not even again.
            let wanted = self.release.is_none() && self.command != Some(CancelCommand::Release);
            if wanted && self.retry.tries() + 1 < most {
                let wait = self.retry.wait(retry, after, jitter);
                self.stage = Stage::Requested { retry_at: Some(now.plus(wait)) };
            } else {
                self.close(ClaimEnd::NotGranted, acts);
            }
        }
    }

    fn on_prepared(&mut self, answer: Result<(), PrepareFailure>, now: Instant, acts: &mut Vec<ClaimAction>) {
        if self.stage != Stage::Preparing {
            return;
        }
        match answer {
            Ok(()) if self.is_usable(now) => {
                self.stage = Stage::Executing;
                acts.push(ClaimAction::Execute);
            }
            // I3: out of time before it started; there is nothing to kill.
            Ok(()) => self.close(ClaimEnd::Lost(LossReason::LeaseExpired), acts),
            Err(unprepared) => self.start_upload(unprepared.outcome(), acts),
        }
    }

    fn on_ended(&mut self, verdict: Verdict, now: Instant, acts: &mut Vec<ClaimAction>) {
        match self.stage {
            Stage::Executing => self.start_upload(verdict.outcome(), acts),
            // I21: nothing was started, so that nothing can have completed or failed.
            Stage::Preparing => self.start_upload(PrepareFailure::Internal.outcome(), acts),
            // What a payload says after it was told to end does not count: exit 0 on SIGTERM is not success (I21).
            // The outcome goes before the log: the host may be gone soon (I23).
            Stage::Stopping { after: AfterStop::Report(outcome) } => {
                self.report(outcome, UploadStage::AfterReport, now, acts)
            }
            Stage::Stopping { after: AfterStop::Abandon(loss) } => self.close(ClaimEnd::Lost(loss), acts),
            Stage::Requested { .. }
            | Stage::Uploading { .. }
            | Stage::Reporting { .. }
            | Stage::UploadingAfterReport
            | Stage::Closed => {}
        }
    }

    fn on_uploaded(&mut self, settled: UploadStatus, now: Instant, acts: &mut Vec<ClaimAction>) {
        match self.stage {
            Stage::Uploading { outcome, .. } => {
                let outcome = match (outcome, settled) {
                    (Outcome::Completed, UploadStatus::ArtifactMissing) => Outcome::Failed,
                    (Outcome::Completed, UploadStatus::UploadFailed) => {
                        Outcome::Exception(ExceptionReason::ResourceUnavailable)
                    }
                    (outcome, UploadStatus::Complete | UploadStatus::ArtifactMissing | UploadStatus::UploadFailed) => {
                        outcome
                    }
                };
                self.report(outcome, UploadStage::Done, now, acts);
            }
            Stage::Reporting { outcome, retry_at, upload: UploadStage::InProgress } => {
                self.stage = Stage::Reporting { outcome, retry_at, upload: UploadStage::Done };
            }
            Stage::UploadingAfterReport => self.finish_upload(acts),
            Stage::Requested { .. }
            | Stage::Preparing
            | Stage::Executing
            | Stage::Stopping { .. }
            | Stage::Reporting { upload: UploadStage::Done | UploadStage::AfterReport, .. }
            | Stage::Closed => {}
        }
    }

    fn on_reported(
        &mut self,
        answer: Result<(), Refusal>,
        now: Instant,
        jitter: &mut Jitter,
        acts: &mut Vec<ClaimAction>,
    ) {
        let Stage::Reporting { outcome, retry_at: None, upload: settle } = self.stage else { return };
        // I9: the first definite answer is the last word.
        match answer {
            Ok(()) => self.on_report_accepted(outcome, settle, now, acts),
            Err(Refusal::Gone) => self.close(ClaimEnd::AlreadyResolved(outcome), acts),
            Err(Refusal::Rejected) => self.close(ClaimEnd::ReportRejected(outcome), acts),
            // I1: the claim was said to be lost meanwhile, so the report is not repeated.
            Err(_) if self.loss.is_some() => self.close(ClaimEnd::Lost(self.loss.unwrap_or(LossReason::Revoked)), acts),
            Err(Refusal::Denied | Refusal::Stale) => {
                if let ReclaimSchedule::Due(at) = self.reclaim {
                    self.reclaim = ReclaimSchedule::Due(at.min(now));
                }
                self.retry_report(outcome, settle, None, now, jitter);
            }
            Err(Refusal::Retry { retry_after: after } | Refusal::Throttled { retry_after: after }) => {
                self.retry_report(outcome, settle, after, now, jitter);
            }
        }
    }

    fn on_timers(&mut self, now: Instant, acts: &mut Vec<ClaimAction>) {
        if self.is_past_deadline(now) && !self.is_closed() {
            self.abandon_at_deadline(acts);
        }
        if self.expiry_due().is_some_and(|at| now >= at) {
            self.on_lost(LossReason::LeaseExpired, acts);
        }
        match self.stage {
            Stage::Requested { retry_at: Some(at) } if now >= at => {
                self.stage = Stage::Requested { retry_at: None };
                acts.push(ClaimAction::Request);
            }
            Stage::Uploading { outcome, deadline: Some(at) } if now >= at => {
                // What is not stored by now will not be; only another run can still succeed. An exception needs nothing stored.
                let outcome = match outcome {
                    Outcome::Completed | Outcome::Failed => Outcome::Exception(ExceptionReason::WorkerShutdown),
                    Outcome::Exception(_) => outcome,
                };
                self.report(outcome, UploadStage::InProgress, now, acts);
            }
            Stage::Reporting { outcome, retry_at: Some(at), upload: settle } if now >= at => {
                self.report(outcome, settle, now, acts);
            }
            Stage::UploadingAfterReport if self.upload_deadline.is_some_and(|at| now >= at) => self.finish_upload(acts),
            Stage::Requested { .. }
            | Stage::Preparing
            | Stage::Executing
            | Stage::Stopping { .. }
            | Stage::Uploading { .. }
            | Stage::Reporting { .. }
            | Stage::UploadingAfterReport
            | Stage::Closed => {}
        }
        if self.reclaim_due().is_some_and(|at| now >= at) {
            self.reclaim = ReclaimSchedule::InFlight;
            let timeout = self.lease.map_or(lease::RECLAIM_TIMEOUT_MAX, |lease| lease.attempt_timeout());
            acts.push(ClaimAction::Reclaim { timeout });
        }
        if self.status_check_due().is_some_and(|at| now >= at) {
            self.status_check_at = None;
            acts.push(ClaimAction::CheckStatus);
        }
    }

    /// The claim is not ours any more. A payload that may be alive is killed; nothing is reported.
    fn on_lost(&mut self, loss: LossReason, acts: &mut Vec<ClaimAction>) {
        if self.loss.is_some() {
            return;
        }
        self.loss = Some(loss);
        match self.stage {
            Stage::Preparing | Stage::Executing => {
                self.stage = Stage::Stopping { after: AfterStop::Abandon(loss) };
                let grace = self.lease.map_or(self.policy.termination_grace, |lease| lease.grace());
                acts.push(ClaimAction::Kill { cause: KillCause::ClaimLost(loss), grace });
            }
            Stage::Stopping { .. } => {
                self.stage = Stage::Stopping { after: AfterStop::Abandon(loss) };
                let grace = self.lease.map_or(self.policy.termination_grace, |lease| lease.grace());
                acts.push(ClaimAction::Kill { cause: KillCause::ClaimLost(loss), grace });
            }
            // A report on its way decides by its answer: the refusal may be the report's own doing.
            Stage::Reporting { retry_at: None, .. }
            | Stage::Requested { .. }
            | Stage::UploadingAfterReport
            | Stage::Closed => {}
            Stage::Uploading { .. } | Stage::Reporting { .. } => self.close(ClaimEnd::Lost(loss), acts),
        }
    }

    fn start_upload(&mut self, outcome: Outcome, acts: &mut Vec<ClaimAction>) {
        self.stage = Stage::Uploading { outcome, deadline: None };
        acts.push(ClaimAction::Upload);
    }

    fn report(&mut self, outcome: Outcome, settle: UploadStage, now: Instant, acts: &mut Vec<ClaimAction>) {
        if !self.is_usable(now) {
            // I1
            self.close(ClaimEnd::Lost(self.loss.unwrap_or(LossReason::LeaseExpired)), acts);
            return;
        }
        if self.is_past_deadline(now) {
            // I22
            self.close(ClaimEnd::Lost(LossReason::ShutdownDeadline), acts);
            return;
        }
        if let Some(until) = self.wait_for_poll(outcome, now) {
            self.stage = Stage::Reporting { outcome, retry_at: Some(until), upload: settle };
            return;
        }
        self.stage = Stage::Reporting { outcome, retry_at: None, upload: settle };
        self.sent_outcome = Some(outcome);
        acts.push(ClaimAction::Report { outcome, timeout: self.report_timeout(now) });
    }

    /// How long a report may take. A call that hangs must leave a termination's last seconds time for others (I22).
    fn report_timeout(&self, now: Instant) -> Duration {
        let timeout = self.lease.map_or(lease::RECLAIM_TIMEOUT_MAX, |lease| lease.attempt_timeout());
        let left = self.release.flatten().map(|deadline| deadline.since(now) / REPORT_ATTEMPTS_MIN);
        left.map_or(timeout, |left| timeout.min(left.max(REPORT_RESERVE / REPORT_ATTEMPTS_MIN)))
    }

    fn retry_report(
        &mut self,
        outcome: Outcome,
        settle: UploadStage,
        after: Option<Duration>,
        now: Instant,
        jitter: &mut Jitter,
    ) {
        let wait = self.retry.wait(REPORT_RETRY, after, jitter);
        self.stage = Stage::Reporting { outcome, retry_at: Some(now.plus(wait)), upload: settle };
    }

    fn on_report_accepted(&mut self, outcome: Outcome, settle: UploadStage, now: Instant, acts: &mut Vec<ClaimAction>) {
        match settle {
            UploadStage::Done => self.close(ClaimEnd::Reported(outcome), acts),
            UploadStage::InProgress => self.upload_after_report(outcome, now),
            UploadStage::AfterReport => {
                self.upload_after_report(outcome, now);
                acts.push(ClaimAction::Upload);
            }
        }
    }

    fn finish_upload(&mut self, acts: &mut Vec<ClaimAction>) {
        let end = self.reported_outcome.map_or(ClaimEnd::Lost(LossReason::ShutdownDeadline), ClaimEnd::Reported);
        self.close(end, acts);
    }

    fn close(&mut self, end: ClaimEnd, acts: &mut Vec<ClaimAction>) {
        self.stage = Stage::Closed;
        let end = match (end, self.sent_outcome) {
            (ClaimEnd::Lost(loss), Some(outcome)) => ClaimEnd::Unconfirmed { outcome, loss },
            (end, _) => end,
        };
        acts.push(ClaimAction::Close(end));
    }

    fn is_usable(&self, now: Instant) -> bool {
        self.loss.is_none() && self.lease.is_some_and(|lease| lease.is_usable(now))
    }
}
