//! What a worker leaves for those who tell others that it is alive. Leaving it costs nothing and waits for nobody.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

use super::status;

/// Signs of life.
#[derive(Debug, Default)]
pub struct Liveness {
    claiming: AtomicBool,
    claims_received: AtomicU64,
    claims_held: AtomicUsize,
    changed: Notify,
    activity: Mutex<Option<status::ActivityStatus>>,
}

impl Liveness {
    /// Whether it has begun to ask for claims: what it has to load is loaded, and its queue is there.
    #[must_use]
    pub fn is_claiming(&self) -> bool {
        self.claiming.load(Ordering::Relaxed)
    }

    /// Claims granted and extended since the start.
    #[must_use]
    pub fn claims_received(&self) -> u64 {
        self.claims_received.load(Ordering::Relaxed)
    }

    /// Claims that are held.
    #[must_use]
    pub fn claims_held(&self) -> usize {
        self.claims_held.load(Ordering::Relaxed)
    }

    /// Resolves when something has changed since the last time. One waits at a time.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Says what becomes of the reports, for those who look at the worker.
    pub fn set_activity(&self, state: &status::ActivityStatus) {
        *self.activity.lock().unwrap_or_else(PoisonError::into_inner) = Some(state.clone());
    }

    pub(super) fn activity(&self) -> Option<status::ActivityStatus> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A source is asked for claims.
    pub(super) fn mark_claiming(&self) {
        if !self.claiming.load(Ordering::Relaxed) {
            self.claiming.store(true, Ordering::Relaxed);
            self.changed.notify_one();
        }
    }

    /// A claim was granted or extended.
    pub(super) fn count_received(&self) {
        self.claims_received.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_one();
    }

    pub(super) fn set_claims_held(&self, held: usize) {
        self.claims_held.store(held, Ordering::Relaxed);
        self.changed.notify_one();
    }
}
