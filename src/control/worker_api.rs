//! The worker's end of the control socket.

use std::convert::Infallible;
use std::fs::File;
use std::future::Future;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWriteExt as _, DuplexStream, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{interval, timeout};
use tokio_util::io::ReaderStream;

pub use super::socket::Socket;
use super::{CommandReply, SPAN_MAX_SECONDS, WorkerCommand, WorkerCommandRequest, WorkerStatusReply};
use crate::domain::claim::{self, CancelResult};
use crate::handler::log::TaskLog;
use crate::host::containment::ProcessScope;
use crate::limits::{
    CONTROL_ACCEPT_RETRY_DELAY, CONTROL_BODY_BYTES_MAX, CONTROL_CONNECTIONS_MAX, CONTROL_FOLLOW_CHECK_INTERVAL,
    CONTROL_HEAD_TIMEOUT, CONTROL_READ_BYTES, CONTROL_SOCKET_CHECK_INTERVAL, CONTROL_TIMEOUT,
};
use crate::worker::status::ClaimDetail;
use crate::worker::{ClaimSnapshot, Command, CommandResult, Control, Note, TaskLookupError, status};

/// Reads the configuration again: what came of it, or why it was refused.
pub type ReloadFn = dyn Fn() -> ReloadFuture + Send + Sync;
/// What came of reading the configuration again.
pub type ReloadFuture = Pin<Box<dyn Future<Output = Result<String, String>> + Send>>;

/// Who answers.
#[derive(Clone)]
pub struct ServedWorker {
    /// The worker's id.
    pub id: String,
    /// Its group.
    pub group: String,
    /// The worker.
    pub control: Control,
    /// What `reload` does.
    pub reload: Arc<ReloadFn>,
}

/// Answers until it is dropped; the socket's file goes with it.
pub async fn serve(socket: Socket, desk: ServedWorker) -> Infallible {
    let reload = Arc::clone(&desk.reload);
    let (asks, asked) = mpsc::channel(CONTROL_CONNECTIONS_MAX);
    let desk = AppState { worker: desk, reload_requests: asks };
    let router = Router::new()
        .route("/v1/status", get(handle_status))
        .route("/v1/commands", post(handle_command))
        .route("/v1/log", get(handle_log))
        .route("/v1/claim", get(handle_claim))
        .fallback(async || {
            let text = "a worker answers here; `journeyman status` and the like ask it";
            ApiError(StatusCode::NOT_FOUND, text.to_owned())
        })
        .with_state(desk);
    serve_router(socket, router, reload, asked).await
}

/// Answers with a router, and reloads where that asks for it.
pub(super) async fn serve_router(
    socket: Socket,
    router: Router,
    reload: Arc<ReloadFn>,
    mut asked: mpsc::Receiver<ReloadReplySender>,
) -> Infallible {
    let Socket { mut listener, file } = socket;
    let file = Arc::new(file);
    let router = router.layer(DefaultBodyLimit::max(CONTROL_BODY_BYTES_MAX));
    let places = Arc::new(Semaphore::new(CONTROL_CONNECTIONS_MAX));
    let (mut connections, mut reloads) = (JoinSet::new(), JoinSet::new());
    let mut mending = JoinSet::new();
    let mut checks = interval(CONTROL_SOCKET_CHECK_INTERVAL);
    loop {
        let (place, stream) = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            _ = checks.tick(), if mending.is_empty() => {
                if file.is_missing() {
                    let file = Arc::clone(&file);
                    mending.spawn_blocking(move || file.recreate_if_removed());
                }
                continue;
            }
            Some(mended) = mending.join_next() => {
                match mended {
                    Ok(Ok(Some(again))) => listener = again,
                    Ok(Err(error)) => tracing::warn!("the control socket was removed and cannot be made again: {error}"),
                    Ok(Ok(None)) | Err(_) => {}
                }
                continue;
            }
            Some(ask) = asked.recv() => {
                // Not in the connection, which ends with whoever asked: what has begun is finished.
                let reload = Arc::clone(&reload);
                reloads.spawn(async move { drop(ask.send(reload().await)) });
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        while reloads.try_join_next().is_some() {}
        let service = TowerToHyperService::new(router.clone());
        connections.spawn(async move {
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(CONTROL_HEAD_TIMEOUT);
            if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
                tracing::debug!(%error, "a connection of the control socket has ended");
            }
            drop(place);
        });
    }
}

/// The next connection, with its place. The others wait in the system's own queue.
async fn accept(listener: &UnixListener, places: &Arc<Semaphore>) -> (Option<OwnedSemaphorePermit>, UnixStream) {
    let place = Arc::clone(places).acquire_owned().await.ok();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return (place, stream),
            Err(error) => {
                tracing::debug!(%error, "no connection of the control socket can be accepted");
                tokio::time::sleep(CONTROL_ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// What a connection has.
#[derive(Clone)]
struct AppState {
    worker: ServedWorker,
    reload_requests: mpsc::Sender<ReloadReplySender>,
}

/// Whoever asked for a reload.
pub(super) type ReloadReplySender = oneshot::Sender<Result<String, String>>;

/// A refusal, for a person.
#[derive(Debug)]
pub struct ApiError(pub(crate) StatusCode, pub(crate) String);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.0, Json(CommandReply { message: self.1 })).into_response()
    }
}

fn worker_exited() -> ApiError {
    ApiError(StatusCode::SERVICE_UNAVAILABLE, "the worker has exited".to_owned())
}

async fn handle_status(
    State(AppState { worker: desk, .. }): State<AppState>,
) -> Result<Json<WorkerStatusReply>, ApiError> {
    let looked = timeout(CONTROL_TIMEOUT, desk.control.status()).await;
    let slow = |_| ApiError(StatusCode::GATEWAY_TIMEOUT, format!("the worker did not answer in {CONTROL_TIMEOUT:?}"));
    let view = looked.map_err(slow)?.ok_or_else(worker_exited)?;
    Ok(Json(WorkerStatusReply::new(desk.id, desk.group, view)))
}

async fn handle_command(
    State(AppState { worker: desk, reload_requests: reloads }): State<AppState>,
    Json(request): Json<WorkerCommandRequest>,
) -> Result<Json<CommandReply>, ApiError> {
    let (command, message) = match request.command {
        WorkerCommand::Pause { seconds } => {
            (Command::Pause { span: parse_seconds(seconds)? }, "paused: running tasks go on")
        }
        WorkerCommand::Resume => (Command::Resume, "resumed: claiming again"),
        WorkerCommand::Drain { seconds } => (
            Command::Drain { within: parse_seconds(seconds)? },
            "draining: running tasks are finished, then the worker exits",
        ),
        WorkerCommand::Stop => {
            (Command::Release { within: None }, "stopping: running tasks are released, then the worker exits")
        }
        WorkerCommand::Release { task } => {
            return end_claim(&desk.control, &task, claim::CancelCommand::Release, request.note).await;
        }
        WorkerCommand::Cancel { task } => {
            return end_claim(&desk.control, &task, claim::CancelCommand::Cancel, request.note).await;
        }
        WorkerCommand::Reload => {
            let (ask, answer) = oneshot::channel();
            reloads.send(ask).await.map_err(|_| worker_exited())?;
            let reloaded = answer.await.map_err(|_| worker_exited())?;
            let reloaded = reloaded.map_err(|error| ApiError(StatusCode::UNPROCESSABLE_ENTITY, error))?;
            return Ok(Json(CommandReply { message: reloaded }));
        }
    };
    if matches!(command, Command::Pause { .. } | Command::Resume) {
        let state = desk.control.status().await.ok_or_else(worker_exited)?.state;
        if !matches!(state, status::LifecycleState::Running | status::LifecycleState::Paused) {
            let text = format!("the worker is {}, and claims nothing any more", state.as_str());
            return Err(ApiError(StatusCode::CONFLICT, text));
        }
    }
    desk.control.command(command, request.note).await;
    Ok(Json(CommandReply { message: message.to_owned() }))
}

fn parse_seconds(seconds: Option<f64>) -> Result<Option<Duration>, ApiError> {
    let Some(seconds) = seconds else { return Ok(None) };
    if !(0.0..=SPAN_MAX_SECONDS).contains(&seconds) {
        let text = format!("a span has to be between 0 and {SPAN_MAX_SECONDS} seconds");
        return Err(ApiError(StatusCode::BAD_REQUEST, text));
    }
    Ok(Some(Duration::from_secs_f64(seconds)))
}

/// Which log, and whether to wait for more of it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogQuery {
    task: String,
    follow: bool,
}

impl From<TaskLookupError> for ApiError {
    fn from(not: TaskLookupError) -> Self {
        let status = match not {
            TaskLookupError::NotFound { .. } => StatusCode::NOT_FOUND,
            TaskLookupError::Ambiguous { .. } => StatusCode::CONFLICT,
            TaskLookupError::WorkerExited => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self(status, not.to_string())
    }
}

/// What a worker is asked is answered in time, or not at all.
async fn with_timeout<T>(asked: impl Future<Output = Result<T, TaskLookupError>>) -> Result<T, ApiError> {
    let slow = |_| ApiError(StatusCode::GATEWAY_TIMEOUT, format!("the worker did not answer in {CONTROL_TIMEOUT:?}"));
    Ok(timeout(CONTROL_TIMEOUT, asked).await.map_err(slow)??)
}

async fn end_claim(
    control: &Control,
    task: &str,
    order: claim::CancelCommand,
    note: Note,
) -> Result<Json<CommandReply>, ApiError> {
    let CommandResult { run, result: obeyed } = with_timeout(control.command_claim(task, order, note)).await?;
    let again = "others may claim it, and so may this worker where it is not paused";
    let what = match order {
        claim::CancelCommand::Release => "released",
        claim::CancelCommand::Cancel => "canceled",
    };
    let (outcome, then) = match obeyed {
        CancelResult::Stopping(outcome) => {
            (outcome, format!("is told to end, and is reported as {outcome} when it has"))
        }
        CancelResult::Reporting(outcome) => (outcome, format!("has ended, and is reported as {outcome} now")),
        CancelResult::ReportWhenGranted(outcome) => {
            (outcome, format!("is being claimed, and is reported as {outcome} then"))
        }
        CancelResult::NotRequested => {
            return Ok(Json(CommandReply {
                message: format!("{run} was not granted, and is not asked for again; {again}"),
            }));
        }
        CancelResult::AlreadyReported(outcome) => {
            let text = format!("{run} cannot be {what} any more: it has ended, and is being reported as {outcome}");
            return Err(ApiError(StatusCode::CONFLICT, text));
        }
        CancelResult::Lost(_) => {
            let text =
                format!("{run} cannot be {what} any more: its claim is lost, and what is left of it is being ended");
            return Err(ApiError(StatusCode::CONFLICT, text));
        }
    };
    if !order.is_satisfied_by(outcome) {
        return Err(ApiError(StatusCode::CONFLICT, format!("{run} is not {what}: it {then}")));
    }
    let message = match order {
        claim::CancelCommand::Release => format!("{run} {then}; {again}"),
        claim::CancelCommand::Cancel => format!("{run} {then}"),
    };
    Ok(Json(CommandReply { message }))
}

/// Which task.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClaimQuery {
    task: String,
}

async fn handle_claim(
    State(AppState { worker: desk, .. }): State<AppState>,
    Query(named): Query<ClaimQuery>,
) -> Result<Json<ClaimDetail>, ApiError> {
    let ClaimSnapshot { mut detail, enclosure } = with_timeout(desk.control.claim_detail(&named.task)).await?;
    if let Some(enclosure) = enclosure {
        // A file system that hangs holds up who asks, and only for so long.
        let looked = tokio::task::spawn_blocking(move || {
            let processes = enclosure.processes();
            (processes, ProcessScope::memory_bytes_of(&[Some(enclosure)]).pop().flatten())
        });
        (detail.processes, detail.claim.memory_bytes) =
            timeout(CONTROL_TIMEOUT, looked).await.ok().and_then(Result::ok).unwrap_or_default();
    }
    Ok(Json(detail))
}

async fn handle_log(
    State(AppState { worker: desk, .. }): State<AppState>,
    Query(which): Query<LogQuery>,
) -> Result<Response, ApiError> {
    let log = with_timeout(desk.control.log(&which.task)).await.map_err(|ApiError(status, text)| {
        let more =
            if status == StatusCode::NOT_FOUND { "; `journeyman task log` reads the logs of ended tasks" } else { "" };
        ApiError(status, format!("{text}{more}"))
    })?;
    let (near, far) = tokio::io::duplex(CONTROL_READ_BYTES);
    let reader = LogReader { log, file: None, offset: 0, query: which, control: desk.control };
    let mut copying = JoinSet::new();
    copying.spawn(reader.run(near));
    Ok(Body::from_stream(ReaderStream::new(LogStream { reader: far, _copying: copying })).into_response())
}

/// The reading end, which ends the copying when nobody reads any more.
struct LogStream {
    reader: DuplexStream,
    _copying: JoinSet<()>,
}

impl AsyncRead for LogStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().reader).poll_read(cx, buffer)
    }
}

/// A log from its start on.
struct LogReader {
    log: TaskLog,
    file: Option<File>,
    offset: u64,
    query: LogQuery,
    control: Control,
}

impl LogReader {
    async fn run(mut self, mut to: DuplexStream) {
        loop {
            // Before reading, so that nothing that comes between is missed.
            let (seen, ended) = (self.log.bytes(), self.log.is_finished());
            // A slow disk holds up who reads, not the worker.
            let mut reader = self;
            let Ok((reader, read)) = tokio::task::spawn_blocking(move || {
                let read = reader.read();
                (reader, read)
            })
            .await
            else {
                return;
            };
            self = reader;
            match read {
                Ok(bytes) if !bytes.is_empty() => {
                    if to.write_all(&bytes).await.is_err() {
                        return;
                    }
                    continue;
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(%error, "a task's log that is followed cannot be read");
                    return;
                }
            }
            if ended || !self.query.follow {
                return;
            }
            tokio::select! {
                () = self.log.wait_for_growth(seen) => {}
                // A log that is never ended, because its claim was lost, is noticed by looking.
                () = tokio::time::sleep(CONTROL_FOLLOW_CHECK_INTERVAL) => {
                    if self.control.log(&self.query.task).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    fn read(&mut self) -> io::Result<Vec<u8>> {
        if self.file.is_none() {
            self.file = match File::open(self.log.path()) {
                Ok(file) => Some(file),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(error),
            };
        }
        let Some(file) = &self.file else { return Ok(Vec::new()) };
        let mut buffer = vec![0; CONTROL_READ_BYTES];
        let taken = file.read_at(&mut buffer, self.offset)?;
        buffer.truncate(taken);
        self.offset += taken as u64;
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixStream;

    use super::*;
    use crate::worker::{Worker, WorkerConfig};

    fn desk(reload: Arc<ReloadFn>) -> ServedWorker {
        let control = Worker::new(WorkerConfig::default(), Vec::new()).control();
        ServedWorker { id: "w".to_owned(), group: "g".to_owned(), control, reload }
    }

    #[tokio::test]
    async fn a_reload_whose_client_hangs_up_is_finished() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let [began, go_on, ended] = [(); 3].map(|()| Arc::new(Semaphore::new(0)));
        let reload: Arc<ReloadFn> = {
            let (began, go_on, ended) = (Arc::clone(&began), Arc::clone(&go_on), Arc::clone(&ended));
            Arc::new(move || {
                let (began, go_on, ended) = (Arc::clone(&began), Arc::clone(&go_on), Arc::clone(&ended));
                Box::pin(async move {
                    began.add_permits(1);
                    go_on.acquire().await.unwrap().forget();
                    ended.add_permits(1);
                    Ok("done".to_owned())
                })
            })
        };
        let mut serving = JoinSet::new();
        serving.spawn(serve(Socket::listen(&path).unwrap(), desk(reload)));
        let body = r#"{"command":"reload","note":{"by":"ana"}}"#;
        let request = format!(
            "POST /v1/commands HTTP/1.1\r\nhost: w\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let asks = async || {
            let mut stream = UnixStream::connect(&path).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            stream
        };
        let stream = asks().await;
        began.acquire().await.unwrap().forget();
        drop(stream);
        // Another one, so that the worker has seen that nobody listens to the first.
        let mut other = asks().await;
        began.acquire().await.unwrap().forget();
        go_on.add_permits(2);
        let both = timeout(Duration::from_secs(60), ended.acquire_many(2)).await;
        both.expect("the first one is finished as well").unwrap().forget();
        let mut answer = vec![0; 1024];
        let read = other.read(&mut answer).await.unwrap();
        assert!(String::from_utf8_lossy(&answer[..read]).contains("done"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_socket_that_was_removed_is_listened_on_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let mut serving = JoinSet::new();
        let reload: Arc<ReloadFn> = Arc::new(|| Box::pin(std::future::pending()));
        serving.spawn(serve(Socket::listen(&path).unwrap(), desk(reload)));
        std::fs::remove_file(&path).unwrap();
        let again = async {
            while UnixStream::connect(&path).await.is_err() {
                tokio::time::sleep(CONTROL_ACCEPT_RETRY_DELAY).await;
            }
        };
        timeout(CONTROL_SOCKET_CHECK_INTERVAL * 2, again).await.unwrap();
    }
}
