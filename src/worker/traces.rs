//! Spans of ended claims for an OpenTelemetry collector, by OTLP over HTTP.
//!
//! A claim is recorded when it ends, and its spans are made from its timeline. They wait in a bounded queue, so that a collector
//! that is slow or down costs spans, which are counted, and no task anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::engine::timeline::{ClaimPhase, PhaseTiming};
use crate::engine::trace_recorder::{FinishedClaim, SpanCounts, TraceRecorder};
use journeyman_domain::claim::ClaimEnd;
use journeyman_domain::limits::{TRACES_BATCH_DELAY, TRACES_BATCH_MAX, TRACES_CLOSE_TIMEOUT, TRACES_QUEUED_MAX};
use journeyman_domain::outcome::Outcome;
use journeyman_domain::time::Instant;
use journeyman_platform::otlp::{Exporter, Signal, attribute, number, resource, scope};
use journeyman_platform::settings::Environment;
use journeyman_platform::tasks::supervised;

/// An ended claim.
#[derive(Debug)]
struct EndedClaim {
    record: FinishedClaim,
    ended_at: SystemTime,
}

/// Passes ended claims to the exporter.
#[derive(Debug)]
struct SpanQueue {
    sender: mpsc::Sender<EndedClaim>,
    counters: Arc<SpanCounters>,
}

#[derive(Debug, Default)]
struct SpanCounters {
    exported: AtomicU64,
    dropped: AtomicU64,
}

impl TraceRecorder for SpanQueue {
    #[expect(clippy::disallowed_methods, reason = "a span has times of the wall clock")]
    fn record(&self, record: FinishedClaim) {
        // Its own and one for each phase.
        let spans = record.timeline.phases().len() as u64 + 1;
        if self.sender.try_send(EndedClaim { record, ended_at: SystemTime::now() }).is_err() {
            self.counters.dropped.fetch_add(spans, Ordering::Relaxed);
        }
    }

    fn span_counts(&self) -> SpanCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SpanCounts { exported: of(&self.counters.exported), dropped: of(&self.counters.dropped) }
    }
}

/// A running export.
#[derive(Debug)]
pub struct Export {
    queue: Arc<SpanQueue>,
    sending: JoinSet<()>,
    shutdown: CancellationToken,
}

impl Export {
    /// Starts the export of a worker; `None` if traces are not exported.
    ///
    /// # Errors
    ///
    /// A variable that cannot be used.
    pub fn start(environment: &Environment, worker: &str) -> Result<Option<Self>, String> {
        let Some(exporter) = Exporter::from_environment(Signal::Traces, environment)? else { return Ok(None) };
        let (sender, records) = mpsc::channel(TRACES_QUEUED_MAX);
        let counters = Arc::<SpanCounters>::default();
        let shutdown = CancellationToken::new();
        let mut sending = JoinSet::new();
        let resource = resource(environment, "worker", worker);
        let span_sender =
            SpanSender { exporter, resource, counters: Arc::clone(&counters), shutdown: shutdown.clone() };
        sending.spawn(supervised("sending traces", span_sender.run(records)));
        Ok(Some(Self { queue: Arc::new(SpanQueue { sender, counters }), sending, shutdown }))
    }

    pub fn recorder(&self) -> Arc<dyn TraceRecorder> {
        Arc::<SpanQueue>::clone(&self.queue)
    }

    /// Sends the queued spans once, within [`TRACES_CLOSE_TIMEOUT`].
    pub async fn close(mut self) {
        self.shutdown.cancel();
        if timeout(TRACES_CLOSE_TIMEOUT, self.sending.join_next()).await.is_err() {
            tracing::warn!("the collector of traces did not answer in time; the last spans are lost");
        }
    }
}

struct SpanSender {
    exporter: Exporter,
    resource: Resource,
    counters: Arc<SpanCounters>,
    shutdown: CancellationToken,
}

impl SpanSender {
    /// Sends the claims that end within [`TRACES_BATCH_DELAY`] of one another together, until the queue is closed and empty.
    async fn run(mut self, mut records: mpsc::Receiver<EndedClaim>) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                received = records.recv_many(&mut batch, TRACES_BATCH_MAX) => if received == 0 { return },
                () = self.shutdown.cancelled(), if !records.is_closed() => {
                    records.close();
                    continue;
                }
            }
            tokio::select! {
                () = sleep(TRACES_BATCH_DELAY) => {}
                () = self.shutdown.cancelled() => {}
            }
            while batch.len() < TRACES_BATCH_MAX
                && let Ok(record) = records.try_recv()
            {
                batch.push(record);
            }
            self.send(&std::mem::take(&mut batch)).await;
        }
    }

    async fn send(&mut self, batch: &[EndedClaim]) {
        let spans: Vec<Span> = batch.iter().flat_map(spans).collect();
        let count = spans.len() as u64;
        let scope_spans = vec![ScopeSpans { scope: Some(scope()), spans, ..ScopeSpans::default() }];
        let resource = Some(self.resource.clone());
        let resource_spans = vec![ResourceSpans { resource, scope_spans, ..ResourceSpans::default() }];
        let is_accepted = self.exporter.send(&ExportTraceServiceRequest { resource_spans }).await;
        let counter = if is_accepted { &self.counters.exported } else { &self.counters.dropped };
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

/// The claim's span, and one for each of its phases.
fn spans(ended: &EndedClaim) -> Vec<Span> {
    let EndedClaim { record, ended_at } = ended;
    let trace = record.span_context;
    let end = nanos(*ended_at);
    let wall_clock = |at: Instant| ended_at.checked_sub(record.now.since(at)).map_or(0, nanos);
    let claim_span = trace.claim_span.span_id();
    let base = |name: &str, span: u64, kind: SpanKind| Span {
        trace_id: trace.claim_span.trace_number().to_be_bytes().to_vec(),
        span_id: span.to_be_bytes().to_vec(),
        parent_span_id: claim_span.to_be_bytes().to_vec(),
        // It is sampled.
        flags: 1,
        name: name.to_owned(),
        kind: kind.into(),
        start_time_unix_nano: end,
        end_time_unix_nano: end,
        ..Span::default()
    };
    let is_good = matches!(record.end, ClaimEnd::Reported(Outcome::Completed | Outcome::Deferred));
    let (code, message) =
        if is_good { (StatusCode::Unset, String::new()) } else { (StatusCode::Error, record.end.to_string()) };
    let own = Span {
        parent_span_id: trace.parent.map_or_else(Vec::new, |parent| parent.to_be_bytes().to_vec()),
        start_time_unix_nano: record.timeline.phases().first().map_or(end, |phase| wall_clock(phase.started_at)),
        attributes: vec![
            attribute("journeyman.task", record.run.task.as_str()),
            number("journeyman.run", record.run.run.into()),
            attribute("journeyman.source", &record.source),
            attribute("journeyman.end", &record.end.to_string()),
        ],
        status: Some(Status { code: code.into(), message }),
        ..base("task", claim_span, SpanKind::Consumer)
    };
    let child = |timing: &PhaseTiming| {
        let (id, kind) = match timing.phase {
            ClaimPhase::Claim | ClaimPhase::Upload | ClaimPhase::Report => (random_span_id(), SpanKind::Client),
            ClaimPhase::Prepare | ClaimPhase::End => (random_span_id(), SpanKind::Internal),
            ClaimPhase::Run => (trace.run_span, SpanKind::Internal),
        };
        Span {
            start_time_unix_nano: wall_clock(timing.started_at),
            end_time_unix_nano: timing.ended_at.map_or(end, wall_clock),
            ..base(timing.phase.as_str(), id, kind)
        }
    };
    std::iter::once(own).chain(record.timeline.phases().iter().map(child)).collect()
}

fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn random_span_id() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().1.max(1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::timeline::Timeline;
    use crate::engine::trace_recorder::SpanContext;
    use journeyman_domain::claim::LossReason;
    use journeyman_domain::id::{Run, TaskId};
    use journeyman_domain::trace_context::TraceParent;

    fn record() -> FinishedClaim {
        let at = |secs| Instant::at(Duration::from_secs(secs));
        let mut timeline = Timeline::default();
        timeline.start(ClaimPhase::Claim, at(10));
        timeline.end(&[ClaimPhase::Claim], at(11));
        timeline.start(ClaimPhase::Report, at(19));
        FinishedClaim {
            run: Run { task: TaskId::parse("T").unwrap(), run: 2 },
            source: "ci".to_owned(),
            span_context: SpanContext { claim_span: TraceParent::new(7, 8), parent: Some(9), run_span: 10 },
            timeline,
            end: ClaimEnd::Lost(LossReason::LeaseExpired),
            now: at(20),
        }
    }

    #[test]
    fn spans_keep_their_distance_to_the_end_of_the_claim() {
        let ended_at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        let spans = spans(&EndedClaim { record: record(), ended_at });
        let seconds = |nanos: u64| nanos / 1_000_000_000;
        let times = spans
            .iter()
            .map(|span| (&*span.name, seconds(span.start_time_unix_nano), seconds(span.end_time_unix_nano)));
        let times: Vec<_> = times.collect();
        assert_eq!(times, [("task", 990, 1_000), ("claim", 990, 991), ("report", 999, 1_000)]);
        assert_eq!(spans[0].parent_span_id, 9_u64.to_be_bytes());
        assert!(spans[1..].iter().all(|span| span.parent_span_id == 8_u64.to_be_bytes()));
        assert_eq!(spans[0].status.as_ref().unwrap().code(), StatusCode::Error);
    }

    #[test]
    fn spans_beyond_the_queue_are_dropped_and_counted() {
        let (sender, _records) = mpsc::channel(2);
        let queue = SpanQueue { sender, counters: Arc::default() };
        (0..5).for_each(|_| queue.record(record()));
        assert_eq!(queue.span_counts(), SpanCounts { exported: 0, dropped: 9 });
    }
}
