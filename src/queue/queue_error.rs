//! Error responses: status, code and JSON body in the form of the Taskcluster services.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use super::clock::UnixMillis;
use super::task_state::RunError;
use crate::limits::QUEUE_RUNS_MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    ServiceUnavailable,
}

impl QueueErrorCode {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::MalformedPayload => "MalformedPayload",
            Self::InvalidRequestArguments => "InvalidRequestArguments",
            Self::InputValidationError => "InputValidationError",
            Self::InputError => "InputError",
            Self::AuthenticationFailed => "AuthenticationFailed",
            Self::InsufficientScopes => "InsufficientScopes",
            Self::ResourceNotFound => "ResourceNotFound",
            Self::RequestConflict => "RequestConflict",
            Self::ResourceExpired => "ResourceExpired",
            Self::InputTooLarge => "InputTooLarge",
            Self::InternalServerError => "InternalServerError",
            Self::ServiceUnavailable => "ServiceUnavailable",
        }
    }

    pub(crate) const fn status(self) -> StatusCode {
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
            Self::ServiceUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

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

    pub(crate) fn task_not_found(task: &str) -> Self {
        Self::not_found(format!("task `{task}` not found"))
    }

    /// The incident id is in the log too.
    pub(crate) fn internal(incident: &uuid::Uuid) -> Self {
        Self::new(QueueErrorCode::InternalServerError, format!("internal error, incidentId: {incident}"))
    }

    /// `subject` is a task id, or a run as `TASK/RUN`.
    pub(crate) fn from_run_error(error: RunError, subject: &str) -> Self {
        match error {
            RunError::NoSuchRun => Self::not_found(format!("run `{subject}` not found")),
            RunError::AlreadyClaimed => {
                Self::conflict(format!("run `{subject}` was already claimed by another worker"))
            }
            RunError::NotRunning => Self::conflict(format!("run `{subject}` is resolved or not running")),
            RunError::PastDeadline => Self::conflict(format!("`{subject}` is past the deadline of its task")),
            RunError::TooManyRuns => Self::conflict(format!("task `{subject}` has {QUEUE_RUNS_MAX} runs, the maximum")),
        }
    }
}

pub(crate) struct RequestInfo<'a> {
    pub(crate) method: &'a str,
    pub(crate) params: Value,
    pub(crate) payload: Value,
}

pub(crate) fn error_response(error: QueueError, request: RequestInfo<'_>, now: UnixMillis) -> Response<Body> {
    let code = error.code;
    let body = json!({
        "code": code.name(),
        "message": error.message,
        "requestInfo": {
            "method": request.method,
            "params": request.params,
            "payload": request.payload,
            "time": now.iso(),
        },
    });
    let mut answer = json_response(code.status(), body.to_string());
    if code == QueueErrorCode::AuthenticationFailed {
        let hawk = HeaderValue::from_static("hawk");
        answer.headers_mut().insert(header::WWW_AUTHENTICATE, hawk);
    }
    if code == QueueErrorCode::ServiceUnavailable {
        answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    answer
}

pub(crate) fn json_response(status: StatusCode, body: impl Into<Body>) -> Response<Body> {
    let mut answer = bare_response(status, body);
    let json = HeaderValue::from_static("application/json; charset=utf-8");
    answer.headers_mut().insert(header::CONTENT_TYPE, json);
    answer
}

pub(crate) fn bare_response(status: StatusCode, body: impl Into<Body>) -> Response<Body> {
    let mut answer = Response::new(body.into());
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    let no_store = HeaderValue::from_static("no-store no-cache must-revalidate");
    headers.insert(header::CACHE_CONTROL, no_store);
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

pub(crate) fn route_not_found() -> Response<Body> {
    json_response(StatusCode::NOT_FOUND, r#"{"error":"Not found"}"#)
}
