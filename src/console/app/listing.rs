//! What pages about tasks share.

use axum::http::StatusCode;
use jiff::Timestamp;

use super::PageError;
use super::targets::QueueTarget;
use crate::console::rows::{Level, Table, Value, cell, maybe};
use crate::console::task::status::{FoundTask, TaskState};
use journeyman_domain::id::TaskId;
use journeyman_domain::limits::CONSOLE_TASKS_SHOWN;
use journeyman_worker::task::formats::is_slugid;

/// The time that has passed, not below 0.
pub(super) fn seconds(from: Timestamp, to: Timestamp) -> f64 {
    to.duration_since(from).as_secs_f64().max(0.0)
}

pub(super) fn level(state: TaskState) -> Level {
    match state {
        TaskState::Completed => Level::Good,
        TaskState::Failed | TaskState::Exception => Level::Bad,
        TaskState::Unscheduled | TaskState::Pending | TaskState::Running | TaskState::Unknown => Level::Plain,
    }
}

pub(super) fn path(target: &QueueTarget, task: &str) -> String {
    format!("/tasks/{}/{task}", target.name)
}

pub(super) fn table(target: &QueueTarget, title: &str, found: &[FoundTask]) -> Table {
    let now = Timestamp::now();
    let rows = found.iter().take(CONSOLE_TASKS_SHOWN).map(|task| {
        let status = &task.status;
        let name = if task.name.is_empty() { &status.task } else { &task.name };
        let run = status.runs.last();
        let took = run.and_then(|run| Some(seconds(run.started_at?, run.resolved_at?)));
        vec![
            cell(Value::Link { text: name.clone(), href: path(target, &status.task) })
                .note(Value::Code(status.task.clone())),
            cell(status.summary()).at(level(status.state)),
            cell(status.task_queue()),
            maybe(task.created, |at| Value::Ago(seconds(at, now))),
            maybe(took, Value::Took),
            maybe(run.and_then(|run| run.worker_id.clone()), Value::Text),
        ]
    });
    let table = Table::new(title, &["task", "state", "queue", "created", "took", "worker"], rows);
    Table { more: found.len().saturating_sub(CONSOLE_TASKS_SHOWN), ..table.or("No task is like this.") }
}

/// # Errors
///
/// A text that is no id of a task.
pub(super) fn parse_id(text: &str) -> Result<TaskId, PageError> {
    let valid = TaskId::parse(text).filter(|_| is_slugid(text));
    valid.ok_or_else(|| PageError(StatusCode::BAD_REQUEST, format!("{text:?} is no id of a task")))
}
