//! Artifact content: signed upload and download URLs and their handlers.
//!
//! An upload is renamed to its final name once all of it is on disk, so a reader never sees a part of it.

use std::io;

use axum::body::{Body, HttpBody as _};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use tokio::time::timeout;
use tokio_util::io::ReaderStream;

use super::QueueState;
use super::api::{App, header_str, next_chunk, query_param};
use super::artifact_files::{self, IncomingFile};
use super::auth::constant_time_eq;
use super::clock::UnixMillis;
use super::queue_error::route_not_found;
use crate::limits::{QUEUE_CHUNK_TIMEOUT, QUEUE_GET_URL_TTL, QUEUE_READ_BYTES, QUEUE_UPLOAD_TIMEOUT};
use crate::source::taskcluster::formats::is_slugid;

pub(crate) const PATH_PREFIX: &str = "/artifact-store/";

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
        is_slugid(task).then(|| Self { task: task.to_owned(), run, name })
    }

    fn file(&self) -> String {
        artifact_files::relative_path(&self.task, self.run, &self.name)
    }
}

fn signature(app: &QueueState, verb: &str, path: &str, content_type: &str, end: &str) -> Vec<u8> {
    app.keyring.sign("artifact", &format!("{verb}\n{path}\n{content_type}\n{end}"))
}

fn signed_url(app: &QueueState, verb: &str, path: &str, content_type: &str, end: UnixMillis) -> String {
    let (end, encode) = (end.0.to_string(), urlencoding::encode);
    let signature = URL_SAFE_NO_PAD.encode(signature(app, verb, path, content_type, &end));
    let content_type = encode(content_type);
    format!("{}{PATH_PREFIX}{path}?type={content_type}&end={end}&sig={signature}", app.root_url)
}

pub(crate) fn put_url(app: &QueueState, target: &ContentPath, content_type: &str, end: UnixMillis) -> String {
    signed_url(app, "PUT", &target.path(), content_type, end)
}

pub(crate) fn get_url(app: &QueueState, target: &ContentPath, content_type: &str) -> String {
    let end = app.now().plus(QUEUE_GET_URL_TTL);
    signed_url(app, "GET", &target.path(), content_type, end)
}

pub(crate) async fn handle(State(app): State<App>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let query = parts.uri.query().unwrap_or_default();
    let part = |name: &str| query_param(query, name).unwrap_or_default();
    let path = parts.uri.path().strip_prefix(PATH_PREFIX).unwrap_or_default();
    let (content_type, end) = (part("type"), part("end"));
    let verb = if parts.method == "HEAD" { "GET" } else { parts.method.as_str() };
    let given = URL_SAFE_NO_PAD.decode(part("sig")).unwrap_or_default();
    let fits = constant_time_eq(signature(&app, verb, path, &content_type, &end), given);
    let in_time = end.parse().is_ok_and(|end| app.now() < UnixMillis(end));
    if !fits || !in_time {
        let message = "the URL's signature is invalid or expired; request a new one from the queue\n";
        return (StatusCode::FORBIDDEN, message).into_response();
    }
    let Some(target) = ContentPath::parse(path) else { return route_not_found() };
    if verb != "PUT" {
        return handle_get(&app, &target, content_type).await;
    }
    if header_str(&parts, CONTENT_TYPE) != Some(content_type.as_str()) {
        return (StatusCode::FORBIDDEN, "content type does not match the signed one\n").into_response();
    }
    handle_put(&app, &target, body).await
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

async fn handle_put(app: &QueueState, target: &ContentPath, body: Body) -> Response {
    // The part that is in memory before it is written.
    let Ok(_share) = app.body_budget.reserve(&body, 2 * QUEUE_READ_BYTES) else {
        let message = "too many uploads in flight; retry later\n";
        return (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")], message).into_response();
    };
    let received = timeout(QUEUE_UPLOAD_TIMEOUT, receive(app, target, body)).await;
    match received.unwrap_or(Err(UploadFailure::Truncated)) {
        Ok(()) => StatusCode::OK.into_response(),
        Err(UploadFailure::TooLarge) => {
            let message = format!("artifact exceeds the limit of {} bytes\n", app.config.artifact_bytes_max);
            (StatusCode::PAYLOAD_TOO_LARGE, message).into_response()
        }
        Err(UploadFailure::Truncated) => (StatusCode::BAD_REQUEST, "the upload ended early\n").into_response(),
        Err(UploadFailure::Disk(error)) => {
            tracing::error!(%error, task = target.task, "cannot store artifact");
            (StatusCode::SERVICE_UNAVAILABLE, "cannot store the artifact; retry later\n").into_response()
        }
    }
}

async fn run_blocking<T: Send + 'static>(act: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(act).await.map_err(io::Error::other)?
}

async fn receive(app: &QueueState, target: &ContentPath, body: Body) -> Result<(), UploadFailure> {
    let bytes_max = app.config.artifact_bytes_max;
    if body.size_hint().lower() > bytes_max {
        return Err(UploadFailure::TooLarge);
    }
    let artifacts = app.config.artifacts.clone();
    let mut file = run_blocking(move || IncomingFile::create(&artifacts)).await?;
    let (mut chunks, mut length) = (body.into_data_stream(), 0_u64);
    loop {
        let chunk = match timeout(QUEUE_CHUNK_TIMEOUT, next_chunk(&mut chunks)).await {
            Ok(Some(Ok(chunk))) => chunk,
            Ok(None) => break,
            Ok(Some(Err(_))) | Err(_) => return Err(UploadFailure::Truncated),
        };
        length = length.saturating_add(chunk.len() as u64);
        if length > bytes_max {
            return Err(UploadFailure::TooLarge);
        }
        file = run_blocking(move || {
            file.write(&chunk)?;
            Ok(file)
        })
        .await?;
    }
    let path = target.file();
    Ok(run_blocking(move || file.commit(&path, artifact_files::sync)).await?)
}

async fn handle_get(app: &QueueState, target: &ContentPath, content_type: String) -> Response {
    let Ok(file) = tokio::fs::File::open(app.config.artifacts.join(target.file())).await else {
        return (StatusCode::NOT_FOUND, "no content was uploaded\n").into_response();
    };
    let length = file.metadata().await.map(|metadata| metadata.len().to_string());
    let body = Body::from_stream(ReaderStream::with_capacity(file, QUEUE_READ_BYTES));
    let length = length.ok().map(|length| [(CONTENT_LENGTH, length)]);
    (length, [(CONTENT_TYPE, content_type)], body).into_response()
}
