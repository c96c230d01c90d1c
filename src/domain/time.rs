//! A point in time on a clock that never steps back and runs through suspend. The domain reads no clock: callers pass
//! the time.

use core::time::Duration;

use serde::{Deserialize, Serialize};

/// A point on the host's boot clock, as a distance from an arbitrary origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Instant(Duration);

impl Instant {
    pub const ORIGIN: Self = Self(Duration::ZERO);

    pub const fn at(since_origin: Duration) -> Self {
        Self(since_origin)
    }

    pub const fn since_origin(self) -> Duration {
        self.0
    }

    /// Saturates at the largest representable time.
    pub const fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }

    /// Saturates at the origin.
    pub const fn minus(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(span))
    }

    /// Zero if `earlier` is in the future.
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}
