//! When a worker of a group may be started again after one that did not last: at once after a good life, later each time
//! otherwise. A group whose workers keep dying is said to fail, and its requests are told so.

use core::time::Duration;

use crate::domain::backoff::{self, Backoff};
use crate::domain::jitter::Jitter;
use crate::domain::time::Instant;

/// The pauses between two starts that came to nothing.
pub const PAUSE: backoff::Policy = backoff::Policy { first: Duration::from_secs(1), max: Duration::from_secs(300) };

/// After so many short lives in a row a group fails.
pub const FAILS_AFTER: u32 = 5;

/// How a worker came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It was told to go, or had nothing more to do.
    Expected,
    /// It had been ready for so long.
    After(Duration),
    /// It was never ready, or could not even be started.
    NeverReady,
}

/// The starts of one group.
#[derive(Debug, Clone)]
pub struct Restarts {
    steady: Duration,
    row: Backoff,
    jitter: Jitter,
    not_before: Instant,
}

impl Restarts {
    /// A life of `steady` is a good one.
    #[must_use]
    pub const fn new(steady: Duration, seed: u64) -> Self {
        Self { steady, row: Backoff::NEW, jitter: Jitter::seeded(seed), not_before: Instant::ORIGIN }
    }

    /// A worker has ended.
    pub fn ended(&mut self, end: End, now: Instant) {
        match end {
            End::Expected => {}
            End::After(life) if life >= self.steady => {
                self.row.reset();
                self.not_before = now;
            }
            End::After(_) | End::NeverReady => {
                let pause = self.row.wait(PAUSE, None, &mut self.jitter);
                self.not_before = self.not_before.max(now.plus(pause));
            }
        }
    }

    /// A worker has been ready for as long as it takes: the row is over.
    pub const fn lasted(&mut self) {
        self.row.reset();
    }

    /// Somebody has mended what was wrong: starts at once, and counts anew.
    pub const fn forgive(&mut self) {
        self.row.reset();
        self.not_before = Instant::ORIGIN;
    }

    /// The earliest time of the next start.
    #[must_use]
    pub const fn not_before(&self) -> Instant {
        self.not_before
    }

    /// How many in a row did not last.
    #[must_use]
    pub const fn short_lives(&self) -> u32 {
        self.row.tries()
    }

    /// Whether it cannot be hoped that the next one lasts.
    #[must_use]
    pub const fn fails(&self) -> bool {
        self.row.tries() >= FAILS_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    fn restarts() -> Restarts {
        Restarts::new(Duration::from_secs(30), 7)
    }

    #[test]
    fn each_short_life_makes_the_next_start_later_up_to_a_limit() {
        let (mut restarts, mut now, mut pauses) = (restarts(), at(0), Vec::new());
        for _ in 0..20 {
            restarts.ended(End::NeverReady, now);
            pauses.push(restarts.not_before().since(now));
            now = restarts.not_before();
        }
        assert!(pauses[0] >= PAUSE.first / 2 && pauses[0] <= PAUSE.first, "{pauses:?}");
        assert!(pauses[19] >= PAUSE.max / 2 && pauses[19] <= PAUSE.max, "{pauses:?}");
        assert!(pauses[8] > pauses[2], "{pauses:?}");
        assert!(restarts.fails());
    }

    #[test]
    fn workers_that_die_together_cost_one_pause_after_the_other_and_never_less() {
        let mut restarts = restarts();
        restarts.ended(End::After(Duration::from_secs(1)), at(0));
        let first = restarts.not_before();
        restarts.ended(End::After(Duration::from_secs(1)), at(0));
        assert!(restarts.not_before() >= first);
    }

    #[test]
    fn a_good_life_ends_the_row_and_a_wanted_end_is_no_failure() {
        let mut restarts = restarts();
        for _ in 0..10 {
            restarts.ended(End::NeverReady, at(0));
        }
        restarts.ended(End::Expected, at(1));
        assert_eq!(restarts.short_lives(), 10);
        restarts.ended(End::After(Duration::from_secs(30)), at(1_000));
        assert_eq!((restarts.short_lives(), restarts.fails(), restarts.not_before()), (0, false, at(1_000)));
    }

    #[test]
    fn what_was_mended_starts_at_once() {
        let mut restarts = restarts();
        (0..9).for_each(|_| restarts.ended(End::NeverReady, at(5)));
        restarts.forgive();
        assert!(restarts.not_before() <= at(5) && !restarts.fails());
    }
}
