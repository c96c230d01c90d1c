//! What a request queue's consumer counts besides claims.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that grows.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn increment(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        #[derive(Debug, Default)]
        pub(super) struct AmqpSourceCounters { $($(#[$doc])* pub(super) $name: Counter),+ }

        impl AmqpSourceCounters {
            /// Every number by its name.
            pub(super) fn read(&self) -> BTreeMap<&'static str, u64> {
                BTreeMap::from([$((stringify!($name), self.$name.0.load(Ordering::Relaxed))),+])
            }
        }
    };
}

counters! {
    /// Connections made.
    connections,
    /// Consumers started.
    consumers_started,
    /// Answers that a queue has taken.
    replies,
    /// Partial answers that a queue has taken.
    partial_replies,
    /// Answers that nobody waited for any more.
    clients_absent,
    /// Answers that the broker refused.
    replies_nacked,
    /// Requests that were acknowledged without an answer, since its queue refused it for too long.
    replies_given_up,
    /// Requests that were given back.
    requeued,
    /// Requests whose channel was gone when they were to be acknowledged.
    acks_failed,
    /// Requests that had been handed out before.
    redelivered,
    /// Copies that note an attempt.
    attempts_recorded,
    /// Requests that were tried too often.
    attempts_exhausted,
    /// Requests whose time was over before they were started.
    expired,
    /// Requests that are too large.
    too_large,
}
