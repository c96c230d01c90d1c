//! The worker's counters, for metrics, the status and the exit line.

use std::fmt;
use std::ops::AddAssign;

use parking_lot::Mutex;

use journeyman_domain::claim::{ClaimEnd, LossReason};
use journeyman_domain::outcome::{ExceptionReason, Outcome};

/// The counters of a running worker.
#[derive(Debug, Default)]
pub struct WorkerCounters(Mutex<WorkerCounts>);

/// The counters at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct WorkerCounts {
    /// The sum of all sources.
    #[serde(flatten)]
    pub sources: SourceCounts,
    /// Claims with a payload that may have overlapped with another worker's.
    pub overlaps_possible: u64,
    /// Claims with processes that may have survived SIGKILL.
    pub cleanup_pending: u64,
    /// Failed deletes of messages, each attempt counted.
    pub deletes_failed: u64,
    pub unreadable_messages: u64,
    /// Messages over the redelivery limit.
    pub dequeue_alerts: u64,
    pub artifacts: u64,
    pub artifacts_failed: u64,
    /// Termination notices.
    pub notices: u64,
    /// Notices by EC2.
    pub notices_aws: u64,
    pub notices_gcp: u64,
    pub notices_azure: u64,
    pub notices_file: u64,
    /// Times the host was found unable to run tasks.
    pub host_faults: u64,
    pub log_bytes: u64,
    pub config_reloads: u64,
    pub config_reloads_rejected: u64,
}

impl WorkerCounters {
    pub(super) fn add(&self, add: impl FnOnce(&mut WorkerCounts)) {
        add(&mut self.0.lock());
    }

    /// Reads all counters.
    pub fn read(&self) -> WorkerCounts {
        *self.0.lock()
    }
}

impl fmt::Display for WorkerCounts {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SourceCounts { claims, outcomes, .. } = self.sources;
        write!(out, "{claims} claims, {outcomes}")?;
        match claims.saturating_sub(outcomes.total()) {
            0 => Ok(()),
            left => write!(out, ", {left} not ended"),
        }
    }
}

/// Counters of one source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct SourceCounts {
    pub polls: u64,
    pub polls_failed: u64,
    /// Refusals of any call but reports and reclaims.
    pub refusals: u64,
    pub claims: u64,
    pub claims_refused: u64,
    pub reclaims: u64,
    pub reclaims_failed: u64,
    #[serde(flatten)]
    pub outcomes: OutcomeCounts,
}

/// Ended claims by result, apart from those that were never granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct OutcomeCounts {
    pub completed: u64,
    pub failed: u64,
    /// Released.
    pub worker_shutdown: u64,
    pub malformed_payload: u64,
    pub resource_unavailable: u64,
    pub internal_error: u64,
    pub intermittent_task: u64,
    /// Not ended: a scheduled message has the work looked at.
    pub deferred: u64,
    /// The task was canceled.
    pub canceled: u64,
    /// Stopped at the task's deadline.
    pub deadline_exceeded: u64,
    /// The queue had an outcome already.
    pub superseded: u64,
    /// Given up after a report without an answer.
    pub unconfirmed: u64,
    /// Given up without a report.
    pub lost: u64,
}

impl OutcomeCounts {
    pub(super) const fn count(&mut self, end: ClaimEnd) {
        *match end {
            ClaimEnd::Reported(Outcome::Completed) => &mut self.completed,
            ClaimEnd::Reported(Outcome::Failed) => &mut self.failed,
            ClaimEnd::Reported(Outcome::Exception(reason)) => match reason {
                ExceptionReason::WorkerShutdown => &mut self.worker_shutdown,
                ExceptionReason::MalformedPayload => &mut self.malformed_payload,
                ExceptionReason::ResourceUnavailable => &mut self.resource_unavailable,
                ExceptionReason::InternalError => &mut self.internal_error,
                ExceptionReason::IntermittentTask => &mut self.intermittent_task,
            },
            ClaimEnd::Reported(Outcome::Deferred) => &mut self.deferred,
            ClaimEnd::AlreadyResolved(_) => &mut self.superseded,
            ClaimEnd::Lost(LossReason::Canceled) => &mut self.canceled,
            ClaimEnd::Lost(LossReason::DeadlineExceeded) => &mut self.deadline_exceeded,
            ClaimEnd::Unconfirmed { .. } => &mut self.unconfirmed,
            ClaimEnd::ReportRejected(_) | ClaimEnd::Lost(_) => &mut self.lost,
            ClaimEnd::NotGranted => return,
        } += 1;
    }

    fn total(&self) -> u64 {
        let others = self.deferred + self.canceled + self.deadline_exceeded + self.superseded + self.unconfirmed;
        self.completed + self.failed + self.exceptions() + self.worker_shutdown + self.lost + others
    }

    /// Reported as an exception other than `worker-shutdown`.
    pub const fn exceptions(&self) -> u64 {
        self.malformed_payload + self.resource_unavailable + self.internal_error + self.intermittent_task
    }
}

impl fmt::Display for OutcomeCounts {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { completed, failed, worker_shutdown, lost, .. } = self;
        let exceptions = self.exceptions();
        write!(
            out,
            "{completed} completed, {failed} failed, {exceptions} exceptions, {worker_shutdown} released, {lost} lost"
        )?;
        for (count, what) in [
            (self.canceled, "canceled"),
            (self.deadline_exceeded, "past their deadline"),
            (self.superseded, "resolved already"),
            (self.unconfirmed, "unconfirmed"),
            (self.deferred, "deferred"),
        ] {
            if count > 0 {
                write!(out, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}

impl AddAssign for OutcomeCounts {
    fn add_assign(&mut self, other: Self) {
        self.completed += other.completed;
        self.failed += other.failed;
        self.worker_shutdown += other.worker_shutdown;
        self.malformed_payload += other.malformed_payload;
        self.resource_unavailable += other.resource_unavailable;
        self.internal_error += other.internal_error;
        self.intermittent_task += other.intermittent_task;
        self.deferred += other.deferred;
        self.canceled += other.canceled;
        self.deadline_exceeded += other.deadline_exceeded;
        self.superseded += other.superseded;
        self.unconfirmed += other.unconfirmed;
        self.lost += other.lost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b11_the_exit_line_accounts_for_every_claim() {
        let mut counts = WorkerCounts::default();
        let ends = [
            ClaimEnd::Reported(Outcome::Completed),
            ClaimEnd::Reported(Outcome::Failed),
            ClaimEnd::Reported(Outcome::Deferred),
            ClaimEnd::Reported(Outcome::Exception(ExceptionReason::WorkerShutdown)),
            ClaimEnd::Reported(Outcome::Exception(ExceptionReason::InternalError)),
            ClaimEnd::Lost(LossReason::Canceled),
            ClaimEnd::Lost(LossReason::DeadlineExceeded),
            ClaimEnd::Lost(LossReason::Revoked),
        ];
        ends.into_iter().for_each(|end| counts.sources.outcomes.count(end));
        counts.sources.claims = 10;
        let line = counts.to_string();
        let sum: u64 = line.split(", ").skip(1).filter_map(|part| part.split(' ').next()?.parse::<u64>().ok()).sum();
        assert_eq!(sum, 10, "{line}");
        assert!(line.contains("1 canceled, 1 past their deadline, 1 deferred, 2 not ended"), "{line}");
    }
}
