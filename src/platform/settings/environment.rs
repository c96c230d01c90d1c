//! The environment of the process, read once in `main`, and the keys that it sets.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::key::{PREFIX, Setting};
use super::problem::{Code, Problem, ValueOrigin};
use super::values::trimmed;

/// The configuration file, if no flag names one.
pub const FILE_VARIABLE: &str = "JOURNEYMAN_CONFIG";
/// A worker's control socket, if no flag names one.
pub const SOCKET_VARIABLE: &str = "JOURNEYMAN_SOCKET";
/// The directory for state that commands share.
pub const STATE_VARIABLE: &str = "JOURNEYMAN_STATE_DIR";

/// Variables that a controller of AMQP workers sets for a worker. One controller spells the last one wrongly.
const CONTROLLER_VARIABLES: [&str; 9] = [
    "WORKER_AMQP_URI",
    "WORKER_ID",
    "WORKER_KEY",
    "WORKER_POOL",
    "WORKER_REQUESTS_QUEUE",
    "WORKER_MAX_MSG_SIZE",
    "WORKER_ACTIVITY_EXCHANGE",
    "WORKER_ID_USE_HOSTNAME",
    "WORKEY_ID_USE_HOSTNAME",
];

/// The environment of this process.
#[derive(Clone, Default)]
pub struct Environment(BTreeMap<OsString, OsString>);

impl Environment {
    /// The environment of this process.
    pub fn from_process() -> Self {
        Self(std::env::vars_os().collect())
    }

    /// An environment with these variables.
    pub fn from_pairs(variables: &[(&str, &str)]) -> Self {
        Self(variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect())
    }

    /// The same with other variables, which take precedence.
    pub fn with<'a>(&self, variables: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let variables = variables.map(|(name, value)| (OsString::from(name), OsString::from(value)));
        Self(self.0.clone().into_iter().chain(variables).collect())
    }

    /// The value of a variable, trimmed; `None` if it is not set, empty or not UTF-8.
    pub fn get(&self, name: &str) -> Option<&str> {
        trimmed(self.0.get(std::ffi::OsStr::new(name))?.to_str()?)
    }

    /// The names of all variables that are UTF-8.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().filter_map(|name| name.to_str())
    }

    /// All variables that are UTF-8.
    pub fn pairs(&self) -> impl Iterator<Item = (String, String)> {
        let text = |text: &OsString| text.to_str().map(str::to_owned);
        self.0.iter().filter_map(move |(name, value)| text(name).zip(text(value)))
    }

    /// The keys that variables set; later ones override earlier ones.
    pub fn settings(&self, problems: &mut Vec<Problem>) -> Vec<Setting> {
        let mut settings = self.controller_settings();
        for (name, value) in &self.0 {
            let Some(name) = name.to_str() else { continue };
            let key = name.strip_prefix(PREFIX);
            if key.is_none() && !CONTROLLER_VARIABLES.contains(&name) {
                continue;
            }
            let origin = ValueOrigin::Env(name.to_owned());
            match (value.to_str(), key) {
                (Some(text), Some(key)) => {
                    let path = key.split("__").map(str::to_owned).collect();
                    settings.push(Setting { path, text: text.to_owned(), origin });
                }
                (Some(_), None) => {}
                // Without one of a controller's, the worker would differ from what the controller knows.
                (None, _) => {
                    let message = format!("the value of {name} is not UTF-8");
                    problems.push(Problem::error(Code::WrongValue, message, origin));
                }
            }
        }
        // A section that is set as a whole then collides with its keys, whichever variable comes first.
        settings.sort_by_key(|setting| std::cmp::Reverse(setting.path.len()));
        settings
    }

    /// The environment without the variables that a controller sets for a worker.
    pub fn without_controller_variables(&self) -> Self {
        let mut others = self.clone();
        others.0.retain(|name, _| !CONTROLLER_VARIABLES.iter().any(|variable| name == variable));
        others
    }

    /// The URI of the AMQP broker. `JOURNEYMAN_AMQP_URI` is also that of `journeyman call`.
    pub fn amqp_uri(&self) -> Option<&str> {
        self.get("JOURNEYMAN_AMQP_URI").or_else(|| self.get("WORKER_AMQP_URI"))
    }

    /// True if a controller has started this process as a worker.
    pub fn is_started_by_controller(&self) -> bool {
        self.get("WORKER_AMQP_URI").is_some() || self.has_worker_group()
    }

    /// True if a controller has set the worker group of this process.
    pub fn has_worker_group(&self) -> bool {
        ["WORKER_KEY", "WORKER_REQUESTS_QUEUE"].iter().any(|name| self.get(name).is_some())
    }

    fn controller_settings(&self) -> Vec<Setting> {
        let set = |name: &str, key: &str| {
            let mut text = self.get(name)?.to_owned();
            if name == "WORKER_MAX_MSG_SIZE" && text.bytes().all(|byte| byte.is_ascii_digit()) {
                text.push('B');
            }
            let path = vec!["amqp".to_owned(), key.to_owned()];
            Some(Setting { path, text, origin: ValueOrigin::Env(name.to_owned()) })
        };
        let keys = [("WORKER_KEY", "worker_key"), ("WORKER_POOL", "pool"), ("WORKER_MAX_MSG_SIZE", "max_message_size")];
        keys.into_iter().filter_map(|(name, key)| set(name, key)).collect()
    }
}
