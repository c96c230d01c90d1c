//! The state machine of a task: claim, reclaim, report, expiry, cancel, rerun. Pure; time is an argument.
//!
//! Authorization is in `scopes`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::clock::UnixMillis;
use journeyman_domain::limits::{QUEUE_LATE_ARTIFACTS_WINDOW, QUEUE_RUNS_MAX};
use journeyman_domain::named_enum;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RunState {
    Pending,
    Running,
    Completed,
    Failed,
    Exception,
}

impl RunState {
    pub(crate) const fn is_resolved(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Exception)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CreatedReason {
    Scheduled,
    Retry,
    TaskRetry,
    Rerun,
    Exception,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ResolvedReason {
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

impl ResolvedReason {
    /// True if a worker may report it as an exception.
    pub(crate) const fn is_reportable(self) -> bool {
        matches!(
            self,
            Self::WorkerShutdown
                | Self::MalformedPayload
                | Self::ResourceUnavailable
                | Self::InternalError
                | Self::Superseded
                | Self::IntermittentTask
        )
    }

    fn run_state(self) -> RunState {
        if self == Self::Completed {
            RunState::Completed
        } else if self == Self::Failed {
            RunState::Failed
        } else {
            RunState::Exception
        }
    }

    /// Why the next run is created, if one is.
    fn retry_reason(self) -> Option<CreatedReason> {
        if self == Self::IntermittentTask {
            return Some(CreatedReason::TaskRetry);
        }
        matches!(self, Self::WorkerShutdown | Self::ClaimExpired).then_some(CreatedReason::Retry)
    }
}

named_enum! {
    /// Ordered from the least to the most urgent.
    #[derive(Default, PartialOrd, Ord, Hash, clap::ValueEnum)]
    pub enum Priority {
        #[default]
        Lowest = "lowest",
        VeryLow = "very-low",
        Low = "low",
        Medium = "medium",
        High = "high",
        VeryHigh = "very-high",
        Highest = "highest",
    }
}

impl Priority {
    /// 7 for the most urgent, 1 for the least.
    pub(crate) const fn rank(self) -> u8 {
        self as u8 + 1
    }

    pub(crate) fn from_rank(rank: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|priority| priority.rank() == rank)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WorkerIdentity {
    #[serde(rename = "workerGroup")]
    pub(crate) group: String,
    #[serde(rename = "workerId")]
    pub(crate) id: String,
}

/// A run, as it is stored and as the API shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RunRecord {
    pub(crate) state: RunState,
    #[serde(rename = "reasonCreated")]
    pub(crate) origin: CreatedReason,
    #[serde(rename = "reasonResolved", skip_serializing_if = "Option::is_none")]
    pub(crate) ending: Option<ResolvedReason>,
    #[serde(flatten)]
    pub(crate) worker: Option<WorkerIdentity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) taken_until: Option<UnixMillis>,
    pub(crate) scheduled: UnixMillis,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) started: Option<UnixMillis>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) resolved: Option<UnixMillis>,
}

impl RunRecord {
    pub(crate) const fn is_running(&self) -> bool {
        matches!(self.state, RunState::Running)
    }

    /// While it is running, and for a while after an exception.
    pub(crate) fn accepts_artifacts(&self, now: UnixMillis) -> bool {
        let is_late = || self.resolved.is_some_and(|end| end.plus(QUEUE_LATE_ARTIFACTS_WINDOW) > now);
        self.is_running() || (self.state == RunState::Exception && is_late())
    }

    const fn pending(origin: CreatedReason, now: UnixMillis) -> Self {
        Self {
            state: RunState::Pending,
            origin,
            ending: None,
            worker: None,
            taken_until: None,
            scheduled: now,
            started: None,
            resolved: None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TaskRecord {
    pub(crate) task_id: String,
    /// `provisionerId/workerType`.
    #[serde(rename = "taskQueueId")]
    pub(crate) queue: String,
    #[serde(rename = "schedulerId")]
    pub(crate) scheduler: String,
    #[serde(rename = "projectId")]
    pub(crate) project: String,
    #[serde(rename = "taskGroupId")]
    pub(crate) group: String,
    pub(crate) priority: Priority,
    pub(crate) deadline: UnixMillis,
    pub(crate) expires: UnixMillis,
    #[serde(skip)]
    pub(crate) name: String,
    #[serde(skip)]
    pub(crate) created: UnixMillis,
    #[serde(skip)]
    pub(crate) retries: u8,
    pub(crate) retries_left: u8,
    #[serde(skip)]
    pub(crate) runs: Vec<RunRecord>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunError {
    NoSuchRun,
    /// Another worker has claimed the run, or the run is resolved.
    AlreadyClaimed,
    PastDeadline,
    NotRunning,
    TooManyRuns,
}

impl TaskRecord {
    /// True if a claim, an expiry or the deadline may still change the task.
    pub(crate) fn is_open(&self) -> bool {
        self.runs.last().is_none_or(|run| !run.state.is_resolved())
    }

    pub(crate) fn pending_run(&self) -> Option<(u32, &RunRecord)> {
        let (at, run) = self.last_run()?;
        (run.state == RunState::Pending).then_some((at, run))
    }

    /// `takenUntil` of the last run while it is running.
    pub(crate) fn running_until(&self) -> Option<UnixMillis> {
        self.runs.last().filter(|run| run.state == RunState::Running).and_then(|run| run.taken_until)
    }

    pub(crate) fn last_run(&self) -> Option<(u32, &RunRecord)> {
        let run = self.runs.last()?;
        Some((u32::try_from(self.runs.len() - 1).ok()?, run))
    }

    pub(crate) fn run(&self, run: u32) -> Result<&RunRecord, RunError> {
        self.runs.get(run as usize).ok_or(RunError::NoSuchRun)
    }

    fn is_last(&self, run: u32) -> bool {
        self.runs.len() == run as usize + 1
    }

    pub(crate) fn schedule(&mut self, now: UnixMillis) {
        if self.runs.is_empty() {
            self.runs.push(RunRecord::pending(CreatedReason::Scheduled, now));
        }
    }

    /// Claims a pending run. The same worker gets the same claim again.
    pub(crate) fn claim(
        &mut self,
        run: u32,
        worker: &WorkerIdentity,
        now: UnixMillis,
        length: Duration,
    ) -> Result<(), RunError> {
        if self.deadline <= now {
            return Err(RunError::PastDeadline);
        }
        let last = self.is_last(run);
        let found = self.runs.get_mut(run as usize).ok_or(RunError::NoSuchRun)?;
        match found.state {
            RunState::Pending if last => {}
            RunState::Running if last && found.worker.as_ref() == Some(worker) => {
                return Ok(());
            }
            RunState::Pending | RunState::Running | RunState::Completed | RunState::Failed | RunState::Exception => {
                return Err(RunError::AlreadyClaimed);
            }
        }
        found.state = RunState::Running;
        found.worker = Some(worker.clone());
        found.taken_until = Some(now.plus(length));
        found.started = Some(now);
        Ok(())
    }

    /// Extends a claim, also after `takenUntil` while the run is unresolved. `takenUntil` never moves back.
    pub(crate) fn reclaim(&mut self, run: u32, now: UnixMillis, length: Duration) -> Result<(), RunError> {
        self.run(run)?;
        if self.deadline <= now {
            return Err(RunError::PastDeadline);
        }
        let last = self.is_last(run);
        let found = self.runs.get_mut(run as usize).ok_or(RunError::NoSuchRun)?;
        if !last || found.state != RunState::Running {
            return Err(RunError::NotRunning);
        }
        found.taken_until = found.taken_until.max(Some(now.plus(length)));
        Ok(())
    }

    /// Resolves a run, and adds a retry if the reason allows one and retries are left. The same report again changes
    /// nothing.
    pub(crate) fn report(&mut self, run: u32, ending: ResolvedReason, now: UnixMillis) -> Result<(), RunError> {
        let found = self.run(run)?;
        if found.ending == Some(ending) {
            // The first report of an exception may have added a run.
            let added = usize::from(found.state == RunState::Exception);
            let later = self.runs.len() - 1 - run as usize;
            return if later <= added { Ok(()) } else { Err(RunError::NotRunning) };
        }
        if found.state != RunState::Running || !self.is_last(run) {
            return Err(RunError::NotRunning);
        }
        self.resolve(ending, now);
        Ok(())
    }

    pub(crate) fn expire_claim(&mut self, now: UnixMillis) {
        if self.running_until().is_some_and(|until| until <= now) {
            self.resolve(ResolvedReason::ClaimExpired, now);
        }
    }

    pub(crate) fn expire_deadline(&mut self, now: UnixMillis) {
        if self.deadline <= now {
            self.resolve_externally(ResolvedReason::DeadlineExceeded, now);
        }
    }

    pub(crate) fn cancel(&mut self, now: UnixMillis) -> Result<(), RunError> {
        if self.deadline < now {
            return Err(RunError::PastDeadline);
        }
        self.resolve_externally(ResolvedReason::Canceled, now);
        Ok(())
    }

    /// Adds a run to a resolved task and restores its retries.
    pub(crate) fn rerun(&mut self, now: UnixMillis) -> Result<(), RunError> {
        if self.deadline < now {
            return Err(RunError::PastDeadline);
        }
        if self.runs.last().is_some_and(|run| !run.state.is_resolved()) {
            return Ok(());
        }
        if self.runs.len() >= QUEUE_RUNS_MAX {
            return Err(RunError::TooManyRuns);
        }
        self.runs.push(RunRecord::pending(CreatedReason::Rerun, now));
        let remaining = QUEUE_RUNS_MAX - self.runs.len();
        self.retries_left = self.retries.min(u8::try_from(remaining).unwrap_or(u8::MAX));
        Ok(())
    }

    /// Resolves a task that may have no run. A resolved task stays as it is.
    fn resolve_externally(&mut self, ending: ResolvedReason, now: UnixMillis) {
        if self.runs.is_empty() {
            self.runs.push(RunRecord::pending(CreatedReason::Exception, now));
        }
        if self.is_open() {
            self.resolve(ending, now);
        }
    }

    fn resolve(&mut self, ending: ResolvedReason, now: UnixMillis) {
        if let Some(run) = self.runs.last_mut() {
            run.state = ending.run_state();
            run.ending = Some(ending);
            run.resolved = Some(now);
        }
        if let Some(origin) = ending.retry_reason().filter(|_| self.retries_left > 0)
            && self.runs.len() < QUEUE_RUNS_MAX
        {
            self.retries_left -= 1;
            self.runs.push(RunRecord::pending(origin, now));
        }
    }
}

#[cfg(test)]
#[path = "task_state_tests.rs"]
mod tests;
