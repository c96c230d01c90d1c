//! The HTTP routes of a worker: health, metrics and the status page. All of them are read-only.

use std::convert::Infallible;
use std::sync::Arc;

use super::metrics;
use super::page;
use super::status_routes::{ReadinessCheck, SnapshotFn, StatusRoutes};
use crate::control::WorkerStatusReply;
use crate::http::HttpListener;
use crate::worker::status::{BlockedReason, LifecycleState, WorkerStatus};

/// Serves until dropped.
pub async fn serve(listener: HttpListener, snapshot: Arc<SnapshotFn<WorkerStatusReply>>) -> Infallible {
    let routes = StatusRoutes {
        role: "worker",
        snapshot,
        checks: |status| readiness_checks(&status.snapshot),
        // Not the queue's answer: one that boots with this host would get the worker restarted.
        is_started: |status| status.snapshot.sidecars.iter().all(|sidecar| sidecar.up || sidecar.restarts > 0),
        metrics: metrics::text,
        page: Box::new(|status| page::worker::render(status, jiff::Timestamp::now())),
    };
    listener.serve(routes.into_router()).await
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
