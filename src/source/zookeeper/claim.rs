//! What the claims of all dialects share: the lock as a lease, one settlement, and its end without one.

use std::sync::Arc;

use super::job_source::SourceInner;
use super::queue_watch::QueueWatch;
use crate::domain::id::Run;
use crate::domain::outcome::Outcome;
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::source::{Artifact, CallError, Claim, SourceFuture};
use crate::task::{PartialReplySink, Reply, ReplyFuture, ReplyLimits, Results};

/// How a dialect settles what it holds. Each call may be repeated.
pub(super) trait Held: Send + 'static {
    /// The node that exists as long as the lock is held.
    fn lock_path(&self) -> String;

    /// Writes result and state, then gives the lock up.
    fn settle<'a>(&'a mut self, watch: &'a QueueWatch, outcome: Outcome, results: &'a Results) -> SourceFuture<'a, ()>;

    /// Gives the lock up without an outcome.
    fn abandon(self: Box<Self>, watch: Arc<QueueWatch>) -> SourceFuture<'static, ()>;
}

/// A request that a handler runs.
pub(super) struct JobClaim {
    run: Run,
    source: Arc<SourceInner>,
    watch: Arc<QueueWatch>,
    lock_path: String,
    results: Results,
    state: tokio::sync::Mutex<ClaimState>,
}

struct ClaimState {
    held: Option<Box<dyn Held>>,
    settled_as: Option<Outcome>,
}

impl JobClaim {
    pub(super) fn new(
        run: Run,
        source: &Arc<SourceInner>,
        watch: &Arc<QueueWatch>,
        held: Box<dyn Held>,
        results: Results,
    ) -> Arc<Self> {
        watch.hold(run.task.as_str(), &run);
        Arc::new(Self {
            run,
            source: Arc::clone(source),
            watch: Arc::clone(watch),
            lock_path: held.lock_path(),
            results,
            state: tokio::sync::Mutex::new(ClaimState { held: Some(held), settled_as: None }),
        })
    }

    fn error(&self, refusal: Refusal, operation: &str, why: &str) -> CallError {
        CallError { refusal, message: format!("{operation} {}: {why}", self.run) }
    }
}

impl Claim for JobClaim {
    fn run(&self) -> &Run {
        &self.run
    }

    fn is_lost(&self) -> bool {
        self.watch.session.is_ended()
    }

    fn renew(&self) -> SourceFuture<'_, Instant> {
        Box::pin(async {
            let session = &self.watch.session;
            let gone = |why| Err(self.error(Refusal::Gone, "reclaim", why));
            if session.is_ended() {
                return gone("the session has expired");
            }
            let sent_at = self.source.clock.now();
            match session.stat(&self.lock_path).await? {
                Some(stat) if stat.ephemeral_owner == session.id() => Ok(SourceInner::expires_at(&self.watch, sent_at)),
                Some(_) => gone("another session holds its lock"),
                None => gone("its lock is gone"),
            }
        })
    }

    fn report(&self, outcome: Outcome) -> SourceFuture<'_, ()> {
        Box::pin(async move {
            let mut state = self.state.lock().await;
            match state.settled_as {
                Some(earlier) if earlier == outcome => return Ok(()),
                Some(earlier) => {
                    return Err(self.error(Refusal::Gone, "report", &format!("it was settled as {earlier}")));
                }
                None => {}
            }
            let ClaimState { held: Some(held), settled_as } = &mut *state else {
                return Err(self.error(Refusal::Gone, "report", "it was abandoned"));
            };
            // Another worker may run the request already, and its outcome is the one that counts.
            if self.watch.session.is_ended() {
                return Err(self.error(Refusal::Gone, "report", "the session has expired"));
            }
            held.settle(&self.watch, outcome, &self.results).await?;
            *settled_as = Some(outcome);
            Ok(())
        })
    }

    fn upload<'a>(&'a self, artifact: &'a Artifact) -> SourceFuture<'a, ()> {
        Box::pin(async move {
            // Logs are served while the request runs, and not stored.
            if artifact.name.starts_with("public/logs/") {
                return Ok(());
            }
            let why = format!("requests have no artifacts; {} can be part of the result", artifact.name);
            Err(self.error(Refusal::Rejected, "upload", &why))
        })
    }
}

impl Drop for JobClaim {
    /// The payload has ended without a report. Its lock is given up, so that others need not wait for the session to expire.
    fn drop(&mut self) {
        let ClaimState { held, settled_as } = self.state.get_mut();
        let (watch, id) = (Arc::clone(&self.watch), self.run.task.clone());
        watch.let_go(id.as_str());
        if let Some(held) = held.take().filter(|_| settled_as.is_none() && !watch.session.is_ended()) {
            self.source.spawn(async move {
                if let Err(error) = held.abandon(watch).await {
                    tracing::warn!(request = %id, "{}; the lock is held until the session expires", error.message);
                }
            });
        }
    }
}

/// These queues have no partial results.
struct NoPartialResults;

impl PartialReplySink for NoPartialResults {
    fn send(&self, _reply: Reply) -> ReplyFuture<'_> {
        Box::pin(std::future::ready(Err(CallError {
            refusal: Refusal::Gone,
            message: "this queue has no partial results".to_owned(),
        })))
    }
}

pub(super) fn results() -> Results {
    let limits = ReplyLimits { body_bytes: crate::limits::ZOOKEEPER_RESULT_BYTES_MAX, content_type_bytes: 255 };
    Results::new(NoPartialResults, limits)
}
