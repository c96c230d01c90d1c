//! The tasks of the demo: what each shows, and how it has to end. Pure: nothing here calls a queue.

use std::path::Path;

use serde_json::{Value, json};

use super::super::task::status::{State, Status};
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
    pub(super) shows: &'static str,
    /// Which handler runs it.
    pub(super) handler: &'static str,
    /// The queue's word for its priority.
    pub(super) priority: &'static str,
    /// What it does.
    pub(super) payload: Value,
    /// How it has to end.
    pub(super) end: End,
    /// What else has to be true.
    pub(super) proof: Proof,
}

/// How a task has to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    pub(super) state: State,
    /// The queue's word for why.
    pub(super) reason: &'static str,
    /// How many runs it takes.
    pub(super) runs: usize,
}

/// What else has to be true of a task that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Proof {
    /// Nothing.
    None,
    /// These artifacts are there.
    Artifacts(&'static [&'static str]),
    /// The log holds this.
    LogHolds(&'static str),
    /// The log was cut: it holds the marker and is not much longer than it may be.
    LogCut,
    /// The claim was extended beyond its first length.
    Reclaimed,
    /// It was started before this task, which was created earlier.
    Before(&'static str),
    /// It is canceled by the demo as soon as it runs.
    Canceled,
}

const COMPLETED: End = End { state: State::Completed, reason: "completed", runs: 1 };
const FAILED: End = End { state: State::Failed, reason: "failed", runs: 1 };

/// The tasks, in the order they are created in. The long one waits for the file `reclaimed`.
pub(super) fn tasks(reclaimed: &Path) -> Vec<DemoTask> {
    // A second more, so that the new end of the claim is seen.
    let until_reclaimed = "until [ -e \"$0\" ]; do sleep 0.1; done; sleep 1";
    vec![
        task("patient", "lowest priority, created first", shell("echo last"), COMPLETED, Proof::None).at("lowest"),
        task(
            "hello",
            "a command that succeeds",
            command(&[&["/bin/echo", "hello"]]),
            COMPLETED,
            Proof::LogHolds("hello"),
        ),
        task("fails", "a command with exit status 3", shell("echo no; exit 3"), FAILED, Proof::LogHolds("3")),
        task(
            "malformed",
            "a payload that breaks the schema",
            json!({ "command": "echo hello", "maxRunTime": 60 }),
            End { state: State::Exception, reason: "malformed-payload", runs: 1 },
            Proof::LogHolds("command"),
        ),
        task(
            "flaky",
            "exit status 75 asks for a retry",
            json!({
                "command": [["/bin/sh", "-c", "echo run $RUN_ID; [ \"$RUN_ID\" -gt 0 ] || exit 75"]],
                "maxRunTime": 60,
                "onExitStatus": { "retry": [75] },
            }),
            End { state: State::Completed, reason: "completed", runs: 2 },
            Proof::None,
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
            Proof::Artifacts(&["public/a.txt", "public/out/one", "public/out/deep/two"]),
        ),
        task(
            "long",
            "runs until its claim is extended",
            command(&[&["/bin/sh", "-c", until_reclaimed, &reclaimed.to_string_lossy()]]),
            COMPLETED,
            Proof::Reclaimed,
        ),
        task(
            "too-long",
            "runs past its maxRunTime of 2 s",
            json!({ "command": [["/bin/sleep", "300"]], "maxRunTime": 2 }),
            FAILED,
            Proof::LogHolds("maxRunTime"),
        ),
        task(
            "canceled",
            "canceled while it runs",
            shell("sleep 300"),
            End { state: State::Exception, reason: "canceled", runs: 1 },
            Proof::Canceled,
        ),
        task(
            "orphan",
            "leaves a child in the background",
            shell("sleep 300 & echo done"),
            COMPLETED,
            Proof::LogHolds("done"),
        ),
        task(
            "big-log",
            "8 MB of log, head and tail kept",
            shell("yes 'one more line of a long log' | head -c 8000000; echo the end"),
            COMPLETED,
            Proof::LogCut,
        ),
        task(
            "two-steps",
            "the second of two commands fails",
            command(&[&["/bin/true"], &["/bin/false"]]),
            FAILED,
            Proof::None,
        ),
        task(
            "program",
            "a handler written in shell",
            json!({ "whom": "world" }),
            COMPLETED,
            Proof::Artifacts(&["public/greeting.json"]),
        )
        .by(GREET),
        task("urgent", "highest priority, created last", shell("echo first"), COMPLETED, Proof::Before("patient"))
            .at("highest"),
    ]
}

fn task(name: &'static str, shows: &'static str, payload: Value, end: End, proof: Proof) -> DemoTask {
    DemoTask { name, shows, handler: COMMAND, priority: "medium", payload, end, proof }
}

impl DemoTask {
    fn at(self, priority: &'static str) -> Self {
        Self { priority, ..self }
    }

    fn by(self, handler: &'static str) -> Self {
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
pub(super) fn complaint(end: End, status: &Status) -> Option<String> {
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
        for shows in tasks.iter().map(|task| task.shows).chain([EXTENDED]) {
            assert!(shows.len() <= SHOWS_CHARS_MAX, "cut on a terminal of 80 columns: {shows}");
        }
    }

    #[test]
    fn an_end_other_than_the_expected_is_told() {
        let status = |state: &str, reason: &str, runs: usize| {
            let run = json!({ "runId": 0, "state": state, "reasonResolved": reason });
            Status::read(&json!({ "taskId": "a", "state": state, "runs": vec![run; runs] }))
        };
        assert_eq!(complaint(COMPLETED, &status("completed", "completed", 1)), None);
        assert!(complaint(COMPLETED, &status("failed", "failed", 1)).is_some());
        assert!(complaint(COMPLETED, &status("completed", "completed", 2)).is_some());
        assert!(complaint(FAILED, &status("exception", "canceled", 1)).is_some());
    }
}
