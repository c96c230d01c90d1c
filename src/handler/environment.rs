//! The environment a payload's processes start with. It begins empty: nothing of the worker's own is passed on but what
//! the operator named.

use std::collections::BTreeMap;

use crate::host::program_path::PATH_DEFAULT;
use crate::limits::ARGUMENT_BYTES_MAX;

use super::Context;

/// The variables that are passed on unless the operator names others.
pub const ENV_ALLOW_DEFAULT: [&str; 3] = ["PATH", "LANG", "TZ"];

/// Names and values.
pub type Variables = BTreeMap<String, String>;

/// Picks the named variables out of the worker's own.
pub fn select(names: &[String], worker: impl IntoIterator<Item = (String, String)>) -> Variables {
    worker.into_iter().filter(|(name, _)| names.iter().any(|kept| kept == name)).collect()
}

/// What a process of this task gets, each line over the one before: a `PATH`; the task's folder as `HOME`; what the operator
/// passes on; and what no payload can say otherwise: `TASK_ID`, `RUN_ID` and `TASK_WORKDIR`, and what the source adds.
#[must_use]
pub fn for_task(passed_on: &Variables, context: &Context) -> Variables {
    for_payload(passed_on, Variables::new(), context)
}

/// As [`for_task`], with what the payload sets over what the operator passes on.
#[must_use]
pub fn for_payload(passed_on: &Variables, payload: Variables, context: &Context) -> Variables {
    let workdir = context.workdir().to_string_lossy().into_owned();
    let task = context.task();
    let mut variables = Variables::new();
    let mut set = |name: &str, value: String| variables.insert(name.to_owned(), value);
    set("PATH", PATH_DEFAULT.to_owned());
    set("HOME", workdir.clone());
    for (name, value) in passed_on {
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

/// Why a variable cannot be set, if it cannot.
#[must_use]
pub fn variable_error(name: &str, value: &str) -> Option<&'static str> {
    if name.is_empty() || name.contains('=') {
        Some("a name must not be empty or hold '='")
    } else if name.contains('\0') || value.contains('\0') {
        Some("NUL bytes cannot be passed on")
    } else if name.len() + 1 + value.len() > ARGUMENT_BYTES_MAX {
        Some("with its name it is longer than the 131071 bytes that can be passed on; put it into a file")
    } else {
        None
    }
}
