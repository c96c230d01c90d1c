//! Counters of a request source besides its claims.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

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
            /// Every counter by its name, which is a label in the metrics.
            pub(super) fn snapshot(&self) -> BTreeMap<&'static str, u64> {
                BTreeMap::from([$((stringify!($name), self.$name.0.load(Ordering::Relaxed))),+])
            }
        }
    };
}

counters! {
    connections,
    /// Last replies that a queue or a client took.
    replies,
    /// Replies to a missing queue.
    clients_absent,
    /// Replies that the broker refused.
    replies_nacked,
    /// Requests that were acknowledged without a reply, since its queue refused it for too long.
    replies_given_up,
    /// Requests that were returned to their queue, as they are or as a copy.
    requeued,
    /// Deliveries that were delivered before.
    redelivered,
    attempts_exhausted,
    /// Requests that expired before they started.
    expired,
    too_large,
}
