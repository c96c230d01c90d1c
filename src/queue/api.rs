//! The HTTP API: its routes, and what every call shares: authentication by the head alone, a bounded body, errors.

use std::collections::BTreeMap;
use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody as _, to_bytes};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::header::{AsHeaderName, CONTENT_TYPE, HOST};
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::middleware;
use axum::response::Response;
use axum::routing::{any, get, post};
use futures_util::StreamExt as _;
use serde::de::DeserializeOwned;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::QueueState;
use super::artifact_calls;
use super::auth::{AuthenticatedRequest, Caller, check_payload_hash};
use super::field_types::{is_identifier, is_printable, is_queue_id, parse_fields};
use super::queue_error::{QueueError, QueueErrorCode, route_not_found};
use super::store::tx::PageRequest;
use super::task_calls as calls;
use super::task_state::{ResolvedReason, TaskRecord};
use super::{artifact_content, azure_storage, origins};
use journeyman_domain::limits::{
    QUEUE_BODY_BYTES_MAX, QUEUE_BODY_TIMEOUT, QUEUE_DISCARD_TIMEOUT, QUEUE_PAGE_MAX, QUEUE_SMALL_BODY_BYTES_MAX,
    QUEUE_UNAUTHENTICATED_BODY_BYTES_MAX,
};
use journeyman_worker::task::formats::is_slugid;

pub(crate) type App = Arc<QueueState>;
pub(crate) type ReplyResult = Result<Response, QueueError>;
type ResponseFuture = Pin<Box<dyn Future<Output = Response> + Send>>;

const CREATE_TASK: &str = "createTask";

/// The routes. Older clients send the slashes of artifact names and of some task queues bare.
pub(super) fn router(app: App) -> Router {
    let routes = [
        ("/ping", get(call("ping", calls::ping))),
        ("/__lbheartbeat__", get(call("lbheartbeat", calls::ping))),
        ("/__heartbeat__", get(call("heartbeat", calls::heartbeat))),
        ("/__version__", get(call("version", calls::version))),
        ("/tasks", post(call("tasks", |app, call| calls::tasks(app, call, "get-task", "tasks")))),
        ("/tasks/status", post(call("statuses", |app, call| calls::tasks(app, call, "status", "statuses")))),
        ("/task/{taskId}", get(call("task", calls::task)).put(call(CREATE_TASK, calls::create_task))),
        ("/task/{taskId}/status", get(call("status", calls::status))),
        (
            "/task/{taskId}/rerun",
            post(call("rerunTask", |app, call| calls::change_task(app, call, "rerun", TaskRecord::rerun))),
        ),
        (
            "/task/{taskId}/cancel",
            post(call("cancelTask", |app, call| calls::change_task(app, call, "cancel", TaskRecord::cancel))),
        ),
        ("/task/{taskId}/runs/{runId}/claim", post(call("claimTask", calls::claim_task))),
        ("/task/{taskId}/runs/{runId}/reclaim", post(call("reclaimTask", calls::reclaim_task))),
        (
            "/task/{taskId}/runs/{runId}/completed",
            post(call("reportCompleted", |app, call| calls::report(app, call, ResolvedReason::Completed))),
        ),
        (
            "/task/{taskId}/runs/{runId}/failed",
            post(call("reportFailed", |app, call| calls::report(app, call, ResolvedReason::Failed))),
        ),
        ("/task/{taskId}/runs/{runId}/exception", post(call("reportException", calls::report_exception))),
        ("/task/{taskId}/runs/{runId}/artifacts", get(call("listArtifacts", artifact_calls::list))),
        (
            "/task/{taskId}/runs/{runId}/artifacts/{*name}",
            get(call("getArtifact", artifact_calls::get)).post(call("createArtifact", artifact_calls::create)),
        ),
        ("/task/{taskId}/artifacts", get(call("listLatestArtifacts", artifact_calls::list))),
        ("/task/{taskId}/artifacts/{*name}", get(call("getLatestArtifact", artifact_calls::get))),
        ("/task/{taskId}/runs/{runId}/artifact-content/{*name}", get(call("artifact", artifact_calls::content))),
        ("/task/{taskId}/artifact-content/{*name}", get(call("latestArtifact", artifact_calls::content))),
        ("/task/{taskId}/runs/{runId}/artifact-info/{*name}", get(call("artifactInfo", artifact_calls::info))),
        ("/task/{taskId}/artifact-info/{*name}", get(call("latestArtifactInfo", artifact_calls::info))),
        ("/poll-task-url/{provisionerId}/{workerType}", get(call("pollTaskUrls", azure_storage::poll_task_urls))),
        ("/claim-work/{*taskQueueId}", post(call("claimWork", calls::claim_work))),
        ("/pending/{*taskQueueId}", get(call("pendingTasks", calls::pending_tasks))),
        ("/task-queues", get(call("listTaskQueues", calls::list_task_queues))),
        ("/task-queues/{taskQueueId}/counts", get(call("taskQueueCounts", calls::task_queue_counts))),
        (
            "/provisioners/{provisionerId}/worker-types/{workerType}/workers",
            get(call("listWorkers", calls::list_workers)),
        ),
        ("/task-queues/{taskQueueId}/pending", get(call("listPendingTasks", calls::list_pending))),
        ("/task-queues/{taskQueueId}/claimed", get(call("listClaimedTasks", calls::list_claimed))),
        ("/task-group/{taskGroupId}/list", get(call("listTaskGroup", calls::list_task_group))),
        ("/task-group/{taskGroupId}/cancel", post(call("cancelTaskGroup", calls::cancel_task_group))),
        ("/journeyman/tasks", get(call("journeymanListTasks", calls::find_tasks))),
    ];
    let api = |router: Router<App>, (path, calls)| router.route(&format!("/api/queue/v1{path}"), calls);
    routes
        .into_iter()
        .fold(Router::new(), api)
        .route("/azure/{provisioner}/{worker_type}/{rank}/messages", any(azure_storage::messages))
        .route("/azure/{provisioner}/{worker_type}/{rank}/messages/{message}", any(azure_storage::message))
        .route(&format!("{}{{*path}}", artifact_content::PATH_PREFIX), any(artifact_content::handle))
        .fallback(|| ready(route_not_found()))
        .method_not_allowed_fallback(|| ready(route_not_found()))
        .layer(middleware::from_fn_with_state(Arc::clone(&app), origins::check))
        .with_state(app)
}

fn call<F, R>(
    name: &'static str,
    handler: F,
) -> impl Fn(State<App>, Result<Path<Params>, PathRejection>, Request) -> ResponseFuture + Clone + Send + Sync + 'static
where
    F: Fn(App, Call) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = ReplyResult> + Send,
{
    move |State(app), path, request| {
        let handler = handler.clone();
        Box::pin(async move {
            let Ok(Path(params)) = path else { return route_not_found() };
            let reply = match Call::read(&app, name, params.clone(), request).await {
                Ok(call) => handler(Arc::clone(&app), call).await,
                Err(error) => Err(error),
            };
            reply.unwrap_or_else(|error| error.into_response(name, &params, app.now()))
        })
    }
}

/// The decoded parameters of a path.
pub(crate) type Params = BTreeMap<String, String>;

fn validate(params: &Params) -> Result<(), QueueError> {
    let is_invalid = |(name, value): &(&String, &String)| match name.as_str() {
        "taskId" | "taskGroupId" => !is_slugid(value),
        "runId" => !(value.bytes().all(|byte| byte.is_ascii_digit()) && value.parse::<u32>().is_ok()),
        "taskQueueId" => !is_queue_id(value),
        "provisionerId" | "workerType" => !is_identifier(value),
        // A reader that stores artifacts by their names would leave its folder.
        "name" => !is_printable(value) || value.split('/').any(|segment| segment == ".."),
        _ => !is_printable(value),
    };
    match params.iter().find(is_invalid) {
        Some((name, _)) => Err(invalid_argument(format!("invalid URL parameter: {name}"))),
        None => Ok(()),
    }
}

/// An authenticated call with valid parameters.
pub(crate) struct Call {
    pub(crate) caller: Caller,
    pub(crate) body: Bytes,
    /// This queue as the caller addressed it, without a trailing slash: `listen` may be `0.0.0.0`.
    pub(crate) root_url: String,
    params: Params,
    query: String,
    /// Held as long as the body.
    _share: BodyShare,
}

impl Call {
    async fn read(app: &QueueState, name: &str, params: Params, request: Request) -> Result<Self, QueueError> {
        let (parts, body) = request.into_parts();
        let accepted = app
            .keyring
            .authenticate(&parts, app.now())
            .and_then(|request| Ok((reserve_body(app, name, &request.caller, &body)?, request)));
        let (share, AuthenticatedRequest { caller, payload_hash }) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // So that the client reads the response instead of a connection reset.
                timeout(QUEUE_DISCARD_TIMEOUT, body.into_data_stream().for_each(|_| ready(()))).await.ok();
                return Err(error);
            }
        };
        let body = match timeout(QUEUE_BODY_TIMEOUT, to_bytes(body, share.bytes_max)).await {
            Ok(Ok(body)) => body,
            Ok(Err(_)) => return Err(malformed("request body ended early, or is too large")),
            Err(_) => return Err(malformed("request body was not received in time")),
        };
        let media_type = header_str(&parts, CONTENT_TYPE).unwrap_or_default().split(';').next().unwrap_or_default();
        let is_json = media_type.trim().eq_ignore_ascii_case("application/json");
        let is_object = is_json && body.trim_ascii_start().starts_with(b"{");
        if !body.is_empty() && !is_object {
            return Err(malformed("expected a JSON object with the content type application/json"));
        }
        if let Some(hash) = payload_hash {
            check_payload_hash(media_type.trim(), &body, hash)?;
        }
        validate(&params)?;
        let query = parts.uri.query().unwrap_or_default().to_owned();
        let host = header_str(&parts, HOST).filter(|host| host.parse::<Authority>().is_ok());
        let root_url = host.map_or_else(|| app.root_url.clone(), |host| format!("http://{host}"));
        Ok(Self { caller, body, root_url, params, query, _share: share })
    }

    pub(crate) fn fields<T: DeserializeOwned>(&self) -> Result<T, QueueError> {
        parse_fields(&self.body)
    }

    /// Empty if the call has no such parameter.
    pub(crate) fn param(&self, name: &str) -> &str {
        self.params.get(name).map_or("", String::as_str)
    }

    pub(crate) fn task_id(&self) -> String {
        self.param("taskId").to_owned()
    }

    pub(crate) fn run(&self) -> u32 {
        // Valid wherever a route has it.
        self.named_run().unwrap_or(u32::MAX)
    }

    /// `None` in the calls that are about the latest run.
    pub(crate) fn named_run(&self) -> Option<u32> {
        self.param("runId").parse().ok()
    }

    pub(crate) fn task_queue(&self) -> String {
        match self.param("taskQueueId") {
            "" => format!("{}/{}", self.param("provisionerId"), self.param("workerType")),
            queue => queue.to_owned(),
        }
    }

    pub(crate) fn query(&self, name: &str) -> Option<String> {
        query_param(&self.query, name)
    }

    pub(crate) fn page(&self) -> Result<PageRequest, QueueError> {
        let number = |name: &str, default| match self.query(name) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|_| invalid_argument(format!("{name} {text:?} is not a number"))),
        };
        let limit = number("limit", QUEUE_PAGE_MAX)?.clamp(1, QUEUE_PAGE_MAX);
        Ok(PageRequest { offset: number("continuationToken", 0)?, limit })
    }
}

pub(crate) fn header_str(parts: &Parts, name: impl AsHeaderName) -> Option<&str> {
    parts.headers.get(name).and_then(|value| value.to_str().ok())
}

/// Decodes a query parameter; `+` is a space.
pub(crate) fn query_param(query: &str, name: &str) -> Option<String> {
    url::form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == name).map(|(_, value)| value.into_owned())
}

pub(crate) fn invalid_argument(message: String) -> QueueError {
    QueueError::new(QueueErrorCode::InvalidRequestArguments, message)
}

fn malformed(message: &str) -> QueueError {
    QueueError::new(QueueErrorCode::MalformedPayload, message)
}

struct BodyShare {
    bytes_max: usize,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Reserves memory for the declared length of a body, or for the most that the call may send.
fn reserve_body(app: &QueueState, call: &str, caller: &Caller, body: &Body) -> Result<BodyShare, QueueError> {
    let bytes_max = match call {
        _ if !caller.is_authenticated() => QUEUE_UNAUTHENTICATED_BODY_BYTES_MAX,
        CREATE_TASK => QUEUE_BODY_BYTES_MAX,
        _ => QUEUE_SMALL_BODY_BYTES_MAX,
    };
    let declared = body.size_hint();
    if declared.lower() > u64::from(bytes_max) {
        let message = format!("request body exceeds the limit of {bytes_max} bytes");
        return Err(QueueError::new(QueueErrorCode::InputTooLarge, message));
    }
    let bytes = declared.upper().and_then(|bytes| u32::try_from(bytes).ok()).unwrap_or(bytes_max);
    let busy = "too many request bodies in flight; retry later";
    let busy = |_| QueueError::new(QueueErrorCode::ServiceUnavailable, busy);
    // Bodies of other callers are small; they must not use up the budget of clients.
    let reserve = || Arc::clone(&app.body_budget).try_acquire_many_owned(bytes).map_err(busy);
    let permit = caller.is_authenticated().then(reserve).transpose()?;
    Ok(BodyShare { bytes_max: bytes_max as usize, _permit: permit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_plus_in_a_query_is_a_space() {
        assert_eq!(query_param("a=1&popreceipt=x+y%2B=", "popreceipt").unwrap(), "x y+=");
        assert_eq!(query_param("a=1", "b"), None);
    }
}
