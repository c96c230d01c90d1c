//! How a source refuses a call, by what the caller must do next.

use alloc::string::String;
use core::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// No definite answer (network, timeout, 408, 5xx): the call may be repeated.
    Retry {
        /// How long the service asked us to wait.
        retry_after: Option<Duration>,
    },
    /// Too many requests (429): as [`Refusal::Retry`], and pause claiming.
    Throttled {
        /// How long the service asked us to wait.
        retry_after: Option<Duration>,
    },
    /// The disk of the storage is full (507): as [`Refusal::Retry`], for a shorter time.
    Full,
    /// Definite (404, 409): the claim or task is not ours, or no longer exists.
    Gone,
    /// Definite (400 and the like): the request is wrong and never succeeds.
    Rejected,
    /// The credentials are not accepted (401, 403).
    Denied,
    /// A signed URL is no longer accepted: reopen the source, then repeat.
    Stale,
}

impl Refusal {
    /// How long the service asked us to wait.
    pub const fn retry_after(self) -> Option<Duration> {
        match self {
            Self::Retry { retry_after } | Self::Throttled { retry_after } => retry_after,
            Self::Full | Self::Gone | Self::Rejected | Self::Denied | Self::Stale => None,
        }
    }
}

/// A call that failed: what to do next, and a message for the log.
///
/// The message names the operation, its subject and the useful line of the answer. It never holds a credential, a
/// signature or a payload.
#[derive(Debug)]
pub struct CallError {
    /// What the caller must do next.
    pub refusal: Refusal,
    /// What failed, on what, and why.
    pub message: String,
}

impl CallError {
    pub fn new(refusal: Refusal, message: impl Into<String>) -> Self {
        Self { refusal, message: message.into() }
    }

    /// An error after which the call may be repeated.
    pub fn retry(message: impl Into<String>) -> Self {
        Self::new(Refusal::Retry { retry_after: None }, message)
    }
}

impl core::fmt::Display for CallError {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        out.write_str(&self.message)
    }
}

impl core::error::Error for CallError {}

impl core::fmt::Display for Refusal {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Retry { retry_after: None } => out.write_str("retry"),
            Self::Retry { retry_after: Some(after) } => write!(out, "retry in {} s", after.as_secs()),
            Self::Throttled { retry_after: None } => out.write_str("throttled; retry"),
            Self::Throttled { retry_after: Some(after) } => write!(out, "throttled; retry in {} s", after.as_secs()),
            Self::Full => out.write_str("disk full; retry"),
            Self::Gone => out.write_str("not our claim"),
            Self::Rejected => out.write_str("rejected; not retried"),
            Self::Denied => out.write_str("credentials rejected"),
            Self::Stale => out.write_str("URL expired; reopen and retry"),
        }
    }
}
