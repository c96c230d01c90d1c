//! The HTTP routes of a controller: health, metrics, the status page, what clients of osrdyne ask, and commands with a token.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::to_bytes;
use axum::extract::{Query, Request, State};
use axum::http::header::ACCEPT;
use axum::http::{Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use maud::html;
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::{ReadinessCheck, SnapshotFn, StatusRoutes};
use crate::console::app::commands::require_token;
use crate::console::app::targets::Target;
use crate::console::app::{self, Console};
use crate::console::controller::{metrics, poison_section};
use crate::console::page::{self, PageContent};
use crate::control::controller_api::{ControllerStatusReply, Inventories};
use journeyman_domain::limits::{CONTROL_ANSWER_BYTES_MAX, HTTP_SNAPSHOT_TIMEOUT};
use journeyman_platform::http::{BearerToken, HttpListener};
use journeyman_services::controller::status::{PoolStatus, WorkerActivity};

/// Serves until dropped. `commands` need the token.
pub async fn serve(
    listener: HttpListener,
    snapshot: Arc<SnapshotFn<ControllerStatusReply>>,
    token: Option<BearerToken>,
    commands: Router,
) -> Infallible {
    let controllers = vec![Target::Own(Arc::clone(&snapshot))];
    let console = app::routes(Arc::new(Console { controllers, token, is_of_role: true, ..Console::default() }));
    let as_osrdyne = Router::new().route("/status", get(workers_of_keys)).route("/health", get(health));
    let as_osrdyne = as_osrdyne.with_state(Arc::clone(&snapshot));
    let routes = StatusRoutes {
        role: "controller",
        snapshot,
        checks: |status| status.pools.iter().map(readiness_check).collect(),
        is_started: |_| true,
        metrics,
    };
    let commands = commands.route_layer(middleware::from_fn(draw_poison));
    listener.serve(routes.into_router().merge(as_osrdyne).merge(console).merge(require_token(commands, token))).await
}

type Snapshot = State<Arc<SnapshotFn<ControllerStatusReply>>>;

/// The workers of the `keys`, or all, as osrdyne shows them. A pool that starts no workers has one for each key that is asked for.
async fn workers_of_keys(State(snapshot): Snapshot, Query(query): Query<Vec<(String, String)>>) -> Response {
    let Ok(Some(status)) = timeout(HTTP_SNAPSHOT_TIMEOUT, snapshot()).await else {
        return (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": "unavailable" }))).into_response();
    };
    let keys: Vec<&str> = query.iter().filter(|(name, _)| name == "keys").map(|(_, key)| key.as_str()).collect();
    Json(json!({ "workers": shown_workers(&status.pools, &keys) })).into_response()
}

fn shown_workers(pools: &[PoolStatus], keys: &[&str]) -> Map<String, Value> {
    let show = |id: &str, key: &str, status: &str| {
        let worker =
            json!({ "worker_id": id, "worker_key": key, "worker_metadata": { "worker_key": key }, "status": status });
        (id.to_owned(), worker)
    };
    let mut shown = Map::new();
    for pool in pools {
        if !pool.starts_workers {
            shown.extend(keys.iter().map(|key| show(key, key, "Ready")));
        }
        for group in pool.groups.iter().filter(|group| keys.is_empty() || keys.contains(&group.key.as_str())) {
            shown.extend(group.worker_list.iter().filter_map(|worker| {
                let status = match worker.state {
                    WorkerActivity::Starting => "Loading",
                    WorkerActivity::Idle | WorkerActivity::Busy => "Ready",
                    WorkerActivity::Stopping => return None,
                };
                Some(show(&worker.id, &group.key, status))
            }));
        }
    }
    shown
}

async fn health(State(snapshot): Snapshot) -> (StatusCode, Json<Value>) {
    let is_up =
        |status: &ControllerStatusReply| status.pools.iter().all(|pool| readiness_check(pool).problem.is_none());
    match timeout(HTTP_SNAPSHOT_TIMEOUT, snapshot()).await {
        Ok(Some(status)) if is_up(&status) => (StatusCode::OK, Json(json!({ "status": "ok" }))),
        Ok(_) | Err(_) => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": "unavailable" }))),
    }
}

/// Draws what the API answers about the poison queue for a reader of pages.
async fn draw_poison(request: Request, next: Next) -> Response {
    let accepts = request.headers().get(ACCEPT).and_then(|accepts| accepts.to_str().ok()).unwrap_or_default();
    let is_drawn = request.method() == Method::GET && accepts.contains("text/html");
    let answer = next.run(request).await;
    if !is_drawn || answer.status() != StatusCode::OK {
        return answer;
    }
    let body = to_bytes(answer.into_body(), CONTROL_ANSWER_BYTES_MAX).await.unwrap_or_default();
    match serde_json::from_slice::<Inventories>(&body) {
        Ok(inventories) => {
            let main = html! { @for (pool, found) in &inventories { (page::section(&poison_section(pool, found))) } };
            PageContent::new("poison queue", html! { "controller" }, main).build().into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

fn readiness_check(pool: &PoolStatus) -> ReadinessCheck {
    let problem = pool.inactive_reason().map(|reason| reason.replace(['\n', '\r'], " "));
    let note = Some(format!("{} groups", pool.groups.len()));
    ReadinessCheck { name: format!("pool {}", pool.name), problem, note }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::openmetrics::markdown;

    #[test]
    fn the_guide_has_every_metric() {
        let guide = include_str!("../../guide/controller.md");
        let none = ControllerStatusReply { version: String::new(), pid: 0, uptime_seconds: 0.0, pools: Vec::new() };
        let table = markdown(&metrics(&none));
        assert!(guide.contains(&table), "in src/guide/controller.md should be:\n{table}");
    }
}
