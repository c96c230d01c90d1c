//! Outcomes of the last hour, by minute.

use std::collections::VecDeque;
use std::time::Duration;

use journeyman_domain::claim::ClaimEnd;
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
}
