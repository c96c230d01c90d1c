//! One function for each effect that takes time; each returns exactly one [`CallResult`].

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};

use crate::handler::log::TaskLog;
use crate::handler::sidecar::SidecarStatus;
use crate::handler::{Context, DynHandler, ExecuteError, PrepareError, PreparedPayload};
use crate::source::{
    Artifact, CallError, Claim, Grant, Message, OpenResult, PollBatch, RecoveryBatch, Source, SourceEvent, SourceFuture,
};
use journeyman_domain::claim::{ClaimEvent, UploadStatus};
use journeyman_domain::id::{LocalToken, PriorityQueue, Run, SourceId};
use journeyman_domain::limits::{HOST_RESOURCES_INTERVAL, KILL_SLACK, PROCESS_KILL_INTERVAL, PROCESS_KILL_TIMEOUT};
use journeyman_domain::outcome::{Cleanup, ExecuteFailure, Outcome, PrepareFailure, Verdict};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::time::Instant;
use journeyman_domain::worker::{Event, HostResources};
use journeyman_platform::host::resources;

use super::catch_panic::{Panicked, catch_panic};
use super::host_probe::{HostProbe, blocking_probe};
use super::running_calls::UncleanedScope;
use super::task_view::TaskView;
use super::uploads::Uploader;
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::crash_points::crash_point;
use journeyman_platform::host::journal::PendingRecord;
use journeyman_platform::host::work_dir::WorkDirLock;

/// Before a source that panicked is asked for its next event again.
const SOURCE_EVENT_RETRY: Duration = Duration::from_secs(1);

/// What a call returns: the event of the rules, or what the engine makes it from.
pub(super) enum CallResult {
    Event(Event),
    /// Nothing follows from it.
    Done,
    Claim {
        claim: LocalToken,
        event: ClaimEvent,
        attachment: Option<Attachment>,
    },
    Opened {
        source: SourceId,
        sent_at: Instant,
        answer: Result<OpenResult, CallError>,
    },
    Polled {
        source: SourceId,
        answer: Result<PollBatch, CallError>,
    },
    Recovered {
        source: SourceId,
        answer: Result<RecoveryBatch, CallError>,
    },
    ResourcesMeasured {
        resources: HostResources,
        /// An error says how this worker has lost the work directory.
        work_dir: io::Result<()>,
    },
    SourceEvent {
        source: SourceId,
        event: SourceEvent,
    },
    /// `None` once the sidecar has ended.
    SidecarChanged {
        sidecar: usize,
        status: Option<watch::Receiver<SidecarStatus>>,
    },
}

/// What the engine keeps of a call about a claim.
pub(super) enum Attachment {
    Grant(Box<Grant>),
    ClaimRefused(CallError),
    Prepared(PreparedPayload),
    /// Processes of the payload may have survived.
    CleanupPending,
}

impl CallResult {
    fn of_claim(claim: LocalToken, event: ClaimEvent) -> Self {
        Self::Claim { claim, event, attachment: None }
    }

    fn claimed(claim: LocalToken, answer: Result<Grant, CallError>) -> Self {
        let (answer, attachment) = match answer {
            Ok(grant) => (Ok(grant.lease), Attachment::Grant(Box::new(grant))),
            Err(error) => (Err(error.refusal), Attachment::ClaimRefused(error)),
        };
        Self::Claim { claim, event: ClaimEvent::Claimed(answer), attachment: Some(attachment) }
    }

    fn ended(claim: LocalToken, verdict: Verdict, cleanup: Cleanup) -> Self {
        crash_point("exited");
        let attachment = (cleanup == Cleanup::Incomplete).then_some(Attachment::CleanupPending);
        Self::Claim { claim, event: ClaimEvent::Ended(verdict), attachment }
    }
}

/// Measures the host's resources after an interval. What cannot be measured is measured again at the next interval.
pub(super) async fn measure_resources(tasks: PathBuf, hold: WorkDirLock, in_flight: Arc<Semaphore>) -> CallResult {
    tokio::time::sleep(HOST_RESOURCES_INTERVAL).await;
    let measure = move || (resources::measure(&tasks), hold.verify());
    let measured = blocking_probe(&in_flight, HOST_RESOURCES_INTERVAL, measure).await;
    let (resources, work_dir) = measured.unwrap_or((HostResources { disk: None, memory: None }, Ok(())));
    CallResult::ResourcesMeasured { resources, work_dir }
}

pub(super) async fn next_source_event(source: Arc<dyn Source>, id: SourceId) -> CallResult {
    loop {
        match catch_panic(source.next_event()).await {
            Ok(event) => return CallResult::SourceEvent { source: id, event },
            Err(Panicked(text)) => {
                tracing::error!(panic = text, "a source panicked; asking for its next event again");
                tokio::time::sleep(SOURCE_EVENT_RETRY).await;
            }
        }
    }
}

pub(super) async fn sidecar_changed(sidecar: usize, mut status: watch::Receiver<SidecarStatus>) -> CallResult {
    let status = status.changed().await.is_ok().then_some(status);
    CallResult::SidecarChanged { sidecar, status }
}

pub(super) async fn open(source: Arc<dyn Source>, id: SourceId, clock: Clock) -> CallResult {
    let sent_at = clock.now();
    CallResult::Opened { source: id, sent_at, answer: call_guarded("open", source.open()).await }
}

/// A claiming poll is journaled before it is sent.
pub(super) async fn poll(
    source: Arc<dyn Source>,
    id: SourceId,
    queue: PriorityQueue,
    max: u8,
    noted: Option<PendingRecord>,
) -> CallResult {
    if let Some(noted) = noted {
        // The writer has logged a failure.
        noted.stored().await.ok();
    }
    CallResult::Polled { source: id, answer: call_guarded("poll", source.poll(queue, max)).await }
}

pub(super) async fn recover(
    source: Arc<dyn Source>,
    id: SourceId,
    held: Vec<Run>,
    newer_than: Option<Duration>,
) -> CallResult {
    let answer = match source.recovery() {
        Some(recovery) => call_guarded("recover", recovery.recover(&held, newer_than)).await,
        None => Ok(RecoveryBatch::default()),
    };
    CallResult::Recovered { source: id, answer }
}

pub(super) async fn claim(source: Arc<dyn Source>, claim: LocalToken, run: Run) -> CallResult {
    let answer = match source.message_queue() {
        Some(queue) => call_guarded("claim", queue.claim(&run)).await,
        None => Err(no_messages_error()),
    };
    CallResult::claimed(claim, answer)
}

pub(super) async fn take_over(source: Arc<dyn Source>, claim: LocalToken, run: Run) -> CallResult {
    let answer = match source.recovery() {
        Some(recovery) => call_guarded("take over", recovery.take_over(&run)).await,
        None => {
            let message = format!("take over {run}: the service requeued it when the previous process ended");
            Err(CallError::new(Refusal::Gone, message))
        }
    };
    CallResult::claimed(claim, answer)
}

pub(super) async fn delete(source: Arc<dyn Source>, message: LocalToken, received: Arc<Message>) -> CallResult {
    let answer = match source.message_queue() {
        Some(queue) => call_guarded("delete", queue.delete(&received)).await,
        None => Err(no_messages_error()),
    };
    crash_point("after-delete");
    CallResult::Event(Event::Deleted { message, answer: log_refusal("delete", answer) })
}

/// A fault of the adapter: its polls return messages, and it has no calls for them.
fn no_messages_error() -> CallError {
    CallError { refusal: Refusal::Rejected, message: "the source has no message queue".to_owned() }
}

pub(super) async fn report(
    token: LocalToken,
    claim: Arc<dyn Claim>,
    outcome: Outcome,
    timeout: Duration,
    task: Option<TaskView>,
) -> CallResult {
    let answer = call_with_timeout(timeout, "report", claim.report(outcome)).await;
    if let (Err(error), Some(task)) = (&answer, &task) {
        task.set_progress(&format!("not reported yet: {}", error.message));
    }
    crash_point("after-report");
    CallResult::of_claim(token, ClaimEvent::Reported(log_refusal("report", answer)))
}

pub(super) async fn reclaim(token: LocalToken, claim: Arc<dyn Claim>, timeout: Duration) -> CallResult {
    let answer = call_with_timeout(timeout, "reclaim", claim.renew()).await;
    crash_point("reclaimed");
    CallResult::of_claim(token, ClaimEvent::Reclaimed(log_refusal("reclaim", answer)))
}

pub(super) async fn check_status(token: LocalToken, claim: Arc<dyn Claim>) -> CallResult {
    let answer = call_guarded("status", claim.lost_reason()).await;
    CallResult::of_claim(token, ClaimEvent::StatusChecked(log_refusal("status", answer)))
}

/// I2: kills the processes at the deadline of their cancellation although every thread of the handlers may be blocked, and
/// again, because a handler may start others. Ends with its claim; the handler sees how the processes ended.
pub(super) async fn kill_at_deadline(task: TaskView) -> CallResult {
    task.kill_due().await;
    loop {
        task.scope().kill();
        tokio::time::sleep(PROCESS_KILL_INTERVAL).await;
    }
}

/// Publishes where a log is served once there is one.
pub(super) async fn publish_live_log(claim: Arc<dyn Claim>, log: TaskLog, artifact: Artifact) -> CallResult {
    log.wait_for_growth(0).await;
    if !log.is_finished()
        && let Err(error) = call_guarded("live log", claim.upload(&artifact)).await
    {
        tracing::warn!("a task's log cannot be followed through the queue: {}", error.message);
    }
    CallResult::Done
}

pub(super) async fn probe_host(host: HostProbe) -> CallResult {
    CallResult::Event(Event::HostProbed(host.run().await))
}

pub(super) async fn upload_results(uploader: Uploader, claim: LocalToken, task: TaskView) -> CallResult {
    let status = catch_panic(Box::pin(uploader.upload_all(task))).await.unwrap_or_else(|Panicked(text)| {
        tracing::error!(panic = text, "uploading a task's log and artifacts panicked");
        UploadStatus::UploadFailed
    });
    crash_point("after-upload");
    CallResult::of_claim(claim, ClaimEvent::Uploaded(status))
}

fn log_refusal<T>(operation: &str, answer: Result<T, CallError>) -> Result<T, Refusal> {
    answer.map_err(|error| {
        if error.refusal == Refusal::Gone {
            // The line about the end of the claim says whether it was lost.
            tracing::debug!(operation, refusal = %error.refusal, "{}", error.message);
        } else {
            tracing::warn!(operation, refusal = %error.refusal, "{}", error.message);
        }
        error.refusal
    })
}

/// Prepares once the claim is journaled. A cancellation drops the preparation.
pub(super) async fn prepare(
    handler: Arc<dyn DynHandler>,
    recorded: Option<PendingRecord>,
    claim: LocalToken,
    payload_error: Option<String>,
    context: Context,
) -> CallResult {
    let prepared = async {
        if let Some(recorded) = recorded
            && let Err(why) = recorded.stored().await
        {
            return Ok(Err(PrepareError::new(PrepareFailure::HostFault, why.to_string())));
        }
        if let Some(why) = payload_error {
            return Ok(Err(PrepareError::malformed(vec![format!("payload: invalid JSON: {why}")])));
        }
        catch_panic(handler.prepare_task(&context)).await
    };
    let answer = tokio::select! {
        biased;
        _ = context.canceled() => None,
        answer = prepared => Some(answer),
    };
    // I26: its processes are gone before anything else happens to the claim. A prepared payload may be a process.
    let cleanup = match answer {
        Some(Ok(Ok(_))) => Cleanup::Complete,
        Some(_) | None => context.scope().clean_up().await,
    };
    if !matches!(answer, Some(Ok(Ok(_)))) {
        settle_files(&context, cleanup).await;
    }
    let Some(answer) = answer.filter(|_| cleanup == Cleanup::Complete) else {
        return CallResult::ended(claim, Err(ExecuteFailure::Internal), cleanup);
    };
    let answer =
        if workdir_failed(&context) { Err(PrepareFailure::HostFault) } else { prepare_result(answer, &context) };
    let (answer, attachment) = match answer {
        Ok(prepared) => (Ok(()), Some(Attachment::Prepared(prepared))),
        Err(failure) => (Err(failure), None),
    };
    crash_point("prepared");
    CallResult::Claim { claim, event: ClaimEvent::Prepared(answer), attachment }
}

fn prepare_result(
    answer: Result<Result<PreparedPayload, PrepareError>, Panicked>,
    context: &Context,
) -> Result<PreparedPayload, PrepareFailure> {
    let error = match answer {
        Ok(Ok(prepared)) => return Ok(prepared),
        Ok(Err(error)) => error,
        Err(Panicked(text)) => {
            tracing::error!(claim.run = %context.task().run, panic = text, "the handler panicked in prepare");
            PrepareError::new(PrepareFailure::Internal, "the handler panicked; the worker's log says more")
        }
    };
    match error.reason {
        PrepareFailure::HostFault => tracing::error!(claim.run = %context.task().run, "host fault: {error}"),
        PrepareFailure::ServiceDown => release_unstarted(context, &error),
        PrepareFailure::Malformed | PrepareFailure::Unavailable | PrepareFailure::Internal => {}
    }
    let description = error.reason.description();
    context.log().write_note(&format!("{description}:"));
    error.messages.iter().for_each(|message| context.log().write_note(&format!("  {message}")));
    context.set_failure_reason(&format!("{description}: {error}"));
    Err(error.reason)
}

pub(super) async fn wait_for_cleanup(claim: LocalToken, uncleaned: UncleanedScope) -> CallResult {
    let UncleanedScope { run, scope, processes } = uncleaned;
    let looked = scope.clone();
    // Neither a host without free threads nor an unreadable process delays the wait.
    let describing =
        catch_panic(Box::pin(async move { tokio::task::spawn_blocking(move || looked.describe_processes()).await }));
    let saying = async {
        if let Ok(Ok(Ok(left))) = tokio::time::timeout(PROCESS_KILL_TIMEOUT, describing).await {
            tracing::warn!(claim.run = %run, group = ?scope.cgroup(), "remaining processes: {left}");
            processes.set(left).ok();
        }
    };
    tokio::join!(scope.wait_cleaned_up(), saying);
    tracing::warn!(claim.run = %run, "the remaining processes of a payload are gone; its slot is free");
    CallResult::Event(Event::CleanupDone { claim })
}

/// Prepares and executes on one thread of the handlers, without asking the rules in between.
pub(super) async fn start(
    handler: Arc<dyn DynHandler>,
    claim: LocalToken,
    payload_error: Option<String>,
    context: Context,
) -> CallResult {
    let answer = prepare(handler, None, claim, payload_error, context.clone()).await;
    let CallResult::Claim { attachment: Some(Attachment::Prepared(prepared)), .. } = answer else { return answer };
    execute(prepared, claim, context).await
}

/// A handler that has not returned [`KILL_SLACK`] after its deadline is dropped, which kills its processes.
pub(super) async fn execute(prepared: PreparedPayload, claim: LocalToken, context: Context) -> CallResult {
    let ended = tokio::select! {
        biased;
        ended = catch_panic(prepared(&context)) => ended,
        () = async { (context.kill_due().await, tokio::time::sleep(KILL_SLACK).await).1 } => {
            tracing::error!(claim.run = %context.task().run, "dropping a handler that did not end in time");
            Ok(Err(ExecuteError::internal("the handler did not end after SIGTERM and the grace")))
        }
    };
    // I26: also for a handler that was dropped, or that left processes behind.
    let cleanup = context.scope().clean_up().await;
    settle_files(&context, cleanup).await;
    CallResult::ended(claim, verdict(ended, &context), cleanup)
}

/// The next task finds the named caches as soon as it can start. What processes may still write is not given to it.
async fn settle_files(context: &Context, cleanup: Cleanup) {
    if cleanup == Cleanup::Incomplete {
        return context.abandon_caches();
    }
    if context.may_return_caches() {
        let returned = context.clone();
        // A panic leaves the caches to the task.
        tokio::task::spawn_blocking(move || returned.return_caches()).await.ok();
    }
    remove_all_but_artifacts(context.clone());
}

/// At once: a task that has filled the disk would keep its results, and those of others, from being stored. Nothing waits for
/// it, because it may take seconds.
fn remove_all_but_artifacts(context: Context) {
    if context.workdir_result().is_some() {
        tokio::task::spawn_blocking(move || {
            if let Err(error) = context.remove_all_but_artifacts() {
                tracing::debug!(claim.run = %context.task().run, %error, "cannot remove files of an ended task yet");
            }
        });
    }
}

/// If the task's directory cannot be created, the handler's result says nothing about the task.
fn workdir_failed(context: &Context) -> bool {
    let Some(Err(error)) = context.workdir_result() else { return false };
    let run = &context.task().run;
    tracing::error!(claim.run = %run, %error, "cannot create the task's directory; check `work_dir`, its disk and its owner");
    true
}

fn verdict(ended: Result<Result<(), ExecuteError>, Panicked>, context: &Context) -> Verdict {
    if workdir_failed(context) {
        return Err(ExecuteFailure::HostFault);
    }
    let error = match ended {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error,
        Err(Panicked(text)) => {
            tracing::error!(claim.run = %context.task().run, panic = text, "the handler panicked");
            ExecuteError::internal("the handler panicked; the worker's log says more")
        }
    };
    match error.reason {
        ExecuteFailure::Deferred => return Err(error.reason),
        ExecuteFailure::HostFault => tracing::error!(claim.run = %context.task().run, "host fault: {error}"),
        ExecuteFailure::AccessDenied => tracing::error!(claim.run = %context.task().run, "access denied: {error}"),
        ExecuteFailure::ServiceDown => release_unstarted(context, &error),
        ExecuteFailure::Failed
        | ExecuteFailure::Intermittent
        | ExecuteFailure::Unavailable
        | ExecuteFailure::Internal => {}
    }
    // A payload that was stopped has not failed by itself.
    let is_stopped = error.reason == ExecuteFailure::Failed && context.cancellation().is_some();
    let description = if is_stopped { "not completed" } else { error.reason.description() };
    let message = format!("{description}: {error}");
    context.log().write_note(&message);
    context.set_failure_reason(&message);
    Err(error.reason)
}

/// A redelivery does not count as an attempt.
fn release_unstarted(context: &Context, error: &dyn std::fmt::Display) {
    tracing::warn!(claim.run = %context.task().run, "released: {error}");
    if let Some(results) = context.results() {
        results.mark_not_started();
    }
}

async fn call_with_timeout<T>(timeout: Duration, operation: &str, answer: SourceFuture<'_, T>) -> Result<T, CallError> {
    match tokio::time::timeout(timeout, call_guarded(operation, answer)).await {
        Ok(answer) => answer,
        Err(_) => Err(CallError::retry(format!("{operation}: no answer within {timeout:?}"))),
    }
}

async fn call_guarded<T>(operation: &str, answer: SourceFuture<'_, T>) -> Result<T, CallError> {
    catch_panic(answer).await.unwrap_or_else(|Panicked(text)| {
        tracing::error!(operation, panic = text, "a source panicked");
        Err(CallError::retry(format!("{operation}: the source panicked")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handler::log::{LogLimits, TaskLog};
    use crate::handler::{PayloadHandler, TaskInfo, erase};
    use journeyman_domain::id::TaskId;
    use std::path::Path;
    use tokio::sync::watch;

    /// Succeeds, with or without using its work directory.
    struct OkHandler {
        uses: Uses,
    }

    #[derive(PartialEq)]
    enum Uses {
        InPrepare,
        InExecute,
        Never,
    }

    impl PayloadHandler for OkHandler {
        type Payload = serde_json::Value;
        type Prepared = ();

        async fn prepare(&self, _: serde_json::Value, context: &Context) -> Result<(), PrepareError> {
            if self.uses == Uses::InPrepare {
                assert!(context.workdir().is_absolute());
            }
            Ok(())
        }

        async fn execute(&self, (): (), context: &Context) -> Result<(), ExecuteError> {
            if self.uses == Uses::InExecute {
                assert!(context.workdir().is_absolute());
            }
            Ok(())
        }
    }

    fn context(workdir: &Path) -> Context {
        let run = Run { task: TaskId::parse("fN1SbArXTPSVFNUvaOlinQ").unwrap(), run: 0 };
        let (definition, env) = (Default::default(), Default::default());
        let task = TaskInfo { run, source: "s".into(), definition, env, trace: None, reported_runs: 0 };
        let log = TaskLog::new(workdir.with_extension("log"), LogLimits::default());
        let (cancel, lease) = (watch::channel(None).1, watch::channel(None).1);
        Context::new(task, workdir.to_owned(), log, cancel, lease, Clock::boot())
    }

    async fn prepared(uses: Uses, context: &Context) -> Result<PreparedPayload, PrepareFailure> {
        let handler = erase(OkHandler { uses });
        let back = prepare(handler, Some(PendingRecord::succeeded()), LocalToken(1), None, context.clone()).await;
        let CallResult::Claim { event: ClaimEvent::Prepared(answer), attachment, .. } = back else {
            panic!("it answers whether it is prepared")
        };
        answer.map(|()| match attachment {
            Some(Attachment::Prepared(prepared)) => prepared,
            Some(_) | None => panic!("it holds the prepared payload"),
        })
    }

    async fn ended(uses: Uses, context: &Context) -> Verdict {
        let Ok(prepared) = prepared(uses, context).await else { panic!("it is prepared") };
        let back = execute(prepared, LocalToken(1), context.clone()).await;
        let CallResult::Claim { event: ClaimEvent::Ended(verdict), .. } = back else {
            panic!("it answers how it ended")
        };
        verdict
    }

    #[tokio::test]
    async fn a_task_directory_that_cannot_be_created_is_a_host_fault() {
        let base = tempfile::tempdir().unwrap();
        let blocked = base.path().join("a file");
        std::fs::write(&blocked, "").unwrap();
        let workdir = blocked.join("work");
        assert_eq!(prepared(Uses::InPrepare, &context(&workdir)).await.err(), Some(PrepareFailure::HostFault));
        assert_eq!(ended(Uses::InExecute, &context(&workdir)).await, Err(ExecuteFailure::HostFault));
        assert_eq!(ended(Uses::Never, &context(&workdir)).await, Ok(()));
    }

    #[tokio::test]
    async fn a_task_directory_is_created_on_first_use() {
        let base = tempfile::tempdir().unwrap();
        let workdir = base.path().join("task").join("work");
        assert_eq!(ended(Uses::Never, &context(&workdir)).await, Ok(()));
        assert!(!base.path().join("task").exists());
        // It is removed again as soon as the payload has ended.
        let used = context(&workdir);
        assert_eq!(ended(Uses::InExecute, &used).await, Ok(()));
        assert!(matches!(used.workdir_result(), Some(Ok(()))));
    }
}
