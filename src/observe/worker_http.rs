//! Health, metrics and the status page over HTTP, for those who watch a worker. Nothing here gives an order.
//!
//! | path | answers with |
//! | --- | --- |
//! | `/livez` | 200 where the worker's loop answers in time |
//! | `/readyz` | 200 where it claims, or would if a slot were free; `?verbose` names every check |
//! | `/metrics` | OpenMetrics |
//! | `/` | the status page, which refreshes itself; `/status` does not |
//! | `/status.json` | the same as JSON, as `journeyman status -o json` shows it |

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Response, StatusCode};
use tokio::time::timeout;

use super::page::{self, Refresh};
use super::server::{self, ReadinessCheck, Routes, TEXT, readiness_response, response};
pub use super::server::{Exposure, HttpListener};
use super::{metrics, openmetrics};
use crate::control::WorkerStatusReply;
use crate::limits::HTTP_SNAPSHOT_TIMEOUT;
use crate::worker::status::{BlockedReason, LifecycleState, WorkerStatus};

/// Looks at the worker: `None` once it has exited.
pub type WorkerSnapshotFn = dyn Fn() -> WorkerSnapshotFuture + Send + Sync;
/// A look that is under way.
pub type WorkerSnapshotFuture = Pin<Box<dyn Future<Output = Option<WorkerStatusReply>> + Send>>;

/// Answers until it is dropped.
pub async fn serve(door: HttpListener, look: Arc<WorkerSnapshotFn>) -> Infallible {
    let site = Routes {
        paths: &["/livez", "/readyz", "/metrics", "/", "/status", "/status.json"],
        hint: "/livez, /readyz?verbose, /metrics, /, /status, /status.json",
        handler: Box::new(move |path, query| {
            let look = Arc::clone(&look);
            Box::pin(async move { handle_get(&path, query.as_deref(), &*look).await })
        }),
        auth_routes: Vec::new(),
    };
    server::serve(door, site).await
}

async fn handle_get(path: &str, query: Option<&str>, look: &WorkerSnapshotFn) -> Response<Body> {
    let status = match timeout(HTTP_SNAPSHOT_TIMEOUT, look()).await {
        Ok(Some(status)) => status,
        Ok(None) => return response(StatusCode::SERVICE_UNAVAILABLE, TEXT, "the worker has exited\n".to_owned()),
        Err(_) => {
            let text = format!("the worker's loop did not answer within {HTTP_SNAPSHOT_TIMEOUT:?}\n");
            return response(StatusCode::SERVICE_UNAVAILABLE, TEXT, text);
        }
    };
    match path {
        "/livez" => response(StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => readiness_response(&readiness_checks(&status.snapshot), query),
        "/metrics" => match metrics::text(status) {
            Ok(text) => response(StatusCode::OK, openmetrics::CONTENT_TYPE, text),
            Err(_) => response(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "the metrics cannot be written\n".to_owned()),
        },
        "/status.json" => {
            let json = serde_json::to_string_pretty(&status).unwrap_or_default();
            response(StatusCode::OK, "application/json", json + "\n")
        }
        _ => {
            let refresh = if path == "/" { Refresh::Auto } else { Refresh::Never };
            page::worker::render(&status, refresh, jiff::Timestamp::now()).into_response()
        }
    }
}

fn readiness_checks(view: &WorkerStatus) -> Vec<ReadinessCheck> {
    let why = view.blocked_message.clone().unwrap_or_default();
    let unless =
        |words: &[BlockedReason]| view.blocked_reason.filter(|blocked| words.contains(blocked)).map(|_| why.clone());
    let held = |name: &str, words: &[BlockedReason]| ReadinessCheck {
        name: name.to_owned(),
        problem: unless(words),
        note: None,
    };
    let going = view.state != LifecycleState::Running && view.state != LifecycleState::Paused;
    let taken = view.claims.len() + view.cleanup_pending.len();
    let free = view.capacity.saturating_sub(u32::try_from(taken).unwrap_or(u32::MAX));
    let remark =
        if free == 0 { "every slot is taken; the next that is free claims".to_owned() } else { format!("{free} free") };
    vec![
        sources_check(view),
        held("not paused", &[BlockedReason::Paused]),
        ReadinessCheck { name: "stays".to_owned(), problem: going.then(|| why.clone()), note: None },
        held("host is fit", &[BlockedReason::HostUnhealthy]),
        held("services", &[BlockedReason::SidecarDown]),
        held("disk", &[BlockedReason::Disk]),
        held("memory", &[BlockedReason::Memory]),
        ReadinessCheck { name: "slots".to_owned(), problem: None, note: Some(remark) },
    ]
}

/// One source that answers is enough to work.
fn sources_check(view: &WorkerStatus) -> ReadinessCheck {
    let up = view.sources.iter().filter(|source| source.polled_seconds_ago.is_some() && !source.failing).count();
    let of = format!("{up} of {} answer", view.sources.len());
    let troubles = view.sources.iter().filter_map(|source| {
        source.error.as_ref().map(|error| format!("; {}: {}", source.name, error.message.replace(['\n', '\r'], " ")))
    });
    let text = troubles.fold(of, |text, trouble| text + &trouble);
    match up {
        0 => ReadinessCheck { name: "sources".to_owned(), problem: Some(text), note: None },
        _ => ReadinessCheck { name: "sources".to_owned(), problem: None, note: Some(text) },
    }
}
