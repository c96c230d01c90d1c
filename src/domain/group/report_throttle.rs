//! Limits how many reports of workers reach the tracker. A busy key is reported thousands of times a second.
//!
//! The first report of a key counts at once, for [`ADMIT_INTERVAL`] longer than usual; those within that time add
//! nothing. So a dropped report takes no time from its group.

use alloc::collections::BTreeMap;
use core::time::Duration;

use super::Key;
use crate::domain::time::Instant;

pub const ADMIT_INTERVAL: Duration = Duration::from_secs(1);

/// Reports of further keys are all admitted.
pub const KEYS_MAX: usize = 10_000;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReportThrottle {
    last_admitted: BTreeMap<Key, Instant>,
    pruned_at: Option<Instant>,
}

impl ReportThrottle {
    /// Returns for how much longer than usual an admitted report counts.
    pub fn admit(&mut self, key: &Key, now: Instant) -> Option<Duration> {
        if let Some(at) = self.last_admitted.get_mut(key) {
            if now < at.plus(ADMIT_INTERVAL) {
                return None;
            }
            *at = now;
            return Some(ADMIT_INTERVAL);
        }
        if self.last_admitted.len() >= KEYS_MAX {
            self.prune(now);
        }
        if self.last_admitted.len() < KEYS_MAX {
            self.last_admitted.insert(key.clone(), now);
        }
        Some(ADMIT_INTERVAL)
    }

    fn prune(&mut self, now: Instant) {
        // It visits all of them.
        if self.pruned_at.is_none_or(|at| now >= at.plus(ADMIT_INTERVAL)) {
            self.last_admitted.retain(|_, at| now < at.plus(ADMIT_INTERVAL));
            self.pruned_at = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::GroupPhase;
    use super::super::tracker::{Tracker, TrackerPolicy};
    use super::*;
    use crate::domain::jitter::Jitter;

    const POLICY: TrackerPolicy =
        TrackerPolicy { unbind_delay: Duration::from_secs(5), stop_delay: Duration::from_secs(5) };

    fn at(millis: u64) -> Instant {
        Instant::at(Duration::from_millis(millis))
    }

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    #[test]
    fn b07_work_that_is_slow_and_steady_keeps_its_group() {
        let (mut reports, mut tracker, key) = (ReportThrottle::default(), Tracker::new(POLICY, [], at(0)), key("a"));
        for second in (0..600).step_by(2) {
            let now = at(second * 1_000);
            tracker.tick(now);
            let extra = reports.admit(&key, now).expect("each of them is heard");
            tracker.on_demand(key.clone(), extra, now);
            assert_eq!(tracker.desired(&key).unwrap().phase, GroupPhase::Active, "after {second} s");
        }
        assert_eq!(tracker.generation().0, 1, "it was never anything else");
    }

    #[test]
    fn b07_a_flood_of_reports_is_heard_once_a_second() {
        let mut reports = ReportThrottle::default();
        let heard = (0..100_000).filter(|number| reports.admit(&key("a"), at(number / 10)).is_some()).count();
        assert_eq!(heard, 10, "of 100,000 in ten seconds");
        assert!(reports.admit(&key("b"), at(9_999)).is_some(), "no key waits for another");
    }

    #[test]
    fn b07_a_report_that_is_not_heard_takes_no_time_away() {
        let mut jitter = Jitter::seeded(7);
        let (mut reports, mut tracker, key) = (ReportThrottle::default(), Tracker::new(POLICY, [], at(0)), key("a"));
        let mut now = at(0);
        for _ in 0..10_000 {
            now = now.plus(jitter.below(Duration::from_millis(1_500)));
            if let Some(extra) = reports.admit(&key, now) {
                tracker.on_demand(key.clone(), extra, now);
            }
            assert!(tracker.desired(&key).unwrap().until >= now.plus(POLICY.unbind_delay));
        }
    }

    #[test]
    fn more_keys_than_are_remembered_are_all_heard_and_take_no_more_room() {
        let mut reports = ReportThrottle::default();
        for number in 0..KEYS_MAX * 2 {
            assert_eq!(reports.admit(&key(&alloc::format!("k{number}")), at(0)), Some(ADMIT_INTERVAL));
        }
        assert_eq!(reports.last_admitted.len(), KEYS_MAX);
        assert_eq!(reports.admit(&key("k0"), at(500)), None);
        assert_eq!(reports.admit(&key("new"), at(2_000)), Some(ADMIT_INTERVAL));
        assert_eq!(reports.last_admitted.len(), 1, "the others count no more");
    }
}
