//! Health, metrics and state of a controller over HTTP, and orders from who has the token.
//!
//! | path | answers with |
//! | --- | --- |
//! | `/livez` | 200 where the loop of each pool answers in time, with a broker or without |
//! | `/readyz` | 200 where it controls every pool; `?verbose` names each |
//! | `/metrics` | OpenMetrics |
//! | `/` | the page, which refreshes itself; `/still` does not |
//! | `/openapi.json` | all of this, described |
//! | `/v1/orders` | what came of an order that was posted |
//! | `/v1/poison` | what was put aside; posted to it: what came of that |
//! | `/status`, `/status.json` | JSON, as `journeyman controller status -o json` shows it |

mod metrics;
pub mod openapi;
pub mod orders;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Response, StatusCode};
use tokio::time::timeout;

use super::door::{self, Check, Door, Site, TEXT, ready, said};
use super::family;
use super::page::controller::Acts;
use super::page::{self, Refresh};
use crate::control::controller::Status;
use crate::controller::view::{Pool, Role};
use crate::limits::HTTP_LOOK_TIMEOUT;
pub use metrics::markdown;
use orders::Orders;

/// Looks at the controller: `None` once it has gone.
pub type Look = dyn Fn() -> Looking + Send + Sync;
/// A look that is under way.
pub type Looking = Pin<Box<dyn Future<Output = Option<Status>> + Send>>;

/// Answers until it is dropped.
pub async fn serve(door: Door, look: Arc<Look>, orders: Orders) -> Infallible {
    let acts = if orders.token.is_some() { Acts::Possible } else { Acts::No };
    let site = Site {
        paths: openapi::PATHS,
        hint: "/livez, /readyz?verbose, /metrics, /, /still, /status, /openapi.json",
        guarded: orders.guarded(),
        answer: Box::new(move |path, query| {
            let look = Arc::clone(&look);
            Box::pin(async move { answer(&path, query.as_deref(), &*look, acts).await })
        }),
    };
    door::serve(door, site).await
}

async fn answer(path: &str, query: Option<&str>, look: &Look, acts: Acts) -> Response<Body> {
    if path == "/openapi.json" {
        return said(StatusCode::OK, "application/json", format!("{:#}\n", openapi::document()));
    }
    let status = match timeout(HTTP_LOOK_TIMEOUT, look()).await {
        Ok(Some(status)) => status,
        Ok(None) => return said(StatusCode::SERVICE_UNAVAILABLE, TEXT, "the controller has gone\n".to_owned()),
        Err(_) => {
            let text = format!("the controller's loop did not answer within {HTTP_LOOK_TIMEOUT:?}\n");
            return said(StatusCode::SERVICE_UNAVAILABLE, TEXT, text);
        }
    };
    match path {
        "/livez" => said(StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => ready(&checks(&status), query),
        "/metrics" => match metrics::text(status) {
            Ok(text) => said(StatusCode::OK, family::CONTENT_TYPE, text),
            Err(_) => said(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "the metrics cannot be written\n".to_owned()),
        },
        "/" => page::controller::show(&status, Refresh::ByItself, acts, jiff::Timestamp::now()).answer(),
        "/still" => page::controller::show(&status, Refresh::Never, Acts::No, jiff::Timestamp::now()).answer(),
        _ => {
            let json = serde_json::to_string_pretty(&status).unwrap_or_default();
            said(StatusCode::OK, "application/json", json + "\n")
        }
    }
}

fn checks(status: &Status) -> Vec<Check> {
    status.view.pools.iter().map(check).collect()
}

fn check(pool: &Pool) -> Check {
    let wrong = pool.role.rests().map(|why| match &pool.broker.error {
        Some(error) if pool.role == Role::Disconnected => format!("{why}: {error}").replace(['\n', '\r'], " "),
        Some(_) | None => why.to_owned(),
    });
    let remark = Some(format!("{} groups", pool.groups.len()));
    Check { name: format!("pool {}", pool.name), wrong, remark }
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
