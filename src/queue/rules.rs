//! What a claim, a report, an expiry, a cancel or a rerun does to a task. Pure: time comes in as an argument.
//!
//! It knows nothing of credentials, of messages or of where tasks are kept. Who may call what is `scopes`' business.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::clock::Millis;
use crate::limits::QUEUE_RUNS_MAX;

/// Where a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    Pending,
    Running,
    Completed,
    Failed,
    Exception,
}

impl State {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Exception => "exception",
        }
    }

    pub(crate) const fn is_resolved(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Exception)
    }
}

/// Why a run exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Origin {
    Scheduled,
    Retry,
    TaskRetry,
    Rerun,
    Exception,
}

impl Origin {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Retry => "retry",
            Self::TaskRetry => "task-retry",
            Self::Rerun => "rerun",
            Self::Exception => "exception",
        }
    }
}

/// Why a run is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Ending {
    Completed,
    Failed,
    WorkerShutdown,
    MalformedPayload,
    ResourceUnavailable,
    InternalError,
    Superseded,
    IntermittentTask,
    ClaimExpired,
    DeadlineExceeded,
    Canceled,
}

impl Ending {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::WorkerShutdown => "worker-shutdown",
            Self::MalformedPayload => "malformed-payload",
            Self::ResourceUnavailable => "resource-unavailable",
            Self::InternalError => "internal-error",
            Self::Superseded => "superseded",
            Self::IntermittentTask => "intermittent-task",
            Self::ClaimExpired => "claim-expired",
            Self::DeadlineExceeded => "deadline-exceeded",
            Self::Canceled => "canceled",
        }
    }

    /// The reasons that a worker may give for an exception.
    pub(crate) fn reported(reason: &str) -> Option<Self> {
        [
            Self::WorkerShutdown,
            Self::MalformedPayload,
            Self::ResourceUnavailable,
            Self::InternalError,
            Self::Superseded,
            Self::IntermittentTask,
        ]
        .into_iter()
        .find(|ending| ending.as_str() == reason)
    }

    const fn state(self) -> State {
        match self {
            Self::Completed => State::Completed,
            Self::Failed => State::Failed,
            Self::WorkerShutdown
            | Self::MalformedPayload
            | Self::ResourceUnavailable
            | Self::InternalError
            | Self::Superseded
            | Self::IntermittentTask
            | Self::ClaimExpired
            | Self::DeadlineExceeded
            | Self::Canceled => State::Exception,
        }
    }

    /// The origin of the run that follows, where one may.
    const fn retried_as(self) -> Option<Origin> {
        match self {
            Self::WorkerShutdown | Self::ClaimExpired => Some(Origin::Retry),
            Self::IntermittentTask => Some(Origin::TaskRetry),
            Self::Completed
            | Self::Failed
            | Self::MalformedPayload
            | Self::ResourceUnavailable
            | Self::InternalError
            | Self::Superseded
            | Self::DeadlineExceeded
            | Self::Canceled => None,
        }
    }
}

/// How urgent a task is; the order is that of urgency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Priority {
    Lowest = 1,
    VeryLow,
    Low,
    Medium,
    High,
    VeryHigh,
    Highest,
}

impl Priority {
    /// Every priority, the most urgent first.
    pub(crate) const ALL: [Self; 7] =
        [Self::Highest, Self::VeryHigh, Self::High, Self::Medium, Self::Low, Self::VeryLow, Self::Lowest];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Highest => "highest",
            Self::VeryHigh => "very-high",
            Self::High => "high",
            Self::Medium => "medium",
            Self::Low => "low",
            Self::VeryLow => "very-low",
            Self::Lowest => "lowest",
        }
    }

    /// 7 for the most urgent down to 1.
    pub(crate) const fn rank(self) -> u8 {
        self as u8
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|priority| priority.as_str() == name)
    }

    pub(crate) fn from_rank(rank: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|priority| priority.rank() == rank)
    }
}

/// Who claims: the pair that names a worker within its task queue.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Worker {
    pub(crate) group: String,
    pub(crate) id: String,
}

/// Which call made a claim. A claim made by `claimWork` cannot be repeated by `claimTask`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Via {
    ClaimTask,
    ClaimWork,
}

/// One attempt at a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    pub(crate) state: State,
    pub(crate) origin: Origin,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ending: Option<Ending>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) worker: Option<Worker>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) via: Option<Via>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) taken_until: Option<Millis>,
    pub(crate) scheduled: Millis,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) started: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) resolved: Option<Millis>,
}

impl RunRecord {
    const fn pending(origin: Origin, now: Millis) -> Self {
        Self {
            state: State::Pending,
            origin,
            ending: None,
            worker: None,
            via: None,
            taken_until: None,
            scheduled: now,
            started: None,
            resolved: None,
        }
    }
}

/// A task as far as the rules look at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) task_id: String,
    /// `provisionerId/workerType`.
    pub(crate) queue: String,
    pub(crate) scheduler: String,
    pub(crate) project: String,
    pub(crate) group: String,
    pub(crate) priority: Priority,
    pub(crate) deadline: Millis,
    pub(crate) expires: Millis,
    pub(crate) retries: u8,
    pub(crate) retries_left: u8,
    pub(crate) runs: Vec<RunRecord>,
}

/// Why a rule says no.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum No {
    /// There is no such run.
    Unknown,
    /// Somebody else has it, had it, or it is over.
    Taken,
    /// The task's deadline has passed.
    Deadline,
    /// The run is resolved, or was never running.
    NotRunning,
    /// The run has another end than the one reported.
    OtherEnd,
    /// The task has as many runs as a task may have.
    TooManyRuns,
}

/// Whether a rule altered the task, or found it as it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Did {
    Change,
    Nothing,
}

impl Task {
    /// The state of the last run; `unscheduled` where there is none.
    pub(crate) fn state_str(&self) -> &'static str {
        self.runs.last().map_or("unscheduled", |run| run.state.as_str())
    }

    /// Whether something may still happen to it by itself: a claim, an expiry, its deadline.
    pub(crate) fn is_open(&self) -> bool {
        self.runs.last().is_none_or(|run| !run.state.is_resolved())
    }

    /// The last run's number and the run, where it is pending.
    pub(crate) fn pending(&self) -> Option<(u32, &RunRecord)> {
        let (at, run) = self.last()?;
        (run.state == State::Pending).then_some((at, run))
    }

    /// The last run's number and the run.
    pub(crate) fn last(&self) -> Option<(u32, &RunRecord)> {
        let run = self.runs.last()?;
        Some((u32::try_from(self.runs.len() - 1).ok()?, run))
    }

    pub(crate) fn run(&self, run: u32) -> Result<&RunRecord, No> {
        self.runs.get(run as usize).ok_or(No::Unknown)
    }

    fn is_last(&self, run: u32) -> bool {
        self.runs.len() == run as usize + 1
    }

    /// Gives a task without runs its first.
    pub(crate) fn schedule(&mut self, now: Millis) -> Did {
        if self.runs.is_empty() {
            self.runs.push(RunRecord::pending(Origin::Scheduled, now));
            return Did::Change;
        }
        Did::Nothing
    }

    /// Hands a pending run to a worker. By `claimTask` it is idempotent: the same worker gets the same claim again.
    pub(crate) fn claim(
        &mut self,
        run: u32,
        worker: &Worker,
        via: Via,
        now: Millis,
        length: Duration,
    ) -> Result<Did, No> {
        if self.deadline <= now {
            return Err(No::Deadline);
        }
        let last = self.is_last(run);
        let found = self.runs.get_mut(run as usize).ok_or(No::Unknown)?;
        match found.state {
            State::Pending if last => {}
            State::Running if last && found.via == Some(via) && found.worker.as_ref() == Some(worker) => {
                return Ok(Did::Nothing);
            }
            State::Pending | State::Running | State::Completed | State::Failed | State::Exception => {
                return Err(No::Taken);
            }
        }
        found.state = State::Running;
        found.worker = Some(worker.clone());
        found.via = Some(via);
        found.taken_until = Some(now.plus(length));
        found.started = Some(now);
        Ok(Did::Change)
    }

    /// Takes back a claim whose answer nobody received, as if it had never been made.
    pub(crate) fn unclaim(&mut self, run: u32) -> Did {
        if !self.is_last(run) {
            return Did::Nothing;
        }
        let Some(found) = self.runs.last_mut().filter(|found| found.state == State::Running) else {
            return Did::Nothing;
        };
        *found = RunRecord::pending(found.origin, found.scheduled);
        Did::Change
    }

    /// Extends a claim, also after it ran out, as long as nobody has resolved it. It never ends sooner than before.
    pub(crate) fn reclaim(&mut self, run: u32, now: Millis, length: Duration) -> Result<Millis, No> {
        self.run(run)?;
        if self.deadline <= now {
            return Err(No::Deadline);
        }
        let last = self.is_last(run);
        let found = self.runs.get_mut(run as usize).ok_or(No::Unknown)?;
        if !last || found.state != State::Running {
            return Err(No::NotRunning);
        }
        let until = now.plus(length).max(found.taken_until.unwrap_or_default());
        found.taken_until = Some(until);
        Ok(until)
    }

    /// Ends a run as completed or failed. The same end again changes nothing.
    pub(crate) fn report(&mut self, run: u32, ending: Ending, now: Millis) -> Result<Did, No> {
        let state = self.run(run)?.state;
        if state == ending.state() {
            return if self.is_last(run) { Ok(Did::Nothing) } else { Err(No::NotRunning) };
        }
        if state != State::Running {
            return Err(No::OtherEnd);
        }
        if !self.is_last(run) {
            return Err(No::NotRunning);
        }
        self.resolve(ending, now);
        Ok(Did::Change)
    }

    /// Ends a run as an exception, and adds the next one where the reason asks for it and retries are left.
    pub(crate) fn report_exception(&mut self, run: u32, ending: Ending, now: Millis) -> Result<Did, No> {
        let found = self.run(run)?;
        if found.state == State::Exception && found.ending == Some(ending) {
            let follows = self.runs.len() - 1 - run as usize;
            return if follows <= 1 { Ok(Did::Nothing) } else { Err(No::NotRunning) };
        }
        if found.state != State::Running || !self.is_last(run) {
            return Err(No::NotRunning);
        }
        self.resolve(ending, now);
        Ok(Did::Change)
    }

    /// Ends the claim of a worker that was not heard of in time.
    pub(crate) fn expire_claim(&mut self, now: Millis) -> Did {
        let over = self
            .runs
            .last()
            .is_some_and(|run| run.state == State::Running && run.taken_until.is_some_and(|until| until <= now));
        if !over {
            return Did::Nothing;
        }
        self.resolve(Ending::ClaimExpired, now);
        Did::Change
    }

    /// Ends a task that is past its deadline.
    pub(crate) fn expire_deadline(&mut self, now: Millis) -> Did {
        if self.deadline > now {
            return Did::Nothing;
        }
        self.end_from_outside(Ending::DeadlineExceeded, now)
    }

    /// Cancels what is not resolved. A resolved task is left as it is.
    pub(crate) fn cancel(&mut self, now: Millis) -> Result<Did, No> {
        if self.deadline < now {
            return Err(No::Deadline);
        }
        Ok(self.end_from_outside(Ending::Canceled, now))
    }

    /// Starts a resolved task once more, with all its retries.
    pub(crate) fn rerun(&mut self, now: Millis) -> Result<Did, No> {
        if self.deadline < now {
            return Err(No::Deadline);
        }
        if self.runs.last().is_some_and(|run| !run.state.is_resolved()) {
            return Ok(Did::Nothing);
        }
        if self.runs.len() >= QUEUE_RUNS_MAX {
            return Err(No::TooManyRuns);
        }
        self.runs.push(RunRecord::pending(Origin::Rerun, now));
        let room = QUEUE_RUNS_MAX - self.runs.len();
        self.retries_left = self.retries.min(u8::try_from(room).unwrap_or(u8::MAX));
        Ok(Did::Change)
    }

    fn end_from_outside(&mut self, ending: Ending, now: Millis) -> Did {
        match self.runs.last().map(|run| run.state) {
            None => {
                let mut run = RunRecord::pending(Origin::Exception, now);
                run.state = State::Exception;
                run.ending = Some(ending);
                run.resolved = Some(now);
                self.runs.push(run);
                Did::Change
            }
            Some(State::Pending | State::Running) => {
                self.resolve(ending, now);
                Did::Change
            }
            Some(State::Completed | State::Failed | State::Exception) => Did::Nothing,
        }
    }

    fn resolve(&mut self, ending: Ending, now: Millis) {
        if let Some(run) = self.runs.last_mut() {
            run.state = ending.state();
            run.ending = Some(ending);
            run.resolved = Some(now);
        }
        if let Some(origin) = ending.retried_as().filter(|_| self.retries_left > 0)
            && self.runs.len() < QUEUE_RUNS_MAX
        {
            self.retries_left -= 1;
            self.runs.push(RunRecord::pending(origin, now));
        }
    }
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
