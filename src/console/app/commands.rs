//! Commands to a controller over HTTP, for clients with the bearer token.

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header::{CONTENT_TYPE, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderName, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};

use crate::control::worker_api::ApiError;
use journeyman_domain::limits::CONTROL_BODY_BYTES_MAX;
use journeyman_platform::http::BearerToken;

/// Requires the token for every route of `commands`; without a token, rejects every command.
pub(crate) fn require_token(commands: Router, token: Option<BearerToken>) -> Router {
    commands
        .route_layer(middleware::from_fn_with_state(token, authenticate))
        .layer(DefaultBodyLimit::max(CONTROL_BODY_BYTES_MAX))
}

async fn authenticate(
    State(token): State<Option<BearerToken>>,
    method: Method,
    headers: HeaderMap,
    request: Request,
    next: Next,
) -> Response {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    // The form of another site cannot have this type.
    let is_json =
        text(CONTENT_TYPE).split(';').next().is_some_and(|media| media.trim().eq_ignore_ascii_case("application/json"));
    if method == Method::POST && !is_json {
        let message = "expected `Content-Type: application/json`".to_owned();
        return ApiError(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).into_response();
    }
    let Some(token) = token else {
        let message = "orders over HTTP are disabled: set `http.token_file`, or use the commands of `journeyman`";
        return ApiError(StatusCode::FORBIDDEN, message.to_owned()).into_response();
    };
    let message = match token.is_in(&headers) {
        Some(true) => return next.run(request).await,
        Some(false) => {
            tracing::warn!("rejected a command with a wrong bearer token");
            "wrong token: expected that of `http.token_file`"
        }
        None => "token required: `Authorization: Bearer TOKEN` with that of `http.token_file`",
    };
    let error = ApiError(StatusCode::UNAUTHORIZED, message.to_owned());
    ([(WWW_AUTHENTICATE, "Bearer realm=\"commands\"")], error).into_response()
}
