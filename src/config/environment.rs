//! The environment of the process, read once in `main`, and the keys that it sets.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::load::{Setting, shout};
use super::problem::{Problem, ProblemCode, ValueOrigin};
use super::reference;

/// Prefix of variables that set keys.
pub const PREFIX: &str = "JOURNEYMAN__";
/// The configuration file, if no flag names one.
pub const FILE_VARIABLE: &str = "JOURNEYMAN_CONFIG";
/// A worker's control socket, if no flag names one.
pub const SOCKET_VARIABLE: &str = "JOURNEYMAN_SOCKET";
/// The directory for state that commands share.
pub const STATE_VARIABLE: &str = "JOURNEYMAN_STATE_DIR";

/// The environment of this process.
#[derive(Clone, Default)]
pub struct Environment(BTreeMap<OsString, OsString>);

impl std::fmt::Debug for Environment {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Environment({} variables)", self.0.len())
    }
}

impl Environment {
    /// The environment of this process.
    pub fn from_process() -> Self {
        Self(std::env::vars_os().collect())
    }

    /// An environment with these variables.
    pub fn from_pairs(variables: &[(&str, &str)]) -> Self {
        Self(variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect())
    }

    /// The value of a variable; `None` if it is not set, empty or not UTF-8.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(std::ffi::OsStr::new(name))?.to_str().filter(|value| !value.is_empty())
    }

    /// All variables that are UTF-8.
    pub fn pairs(&self) -> impl Iterator<Item = (String, String)> {
        let text = |text: &OsString| text.to_str().map(str::to_owned);
        self.0.iter().filter_map(move |(name, value)| text(name).zip(text(value)))
    }

    /// The keys that variables set; later ones override earlier ones.
    pub(super) fn settings(&self, problems: &mut Vec<Problem>) -> Vec<Setting> {
        let mut settings = self.controller_settings();
        problems.extend(self.non_utf8_controller_variables());
        for (name, value) in &self.0 {
            let Some(name) = name.to_str() else { continue };
            let Some(rest) = name.strip_prefix(PREFIX) else { continue };
            let origin = ValueOrigin::Env(name.to_owned());
            let Some(text) = value.to_str() else {
                problems.push(not_utf8(name));
                continue;
            };
            let path = rest.split("__").map(str::to_owned).collect();
            settings.push(Setting { path, text: text.to_owned(), origin });
        }
        // A section that is set as a whole then collides with its keys, whichever variable comes first.
        settings.sort_by_key(|setting| std::cmp::Reverse(setting.path.len()));
        settings
    }
}

/// Variables that a controller of AMQP workers sets for a worker, and the keys that they set.
const CONTROLLER_VARIABLES: [(&str, [&str; 2]); 8] = [
    ("WORKER_AMQP_URI", ["AMQP", "URI"]),
    // The variable of `journeyman call`, which reads no configuration.
    ("JOURNEYMAN_AMQP_URI", ["AMQP", "URI"]),
    ("WORKER_ID", ["AMQP", "WORKER_ID"]),
    ("WORKER_KEY", ["AMQP", "WORKER_KEY"]),
    ("WORKER_POOL", ["AMQP", "POOL"]),
    ("WORKER_REQUESTS_QUEUE", ["AMQP", "REQUESTS_QUEUE"]),
    ("WORKER_MAX_MSG_SIZE", ["AMQP", "MAX_MESSAGE_SIZE"]),
    ("WORKER_ACTIVITY_EXCHANGE", ["ACTIVITY", "EXCHANGE"]),
];

impl Environment {
    /// The environment without the variables that a controller sets for a worker.
    pub fn without_controller_variables(&self) -> Self {
        let is_removed = |name: &OsString| {
            let of_controller = CONTROLLER_VARIABLES.iter().map(|(name, _)| *name).chain(ID_BY_HOSTNAME);
            name.to_str().is_some_and(|name| of_controller.into_iter().any(|other| other == name))
        };
        Self(
            self.0
                .iter()
                .filter(|(name, _)| !is_removed(name))
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
        )
    }
}

/// Makes the host name the worker's id. One controller spells it wrongly.
const ID_BY_HOSTNAME: [&str; 2] = ["WORKER_ID_USE_HOSTNAME", "WORKEY_ID_USE_HOSTNAME"];

impl Environment {
    /// Whether a controller has started this process as a worker.
    pub fn is_started_by_controller(&self) -> bool {
        self.get("WORKER_AMQP_URI").is_some() || self.has_worker_group()
    }

    /// Whether a controller has set the worker group of this process.
    pub fn has_worker_group(&self) -> bool {
        ["WORKER_KEY", "WORKER_REQUESTS_QUEUE"].iter().any(|name| self.get(name).is_some())
    }

    /// Controller variables that are not UTF-8. Without them the worker's id would differ from the one the controller knows.
    fn non_utf8_controller_variables(&self) -> Vec<Problem> {
        let is_unreadable =
            |name: &&str| self.0.get(std::ffi::OsStr::new(name)).is_some_and(|value| value.to_str().is_none());
        CONTROLLER_VARIABLES.iter().map(|(name, _)| *name).filter(is_unreadable).map(not_utf8).collect()
    }

    fn controller_settings(&self) -> Vec<Setting> {
        let by_hostname = ID_BY_HOSTNAME
            .iter()
            .find(|name| self.get(name).is_some_and(|value| !["0", "false", "no"].contains(&value)));
        let set = |name: &'static str, path: [&str; 2]| {
            let mut text = self.get(name)?.to_owned();
            if name == "WORKER_MAX_MSG_SIZE" && text.bytes().all(|byte| byte.is_ascii_digit()) {
                text.push('B');
            }
            if name == "WORKER_ID" && by_hostname.is_some() {
                text = hostname();
            }
            Some(Setting { path: path.map(str::to_owned).to_vec(), text, origin: ValueOrigin::Env(name.to_owned()) })
        };
        CONTROLLER_VARIABLES.into_iter().filter_map(|(name, path)| set(name, path)).collect()
    }
}

fn not_utf8(name: &str) -> Problem {
    Problem {
        code: ProblemCode::Value,
        message: format!("the value of {name} is not UTF-8"),
        origin: ValueOrigin::Env(name.to_owned()),
        label: String::new(),
        help: None,
    }
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

impl Environment {
    /// Warnings about variables that would set a key if their underscores were doubled.
    pub(super) fn unknown_variables(&self) -> Vec<Problem> {
        let names = self.0.keys().filter_map(|name| name.to_str());
        let names: Vec<&str> =
            names.filter(|name| name.starts_with("JOURNEYMAN_") && !name.starts_with(PREFIX)).collect();
        if names.is_empty() {
            return Vec::new();
        }
        let single = |variable: &str| variable.replace("__", "_");
        let known: BTreeMap<String, String> =
            reference::keys().iter().map(|key| variable(&key.key)).map(|known| (single(&known), known)).collect();
        names
            .into_iter()
            .filter_map(|name| Some((name, known.get(&single(name))?)))
            .map(|(name, near)| Problem {
                code: ProblemCode::UnknownVariable,
                message: format!("the variable {name} sets nothing"),
                origin: ValueOrigin::Env(name.to_owned()),
                label: String::new(),
                help: Some(format!("did you mean `{near}`?")),
            })
            .collect()
    }
}

/// The variable that sets a key, such as `JOURNEYMAN__WORKER__CAPACITY` for `worker.capacity`.
pub fn variable(key: &str) -> String {
    format!("{PREFIX}{}", shout(&key.replace('.', "__")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn help(name: &str) -> Option<String> {
        Environment::from_pairs(&[(name, "1")]).unknown_variables().into_iter().next().and_then(|problem| problem.help)
    }

    #[test]
    fn a_variable_with_single_underscores_is_suggested_correctly() {
        for (name, expected) in [
            ("JOURNEYMAN_WORKER_CAPACITY", "JOURNEYMAN__WORKER__CAPACITY"),
            ("JOURNEYMAN_WORKER__POLL_INTERVAL", "JOURNEYMAN__WORKER__POLL_INTERVAL"),
        ] {
            assert_eq!(help(name), Some(format!("did you mean `{expected}`?")), "{name}");
        }
    }

    #[test]
    fn known_and_unrelated_variables_raise_no_warning() {
        for name in ["JOURNEYMAN_CONFIG", "JOURNEYMAN__WORKER__CAPACITY", "JOURNEYMAN_SERVICE_HOST"] {
            assert_eq!(help(name), None, "{name}");
        }
    }
}
