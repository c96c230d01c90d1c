//! Renders the page of `journeyman dev`.

use jiff::Timestamp;
use maud::{Markup, html};
use serde_json::Value;

use super::{Filter, TaskDetail, TaskList};
use crate::cli::task::task_status::{FoundTask, RunStatus, TaskState, TaskStatus};
use crate::control::WorkerStatusReply;
use crate::observe::page::{self, CommandButtons, HtmlPage, PageContent, SnapshotClock, build_page, format_seconds};

fn page(title: String, main: Markup, aside: Markup) -> HtmlPage {
    let parts = PageContent {
        title,
        name: html! { nav { a href="/" { "Tasks" } a href="/worker" { "Worker" } } },
        main,
        aside,
        buttons: CommandButtons::Forms,
        links: html! { "this page is served to this machine only" },
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
    };
    build_page(parts, clock())
}

fn clock() -> SnapshotClock {
    SnapshotClock { now: Timestamp::now() }
}

pub(super) fn worker(status: &WorkerStatusReply) -> HtmlPage {
    page(format!("worker {}", status.id), page::worker::body(status, &[], clock()), html! {})
}

pub(super) fn list(list: &TaskList) -> HtmlPage {
    let main = html! {
        (queues(list))
        (filter_form(list))
        @if list.tasks.is_empty() { (no_tasks(&list.filter)) } @else { (tasks(&list.tasks)) }
        @if let Some(next) = &list.next { p { a href=(older(&list.filter, next)) { "older tasks" } } }
    };
    page("tasks".to_owned(), main, html! {})
}

fn queues(list: &TaskList) -> Markup {
    let worker = &list.worker.snapshot;
    html! {
        dl.facts {
            @for (queue, pending) in &list.pending {
                @let running = worker.claims.iter().filter(|claim| queue.ends_with(&format!("/{}", claim.source))).count();
                div { dt { "queue " (queue) } dd { (pending) " pending" small { (running) " running" } } }
            }
            div {
                dt { "worker" }
                dd {
                    (worker.occupancy())
                    small {
                        @match &worker.blocked_message {
                            Some(why) => { (worker.state.as_str()) ": " (why) },
                            None => { "claiming" },
                        }
                    }
                }
            }
        }
    }
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

fn no_tasks(filter: &Filter) -> Markup {
    html! {
        div.empty {
            @if filter.name.is_empty() && filter.state.is_empty() && filter.queue.is_empty() {
                p { "No tasks yet. " code { "journeyman task create --wait -- /bin/echo hello" } " creates one." }
            } @else {
                p { "No task matches. " a href="/" { "All tasks" } }
            }
        }
    }
}

fn older(filter: &Filter, next: &str) -> String {
    let Filter { name, state, queue, .. } = filter;
    let query = [("name", name.as_str()), ("state", state), ("queue", queue), ("after", next)];
    let query = query.map(|(key, value)| format!("{key}={}", urlencoding::encode(value)));
    format!("/?{}", query.join("&"))
}

fn tasks(tasks: &[FoundTask]) -> Markup {
    html! {
        table {
            thead { tr { th { "task" } th { "state" } th { "queue" } th { "created" } th { "took" } } }
            tbody {
                @for FoundTask { status, name, created } in tasks {
                    tr {
                        td data-label="task" {
                            a.name href={ "/tasks/" (status.task) } { (name) }
                            code.short { (status.task) }
                        }
                        td data-label="state" { (state_tag(status.state, &status.summary())) }
                        td.short data-label="queue" { (status.task_queue()) }
                        td.short data-label="created" { (time_ago(*created)) }
                        td.short data-label="took" { (status.runs.last().map_or_else(|| html! { "–" }, took)) }
                    }
                }
            }
        }
    }
}

fn state_tag(state: TaskState, text: &str) -> Markup {
    let class = match state {
        TaskState::Completed => "good",
        TaskState::Failed | TaskState::Exception => "bad",
        TaskState::Running => "ink4",
        TaskState::Unscheduled | TaskState::Pending | TaskState::Unknown => "dim",
    };
    html! { span class=(class) { (text) } }
}

fn time_ago(at: Option<Timestamp>) -> Markup {
    let clock = clock();
    at.map_or_else(|| html! { "–" }, |at| clock.ago(clock.now.duration_since(at).as_secs_f64()))
}

/// So far, while it runs.
fn took(run: &RunStatus) -> Markup {
    let Some(started) = run.started_at else { return html! { "–" } };
    let until = run.resolved_at.unwrap_or_else(Timestamp::now);
    let seconds = until.duration_since(started).as_secs_f64();
    html! { @if seconds < 10.0 { (format!("{:.1}s", seconds.max(0.0))) } @else { (format_seconds(seconds)) } }
}

pub(super) fn task(detail: &TaskDetail) -> HtmlPage {
    let TaskDetail { status, definition, shown_run, .. } = detail;
    let text = |path: &str| definition.pointer(path).and_then(Value::as_str).unwrap_or_default();
    let name = text("/metadata/name");
    let shown = status.runs.iter().find(|run| Some(run.number) == *shown_run);
    let main = html! {
        h2.title { (name) }
        div {
            code.short { (status.task) } " "
            button type="button" data-copy=(status.task) hidden { "copy" } " "
            (buttons(detail))
        }
        @if !text("/metadata/description").is_empty() { p.dim { (text("/metadata/description")) } }
        dl.facts {
            div { dt { "state" } dd { (state_tag(status.state, &status.summary())) } }
            div { dt { "queue" } dd { (status.task_queue()) } }
            div { dt { "created" } dd { (time_ago(time(definition, "created"))) } }
            div { dt { "deadline" } dd { (time_until(time(definition, "deadline"))) } }
            div { dt { "priority" } dd { (text("/priority")) } }
            div { dt { "retries left" } dd { (status.raw.get("retriesLeft").and_then(Value::as_u64).unwrap_or(0)) } }
        }
        h2 { "Runs" }
        @if status.runs.is_empty() { div.empty { p { "It waits for the tasks that it depends on." } } }
        @else { (runs(detail)) }
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

fn time(definition: &Value, key: &str) -> Option<Timestamp> {
    definition.get(key)?.as_str()?.parse().ok()
}

fn time_until(at: Option<Timestamp>) -> Markup {
    let clock = clock();
    let seconds = at.map(|at| at.duration_since(clock.now).as_secs_f64());
    html! {
        @match seconds {
            Some(ahead) if ahead >= 0.0 => { "in " (clock.ahead(ahead)) },
            Some(passed) => { (clock.ago(-passed)) },
            None => { "–" },
        }
    }
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

fn runs(TaskDetail { status, artifacts, shown_run, .. }: &TaskDetail) -> Markup {
    html! {
        table {
            thead { tr { th { "run" } th { "state" } th { "worker" } th { "started" } th { "took" } th { "artifacts" } } }
            tbody {
                @for run in status.runs.iter().rev() {
                    tr {
                        td.short data-label="run" {
                            (run.number) " "
                            @if Some(run.number) != *shown_run { a href={ "?run=" (run.number) } { "log" } }
                        }
                        td data-label="state" { (state_tag(run.state, &run.summary())) }
                        td data-label="worker" { (run.worker_id.as_deref().unwrap_or("–")) }
                        td.short data-label="started" {
                            (time_ago(run.started_at))
                            @if let (Some(scheduled), Some(started)) = (run.scheduled_at, run.started_at) {
                                small { "waited " (format_seconds(started.duration_since(scheduled).as_secs_f64())) }
                            }
                        }
                        td.short data-label="took" { (took(run)) }
                        td data-label="artifacts" {
                            @for (_, listed) in artifacts.iter().filter(|(number, _)| *number == run.number) {
                                ul.plain { @for artifact in listed { (artifact_link(status, run.number, artifact)) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn artifact_link(status: &TaskStatus, run: u32, artifact: &Value) -> Markup {
    let name = artifact.get("name").and_then(Value::as_str).unwrap_or_default();
    let path: Vec<_> = name.split('/').map(urlencoding::encode).collect();
    html! {
        li {
            a href={ "/tasks/" (status.task) "/" (run) "/artifacts/" (path.join("/")) } { (name) }
            @if artifact.get("storageType").and_then(Value::as_str) == Some("error") { span.bad { " missing" } }
        }
    }
}
