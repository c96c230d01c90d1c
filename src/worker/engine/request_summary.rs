//! The requests that ended, as one line of the log a second: they may be thousands.

use journeyman_domain::claim::ClaimEnd;
use journeyman_domain::limits::REQUEST_SUMMARY_INTERVAL;
use journeyman_domain::time::Instant;

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
        self.due.get_or_insert_with(|| now.plus(REQUEST_SUMMARY_INTERVAL));
    }

    pub(super) fn log(&mut self) {
        if self.due.take().is_some() {
            let outcomes = std::mem::take(&mut self.outcomes);
            let OutcomeCounts { completed, failed, worker_shutdown: released, lost, deferred, .. } = outcomes;
            let exceptions = outcomes.exceptions();
            tracing::info!(
                completed,
                failed,
                exceptions,
                released,
                lost,
                deferred,
                "requests ended: {completed} completed, {failed} failed, {exceptions} exceptions, {released} released, {lost} lost; {deferred} deferred"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use journeyman_domain::outcome::Outcome;

    #[test]
    fn c1_requests_that_ended_are_logged_a_second_after_the_first_of_them() {
        let at = |millis| Instant::at(std::time::Duration::from_millis(millis));
        let mut summary = RequestSummary::default();
        summary.count(ClaimEnd::Reported(Outcome::Completed), at(0));
        summary.count(ClaimEnd::Reported(Outcome::Failed), at(900));
        assert_eq!((summary.due, summary.outcomes.completed, summary.outcomes.failed), (Some(at(1000)), 1, 1));
        summary.log();
        assert_eq!((summary.due, summary.outcomes), (None, OutcomeCounts::default()));
    }
}
