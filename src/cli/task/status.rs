//! Parses the task status of a queue and formats it for users.

use std::fmt::Write as _;
use std::time::Duration;

use jiff::{SignedDuration, SpanRound, Timestamp, Unit};
use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskState {
    Unscheduled,
    Pending,
    Running,
    Completed,
    Failed,
    Exception,
    /// A state unknown to this version.
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunStatus {
    pub number: u32,
    pub state: TaskState,
    /// The state as the queue spells it.
    pub state_text: String,
    /// `reasonResolved`.
    pub reason: Option<String>,
    /// `GROUP/ID`.
    pub worker: Option<String>,
    pub started_at: Option<Timestamp>,
    resolved_at: Option<Timestamp>,
    pub taken_until: Option<Timestamp>,
}

#[derive(Debug, Clone)]
pub struct TaskStatus {
    pub task: String,
    pub state: TaskState,
    state_text: String,
    queue: String,
    pub retries_left: Option<u64>,
    pub runs: Vec<RunStatus>,
    /// The response of the queue.
    pub raw: Value,
}

impl TaskStatus {
    /// Missing properties are left out.
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

    #[must_use]
    pub fn is_resolved(&self) -> bool {
        matches!(self.state, TaskState::Completed | TaskState::Failed | TaskState::Exception)
    }

    #[must_use]
    pub fn is_canceled(&self) -> bool {
        self.runs.last().and_then(|run| run.reason.as_deref()) == Some("canceled")
    }

    /// The state and, while running, the rest of the lease.
    #[must_use]
    pub fn short_summary(&self, now: Timestamp) -> String {
        let claimed = self.runs.last().filter(|run| run.state == TaskState::Running).and_then(|run| run.taken_until);
        match claimed {
            Some(until) => format!("running, claim expires in {} s", until.duration_since(now).as_secs().max(0)),
            None => self.summary(),
        }
    }

    /// The state and a reason that differs from it.
    #[must_use]
    pub fn summary(&self) -> String {
        let reason = self.runs.last().and_then(|run| run.reason.as_ref()).filter(|reason| **reason != self.state_text);
        reason.map_or_else(|| self.state_text.clone(), |reason| format!("{} {reason}", self.state_text))
    }

    /// Why a run (by default the last one) has no log, and what to do.
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
                    format!("{task} has no run {number}; the last run is {}", last.number)
                }
                (_, TaskState::Unscheduled, _) => {
                    format!("{task} is unscheduled: it waits for its dependencies and has no run yet")
                }
                _ => format!("{task} is {} and has no run, so there is no log", self.summary()),
            };
        };
        let earlier = match found.number.checked_sub(1) {
            Some(before) => format!("; `--run {before}` shows the previous run"),
            None => String::new(),
        };
        let (run, summary) = (format!("{task}/{}", found.number), found.summary());
        match found.state {
            TaskState::Pending | TaskState::Unscheduled => format!(
                "{run} is pending: no worker of {queue} has claimed it yet. Is one running? --wait waits for the log{earlier}"
            ),
            TaskState::Running => {
                format!("{run} is running; its log is uploaded at the end. --wait waits for it{earlier}")
            }
            TaskState::Exception if found.started_at.is_none() => {
                format!("{run} is {summary} and was never started, so there is no log{earlier}")
            }
            TaskState::Exception => format!(
                "{run} is {summary} and has no log: the worker did not start it, is still uploading the log, or was lost{earlier}"
            ),
            TaskState::Completed | TaskState::Failed | TaskState::Other => {
                format!("{run} is {summary} and has no log: none was uploaded, or it has expired{earlier}")
            }
        }
    }

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
    /// Whether the lease was extended beyond one claim of this length.
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
    fn the_reason_for_a_missing_log_names_the_next_step() {
        let why = |state: &str, runs: Value, run: Option<u32>| {
            let raw = serde_json::json!({ "taskId": "abc", "taskQueueId": "a/b", "state": state, "runs": runs });
            TaskStatus::read(&raw).missing_log_reason(run)
        };
        let run = |state: &str, started: Option<&str>, reason: Option<&str>| serde_json::json!({ "runId": 0, "state": state, "started": started, "reasonResolved": reason });
        let began = Some("2026-11-21T10:20:44.5Z");
        let second = serde_json::json!({ "runId": 1, "state": "pending" });
        for (text, parts) in [
            (why("unscheduled", serde_json::json!([]), None), &["is unscheduled", "dependencies"][..]),
            (why("exception", serde_json::json!([]), None), &["abc is exception and has no run"]),
            (why("pending", serde_json::json!([run("pending", None, None)]), None), &["no worker of a/b", "--wait"]),
            (why("running", serde_json::json!([run("running", began, None)]), None), &["abc/0 is running", "--wait"]),
            (
                why("exception", serde_json::json!([run("exception", None, Some("canceled"))]), None),
                &["exception (canceled) and was never started"],
            ),
            (
                why("exception", serde_json::json!([run("exception", began, Some("claim-expired"))]), None),
                &["exception (claim-expired)", "was lost"],
            ),
            (
                why("completed", serde_json::json!([run("completed", began, Some("completed"))]), None),
                &["abc/0 is completed and has no log", "expired"],
            ),
            (
                why("pending", serde_json::json!([run("exception", began, Some("claim-expired")), second]), None),
                &["abc/1 is pending", "`--run 0` shows the previous run"],
            ),
            (
                why("running", serde_json::json!([run("running", began, None)]), Some(7)),
                &["no run 7; the last run is 0"],
            ),
        ] {
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
    }

    #[test]
    fn statuses_of_both_dialects_are_parsed() {
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
