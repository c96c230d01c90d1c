//! Handles one request: route, authentication by the head alone, body within its limit, call, response.

use std::borrow::Cow;
use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Request, Response};
use serde_json::Value;

use super::QueueState;
use super::auth::{AuthenticatedRequest, SignedRequest, check_payload_hash};
use super::queue_error::{self, QueueError, QueueErrorCode, RequestInfo, json_response};
use super::request_body::{self, CallerKind, RequestBody};
use super::response_json::parse_body;
use super::route::{self, ApiMethod, Route};
use super::server::ConnectionPermit;
use super::task_calls::{self, CallInput, CallReply};

pub(super) async fn serve(app: &QueueState, permit: &ConnectionPermit, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let mut answer = dispatch(app, permit, &parts, body).await;
    if permit.is_unauthenticated() {
        answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

async fn dispatch(app: &QueueState, permit: &ConnectionPermit, parts: &Parts, body: Body) -> Response<Body> {
    let path = parts.uri.path();
    let query = parts.uri.query().unwrap_or_default();
    let method = parts.method.as_str();
    if let Some(rest) = path.strip_prefix("/azure/") {
        return super::azure_storage::handle(app, permit, method, rest, query).await;
    }
    if let Some(rest) = path.strip_prefix(super::artifact_content::CONTENT_PATH_PREFIX) {
        return super::artifact_content::handle(app, permit, parts, rest, body).await;
    }
    let route = path.strip_prefix("/api/queue/v1/").and_then(|rest| route::queue_route(method, rest));
    match route {
        Some(route) => handle_call(app, permit, parts, route, body).await,
        None => queue_error::route_not_found(),
    }
}

async fn handle_call(
    app: &QueueState,
    permit: &ConnectionPermit,
    parts: &Parts,
    route: Route,
    body: Body,
) -> Response<Body> {
    let context = CallContext { method: route.method.name(), params: route.params_json() };
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    let signed = SignedRequest {
        method: parts.method.as_str(),
        target,
        host: header_str(parts, HOST).unwrap_or_default(),
        // An unreadable header is an invalid signature, not a missing one.
        authorization: parts.headers.get(AUTHORIZATION).map(|value| value.to_str().unwrap_or_default()),
    };
    let authenticated = app.keyring.authenticate(&signed, app.now());
    let from = match &authenticated {
        Ok(AuthenticatedRequest { caller, .. }) if caller.is_authenticated() => {
            permit.mark_authenticated();
            CallerKind::Authenticated
        }
        Ok(_) | Err(_) => CallerKind::Unauthenticated,
    };
    let read =
        request_body::read(body, &parts.headers, request_body::bytes_max(route.method, from), &app.body_budget).await;
    let (authenticated, body) = match (authenticated, read) {
        (Ok(authenticated), Ok(body)) => (authenticated, Arc::new(body)),
        (Ok(_), Err(error)) => return context.refuse(app, error, &[]),
        // An error response repeats the body as far as it was read.
        (Err(error), read) => return context.refuse(app, error, &read.unwrap_or_default()),
    };
    match execute(app, parts, route, authenticated, &body).await {
        Ok(reply) => to_response(reply),
        Err(error) => context.refuse(app, error, &body),
    }
}

struct CallContext {
    method: &'static str,
    params: Value,
}

impl CallContext {
    fn refuse(self, app: &QueueState, error: QueueError, body: &[u8]) -> Response<Body> {
        // An unread body is context as an empty object.
        let unread = matches!(error.code, QueueErrorCode::MalformedPayload | QueueErrorCode::InputTooLarge);
        let payload = parse_body(if unread { &[] } else { body });
        let request = RequestInfo { method: self.method, params: self.params, payload };
        queue_error::error_response(error, request, app.now())
    }
}

fn header_str(parts: &Parts, name: impl axum::http::header::AsHeaderName) -> Option<&str> {
    parts.headers.get(name).and_then(|value| value.to_str().ok())
}

async fn execute(
    app: &QueueState,
    parts: &Parts,
    route: Route,
    authenticated: AuthenticatedRequest,
    body: &Arc<RequestBody>,
) -> Result<CallReply, QueueError> {
    let content_type = header_str(parts, CONTENT_TYPE).unwrap_or_default();
    let AuthenticatedRequest { caller, payload_hash: hash } = authenticated;
    check_json(route.method, content_type, body)?;
    if let Some(hash) = hash {
        check_payload_hash(content_type, body, hash)?;
    }
    let found = route.invalid_params();
    if !found.is_empty() {
        let message = format!("invalid URL parameters: {}", found.join(", "));
        return Err(QueueError::new(QueueErrorCode::InvalidRequestArguments, message));
    }
    let query = parts.uri.query().unwrap_or_default().to_owned();
    task_calls::handle(app, CallInput { route, query, caller, body: Arc::clone(body) }).await
}

/// A body must be a JSON object with the JSON content type. `createTask` parses its large body itself.
fn check_json(call: ApiMethod, content_type: &str, body: &[u8]) -> Result<(), QueueError> {
    if body.is_empty() {
        return Ok(());
    }
    let media = content_type.split(';').next().unwrap_or_default().trim();
    if !media.eq_ignore_ascii_case("application/json") {
        return Err(QueueError::new(
            QueueErrorCode::MalformedPayload,
            format!("expected the content type application/json, not {content_type:?}"),
        ));
    }
    if call == ApiMethod::CreateTask && body.first() == Some(&b'{') {
        return Ok(());
    }
    let message =
        |what: Cow<'_, str>| QueueError::new(QueueErrorCode::MalformedPayload, format!("invalid JSON: {what}"));
    match serde_json::from_slice(body) {
        Ok(Value::Object(_)) => Ok(()),
        Ok(_) => Err(message("expected an object".into())),
        Err(error) => Err(message(error.to_string().into())),
    }
}

fn to_response(reply: CallReply) -> Response<Body> {
    let mut answer = json_response(reply.status, reply.body);
    for task_calls::ReplyHeader { name, value } in reply.headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            answer.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
    answer
}
