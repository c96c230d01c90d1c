//! Takes events over HTTP, and answers once they are on disk.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Serialize;
use serde_json::json;
use tokio::sync::Semaphore;

use super::{Intake, parse_events};
use crate::http::BearerToken;
use crate::limits::{NOTIFIER_BODY_BYTES_MAX, NOTIFIER_CALLS_MAX};
use crate::notifier::store::{Added, Counts, StoreFailure};

pub(in crate::notifier) struct Api {
    intake: Arc<Intake>,
    token: BearerToken,
    calls: Semaphore,
}

/// Why a call is refused, in words for its caller.
struct Refused(StatusCode, String);

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let Self(status, message) = self;
        let body = Json(json!({ "message": message }));
        match status {
            StatusCode::UNAUTHORIZED => (status, [(header::WWW_AUTHENTICATE, "Bearer")], body).into_response(),
            StatusCode::TOO_MANY_REQUESTS => (status, [(header::RETRY_AFTER, "1")], body).into_response(),
            _ => (status, body).into_response(),
        }
    }
}

impl From<StoreFailure> for Refused {
    fn from(failure: StoreFailure) -> Self {
        let status = match failure {
            StoreFailure::DiskFull => StatusCode::INSUFFICIENT_STORAGE,
            StoreFailure::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(status, failure.to_string())
    }
}

#[derive(Serialize)]
struct EndpointStatus {
    #[serde(flatten)]
    counts: Counts,
    health: crate::domain::lane::endpoint::EndpointHealth,
}

impl Api {
    pub(in crate::notifier) fn new(intake: Arc<Intake>, token: BearerToken) -> Self {
        Self { intake, token, calls: Semaphore::new(NOTIFIER_CALLS_MAX) }
    }

    pub(in crate::notifier) fn routes(self) -> Router {
        Router::new()
            .route("/v1/events", post(accept))
            .route("/v1/status", get(status))
            .layer(DefaultBodyLimit::max(NOTIFIER_BODY_BYTES_MAX))
            .with_state(Arc::new(self))
    }

    fn authenticate(&self, headers: &HeaderMap) -> Result<(), Refused> {
        let message = match self.token.is_in(headers) {
            Some(true) => return Ok(()),
            Some(false) => "wrong token: expected that of `notifier.token_file`",
            None => "token required: `Authorization: Bearer TOKEN` with that of `notifier.token_file`",
        };
        Err(Refused(StatusCode::UNAUTHORIZED, message.to_owned()))
    }
}

async fn accept(State(api): State<Arc<Api>>, headers: HeaderMap, body: Bytes) -> Result<Response, Refused> {
    api.authenticate(&headers)?;
    let Ok(_permit) = api.calls.try_acquire() else {
        return Err(Refused(StatusCode::TOO_MANY_REQUESTS, "too many calls at once; retry in a second".to_owned()));
    };
    let events = parse_events(&body).map_err(|message| Refused(StatusCode::BAD_REQUEST, message))?;
    let added = api.intake.accept(events).await?;
    let duplicates = added.iter().filter(|one| **one == Added::Duplicate).count();
    let accepted = added.len() - duplicates;
    Ok((StatusCode::ACCEPTED, Json(json!({ "accepted": accepted, "duplicates": duplicates }))).into_response())
}

async fn status(State(api): State<Arc<Api>>, headers: HeaderMap) -> Result<Response, Refused> {
    api.authenticate(&headers)?;
    let mut endpoints = BTreeMap::new();
    for name in api.intake.wanted.keys() {
        let (counts, health) = (api.intake.store.counts(name).await?, api.intake.store.health(name).await?);
        endpoints.insert(&**name, EndpointStatus { counts, health });
    }
    Ok(Json(json!({ "endpoints": endpoints })).into_response())
}
