//! Spans of ended claims for an OpenTelemetry collector, by OTLP over HTTP.
//!
//! A claim is recorded when it ends, and its spans are made from its timeline. They wait in a bounded queue, so that a collector
//! that is slow or down costs spans, which are counted, and no task anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use opentelemetry::trace::{SpanContext as OtelSpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::EnvResourceDetector;
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanExporter as _, SpanLinks};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::engine::timeline::{ClaimPhase, PhaseTiming};
use crate::engine::trace_recorder::{FinishedClaim, SpanCounts, TraceRecorder};
use journeyman_domain::claim::ClaimEnd;
use journeyman_domain::limits::{
    TRACES_BATCH_DELAY, TRACES_BATCH_MAX, TRACES_CLOSE_TIMEOUT, TRACES_EXPORT_TIMEOUT, TRACES_QUEUED_MAX,
};
use journeyman_domain::outcome::Outcome;
use journeyman_domain::time::Instant;
use journeyman_platform::otlp::{Signal, headers};
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
    /// Starts the export for a worker of this id and group. The exporter reads the `OTEL_*` variables for headers.
    ///
    /// # Errors
    ///
    /// An exporter that cannot be built.
    pub fn start(
        collector: &url::Url,
        environment: &Environment,
        worker_id: &str,
        worker_group: &str,
    ) -> Result<Self, String> {
        // The exporter reads them too; this hides them.
        drop(headers(Signal::Traces, environment));
        journeyman_platform::crypto_provider::install_crypto_provider();
        // A redirect would send the headers, often a token, to another host.
        let client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .timeout(TRACES_EXPORT_TIMEOUT)
            .build();
        let mut exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(client.map_err(|error| error.to_string())?)
            .with_endpoint(collector.as_str())
            .build()
            .map_err(|error| error.to_string())?;
        exporter.set_resource(&resource(environment, worker_id, worker_group));
        let (sender, records) = mpsc::channel(TRACES_QUEUED_MAX);
        let counters = Arc::<SpanCounters>::default();
        let shutdown = CancellationToken::new();
        let mut sending = JoinSet::new();
        let span_sender = SpanSender { exporter, counters: Arc::clone(&counters), shutdown: shutdown.clone() };
        sending.spawn(supervised("sending traces", span_sender.run(records)));
        let host = collector.host_str().unwrap_or_default();
        tracing::info!(host, "traces are exported");
        Ok(Self { queue: Arc::new(SpanQueue { sender, counters }), sending, shutdown })
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

fn resource(environment: &Environment, worker_id: &str, worker_group: &str) -> Resource {
    let own = [
        KeyValue::new("service.name", env!("CARGO_PKG_NAME")),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("service.instance.id", worker_id.to_owned()),
        KeyValue::new("journeyman.worker.group", worker_group.to_owned()),
    ];
    // The operator's attributes override these.
    let resource = Resource::builder_empty().with_attributes(own).with_detector(Box::new(EnvResourceDetector::new()));
    match environment.get("OTEL_SERVICE_NAME") {
        Some(name) => resource.with_service_name(name.to_owned()).build(),
        None => resource.build(),
    }
}

struct SpanSender {
    exporter: SpanExporter,
    counters: Arc<SpanCounters>,
    shutdown: CancellationToken,
}

impl SpanSender {
    /// Sends the claims that end within [`TRACES_BATCH_DELAY`] of one another together, until the queue is closed and empty.
    async fn run(self, mut records: mpsc::Receiver<EndedClaim>) {
        let mut failing = false;
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
            self.send(&std::mem::take(&mut batch), &mut failing).await;
        }
    }

    async fn send(&self, batch: &[EndedClaim], failing: &mut bool) {
        let spans: Vec<SpanData> = batch.iter().flat_map(spans).collect();
        let count = spans.len() as u64;
        match self.exporter.export(spans).await {
            Ok(()) => {
                self.counters.exported.fetch_add(count, Ordering::Relaxed);
                if std::mem::take(failing) {
                    tracing::info!("the collector of traces accepts spans again");
                }
            }
            Err(error) => {
                self.counters.dropped.fetch_add(count, Ordering::Relaxed);
                if !std::mem::replace(failing, true) {
                    tracing::warn!("dropping spans, tasks are not affected: the collector of traces: {error}");
                }
            }
        }
    }
}

/// The claim's span, and one for each of its phases.
fn spans(ended: &EndedClaim) -> Vec<SpanData> {
    let EndedClaim { record, ended_at } = ended;
    let trace = record.span_context;
    let wall_clock = |at: Instant| ended_at.checked_sub(record.now.since(at)).unwrap_or(SystemTime::UNIX_EPOCH);
    let claim_span = SpanId::from(trace.claim_span.span_id());
    let scope = InstrumentationScope::builder(env!("CARGO_PKG_NAME")).with_version(env!("CARGO_PKG_VERSION")).build();
    let base = |name: &'static str, span: SpanId, parent: SpanId| SpanData {
        span_context: OtelSpanContext::new(
            TraceId::from(trace.claim_span.trace_number()),
            span,
            TraceFlags::SAMPLED,
            false,
            TraceState::NONE,
        ),
        parent_span_id: parent,
        parent_span_is_remote: false,
        span_kind: SpanKind::Internal,
        name: name.into(),
        start_time: *ended_at,
        end_time: *ended_at,
        attributes: Vec::new(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: Status::Unset,
        instrumentation_scope: scope.clone(),
    };
    let own = SpanData {
        span_kind: SpanKind::Consumer,
        parent_span_is_remote: trace.parent.is_some(),
        start_time: record.timeline.phases().first().map_or(*ended_at, |phase| wall_clock(phase.started_at)),
        attributes: vec![
            KeyValue::new("journeyman.task", record.run.task.as_str().to_owned()),
            KeyValue::new("journeyman.run", i64::from(record.run.run)),
            KeyValue::new("journeyman.source", record.source.clone()),
            KeyValue::new("journeyman.end", record.end.to_string()),
        ],
        status: if matches!(record.end, ClaimEnd::Reported(Outcome::Completed | Outcome::Deferred)) {
            Status::Unset
        } else {
            Status::error(record.end.to_string())
        },
        ..base("task", claim_span, trace.parent.map_or(SpanId::INVALID, SpanId::from))
    };
    let child = |timing: &PhaseTiming| {
        let (id, kind) = match timing.phase {
            ClaimPhase::Claim | ClaimPhase::Upload | ClaimPhase::Report => (random_span_id(), SpanKind::Client),
            ClaimPhase::Prepare | ClaimPhase::End => (random_span_id(), SpanKind::Internal),
            ClaimPhase::Run => (trace.run_span, SpanKind::Internal),
        };
        SpanData {
            span_kind: kind,
            start_time: wall_clock(timing.started_at),
            end_time: timing.ended_at.map_or(*ended_at, wall_clock),
            ..base(timing.phase.as_str(), SpanId::from(id), claim_span)
        }
    };
    std::iter::once(own).chain(record.timeline.phases().iter().map(child)).collect()
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
        let seconds = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let times: Vec<_> =
            spans.iter().map(|span| (&*span.name, seconds(span.start_time), seconds(span.end_time))).collect();
        assert_eq!(times, [("task", 990, 1_000), ("claim", 990, 991), ("report", 999, 1_000)]);
        assert_eq!(spans[0].parent_span_id, SpanId::from(9));
        assert!(spans[1..].iter().all(|span| span.parent_span_id == SpanId::from(8)));
        assert!(matches!(spans[0].status, Status::Error { .. }));
    }

    #[test]
    fn spans_beyond_the_queue_are_dropped_and_counted() {
        let (sender, _records) = mpsc::channel(2);
        let queue = SpanQueue { sender, counters: Arc::default() };
        (0..5).for_each(|_| queue.record(record()));
        assert_eq!(queue.span_counts(), SpanCounts { exported: 0, dropped: 9 });
    }
}
