//! The life of one claim, from the request to the last word about it.
//!
//! This machine knows the lease, the stages and the order of things. It does not know messages, slots or sources;
//! [`super::worker`] does. What it wants done it appends to a list of [`Act`]s.

mod event;
mod hold;
mod leave;
mod order;

use alloc::vec::Vec;
use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::lease::{self, Lease};
use super::outcome::{Outcome, Reason, Unprepared, Verdict};
use super::refusal::Refusal;
use super::time::Instant;

pub use event::{Act, End, Happening, KillCause, Loss, Obeyed, Order, Settled};

/// How often a claim request without a definite answer is sent in all. The message stays invisible for minutes; these take half of one.
pub const REQUESTS_MAX: u32 = 6;
/// The waits between them.
pub const REQUEST_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(10) };
/// How often an earlier life's claim is asked for in all where no answer is definite: for about as long as a lease lasts.
pub const TAKE_OVERS_MAX: u32 = 45;
/// The waits between them.
pub const TAKE_OVER_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(30) };
/// The waits between reports without a definite answer.
pub const REPORT_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(250), max: Duration::from_secs(15) };
/// How long a hand back waits for a poll at most. The service holds one for 20 s; behind a slow proxy it is not worth the wait.
pub const POLL_OUT_MAX: Duration = Duration::from_secs(25);
/// How long log and artifacts may take after the report, unless the worker has to go.
pub const TRAIL_MAX: Duration = Duration::from_secs(60);
/// How long log and artifacts may still take once the worker has to go and nobody says when: before the report, and after it.
pub const HURRY_MAX: Duration = Duration::from_secs(15);
/// What is set aside of a termination's notice for sending the reports.
pub const REPORT_RESERVE: Duration = Duration::from_secs(3);

/// How many reports that are not answered must fit before a termination's deadline.
pub const REPORTS_MIN: u32 = 3;

/// What the rules of a claim depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Policy {
    /// How long a payload may take to end after it was told to.
    pub grace: Duration,
    /// How often to ask whether a run is still wanted; `None` is never.
    pub check_every: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    Requested { retry_at: Option<Instant> },
    Preparing,
    Executing,
    Ending { after: After },
    Settling { outcome: Outcome, hurry_at: Option<Instant> },
    Reporting { outcome: Outcome, retry_at: Option<Instant>, settle: Settle },
    Trailing,
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum After {
    Report(Outcome),
    Nothing(Loss),
}

/// Where log and artifacts stand while the outcome is being reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Settle {
    Done,
    UnderWay,
    Afterwards,
}

/// Whether a poll is under way that would bring back what is handed back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Poll {
    Out,
    Awaited,
    Over,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Extension {
    Due(Instant),
    UnderWay,
}

/// One claim. Two that are equal behave the same from here on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Machine {
    policy: Policy,
    stage: Stage,
    lease: Option<Lease>,
    extension: Extension,
    extension_retry: Backoff,
    retry: Backoff,
    check_at: Option<Instant>,
    lost: Option<Loss>,
    hand_back: Option<Option<Instant>>,
    ordered: Option<Order>,
    poll: Poll,
    /// What was reported, answered or not.
    sent: Option<Outcome>,
    reported: Option<Outcome>,
    trail_until: Option<Instant>,
    /// What an earlier life of the worker has left to report. Nothing else is done about such a claim.
    left: Option<Outcome>,
}

impl Machine {
    /// A claim that is being asked for; its first act is the request.
    #[must_use]
    pub fn requested(policy: Policy, acts: &mut Vec<Act>) -> Self {
        acts.push(Act::Request);
        Self::in_stage(policy, Stage::Requested { retry_at: None })
    }

    /// A claim that a poll or a recovery brought; tell it [`Happening::Granted`] next.
    #[must_use]
    pub const fn brought(policy: Policy) -> Self {
        Self::in_stage(policy, Stage::Requested { retry_at: None })
    }

    /// A claim of an earlier life, of which `outcome` is to be reported once it is granted again; its first act is the request
    /// for that. Its payload is never prepared (I28).
    #[must_use]
    pub fn left_over(policy: Policy, outcome: Outcome, acts: &mut Vec<Act>) -> Self {
        Self { left: Some(outcome), ..Self::requested(policy, acts) }
    }

    const fn in_stage(policy: Policy, stage: Stage) -> Self {
        Self {
            policy,
            stage,
            lease: None,
            extension: Extension::UnderWay,
            extension_retry: Backoff::NEW,
            retry: Backoff::NEW,
            check_at: None,
            lost: None,
            hand_back: None,
            ordered: None,
            poll: Poll::Over,
            sent: None,
            reported: None,
            trail_until: None,
            left: None,
        }
    }

    /// Whether it is an earlier life's.
    #[must_use]
    pub const fn is_left_over(&self) -> bool {
        self.left.is_some()
    }

    /// Whether the queue has granted it.
    #[must_use]
    pub const fn granted(&self) -> bool {
        self.lease.is_some()
    }

    /// Whether its payload has been started.
    #[must_use]
    pub const fn started(&self) -> bool {
        !matches!(self.stage, Stage::Requested { .. } | Stage::Preparing)
    }

    /// Whether it is over.
    #[must_use]
    pub const fn closed(&self) -> bool {
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
        self.extension_due()
    }

    /// One word for a person: what the claim is doing.
    #[must_use]
    pub const fn step(&self) -> &'static str {
        match self.stage {
            Stage::Requested { .. } => "claiming",
            Stage::Preparing => "preparing",
            Stage::Executing => "running",
            Stage::Ending { .. } => "ending",
            Stage::Settling { .. } => "storing",
            Stage::Reporting { .. } => "reporting",
            Stage::Trailing => "storing log",
            Stage::Closed => "closed",
        }
    }

    /// Takes in what happened and appends what to do about it.
    pub fn handle(&mut self, happening: Happening, now: Instant, jitter: &mut Jitter, acts: &mut Vec<Act>) {
        if self.closed() {
            return;
        }
        match happening {
            Happening::Granted { sent_at, length } => self.on_granted(sent_at, length, now, jitter, acts),
            Happening::Unanswered { after } => self.on_unanswered(after, now, jitter, acts),
            Happening::Prepared(answer) => self.on_prepared(answer, now, acts),
            Happening::Started if self.stage == Stage::Preparing => self.stage = Stage::Executing,
            // It was told to end meanwhile, and will.
            Happening::Started => {}
            Happening::Ended(verdict) => self.on_ended(verdict, now, acts),
            Happening::Settled(settled) => self.on_settled(settled, now, acts),
            Happening::Reported(answer) => self.on_reported(answer, now, jitter, acts),
            Happening::Reclaimed { sent_at, answer } => self.on_reclaimed(sent_at, answer, now, jitter, acts),
            Happening::Checked(answer) => self.on_checked(answer, now, acts),
            Happening::Lost => self.lose(Loss::Refused, acts),
            Happening::HandBack { deadline } => self.on_hand_back(deadline, now, acts),
            Happening::Ordered(order) => self.on_ordered(order, now, acts),
            Happening::PollOut if self.poll == Poll::Over => self.poll = Poll::Out,
            Happening::PollOut => {}
            Happening::PollOver => self.on_poll_over(now),
            Happening::Tick => {}
        }
        self.on_time(now, acts);
    }

    /// When it next wants [`Happening::Tick`].
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let stage = match self.stage {
            Stage::Requested { retry_at } | Stage::Reporting { retry_at, .. } => retry_at,
            Stage::Settling { hurry_at, .. } => hurry_at,
            Stage::Trailing => self.trail_until,
            Stage::Preparing | Stage::Executing | Stage::Ending { .. } | Stage::Closed => None,
        };
        let given_up = self.hand_back.flatten().filter(|_| !self.closed());
        [stage, self.extension_due(), self.abandon_due(), self.check_due(), given_up].into_iter().flatten().min()
    }

    fn on_granted(
        &mut self,
        sent_at: Instant,
        length: Duration,
        now: Instant,
        jitter: &mut Jitter,
        acts: &mut Vec<Act>,
    ) {
        if self.granted() {
            return;
        }
        let lease = Lease::granted(sent_at, length, self.lease_policy());
        self.lease = Some(lease);
        self.retry.reset();
        if !lease.usable(now) {
            // I3: the payload is never started, and I1 forbids even a report.
            self.close(End::Lost(Loss::GrantedLate), acts);
            return;
        }
        self.extension = Extension::Due(lease.reclaim_at(jitter));
        if let Some(left) = self.left {
            // I34: an order is about what was not accepted yet.
            let outcome = self.ordered.map_or(left, |order| order.instead_of(left));
            self.report(outcome, Settle::Done, now, acts);
        } else if self.hand_back.is_some() || self.ordered == Some(Order::HandBack) {
            self.report(self.ended_by_us(), Settle::Done, now, acts);
        } else if let Some(order) = self.ordered {
            // By way of the log, which says why nothing of it was run.
            self.settle(order.outcome(), acts);
        } else {
            self.check_at = self.policy.check_every.map(|every| now.plus(every));
            self.stage = Stage::Preparing;
            acts.push(Act::Extended { lease_ends: lease.abandon_at() });
            acts.push(Act::Prepare);
        }
    }

    fn on_unanswered(&mut self, after: Option<Duration>, now: Instant, jitter: &mut Jitter, acts: &mut Vec<Act>) {
        if let Stage::Requested { .. } = self.stage {
            let (most, retry) = match self.left {
                Some(_) => (TAKE_OVERS_MAX, TAKE_OVER_RETRY),
                None => (REQUESTS_MAX, REQUEST_RETRY),
            };
            // I22: on the way out no request is sent any more, not even again.
            let wanted = self.hand_back.is_none() && self.ordered != Some(Order::HandBack);
            if wanted && self.retry.tries() + 1 < most {
                let wait = self.retry.wait(retry, after, jitter);
                self.stage = Stage::Requested { retry_at: Some(now.plus(wait)) };
            } else {
                self.close(End::NotGranted, acts);
            }
        }
    }

    fn on_prepared(&mut self, answer: Result<(), Unprepared>, now: Instant, acts: &mut Vec<Act>) {
        if self.stage != Stage::Preparing {
            return;
        }
        match answer {
            Ok(()) if self.usable(now) => {
                self.stage = Stage::Executing;
                acts.push(Act::Execute);
            }
            // I3: out of time before it started; there is nothing to kill.
            Ok(()) => self.close(End::Lost(Loss::LeaseOver), acts),
            Err(unprepared) => self.settle(unprepared.outcome(), acts),
        }
    }

    fn on_ended(&mut self, verdict: Verdict, now: Instant, acts: &mut Vec<Act>) {
        match self.stage {
            Stage::Executing => self.settle(verdict.outcome(), acts),
            // I21: nothing was started, so that nothing can have completed or failed.
            Stage::Preparing => self.settle(Unprepared::Internal.outcome(), acts),
            // What a payload says after it was told to end does not count: exit 0 on SIGTERM is not success (I21).
            // The outcome goes before the log: the host may be gone soon (I23).
            Stage::Ending { after: After::Report(outcome) } => self.report(outcome, Settle::Afterwards, now, acts),
            Stage::Ending { after: After::Nothing(loss) } => self.close(End::Lost(loss), acts),
            Stage::Requested { .. }
            | Stage::Settling { .. }
            | Stage::Reporting { .. }
            | Stage::Trailing
            | Stage::Closed => {}
        }
    }

    fn on_settled(&mut self, settled: Settled, now: Instant, acts: &mut Vec<Act>) {
        match self.stage {
            Stage::Settling { outcome, .. } => {
                let outcome = match (outcome, settled) {
                    (Outcome::Completed, Settled::Missing) => Outcome::Failed,
                    (Outcome::Completed, Settled::Unstored) => Outcome::Exception(Reason::ResourceUnavailable),
                    (outcome, Settled::Clean | Settled::Missing | Settled::Unstored) => outcome,
                };
                self.report(outcome, Settle::Done, now, acts);
            }
            Stage::Reporting { outcome, retry_at, settle: Settle::UnderWay } => {
                self.stage = Stage::Reporting { outcome, retry_at, settle: Settle::Done };
            }
            Stage::Trailing => self.close_trailing(acts),
            Stage::Requested { .. }
            | Stage::Preparing
            | Stage::Executing
            | Stage::Ending { .. }
            | Stage::Reporting { settle: Settle::Done | Settle::Afterwards, .. }
            | Stage::Closed => {}
        }
    }

    fn on_reported(&mut self, answer: Result<(), Refusal>, now: Instant, jitter: &mut Jitter, acts: &mut Vec<Act>) {
        let Stage::Reporting { outcome, retry_at: None, settle } = self.stage else { return };
        // I9: the first definite answer is the last word.
        match answer {
            Ok(()) => self.after_report(outcome, settle, now, acts),
            Err(Refusal::Gone) => self.close(End::Superseded(outcome), acts),
            Err(Refusal::Rejected) => self.close(End::Unreportable(outcome), acts),
            // I1: the claim was said to be lost meanwhile, so the report is not repeated.
            Err(_) if self.lost.is_some() => self.close(End::Lost(self.lost.unwrap_or(Loss::Refused)), acts),
            Err(Refusal::Denied | Refusal::Stale) => {
                if let Extension::Due(at) = self.extension {
                    self.extension = Extension::Due(at.min(now));
                }
                self.retry_report(outcome, settle, None, now, jitter);
            }
            Err(Refusal::Retry { after } | Refusal::Throttled { after }) => {
                self.retry_report(outcome, settle, after, now, jitter);
            }
        }
    }

    fn on_time(&mut self, now: Instant, acts: &mut Vec<Act>) {
        if self.out_of_time(now) && !self.closed() {
            self.give_up_at_deadline(acts);
        }
        if self.abandon_due().is_some_and(|at| now >= at) {
            self.lose(Loss::LeaseOver, acts);
        }
        match self.stage {
            Stage::Requested { retry_at: Some(at) } if now >= at => {
                self.stage = Stage::Requested { retry_at: None };
                acts.push(Act::Request);
            }
            Stage::Settling { outcome, hurry_at: Some(at) } if now >= at => {
                // What is not stored by now will not be; only another run can still succeed. An exception needs nothing stored.
                let outcome = match outcome {
                    Outcome::Completed | Outcome::Failed => Outcome::Exception(Reason::WorkerShutdown),
                    Outcome::Exception(_) => outcome,
                };
                self.report(outcome, Settle::UnderWay, now, acts);
            }
            Stage::Reporting { outcome, retry_at: Some(at), settle } if now >= at => {
                self.report(outcome, settle, now, acts);
            }
            Stage::Trailing if self.trail_until.is_some_and(|at| now >= at) => self.close_trailing(acts),
            Stage::Requested { .. }
            | Stage::Preparing
            | Stage::Executing
            | Stage::Ending { .. }
            | Stage::Settling { .. }
            | Stage::Reporting { .. }
            | Stage::Trailing
            | Stage::Closed => {}
        }
        if self.extension_due().is_some_and(|at| now >= at) {
            self.extension = Extension::UnderWay;
            let timeout = self.lease.map_or(lease::ATTEMPT_MAX, |lease| lease.attempt());
            acts.push(Act::Reclaim { timeout });
        }
        if self.check_due().is_some_and(|at| now >= at) {
            self.check_at = None;
            acts.push(Act::Check);
        }
    }

    /// The claim is not ours any more. A payload that may be alive is killed; nothing is reported.
    fn lose(&mut self, loss: Loss, acts: &mut Vec<Act>) {
        if self.lost.is_some() {
            return;
        }
        self.lost = Some(loss);
        match self.stage {
            Stage::Preparing | Stage::Executing => {
                self.stage = Stage::Ending { after: After::Nothing(loss) };
                let grace = self.lease.map_or(self.policy.grace, |lease| lease.grace());
                acts.push(Act::Kill { cause: KillCause::ClaimLost(loss), grace });
            }
            Stage::Ending { .. } => {
                self.stage = Stage::Ending { after: After::Nothing(loss) };
                let grace = self.lease.map_or(self.policy.grace, |lease| lease.grace());
                acts.push(Act::Kill { cause: KillCause::ClaimLost(loss), grace });
            }
            // A report on its way decides by its answer: the refusal may be the report's own doing.
            Stage::Reporting { retry_at: None, .. } | Stage::Requested { .. } | Stage::Trailing | Stage::Closed => {}
            Stage::Settling { .. } | Stage::Reporting { .. } => self.close(End::Lost(loss), acts),
        }
    }

    fn settle(&mut self, outcome: Outcome, acts: &mut Vec<Act>) {
        self.stage = Stage::Settling { outcome, hurry_at: None };
        acts.push(Act::Settle);
    }

    fn report(&mut self, outcome: Outcome, settle: Settle, now: Instant, acts: &mut Vec<Act>) {
        if !self.usable(now) {
            // I1
            self.close(End::Lost(self.lost.unwrap_or(Loss::LeaseOver)), acts);
            return;
        }
        if self.out_of_time(now) {
            // I22
            self.close(End::Lost(Loss::NoTime), acts);
            return;
        }
        if let Some(until) = self.waits_for_poll(outcome, now) {
            self.stage = Stage::Reporting { outcome, retry_at: Some(until), settle };
            return;
        }
        self.stage = Stage::Reporting { outcome, retry_at: None, settle };
        self.sent = Some(outcome);
        acts.push(Act::Report { outcome, timeout: self.report_timeout(now) });
    }

    /// How long a report may take. A call that hangs must leave a termination's last seconds time for others (I22).
    fn report_timeout(&self, now: Instant) -> Duration {
        let timeout = self.lease.map_or(lease::ATTEMPT_MAX, |lease| lease.attempt());
        let left = self.hand_back.flatten().map(|deadline| deadline.since(now) / REPORTS_MIN);
        left.map_or(timeout, |left| timeout.min(left.max(REPORT_RESERVE / REPORTS_MIN)))
    }

    fn retry_report(
        &mut self,
        outcome: Outcome,
        settle: Settle,
        after: Option<Duration>,
        now: Instant,
        jitter: &mut Jitter,
    ) {
        let wait = self.retry.wait(REPORT_RETRY, after, jitter);
        self.stage = Stage::Reporting { outcome, retry_at: Some(now.plus(wait)), settle };
    }

    fn after_report(&mut self, outcome: Outcome, settle: Settle, now: Instant, acts: &mut Vec<Act>) {
        match settle {
            Settle::Done => self.close(End::Reported(outcome), acts),
            Settle::UnderWay => self.trail(outcome, now),
            Settle::Afterwards => {
                self.trail(outcome, now);
                acts.push(Act::Settle);
            }
        }
    }

    fn close_trailing(&mut self, acts: &mut Vec<Act>) {
        let end = self.reported.map_or(End::Lost(Loss::NoTime), End::Reported);
        self.close(end, acts);
    }

    fn close(&mut self, end: End, acts: &mut Vec<Act>) {
        self.stage = Stage::Closed;
        let end = match (end, self.sent) {
            (End::Lost(loss), Some(outcome)) => End::Unconfirmed { outcome, loss },
            (end, _) => end,
        };
        acts.push(Act::Close(end));
    }

    fn usable(&self, now: Instant) -> bool {
        self.lost.is_none() && self.lease.is_some_and(|lease| lease.usable(now))
    }
}
