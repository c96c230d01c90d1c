//! The list of unavailable URLs, and their redelivery, as users of Mistral's notifier call them.

use axum::Json;
use reqwest::Url;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Refused, Writer};
use crate::notifier::mistral::is_target;
use crate::notifier::store::EndpointChange;
use journeyman_platform::host::clock::stamp;

/// Those that get nothing, and those whose last attempt has failed. A URL may be a secret, so readers do not see them.
pub(super) async fn unavailable(Writer(api): Writer) -> Result<Json<Value>, Refused> {
    let states = api.store.endpoints().await?.states;
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
    Writer(api): Writer,
    Json(Redeliver { url }): Json<Redeliver>,
) -> Result<Json<Value>, Refused> {
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
