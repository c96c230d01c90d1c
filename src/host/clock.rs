//! The worker's clock: the host's boot clock, which runs through suspend, or tokio's, which tests can pause.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::domain::time::Instant;

/// How long the worker sleeps at most while it holds claims. Timers stand still while a host is suspended; the boot
/// clock does not, so a claim that ran out meanwhile is noticed this soon after the host wakes.
pub const SUSPEND_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The time since 1970, for what has to be told across boots. It steps whenever somebody sets it.
pub(crate) fn unix_time() -> Duration {
    read_clock(ClockId::Realtime)
}

fn read_clock(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// A clock.
#[derive(Debug, Clone, Copy)]
pub struct Clock(ClockKind);

#[derive(Debug, Clone, Copy)]
enum ClockKind {
    Boot,
    Tokio { origin: tokio::time::Instant },
}

impl Clock {
    /// The host's clock since it was started, suspend included.
    #[must_use]
    pub const fn boot() -> Self {
        Self(ClockKind::Boot)
    }

    /// Tokio's clock from here on, for tests with paused time.
    #[must_use]
    pub fn tokio() -> Self {
        Self(ClockKind::Tokio { origin: tokio::time::Instant::now() })
    }

    /// Whether it goes by the time of the runtime it is read on.
    pub(crate) const fn is_tokio(self) -> bool {
        matches!(self.0, ClockKind::Tokio { .. })
    }

    /// The time.
    #[must_use]
    pub fn now(self) -> Instant {
        match self.0 {
            ClockKind::Boot => Instant::at(read_clock(ClockId::Boottime)),
            ClockKind::Tokio { origin } => Instant::at(origin.elapsed()),
        }
    }

    /// Waits until `at`, looking at the clock at least every [`SUSPEND_CHECK_INTERVAL`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn sleep_until(self, at: Instant) {
        loop {
            let left = at.since(self.now());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(SUSPEND_CHECK_INTERVAL)).await;
        }
    }
}
