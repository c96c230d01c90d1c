//! Parses the task status of a queue and formats it for users.

use std::fmt::Write as _;

use jiff::{SpanRound, Timestamp, Unit};
use serde::Deserialize;
use serde_json::Value;

use crate::console::text::strip_control_chars;
use journeyman_domain::named_enum;
use journeyman_domain::refusal::Refusal;
use journeyman_worker::source::CallError;

named_enum! {
    #[derive(Default)]
    pub enum TaskState {
        Unscheduled = "unscheduled",
        Pending = "pending",
        Running = "running",
        Completed = "completed",
        Failed = "failed",
        Exception = "exception",
        #[serde(other)]
        #[default]
        Unknown = "unknown",
    }
}

/// The runs that are described; `-o json` has all of them.
const RUNS_SHOWN: usize = 3;

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RunStatus {
    #[serde(rename = "runId")]
    pub number: u32,
    pub state: TaskState,
    #[serde(rename = "reasonResolved")]
    pub reason: Option<String>,
    pub worker_group: String,
    pub worker_id: Option<String>,
    pub scheduled: Option<Timestamp>,
    #[serde(rename = "started")]
    pub started_at: Option<Timestamp>,
    #[serde(rename = "resolved")]
    pub resolved_at: Option<Timestamp>,
    taken_until: Option<Timestamp>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TaskStatus {
    #[serde(rename = "taskId")]
    pub task: String,
    pub state: TaskState,
    provisioner_id: String,
    worker_type: String,
    pub retries_left: u32,
    pub runs: Vec<RunStatus>,
    /// The response of the queue.
    #[serde(skip)]
    pub raw: Value,
}

impl TaskStatus {
    /// A text of the queue's response; empty without it.
    pub fn text(&self, name: &str) -> &str {
        self.raw.get(name).and_then(Value::as_str).unwrap_or_default()
    }
}

/// An entry of the list of all tasks.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct FoundTask {
    pub status: TaskStatus,
    #[serde(default)]
    pub name: String,
    pub created: Option<Timestamp>,
}

impl FoundTask {
    pub(crate) fn read(entry: &Value) -> Result<Self, CallError> {
        Self::deserialize(entry).map_err(|error| CallError {
            refusal: Refusal::Rejected,
            message: format!("cannot read the list of tasks of the queue: {error}"),
        })
    }
}

impl TaskStatus {
    /// Missing properties are left out.
    pub fn read(raw: &Value) -> Result<Self, CallError> {
        let status = Self::deserialize(raw).map_err(|error| CallError {
            refusal: Refusal::Rejected,
            message: format!("cannot read the task status of the queue: {error}"),
        })?;
        Ok(Self { raw: raw.clone(), ..status })
    }

    pub fn is_resolved(&self) -> bool {
        matches!(self.state, TaskState::Completed | TaskState::Failed | TaskState::Exception)
    }

    /// True if this run, or by default one of the task, is not resolved.
    pub fn may_run(&self, run: Option<u32>) -> bool {
        match run.and_then(|number| self.runs.iter().find(|run| run.number == number)) {
            Some(run) => matches!(run.state, TaskState::Pending | TaskState::Running),
            None => run.is_none() && !self.is_resolved(),
        }
    }

    pub fn task_queue(&self) -> String {
        format!("{}/{}", self.provisioner_id, self.worker_type)
    }

    pub fn is_canceled(&self) -> bool {
        self.runs.last().and_then(|run| run.reason.as_deref()) == Some("canceled")
    }

    /// The state and a reason that differs from it.
    pub fn summary(&self) -> String {
        self.runs.last().map_or_else(|| self.state.as_str().to_owned(), RunStatus::summary)
    }

    /// Why a run (by default the last one) has no log, and what to do.
    pub fn missing_log_reason(&self, run: Option<u32>) -> String {
        let is_wanted = |found: &&RunStatus| run.is_none_or(|number| found.number == number);
        let Some(found) = self.runs.iter().rfind(is_wanted) else {
            return format!("{} is {} and has no such run, so there is no log", self.task, self.summary());
        };
        let reason = match found.state {
            TaskState::Exception if found.started_at.is_none() => "it never started",
            TaskState::Exception if found.reason.as_deref() == Some("canceled") => "its log is not stored, or not yet",
            TaskState::Unscheduled | TaskState::Pending | TaskState::Running => {
                "its log is stored at the end. --follow prints it as it grows, where the worker serves live logs; --wait waits for the \
                 end"
            }
            TaskState::Completed | TaskState::Failed | TaskState::Exception | TaskState::Unknown => "no log is stored",
        };
        let previous = found.number.checked_sub(1).map(|run| format!("; `--run {run}` shows the previous run"));
        format!("{}/{} is {}: {reason}{}", self.task, found.number, found.summary(), previous.unwrap_or_default())
    }

    pub fn describe(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let state = self.state.as_str();
        _ = writeln!(out, "{}  {state}  {}", self.task, self.task_queue());
        let folded = self.runs.len().saturating_sub(RUNS_SHOWN);
        if let Some(last) = self.runs[..folded].last() {
            _ = writeln!(out, "  runs 0 to {}, the last of them {}", last.number, last.summary());
        }
        for run in &self.runs[folded..] {
            _ = writeln!(out, "  run {}  {}", run.number, run.describe());
        }
        out
    }
}

impl RunStatus {
    pub fn summary(&self) -> String {
        let state = self.state.as_str();
        match self.reason.as_deref().filter(|reason| *reason != state) {
            Some(reason) => format!("{state} ({})", strip_control_chars(reason)),
            None => state.to_owned(),
        }
    }

    fn describe(&self) -> String {
        let mut out = self.summary();
        // Writing to a String cannot fail.
        if let Some(worker) = &self.worker_id {
            _ = write!(out, "  on {}/{worker}", self.worker_group);
        }
        if let (Some(started), Some(resolved)) = (self.started_at, self.resolved_at) {
            let took = (resolved - started).round(SpanRound::new().largest(Unit::Hour).smallest(Unit::Millisecond));
            if let Ok(took) = took {
                _ = write!(out, "  took {took:#}");
            }
        }
        if let Some(until) = self.taken_until.filter(|_| self.state == TaskState::Running) {
            _ = write!(out, "  claimed until {}", until.strftime("%H:%M:%SZ"));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_for_a_missing_log_names_the_next_step() {
        let raw = serde_json::json!({ "taskId": "abc", "state": "pending", "runs": [
            { "runId": 0, "state": "exception", "started": "2026-11-21T10:20:44.5Z", "reasonResolved": "claim-expired" },
            { "runId": 1, "state": "pending" },
        ]});
        let status = TaskStatus::read(&raw).unwrap();
        let last = status.missing_log_reason(None);
        assert!(last.contains("abc/1") && last.contains("--wait") && last.contains("--run 0"), "{last}");
        assert!(status.missing_log_reason(Some(0)).contains("exception (claim-expired)"));
        assert!(status.missing_log_reason(Some(7)).contains("no such run"));
    }

    #[test]
    fn a1_the_log_of_a_run_that_was_canceled_may_still_be_stored() {
        let raw = serde_json::json!({ "taskId": "abc", "state": "exception", "runs": [
            { "runId": 0, "state": "exception", "started": "2026-11-21T10:20:44.5Z", "reasonResolved": "canceled" },
        ]});
        let reason = TaskStatus::read(&raw).unwrap().missing_log_reason(None);
        assert!(reason.contains("exception (canceled)") && reason.ends_with("or not yet"), "{reason}");
    }

    #[test]
    fn a_status_that_cannot_be_read_is_an_error() {
        let raw = serde_json::json!({ "taskId": "abc", "state": "completed", "runs": [{ "runId": 0, "started": 7 }] });
        let refused = TaskStatus::read(&raw).unwrap_err();
        assert_eq!(refused.refusal, Refusal::Rejected);
        assert!(refused.message.contains("status"), "{}", refused.message);
    }

    #[test]
    fn earlier_runs_are_folded() {
        let run = |number: u32| serde_json::json!({ "runId": number, "state": "exception", "reasonResolved": "claim-expired" });
        let raw =
            serde_json::json!({ "taskId": "abc", "state": "exception", "runs": (0..5).map(run).collect::<Vec<_>>() });
        let said = TaskStatus::read(&raw).unwrap().describe();
        assert!(said.contains("\n  runs 0 to 1, the last of them exception (claim-expired)\n  run 2  "), "{said}");
        assert_eq!(said.lines().count(), 5, "{said}");
    }

    #[test]
    fn statuses_of_both_dialects_are_parsed() {
        let modern = serde_json::json!({
            "taskId": "abc", "taskQueueId": "a/b", "provisionerId": "a", "workerType": "b", "state": "exception",
            "retriesLeft": 0,
            "runs": [{ "runId": 0, "state": "exception", "reasonResolved": "claim-expired", "workerGroup": "g",
                "workerId": "w", "started": "2026-11-21T10:20:44.5Z", "resolved": "2026-11-21T10:20:46Z" }]
        });
        let status = TaskStatus::read(&modern).unwrap();
        assert!(status.is_resolved());
        assert_eq!(
            status.describe(),
            "abc  exception  a/b\n  run 0  exception (claim-expired)  on g/w  took 1s 500ms\n"
        );
        let legacy =
            serde_json::json!({ "taskId": "abc", "provisionerId": "a", "workerType": "b", "state": "pending" });
        let status = TaskStatus::read(&legacy).unwrap();
        assert!(!status.is_resolved());
        assert_eq!(status.describe(), "abc  pending  a/b\n");
    }
}
