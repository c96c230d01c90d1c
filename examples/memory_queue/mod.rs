//! A source of one's own: a queue in memory, for tests of handlers and of programs that embed a worker.
//!
//! It follows the rules of the real queues (leases that expire, one outcome, retries, redelivery, priorities) on a
//! given clock, without network, credentials or durability.

mod recovery;
mod tasks;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use tokio::sync::Notify;

use tasks::{TaskEntry, TaskTable, priority_queue};

use journeyman::id::{PriorityQueue, Run, TaskId};
use journeyman::outcome::{ExceptionReason, Outcome};
use journeyman::source::{
    Artifact, ArtifactBody, CallError, Capabilities, Claim, Grant, Granted, LossReason, Message, MessageQueue,
    OpenResult, PollBatch, Recovery, RecoveryBatch, Refusal, Source, SourceFuture,
};
use journeyman::time::Instant;

/// The priorities of tasks, highest first; each has a queue.
pub(crate) const PRIORITIES: [&str; 7] = ["highest", "very-high", "high", "medium", "low", "very-low", "lowest"];

/// Returns the time of a monotonic clock.
pub(crate) type NowFn = Arc<dyn Fn() -> Instant + Send + Sync>;

/// How a queue hands out its tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PollStyle {
    /// Messages, with one queue per priority.
    Messages {
        /// How long a received message stays invisible.
        visibility_timeout: Duration,
    },
    /// Claims, by long polls.
    Claims {
        /// How long a poll waits.
        long_poll_wait: Duration,
    },
}

/// The behaviour of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Config {
    /// How tasks are handed out.
    pub(crate) style: PollStyle,
    /// The length of a lease.
    pub(crate) lease: Duration,
    /// Retries of a task without `retries` in its definition.
    pub(crate) retries: u32,
}

impl Default for Config {
    /// As Taskcluster: claims of 20 minutes by long polls of 20 seconds, 5 retries.
    fn default() -> Self {
        Self {
            style: PollStyle::Claims { long_poll_wait: Duration::from_secs(20) },
            lease: Duration::from_secs(20 * 60),
            retries: 5,
        }
    }
}

/// The state of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunState {
    /// Waiting for a worker.
    Pending,
    /// Claimed.
    Running,
    /// Reported, or ended as an exception.
    Resolved(RunEnd),
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunEnd {
    /// Reported by its worker.
    Reported(Outcome),
    /// The lease expired.
    ClaimExpired,
    /// The task was canceled.
    Canceled,
}

/// A task of this id exists already.
#[derive(Debug, thiserror::Error)]
#[error("task {0} exists already")]
pub(crate) struct TaskExists(pub(crate) TaskId);

/// A queue in memory. Clones share it.
#[derive(Clone)]
pub(crate) struct MemoryQueue(Arc<QueueInner>);

struct QueueInner {
    config: Config,
    clock: NowFn,
    state: Mutex<TaskTable>,
    wakeups: Notify,
}

impl MemoryQueue {
    /// Creates an empty queue.
    #[must_use]
    pub(crate) fn new(settings: Config, clock: NowFn) -> Self {
        Self(Arc::new(QueueInner { config: settings, clock, state: Mutex::default(), wakeups: Notify::new() }))
    }

    /// Adds a task. Of its definition, `priority` (default `lowest`) and `retries` are used.
    ///
    /// # Errors
    ///
    /// Fails if a task of this id exists.
    pub(crate) fn create(&self, task: TaskId, definition: Value) -> Result<(), TaskExists> {
        let now = self.now();
        let mut tasks = self.expire_leases(now);
        if tasks.tasks.contains_key(&task) {
            return Err(TaskExists(task));
        }
        let named = definition.get("priority").and_then(Value::as_str);
        let queue = PRIORITIES.iter().position(|name| Some(*name) == named).unwrap_or(PRIORITIES.len() - 1);
        let retries = definition.get("retries").and_then(Value::as_u64);
        let retries_left = retries.and_then(|count| count.try_into().ok()).unwrap_or(self.0.config.retries);
        tasks.tasks.insert(task.clone(), TaskEntry { definition, queue, retries_left, runs: Vec::new() });
        tasks.schedule(&task, now);
        drop(tasks);
        self.0.wakeups.notify_waiters();
        Ok(())
    }

    /// Adds a message that cannot be read.
    pub(crate) fn put_unreadable(&self, queue: PriorityQueue) {
        let now = self.now();
        self.expire_leases(now).push(usize::from(queue.0).min(PRIORITIES.len() - 1), None, now);
        self.0.wakeups.notify_waiters();
    }

    /// Cancels a task. No effect if it is resolved.
    pub(crate) fn cancel(&self, task: &TaskId) {
        let mut tasks = self.expire_leases(self.now());
        tasks.resolve(task, RunEnd::Canceled);
    }

    /// The states of a task's runs in order; empty if there is no such task.
    #[must_use]
    pub(crate) fn states(&self, task: &TaskId) -> Vec<RunState> {
        let tasks = self.expire_leases(self.now());
        tasks.tasks.get(task).map_or_else(Vec::new, |task| task.runs.iter().map(|run| run.state).collect())
    }

    /// An artifact of a run. Its file can be read although the worker has removed it, and stays open until the queue is
    /// dropped.
    #[must_use]
    pub(crate) fn artifact(&self, run: &Run, name: &str) -> Option<ArtifactBody> {
        let tasks = self.expire_leases(self.now());
        tasks.run(run)?.artifacts.get(name).cloned()
    }

    /// Creates a source that claims from this queue as `worker`.
    #[must_use]
    pub(crate) fn source(&self, worker: &str) -> MemorySource {
        MemorySource { queue: self.clone(), worker: worker.into() }
    }

    fn now(&self) -> Instant {
        (self.0.clock)()
    }

    /// The tasks, after expiring leases.
    fn expire_leases(&self, now: Instant) -> MutexGuard<'_, TaskTable> {
        let mut tasks = self.0.state.lock();
        while let Some((_, task)) = tasks.leases.first().filter(|(end, _)| *end <= now).cloned() {
            tasks.resolve(&task, RunEnd::ClaimExpired);
            tasks.retry(&task, now);
        }
        tasks
    }
}

/// A source of claims from a [`MemoryQueue`], for one worker.
#[derive(Clone)]
pub(crate) struct MemorySource {
    queue: MemoryQueue,
    worker: Arc<str>,
}

struct MemoryClaim {
    source: MemorySource,
    run: Run,
}

impl MemorySource {
    async fn poll_claims(&self, max: u8, wait: Duration) -> PollBatch {
        let shared = &self.queue.0;
        let found = async {
            loop {
                let mut woken = std::pin::pin!(shared.wakeups.notified());
                woken.as_mut().enable();
                let now = self.queue.now();
                let batch = self.queue.expire_leases(now).claim_pending(max, self, now);
                if !batch.grants.is_empty() || !batch.messages.is_empty() {
                    return batch;
                }
                woken.await;
            }
        };
        if let Ok(batch) = tokio::time::timeout(wait, found).await {
            return batch;
        }
        // A lease that expired since has woken no poll.
        let now = self.queue.now();
        self.queue.expire_leases(now).claim_pending(max, self, now)
    }

    fn claim_run(&self, run: &Run) -> Result<Grant, CallError> {
        let now = self.queue.now();
        let settings = self.queue.0.config;
        let mut tasks = self.queue.expire_leases(now);
        let lease = match tasks.run(run) {
            Some(found) if found.state == RunState::Pending => settings.lease,
            Some(found) if tasks.is_running(run, &self.worker) => found.taken_until.since(now),
            Some(_) => return Err(gone_error(run, "claimed by another worker, or resolved")),
            None => return Err(gone_error(run, "unknown")),
        };
        tasks.set_lease(run, &self.worker, lease, now);
        tasks.grant(run, self, Granted { sent_at: now, length: lease }).ok_or_else(|| gone_error(run, "unknown"))
    }

    fn extend_lease(&self, run: &Run) -> Result<Granted, CallError> {
        let now = self.queue.now();
        let lease = self.queue.0.config.lease;
        let mut tasks = self.queue.expire_leases(now);
        if !tasks.is_running(run, &self.worker) {
            return Err(gone_error(run, "not running, or not for this worker"));
        }
        tasks.set_lease(run, &self.worker, lease, now);
        Ok(Granted { sent_at: now, length: lease })
    }

    fn take_over_run(&self, run: &Run) -> Result<Grant, CallError> {
        let lease = self.extend_lease(run)?;
        let grant = self.queue.0.state.lock().grant(run, self, lease);
        grant.ok_or_else(|| gone_error(run, "unknown"))
    }

    fn delete_message(&self, message: &Message) -> Result<(), CallError> {
        let Message { queue, id, receipt, .. } = message;
        let mut tasks = self.queue.expire_leases(self.queue.now());
        let Some(entries) = tasks.entries.get_mut(usize::from(queue.0)) else {
            return Err(call_error(Refusal::Rejected, format!("there is no priority queue {}", queue.0)));
        };
        let Some(place) = entries.iter().position(|entry| entry.id == *id) else { return Ok(()) };
        if entries[place].receipt != *receipt {
            let what = format!("delete of {id}: it was received again since");
            return Err(call_error(Refusal::Rejected, what));
        }
        entries.remove(place);
        Ok(())
    }
}

impl MemoryClaim {
    fn report_outcome(&self, outcome: Outcome) -> Result<(), CallError> {
        let (run, MemorySource { queue, worker }) = (&self.run, &self.source);
        if outcome == Outcome::Deferred {
            return Err(call_error(Refusal::Rejected, format!("report of {run}: this queue schedules no messages")));
        }
        let now = queue.now();
        let mut tasks = queue.expire_leases(now);
        if tasks.is_running(run, worker) {
            tasks.resolve(&run.task, RunEnd::Reported(outcome));
            if matches!(
                outcome,
                Outcome::Exception(ExceptionReason::WorkerShutdown | ExceptionReason::IntermittentTask)
            ) {
                tasks.retry(&run.task, now);
                drop(tasks);
                queue.0.wakeups.notify_waiters();
            }
            return Ok(());
        }
        let again = RunState::Resolved(RunEnd::Reported(outcome));
        let repeated =
            tasks.run(run).is_some_and(|found| found.state == again && found.worker.as_ref() == Some(worker));
        if repeated { Ok(()) } else { Err(gone_error(run, "resolved already")) }
    }

    fn store_artifact(&self, artifact: &Artifact) -> Result<(), CallError> {
        let (run, MemorySource { queue, worker }) = (&self.run, &self.source);
        let mut tasks = queue.expire_leases(queue.now());
        let found = tasks.run_mut(run).filter(|found| found.worker.as_ref() == Some(worker));
        let open = |state| {
            let ended = RunState::Resolved(RunEnd::Reported(Outcome::Completed));
            state != ended && state != RunState::Resolved(RunEnd::Reported(Outcome::Failed))
        };
        let found = found
            .filter(|found| open(found.state))
            .ok_or_else(|| gone_error(run, "resolved, and takes no artifacts"))?;
        found.artifacts.insert(artifact.name.clone(), artifact.body.clone());
        Ok(())
    }
}

fn call_error(refusal: Refusal, what: String) -> CallError {
    CallError { refusal, message: what }
}

fn gone_error(run: &Run, how: &str) -> CallError {
    call_error(Refusal::Gone, format!("run {run} is {how}"))
}

impl Source for MemorySource {
    fn describe(&self) -> String {
        "queue in memory".into()
    }

    fn service_id(&self) -> String {
        format!("memory at {:p}", Arc::as_ptr(&self.queue.0))
    }

    fn claimant(&self) -> String {
        format!("{} {}", self.service_id(), self.worker)
    }

    fn capabilities(&self) -> Capabilities {
        let claims = matches!(self.queue.0.config.style, PollStyle::Claims { .. });
        Capabilities {
            long_poll: claims,
            supports_recovery: claims,
            reports_cancellation: true,
            connection_scoped: false,
            fenced_reports: false,
        }
    }

    fn open(&self) -> SourceFuture<'_, OpenResult> {
        let queues = match self.queue.0.config.style {
            PollStyle::Messages { .. } => priority_queue(PRIORITIES.len()).0,
            PollStyle::Claims { .. } => 1,
        };
        Box::pin(async move { Ok(OpenResult { priority_queues: queues, usable_for: None }) })
    }

    fn poll(&self, queue: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch> {
        Box::pin(async move {
            match self.queue.0.config.style {
                PollStyle::Claims { long_poll_wait: wait } => Ok(self.poll_claims(max, wait).await),
                PollStyle::Messages { visibility_timeout: hidden } => {
                    let queue = usize::from(queue.0);
                    if queue >= PRIORITIES.len() {
                        return Err(call_error(Refusal::Stale, format!("there is no priority queue {queue}")));
                    }
                    let now = self.queue.now();
                    Ok(self.queue.expire_leases(now).receive(queue, max, hidden, now))
                }
            }
        })
    }

    fn message_queue(&self) -> Option<&dyn MessageQueue> {
        matches!(self.queue.0.config.style, PollStyle::Messages { .. }).then_some(self)
    }

    fn recovery(&self) -> Option<&dyn Recovery> {
        Some(self)
    }
}

impl MessageQueue for MemorySource {
    fn claim<'a>(&'a self, run: &'a Run) -> SourceFuture<'a, Grant> {
        Box::pin(async { self.claim_run(run) })
    }

    fn delete<'a>(&'a self, message: &'a Message) -> SourceFuture<'a, ()> {
        Box::pin(async move { self.delete_message(message) })
    }
}

impl Recovery for MemorySource {
    fn recover<'a>(&'a self, held: &'a [Run], newer_than: Option<Duration>) -> SourceFuture<'a, RecoveryBatch> {
        Box::pin(async move { Ok(self.recover_claims(held, newer_than)) })
    }

    fn take_over<'a>(&'a self, run: &'a Run) -> SourceFuture<'a, Grant> {
        Box::pin(async { self.take_over_run(run) })
    }
}

impl Claim for MemoryClaim {
    fn run(&self) -> &Run {
        &self.run
    }

    fn renew(&self) -> SourceFuture<'_, Granted> {
        Box::pin(async { self.source.extend_lease(&self.run) })
    }

    fn report(&self, outcome: Outcome) -> SourceFuture<'_, ()> {
        Box::pin(async move { self.report_outcome(outcome) })
    }

    fn upload<'a>(&'a self, artifact: &'a Artifact) -> SourceFuture<'a, ()> {
        Box::pin(async move { self.store_artifact(artifact) })
    }

    fn lost_reason(&self) -> SourceFuture<'_, Option<LossReason>> {
        Box::pin(async {
            let MemorySource { queue, worker } = &self.source;
            let tasks = queue.expire_leases(queue.now());
            Ok(match tasks.run(&self.run).map(|run| run.state) {
                _ if tasks.is_running(&self.run, worker) => None,
                Some(RunState::Resolved(RunEnd::Canceled)) => Some(LossReason::Canceled),
                Some(_) | None => Some(LossReason::Revoked),
            })
        })
    }
}
