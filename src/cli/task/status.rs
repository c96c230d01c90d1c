//! A task's status as the queue answers it, read tolerantly and written for a person.

use std::fmt::Write as _;

use std::time::Duration;

use jiff::{SignedDuration, SpanRound, Timestamp, Unit};
use serde_json::Value;

/// How a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
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

impl State {
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
    pub state: State,
    /// The queue's word for how it is.
    pub state_text: String,
    /// Why it was resolved, in the queue's words.
    pub reason: Option<String>,
    /// Who has it.
    pub worker: Option<String>,
    /// When it was started.
    pub started: Option<Timestamp>,
    resolved: Option<Timestamp>,
    /// Until when it is claimed.
    pub taken_until: Option<Timestamp>,
}

/// A task's status.
#[derive(Debug, Clone)]
pub struct Status {
    /// The task.
    pub task: String,
    /// How it is.
    pub state: State,
    state_text: String,
    queue: String,
    /// How many times it may still be retried.
    pub retries_left: Option<u64>,
    /// Its runs, in order.
    pub runs: Vec<RunStatus>,
    /// What the queue answered.
    pub raw: Value,
}

impl Status {
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
            state: State::read(&state_text),
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
        matches!(self.state, State::Completed | State::Failed | State::Exception)
    }

    /// State and, while it runs, how long the claim lasts from `now`.
    #[must_use]
    pub fn in_short(&self, now: Timestamp) -> String {
        let claimed = self.runs.last().filter(|run| run.state == State::Running).and_then(|run| run.taken_until);
        match claimed {
            Some(until) => format!("running, claim ends in {} s", until.duration_since(now).as_secs().max(0)),
            None => self.in_words(),
        }
    }

    /// State and, where that says more, the reason.
    #[must_use]
    pub fn in_words(&self) -> String {
        let reason = self.runs.last().and_then(|run| run.reason.as_ref()).filter(|reason| **reason != self.state_text);
        reason.map_or_else(|| self.state_text.clone(), |reason| format!("{} {reason}", self.state_text))
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
        let (Some(started), Some(until)) = (self.started, self.taken_until) else { return false };
        SignedDuration::try_from(claim)
            .is_ok_and(|claim| until.duration_since(started) > claim + SignedDuration::from_secs(1))
    }

    fn read(raw: &Value) -> Self {
        let text = |name: &str| raw.get(name).and_then(Value::as_str);
        let time = |name: &str| text(name).and_then(|text| text.parse().ok());
        let state_text = text("state").unwrap_or("").to_owned();
        Self {
            number: raw.get("runId").and_then(Value::as_u64).and_then(|run| u32::try_from(run).ok()).unwrap_or(0),
            state: State::read(&state_text),
            state_text,
            reason: text("reasonResolved").map(str::to_owned),
            worker: text("workerGroup").zip(text("workerId")).map(|(group, id)| format!("{group}/{id}")),
            started: time("started"),
            resolved: time("resolved"),
            taken_until: time("takenUntil"),
        }
    }

    fn describe(&self) -> String {
        let mut out = self.state_text.clone();
        // Writing to a String cannot fail.
        if let Some(reason) = self.reason.as_ref().filter(|reason| **reason != self.state_text) {
            _ = write!(out, " ({reason})");
        }
        if let Some(worker) = &self.worker {
            _ = write!(out, "  on {worker}");
        }
        if let (Some(started), Some(resolved)) = (self.started, self.resolved) {
            let took = (resolved - started).round(SpanRound::new().largest(Unit::Hour).smallest(Unit::Millisecond));
            if let Ok(took) = took {
                _ = write!(out, "  took {took:#}");
            }
        }
        if let Some(until) = self.taken_until.filter(|_| self.state == State::Running) {
            _ = write!(out, "  claimed until {}", until.strftime("%H:%M:%SZ"));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_of_either_era_is_read() {
        let modern = serde_json::json!({
            "taskId": "abc", "taskQueueId": "a/b", "provisionerId": "a", "workerType": "b", "state": "exception",
            "retriesLeft": 0,
            "runs": [{ "runId": 0, "state": "exception", "reasonResolved": "claim-expired", "workerGroup": "g",
                "workerId": "w", "started": "2026-11-21T10:20:44.5Z", "resolved": "2026-11-21T10:20:46Z" }]
        });
        let status = Status::read(&modern);
        assert!(status.is_resolved());
        assert_eq!(
            status.describe(),
            "abc  exception  a/b\n  run 0  exception (claim-expired)  on g/w  took 1s 500ms\n"
        );
        let legacy =
            serde_json::json!({ "taskId": "abc", "provisionerId": "a", "workerType": "b", "state": "pending" });
        let status = Status::read(&legacy);
        assert!(!status.is_resolved());
        assert_eq!(status.describe(), "abc  pending  a/b\n");
    }
}
