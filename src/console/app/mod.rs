//! The console: one program of pages over every role that it is told of. Each role serves it at its own address.

pub(crate) mod commands;
mod create_form;
pub(crate) mod fleet;
mod listing;
mod log_text;
mod log_view;
mod phases;
mod queues;
mod result;
pub mod targets;
mod tasks;
mod via;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::future::join_all;
use maud::{Markup, html};
use serde_json::Value as Json;
use tokio::time::timeout;

use self::commands::require_token;
use self::result::ArtifactKey;
use self::targets::{QueueTarget, Reading, SnapshotFn, Target, read_all};
use super::page::{self, HtmlPage, PageContent};
use super::rows::{Headline, Level, Report, Section, Table, Value, cell};
use super::{controller, notifier, worker};
use crate::control::WorkerStatusReply;
use crate::control::controller_api::ControllerStatusReply;
use journeyman_domain::limits::{CONSOLE_OVERVIEW_TIMEOUT, CONSOLE_QUEUE_TIMEOUT};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::host::clock::stamp;
use journeyman_platform::http::BearerToken;
use journeyman_services::notifier::Status as NotifierStatus;
use journeyman_worker::engine::ClaimHistory;
use journeyman_worker::source::CallError;
use journeyman_worker::task::formats::is_slugid;

/// What a console shows.
#[derive(Default)]
pub struct Console {
    pub queues: Vec<QueueTarget>,
    pub workers: Vec<Target<WorkerStatusReply>>,
    pub controllers: Vec<Target<ControllerStatusReply>>,
    pub notifiers: Vec<Target<NotifierStatus>>,
    /// The sources of its own worker that have a page.
    pub sources: Vec<String>,
    /// The schemas of payloads that its own worker runs, by task queue.
    pub schemas: BTreeMap<String, Json>,
    /// The history of its own worker.
    pub history: Option<Arc<SnapshotFn<Vec<ClaimHistory>>>>,
    /// Orders need it.
    pub token: Option<BearerToken>,
    /// Readers need the token too.
    pub is_private: bool,
    /// The worker or the controller of this process serves it, with its other routes.
    pub is_of_role: bool,
    /// Signs the addresses of artifacts that a browser loads without the token.
    pub artifact_key: ArtifactKey,
}

type Shared = State<Arc<Console>>;
type PageResult = Result<HtmlPage, PageError>;

/// Why there is no page.
#[derive(Debug)]
struct PageError(StatusCode, String);

impl PageError {
    fn not_found(what: impl Into<String>) -> Self {
        Self(StatusCode::NOT_FOUND, what.into())
    }
}

impl From<CallError> for PageError {
    fn from(error: CallError) -> Self {
        let status = match error.refusal {
            Refusal::Gone => StatusCode::NOT_FOUND,
            Refusal::Rejected => StatusCode::BAD_REQUEST,
            Refusal::Denied | Refusal::Stale => StatusCode::FORBIDDEN,
            Refusal::Retry { .. } | Refusal::Throttled { .. } | Refusal::Full => StatusCode::BAD_GATEWAY,
        };
        Self(status, error.message)
    }
}

impl IntoResponse for PageError {
    fn into_response(self) -> Response {
        let headline = Headline { level: Level::Bad, state: self.0.as_str().to_owned(), cell: cell(self.1) };
        let main = page::section(&Section { headline, ..Section::default() });
        let home = html! { a href="/" { "overview" } };
        (self.0, PageContent::new("not shown · journeyman", home, main).build()).into_response()
    }
}

/// Bounds what a page asks of the queue that it is about.
async fn within<T, E: Into<PageError>>(asking: impl Future<Output = Result<T, E>>) -> Result<T, PageError> {
    within_time(CONSOLE_QUEUE_TIMEOUT, asking).await
}

/// Bounds what a page about many roles asks of one queue.
async fn within_moment<T, E: Into<PageError>>(asking: impl Future<Output = Result<T, E>>) -> Result<T, PageError> {
    within_time(CONSOLE_OVERVIEW_TIMEOUT, asking).await
}

async fn within_time<T, E: Into<PageError>>(
    limit: Duration,
    asking: impl Future<Output = Result<T, E>>,
) -> Result<T, PageError> {
    let slow = |_| PageError(StatusCode::GATEWAY_TIMEOUT, format!("the queue did not answer within {limit:?}"));
    timeout(limit, asking).await.map_err(slow)?.map_err(Into::into)
}

impl Console {
    /// Asks the roles at other addresses; does not end.
    pub async fn watch(&self) {
        let workers = join_all(self.workers.iter().map(Target::watch));
        let controllers = join_all(self.controllers.iter().map(Target::watch));
        let notifiers = join_all(self.notifiers.iter().map(Target::watch));
        tokio::join!(workers, controllers, notifiers);
        std::future::pending::<()>().await;
    }

    /// True if it shows no role.
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.workers.is_empty() && self.controllers.is_empty() && self.notifiers.is_empty()
    }

    fn queue(&self, name: &str) -> Result<&QueueTarget, PageError> {
        let found = self.queues.iter().find(|queue| queue.name == name);
        found.ok_or_else(|| PageError::not_found(format!("this console has no queue {name:?}")))
    }

    /// The queue of all tasks, if there is one queue only.
    fn only_queue(&self) -> Option<&QueueTarget> {
        if let [queue] = self.queues.as_slice() { Some(queue) } else { None }
    }

    fn commands(&self) -> Option<&'static str> {
        let has_orders = !(self.queues.is_empty() && self.controllers.is_empty() && self.notifiers.is_empty());
        (has_orders && self.token.is_some()).then_some("http.token_file")
    }

    /// A page with the navigation; without a token it has no buttons.
    fn page(&self, title: &str, name: Markup, main: Markup) -> PageContent {
        let nav = html! {
            a href="/" { "overview" }
            @if !self.workers.is_empty() || !self.queues.is_empty() { a href="/fleet" { "fleet" } }
            @for queue in &self.queues {
                a href={ "/tasks/" (queue.name) } { "tasks" @if self.queues.len() > 1 { " of " (queue.name) } }
                @if self.token.is_some() { a href={ "/create/" (queue.name) } { "create" } }
            }
        };
        let title = format!("{title} · journeyman");
        PageContent { nav, commands: self.commands(), ..PageContent::new(title, name, main) }
    }

    /// True if the request has the token.
    fn is_known(&self, headers: &HeaderMap) -> bool {
        self.token.is_some_and(|token| token.is_in(headers) == Some(true))
    }

    async fn overview(&self, is_known: bool) -> Result<PageContent, PageError> {
        let queues = join_all(self.queues.iter().map(queues::summary)).await;
        let (workers, controllers) = (read_all(&self.workers).await, read_all(&self.controllers).await);
        let notifiers = read_all(&self.notifiers).await;
        let roles = self.workers.len() + self.controllers.len() + self.notifiers.len() + self.queues.len();
        let gone = workers.iter().map(Reading::gone).chain(controllers.iter().map(Reading::gone)).flatten().next();
        if let Some(why) = gone.filter(|_| roles == 1) {
            return Err(PageError(StatusCode::SERVICE_UNAVAILABLE, why.to_owned()));
        }
        let mut reports = Vec::new();
        let fleet = match workers.as_slice() {
            [one] => {
                reports.extend(report(one, "worker", |status| worker::report(status, &self.sources)));
                html! {}
            }
            [] => html! {},
            _ => fleet::summary(&workers),
        };
        for (target, reading) in self.controllers.iter().zip(&controllers) {
            let prefix = via::prefix(target);
            let mut report = report(reading, "controller", controller::report);
            // That of a control socket takes no orders from pages.
            if target.is_own() && !self.is_of_role {
                report.iter_mut().for_each(page::remove_actions);
            }
            reports.extend(report.map(|report| via::redirect(report, &prefix)));
        }
        for (target, reading) in self.notifiers.iter().zip(&notifiers) {
            let prefix = via::prefix(target);
            let report = report(reading, "notifier", |status| {
                let mut section = Section { title: via::link(target), ..notifier::status(status, stamp()) };
                // A notifier itself shows no more without a token.
                section.tables.retain(|_| is_known);
                Report {
                    title: "notifier".to_owned(),
                    name: cell("notifier"),
                    sections: vec![section],
                    ..Report::default()
                }
            });
            reports.extend(report.map(|report| via::redirect(report, &prefix)));
        }
        if let Some(queue) = self.only_queue() {
            link_tasks(
                reports.iter_mut().flat_map(|report| &mut report.sections).flat_map(|section| &mut section.tables),
                queue,
            );
        }
        if self.token.is_none() {
            reports.iter_mut().for_each(page::remove_actions);
        }
        let main = html! {
            (fleet)
            @for report in &reports { @for section in &report.sections { (page::section(section)) } }
            @for queue in queues { (queue) }
        };
        let (title, name) = match reports.as_slice() {
            [one] => (one.title.clone(), page::cell(&one.name)),
            _ => ("overview".to_owned(), html! { "console" }),
        };
        // The address of a role has more than pages.
        let links = html! {
            @if self.is_of_role { a href="/metrics" { "metrics" } " · " a href="/readyz" { "readiness" } " · " a href="/status.json" { "JSON" } }
        };
        Ok(PageContent { links, title: title.clone(), ..self.page(&title, name, main) })
    }
}

/// Lets the runs in tables lead to the pages of their tasks.
fn link_tasks<'a>(tables: impl IntoIterator<Item = &'a mut Table>, queue: &QueueTarget) {
    for cell in tables.into_iter().flat_map(|table| table.rows.iter_mut().filter_map(|row| row.first_mut())) {
        for part in &mut cell.parts {
            if let Value::Code(text) = &part.value
                && let Some((task, _)) = text.split_once('/').filter(|(task, _)| is_slugid(task))
            {
                part.value = Value::Link { text: text.clone(), href: listing::path(queue, task) };
            }
        }
    }
}

/// Makes the report of a role, or says why there is none.
fn report<S>(reading: &Reading<S>, role: &str, make: impl Fn(&S) -> Report) -> Option<Report> {
    let Reading { status, age, error } = reading;
    let mut report = status.as_deref().map(make);
    if let Some(error) = error {
        let old = age.map_or_else(String::new, |age| format!("; what follows is {} s old", age.as_secs()));
        let unknown = || Report {
            title: format!("{role} unknown"),
            name: cell(role),
            sections: vec![Section::default()],
            ..Report::default()
        };
        let report = report.get_or_insert_with(unknown);
        let first = report.sections.first_mut();
        first.into_iter().for_each(|section| section.alerts.insert(0, (Level::Bad, format!("{error}{old}"))));
    }
    report
}

/// The routes of the pages, and of the orders that they give.
pub fn routes(console: Arc<Console>) -> Router {
    let token = console.token;
    let orders = Router::new()
        .route("/tasks/{target}", post(tasks::create))
        .route("/tasks/{target}/{task}/{action}", post(tasks::change))
        .route("/bulk/{target}/{action}", get(tasks::bulk_page).post(tasks::bulk))
        .route("/via/{target}/{*path}", get(via::forward).post(via::forward))
        .with_state(Arc::clone(&console));
    let pages = Router::new()
        .route("/", get(overview))
        .route("/fleet", get(fleet::page))
        .route("/workers/{id}", get(fleet::worker_page))
        .route("/queues/{target}/{*queue}", get(queues::page))
        .route("/groups/{target}/{group}", get(tasks::group))
        .route("/create/{target}", get(create_form::page))
        .route("/notifiers/{target}", get(via::notifier_page))
        .route("/tasks/{target}", get(tasks::list))
        .route("/tasks/{target}/{task}", get(tasks::page))
        .route("/tasks/{target}/{task}/log", get(log_view::page))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&console), ask_for_token));
    // No page stands in for the content of a task: a script would take it for one of this console.
    let contents = Router::new().route("/tasks/{target}/{task}/{run}/{*name}", get(result::artifact));
    pages.merge(contents).with_state(console).merge(require_token(orders, token))
}

async fn overview(State(console): Shared, headers: HeaderMap) -> PageResult {
    let refresh = if console.queues.is_empty() { page::REFRESH_SECONDS } else { QUEUE_REFRESH_SECONDS };
    let content = console.overview(console.is_known(&headers)).await?;
    Ok(PageContent { refresh_seconds: refresh, ..content }.build())
}

/// A page that asks a queue is refreshed less often.
const QUEUE_REFRESH_SECONDS: u8 = 5;

/// Pages of a queue that checks its callers show nothing without the token.
async fn ask_for_token(State(console): Shared, request: Request, next: Next) -> Response {
    if !console.is_private || console.is_known(request.headers()) {
        return next.run(request).await;
    }
    let hint = if console.token.is_some() {
        html! { p.empty { "This queue checks its callers: its pages are shown with the token of " code { "http.token_file" } "." } }
    } else {
        html! { p.empty { "This queue checks its callers: its pages are shown with a token. Set " code { "http.token_file" } " to a file with one." } }
    };
    console.page("queue", html! { "queue" }, hint).build().into_response()
}
