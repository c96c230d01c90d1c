//! What operators see and change.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, Query};
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use uuid::Uuid;

use super::status::Status;
use super::{Reader, Refused, Writer};
use crate::notifier::registry::EndpointSettings;
use crate::notifier::store::{
    AttemptRow, EndpointChange, LaneChange, LaneRow, MessageFilter, MessagePage, ReplayFilter,
};
use journeyman_domain::lane::dispatcher::LaneId;
use journeyman_domain::lane::endpoint::DisableReason;
use journeyman_domain::limits::{NOTIFIER_NAME_BYTES_MAX, NOTIFIER_ROWS_MAX, NOTIFIER_ROWS_SHOWN};
use journeyman_domain::staged::Stamp;
use journeyman_platform::host::clock::stamp;
use journeyman_worker::notify::Event;

type Answer<T> = Result<Json<T>, Refused>;

pub(super) async fn status(Reader(api): Reader) -> Answer<Status> {
    Ok(Json(api.status().await?))
}

/// The note that may come with each change.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Change {
    /// How long a pause lasts; until it is ended otherwise.
    seconds: Option<u64>,
    /// Why.
    note: Option<String>,
    /// The position of the head that is skipped.
    position: Option<i64>,
}

impl Change {
    /// # Errors
    ///
    /// Fails if the note cannot be shown in a line.
    fn check(self) -> Result<Self, Refused> {
        let is_good = |note: &String| note.len() <= NOTIFIER_NAME_BYTES_MAX && !note.contains(char::is_control);
        if self.note.as_ref().is_none_or(is_good) {
            Ok(self)
        } else {
            Err(Refused::bad_request(format!(
                "note: at most {NOTIFIER_NAME_BYTES_MAX} bytes, and no control characters"
            )))
        }
    }

    fn until(&self) -> Stamp {
        self.seconds.map_or(Stamp(i64::MAX), |seconds| stamp().plus(Duration::from_secs(seconds)))
    }
}

pub(super) async fn change_endpoint(
    Writer(api): Writer,
    Path((name, action)): Path<(String, String)>,
    change: Option<Json<Change>>,
) -> Answer<Value> {
    let endpoints = api.intake.endpoints();
    let Some((endpoint, _)) = endpoints.get_key_value(name.as_str()) else {
        return Err(Refused::not_found(format!("no endpoint {name:?}")));
    };
    let change = change.map(|Json(change)| change).unwrap_or_default().check()?;
    let done = match action.as_str() {
        "pause" => EndpointChange::Pause { until: Some(change.until()) },
        "resume" => EndpointChange::Pause { until: None },
        "disable" => EndpointChange::Disable(DisableReason::ByOperator),
        "enable" => EndpointChange::Enable,
        "redeliver" => EndpointChange::Redeliver,
        "test" => {
            api.intake.accept_each(vec![(test_event(), Arc::clone(endpoint))]).await?;
            return Ok(Json(json!({ "endpoint": name, "sent": "notifier.test" })));
        }
        _ => return Err(Refused::not_found(format!("no action {action:?} of an endpoint"))),
    };
    api.store.change_endpoint(endpoint, done, change.note, stamp()).await?;
    Ok(Json(json!({ "endpoint": name, "done": action })))
}

pub(super) async fn endpoint(Reader(api): Reader, Path(name): Path<String>) -> Answer<Value> {
    let endpoints = api.intake.endpoints();
    let found = endpoints.get(name.as_str()).map(|entry| entry.shown());
    found.map(Json).ok_or_else(|| Refused::not_found(format!("no endpoint {name:?}")))
}

pub(super) async fn put_endpoint(
    Writer(api): Writer,
    Path(name): Path<String>,
    Json(settings): Json<EndpointSettings>,
) -> Answer<Value> {
    api.intake.put_endpoint(&name, &settings).await?;
    Ok(Json(json!({ "endpoint": name, "done": "put" })))
}

pub(super) async fn remove_endpoint(Writer(api): Writer, Path(name): Path<String>) -> Answer<Value> {
    api.intake.remove_endpoint(&name).await?;
    Ok(Json(json!({ "endpoint": name, "done": "removed" })))
}

/// An event in a lane of its own.
fn test_event() -> Event {
    let id = Uuid::new_v4().to_string();
    let data = to_raw_value(&json!({ "test": true })).unwrap_or_else(|_| RawValue::NULL.to_owned());
    let (source, r#type, key) = ("journeyman".to_owned(), "notifier.test".to_owned(), format!("test-{id}"));
    Event { source, id, r#type, key, epoch: None, time: None, last: true, data }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rows {
    endpoint: Option<String>,
    key: Option<String>,
    lane: Option<i64>,
    /// The last attempt of the page before.
    before: Option<String>,
    limit: Option<usize>,
}

impl Rows {
    fn max(&self) -> usize {
        self.limit.unwrap_or(NOTIFIER_ROWS_SHOWN).min(NOTIFIER_ROWS_MAX)
    }
}

pub(super) async fn lanes(Reader(api): Reader, Query(rows): Query<Rows>) -> Answer<Vec<LaneRow>> {
    let max = rows.max();
    Ok(Json(api.store.lanes(rows.endpoint, rows.key, max).await?))
}

pub(super) async fn attempts(Reader(api): Reader, Query(rows): Query<Rows>) -> Answer<Vec<AttemptRow>> {
    let max = rows.max();
    let numbers = |text: String| Vec::from_iter(text.split(',').map_while(|part| part.parse::<i64>().ok()));
    let before =
        rows.before.map(|text| numbers(text).try_into()).transpose().map_err(|_| {
            Refused::bad_request("before: expected the `started_at,lane,position,number` of an attempt")
        })?;
    Ok(Json(api.store.attempts(rows.endpoint, rows.lane, before, max).await?))
}

pub(super) async fn messages(Reader(api): Reader, Query(filter): Query<MessageFilter>) -> Answer<MessagePage> {
    let max = filter.limit.unwrap_or(NOTIFIER_ROWS_SHOWN).min(NOTIFIER_ROWS_MAX);
    Ok(Json(api.store.messages(filter.without_empty_texts(), max).await?))
}

/// A message with its data, and its attempts.
pub(super) async fn message(Reader(api): Reader, Path((lane, position)): Path<(i64, i64)>) -> Answer<Value> {
    let Some(found) = api.store.message(lane, position).await? else {
        return Err(Refused::not_found(format!("lane {lane} has no message {position}: it has expired, or never was")));
    };
    let before = [i64::MAX, i64::MAX, position + 1, 0];
    let mut attempts = api.store.attempts(None, Some(lane), Some(before), NOTIFIER_ROWS_MAX).await?;
    attempts.retain(|attempt| attempt.position == position);
    Ok(Json(json!({ "message": found, "attempts": attempts })))
}

pub(super) async fn change_lane(
    Writer(api): Writer,
    Path((id, action)): Path<(i64, String)>,
    change: Option<Json<Change>>,
) -> Answer<Value> {
    let change = change.map(|Json(change)| change).unwrap_or_default().check()?;
    let done = match (action.as_str(), change.position, &change.note) {
        ("pause", ..) => LaneChange::Pause { until: change.until() },
        ("resume", ..) => LaneChange::Resume,
        ("skip-head", Some(position), Some(_)) => LaneChange::SkipHead { position },
        ("skip-head", ..) => {
            let needs = "skip-head needs the `position` of the head, and a `note` that says why";
            return Err(Refused::bad_request(needs));
        }
        _ => return Err(Refused::not_found(format!("no action {action:?} of a lane"))),
    };
    if api.store.change_lane(LaneId(id), done, change.note, stamp()).await? {
        if matches!(done, LaneChange::SkipHead { .. }) {
            api.intake.counters.on_skipped();
        }
        Ok(Json(json!({ "lane": id, "done": action })))
    } else {
        let message = format!("no lane {id}, or the message is not its head: `GET /v1/lanes` has the heads");
        Err(Refused::not_found(message))
    }
}

pub(super) async fn replay(Writer(api): Writer, Json(filter): Json<ReplayFilter>) -> Answer<Value> {
    if !api.intake.endpoints().contains_key(filter.endpoint.as_str()) {
        return Err(Refused::not_found(format!("no endpoint {:?}", filter.endpoint)));
    }
    let is_dry_run = filter.dry_run;
    let messages = api.store.replay(filter, stamp()).await?;
    if !is_dry_run {
        api.intake.counters.on_replayed(messages);
    }
    Ok(Json(json!({ "messages": messages, "dry_run": is_dry_run })))
}
