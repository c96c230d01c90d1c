//! The notifier over HTTP: for senders of events, and for operators.

mod events;
mod mistral;
mod operators;
mod shown;
mod status;

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, FromRequestParts};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router, middleware};
use serde_json::json;
use tokio::sync::Semaphore;

use super::intake::{EndpointError, Intake};
use super::registry::InvalidEndpoint;
use super::store::{Store, StoreFailure};
use journeyman_domain::limits::{NOTIFIER_BODIES_BYTES_MAX, NOTIFIER_SMALL_BODY_BYTES_MAX};
use journeyman_platform::http::{BearerToken, add_headers};

pub use self::shown::{Console, Lists, Shown};
pub use self::status::{EndpointCondition, EndpointStatus, Status};

pub(super) struct Api {
    intake: Arc<Intake>,
    store: Store,
    tokens: Tokens,
    /// Bytes of events in memory that are not stored yet.
    bodies: Semaphore,
    console: Console,
}

pub struct Tokens {
    /// The token that may do everything.
    pub write: BearerToken,
    /// The token that may only read.
    pub read: Option<BearerToken>,
    /// The token that may only send events.
    pub publish: Option<BearerToken>,
}

const OPENAPI: &str = include_str!("openapi.json");

/// Why a call is refused, in words for its caller.
struct Refused(StatusCode, String);

impl Refused {
    fn bad_request(message: impl Into<String>) -> Self {
        Self(StatusCode::BAD_REQUEST, message.into())
    }

    fn not_found(message: impl Into<String>) -> Self {
        Self(StatusCode::NOT_FOUND, message.into())
    }
}

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
            StoreFailure::Unusable(_) | StoreFailure::Changed(_) => StatusCode::SERVICE_UNAVAILABLE,
            StoreFailure::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(status, failure.to_string())
    }
}

impl From<EndpointError> for Refused {
    fn from(error: EndpointError) -> Self {
        match error {
            EndpointError::Invalid(error) => {
                let is_conflict = matches!(error, InvalidEndpoint::Configured(_) | InvalidEndpoint::Seal(_));
                let status = if is_conflict { StatusCode::CONFLICT } else { StatusCode::BAD_REQUEST };
                Self(status, error.to_string())
            }
            EndpointError::Store(failure) => failure.into(),
        }
    }
}

impl Api {
    pub(super) fn new(intake: Arc<Intake>, store: Store, tokens: Tokens, console: Console) -> Self {
        Self { intake, store, tokens, bodies: Semaphore::new(NOTIFIER_BODIES_BYTES_MAX), console }
    }

    pub(super) fn routes(self: Arc<Self>) -> Router {
        Router::new()
            .route("/", get(shown::page))
            .route("/metrics", get(shown::metrics))
            .route("/v1/openapi.json", get(openapi))
            .route("/v1/events", post(events::accept))
            .route("/v1/status", get(operators::status))
            .route("/v1/endpoints/{name}", get(operators::endpoint))
            .route("/v1/endpoints/{name}", put(operators::put_endpoint).delete(operators::remove_endpoint))
            .route("/v1/endpoints/{name}/{action}", post(operators::change_endpoint))
            .route("/v1/lanes", get(operators::lanes))
            .route("/v1/lanes/{id}/{action}", post(operators::change_lane))
            .route("/v1/attempts", get(operators::attempts))
            .route("/v1/messages", get(operators::messages))
            .route("/v1/messages/{lane}/{position}", get(operators::message))
            .route("/v1/replay", post(operators::replay))
            .route("/unavailable", get(mistral::unavailable))
            .route("/redeliver", post(mistral::redeliver))
            .layer(DefaultBodyLimit::max(NOTIFIER_SMALL_BODY_BYTES_MAX))
            .layer(middleware::map_response(add_headers))
            .with_state(self)
    }

    fn may_write(&self, headers: &HeaderMap) -> Result<(), Refused> {
        let has = |token: Option<BearerToken>| token.is_some_and(|token| token.is_in(headers) == Some(true));
        let forbidden = |what: &str| {
            let message = format!("this token may {what} only: use that of `notifier.token_file`");
            Err(Refused(StatusCode::FORBIDDEN, message))
        };
        match self.tokens.write.is_in(headers) {
            Some(true) => Ok(()),
            Some(false) if has(self.tokens.read) => forbidden("read"),
            Some(false) if has(self.tokens.publish) => forbidden("send events"),
            Some(false) => Err(unauthorized("wrong token: expected that of `notifier.token_file`")),
            None => {
                Err(unauthorized("token required: `Authorization: Bearer TOKEN` with that of `notifier.token_file`"))
            }
        }
    }

    fn may_read(&self, headers: &HeaderMap) -> Result<(), Refused> {
        let is_reader = self.tokens.read.is_some_and(|token| token.is_in(headers) == Some(true));
        if is_reader { Ok(()) } else { self.may_write(headers) }
    }
}

/// A caller that may send events.
struct Publisher(Arc<Api>);

impl FromRequestParts<Arc<Api>> for Publisher {
    type Rejection = Refused;

    async fn from_request_parts(call: &mut Parts, api: &Arc<Api>) -> Result<Self, Refused> {
        let is_publisher = api.tokens.publish.is_some_and(|token| token.is_in(&call.headers) == Some(true));
        let may = if is_publisher { Ok(()) } else { api.may_write(&call.headers) };
        may.map(|()| Self(Arc::clone(api)))
    }
}

/// A caller that may do everything.
struct Writer(Arc<Api>);

impl FromRequestParts<Arc<Api>> for Writer {
    type Rejection = Refused;

    async fn from_request_parts(call: &mut Parts, api: &Arc<Api>) -> Result<Self, Refused> {
        api.may_write(&call.headers).map(|()| Self(Arc::clone(api)))
    }
}

/// A caller that may read.
struct Reader(Arc<Api>);

impl FromRequestParts<Arc<Api>> for Reader {
    type Rejection = Refused;

    async fn from_request_parts(call: &mut Parts, api: &Arc<Api>) -> Result<Self, Refused> {
        api.may_read(&call.headers).map(|()| Self(Arc::clone(api)))
    }
}

async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI)
}

fn unauthorized(message: &str) -> Refused {
    Refused(StatusCode::UNAUTHORIZED, message.to_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Each `.route("PATH", get(…).post(…))` of this file.
    fn routes() -> BTreeSet<(String, String)> {
        let calls = include_str!("mod.rs").lines().filter_map(|line| line.trim().strip_prefix(".route(\""));
        let mut routes = BTreeSet::new();
        for (path, handlers) in calls.filter_map(|call| call.split_once("\", ")) {
            let methods = ["get", "post", "put", "delete"].into_iter().filter(|method| {
                handlers.starts_with(&format!("{method}(")) || handlers.contains(&format!(".{method}("))
            });
            routes.extend(methods.map(|method| (path.to_owned(), method.to_owned())));
        }
        routes
    }

    #[test]
    fn the_openapi_document_has_every_route() {
        let document: serde_json::Value = serde_json::from_str(OPENAPI).unwrap();
        let paths = document["paths"].as_object().unwrap();
        let described = paths
            .iter()
            .flat_map(|(path, item)| item.as_object().unwrap().keys().map(|method| (path.clone(), method.clone())));
        assert_eq!(described.collect::<BTreeSet<_>>(), routes());
    }
}
