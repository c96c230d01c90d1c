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

use crate::config::telemetry::{Collector, Pair};
use crate::domain::backoff::{Backoff, Policy};
use crate::domain::claim::{End, Loss};
use crate::domain::jitter::Jitter;
use crate::domain::outcome::Outcome;
use crate::domain::time::Instant;
use crate::limits::{
    TRACES_ANSWER_BYTES_MAX, TRACES_BATCH_MAX, TRACES_CLOSE_WAIT, TRACES_EVERY, TRACES_TRIES, TRACES_WAITING_MAX,
};
use crate::worker::record::{Record, Recorder, Spans};
use crate::worker::timeline::{Lap, Phase};

const RETRY: Policy = Policy { first: Duration::from_secs(1), max: Duration::from_secs(10) };

/// A claim that is over, and when that was.
#[derive(Debug)]
struct Dated {
    record: Record,
    at: Timestamp,
}

/// Where a worker puts its spans.
#[derive(Debug)]
struct Queue {
    waiting: mpsc::Sender<Dated>,
    counted: Arc<Counted>,
}

#[derive(Debug, Default)]
struct Counted {
    exported: AtomicU64,
    dropped: AtomicU64,
}

impl Recorder for Queue {
    fn ended(&self, record: Record) {
        let dated = Dated { record, at: Timestamp::now() };
        if let Err(error) = self.waiting.try_send(dated) {
            let (mpsc::error::TrySendError::Full(lost) | mpsc::error::TrySendError::Closed(lost)) = error;
            self.counted.lose(many(&lost.record));
        }
    }

    fn counts(&self) -> Spans {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Spans { exported: of(&self.counted.exported), dropped: of(&self.counted.dropped) }
    }
}

impl Counted {
    fn lose(&self, spans: u64) {
        self.dropped.fetch_add(spans, Ordering::Relaxed);
    }
}

/// The spans of a claim: its own and one for each phase.
fn many(record: &Record) -> u64 {
    record.timeline.laps().len() as u64 + 1
}

/// The export of spans, while it goes on.
#[derive(Debug)]
pub struct Export {
    queue: Arc<Queue>,
    sending: JoinSet<()>,
    leaves: CancellationToken,
}

impl Export {
    /// Starts it, for a worker of this id and group.
    ///
    /// # Errors
    ///
    /// Where no client can be made: a header that is none, or no certificates of this system.
    pub fn start(collector: Collector, worker_id: &str, worker_group: &str) -> Result<Self, String> {
        let post = Post::new(&collector)?;
        let (waiting, records) = mpsc::channel(TRACES_WAITING_MAX);
        let counted = Arc::<Counted>::default();
        let queue = Arc::new(Queue { waiting, counted: Arc::clone(&counted) });
        let leaves = CancellationToken::new();
        let resource = resource(&collector, worker_id, worker_group);
        let mut sending = JoinSet::new();
        sending.spawn(Sender { post, resource, counted, leaves: leaves.clone() }.run(records));
        tracing::info!(endpoint = %shown(&collector.endpoint), "traces are exported");
        Ok(Self { queue, sending, leaves })
    }

    /// Where the worker puts its spans.
    #[must_use]
    pub fn recorder(&self) -> Arc<dyn Recorder> {
        Arc::<Queue>::clone(&self.queue)
    }

    /// Sends what waits, once, and takes no longer than [`TRACES_CLOSE_WAIT`].
    pub async fn close(mut self) {
        self.leaves.cancel();
        if timeout(TRACES_CLOSE_WAIT, self.sending.join_next()).await.is_err() {
            tracing::warn!("the collector of traces did not answer in time; the last spans are lost");
        }
    }
}

/// An address without what may be a secret in it.
fn shown(endpoint: &url::Url) -> String {
    let (host, port) = (endpoint.host_str().unwrap_or_default(), endpoint.port());
    let port = port.map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{host}{port}{}", endpoint.scheme(), endpoint.path())
}

struct Sender {
    post: Post,
    resource: Resource,
    counted: Arc<Counted>,
    leaves: CancellationToken,
}

impl Sender {
    async fn run(self, mut records: mpsc::Receiver<Dated>) {
        let mut in_trouble = false;
        while let Some(batch) = self.batch(&mut records).await {
            let spans: u64 = batch.iter().map(|dated| many(&dated.record)).sum();
            match self.send(self.request(&batch)).await {
                Ok(rejected) => {
                    self.counted.exported.fetch_add(spans.saturating_sub(rejected), Ordering::Relaxed);
                    self.counted.lose(rejected.min(spans));
                    if std::mem::take(&mut in_trouble) {
                        tracing::info!("the collector of traces takes spans again");
                    }
                }
                Err(why) => {
                    self.counted.lose(spans);
                    if !std::mem::replace(&mut in_trouble, true) {
                        tracing::warn!("spans are dropped, tasks are not concerned: {why}");
                    }
                }
            }
        }
    }

    /// What has come within [`TRACES_EVERY`] of the first; `None` where nothing will.
    async fn batch(&self, records: &mut mpsc::Receiver<Dated>) -> Option<Vec<Dated>> {
        let first = tokio::select! {
            biased;
            first = records.recv() => first?,
            () = self.leaves.cancelled() => records.try_recv().ok()?,
        };
        let mut batch = vec![first];
        let until = sleep(TRACES_EVERY);
        tokio::pin!(until);
        while batch.len() < TRACES_BATCH_MAX {
            tokio::select! {
                biased;
                next = records.recv() => match next {
                    Some(next) => batch.push(next),
                    None => break,
                },
                () = &mut until => break,
                () = self.leaves.cancelled() => break,
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
            let last = backoff.tries() + 1 >= TRACES_TRIES || self.leaves.is_cancelled();
            if refused.again == Again::No || last {
                return Err(refused.why);
            }
            let wait = backoff.wait(RETRY, refused.after, &mut jitter);
            // A worker that leaves tries once more, and waits for nothing.
            drop(timeout(wait, self.leaves.cancelled()).await);
        }
    }

    fn request(&self, batch: &[Dated]) -> Vec<u8> {
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
struct Post {
    http: reqwest::Client,
    endpoint: url::Url,
}

/// Why spans were not taken.
struct Refused {
    why: String,
    again: Again,
    after: Option<Duration>,
}

#[derive(PartialEq, Eq)]
enum Again {
    Yes,
    No,
}

impl Post {
    fn new(collector: &Collector) -> Result<Self, String> {
        use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
        let mut headers = HeaderMap::new();
        for Pair { name, value } in &collector.headers {
            let wrong = || format!("OTEL_EXPORTER_OTLP_HEADERS: {name:?} is no header, or its value is none");
            let name = HeaderName::try_from(name).map_err(|_| wrong())?;
            let mut value = HeaderValue::try_from(value).map_err(|_| wrong())?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        crate::host::tls::choose();
        let http = reqwest::Client::builder()
            .default_headers(headers)
            .timeout(collector.timeout)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self { http, endpoint: collector.endpoint.clone() })
    }

    async fn post(&self, body: Vec<u8>) -> Result<u64, Refused> {
        let lost = |error: reqwest::Error| Refused { why: deepest(&error), again: Again::Yes, after: None };
        let mut answer = self.http.post(self.endpoint.clone()).body(body).send().await.map_err(lost)?;
        let status = answer.status();
        if !status.is_success() {
            let again = if matches!(status.as_u16(), 429 | 502 | 503 | 504) { Again::Yes } else { Again::No };
            let seconds = answer.headers().get(reqwest::header::RETRY_AFTER);
            let seconds = seconds.and_then(|value| value.to_str().ok()?.parse().ok());
            let after = seconds.map(|seconds| Duration::from_secs(seconds).min(RETRY.max));
            return Err(Refused { why: format!("the collector answered {status}"), again, after });
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
fn deepest(error: &reqwest::Error) -> String {
    let mut text = if error.is_timeout() { "no answer in time".to_owned() } else { "the connection failed".to_owned() };
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text = inner.to_string();
        cause = inner.source();
    }
    format!("the collector of traces: {text}")
}

fn resource(collector: &Collector, worker_id: &str, worker_group: &str) -> Resource {
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
fn spans(dated: &Dated) -> Vec<Span> {
    let Dated { record, at } = dated;
    let trace = record.trace;
    let ended = nanos(*at, record.now, record.now);
    let began = record.timeline.laps().first().map_or(ended, |lap| nanos(*at, record.now, lap.began));
    let base = |name: &str, span: u64, parent: Option<u64>| Span {
        trace_id: trace.own.trace().to_be_bytes().to_vec(),
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
        ..base("task", trace.own.span(), trace.parent)
    };
    let child = |lap: &Lap| {
        let span = if lap.phase == Phase::Run { trace.run } else { uuid::Uuid::new_v4().as_u64_pair().1.max(1) };
        let kind = match lap.phase {
            Phase::Claim | Phase::Upload | Phase::Report => SpanKind::Client,
            Phase::Prepare | Phase::Run | Phase::End => SpanKind::Internal,
        };
        Span {
            kind: kind.into(),
            start_time_unix_nano: nanos(*at, record.now, lap.began),
            end_time_unix_nano: lap.ended.map_or(ended, |end| nanos(*at, record.now, end)),
            ..base(lap.phase.as_str(), span, Some(trace.own.span()))
        }
    };
    std::iter::once(own).chain(record.timeline.laps().iter().map(child)).collect()
}

/// A moment by the wall clock: as long before the end of the claim as on the worker's own.
fn nanos(at: Timestamp, now: Instant, then: Instant) -> u64 {
    let ago = i128::try_from(now.since(then).as_nanos()).unwrap_or(i128::MAX);
    u64::try_from(at.as_nanosecond().saturating_sub(ago)).unwrap_or(0)
}

fn attributes(record: &Record) -> Vec<KeyValue> {
    let run = Value::IntValue(record.run.run.into());
    vec![
        text("journeyman.task", record.run.task.as_str()),
        KeyValue {
            key: "journeyman.run".to_owned(),
            value: Some(AnyValue { value: Some(run) }),
            ..KeyValue::default()
        },
        text("journeyman.source", &record.source),
        text("journeyman.end", &end(record.end)),
    ]
}

fn text(key: &str, value: &str) -> KeyValue {
    let value = Value::StringValue(value.to_owned());
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

/// What became of it, in few words.
fn end(end: End) -> String {
    let lost = |loss| match loss {
        Loss::Refused => "the queue refused it",
        Loss::Canceled => "canceled",
        Loss::LeaseOver => "its lease was over",
        Loss::GrantedLate => "granted too late",
        Loss::NoTime => "no time left",
    };
    match end {
        End::Reported(outcome) => outcome.to_string(),
        End::Superseded(outcome) => format!("superseded, ours was {outcome}"),
        End::Unreportable(outcome) => format!("not reportable, ours was {outcome}"),
        End::Unconfirmed { outcome, loss } => format!("unconfirmed, ours was {outcome}: {}", lost(loss)),
        End::Lost(loss) => format!("lost: {}", lost(loss)),
        End::NotGranted => "not granted".to_owned(),
    }
}

fn status(ended: End) -> Option<Status> {
    let well = ended == End::Reported(Outcome::Completed);
    (!well).then(|| Status { message: end(ended), code: StatusCode::Error.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::id::{Run, TaskId};
    use crate::domain::trace::TraceParent;
    use crate::worker::record::Trace;
    use crate::worker::timeline::Timeline;

    fn record() -> Record {
        let at = |secs| Instant::at(Duration::from_secs(secs));
        let mut timeline = Timeline::default();
        timeline.begin(Phase::Claim, at(10));
        timeline.end(&[Phase::Claim], at(11));
        timeline.begin(Phase::Report, at(19));
        Record {
            run: Run { task: TaskId::parse("T").unwrap(), run: 2 },
            source: "ci".to_owned(),
            trace: Trace { own: TraceParent::new(7, 8), parent: Some(9), run: 10 },
            timeline,
            end: End::Lost(Loss::LeaseOver),
            now: at(20),
        }
    }

    #[test]
    fn times_are_as_long_ago_as_on_the_workers_clock_and_what_has_no_end_ends_with_the_claim() {
        let dated = Dated { record: record(), at: Timestamp::from_second(1_000).unwrap() };
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
        let queue = Queue { waiting, counted: Arc::default() };
        (0..5).for_each(|_| queue.ended(record()));
        assert_eq!(queue.counts(), Spans { exported: 0, dropped: 9 });
    }
}
