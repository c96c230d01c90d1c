//! Orders to roles at other addresses: the console sends them on, with its own token for that role.

use axum::body::{Body, to_bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use maud::html;
use serde::Deserialize;

use super::targets::{Address, Target};
use super::{Console, PageError, PageResult, Shared};
use crate::console::notifier::{attempt_table, lane_table, message_table, status};
use crate::console::page::{self, PageContent};
use crate::console::rows::{Cell, Report, Section, Value, cell};
use crate::control::worker_api::ApiError;
use journeyman_domain::limits::{
    CONSOLE_ANSWER_BYTES_MAX, CONSOLE_ASK_TIMEOUT, CONTROL_BODY_BYTES_MAX, CONTROLLER_POISON_TIMEOUT,
};
use journeyman_platform::host::clock::stamp;
use journeyman_platform::http::client::{read_body, root_cause};
use journeyman_services::notifier::{AttemptRow, LaneRow, MessagePage, Status as NotifierStatus};

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

/// What messages are narrowed by; an empty text narrows nothing.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct MessageSearch {
    endpoint: String,
    key: String,
    event_id: String,
    outcome: String,
    contains: String,
    before: String,
}

impl MessageSearch {
    fn query(&self) -> String {
        let Self { endpoint, key, event_id, outcome, contains, .. } = self;
        let given = [
            ("endpoint", endpoint),
            ("key", key),
            ("event_id", event_id),
            ("outcome", outcome),
            ("contains", contains),
        ];
        let given = given.into_iter().filter(|(_, value)| !value.is_empty());
        given.map(|(name, value)| format!("{name}={}&", urlencoding::encode(value))).collect()
    }
}

const OUTCOMES: [&str; 6] = ["waiting", "delivered", "dead", "exhausted", "aborted-by-receiver", "skipped-by-operator"];

/// Lanes, messages and attempts of a notifier, for readers with the token: a search tells what messages carry.
pub(super) async fn notifier(
    State(console): Shared,
    Path(name): Path<String>,
    Query(search): Query<MessageSearch>,
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
    let query = search.query();
    let before = if search.before.is_empty() {
        String::new()
    } else {
        format!("before={}&", urlencoding::encode(&search.before))
    };
    let messages = format!("v1/messages?{query}{before}data=true");
    let (lanes, attempts, messages) = tokio::join!(
        address.get::<Vec<LaneRow>>("v1/lanes"),
        address.get::<Vec<AttemptRow>>("v1/attempts"),
        address.get::<MessagePage>(&messages),
    );
    let failed = |why: String| PageError(StatusCode::BAD_GATEWAY, why);
    let (lanes, attempts, now) = (lanes.map_err(failed)?, attempts.map_err(failed)?, stamp());
    let MessagePage { messages, next } = messages.map_err(failed)?;
    let section = target.read().await.status.map_or_else(Section::default, |found| status(&found, now));
    let tables = |tables| Section { tables, ..Section::default() };
    let sections = vec![section, tables(vec![lane_table(&lanes, now)]), tables(vec![attempt_table(&attempts, now)])];
    let report = redirect(Report { sections, ..Report::default() }, &prefix(target));
    let main = html! {
        @for section in &report.sections { (page::section(section)) }
        form.search method="get" {
            @for (name, value) in [("endpoint", &search.endpoint), ("key", &search.key), ("event_id", &search.event_id), ("contains", &search.contains)] {
                label { (name.replace('_', " ")) " " input name=(name) value=(value) size="12"; }
            }
            label { "state " select name="outcome" {
                option value="" { "any" }
                @for outcome in OUTCOMES { option value=(outcome) selected[search.outcome == outcome] { (outcome) } }
            } }
            button type="submit" { "find" }
        }
        (page::section(&tables(vec![message_table(&messages, now)])))
        @if let Some(next) = next { p { a href={ "?" (query) "before=" (next) } { "older messages" } } }
    };
    let content = console.page(&name, html! { "notifier " (name) }, main);
    Ok(PageContent { refresh_seconds: super::QUEUE_REFRESH_SECONDS, ..content }.build())
}
