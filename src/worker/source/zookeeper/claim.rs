//! What the claims of all dialects share: the lock as a lease, one settlement, and its end without one; and what happens to a
//! build before its end, its status and its pauses.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::queue_watch::{HoldGuard, QueueWatch};
use super::{Dialect, ZooKeeperSourceConfig};
use crate::source::{
    Artifact, CallError, Claim, Granted, LossReason, RunTerms, SourceEvent, SourceFuture, cannot_defer,
};
use crate::task::{PartialReplySink, Reply, ReplyFuture, ReplyLimits, Results, cannot_pause};
use journeyman_domain::id::Run;
use journeyman_domain::outcome::Outcome;
use journeyman_domain::refusal::Refusal;
use journeyman_platform::host::clock::Clock;
use journeyman_platform::tasks::supervised;
use journeyman_platform::zookeeper::job_queue::JobQueue;
use journeyman_platform::zookeeper::{ConnectConfig, Session};

/// The terms of a run without a deadline.
pub(super) const UNLIMITED: RunTerms = RunTerms { deadline: None, retries_left: Some(u32::MAX) };

/// A queue, and the session that uses it.
#[derive(Clone)]
pub(super) struct QueueSession {
    pub(super) session: Arc<Session>,
    pub(super) queue: JobQueue,
}

/// How a dialect settles what it holds. Each call may be repeated.
pub(super) trait Held: Send + 'static {
    /// The bytes that the handler's result may have.
    fn result_bytes_max(&self) -> usize;

    /// The node that exists as long as the lock is held.
    fn lock_path(&self) -> String;

    /// Goes on in another session, unless another worker has had the request since the one before has expired (I9).
    fn reclaim<'a>(&'a mut self, at: &'a QueueSession) -> SourceFuture<'a, ()>;

    /// Writes result and state, then gives the lock up.
    fn settle<'a>(&'a mut self, at: &'a QueueSession, outcome: Outcome, results: &'a Results) -> SourceFuture<'a, ()>;

    /// Gives the lock up without an outcome.
    fn abandon(self: Box<Self>, at: QueueSession) -> SourceFuture<'static, ()>;

    /// Sends a partial result.
    fn send_status<'a>(&'a mut self, _at: &'a QueueSession, _status: Reply) -> SourceFuture<'a, ()> {
        Box::pin(std::future::ready(Err(no_partial_results())))
    }

    /// Writes that the task waits to be resumed.
    fn pause<'a>(&'a mut self, _at: &'a QueueSession, _results: &'a Results) -> SourceFuture<'a, ()> {
        Box::pin(std::future::ready(Err(cannot_pause())))
    }

    /// Writes that the task goes on.
    fn resume<'a>(&'a mut self, _at: &'a QueueSession) -> SourceFuture<'a, ()> {
        Box::pin(std::future::ready(Err(cannot_pause())))
    }
}

/// What the claims of a source share.
pub(super) struct SourceContext {
    pub(super) dialect: Dialect,
    pub(super) worker_id: String,
    connect: ConnectConfig,
    pub(super) clock: Clock,
    pub(super) events: mpsc::Sender<SourceEvent>,
    /// Watching, pauses, and giving up locks of claims without a report.
    pub(super) tasks: Mutex<JoinSet<()>>,
    /// Where the source is polled: a handler that pauses or drops its claim runs on threads that end earlier.
    runtime: OnceLock<Handle>,
}

impl SourceContext {
    pub(super) fn new(config: &ZooKeeperSourceConfig, events: mpsc::Sender<SourceEvent>) -> Self {
        let (tasks, runtime) = (Mutex::default(), OnceLock::new());
        let (dialect, worker_id, connect) = (config.dialect, config.worker_id.clone(), config.connect.clone());
        Self { dialect, worker_id, connect, clock: Clock::boot(), events, tasks, runtime }
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn_on(supervised("a ZooKeeper source", task), self.runtime.get_or_init(Handle::current));
    }
}

/// A request that a handler runs.
pub(super) struct JobClaim {
    run: Run,
    source: Arc<SourceContext>,
    watch: Arc<QueueWatch>,
    lock_path: String,
    results: Results,
    hold: HoldGuard,
    state: Arc<tokio::sync::Mutex<ClaimState>>,
    /// Held while the task is paused.
    pause: Arc<tokio::sync::Mutex<()>>,
    /// The payload has ended.
    ended: CancellationToken,
    /// The outcome was accepted, and the caller of the report knows it.
    reported: AtomicBool,
}

struct ClaimState {
    held: Option<Box<dyn Held>>,
    /// Not that of the watch, once the claim has outlived it.
    at: QueueSession,
    settled_as: Option<Outcome>,
}

impl JobClaim {
    pub(super) fn new(
        run: Run,
        source: &Arc<SourceContext>,
        watch: &Arc<QueueWatch>,
        hold: HoldGuard,
        held: Box<dyn Held>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|claim| Self {
            run,
            hold,
            source: Arc::clone(source),
            watch: Arc::clone(watch),
            lock_path: held.lock_path(),
            results: results(Weak::clone(claim), held.result_bytes_max()),
            state: Arc::new(tokio::sync::Mutex::new(ClaimState {
                held: Some(held),
                at: watch.at.clone(),
                settled_as: None,
            })),
            pause: Arc::default(),
            ended: CancellationToken::new(),
            reported: AtomicBool::new(false),
        })
    }

    /// The sink of the handler's replies.
    pub(super) fn results(&self) -> Results {
        self.results.clone()
    }

    async fn send_status(&self, status: Reply) -> Result<(), CallError> {
        self.state.lock().await.running()?.send_status(&self.watch.at, status).await
    }

    /// Pauses the task until it is resumed or ends. The claim is held for the writes only, so that its end is seen.
    async fn pause(self: Arc<Self>) -> Result<(), CallError> {
        let (watch, id, ended) = (Arc::clone(&self.watch), self.run.task.clone(), self.ended.clone());
        self.state.lock().await.running()?.pause(&watch.at, &self.results).await?;
        // Jobs that take as long as they like depend on it.
        _ = self.source.events.send(SourceEvent::Terms(self.run.clone(), UNLIMITED)).await;
        let claim = Arc::downgrade(&self);
        drop(self);
        tokio::select! {
            () = ended.cancelled() => return Err(has_ended()),
            resumed = watch.resumed(id.as_str()) => resumed?,
        }
        let claim = claim.upgrade().ok_or_else(has_ended)?;
        claim.state.lock().await.running()?.resume(&watch.at).await
    }

    fn error(&self, refusal: Refusal, operation: &str, why: &str) -> CallError {
        CallError { refusal, message: format!("{operation} {}: {why}", self.run) }
    }
}

impl ClaimState {
    fn running(&mut self) -> Result<&mut Box<dyn Held>, CallError> {
        self.held.as_mut().filter(|_| self.settled_as.is_none()).ok_or_else(has_ended)
    }

    async fn settle(&mut self, connect: &ConnectConfig, outcome: Outcome, results: &Results) -> Result<(), CallError> {
        let gone = |message: &str| Err(gone(message));
        match self.settled_as {
            Some(earlier) if earlier == outcome => return Ok(()),
            Some(earlier) => return gone(&format!("it was settled as {earlier}")),
            None => {}
        }
        let Some(held) = &mut self.held else { return gone("it was abandoned") };
        if self.at.session.is_ended() {
            let session = Arc::new(Session::connect(connect).await?);
            let at = QueueSession { session, queue: self.at.queue.clone() };
            held.reclaim(&at).await?;
            self.at = at;
        }
        held.settle(&self.at, outcome, results).await?;
        self.settled_as = Some(outcome);
        Ok(())
    }
}

impl Claim for JobClaim {
    fn run(&self) -> &Run {
        &self.run
    }

    fn known_loss(&self) -> Option<LossReason> {
        if self.watch.at.session.is_ended() {
            return Some(LossReason::Revoked);
        }
        self.hold.is_canceled().then_some(LossReason::Canceled)
    }

    fn renew(&self) -> SourceFuture<'_, Granted> {
        Box::pin(async {
            let session = &self.watch.at.session;
            let gone = |why| Err(self.error(Refusal::Gone, "reclaim", why));
            let is_reporting = self.ended.is_cancelled() && !self.reported.load(Ordering::Relaxed);
            let by_report = |why| Err(self.error(Refusal::Retry { retry_after: None }, "reclaim", why));
            if session.is_ended() {
                let why = "the session has expired";
                return if is_reporting { by_report(why) } else { gone(why) };
            }
            let sent_at = self.source.clock.now();
            // Half of what the worker waits for a reclaim. What the session has proved is true without an answer too.
            let proved = Granted { sent_at: session.proved_at(), length: session.timeout() };
            let stat = match timeout(session.timeout() / 48, session.stat(&self.lock_path)).await {
                Ok(Err(error)) if !error.is_unanswered() => return Err(error.into()),
                Ok(Ok(stat)) => stat,
                Ok(Err(_)) | Err(_) => return Ok(proved),
            };
            match stat {
                Some(stat) if stat.ephemeral_owner == session.id() => {
                    Ok(Granted { sent_at, length: session.timeout() })
                }
                Some(_) => gone("another session holds its lock"),
                // The report gives the lock up as its last step, and its answer decides.
                None if is_reporting => by_report("the report under way gives its lock up"),
                None => gone("its lock is gone"),
            }
        })
    }

    fn report(&self, outcome: Outcome) -> SourceFuture<'_, ()> {
        Box::pin(async move {
            if outcome == Outcome::Deferred {
                return Err(cannot_defer(&self.run));
            }
            self.ended.cancel();
            let (state, source, results) = (Arc::clone(&self.state), Arc::clone(&self.source), self.results.clone());
            let (sender, settled) = oneshot::channel();
            self.hold.set_settling();
            // Not in this future: a report that takes too long is dropped and repeated, and between two writes a repetition
            // would not know whether the request is settled.
            self.source.spawn(async move {
                _ = sender.send(state.lock().await.settle(&source.connect, outcome, &results).await);
            });
            let settled =
                settled.await.unwrap_or_else(|_| Err(self.error(Refusal::Gone, "report", "the source is closed")));
            settled.map_err(|CallError { refusal, message }| self.error(refusal, "report", &message))?;
            self.reported.store(true, Ordering::Relaxed);
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
        self.ended.cancel();
        let (state, id) = (Arc::clone(&self.state), self.run.task.clone());
        if self.watch.at.session.is_ended() || state.try_lock().is_ok_and(|state| state.settled_as.is_some()) {
            return;
        }
        self.source.spawn(async move {
            let mut state = state.lock().await;
            let Some(held) = state.held.take().filter(|_| state.settled_as.is_none()) else { return };
            if let Err(error) = held.abandon(state.at.clone()).await {
                tracing::warn!(request = %id, "{}; the lock is held until the session expires", error.message);
            }
        });
    }
}

/// Sends the status and the pauses of a build, as long as it runs.
struct ClaimSink(Weak<JobClaim>);

impl PartialReplySink for ClaimSink {
    fn send(&self, reply: Reply) -> ReplyFuture<'_> {
        Box::pin(async move { self.0.upgrade().ok_or_else(has_ended)?.send_status(reply).await })
    }

    fn pause(&self) -> ReplyFuture<'_> {
        Box::pin(async {
            let claim = self.0.upgrade().ok_or_else(has_ended)?;
            let Ok(paused) = Arc::clone(&claim.pause).try_lock_owned() else {
                return Err(claim.error(Refusal::Rejected, "pause", "it is paused already"));
            };
            let (resumed, answer) = oneshot::channel();
            // Not in this future: if it were dropped between two writes, the version of the request would be unknown.
            let source = Arc::clone(&claim.source);
            source.spawn(async move {
                let answer = claim.pause().await;
                drop(paused);
                if let Err(Err(error)) = resumed.send(answer) {
                    tracing::debug!("{error}");
                }
            });
            answer.await.unwrap_or_else(|_| Err(has_ended()))
        })
    }
}

pub(super) fn gone(message: &str) -> CallError {
    CallError { refusal: Refusal::Gone, message: message.to_owned() }
}

pub(super) fn no_partial_results() -> CallError {
    gone("this queue has no partial results")
}

fn has_ended() -> CallError {
    gone("the task has ended")
}

/// The replies of a task that has no claim any more.
pub(super) fn no_results() -> Results {
    results(Weak::new(), 0)
}

fn results(claim: Weak<JobClaim>, body_bytes: usize) -> Results {
    let limits = ReplyLimits { body_bytes, content_type_bytes: 255 };
    Results::new(ClaimSink(claim), limits)
}
