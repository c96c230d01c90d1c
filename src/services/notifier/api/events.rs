//! Takes events over HTTP, and answers once they are on disk.

use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde_json::json;

use super::{Refused, Writer};
use crate::notifier::intake::parse_events;

pub(super) async fn accept(Writer(api): Writer, body: Bytes) -> Result<Response, Refused> {
    let Ok(_permit) = api.calls.try_acquire() else {
        return Err(Refused(StatusCode::TOO_MANY_REQUESTS, "too many calls at once; retry in a second".to_owned()));
    };
    let events = parse_events(&body).map_err(|message| {
        api.intake.counters.on_refused("http");
        Refused(StatusCode::BAD_REQUEST, message)
    })?;
    let (accepted, duplicates) = api.intake.take("http", events).await?;
    Ok((StatusCode::ACCEPTED, Json(json!({ "accepted": accepted, "duplicates": duplicates }))).into_response())
}
