//! Requests in, answers out: finds the call, recognises the caller by the head alone, reads the body within its bound,
//! tells refusals.

use std::borrow::Cow;
use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Request, Response};
use serde_json::Value;

use super::App;
use super::api::{self, Input, Reply};
use super::auth::{Recognised, Signed, check_hash};
use super::body::{self, From, Held};
use super::fault::{self, Asked, Code, Fault, json_answer};
use super::route::{self, Call, Route};
use super::server::Seat;
use super::view::body_value;

/// Answers any request.
pub(super) async fn serve(app: &App, seat: &Seat, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let mut answer = find(app, seat, &parts, body).await;
    if seat.is_strangers() {
        answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

async fn find(app: &App, seat: &Seat, parts: &Parts, body: Body) -> Response<Body> {
    let path = parts.uri.path();
    let query = parts.uri.query().unwrap_or_default();
    let method = parts.method.as_str();
    if let Some(rest) = path.strip_prefix("/azure/") {
        return super::azure::answer(app, seat, method, rest, query).await;
    }
    if let Some(rest) = path.strip_prefix(super::content::PREFIX) {
        return super::content::serve(app, seat, parts, rest, body).await;
    }
    let route = path
        .strip_prefix("/api/queue/v1/")
        .and_then(|rest| route::queue(method, rest))
        .or_else(|| path.strip_prefix("/api/object/v1/").and_then(|rest| route::object(method, rest)));
    match route {
        Some(route) => call(app, seat, parts, route, body).await,
        None => fault::no_such_route(),
    }
}

async fn call(app: &App, seat: &Seat, parts: &Parts, route: Route, body: Body) -> Response<Body> {
    let shown = Shown { method: route.call.name(), params: route.shown() };
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    let signed = Signed {
        method: parts.method.as_str(),
        target,
        host: header(parts, HOST).unwrap_or_default(),
        // What is no text is no signature either, and is not the same as none.
        authorization: parts.headers.get(AUTHORIZATION).map(|value| value.to_str().unwrap_or_default()),
    };
    let recognised = app.keys.recognise(&signed, app.now());
    let from = match &recognised {
        Ok(Recognised { caller, .. }) if caller.is_known() => {
            seat.prove();
            From::Known
        }
        Ok(_) | Err(_) => From::Stranger,
    };
    let read = body::read(body, &parts.headers, body::bytes_max(route.call, from), &app.bodies).await;
    let (recognised, body) = match (recognised, read) {
        (Ok(recognised), Ok(body)) => (recognised, Arc::new(body)),
        (Ok(_), Err(fault)) => return shown.told(app, fault, &[]),
        // A refusal repeats the body as far as it was read.
        (Err(fault), read) => return shown.told(app, fault, &read.unwrap_or_default()),
    };
    match attempt(app, parts, route, recognised, &body).await {
        Ok(reply) => answered(reply),
        Err(fault) => shown.told(app, fault, &body),
    }
}

/// What a refusal repeats of the request.
struct Shown {
    method: &'static str,
    params: Value,
}

impl Shown {
    fn told(self, app: &App, fault: Fault, body: &[u8]) -> Response<Body> {
        // A body that could not be read is shown as an empty one.
        let unread = matches!(fault.code, Code::MalformedPayload | Code::InputTooLarge);
        let payload = body_value(if unread { &[] } else { body });
        let asked = Asked { method: self.method, params: self.params, payload };
        fault::told(fault, asked, app.now())
    }
}

fn header(parts: &Parts, name: impl axum::http::header::AsHeaderName) -> Option<&str> {
    parts.headers.get(name).and_then(|value| value.to_str().ok())
}

async fn attempt(
    app: &App,
    parts: &Parts,
    route: Route,
    recognised: Recognised,
    body: &Arc<Held>,
) -> Result<Reply, Fault> {
    let content_type = header(parts, CONTENT_TYPE).unwrap_or_default();
    let Recognised { caller, hash } = recognised;
    check_json(route.call, content_type, body)?;
    if let Some(hash) = hash {
        check_hash(content_type, body, hash)?;
    }
    let found = route.findings();
    if !found.is_empty() {
        let told = format!("Invalid URL patterns:\n{}", found.join("\n"));
        return Err(Fault::new(Code::InvalidRequestArguments, told));
    }
    let query = parts.uri.query().unwrap_or_default().to_owned();
    api::answer(app, Input { route, query, caller, body: Arc::clone(body) }).await
}

/// A body must be a JSON object, and say that it is JSON. A large one is looked at by its own call alone.
fn check_json(call: Call, content_type: &str, body: &[u8]) -> Result<(), Fault> {
    if body.is_empty() {
        return Ok(());
    }
    let media = content_type.split(';').next().unwrap_or_default().trim();
    if !media.eq_ignore_ascii_case("application/json") {
        return Err(Fault::new(
            Code::MalformedPayload,
            format!("Payload must be JSON with content-type: application/json got content-type: {content_type}"),
        ));
    }
    if call == Call::CreateTask && body.first() == Some(&b'{') {
        return Ok(());
    }
    let told = |what: Cow<'_, str>| Fault::new(Code::MalformedPayload, format!("Failed to parse JSON: {what}"));
    match serde_json::from_slice(body) {
        Ok(Value::Object(_) | Value::Array(_)) => Ok(()),
        Ok(_) => Err(told("Must be an object or array".into())),
        Err(error) => Err(told(error.to_string().into())),
    }
}

fn answered(reply: Reply) -> Response<Body> {
    let mut answer = if reply.body.is_empty() {
        fault::bare_answer(reply.status, Body::empty())
    } else {
        json_answer(reply.status, reply.body)
    };
    for api::Header { name, value } in reply.headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            answer.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
    answer
}
