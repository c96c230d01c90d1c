//! A set that keeps the last N values.

use alloc::collections::{BTreeSet, VecDeque};

#[derive(Debug)]
pub(crate) struct RecentSet<T> {
    order: VecDeque<T>,
    values: BTreeSet<T>,
    capacity: usize,
}

impl<T: Ord + Clone> RecentSet<T> {
    pub(crate) const fn with_capacity(capacity: usize) -> Self {
        Self { order: VecDeque::new(), values: BTreeSet::new(), capacity }
    }

    pub(crate) fn contains(&self, value: &T) -> bool {
        self.values.contains(value)
    }

    /// Returns whether the value is new.
    pub(crate) fn insert(&mut self, value: &T) -> bool {
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
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.order.iter()
    }
}
