//! The controller's end of the control socket: it can be looked at, and told what people want of its pools. What comes by HTTP
//! is understood by the same [`Pools::order`].

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRef, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use super::Answer;
use super::poison;
use super::server::{Refusal, Reload, Reloading, Socket, answer};
use crate::controller::Control;
use crate::controller::orders::{Order, Refused};
use crate::controller::view::View;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{CONTROL_CONNECTIONS_MAX, CONTROL_TIMEOUT};
use crate::worker::Note;

/// The socket's name in the folder of the first pool, where no other path is set.
pub const SOCKET: &str = "controller.sock";

/// The socket of the controller whose first pool has this folder.
#[must_use]
pub fn socket_in(folder: &Path) -> PathBuf {
    folder.join(SOCKET)
}

/// Which controller answers, and how it looks. The answer to `GET /v1/controller`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// How it looks.
    #[serde(flatten)]
    pub view: View,
}

/// What `POST /v1/orders` takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Ordered {
    /// Which pool; absent where there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// What to do.
    pub order: Order,
    /// Who says so, and why.
    #[serde(default = "somebody")]
    pub note: Note,
}

fn somebody() -> Note {
    Note::of("somebody")
}

impl Ordered {
    /// Reads one.
    ///
    /// # Errors
    ///
    /// What is wrong with it, for people.
    pub fn read(body: &[u8]) -> Result<Self, Refusal> {
        serde_json::from_slice(body).map_err(|error| {
            let text = format!(
                "a controller can be told to pause, to resume, to scale a group, to drain a worker and to retry; this is none of \
                 these: {error}"
            );
            Refusal(StatusCode::BAD_REQUEST, text)
        })
    }
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

impl Pools {
    /// Gives an order to one of them.
    ///
    /// # Errors
    ///
    /// Why it is not obeyed.
    pub async fn order(&self, ordered: Ordered) -> Result<Answer, Refusal> {
        let Ordered { pool, order, note } = ordered;
        let names = || self.controls.iter().map(|control| control.pool.as_str()).collect::<Vec<_>>().join(", ");
        let control = match (&pool, &*self.controls) {
            (Some(name), controls) => controls.iter().find(|control| control.pool == *name).ok_or_else(|| {
                Refusal(StatusCode::NOT_FOUND, format!("there is no pool {name:?}; there are: {}", names()))
            })?,
            (None, [only]) => only,
            (None, _) => {
                return Err(Refusal(StatusCode::BAD_REQUEST, format!("`pool` has to say which is meant: {}", names())));
            }
        };
        let by = if note.text.is_empty() { note.by } else { format!("{}: {}", note.by, note.text) };
        let told = timeout(CONTROL_TIMEOUT, control.order(order, by)).await.map_err(slow)?.ok_or_else(gone)?;
        told.map(|said| Answer { said }).map_err(|refused| match refused {
            Refused::Missing(text) => Refusal(StatusCode::NOT_FOUND, text),
            Refused::Senseless(text) => Refusal(StatusCode::BAD_REQUEST, text),
            Refused::Untimely(text) => Refusal(StatusCode::CONFLICT, text),
        })
    }

    /// The one of this name, or all.
    pub(super) fn named(&self, name: Option<&str>) -> Result<Vec<&Control>, Refusal> {
        let named: Vec<&Control> =
            self.controls.iter().filter(|control| name.is_none_or(|name| control.pool == name)).collect();
        if named.is_empty() {
            let pools = self.controls.iter().map(|control| control.pool.as_str()).collect::<Vec<_>>().join(", ");
            let text = format!("there is no pool {}; there is {pools}", name.unwrap_or_default());
            return Err(Refusal(StatusCode::NOT_FOUND, text));
        }
        Ok(named)
    }
}

/// What a connection has.
#[derive(Clone)]
struct Desk {
    pools: Pools,
    reloads: mpsc::Sender<Reloading>,
}

impl FromRef<Desk> for Pools {
    fn from_ref(desk: &Desk) -> Self {
        desk.pools.clone()
    }
}

/// Answers until it is dropped; the socket's file goes with it.
pub async fn serve(socket: Socket, pools: Pools, reload: Arc<Reload>) -> Infallible {
    let (reloads, asked) = mpsc::channel(CONTROL_CONNECTIONS_MAX);
    let router = Router::new()
        .route("/v1/controller", get(status))
        .route("/v1/orders", post(order))
        .route("/v1/poison", get(poison::see).post(poison::settle))
        .route("/v1/poison/body", get(poison::body))
        .fallback(async || {
            let text = "a controller answers here; `journeyman controller status` asks it";
            Refusal(StatusCode::NOT_FOUND, text.to_owned())
        })
        .with_state(Desk { pools, reloads });
    answer(socket, router, reload, asked).await
}

pub(super) fn gone() -> Refusal {
    Refusal(StatusCode::SERVICE_UNAVAILABLE, "the controller has gone".to_owned())
}

fn slow(_: Elapsed) -> Refusal {
    Refusal(StatusCode::GATEWAY_TIMEOUT, format!("the controller did not answer in {CONTROL_TIMEOUT:?}"))
}

async fn status(State(Desk { pools, .. }): State<Desk>) -> Result<Json<Status>, Refusal> {
    let looked = timeout(CONTROL_TIMEOUT, pools.look()).await.map_err(slow)?;
    Ok(Json(looked.ok_or_else(gone)?))
}

async fn order(State(Desk { reloads, pools }): State<Desk>, body: Bytes) -> Result<Json<Answer>, Refusal> {
    if !is_reload(&body) {
        return Ok(Json(pools.order(Ordered::read(&body)?).await?));
    }
    let (ask, said) = oneshot::channel();
    reloads.send(ask).await.map_err(|_| gone())?;
    let said = said.await.map_err(|_| gone())?.map_err(|why| Refusal(StatusCode::UNPROCESSABLE_ENTITY, why))?;
    Ok(Json(Answer { said }))
}

/// Whether it is what `journeyman reload` tells a worker.
fn is_reload(body: &[u8]) -> bool {
    serde_json::from_slice::<super::Ordered>(body).is_ok_and(|ordered| ordered.order == super::Order::Reload)
}
