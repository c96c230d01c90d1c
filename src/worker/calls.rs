//! One function for each effect that takes time; each returns exactly one [`CallResult`].

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, watch};

use crate::domain::claim::UploadStatus;
use crate::domain::host_health::ProbeResult;
use crate::domain::id::{LocalToken, PriorityQueue, Run, SourceId};
use crate::domain::outcome::{Cleanup, ExecuteFailure, Outcome, PrepareFailure, Verdict};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::domain::worker::HostResources;
use crate::handler::sidecar::SidecarStatus;
use crate::handler::{Context, DynHandler, ExecuteError, PrepareError, PreparedPayload};
use crate::host::resources;
use crate::limits::{HOST_RESOURCES_INTERVAL, KILL_SLACK, PROCESS_KILL_TIMEOUT};
use crate::source::{CallError, Claim, Grant, OpenResult, PollBatch, RecoveryBatch, Source, SourceEvent, SourceFuture};

use super::catch_panic::{Panicked, catch_panic};
use super::claim_runtime::{Execution, PolledMessage};
use super::host_probe::HostProbe;
use super::timeline::ClaimPhase;
use super::uploads::Uploader;
use crate::host::clock::Clock;
use crate::host::containment::ProcessScope;
use crate::host::crash_points::crash_point;
use crate::host::journal::{PendingSync, PendingWrite};
use crate::host::work_dir::WorkDirLock;

pub(super) enum CallResult {
    ResourcesMeasured {
        room: HostResources,
        /// Whether this worker still holds the work directory.
        held: io::Result<()>,
    },
    Opened {
        source: SourceId,
        sent_at: Instant,
        answer: Result<OpenResult, CallError>,
    },
    Polled {
        source: SourceId,
        lane: PriorityQueue,
        sent_at: Instant,
        answer: Result<PollBatch, CallError>,
    },
    Recovered {
        source: SourceId,
        sent_at: Instant,
        answer: Result<RecoveryBatch, CallError>,
    },
    Claimed {
        claim: LocalToken,
        sent_at: Instant,
        answer: Result<Grant, CallError>,
    },
    TakenOver {
        claim: LocalToken,
        sent_at: Instant,
        answer: Result<Grant, CallError>,
    },
    Deleted {
        message: LocalToken,
        answer: Result<(), CallError>,
    },
    Prepared {
        claim: LocalToken,
        answer: Result<Box<dyn PreparedPayload>, PrepareFailure>,
    },
    /// `started` is set if the call that prepared it started it.
    Ended {
        claim: LocalToken,
        verdict: Verdict,
        emptiness: Cleanup,
        started: Option<Instant>,
    },
    CleanupDone {
        claim: LocalToken,
    },
    Uploaded {
        claim: LocalToken,
        settled: UploadStatus,
    },
    Reported {
        claim: LocalToken,
        answer: Result<(), CallError>,
    },
    Reclaimed {
        claim: LocalToken,
        sent_at: Instant,
        answer: Result<Duration, CallError>,
    },
    Checked {
        claim: LocalToken,
        answer: Result<bool, CallError>,
    },
    HostProbed(ProbeResult),
    SourceEvent {
        source: SourceId,
        news: SourceEvent,
    },
    /// `None` once the sidecar has ended.
    SidecarChanged {
        beside: usize,
        word: Option<watch::Receiver<SidecarStatus>>,
    },
}

impl CallResult {
    pub(super) const fn phases_ended(&self) -> &'static [ClaimPhase] {
        match self {
            Self::Claimed { .. } | Self::TakenOver { .. } => &[ClaimPhase::Claim],
            Self::Prepared { .. } => &[ClaimPhase::Prepare],
            Self::Ended { .. } => &[ClaimPhase::Prepare, ClaimPhase::Run, ClaimPhase::End],
            Self::Uploaded { .. } => &[ClaimPhase::Upload],
            Self::Reported { .. } => &[ClaimPhase::Report],
            Self::ResourcesMeasured { .. }
            | Self::Opened { .. }
            | Self::Polled { .. }
            | Self::Recovered { .. }
            | Self::Deleted { .. }
            | Self::CleanupDone { .. }
            | Self::Reclaimed { .. }
            | Self::Checked { .. }
            | Self::HostProbed(_)
            | Self::SourceEvent { .. }
            | Self::SidecarChanged { .. } => &[],
        }
    }

    pub(super) const fn claim(&self) -> Option<LocalToken> {
        match self {
            Self::Claimed { claim, .. }
            | Self::TakenOver { claim, .. }
            | Self::Prepared { claim, .. }
            | Self::Ended { claim, .. }
            | Self::CleanupDone { claim }
            | Self::Uploaded { claim, .. }
            | Self::Reported { claim, .. }
            | Self::Reclaimed { claim, .. }
            | Self::Checked { claim, .. } => Some(*claim),
            Self::ResourcesMeasured { .. }
            | Self::Opened { .. }
            | Self::Polled { .. }
            | Self::Recovered { .. }
            | Self::Deleted { .. }
            | Self::HostProbed(_)
            | Self::SourceEvent { .. }
            | Self::SidecarChanged { .. } => None,
        }
    }
}

/// Measures the host's resources after an interval. A hanging disk counts as unknown and is not measured again until
/// it answers, since each measurement holds a thread.
pub(super) async fn measure_resources(tasks: PathBuf, hold: WorkDirLock, one: Arc<Semaphore>) -> CallResult {
    tokio::time::sleep(HOST_RESOURCES_INTERVAL).await;
    let unknown = CallResult::ResourcesMeasured { room: HostResources { disk: None, memory: None }, held: Ok(()) };
    let Ok(permit) = Arc::clone(&one).try_acquire_owned() else { return unknown };
    // A host without a free thread is measured at the next interval.
    let measured = catch_panic(async move {
        let measuring = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            (resources::measure(&tasks), hold.verify())
        });
        measuring.await
    });
    match tokio::time::timeout(HOST_RESOURCES_INTERVAL, measured).await {
        Ok(Ok(Ok((room, held)))) => CallResult::ResourcesMeasured { room, held },
        Ok(Ok(Err(_)) | Err(_)) | Err(_) => unknown,
    }
}

/// A source that panics sends no more events.
pub(super) async fn next_source_event(source: Arc<dyn Source>, id: SourceId) -> CallResult {
    match catch_panic(source.next_event()).await {
        Ok(news) => CallResult::SourceEvent { source: id, news },
        Err(Panicked(text)) => {
            tracing::error!(panic = text, "a source panicked; it sends no more events");
            std::future::pending().await
        }
    }
}

pub(super) async fn sidecar_changed(beside: usize, mut word: watch::Receiver<SidecarStatus>) -> CallResult {
    match word.changed().await {
        Ok(()) => CallResult::SidecarChanged { beside, word: Some(word) },
        Err(_) => CallResult::SidecarChanged { beside, word: None },
    }
}

pub(super) async fn open(source: Arc<dyn Source>, id: SourceId, clock: Clock) -> CallResult {
    let sent_at = clock.now();
    CallResult::Opened { source: id, sent_at, answer: call_guarded("open", source.open()).await }
}

/// A claiming poll is journaled before it is sent.
pub(super) async fn poll(
    source: Arc<dyn Source>,
    id: SourceId,
    lane: PriorityQueue,
    max: u8,
    noted: Option<PendingWrite>,
    clock: Clock,
) -> CallResult {
    if let Some(noted) = noted {
        noted.written().await;
    }
    let sent_at = clock.now();
    CallResult::Polled { source: id, lane, sent_at, answer: call_guarded("poll", source.poll(lane, max)).await }
}

pub(super) async fn recover(
    source: Arc<dyn Source>,
    id: SourceId,
    held: Vec<Run>,
    newer_than: Option<Duration>,
    clock: Clock,
) -> CallResult {
    let sent_at = clock.now();
    let answer = match source.recovery() {
        Some(recovery) => call_guarded("recover", recovery.recover(&held, newer_than)).await,
        None => Ok(RecoveryBatch::default()),
    };
    CallResult::Recovered { source: id, sent_at, answer }
}

pub(super) async fn claim(
    source: Arc<dyn Source>,
    claim: LocalToken,
    message: Arc<crate::source::Message>,
    clock: Clock,
) -> CallResult {
    let sent_at = clock.now();
    let answer = match source.message_queue() {
        Some(queue) => call_guarded("claim", queue.claim(&message)).await,
        None => Err(no_messages_error("claim", &message.id)),
    };
    CallResult::Claimed { claim, sent_at, answer }
}

pub(super) async fn take_over(source: Arc<dyn Source>, claim: LocalToken, run: Run, clock: Clock) -> CallResult {
    let sent_at = clock.now();
    let answer = match source.recovery() {
        Some(recovery) => call_guarded("take over", recovery.take_over(&run)).await,
        None => {
            let message = format!("take over {run}: the service requeued it when the previous process ended");
            Err(CallError { refusal: Refusal::Gone, message })
        }
    };
    CallResult::TakenOver { claim, sent_at, answer }
}

pub(super) async fn delete(source: Arc<dyn Source>, message: LocalToken, entry: Arc<PolledMessage>) -> CallResult {
    let answer = match source.message_queue() {
        Some(queue) => call_guarded("delete", queue.delete(entry.lane, &entry.id, &entry.receipt)).await,
        None => Err(no_messages_error("delete", &entry.id)),
    };
    CallResult::Deleted { message, answer }
}

/// A fault of the adapter: its polls return messages, and it has no calls for them.
fn no_messages_error(operation: &str, message: &str) -> CallError {
    let message = format!("{operation} message {message}: the source has no message queue");
    CallError { refusal: Refusal::Rejected, message }
}

pub(super) async fn report(
    token: LocalToken,
    claim: Arc<dyn Claim>,
    outcome: Outcome,
    timeout: Duration,
) -> CallResult {
    let answer = call_with_timeout(timeout, "report", claim.report(outcome)).await;
    CallResult::Reported { claim: token, answer }
}

pub(super) async fn reclaim(token: LocalToken, claim: Arc<dyn Claim>, timeout: Duration, clock: Clock) -> CallResult {
    let sent_at = clock.now();
    let answer = call_with_timeout(timeout, "reclaim", claim.renew()).await;
    CallResult::Reclaimed { claim: token, sent_at, answer: answer.map(|expires_at| expires_at.since(sent_at)) }
}

pub(super) async fn check(token: LocalToken, claim: Arc<dyn Claim>) -> CallResult {
    CallResult::Checked { claim: token, answer: call_guarded("status", claim.is_canceled()).await }
}

pub(super) async fn probe_host(host: HostProbe) -> CallResult {
    CallResult::HostProbed(host.run().await)
}

pub(super) async fn upload_results(store: Uploader, claim: LocalToken, job: Execution) -> CallResult {
    let settled = match catch_panic(store.upload_all(job)).await {
        Ok(settled) => settled,
        Err(Panicked(text)) => {
            tracing::error!(panic = text, "uploading a task's log and artifacts panicked");
            UploadStatus::UploadFailed
        }
    };
    CallResult::Uploaded { claim, settled }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct PayloadStarted {
    pub(super) claim: LocalToken,
    pub(super) at: Instant,
}

/// Prepares, and starts at once if the lease allows (I3), which saves a round trip between threads. `starts` receives
/// a payload that does not end at once.
pub(super) async fn prepare_and_execute(
    handler: Arc<dyn DynHandler>,
    recorded: Option<PendingSync>,
    claim: LocalToken,
    context: Context,
    starts: mpsc::Sender<PayloadStarted>,
) -> CallResult {
    let back = prepare(handler, recorded, claim, context.clone()).await;
    let CallResult::Prepared { answer: Ok(prepared), .. } = back else { return back };
    crash_point("prepared");
    let at = context.now();
    if context.cancellation().is_some() || at >= context.expires_at() {
        return CallResult::Prepared { claim, answer: Ok(prepared) };
    }
    let mut executing = Box::pin(execute(prepared, claim, context.clone()));
    let mut back = tokio::select! {
        biased;
        back = &mut executing => back,
        () = std::future::ready(()) => {
            // The receiver is closed if the worker exits, which drops this call as well.
            starts.send(PayloadStarted { claim, at }).await.ok();
            executing.await
        }
    };
    if let CallResult::Ended { started, .. } = &mut back {
        *started = Some(at);
    }
    back
}

/// Prepares once the claim is journaled. A cancellation drops the preparation.
async fn prepare(
    handler: Arc<dyn DynHandler>,
    recorded: Option<PendingSync>,
    claim: LocalToken,
    context: Context,
) -> CallResult {
    let payload = context.task().definition.get("payload").unwrap_or(&serde_json::Value::Null);
    let prepared = async {
        if let Some(recorded) = recorded
            && let Err(why) = recorded.synced().await
        {
            return Ok(Err(PrepareError::new(PrepareFailure::HostFault, why.to_string())));
        }
        if let Some(why) = context.payload_error() {
            return Ok(Err(PrepareError::malformed(vec![format!("payload: invalid JSON: {why}")])));
        }
        catch_panic(handler.prepare(payload, &context)).await
    };
    let answer = tokio::select! {
        biased;
        _ = context.canceled() => None,
        answer = prepared => Some(answer),
    };
    // I26: its processes are gone before anything else happens to the claim. A prepared payload may be a process.
    let emptiness = match answer {
        Some(Ok(Ok(_))) => Cleanup::Complete,
        Some(_) | None => context.scope().clean_up().await,
    };
    let Some(answer) = answer.filter(|_| emptiness == Cleanup::Complete) else {
        return CallResult::Ended { claim, verdict: Err(ExecuteFailure::Internal), emptiness, started: None };
    };
    if workdir_failed(&context) {
        return CallResult::Prepared { claim, answer: Err(PrepareFailure::HostFault) };
    }
    let error = match answer {
        Ok(Ok(prepared)) => return CallResult::Prepared { claim, answer: Ok(prepared) },
        Ok(Err(error)) => error,
        Err(Panicked(text)) => {
            tracing::error!(claim.run = %context.task().run, panic = text, "the handler panicked in prepare");
            PrepareError::new(PrepareFailure::Internal, "the handler panicked; the worker's log says more")
        }
    };
    match error.reason {
        PrepareFailure::HostFault => tracing::error!(claim.run = %context.task().run, "host fault: {error}"),
        PrepareFailure::ServiceDown => release_unstarted(&context, &error),
        PrepareFailure::Malformed | PrepareFailure::Unavailable | PrepareFailure::Internal => {}
    }
    let description = error.reason.description();
    context.log().write_note(&format!("{description}:"));
    error.messages.iter().for_each(|message| context.log().write_note(&format!("  {message}")));
    set_failure_reason(&context, &format!("{description}: {error}"));
    CallResult::Prepared { claim, answer: Err(error.reason) }
}

pub(super) async fn wait_for_cleanup(claim: LocalToken, run: Run, enclosure: ProcessScope) -> CallResult {
    let looked = enclosure.clone();
    // Neither a host without free threads nor an unreadable process delays the wait.
    let describing = catch_panic(async move { tokio::task::spawn_blocking(move || looked.describe_processes()).await });
    let saying = async {
        if let Ok(Ok(Ok(left))) = tokio::time::timeout(PROCESS_KILL_TIMEOUT, describing).await {
            tracing::warn!(claim.run = %run, group = ?enclosure.name().cgroup, "remaining processes: {left}");
        }
    };
    tokio::join!(enclosure.wait_cleaned_up(), saying);
    CallResult::CleanupDone { claim }
}

/// A handler that has not returned [`KILL_SLACK`] after its deadline is dropped, which kills its processes.
pub(super) async fn execute(prepared: Box<dyn PreparedPayload>, claim: LocalToken, context: Context) -> CallResult {
    let ended = tokio::select! {
        biased;
        ended = catch_panic(prepared.execute(&context)) => ended,
        () = kill_overdue(&context) => {
            tracing::error!(claim.run = %context.task().run, "dropping a handler that did not end in time");
            Ok(Err(ExecuteError::internal("the handler did not end after SIGTERM and the grace")))
        }
    };
    // I26: also for a handler that was dropped, or that left processes behind.
    let emptiness = context.scope().clean_up().await;
    CallResult::Ended { claim, verdict: verdict(ended, &context), emptiness, started: None }
}

async fn kill_overdue(context: &Context) {
    context.kill_due().await;
    tokio::time::sleep(KILL_SLACK).await;
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
        ExecuteFailure::HostFault => tracing::error!(claim.run = %context.task().run, "host fault: {error}"),
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
    set_failure_reason(context, &message);
    Err(error.reason)
}

/// A redelivery does not count as an attempt.
fn release_unstarted(context: &Context, error: &dyn std::fmt::Display) {
    tracing::warn!(claim.run = %context.task().run, "released: {error}");
    if let Some(results) = context.results() {
        results.mark_not_started();
    }
}

/// For the sender of a request.
fn set_failure_reason(context: &Context, text: &str) {
    if let Some(results) = context.results() {
        results.set_failure_reason(text);
    }
}

async fn call_with_timeout<T>(timeout: Duration, operation: &str, answer: SourceFuture<'_, T>) -> Result<T, CallError> {
    match tokio::time::timeout(timeout, call_guarded(operation, answer)).await {
        Ok(answer) => answer,
        Err(_) => {
            let what = format!("{operation}: no answer within {timeout:?}");
            Err(CallError { refusal: Refusal::Retry { retry_after: None }, message: what })
        }
    }
}

async fn call_guarded<T>(operation: &str, answer: SourceFuture<'_, T>) -> Result<T, CallError> {
    catch_panic(answer).await.unwrap_or_else(|Panicked(text)| {
        tracing::error!(operation, panic = text, "a source panicked");
        let what = format!("{operation}: the source panicked");
        Err(CallError { refusal: Refusal::Retry { retry_after: None }, message: what })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::id::TaskId;
    use crate::handler::artifact::Artifacts;
    use crate::handler::log::{LogLimits, TaskLog};
    use crate::handler::{PayloadHandler, TaskInfo, erase};
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
        held_until(workdir, Instant::ORIGIN)
    }

    fn held_until(workdir: &Path, lease_ends: Instant) -> Context {
        let run = Run { task: TaskId::parse("fN1SbArXTPSVFNUvaOlinQ").unwrap(), run: 0 };
        let task = TaskInfo { run, source: "s".into(), definition: serde_json::Value::Null, env: Default::default() };
        let log = TaskLog::new(workdir.with_extension("log"), LogLimits::default());
        let (cancel, lease_ends) = (watch::channel(None).1, watch::channel(lease_ends).1);
        Context::new(task, workdir.to_owned(), log, Artifacts::new(), cancel, lease_ends, Clock::boot())
    }

    async fn prepared(uses: Uses, context: &Context) -> Result<Box<dyn PreparedPayload>, PrepareFailure> {
        let handler = erase(OkHandler { uses });
        let back = prepare(handler, Some(PendingSync::succeeded()), LocalToken(1), context.clone()).await;
        let CallResult::Prepared { answer, .. } = back else { panic!("it answers whether it is prepared") };
        answer
    }

    async fn ended(uses: Uses, context: &Context) -> Verdict {
        let Ok(prepared) = prepared(uses, context).await else { panic!("it is prepared") };
        let back = execute(prepared, LocalToken(1), context.clone()).await;
        let CallResult::Ended { verdict, .. } = back else { panic!("it answers how it ended") };
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
    async fn i03_a_payload_is_started_as_soon_as_it_is_prepared_while_its_claim_is_ours_and_not_after() {
        let base = tempfile::tempdir().unwrap();
        let ran = async |lease_ends| {
            let context = held_until(base.path(), lease_ends);
            let handler = erase(OkHandler { uses: Uses::Never });
            prepare_and_execute(handler, None, LocalToken(1), context, mpsc::channel(1).0).await
        };
        let now = Clock::boot().now();
        let back = ran(now.plus(Duration::from_secs(3600))).await;
        assert!(matches!(back, CallResult::Ended { verdict: Ok(()), started: Some(_), .. }));
        let back = ran(now).await;
        assert!(matches!(back, CallResult::Prepared { answer: Ok(_), .. }));
    }

    #[tokio::test]
    async fn a_task_directory_is_created_on_first_use() {
        let base = tempfile::tempdir().unwrap();
        let workdir = base.path().join("task").join("work");
        assert_eq!(ended(Uses::Never, &context(&workdir)).await, Ok(()));
        assert!(!base.path().join("task").exists());
        assert_eq!(ended(Uses::InExecute, &context(&workdir)).await, Ok(()));
        assert!(workdir.is_dir());
    }
}
