//! Resolves a user-supplied task name to a claim.

use thiserror::Error;

use crate::domain::id::{LocalToken, Run};

/// Names listed in an error.
const NAMES_MAX: usize = 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LookupCandidate {
    pub(super) claim: LocalToken,
    pub(super) run: Run,
    pub(super) source: String,
}

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

/// Accepts `TASK`, `TASK/RUN` or a unique prefix of either, optionally after `SOURCE:`.
pub(super) fn resolve(name: &str, held: Vec<LookupCandidate>) -> Result<LocalToken, TaskLookupError> {
    let (source, short) = name.split_once(':').map_or((None, name), |(source, short)| (Some(source), short));
    let of_source = |one: &&LookupCandidate| source.is_none_or(|source| one.source == source);
    let called = |wanted: &dyn Fn(&LookupCandidate) -> bool| -> Vec<&LookupCandidate> {
        held.iter().filter(of_source).filter(|one| wanted(one)).collect()
    };
    let whole = called(&|one| one.run.task.as_str() == short || one.run.to_string() == short);
    let begun = called(&|one| !short.is_empty() && one.run.to_string().starts_with(short));
    let found = if whole.is_empty() { begun } else { whole };
    match found[..] {
        [one] => Ok(one.claim),
        [] => Err(TaskLookupError::NotFound {
            name: name.to_owned(),
            held: distinct_names(&held.iter().collect::<Vec<_>>()),
        }),
        [..] => Err(TaskLookupError::Ambiguous { name: name.to_owned(), these: distinct_names(&found) }),
    }
}

/// With the source where two claims have the same run.
fn distinct_names(these: &[&LookupCandidate]) -> Vec<String> {
    let twice = |one: &&LookupCandidate| these.iter().filter(|other| other.run == one.run).count() > 1;
    let named =
        |one: &&LookupCandidate| if twice(one) { format!("{}:{}", one.source, one.run) } else { one.run.to_string() };
    these.iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::id::TaskId;

    fn held(names: &[(&str, u32, &str)]) -> Vec<LookupCandidate> {
        let one = |(number, (task, run, source)): (u64, &(&str, u32, &str))| LookupCandidate {
            claim: LocalToken(number),
            run: Run { task: TaskId::parse(task).unwrap(), run: *run },
            source: (*source).to_owned(),
        };
        (1..).zip(names).map(one).collect()
    }

    fn said(name: &str, these: &[(&str, u32, &str)]) -> String {
        resolve(name, held(these)).map_or_else(|not| not.to_string(), |claim| claim.0.to_string())
    }

    #[test]
    fn a_task_resolves_by_id_by_id_and_run_or_by_a_unique_prefix() {
        let these = [("Abc", 0, "ci"), ("Abd", 2, "ci"), ("Ab", 0, "ci")];
        for (name, meant) in [("Abc", "1"), ("Abc/0", "1"), ("Abd", "2"), ("Abd/", "2"), ("Ab", "3"), ("Ab/0", "3")] {
            assert_eq!(said(name, &these), meant, "{name}");
        }
        assert_eq!(said("A", &these), "A is ambiguous: Abc/0, Abd/2, Ab/0; give a longer prefix");
        assert_eq!(said("abc", &these), "this worker holds no task abc; it holds Abc/0, Abd/2, Ab/0");
        assert_eq!(said("", &these), "this worker holds no task ; it holds Abc/0, Abd/2, Ab/0");
        assert_eq!(said("x", &[]), "this worker holds no task x; it holds nothing");
        assert_eq!(said("Abc/1", &these), "this worker holds no task Abc/1; it holds Abc/0, Abd/2, Ab/0");
    }

    #[test]
    fn equal_task_ids_are_distinguished_by_run_and_source() {
        let these = [("Abc", 0, "ci"), ("Abc", 1, "ci"), ("Abc", 1, "try")];
        assert_eq!(said("Abc", &these), "Abc is ambiguous: Abc/0, ci:Abc/1, try:Abc/1; give a longer prefix");
        assert_eq!(said("Abc/0", &these), "1");
        assert_eq!(said("Abc/1", &these), "Abc/1 is ambiguous: ci:Abc/1, try:Abc/1; give a longer prefix");
        assert_eq!(said("try:Abc/1", &these), "3");
        assert_eq!(said("try:A", &these), "3");
        assert_eq!(said("nope:A", &these), "this worker holds no task nope:A; it holds Abc/0, ci:Abc/1, try:Abc/1");
    }

    #[test]
    fn an_error_lists_a_limited_number_of_names() {
        let names: Vec<String> = (0..30).map(|number| format!("T{number}")).collect();
        let these: Vec<_> = names.iter().map(|name| (name.as_str(), 0, "ci")).collect();
        let said = said("x", &these);
        assert!(said.ends_with("T19/0 and 10 more"), "{said}");
    }
}
