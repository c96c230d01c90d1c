//! The HTTP routes of a controller: health, metrics and the status page. All of them are read-only.

mod metrics;

use std::convert::Infallible;
use std::sync::Arc;

use super::page;
use super::status_routes::{ReadinessCheck, SnapshotFn, StatusRoutes};
use crate::control::controller_api::ControllerStatusReply;
use crate::controller::status::PoolStatus;
use crate::http::HttpListener;
pub use metrics::markdown;

/// Serves until dropped.
pub async fn serve(listener: HttpListener, snapshot: Arc<SnapshotFn<ControllerStatusReply>>) -> Infallible {
    let routes = StatusRoutes {
        role: "controller",
        snapshot,
        checks: |status| status.pools.iter().map(readiness_check).collect(),
        is_started: |_| true,
        metrics: metrics::text,
        page: |status| page::controller::render(status, jiff::Timestamp::now()),
    };
    listener.serve(routes.into_router()).await
}

fn readiness_check(pool: &PoolStatus) -> ReadinessCheck {
    let problem = pool.inactive_reason().map(|reason| reason.replace(['\n', '\r'], " "));
    let note = Some(format!("{} groups", pool.groups.len()));
    ReadinessCheck { name: format!("pool {}", pool.name), problem, note }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_has_every_metric() {
        let guide = include_str!("../guide/controller.md");
        assert!(guide.contains(&markdown()), "in src/guide/controller.md should be:\n{}", markdown());
    }
}
