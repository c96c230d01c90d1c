//! Requests about the poison queue, by the control socket or HTTP.

use std::collections::BTreeMap;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::controller_api::{PoolHandles, controller_exited};
use super::worker_api::ApiError;
use crate::controller::poison_queue::{PoisonAction, PoisonError, PoisonList, PoisonOutcome, PoisonSelection};
use crate::limits::CONTROLLER_POISON_TIMEOUT;

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

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PoisonedRequestQuery {
    pool: Option<String>,
    id: String,
}

impl PoolHandles {
    pub async fn inventories(&self, pool: Option<&str>) -> Result<Inventories, ApiError> {
        let mut inventories = Inventories::new();
        for control in self.select(pool)? {
            inventories.insert(control.pool.clone(), with_timeout(control.list_poison()).await?);
        }
        Ok(inventories)
    }

    pub async fn apply_poison_action(
        &self,
        PoisonActionRequest { pool, selection, action, by }: PoisonActionRequest,
    ) -> Result<PoisonOutcome, ApiError> {
        with_timeout(self.select_one(pool.as_deref())?.resolve_poison(selection, action, by)).await
    }
}

pub(super) async fn handle_list(
    State(pools): State<PoolHandles>,
    Query(of): Query<PoolQuery>,
) -> Result<Json<Inventories>, ApiError> {
    pools.inventories(of.pool.as_deref()).await.map(Json)
}

pub(super) async fn handle_body(
    State(pools): State<PoolHandles>,
    Query(one): Query<PoisonedRequestQuery>,
) -> Result<Vec<u8>, ApiError> {
    with_timeout(pools.select_one(one.pool.as_deref())?.poison_body(&one.id)).await
}

pub(super) async fn handle_action(
    State(pools): State<PoolHandles>,
    body: Bytes,
) -> Result<Json<PoisonOutcome>, ApiError> {
    pools.apply_poison_action(PoisonActionRequest::parse(&body)?).await.map(Json)
}

async fn with_timeout<T>(asked: impl Future<Output = Option<Result<T, PoisonError>>>) -> Result<T, ApiError> {
    let limit = CONTROLLER_POISON_TIMEOUT * 2;
    let slow = |_| ApiError(StatusCode::GATEWAY_TIMEOUT, format!("the controller did not answer in {limit:?}"));
    let answered = timeout(limit, asked).await.map_err(slow)?.ok_or_else(controller_exited)?;
    answered.map_err(|why| {
        let status = match &why {
            PoisonError::NotFound(_) => StatusCode::NOT_FOUND,
            PoisonError::NotActive(_) | PoisonError::NotScanned(_) => StatusCode::CONFLICT,
            PoisonError::Failed(_) => StatusCode::BAD_GATEWAY,
        };
        ApiError(status, why.to_string())
    })
}
