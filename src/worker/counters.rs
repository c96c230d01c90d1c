//! The worker's counters, for metrics, the status and the exit line.

use std::fmt;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::domain::claim::{ClaimEnd, LossReason};
use crate::domain::outcome::{ExceptionReason, Outcome};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        #[derive(Debug, Default)]
        pub struct WorkerCounters {
            /// The sum of all sources.
            pub(super) sources: Mutex<SourceCounts>,
            $($(#[$doc])* pub(super) $name: AtomicU64),+
        }

        /// The counters at one moment.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
        pub struct WorkerCounts {
            pub polls: u64,
            pub polls_failed: u64,
            pub claims: u64,
            pub claims_refused: u64,
            pub reclaims: u64,
            pub reclaims_failed: u64,
            #[serde(flatten)]
            pub outcomes: OutcomeCounts,
            $($(#[$doc])* pub $name: u64),+
        }

        impl WorkerCounters {
            /// Reads all counters.
            #[must_use]
            pub fn read(&self) -> WorkerCounts {
                let sources = *self.sources.lock();
                WorkerCounts {
                    polls: sources.polls + sources.polls_failed,
                    polls_failed: sources.polls_failed,
                    claims: sources.claims,
                    claims_refused: sources.claims_refused,
                    reclaims: sources.reclaims,
                    reclaims_failed: sources.reclaims_failed,
                    outcomes: sources.ends.into(),
                    $($name: self.$name.load(Ordering::Relaxed)),+
                }
            }
        }
    };
}

impl fmt::Display for WorkerCounts {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { claims, outcomes, .. } = self;
        let OutcomeCounts { completed, failed, exceptions, released, lost, .. } = outcomes;
        write!(
            out,
            "{claims} claims, {completed} completed, {failed} failed, {exceptions} exceptions, {released} released, {lost} lost"
        )
    }
}

counters! {
    /// Claims whose payload may have overlapped with another worker's.
    overlaps_possible,
    /// Claims whose processes may have survived SIGKILL.
    cleanup_pending,
    /// Failed deletes of messages, each attempt counted.
    deletes_failed,
    unreadable_messages,
    /// Messages over the redelivery limit.
    dequeue_alerts,
    artifacts,
    artifacts_failed,
    /// Termination notices.
    notices,
    /// Notices by EC2.
    notices_aws,
    notices_gcp,
    notices_azure,
    notices_file,
    /// Times the host was found unable to run tasks.
    host_faults,
    /// Panics of handlers and adapters.
    panics,
    log_bytes,
    config_reloads,
    config_reloads_rejected,
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
    pub ends: ClaimEndCounts,
}

/// Ended claims by result, apart from those that were never granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct ClaimEndCounts {
    pub completed: u64,
    pub failed: u64,
    pub worker_shutdown: u64,
    pub malformed_payload: u64,
    pub resource_unavailable: u64,
    pub internal_error: u64,
    pub intermittent_task: u64,
    /// The queue had an outcome already.
    pub superseded: u64,
    /// Given up after a report without an answer.
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

/// Ended claims by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct OutcomeCounts {
    pub completed: u64,
    pub failed: u64,
    /// Reported as an exception other than `worker-shutdown`.
    pub exceptions: u64,
    /// Reported as `worker-shutdown`.
    pub released: u64,
    /// Canceled, or resolved elsewhere.
    #[serde(default)]
    pub superseded: u64,
    /// Given up after a report without an answer.
    #[serde(default)]
    pub unconfirmed: u64,
    /// Ended without a report accepted by the queue.
    pub lost: u64,
}

impl OutcomeCounts {
    pub(super) fn of(end: ClaimEnd) -> Self {
        let mut ends = ClaimEndCounts::default();
        ends.count(end);
        ends.into()
    }
}

impl From<ClaimEndCounts> for OutcomeCounts {
    fn from(ends: ClaimEndCounts) -> Self {
        Self {
            completed: ends.completed,
            failed: ends.failed,
            exceptions: ends.malformed_payload
                + ends.resource_unavailable
                + ends.internal_error
                + ends.intermittent_task,
            released: ends.worker_shutdown,
            superseded: ends.superseded,
            unconfirmed: ends.unconfirmed,
            lost: ends.lost,
        }
    }
}

impl AddAssign for OutcomeCounts {
    fn add_assign(&mut self, other: Self) {
        self.completed += other.completed;
        self.failed += other.failed;
        self.exceptions += other.exceptions;
        self.released += other.released;
        self.superseded += other.superseded;
        self.unconfirmed += other.unconfirmed;
        self.lost += other.lost;
    }
}

pub(super) fn count(counter: &AtomicU64) {
    add(counter, 1);
}

pub(super) fn add(counter: &AtomicU64, many: u64) {
    counter.fetch_add(many, Ordering::Relaxed);
}
