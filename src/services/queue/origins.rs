//! Which web pages may call the queue: those of the configured origins (CORS), and none while authentication is off.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_MAX_AGE,
    ACCESS_CONTROL_REQUEST_METHOD, HOST, HeaderValue, ORIGIN, VARY,
};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::call::QueueState;
use super::config::Auth;
use super::field_types::header_str;
use super::queue_error::{Params, QueueError, QueueErrorCode};
use journeyman_platform::http::is_loopback_host;

pub(super) async fn check(State(app): State<Arc<QueueState>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let origin = header_str(&parts, ORIGIN);
    let is_allowed = origin.is_some_and(|origin| app.config.allowed_origins.iter().any(|allowed| allowed == origin));
    let is_foreign_host = header_str(&parts, HOST).is_some_and(|host| !is_loopback_host(host));
    let refused = match app.config.auth {
        Auth::Checked => None,
        // A web page could otherwise reach the queue through a name that leads to this machine.
        Auth::Open if is_foreign_host => Some("`Host` has to be localhost or a loopback address"),
        Auth::Open | Auth::OpenToNetwork if parts.headers.contains_key(ORIGIN) && !is_allowed => {
            Some("`Origin` has to be one of `queue.allowed_origins`")
        }
        Auth::Open | Auth::OpenToNetwork => None,
    };
    if let Some(rule) = refused {
        let message = format!("authentication is off, so web pages must not call this queue: {rule}");
        let error = QueueError::new(QueueErrorCode::InsufficientScopes, message);
        return error.into_response(parts.method.as_str(), &Params::new(), app.now());
    }
    let Some(origin) = parts.headers.get(ORIGIN).cloned().filter(|_| is_allowed) else {
        return next.run(Request::from_parts(parts, body)).await;
    };
    let is_preflight = parts.method == Method::OPTIONS && parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = if is_preflight {
        let allowed = [
            (ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, PUT"),
            (ACCESS_CONTROL_ALLOW_HEADERS, "Authorization, Content-Type"),
            (ACCESS_CONTROL_MAX_AGE, "900"),
        ];
        (StatusCode::NO_CONTENT, allowed).into_response()
    } else {
        next.run(Request::from_parts(parts, body)).await
    };
    response.headers_mut().insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    response.headers_mut().append(VARY, HeaderValue::from_static("Origin"));
    response
}
