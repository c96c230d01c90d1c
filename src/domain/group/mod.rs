//! Groups of workers that a controller keeps by demand: one for each key that requests come under.
//!
//! [`tracker`] decides which groups are wanted, [`report_throttle`] which reports of workers count, [`pool`] what follows from
//! that for their request queues, [`forwarding`] which request goes on to its queue next, [`queue_polling`] when those are looked into,
//! [`scale`] how many workers each has by its [`load`], [`restart_backoff`] when a worker that did not last is started again, and
//! [`overrides`] what operators have ordered instead. None of them knows how queues and workers come into being.
//!
//! A group that is not needed any more goes in two steps, since a request may come at any time: first its queue is
//! unbound, so that a new request goes to the orphans, where the controller sees it; when nothing was heard of it for a
//! while, its workers are stopped and its queue is deleted, but only if it is empty and nobody consumes from it (I31).

pub mod forwarding;
pub mod load;
pub mod overrides;
pub mod pool;
pub mod queue_polling;
pub mod report_throttle;
pub mod restart_backoff;
pub mod scale;
pub mod tracker;

use alloc::boxed::Box;
use core::fmt;

/// The longest key, in bytes: it is a routing key.
pub const KEY_BYTES_MAX: usize = 255;

/// What requests and the workers for them have in common. Any text; what it means is between client and worker.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Box<str>);

impl Key {
    /// `None` where it is longer than [`KEY_BYTES_MAX`]. An empty key is a key.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        (text.len() <= KEY_BYTES_MAX).then(|| Self(text.into()))
    }

    /// As it was given.
    #[must_use]
    pub const fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// Counts the changes of what is wanted. A later one is never the smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Generation(pub u64);

/// What a group that is there is wanted to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupPhase {
    /// Requests go straight to its queue.
    Active,
    /// New requests go to the orphans; its workers finish what is in the queue.
    Unbound,
}
