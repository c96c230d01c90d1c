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

use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Response, StatusCode};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _};
use tokio::time::Instant;
use tokio_util::io::StreamReader;
use url::Url;

use super::{AddressedRequest, HttpInner};
use crate::handler::artifact::{self, ArtifactDeclaration, ArtifactKind};
use crate::handler::process::format_seconds;
use crate::handler::{Context, ExecuteError, ExecuteFailure, TaskInfo};
use crate::task::{Reply, ReplyStatus, Results};
use journeyman_domain::limits::{
    SERVICE_ANSWER_BYTES_MAX, SERVICE_HEADERS_MAX, SERVICE_RETRY_AFTER_DEFAULT, SERVICE_RETRY_AFTER_MAX,
};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::host::clock::stamp;
use journeyman_platform::http::client::{self, BodyError, read_body};

pub(super) enum ForwardResult {
    Done,
    Busy { message: String, retry_after: Duration },
    NotConnected,
}

/// Holds the response to a task that is not a request.
const ANSWER_ARTIFACT: &str = "public/answer";
const ANSWER_FILE: &str = "answer";
const NDJSON: &str = "application/x-ndjson";

const STATUS_HEADER: &str = "x-status";

/// Headers by which workers and controllers annotate requests.
const RESERVED_HEADER_PREFIX: &str = "x-journeyman-";

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
        let media = if request.text().is_some() { "application/json" } else { "application/octet-stream" };
        let TaskInfo { run, trace, .. } = context.task();
        let trace = trace.map(|trace| trace.to_string());
        let seconds_left =
            deadline.map(|deadline| format!("{:.3}", deadline.saturating_duration_since(Instant::now()).as_secs_f64()));
        let known = [
            ("x-task-id", Some(run.task.as_str())),
            ("x-run-id", Some(&*run.run.to_string())),
            ("content-type", Some(request.content_type.as_deref().unwrap_or(media))),
            ("content-encoding", request.content_encoding.as_deref()),
            ("x-worker-key", Some(&*request.routing_key).filter(|key| !key.is_empty())),
            ("x-correlation-id", request.correlation_id.as_deref()),
            ("idempotency-key", request.idempotency_key.as_deref()),
            ("x-rpc-path", request.path.as_deref()),
            ("x-seconds-left", seconds_left.as_deref()),
            ("traceparent", trace.as_deref()),
        ];
        for (name, value) in known {
            // The client cannot set them.
            headers.remove(name);
            insert_header(&mut headers, name, value.unwrap_or_default());
        }
        headers
    }

    pub(super) async fn forward(
        &self,
        request: &AddressedRequest,
        context: &Context,
    ) -> Result<ForwardResult, ExecuteError> {
        let (headers, body) = (self.request_headers(request, context), request.request.body.clone());
        let started = Instant::now();
        let sending = self.client.post(request.url.clone()).headers(headers).body(body).send();
        let _in_flight = Arc::clone(&self.in_flight);
        let response = match sending.await {
            Ok(response) => response,
            Err(error) if error.is_connect() => return Ok(ForwardResult::NotConnected),
            Err(error) => return Err(self.disconnect_error(&error)),
        };
        let code = response.status();
        if matches!(code, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            let message = format!("the service {} answered {code}", self.name);
            let retry_after = retry_after(&response);
            // The client gets this reply if it was the last attempt. A reply that cannot be stored changes nothing.
            if let Some(results) = context.results()
                && let Err(error) = self.relay_reply(response, results, context).await
            {
                tracing::debug!(handler = self.name, "cannot store the reply of a busy service: {error:?}");
            }
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
        if code.is_success() {
            return Ok(ForwardResult::Done);
        }
        let hint = if code.is_redirection() { "; redirects are not followed" } else { "" };
        let message = format!("the service {} answered {code}{hint}", self.name);
        Err(ExecuteError::failed(message))
    }

    async fn relay_reply(&self, response: Response, results: &Results, context: &Context) -> Result<(), ExecuteError> {
        let success = response.status().is_success();
        let content_type = header(&response, CONTENT_TYPE);
        let requested =
            response.headers().get(STATUS_HEADER).map(|value| value.to_str().ok().and_then(ReplyStatus::parse));
        let status = match requested {
            // A failure is never reported as `ok`.
            Some(Some(status)) if success || status != ReplyStatus::OK => status,
            Some(None) if success => {
                let message = "sent an invalid `x-status`: use 1 to 64 letters, digits, `_`, `-` and `.`";
                return Err(ExecuteError::failed(format!("the service {} {message}", self.name)));
            }
            None if success => ReplyStatus::OK,
            Some(_) | None => ReplyStatus::CORE_ERROR,
        };
        let bytes_max = results.limits().body_bytes;
        let is_ndjson = success && content_type.as_deref().is_some_and(|kind| kind.starts_with(NDJSON));
        let body = if is_ndjson {
            self.relay_lines(response, content_type.as_deref(), bytes_max, context).await?
        } else {
            self.read_body(response, bytes_max).await?
        };
        let reply = Reply { status, body: body.into(), content_type };
        context.set_reply(reply).map_err(|error| {
            tracing::warn!(claim.run = %context.task().run, handler = self.name, "cannot send a reply: {error}");
            ExecuteError::failed(format!("the service {}: {error}", self.name))
        })
    }

    /// Sends each line of NDJSON as a partial reply. Returns the text after the last line end, which is the final reply; `null`
    /// if there is none.
    async fn relay_lines(
        &self,
        response: Response,
        content_type: Option<&str>,
        bytes_max: usize,
        context: &Context,
    ) -> Result<Vec<u8>, ExecuteError> {
        let mut stream = StreamReader::new(response.bytes_stream().map_err(std::io::Error::other));
        let mut sent_count = 0_u64;
        loop {
            let mut line = Vec::new();
            let read = (&mut stream).take(bytes_max as u64 + 2).read_until(b'\n', &mut line).await;
            read.map_err(|error| match sent_count {
                0 => self.disconnect_error(&error),
                // A request is not retried after a partial reply was sent.
                _ => ExecuteError::failed(self.disconnect_error(&error).message),
            })?;
            let is_last = !line.ends_with(b"\n");
            let body = if is_last { line.as_slice() } else { line.trim_ascii_end() };
            if body.len() > bytes_max {
                return Err(self.too_large_error(bytes_max));
            }
            if is_last {
                return Ok(if line.is_empty() && sent_count > 0 { b"null".to_vec() } else { line });
            }
            if body.is_empty() {
                continue;
            }
            let content_type = content_type.map(str::to_owned);
            context.send_partial_reply(Reply { content_type, ..Reply::ok(body) }).await.map_err(|refused| {
                ExecuteError::failed(if refused.refusal == Refusal::Gone {
                    "the client no longer waits for replies".to_owned()
                } else {
                    format!("cannot send a partial reply: {refused}")
                })
            })?;
            sent_count += 1;
        }
    }

    /// Stores the response as an artifact and returns its size.
    async fn store_answer(&self, response: Response, context: &Context) -> Result<usize, ExecuteError> {
        // An invalid media type is replaced by a guess.
        let content_type = header(&response, CONTENT_TYPE).filter(|kind| artifact::is_valid_content_type(kind));
        let body = self.read_body(response, SERVICE_ANSWER_BYTES_MAX).await?;
        tokio::fs::write(context.workdir().join(ANSWER_FILE), &body).await.map_err(|error| {
            ExecuteError::from_io(&format!("cannot store the response of the service {}", self.name), &error)
        })?;
        let kind = ArtifactKind::File { path: ANSWER_FILE.into(), content_type };
        let declared = context.artifacts().declare(ArtifactDeclaration::new(ANSWER_ARTIFACT, kind));
        declared.map_err(|error| ExecuteError::internal(error.to_string()))?;
        Ok(body.len())
    }

    async fn read_body(&self, mut response: Response, bytes_max: usize) -> Result<Vec<u8>, ExecuteError> {
        read_body(&mut response, bytes_max).await.map_err(|error| match error {
            BodyError::TooLong => self.too_large_error(bytes_max),
            BodyError::Connection(error) => self.disconnect_error(&error),
        })
    }

    fn too_large_error(&self, max_bytes: usize) -> ExecuteError {
        ExecuteError::failed(format!("the response of the service {} exceeds {max_bytes} bytes", self.name))
    }

    fn disconnect_error(&self, error: &dyn std::error::Error) -> ExecuteError {
        tracing::debug!(handler = self.name, error = error.to_string(), "a service closed the connection");
        let message = format!("the service {} closed the connection before its response was complete", self.name);
        ExecuteError::new(ExecuteFailure::Intermittent, message)
    }
}

fn is_forwarded_header(name: &str) -> bool {
    !name.starts_with(RESERVED_HEADER_PREFIX) && (name.starts_with("x-") || name == "tracestate")
}

fn retry_after(response: &Response) -> Duration {
    let asked = client::retry_after(response.headers(), stamp());
    asked.unwrap_or(SERVICE_RETRY_AFTER_DEFAULT).min(SERVICE_RETRY_AFTER_MAX)
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

fn header(response: &Response, name: HeaderName) -> Option<String> {
    response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// Ignores empty and invalid values.
fn insert_header(headers: &mut HeaderMap, name: &str, value: &str) {
    let (name, value) = (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(value));
    if let (Ok(name), Ok(value)) = (name, value)
        && !value.is_empty()
    {
        headers.insert(name, value);
    }
}
