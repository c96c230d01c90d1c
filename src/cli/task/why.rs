//! Says why a task waits or did not complete, and what happens next.

use std::fmt::Write as _;
use std::future::Future;

use jiff::Timestamp;
use serde_json::Value;
use tokio::time::timeout;

use super::task_status::{TaskState, TaskStatus};
use crate::cli::queue_client::QueueClient;
use crate::console::text::cut;
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::limits::{TASK_CARD_LOG_BYTES_MAX, TASK_CARD_TIMEOUT, TASK_CARD_WORKERS_MAX};
use journeyman_domain::units::format_seconds;
use journeyman_platform::settings::problem::suggest;
use journeyman_worker::source::taskcluster::Api;

/// The lines of the log that are shown of a task that did not complete.
const LOG_LINES: usize = 20;

const LINE_CHARS_MAX: usize = 200;

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
    if !status.is_resolved()
        && let [.., before, now] = status.runs.as_slice()
    {
        let left = counted(status.retries_left as usize, "retry", "retries");
        add("next", &format!("run {}, because the one before ended as {}; {left} left", now.number, before.summary()));
    }
    match status.state {
        TaskState::Pending => add("why", &waiting(client, status).await),
        TaskState::Unscheduled => add("why", "it waits until the tasks that it depends on are resolved"),
        TaskState::Failed | TaskState::Exception => {
            let log = end_of_log(&client.api, status).await;
            let lines = log.as_deref().unwrap_or_default();
            add("why", &reason(status, lines));
            add("next", &next(status));
            let shown = lines.len().min(LOG_LINES);
            if log.is_none() {
                add(
                    "log",
                    &format!(
                        "not read to its end in {} s; `journeyman task log {}` prints it",
                        TASK_CARD_TIMEOUT.as_secs(),
                        status.task
                    ),
                );
            } else if shown > 0 {
                add("log", &format!("its last {shown} lines; `journeyman task log {}` prints all of it", status.task));
                lines[lines.len() - shown..]
                    .iter()
                    .for_each(|line| add("", &format!("| {}", cut(line, LINE_CHARS_MAX))));
            }
        }
        TaskState::Running | TaskState::Completed | TaskState::Unknown => {}
    }
    out
}

/// How the worker's last word on a payload begins.
const VERDICTS: [&str; 6] =
    ["failed: ", "failed, ", "not completed", "not started", "released: ", "the payload is malformed"];

/// The verdict of the worker in the log, or else its last line about the task, or what the queue says.
fn reason(status: &TaskStatus, log: &[String]) -> String {
    let of_queue = ["canceled", "deadline-exceeded", "claim-expired"];
    if status.runs.last().and_then(|run| run.reason.as_deref()).is_some_and(|reason| of_queue.contains(&reason)) {
        return meaning(status).to_owned();
    }
    let note = |line: &str| {
        let (time, note) = line.strip_prefix(NOTE)?.split_once("] ")?;
        time.parse::<Timestamp>().ok().map(|_| note.to_owned())
    };
    let notes: Vec<String> = log.iter().filter_map(|line| note(line)).collect();
    let is_verdict = |note: &String| VERDICTS.iter().any(|start| note.starts_with(start));
    let is_about = |note: &String| !["  ", "result: ", "resources: "].iter().any(|start| note.starts_with(start));
    // Commands may print what looks like a verdict, but not after their result.
    let ended = notes.iter().rposition(|note| note.starts_with("result: ")).unwrap_or(0);
    let verdict = notes[ended..].iter().rposition(is_verdict).map(|at| at + ended);
    let last = verdict.or_else(|| notes.iter().rposition(is_about));
    let Some(last) = last else { return meaning(status).to_owned() };
    let reason = notes[last].strip_prefix("failed: ").unwrap_or(&notes[last]);
    let mut details: Vec<&str> = notes[last + 1..].iter().filter_map(|note| note.strip_prefix("  ")).collect();
    if !is_verdict(&notes[last]) {
        details.extend(notes[..last].iter().filter(|note| note.starts_with("artifact ")).map(String::as_str));
    }
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

/// The last lines of the log of the last run, none if it has no log; `None` if its end was not reached in time.
async fn end_of_log(api: &Api, status: &TaskStatus) -> Option<Vec<String>> {
    let started = status.runs.last().filter(|run| run.started_at.is_some());
    let (Some(run), Some(task)) = (started, TaskId::parse(&status.task)) else { return Some(Vec::new()) };
    let run = Run { task, run: run.number };
    let mut end = Vec::new();
    let reading = async {
        let Ok(mut download) = super::open_log(api, &run).await else { return true };
        loop {
            match download.next_chunk().await {
                Ok(Some(chunk)) => end.extend_from_slice(&chunk),
                Ok(None) => return true,
                Err(_) => return false,
            }
            end.drain(..end.len().saturating_sub(TASK_CARD_LOG_BYTES_MAX));
        }
    };
    let is_whole = timeout(TASK_CARD_TIMEOUT, reading).await.unwrap_or(false);
    is_whole.then(|| String::from_utf8_lossy(&end).lines().map(str::to_owned).collect())
}

/// Who could claim a pending task, and why no worker has.
async fn waiting(client: &QueueClient, status: &TaskStatus) -> String {
    let queue = status.task_queue();
    let mut said = vec![within(workers_of(client, &queue)).await.unwrap_or_else(|| {
        format!(
            "the queue does not tell which workers claim from {queue}; that needs the scope queue:list-workers:{queue}"
        )
    })];
    said.extend(within(depth_of(client, &queue)).await);
    said.extend(client.blocked_worker().await);
    said.join("; ")
}

async fn within(asking: impl Future<Output = Option<String>>) -> Option<String> {
    timeout(TASK_CARD_TIMEOUT, asking).await.ok().flatten()
}

async fn workers_of(client: &QueueClient, queue: &str) -> Option<String> {
    let workers = client.api.workers(queue).await.ok()?.entries.len();
    Some(match workers {
        0 => format!("no worker has claimed from {queue} lately{}", other_queues(client, queue).await),
        1 => format!("1 worker has claimed from {queue} lately"),
        _ => format!("{workers} workers have claimed from {queue} lately"),
    })
}

async fn depth_of(client: &QueueClient, queue: &str) -> Option<String> {
    let pending = client.api.pending_count(queue).await.ok()?;
    let claimed = client.api.claimed_tasks(queue, None).await.ok();
    let running =
        claimed.map_or_else(String::new, |page| format!("{} running, ", counted(page.entries.len(), "task", "tasks")));
    let first = client.api.pending_tasks(queue, None).await.ok().and_then(|page| page.entries.into_iter().next());
    let since =
        first.as_ref().and_then(|entry| entry.get("inserted").and_then(Value::as_str)?.parse::<Timestamp>().ok());
    let oldest = since.map_or_else(String::new, |since| {
        format!(", the next one for {}", format_seconds(Timestamp::now().duration_since(since).as_secs_f64()))
    });
    Some(format!("{running}{pending} pending{oldest}"))
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
            Ok(workers) => told.push(format!("{name} has {}", counted(workers, "worker", "workers"))),
        }
    }
    if told.is_empty() { ", nor from another queue".to_owned() } else { format!("; {}", told.join(", ")) }
}

fn counted(count: usize, one: &str, several: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {several}") }
}
