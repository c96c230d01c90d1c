//! The environment as it was when the process started, and the settings in it.
//!
//! It is read once, in `main`; everything else is handed this value, so that a test needs no environment of its own.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::problem::{Problem, ProblemCode, ValueOrigin, suggest};
use super::reference;
use super::tree::{Setting, shout};

/// What every variable that sets a key starts with.
pub const PREFIX: &str = "JOURNEYMAN__";
/// What every variable of ours starts with.
const NAME_PREFIX: &str = "JOURNEYMAN_";
/// Names the configuration file where no flag does.
pub const FILE_VARIABLE: &str = "JOURNEYMAN_CONFIG";
/// Names a worker's control socket where no flag does.
pub const SOCKET_VARIABLE: &str = "JOURNEYMAN_SOCKET";
/// Names the folder for what is kept between commands.
pub const STATE_VARIABLE: &str = "JOURNEYMAN_STATE_DIR";
/// What a payload finds in its environment, which may run this program in turn, and what tests are told by.
const OTHER_VARIABLES: [&str; 7] = ["AMQP_URI", "EXIT_", "HANDLER", "PHASE", "PROTOCOL", "TEST_", "SIM_"];

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
    pub fn from_process() -> Self {
        Self(std::env::vars_os().collect())
    }

    /// An environment of these variables.
    #[must_use]
    pub fn from_pairs(variables: &[(&str, &str)]) -> Self {
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

    /// The settings in it, those that count less first. Variables that are ours and cannot be read become problems.
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
        settings
    }
}

/// What a controller of AMQP workers tells a worker, and the key that it sets.
const CONTROLLER_VARIABLES: [(&str, [&str; 2]); 8] = [
    ("WORKER_AMQP_URI", ["AMQP", "URI"]),
    // As `journeyman call` knows it, which reads no configuration.
    ("JOURNEYMAN_AMQP_URI", ["AMQP", "URI"]),
    ("WORKER_ID", ["AMQP", "WORKER_ID"]),
    ("WORKER_KEY", ["AMQP", "WORKER_KEY"]),
    ("WORKER_POOL", ["AMQP", "POOL"]),
    ("WORKER_REQUESTS_QUEUE", ["AMQP", "REQUESTS_QUEUE"]),
    ("WORKER_MAX_MSG_SIZE", ["AMQP", "MAX_MESSAGE_SIZE"]),
    ("WORKER_ACTIVITY_EXCHANGE", ["ACTIVITY", "EXCHANGE"]),
];

impl Environment {
    /// Without what a controller says to a worker, for whoever is none.
    #[must_use]
    pub fn without_controller_variables(&self) -> Self {
        let is_ones = |name: &OsString| {
            let of_controller = CONTROLLER_VARIABLES.iter().map(|(name, _)| *name).chain(ID_BY_HOSTNAME);
            name.to_str().is_some_and(|name| of_controller.into_iter().any(|other| other == name))
        };
        Self(
            self.0
                .iter()
                .filter(|(name, _)| !is_ones(name))
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
        )
    }
}

/// Where a controller gives several workers one id, their hosts' names tell them apart. One controller spells it wrongly.
const ID_BY_HOSTNAME: [&str; 2] = ["WORKER_ID_USE_HOSTNAME", "WORKEY_ID_USE_HOSTNAME"];

impl Environment {
    /// Whether a controller has started this process for a queue of requests.
    #[must_use]
    pub fn is_started_by_controller(&self) -> bool {
        self.get("WORKER_AMQP_URI").is_some() || self.has_worker_group()
    }

    /// Whether a controller has said which group this process works for.
    #[must_use]
    pub fn has_worker_group(&self) -> bool {
        ["WORKER_KEY", "WORKER_REQUESTS_QUEUE"].iter().any(|name| self.get(name).is_some())
    }

    /// What a controller says that nobody can read: without it the worker would go by another name than the controller knows.
    fn non_utf8_controller_variables(&self) -> Vec<Problem> {
        let there = |name: &&str| self.0.get(std::ffi::OsStr::new(name)).is_some_and(|value| value.to_str().is_none());
        CONTROLLER_VARIABLES.iter().map(|(name, _)| *name).filter(there).map(not_utf8).collect()
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
    /// The variables that look like ours and set nothing. They stop nobody: a cluster may define some for a purpose of
    /// its own, as Kubernetes does for every service.
    pub(super) fn unknown_variables(&self) -> Vec<Problem> {
        let rest = |name: &str| name.strip_prefix(NAME_PREFIX).filter(|rest| !rest.starts_with('_')).map(str::to_owned);
        let ours = self.0.keys().filter_map(|name| name.to_str()).filter_map(|name| Some((name, rest(name)?)));
        ours.filter(|(name, rest)| !is_known(name, rest))
            .map(|(name, rest)| Problem {
                code: ProblemCode::UnknownVariable,
                message: format!("the variable {name} sets nothing"),
                origin: ValueOrigin::Env(name.to_owned()),
                label: String::new(),
                help: Some(suggest_variable(name, &rest).map_or_else(
                    || format!("variables that set keys start with `{PREFIX}`, such as {PREFIX}WORKER__CAPACITY"),
                    |meant| format!("did you mean `{meant}`?"),
                )),
            })
            .collect()
    }
}

fn is_known(name: &str, rest: &str) -> bool {
    let of_kubernetes = rest.split('_').any(|word| word == "PORT") || rest.ends_with("SERVICE_HOST");
    [FILE_VARIABLE, SOCKET_VARIABLE, STATE_VARIABLE].contains(&name)
        || OTHER_VARIABLES
            .iter()
            .any(|other| rest.strip_prefix(other).is_some_and(|rest| other.ends_with('_') || rest.is_empty()))
        || of_kubernetes
}

/// The variable that was meant: the same words with other underscores, or else the nearest.
fn suggest_variable(name: &str, rest: &str) -> Option<String> {
    let words = rest.replace("__", "_");
    let keys: Vec<String> = reference::keys().into_iter().map(|key| variable(&key.key)).collect();
    let same = keys.iter().filter_map(|key| match_variable(key, &words));
    if let Some(same) = same.max_by_key(|(fixed, _)| *fixed).map(|(_, name)| name) {
        return Some(same);
    }
    let fixed = keys.iter().map(String::as_str).filter(|key| !key.contains(NAME_PLACEHOLDER));
    suggest(name, fixed.chain([FILE_VARIABLE, SOCKET_VARIABLE, STATE_VARIABLE])).map(str::to_owned)
}

/// The part of a variable that the user chooses.
const NAME_PLACEHOLDER: &str = "__NAME__";

/// The variable `key` for these words, and how many of its letters are not the user's own; `None` where it has others.
fn match_variable(key: &str, words: &str) -> Option<(usize, String)> {
    let single = |text: &str| text.trim_start_matches(PREFIX).replace("__", "_");
    let Some((head, tail)) = key.split_once(NAME_PLACEHOLDER) else {
        return (single(key) == words).then(|| (key.len(), key.to_owned()));
    };
    let chosen = words.strip_prefix(&single(head))?.strip_prefix('_')?.strip_suffix(tail)?.strip_suffix('_')?;
    (!chosen.is_empty()).then(|| (head.len() + tail.len(), format!("{head}__{chosen}__{tail}")))
}

/// The variable that sets a key, such as `JOURNEYMAN__WORKER__CAPACITY` for `worker.capacity`.
#[must_use]
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
    fn a_variable_with_other_underscores_is_told_the_right_ones() {
        for (name, meant) in [
            ("JOURNEYMAN_WORKER_CAPACITY", "JOURNEYMAN__WORKER__CAPACITY"),
            ("JOURNEYMAN_WORKER__POLL_INTERVAL", "JOURNEYMAN__WORKER__POLL_INTERVAL"),
            ("JOURNEYMAN_WORKER_POLL_INTERVALL", "JOURNEYMAN__WORKER__POLL_INTERVAL"),
            ("JOURNEYMAN_SOURCE_CI_ROOT_URL", "JOURNEYMAN__SOURCE__CI__ROOT_URL"),
            ("JOURNEYMAN_SOURCE_CI_LARGE_ACCESS_TOKEN_FILE", "JOURNEYMAN__SOURCE__CI_LARGE__ACCESS_TOKEN_FILE"),
            ("JOURNEYMAN_QUEUE_CLIENTS_ME_ACCESS_TOKEN", "JOURNEYMAN__QUEUE__CLIENTS__ME__ACCESS_TOKEN"),
            ("JOURNEYMAN_CONFIG_FILE", "JOURNEYMAN_CONFIG"),
        ] {
            assert_eq!(help(name), Some(format!("did you mean `{meant}`?")), "{name}");
        }
    }

    #[test]
    fn a_variable_that_is_known_or_is_for_something_else_is_left_alone() {
        for name in [
            "JOURNEYMAN_CONFIG",
            "JOURNEYMAN_STATE_DIR",
            "JOURNEYMAN__WORKER__CAPACITY",
            "JOURNEYMAN_TEST_AZURITE",
            "JOURNEYMAN_SIM_SEEDS",
            "JOURNEYMAN_EXIT_FAILED",
            "JOURNEYMAN_PHASE",
            "JOURNEYMAN_SERVICE_HOST",
            "JOURNEYMAN_PORT_7070_TCP_ADDR",
            "JOURNEYMANS_FRIEND",
        ] {
            assert_eq!(help(name), None, "{name}");
        }
    }
}
