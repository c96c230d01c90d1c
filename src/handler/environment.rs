//! The environment of payload processes: only variables that the operator allows pass from the worker.

use std::collections::BTreeMap;

use crate::host::program_path::PATH_DEFAULT;
use crate::limits::ARGUMENT_BYTES_MAX;

use super::Context;

pub type Variables = BTreeMap<String, String>;

/// Selects the named variables.
pub fn select(names: &[String], variables: impl IntoIterator<Item = (String, String)>) -> Variables {
    variables.into_iter().filter(|(name, _)| names.iter().any(|selected| selected == name)).collect()
}

/// The environment of a task without variables of its payload.
#[must_use]
pub fn for_task(allowed: &Variables, context: &Context) -> Variables {
    for_payload(allowed, Variables::new(), context)
}

/// Each set overrides the one before: `PATH` and `HOME`; `allowed`, from the worker; `payload`; then what no payload can
/// override: `TASK_ID`, `RUN_ID`, the variables of the source, and `TASK_WORKDIR`.
#[must_use]
pub fn for_payload(allowed: &Variables, payload: Variables, context: &Context) -> Variables {
    let workdir = context.workdir().to_string_lossy().into_owned();
    let task = context.task();
    let mut variables = Variables::new();
    let mut set = |name: &str, value: String| variables.insert(name.to_owned(), value);
    set("PATH", PATH_DEFAULT.to_owned());
    set("HOME", workdir.clone());
    for (name, value) in allowed {
        set(name, value.clone());
    }
    for (name, value) in payload {
        set(&name, value);
    }
    set("TASK_ID", task.run.task.to_string());
    set("RUN_ID", task.run.run.to_string());
    for (name, value) in &task.env {
        set(name, value.clone());
    }
    set("TASK_WORKDIR", workdir);
    variables
}

/// Why a variable cannot be set; `None` if it can.
#[must_use]
pub fn variable_error(name: &str, value: &str) -> Option<&'static str> {
    if name.is_empty() || name.contains('=') {
        Some("a name must not be empty or contain '='")
    } else if name.contains('\0') || value.contains('\0') {
        Some("it contains a NUL byte")
    } else if name.len() + 1 + value.len() > ARGUMENT_BYTES_MAX {
        Some("name and value are longer than the 131071 bytes that Linux allows; use a file")
    } else {
        None
    }
}
