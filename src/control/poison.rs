//! What was put aside in a pool, on the control socket of its controller and, with the token, over HTTP: seen, tried once more, dropped.

use std::collections::BTreeMap;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::controller::{Pools, gone};
use super::server::Refusal;
use crate::controller::Control;
use crate::controller::inventory::{Fate, Inventory, Settled, Unsaid, Which};
use crate::limits::CONTROLLER_POISON_TIME;

/// The answer to `GET /v1/poison`: what was put aside, by the name of its pool.
pub type Inventories = BTreeMap<String, Inventory>;

/// What `POST /v1/poison` takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Settle {
    /// The pool; it may be left out where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Which requests.
    pub which: Which,
    /// What becomes of them.
    pub fate: Fate,
    /// Who says so.
    pub by: String,
}

impl Settle {
    /// Reads one.
    ///
    /// # Errors
    ///
    /// What is wrong with it, for people.
    pub fn read(body: &[u8]) -> Result<Self, Refusal> {
        serde_json::from_slice(body).map_err(|error| {
            let text = format!(
                "of what was put aside `which` is \"all\" or {{\"these\": [ID, …]}}, and its `fate` to be \"requeue\" or \"drop\"; this is \
                 none of these: {error}"
            );
            Refusal(StatusCode::BAD_REQUEST, text)
        })
    }
}

/// Which pool.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Of {
    pool: Option<String>,
}

/// Which request.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct One {
    pool: Option<String>,
    id: String,
}

impl Pools {
    /// What was put aside in the pool of this name, or in all of them.
    ///
    /// # Errors
    ///
    /// Why that cannot be said.
    pub async fn inventories(&self, pool: Option<&str>) -> Result<Inventories, Refusal> {
        let mut inventories = Inventories::new();
        for control in self.named(pool)? {
            inventories.insert(control.pool.clone(), in_time(control.inventory()).await?);
        }
        Ok(inventories)
    }

    /// Has requests tried once more, or dropped.
    ///
    /// # Errors
    ///
    /// Why it is not done. Some may be done by then.
    pub async fn settle(&self, Settle { pool, which, fate, by }: Settle) -> Result<Settled, Refusal> {
        in_time(only(self, pool.as_deref())?.settle(which, fate, by)).await
    }
}

pub(super) async fn see(State(pools): State<Pools>, Query(of): Query<Of>) -> Result<Json<Inventories>, Refusal> {
    pools.inventories(of.pool.as_deref()).await.map(Json)
}

pub(super) async fn body(State(pools): State<Pools>, Query(one): Query<One>) -> Result<Vec<u8>, Refusal> {
    in_time(only(&pools, one.pool.as_deref())?.body(&one.id)).await
}

pub(super) async fn settle(State(pools): State<Pools>, body: Bytes) -> Result<Json<Settled>, Refusal> {
    pools.settle(Settle::read(&body)?).await.map(Json)
}

fn only<'a>(pools: &'a Pools, name: Option<&str>) -> Result<&'a Control, Refusal> {
    let mut named = pools.named(name)?.into_iter();
    match (named.next(), named.next()) {
        (Some(control), None) => Ok(control),
        _ => Err(Refusal(StatusCode::BAD_REQUEST, "there are several pools: name one of them".to_owned())),
    }
}

async fn in_time<T>(asked: impl Future<Output = Option<Result<T, Unsaid>>>) -> Result<T, Refusal> {
    let limit = CONTROLLER_POISON_TIME * 2;
    let slow = |_| Refusal(StatusCode::GATEWAY_TIMEOUT, format!("the controller did not answer in {limit:?}"));
    let answered = timeout(limit, asked).await.map_err(slow)?.ok_or_else(gone)?;
    answered.map_err(|why| {
        let status = match &why {
            Unsaid::NoneSuch(_) => StatusCode::NOT_FOUND,
            Unsaid::NotHere(_) | Unsaid::NotReached(_) => StatusCode::CONFLICT,
            Unsaid::Failed(_) => StatusCode::BAD_GATEWAY,
        };
        Refusal(status, why.to_string())
    })
}
