//! Deterministic jitter from a seed.

use core::time::Duration;

/// SplitMix64. Not for secrets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Jitter(u64);

impl Jitter {
    pub const fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A span in `0..span`.
    pub fn below(&mut self, span: Duration) -> Duration {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        if nanos == 0 { Duration::ZERO } else { Duration::from_nanos(self.bits() % nanos) }
    }
}
