//! The load of a group: requests that wait, and requests that workers hold.
//!
//! The held requests are not derived from the waiting ones: a queue is empty while workers hold all of it. A fresh
//! count of the broker is used where there is one, otherwise the reports of the workers.

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Not held by any worker.
    pub ready: u32,
    /// Held and unacknowledged, as counted by the broker.
    pub unacknowledged: Option<u32>,
    /// Held, as reported by the workers.
    pub in_flight: Option<u32>,
    /// Tasks of a demand source, pending and claimed together: one moves from the first to the second between two
    /// counts.
    pub external_tasks: u32,
    /// The queue has not been inspected yet.
    pub is_unknown: bool,
}

impl Load {
    /// From the waiting requests, the broker's count where it is fresh, and the number of busy workers, each of which
    /// may hold `concurrency` requests.
    pub fn new(ready: u32, unacknowledged: Option<u32>, busy: u32, concurrency: u32) -> Self {
        // Workers do not report how many each holds; a lower number might stop a busy one.
        let in_flight = unacknowledged.is_none().then(|| busy.saturating_mul(concurrency.max(1)));
        Self { ready, unacknowledged, in_flight, ..Self::default() }
    }

    pub fn unknown() -> Self {
        Self { is_unknown: true, ..Self::default() }
    }

    pub fn is_idle(&self) -> bool {
        self.ready == 0 && self.in_progress() == 0 && !self.is_unknown
    }

    /// The greater of the held requests and external tasks: a late count must neither stop a worker nor start one for
    /// what another holds.
    pub fn in_progress(&self) -> u32 {
        let counted = self.unacknowledged.unwrap_or_default().saturating_add(self.external_tasks);
        counted.max(self.in_flight.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_count_of_the_broker_replaces_the_number_of_busy_workers() {
        let load = Load::new(3, Some(2), 7, 4);
        assert_eq!((load.in_progress(), load.is_idle()), (2, false));
        assert!(Load::new(0, Some(0), 7, 4).is_idle(), "that a worker was busy a while ago keeps none");
        let load = Load::new(0, None, 7, 4);
        assert_eq!((load.in_progress(), load.is_idle()), (28, false));
    }

    #[test]
    fn a_task_that_was_claimed_since_the_last_count_is_counted_once() {
        let before = Load { external_tasks: 2, ..Load::new(1, None, 0, 1) };
        let meanwhile = Load { external_tasks: 2, ..Load::new(1, None, 2, 1) };
        assert_eq!((before.in_progress(), meanwhile.in_progress()), (2, 2));
    }
}
