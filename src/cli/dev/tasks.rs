//! The tasks of the demo: what each shows, and how it has to end. Pure: nothing here calls a queue.

use std::path::Path;

use serde_json::{Value, json};

use super::super::task::status::{TaskState, TaskStatus};
use crate::config::schema::COMMAND;

/// The handler in shell that the demo serves beside `command`.
pub(super) const GREET: &str = "greet";

/// That handler: its payload comes as JSON on standard input, its results go to descriptor 3.
pub(super) const GREET_PROGRAM: &str = r#"#!/bin/sh
whom=$(sed -n 's/.*"whom":"\([^"]*\)".*/\1/p')
if [ -z "$whom" ]; then
    echo 'the payload has to name whom to greet: {"whom": "…"}'
    exit "$JOURNEYMAN_EXIT_FAILED"
fi
echo "hello $whom"
printf '{"type":"result","name":"public/greeting.json","value":{"hello":"%s"}}\n' "$whom" >&3
"#;

/// What the long task shows once its claim was extended.
pub(super) const EXTENDED: &str = "its claim was extended in time";

/// One task of the demo.
#[derive(Debug, Clone)]
pub(super) struct DemoTask {
    /// A short name, different from the others'.
    pub(super) name: &'static str,
    /// What it shows.
    pub(super) description: &'static str,
    /// Which handler runs it.
    pub(super) handler: &'static str,
    /// The queue's word for its priority.
    pub(super) priority: &'static str,
    /// What it does.
    pub(super) payload: Value,
    /// How it has to end.
    pub(super) expected: ExpectedResult,
    /// What else has to be true.
    pub(super) expectation: Expectation,
}

/// How a task has to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpectedResult {
    pub(super) state: TaskState,
    /// The queue's word for why.
    pub(super) reason: &'static str,
    /// How many runs it takes.
    pub(super) runs: usize,
}

/// What else has to be true of a task that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expectation {
    /// Nothing.
    None,
    /// These artifacts are there.
    Artifacts(&'static [&'static str]),
    /// The log holds this.
    LogContains(&'static str),
    /// The log was cut: it holds the marker and is not much longer than it may be.
    LogTruncated,
    /// The claim was extended beyond its first length.
    Reclaimed,
    /// It was started before this task, which was created earlier.
    StartedBefore(&'static str),
    /// It is canceled by the demo as soon as it runs.
    Canceled,
}

const COMPLETED: ExpectedResult = ExpectedResult { state: TaskState::Completed, reason: "completed", runs: 1 };
const FAILED: ExpectedResult = ExpectedResult { state: TaskState::Failed, reason: "failed", runs: 1 };

/// The tasks, in the order they are created in. The long one waits for the file `reclaimed`.
pub(super) fn tasks(reclaimed: &Path) -> Vec<DemoTask> {
    // A second more, so that the new end of the claim is seen.
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
            "leaves a file and a folder",
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

fn task(name: &'static str, shows: &'static str, payload: Value, end: ExpectedResult, proof: Expectation) -> DemoTask {
    DemoTask {
        name,
        description: shows,
        handler: COMMAND,
        priority: "medium",
        payload,
        expected: end,
        expectation: proof,
    }
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

/// What is not as it should be about how a task ended.
pub(super) fn unexpected_result(end: ExpectedResult, status: &TaskStatus) -> Option<String> {
    let reason = status.runs.last().and_then(|run| run.reason.clone()).unwrap_or_default();
    if status.state != end.state || reason != end.reason {
        return Some(format!("should have ended as {}, and ended as {reason}", end.reason));
    }
    (status.runs.len() != end.runs)
        .then(|| format!("should have taken {} runs, and took {}", end.runs, status.runs.len()))
}

#[cfg(test)]
mod tests {
    use super::super::screen::SHOWS_CHARS_MAX;
    use super::*;

    #[test]
    fn the_demo_has_a_dozen_tasks_and_every_name_once() {
        let tasks = tasks(Path::new("reclaimed"));
        let names: std::collections::BTreeSet<_> = tasks.iter().map(|task| task.name).collect();
        assert_eq!(names.len(), tasks.len());
        assert!(tasks.len() >= 12);
        for shows in tasks.iter().map(|task| task.description).chain([EXTENDED]) {
            assert!(shows.len() <= SHOWS_CHARS_MAX, "cut on a terminal of 80 columns: {shows}");
        }
    }

    #[test]
    fn an_end_other_than_the_expected_is_told() {
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
