//! What is counted where several hands count.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that rises, and may fall again.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn take(&self) {
        // It may have been cleared before what was under way had heard of that.
        let less = |count: u64| Some(count.saturating_sub(1));
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok();
    }

    pub(super) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counts of one pool.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// Orphans that this connection brought and that are still in hand.
    pub(super) orphans: Count,
    pub(super) forwarded: Count,
    pub(super) dead_letters: Count,
    pub(super) poison: Count,
    pub(super) steps: Count,
    pub(super) steps_failed: Count,
    pub(super) reports: Count,
    pub(super) started: Count,
    pub(super) failed: Count,
    pub(super) losses: Count,
}
