//! Error responses: status, code and JSON body in the form of the Taskcluster services.

use std::collections::BTreeMap;

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use serde_json::json;

use super::clock::UnixMillis;
use super::task_state::RunError;
use journeyman_domain::limits::QUEUE_RUNS_MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum QueueErrorCode {
    MalformedPayload,
    InvalidRequestArguments,
    InputValidationError,
    InputError,
    AuthenticationFailed,
    InsufficientScopes,
    ResourceNotFound,
    RequestConflict,
    ResourceExpired,
    InputTooLarge,
    InternalServerError,
    InsufficientStorage,
    ServiceUnavailable,
}

impl QueueErrorCode {
    const fn status(self) -> StatusCode {
        match self {
            Self::MalformedPayload | Self::InvalidRequestArguments | Self::InputValidationError | Self::InputError => {
                StatusCode::BAD_REQUEST
            }
            Self::AuthenticationFailed => StatusCode::UNAUTHORIZED,
            Self::InsufficientScopes => StatusCode::FORBIDDEN,
            Self::ResourceNotFound => StatusCode::NOT_FOUND,
            Self::RequestConflict => StatusCode::CONFLICT,
            Self::ResourceExpired => StatusCode::GONE,
            Self::InputTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::InternalServerError => StatusCode::INTERNAL_SERVER_ERROR,
            Self::InsufficientStorage => StatusCode::INSUFFICIENT_STORAGE,
            Self::ServiceUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// The decoded parameters of a path.
pub(crate) type Params = BTreeMap<String, String>;

#[derive(Debug)]
pub(crate) struct QueueError {
    pub(crate) code: QueueErrorCode,
    pub(crate) message: String,
}

impl QueueError {
    pub(crate) fn new(code: QueueErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub(crate) fn input(message: impl Into<String>) -> Self {
        Self::new(QueueErrorCode::InputError, message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(QueueErrorCode::ResourceNotFound, message)
    }

    pub(crate) fn conflict(message: impl Into<String>) -> Self {
        Self::new(QueueErrorCode::RequestConflict, message)
    }

    /// The incident id is in the log too.
    pub(crate) fn internal(incident: &uuid::Uuid) -> Self {
        Self::new(QueueErrorCode::InternalServerError, format!("internal error, incidentId: {incident}"))
    }

    pub(crate) fn into_response(self, method: &str, params: &Params, now: UnixMillis) -> Response {
        let body = json!({
            "code": self.code,
            "message": self.message,
            "requestInfo": {"method": method, "params": params, "time": now.iso()},
        });
        let mut response = json_response(self.code.status(), body.to_string());
        let headers = response.headers_mut();
        if self.code == QueueErrorCode::AuthenticationFailed {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("hawk"));
        }
        if self.code == QueueErrorCode::ServiceUnavailable {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<RunError> for QueueError {
    fn from(error: RunError) -> Self {
        match error {
            RunError::NoSuchRun => Self::not_found("run not found"),
            RunError::AlreadyClaimed => Self::conflict("the run was already claimed by another worker"),
            RunError::NotRunning => Self::conflict("the run is resolved or not running"),
            RunError::PastDeadline => Self::conflict("the deadline of the task has passed"),
            RunError::TooManyRuns => Self::conflict(format!("the task has {QUEUE_RUNS_MAX} runs, the maximum")),
        }
    }
}

pub(crate) fn json_response(status: StatusCode, body: impl Into<Body>) -> Response {
    let headers = [
        (CONTENT_TYPE, "application/json; charset=utf-8"),
        (CACHE_CONTROL, "no-store no-cache must-revalidate"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (status, headers, body.into()).into_response()
}

pub(crate) fn route_not_found() -> Response {
    // `error` is all that Taskcluster says; its clients read the others.
    let message = "this queue has no such method; `journeyman guide queue` lists those that it has";
    let body = json!({"code": QueueErrorCode::ResourceNotFound, "message": message, "error": "Not found"});
    json_response(StatusCode::NOT_FOUND, body.to_string())
}
