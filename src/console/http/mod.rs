//! The read-only routes that workers and controllers share: health, metrics and the status as JSON.

pub mod controller;
pub mod worker;

use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use tokio::time::timeout;

pub use crate::console::app::targets::SnapshotFn;
use crate::console::openmetrics::{self, Metric};
use journeyman_domain::limits::HTTP_SNAPSHOT_TIMEOUT;

pub(super) struct StatusRoutes<S> {
    /// "worker" or "controller".
    pub(super) role: &'static str,
    pub(super) snapshot: Arc<SnapshotFn<S>>,
    pub(super) checks: fn(&S) -> Vec<ReadinessCheck>,
    pub(super) is_started: fn(&S) -> bool,
    pub(super) metrics: fn(&S) -> Vec<Metric>,
}

pub(super) struct ReadinessCheck {
    pub(super) name: String,
    pub(super) problem: Option<String>,
    pub(super) note: Option<String>,
}

type Unavailable = (StatusCode, String);

impl<S: Serialize + Send + Sync + 'static> StatusRoutes<S> {
    pub(super) fn into_router(self) -> Router {
        Router::new()
            .route("/livez", get(Self::liveness))
            .route("/startupz", get(Self::startup))
            .route("/readyz", get(Self::readiness))
            .route("/metrics", get(Self::metrics))
            .route("/status.json", get(Self::json))
            .method_not_allowed_fallback(async || {
                (StatusCode::METHOD_NOT_ALLOWED, "method not allowed: this endpoint is read-only\n")
            })
            .fallback(async || {
                (StatusCode::NOT_FOUND, "paths: /, /livez, /startupz, /readyz, /metrics, /status.json\n")
            })
            .with_state(Arc::new(self))
    }

    async fn take_snapshot(&self) -> Result<S, Unavailable> {
        match timeout(HTTP_SNAPSHOT_TIMEOUT, (self.snapshot)()).await {
            Ok(Some(status)) => Ok(status),
            Ok(None) => Err(format!("the {} has exited\n", self.role)),
            Err(_) => Err(format!("the {} did not answer within {HTTP_SNAPSHOT_TIMEOUT:?}\n", self.role)),
        }
        .map_err(|text| (StatusCode::SERVICE_UNAVAILABLE, text))
    }

    async fn liveness(State(routes): State<Arc<Self>>) -> Result<&'static str, Unavailable> {
        routes.take_snapshot().await.map(|_| "ok\n")
    }

    async fn startup(State(routes): State<Arc<Self>>) -> Result<&'static str, Unavailable> {
        let is_started = (routes.is_started)(&routes.take_snapshot().await?);
        if is_started { Ok("started\n") } else { Err((StatusCode::SERVICE_UNAVAILABLE, "not started\n".to_owned())) }
    }

    async fn readiness(State(routes): State<Arc<Self>>) -> Result<String, Unavailable> {
        let checks = (routes.checks)(&routes.take_snapshot().await?);
        let ready = checks.iter().all(|check| check.problem.is_none());
        let mut text = String::new();
        for check in &checks {
            // Writing to a String cannot fail.
            _ = match (&check.problem, &check.note) {
                (Some(problem), _) => writeln!(text, "[-] {}: {problem}", check.name),
                (None, Some(note)) => writeln!(text, "[+] {}: {note}", check.name),
                (None, None) => writeln!(text, "[+] {}", check.name),
            };
        }
        if ready { Ok(text + "ready\n") } else { Err((StatusCode::SERVICE_UNAVAILABLE, text + "not ready\n")) }
    }

    async fn metrics(State(routes): State<Arc<Self>>) -> Result<Response, Unavailable> {
        let text = openmetrics::text(&(routes.metrics)(&routes.take_snapshot().await?));
        Ok(([(CONTENT_TYPE, openmetrics::CONTENT_TYPE)], text).into_response())
    }

    async fn json(State(routes): State<Arc<Self>>) -> Result<Json<S>, Unavailable> {
        routes.take_snapshot().await.map(Json)
    }
}
