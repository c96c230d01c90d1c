//! The page and the metrics of a notifier, which the program draws. Both are open; a page with a token shows more.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::response::Response;

use super::status::Status;
use super::{Api, Refused};
use crate::notifier::counters::Counted;
use crate::notifier::store::{AttemptRow, LaneRow, StoreFailure};
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
    /// The caller may read what follows.
    pub is_read: bool,
    pub lanes: Vec<LaneRow>,
    pub attempts: Vec<AttemptRow>,
    pub now: Stamp,
}

pub(super) async fn page(State(api): State<Arc<Api>>, headers: HeaderMap) -> Result<Response, Refused> {
    let mut shown = api.shown().await?;
    if headers.contains_key(AUTHORIZATION) {
        api.may_read(&headers)?;
        shown.is_read = true;
        shown.lanes = api.store.lanes(None, None, NOTIFIER_ROWS_SHOWN).await?;
        shown.attempts = api.store.attempts(None, None, None, NOTIFIER_ROWS_SHOWN).await?;
    }
    Ok((api.console.page)(&shown))
}

pub(super) async fn metrics(State(api): State<Arc<Api>>) -> Result<Response, Refused> {
    Ok((api.console.metrics)(&api.shown().await?))
}

impl Api {
    pub(in crate::notifier) async fn shown(&self) -> Result<Shown, StoreFailure> {
        let (status, counted) = (self.status().await?, self.intake.counters.counted());
        Ok(Shown { status, counted, is_read: false, lanes: Vec::new(), attempts: Vec::new(), now: stamp() })
    }
}
