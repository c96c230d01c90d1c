//! When a worker of a group may be started again: at once after a stable worker, later each time otherwise. A group
//! whose workers keep failing rejects its requests.

use core::time::Duration;

use crate::backoff::{self, Backoff};
use crate::jitter::Jitter;
use crate::time::Instant;

pub const RESTART_DELAY: backoff::Policy =
    backoff::Policy { first: Duration::from_secs(1), max: Duration::from_secs(300) };

/// Consecutive failures after which a group counts as failed.
pub const FAILURES_MAX: u32 = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerEnd {
    /// It was ready for this long.
    AfterReady(Duration),
    /// It never became ready, or could not be started.
    NeverReady,
}

#[derive(Debug, Clone)]
pub struct RestartBackoff {
    stable_after: Duration,
    backoff: Backoff,
    jitter: Jitter,
    not_before: Instant,
}

impl RestartBackoff {
    /// A worker that runs for `stable_after` is stable.
    pub const fn new(stable_after: Duration, seed: u64) -> Self {
        Self { stable_after, backoff: Backoff::NEW, jitter: Jitter::seeded(seed), not_before: Instant::ORIGIN }
    }

    pub fn on_worker_ended(&mut self, end: WorkerEnd, now: Instant) {
        match end {
            WorkerEnd::AfterReady(life) if life >= self.stable_after => {
                self.backoff.reset();
                self.not_before = now;
            }
            WorkerEnd::AfterReady(_) | WorkerEnd::NeverReady => {
                let pause = self.backoff.wait(RESTART_DELAY, None, &mut self.jitter);
                self.not_before = self.not_before.max(now.plus(pause));
            }
        }
    }

    /// An operator has fixed the cause: starts at once, and counts anew.
    pub const fn reset(&mut self) {
        self.backoff.reset();
        self.not_before = Instant::ORIGIN;
    }

    pub const fn not_before(&self) -> Instant {
        self.not_before
    }

    pub const fn consecutive_failures(&self) -> u32 {
        self.backoff.tries()
    }

    pub const fn is_failing(&self) -> bool {
        self.backoff.tries() >= FAILURES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    fn restarts() -> RestartBackoff {
        RestartBackoff::new(Duration::from_secs(30), 7)
    }

    #[test]
    fn each_short_life_makes_the_next_start_later_up_to_a_limit() {
        let (mut restarts, mut now, mut pauses) = (restarts(), at(0), Vec::new());
        for _ in 0..20 {
            restarts.on_worker_ended(WorkerEnd::NeverReady, now);
            pauses.push(restarts.not_before().since(now));
            now = restarts.not_before();
        }
        assert!(pauses[0] >= RESTART_DELAY.first / 2 && pauses[0] <= RESTART_DELAY.first, "{pauses:?}");
        assert!(pauses[19] >= RESTART_DELAY.max / 2 && pauses[19] <= RESTART_DELAY.max, "{pauses:?}");
        assert!(pauses[8] > pauses[2], "{pauses:?}");
        assert!(restarts.is_failing());
    }

    #[test]
    fn workers_that_die_together_cost_one_pause_after_the_other_and_never_less() {
        let mut restarts = restarts();
        restarts.on_worker_ended(WorkerEnd::AfterReady(Duration::from_secs(1)), at(0));
        let first = restarts.not_before();
        restarts.on_worker_ended(WorkerEnd::AfterReady(Duration::from_secs(1)), at(0));
        assert!(restarts.not_before() >= first);
    }

    #[test]
    fn a_stable_worker_resets_the_failures() {
        let mut restarts = restarts();
        for _ in 0..10 {
            restarts.on_worker_ended(WorkerEnd::NeverReady, at(0));
        }
        restarts.on_worker_ended(WorkerEnd::AfterReady(Duration::from_secs(30)), at(1_000));
        assert_eq!(
            (restarts.consecutive_failures(), restarts.is_failing(), restarts.not_before()),
            (0, false, at(1_000))
        );
    }

    #[test]
    fn what_was_mended_starts_at_once() {
        let mut restarts = restarts();
        (0..9).for_each(|_| restarts.on_worker_ended(WorkerEnd::NeverReady, at(5)));
        restarts.reset();
        assert!(restarts.not_before() <= at(5) && !restarts.is_failing());
    }
}
