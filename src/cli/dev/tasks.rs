//! The tasks of the demo and their expected results.

use std::path::Path;

use serde_json::{Value, json};

use super::super::task::status::{TaskState, TaskStatus};
use crate::config::schema::COMMAND;

pub(super) const GREET: &str = "greet";

/// Reads the payload as JSON from standard input and writes its results to descriptor 3.
pub(super) const GREET_PROGRAM: &str = r#"#!/bin/sh
whom=$(sed -n 's/.*"whom":"\([^"]*\)".*/\1/p')
if [ -z "$whom" ]; then
    echo 'payload must have the form {"whom": "…"}'
    exit "$JOURNEYMAN_EXIT_FAILED"
fi
echo "hello $whom"
printf '{"type":"result","name":"public/greeting.json","value":{"hello":"%s"}}\n' "$whom" >&3
"#;

pub(super) const EXTENDED: &str = "its claim was extended";

#[derive(Debug, Clone)]
pub(super) struct DemoTask {
    pub(super) name: &'static str,
    pub(super) description: &'static str,
    pub(super) handler: &'static str,
    pub(super) priority: &'static str,
    pub(super) payload: Value,
    pub(super) expected: ExpectedResult,
    pub(super) expectation: Expectation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpectedResult {
    pub(super) state: TaskState,
    /// `reasonResolved` of the last run.
    pub(super) reason: &'static str,
    pub(super) runs: usize,
}

/// A further check of a resolved task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expectation {
    None,
    Artifacts(&'static [&'static str]),
    LogContains(&'static str),
    LogTruncated,
    Reclaimed,
    /// Started before this task, which was created earlier.
    StartedBefore(&'static str),
    /// The demo cancels it once it runs.
    Canceled,
}

const COMPLETED: ExpectedResult = ExpectedResult { state: TaskState::Completed, reason: "completed", runs: 1 };
const FAILED: ExpectedResult = ExpectedResult { state: TaskState::Failed, reason: "failed", runs: 1 };

/// In order of creation. The long task waits for the file `reclaimed`.
pub(super) fn tasks(reclaimed: &Path) -> Vec<DemoTask> {
    // One second more, so that the table shows the new lease.
    let until_reclaimed = "until [ -e \"$0\" ]; do sleep 0.1; done; sleep 1";
    vec![
        task("patient", "lowest priority, created first", shell("echo last"), COMPLETED, Expectation::None)
            .with_priority("lowest"),
        task(
            "hello",
            "a command that succeeds",
            command(&[&["/bin/echo", "hello"]]),
            COMPLETED,
            Expectation::LogContains("hello"),
        ),
        task("fails", "a command with exit status 3", shell("echo no; exit 3"), FAILED, Expectation::LogContains("3")),
        task(
            "malformed",
            "a payload that breaks the schema",
            json!({ "command": "echo hello", "maxRunTime": 60 }),
            ExpectedResult { state: TaskState::Exception, reason: "malformed-payload", runs: 1 },
            Expectation::LogContains("command"),
        ),
        task(
            "flaky",
            "exit status 75 asks for a retry",
            json!({
                "command": [["/bin/sh", "-c", "echo run $RUN_ID; [ \"$RUN_ID\" -gt 0 ] || exit 75"]],
                "maxRunTime": 60,
                "onExitStatus": { "retry": [75] },
            }),
            ExpectedResult { state: TaskState::Completed, reason: "completed", runs: 2 },
            Expectation::None,
        ),
        task(
            "artifacts",
            "uploads a file and a directory",
            json!({
                "command": [["/bin/sh", "-c", "echo built > a.txt; mkdir -p out/deep; echo 1 > out/one; echo 2 > out/deep/two"]],
                "maxRunTime": 60,
                "artifacts": [
                    { "type": "file", "name": "public/a.txt", "path": "a.txt" },
                    { "type": "directory", "name": "public/out", "path": "out" },
                ],
            }),
            COMPLETED,
            Expectation::Artifacts(&["public/a.txt", "public/out/one", "public/out/deep/two"]),
        ),
        task(
            "long",
            "runs until its claim is extended",
            command(&[&["/bin/sh", "-c", until_reclaimed, &reclaimed.to_string_lossy()]]),
            COMPLETED,
            Expectation::Reclaimed,
        ),
        task(
            "too-long",
            "runs past its maxRunTime of 2 s",
            json!({ "command": [["/bin/sleep", "300"]], "maxRunTime": 2 }),
            FAILED,
            Expectation::LogContains("maxRunTime"),
        ),
        task(
            "canceled",
            "canceled while it runs",
            shell("sleep 300"),
            ExpectedResult { state: TaskState::Exception, reason: "canceled", runs: 1 },
            Expectation::Canceled,
        ),
        task(
            "orphan",
            "leaves a child in the background",
            shell("sleep 300 & echo done"),
            COMPLETED,
            Expectation::LogContains("done"),
        ),
        task(
            "big-log",
            "8 MB of log, head and tail kept",
            shell("yes 'one more line of a long log' | head -c 8000000; echo the end"),
            COMPLETED,
            Expectation::LogTruncated,
        ),
        task(
            "two-steps",
            "the second of two commands fails",
            command(&[&["/bin/true"], &["/bin/false"]]),
            FAILED,
            Expectation::None,
        ),
        task(
            "program",
            "a handler written in shell",
            json!({ "whom": "world" }),
            COMPLETED,
            Expectation::Artifacts(&["public/greeting.json"]),
        )
        .with_handler(GREET),
        task(
            "urgent",
            "highest priority, created last",
            shell("echo first"),
            COMPLETED,
            Expectation::StartedBefore("patient"),
        )
        .with_priority("highest"),
    ]
}

fn task(
    name: &'static str,
    description: &'static str,
    payload: Value,
    expected: ExpectedResult,
    expectation: Expectation,
) -> DemoTask {
    DemoTask { name, description, handler: COMMAND, priority: "medium", payload, expected, expectation }
}

impl DemoTask {
    fn with_priority(self, priority: &'static str) -> Self {
        Self { priority, ..self }
    }

    fn with_handler(self, handler: &'static str) -> Self {
        Self { handler, ..self }
    }
}

fn command(argv: &[&[&str]]) -> Value {
    json!({ "command": argv, "maxRunTime": 60 })
}

fn shell(script: &str) -> Value {
    command(&[&["/bin/sh", "-c", script]])
}

pub(super) fn unexpected_result(expected: ExpectedResult, status: &TaskStatus) -> Option<String> {
    let reason = status.runs.last().and_then(|run| run.reason.clone()).unwrap_or_default();
    if status.state != expected.state || reason != expected.reason {
        return Some(format!("expected {}, got {reason}", expected.reason));
    }
    (status.runs.len() != expected.runs).then(|| format!("expected {} runs, got {}", expected.runs, status.runs.len()))
}

#[cfg(test)]
mod tests {
    use super::super::screen::DESCRIPTION_CHARS_MAX;
    use super::*;

    #[test]
    fn the_demo_has_at_least_a_dozen_tasks_with_unique_names() {
        let tasks = tasks(Path::new("reclaimed"));
        let names: std::collections::BTreeSet<_> = tasks.iter().map(|task| task.name).collect();
        assert_eq!(names.len(), tasks.len());
        assert!(tasks.len() >= 12);
        for description in tasks.iter().map(|task| task.description).chain([EXTENDED]) {
            assert!(description.len() <= DESCRIPTION_CHARS_MAX, "truncated at 80 columns: {description}");
        }
    }

    #[test]
    fn an_unexpected_result_is_reported() {
        let status = |state: &str, reason: &str, runs: usize| {
            let run = json!({ "runId": 0, "state": state, "reasonResolved": reason });
            TaskStatus::read(&json!({ "taskId": "a", "state": state, "runs": vec![run; runs] }))
        };
        assert_eq!(unexpected_result(COMPLETED, &status("completed", "completed", 1)), None);
        assert!(unexpected_result(COMPLETED, &status("failed", "failed", 1)).is_some());
        assert!(unexpected_result(COMPLETED, &status("completed", "completed", 2)).is_some());
        assert!(unexpected_result(FAILED, &status("exception", "canceled", 1)).is_some());
    }
}
