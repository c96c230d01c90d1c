//! The state machine of one claim, from the request to its end.
//!
//! It knows the lease, the stages and their order, but no messages, slots or sources; those belong to
//! [`super::worker`]. It appends [`ClaimAction`]s to a list.

mod cancel;
mod event;
mod reclaim;
mod shutdown;

use alloc::vec::Vec;
use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::lease::{self, Granted, Lease};
use super::outcome::{ExceptionReason, ExecuteFailure, Outcome, PrepareFailure, Verdict};
use super::refusal::Refusal;
use super::time::Instant;

pub use event::{
    CancelCause, CancelCommand, CancelResult, ClaimAction, ClaimEnd, ClaimEvent, LossReason, RunTerms, UploadStatus,
};

/// Claim requests without a definite answer. The message stays invisible for minutes; these take half a minute.
pub const CLAIM_ATTEMPTS_MAX: u32 = 6;
pub const CLAIM_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(10) };
/// Requests for a claim of a previous process without a definite answer: about as long as a lease lasts.
pub const TAKEOVER_ATTEMPTS_MAX: u32 = 45;
pub const TAKEOVER_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(30) };
pub const REPORT_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(250), max: Duration::from_secs(15) };
/// How long a release waits for a poll. The service holds one for 20 s; behind a slow proxy the wait is not worth it.
pub const POLL_WAIT_MAX: Duration = Duration::from_secs(25);
/// The time for log and artifacts after the report, unless the worker stops.
pub const UPLOAD_AFTER_REPORT_MAX: Duration = Duration::from_secs(60);
/// For log and artifacts before the report, and again after it, once the worker stops without a known deadline.
pub const SHUTDOWN_UPLOAD_MAX: Duration = Duration::from_secs(15);
/// For the status of a lost claim, which tells a canceled task from one that another worker has.
pub const LOSS_CHECK_MAX: Duration = Duration::from_secs(5);
/// Reserved before a termination deadline for the reports.
pub const REPORT_RESERVE: Duration = Duration::from_secs(3);

/// Unanswered reports that must fit before a termination deadline.
pub const REPORT_ATTEMPTS_MIN: u32 = 3;
/// How long after its lease a fenced report that was sent before is repeated: a service may be away for longer than a lease.
pub const LATE_REPORT_MAX: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClaimPolicy {
    /// Between SIGTERM and SIGKILL.
    pub termination_grace: Duration,
    /// How often to ask whether the run was resolved elsewhere; `None` is never.
    pub status_poll_interval: Option<Duration>,
    /// The queue can tell why a claim is lost.
    pub reports_cancellation: bool,
    /// Whether the payload is prepared and executed in one step, for claims that may be thousands a second.
    pub starts_in_one_step: bool,
    /// The same as [`super::poll::Capabilities::fenced_reports`].
    pub fenced_reports: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    Requested {
        retry_at: Option<Instant>,
    },
    Preparing,
    Executing,
    Stopping {
        after: AfterStop,
    },
    Uploading {
        outcome: Outcome,
        deadline: Option<Instant>,
    },
    Reporting {
        outcome: Outcome,
        retry_at: Option<Instant>,
        upload: UploadStage,
    },
    /// The payload has ended and the claim is over; a status check tells why.
    Explaining {
        end: ClaimEnd,
        upload: UploadStage,
    },
    /// The report was answered, or the task was canceled or is past its deadline.
    UploadingAfterReport,
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum AfterStop {
    Report(Outcome),
    Abandon(LossReason),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum UploadStage {
    Done,
    InProgress,
    AfterReport,
}

/// The poll that would return a task if it were released while it is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum PollBarrier {
    InFlight,
    Waiting,
    Clear,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum StatusSchedule {
    Never,
    Due(Instant),
    InFlight,
}

/// Equal values behave the same from here on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClaimState {
    policy: ClaimPolicy,
    terms: Option<RunTerms>,
    stage: Stage,
    lease: Option<Lease>,
    /// `None` while a reclaim is in flight.
    next_reclaim: Option<Instant>,
    reclaim_retry: Backoff,
    retry: Backoff,
    status_check: StatusSchedule,
    loss: Option<LossReason>,
    release: Option<Option<Instant>>,
    command: Option<CancelCommand>,
    poll_barrier: PollBarrier,
    /// Answered or not.
    sent_outcome: Option<Outcome>,
    reported_outcome: Option<Outcome>,
    upload_deadline: Option<Instant>,
    /// A previous process left this outcome to report; nothing else is done about the claim.
    recovered_outcome: Option<Outcome>,
}

impl ClaimState {
    /// A claim to be requested.
    pub fn requested(policy: ClaimPolicy, actions: &mut Vec<ClaimAction>) -> Self {
        actions.push(ClaimAction::Request);
        Self::from_grant(policy)
    }

    /// A claim granted by a poll or a recovery; [`ClaimEvent::Claimed`] follows.
    pub const fn from_grant(policy: ClaimPolicy) -> Self {
        Self {
            policy,
            terms: None,
            stage: Stage::Requested { retry_at: None },
            lease: None,
            next_reclaim: None,
            reclaim_retry: Backoff::NEW,
            retry: Backoff::NEW,
            status_check: StatusSchedule::Never,
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

    /// A claim of a previous process: `outcome` is reported once the claim is granted again. Its payload is never
    /// prepared (I28).
    pub fn recovered(policy: ClaimPolicy, outcome: Outcome, actions: &mut Vec<ClaimAction>) -> Self {
        actions.push(ClaimAction::TakeOver);
        Self { recovered_outcome: Some(outcome), ..Self::from_grant(policy) }
    }

    pub const fn is_recovered(&self) -> bool {
        self.recovered_outcome.is_some()
    }

    /// Whether the queue has granted the claim with a lease that was usable on arrival.
    pub const fn is_granted(&self) -> bool {
        self.lease.is_some() && !matches!(self.stage, Stage::Requested { .. })
    }

    pub const fn is_started(&self) -> bool {
        !matches!(self.stage, Stage::Requested { .. } | Stage::Preparing)
    }

    pub const fn is_executing(&self) -> bool {
        matches!(self.stage, Stage::Executing)
    }

    pub fn is_last_run(&self) -> bool {
        self.terms.is_some_and(RunTerms::is_last_run)
    }

    /// Forgets a release that came before the grant.
    pub(super) const fn forget_release(&mut self) {
        self.release = None;
    }

    pub const fn is_closed(&self) -> bool {
        matches!(self.stage, Stage::Closed)
    }

    /// Why the claim is lost.
    pub const fn loss(&self) -> Option<LossReason> {
        self.loss
    }

    pub const fn lease(&self) -> Option<Lease> {
        self.lease
    }

    pub const fn state_name(&self) -> &'static str {
        match self.stage {
            Stage::Requested { .. } => "claiming",
            Stage::Preparing => "preparing",
            Stage::Executing => "running",
            Stage::Stopping { .. } => "stopping",
            Stage::Uploading { .. } => "uploading",
            Stage::Reporting { .. } => "reporting",
            Stage::Explaining { .. } => "closing",
            Stage::UploadingAfterReport if self.loss.is_some() => "uploading",
            Stage::UploadingAfterReport => "uploading-after-report",
            Stage::Closed => "closed",
        }
    }

    /// Applies an event and appends the resulting actions.
    pub fn handle(&mut self, event: ClaimEvent, now: Instant, jitter: &mut Jitter, actions: &mut Vec<ClaimAction>) {
        if self.is_closed() {
            return;
        }
        match event {
            ClaimEvent::Terms(terms) => self.terms = Some(terms),
            ClaimEvent::Claimed(Ok(granted)) => self.on_granted(granted, now, jitter, actions),
            ClaimEvent::Claimed(Err(refusal)) => self.on_claim_refused(refusal, now, jitter, actions),
            ClaimEvent::Prepared(answer) => self.on_prepared(answer, now, actions),
            ClaimEvent::Ended(verdict) => self.on_ended(verdict, now, actions),
            ClaimEvent::Uploaded(status) => self.on_uploaded(status, now, actions),
            ClaimEvent::Reported(answer) => self.on_reported(answer, now, jitter, actions),
            ClaimEvent::Reclaimed(answer) => self.on_reclaimed(answer, now, jitter, actions),
            ClaimEvent::StatusChecked(answer) => self.on_status_checked(answer, now, actions),
            ClaimEvent::Lost => self.on_lost(LossReason::Revoked, actions),
            ClaimEvent::Release { deadline } => self.on_release(deadline, now, actions),
            ClaimEvent::Command(command) => self.on_cancel_command(command, now, actions),
            ClaimEvent::PollStarted if self.poll_barrier == PollBarrier::Clear => {
                self.poll_barrier = PollBarrier::InFlight
            }
            ClaimEvent::PollStarted => {}
            ClaimEvent::PollEnded => self.on_poll_ended(now),
            ClaimEvent::Tick => {}
        }
        self.on_timers(now, actions);
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        let stage = match self.stage {
            Stage::Requested { retry_at } | Stage::Reporting { retry_at, .. } => retry_at,
            Stage::Uploading { deadline: hurry_at, .. } => hurry_at,
            Stage::Explaining { .. } | Stage::UploadingAfterReport => self.upload_deadline,
            Stage::Preparing | Stage::Executing | Stage::Stopping { .. } | Stage::Closed => None,
        };
        let given_up = self.release.flatten().filter(|_| !self.is_closed());
        let own =
            [stage, self.reclaim_due(), self.expiry_due(), self.status_check_due(), given_up, self.deadline_due()];
        own.into_iter().flatten().min()
    }

    fn on_granted(&mut self, granted: Granted, now: Instant, jitter: &mut Jitter, actions: &mut Vec<ClaimAction>) {
        if !matches!(self.stage, Stage::Requested { .. }) {
            return;
        }
        let lease = self.new_lease(granted);
        let was_late = self.lease.replace(lease).is_some();
        let is_good = if was_late { lease.is_usable(now) } else { lease.has_room(now) };
        if !is_good {
            // I3: a lease counts from when the poll was sent, and the service may have held the poll for longer. Only a
            // reclaim tells whether the claim is still good.
            if was_late {
                self.close(ClaimEnd::Lost(LossReason::GrantedTooLate), actions);
            } else {
                self.stage = Stage::Requested { retry_at: None };
                actions.push(self.request());
            }
            return;
        }
        self.retry.reset();
        self.next_reclaim = Some(lease.reclaim_at(jitter));
        if let Some(left) = self.recovered_outcome {
            // I34: a command applies to an outcome that was not accepted yet.
            let outcome = self.command.map_or(left, |command| command.override_outcome(left));
            self.report(outcome, UploadStage::Done, now, actions);
        } else if self.release.is_some() || self.command == Some(CancelCommand::Release) {
            self.report(self.stopped_outcome(), UploadStage::Done, now, actions);
        } else if let Some(command) = self.command {
            // The log is uploaded, which says why the payload did not run.
            self.start_upload(command.outcome(), actions);
        } else {
            self.schedule_status_check(now);
            actions.push(ClaimAction::UpdateLease(lease));
            let (stage, action) = if self.policy.starts_in_one_step {
                (Stage::Executing, ClaimAction::Start)
            } else {
                (Stage::Preparing, ClaimAction::Prepare)
            };
            self.stage = stage;
            actions.push(action);
        }
    }

    fn on_claim_refused(
        &mut self,
        refusal: Refusal,
        now: Instant,
        jitter: &mut Jitter,
        actions: &mut Vec<ClaimAction>,
    ) {
        if !matches!(self.stage, Stage::Requested { .. }) {
            return;
        }
        let (most, retry, refused) = if self.lease.is_some() {
            (CLAIM_ATTEMPTS_MAX, CLAIM_RETRY, ClaimEnd::Lost(LossReason::GrantedTooLate))
        } else if self.is_recovered() {
            // I9: no report unless the queue has granted the claim again.
            (TAKEOVER_ATTEMPTS_MAX, TAKEOVER_RETRY, ClaimEnd::Lost(LossReason::Revoked))
        } else {
            (CLAIM_ATTEMPTS_MAX, CLAIM_RETRY, ClaimEnd::NotGranted)
        };
        let passing = match refusal {
            Refusal::Retry { .. } | Refusal::Full | Refusal::Stale => true,
            Refusal::Throttled { .. } => self.is_recovered() || self.lease.is_some(),
            Refusal::Gone | Refusal::Rejected | Refusal::Denied => false,
        };
        if !passing {
            return self.close(refused, actions);
        }
        // I22: on shutdown no request is sent any more, not even a retry.
        let wanted = self.release.is_none() && self.command != Some(CancelCommand::Release);
        if wanted && self.retry.tries() + 1 < most {
            let wait = self.retry.wait(retry, refusal.retry_after(), jitter);
            self.stage = Stage::Requested { retry_at: Some(now.plus(wait)) };
        } else {
            self.close(if self.lease.is_some() { refused } else { ClaimEnd::NotGranted }, actions);
        }
    }

    const fn request(&self) -> ClaimAction {
        if self.lease.is_some() {
            ClaimAction::Reclaim { timeout: lease::RECLAIM_TIMEOUT_MAX }
        } else if self.is_recovered() {
            ClaimAction::TakeOver
        } else {
            ClaimAction::Request
        }
    }

    fn on_prepared(&mut self, answer: Result<(), PrepareFailure>, now: Instant, actions: &mut Vec<ClaimAction>) {
        match (self.stage, answer) {
            (Stage::Preparing, Ok(())) if self.is_usable(now) => {
                self.stage = Stage::Executing;
                actions.push(ClaimAction::Execute);
            }
            // I3: expired before the start; there is nothing to kill.
            (Stage::Preparing, Ok(())) => self.close(ClaimEnd::Lost(LossReason::LeaseExpired), actions),
            (Stage::Preparing, Err(unprepared)) => self.start_upload(unprepared.outcome(), actions),
            (Stage::Executing, Err(unprepared)) if self.policy.starts_in_one_step => {
                self.start_upload(unprepared.outcome(), actions)
            }
            (_, _) => {}
        }
    }

    fn on_ended(&mut self, verdict: Verdict, now: Instant, actions: &mut Vec<ClaimAction>) {
        match self.stage {
            Stage::Executing => {
                let outcome = verdict.map_or_else(ExecuteFailure::outcome, |()| Outcome::Completed);
                self.start_upload(outcome, actions)
            }
            // I21: nothing was started, so nothing completed or failed.
            Stage::Preparing => self.start_upload(PrepareFailure::Internal.outcome(), actions),
            // A verdict after SIGTERM does not count: exit 0 on SIGTERM is not success (I21). The outcome is reported
            // before the log is uploaded, since the host may be gone soon (I23).
            Stage::Stopping { after: AfterStop::Report(outcome) } => {
                self.report(outcome, UploadStage::AfterReport, now, actions)
            }
            Stage::Stopping { after: AfterStop::Abandon(loss) } => {
                self.end_lost(ClaimEnd::Lost(loss), UploadStage::AfterReport, now, actions)
            }
            // Ended already.
            Stage::Requested { .. }
            | Stage::Uploading { .. }
            | Stage::Reporting { .. }
            | Stage::Explaining { .. }
            | Stage::UploadingAfterReport
            | Stage::Closed => {}
        }
    }

    fn on_uploaded(&mut self, status: UploadStatus, now: Instant, actions: &mut Vec<ClaimAction>) {
        match self.stage {
            Stage::Uploading { outcome, .. } => {
                let outcome = match (outcome, status) {
                    (Outcome::Completed, UploadStatus::ArtifactMissing) => Outcome::Failed,
                    (Outcome::Completed, UploadStatus::UploadFailed) => {
                        Outcome::Exception(ExceptionReason::ResourceUnavailable)
                    }
                    (outcome, UploadStatus::Complete | UploadStatus::ArtifactMissing | UploadStatus::UploadFailed) => {
                        outcome
                    }
                };
                self.report(outcome, UploadStage::Done, now, actions);
            }
            Stage::Reporting { outcome, retry_at, upload: UploadStage::InProgress } => {
                self.stage = Stage::Reporting { outcome, retry_at, upload: UploadStage::Done };
            }
            Stage::Explaining { end, upload: UploadStage::InProgress } => {
                self.stage = Stage::Explaining { end, upload: UploadStage::Done };
            }
            Stage::UploadingAfterReport => self.finish_upload(actions),
            Stage::Requested { .. }
            | Stage::Preparing
            | Stage::Executing
            | Stage::Stopping { .. }
            | Stage::Explaining { .. }
            | Stage::Reporting { upload: UploadStage::Done | UploadStage::AfterReport, .. }
            | Stage::Closed => {}
        }
    }

    fn on_reported(
        &mut self,
        answer: Result<(), Refusal>,
        now: Instant,
        jitter: &mut Jitter,
        actions: &mut Vec<ClaimAction>,
    ) {
        let Stage::Reporting { outcome, retry_at: None, upload } = self.stage else { return };
        // I9: the first definite answer is final.
        match answer {
            Ok(()) => match upload {
                UploadStage::Done => self.close(ClaimEnd::Reported(outcome), actions),
                UploadStage::InProgress => self.upload_after_report(outcome, now),
                UploadStage::AfterReport => {
                    self.upload_after_report(outcome, now);
                    actions.push(ClaimAction::Upload);
                }
            },
            Err(Refusal::Gone) => self.explain(ClaimEnd::AlreadyResolved(outcome), upload, now, actions),
            Err(Refusal::Rejected) => self.close(ClaimEnd::ReportRejected(outcome), actions),
            // I1: the claim was lost meanwhile, so the report is not repeated.
            Err(_) if self.loss.is_some() => {
                self.explain(ClaimEnd::Lost(self.loss.unwrap_or(LossReason::Revoked)), upload, now, actions)
            }
            Err(refusal) => {
                // A reclaim brings new credentials.
                if let Refusal::Denied | Refusal::Stale = refusal {
                    self.next_reclaim = self.next_reclaim.map(|at| at.min(now));
                }
                let wait = self.retry.wait(REPORT_RETRY, refusal.retry_after(), jitter);
                self.stage = Stage::Reporting { outcome, retry_at: Some(now.plus(wait)), upload };
            }
        }
    }

    fn on_timers(&mut self, now: Instant, actions: &mut Vec<ClaimAction>) {
        if self.is_past_deadline(now) && !self.is_closed() {
            self.abandon_at_deadline(actions);
        }
        if self.expiry_due().is_some_and(|at| now >= at) {
            self.on_lost(LossReason::LeaseExpired, actions);
        }
        if self.deadline_due().is_some_and(|at| now >= at) {
            self.on_lost(LossReason::DeadlineExceeded, actions);
        }
        match self.stage {
            Stage::Requested { retry_at: Some(at) } if now >= at => {
                self.stage = Stage::Requested { retry_at: None };
                actions.push(self.request());
            }
            Stage::Uploading { outcome, deadline: Some(at) } if now >= at => {
                // An upload that has not finished will not; only a retry can succeed. An exception needs no
                // artifacts.
                let outcome = match outcome {
                    Outcome::Completed | Outcome::Failed => Outcome::Exception(ExceptionReason::WorkerShutdown),
                    Outcome::Exception(_) | Outcome::Deferred => outcome,
                };
                self.report(outcome, UploadStage::InProgress, now, actions);
            }
            Stage::Reporting { outcome, retry_at: Some(at), upload } if now >= at => {
                self.report(outcome, upload, now, actions);
            }
            Stage::UploadingAfterReport if self.upload_deadline.is_some_and(|at| now >= at) => {
                self.finish_upload(actions)
            }
            Stage::Explaining { end, .. } if self.upload_deadline.is_some_and(|at| now >= at) => {
                self.close(end, actions);
            }
            Stage::Requested { .. }
            | Stage::Preparing
            | Stage::Executing
            | Stage::Stopping { .. }
            | Stage::Explaining { .. }
            | Stage::Uploading { .. }
            | Stage::Reporting { .. }
            | Stage::UploadingAfterReport
            | Stage::Closed => {}
        }
        if self.reclaim_due().is_some_and(|at| now >= at) {
            self.next_reclaim = None;
            let timeout = self.lease.map_or(lease::RECLAIM_TIMEOUT_MAX, |lease| lease.attempt_timeout());
            actions.push(ClaimAction::Reclaim { timeout });
        }
        if self.status_check_due().is_some_and(|at| now >= at) {
            self.check_status(actions);
        }
    }

    /// Kills a payload that may be alive; nothing is reported.
    fn on_lost(&mut self, loss: LossReason, actions: &mut Vec<ClaimAction>) {
        if self.loss.is_some() {
            return;
        }
        self.loss = Some(loss);
        match self.stage {
            Stage::Preparing | Stage::Executing | Stage::Stopping { .. } => {
                self.stage = Stage::Stopping { after: AfterStop::Abandon(loss) };
                let grace = self.lease.map_or(self.policy.termination_grace, |lease| lease.grace());
                actions.push(ClaimAction::Kill { cause: CancelCause::ClaimLost(loss), grace });
            }
            // A late grant that is being reclaimed.
            Stage::Requested { .. } if self.lease.is_some() => self.close(ClaimEnd::Lost(loss), actions),
            // A report in flight decides by its answer: the loss may be its own effect.
            Stage::Reporting { retry_at: None, .. }
            | Stage::Requested { .. }
            | Stage::Explaining { .. }
            | Stage::UploadingAfterReport
            | Stage::Closed => {}
            Stage::Uploading { .. } | Stage::Reporting { .. } => self.close(ClaimEnd::Lost(loss), actions),
        }
    }

    fn start_upload(&mut self, outcome: Outcome, actions: &mut Vec<ClaimAction>) {
        self.stage = Stage::Uploading { outcome, deadline: None };
        actions.push(ClaimAction::Upload);
    }

    fn report(&mut self, outcome: Outcome, upload: UploadStage, now: Instant, actions: &mut Vec<ClaimAction>) {
        if !self.is_usable(now) {
            // I1
            self.close(ClaimEnd::Lost(self.loss.unwrap_or(LossReason::LeaseExpired)), actions);
            return;
        }
        if self.is_past_deadline(now) {
            // I22
            self.close(ClaimEnd::Lost(LossReason::ShutdownDeadline), actions);
            return;
        }
        if let Some(until) = self.wait_for_poll(outcome, now) {
            self.stage = Stage::Reporting { outcome, retry_at: Some(until), upload };
            return;
        }
        self.stage = Stage::Reporting { outcome, retry_at: None, upload };
        self.sent_outcome = Some(outcome);
        actions.push(ClaimAction::Report { outcome, timeout: self.report_timeout(now) });
    }

    /// A hanging call must leave other calls time before a termination deadline (I22).
    fn report_timeout(&self, now: Instant) -> Duration {
        let timeout = self.lease.map_or(lease::RECLAIM_TIMEOUT_MAX, |lease| lease.attempt_timeout());
        let left = self.release.flatten().map(|deadline| deadline.since(now) / REPORT_ATTEMPTS_MIN);
        left.map_or(timeout, |left| timeout.min(left.max(REPORT_RESERVE / REPORT_ATTEMPTS_MIN)))
    }

    fn finish_upload(&mut self, actions: &mut Vec<ClaimAction>) {
        let lost = ClaimEnd::Lost(self.loss.unwrap_or(LossReason::ShutdownDeadline));
        let end = self.reported_outcome.map_or(lost, ClaimEnd::Reported);
        self.close(end, actions);
    }

    fn close(&mut self, end: ClaimEnd, actions: &mut Vec<ClaimAction>) {
        self.stage = Stage::Closed;
        let end = match (end, self.sent_outcome) {
            (ClaimEnd::Lost(loss), Some(outcome)) => ClaimEnd::Unconfirmed { outcome, loss },
            (end, _) => end,
        };
        actions.push(ClaimAction::Close(end));
    }

    fn is_usable(&self, now: Instant) -> bool {
        self.loss.is_none() && self.ends_at().is_some_and(|at| now < at)
    }

    fn new_lease(&self, granted: Granted) -> Lease {
        let new = if self.policy.fenced_reports { Lease::until_kill } else { Lease::new };
        new(granted, self.policy.termination_grace)
    }

    /// Nothing is reported from then on (I1). No payload is left once an outcome was sent, so a fenced one may come later, unless the
    /// worker has to stop.
    fn ends_at(&self) -> Option<Instant> {
        let is_late_report = self.policy.fenced_reports && self.sent_outcome.is_some() && self.release.is_none();
        self.lease.map(
            |lease| {
                if is_late_report { lease.granted_until().plus(LATE_REPORT_MAX) } else { lease.expires_at() }
            },
        )
    }
}
