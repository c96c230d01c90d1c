//! One request on its way to the service, and the answer on its way back.
//!
//! What the service is asked: `POST BASE/PATH` with the body. Headers of ours say which task it is (`x-task-id`, `x-run-id`),
//! what it was published as (`x-correlation-id`, `x-rpc-path`, `x-worker-key`), what it is at every delivery
//! (`idempotency-key`), how many seconds its author still waits
//! (`x-seconds-left`), and where it belongs in a trace (`traceparent`). Of its own headers those are passed on that the
//! operator names, and never one that is ours or about the connection.
//!
//! What it answers: 2xx is completed; 429 and 503 ask for another run, after the pause they name in `retry-after`; every other code is failed. A redirect is not
//! followed. The body is the answer, and its status `ok` or `core_error`, or what the service says in `x-status`. Where the
//! body is of the type `application/x-ndjson`, each line is a partial answer, sent when it is there, and what follows the
//! last line's end is the last answer.

use std::path::Path;

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
use crate::handler::{Context, ExecuteError, host_errors};
use crate::limits::{
    SERVICE_ANSWER_BYTES_MAX, SERVICE_HEADERS_MAX, SERVICE_RETRY_AFTER_DEFAULT, SERVICE_RETRY_AFTER_MAX,
};
use crate::source::{Reply, ReplyStatus, Results};

/// What comes of an attempt.
pub(super) enum ForwardResult {
    /// The service has seen it.
    Done(Result<(), ExecuteError>),
    /// It has, and has too much to do.
    Busy {
        /// A sentence.
        message: String,
        /// How long it wants to be left alone.
        retry_after: Duration,
    },
    /// Nobody has.
    NotConnected,
}

/// The artifact that the answer to a task becomes which nobody waits for.
const ANSWER_ARTIFACT: &str = "public/answer";
/// Its file.
const ANSWER_FILE: &str = "answer";
/// The type of answers that come line by line.
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

/// What headers begin with by which workers and controllers note something on a request.
const RESERVED_HEADER_PREFIX: &str = "x-journeyman-";
/// What nobody else says: ours, and what is about a connection.
const RESERVED_HEADERS: [&str; 18] = [
    TASK_ID_HEADER,
    RUN_ID_HEADER,
    CORRELATION_ID_HEADER,
    IDEMPOTENCY_KEY_HEADER,
    PATH_HEADER,
    WORKER_KEY_HEADER,
    SECONDS_LEFT_HEADER,
    TRACEPARENT_HEADER,
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "keep-alive",
    "te",
    "transfer-encoding",
    "upgrade",
];

impl HttpInner {
    /// The address of a path of the service: on no other host, and not above the base; `None` where it would be.
    pub(super) fn resolve_url(&self, path: &str) -> Option<Url> {
        let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
        let path = path.trim_start_matches('/');
        // As a reader of addresses takes them.
        let odd = |piece: &str| matches!(piece.to_ascii_lowercase().replace("%2e", ".").as_str(), "." | "..");
        if path.split('/').any(odd) || path.chars().any(|char| char == '\\' || char.is_control()) {
            return None;
        }
        let mut url = self.base.clone();
        if !path.is_empty() {
            let base = url.path().trim_end_matches('/').to_owned();
            url.set_path(&format!("{base}/{path}"));
        }
        url.set_query(query);
        let stays =
            url.origin() == self.base.origin() && url.path().starts_with(self.base.path().trim_end_matches('/'));
        stays.then_some(url)
    }

    fn request_headers(
        &self,
        AddressedRequest { request, deadline: until, .. }: &AddressedRequest,
        context: &Context,
    ) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in &request.headers {
            let name = name.to_ascii_lowercase();
            if headers.len() < SERVICE_HEADERS_MAX && self.is_forwarded_header(&name) {
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
        if let Some(until) = until {
            let left = until.saturating_duration_since(Instant::now());
            insert_header(&mut headers, SECONDS_LEFT_HEADER, &format!("{:.3}", left.as_secs_f64()));
        }
        if let Some(trace) = context.task().env.get("TRACEPARENT") {
            insert_header(&mut headers, TRACEPARENT_HEADER, trace);
        }
        headers
    }

    fn is_forwarded_header(&self, name: &str) -> bool {
        let named = |pattern: &String| match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(&start.to_ascii_lowercase()),
            None => name.eq_ignore_ascii_case(pattern),
        };
        !RESERVED_HEADERS.contains(&name)
            && !name.starts_with(RESERVED_HEADER_PREFIX)
            && self.config.forward_headers.iter().any(named)
    }

    /// Sends it, and takes the answer in.
    pub(super) async fn forward(
        &self,
        ready: &AddressedRequest,
        context: &Context,
    ) -> Result<ForwardResult, ExecuteError> {
        let (headers, body) = (self.request_headers(ready, context), ready.request.body_bytes());
        let began = Instant::now();
        let asking = self.client.post(ready.url.clone()).headers(headers).body(body).send();
        let at_work = self.track_request();
        let response = match asking.await {
            Ok(response) => response,
            Err(error) if error.is_connect() => return Ok(ForwardResult::NotConnected),
            Err(error) => return Err(self.disconnect_error(&error, SentReplies::NothingSent)),
        };
        let code = response.status();
        if matches!(code, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            let what = format!("the service {} answered {code}", self.config.name);
            let rest = retry_after(&response);
            // It is what its author reads where this was the last try. One that cannot be kept changes nothing.
            if let Some(replies) = context.results()
                && let Err(unfit) = self.relay_reply(response, replies, context).await
            {
                tracing::debug!(handler = self.config.name, "what a busy service said is not kept: {unfit:?}");
            }
            drop(at_work);
            return Ok(ForwardResult::Busy { message: what, retry_after: rest });
        }
        match context.results() {
            Some(replies) => self.relay_reply(response, replies, context).await?,
            None => {
                let bytes = self.store_answer(response, context).await?;
                let took = format_seconds(began.elapsed());
                context.log().write_note(&format!("POST {}: {code}, {bytes} bytes, after {took}", ready.url.path()));
            }
        }
        drop(at_work);
        if code.is_success() {
            return Ok(ForwardResult::Done(Ok(())));
        }
        let also = if code.is_redirection() { ", and redirects are not followed" } else { "" };
        let what = format!("the service {} answered {code}{also}", self.config.name);
        Ok(ForwardResult::Done(Err(ExecuteError::Failed(what))))
    }

    /// Hands the answer to whoever waits for it.
    async fn relay_reply(
        &self,
        mut response: Response,
        replies: &Results,
        context: &Context,
    ) -> Result<(), ExecuteError> {
        let good = response.status().is_success();
        let content_type = header(&response, CONTENT_TYPE.as_str());
        let said = response.headers().get(STATUS_HEADER).map(|said| said.to_str().ok().and_then(ReplyStatus::parse));
        let status = match said {
            // What failed is not said to be well.
            Some(Some(said)) if good || said != ReplyStatus::OK => said,
            Some(None) if good => {
                let what = "says a status in `x-status` that is none: 1 to 64 letters, digits, `_`, `-` and `.`";
                return Err(ExecuteError::Failed(format!("the service {} {what}", self.config.name)));
            }
            None if good => ReplyStatus::OK,
            Some(_) | None => ReplyStatus::CORE_ERROR,
        };
        let reply =
            |body: Vec<u8>| Reply { status: status.clone(), body: body.into(), content_type: content_type.clone() };
        let most = replies.max_bytes();
        let mut lines =
            NdjsonSplitter::of(good && content_type.as_deref().is_some_and(|kind| kind.starts_with(NDJSON)));
        let mut heard = SentReplies::NothingSent;
        let mut kept = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(|error| self.disconnect_error(&error, heard))? {
            kept.extend_from_slice(&piece);
            while let Some(line) = lines.next(&mut kept) {
                if line.len() > most {
                    return Err(self.too_large_error(most));
                }
                let partial = Reply { status: ReplyStatus::OK, ..reply(line) };
                context.send_partial_reply(partial).await.map_err(|refused| match refused.refusal {
                    Refusal::Gone => ExecuteError::Failed("nobody waits for its answers any more".to_owned()),
                    Refusal::Retry { .. }
                    | Refusal::Throttled { .. }
                    | Refusal::Rejected
                    | Refusal::Denied
                    | Refusal::Stale => ExecuteError::Failed(format!("a partial answer cannot be sent: {refused}")),
                })?;
                heard = SentReplies::PartialSent;
            }
            if kept.len() > most {
                return Err(self.too_large_error(most));
            }
        }
        if matches!(heard, SentReplies::PartialSent) && kept.is_empty() {
            // The last line was sent when it came.
            kept.extend_from_slice(b"null");
        }
        context.set_reply(reply(kept)).map_err(|unfit| {
            tracing::warn!(claim.run = %context.task().run, handler = self.config.name, "an answer cannot be sent: {unfit}");
            ExecuteError::Failed(format!("the service {}: {unfit}", self.config.name))
        })
    }

    /// Keeps the answer to a task as an artifact. Answers how large it is.
    async fn store_answer(&self, mut response: Response, context: &Context) -> Result<usize, ExecuteError> {
        let of_disk = |error: std::io::Error| {
            let what = format!("the answer of the service {} cannot be kept: {error}", self.config.name);
            if host_errors::is_host_error(&error) { ExecuteError::Host(what) } else { ExecuteError::Internal(what) }
        };
        // One that no artifact can have is guessed like any other.
        let content_type =
            header(&response, CONTENT_TYPE.as_str()).filter(|kind| artifact::is_valid_content_type(kind));
        let mut file = File::create(context.workdir().join(ANSWER_FILE)).await.map_err(of_disk)?;
        let mut bytes = 0_usize;
        while let Some(piece) =
            response.chunk().await.map_err(|error| self.disconnect_error(&error, SentReplies::NothingSent))?
        {
            bytes = bytes.saturating_add(piece.len());
            if bytes > SERVICE_ANSWER_BYTES_MAX {
                return Err(self.too_large_error(SERVICE_ANSWER_BYTES_MAX));
            }
            file.write_all(&piece).await.map_err(of_disk)?;
        }
        file.flush().await.map_err(of_disk)?;
        let what = ArtifactKind::File { path: Path::new(ANSWER_FILE).to_owned(), content_type };
        let declared = context.artifacts().declare(ArtifactDeclaration::new(ANSWER_ARTIFACT, what));
        declared.map_err(|error| ExecuteError::Internal(error.to_string()))?;
        Ok(bytes)
    }

    fn too_large_error(&self, most: usize) -> ExecuteError {
        ExecuteError::Failed(format!("the answer of the service {} has more than {most} bytes", self.config.name))
    }

    /// The service had it, and the connection broke. What has been answered in part is not begun again.
    fn disconnect_error(&self, error: &reqwest::Error, heard: SentReplies) -> ExecuteError {
        tracing::debug!(handler = self.config.name, error = ?error.to_string(), "a service broke off");
        let what = format!("the service {} broke off before its answer was whole", self.config.name);
        match heard {
            SentReplies::NothingSent => ExecuteError::Intermittent(what),
            SentReplies::PartialSent => ExecuteError::Failed(what),
        }
    }
}

/// What somebody has heard of an answer.
#[derive(Debug, Clone, Copy)]
enum SentReplies {
    NothingSent,
    PartialSent,
}

/// Cuts lines off what has come.
struct NdjsonSplitter {
    /// So much was looked at; `None` where there are no lines.
    scanned: Option<usize>,
}

impl NdjsonSplitter {
    fn of(there: bool) -> Self {
        Self { scanned: there.then_some(0) }
    }

    /// The next line that is not empty, without its end.
    fn next(&mut self, kept: &mut Vec<u8>) -> Option<Vec<u8>> {
        let seen = self.scanned.as_mut()?;
        loop {
            let fresh = kept.get(*seen..).unwrap_or_default();
            let Some(end) = fresh.iter().position(|byte| *byte == b'\n').map(|at| at + *seen) else {
                *seen = kept.len();
                return None;
            };
            *seen = 0;
            let rest = kept.split_off(end + 1);
            let mut line = std::mem::replace(kept, rest);
            line.truncate(end);
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            if !line.is_empty() {
                return Some(line);
            }
        }
    }
}

/// How long a service that is too busy wants to be left alone, in seconds as it says or as usual.
fn retry_after(response: &Response) -> Duration {
    let asked = header(response, RETRY_AFTER.as_str()).and_then(|text| text.trim().parse().ok());
    asked.map_or(SERVICE_RETRY_AFTER_DEFAULT, Duration::from_secs).min(SERVICE_RETRY_AFTER_MAX)
}

/// Leaves it alone: the slot is kept, so that nothing else is taken for a service that has too much. Never for longer than
/// somebody waits for the answer.
pub(super) async fn wait_before_retry(rest: Duration, until: Option<Instant>, context: &Context) {
    let over = Instant::now() + rest;
    tokio::select! {
        () = tokio::time::sleep_until(until.map_or(over, |until| until.min(over))) => {}
        _ = context.canceled() => {}
    }
}

fn header(response: &Response, name: &str) -> Option<String> {
    response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// What cannot be a header is none.
fn insert_header(headers: &mut HeaderMap, name: &str, value: &str) {
    let name = HeaderName::from_bytes(name.as_bytes());
    if let (Ok(name), Ok(value)) = (name, HeaderValue::from_str(value)) {
        headers.insert(name, value);
    }
}
