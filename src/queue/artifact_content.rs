//! Artifact content: signed upload and download URLs and their handlers.
//!
//! An upload is renamed to its final name once all of it is on disk, so a reader never sees a part of it.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;

use axum::body::{Body, HttpBody as _};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Response, StatusCode};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use tokio::time::timeout;
use tokio_util::io::ReaderStream;

use super::QueueState;
use super::artifact_files::{self, IncomingFile};
use super::auth::constant_time_eq;
use super::clock::UnixMillis;
use super::queue_error::route_not_found;
use super::route::query_param;
use super::server::ConnectionPermit;
use crate::limits::{QUEUE_CHUNK_TIMEOUT, QUEUE_GET_URL_TTL, QUEUE_READ_BYTES, QUEUE_UPLOAD_TIMEOUT};

pub(crate) const CONTENT_PATH_PREFIX: &str = "/artifact-store/";

#[derive(Clone)]
pub(crate) struct ContentPath {
    pub(crate) task: String,
    pub(crate) run: u32,
    pub(crate) name: String,
}

impl ContentPath {
    fn path(&self) -> String {
        let name: Vec<_> = self.name.split('/').map(urlencoding::encode).collect();
        format!("{}/{}/{}", self.task, self.run, name.join("/"))
    }

    /// Only the task id becomes a path component unhashed.
    fn parse(path: &str) -> Option<Self> {
        let mut parts = path.splitn(3, '/');
        let (task, run, name) = (parts.next()?, parts.next()?.parse().ok()?, parts.next()?);
        let name = urlencoding::decode(name).ok()?.into_owned();
        super::field_types::is_slugid(task).then(|| Self { task: task.to_owned(), run, name })
    }

    fn file(&self, app: &QueueState) -> PathBuf {
        app.artifacts.join(artifact_files::relative_path(&self.task, self.run, &self.name))
    }
}

fn signature(app: &QueueState, verb: &str, path: &str, content_type: &str, end: &str) -> Vec<u8> {
    app.keyring.sign("artifact", &format!("{verb}\n{path}\n{content_type}\n{end}"))
}

fn signed_url(app: &QueueState, verb: &str, path: &str, content_type: &str, end: UnixMillis) -> String {
    let (end, encode) = (end.0.to_string(), urlencoding::encode);
    let signature = URL_SAFE_NO_PAD.encode(signature(app, verb, path, content_type, &end));
    let content_type = encode(content_type);
    format!("{}{CONTENT_PATH_PREFIX}{path}?type={content_type}&end={end}&sig={signature}", app.root_url)
}

pub(crate) fn put_url(app: &QueueState, target: &ContentPath, content_type: &str, end: UnixMillis) -> String {
    signed_url(app, "PUT", &target.path(), content_type, end)
}

pub(crate) fn get_url(app: &QueueState, target: &ContentPath, content_type: &str) -> String {
    let end = app.now().plus(QUEUE_GET_URL_TTL);
    signed_url(app, "GET", &target.path(), content_type, end)
}

fn text_response(status: StatusCode, body: impl Into<Body>) -> Response<Body> {
    let mut answer = Response::new(body.into());
    *answer.status_mut() = status;
    answer
}

pub(crate) async fn handle(
    app: &QueueState,
    permit: &ConnectionPermit,
    parts: &Parts,
    path: &str,
    body: Body,
) -> Response<Body> {
    let query = parts.uri.query().unwrap_or_default();
    let part = |name: &str| query_param(query, name).unwrap_or_default();
    let (content_type, end) = (part("type"), part("end"));
    let verb = if parts.method == "HEAD" { "GET" } else { parts.method.as_str() };
    let given = URL_SAFE_NO_PAD.decode(part("sig")).unwrap_or_default();
    let fits = constant_time_eq(signature(app, verb, path, &content_type, &end), given);
    let in_time = end.parse().is_ok_and(|end| app.now() < UnixMillis(end));
    if !fits || !in_time {
        return text_response(
            StatusCode::FORBIDDEN,
            "the URL's signature is invalid or expired; request a new one from the queue\n",
        );
    }
    permit.mark_authenticated();
    let Some(target) = ContentPath::parse(path) else { return route_not_found() };
    match verb {
        "PUT" => {
            let sent = parts.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
            if sent != Some(content_type.as_str()) {
                return text_response(StatusCode::FORBIDDEN, "content type does not match the signed one\n");
            }
            handle_put(app, &target, body).await
        }
        "GET" => handle_get(app, &target, &content_type).await,
        _ => text_response(StatusCode::METHOD_NOT_ALLOWED, "method not allowed: use GET or PUT\n"),
    }
}

enum UploadFailure {
    TooLarge,
    Truncated,
    Disk(io::Error),
}

impl From<io::Error> for UploadFailure {
    fn from(error: io::Error) -> Self {
        Self::Disk(error)
    }
}

async fn handle_put(app: &QueueState, target: &ContentPath, body: Body) -> Response<Body> {
    // The part that is in memory before it is written.
    let Ok(_share) = app.body_budget.reserve(2 * QUEUE_READ_BYTES) else {
        let mut busy = text_response(StatusCode::SERVICE_UNAVAILABLE, "too many uploads in flight; retry later\n");
        busy.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        return busy;
    };
    let received = timeout(QUEUE_UPLOAD_TIMEOUT, receive(app, target, body)).await;
    match received.unwrap_or(Err(UploadFailure::Truncated)) {
        Ok(()) => text_response(StatusCode::OK, Body::empty()),
        Err(UploadFailure::TooLarge) => {
            let message = format!("artifact exceeds the limit of {} bytes\n", app.artifact_bytes_max);
            text_response(StatusCode::PAYLOAD_TOO_LARGE, message)
        }
        Err(UploadFailure::Truncated) => text_response(StatusCode::BAD_REQUEST, "the upload ended early\n"),
        Err(UploadFailure::Disk(error)) => {
            tracing::error!(%error, task = target.task, "cannot store artifact");
            text_response(StatusCode::SERVICE_UNAVAILABLE, "cannot store the artifact; retry later\n")
        }
    }
}

async fn run_blocking<T: Send + 'static>(act: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(act).await.map_err(io::Error::other)?
}

async fn write_chunk(draft: Option<IncomingFile>, bytes: Vec<u8>, artifacts: PathBuf) -> io::Result<IncomingFile> {
    run_blocking(move || {
        let mut draft = draft.map_or_else(|| IncomingFile::create(&artifacts), Ok)?;
        draft.write(&bytes)?;
        Ok(draft)
    })
    .await
}

/// Content smaller than one chunk, such as most logs, is written in one step.
async fn receive(app: &QueueState, target: &ContentPath, mut body: Body) -> Result<(), UploadFailure> {
    if body.size_hint().lower() > app.artifact_bytes_max {
        return Err(UploadFailure::TooLarge);
    }
    let (mut draft, mut held, mut length) = (None, Vec::new(), 0_u64);
    loop {
        let next = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
        let frame = match timeout(QUEUE_CHUNK_TIMEOUT, next).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => break,
            Ok(Some(Err(_))) | Err(_) => return Err(UploadFailure::Truncated),
        };
        if let Ok(data) = frame.into_data() {
            length = length.saturating_add(data.len() as u64);
            if length > app.artifact_bytes_max {
                return Err(UploadFailure::TooLarge);
            }
            held.extend_from_slice(&data);
            if held.len() >= QUEUE_READ_BYTES {
                draft = Some(write_chunk(draft, std::mem::take(&mut held), app.artifacts.clone()).await?);
            }
        }
    }
    Ok(commit_file(app, target, draft, held).await?)
}

async fn commit_file(
    app: &QueueState,
    target: &ContentPath,
    draft: Option<IncomingFile>,
    rest: Vec<u8>,
) -> io::Result<()> {
    let (artifacts, path) = (app.artifacts.clone(), target.file(app));
    run_blocking(move || {
        let mut draft = draft.map_or_else(|| IncomingFile::create(&artifacts), Ok)?;
        draft.write(&rest)?;
        draft.commit(&path, artifact_files::sync)
    })
    .await
}

async fn handle_get(app: &QueueState, target: &ContentPath, content_type: &str) -> Response<Body> {
    let Ok(file) = tokio::fs::File::open(target.file(app)).await else {
        return text_response(StatusCode::NOT_FOUND, "no content was uploaded\n");
    };
    let length = file.metadata().await.map(|about| about.len()).ok();
    let mut found =
        text_response(StatusCode::OK, Body::from_stream(ReaderStream::with_capacity(file, QUEUE_READ_BYTES)));
    let headers = found.headers_mut();
    if let Ok(value) = HeaderValue::from_str(content_type) {
        headers.insert(CONTENT_TYPE, value);
    }
    if let Some(length) = length {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    found
}
