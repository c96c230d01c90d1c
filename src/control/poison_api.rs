//! Requests about the poison queue, by the control socket or HTTP.

use std::collections::BTreeMap;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::controller_api::PoolHandles;
use super::worker_api::ApiError;
use crate::controller::poison_queue::{PoisonAction, PoisonList, PoisonOutcome, PoisonSelection};
use journeyman_domain::limits::CONTROLLER_POISON_TIMEOUT;

pub type Inventories = BTreeMap<String, PoisonList>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoisonActionRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    pub selection: PoisonSelection,
    pub action: PoisonAction,
    pub by: String,
}

impl PoisonActionRequest {
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        serde_json::from_slice(body).map_err(|error| {
            let text = format!(
                "not a poison request: `selection` is \"all\" or {{\"ids\": [ID, …]}}, `action` is \"requeue\" or \"discard\": {error}"
            );
            ApiError(StatusCode::BAD_REQUEST, text)
        })
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PoolQuery {
    pool: Option<String>,
}

pub(super) async fn handle_list(
    State(pools): State<PoolHandles>,
    Query(query): Query<PoolQuery>,
) -> Result<Json<Inventories>, ApiError> {
    let mut inventories = Inventories::new();
    for handle in pools.select(query.pool.as_deref())? {
        inventories.insert(handle.pool.clone(), with_timeout(handle.poison.list()).await?);
    }
    Ok(Json(inventories))
}

pub(super) async fn handle_action(
    State(pools): State<PoolHandles>,
    body: Bytes,
) -> Result<Json<PoisonOutcome>, ApiError> {
    let PoisonActionRequest { pool, selection, action, by } = PoisonActionRequest::parse(&body)?;
    let handle = pools.select_one(pool.as_deref())?;
    let poison = handle.poison.clone();
    // Otherwise a request that is copied and not acknowledged would run twice.
    #[expect(clippy::disallowed_methods, reason = "it continues when its caller has left")]
    let resolving = tokio::spawn(async move { poison.resolve(&selection, action, &by).await });
    with_timeout(async { resolving.await.unwrap_or_else(|error| Err(error.to_string())) }).await.map(Json)
}

async fn with_timeout<T>(request: impl Future<Output = Result<T, String>>) -> Result<T, ApiError> {
    match timeout(CONTROLLER_POISON_TIMEOUT * 2, request).await {
        Ok(result) => result.map_err(|why| ApiError(StatusCode::BAD_GATEWAY, why)),
        Err(_) => {
            Err(ApiError(StatusCode::GATEWAY_TIMEOUT, "the poison queue could not be scanned in time".to_owned()))
        }
    }
}
