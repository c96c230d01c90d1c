//! The HTTP routes of a controller: health, metrics, the status page, and commands with a token.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::header::ACCEPT;
use axum::http::{Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use maud::html;

use super::commands::require_token;
use super::{ReadinessCheck, SnapshotFn, StatusRoutes};
use crate::console::controller::{metrics, poison_section, report};
use crate::console::page::{self, Commands, PageContent};
use crate::control::controller_api::{ControllerStatusReply, Inventories};
use journeyman_domain::limits::CONTROL_ANSWER_BYTES_MAX;
use journeyman_platform::http::{BearerToken, HttpListener};
use journeyman_services::controller::status::PoolStatus;

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
        metrics,
        page: Box::new(move |status| {
            let commands = if has_token { Commands::Token("http.token_file") } else { Commands::None };
            page::status_page(report(status), commands)
        }),
    };
    let commands = commands.route_layer(middleware::from_fn(draw_poison));
    listener.serve(routes.into_router().merge(require_token(commands, token))).await
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
