//! Counters of a pool.

use std::sync::atomic::{AtomicU64, Ordering};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[derive(Debug, Default)]
        pub(super) struct PoolCounters {
            /// A gauge: orphans that this connection holds.
            pub(super) orphans: AtomicCount,
            $(pub(super) $name: AtomicCount,)*
        }

        impl PoolCounters {
            pub(super) fn values(&self) -> CounterValues {
                CounterValues { $($name: self.$name.get(),)* }
            }
        }

        /// Counters since the start.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        pub struct CounterValues {
            $($(#[$doc])* pub $name: u64,)*
        }
    };
}

counters! {
    orphans_forwarded,
    /// Requests that the controller answered with an error.
    dead_letters,
    /// Those of them that were moved to the poison queue.
    poison_requests,
    queue_operations,
    queue_operation_failures,
    activity_reports,
    workers_started,
    /// Exits without a stop request, and failed starts.
    workers_failed,
    broker_disconnects,
}
