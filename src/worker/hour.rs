//! What became of the claims of the last hour, minute by minute.

use std::collections::VecDeque;
use std::time::Duration;

use crate::domain::time::Instant;

use super::view::Outcomes;

const MINUTE: Duration = Duration::from_secs(60);
const MINUTES: u64 = 60;

/// One minute's outcomes.
#[derive(Debug)]
struct Minute {
    number: u64,
    outcomes: Outcomes,
}

/// The last hour. Holds one entry for each minute in which something ended.
#[derive(Debug, Default)]
pub(super) struct Hour(VecDeque<Minute>);

impl Hour {
    /// Counts something that ended now.
    pub(super) fn count(&mut self, now: Instant, count: impl FnOnce(&mut Outcomes)) {
        let number = minute(now);
        self.forget(number);
        match self.0.back_mut() {
            Some(last) if last.number == number => count(&mut last.outcomes),
            _ => {
                let mut outcomes = Outcomes::default();
                count(&mut outcomes);
                self.0.push_back(Minute { number, outcomes });
            }
        }
    }

    /// The sum.
    pub(super) fn sum(&mut self, now: Instant) -> Outcomes {
        self.forget(minute(now));
        self.0.iter().fold(Outcomes::default(), |sum, minute| {
            let one = minute.outcomes;
            Outcomes {
                completed: sum.completed + one.completed,
                failed: sum.failed + one.failed,
                exceptions: sum.exceptions + one.exceptions,
                handed_back: sum.handed_back + one.handed_back,
                superseded: sum.superseded + one.superseded,
                lost: sum.lost + one.lost,
            }
        })
    }

    fn forget(&mut self, number: u64) {
        while self.0.front().is_some_and(|minute| minute.number + MINUTES <= number) {
            self.0.pop_front();
        }
    }
}

fn minute(now: Instant) -> u64 {
    now.since_origin().as_secs() / MINUTE.as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_an_hour_no_longer_counts() {
        let at = |minutes: u64| Instant::at(MINUTE * u32::try_from(minutes).unwrap());
        let mut hour = Hour::default();
        for minutes in 0..90 {
            hour.count(at(minutes), |outcomes| outcomes.completed += 1);
        }
        assert_eq!(hour.sum(at(89)).completed, 60);
        assert_eq!(hour.sum(at(120)).completed, 29);
        assert_eq!(hour.sum(at(149)), Outcomes::default());
        assert!(hour.0.is_empty());
    }
}
