//! Logs and counts the alerts of the rules.

use journeyman_domain::id::SourceId;
use journeyman_domain::worker::Alert;

use super::event_loop::Engine;

impl Engine {
    pub(super) fn alert(&self, alert: &Alert) {
        let counters = &self.control.counters;
        let source = |id: SourceId| self.source_name(id);
        match alert {
            Alert::DequeueCount { id, count: dequeues } => {
                counters.add(|counts| counts.dequeue_alerts += 1);
                tracing::error!(
                    alert = "high-dequeue-count",
                    message.id = &**id,
                    message.dequeue_count = dequeues,
                    "[alert operator] a message was received {dequeues} times: its task cannot be claimed, or deleting it fails"
                );
            }
            Alert::Undecodable { id, count: dequeues } => {
                counters.add(|counts| counts.unreadable_messages += 1);
                tracing::error!(
                    alert = "unreadable-message",
                    message.id = &**id,
                    message.dequeue_count = dequeues,
                    "[alert operator] deleting a message that cannot be read; check what writes to this queue"
                );
            }
            Alert::UnreadableClaim { source: id, id: claim } => {
                counters.add(|counts| counts.unreadable_messages += 1);
                tracing::error!(
                    alert = "unreadable-claim",
                    source = source(*id),
                    claim = &**claim,
                    "[alert operator] cannot read a claim that the queue granted: the worker recovers it by listing its claims if the scopes allow it; otherwise the task runs again once the claim expires"
                );
            }
            Alert::DeleteFailed { id, count: dequeues, retried } => {
                counters.add(|counts| counts.deletes_failed += 1);
                let again = if *retried {
                    "retrying"
                } else {
                    "[alert operator] giving up; the message will be received again"
                };
                tracing::error!(
                    alert = "delete-failed",
                    message.id = &**id,
                    message.dequeue_count = dequeues,
                    "cannot delete a message: {again}"
                );
            }
            Alert::Denied { source: id, consecutive } => tracing::error!(
                alert = "auth-denied",
                source = source(*id),
                consecutive,
                "[alert operator] the queue rejects the credentials: check client id, token, scopes and clock, or the broker's user and password; the worker claims nothing until they are accepted"
            ),
            Alert::SourceUnavailable { source: id, consecutive } => tracing::error!(
                alert = "source-unavailable",
                source = source(*id),
                consecutive,
                "[alert operator] source unavailable, still retrying; last error: {}",
                self.history.sources[id.index()].last_refusal.as_ref().map_or("none", |refusal| &refusal.message)
            ),
            Alert::Throttled { source: id } => {
                tracing::warn!(alert = "throttled", source = source(*id), "the queue throttles requests; backing off");
            }
            Alert::HostUnhealthy { run } => {
                counters.add(|counts| counts.host_faults += 1);
                tracing::error!(
                    alert = "host-unhealthy", claim.run = %run,
                    "[alert operator] this host cannot run tasks; the lines before say why. The worker claims \
                     nothing until a probe succeeds: free disk space, raise the limits on open files and processes, repair \
                     `work_dir`, or remove the host"
                );
            }
            Alert::AccessDenied { source: id } => tracing::error!(
                alert = "access-denied",
                source = source(*id),
                "[alert operator] the cluster refuses this worker; the line before says why. Grant its user what is missing, or create \
                 the namespace: until a task has run, the worker claims from this source at longer and longer intervals"
            ),
            Alert::WorkDirLost => {
                counters.add(|counts| counts.host_faults += 1);
                let why = self
                    .history
                    .work_dir_lost_reason
                    .as_deref()
                    .unwrap_or("the work directory was removed or replaced");
                tracing::error!(
                    alert = "work-dir-lost",
                    "[alert operator] {why}. The worker finishes its claims and exits, so that the next one creates the directory again; \
                     check what removes files there"
                );
            }
            Alert::OverlapPossible { run } => {
                counters.add(|counts| counts.overlaps_possible += 1);
                tracing::error!(
                    alert = "possible-overlap", claim.run = %run,
                    "[alert operator] the payload ran past its lease; another worker may have started the task too"
                );
            }
            Alert::CleanupPending { run } => {
                counters.add(|counts| counts.cleanup_pending += 1);
                tracing::error!(
                    alert = "cleanup-pending", claim.run = %run,
                    "[alert operator] processes of a payload may remain: they survived SIGKILL, or may belong to another task and \
                     are not killed; the slot stays taken until they are gone"
                );
            }
            Alert::LateGrant { run } => {
                let why = self.blocked_message();
                tracing::warn!(claim.run = %run, "releasing a claim granted by a call in flight: {why}");
            }
            Alert::LastRun { run } => {
                let why = self.blocked_message();
                tracing::info!(claim.run = %run, "running a claim that has no retries left, instead of releasing it: {why}");
            }
            Alert::RecoveredClaim { run } => {
                tracing::warn!(claim.run = %run, "releasing a claim of a previous process of this worker");
            }
            Alert::DuplicateWorkerId { source: id, claims } => tracing::error!(
                alert = "duplicate-worker-id",
                source = source(*id),
                claims,
                "[alert operator] {}",
                duplicate_id_message(*claims)
            ),
            Alert::UnexpectedGrant { run } => {
                tracing::warn!(claim.run = %run, "releasing a claim granted without a free slot");
            }
        }
    }
}

pub(super) fn duplicate_id_message(claims: usize) -> String {
    format!(
        "claims under this worker's id not in its journal ({claims}): another worker uses the id, or a previous process had another \
         `work_dir`. They are left alone and run again once they expire; give each worker an `id` of its own"
    )
}
