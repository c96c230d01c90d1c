//! Says why a task waits or did not complete, and what happens next.

use std::fmt::Write as _;
use std::future::Future;

use jiff::Timestamp;
use serde_json::Value;
use tokio::time::timeout;

use super::log::{open_log, read_end};
use super::status::{TaskState, TaskStatus};
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

/// Why a task waits or did not complete, what happens next, and the end of its log. Empty for any other task.
#[derive(Debug, Default)]
pub(crate) struct TaskCard {
    pub(crate) why: String,
    pub(crate) next: String,
    /// `None` if its end was not reached in time.
    pub(crate) log: Option<Vec<String>>,
}

impl TaskCard {
    /// Lines below the status of the task.
    pub(crate) fn text(&self, task: &str) -> String {
        let mut out = String::new();
        let mut add = |name: &str, text: &str| {
            if !text.is_empty() {
                // Writing to a String cannot fail.
                _ = writeln!(out, "  {name:6} {text}");
            }
        };
        add("why", &self.why);
        add("next", &self.next);
        match &self.log {
            None => {
                let limit = TASK_CARD_TIMEOUT.as_secs();
                add("log", &format!("not read to its end in {limit} s; `journeyman task log {task}` prints it"));
            }
            Some(lines) if !lines.is_empty() => {
                add("log", &format!("its last {} lines; `journeyman task log {task}` prints all of it", lines.len()));
                lines.iter().for_each(|line| add("", &format!("| {}", cut(line, LINE_CHARS_MAX))));
            }
            Some(_) => {}
        }
        out
    }
}

/// Asks the queue; takes at most some seconds. `blocked` is why a worker that is known to be the only one claims nothing.
///
/// The log is one with this prefix.
pub(crate) async fn read(api: &Api, status: &TaskStatus, blocked: Option<String>, prefix: &str) -> TaskCard {
    let mut card = TaskCard { log: Some(Vec::new()), ..TaskCard::default() };
    if !status.is_resolved()
        && let [.., before, now] = status.runs.as_slice()
    {
        let left = counted(status.retries_left as usize, "retry", "retries");
        let run = now.number;
        card.next = format!("run {run}, because the one before ended as {}; {left} left", before.summary());
    }
    match status.state {
        TaskState::Pending => card.why = waiting(api, status, blocked).await,
        TaskState::Unscheduled => "it waits until the tasks that it depends on are resolved".clone_into(&mut card.why),
        TaskState::Failed | TaskState::Exception => {
            let mut log = end_of_log(api, status, prefix).await;
            card.why = reason(status, log.as_deref().unwrap_or_default());
            card.next = next(status);
            if let Some(lines) = &mut log {
                lines.drain(..lines.len().saturating_sub(LOG_LINES));
            }
            card.log = log;
        }
        TaskState::Running | TaskState::Completed | TaskState::Unknown => {}
    }
    card
}

/// Time and text of a line of the worker.
pub(crate) fn split_note(line: &str) -> Option<(Timestamp, &str)> {
    split_time(line.strip_prefix(NOTE)?)
}

/// Time and text of `TIME] TEXT`, a line without its `[`.
pub(crate) fn split_time(line: &str) -> Option<(Timestamp, &str)> {
    let (time, text) = line.split_once("] ")?;
    Some((time.parse().ok()?, text))
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
    let notes: Vec<String> = log.iter().filter_map(|line| Some(split_note(line)?.1.to_owned())).collect();
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
async fn end_of_log(api: &Api, status: &TaskStatus, prefix: &str) -> Option<Vec<String>> {
    let started = status.runs.last().filter(|run| run.started_at.is_some());
    let (Some(run), Some(task)) = (started, TaskId::parse(&status.task)) else { return Some(Vec::new()) };
    let run = Run { task, run: run.number };
    let reading = async {
        let Ok(download) = open_log(api, &run, prefix).await else { return Some(Vec::new()) };
        let end = read_end(download, TASK_CARD_LOG_BYTES_MAX, TASK_CARD_TIMEOUT, None).await;
        end.is_whole.then(|| end.text.lines().map(str::to_owned).collect())
    };
    timeout(TASK_CARD_TIMEOUT, reading).await.ok().flatten()
}

/// Who could claim a pending task, and why no worker has.
async fn waiting(api: &Api, status: &TaskStatus, blocked: Option<String>) -> String {
    let queue = status.task_queue();
    let mut said = vec![within(workers_of(api, &queue)).await.unwrap_or_else(|| {
        format!(
            "the queue does not tell which workers claim from {queue}; that needs the scope queue:list-workers:{queue}"
        )
    })];
    said.extend(within(depth_of(api, &queue)).await);
    said.extend(blocked);
    said.join("; ")
}

async fn within(asking: impl Future<Output = Option<String>>) -> Option<String> {
    timeout(TASK_CARD_TIMEOUT, asking).await.ok().flatten()
}

async fn workers_of(api: &Api, queue: &str) -> Option<String> {
    let workers = api.workers(queue).await.ok()?.entries.len();
    Some(match workers {
        0 => format!("no worker has claimed from {queue} lately{}", other_queues(api, queue).await),
        1 => format!("1 worker has claimed from {queue} lately"),
        _ => format!("{workers} workers have claimed from {queue} lately"),
    })
}

async fn depth_of(api: &Api, queue: &str) -> Option<String> {
    let pending = api.pending_count(queue).await.ok()?;
    let claimed = api.claimed_tasks(queue, None).await.ok();
    let running =
        claimed.map_or_else(String::new, |page| format!("{} running, ", counted(page.entries.len(), "task", "tasks")));
    let first = api.pending_tasks(queue, None).await.ok().and_then(|page| page.entries.into_iter().next());
    let since =
        first.as_ref().and_then(|entry| entry.get("inserted").and_then(Value::as_str)?.parse::<Timestamp>().ok());
    let oldest = since.map_or_else(String::new, |since| {
        format!(", the next one for {}", format_seconds(Timestamp::now().duration_since(since).as_secs_f64()))
    });
    Some(format!("{running}{pending} pending{oldest}"))
}

/// Queues that workers claim from, the one with the most similar name first.
async fn other_queues(api: &Api, queue: &str) -> String {
    let Ok(page) = api.task_queues().await else { return String::new() };
    let mut names: Vec<&str> = page.entries.iter().filter_map(|entry| entry.get("taskQueueId")?.as_str()).collect();
    names.retain(|name| *name != queue);
    let near = suggest(queue, names.iter().copied());
    names.sort_by_key(|name| Some(*name) != near);
    let mut told = Vec::new();
    for name in names.into_iter().take(TASK_CARD_WORKERS_MAX) {
        match api.workers(name).await.map(|page| page.entries.len()) {
            Ok(0) | Err(_) => {}
            Ok(workers) => told.push(format!("{name} has {}", counted(workers, "worker", "workers"))),
        }
    }
    if told.is_empty() { ", nor from another queue".to_owned() } else { format!("; {}", told.join(", ")) }
}

fn counted(count: usize, one: &str, several: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {several}") }
}
