//! The HTTP routes of a controller: health, metrics, the status page, and commands with a token.

mod commands;
mod metrics;

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;

use super::page;
use super::page::controller::CommandButtons;
use super::status_routes::{ReadinessCheck, SnapshotFn, StatusRoutes};
use crate::control::controller_api::ControllerStatusReply;
use crate::controller::status::PoolStatus;
use commands::require_token;
use journeyman_platform::http::{BearerToken, HttpListener};
pub use metrics::markdown;

/// Serves until dropped. `commands` need the token.
pub async fn serve(
    listener: HttpListener,
    snapshot: Arc<SnapshotFn<ControllerStatusReply>>,
    token: Option<BearerToken>,
    commands: Router,
) -> Infallible {
    let has_token = token.is_some();
    let routes = StatusRoutes {
        role: "controller",
        snapshot,
        checks: |status| status.pools.iter().map(readiness_check).collect(),
        is_started: |_| true,
        metrics: metrics::text,
        page: Box::new(move |status| {
            let buttons = if has_token { CommandButtons::Shown } else { CommandButtons::Hidden };
            page::controller::render(status, buttons, jiff::Timestamp::now())
        }),
    };
    listener.serve(routes.into_router().merge(require_token(commands, token))).await
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
        let guide = include_str!("../../guide/controller.md");
        assert!(guide.contains(&markdown()), "in src/guide/controller.md should be:\n{}", markdown());
    }
}
