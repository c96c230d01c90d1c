//! The tasks of the demo and their expected results.

use serde::Deserialize;
use serde_json::Value;

use crate::console::task::status::TaskStatus;
use journeyman_domain::id::TaskId;
use journeyman_worker::task::formats::new_task_id;

pub(super) const GREET: &str = "greet";

/// Reads the payload as JSON from standard input and writes its results to descriptor 3.
pub(super) const GREET_PROGRAM: &str = include_str!("greet.sh");

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
    /// The demo cancels it once it runs.
    #[serde(default)]
    pub(super) cancel: bool,
    #[serde(skip)]
    pub(super) status: Option<TaskStatus>,
}

/// The tasks in order of creation.
pub(super) fn tasks() -> Result<Vec<DemoTask>, toml::de::Error> {
    Ok(toml::from_str::<TaskFile>(include_str!("tasks.toml"))?.task)
}

impl DemoTask {
    pub(super) fn is_resolved(&self) -> bool {
        self.status.as_ref().is_some_and(TaskStatus::is_resolved)
    }

    pub(super) fn line(&self, status: &TaskStatus) -> String {
        let run = status.runs.last().map_or_else(String::new, |run| run.number.to_string());
        format!("{:10} {:30} {run:>3}  {}", self.name, status.summary(), self.description)
    }

    /// How it did not end as expected.
    pub(super) fn problem(&self) -> Option<String> {
        let name = &self.name;
        let Some(status) = self.status.as_ref().filter(|status| status.is_resolved()) else {
            return Some(format!("{name}: not resolved"));
        };
        let reason = status.runs.last().and_then(|run| run.reason.as_deref()).unwrap_or_default();
        let (runs, expected_runs) = (status.runs.len(), self.retries + 1);
        let is_expected = (self.reason.as_str(), expected_runs) == (reason, runs);
        (!is_expected)
            .then(|| format!("{name}: expected {} in {expected_runs} runs, got {reason} in {runs}", self.reason))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_demo_has_at_least_a_dozen_tasks_with_unique_names() {
        let tasks = tasks().unwrap();
        let names: std::collections::BTreeSet<_> = tasks.iter().map(|task| &task.name).collect();
        assert_eq!(names.len(), tasks.len());
        assert!(tasks.len() >= 12);
    }

    #[test]
    fn an_unexpected_result_is_reported() {
        let task = tasks().unwrap().remove(0);
        assert!(task.problem().is_some(), "not resolved");
        let problem = |reason: &str, runs: usize| {
            let run = json!({ "runId": 0, "reasonResolved": reason });
            let status = json!({ "state": "completed", "runs": vec![run; runs] });
            DemoTask { status: Some(TaskStatus::read(&status).unwrap()), ..task.clone() }.problem()
        };
        assert_eq!(problem("completed", 1), None);
        assert!(problem("failed", 1).is_some());
        assert!(problem("completed", 2).is_some());
    }
}
