//! The HTTP routes of a worker: health, metrics and the status page. All of them are read-only.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use futures_util::future::join_all;
use maud::html;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{ReadinessCheck, SnapshotFn, StatusRoutes};
use crate::console::app::targets::Target;
use crate::console::app::{self, Console};
use crate::console::page::{self, HtmlPage, PageContent};
use crate::console::worker::{self, metrics};
use crate::control::WorkerStatusReply;
use journeyman_domain::limits::{HTTP_SNAPSHOT_TIMEOUT, SOURCE_INSPECT_TIMEOUT};
use journeyman_platform::http::HttpListener;
use journeyman_worker::engine::ClaimHistory;
use journeyman_worker::engine::status::{BlockedReason, LifecycleState, WorkerStatus};
use journeyman_worker::source::{InspectionTable, Source};

/// Each refresh reads the queue.
const SOURCE_REFRESH_SECONDS: u8 = 30;

type Sources = Arc<Vec<(String, Arc<dyn Source>)>>;

/// Serves until dropped. Each of the sources has a page of its own; `console` has what the worker's pages show besides it.
pub async fn serve(
    listener: HttpListener,
    snapshot: Arc<SnapshotFn<WorkerStatusReply>>,
    sources: Vec<(String, Arc<dyn Source>)>,
    mut console: Console,
) -> Infallible {
    console.sources = sources.iter().map(|(name, _)| name.clone()).collect();
    console.is_of_role = true;
    console.workers.push(Target::Own(Arc::clone(&snapshot)));
    let console = Arc::new(console);
    let own_routes = Router::new()
        .route("/history.json", get(history_json))
        .route("/schemas.json", get(schemas_json))
        .with_state(Arc::clone(&console));
    let source_routes = Router::new()
        .route("/sources/{*name}", get(source_page))
        .route("/sources.json", get(sources_json))
        .with_state(Arc::new(sources));
    let health_route = Router::new().route("/health", get(health)).with_state(Arc::clone(&snapshot));
    let routes = StatusRoutes {
        role: "worker",
        snapshot,
        checks: |status| readiness_checks(&status.snapshot),
        // Not the queue's answer: one that boots with this host would get the worker restarted.
        is_started: |status| status.snapshot.sidecars.iter().all(|sidecar| sidecar.up || sidecar.restarts > 0),
        metrics,
    };
    listener
        .serve(
            routes.into_router().merge(source_routes).merge(health_route).merge(own_routes).merge(app::routes(console)),
        )
        .await
}

/// The claims of the last hour, for the pages of other consoles.
async fn history_json(State(console): State<Arc<Console>>) -> Json<Option<Vec<ClaimHistory>>> {
    match &console.history {
        Some(history) => Json(history().await),
        None => Json(None),
    }
}

/// The schemas of payloads, by task queue.
async fn schemas_json(State(console): State<Arc<Console>>) -> Json<BTreeMap<String, Value>> {
    Json(console.schemas.clone())
}

/// As Screwdriver's own worker answers: whether the broker can be reached.
async fn health(State(snapshot): State<Arc<SnapshotFn<WorkerStatusReply>>>) -> (StatusCode, &'static str) {
    let is_up = |status: &WorkerStatusReply| status.snapshot.sources.iter().all(|source| !source.failing);
    match timeout(HTTP_SNAPSHOT_TIMEOUT, snapshot()).await {
        Ok(Some(status)) if is_up(&status) => (StatusCode::OK, "ok"),
        Ok(_) | Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
    }
}

async fn inspect(source: &dyn Source) -> Result<Vec<InspectionTable>, String> {
    let reading = async { Some(source.inspect()?.await) };
    match timeout(SOURCE_INSPECT_TIMEOUT, reading).await {
        Ok(Some(Ok(tables))) => Ok(tables),
        Ok(Some(Err(error))) => Err(error.message),
        Ok(None) => Ok(Vec::new()),
        Err(_) => Err(format!("the source did not answer within {SOURCE_INSPECT_TIMEOUT:?}")),
    }
}

async fn source_page(State(sources): State<Sources>, Path(name): Path<String>) -> Result<HtmlPage, StatusCode> {
    let (_, source) = sources.iter().find(|(found, _)| *found == name).ok_or(StatusCode::NOT_FOUND)?;
    let section = worker::source(&name, &inspect(&**source).await);
    let parent = html! { a href="/" { "worker" } };
    let links = html! { (parent) " · " a href="/sources.json" { "JSON" } };
    let content = PageContent::new(format!("{name} · journeyman"), parent, page::section(&section));
    Ok(PageContent { links, refresh_seconds: SOURCE_REFRESH_SECONDS, ..content }.build())
}

async fn sources_json(State(sources): State<Sources>) -> Json<BTreeMap<String, Value>> {
    let inspected = sources.iter().map(async |(name, source)| {
        let found = match inspect(&**source).await {
            Ok(tables) => json!({ "tables": tables }),
            Err(error) => json!({ "error": error }),
        };
        (name.clone(), found)
    });
    Json(join_all(inspected).await.into_iter().collect())
}

fn readiness_checks(view: &WorkerStatus) -> Vec<ReadinessCheck> {
    let reason = || Some(view.blocked_message.clone().unwrap_or_default());
    let check = |name: &str, failed: bool| ReadinessCheck {
        name: name.to_owned(),
        problem: failed.then(reason).flatten(),
        note: None,
    };
    let shutting_down = view.state != LifecycleState::Running && view.state != LifecycleState::Paused;
    let used = view.claims.len() + view.cleanup_pending.len();
    let free = view.capacity.saturating_sub(u32::try_from(used).unwrap_or(u32::MAX));
    let slots = if free == 0 { "every slot is taken".to_owned() } else { format!("{free} free") };
    vec![
        sources_check(view),
        check("not paused", view.blocked_reason == Some(BlockedReason::Paused)),
        check("not shutting down", shutting_down),
        check("host healthy", view.blocked_reason == Some(BlockedReason::HostUnhealthy)),
        check("sidecars", view.blocked_reason == Some(BlockedReason::SidecarDown)),
        check("disk", view.blocked_reason == Some(BlockedReason::Disk)),
        check("memory", view.blocked_reason == Some(BlockedReason::Memory)),
        ReadinessCheck { name: "slots".to_owned(), problem: None, note: Some(slots) },
    ]
}

/// One source that answers is enough to work.
fn sources_check(view: &WorkerStatus) -> ReadinessCheck {
    let up = view.sources.iter().filter(|source| source.is_up()).count();
    let errors = view.sources.iter().filter_map(|source| {
        source.error.as_ref().map(|error| format!("; {}: {}", source.name, error.message.replace(['\n', '\r'], " ")))
    });
    let text = errors.fold(format!("{up} of {} answer", view.sources.len()), |text, error| text + &error);
    let (problem, note) = if up == 0 { (Some(text), None) } else { (None, Some(text)) };
    ReadinessCheck { name: "sources".to_owned(), problem, note }
}
