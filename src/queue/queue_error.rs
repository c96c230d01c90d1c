//! A call that is refused: the status, the code, and the JSON body that tells why, in the service's own form.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use super::clock::UnixMillis;
use super::task_state::RunError;

/// The kinds of refusal; each has one status and one name.
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

/// Why a call is refused.
#[derive(Debug)]
pub(crate) struct QueueError {
    pub(crate) code: QueueErrorCode,
    pub(crate) message: String,
    /// What `requestInfo.payload` shows instead of the body as it came, where defaults have been filled in.
    pub(crate) payload: Option<Value>,
}

impl QueueError {
    pub(crate) fn new(code: QueueErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), payload: None }
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
        Self::not_found(format!("Task `{task}` not found. Are you sure it was created?"))
    }

    pub(crate) fn run_not_found(task: &str, run: u32) -> Self {
        Self::not_found(format!("Run {run} not found on task `{task}`."))
    }

    /// A fault of the queue itself. The incident is what its log names too.
    pub(crate) fn internal(incident: &uuid::Uuid) -> Self {
        Self::new(QueueErrorCode::InternalServerError, format!("Internal Server Error, incidentId: {incident}"))
    }

    /// The refusal of a call that changes a run, as it is told for most calls.
    pub(crate) fn from_run_error(no: RunError, task: &str, run: u32) -> Self {
        match no {
            RunError::NoSuchRun => Self::run_not_found(task, run),
            RunError::AlreadyClaimed => Self::conflict(format!("Run {run} was already claimed by another worker.")),
            RunError::PastDeadline | RunError::NotRunning | RunError::ResolvedOtherwise | RunError::TooManyRuns => {
                Self::conflict(format!("Run {run} on task `{task}` is resolved or not running."))
            }
        }
    }
}

/// What a refusal repeats of the request.
pub(crate) struct RequestInfo<'a> {
    pub(crate) method: &'a str,
    pub(crate) params: Value,
    pub(crate) payload: Value,
}

/// The answer that tells a refusal.
pub(crate) fn error_response(fault: QueueError, asked: RequestInfo<'_>, now: UnixMillis) -> Response<Body> {
    let (code, time) = (fault.code, now.iso());
    let message = format!(
        "{}\n\n---\n\n* method:     {}\n* errorCode:  {}\n* statusCode: {}\n* time:       {time}",
        fault.message,
        asked.method,
        code.name(),
        code.status().as_u16(),
    );
    let body = json!({
        "code": code.name(),
        "message": message,
        "requestInfo": {
            "method": asked.method,
            "params": asked.params,
            "payload": fault.payload.unwrap_or(asked.payload),
            "time": time,
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

/// A JSON answer with the headers that the service puts on each.
pub(crate) fn json_response(status: StatusCode, body: impl Into<Body>) -> Response<Body> {
    let mut answer = bare_response(status, body);
    let json = HeaderValue::from_static("application/json; charset=utf-8");
    answer.headers_mut().insert(header::CONTENT_TYPE, json);
    answer
}

/// An answer without a content type.
pub(crate) fn bare_response(status: StatusCode, body: impl Into<Body>) -> Response<Body> {
    let mut answer = Response::new(body.into());
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    let no_store = HeaderValue::from_static("no-store no-cache must-revalidate");
    headers.insert(header::CACHE_CONTROL, no_store);
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

/// The answer where no call has that address.
pub(crate) fn route_not_found() -> Response<Body> {
    json_response(StatusCode::NOT_FOUND, r#"{"error":"Not found"}"#)
}
