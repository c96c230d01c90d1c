//! A task's status as the queue answers it, read tolerantly and written for a person.

use std::fmt::Write as _;

use std::time::Duration;

use jiff::{SignedDuration, SpanRound, Timestamp, Unit};
use serde_json::Value;

/// How a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskState {
    /// Waits for something before it may run.
    Unscheduled,
    /// Waits for a worker.
    Pending,
    /// Runs.
    Running,
    /// Succeeded.
    Completed,
    /// Did not succeed.
    Failed,
    /// Ended otherwise.
    Exception,
    /// A word that is not known here.
    Other,
}

impl TaskState {
    fn read(text: &str) -> Self {
        match text {
            "unscheduled" => Self::Unscheduled,
            "pending" => Self::Pending,
            "running" => Self::Running,
            "completed" => Self::Completed,
            "failed" => Self::Failed,
            "exception" => Self::Exception,
            _ => Self::Other,
        }
    }
}

/// One run of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunStatus {
    /// Its number, from 0.
    pub number: u32,
    /// How it is.
    pub state: TaskState,
    /// The queue's word for how it is.
    pub state_text: String,
    /// Why it was resolved, in the queue's words.
    pub reason: Option<String>,
    /// Who has it.
    pub worker: Option<String>,
    /// When it was started.
    pub started_at: Option<Timestamp>,
    resolved_at: Option<Timestamp>,
    /// Until when it is claimed.
    pub taken_until: Option<Timestamp>,
}

/// A task's status.
#[derive(Debug, Clone)]
pub struct TaskStatus {
    /// The task.
    pub task: String,
    /// How it is.
    pub state: TaskState,
    state_text: String,
    queue: String,
    /// How many times it may still be retried.
    pub retries_left: Option<u64>,
    /// Its runs, in order.
    pub runs: Vec<RunStatus>,
    /// What the queue answered.
    pub raw: Value,
}

impl TaskStatus {
    /// Reads what the queue answered. What is missing is left out.
    #[must_use]
    pub fn read(raw: &Value) -> Self {
        let text = |name: &str| raw.get(name).and_then(Value::as_str).unwrap_or("").to_owned();
        let queue = match text("taskQueueId") {
            queue if queue.is_empty() => format!("{}/{}", text("provisionerId"), text("workerType")),
            queue => queue,
        };
        let state_text = text("state");
        Self {
            task: text("taskId"),
            state: TaskState::read(&state_text),
            state_text,
            queue,
            retries_left: raw.get("retriesLeft").and_then(Value::as_u64),
            runs: raw.get("runs").and_then(Value::as_array).into_iter().flatten().map(RunStatus::read).collect(),
            raw: raw.clone(),
        }
    }

    /// Whether nothing will happen to it any more.
    #[must_use]
    pub fn is_resolved(&self) -> bool {
        matches!(self.state, TaskState::Completed | TaskState::Failed | TaskState::Exception)
    }

    /// Whether its end is that it was canceled.
    #[must_use]
    pub fn is_canceled(&self) -> bool {
        self.runs.last().and_then(|run| run.reason.as_deref()) == Some("canceled")
    }

    /// State and, while it runs, how long the claim lasts from `now`.
    #[must_use]
    pub fn short_summary(&self, now: Timestamp) -> String {
        let claimed = self.runs.last().filter(|run| run.state == TaskState::Running).and_then(|run| run.taken_until);
        match claimed {
            Some(until) => format!("running, claim ends in {} s", until.duration_since(now).as_secs().max(0)),
            None => self.summary(),
        }
    }

    /// State and, where that says more, the reason.
    #[must_use]
    pub fn summary(&self) -> String {
        let reason = self.runs.last().and_then(|run| run.reason.as_ref()).filter(|reason| **reason != self.state_text);
        reason.map_or_else(|| self.state_text.clone(), |reason| format!("{} {reason}", self.state_text))
    }

    /// Why a run, or the last one, has no log, and what to do about it.
    #[must_use]
    pub fn missing_log_reason(&self, run: Option<u32>) -> String {
        let (task, queue) = (&self.task, &self.queue);
        let wanted = match run {
            Some(number) => self.runs.iter().find(|run| run.number == number),
            None => self.runs.last(),
        };
        let Some(found) = wanted else {
            return match (run, self.state, self.runs.last()) {
                (Some(number), _, Some(last)) => {
                    format!("{task} has no run {number}; its last is {}", last.number)
                }
                (_, TaskState::Unscheduled, _) => format!(
                    "{task} is unscheduled: it waits for the tasks it depends on, or to be scheduled, and has no run yet"
                ),
                _ => format!("{task} is {} and never ran, so there is no log", self.summary()),
            };
        };
        let earlier = match found.number.checked_sub(1) {
            Some(before) => format!("; `--run {before}` shows the run before it"),
            None => String::new(),
        };
        let (run, words) = (format!("{task}/{}", found.number), found.summary());
        match found.state {
            TaskState::Pending | TaskState::Unscheduled => format!(
                "{run} is pending: no worker of {queue} has claimed it yet. Is one running? --wait waits for its log{earlier}"
            ),
            TaskState::Running => {
                format!("{run} is running, and its log is stored when it ends. --wait waits for that{earlier}")
            }
            TaskState::Exception if found.started_at.is_none() => {
                format!("{run} ended as {words} before a worker started it, so there is no log{earlier}")
            }
            TaskState::Exception => format!(
                "{run} ended as {words} and has no log: its worker had not begun it, is stopping it and may still store one, or was lost{earlier}"
            ),
            TaskState::Completed | TaskState::Failed | TaskState::Other => {
                format!("{run} is {words} and has no log: its worker stored none, or it has expired{earlier}")
            }
        }
    }

    /// For a person.
    #[must_use]
    pub fn describe(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        _ = writeln!(out, "{}  {}  {}", self.task, self.state_text, self.queue);
        for run in &self.runs {
            _ = writeln!(out, "  run {}  {}", run.number, run.describe());
        }
        out
    }
}

impl RunStatus {
    /// Whether it was claimed for longer than one claim of this length.
    #[must_use]
    pub fn was_extended(&self, claim: Duration) -> bool {
        let (Some(started), Some(until)) = (self.started_at, self.taken_until) else { return false };
        SignedDuration::try_from(claim)
            .is_ok_and(|claim| until.duration_since(started) > claim + SignedDuration::from_secs(1))
    }

    fn read(raw: &Value) -> Self {
        let text = |name: &str| raw.get(name).and_then(Value::as_str);
        let time = |name: &str| text(name).and_then(|text| text.parse().ok());
        let state_text = text("state").unwrap_or("").to_owned();
        Self {
            number: raw.get("runId").and_then(Value::as_u64).and_then(|run| u32::try_from(run).ok()).unwrap_or(0),
            state: TaskState::read(&state_text),
            state_text,
            reason: text("reasonResolved").map(str::to_owned),
            worker: text("workerGroup").zip(text("workerId")).map(|(group, id)| format!("{group}/{id}")),
            started_at: time("started"),
            resolved_at: time("resolved"),
            taken_until: time("takenUntil"),
        }
    }

    fn summary(&self) -> String {
        match self.reason.as_ref().filter(|reason| **reason != self.state_text) {
            Some(reason) => format!("{} ({reason})", self.state_text),
            None => self.state_text.clone(),
        }
    }

    fn describe(&self) -> String {
        let mut out = self.summary();
        // Writing to a String cannot fail.
        if let Some(worker) = &self.worker {
            _ = write!(out, "  on {worker}");
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
    fn why_there_is_no_log_says_what_is_so_and_what_to_do() {
        let why = |state: &str, runs: Value, run: Option<u32>| {
            let raw = serde_json::json!({ "taskId": "abc", "taskQueueId": "a/b", "state": state, "runs": runs });
            TaskStatus::read(&raw).missing_log_reason(run)
        };
        let run = |state: &str, started: Option<&str>, reason: Option<&str>| serde_json::json!({ "runId": 0, "state": state, "started": started, "reasonResolved": reason });
        let began = Some("2026-11-21T10:20:44.5Z");
        let second = serde_json::json!({ "runId": 1, "state": "pending" });
        for (text, words) in [
            (why("unscheduled", serde_json::json!([]), None), &["is unscheduled", "depends on"][..]),
            (why("exception", serde_json::json!([]), None), &["abc is exception and never ran"]),
            (why("pending", serde_json::json!([run("pending", None, None)]), None), &["no worker of a/b", "--wait"]),
            (why("running", serde_json::json!([run("running", began, None)]), None), &["abc/0 is running", "--wait"]),
            (
                why("exception", serde_json::json!([run("exception", None, Some("canceled"))]), None),
                &["exception (canceled) before a worker started it"],
            ),
            (
                why("exception", serde_json::json!([run("exception", began, Some("claim-expired"))]), None),
                &["exception (claim-expired)", "may still store one, or was lost"],
            ),
            (
                why("completed", serde_json::json!([run("completed", began, Some("completed"))]), None),
                &["abc/0 is completed and has no log", "expired"],
            ),
            (
                why("pending", serde_json::json!([run("exception", began, Some("claim-expired")), second]), None),
                &["abc/1 is pending", "`--run 0` shows the run before it"],
            ),
            (why("running", serde_json::json!([run("running", began, None)]), Some(7)), &["no run 7; its last is 0"]),
        ] {
            assert!(words.iter().all(|words| text.contains(words)), "{text}");
        }
    }

    #[test]
    fn a_status_of_either_era_is_read() {
        let modern = serde_json::json!({
            "taskId": "abc", "taskQueueId": "a/b", "provisionerId": "a", "workerType": "b", "state": "exception",
            "retriesLeft": 0,
            "runs": [{ "runId": 0, "state": "exception", "reasonResolved": "claim-expired", "workerGroup": "g",
                "workerId": "w", "started": "2026-11-21T10:20:44.5Z", "resolved": "2026-11-21T10:20:46Z" }]
        });
        let status = TaskStatus::read(&modern);
        assert!(status.is_resolved());
        assert_eq!(
            status.describe(),
            "abc  exception  a/b\n  run 0  exception (claim-expired)  on g/w  took 1s 500ms\n"
        );
        let legacy =
            serde_json::json!({ "taskId": "abc", "provisionerId": "a", "workerType": "b", "state": "pending" });
        let status = TaskStatus::read(&legacy);
        assert!(!status.is_resolved());
        assert_eq!(status.describe(), "abc  pending  a/b\n");
    }
}
