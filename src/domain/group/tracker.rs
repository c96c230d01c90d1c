//! Decides which groups are wanted, and in which phase, from demand and time alone.

use alloc::collections::BTreeMap;
use core::time::Duration;

use super::{GroupPhase, Key};
use crate::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TrackerPolicy {
    /// The time from the last demand until its queue is unbound.
    pub unbind_delay: Duration,
    /// The time from then until the group is removed.
    pub stop_delay: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DesiredGroup {
    pub phase: GroupPhase,
    /// The time at which the next phase follows without further demand.
    pub until: Instant,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Tracker {
    policy: TrackerPolicy,
    changes: u64,
    groups: BTreeMap<Key, DesiredGroup>,
}

impl Tracker {
    pub const fn new(policy: TrackerPolicy) -> Self {
        Self { policy, changes: 0, groups: BTreeMap::new() }
    }

    /// The group is active for `extra` longer than the policy says. A caller that sees demand only at intervals passes
    /// the interval as `extra`.
    pub fn on_demand(&mut self, key: Key, extra: Duration, now: Instant) {
        let until = now.plus(self.policy.unbind_delay.saturating_add(extra));
        match self.groups.get_mut(&key) {
            Some(wanted) if wanted.phase == GroupPhase::Active => {
                wanted.until = wanted.until.max(until);
            }
            Some(_) | None => {
                self.changes += 1;
                self.groups.insert(key, DesiredGroup { phase: GroupPhase::Active, until });
            }
        }
    }

    /// Moves each group whose time is over to its next phase. The phase after counts from `now`, so that a late tick
    /// never shortens the time a queue is unbound.
    pub fn tick(&mut self, now: Instant) {
        let stop_at = now.plus(self.policy.stop_delay);
        self.groups.retain(|_, wanted| {
            if now < wanted.until {
                return true;
            }
            self.changes += 1;
            match wanted.phase {
                GroupPhase::Active => {
                    *wanted = DesiredGroup { phase: GroupPhase::Unbound, until: stop_at };
                    true
                }
                GroupPhase::Unbound => false,
            }
        });
    }

    /// Delays that have begun keep their old length.
    pub const fn reconfigure(&mut self, policy: TrackerPolicy) {
        self.policy = policy;
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.groups.values().map(|wanted| wanted.until).min()
    }

    /// How often the phase of a group has changed.
    pub const fn changes(&self) -> u64 {
        self.changes
    }

    pub fn desired(&self, key: &Key) -> Option<DesiredGroup> {
        self.groups.get(key).copied()
    }

    pub fn groups(&self) -> impl Iterator<Item = (&Key, DesiredGroup)> {
        self.groups.iter().map(|(key, wanted)| (key, *wanted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: TrackerPolicy =
        TrackerPolicy { unbind_delay: Duration::from_secs(10), stop_delay: Duration::from_secs(5) };

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    fn phase(tracker: &Tracker, text: &str) -> Option<GroupPhase> {
        tracker.desired(&key(text)).map(|wanted| wanted.phase)
    }

    #[test]
    fn a_group_without_demand_is_unbound_and_then_removed() {
        let mut tracker = Tracker::new(POLICY);
        tracker.on_demand(key("a"), Duration::ZERO, at(0));
        for (second, changes, expected) in [
            (9, 1, Some(GroupPhase::Active)),
            (10, 2, Some(GroupPhase::Unbound)),
            (14, 2, Some(GroupPhase::Unbound)),
            (15, 3, None),
        ] {
            tracker.tick(at(second));
            assert_eq!((tracker.changes(), phase(&tracker, "a")), (changes, expected), "after {second} s");
        }
        assert_eq!(tracker.next_deadline(), None);
    }

    #[test]
    fn demand_makes_an_unbound_group_active_again() {
        let mut tracker = Tracker::new(POLICY);
        tracker.on_demand(key("a"), Duration::ZERO, at(0));
        tracker.tick(at(10));
        tracker.on_demand(key("a"), Duration::ZERO, at(12));
        assert_eq!((tracker.changes(), phase(&tracker, "a")), (3, Some(GroupPhase::Active)));
        assert_eq!(tracker.desired(&key("a")).unwrap().until, at(22));
    }

    #[test]
    fn slow_steady_demand_keeps_a_group_active_without_a_change() {
        let mut tracker = Tracker::new(POLICY);
        for second in 0..1_000 {
            tracker.tick(at(second * 9));
            tracker.on_demand(key("a"), Duration::ZERO, at(second * 9));
        }
        assert_eq!(tracker.changes(), 1);
    }

    #[test]
    fn a_shorter_demand_never_takes_time_away() {
        let mut tracker = Tracker::new(POLICY);
        tracker.on_demand(key("a"), Duration::from_secs(60), at(0));
        tracker.on_demand(key("a"), Duration::ZERO, at(1));
        assert_eq!(tracker.desired(&key("a")).unwrap().until, at(70));
    }

    #[test]
    fn a_late_tick_does_not_shorten_the_time_in_which_a_queue_is_unbound() {
        let mut tracker = Tracker::new(POLICY);
        tracker.on_demand(key("a"), Duration::ZERO, at(0));
        tracker.tick(at(1_000));
        assert_eq!(phase(&tracker, "a"), Some(GroupPhase::Unbound));
        assert_eq!(tracker.next_deadline(), Some(at(1_005)));
    }
}
