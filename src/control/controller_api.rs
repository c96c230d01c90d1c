//! Control socket of the controller: status, commands and the poison queue. The HTTP server uses the same [`PoolHandles`].

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};

use axum::body::Bytes;
use axum::extract::{FromRef, Query, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::worker_api::{ApiError, ReloadSender, Socket, request_reload};
use super::{CommandReply, WorkerCommand, WorkerCommandRequest};
use journeyman_domain::limits::{CONTROL_TIMEOUT, CONTROLLER_POISON_TIMEOUT};
use journeyman_domain::time::Instant;
use journeyman_platform::host::clock::Clock;
use journeyman_services::controller::ControllerHandle;
use journeyman_services::controller::commands::{CommandError, PoolCommand};
use journeyman_services::controller::poison_queue::{PoisonAction, PoisonList, PoisonOutcome, PoisonSelection};
use journeyman_services::controller::status::PoolStatus;
use journeyman_worker::engine::Note;

pub const SOCKET_NAME: &str = "controller.sock";

pub fn socket_in(folder: &Path) -> PathBuf {
    folder.join(SOCKET_NAME)
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ControllerStatusReply {
    pub version: String,
    pub pid: u32,
    pub uptime_seconds: f64,
    pub pools: Vec<PoolStatus>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolCommandRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    pub command: PoolCommand,
    #[serde(default = "unknown_author")]
    pub note: Note,
}

fn unknown_author() -> Note {
    Note::of("unknown")
}

impl PoolCommandRequest {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        parse(body, "not a command; a controller accepts pause, resume, scale, drain (a worker) and retry")
    }
}

#[derive(Debug, Clone)]
pub struct PoolHandles {
    controls: Vec<ControllerHandle>,
    clock: Clock,
    started_at: Instant,
}

impl PoolHandles {
    pub fn new(controls: Vec<ControllerHandle>, clock: Clock) -> Self {
        Self { controls, clock, started_at: clock.now() }
    }

    pub async fn snapshot(&self) -> Option<ControllerStatusReply> {
        let mut pools = Vec::with_capacity(self.controls.len());
        for control in &self.controls {
            pools.push(control.status().await?);
        }
        let uptime_seconds = self.clock.now().since(self.started_at).as_secs_f64();
        Some(ControllerStatusReply {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds,
            pools,
        })
    }

    pub async fn apply(&self, request: PoolCommandRequest) -> Result<CommandReply, ApiError> {
        let PoolCommandRequest { pool, command, note } = request;
        let control = self.select_one(pool.as_deref())?;
        let by = if note.text.is_empty() { note.by } else { format!("{}: {}", note.by, note.text) };
        let result = reply_of(control.command(command, by)).await?;
        result.map(|message| CommandReply { message }).map_err(|error| match error {
            CommandError::NotFound(text) => ApiError(StatusCode::NOT_FOUND, text),
            CommandError::Invalid(text) => ApiError(StatusCode::BAD_REQUEST, text),
            CommandError::Conflict(text) => ApiError(StatusCode::CONFLICT, text),
        })
    }

    pub(super) fn select(&self, name: Option<&str>) -> Result<Vec<&ControllerHandle>, ApiError> {
        let named: Vec<&ControllerHandle> =
            self.controls.iter().filter(|control| name.is_none_or(|name| control.pool == name)).collect();
        if named.is_empty() {
            let text = format!("no pool {}; the pools are {}", name.unwrap_or_default(), self.names());
            return Err(ApiError(StatusCode::NOT_FOUND, text));
        }
        Ok(named)
    }

    pub(super) fn select_one(&self, name: Option<&str>) -> Result<&ControllerHandle, ApiError> {
        match self.select(name)?.as_slice() {
            [control] => Ok(control),
            _ => Err(ApiError(StatusCode::BAD_REQUEST, format!("`pool` is required, one of {}", self.names()))),
        }
    }

    fn names(&self) -> String {
        self.controls.iter().map(|control| control.pool.as_str()).collect::<Vec<_>>().join(", ")
    }
}

#[derive(Clone)]
struct AppState {
    pools: PoolHandles,
    /// `None` for commands over HTTP.
    reloads: Option<ReloadSender>,
}

impl FromRef<AppState> for PoolHandles {
    fn from_ref(state: &AppState) -> Self {
        state.pools.clone()
    }
}

/// The commands that are also served over HTTP.
pub fn command_routes(pools: PoolHandles) -> Router {
    shared_routes().with_state(AppState { pools, reloads: None })
}

fn shared_routes() -> Router<AppState> {
    Router::new().route("/v1/commands", post(handle_command)).route("/v1/poison", get(list_poison).post(act_on_poison))
}

/// Serves until dropped, then removes the socket.
pub async fn serve(socket: Socket, pools: PoolHandles, reloads: ReloadSender) -> Infallible {
    let router = shared_routes()
        .route("/v1/controller", get(handle_status))
        .fallback(async || {
            ApiError(
                StatusCode::NOT_FOUND,
                "this is the control socket of a controller; use `journeyman controller status`".to_owned(),
            )
        })
        .with_state(AppState { pools, reloads: Some(reloads) });
    socket.serve(router).await
}

async fn reply_of<T>(reply: impl Future<Output = Option<T>>) -> Result<T, ApiError> {
    let Ok(reply) = timeout(CONTROL_TIMEOUT, reply).await else {
        let text = format!("the controller did not answer in {CONTROL_TIMEOUT:?}");
        return Err(ApiError(StatusCode::GATEWAY_TIMEOUT, text));
    };
    reply.ok_or_else(|| ApiError(StatusCode::SERVICE_UNAVAILABLE, "the controller has stopped".to_owned()))
}

async fn handle_status(
    State(AppState { pools, .. }): State<AppState>,
) -> Result<Json<ControllerStatusReply>, ApiError> {
    reply_of(pools.snapshot()).await.map(Json)
}

async fn handle_command(
    State(AppState { reloads, pools }): State<AppState>,
    body: Bytes,
) -> Result<Json<CommandReply>, ApiError> {
    let worker_request = || serde_json::from_slice::<WorkerCommandRequest>(&body);
    if reloads.is_some() && worker_request().is_ok_and(|request| request.command == WorkerCommand::Reload) {
        return request_reload(reloads.as_ref()).await;
    }
    Ok(Json(pools.apply(PoolCommandRequest::parse(&body)?).await?))
}

pub type Inventories = BTreeMap<String, PoisonList>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoisonActionRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    pub selection: PoisonSelection,
    pub action: PoisonAction,
    pub by: String,
}

impl PoisonActionRequest {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let refusal = "not a poison request: `selection` is \"all\" or {\"ids\": [ID, …]}, `action` is \"requeue\" or \"discard\"";
        parse(body, refusal)
    }
}

/// Reads the body of a request; `refusal` begins the message about one that cannot be read.
fn parse<T: DeserializeOwned>(body: &[u8], refusal: &str) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| ApiError(StatusCode::BAD_REQUEST, format!("{refusal}: {error}")))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolQuery {
    pool: Option<String>,
}

async fn list_poison(
    State(pools): State<PoolHandles>,
    Query(query): Query<PoolQuery>,
) -> Result<Json<Inventories>, ApiError> {
    let mut inventories = Inventories::new();
    for handle in pools.select(query.pool.as_deref())? {
        inventories.insert(handle.pool.clone(), with_timeout(handle.poison.list()).await?);
    }
    Ok(Json(inventories))
}

async fn act_on_poison(State(pools): State<PoolHandles>, body: Bytes) -> Result<Json<PoisonOutcome>, ApiError> {
    let PoisonActionRequest { pool, selection, action, by } = PoisonActionRequest::parse(&body)?;
    let handle = pools.select_one(pool.as_deref())?;
    let poison = handle.poison.clone();
    // Otherwise a request that is copied and not acknowledged would run twice.
    #[expect(clippy::disallowed_methods, reason = "it continues when its caller has left")]
    let resolving = tokio::spawn(async move { poison.resolve(&selection, action, &by).await });
    with_timeout(async { resolving.await.unwrap_or_else(|error| Err(error.to_string())) }).await.map(Json)
}

async fn with_timeout<T>(request: impl Future<Output = Result<T, String>>) -> Result<T, ApiError> {
    match timeout(CONTROLLER_POISON_TIMEOUT * 2, request).await {
        Ok(result) => result.map_err(|why| ApiError(StatusCode::BAD_GATEWAY, why)),
        Err(_) => {
            Err(ApiError(StatusCode::GATEWAY_TIMEOUT, "the poison queue could not be scanned in time".to_owned()))
        }
    }
}
