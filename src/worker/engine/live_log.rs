//! Logs of running tasks: followed by readers, and served over HTTP, each under a secret address.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::header::{ACCESS_CONTROL_ALLOW_ORIGIN, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use parking_lot::Mutex;
use tokio::task::{AbortHandle, spawn_blocking};

use crate::handler::log::{self, TaskLog};
use crate::task::{Artifact, ArtifactBody, TaskFile};
use journeyman_domain::limits::CONTROL_READ_BYTES;

/// The logs that are served. Clones share them.
#[derive(Debug, Clone)]
pub struct LiveLogs {
    /// Without a trailing slash.
    base_url: Arc<str>,
    logs: Arc<Mutex<HashMap<String, TaskLog>>>,
}

impl LiveLogs {
    /// Readers reach [`LiveLogs::into_router`] at this URL.
    pub fn new(base_url: &str) -> Self {
        Self { base_url: base_url.trim_end_matches('/').into(), logs: Arc::default() }
    }

    /// The routes. Pages of other origins may read them: an address is known to readers of the task's artifacts only.
    pub fn into_router(self) -> Router {
        Router::new()
            .route("/log/{secret}", get(serve_log))
            .fallback(async || (StatusCode::NOT_FOUND, "there is no such log, or its task has ended\n"))
            .with_state(self)
    }

    pub(super) fn serve(&self, log: TaskLog) -> LiveLog {
        let secret = format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple());
        self.logs.lock().insert(secret.clone(), log);
        LiveLog { served: self.clone(), secret, publishing: None }
    }
}

/// A log that is served until this is dropped.
pub(super) struct LiveLog {
    served: LiveLogs,
    secret: String,
    /// The upload of [`LiveLog::artifact`].
    pub(super) publishing: Option<AbortHandle>,
}

impl LiveLog {
    /// Leads readers of the task's artifacts to the log.
    pub(super) fn artifact(&self, name: String) -> Artifact {
        let url = format!("{}/log/{}", self.served.base_url, self.secret);
        let body = ArtifactBody::Reference { url, content_type: log::CONTENT_TYPE.to_owned() };
        Artifact { name, expires: None, body }
    }
}

impl Drop for LiveLog {
    fn drop(&mut self) {
        self.served.logs.lock().remove(&self.secret);
    }
}

async fn serve_log(State(live): State<LiveLogs>, Path(secret): Path<String>) -> Response {
    let Some(log) = live.logs.lock().get(&secret).cloned() else {
        return (StatusCode::NOT_FOUND, "there is no such log, or its task has ended\n").into_response();
    };
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static(log::CONTENT_TYPE)),
        (ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*")),
    ];
    (headers, LogTail::following(log).into_body()).into_response()
}

/// Reads a log that may still grow.
#[derive(Debug)]
pub struct LogTail {
    log: TaskLog,
    file: Option<TaskFile>,
    read_bytes: u64,
    follows: bool,
}

impl LogTail {
    /// Reads to the end of the task.
    pub const fn following(log: TaskLog) -> Self {
        Self { log, file: None, read_bytes: 0, follows: true }
    }

    /// Reads what the log has.
    pub const fn so_far(log: TaskLog) -> Self {
        Self { log, file: None, read_bytes: 0, follows: false }
    }

    /// The body of a response.
    pub fn into_body(self) -> Body {
        Body::from_stream(futures_util::stream::try_unfold(self, Self::next))
    }

    async fn next(mut self) -> io::Result<Option<(Vec<u8>, Self)>> {
        loop {
            // Before reading, so that no growth is missed.
            let (seen, ended) = (self.log.bytes(), self.log.is_finished());
            let chunk = self.read().await?;
            if !chunk.is_empty() {
                return Ok(Some((chunk, self)));
            }
            if ended || !self.follows {
                return Ok(None);
            }
            self.log.wait_for_growth(seen).await;
        }
    }

    /// Empty at the end, and while there is no file.
    async fn read(&mut self) -> io::Result<Vec<u8>> {
        let (log, opened, at) = (self.log.clone(), self.file.take(), self.read_bytes);
        let reading = spawn_blocking(move || {
            let file = match opened {
                Some(file) => file,
                None => match File::open(log.path()) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((None, Vec::new())),
                    opened => opened?.into(),
                },
            };
            let mut chunk = vec![0; CONTROL_READ_BYTES];
            let read = file.read_at(&mut chunk, at)?;
            chunk.truncate(read);
            Ok::<_, io::Error>((Some(file), chunk))
        });
        let (file, chunk) = reading.await.map_err(io::Error::other).flatten()?;
        self.read_bytes += chunk.len() as u64;
        self.file = file;
        Ok(chunk)
    }
}
