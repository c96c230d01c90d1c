//! The environment as it was when the process started, and the settings in it.
//!
//! It is read once, in `main`; everything else is handed this value, so that a test needs no environment of its own.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::problem::{Code, Origin, Problem};
use super::tree::{Setting, shout};

/// What every variable of ours starts with.
pub const PREFIX: &str = "JOURNEYMAN__";

/// The environment of this process.
#[derive(Clone, Default)]
pub struct Environment(BTreeMap<OsString, OsString>);

impl std::fmt::Debug for Environment {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Environment({} variables)", self.0.len())
    }
}

impl Environment {
    /// The environment of this process, as it is now.
    #[must_use]
    pub fn of_process() -> Self {
        Self(std::env::vars_os().collect())
    }

    /// An environment of these variables.
    #[must_use]
    pub fn of(variables: &[(&str, &str)]) -> Self {
        Self(variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect())
    }

    /// A variable's value; `None` where it is not set, empty, or not UTF-8.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(std::ffi::OsStr::new(name))?.to_str().filter(|value| !value.is_empty())
    }

    /// Every variable that is UTF-8, with its value.
    pub fn pairs(&self) -> impl Iterator<Item = (String, String)> {
        let text = |text: &OsString| text.to_str().map(str::to_owned);
        self.0.iter().filter_map(move |(name, value)| text(name).zip(text(value)))
    }

    /// The settings in it. Variables that are ours and cannot be read become problems.
    pub(super) fn settings(&self, problems: &mut Vec<Problem>) -> Vec<Setting> {
        let mut settings = Vec::new();
        for (name, value) in &self.0 {
            let Some(name) = name.to_str() else { continue };
            let Some(rest) = name.strip_prefix(PREFIX) else { continue };
            let origin = Origin::Env(name.to_owned());
            let Some(text) = value.to_str() else {
                problems.push(Problem {
                    code: Code::Value,
                    what: format!("the value of {name} is not UTF-8"),
                    origin,
                    label: String::new(),
                    help: None,
                });
                continue;
            };
            let path = rest.split("__").map(str::to_owned).collect();
            settings.push(Setting { path, text: text.to_owned(), origin });
        }
        settings
    }
}

/// The variable that sets a key, such as `JOURNEYMAN__WORKER__CAPACITY` for `worker.capacity`.
#[must_use]
pub fn variable(key: &str) -> String {
    format!("{PREFIX}{}", shout(&key.replace('.', "__")))
}
