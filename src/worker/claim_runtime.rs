//! The runtime state of one claim that the rules do not need.

use std::hash::{BuildHasher as _, RandomState};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::domain::claim::{self, KillCause};
use crate::domain::id::{LocalToken, Run, SourceId};
use crate::domain::time::Instant;
use crate::domain::trace_context::TraceParent;
use crate::handler::artifact::Artifacts;
use crate::handler::log::{LogLimits, TaskLog};
use crate::handler::{CancelCause, Cancellation, Context, PreparedPayload, TaskInfo};
use crate::source::{Claim, Grant, Message, Results};

use super::SourceBinding;
use super::claim_commands::ClaimCommand;
use super::timeline::{ClaimPhase, Timeline};
use super::trace_recorder::SpanContext;
use crate::host::clock::Clock;
use crate::host::containment::ProcessScope;
use crate::host::work_dir::WorkDirLock;

#[derive(Clone)]
pub(super) struct PolledMessage {
    pub(super) source: SourceId,
    pub(super) message: Arc<Message>,
}

pub(super) struct ClaimRuntime {
    pub(super) source: SourceId,
    pub(super) run: Run,
    /// A claim of a previous process, to be reported only.
    pub(super) recovered: bool,
    /// Of the message that it was requested for.
    pub(super) dequeue_count: Option<u32>,
    pub(super) claim: Option<Arc<dyn Claim>>,
    pub(super) prepared: Option<PreparedPayload>,
    pub(super) execution: Option<Execution>,
    calls: Vec<AbortHandle>,
    pub(super) granted_at: Option<Instant>,
    pub(super) reclaimed_at: Option<Instant>,
    /// When the request was sent that the lease counts from.
    pub(super) lease_requested_at: Option<Instant>,
    pub(super) reclaims: u32,
    pub(super) timeline: Timeline,
    pub(super) last_command: Option<ClaimCommand>,
    pub(super) trace: Option<TraceParent>,
    pub(super) span_context: Option<SpanContext>,
    definition: serde_json::Value,
    pub(super) payload_error: Option<String>,
    results: Option<Results>,
    cancel: watch::Sender<Option<Cancellation>>,
    expires_at: watch::Sender<Instant>,
}

#[derive(Debug, Clone)]
pub(super) struct Execution {
    pub(super) context: Context,
    /// Exists if the context says that it was created.
    pub(super) folder: PathBuf,
}

pub(super) struct ExecutionSetup<'a> {
    pub(super) tasks_dir: &'a Path,
    pub(super) work_dir_lock: WorkDirLock,
    pub(super) log: LogLimits,
    pub(super) clock: Clock,
    pub(super) scope: ProcessScope,
}

impl ClaimRuntime {
    pub(super) fn new(source: SourceId, run: Run) -> Self {
        Self {
            source,
            run,
            recovered: false,
            dequeue_count: None,
            claim: None,
            prepared: None,
            execution: None,
            calls: Vec::new(),
            granted_at: None,
            reclaimed_at: None,
            lease_requested_at: None,
            reclaims: 0,
            timeline: Timeline::default(),
            last_command: None,
            trace: None,
            span_context: None,
            definition: serde_json::Value::Null,
            payload_error: None,
            results: None,
            cancel: watch::Sender::new(None),
            expires_at: watch::Sender::new(Instant::ORIGIN),
        }
    }

    /// Of a message about a run.
    pub(super) fn requested(entry: &PolledMessage) -> Self {
        let Ok(run) = &entry.message.run else { unreachable!("a claim of a message without a run") };
        Self { dequeue_count: Some(entry.message.dequeue_count), ..Self::new(entry.source, run.clone()) }
    }

    pub(super) fn recovered(source: SourceId, run: Run) -> Self {
        Self { recovered: true, ..Self::new(source, run) }
    }

    /// The claim that was granted.
    pub(super) fn granted(&self) -> Arc<dyn Claim> {
        let Some(claim) = &self.claim else { unreachable!("{} is used before it is granted", self.run) };
        Arc::clone(claim)
    }

    pub(super) fn on_reclaimed(&mut self, sent_at: Instant, now: Instant) {
        (self.reclaimed_at, self.lease_requested_at) = (Some(now), Some(sent_at));
        self.reclaims = self.reclaims.saturating_add(1);
    }

    pub(super) fn on_granted(&mut self, grant: Grant, sent_at: Instant, recording: TraceRecording, now: Instant) {
        self.granted_at = Some(now);
        self.lease_requested_at = Some(sent_at);
        self.timeline.start(ClaimPhase::Claim, now);
        self.timeline.end(&[ClaimPhase::Claim], now);
        self.definition = grant.task;
        self.payload_error = grant.payload_error;
        let trace = trace_origin(&self.definition);
        (self.trace, self.span_context) = (Some(trace.handler_parent(recording)), trace.recorded_spans(recording));
        self.results = grant.results;
        self.claim = Some(grant.claim);
    }

    /// Without a handler nothing ran, which does not count as an attempt.
    pub(super) fn mark_not_started(&self) {
        if let (None, Some(replies)) = (&self.execution, &self.results) {
            replies.mark_not_started();
        }
    }

    pub(super) fn track_call(&mut self, call: AbortHandle) {
        self.calls.push(call);
    }

    pub(super) fn abort_calls(&self) {
        self.calls.iter().for_each(AbortHandle::abort);
    }

    /// A finished call keeps its memory while its handle is held.
    pub(super) fn prune_calls(&mut self) {
        self.calls.retain(|call| !call.is_finished());
    }

    /// Creates the handler's context without touching the disk. The directory's name is unique: two services may use
    /// equal ids, and the directory of an earlier claim may still be being removed.
    pub(super) fn start_execution(
        &mut self,
        claim: LocalToken,
        feed: &SourceBinding,
        setup: ExecutionSetup<'_>,
    ) -> Execution {
        let ExecutionSetup { tasks_dir: base, work_dir_lock, log, clock, scope } = setup;
        let run = &self.run;
        let name = format!("{}_{}_{}", run.task, run.run, claim.0);
        let workdir = base.join(&name);
        let log = TaskLog::in_work_dir(base.join(format!("{name}.log")), log, work_dir_lock);
        let definition = std::mem::take(&mut self.definition);
        let mut env = feed.env.clone();
        if let Some(group) = definition.get("taskGroupId").and_then(serde_json::Value::as_str) {
            env.insert("TASK_GROUP_ID".to_owned(), group.to_owned());
        }
        env.extend(self.trace.map(|trace| ("TRACEPARENT".to_owned(), trace.to_string())));
        let task = TaskInfo { run: run.clone(), source: feed.name.clone(), definition, env };
        let folder = workdir.clone();
        let context = Context::new(
            task,
            workdir,
            log,
            Artifacts::new(),
            self.cancel.subscribe(),
            self.expires_at.subscribe(),
            clock,
        )
        .in_scope(scope)
        .with_results(self.results.take());
        let job = Execution { context, folder };
        self.execution = Some(job.clone());
        job
    }

    /// Passes the stop on to the handler. The earliest deadline applies, and a lost claim outranks a shutdown.
    pub(super) fn kill(&self, cause: KillCause, grace: Duration, now: Instant) {
        self.cancel.send_modify(|order| {
            let deadline = now.plus(grace);
            let cause = match (order.map(|order| order.cause), cause) {
                (Some(CancelCause::ClaimLost), _) | (_, KillCause::ClaimLost(_)) => CancelCause::ClaimLost,
                (Some(CancelCause::Canceled), _) | (_, KillCause::Command(claim::CancelCommand::Cancel)) => {
                    CancelCause::Canceled
                }
                (Some(CancelCause::Released), _) | (None, KillCause::Command(claim::CancelCommand::Release)) => {
                    CancelCause::Released
                }
                (
                    Some(CancelCause::Shutdown),
                    KillCause::Shutdown | KillCause::Command(claim::CancelCommand::Release),
                )
                | (None, KillCause::Shutdown) => CancelCause::Shutdown,
            };
            *order = Some(match *order {
                Some(old) if old.deadline <= deadline => Cancellation { cause, ..old },
                Some(_) | None => Cancellation { cause, deadline, termination_grace: grace },
            });
        });
    }

    pub(super) fn is_kill_requested(&self) -> bool {
        self.cancel.borrow().is_some()
    }

    pub(super) fn set_expires_at(&self, lease_ends: Instant) {
        self.expires_at.send_replace(lease_ends);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TraceRecording {
    On,
    Off,
}

/// The creator's trace, or a new one, and the spans to record in it.
#[derive(Debug, Clone, Copy)]
struct TraceOrigin {
    given: Option<TraceParent>,
    claim_span: TraceParent,
    run_span: u64,
}

fn trace_origin(definition: &serde_json::Value) -> TraceOrigin {
    let given = definition.pointer("/extra/traceparent").and_then(serde_json::Value::as_str);
    let given = given.and_then(TraceParent::parse);
    let own = given.unwrap_or_else(|| {
        let (high, low) = (u128::from(unique_span_id()), u128::from(unique_span_id()));
        TraceParent::new(high << 64 | low, unique_span_id())
    });
    TraceOrigin { given, claim_span: own.child(unique_span_id()), run_span: unique_span_id() }
}

/// Unique, not secret.
fn unique_span_id() -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    KEYS.hash_one(COUNT.fetch_add(1, Ordering::Relaxed))
}

impl TraceOrigin {
    /// Nothing is recorded if the creator's trace is not sampled.
    fn recorded_spans(self, recording: TraceRecording) -> Option<SpanContext> {
        let parent = self.given.map(|given| given.span_id());
        let trace = SpanContext {
            claim_span: self.claim_span,
            parent,
            run_span: self.claim_span.child(self.run_span).span_id(),
        };
        Some(trace).filter(|_| recording == TraceRecording::On && self.claim_span.is_sampled())
    }

    fn handler_parent(self, recording: TraceRecording) -> TraceParent {
        let unrecorded = self.given.unwrap_or(self.claim_span);
        self.recorded_spans(recording).map_or(unrecorded, |trace| trace.claim_span.child(trace.run_span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::id::TaskId;
    use tokio::task::JoinSet;

    fn run() -> Run {
        Run { task: TaskId::parse("fN1SbArXTPSVFNUvaOlinQ").unwrap(), run: 0 }
    }

    #[test]
    fn of_several_stops_a_lost_claim_and_the_earliest_deadline_apply() {
        let at = |secs| Instant::at(Duration::from_secs(secs));
        let (lost, shutdown) = (KillCause::ClaimLost(claim::LossReason::Revoked), KillCause::Shutdown);
        for (orders, deadline, grace) in [
            ([(shutdown, 0, 30), (lost, 1, 10)], at(11), 10),
            ([(shutdown, 0, 5), (lost, 1, 10)], at(5), 5),
            ([(lost, 0, 10), (shutdown, 1, 30)], at(10), 10),
            ([(lost, 0, 10), (shutdown, 1, 0)], at(1), 0),
        ] {
            let live = ClaimRuntime::new(SourceId(0), run());
            for (cause, now, grace) in orders {
                live.kill(cause, Duration::from_secs(grace), at(now));
            }
            let grace = Duration::from_secs(grace);
            let order = Some(Cancellation { cause: CancelCause::ClaimLost, deadline, termination_grace: grace });
            assert_eq!(*live.cancel.borrow(), order, "{orders:?}");
        }
    }

    #[test]
    fn a_task_continues_a_valid_trace_of_its_creator_and_starts_one_otherwise() {
        let given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let of = |extra| {
            trace_origin(&serde_json::json!({ "extra": extra })).handler_parent(TraceRecording::Off).to_string()
        };
        assert_eq!(of(serde_json::json!({ "traceparent": given })), given);
        for odd in [serde_json::json!({}), serde_json::json!({ "traceparent": 7 }), serde_json::json!("00-")] {
            let own = of(odd);
            assert!(TraceParent::parse(&own).is_some_and(|read| read.to_string() == own), "{own}");
            assert_ne!(own, of(serde_json::json!({})));
        }
    }

    #[test]
    fn a_handler_receives_the_recorded_span_and_an_unsampled_trace_records_none() {
        let of = |flags: &str| {
            let given = format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}");
            trace_origin(&serde_json::json!({ "extra": { "traceparent": given } }))
        };
        let found = of("01");
        let trace = found.recorded_spans(TraceRecording::On).unwrap();
        assert_eq!(trace.claim_span.trace_id().to_string(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(trace.parent, Some(0xb7ad_6b71_6920_3331));
        let told = found.handler_parent(TraceRecording::On);
        assert_eq!((told.trace_number(), told.span_id()), (trace.claim_span.trace_number(), trace.run_span));
        assert!(
            trace.claim_span.span_id() != trace.run_span && Some(trace.run_span) != trace.parent && told.is_sampled()
        );
        assert_eq!(found.recorded_spans(TraceRecording::Off), None);
        let unwanted = of("00");
        assert_eq!(unwanted.recorded_spans(TraceRecording::On), None);
        let passed = unwanted.handler_parent(TraceRecording::On).to_string();
        assert_eq!(passed, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00");
        let own = trace_origin(&serde_json::Value::Null).recorded_spans(TraceRecording::On).unwrap();
        assert_eq!(own.parent, None);
    }

    #[tokio::test]
    async fn finished_calls_are_released() {
        let (mut live, mut calls) = (ClaimRuntime::new(SourceId(0), run()), JoinSet::new());
        live.track_call(calls.spawn(async {}));
        calls.join_next().await.unwrap().unwrap();
        live.track_call(calls.spawn(std::future::pending()));
        live.prune_calls();
        assert_eq!(live.calls.len(), 1);
        assert!(!live.calls[0].is_finished());
    }
}
