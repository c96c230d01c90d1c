//! The end of a claim: what is told, counted and taken away.

use tokio::task::AbortHandle;

use crate::domain::claim::{End, Loss};
use crate::domain::id::{Run, Token};
use crate::domain::journal::{After, EntryId};
use crate::domain::outcome::{Outcome, Reason};
use crate::host::crash::crash_point;

use super::counters::{add, count};
use super::engine::Engine;
use super::guard::discard;
use super::live::{Job, Live};
use super::record::Record;

impl Engine {
    fn record(&self, live: &Live, run: &Run, end: End) {
        let (Some(recorder), Some(trace)) = (&self.settings.recorder, live.recorded) else { return };
        let source = self.feeds.get(live.feed).map(|feed| feed.name.clone()).unwrap_or_default();
        let timeline = live.timeline.clone();
        recorder.ended(Record { run: run.clone(), source, trace, timeline, end, now: self.clock.now() });
    }

    /// The claim is over.
    pub(super) fn close(&mut self, claim: Token, run: &Run, end: End) {
        crash_point("before-closing");
        match After::of(end) {
            After::Nothing => self.journal.over(EntryId(claim.0)),
            After::AskAgain => {}
        }
        let Some(mut live) = self.live.remove(&claim) else { return };
        self.control.pulse.hold(self.live.len());
        if self.left_over_ended(claim, live.feed, end) {
            live.calls.iter().for_each(AbortHandle::abort);
            return;
        }
        discard(live.prepared.take());
        live.calls.iter().for_each(AbortHandle::abort);
        self.count_end(live.feed, end);
        self.record(&live, run, end);
        let counters = self.counters();
        add(&counters.log_bytes, live.job.as_ref().map_or(0, |job| job.context.log().bytes()));
        let trace_id = live.trace.map(|trace| trace.trace_id());
        let trace_id = trace_id.as_ref().map(tracing::field::display);
        match end {
            End::Reported(outcome) => {
                count(match outcome {
                    Outcome::Completed => &counters.completed,
                    Outcome::Failed => &counters.failed,
                    Outcome::Exception(Reason::WorkerShutdown) => &counters.handed_back,
                    Outcome::Exception(_) => &counters.exceptions,
                });
                tracing::info!(claim.run = %run, trace_id, %outcome, "reported");
            }
            End::Superseded(outcome) => {
                count(&counters.superseded);
                tracing::warn!(claim.run = %run, trace_id, %outcome, "the queue has an outcome for it already; ours is not taken");
            }
            End::Unreportable(outcome) => {
                count(&counters.lost);
                tracing::error!(claim.run = %run, trace_id, %outcome, "the queue refuses the report; the run will expire");
            }
            End::Unconfirmed { outcome, loss: loss @ (Loss::Refused | Loss::Canceled) } => {
                count(&counters.unconfirmed);
                tracing::warn!(
                    claim.run = %run, trace_id, %outcome, ?loss,
                    "the report was not answered, and the queue says that the claim is over: most likely by this report"
                );
            }
            End::Unconfirmed { outcome, loss } => {
                count(&counters.unconfirmed);
                tracing::warn!(
                    claim.run = %run, trace_id, %outcome, ?loss,
                    "the report was not answered before the claim was given up; whether it was accepted is not known"
                );
            }
            End::Lost(Loss::Canceled) => {
                count(&counters.superseded);
                tracing::info!(claim.run = %run, trace_id, "canceled, or resolved by somebody else; nothing is reported");
            }
            End::Lost(loss) => {
                count(&counters.lost);
                tracing::warn!(claim.run = %run, trace_id, ?loss, "claim lost; nothing is reported");
            }
            End::NotGranted => tracing::debug!(claim.run = %run, "not granted"),
        }
        if let Some(job) = live.job {
            remove(job);
        }
    }
}

/// Takes away what a finished task leaves on the disk, if there is anything. Off this thread: a disk may take its time
/// to free blocks, and the leases of all other tasks are kept here.
fn remove(job: Job) {
    if job.context.folder_made().is_none() && job.context.log().is_empty() {
        return;
    }
    tokio::task::spawn_blocking(move || {
        let Job { context, folder } = job;
        if let Err(error) = context.clear_away() {
            tracing::warn!(folder = %folder.display(), %error, "what a task left could not be removed");
        }
    });
}
