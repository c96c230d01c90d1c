//! Takes events over HTTP, and answers once they are on disk.

use std::error::Error as _;

use axum::Json;
use axum::body::{Body, HttpBody as _, to_bytes};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use http_body_util::LengthLimitError;
use serde_json::json;

use super::{Publisher, Refused};
use crate::notifier::intake::parse_events;
use journeyman_domain::limits::NOTIFIER_BODY_BYTES_MAX;

pub(super) async fn accept(Publisher(api): Publisher, body: Body) -> Result<Response, Refused> {
    let declared = body.size_hint().upper();
    let bytes = declared.map_or(NOTIFIER_BODY_BYTES_MAX, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    if bytes > NOTIFIER_BODY_BYTES_MAX {
        let message = format!("a call has at most {NOTIFIER_BODY_BYTES_MAX} bytes; send fewer events at once");
        return Err(Refused(StatusCode::PAYLOAD_TOO_LARGE, message));
    }
    let Ok(_share) = api.bodies.try_acquire_many(u32::try_from(bytes).unwrap_or(u32::MAX)) else {
        return Err(Refused(StatusCode::TOO_MANY_REQUESTS, "too many calls at once; retry in a second".to_owned()));
    };
    let unread = |error: axum::Error| {
        let is_large = error.source().is_some_and(|source| source.is::<LengthLimitError>());
        let status = if is_large { StatusCode::PAYLOAD_TOO_LARGE } else { StatusCode::REQUEST_TIMEOUT };
        Refused(status, format!("cannot read the body of the call: {error}"))
    };
    let body = to_bytes(body, NOTIFIER_BODY_BYTES_MAX).await.map_err(unread)?;
    let events = parse_events(&body).map_err(|message| {
        api.intake.counters.on_refused("http");
        Refused(StatusCode::BAD_REQUEST, message)
    })?;
    let (accepted, duplicates) = api.intake.take("http", events).await?;
    Ok((StatusCode::ACCEPTED, Json(json!({ "accepted": accepted, "duplicates": duplicates }))).into_response())
}
