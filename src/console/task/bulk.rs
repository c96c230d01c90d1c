//! Orders about many tasks at once.

use std::collections::BTreeMap;

use futures_util::stream::{StreamExt as _, iter};
use serde::{Deserialize, Serialize};

use super::status::{FoundTask, TaskState};
use journeyman_domain::id::TaskId;
use journeyman_domain::limits::{BULK_CALLS_MAX, BULK_TASKS_MAX};
use journeyman_domain::refusal::Refusal;
use journeyman_worker::source::CallError;
use journeyman_worker::source::taskcluster::{Api, TaskSearch};

/// What is done to each of the tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BulkAction {
    /// Runs it again.
    Rerun,
    /// Resolves it as canceled.
    Cancel,
}

impl BulkAction {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Rerun => "rerun",
            Self::Cancel => "cancel",
        }
    }

    /// Completed tasks are run again only if the search names their state.
    fn applies_to(self, task: &FoundTask, is_state_named: bool) -> bool {
        let state = task.status.state;
        match self {
            Self::Rerun if is_state_named => task.status.is_resolved(),
            Self::Rerun => matches!(state, TaskState::Failed | TaskState::Exception),
            Self::Cancel => matches!(state, TaskState::Unscheduled | TaskState::Pending | TaskState::Running),
        }
    }

    pub(crate) async fn apply(self, api: &Api, task: &TaskId) -> Result<serde_json::Value, CallError> {
        match self {
            Self::Rerun => api.rerun_task(task).await,
            Self::Cancel => api.cancel_task(task).await,
        }
    }
}

/// What became of the tasks of an order.
#[derive(Debug, Default, Serialize)]
pub(crate) struct BulkResult {
    pub(crate) succeeded: Vec<String>,
    /// Why, by task.
    pub(crate) failed: BTreeMap<String, String>,
}

/// The tasks of a search to which the action applies.
///
/// # Errors
///
/// Those of the queue, and more than [`BULK_TASKS_MAX`] tasks that the search finds.
pub(crate) async fn find(api: &Api, action: BulkAction, search: &TaskSearch) -> Result<Vec<FoundTask>, CallError> {
    let (mut found, mut seen, mut token) = (Vec::new(), 0, None::<String>);
    loop {
        let page = api.find_tasks(search, token.as_deref()).await?;
        seen += page.entries.len();
        for entry in &page.entries {
            found.push(FoundTask::read(entry)?);
        }
        found.retain(|task| action.applies_to(task, !search.state.is_empty()));
        token = page.continuation_token;
        if found.len() > BULK_TASKS_MAX || (token.is_some() && seen > BULK_TASKS_MAX * 100) {
            let message =
                format!("more than {BULK_TASKS_MAX} tasks match; narrow the search by queue, name, state or time");
            return Err(CallError { refusal: Refusal::Rejected, message });
        }
        if token.is_none() {
            return Ok(found);
        }
    }
}

/// Changes each of the tasks, also after an error, some at the same time.
pub(crate) async fn apply(api: &Api, action: BulkAction, tasks: Vec<TaskId>) -> BulkResult {
    let changing = iter(tasks).map(async |task| {
        let changed = action.apply(api, &task).await;
        (task.to_string(), changed.err().map(|error| error.message))
    });
    let mut result = BulkResult::default();
    for (task, error) in changing.buffer_unordered(BULK_CALLS_MAX).collect::<Vec<_>>().await {
        match error {
            None => result.succeeded.push(task),
            Some(error) => drop(result.failed.insert(task, error)),
        }
    }
    result
}
