//! Spans of ended claims for an OpenTelemetry collector, by OTLP over HTTP.
//!
//! A claim is told of when it is over, and its spans are made of what it went through; nothing is kept while it runs. They wait
//! in a bounded queue. A collector that is slow, dead or wrong costs spans, which are counted, and no task anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::config::collector::{CollectorConfig, NameValue};
use crate::domain::backoff::{Backoff, Policy};
use crate::domain::claim::{ClaimEnd, LossReason};
use crate::domain::jitter::Jitter;
use crate::domain::outcome::Outcome;
use crate::domain::time::Instant;
use crate::limits::{
    TRACES_ANSWER_BYTES_MAX, TRACES_ATTEMPTS_MAX, TRACES_BATCH_DELAY, TRACES_BATCH_MAX, TRACES_CLOSE_TIMEOUT,
    TRACES_QUEUED_MAX,
};
use crate::worker::timeline::{ClaimPhase, PhaseTiming};
use crate::worker::trace_recorder::{FinishedClaim, SpanCounts, TraceRecorder};

const RETRY: Policy = Policy { first: Duration::from_secs(1), max: Duration::from_secs(10) };

/// A claim that is over, and when that was.
#[derive(Debug)]
struct EndedClaim {
    record: FinishedClaim,
    ended_at: Timestamp,
}

/// Where a worker puts its spans.
#[derive(Debug)]
struct SpanQueue {
    waiting: mpsc::Sender<EndedClaim>,
    counters: Arc<SpanCounters>,
}

#[derive(Debug, Default)]
struct SpanCounters {
    exported: AtomicU64,
    dropped: AtomicU64,
}

impl TraceRecorder for SpanQueue {
    fn record(&self, record: FinishedClaim) {
        let dated = EndedClaim { record, ended_at: Timestamp::now() };
        if let Err(error) = self.waiting.try_send(dated) {
            let (mpsc::error::TrySendError::Full(lost) | mpsc::error::TrySendError::Closed(lost)) = error;
            self.counters.add_dropped(span_count(&lost.record));
        }
    }

    fn span_counts(&self) -> SpanCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SpanCounts { exported: of(&self.counters.exported), dropped: of(&self.counters.dropped) }
    }
}

impl SpanCounters {
    fn add_dropped(&self, spans: u64) {
        self.dropped.fetch_add(spans, Ordering::Relaxed);
    }
}

/// The spans of a claim: its own and one for each phase.
fn span_count(record: &FinishedClaim) -> u64 {
    record.timeline.phases().len() as u64 + 1
}

/// The export of spans, while it goes on.
#[derive(Debug)]
pub struct Export {
    queue: Arc<SpanQueue>,
    sending: JoinSet<()>,
    shutdown: CancellationToken,
}

impl Export {
    /// Starts it, for a worker of this id and group.
    ///
    /// # Errors
    ///
    /// Where no client can be made: a header that is none, or no certificates of this system.
    pub fn start(collector: CollectorConfig, worker_id: &str, worker_group: &str) -> Result<Self, String> {
        let post = CollectorClient::new(&collector)?;
        let (waiting, records) = mpsc::channel(TRACES_QUEUED_MAX);
        let counted = Arc::<SpanCounters>::default();
        let queue = Arc::new(SpanQueue { waiting, counters: Arc::clone(&counted) });
        let leaves = CancellationToken::new();
        let resource = resource(&collector, worker_id, worker_group);
        let mut sending = JoinSet::new();
        sending.spawn(SpanSender { post, resource, counters: counted, shutdown: leaves.clone() }.run(records));
        tracing::info!(endpoint = %redacted_url(&collector.endpoint), "traces are exported");
        Ok(Self { queue, sending, shutdown: leaves })
    }

    /// Where the worker puts its spans.
    #[must_use]
    pub fn recorder(&self) -> Arc<dyn TraceRecorder> {
        Arc::<SpanQueue>::clone(&self.queue)
    }

    /// Sends what waits, once, and takes no longer than [`TRACES_CLOSE_TIMEOUT`].
    pub async fn close(mut self) {
        self.shutdown.cancel();
        if timeout(TRACES_CLOSE_TIMEOUT, self.sending.join_next()).await.is_err() {
            tracing::warn!("the collector of traces did not answer in time; the last spans are lost");
        }
    }
}

/// An address without what may be a secret in it.
fn redacted_url(endpoint: &url::Url) -> String {
    let (host, port) = (endpoint.host_str().unwrap_or_default(), endpoint.port());
    let port = port.map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{host}{port}{}", endpoint.scheme(), endpoint.path())
}

struct SpanSender {
    post: CollectorClient,
    resource: Resource,
    counters: Arc<SpanCounters>,
    shutdown: CancellationToken,
}

impl SpanSender {
    async fn run(self, mut records: mpsc::Receiver<EndedClaim>) {
        let mut in_trouble = false;
        while let Some(batch) = self.batch(&mut records).await {
            let spans: u64 = batch.iter().map(|dated| span_count(&dated.record)).sum();
            match self.send(self.request(&batch)).await {
                Ok(rejected) => {
                    self.counters.exported.fetch_add(spans.saturating_sub(rejected), Ordering::Relaxed);
                    self.counters.add_dropped(rejected.min(spans));
                    if std::mem::take(&mut in_trouble) {
                        tracing::info!("the collector of traces takes spans again");
                    }
                }
                Err(why) => {
                    self.counters.add_dropped(spans);
                    if !std::mem::replace(&mut in_trouble, true) {
                        tracing::warn!("spans are dropped, tasks are not concerned: {why}");
                    }
                }
            }
        }
    }

    /// What has come within [`TRACES_BATCH_DELAY`] of the first; `None` where nothing will.
    async fn batch(&self, records: &mut mpsc::Receiver<EndedClaim>) -> Option<Vec<EndedClaim>> {
        let first = tokio::select! {
            biased;
            first = records.recv() => first?,
            () = self.shutdown.cancelled() => records.try_recv().ok()?,
        };
        let mut batch = vec![first];
        let until = sleep(TRACES_BATCH_DELAY);
        tokio::pin!(until);
        while batch.len() < TRACES_BATCH_MAX {
            tokio::select! {
                biased;
                next = records.recv() => match next {
                    Some(next) => batch.push(next),
                    None => break,
                },
                () = &mut until => break,
                () = self.shutdown.cancelled() => break,
            }
        }
        Some(batch)
    }

    /// Answers with how many spans the collector did not take.
    async fn send(&self, body: Vec<u8>) -> Result<u64, String> {
        let (mut backoff, mut jitter) = (Backoff::NEW, Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0));
        loop {
            let refused = match self.post.post(body.clone()).await {
                Ok(rejected) => return Ok(rejected),
                Err(refused) => refused,
            };
            let last = backoff.tries() + 1 >= TRACES_ATTEMPTS_MAX || self.shutdown.is_cancelled();
            if refused.retry == Retry::No || last {
                return Err(refused.reason);
            }
            let wait = backoff.wait(RETRY, refused.retry_after, &mut jitter);
            // A worker that leaves tries once more, and waits for nothing.
            drop(timeout(wait, self.shutdown.cancelled()).await);
        }
    }

    fn request(&self, batch: &[EndedClaim]) -> Vec<u8> {
        let scope = InstrumentationScope {
            name: env!("CARGO_PKG_NAME").to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..InstrumentationScope::default()
        };
        let spans = batch.iter().flat_map(spans).collect();
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, schema_url: String::new() }];
        let resource = Some(self.resource.clone());
        let resource_spans = vec![ResourceSpans { resource, scope_spans, schema_url: String::new() }];
        ExportTraceServiceRequest { resource_spans }.encode_to_vec()
    }
}

/// Requests to the collector.
struct CollectorClient {
    http: reqwest::Client,
    endpoint: url::Url,
}

/// Why spans were not taken.
struct PostError {
    reason: String,
    retry: Retry,
    retry_after: Option<Duration>,
}

#[derive(PartialEq, Eq)]
enum Retry {
    Yes,
    No,
}

impl CollectorClient {
    fn new(collector: &CollectorConfig) -> Result<Self, String> {
        use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
        let mut headers = HeaderMap::new();
        for NameValue { name, value } in &collector.headers {
            let wrong = || format!("OTEL_EXPORTER_OTLP_HEADERS: {name:?} is no header, or its value is none");
            let name = HeaderName::try_from(name).map_err(|_| wrong())?;
            let mut value = HeaderValue::try_from(value).map_err(|_| wrong())?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        crate::host::crypto_provider::install_crypto_provider();
        let http = reqwest::Client::builder()
            .default_headers(headers)
            .timeout(collector.timeout)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self { http, endpoint: collector.endpoint.clone() })
    }

    async fn post(&self, body: Vec<u8>) -> Result<u64, PostError> {
        let lost =
            |error: reqwest::Error| PostError { reason: root_cause(&error), retry: Retry::Yes, retry_after: None };
        let mut answer = self.http.post(self.endpoint.clone()).body(body).send().await.map_err(lost)?;
        let status = answer.status();
        if !status.is_success() {
            let again = if matches!(status.as_u16(), 429 | 502 | 503 | 504) { Retry::Yes } else { Retry::No };
            let seconds = answer.headers().get(reqwest::header::RETRY_AFTER);
            let seconds = seconds.and_then(|value| value.to_str().ok()?.parse().ok());
            let after = seconds.map(|seconds| Duration::from_secs(seconds).min(RETRY.max));
            return Err(PostError {
                reason: format!("the collector answered {status}"),
                retry: again,
                retry_after: after,
            });
        }
        let mut body = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(lost)? {
            body.extend_from_slice(&piece);
            if body.len() > TRACES_ANSWER_BYTES_MAX {
                break;
            }
        }
        // An answer in other words is still a yes.
        let read = ExportTraceServiceResponse::decode(body.as_slice()).unwrap_or_default();
        Ok(read.partial_success.map_or(0, |partly| u64::try_from(partly.rejected_spans).unwrap_or(0)))
    }
}

/// The useful end of a chain of errors; it names no address.
fn root_cause(error: &reqwest::Error) -> String {
    let mut text = if error.is_timeout() { "no answer in time".to_owned() } else { "the connection failed".to_owned() };
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text = inner.to_string();
        cause = inner.source();
    }
    format!("the collector of traces: {text}")
}

fn resource(collector: &CollectorConfig, worker_id: &str, worker_group: &str) -> Resource {
    let own = [
        text("service.name", &collector.service_name),
        text("service.version", env!("CARGO_PKG_VERSION")),
        text("service.instance.id", worker_id),
        text("journeyman.worker.group", worker_group),
    ];
    let more = collector.attributes.iter().map(|pair| text(&pair.name, &pair.value));
    // Of two of one name the operator's counts.
    let own = own.into_iter().filter(|own| collector.attributes.iter().all(|pair| pair.name != own.key));
    Resource { attributes: own.chain(more).collect(), ..Resource::default() }
}

/// The claim's span, and one for each of its phases.
fn spans(dated: &EndedClaim) -> Vec<Span> {
    let EndedClaim { record, ended_at: at } = dated;
    let trace = record.span_context;
    let ended = nanos(*at, record.now, record.now);
    let began = record.timeline.phases().first().map_or(ended, |lap| nanos(*at, record.now, lap.started_at));
    let base = |name: &str, span: u64, parent: Option<u64>| Span {
        trace_id: trace.claim_span.trace_number().to_be_bytes().to_vec(),
        span_id: span.to_be_bytes().to_vec(),
        parent_span_id: parent.map(|parent| parent.to_be_bytes().to_vec()).unwrap_or_default(),
        name: name.to_owned(),
        // The low byte holds the trace's own flags.
        flags: 1,
        ..Span::default()
    };
    let own = Span {
        kind: SpanKind::Consumer.into(),
        start_time_unix_nano: began,
        end_time_unix_nano: ended,
        attributes: attributes(record),
        status: status(record.end),
        ..base("task", trace.claim_span.span_id(), trace.parent)
    };
    let child = |lap: &PhaseTiming| {
        let span =
            if lap.phase == ClaimPhase::Run { trace.run_span } else { uuid::Uuid::new_v4().as_u64_pair().1.max(1) };
        let kind = match lap.phase {
            ClaimPhase::Claim | ClaimPhase::Upload | ClaimPhase::Report => SpanKind::Client,
            ClaimPhase::Prepare | ClaimPhase::Run | ClaimPhase::End => SpanKind::Internal,
        };
        Span {
            kind: kind.into(),
            start_time_unix_nano: nanos(*at, record.now, lap.started_at),
            end_time_unix_nano: lap.ended_at.map_or(ended, |end| nanos(*at, record.now, end)),
            ..base(lap.phase.as_str(), span, Some(trace.claim_span.span_id()))
        }
    };
    std::iter::once(own).chain(record.timeline.phases().iter().map(child)).collect()
}

/// A moment by the wall clock: as long before the end of the claim as on the worker's own.
fn nanos(at: Timestamp, now: Instant, then: Instant) -> u64 {
    let ago = i128::try_from(now.since(then).as_nanos()).unwrap_or(i128::MAX);
    u64::try_from(at.as_nanosecond().saturating_sub(ago)).unwrap_or(0)
}

fn attributes(record: &FinishedClaim) -> Vec<KeyValue> {
    let run = Value::IntValue(record.run.run.into());
    vec![
        text("journeyman.task", record.run.task.as_str()),
        KeyValue {
            key: "journeyman.run".to_owned(),
            value: Some(AnyValue { value: Some(run) }),
            ..KeyValue::default()
        },
        text("journeyman.source", &record.source),
        text("journeyman.end", &end_text(record.end)),
    ]
}

fn text(key: &str, value: &str) -> KeyValue {
    let value = Value::StringValue(value.to_owned());
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

/// What became of it, in few words.
fn end_text(end: ClaimEnd) -> String {
    let lost = |loss| match loss {
        LossReason::Revoked => "the queue refused it",
        LossReason::Canceled => "canceled",
        LossReason::LeaseExpired => "its lease was over",
        LossReason::GrantedTooLate => "granted too late",
        LossReason::ShutdownDeadline => "no time left",
    };
    match end {
        ClaimEnd::Reported(outcome) => outcome.to_string(),
        ClaimEnd::AlreadyResolved(outcome) => format!("superseded, ours was {outcome}"),
        ClaimEnd::ReportRejected(outcome) => format!("not reportable, ours was {outcome}"),
        ClaimEnd::Unconfirmed { outcome, loss } => format!("unconfirmed, ours was {outcome}: {}", lost(loss)),
        ClaimEnd::Lost(loss) => format!("lost: {}", lost(loss)),
        ClaimEnd::NotGranted => "not granted".to_owned(),
    }
}

fn status(ended: ClaimEnd) -> Option<Status> {
    let well = ended == ClaimEnd::Reported(Outcome::Completed);
    (!well).then(|| Status { message: end_text(ended), code: StatusCode::Error.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::id::{Run, TaskId};
    use crate::domain::trace_context::TraceParent;
    use crate::worker::timeline::Timeline;
    use crate::worker::trace_recorder::SpanContext;

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
    fn times_are_as_long_ago_as_on_the_workers_clock_and_what_has_no_end_ends_with_the_claim() {
        let dated = EndedClaim { record: record(), ended_at: Timestamp::from_second(1_000).unwrap() };
        let spans = spans(&dated);
        let seconds = |nanos: u64| nanos / 1_000_000_000;
        let times: Vec<_> = spans
            .iter()
            .map(|span| (span.name.as_str(), seconds(span.start_time_unix_nano), seconds(span.end_time_unix_nano)))
            .collect();
        assert_eq!(times, [("task", 990, 1_000), ("claim", 990, 991), ("report", 999, 1_000)]);
        assert_eq!(spans[0].parent_span_id, 9_u64.to_be_bytes());
        assert!(spans[1..].iter().all(|span| span.parent_span_id == 8_u64.to_be_bytes()));
        let status = spans[0].status.as_ref().unwrap();
        assert_eq!((status.code(), status.message.as_str()), (StatusCode::Error, "lost: its lease was over"));
    }

    #[test]
    fn what_finds_no_room_is_dropped_and_counted() {
        let (waiting, _records) = mpsc::channel(2);
        let queue = SpanQueue { waiting, counters: Arc::default() };
        (0..5).for_each(|_| queue.record(record()));
        assert_eq!(queue.span_counts(), SpanCounts { exported: 0, dropped: 9 });
    }
}
