//! Counters of a pool.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(super) struct AtomicCount(AtomicU64);

impl AtomicCount {
    pub(super) fn increment(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn decrement(&self) {
        // It may have been reset while a task still held one.
        let less = |count: u64| Some(count.saturating_sub(1));
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok();
    }

    pub(super) fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
pub(super) struct PoolCounters {
    pub(super) orphans: AtomicCount,
    pub(super) forwarded: AtomicCount,
    pub(super) dead_letters: AtomicCount,
    pub(super) poison_requests: AtomicCount,
    pub(super) queue_operations: AtomicCount,
    pub(super) queue_operation_failures: AtomicCount,
    pub(super) activity_reports: AtomicCount,
    pub(super) workers_started: AtomicCount,
    pub(super) workers_failed: AtomicCount,
    pub(super) broker_disconnects: AtomicCount,
}
