//! Spread without randomness: a generator whose whole future follows from the seed it was given.

use core::time::Duration;

/// A seeded generator (SplitMix64). Good enough to keep workers apart, unfit for anything secret.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Jitter(u64);

impl Jitter {
    /// Starts from a seed.
    #[must_use]
    pub const fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A span from zero up to, not including, `span`.
    pub fn below(&mut self, span: Duration) -> Duration {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        if nanos == 0 { Duration::ZERO } else { Duration::from_nanos(self.bits() % nanos) }
    }
}
