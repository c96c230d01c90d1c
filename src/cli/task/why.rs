//! Says why a task waits or did not complete, and what happens next.

use std::fmt::Write as _;

use jiff::Timestamp;
use serde_json::Value;
use tokio::time::timeout;

use super::task_status::{TaskState, TaskStatus};
use crate::cli::queue_client::QueueClient;
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::limits::{TASK_CARD_LOG_BYTES_MAX, TASK_CARD_TIMEOUT, TASK_CARD_WORKERS_MAX};
use journeyman_platform::settings::problem::suggest;
use journeyman_worker::source::taskcluster::Api;

/// The lines of the log that are shown of a task that did not complete.
const LOG_LINES: usize = 20;

/// Begins the lines of the worker in a task's log.
const NOTE: &str = "[journeyman ";

/// Lines below the status of a task: why it waits or did not complete, what is next, and the end of its log; empty for any other task.
pub(super) async fn explain(client: &QueueClient, status: &TaskStatus) -> String {
    let mut out = String::new();
    let mut add = |name: &str, text: &str| {
        if !text.is_empty() {
            // Writing to a String cannot fail.
            _ = writeln!(out, "  {name:6} {text}");
        }
    };
    match status.state {
        TaskState::Pending => add("why", &waiting(client, status).await),
        TaskState::Unscheduled => add("why", "it waits until the tasks that it depends on are resolved"),
        TaskState::Failed | TaskState::Exception => {
            let lines = end_of_log(&client.api, status).await;
            add("why", &reason(status, &lines));
            add("next", &next(status));
            let shown = lines.len().min(LOG_LINES);
            if shown > 0 {
                add("log", &format!("its last {shown} lines; `journeyman task log {}` prints all of it", status.task));
                lines[lines.len() - shown..].iter().for_each(|line| add("", &format!("| {line}")));
            }
        }
        TaskState::Running | TaskState::Completed | TaskState::Unknown => {}
    }
    out
}

/// What the worker wrote last into the log, or what the queue says.
fn reason(status: &TaskStatus, log: &[String]) -> String {
    let notes: Vec<&str> =
        log.iter().filter_map(|line| line.strip_prefix(NOTE)?.split_once("] ")).map(|(_, note)| note).collect();
    let is_reason =
        |note: &&str| !note.starts_with(' ') && !note.starts_with("result: ") && !note.starts_with("resources: ");
    let last = notes.iter().rposition(is_reason);
    let Some(last) = last.filter(|_| !status.is_canceled()) else { return meaning(status).to_owned() };
    let reason = notes[last].strip_prefix("failed: ").unwrap_or(notes[last]);
    let details: Vec<&str> = notes[last + 1..].iter().filter_map(|note| note.strip_prefix("  ")).collect();
    if details.is_empty() { reason.to_owned() } else { format!("{reason} {}", details.join("; ")) }
}

fn meaning(status: &TaskStatus) -> &'static str {
    match status.runs.last().and_then(|run| run.reason.as_deref()).unwrap_or_default() {
        "canceled" => "it was canceled",
        "deadline-exceeded" => "its deadline passed before a worker had resolved it",
        "claim-expired" => "its worker did not extend the claim in time: it was lost, or could not reach the queue",
        "worker-shutdown" => "its worker stopped, and gave it back",
        "malformed-payload" => "the handler cannot run this payload",
        "resource-unavailable" => "a resource that it needs was not available",
        "internal-error" => "a fault of the worker or of the handler",
        "intermittent-task" => "it asked for another run",
        "failed" => "its code failed",
        _ => "",
    }
}

fn next(status: &TaskStatus) -> String {
    let rerun = format!("`journeyman task rerun {}` runs it again", status.task);
    match status.runs.last().and_then(|run| run.reason.as_deref()).unwrap_or_default() {
        "malformed-payload" => {
            "create a task with another payload; `journeyman handler schema NAME` prints what it has to be".to_owned()
        }
        "deadline-exceeded" => "create it again with a later deadline".to_owned(),
        "failed" => format!("a failure is not retried; {rerun}"),
        "canceled" | "internal-error" | "resource-unavailable" => rerun,
        _ => format!("no retries are left; {rerun}"),
    }
}

/// The end of the log of the last run, without what is not text; empty if it has none.
async fn end_of_log(api: &Api, status: &TaskStatus) -> Vec<String> {
    let Some(run) = status.runs.last().filter(|run| run.started_at.is_some()) else { return Vec::new() };
    let Some(task) = TaskId::parse(&status.task) else { return Vec::new() };
    let run = Run { task, run: run.number };
    let mut end = Vec::new();
    let reading = async {
        let Ok(mut download) = super::open_log(api, &run).await else { return };
        while let Ok(Some(chunk)) = download.next_chunk().await {
            end.extend_from_slice(&chunk);
            end.drain(..end.len().saturating_sub(TASK_CARD_LOG_BYTES_MAX));
        }
    };
    // What was read by then is better than no reason.
    drop(timeout(TASK_CARD_TIMEOUT, reading).await);
    let text = String::from_utf8_lossy(&end);
    text.lines().map(str::to_owned).collect()
}

/// Who could claim a pending task, and why no worker has; empty if the queue does not say.
async fn waiting(client: &QueueClient, status: &TaskStatus) -> String {
    let queue = status.task_queue();
    let asked = timeout(TASK_CARD_TIMEOUT, async {
        let workers = client.api.workers(&queue).await.ok()?.entries.len();
        if workers == 0 {
            return Some(format!("no worker has claimed from {queue} lately{}", other_queues(client, &queue).await));
        }
        let pending = client.api.pending_count(&queue).await.ok()?;
        let running = client.api.claimed_tasks(&queue, None).await.ok()?.entries.len();
        let first = client.api.pending_tasks(&queue, None).await.ok().and_then(|page| page.entries.into_iter().next());
        let since =
            first.as_ref().and_then(|entry| entry.get("inserted").and_then(Value::as_str)?.parse::<Timestamp>().ok());
        let oldest = since.map_or_else(String::new, |since| {
            format!(", the next one since {} s", (Timestamp::now() - since).get_seconds())
        });
        let (workers, tasks) = (counted(workers, "worker"), counted(running, "task"));
        let recently = if workers.starts_with('1') { "has" } else { "have" };
        Some(format!("{workers} {recently} claimed from {queue} lately; {tasks} running, {pending} pending{oldest}"))
    });
    let asked = asked.await.ok().flatten().unwrap_or_default();
    match client.blocked_worker().await {
        Some(why) if asked.is_empty() => why,
        Some(why) => format!("{asked}; {why}"),
        None => asked,
    }
}

/// Queues that workers claim from, the one with the most similar name first.
async fn other_queues(client: &QueueClient, queue: &str) -> String {
    let Ok(page) = client.api.task_queues().await else { return String::new() };
    let mut names: Vec<&str> = page.entries.iter().filter_map(|entry| entry.get("taskQueueId")?.as_str()).collect();
    names.retain(|name| *name != queue);
    let near = suggest(queue, names.iter().copied());
    names.sort_by_key(|name| Some(*name) != near);
    let mut told = Vec::new();
    for name in names.into_iter().take(TASK_CARD_WORKERS_MAX) {
        match client.api.workers(name).await.map(|page| page.entries.len()) {
            Ok(0) | Err(_) => {}
            Ok(workers) => told.push(format!("{name} has {}", counted(workers, "worker"))),
        }
    }
    if told.is_empty() { ", nor from another queue".to_owned() } else { format!("; {}", told.join(", ")) }
}

fn counted(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}
