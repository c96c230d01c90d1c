//! Resolves a user-supplied task name to a claim.

use thiserror::Error;

use journeyman_domain::id::{LocalToken, Run};

/// Names listed in an error.
const NAMES_MAX: usize = 20;

/// Why a name resolves to no claim.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TaskLookupError {
    /// No held claim matches.
    #[error("this worker holds no task {name}; {}", describe_claims(.held))]
    NotFound {
        /// The given name.
        name: String,
        /// The held runs.
        held: Vec<String>,
    },
    /// Several match.
    #[error("{name} is ambiguous: {}; give a longer prefix", join_names(.these))]
    Ambiguous {
        /// The given name.
        name: String,
        /// The matching runs.
        these: Vec<String>,
    },
    /// The worker has exited.
    #[error("the worker has exited")]
    WorkerExited,
}

fn describe_claims(held: &[String]) -> String {
    if held.is_empty() { "it holds nothing".to_owned() } else { format!("it holds {}", join_names(held)) }
}

fn join_names(names: &[String]) -> String {
    let shown = names.iter().take(NAMES_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = names.len().saturating_sub(NAMES_MAX);
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

/// Accepts `TASK`, `TASK/RUN` or a unique prefix of either.
pub(super) fn resolve(name: &str, held: &[(LocalToken, &Run)]) -> Result<LocalToken, TaskLookupError> {
    let matching = |matches: &dyn Fn(&Run) -> bool| -> Vec<(LocalToken, &Run)> {
        held.iter().copied().filter(|(_, run)| matches(run)).collect()
    };
    let exact = matching(&|run| run.task.as_str() == name || run.to_string() == name);
    let prefixed = || matching(&|run| !name.is_empty() && run.to_string().starts_with(name));
    let found = if exact.is_empty() { prefixed() } else { exact };
    let names = |claims: &[(LocalToken, &Run)]| claims.iter().map(|(_, run)| run.to_string()).collect();
    match found[..] {
        [(claim, _)] => Ok(claim),
        [] => Err(TaskLookupError::NotFound { name: name.to_owned(), held: names(held) }),
        [..] => Err(TaskLookupError::Ambiguous { name: name.to_owned(), these: names(&found) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use journeyman_domain::id::TaskId;

    fn resolved(name: &str, held: &[(&str, u32)]) -> String {
        let run = |(task, run): &(&str, u32)| Run { task: TaskId::parse(task).unwrap(), run: *run };
        let runs: Vec<Run> = held.iter().map(run).collect();
        let held: Vec<_> = (1..).map(LocalToken).zip(&runs).collect();
        resolve(name, &held).map_or_else(|error| error.to_string(), |claim| claim.0.to_string())
    }

    #[test]
    fn a_task_resolves_by_id_by_id_and_run_or_by_a_unique_prefix() {
        let these = [("Abc", 0), ("Abd", 2), ("Ab", 0)];
        for (name, meant) in [("Abc", "1"), ("Abc/0", "1"), ("Abd", "2"), ("Abd/", "2"), ("Ab", "3"), ("Ab/0", "3")] {
            assert_eq!(resolved(name, &these), meant, "{name}");
        }
        assert_eq!(resolved("A", &these), "A is ambiguous: Abc/0, Abd/2, Ab/0; give a longer prefix");
        assert_eq!(resolved("Abc", &[("Abc", 0), ("Abc", 1)]), "Abc is ambiguous: Abc/0, Abc/1; give a longer prefix");
        assert_eq!(resolved("abc", &these), "this worker holds no task abc; it holds Abc/0, Abd/2, Ab/0");
        assert_eq!(resolved("", &these), "this worker holds no task ; it holds Abc/0, Abd/2, Ab/0");
        assert_eq!(resolved("x", &[]), "this worker holds no task x; it holds nothing");
        assert_eq!(resolved("Abc/1", &these), "this worker holds no task Abc/1; it holds Abc/0, Abd/2, Ab/0");
    }

    #[test]
    fn an_error_lists_a_limited_number_of_names() {
        let names: Vec<String> = (0..30).map(|number| format!("T{number}")).collect();
        let these: Vec<_> = names.iter().map(|name| (name.as_str(), 0)).collect();
        let error = resolved("x", &these);
        assert!(error.ends_with("T19/0 and 10 more"), "{error}");
    }
}
