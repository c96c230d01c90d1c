//! Groups of workers that a controller scales by demand: one for each key of requests.
//!
//! [`tracker`] decides which groups are wanted, [`pool`] the steps for their request queues, [`scale`] how many workers
//! each group has by its [`load`], [`restart_backoff`] when a failed worker is started again, and [`overrides`] holds
//! operators' overrides.
//!
//! An unneeded group is removed in two steps, since a request may arrive at any time: first its queue is unbound, so
//! that a new request reaches the orphans, where the controller sees it; after a quiet delay its workers are stopped
//! and its queue is deleted, if it is empty and without consumers (I31).

pub mod load;
pub mod overrides;
pub mod pool;
pub mod restart_backoff;
pub mod scale;
pub mod tracker;

use alloc::boxed::Box;
use core::fmt;

/// A routing key of AMQP.
pub const KEY_BYTES_MAX: usize = 255;

/// What requests and their workers have in common. Any text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Box<str>);

impl Key {
    /// `None` if longer than [`KEY_BYTES_MAX`]. An empty key is valid.
    pub fn new(text: &str) -> Option<Self> {
        (text.len() <= KEY_BYTES_MAX).then(|| Self(text.into()))
    }

    pub const fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupPhase {
    /// Its queue is bound.
    Active,
    /// New requests go to the orphans; its workers finish what is in the queue.
    Unbound,
}
