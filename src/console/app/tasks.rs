//! Tasks: lists of them, one of them, and orders about them.

use std::time::Duration;

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use futures_util::future::join_all;
use jiff::Timestamp;
use maud::{Markup, html};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as JsonValue, json};
use tokio::time::timeout;

use super::create_form::{self, Change};
use super::listing::{level, parse_id, path, seconds, table};
use super::targets::QueueTarget;
use super::{Console, PageError, PageResult, QUEUE_REFRESH_SECONDS, Shared, log_text, phases, result, within};
use crate::console::page::{self, PageContent};
use crate::console::picture::{Bar, Lane, legend, timeline};
use crate::console::rows::{Action, Cell, Headline, Level, NONE, Section, Table, Value, cell, maybe, precise, row};
use crate::console::task::bulk::{self, BulkAction, BulkResult};
use crate::console::task::card::{self, TaskCard};
use crate::console::task::definition;
use crate::console::task::log::LOG_PREFIX;
use crate::console::task::status::{FoundTask, RunStatus, TaskStatus};
use crate::control::worker_api::ApiError;
use journeyman_domain::id::Run;
use journeyman_domain::limits::{CONSOLE_TASKS_SHOWN, TASK_CARD_TIMEOUT};
use journeyman_platform::settings::values::{Queue, Span};
use journeyman_worker::engine::ClaimHistory;
use journeyman_worker::source::CallError;
use journeyman_worker::source::taskcluster::TaskSearch;
use journeyman_worker::task::formats::{TASK_STATES, new_task_id};

const DEADLINE_DEFAULT: Duration = Duration::from_secs(3600);

/// What a list of tasks is narrowed by; an empty text matches every task.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Search {
    queue: String,
    state: String,
    name: String,
    /// A time such as `1h`.
    since: String,
    /// The token of a page.
    page: Option<String>,
}

impl Search {
    fn read(&self, limit: usize) -> Result<TaskSearch, PageError> {
        let since = if self.since.is_empty() {
            String::new()
        } else {
            let span: Span =
                self.since.parse().map_err(|what| PageError(StatusCode::BAD_REQUEST, format!("since: {what}")))?;
            Timestamp::now().checked_sub(span.0).map_or_else(|_| String::new(), |at| at.to_string())
        };
        let Self { queue, state, name, .. } = self;
        Ok(TaskSearch {
            queue: queue.clone(),
            state: state.clone(),
            name: name.clone(),
            since,
            limit: limit.to_string(),
        })
    }
}

/// The list of tasks, by a form that needs no scripts.
pub(super) async fn list(State(console): Shared, Path(name): Path<String>, Query(search): Query<Search>) -> PageResult {
    let target = console.queue(&name)?;
    let wanted = search.read(CONSOLE_TASKS_SHOWN)?;
    let found = within(target.api.find_tasks(&wanted, search.page.as_deref())).await;
    let (found, next, why) = match found {
        Ok(page) => (
            page.entries.iter().filter_map(|entry| FoundTask::read(entry).ok()).collect(),
            page.continuation_token,
            None,
        ),
        Err(PageError(StatusCode::NOT_FOUND, _)) => {
            let why = "This queue lists the pending and running tasks of one task queue only: name it.";
            (unresolved(target, &search.queue).await?, None, Some(why))
        }
        Err(error) => return Err(error),
    };
    let title = format!("tasks of {name}");
    let query = |page| serde_urlencoded::to_string(Search { page, ..search.clone() }).unwrap_or_default();
    let these = query(None);
    let bulk = |action: BulkAction| {
        let button = Action::new(
            &format!("{} these", action.as_str()),
            format!("/bulk/{name}/{}?{these}", action.as_str()),
            JsonValue::Null,
        );
        (console.token.is_some() && why.is_none()).then_some(button)
    };
    let heading = cell(title.as_str()).action(bulk(BulkAction::Rerun)).action(bulk(BulkAction::Cancel));
    let section = Section { title: heading, tables: vec![table(target, "newest first", &found)], ..Section::default() };
    let main = html! {
        form.search method="get" {
            label { "queue " input name="queue" value=(search.queue) placeholder="any"; }
            label { "state " select name="state" {
                option value="" { "any" }
                @for state in TASK_STATES { option value=(state) selected[search.state == state] { (state) } }
            } }
            label { "name " input name="name" value=(search.name) placeholder="a part of it"; }
            label { "within " input name="since" value=(search.since) placeholder="such as 1h" size="8"; }
            button type="submit" { "find" }
        }
        @if let Some(why) = why { p.empty { (why) } }
        (page::section(&section))
        @if next.is_some() { p { a href={ "?" (query(next)) } { "older tasks" } } }
    };
    let content = console.page(&title, html! { "queue " (name) }, main);
    Ok(PageContent { refresh_seconds: QUEUE_REFRESH_SECONDS, ..content }.build())
}

/// What any Taskcluster lists.
async fn unresolved(target: &QueueTarget, queue: &str) -> Result<Vec<FoundTask>, PageError> {
    if queue.is_empty() {
        return Ok(Vec::new());
    }
    let asked =
        async { tokio::try_join!(target.api.claimed_tasks(queue, None), target.api.pending_tasks(queue, None)) };
    let (claimed, pending) = within(asked).await?;
    let read = |state: &'static str| {
        move |entry: JsonValue| {
            let (provisioner, worker_type) = queue.split_once('/').unwrap_or((queue, ""));
            let run = json!({ "runId": entry["runId"], "state": state, "workerId": entry["workerId"], "workerGroup": "", "started": entry["claimed"] });
            let status = json!({ "taskId": entry["taskId"], "state": state, "provisionerId": provisioner, "workerType": worker_type, "runs": [run] });
            let task = &entry["task"];
            FoundTask::read(&json!({ "status": status, "name": task["metadata"]["name"], "created": task["created"] }))
                .ok()
        }
    };
    let claimed = claimed.entries.into_iter().filter_map(read("running"));
    Ok(claimed.chain(pending.entries.into_iter().filter_map(read("pending"))).collect())
}

/// The tasks of a group.
pub(super) async fn group(State(console): Shared, Path((name, group)): Path<(String, String)>) -> PageResult {
    let target = console.queue(&name)?;
    let found = within(target.api.task_group(&group, None)).await?;
    let is_part = found.continuation_token.is_some();
    let read = |entry: &JsonValue| {
        let task = &entry["task"];
        FoundTask::read(
            &json!({ "status": entry["status"], "name": task["metadata"]["name"], "created": task["created"] }),
        )
        .ok()
    };
    let found: Vec<FoundTask> = found.entries.iter().filter_map(read).collect();
    let states = TASK_STATES.iter().filter_map(|state| {
        let count = found.iter().filter(|task| task.status.state.as_str() == *state).count();
        (count > 0).then(|| row(*state, cell(count)))
    });
    let section = Section {
        title: cell(format!("group {group}")),
        alerts: is_part
            .then(|| (Level::Warn, format!("The group has more tasks: these are the first {}.", found.len())))
            .into_iter()
            .collect(),
        facts: states.collect(),
        tables: vec![table(target, "tasks, oldest first", &found)],
        ..Section::default()
    };
    let content = console.page("group", html! { "queue " (name) }, page::section(&section));
    Ok(PageContent { refresh_seconds: QUEUE_REFRESH_SECONDS, ..content }.build())
}

/// One task: why it ended so, its runs, results and artifacts.
pub(super) async fn page(State(console): Shared, Path((name, task)): Path<(String, String)>) -> PageResult {
    let (target, id) = (console.queue(&name)?, parse_id(&task)?);
    let status =
        within(async { target.api.task_status(&id).await.and_then(|status| TaskStatus::read(&status)) }).await?;
    let run = status.runs.last().filter(|run| run.started_at.is_some());
    let run = run.map(|run| Run { task: id.clone(), run: run.number });
    let artifacts = async {
        match &run {
            Some(run) => within(target.api.artifacts(run, None)).await.map(|page| page.entries).unwrap_or_default(),
            None => Vec::new(),
        }
    };
    let (definition, card, artifacts, histories) = tokio::join!(
        within(target.api.task_definition(&id)),
        timeout(TASK_CARD_TIMEOUT * 2, card::read(&target.api, &status, None, LOG_PREFIX)),
        artifacts,
        histories(&console, &status),
    );
    let (histories_at, histories) = histories;
    let definition = definition.unwrap_or_default();
    let shown = match &run {
        Some(run) => result::shown(&console, target, run, &artifacts).await,
        None => html! {},
    };
    let progress = histories.iter().find(|claim| claim.outcome.is_none()).and_then(|claim| claim.progress.clone());
    let main = html! {
        (page::section(&section(&console, target, &status, &definition)))
        @if let Ok(card) = card { (card_of(target, &status, &card)) }
        @if let Some(progress) = progress { (log_text::progress_bar(&progress)) }
        (runs(&status, &histories, histories_at))
        (shown)
        @if let Some(run) = &run { (result::table(&console, target, run, &artifacts)) }
    };
    let title = definition.pointer("/metadata/name").and_then(JsonValue::as_str).unwrap_or(&task).to_owned();
    let content = console.page(&format!("{} {title}", status.state.as_str()), html! { "task " code { (task) } }, main);
    Ok(content.build())
}

fn section(console: &Console, target: &QueueTarget, status: &TaskStatus, definition: &JsonValue) -> Section {
    let text = |path: &str| definition.pointer(path).and_then(JsonValue::as_str).filter(|text| !text.is_empty());
    let order = |action: BulkAction| {
        Action::new(action.as_str(), format!("{}/{}", path(target, &status.task), action.as_str()), json!({}))
    };
    let again = format!("/create/{}?from={}", target.name, status.task);
    let mut title = cell(text("/metadata/name").unwrap_or(&status.task));
    if console.token.is_some() {
        let order = if status.is_resolved() {
            order(BulkAction::Rerun)
        } else {
            order(BulkAction::Cancel).confirm("Cancel this task?")
        };
        title = title
            .action(Some(order))
            .note(Value::Link { text: "run again with a changed payload".to_owned(), href: again });
    }
    let now = Timestamp::now();
    let time = |text: &str| text.parse::<Timestamp>().ok();
    let when = |at: Timestamp| {
        if at > now { Value::In(seconds(now, at)) } else { Value::Ago(seconds(at, now)) }
    };
    let queue = status.task_queue();
    let group = status.text("taskGroupId").to_owned();
    let facts = vec![
        row("queue", cell(Value::Link { text: queue.clone(), href: format!("/queues/{}/{queue}", target.name) })),
        row("group", cell(Value::Link { text: group.clone(), href: format!("/groups/{}/{group}", target.name) })),
        row("created", maybe(text("/created").and_then(time), when)),
        row("deadline", maybe(time(status.text("deadline")), when)),
        row("priority", cell(status.text("priority"))),
        row("retries left", cell(status.retries_left)),
    ];
    let state = status.runs.last().and_then(|run| run.reason.clone()).filter(|reason| reason != status.state.as_str());
    let worker = status.runs.last().and_then(|run| run.worker_id.clone());
    let detail = Cell::default()
        .and_some(state)
        .and_some(worker.map(|worker| format!("on {worker}")))
        .and_some(text("/metadata/description").filter(|text| *text != definition::DESCRIPTION));
    let headline = Headline { level: level(status.state), state: status.state.as_str().to_owned(), cell: detail };
    Section { title, headline, facts, ..Section::default() }
}

fn card_of(target: &QueueTarget, status: &TaskStatus, TaskCard { why, next, log }: &TaskCard) -> Markup {
    let log_path = format!("{}/log", path(target, &status.task));
    html! {
        section {
            @if !why.is_empty() { p.why { strong { "why " } (page::prose(why)) } }
            @if !next.is_empty() { p { strong { "next " } (page::prose(next)) } }
            @if let Some(lines) = log.as_ref().filter(|lines| !lines.is_empty()) { pre.log { @for line in lines { (log_text::colored(line)) "\n" } } }
            @if status.runs.iter().any(|run| run.started_at.is_some()) { p { a href=(log_path) { "log" } } }
        }
    }
}

/// What the workers that are known have recorded of the runs of a task, and when they said it.
async fn histories(console: &Console, status: &TaskStatus) -> (Timestamp, Vec<ClaimHistory>) {
    let asked = console.workers.iter().map(async |target| {
        let worker = target.read().await.status.map(|status| status.id.clone());
        let has_run = worker.is_some() && status.runs.iter().any(|run| run.worker_id == worker);
        if has_run { phases::history(console, target).await } else { Vec::new() }
    });
    let found = join_all(asked).await.into_iter().flatten().filter(|claim| claim.task == status.task).collect();
    (Timestamp::now(), found)
}

/// The runs of a task as a timeline, and the same as a table.
fn runs(status: &TaskStatus, histories: &[ClaimHistory], now: Timestamp) -> Markup {
    let Some(first) = status.runs.iter().find_map(|run| run.scheduled.or(run.started_at)) else { return html! {} };
    let at = |time: Timestamp| time.duration_since(first).as_secs_f64();
    let end = status.runs.last().and_then(|run| run.resolved_at).map_or_else(|| at(now), at);
    let lane = |run: &RunStatus| {
        let claim = histories.iter().find(|claim| claim.run == run.number);
        let mut bars = Vec::new();
        if let Some(scheduled) = run.scheduled {
            let until = run.started_at.or(run.resolved_at).map_or_else(|| at(now), at);
            let title = format!("waiting {}", precise(until - at(scheduled)));
            bars.push(Bar { from: at(scheduled), to: until, class: "wait", title, href: None });
        }
        let shift = at(now);
        match (claim, run.started_at) {
            (Some(claim), started) => {
                let phases: Vec<Bar> = phases::bars(claim, None)
                    .into_iter()
                    .map(|bar| Bar { from: bar.from + shift, to: bar.to + shift, ..bar })
                    .collect();
                // The queue grants it before the worker has the answer, and its record on disk.
                if let (Some(started), Some(first)) = (started.map(at), phases.first()) {
                    let title =
                        format!("claimed for {} before the worker had it", precise((first.from - started).max(0.0)));
                    bars.push(Bar { from: started, to: first.from.max(started), class: "claim", title, href: None });
                }
                bars.extend(phases);
            }
            (None, Some(started)) => {
                let until = run.resolved_at.map_or(shift, at);
                let is_lost = run.reason.as_deref() == Some("claim-expired");
                let (class, what) = if is_lost { ("lost", "lost after") } else { ("run", "claimed for") };
                let title = format!("{what} {}", precise(until - at(started)));
                bars.push(Bar { from: at(started), to: until, class, title, href: None });
            }
            (None, None) => {}
        }
        let ticks =
            claim.map(|claim| claim.reclaimed_seconds_ago.iter().map(|ago| shift - ago).collect()).unwrap_or_default();
        Lane { label: format!("run {}", run.number), bars, ticks }
    };
    let lanes: Vec<Lane> = status.runs.iter().map(lane).collect();
    let rows = status.runs.iter().zip(&lanes).rev().map(|(run, lane)| {
        let phases = lane.bars.iter().map(|bar| bar.title.clone()).collect::<Vec<_>>().join(", ");
        let reclaims = Some(lane.ticks.len()).filter(|count| *count > 0).map(|count| format!("{count} reclaims"));
        let phases = cell(phases).note_some(reclaims);
        let worker = run.worker_id.as_ref().map(|id| format!("{}/{id}", run.worker_group));
        vec![
            cell(run.number),
            cell(run.summary()).at(level(run.state)),
            cell(worker.unwrap_or_else(|| NONE.to_owned())),
            phases,
        ]
    });
    let table = Table::new("runs, latest first", &["run", "state", "worker", "phases"], rows);
    let took = precise(end);
    html! {
        section {
            h3 { "timeline" }
            (timeline(&lanes, 0.0, end, ["scheduled", &took]))
            (legend(&phases::PHASES))
            (page::table(&table))
        }
    }
}

/// Why an order was not carried out.
impl From<CallError> for ApiError {
    fn from(error: CallError) -> Self {
        // The token of this page is right; it is the console that may not.
        PageError::from(error).into()
    }
}

impl From<PageError> for ApiError {
    fn from(PageError(status, message): PageError) -> Self {
        Self(status, message)
    }
}

/// Runs a task again, or cancels it.
pub(super) async fn change(
    State(console): Shared,
    Path((name, task, action)): Path<(String, String, BulkAction)>,
) -> Result<Json<JsonValue>, ApiError> {
    let (target, id) = (console.queue(&name)?, parse_id(&task)?);
    let status = action.apply(&target.api, &id).await?;
    let state = status["state"].as_str().unwrap_or_default();
    Ok(Json(json!({ "message": format!("{}: done; the task is {state}", action.as_str()) })))
}

/// A task that a person creates.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewTask {
    queue: Queue,
    name: String,
    /// The task whose payload is changed; empty for a new one.
    #[serde(default)]
    from: String,
    changes: Vec<Change>,
}

pub(super) async fn create(
    State(console): Shared,
    Path(name): Path<String>,
    Json(new): Json<NewTask>,
) -> Result<Json<JsonValue>, ApiError> {
    let target = console.queue(&name)?;
    let mut payload = Map::new();
    if !new.from.is_empty() {
        let from = parse_id(&new.from)?;
        let mut definition = target.api.task_definition(&from).await?;
        if let JsonValue::Object(found) = definition["payload"].take() {
            payload = found;
        }
    }
    create_form::change(&mut payload, new.changes).map_err(|why| ApiError(StatusCode::BAD_REQUEST, why))?;
    let mut task = Map::new();
    task.insert("provisionerId".to_owned(), json!(new.queue.provisioner()));
    task.insert("workerType".to_owned(), json!(new.queue.worker_type()));
    task.insert("payload".to_owned(), JsonValue::Object(payload));
    let title = if new.name.is_empty() { "task" } else { &new.name };
    definition::complete(&mut task, title, DEADLINE_DEFAULT);
    let id = new_task_id();
    target.api.create_task(&id, JsonValue::Object(task)).await?;
    Ok(Json(json!({ "message": format!("{id} created"), "href": path(target, id.as_str()) })))
}

/// Shows how many tasks an order is about, before it is given.
pub(super) async fn bulk_page(
    State(console): Shared,
    Path((name, action)): Path<(String, BulkAction)>,
    Query(search): Query<Search>,
) -> PageResult {
    let target = console.queue(&name)?;
    let mut wanted = search.read(1_000)?;
    wanted.limit = String::new();
    let found = within(bulk::find(&target.api, action, &wanted)).await?;
    let ids: Vec<&str> = found.iter().map(|task| task.status.task.as_str()).collect();
    let verb = action.as_str();
    let count = ids.len();
    let button = Action::new(&format!("{verb} {count} tasks"), format!("/bulk/{name}/{verb}"), json!({ "tasks": ids }))
        .confirm(format!("{verb} {count} tasks?"));
    let title = cell(format!("{count} tasks to {verb}")).action((count > 0).then_some(button));
    let section = Section { title, tables: vec![table(target, "these", &found)], ..Section::default() };
    Ok(console.page(verb, html! { "queue " (name) }, page::section(&section)).build())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BulkOrder {
    tasks: Vec<String>,
}

pub(super) async fn bulk(
    State(console): Shared,
    Path((name, action)): Path<(String, BulkAction)>,
    Json(order): Json<BulkOrder>,
) -> Result<Json<BulkResult>, ApiError> {
    let target = console.queue(&name)?;
    let ids = order.tasks.iter().map(|id| parse_id(id)).collect::<Result<Vec<_>, _>>()?;
    Ok(Json(bulk::apply(&target.api, action, ids).await))
}
