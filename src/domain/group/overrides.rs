//! Operators' overrides of a pool and its groups: pauses, and other worker limits for a time.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;

use super::Key;
use super::scale::ScaleLimits;
use crate::time::Instant;

/// No worker is started or stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// `None` is until resumed.
    pub until: Option<Instant>,
    /// Operator and reason.
    pub note: Box<str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScaleOverride {
    pub min: Option<u32>,
    pub max: Option<u32>,
    pub until: Instant,
    /// Operator and reason.
    pub note: Box<str>,
}

impl ScaleOverride {
    /// The limits with the override applied. A configured limit yields to an overridden one.
    pub fn apply_to(&self, limits: ScaleLimits) -> ScaleLimits {
        let (mut min, mut max) = (self.min.unwrap_or(limits.min), self.max.unwrap_or(limits.max));
        if min > max && self.max.is_some() {
            min = max;
        }
        max = max.max(min);
        ScaleLimits { min, max, ..limits }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overrides {
    pool_pause: Option<Pause>,
    group_pauses: BTreeMap<Key, Pause>,
    scale: BTreeMap<Key, ScaleOverride>,
}

impl Overrides {
    pub fn pause(&mut self, key: Option<Key>, pause: Pause) {
        match key {
            Some(key) => drop(self.group_pauses.insert(key, pause)),
            None => self.pool_pause = Some(pause),
        }
    }

    /// Resumes; resuming the pool resumes its groups. Returns whether there was a pause.
    pub fn resume(&mut self, key: Option<&Key>) -> bool {
        match key {
            Some(key) => self.group_pauses.remove(key).is_some(),
            None => {
                let groups = core::mem::take(&mut self.group_pauses);
                self.pool_pause.take().is_some() || !groups.is_empty()
            }
        }
    }

    pub fn scale(&mut self, key: Key, numbers: ScaleOverride) {
        self.scale.insert(key, numbers);
    }

    /// Returns whether there was an override.
    pub fn clear_scale(&mut self, key: &Key) -> bool {
        self.scale.remove(key).is_some()
    }

    pub fn expire(&mut self, now: Instant) {
        let stands = |pause: &Pause| pause.until.is_none_or(|until| now < until);
        self.pool_pause = self.pool_pause.take().filter(stands);
        self.group_pauses.retain(|_, pause| stands(pause));
        self.scale.retain(|_, numbers| now < numbers.until);
    }

    pub const fn pool_pause(&self) -> Option<&Pause> {
        self.pool_pause.as_ref()
    }

    /// The group's own pause, or that of its pool.
    pub fn pause_of(&self, key: &Key) -> Option<&Pause> {
        self.group_pauses.get(key).or(self.pool_pause.as_ref())
    }

    pub fn scale_of(&self, key: &Key) -> Option<&ScaleOverride> {
        self.scale.get(key)
    }

    /// Groups that an override wants workers of.
    pub fn keys_with_minimum(&self) -> impl Iterator<Item = &Key> {
        self.scale.iter().filter(|(_, numbers)| numbers.min.is_some_and(|min| min > 0)).map(|(key, _)| key)
    }

    pub fn count(&self) -> usize {
        self.group_pauses.len() + self.scale.len()
    }
}

#[cfg(test)]
mod tests {
    use core::time::Duration;

    use super::*;

    const LIMITS: ScaleLimits =
        ScaleLimits { min: 1, max: 4, min_idle: 0, concurrency: 1, scale_down_delay: Duration::from_secs(60) };

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    fn pause(until: Option<u64>) -> Pause {
        Pause { until: until.map(at), note: "ana".into() }
    }

    fn numbers(min: Option<u32>, max: Option<u32>) -> ScaleOverride {
        ScaleOverride { min, max, until: at(10), note: "ana".into() }
    }

    #[test]
    fn a_pause_ends_by_itself_where_it_has_a_time_and_by_word_otherwise() {
        let mut orders = Overrides::default();
        orders.pause(Some(key("a")), pause(Some(10)));
        orders.pause(None, pause(None));
        assert!(orders.pause_of(&key("a")).is_some() && orders.pause_of(&key("b")).is_some());
        orders.expire(at(10));
        assert_eq!(orders.count(), 0);
        assert!(orders.resume(None), "that of the pool stands");
        assert!(orders.pause_of(&key("a")).is_none() && !orders.resume(None));
    }

    #[test]
    fn a_pool_that_is_resumed_is_resumed_with_all_its_groups_and_a_group_for_itself() {
        let mut orders = Overrides::default();
        orders.pause(Some(key("a")), pause(None));
        orders.pause(Some(key("b")), pause(None));
        assert!(orders.resume(Some(&key("a"))) && !orders.resume(Some(&key("a"))));
        assert!(orders.pause_of(&key("a")).is_none() && orders.pause_of(&key("b")).is_some());
        assert!(orders.resume(None));
        assert!(orders.pause_of(&key("b")).is_none());
    }

    #[test]
    fn the_number_that_nobody_ordered_gives_way() {
        let over = |min, max| {
            let limits = numbers(min, max).apply_to(LIMITS);
            (limits.min, limits.max)
        };
        assert_eq!(over(Some(6), None), (6, 6));
        assert_eq!(over(None, Some(0)), (0, 0));
        assert_eq!(over(Some(2), Some(9)), (2, 9));
        assert_eq!(over(None, None), (1, 4));
    }

    #[test]
    fn a_group_that_workers_were_ordered_for_is_kept_until_the_time_is_over() {
        let mut orders = Overrides::default();
        orders.scale(key("a"), numbers(Some(2), None));
        orders.scale(key("b"), numbers(Some(0), None));
        assert_eq!(orders.keys_with_minimum().collect::<Vec<_>>(), [&key("a")]);
        orders.expire(at(9));
        assert_eq!(orders.count(), 2);
        orders.expire(at(10));
        assert_eq!((orders.count(), orders.keys_with_minimum().count()), (0, 0));
    }
}
