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

    pub fn is_resolved(&self) -> bool {
        matches!(self.state, TaskState::Completed | TaskState::Failed | TaskState::Exception)
    }

    pub fn is_canceled(&self) -> bool {
        self.runs.last().and_then(|run| run.reason.as_deref()) == Some("canceled")
    }

    /// The state and, while running, the rest of the lease.
    pub fn short_summary(&self, now: Timestamp) -> String {
        let claimed = self.runs.last().filter(|run| run.state == TaskState::Running).and_then(|run| run.taken_until);
        match claimed {
            Some(until) => format!("running, claim expires in {} s", until.duration_since(now).as_secs().max(0)),
            None => self.summary(),
        }
    }

    /// The state and a reason that differs from it.
    pub fn summary(&self) -> String {
        let reason = self.runs.last().and_then(|run| run.reason.as_ref()).filter(|reason| **reason != self.state_text);
        reason.map_or_else(|| self.state_text.clone(), |reason| format!("{} {reason}", self.state_text))
    }

    /// Why a run (by default the last one) has no log, and what to do.
    pub fn missing_log_reason(&self, run: Option<u32>) -> String {
        let wanted = match run {
            Some(number) => self.runs.iter().find(|run| run.number == number),
            None => self.runs.last(),
        };
        let Some(found) = wanted else {
            let run = run.map_or_else(|| "run".to_owned(), |number| format!("run {number}"));
            let waits = if self.state == TaskState::Unscheduled { ": it waits for its dependencies" } else { "" };
            return format!("{} is {} and has no {run}, so there is no log{waits}", self.task, self.summary());
        };
        let reason = match found.state {
            TaskState::Pending | TaskState::Unscheduled => {
                format!("no worker of {} has claimed it yet. Is one running? --wait waits for the log", self.queue)
            }
            TaskState::Running => "its log is uploaded at the end. --wait waits for it".to_owned(),
            TaskState::Completed | TaskState::Failed | TaskState::Exception | TaskState::Other => {
                let reason = if found.started_at.is_some() {
                    "its log was not uploaded, or has expired"
                } else {
                    "it was never started"
                };
                reason.to_owned()
            }
        };
        let earlier = match found.number.checked_sub(1) {
            Some(before) => format!("; `--run {before}` shows the previous run"),
            None => String::new(),
        };
        format!("{}/{} is {}: {reason}{earlier}", self.task, found.number, found.summary())
    }

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
        let raw = serde_json::json!({ "taskId": "abc", "taskQueueId": "a/b", "state": "pending", "runs": [
            { "runId": 0, "state": "exception", "started": "2026-11-21T10:20:44.5Z", "reasonResolved": "claim-expired" },
            { "runId": 1, "state": "pending" },
        ]});
        let status = TaskStatus::read(&raw);
        let last = status.missing_log_reason(None);
        assert!(last.contains("abc/1") && last.contains("--wait") && last.contains("--run 0"), "{last}");
        assert!(status.missing_log_reason(Some(0)).contains("exception (claim-expired)"));
        assert!(status.missing_log_reason(Some(7)).contains("no run 7"));
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
