//! Outcomes of the last hour, by minute, and those of requests, as one line of the log a second.

use std::collections::VecDeque;
use std::time::Duration;

use journeyman_domain::claim::ClaimEnd;
use journeyman_domain::limits::REQUEST_SUMMARY_INTERVAL;
use journeyman_domain::time::Instant;

use super::counters::OutcomeCounts;

const MINUTE: Duration = Duration::from_secs(60);
const WINDOW_MINUTES: u64 = 60;

#[derive(Debug)]
struct MinuteCounts {
    number: u64,
    outcomes: OutcomeCounts,
}

/// One entry for each minute in which a claim ended.
#[derive(Debug, Default)]
pub(super) struct RecentOutcomes(VecDeque<MinuteCounts>);

impl RecentOutcomes {
    pub(super) fn count(&mut self, now: Instant, end: ClaimEnd) {
        let number = minute_number(now);
        self.expire(number);
        if self.0.back().is_none_or(|last| last.number != number) {
            self.0.push_back(MinuteCounts { number, outcomes: OutcomeCounts::default() });
        }
        if let Some(last) = self.0.back_mut() {
            last.outcomes.count(end);
        }
    }

    pub(super) fn sum(&mut self, now: Instant) -> OutcomeCounts {
        self.expire(minute_number(now));
        let mut sum = OutcomeCounts::default();
        self.0.iter().for_each(|minute| sum += minute.outcomes);
        sum
    }

    fn expire(&mut self, number: u64) {
        while self.0.front().is_some_and(|minute| minute.number + WINDOW_MINUTES <= number) {
            self.0.pop_front();
        }
    }
}

fn minute_number(now: Instant) -> u64 {
    now.since_origin().as_secs() / MINUTE.as_secs()
}

/// The requests that have ended since the last line: they may be thousands.
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
            tracing::info!(completed, failed, exceptions, released, lost, deferred, "requests ended: {outcomes}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use journeyman_domain::outcome::Outcome;

    #[test]
    fn outcomes_older_than_an_hour_do_not_count() {
        let at = |minutes: u64| Instant::at(MINUTE * u32::try_from(minutes).unwrap());
        let mut hour = RecentOutcomes::default();
        for minutes in 0..90 {
            hour.count(at(minutes), ClaimEnd::Reported(Outcome::Completed));
        }
        assert_eq!(hour.sum(at(89)).completed, 60);
        assert_eq!(hour.sum(at(120)).completed, 29);
        assert_eq!(hour.sum(at(149)), OutcomeCounts::default());
        assert!(hour.0.is_empty());
    }

    #[test]
    fn c1_requests_that_ended_are_logged_a_second_after_the_first_of_them() {
        let at = |millis| Instant::at(Duration::from_millis(millis));
        let mut summary = RequestSummary::default();
        summary.count(ClaimEnd::Reported(Outcome::Completed), at(0));
        summary.count(ClaimEnd::Reported(Outcome::Failed), at(900));
        assert_eq!((summary.due, summary.outcomes.completed, summary.outcomes.failed), (Some(at(1000)), 1, 1));
        summary.log();
        assert_eq!((summary.due, summary.outcomes), (None, OutcomeCounts::default()));
    }
}
