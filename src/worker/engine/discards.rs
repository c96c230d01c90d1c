//! Removes what ended claims have left elsewhere, such as pods. A claim stays in the journal until then, so that the next process
//! goes on with what this one has not removed.

use std::sync::Arc;

use journeyman_domain::backoff::Backoff;
use journeyman_domain::claim::ClaimEnd;
use journeyman_domain::id::LocalToken;
use journeyman_domain::jitter::Jitter;
use journeyman_domain::journal::{self, EntryId, LeftWork};
use journeyman_domain::limits::{STAGED_CALL_TIMEOUT, WORK_DISCARD_ATTEMPTS_MAX};
use journeyman_domain::staged::UNKNOWN_RETRY;
use journeyman_platform::host::crash_points::crash_point;

use super::catch_panic::{Panicked, catch_panic};
use super::claim_runtime::ClaimRuntime;
use super::event_loop::Engine;
use super::task_view::TaskView;
use crate::handler::{DynHandler, EndedWork};
use crate::source::Source;

impl Engine {
    /// Returns whether the claim is closed in the journal later.
    pub(super) fn discard_work(&mut self, claim: LocalToken, live: &ClaimRuntime, end: ClaimEnd) -> bool {
        let binding = &self.sources[live.source.index()];
        let work = if live.recovered {
            Some(EndedWork { source: binding.name.clone(), run: live.run.clone(), request: None })
        } else {
            live.task.as_ref().and_then(TaskView::left_work)
        };
        let (left, Some(work)) = (journal::left_work(end), work) else { return false };
        if left == LeftWork::Kept || binding.handler.discard(&work).is_none() {
            return false;
        }
        let (source, handler) = (Arc::clone(&binding.source), Arc::clone(&binding.handler));
        let (records, seed) = (self.journal.records.clone(), self.seed ^ claim.0);
        self.calls.spawn_discard(async move {
            let discarding = catch_panic(Box::pin(discard(&*source, &*handler, &work, left, seed)));
            if let Err(Panicked(panic)) = discarding.await {
                tracing::error!(claim.run = %work.run, panic, "the handler panicked in discard");
            }
            records.record_closed(EntryId(claim.0));
        });
        true
    }
}

async fn discard(source: &dyn Source, handler: &dyn DynHandler, work: &EndedWork, left: LeftWork, seed: u64) {
    let (mut backoff, mut jitter) = (Backoff::NEW, Jitter::seeded(seed));
    loop {
        let call = async {
            let is_unwanted = match source.recovery().filter(|_| left == LeftWork::RemovedIfResolved) {
                Some(queue) => queue.is_resolved(&work.run.task).await.map_err(|error| error.message)?,
                None => left == LeftWork::Removed,
            };
            crash_point("before-discard");
            match handler.discard(work).filter(|_| is_unwanted) {
                Some(discarding) => discarding.await,
                None => Ok(()),
            }
        };
        let error = match tokio::time::timeout(STAGED_CALL_TIMEOUT, call).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => format!("no answer within {STAGED_CALL_TIMEOUT:?}"),
        };
        let wait = backoff.wait(UNKNOWN_RETRY, None, &mut jitter);
        if backoff.tries() == WORK_DISCARD_ATTEMPTS_MAX {
            tracing::warn!(claim.run = %work.run, "what the task has left elsewhere was not removed: {error}");
            return;
        }
        tokio::time::sleep(wait).await;
    }
}
