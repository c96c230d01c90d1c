//! Forwards one request to the service and relays the reply.
//!
//! The worker sends `POST BASE/PATH` with the body of the request. It adds the task (`x-task-id`, `x-run-id`), how the request
//! was published (`x-correlation-id`, `x-rpc-path`, `x-worker-key`), its `idempotency-key`, how many seconds the client
//! still waits (`x-seconds-left`), and the trace context (`traceparent`). It forwards those headers of the request that begin
//! with `x-`, except those above, and `tracestate`.
//!
//! A 2xx response completes the task; 429 and 503 retry it, after the delay in `retry-after`; any other status, redirects
//! included, fails it. The body is the reply. The reply's status is `ok` or `core_error`, or that in the header `x-status`.
//! If the body is `application/x-ndjson`, each line is a partial reply, sent at once, and the text after the last line end is
//! the final reply.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Response, StatusCode};
use tokio::fs::File;
use tokio::io::AsyncWriteExt as _;
use tokio::time::Instant;
use url::Url;

use super::{AddressedRequest, HttpInner};
use crate::domain::refusal::Refusal;
use crate::handler::artifact::{self, ArtifactDeclaration, ArtifactKind};
use crate::handler::process::format_seconds;
use crate::handler::program_messages::{LineSplitter, SplitLine};
use crate::handler::{Context, ExecuteError, ExecuteFailure};
use crate::limits::{
    SERVICE_ANSWER_BYTES_MAX, SERVICE_HEADERS_MAX, SERVICE_RETRY_AFTER_DEFAULT, SERVICE_RETRY_AFTER_MAX,
};
use crate::task::{Reply, ReplyStatus, Results};

pub(super) enum ForwardResult {
    /// The service has answered.
    Done(Result<(), ExecuteError>),
    Busy {
        message: String,
        retry_after: Duration,
    },
    NotConnected,
}

/// Holds the response to a task that is not a request.
const ANSWER_ARTIFACT: &str = "public/answer";
const ANSWER_FILE: &str = "answer";
const NDJSON: &str = "application/x-ndjson";

const TASK_ID_HEADER: &str = "x-task-id";
const RUN_ID_HEADER: &str = "x-run-id";
const CORRELATION_ID_HEADER: &str = "x-correlation-id";
const IDEMPOTENCY_KEY_HEADER: &str = "idempotency-key";
const PATH_HEADER: &str = "x-rpc-path";
const WORKER_KEY_HEADER: &str = "x-worker-key";
const SECONDS_LEFT_HEADER: &str = "x-seconds-left";
const TRACEPARENT_HEADER: &str = "traceparent";
const STATUS_HEADER: &str = "x-status";

/// Headers by which workers and controllers annotate requests.
const RESERVED_HEADER_PREFIX: &str = "x-journeyman-";
const RESERVED_HEADERS: [&str; 6] =
    [TASK_ID_HEADER, RUN_ID_HEADER, CORRELATION_ID_HEADER, PATH_HEADER, WORKER_KEY_HEADER, SECONDS_LEFT_HEADER];

impl HttpInner {
    /// `None` if the path would leave the base URL.
    pub(super) fn resolve_url(&self, path: &str) -> Option<Url> {
        let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
        let path = path.trim_start_matches('/');
        // URL parsers treat `%2e` as a dot.
        let is_dots = |segment: &str| matches!(segment.to_ascii_lowercase().replace("%2e", ".").as_str(), "." | "..");
        if path.split('/').any(is_dots) || path.chars().any(|char| char == '\\' || char.is_control()) {
            return None;
        }
        let mut url = self.base.clone();
        if !path.is_empty() {
            let base = url.path().trim_end_matches('/').to_owned();
            url.set_path(&format!("{base}/{path}"));
        }
        url.set_query(query);
        let is_below =
            url.origin() == self.base.origin() && url.path().starts_with(self.base.path().trim_end_matches('/'));
        is_below.then_some(url)
    }

    fn request_headers(
        &self,
        AddressedRequest { request, deadline, .. }: &AddressedRequest,
        context: &Context,
    ) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in &request.headers {
            let name = name.to_ascii_lowercase();
            if headers.len() < SERVICE_HEADERS_MAX && is_forwarded_header(&name) {
                insert_header(&mut headers, &name, value);
            }
        }
        let run = &context.task().run;
        insert_header(&mut headers, TASK_ID_HEADER, run.task.as_str());
        insert_header(&mut headers, RUN_ID_HEADER, &run.run.to_string());
        let media = if request.body_base64.is_some() { "application/octet-stream" } else { "application/json" };
        insert_header(&mut headers, CONTENT_TYPE.as_str(), request.content_type.as_deref().unwrap_or(media));
        if !request.routing_key.is_empty() {
            insert_header(&mut headers, WORKER_KEY_HEADER, &request.routing_key);
        }
        let known = [
            (CONTENT_ENCODING.as_str(), &request.content_encoding),
            (CORRELATION_ID_HEADER, &request.correlation_id),
            (IDEMPOTENCY_KEY_HEADER, &request.idempotency_key),
            (PATH_HEADER, &request.path),
        ];
        for (name, value) in known {
            if let Some(value) = value {
                insert_header(&mut headers, name, value);
            }
        }
        if let Some(deadline) = deadline {
            let remaining = deadline.saturating_duration_since(Instant::now());
            insert_header(&mut headers, SECONDS_LEFT_HEADER, &format!("{:.3}", remaining.as_secs_f64()));
        }
        if let Some(trace) = context.task().env.get("TRACEPARENT") {
            insert_header(&mut headers, TRACEPARENT_HEADER, trace);
        }
        headers
    }

    pub(super) async fn forward(
        &self,
        request: &AddressedRequest,
        context: &Context,
    ) -> Result<ForwardResult, ExecuteError> {
        let (headers, body) = (self.request_headers(request, context), request.request.body_bytes());
        let started = Instant::now();
        let sending = self.client.post(request.url.clone()).headers(headers).body(body).send();
        let in_flight = Arc::clone(&self.in_flight);
        let response = match sending.await {
            Ok(response) => response,
            Err(error) if error.is_connect() => return Ok(ForwardResult::NotConnected),
            Err(error) => return Err(self.disconnect_error(&error, SentReplies::NothingSent)),
        };
        let code = response.status();
        if matches!(code, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            let message = format!("the service {} answered {code}", self.config.name);
            let retry_after = retry_after(&response);
            // The client gets this reply if it was the last attempt. A reply that cannot be stored changes nothing.
            if let Some(results) = context.results()
                && let Err(error) = self.relay_reply(response, results, context).await
            {
                tracing::debug!(handler = self.config.name, "cannot store the reply of a busy service: {error:?}");
            }
            drop(in_flight);
            return Ok(ForwardResult::Busy { message, retry_after });
        }
        match context.results() {
            Some(results) => self.relay_reply(response, results, context).await?,
            None => {
                let bytes = self.store_answer(response, context).await?;
                let elapsed = format_seconds(started.elapsed());
                let path = request.url.path();
                context.log().write_note(&format!("POST {path}: {code}, {bytes} bytes, after {elapsed}"));
            }
        }
        drop(in_flight);
        if code.is_success() {
            return Ok(ForwardResult::Done(Ok(())));
        }
        let hint = if code.is_redirection() { "; redirects are not followed" } else { "" };
        let message = format!("the service {} answered {code}{hint}", self.config.name);
        Ok(ForwardResult::Done(Err(ExecuteError::failed(message))))
    }

    async fn relay_reply(
        &self,
        mut response: Response,
        results: &Results,
        context: &Context,
    ) -> Result<(), ExecuteError> {
        let success = response.status().is_success();
        let content_type = header(&response, CONTENT_TYPE.as_str());
        let requested =
            response.headers().get(STATUS_HEADER).map(|value| value.to_str().ok().and_then(ReplyStatus::parse));
        let status = match requested {
            // A failure is never reported as `ok`.
            Some(Some(status)) if success || status != ReplyStatus::OK => status,
            Some(None) if success => {
                let message = "sent an invalid `x-status`: use 1 to 64 letters, digits, `_`, `-` and `.`";
                return Err(ExecuteError::failed(format!("the service {} {message}", self.config.name)));
            }
            None if success => ReplyStatus::OK,
            Some(_) | None => ReplyStatus::CORE_ERROR,
        };
        let reply =
            |body: Vec<u8>| Reply { status: status.clone(), body: body.into(), content_type: content_type.clone() };
        let max_bytes = results.limits().body_bytes;
        let is_ndjson = success && content_type.as_deref().is_some_and(|kind| kind.starts_with(NDJSON));
        let mut lines = LineSplitter::new(max_bytes);
        let mut sent = SentReplies::NothingSent;
        let (mut received, mut partials) = (Vec::new(), Vec::new());
        while let Some(chunk) = response.chunk().await.map_err(|error| self.disconnect_error(&error, sent))? {
            if is_ndjson {
                lines.push(&chunk, |line| partials.push(partial_body(&line)));
            } else {
                received.extend_from_slice(&chunk);
            }
            for body in partials.drain(..) {
                let body = body.ok_or_else(|| self.too_large_error(max_bytes))?;
                if body.is_empty() {
                    continue;
                }
                let partial = Reply { status: ReplyStatus::OK, ..reply(body) };
                context.send_partial_reply(partial).await.map_err(|refused| match refused.refusal {
                    Refusal::Gone => ExecuteError::failed("the client no longer waits for replies".to_owned()),
                    Refusal::Retry { .. }
                    | Refusal::Throttled { .. }
                    | Refusal::Rejected
                    | Refusal::Denied
                    | Refusal::Stale => ExecuteError::failed(format!("cannot send a partial reply: {refused}")),
                })?;
                sent = SentReplies::PartialSent;
            }
            if lines.is_too_long() || received.len() > max_bytes {
                return Err(self.too_large_error(max_bytes));
            }
        }
        // The text after the last line end is the final reply.
        lines.finish(|line| received.extend(partial_body(&line).unwrap_or_default()));
        if matches!(sent, SentReplies::PartialSent) && received.is_empty() {
            // The last line was a partial reply, so the final reply is empty.
            received.extend_from_slice(b"null");
        }
        context.set_reply(reply(received)).map_err(|error| {
            tracing::warn!(claim.run = %context.task().run, handler = self.config.name, "cannot send a reply: {error}");
            ExecuteError::failed(format!("the service {}: {error}", self.config.name))
        })
    }

    /// Stores the response as an artifact and returns its size.
    async fn store_answer(&self, mut response: Response, context: &Context) -> Result<usize, ExecuteError> {
        let disk_error = |error: std::io::Error| {
            ExecuteError::from_io(&format!("cannot store the response of the service {}", self.config.name), &error)
        };
        // An invalid media type is replaced by a guess.
        let content_type =
            header(&response, CONTENT_TYPE.as_str()).filter(|kind| artifact::is_valid_content_type(kind));
        let mut file = File::create(context.workdir().join(ANSWER_FILE)).await.map_err(disk_error)?;
        let mut bytes = 0_usize;
        while let Some(chunk) =
            response.chunk().await.map_err(|error| self.disconnect_error(&error, SentReplies::NothingSent))?
        {
            bytes = bytes.saturating_add(chunk.len());
            if bytes > SERVICE_ANSWER_BYTES_MAX {
                return Err(self.too_large_error(SERVICE_ANSWER_BYTES_MAX));
            }
            file.write_all(&chunk).await.map_err(disk_error)?;
        }
        file.flush().await.map_err(disk_error)?;
        let kind = ArtifactKind::File { path: Path::new(ANSWER_FILE).to_owned(), content_type };
        let declared = context.artifacts().declare(ArtifactDeclaration::new(ANSWER_ARTIFACT, kind));
        declared.map_err(|error| ExecuteError::internal(error.to_string()))?;
        Ok(bytes)
    }

    fn too_large_error(&self, max_bytes: usize) -> ExecuteError {
        ExecuteError::failed(format!("the response of the service {} exceeds {max_bytes} bytes", self.config.name))
    }

    /// A request is not retried after a partial reply was sent.
    fn disconnect_error(&self, error: &reqwest::Error, sent: SentReplies) -> ExecuteError {
        tracing::debug!(handler = self.config.name, error = ?error.to_string(), "a service closed the connection");
        let message =
            format!("the service {} closed the connection before its response was complete", self.config.name);
        match sent {
            SentReplies::NothingSent => ExecuteError::new(ExecuteFailure::Intermittent, message),
            SentReplies::PartialSent => ExecuteError::failed(message),
        }
    }
}

fn is_forwarded_header(name: &str) -> bool {
    !RESERVED_HEADERS.contains(&name)
        && !name.starts_with(RESERVED_HEADER_PREFIX)
        && (name.starts_with("x-") || name == "tracestate")
}

#[derive(Debug, Clone, Copy)]
enum SentReplies {
    NothingSent,
    PartialSent,
}

/// A line of NDJSON; `None` if it is too long.
fn partial_body(line: &SplitLine<'_>) -> Option<Vec<u8>> {
    match line {
        SplitLine::Whole(bytes) => Some(bytes.strip_suffix(b"\r").unwrap_or(bytes).to_vec()),
        SplitLine::TooLong => None,
    }
}

fn retry_after(response: &Response) -> Duration {
    let seconds = header(response, RETRY_AFTER.as_str()).and_then(|text| text.trim().parse().ok());
    seconds.map_or(SERVICE_RETRY_AFTER_DEFAULT, Duration::from_secs).min(SERVICE_RETRY_AFTER_MAX)
}

/// Waits with the slot occupied, so that the worker claims no other task for an overloaded service; at most until the
/// client's deadline.
pub(super) async fn wait_before_retry(delay: Duration, deadline: Option<Instant>, context: &Context) {
    let end = Instant::now() + delay;
    tokio::select! {
        () = tokio::time::sleep_until(deadline.map_or(end, |deadline| deadline.min(end))) => {}
        _ = context.canceled() => {}
    }
}

fn header(response: &Response, name: &str) -> Option<String> {
    response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// Ignores invalid names and values.
fn insert_header(headers: &mut HeaderMap, name: &str, value: &str) {
    let name = HeaderName::from_bytes(name.as_bytes());
    if let (Ok(name), Ok(value)) = (name, HeaderValue::from_str(value)) {
        headers.insert(name, value);
    }
}
