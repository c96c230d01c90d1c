//! How many requests wait in the queue of a group, and when they are counted again. A count is a call to the broker: with a
//! thousand groups, counts are most of a controller's work.

use super::{Key, Pool};
use crate::limits::CONTROLLER_QUIET_QUEUE_INTERVAL;
use crate::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DepthSample {
    pub ready: u32,
    pub at: Instant,
}

/// Who takes the next request of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextTaker {
    /// A worker that may have to be started first.
    NewWorker,
    IdleWorker,
    /// The pool has no driver.
    ExternalWorker,
}

impl Pool {
    pub fn depth(&self, key: &Key) -> Option<DepthSample> {
        self.queues.get(key)?.depth
    }

    /// Only a count that starts no worker may be late.
    pub fn is_count_due(&self, key: &Key, taker: NextTaker, now: Instant) -> bool {
        let Some(queue) = self.queues.get(key).filter(|_| self.is_bound(key)) else { return false };
        let Some(last) = queue.depth else { return true };
        match taker {
            NextTaker::NewWorker => true,
            NextTaker::IdleWorker if last.ready > 0 => true,
            NextTaker::IdleWorker | NextTaker::ExternalWorker => {
                queue.is_changed || now.since(last.at) >= CONTROLLER_QUIET_QUEUE_INTERVAL
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{POLICY, at};
    use super::super::{Event, QueueStep, StepResult};
    use super::*;
    use crate::limits::CONTROLLER_RECONCILE_INTERVAL;

    fn key() -> Key {
        Key::new("a").unwrap()
    }

    fn bound() -> Pool {
        let mut pool = Pool::new(POLICY, 1);
        pool.handle(Event::Connected, at(0));
        pool.handle(Event::Demand { key: key(), extra: CONTROLLER_QUIET_QUEUE_INTERVAL * 100 }, at(0));
        pool.handle(Event::StepFinished { key: key(), step: QueueStep::Bind, result: StepResult::Done }, at(0));
        pool
    }

    /// Calls to the broker within a minute, over the ticks of a controller.
    fn counts(taker: NextTaker, ready: u32) -> u32 {
        let (mut pool, mut counts, mut now) = (bound(), 0, at(0));
        while now < at(60) {
            pool.handle(Event::Tick, now);
            if pool.is_count_due(&key(), taker, now) {
                counts += 1;
                pool.handle(Event::Depth { key: key(), ready }, now);
            }
            now = now.plus(CONTROLLER_RECONCILE_INTERVAL);
        }
        counts
    }

    #[test]
    fn a_group_for_which_no_worker_starts_is_counted_every_five_seconds() {
        for (taker, ready, expected) in [
            (NextTaker::ExternalWorker, 1, 12),
            (NextTaker::ExternalWorker, 0, 12),
            (NextTaker::IdleWorker, 0, 12),
            (NextTaker::IdleWorker, 1, 120),
            (NextTaker::NewWorker, 0, 120),
        ] {
            assert_eq!(counts(taker, ready), expected, "{taker:?}, {ready}");
        }
    }

    #[test]
    fn a_group_at_rest_is_counted_at_the_next_tick_after_a_change() {
        for change in [Event::demand(key()), Event::Workers { key: key(), count: 1 }] {
            let mut pool = bound();
            assert!(pool.is_count_due(&key(), NextTaker::ExternalWorker, at(0)), "it was never counted");
            pool.handle(Event::Depth { key: key(), ready: 0 }, at(0));
            assert!(!pool.is_count_due(&key(), NextTaker::ExternalWorker, at(1)));
            pool.handle(change, at(1));
            assert!(pool.is_count_due(&key(), NextTaker::ExternalWorker, at(1)));
            pool.handle(Event::Depth { key: key(), ready: 0 }, at(1));
            assert!(!pool.is_count_due(&key(), NextTaker::ExternalWorker, at(2)));
        }
    }
}
