//! Takes events over HTTP, and answers once they are on disk.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use serde_json::json;

use super::{Api, Refused};
use crate::limits::NOTIFIER_BATCH_MAX;
use crate::notifier::event::Event;
use crate::notifier::store::Added;

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

pub(super) async fn accept(State(api): State<Arc<Api>>, headers: HeaderMap, body: Bytes) -> Result<Response, Refused> {
    api.may_write(&headers)?;
    let Ok(_permit) = api.calls.try_acquire() else {
        return Err(Refused(StatusCode::TOO_MANY_REQUESTS, "too many calls at once; retry in a second".to_owned()));
    };
    let counters = &api.intake.counters;
    let events = parse(&body).map_err(|message| {
        counters.on_refused("http");
        Refused(StatusCode::BAD_REQUEST, message)
    })?;
    let added = api.intake.accept(events).await?;
    let duplicates = added.iter().filter(|one| **one == Added::Duplicate).count();
    let accepted = added.len() - duplicates;
    counters.on_taken("http", accepted, duplicates);
    Ok((StatusCode::ACCEPTED, Json(json!({ "accepted": accepted, "duplicates": duplicates }))).into_response())
}
