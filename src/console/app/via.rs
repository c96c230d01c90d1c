//! Orders to roles at other addresses: the console sends them on, with its own token for that role.

use axum::body::{Body, to_bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use maud::html;

use super::targets::{Address, Target};
use super::{Console, PageError, PageResult, Shared};
use crate::console::notifier;
use crate::console::page::PageContent;
use crate::console::rows::{Cell, Report, Section, Value, cell};
use crate::control::worker_api::ApiError;
use journeyman_domain::limits::{
    CONSOLE_ANSWER_BYTES_MAX, CONSOLE_ASK_TIMEOUT, CONTROL_BODY_BYTES_MAX, CONTROLLER_POISON_TIMEOUT,
};
use journeyman_platform::host::clock::stamp;
use journeyman_platform::http::client::{read_body, root_cause};
use journeyman_services::notifier::{AttemptRow, LaneRow, Lists, MessageFilter, MessagePage, Status as NotifierStatus};

/// What comes before the paths of orders to a role; nothing for one of this process.
pub(super) fn prefix<S>(target: &Target<S>) -> String {
    target.address().map_or_else(String::new, |address| format!("/via/{}", urlencoding::encode(&address.name)))
}

/// Lets the buttons of a report give their orders through this console.
pub(super) fn redirect(mut report: Report, prefix: &str) -> Report {
    for Section { title, tables, .. } in &mut report.sections {
        let cells = tables.iter_mut().flat_map(|table| table.rows.iter_mut().flatten()).chain([title]);
        cells.flat_map(|cell| &mut cell.actions).for_each(|action| action.path.insert_str(0, prefix));
    }
    report
}

/// The name of a notifier, which leads to its page.
pub(super) fn link(target: &Target<NotifierStatus>) -> Cell {
    target.address().map_or_else(Cell::default, |address| {
        let href = format!("/notifiers/{}", urlencoding::encode(&address.name));
        cell(Value::Link { text: format!("notifier {}", address.name), href })
    })
}

fn find<'a>(console: &'a Console, name: &str) -> Option<&'a Address> {
    let controllers = console.controllers.iter().filter_map(Target::address);
    let mut all = controllers.chain(console.notifiers.iter().filter_map(Target::address));
    all.find(|address| address.name == name)
}

/// Sends an order on. The role checks it.
pub(super) async fn forward(
    State(console): Shared,
    Path((name, _)): Path<(String, String)>,
    request: Request,
) -> Result<Response, ApiError> {
    let failed = |status, message: String| ApiError(status, message);
    let Some(address) = find(&console, &name) else {
        return Err(failed(StatusCode::NOT_FOUND, format!("this console has no role {name:?}")));
    };
    // The path is taken as it was sent, because names in it may have slashes.
    let path = request.uri().path().splitn(4, '/').nth(3).unwrap_or_default();
    let url = address.url.join(path).ok().filter(|url| url.as_str().starts_with(&format!("{}v1/", address.url)));
    let Some(mut url) = url else {
        return Err(failed(StatusCode::NOT_FOUND, "only paths of an API are sent on".to_owned()));
    };
    url.set_query(request.uri().query());
    let is_page = request.headers().get(ACCEPT).is_some_and(|accept| accept == "text/html");
    let mut sent =
        address.http.request(request.method().clone(), url).timeout(CONSOLE_ASK_TIMEOUT + CONTROLLER_POISON_TIMEOUT);
    sent = sent.header(ACCEPT, if is_page { "text/html" } else { "application/json" });
    if let Some(token) = &address.token {
        sent = sent.header(AUTHORIZATION, format!("Bearer {}", token.reveal()));
    }
    if request.method() == Method::POST {
        let body = to_bytes(request.into_body(), CONTROL_BODY_BYTES_MAX).await;
        let body = body.map_err(|error| failed(StatusCode::PAYLOAD_TOO_LARGE, error.to_string()))?;
        sent = sent.header(CONTENT_TYPE, "application/json").body(body);
    }
    let unreachable =
        |error: reqwest::Error| failed(StatusCode::BAD_GATEWAY, format!("{name}: {}", root_cause(&error)));
    let mut answer = sent.send().await.map_err(unreachable)?;
    let status = answer.status();
    if status == StatusCode::UNAUTHORIZED {
        // The reader's own token is right.
        let why = format!("{name} refuses the token of this console: set `token_file` of [console.target.{name}]");
        return Err(failed(StatusCode::BAD_GATEWAY, why));
    }
    let body = read_body(&mut answer, CONSOLE_ANSWER_BYTES_MAX).await;
    let body = body.map_err(|_| failed(StatusCode::BAD_GATEWAY, format!("{name}: its answer cannot be read")))?;
    if is_page {
        // Its buttons come back through this console.
        let text = String::from_utf8_lossy(&body)
            .replace("data-path=\"/", &format!("data-path=\"/via/{}/", urlencoding::encode(&name)));
        return Ok((status, [(CONTENT_TYPE, "text/html; charset=utf-8")], text).into_response());
    }
    Ok((status, [(CONTENT_TYPE, "application/json")], Body::from(body)).into_response())
}

/// Lanes, messages and attempts of a notifier, for readers with the token: a search tells what messages carry.
pub(super) async fn notifier_page(
    State(console): Shared,
    Path(name): Path<String>,
    Query(filter): Query<MessageFilter>,
    headers: HeaderMap,
) -> PageResult {
    let is_named = |target: &&Target<NotifierStatus>| target.address().is_some_and(|address| address.name == name);
    let target = console.notifiers.iter().find(is_named);
    let Some((target, address)) = target.and_then(|target| Some((target, target.address()?))) else {
        return Err(PageError::not_found(format!("this console has no notifier {name:?}")));
    };
    if !console.is_known(&headers) {
        let hint = html! { p.empty data-ask { "Endpoints, lanes, messages and attempts are shown with the token of " code { "http.token_file" } "." } };
        return Ok(console.page(&name, html! { "notifier " (name) }, hint).build());
    }
    let messages = format!("v1/messages?{}", notifier::query(&MessageFilter { data: true, ..filter.clone() }));
    let (status, lanes, attempts, messages) = tokio::try_join!(
        address.get::<NotifierStatus>("v1/status"),
        address.get::<Vec<LaneRow>>("v1/lanes"),
        address.get::<Vec<AttemptRow>>("v1/attempts"),
        address.get::<MessagePage>(&messages),
    )
    .map_err(|why| PageError(StatusCode::BAD_GATEWAY, why))?;
    let (lists, now) = (Lists { lanes, attempts, messages, filter }, stamp());
    let report = redirect(notifier::report(&status, &lists, now), &prefix(target));
    let main = notifier::draw(&report, &lists, now);
    let content = console.page(&name, html! { "notifier " (name) }, main);
    Ok(PageContent { refresh_seconds: super::QUEUE_REFRESH_SECONDS, ..content }.build())
}
