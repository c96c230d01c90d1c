//! The requests that ended, as one line of the log a second: they may be thousands.

use crate::domain::claim::ClaimEnd;
use crate::domain::time::Instant;
use crate::limits::REQUEST_SUMMARY_INTERVAL;

use super::counters::OutcomeCounts;

#[derive(Debug, Default)]
pub(super) struct RequestSummary {
    outcomes: OutcomeCounts,
    /// `None` if no request has ended since the last line.
    pub(super) due: Option<Instant>,
}

impl RequestSummary {
    pub(super) fn count(&mut self, end: ClaimEnd, now: Instant) {
        self.outcomes.count(end);
        self.due.get_or_insert(now.plus(REQUEST_SUMMARY_INTERVAL));
    }

    pub(super) fn log(&mut self) {
        if self.due.take().is_some() {
            let outcomes = std::mem::take(&mut self.outcomes);
            let OutcomeCounts { completed, failed, worker_shutdown: released, lost, .. } = outcomes;
            let exceptions = outcomes.exceptions();
            tracing::info!(
                completed,
                failed,
                exceptions,
                released,
                lost,
                "requests ended: {completed} completed, {failed} failed, {exceptions} exceptions, {released} released, {lost} lost"
            );
        }
    }
}
