//! The load of a group: requests that wait, requests that workers hold, and the rate of new ones.
//!
//! The held requests are not derived from the waiting ones: a queue is empty while workers hold all of it. A fresh
//! count of the broker is used where there is one, otherwise the reports of the workers.

/// The most that a rate may ask for, as a multiple of what is held: a burst looks like any rate for a moment.
const RATE_GROWTH_MAX: u64 = 2;

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
    /// The requests that the arrival rate keeps held, in thousandths; `None` where the rate is unknown.
    pub in_progress_by_rate: Option<u64>,
    /// The queue has not been inspected yet.
    pub is_unknown: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadCounts {
    pub unacknowledged: u32,
    /// In 1,000 seconds.
    pub published: Option<u64>,
    /// In 1,000 seconds.
    pub acknowledged: Option<u64>,
}

impl Load {
    /// From the waiting requests, the broker's count where it is fresh, and the number of busy workers, each of which
    /// may hold `concurrency` requests.
    #[must_use]
    pub fn new(ready: u32, counted: Option<LoadCounts>, busy: u32, concurrency: u32) -> Self {
        match counted {
            Some(counted) => Self {
                ready,
                unacknowledged: Some(counted.unacknowledged),
                in_flight: None,
                in_progress_by_rate: counted.in_progress_by_rate(),
                ..Self::default()
            },
            // Workers do not report how many each holds; a lower number might stop a busy one.
            None => Self { ready, in_flight: Some(busy.saturating_mul(concurrency.max(1))), ..Self::default() },
        }
    }

    #[must_use]
    pub fn unknown() -> Self {
        Self { is_unknown: true, ..Self::default() }
    }

    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ready == 0 && self.in_progress() == 0 && !self.is_unknown
    }

    /// The greater of the held requests and external tasks: a late count must neither stop a worker nor start one for
    /// what another holds.
    #[must_use]
    pub fn in_progress(&self) -> u32 {
        let counted = self.unacknowledged.unwrap_or_default().saturating_add(self.external_tasks);
        counted.max(self.in_flight.unwrap_or_default())
    }
}

impl LoadCounts {
    /// As many as are held, more where the arrival rate exceeds the completion rate.
    fn in_progress_by_rate(self) -> Option<u64> {
        let (comes, goes) = (self.published?, self.acknowledged?);
        let held = u64::from(self.unacknowledged) * 1_000;
        (goes > 0).then(|| (held.saturating_mul(comes) / goes).min(held * RATE_GROWTH_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn counted(unacknowledged: u32, published: u64, acknowledged: u64) -> LoadCounts {
        LoadCounts { unacknowledged, published: Some(published), acknowledged: Some(acknowledged) }
    }

    #[test]
    fn a_fresh_count_is_what_is_held_and_without_one_workers_say_how_many_of_them_are_busy() {
        let load = Load::new(3, Some(counted(2, 0, 0)), 7, 4);
        assert_eq!((load.in_progress(), load.is_idle()), (2, false));
        let load = Load::new(0, Some(counted(0, 0, 0)), 7, 4);
        assert!(load.is_idle(), "that a worker was busy a while ago keeps nobody");
        let load = Load::new(0, None, 7, 4);
        assert_eq!((load.in_progress(), load.is_idle(), load.in_progress_by_rate), (28, false, None));
    }

    #[test]
    fn a_task_that_was_claimed_since_tasks_were_counted_is_counted_once() {
        let before = Load { external_tasks: 2, ..Load::new(1, None, 0, 1) };
        let meanwhile = Load { external_tasks: 2, ..Load::new(1, None, 2, 1) };
        assert_eq!((before.in_progress(), meanwhile.in_progress()), (2, 2));
    }

    #[test]
    fn where_more_comes_than_is_done_more_will_be_held_and_within_bounds() {
        let by_rate = |counted| Load::new(0, Some(counted), 0, 1).in_progress_by_rate;
        assert_eq!(by_rate(counted(4, 1_500, 1_000)), Some(6_000));
        assert_eq!(by_rate(counted(4, 500, 1_000)), Some(2_000));
        assert_eq!(by_rate(counted(4, 1_000_000, 1)), Some(8_000));
        assert_eq!(by_rate(counted(4, 1_000, 0)), None, "nothing was done yet, which says nothing");
        assert_eq!(by_rate(LoadCounts { published: None, ..counted(4, 1, 1) }), None);
        assert_eq!(by_rate(counted(u32::MAX, u64::MAX, 1)), Some(u64::from(u32::MAX) * 2_000));
    }
}
