//! The environment of payload processes: only variables that the operator allows pass from the worker.

use std::collections::BTreeMap;
use std::path::Path;

use journeyman_platform::host::program_path::PATH_DEFAULT;

use super::Context;

/// Says where the task's proxy is.
pub(super) const PROXY_VARIABLE: &str = "TASKCLUSTER_PROXY_URL";

pub type Variables = BTreeMap<String, String>;

/// Selects the named variables.
pub fn select(names: &[String], variables: impl IntoIterator<Item = (String, String)>) -> Variables {
    variables.into_iter().filter(|(name, _)| names.iter().any(|selected| selected == name)).collect()
}

/// `PATH` and `HOME`, then `allowed` from the worker.
pub fn base(allowed: &Variables, home: &Path) -> Variables {
    let mut variables = Variables::from([
        ("PATH".to_owned(), PATH_DEFAULT.to_owned()),
        ("HOME".to_owned(), home.to_string_lossy().into_owned()),
    ]);
    variables.extend(allowed.clone());
    variables
}

/// The environment of a task without variables of its payload.
pub fn for_task(allowed: &Variables, context: &Context) -> Variables {
    for_payload(allowed, Variables::new(), context)
}

/// Each set overrides the one before: [`base`]; `payload`; then what no payload can override: `TASK_ID`, `RUN_ID`, the
/// variables of the source, and `TASK_WORKDIR`.
pub fn for_payload(allowed: &Variables, payload: Variables, context: &Context) -> Variables {
    let mut variables = base(allowed, context.workdir());
    let user = context.user().map(|user| user.name());
    variables
        .extend(user.into_iter().flat_map(|name| ["USER", "LOGNAME"].map(|key| (key.to_owned(), name.to_owned()))));
    variables.extend(payload);
    variables.extend(identity(context));
    variables.insert("TASK_WORKDIR".to_owned(), context.workdir().to_string_lossy().into_owned());
    variables
}

/// What a payload can learn of its task wherever it runs: `TASK_ID`, `RUN_ID`, the variables of the source, and its trace.
pub(super) fn identity(context: &Context) -> Variables {
    let task = context.task();
    let mut variables = Variables::from([
        ("TASK_ID".to_owned(), task.run.task.to_string()),
        ("RUN_ID".to_owned(), task.run.run.to_string()),
    ]);
    variables.extend((*task.env).clone());
    variables.extend(context.proxy_url().map(|url| (PROXY_VARIABLE.to_owned(), url.to_owned())));
    variables.extend(task.trace.map(|trace| ("TRACEPARENT".to_owned(), trace.to_string())));
    variables
}

/// Why a variable cannot be set; `None` if it can.
pub fn variable_error(name: &str, value: &str) -> Option<&'static str> {
    if name.is_empty() || name.contains('=') {
        Some("a name must not be empty or contain '='")
    } else if name.contains('\0') || value.contains('\0') {
        Some("it contains a NUL byte")
    } else {
        None
    }
}
