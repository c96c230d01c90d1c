//! Artifact content: signed upload and download URLs and their handlers.
//!
//! An upload is renamed to its final name once all of it is on disk, so a reader never sees a part of it.

use std::io;

use axum::body::{Body, HttpBody as _};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::{IntoResponse as _, Response};
use futures_util::TryStreamExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;
use tokio_util::io::{ReaderStream, StreamReader};

use super::artifact_files::{self, IncomingFile, StoredEncoding, gzip_path};
use super::call::{App, QueueState};
use super::clock::UnixMillis;
use super::field_types::{header_str, query_param};
use super::queue_error::{Params, QueueError, QueueErrorCode, route_not_found};
use journeyman_domain::limits::{QUEUE_READ_BYTES, QUEUE_UPLOAD_HEAD_BYTES, QUEUE_UPLOAD_TIMEOUT};
use journeyman_platform::tasks::blocking;
use journeyman_worker::task::formats::is_slugid;

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

fn subject(verb: &str, path: &str, content_type: &str) -> String {
    format!("{verb}\n{path}\n{content_type}")
}

/// A path and query.
pub(crate) fn signed_target(
    app: &QueueState,
    verb: &str,
    target: &ContentPath,
    content_type: &str,
    end: UnixMillis,
) -> String {
    let path = target.path();
    let signature = app.keyring.sign_url(&subject(verb, &path, content_type), end);
    format!("{PATH_PREFIX}{path}?type={}&{signature}", urlencoding::encode(content_type))
}

pub(crate) async fn handle(State(app): State<App>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let query = parts.uri.query().unwrap_or_default();
    let path = parts.uri.path().strip_prefix(PATH_PREFIX).unwrap_or_default();
    let content_type = query_param(query, "type").unwrap_or_default();
    let verb = if parts.method == "HEAD" { "GET" } else { parts.method.as_str() };
    if !app.keyring.is_url_valid(&subject(verb, path, &content_type), query, app.now()) {
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
    let encoding = match header_str(&parts, CONTENT_ENCODING) {
        None | Some("identity") => StoredEncoding::Identity,
        Some("gzip") => StoredEncoding::Gzip,
        Some(_) => {
            let message = "only the content encodings identity and gzip are stored\n";
            return (StatusCode::UNSUPPORTED_MEDIA_TYPE, message).into_response();
        }
    };
    handle_put(&app, &target, encoding, body).await
}

async fn handle_put(app: &QueueState, target: &ContentPath, encoding: StoredEncoding, body: Body) -> Response {
    match timeout(QUEUE_UPLOAD_TIMEOUT, receive(app, target, encoding, body)).await {
        Ok(Ok(Stored::Yes)) => StatusCode::OK.into_response(),
        Ok(Ok(Stored::RunResolved)) => {
            (StatusCode::CONFLICT, "the run is resolved, so its artifacts cannot change\n").into_response()
        }
        Ok(Err(error)) if error.kind() == io::ErrorKind::FileTooLarge => {
            let message = format!("artifact exceeds the limit of {} bytes\n", app.config.artifact_bytes_max);
            (StatusCode::PAYLOAD_TOO_LARGE, message).into_response()
        }
        Ok(Err(error)) if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
            tracing::error!(%error, task = target.task, "cannot store artifact");
            (StatusCode::INSUFFICIENT_STORAGE, "disk full: the queue cannot store the artifact\n").into_response()
        }
        Ok(Err(error)) if error.raw_os_error().is_some() || error.kind() == io::ErrorKind::ResourceBusy => {
            tracing::error!(%error, task = target.task, "cannot store artifact");
            (StatusCode::SERVICE_UNAVAILABLE, format!("cannot store the artifact: {error}; retry later\n"))
                .into_response()
        }
        Ok(Err(_)) | Err(_) => (StatusCode::BAD_REQUEST, "the upload ended early\n").into_response(),
    }
}

enum Stored {
    Yes,
    RunResolved,
}

/// After the upload, because the run may have been resolved meanwhile. A resolved run gets what it lacks, for a while.
async fn may_store(app: &QueueState, target: &ContentPath) -> io::Result<bool> {
    let file = target.file();
    let is_new = ![file.clone(), gzip_path(&file)].iter().any(|path| app.config.artifacts.join(path).exists());
    let path = target.clone();
    let found = app.store.execute(move |tx| {
        let row = tx.require_task(&path.task)?;
        let run = row.task.run(path.run)?;
        Ok(run.is_running() || (is_new && run.accepts_artifacts(tx.now)))
    });
    match found.await {
        Err(error) if error.code == QueueErrorCode::ResourceNotFound => Ok(false),
        found => found.map_err(|_| io::ErrorKind::ResourceBusy.into()),
    }
}

async fn receive(app: &QueueState, target: &ContentPath, encoding: StoredEncoding, body: Body) -> io::Result<Stored> {
    let bytes_max = app.config.artifact_bytes_max;
    if body.size_hint().lower() > bytes_max {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut content = StreamReader::new(body.into_data_stream().map_err(io::Error::other)).take(bytes_max + 1);
    let (artifacts, file) = (app.config.artifacts.clone(), target.file());
    let stored = async {
        let mut head = Vec::new();
        let mut length = (&mut content).take(QUEUE_UPLOAD_HEAD_BYTES).read_to_end(&mut head).await? as u64;
        let is_whole = length < QUEUE_UPLOAD_HEAD_BYTES;
        let create = move || IncomingFile::create(&artifacts, &head);
        if is_whole && length <= bytes_max {
            if !may_store(app, target).await? {
                return Ok(Stored::RunResolved);
            }
            // Most uploads are short logs, so one job does all their work on the disk.
            return on_disk(move || create()?.commit(&file, encoding)).await.map(|()| Stored::Yes);
        }
        let incoming = on_disk(create).await?;
        let mut rest = tokio::fs::File::from_std(incoming.file.try_clone()?);
        length += tokio::io::copy(&mut content, &mut rest).await?;
        if length > bytes_max {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        rest.flush().await?;
        if !may_store(app, target).await? {
            return Ok(Stored::RunResolved);
        }
        on_disk(move || incoming.commit(&file, encoding)).await.map(|()| Stored::Yes)
    }
    .await;
    if stored.is_err() {
        // A client reads the answer once all of its content is sent.
        tokio::io::copy(&mut content, &mut tokio::io::sink()).await.ok();
    }
    stored
}

async fn on_disk<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    blocking(work).await.map_err(io::Error::other)?
}

async fn handle_get(app: &QueueState, target: &ContentPath, content_type: String) -> Response {
    let path = target.file();
    let open = |path: &str| tokio::fs::File::open(app.config.artifacts.join(path));
    let (file, encoding) = match open(&path).await {
        Ok(file) => (file, None),
        Err(_) => match open(&gzip_path(&path)).await {
            Ok(file) => (file, Some([(CONTENT_ENCODING, "gzip")])),
            Err(_) => {
                let error = QueueError::not_found("no content was uploaded");
                return error.into_response("getArtifact", &Params::new(), app.now());
            }
        },
    };
    let length = file.metadata().await.map(|metadata| metadata.len().to_string());
    let body = Body::from_stream(ReaderStream::with_capacity(file, QUEUE_READ_BYTES));
    let length = length.ok().map(|length| [(CONTENT_LENGTH, length)]);
    // A browser must not run what a task has stored as a page of the queue.
    let headers = [
        (CONTENT_TYPE, content_type.as_str()),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CONTENT_SECURITY_POLICY, "default-src 'none'; style-src 'unsafe-inline'; sandbox"),
    ];
    (length, encoding, headers, body).into_response()
}
