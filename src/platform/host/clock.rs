//! The worker's clock: the host's boot clock, which runs through suspend, or tokio's clock, which tests can pause.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use journeyman_domain::staged::Stamp;
use journeyman_domain::time::Instant;

/// Longest sleep of the worker while it holds claims. Timers stop while a host is suspended and the boot clock does not, so an
/// expired claim is noticed this soon after the host resumes.
pub const SUSPEND_CHECK_INTERVAL: Duration = Duration::from_secs(1);

fn read_clock(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// The source of the worker's time.
#[derive(Debug, Clone, Copy)]
pub enum Clock {
    /// The time since boot, including suspend.
    Boot,
    /// Tokio's clock, for tests with paused time.
    Tokio { origin: tokio::time::Instant },
}

/// The wall clock, which steps when it is set.
pub fn stamp() -> Stamp {
    Stamp(jiff::Timestamp::now().as_millisecond())
}

impl Clock {
    /// The time since boot, including suspend.
    pub const fn boot() -> Self {
        Self::Boot
    }

    /// Tokio's clock, starting now; for tests with paused time.
    pub fn tokio() -> Self {
        Self::Tokio { origin: tokio::time::Instant::now() }
    }

    pub const fn is_tokio(self) -> bool {
        matches!(self, Self::Tokio { .. })
    }

    /// The current time.
    pub fn now(self) -> Instant {
        match self {
            Self::Boot => Instant::at(read_clock(ClockId::Boottime)),
            Self::Tokio { origin } => Instant::at(origin.elapsed()),
        }
    }

    /// The time since 1970, for times that are compared across boots. It steps when the system clock is set.
    pub fn unix_time(self) -> Duration {
        match self {
            Self::Boot => read_clock(ClockId::Realtime),
            Self::Tokio { origin } => origin.elapsed(),
        }
    }

    /// Waits until `at`, checking the clock at least every [`SUSPEND_CHECK_INTERVAL`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn sleep_until(self, at: Instant) {
        loop {
            let remaining = at.since(self.now());
            if remaining.is_zero() {
                return;
            }
            tokio::time::sleep(remaining.min(SUSPEND_CHECK_INTERVAL)).await;
        }
    }
}

/// Resolves as the future does, if there is one.
pub async fn or_pending<F: Future>(future: Option<F>) -> F::Output {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
