//! The tasks of the demo and their expected results.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::cli::task::task_status::TaskStatus;
use crate::domain::id::TaskId;
use crate::source::taskcluster::formats::new_task_id;

pub(super) const GREET: &str = "greet";

/// Reads the payload as JSON from standard input and writes its results to descriptor 3.
pub(super) const GREET_PROGRAM: &str = include_str!("greet.sh");

pub(super) const EXTENDED: &str = "its claim was extended";

#[derive(Deserialize)]
struct TaskFile {
    task: Vec<DemoTask>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DemoTask {
    #[serde(skip, default = "new_task_id")]
    pub(super) id: TaskId,
    pub(super) name: String,
    pub(super) description: String,
    pub(super) handler: Option<String>,
    pub(super) priority: Option<String>,
    pub(super) payload: Value,
    pub(super) reason: String,
    #[serde(default)]
    pub(super) retries: usize,
    #[serde(default)]
    pub(super) expectation: Expectation,
    #[serde(skip)]
    pub(super) status: Option<TaskStatus>,
    #[serde(skip)]
    pub(super) result: CheckResult,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum CheckResult {
    #[default]
    Pending,
    Passed,
    Failed(String),
}

/// A further check of a resolved task.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Expectation {
    #[default]
    Nothing,
    Artifacts(Vec<String>),
    LogContains(String),
    LogTruncated,
    /// The task waits for a file that the demo creates once the claim was extended.
    Reclaimed,
    /// Started before this task, which was created earlier.
    StartedBefore(String),
    /// The demo cancels it once it runs.
    Canceled,
}

/// In order of creation. The long task waits for the file `reclaimed`.
pub(super) fn tasks(reclaimed: &Path) -> Result<Vec<DemoTask>, toml::de::Error> {
    let mut tasks = toml::from_str::<TaskFile>(include_str!("tasks.toml"))?.task;
    for task in tasks.iter_mut().filter(|task| task.expectation == Expectation::Reclaimed) {
        task.payload["env"] = json!({ "RECLAIMED": reclaimed });
    }
    Ok(tasks)
}

/// The reason and the number of runs of a resolved task, if they are not the expected ones.
pub(super) fn unexpected_result(task: &DemoTask, status: &TaskStatus) -> Option<String> {
    let reason = status.runs.last().and_then(|run| run.reason.as_deref()).unwrap_or_default();
    let (runs, expected_runs) = (status.runs.len(), task.retries + 1);
    let is_expected = (task.reason.as_str(), expected_runs) == (reason, runs);
    (!is_expected).then(|| format!("expected {} in {expected_runs} runs, got {reason} in {runs}", task.reason))
}

#[cfg(test)]
mod tests {
    use super::super::screen::DESCRIPTION_CHARS_MAX;
    use super::*;

    #[test]
    fn the_demo_has_at_least_a_dozen_tasks_with_unique_names() {
        let tasks = tasks(Path::new("reclaimed")).unwrap();
        let names: std::collections::BTreeSet<_> = tasks.iter().map(|task| &task.name).collect();
        assert_eq!(names.len(), tasks.len());
        assert!(tasks.len() >= 12);
        for description in tasks.iter().map(|task| task.description.as_str()).chain([EXTENDED]) {
            assert!(description.len() <= DESCRIPTION_CHARS_MAX, "truncated at 80 columns: {description}");
        }
    }

    #[test]
    fn an_unexpected_result_is_reported() {
        let tasks = tasks(Path::new("reclaimed")).unwrap();
        let check = |reason: &str, runs: usize| {
            let run = json!({ "runId": 0, "reasonResolved": reason });
            unexpected_result(&tasks[0], &TaskStatus::read(&json!({ "runs": vec![run; runs] })).unwrap())
        };
        assert_eq!(check("completed", 1), None);
        assert!(check("failed", 1).is_some());
        assert!(check("completed", 2).is_some());
    }
}
