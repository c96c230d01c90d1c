//! Task queues: what they hold, and what happened to their tasks.

use axum::extract::{Path, State};
use futures_util::future::join_all;
use jiff::Timestamp;
use maud::{Markup, html};
use serde::Deserialize;
use serde_json::Value as Json;

use super::listing::{seconds, table as task_table};
use super::targets::QueueTarget;
use super::{PageError, PageResult, QUEUE_REFRESH_SECONDS, Shared, within, within_moment};
use crate::console::page::{self, PageContent};
use crate::console::picture::{histogram, legend, lines};
use crate::console::rows::{Cell, Level, NONE, Section, Table, Value, cell, maybe, row};
use crate::console::task::status::FoundTask;
use journeyman_domain::limits::{CONSOLE_QUEUES_COUNTED, CONSOLE_TASKS_MEASURED};
use journeyman_domain::refusal::Refusal;
use journeyman_worker::source::CallError;
use journeyman_worker::source::taskcluster::TaskSearch;

/// What a task queue holds.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct TaskQueue {
    task_queue_id: String,
    pending_tasks: Option<u64>,
    claimed_tasks: Option<u64>,
    oldest_pending: Option<Timestamp>,
    /// Only the queue of this project counts them.
    minutes: Option<Vec<Minute>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Minute {
    from: Timestamp,
    created: u32,
    completed: u32,
    failed: u32,
    exceptions: u32,
}

impl TaskQueue {
    fn sum(&self, count: impl Fn(&Minute) -> u32) -> Option<u64> {
        let minutes = self.minutes.as_ref()?;
        Some(minutes.iter().map(|minute| u64::from(count(minute))).sum())
    }
}

/// A Taskcluster is asked for each queue by itself, or for one only.
async fn task_queues(target: &QueueTarget, only: Option<&str>) -> Result<Vec<TaskQueue>, CallError> {
    let read = |entry: &Json| TaskQueue::deserialize(entry).unwrap_or_default();
    match target.api.activity().await {
        Ok(page) => Ok(page.entries.iter().map(read).collect()),
        Err(CallError { refusal: Refusal::Gone, .. }) => {
            let found = match only {
                Some(queue) => vec![TaskQueue { task_queue_id: queue.to_owned(), ..TaskQueue::default() }],
                None => target.api.task_queues().await?.entries.iter().take(CONSOLE_QUEUES_COUNTED).map(read).collect(),
            };
            let counted = found.into_iter().map(async |mut queue| {
                queue.pending_tasks = target.api.pending_count(&queue.task_queue_id).await.ok();
                queue
            });
            Ok(join_all(counted).await)
        }
        Err(error) => Err(error),
    }
}

/// The task queues of a queue, for the overview.
pub(super) async fn summary(target: &QueueTarget) -> Markup {
    let found = within_moment(task_queues(target, None)).await;
    let title = cell(Value::Link { text: format!("queue {}", target.name), href: format!("/tasks/{}", target.name) });
    match found {
        Err(PageError(_, why)) => {
            page::section(&Section { title, alerts: vec![(Level::Bad, why)], ..Section::default() })
        }
        Ok(queues) => {
            let section = Section { title, tables: vec![table(target, &queues)], ..Section::default() };
            html! { (page::section(&section)) (throughput(&queues)) }
        }
    }
}

fn table(target: &QueueTarget, queues: &[TaskQueue]) -> Table {
    let now = Timestamp::now();
    let count = |count: Option<u64>| maybe(count, Value::Count);
    let rows = queues.iter().map(|queue| {
        let href = format!("/queues/{}/{}", target.name, queue.task_queue_id);
        let done = queue.sum(|minute| minute.completed);
        let failed = queue.sum(|minute| minute.failed + minute.exceptions);
        vec![
            cell(Value::Link { text: queue.task_queue_id.clone(), href }),
            count(queue.pending_tasks),
            count(queue.claimed_tasks),
            maybe(queue.oldest_pending, |since| Value::Lasts(seconds(since, now))),
            count(done),
            count(failed).at(if failed.unwrap_or(0) > 0 { Level::Bad } else { Level::Plain }),
        ]
    });
    let columns =
        ["task queue", "pending", "running", "oldest pending", "completed, last hour", "not completed, last hour"];
    Table::new("task queues", &columns, rows).or("No task has been created yet.")
}

/// The tasks of the last hour, by minute.
fn throughput(queues: &[TaskQueue]) -> Markup {
    const MINUTES: usize = 60;
    if queues.iter().all(|queue| queue.minutes.is_none()) {
        return html! {};
    }
    let now = Timestamp::now();
    let by_minute = |count: fn(&Minute) -> u32| {
        let mut counts = vec![0; MINUTES];
        for minute in queues.iter().flat_map(|queue| queue.minutes.iter().flatten()) {
            let ago = now.as_second().div_euclid(60) - minute.from.as_second().div_euclid(60);
            let index = usize::try_from(ago).ok().and_then(|ago| (MINUTES - 1).checked_sub(ago));
            if let Some(sum) = index.and_then(|index| counts.get_mut(index)) {
                *sum += count(minute);
            }
        }
        counts
    };
    let series = [
        ("wait", "created", by_minute(|minute| minute.created)),
        ("good", "completed", by_minute(|minute| minute.completed)),
        ("bad", "not completed", by_minute(|minute| minute.failed + minute.exceptions)),
    ];
    let is_busy = |minute: &usize| series.iter().any(|(_, _, counts)| counts[*minute] > 0);
    let rows = (0..MINUTES).rev().filter(is_busy).map(|minute| {
        let ago = cell(format!("{} min ago", MINUTES - 1 - minute));
        std::iter::once(ago).chain(series.iter().map(|(_, _, counts)| cell(counts[minute]))).collect()
    });
    let numbers = Table::new("", &["minute", "created", "completed", "not completed"], rows).or("None yet.");
    html! {
        h3 { "tasks by minute, since the queue started" }
        (lines(&series, ["an hour ago", "now"]))
        (legend(&[("wait", "created"), ("good", "completed"), ("bad", "not completed")]))
        details data-name="minutes" { summary { "the same as numbers" } (page::table(&numbers)) }
    }
}

/// The upper bounds of columns of times, and their names.
const TIMES: [(f64, &str); 6] =
    [(1.0, "1 s"), (10.0, "10 s"), (60.0, "1 min"), (600.0, "10 min"), (3600.0, "1 h"), (f64::INFINITY, "more")];

fn times(name: &str, seconds: impl Iterator<Item = f64> + Clone) -> Markup {
    let within = |index: usize, took: f64| took <= TIMES[index].0 && (index == 0 || took > TIMES[index - 1].0);
    let column = |(index, (_, label)): (usize, &(f64, &str))| {
        let count = seconds.clone().filter(|took| within(index, *took)).count();
        ((*label).to_owned(), u32::try_from(count).unwrap_or(u32::MAX))
    };
    histogram(name, &TIMES.iter().enumerate().map(column).collect::<Vec<_>>())
}

/// Id, group and latest task of the workers that have claimed from a queue lately.
pub(super) async fn workers_of_queue(target: &QueueTarget) -> Result<Vec<(String, String, String)>, CallError> {
    let queues = target.api.task_queues().await?.entries;
    let names = queues.iter().take(CONSOLE_QUEUES_COUNTED).filter_map(|queue| queue["taskQueueId"].as_str());
    let found = join_all(names.map(|name| target.api.workers(name))).await;
    let text = |entry: &Json, path: &str| entry.pointer(path).and_then(Json::as_str).unwrap_or(NONE).to_owned();
    let entries = found.into_iter().filter_map(Result::ok).flat_map(|page| page.entries);
    Ok(entries
        .map(|entry| (text(&entry, "/workerId"), text(&entry, "/workerGroup"), text(&entry, "/latestTask/taskId")))
        .collect())
}

fn workers(found: &[Json]) -> Table {
    let now = Timestamp::now();
    let rows = found.iter().map(|entry| {
        let text = |path: &str| entry.pointer(path).and_then(Json::as_str).unwrap_or(NONE);
        let since = text("/firstClaim").parse::<Timestamp>().ok();
        let since: Cell = maybe(since, |since| Value::Ago(seconds(since, now)));
        vec![
            cell(text("/workerId")),
            cell(text("/workerGroup")),
            since,
            cell(Value::Code(text("/latestTask/taskId").to_owned())),
        ]
    });
    Table::new("workers that claimed lately", &["worker", "group", "first claim", "latest task"], rows)
        .or("No worker has claimed from this queue lately.")
}

/// One task queue.
pub(super) async fn page(State(console): Shared, Path((name, queue)): Path<(String, String)>) -> PageResult {
    let target = console.queue(&name)?;
    let search =
        TaskSearch { queue: queue.clone(), limit: CONSOLE_TASKS_MEASURED.to_string(), ..TaskSearch::default() };
    let asked = async {
        let (held, found, workers) = tokio::join!(
            task_queues(target, Some(&queue)),
            target.api.find_tasks(&search, None),
            target.api.workers(&queue)
        );
        Ok::<_, CallError>((held?, found, workers))
    };
    let (held, found, found_workers) = Box::pin(within(asked)).await?;
    let one: Vec<TaskQueue> = held.into_iter().filter(|one| one.task_queue_id == queue).collect();
    let Some(held) = one.first() else {
        return Err(PageError::not_found(format!("no task of {queue} has been created")));
    };
    // A Taskcluster does not list tasks that are resolved.
    let entries = found.map(|page| page.entries).unwrap_or_default();
    let found: Vec<FoundTask> = entries.iter().filter_map(|entry| FoundTask::read(entry).ok()).collect();
    let runs = || found.iter().flat_map(|task| &task.status.runs);
    let waited = runs().filter_map(|run| Some(seconds(run.scheduled?, run.started_at?)));
    let took = runs().filter_map(|run| Some(seconds(run.started_at?, run.resolved_at?)));
    let now = Timestamp::now();
    let facts = vec![
        row("pending", maybe(held.pending_tasks, Value::Count)),
        row("running", maybe(held.claimed_tasks, Value::Count)),
        row("oldest pending", maybe(held.oldest_pending, |since| Value::Lasts(seconds(since, now)))),
    ];
    let workers = workers(&found_workers.map(|page| page.entries).unwrap_or_default());
    let title = cell(format!("task queue {queue}"));
    let section = Section { title, facts, tables: vec![workers], ..Section::default() };
    let main = html! {
        (page::section(&section))
        section {
            (throughput(&one))
            @if !found.is_empty() {
                h3 { "times of the latest " (found.len()) " tasks" }
                div.histograms { (times("time in queue", waited)) (times("run time", took)) }
            }
            (page::table(&task_table(target, "latest tasks", &found)))
            p { a href={ "/tasks/" (name) "?queue=" (urlencoding::encode(&queue)) } { "all tasks of this queue" } }
        }
    };
    let content = console.page(&queue, html! { "queue " (name) }, main);
    Ok(PageContent { refresh_seconds: QUEUE_REFRESH_SECONDS, ..content }.build())
}
