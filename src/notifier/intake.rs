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
use tokio::sync::{Notify, Semaphore};

use super::event::Event;
use super::pattern::TypePattern;
use super::stamp;
use super::store::{Added, Counts, Store, StoreFailure};
use crate::host::crash_points::crash_point;
use crate::http::BearerToken;
use crate::limits::{NOTIFIER_BATCH_MAX, NOTIFIER_BODY_BYTES_MAX, NOTIFIER_CALLS_MAX};

pub(super) struct Intake {
    store: Store,
    token: BearerToken,
    /// The types of events that each endpoint wants.
    wanted: BTreeMap<Arc<str>, Vec<TypePattern>>,
    calls: Semaphore,
    stored: Arc<Notify>,
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

impl Intake {
    pub(super) fn new(
        store: Store,
        token: BearerToken,
        wanted: BTreeMap<Arc<str>, Vec<TypePattern>>,
        stored: Arc<Notify>,
    ) -> Self {
        Self { store, token, wanted, calls: Semaphore::new(NOTIFIER_CALLS_MAX), stored }
    }

    pub(super) fn routes(self) -> Router {
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

    fn endpoints_for(&self, event: &Event) -> Vec<Arc<str>> {
        let wants = |patterns: &[TypePattern]| patterns.iter().any(|pattern| pattern.matches(&event.r#type));
        self.wanted.iter().filter(|(_, patterns)| wants(patterns)).map(|(name, _)| Arc::clone(name)).collect()
    }
}

/// One event, or an array of them.
fn parse(body: &[u8]) -> Result<Vec<Event>, String> {
    // An untagged enum would lose the bytes of the data.
    let is_array = body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    let place = |error: serde_json::Error| format!("invalid event at line {}, column {}", error.line(), error.column());
    let events: Vec<Event> = if is_array {
        serde_json::from_slice(body).map_err(place)?
    } else {
        vec![serde_json::from_slice(body).map_err(place)?]
    };
    if events.is_empty() || events.len() > NOTIFIER_BATCH_MAX {
        return Err(format!("{} events: a call has 1 to {NOTIFIER_BATCH_MAX}", events.len()));
    }
    for (index, event) in events.iter().enumerate() {
        event.check().map_err(|error| format!("event {index}: {error}"))?;
    }
    Ok(events)
}

async fn accept(State(intake): State<Arc<Intake>>, headers: HeaderMap, body: Bytes) -> Result<Response, Refused> {
    intake.authenticate(&headers)?;
    let Ok(_permit) = intake.calls.try_acquire() else {
        return Err(Refused(StatusCode::TOO_MANY_REQUESTS, "too many calls at once; retry in a second".to_owned()));
    };
    let events = parse(&body).map_err(|message| Refused(StatusCode::BAD_REQUEST, message))?;
    let events = events.into_iter().map(|event| {
        let endpoints = intake.endpoints_for(&event);
        (event, endpoints)
    });
    let added = intake.store.add(events.collect(), stamp()).await?;
    crash_point("notifier-stored");
    intake.stored.notify_one();
    let duplicates = added.iter().filter(|one| **one == Added::Duplicate).count();
    let accepted = added.len() - duplicates;
    Ok((StatusCode::ACCEPTED, Json(json!({ "accepted": accepted, "duplicates": duplicates }))).into_response())
}

async fn status(State(intake): State<Arc<Intake>>, headers: HeaderMap) -> Result<Response, Refused> {
    intake.authenticate(&headers)?;
    let mut endpoints = BTreeMap::new();
    for name in intake.wanted.keys() {
        let (counts, health) = (intake.store.counts(name).await?, intake.store.health(name).await?);
        endpoints.insert(&**name, EndpointStatus { counts, health });
    }
    Ok(Json(json!({ "endpoints": endpoints })).into_response())
}
