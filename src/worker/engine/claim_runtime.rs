//! The runtime state of one claim that the rules do not need.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use crate::handler::context::FileNames;
use crate::handler::{Cancellation, Context, PreparedPayload, TaskInfo};
use crate::source::{Claim, Grant, Message, Results};
use crate::task::Definition;
use journeyman_domain::claim::{CancelCause, CancelCommand};
use journeyman_domain::id::{LocalToken, Run, SourceId};
use journeyman_domain::lease::Lease;
use journeyman_domain::limits::HISTORY_RECLAIMS_MAX;
use journeyman_domain::time::Instant;
use journeyman_domain::trace_context::TraceParent;

use super::live_log::LiveLog;
use super::status::Note;
use super::task_view::TaskView;
use super::timeline::{ClaimPhase, Timeline};
use super::trace_recorder::SpanContext;
use super::{SourceBinding, WorkerConfig};
use journeyman_platform::host::containment::ProcessScope;
use journeyman_platform::host::work_dir::WorkDirLock;

#[derive(Clone)]
pub(super) struct PolledMessage {
    pub(super) source: SourceId,
    pub(super) message: Arc<Message>,
}

#[derive(Debug, Clone)]
pub(super) struct ClaimCommand {
    pub(super) command: CancelCommand,
    pub(super) note: Note,
    pub(super) at: Instant,
}

impl ClaimCommand {
    pub(super) fn log_line(&self) -> String {
        let Note { by, text } = &self.note;
        let why = if text.is_empty() { String::new() } else { format!(": {text}") };
        // The note is free text, and a log has lines.
        format!("{} by operator {by}{why}", self.command.past_tense()).replace(char::is_control, " ")
    }
}

pub(super) struct ClaimRuntime {
    pub(super) source: SourceId,
    pub(super) run: Run,
    /// A claim of a previous process, to be reported only.
    pub(super) recovered: bool,
    /// The dequeue count of the message that it was requested for.
    pub(super) dequeue_count: Option<u32>,
    pub(super) claim: Option<Arc<dyn Claim>>,
    pub(super) prepared: Option<PreparedPayload>,
    pub(super) task: Option<TaskView>,
    pub(super) live_log: Option<LiveLog>,
    pub(super) calls: Vec<AbortHandle>,
    pub(super) granted_at: Option<Instant>,
    pub(super) queued_for: Option<Duration>,
    /// The latest last.
    pub(super) reclaimed_at: VecDeque<Instant>,
    pub(super) reclaims: u32,
    pub(super) timeline: Timeline,
    pub(super) last_command: Option<ClaimCommand>,
    pub(super) trace: Option<TraceParent>,
    pub(super) span_context: Option<SpanContext>,
    definition: Definition,
    pub(super) payload_error: Option<String>,
    results: Option<Results>,
    cancel: watch::Sender<Option<Cancellation>>,
    pub(super) lease: watch::Sender<Option<Lease>>,
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
            task: None,
            live_log: None,
            calls: Vec::new(),
            granted_at: None,
            queued_for: None,
            reclaimed_at: VecDeque::new(),
            reclaims: 0,
            timeline: Timeline::default(),
            last_command: None,
            trace: None,
            span_context: None,
            definition: Definition::default(),
            payload_error: None,
            results: None,
            cancel: watch::Sender::new(None),
            lease: watch::Sender::new(None),
        }
    }

    /// The claim of a message about a run.
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

    pub(super) fn on_reclaimed(&mut self, now: Instant) {
        if self.reclaimed_at.len() == HISTORY_RECLAIMS_MAX {
            self.reclaimed_at.pop_front();
        }
        self.reclaimed_at.push_back(now);
        self.reclaims = self.reclaims.saturating_add(1);
    }

    pub(super) fn on_granted(&mut self, grant: Grant, recording: TraceRecording, now: Instant) {
        self.granted_at = Some(now);
        self.queued_for = grant.queued_for;
        self.timeline.start(ClaimPhase::Claim, now);
        self.timeline.end(&[ClaimPhase::Claim], now);
        self.definition = grant.task;
        self.payload_error = grant.payload_error;
        let trace = trace_claim(&self.definition, recording);
        (self.trace, self.span_context) = (Some(trace.handler), trace.spans);
        self.results = grant.results;
        self.claim = Some(grant.claim);
    }

    /// The task's name in its metadata.
    pub(super) fn task_name(&self) -> Option<&str> {
        let definition = match &self.task {
            Some(task) => &task.task().definition,
            None => &self.definition,
        };
        definition.name()
    }

    /// Without a handler nothing ran, which does not count as an attempt.
    pub(super) fn mark_not_started(&self) {
        if let (None, Some(replies)) = (&self.task, &self.results) {
            replies.mark_not_started();
        }
    }

    /// A finished call keeps its memory while its handle is held.
    pub(super) fn prune_calls(&mut self) {
        self.calls.retain(|call| !call.is_finished());
    }

    /// Creates the handler's context without touching the disk.
    pub(super) fn start_execution(
        &mut self,
        claim: LocalToken,
        binding: &SourceBinding,
        config: &WorkerConfig,
        work_dir: WorkDirLock,
        scope: ProcessScope,
        launched: &mpsc::Sender<LocalToken>,
    ) -> Context {
        let run = &self.run;
        let definition = std::mem::take(&mut self.definition);
        let (log_limits, log_times) = (config.log, config.log_times);
        let names = FileNames { claim, work_dir, log_limits, log_times, launched: launched.clone() };
        let mut env = Arc::clone(&binding.env);
        if self.results.is_none()
            && let Some(group) = definition.json()["taskGroupId"].as_str()
        {
            Arc::make_mut(&mut env).insert("TASK_GROUP_ID".to_owned(), group.to_owned());
        }
        let (source, trace) = (binding.name.clone(), self.trace);
        let reported_runs = self.claim.as_ref().map_or(0, |claim| claim.reported_runs());
        let task = TaskInfo { run: run.clone(), source, definition, env, trace, reported_runs };
        let context =
            Context::with_files(task, None, Some(names), scope, self.cancel.subscribe(), self.lease(), config.clock)
                .with_results(self.results.take())
                .with_deployment(self.claim.clone().and_then(Claim::deployment));
        self.task = Some(TaskView::of(context.clone()));
        context
    }

    /// Passes the stop on to the handler. The earliest deadline and the greatest cause apply.
    pub(super) fn kill(&self, cause: CancelCause, grace: Duration, now: Instant) {
        let new = Cancellation { cause, deadline: now.plus(grace), termination_grace: grace };
        self.cancel.send_modify(|cancel| {
            *cancel = Some(match *cancel {
                Some(old) if old.deadline <= new.deadline => Cancellation { cause: old.cause.max(cause), ..old },
                Some(old) => Cancellation { cause: old.cause.max(cause), ..new },
                None => new,
            });
        });
    }

    pub(super) fn is_kill_requested(&self) -> bool {
        self.cancel.borrow().is_some()
    }

    pub(super) fn lease(&self) -> watch::Receiver<Option<Lease>> {
        self.lease.subscribe()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TraceRecording {
    On,
    Off,
}

/// The trace of a claim.
struct ClaimTrace {
    /// The `TRACEPARENT` of the handler.
    handler: TraceParent,
    /// `None` if nothing is recorded.
    spans: Option<SpanContext>,
}

/// Continues the creator's trace, or starts one. Nothing is recorded if the creator's trace is not sampled.
fn trace_claim(definition: &Definition, recording: TraceRecording) -> ClaimTrace {
    let given = definition.traceparent().and_then(|text| TraceParent::parse(&text));
    let trace = given.unwrap_or_else(|| {
        let (high, low) = (u128::from(unique_span_id()), u128::from(unique_span_id()));
        TraceParent::new(high << 64 | low, unique_span_id())
    });
    let claim_span = trace.child(unique_span_id());
    if recording == TraceRecording::Off || !trace.is_sampled() {
        return ClaimTrace { handler: given.unwrap_or(claim_span), spans: None };
    }
    let handler = claim_span.child(unique_span_id());
    let spans = SpanContext { claim_span, parent: given.map(|given| given.span_id()), run_span: handler.span_id() };
    ClaimTrace { handler, spans: Some(spans) }
}

/// Unique, not secret.
fn unique_span_id() -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    KEYS.hash_one(COUNT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use journeyman_domain::claim::LossReason;
    use journeyman_domain::id::TaskId;
    use tokio::task::JoinSet;

    fn run() -> Run {
        Run { task: TaskId::parse("fN1SbArXTPSVFNUvaOlinQ").unwrap(), run: 0 }
    }

    #[test]
    fn of_several_stops_a_lost_claim_and_the_earliest_deadline_apply() {
        let at = |secs| Instant::at(Duration::from_secs(secs));
        let (lost, shutdown) = (CancelCause::ClaimLost(LossReason::Revoked), CancelCause::Shutdown);
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
            let order = Some(Cancellation { cause: lost, deadline, termination_grace: grace });
            assert_eq!(*live.cancel.borrow(), order, "{orders:?}");
        }
    }

    #[test]
    fn a_task_continues_a_valid_trace_of_its_creator_and_starts_one_otherwise() {
        let given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let of =
            |extra| trace_claim(&serde_json::json!({ "extra": extra }).into(), TraceRecording::Off).handler.to_string();
        assert_eq!(of(serde_json::json!({ "traceparent": given })), given);
        for odd in [serde_json::json!({}), serde_json::json!({ "traceparent": 7 }), serde_json::json!("00-")] {
            let own = of(odd);
            assert!(TraceParent::parse(&own).is_some_and(|read| read.to_string() == own), "{own}");
            assert_ne!(own, of(serde_json::json!({})));
        }
    }

    #[test]
    fn a_handler_receives_the_recorded_span_and_an_unsampled_trace_records_none() {
        let of = |flags: &str, recording| {
            let given = format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}");
            trace_claim(&serde_json::json!({ "extra": { "traceparent": given } }).into(), recording)
        };
        let ClaimTrace { handler, spans } = of("01", TraceRecording::On);
        let spans = spans.unwrap();
        assert_eq!(spans.claim_span.trace_id().to_string(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(spans.parent, Some(0xb7ad_6b71_6920_3331));
        assert_eq!((handler.trace_number(), handler.span_id()), (spans.claim_span.trace_number(), spans.run_span));
        assert!(spans.claim_span.span_id() != spans.run_span && Some(spans.run_span) != spans.parent);
        assert!(handler.is_sampled() && of("01", TraceRecording::Off).spans.is_none());
        let unsampled = of("00", TraceRecording::On);
        assert_eq!(unsampled.spans, None);
        assert_eq!(unsampled.handler.to_string(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00");
        assert_eq!(trace_claim(&Definition::default(), TraceRecording::On).spans.unwrap().parent, None);
    }

    #[tokio::test]
    async fn finished_calls_are_released() {
        let (mut live, mut calls) = (ClaimRuntime::new(SourceId(0), run()), JoinSet::new());
        live.calls.push(calls.spawn(async {}));
        calls.join_next().await.unwrap().unwrap();
        live.calls.push(calls.spawn(std::future::pending()));
        live.prune_calls();
        assert_eq!(live.calls.len(), 1);
        assert!(!live.calls[0].is_finished());
    }
}
