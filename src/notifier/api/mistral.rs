//! The list of unavailable URLs, and their redelivery, as users of Mistral's notifier call them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use reqwest::Url;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Api, Refused};
use crate::notifier::mistral::is_target;
use crate::notifier::store::EndpointChange;
use journeyman_platform::host::clock::stamp;

/// Those that get nothing, and those whose last attempt has failed.
pub(super) async fn unavailable(State(api): State<Arc<Api>>, headers: HeaderMap) -> Result<Json<Value>, Refused> {
    // A URL may be a secret.
    api.may_write(&headers)?;
    let states = api.store.endpoints().await?;
    let mut urls = Vec::new();
    for (name, entry) in api.intake.endpoints().iter().filter(|(name, _)| is_target(name)) {
        let Some(state) = states.get(&**name) else { continue };
        if state.disabled.is_some() || state.health.failing_since.is_some() {
            let (url, since) = (entry.endpoint.url.as_str(), state.health.failing_since);
            urls.push(json!({ "url": url, "endpoint": &**name, "disabled": state.disabled, "failing_since": since }));
        }
    }
    Ok(Json(json!({ "unavailable": urls })))
}

#[derive(Deserialize)]
pub(super) struct Redeliver {
    url: String,
}

/// Each endpoint of the URL is tried again, from the heads of its lanes on.
pub(super) async fn redeliver(
    State(api): State<Arc<Api>>,
    headers: HeaderMap,
    Json(Redeliver { url }): Json<Redeliver>,
) -> Result<Json<Value>, Refused> {
    api.may_write(&headers)?;
    let url = Url::parse(&url).map_err(|error| Refused::bad_request(format!("url: {error}")))?;
    let mut count = 0;
    for (name, _) in api.intake.endpoints().iter().filter(|(name, entry)| is_target(name) && entry.endpoint.url == url)
    {
        api.store.change_endpoint(name, EndpointChange::Redeliver, None, stamp()).await?;
        count += 1;
    }
    if count == 0 {
        Err(Refused::not_found("no event was sent to this URL"))
    } else {
        Ok(Json(json!({ "endpoints": count })))
    }
}
