//! Serves the control socket of a worker.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

pub use super::socket::Socket;
use super::{CommandReply, SPAN_MAX_SECONDS, WorkerCommand, WorkerCommandRequest, WorkerStatusReply};
use journeyman_domain::claim::{CancelCommand, CancelResult};
use journeyman_domain::limits::CONTROL_TIMEOUT;
use journeyman_platform::host::containment::ProcessScope;
use journeyman_worker::engine::live_log::LogTail;
use journeyman_worker::engine::status::{ClaimDetail, LifecycleState, WorkerStatus};
use journeyman_worker::engine::{ClaimSnapshot, Command, CommandResult, Control, Note, TaskLookupError};

/// Takes the reply to a request for a reload: a message, or why the configuration was rejected.
pub type ReloadRequest = oneshot::Sender<Result<String, String>>;
pub type ReloadSender = mpsc::Sender<ReloadRequest>;

#[derive(Clone)]
pub struct ServedWorker {
    pub id: String,
    pub group: String,
    pub control: Control,
    /// `None` if the configuration cannot be reloaded.
    pub reloads: Option<ReloadSender>,
}

/// Serves until dropped, then removes the socket.
pub async fn serve(socket: Socket, worker: ServedWorker) -> Infallible {
    let router = Router::new()
        .route("/v1/status", get(handle_status))
        .route("/v1/commands", post(handle_command))
        .route("/v1/log", get(handle_log))
        .route("/v1/claim", get(handle_claim))
        .fallback(async || ApiError(StatusCode::NOT_FOUND, "this is the control socket of a worker".to_owned()))
        .with_state(worker);
    socket.serve(router).await
}

pub(super) async fn request_reload(reloads: Option<&ReloadSender>) -> Result<Json<CommandReply>, ApiError> {
    let rejected = |text: String| ApiError(StatusCode::UNPROCESSABLE_ENTITY, text);
    let restart = || rejected("this process cannot reload its configuration; restart it".to_owned());
    let exiting = || ApiError(StatusCode::SERVICE_UNAVAILABLE, "the process is exiting".to_owned());
    let (sender, result) = oneshot::channel();
    reloads.ok_or_else(restart)?.send(sender).await.map_err(|_| exiting())?;
    let message = result.await.map_err(|_| exiting())?.map_err(rejected)?;
    Ok(Json(CommandReply { message }))
}

#[derive(Debug)]
pub struct ApiError(pub(crate) StatusCode, pub(crate) String);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.0, Json(CommandReply { message: self.1 })).into_response()
    }
}

async fn status_of(worker: &ServedWorker) -> Result<WorkerStatus, ApiError> {
    with_timeout(async { worker.control.status().await.ok_or(TaskLookupError::WorkerExited) }).await
}

async fn handle_status(State(worker): State<ServedWorker>) -> Result<Json<WorkerStatusReply>, ApiError> {
    let status = status_of(&worker).await?;
    Ok(Json(WorkerStatusReply::new(worker.id, worker.group, status)))
}

async fn handle_command(
    State(worker): State<ServedWorker>,
    Json(request): Json<WorkerCommandRequest>,
) -> Result<Json<CommandReply>, ApiError> {
    let (command, message) = match request.command {
        WorkerCommand::Pause { seconds } => {
            (Command::Pause { span: parse_seconds(seconds)? }, "paused: running tasks continue")
        }
        WorkerCommand::Resume => (Command::Resume, "resumed: claiming again"),
        WorkerCommand::Drain { seconds } => (
            Command::Drain { within: parse_seconds(seconds)? },
            "draining: the worker finishes running tasks, then exits",
        ),
        WorkerCommand::Stop => {
            (Command::Release { within: None }, "stopping: the worker releases running tasks, then exits")
        }
        WorkerCommand::Release { task } => {
            return end_claim(&worker, &task, CancelCommand::Release, request.note).await;
        }
        WorkerCommand::Cancel { task } => return end_claim(&worker, &task, CancelCommand::Cancel, request.note).await,
        WorkerCommand::Reload => return request_reload(worker.reloads.as_ref()).await,
    };
    if matches!(command, Command::Pause { .. } | Command::Resume) {
        let state = status_of(&worker).await?.state;
        if !matches!(state, LifecycleState::Running | LifecycleState::Paused) {
            let text = format!("the worker is {} and no longer claims", state.as_str());
            return Err(ApiError(StatusCode::CONFLICT, text));
        }
    }
    worker.control.command(command, request.note).await;
    Ok(Json(CommandReply { message: message.to_owned() }))
}

fn parse_seconds(seconds: Option<f64>) -> Result<Option<Duration>, ApiError> {
    let Some(seconds) = seconds else { return Ok(None) };
    if !(0.0..=SPAN_MAX_SECONDS).contains(&seconds) {
        let text = format!("`seconds` must be between 0 and {SPAN_MAX_SECONDS}");
        return Err(ApiError(StatusCode::BAD_REQUEST, text));
    }
    Ok(Some(Duration::from_secs_f64(seconds)))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClaimQuery {
    task: String,
    #[serde(default)]
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

async fn with_timeout<T>(lookup: impl Future<Output = Result<T, TaskLookupError>>) -> Result<T, ApiError> {
    let slow = |_| ApiError(StatusCode::GATEWAY_TIMEOUT, format!("the worker did not answer in {CONTROL_TIMEOUT:?}"));
    Ok(timeout(CONTROL_TIMEOUT, lookup).await.map_err(slow)??)
}

async fn end_claim(
    worker: &ServedWorker,
    task: &str,
    command: CancelCommand,
    note: Note,
) -> Result<Json<CommandReply>, ApiError> {
    let CommandResult { run, result } = with_timeout(worker.control.command_claim(task, command, note)).await?;
    let ends = |outcome| format!("it ends and will be reported as {outcome}");
    let (is_satisfied, text) = match result {
        CancelResult::NotRequested => (true, "its claim was not granted".to_owned()),
        CancelResult::Lost(_) => (false, "its claim is lost".to_owned()),
        CancelResult::AlreadyReported(outcome) => (false, ends(outcome)),
        CancelResult::Stopping(outcome)
        | CancelResult::Reporting(outcome)
        | CancelResult::ReportWhenGranted(outcome) => (command.is_satisfied_by(outcome), ends(outcome)),
    };
    if is_satisfied {
        return Ok(Json(CommandReply { message: format!("{run}: {text}") }));
    }
    Err(ApiError(StatusCode::CONFLICT, format!("{run} is not {}: {text}", command.past_tense())))
}

async fn handle_claim(
    State(worker): State<ServedWorker>,
    Query(query): Query<ClaimQuery>,
) -> Result<Json<ClaimDetail>, ApiError> {
    let ClaimSnapshot { mut detail, enclosure } = with_timeout(worker.control.claim_detail(&query.task)).await?;
    if let Some(scope) = enclosure {
        // May block on a file system that hangs.
        let probe = tokio::task::spawn_blocking(move || {
            let usage = scope.usage();
            (scope.processes(), ProcessScope::memory_bytes_of(&[Some(scope)]).pop().flatten(), usage)
        });
        let usage;
        (detail.processes, detail.claim.memory_bytes, usage) =
            timeout(CONTROL_TIMEOUT, probe).await.ok().and_then(Result::ok).unwrap_or_default();
        detail.memory_peak_bytes = usage.memory_peak;
        detail.cpu_seconds = usage.cpu.map(|cpu| cpu.as_secs_f64());
    }
    Ok(Json(detail))
}

async fn handle_log(State(worker): State<ServedWorker>, Query(query): Query<ClaimQuery>) -> Result<Response, ApiError> {
    let log = with_timeout(worker.control.log(&query.task)).await.map_err(|ApiError(status, text)| {
        let more =
            if status == StatusCode::NOT_FOUND { "; `journeyman task log` reads the logs of ended tasks" } else { "" };
        ApiError(status, format!("{text}{more}"))
    })?;
    let tail = if query.follow { LogTail::following(log) } else { LogTail::so_far(log) };
    Ok(tail.into_body().into_response())
}
