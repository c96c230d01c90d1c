//! HTTP server of a controller: health, metrics, status, pages, and commands by token.
//!
//! | path | serves |
//! | --- | --- |
//! | `/livez` | 200 if the loop of each pool replies in time, even without a broker |
//! | `/readyz` | 200 if every pool is active; `?verbose` lists them |
//! | `/metrics` | OpenMetrics |
//! | `/` | the page, refreshed; `/still` is static |
//! | `/openapi.json` | the API description |
//! | `/v1/commands` | POST: a command |
//! | `/v1/poison` | GET: the poison queue; POST: requeue or discard |
//! | `/status`, `/status.json` | the JSON of `journeyman controller status -o json` |

pub mod commands;
mod metrics;
pub mod openapi;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Response, StatusCode};
use tokio::time::timeout;

use super::openmetrics;
use super::page::controller::CommandButtons;
use super::page::{self, Refresh};
use super::server::{self, HttpListener, ReadinessCheck, Routes, TEXT, readiness_response, response};
use crate::control::controller_api::ControllerStatusReply;
use crate::controller::status::{PoolStatus, Role};
use crate::limits::HTTP_SNAPSHOT_TIMEOUT;
use commands::CommandApi;
pub use metrics::markdown;

pub type ControllerSnapshotFn = dyn Fn() -> ControllerSnapshotFuture + Send + Sync;
pub type ControllerSnapshotFuture = Pin<Box<dyn Future<Output = Option<ControllerStatusReply>> + Send>>;

pub async fn serve(door: HttpListener, look: Arc<ControllerSnapshotFn>, orders: CommandApi) -> Infallible {
    let acts = if orders.token.is_some() { CommandButtons::Shown } else { CommandButtons::Hidden };
    let site = Routes {
        paths: openapi::PATHS,
        hint: "/livez, /readyz?verbose, /metrics, /, /still, /status, /openapi.json",
        auth_routes: orders.into_routes(),
        handler: Box::new(move |path, query| {
            let look = Arc::clone(&look);
            Box::pin(async move { handle_get(&path, query.as_deref(), &*look, acts).await })
        }),
    };
    server::serve(door, site).await
}

async fn handle_get(
    path: &str,
    query: Option<&str>,
    look: &ControllerSnapshotFn,
    acts: CommandButtons,
) -> Response<Body> {
    if path == "/openapi.json" {
        return response(StatusCode::OK, "application/json", format!("{:#}\n", openapi::document()));
    }
    let status = match timeout(HTTP_SNAPSHOT_TIMEOUT, look()).await {
        Ok(Some(status)) => status,
        Ok(None) => return response(StatusCode::SERVICE_UNAVAILABLE, TEXT, "the controller has stopped\n".to_owned()),
        Err(_) => {
            let text = format!("no reply from the controller within {HTTP_SNAPSHOT_TIMEOUT:?}\n");
            return response(StatusCode::SERVICE_UNAVAILABLE, TEXT, text);
        }
    };
    match path {
        "/livez" => response(StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => readiness_response(&readiness_checks(&status), query),
        "/metrics" => match metrics::text(status) {
            Ok(text) => response(StatusCode::OK, openmetrics::CONTENT_TYPE, text),
            Err(_) => response(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "cannot write the metrics\n".to_owned()),
        },
        "/" => page::controller::render(&status, Refresh::Auto, acts, jiff::Timestamp::now()).into_response(),
        "/still" => page::controller::render(&status, Refresh::Never, CommandButtons::Hidden, jiff::Timestamp::now())
            .into_response(),
        _ => {
            let json = serde_json::to_string_pretty(&status).unwrap_or_default();
            response(StatusCode::OK, "application/json", json + "\n")
        }
    }
}

fn readiness_checks(status: &ControllerStatusReply) -> Vec<ReadinessCheck> {
    status.snapshot.pools.iter().map(readiness_check).collect()
}

fn readiness_check(pool: &PoolStatus) -> ReadinessCheck {
    let wrong = pool.role.inactive_reason().map(|why| match &pool.broker.error {
        Some(error) if pool.role == Role::Disconnected => format!("{why}: {error}").replace(['\n', '\r'], " "),
        Some(_) | None => why.to_owned(),
    });
    let remark = Some(format!("{} groups", pool.groups.len()));
    ReadinessCheck { name: format!("pool {}", pool.name), problem: wrong, note: remark }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_has_every_metric() {
        let guide = include_str!("../../guide/controller.md");
        assert!(guide.contains(&markdown()), "in src/guide/controller.md should be:\n{}", markdown());
    }
}
