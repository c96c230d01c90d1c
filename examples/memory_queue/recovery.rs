//! Recovery of the claims of lost replies, and of those of a previous process.

use std::time::Duration;

use super::MemorySource;
use journeyman::id::Run;
use journeyman::source::{Granted, RecoveryBatch};

impl MemorySource {
    /// Takes over this worker's claims that are at most `newer_than` old, except `held`.
    pub(super) fn recover_claims(&self, held: &[Run], newer_than: Option<Duration>) -> RecoveryBatch {
        let now = self.queue.now();
        let lease = self.queue.0.config.lease;
        let mut tasks = self.queue.expire_leases(now);
        let by_name: Vec<Run> = tasks
            .leases
            .iter()
            .filter_map(|(_, id)| {
                let last = tasks.tasks.get(id)?.runs.len().checked_sub(1)?;
                let run = Run { task: id.clone(), run: last.try_into().ok()? };
                (tasks.is_running(&run, &self.worker) && !held.contains(&run)).then_some(run)
            })
            .collect();
        let mut recovered = RecoveryBatch::default();
        for run in by_name {
            let claimed = tasks.run(&run).map(|found| now.since(found.claimed_at)).unwrap_or_default();
            if newer_than.is_none_or(|age| claimed > age) {
                recovered.foreign_claims += 1;
                continue;
            }
            tasks.set_lease(&run, &self.worker, lease, now);
            recovered.grants.extend(tasks.grant(&run, self, Granted { sent_at: now, length: lease }));
        }
        recovered
    }
}
