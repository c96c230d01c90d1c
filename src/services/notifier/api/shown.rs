//! The page and the metrics of a notifier, which the program draws. Both are open; a page with a token shows more.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::response::Response;

use super::status::Status;
use super::{Api, Refused};
use crate::notifier::counters::Counted;
use crate::notifier::store::{AttemptRow, LaneRow, MessageFilter, MessagePage, StoreFailure};
use journeyman_domain::limits::NOTIFIER_ROWS_SHOWN;
use journeyman_domain::staged::Stamp;
use journeyman_platform::host::clock::stamp;

/// Draws a notifier.
pub struct Console {
    pub page: fn(&Shown) -> Response,
    pub metrics: fn(&Shown) -> Response,
}

/// What a notifier shows.
pub struct Shown {
    pub status: Status,
    /// What this node has counted.
    pub counted: Counted,
    /// Absent unless the caller may read.
    pub lists: Option<Lists>,
    pub now: Stamp,
}

/// What waits, what was tried, and the messages that were searched for.
pub struct Lists {
    pub lanes: Vec<LaneRow>,
    pub attempts: Vec<AttemptRow>,
    pub messages: MessagePage,
    pub filter: MessageFilter,
}

pub(super) async fn page(
    State(api): State<Arc<Api>>,
    Query(filter): Query<MessageFilter>,
    headers: HeaderMap,
) -> Result<Response, Refused> {
    let mut shown = api.shown().await?;
    if headers.contains_key(AUTHORIZATION) {
        api.may_read(&headers)?;
        let filter = MessageFilter { data: true, ..filter.without_empty_texts() };
        shown.lists = Some(Lists {
            lanes: api.store.lanes(None, None, NOTIFIER_ROWS_SHOWN).await?,
            attempts: api.store.attempts(None, None, None, NOTIFIER_ROWS_SHOWN).await?,
            messages: api.store.messages(filter.clone(), NOTIFIER_ROWS_SHOWN).await?,
            filter,
        });
    }
    Ok((api.console.page)(&shown))
}

pub(super) async fn metrics(State(api): State<Arc<Api>>) -> Result<Response, Refused> {
    Ok((api.console.metrics)(&api.shown().await?))
}

impl Api {
    pub(in crate::notifier) async fn shown(&self) -> Result<Shown, StoreFailure> {
        let (status, counted) = (self.status().await?, self.intake.counters.counted());
        Ok(Shown { status, counted, lists: None, now: stamp() })
    }
}
