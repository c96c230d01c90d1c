//! Exponential waits before a call is repeated.

use core::time::Duration;

use super::jitter::Jitter;

/// The longest `Retry-After` that is honoured.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    pub first: Duration,
    pub max: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Backoff {
    tries: u32,
}

impl Backoff {
    pub const NEW: Self = Self { tries: 0 };

    /// Waits handed out since creation or the last [`Backoff::reset`].
    pub const fn tries(&self) -> u32 {
        self.tries
    }

    pub const fn reset(&mut self) {
        self.tries = 0;
    }

    /// The next wait: between half and all of the doubled span, after what the service `asked` for, up to
    /// [`RETRY_AFTER_MAX`], if that is more. A service asks all its clients for the same.
    pub fn wait(&mut self, policy: Policy, asked: Option<Duration>, jitter: &mut Jitter) -> Duration {
        let doubled = policy.first.saturating_mul(1 << self.tries.min(20)).min(policy.max);
        self.tries = self.tries.saturating_add(1);
        let wait = doubled / 2 + jitter.below(doubled - doubled / 2 + Duration::from_nanos(1));
        let asked = asked.unwrap_or_default().min(RETRY_AFTER_MAX);
        if asked > wait { asked + wait } else { wait }
    }
}
