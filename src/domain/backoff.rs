//! How long to wait before the same call again.

use core::time::Duration;

use super::jitter::Jitter;

/// The longest wait that a service may ask of us.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

/// The shape of a row of waits: `first`, doubled each time up to `max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// The first wait.
    pub first: Duration,
    /// The longest wait.
    pub max: Duration,
}

/// A row of waits in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Backoff {
    tries: u32,
}

impl Backoff {
    /// A row that has not begun.
    pub const NEW: Self = Self { tries: 0 };

    /// How many waits were handed out since the start or the last [`Backoff::reset`].
    #[must_use]
    pub const fn tries(&self) -> u32 {
        self.tries
    }

    /// Starts the row again.
    pub const fn reset(&mut self) {
        self.tries = 0;
    }

    /// The next wait: between half and all of the doubled span, and never less than what the service `asked`
    /// (up to [`RETRY_AFTER_MAX`]).
    pub fn wait(&mut self, policy: Policy, asked: Option<Duration>, jitter: &mut Jitter) -> Duration {
        let doubled = policy.first.saturating_mul(1 << self.tries.min(20)).min(policy.max);
        self.tries = self.tries.saturating_add(1);
        let wait = doubled / 2 + jitter.below(doubled - doubled / 2 + Duration::from_nanos(1));
        wait.max(asked.unwrap_or_default().min(RETRY_AFTER_MAX))
    }
}
