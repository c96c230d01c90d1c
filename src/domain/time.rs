//! Time as the rules see it: a point on a clock that never steps back and runs through suspend.
//!
//! Nothing here reads a clock. Whoever calls the domain brings the time along.

use core::time::Duration;

/// A point on the host's boot clock, as a distance from an arbitrary origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(Duration);

impl Instant {
    /// The origin of the clock.
    pub const ORIGIN: Self = Self(Duration::ZERO);

    /// The point `since_origin` after the origin.
    #[must_use]
    pub const fn at(since_origin: Duration) -> Self {
        Self(since_origin)
    }

    /// The distance from the origin.
    #[must_use]
    pub const fn since_origin(self) -> Duration {
        self.0
    }

    /// The point `span` later; the end of time where that cannot be counted.
    #[must_use]
    pub const fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }

    /// The point `span` earlier, at the earliest the origin.
    #[must_use]
    pub const fn minus(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(span))
    }

    /// How long ago `earlier` was; zero where it is not in the past.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}
