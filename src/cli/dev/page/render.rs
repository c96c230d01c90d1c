//! Renders the page of `journeyman dev`.

use jiff::Timestamp;
use maud::{Markup, html};
use serde_json::Value as Json;

use super::{Filter, TaskDetail, TaskList};
use crate::cli::task::task_status::{FoundTask, RunStatus, TaskState, TaskStatus};
use crate::console::page::{Commands, HtmlPage, PageContent, facts, section, table};
use crate::console::rows::{Cell, Level, Table, Value, cell, maybe, row};
use crate::console::worker;
use crate::control::WorkerStatusReply;

fn page(title: String, main: Markup, aside: Markup) -> HtmlPage {
    let name = html! { nav { a href="/" { "Tasks" } a href="/worker" { "Worker" } } };
    let links = html! { "this page is served to this machine only" };
    PageContent { aside, commands: Commands::Forms, links, ..PageContent::new(title, name, main) }.build()
}

pub(super) fn worker(status: &WorkerStatusReply) -> HtmlPage {
    page(format!("worker {}", status.id), section(&worker::section(&status.snapshot, &[])), html! {})
}

pub(super) fn list(list: &TaskList) -> HtmlPage {
    let view = &list.worker.snapshot;
    let mut rows: Vec<_> = list
        .pending
        .iter()
        .map(|(queue, pending)| {
            let running = view.claims.iter().filter(|claim| queue.ends_with(&format!("/{}", claim.source))).count();
            row(format!("queue {queue}"), cell(format!("{pending} pending")).note(format!("{running} running")))
        })
        .collect();
    let headline = worker::headline(view);
    rows.push(row("worker", cell(&headline.state).and(headline.cell.text()).at(headline.level)));
    let main = html! {
        (facts(&rows))
        (filter_form(list))
        (table(&tasks(list)))
        @if let Some(next) = &list.next { p { a href=(older(&list.filter, next)) { "older tasks" } } }
    };
    page("tasks".to_owned(), main, html! {})
}

fn filter_form(list: &TaskList) -> Markup {
    let Filter { name, state, queue, .. } = &list.filter;
    let states = TaskState::ALL.map(TaskState::as_str);
    html! {
        form.filter method="get" action="/" {
            input type="search" name="name" value=(name) placeholder="part of the name" aria-label="part of the name";
            select name="state" aria-label="state" {
                option value="" { "every state" }
                @for known in states.into_iter().filter(|state| *state != TaskState::Unknown.as_str()) {
                    option value=(known) selected[known == state] { (known) }
                }
            }
            select name="queue" aria-label="queue" {
                option value="" { "every queue" }
                @for (known, _) in &list.pending { option value=(known) selected[known == queue] { (known) } }
            }
            button type="submit" { "find" }
        }
    }
}

fn older(filter: &Filter, next: &str) -> String {
    let Filter { name, state, queue, .. } = filter;
    let query = [("name", name.as_str()), ("state", state), ("queue", queue), ("after", next)];
    let query = query.map(|(key, value)| format!("{key}={}", urlencoding::encode(value)));
    format!("/?{}", query.join("&"))
}

fn tasks(list: &TaskList) -> Table {
    let Filter { name, state, queue, .. } = &list.filter;
    let is_filtered = [name, state, queue].into_iter().any(|text| !text.is_empty());
    let empty = if is_filtered {
        "No task matches."
    } else {
        "No tasks yet. `journeyman task create --wait -- /bin/echo hello` creates one."
    };
    let rows = list.tasks.iter().map(|FoundTask { status, name, created }| {
        vec![
            cell(Value::Link { text: name.clone(), href: format!("/tasks/{}", status.task) }),
            state_cell(status.state, &status.summary()),
            cell(status.task_queue()),
            maybe(*created, ago),
            status.runs.last().map_or_else(|| maybe(None, Value::Took), took),
            cell(Value::Code(status.task.clone())),
        ]
    });
    Table::new("tasks", &["task", "state", "queue", "created", "took", "id"], rows).or(empty)
}

fn state_cell(state: TaskState, text: &str) -> Cell {
    cell(text).at(match state {
        TaskState::Completed => Level::Good,
        TaskState::Failed | TaskState::Exception => Level::Bad,
        TaskState::Running | TaskState::Unscheduled | TaskState::Pending | TaskState::Unknown => Level::Plain,
    })
}

fn ago(at: Timestamp) -> Value {
    let seconds = Timestamp::now().duration_since(at).as_secs_f64();
    if seconds < 0.0 { Value::In(-seconds) } else { Value::Ago(seconds) }
}

/// So far, while it runs.
fn took(run: &RunStatus) -> Cell {
    maybe(run.started_at, |started| {
        let until = run.resolved_at.unwrap_or_else(Timestamp::now);
        let seconds = until.duration_since(started).as_secs_f64();
        if seconds < 10.0 { format!("{:.1}s", seconds.max(0.0)).into() } else { Value::Took(seconds) }
    })
}

pub(super) fn task(detail: &TaskDetail) -> HtmlPage {
    let TaskDetail { status, definition, shown_run, .. } = detail;
    let text = |path: &str| definition.pointer(path).and_then(Json::as_str).unwrap_or_default();
    let name = text("/metadata/name");
    let shown = status.runs.iter().find(|run| Some(run.number) == *shown_run);
    let retries = status.raw.get("retriesLeft").and_then(Json::as_u64).unwrap_or(0);
    let rows = [
        row("state", state_cell(status.state, &status.summary())),
        row("queue", cell(status.task_queue())),
        row("created", maybe(time(definition, "created"), ago)),
        row("deadline", maybe(time(definition, "deadline"), ago)),
        row("priority", cell(text("/priority"))),
        row("retries left", cell(retries)),
    ];
    let main = html! {
        h2.title { (name) }
        div { code.short { (status.task) } " " (buttons(detail)) }
        @if !text("/metadata/description").is_empty() { p.dim { (text("/metadata/description")) } }
        (facts(&rows))
        (table(&runs(detail)))
        @for run in &status.runs { (artifacts(detail, run.number)) }
        details data-name="definition" {
            summary { "Definition" }
            pre.definition { (format!("{definition:#}")) }
        }
        @if let Some(run) = shown {
            h2 data-log={ "/tasks/" (status.task) "/" (run.number) "/log" }
                data-grows=(if status.may_run(Some(run.number)) { "yes" } else { "no" }) {
                "Log of run " (run.number)
                small.at { a href={ "/tasks/" (status.task) "/" (run.number) "/log" } { "as text" } }
            }
        }
    };
    let aside = html! { @if shown.is_some() { p #lognote .dim {} pre #log tabindex="0" {} } };
    page(format!("{} · {name}", status.summary()), main, aside)
}

fn time(definition: &Json, key: &str) -> Option<Timestamp> {
    definition.get(key)?.as_str()?.parse().ok()
}

fn buttons(detail: &TaskDetail) -> Markup {
    let TaskDetail { status, definition, token, .. } = detail;
    let may_rerun =
        status.is_resolved() && time(definition, "deadline").is_some_and(|deadline| deadline > Timestamp::now());
    let form = |verb: &str| {
        html! {
            form method="post" action={ "/tasks/" (status.task) "/" (verb) } {
                input type="hidden" name="token" value=(token);
                button type="submit" { (verb) }
            }
        }
    };
    html! {
        @if !status.is_resolved() { (form("cancel")) }
        @if may_rerun { (form("rerun")) }
    }
}

fn runs(TaskDetail { status, shown_run, .. }: &TaskDetail) -> Table {
    let rows = status.runs.iter().rev().map(|run| {
        let log = Value::Link { text: "log".to_owned(), href: format!("?run={}", run.number) };
        let waited = run.scheduled_at.zip(run.started_at).map(|(scheduled, started)| {
            format!("waited {}", Value::Took(started.duration_since(scheduled).as_secs_f64()).text())
        });
        vec![
            cell(run.number).and_some((Some(run.number) != *shown_run).then_some(log)),
            state_cell(run.state, &run.summary()),
            maybe(run.worker_id.clone(), Value::Text),
            maybe(run.started_at, ago).note_some(waited),
            took(run),
        ]
    });
    Table::new("runs", &["run", "state", "worker", "started", "took"], rows)
        .or("The task waits for the tasks that it depends on.")
}

fn artifacts(TaskDetail { status, artifacts, .. }: &TaskDetail, run: u32) -> Markup {
    let listed = artifacts.iter().filter(|(number, _)| *number == run).flat_map(|(_, listed)| listed);
    let rows = listed.map(|artifact| vec![artifact_link(status, run, artifact)]);
    let found = Table::new(format!("artifacts of run {run}"), &["name"], rows);
    html! { @if !found.rows.is_empty() { (table(&found)) } }
}

fn artifact_link(status: &TaskStatus, run: u32, artifact: &Json) -> Cell {
    let name = artifact.get("name").and_then(Json::as_str).unwrap_or_default();
    let path: Vec<_> = name.split('/').map(urlencoding::encode).collect();
    let href = format!("/tasks/{}/{run}/artifacts/{}", status.task, path.join("/"));
    let link = cell(Value::Link { text: name.to_owned(), href });
    if artifact.get("storageType").and_then(Json::as_str) == Some("error") {
        link.and("missing").at(Level::Bad)
    } else {
        link
    }
}
