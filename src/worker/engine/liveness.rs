//! Liveness signals of a worker for its activity reports. Setting them never blocks.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::status;

/// Liveness signals.
#[derive(Debug, Default)]
pub struct Liveness {
    claiming: AtomicBool,
    claims_received: AtomicU64,
    claims_held: AtomicUsize,
    changed: Notify,
    activity: Mutex<Option<status::ActivityStatus>>,
}

impl Liveness {
    /// True once it has polled: its handlers are loaded, and its queue exists.
    pub fn is_claiming(&self) -> bool {
        self.claiming.load(Ordering::Relaxed)
    }

    /// Claims granted and extended since the start.
    pub fn claims_received(&self) -> u64 {
        self.claims_received.load(Ordering::Relaxed)
    }

    /// Claims held.
    pub fn claims_held(&self) -> usize {
        self.claims_held.load(Ordering::Relaxed)
    }

    /// Resolves after a change. One waiter at a time.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Publishes the state of the activity reports in the status.
    pub fn set_activity(&self, state: &status::ActivityStatus) {
        *self.activity.lock() = Some(state.clone());
    }

    pub(super) fn activity(&self) -> Option<status::ActivityStatus> {
        self.activity.lock().clone()
    }

    pub(super) fn mark_claiming(&self) {
        if !self.claiming.load(Ordering::Relaxed) {
            self.claiming.store(true, Ordering::Relaxed);
            self.changed.notify_one();
        }
    }

    pub(super) fn count_received(&self) {
        self.claims_received.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_one();
    }

    pub(super) fn set_claims_held(&self, held: usize) {
        self.claims_held.store(held, Ordering::Relaxed);
        self.changed.notify_one();
    }
}
