//! The end of a claim: logged, counted, cleaned up.

use serde_json::json;

use crate::notify::Announcement;
use journeyman_domain::claim::{ClaimEnd, LossReason};
use journeyman_domain::id::LocalToken;
use journeyman_domain::journal::{self, EntryId};
use journeyman_platform::host::crash_points::crash_point;

use super::catch_panic::drop_guarded;
use super::claim_runtime::ClaimRuntime;
use super::durations::EndKind;
use super::event_loop::Engine;
use super::history::EndedClaim;
use super::task_view::TaskView;
use super::trace_recorder::FinishedClaim;

impl Engine {
    fn record_trace(&self, live: &ClaimRuntime, end: ClaimEnd) {
        let (Some(recorder), Some(trace)) = (&self.config.recorder, live.span_context) else { return };
        let source = self.source_name(live.source).to_owned();
        let timeline = live.timeline.clone();
        recorder.record(FinishedClaim {
            run: live.run.clone(),
            source,
            span_context: trace,
            timeline,
            end,
            now: self.now(),
        });
    }

    fn announce_end(&self, live: &ClaimRuntime, end: ClaimEnd) {
        let Some(announcer) = &self.config.announcer else { return };
        // The next process announces its end.
        let is_told_later = matches!(
            end,
            ClaimEnd::Lost(LossReason::ShutdownDeadline)
                | ClaimEnd::Unconfirmed { loss: LossReason::ShutdownDeadline, .. }
        );
        let Some(kind) = EndKind::of(end).filter(|_| !is_told_later) else { return };
        let event_type = match kind {
            EndKind::Completed => "claim.completed",
            EndKind::Failed => "claim.failed",
            EndKind::Exception => "claim.exception",
            EndKind::Lost => "claim.lost",
        };
        let run = &live.run;
        announcer.announce(Announcement {
            event_type,
            key: run.task.to_string(),
            id: format!("{run}/{event_type}"),
            epoch: Some(run.run),
            data: json!({
                "taskId": run.task.to_string(),
                "runId": run.run,
                "source": self.source_name(live.source),
                "outcome": end.outcome().map(|outcome| outcome.to_string()),
                "traceparent": live.trace.map(|trace| trace.to_string()),
            }),
        });
    }

    pub(super) fn close(&mut self, claim: LocalToken, end: ClaimEnd) {
        crash_point("before-journal-close");
        let Some(mut live) = self.calls.claims.remove(&claim) else { unreachable!("{claim:?} is closed twice") };
        let is_discarded = self.discard_work(claim, &live, end);
        if !is_discarded && !journal::is_left_to_next_process(end) {
            self.journal.records.record_closed(EntryId(claim.0));
        }
        self.control.liveness.set_claims_held(self.calls.claims.len());
        live.calls.iter().for_each(|call| call.abort());
        self.announce_end(&live, end);
        if live.recovered {
            return self.close_recovered_claim(&live, end);
        }
        drop_guarded(live.prepared.take());
        let now = self.now();
        self.history.on_claim_ended(live.source, end, now);
        if let Some(granted_at) = live.granted_at {
            let durations = &mut self.history.source(live.source).durations;
            durations.observe(&live.timeline, live.queued_for, granted_at, end, now);
        }
        self.record_trace(&live, end);
        let run = &live.run;
        live.task.iter().for_each(TaskView::end_following);
        let log_bytes = live.task.as_ref().map_or(0, TaskView::log_bytes);
        self.control.counters.add(|counts| counts.log_bytes += log_bytes);
        let trace_id = live.trace.map(|trace| trace.trace_id());
        let trace_id = trace_id.as_ref().map(tracing::field::display);
        let connection_scoped = self.is_connection_scoped(live.source);
        if connection_scoped {
            self.history.requests.count(end, now);
        }
        match end {
            ClaimEnd::Reported(outcome) if connection_scoped => {
                tracing::debug!(claim.run = %run, trace_id, %outcome, "reported");
            }
            ClaimEnd::Reported(outcome) => {
                tracing::info!(claim.run = %run, trace_id, %outcome, "reported");
            }
            ClaimEnd::AlreadyResolved(outcome) => {
                tracing::warn!(claim.run = %run, trace_id, %outcome, "the queue has an outcome already; the report was not accepted");
            }
            ClaimEnd::ReportRejected(outcome) => {
                tracing::error!(claim.run = %run, trace_id, %outcome, "the queue rejected the report; the run will expire");
            }
            ClaimEnd::Unconfirmed { outcome, loss } => {
                tracing::warn!(
                    claim.run = %run, trace_id, %outcome, ?loss,
                    "the report was not answered before the claim was lost; it is unknown whether it was accepted"
                );
            }
            ClaimEnd::Lost(LossReason::Canceled) => {
                tracing::info!(claim.run = %run, trace_id, "canceled; not reported");
            }
            ClaimEnd::Lost(LossReason::DeadlineExceeded) => {
                tracing::info!(claim.run = %run, trace_id, "stopped at the task's deadline; the queue resolves it as deadline-exceeded");
            }
            ClaimEnd::Lost(loss) => {
                tracing::warn!(claim.run = %run, trace_id, ?loss, "claim lost; not reported");
            }
            ClaimEnd::NotGranted => tracing::debug!(claim.run = %run, "not granted"),
        }
        if let Some(granted_at) = live.granted_at {
            let name = live.task_name().map(str::to_owned);
            let reason = live.task.as_ref().and_then(TaskView::failure_reason).map(str::to_owned);
            self.history.keep_result(EndedClaim {
                run: live.run,
                name,
                source: live.source,
                end,
                reason,
                granted_at,
                ended_at: now,
                timeline: live.timeline.clone(),
                reclaimed_at: live.reclaimed_at.clone(),
            });
        }
        if let Some(task) = live.task {
            remove_files(&task);
        }
    }
}

/// On a blocking thread: freeing blocks takes time, and this thread renews the leases of all tasks.
fn remove_files(task: &TaskView) {
    if task.workdir().is_none() && !task.has_log() {
        return;
    }
    let context = task.for_handler();
    tokio::task::spawn_blocking(move || {
        let folder = context.workdir_path().to_owned();
        if let Err(error) = context.clean_up() {
            tracing::warn!(folder = %folder.display(), %error, "cannot remove a task's files");
        }
    });
}
