//! The controller's end of the control socket. It can be looked at, and told to read its configuration again.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::server::{Refusal, Reload, Reloading, Socket, answer};
use super::{Answer, Order, Ordered};
use crate::controller::Control;
use crate::controller::view::View;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{CONTROL_CONNECTIONS_MAX, CONTROL_TIMEOUT};

/// The socket's name in the folder of the first pool, where no other path is set.
pub const SOCKET: &str = "controller.sock";

/// The socket of the controller whose first pool has this folder.
#[must_use]
pub fn socket_in(folder: &Path) -> PathBuf {
    folder.join(SOCKET)
}

/// Which controller answers, and how it looks. The answer to `GET /v1/controller`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// How it looks.
    #[serde(flatten)]
    pub view: View,
}

/// The controllers of all pools of this process.
#[derive(Debug, Clone)]
pub struct Pools {
    controls: Vec<Control>,
    clock: Clock,
    since: Instant,
}

impl Pools {
    /// These, from now on.
    #[must_use]
    pub fn new(controls: Vec<Control>, clock: Clock) -> Self {
        Self { controls, clock, since: clock.now() }
    }

    /// How they look now; `None` once one of them has gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn look(&self) -> Option<Status> {
        let mut pools = Vec::with_capacity(self.controls.len());
        for control in &self.controls {
            pools.push(control.look().await?);
        }
        let uptime_seconds = self.clock.now().since(self.since).as_secs_f64();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Some(Status { version, pid: std::process::id(), view: View { uptime_seconds, pools } })
    }
}

/// What a connection has.
#[derive(Clone)]
struct Desk {
    pools: Pools,
    reloads: mpsc::Sender<Reloading>,
}

/// Answers until it is dropped; the socket's file goes with it.
pub async fn serve(socket: Socket, pools: Pools, reload: Arc<Reload>) -> Infallible {
    let (reloads, asked) = mpsc::channel(CONTROL_CONNECTIONS_MAX);
    let router = Router::new()
        .route("/v1/controller", get(status))
        .route("/v1/orders", post(order))
        .fallback(async || {
            let text = "a controller answers here; `journeyman controller status` asks it";
            Refusal(StatusCode::NOT_FOUND, text.to_owned())
        })
        .with_state(Desk { pools, reloads });
    answer(socket, router, reload, asked).await
}

fn gone() -> Refusal {
    Refusal(StatusCode::SERVICE_UNAVAILABLE, "the controller has gone".to_owned())
}

async fn status(State(Desk { pools, .. }): State<Desk>) -> Result<Json<Status>, Refusal> {
    let slow =
        |_| Refusal(StatusCode::GATEWAY_TIMEOUT, format!("the controller did not answer in {CONTROL_TIMEOUT:?}"));
    let looked = timeout(CONTROL_TIMEOUT, pools.look()).await.map_err(slow)?;
    Ok(Json(looked.ok_or_else(gone)?))
}

async fn order(
    State(Desk { reloads, .. }): State<Desk>,
    Json(ordered): Json<Ordered>,
) -> Result<Json<Answer>, Refusal> {
    if ordered.order != Order::Reload {
        let text = "a controller can be told to reload, and nothing else; TERM ends it, and its workers go on";
        return Err(Refusal(StatusCode::BAD_REQUEST, text.to_owned()));
    }
    let (ask, said) = oneshot::channel();
    reloads.send(ask).await.map_err(|_| gone())?;
    let said = said.await.map_err(|_| gone())?.map_err(|why| Refusal(StatusCode::UNPROCESSABLE_ENTITY, why))?;
    Ok(Json(Answer { said }))
}
