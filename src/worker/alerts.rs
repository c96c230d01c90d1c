//! What an operator is told, in words, and counted.

use crate::domain::id::SourceId;
use crate::domain::worker::{Alert, DeleteRetry};

use super::counters::count;
use super::engine::Engine;

impl Engine {
    /// Tells the operator.
    pub(super) fn alert(&self, alert: &Alert) {
        let counters = self.counters();
        let source = |id: SourceId| self.source_name(id);
        match alert {
            Alert::DequeueCount { id, count: dequeues, .. } => {
                count(&counters.dequeue_alerts);
                tracing::error!(
                    alert = "high-dequeue-count",
                    message.id = &**id,
                    message.dequeue_count = dequeues,
                    "[alert operator] a message was received {dequeues} times: its task cannot be claimed, or its deletes fail"
                );
            }
            Alert::Undecodable { id, count: dequeues, .. } => {
                count(&counters.unreadable_messages);
                tracing::error!(
                    alert = "unreadable-message",
                    message.id = &**id,
                    message.dequeue_count = dequeues,
                    "[alert operator] a message that cannot be read is deleted: see who writes to this queue"
                );
            }
            Alert::UnreadableClaim { source: id, id: claim } => {
                count(&counters.unreadable_messages);
                tracing::error!(
                    alert = "unreadable-claim",
                    source = source(*id),
                    claim = &**claim,
                    "[alert operator] the queue claimed a task for us in words that cannot be read: it is looked for by its listing of claims, where the scopes allow it, and runs again when its claim is over otherwise"
                );
            }
            Alert::DeleteFailed { id, count: dequeues, retry: retried, .. } => {
                count(&counters.deletes_failed);
                let again = match retried {
                    DeleteRetry::Yes => "it is tried again",
                    DeleteRetry::No => "[alert operator] it will be received again",
                };
                tracing::error!(
                    alert = "delete-failed",
                    message.id = &**id,
                    message.dequeue_count = dequeues,
                    "deleting a message failed; {again}"
                );
            }
            Alert::Denied { source: id, consecutive } => tracing::error!(
                alert = "auth-denied",
                source = source(*id),
                consecutive,
                "[alert operator] the queue refuses our credentials: check client id, token, scopes and clock, or user and password of a broker; nothing is claimed until it does not"
            ),
            Alert::SourceUnavailable { source: id, consecutive } => tracing::error!(
                alert = "source-unavailable",
                source = source(*id),
                consecutive,
                "[alert operator] nothing can be claimed from this source for a while; it is tried on. The last word: {}",
                self.last_refusals.get(id).map_or("none", String::as_str)
            ),
            Alert::Throttled { source: id } => {
                tracing::warn!(alert = "throttled", source = source(*id), "the queue asks us to slow down");
            }
            Alert::HostUnhealthy { run } => {
                count(&counters.host_faults);
                tracing::error!(
                    alert = "host-unhealthy", claim.run = %run,
                    "[alert operator] this host cannot run tasks; the lines before say what it lacks. The task is handed back, and \
                     nothing is claimed until a look at the host finds it fit: free its disk, raise its limits on open files and \
                     processes, mend `work_dir`, or take it away"
                );
            }
            Alert::WorkDirLost => {
                count(&counters.host_faults);
                let why = self.work_dir_lost_reason.as_deref().unwrap_or("the work folder was removed or replaced");
                tracing::error!(
                    alert = "work-dir-lost",
                    "[alert operator] {why}. Nothing more is claimed, what runs is finished, and then this worker exits, so that \
                     the next one makes the folder anew; see what removes files there"
                );
            }
            Alert::OverlapPossible { run } => {
                count(&counters.overlaps_possible);
                tracing::error!(
                    alert = "possible-overlap", claim.run = %run,
                    "[alert operator] the lease was over before its payload was; another worker may have started it"
                );
            }
            Alert::CleanupPending { run } => {
                count(&counters.cleanup_pending);
                tracing::error!(
                    alert = "cleanup-pending", claim.run = %run,
                    "[alert operator] processes of a payload may still be there: they outlived a kill, or may be another task's and \
                     are not killed; its slot is not used until they are gone"
                );
            }
            Alert::LateGrant { run } => {
                let why = self.blocked_message();
                tracing::warn!(claim.run = %run, "it came by a call that was under way, and is handed back before it began: {why}");
            }
            Alert::RecoveredClaim { run } => {
                tracing::warn!(claim.run = %run, "held by an earlier life of this worker; handed back");
            }
            Alert::DuplicateWorkerId { source: id, claims } => tracing::error!(
                alert = "duplicate-worker-id",
                source = source(*id),
                claims,
                "[alert operator] {}",
                duplicate_id_message(*claims)
            ),
            Alert::UnexpectedGrant { run } => {
                tracing::warn!(claim.run = %run, "granted without a free slot; handed back");
            }
        }
    }
}

/// What an operator is told of claims under this worker's name that are not its own.
pub(super) fn duplicate_id_message(claims: usize) -> String {
    let claims = if claims == 1 { "1 claim is".to_owned() } else { format!("{claims} claims are") };
    format!(
        "{claims} held under this worker's name that nothing in its work folder knows of: another worker may live under it, on \
         whatever host. They are left alone; give each worker an `id` of its own. If there is no other, they are of a life with \
         another `work_dir`, and run again once they expire"
    )
}
