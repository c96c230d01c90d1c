//! Requests in, answers out: finds the call, recognises the caller by the head alone, reads the body within its bound,
//! tells refusals.

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

/// Answers any request.
pub(super) async fn serve(app: &QueueState, seat: &ConnectionPermit, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let mut answer = dispatch(app, seat, &parts, body).await;
    if seat.is_unauthenticated() {
        answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

async fn dispatch(app: &QueueState, seat: &ConnectionPermit, parts: &Parts, body: Body) -> Response<Body> {
    let path = parts.uri.path();
    let query = parts.uri.query().unwrap_or_default();
    let method = parts.method.as_str();
    if let Some(rest) = path.strip_prefix("/azure/") {
        return super::azure_storage::handle(app, seat, method, rest, query).await;
    }
    if let Some(rest) = path.strip_prefix(super::artifact_content::CONTENT_PATH_PREFIX) {
        return super::artifact_content::handle(app, seat, parts, rest, body).await;
    }
    let route = path
        .strip_prefix("/api/queue/v1/")
        .and_then(|rest| route::queue_route(method, rest))
        .or_else(|| path.strip_prefix("/api/object/v1/").and_then(|rest| route::object_route(method, rest)));
    match route {
        Some(route) => handle_call(app, seat, parts, route, body).await,
        None => queue_error::route_not_found(),
    }
}

async fn handle_call(
    app: &QueueState,
    seat: &ConnectionPermit,
    parts: &Parts,
    route: Route,
    body: Body,
) -> Response<Body> {
    let shown = CallContext { method: route.method.name(), params: route.params_json() };
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    let signed = SignedRequest {
        method: parts.method.as_str(),
        target,
        host: header_str(parts, HOST).unwrap_or_default(),
        // What is no text is no signature either, and is not the same as none.
        authorization: parts.headers.get(AUTHORIZATION).map(|value| value.to_str().unwrap_or_default()),
    };
    let recognised = app.keyring.authenticate(&signed, app.now());
    let from = match &recognised {
        Ok(AuthenticatedRequest { caller, .. }) if caller.is_authenticated() => {
            seat.mark_authenticated();
            CallerKind::Authenticated
        }
        Ok(_) | Err(_) => CallerKind::Unauthenticated,
    };
    let read =
        request_body::read(body, &parts.headers, request_body::bytes_max(route.method, from), &app.body_budget).await;
    let (recognised, body) = match (recognised, read) {
        (Ok(recognised), Ok(body)) => (recognised, Arc::new(body)),
        (Ok(_), Err(fault)) => return shown.refuse(app, fault, &[]),
        // A refusal repeats the body as far as it was read.
        (Err(fault), read) => return shown.refuse(app, fault, &read.unwrap_or_default()),
    };
    match execute(app, parts, route, recognised, &body).await {
        Ok(reply) => to_response(reply),
        Err(fault) => shown.refuse(app, fault, &body),
    }
}

/// What a refusal repeats of the request.
struct CallContext {
    method: &'static str,
    params: Value,
}

impl CallContext {
    fn refuse(self, app: &QueueState, fault: QueueError, body: &[u8]) -> Response<Body> {
        // A body that could not be read is shown as an empty one.
        let unread = matches!(fault.code, QueueErrorCode::MalformedPayload | QueueErrorCode::InputTooLarge);
        let payload = parse_body(if unread { &[] } else { body });
        let asked = RequestInfo { method: self.method, params: self.params, payload };
        queue_error::error_response(fault, asked, app.now())
    }
}

fn header_str(parts: &Parts, name: impl axum::http::header::AsHeaderName) -> Option<&str> {
    parts.headers.get(name).and_then(|value| value.to_str().ok())
}

async fn execute(
    app: &QueueState,
    parts: &Parts,
    route: Route,
    recognised: AuthenticatedRequest,
    body: &Arc<RequestBody>,
) -> Result<CallReply, QueueError> {
    let content_type = header_str(parts, CONTENT_TYPE).unwrap_or_default();
    let AuthenticatedRequest { caller, payload_hash: hash } = recognised;
    check_json(route.method, content_type, body)?;
    if let Some(hash) = hash {
        check_payload_hash(content_type, body, hash)?;
    }
    let found = route.invalid_params();
    if !found.is_empty() {
        let told = format!("Invalid URL patterns:\n{}", found.join("\n"));
        return Err(QueueError::new(QueueErrorCode::InvalidRequestArguments, told));
    }
    let query = parts.uri.query().unwrap_or_default().to_owned();
    task_calls::handle(app, CallInput { route, query, caller, body: Arc::clone(body) }).await
}

/// A body must be a JSON object, and say that it is JSON. A large one is looked at by its own call alone.
fn check_json(call: ApiMethod, content_type: &str, body: &[u8]) -> Result<(), QueueError> {
    if body.is_empty() {
        return Ok(());
    }
    let media = content_type.split(';').next().unwrap_or_default().trim();
    if !media.eq_ignore_ascii_case("application/json") {
        return Err(QueueError::new(
            QueueErrorCode::MalformedPayload,
            format!("Payload must be JSON with content-type: application/json got content-type: {content_type}"),
        ));
    }
    if call == ApiMethod::CreateTask && body.first() == Some(&b'{') {
        return Ok(());
    }
    let told =
        |what: Cow<'_, str>| QueueError::new(QueueErrorCode::MalformedPayload, format!("Failed to parse JSON: {what}"));
    match serde_json::from_slice(body) {
        Ok(Value::Object(_) | Value::Array(_)) => Ok(()),
        Ok(_) => Err(told("Must be an object or array".into())),
        Err(error) => Err(told(error.to_string().into())),
    }
}

fn to_response(reply: CallReply) -> Response<Body> {
    let mut answer = if reply.body.is_empty() {
        queue_error::bare_response(reply.status, Body::empty())
    } else {
        json_response(reply.status, reply.body)
    };
    for task_calls::ReplyHeader { name, value } in reply.headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            answer.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
    answer
}
