//! A set that keeps the last N values.

use alloc::collections::{BTreeSet, VecDeque};

#[derive(Debug)]
pub(super) struct RecentSet<T> {
    order: VecDeque<T>,
    values: BTreeSet<T>,
    capacity: usize,
}

impl<T: Ord + Clone> RecentSet<T> {
    pub(super) const fn with_capacity(capacity: usize) -> Self {
        Self { order: VecDeque::new(), values: BTreeSet::new(), capacity }
    }

    pub(super) fn contains(&self, value: &T) -> bool {
        self.values.contains(value)
    }

    /// Returns whether the value is new.
    pub(super) fn insert(&mut self, value: &T) -> bool {
        if !self.values.insert(value.clone()) {
            return false;
        }
        self.order.push_back(value.clone());
        if self.order.len() > self.capacity
            && let Some(oldest) = self.order.pop_front()
        {
            self.values.remove(&oldest);
        }
        true
    }

    /// Oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.order.iter()
    }
}
