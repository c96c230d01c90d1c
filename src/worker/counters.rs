//! What the worker counts, for metrics, tests and the line it says at its end.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::domain::claim::{ClaimEnd, LossReason};
use crate::domain::outcome::{ExceptionReason, Outcome};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Counters since the start. Cheap to read at any time.
        #[derive(Debug, Default)]
        pub struct WorkerCounters { $($(#[$doc])* pub(super) $name: AtomicU64),+ }

        /// The counters at one moment.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
        pub struct WorkerCounts { $($(#[$doc])* pub $name: u64),+ }

        impl WorkerCounters {
            /// Reads them all.
            #[must_use]
            pub fn read(&self) -> WorkerCounts {
                WorkerCounts { $($name: self.$name.load(Ordering::Relaxed)),+ }
            }
        }
    };
}

impl fmt::Display for WorkerCounts {
    /// What became of its claims, in words.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { claims, completed, failed, exceptions, released, lost, .. } = self;
        write!(
            out,
            "{claims} claims, {completed} completed, {failed} failed, {exceptions} exceptions, {released} released, {lost} lost"
        )
    }
}

counters! {
    /// Polls sent.
    polls,
    /// Polls that were refused or failed.
    polls_failed,
    /// Claims granted.
    claims,
    /// Claim requests that were refused or failed.
    claims_refused,
    /// Extensions granted.
    reclaims,
    /// Extensions refused or failed.
    reclaims_failed,
    /// Runs reported completed.
    completed,
    /// Runs reported failed.
    failed,
    /// Runs reported as an exception other than `worker-shutdown`.
    exceptions,
    /// Runs handed back as `worker-shutdown`.
    released,
    /// Runs that the queue had resolved before our report, such as by a cancel.
    superseded,
    /// Claims given up after a report that was not answered.
    unconfirmed,
    /// Claims given up without a report.
    lost,
    /// Claims whose payload may have run beside another worker's.
    overlaps_possible,
    /// Claims whose payload could not be proven gone.
    cleanup_pending,
    /// Deletes of messages that failed, every attempt counted.
    deletes_failed,
    /// Messages that could not be read.
    unreadable_messages,
    /// Messages that were received too often.
    dequeue_alerts,
    /// Artifacts stored, the log included.
    artifacts,
    /// Artifacts that could not be stored.
    artifacts_failed,
    /// Notices that the host goes.
    notices,
    /// Notices by EC2.
    notices_aws,
    /// Notices by Compute Engine.
    notices_gcp,
    /// Notices by Azure.
    notices_azure,
    /// Notices by a file.
    notices_file,
    /// Times the host was found unable to run tasks.
    host_faults,
    /// Panics of handlers and adapters.
    panics,
    /// Bytes of the logs of ended tasks.
    log_bytes,
    /// Configurations read again and taken over.
    config_reloads,
    /// Configurations read again and refused.
    config_reloads_rejected,
}

/// What is counted of one source. There are as many of these as there are sources in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct SourceCounts {
    /// Polls answered.
    pub polls: u64,
    /// Polls that were refused or failed.
    pub polls_failed: u64,
    /// Refusals of any call but reports and reclaims.
    pub refusals: u64,
    /// Claims granted.
    pub claims: u64,
    /// Claim requests that were refused or failed.
    pub claims_refused: u64,
    /// Extensions granted.
    pub reclaims: u64,
    /// Extensions refused or failed.
    pub reclaims_failed: u64,
    /// What became of its claims.
    pub ends: ClaimEndCounts,
}

/// What became of claims, apart from those that were never granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct ClaimEndCounts {
    /// Reported completed.
    pub completed: u64,
    /// Reported failed.
    pub failed: u64,
    /// Handed back.
    pub worker_shutdown: u64,
    /// Reported as an exception of that reason.
    pub malformed_payload: u64,
    /// Reported as an exception of that reason.
    pub resource_unavailable: u64,
    /// Reported as an exception of that reason.
    pub internal_error: u64,
    /// Reported as an exception of that reason.
    pub intermittent_task: u64,
    /// The queue had an outcome already.
    pub superseded: u64,
    /// Given up after a report that was not answered.
    pub unconfirmed: u64,
    /// Given up without a report.
    pub lost: u64,
}

impl ClaimEndCounts {
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
            ClaimEnd::AlreadyResolved(_) | ClaimEnd::Lost(LossReason::Canceled) => &mut self.superseded,
            ClaimEnd::Unconfirmed { .. } => &mut self.unconfirmed,
            ClaimEnd::ReportRejected(_) | ClaimEnd::Lost(_) => &mut self.lost,
            ClaimEnd::NotGranted => return,
        } += 1;
    }
}

pub(super) fn count(counter: &AtomicU64) {
    add(counter, 1);
}

pub(super) fn add(counter: &AtomicU64, many: u64) {
    counter.fetch_add(many, Ordering::Relaxed);
}
