//! What a source's "no" asks of the caller. Named by what comes next, not by what went wrong.

use core::time::Duration;

/// What to do after a call that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// Nothing definite was learnt (network, timeout, 408, 5xx): the call may be made again.
    Retry {
        /// How long the service asked us to wait.
        after: Option<Duration>,
    },
    /// We are too fast (429): as [`Refusal::Retry`], and stop claiming for a while.
    Throttled {
        /// How long the service asked us to wait.
        after: Option<Duration>,
    },
    /// Definite, and it lies in what was asked about (404, 409): it is not ours, or no longer there.
    Gone,
    /// Definite, and it lies in our request (400 and the like): the same request never succeeds.
    Rejected,
    /// Our credentials are not accepted (401, 403).
    Denied,
    /// A signed URL is no longer accepted: open the source again, then repeat.
    Stale,
}
