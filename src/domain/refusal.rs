//! What a source's "no" asks of the caller. Named by what comes next, not by what went wrong.

use core::time::Duration;

/// What to do after a call that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// Nothing definite was learnt (network, timeout, 408, 5xx): the call may be made again.
    Retry {
        /// How long the service asked us to wait.
        retry_after: Option<Duration>,
    },
    /// We are too fast (429): as [`Refusal::Retry`], and stop claiming for a while.
    Throttled {
        /// How long the service asked us to wait.
        retry_after: Option<Duration>,
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

/// What comes next, in a word or two for a log.
impl core::fmt::Display for Refusal {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Retry { retry_after: None } => out.write_str("again"),
            Self::Retry { retry_after: Some(after) } => write!(out, "again in {} s", after.as_secs()),
            Self::Throttled { retry_after: None } => out.write_str("more slowly"),
            Self::Throttled { retry_after: Some(after) } => write!(out, "more slowly, again in {} s", after.as_secs()),
            Self::Gone => out.write_str("given up: it is not ours"),
            Self::Rejected => out.write_str("given up: it never succeeds"),
            Self::Denied => out.write_str("once the credentials are accepted"),
            Self::Stale => out.write_str("opened anew, and again"),
        }
    }
}
