//! What the worker counts, for metrics, tests and the line it says at its end.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Counters since the start. Cheap to read at any time.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub(super) $name: AtomicU64),+ }

        /// The counters at one moment.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
        pub struct Counts { $($(#[$doc])* pub $name: u64),+ }

        impl Counters {
            /// Reads them all.
            #[must_use]
            pub fn read(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed)),+ }
            }
        }
    };
}

counters! {
    /// Polls sent.
    polls,
    /// Polls that were refused or failed.
    polls_failed,
    /// Claims granted.
    claims,
    /// Claim requests that were refused or failed.
    claims_refused,
    /// Extensions granted.
    reclaims,
    /// Extensions refused or failed.
    reclaims_failed,
    /// Runs reported completed.
    completed,
    /// Runs reported failed.
    failed,
    /// Runs reported as an exception other than `worker-shutdown`.
    exceptions,
    /// Runs handed back as `worker-shutdown`.
    handed_back,
    /// Runs that the queue had resolved before our report.
    superseded,
    /// Claims given up after a report that was not answered.
    unconfirmed,
    /// Claims given up without a report.
    lost,
    /// Claims whose payload may have run beside another worker's.
    overlaps_possible,
    /// Claims whose payload could not be proven gone.
    occupied,
    /// Deletes of messages that failed, every attempt counted.
    deletes_failed,
    /// Messages that could not be read.
    undecodable,
    /// Messages that were received too often.
    dequeue_alerts,
    /// Artifacts stored, the log included.
    artifacts,
    /// Artifacts that could not be stored.
    artifacts_failed,
    /// Notices that the host goes.
    notices,
    /// Hints that the host may have to go.
    hints,
    /// Times the host was found unable to run tasks.
    host_faults,
    /// Panics of handlers and adapters.
    panics,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
