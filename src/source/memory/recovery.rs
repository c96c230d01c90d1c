//! Claims whose reply was lost, and those of an earlier life of a worker, as a queue in memory gives them back.

use std::time::Duration;

use super::{Memory, gone};
use crate::domain::id::Run;
use crate::source::{Grant, Recovered, Refused, Window};

impl Memory {
    /// What this worker has claimed and does not hold, where a poll of its own may have claimed it.
    pub(super) fn adopt(&self, held: &[Run], asked: &[Window]) -> Recovered {
        let now = self.queue.now();
        let lease = self.queue.0.settings.lease;
        let mut tasks = self.queue.settled(now);
        let by_name: Vec<Run> = tasks
            .leases
            .iter()
            .filter_map(|(_, id)| {
                let last = tasks.tasks.get(id)?.runs.len().checked_sub(1)?;
                let run = Run { task: id.clone(), run: last.try_into().ok()? };
                (tasks.is_running(&run, &self.worker) && !held.contains(&run)).then_some(run)
            })
            .collect();
        let mut recovered = Recovered::default();
        for run in by_name {
            let claimed = tasks.run(&run).map(|found| now.since(found.claimed)).unwrap_or_default();
            if !asked.iter().any(|window| window.holds(claimed, Duration::ZERO)) {
                recovered.others += 1;
                continue;
            }
            tasks.lend(&run, &self.worker, lease, now);
            recovered.grants.extend(tasks.grant(&run, &self.worker, lease));
        }
        recovered
    }

    pub(super) fn take_back(&self, run: &Run) -> Result<Grant, Refused> {
        let now = self.queue.now();
        let lease = self.queue.0.settings.lease;
        let mut tasks = self.queue.settled(now);
        if !tasks.is_running(run, &self.worker) {
            return Err(gone(run, "not running, or not for this worker"));
        }
        tasks.lend(run, &self.worker, lease, now);
        tasks.grant(run, &self.worker, lease).ok_or_else(|| gone(run, "unknown"))
    }
}
