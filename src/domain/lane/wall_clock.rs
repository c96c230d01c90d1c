//! Notices that the wall clock was set: what waits for a time of it would wait for as much longer as it was set back.

use core::time::Duration;

use crate::staged::Stamp;
use crate::time::Instant;

/// A smaller step is a correction by which no lane waits noticeably longer.
pub const STEP_MIN: Duration = Duration::from_secs(2);

/// Compares the wall clock with one that never steps.
#[derive(Debug, Clone, Copy)]
pub struct WallClock {
    wall: Stamp,
    clock: Instant,
}

impl WallClock {
    pub const fn new(wall: Stamp, clock: Instant) -> Self {
        Self { wall, clock }
    }

    /// Returns by how many milliseconds the wall clock was set forward since the last call, or back.
    pub fn step(&mut self, wall: Stamp, clock: Instant) -> Option<i64> {
        let passed = i64::try_from(clock.since(self.clock).as_millis()).unwrap_or(i64::MAX);
        let step = wall.0.saturating_sub(self.wall.0).saturating_sub(passed);
        *self = Self { wall, clock };
        (u128::from(step.unsigned_abs()) >= STEP_MIN.as_millis()).then_some(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f13_a_step_of_the_wall_clock_is_noticed_once_and_a_drift_is_none() {
        let mut clock = WallClock::new(Stamp(1_000_000), Instant::ORIGIN);
        for (wall, seconds, step) in [
            (1_030_000, 30, None),
            (1_060_500, 60, None),
            (1_091_000, 90, None),
            (1_021_000 - 3_600_000, 120, Some(-3_700_000)),
            (1_051_000 - 3_600_000, 150, None),
            (1_081_000, 180, Some(3_600_000)),
        ] {
            assert_eq!(clock.step(Stamp(wall), Instant::at(Duration::from_secs(seconds))), step, "{seconds} s");
        }
    }
}
