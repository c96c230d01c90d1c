//! The routes of the HTTP API.

use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use axum::routing::{any, get, post};
use axum::{Router, middleware};

use super::call::{App, CREATE_TASK, Call, ReplyResult};
use super::queue_error::{Params, route_not_found};
use super::task_state::{ResolvedReason, TaskRecord};
use super::{artifact_calls, artifact_content, azure_storage, origins, task_calls as calls};

type ResponseFuture = Pin<Box<dyn Future<Output = Response> + Send>>;

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
        ("/journeyman/task-queues", get(call("journeymanListActivity", calls::list_activity))),
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
