//! The tasks of the demo and their expected results.

use std::path::Path;

use serde_json::{Value, json};

use crate::cli::task::task_status::TaskStatus;
use crate::config::schema::COMMAND;
use crate::domain::id::TaskId;
use crate::source::taskcluster::formats::new_task_id;

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

const GREETING: &str = "public/greeting.json";

pub(super) const EXTENDED: &str = "its claim was extended";

#[derive(Debug, Clone)]
pub(super) struct DemoTask {
    pub(super) id: TaskId,
    pub(super) name: &'static str,
    pub(super) description: &'static str,
    pub(super) handler: &'static str,
    pub(super) priority: &'static str,
    pub(super) payload: Value,
    /// The expected `reasonResolved` of the last run.
    pub(super) reason: &'static str,
    /// The expected number of runs.
    pub(super) runs: usize,
    pub(super) expectation: Expectation,
    pub(super) status: Option<TaskStatus>,
    pub(super) result: CheckResult,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CheckResult {
    Pending,
    Passed,
    Failed(String),
}

/// A further check of a resolved task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expectation {
    Nothing,
    Artifacts(&'static [&'static str]),
    LogContains(&'static str),
    LogTruncated,
    Reclaimed,
    /// Started before this task, which was created earlier.
    StartedBefore(&'static str),
    /// The demo cancels it once it runs.
    Canceled,
}

/// In order of creation. The long task waits for the file `reclaimed`.
pub(super) fn tasks(reclaimed: &Path) -> Vec<DemoTask> {
    use Expectation::{Artifacts, Canceled, LogContains, LogTruncated, Nothing, Reclaimed, StartedBefore};
    // One second more, so that the table shows the new lease.
    let until_reclaimed = "until [ -e \"$0\" ]; do sleep 0.1; done; sleep 1";
    let long = command(&[&["/bin/sh", "-c", until_reclaimed, &reclaimed.to_string_lossy()]]);
    let malformed = json!({ "command": "echo hello", "maxRunTime": 60 });
    let flaky = json!({
        "command": [["/bin/sh", "-c", "echo run $RUN_ID; [ \"$RUN_ID\" -gt 0 ] || exit 75"]],
        "maxRunTime": 60,
        "onExitStatus": { "retry": [75] },
    });
    let artifacts = json!({
        "command": [["/bin/sh", "-c", "echo built > a.txt; mkdir -p out/deep; echo 1 > out/one; echo 2 > out/deep/two"]],
        "maxRunTime": 60,
        "artifacts": [
            { "type": "file", "name": "public/a.txt", "path": "a.txt" },
            { "type": "directory", "name": "public/out", "path": "out" },
        ],
    });
    let uploaded: &[&str] = &["public/a.txt", "public/out/one", "public/out/deep/two"];
    let too_long = json!({ "command": [["/bin/sleep", "300"]], "maxRunTime": 2 });
    let big_log = "yes 'one more line of a long log' | head -c 8000000; echo the end";
    let mut tasks = vec![
        task("patient", "lowest priority, created first", shell("echo last"), "completed", Nothing),
        task("hello", "a command that succeeds", shell("echo hello"), "completed", LogContains("hello")),
        task("fails", "a command with exit status 3", shell("echo no; exit 3"), "failed", LogContains("3")),
        task("malformed", "a payload that breaks the schema", malformed, "malformed-payload", LogContains("command")),
        task("flaky", "exit status 75 asks for a retry", flaky, "completed", Nothing),
        task("artifacts", "uploads a file and a directory", artifacts, "completed", Artifacts(uploaded)),
        task("long", "runs until its claim is extended", long, "completed", Reclaimed),
        task("too-long", "runs past its maxRunTime of 2 s", too_long, "failed", LogContains("maxRunTime")),
        task("canceled", "canceled while it runs", shell("sleep 300"), "canceled", Canceled),
        task(
            "orphan",
            "leaves a child in the background",
            shell("sleep 300 & echo done"),
            "completed",
            LogContains("done"),
        ),
        task("big-log", "8 MB of log, head and tail kept", shell(big_log), "completed", LogTruncated),
        task(
            "two-steps",
            "the second of two commands fails",
            command(&[&["/bin/true"], &["/bin/false"]]),
            "failed",
            Nothing,
        ),
        task("program", "a handler written in shell", json!({ "whom": "world" }), "completed", Artifacts(&[GREETING])),
        task("urgent", "highest priority, created last", shell("echo first"), "completed", StartedBefore("patient")),
    ];
    for task in &mut tasks {
        match task.name {
            "patient" => task.priority = "lowest",
            "flaky" => task.runs = 2,
            "program" => task.handler = GREET,
            "urgent" => task.priority = "highest",
            _ => {}
        }
    }
    tasks
}

fn task(
    name: &'static str,
    description: &'static str,
    payload: Value,
    reason: &'static str,
    expectation: Expectation,
) -> DemoTask {
    DemoTask {
        id: new_task_id(),
        name,
        description,
        handler: COMMAND,
        priority: "medium",
        payload,
        reason,
        runs: 1,
        expectation,
        status: None,
        result: CheckResult::Pending,
    }
}

fn command(argv: &[&[&str]]) -> Value {
    json!({ "command": argv, "maxRunTime": 60 })
}

fn shell(script: &str) -> Value {
    command(&[&["/bin/sh", "-c", script]])
}

/// The reason and the number of runs of a resolved task, if they are not the expected ones.
pub(super) fn unexpected_result(task: &DemoTask, status: &TaskStatus) -> Option<String> {
    let reason = status.runs.last().and_then(|run| run.reason.as_deref()).unwrap_or_default();
    let runs = status.runs.len();
    let expected = (task.reason, task.runs) == (reason, runs);
    (!expected).then(|| format!("expected {} in {} runs, got {reason} in {runs}", task.reason, task.runs))
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
        let task = task("a", "", Value::Null, "completed", Expectation::Nothing);
        let check = |reason: &str, runs: usize| {
            let run = json!({ "runId": 0, "reasonResolved": reason });
            unexpected_result(&task, &TaskStatus::read(&json!({ "runs": vec![run; runs] })).unwrap())
        };
        assert_eq!(check("completed", 1), None);
        assert!(check("failed", 1).is_some());
        assert!(check("completed", 2).is_some());
    }
}
