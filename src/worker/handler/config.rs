//! The sections of handlers and hooks.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::DynHandler;
use super::containers::config::ContainersConfig;
use super::http::config::HttpHandler;
use super::kubernetes::config::KubernetesHandler;
use super::mounts::config::{ConfiguredMount, configured_mounts};
use super::mounts::payload::Mount;
use journeyman_domain::limits::RUN_TIME_MIN_MS;
use journeyman_platform::settings::values::{File, SecretFile, Span, built_in};

/// A time that a task may run.
pub type RunTime = Span<RUN_TIME_MIN_MS>;

/// A handler that runs payloads.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[cfg_attr(debug_assertions, schemars(extend("x-default-kind" = "program")))]
pub enum Handler {
    /// Runs the command lines of the task.
    Command(CommandHandler),
    /// Runs a program that reads the payload.
    Program(ProgramHandler),
    /// Forwards the task to an HTTP service.
    Http(HttpHandler),
    /// Runs the task as a pod.
    Kubernetes(KubernetesHandler),
    /// Runs tasks by a handler that the program brings.
    #[serde(untagged)]
    #[cfg_attr(debug_assertions, schemars(skip, !untagged))]
    Custom(CustomHandler),
}

impl Default for Handler {
    fn default() -> Self {
        Self::Command(CommandHandler::default())
    }
}

impl Handler {
    /// What it places in the directories of its tasks.
    ///
    /// # Errors
    ///
    /// The key and what is wrong with it.
    pub fn mounts(&self) -> Result<Vec<Mount>, String> {
        match self {
            Self::Command(CommandHandler { mounts, caches, .. })
            | Self::Program(ProgramHandler { mounts, caches, .. }) => configured_mounts(mounts, caches),
            Self::Http(_) | Self::Kubernetes(_) | Self::Custom(_) => Ok(Vec::new()),
        }
    }

    /// The maximum run time of its tasks.
    pub fn max_run_time(&self) -> RunTime {
        match self {
            Self::Command(handler) => handler.max_run_time,
            Self::Program(handler) => handler.max_run_time,
            Self::Http(handler) => handler.max_run_time,
            Self::Kubernetes(handler) => handler.max_run_time,
            Self::Custom(_) => max_run_time(),
        }
    }
}

/// A handler of a kind that the program brings.
#[derive(Clone, Serialize)]
pub struct CustomHandler {
    /// The name of the kind.
    pub kind: String,
    /// Its settings as they were read; those with names of secrets are masked.
    #[serde(flatten)]
    pub settings: toml::Table,
    /// The handler that was made of them.
    #[serde(skip)]
    pub handler: Arc<dyn DynHandler>,
}

impl std::fmt::Debug for CustomHandler {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("CustomHandler").field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// A handler that runs the command lines of the task.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct CommandHandler {
    /// Variables of the worker's environment that a payload sees.
    pub env_allow: Vec<String>,
    /// Maximum run time of a task, whatever it asks for, and the run time of one that asks for none.
    pub max_run_time: RunTime,
    /// File with the ed25519 key that signs the artifacts of tasks with `features.chainOfTrust`: a seed of 32 bytes in base64, as generic-worker and scriptworker write it. Commands of such tasks need `host.task_users`.
    pub chain_of_trust_key: Option<SecretFile>,
    /// Content that each task finds in its directory, by path.
    pub mounts: BTreeMap<String, ConfiguredMount>,
    /// Directories that are kept from task to task: the path in the task's directory, by the name of the cache.
    pub caches: BTreeMap<String, String>,
    /// Runs payloads that name an image as containers.
    pub containers: Option<ContainersConfig>,
}

impl Default for CommandHandler {
    fn default() -> Self {
        Self {
            env_allow: env_allow(),
            max_run_time: max_run_time(),
            chain_of_trust_key: None,
            mounts: BTreeMap::new(),
            caches: BTreeMap::new(),
            containers: None,
        }
    }
}

/// A handler that runs a program.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ProgramHandler {
    /// The program and its arguments. With `http`, the worker starts it as a sidecar that serves `url`, checks its health and restarts it.
    #[serde(deserialize_with = "program")]
    pub exec: Vec<String>,
    /// A program that validates a payload before it runs.
    #[serde(default)]
    pub check: Vec<String>,
    /// File with the JSON Schema of the payloads.
    pub schema: Option<File>,
    /// Variables of the worker's environment that a payload sees.
    #[serde(default = "env_allow")]
    pub env_allow: Vec<String>,
    /// Maximum run time of a task, whatever it asks for.
    #[serde(default = "max_run_time")]
    pub max_run_time: RunTime,
    /// Content that each task finds in its directory, by path.
    #[serde(default)]
    pub mounts: BTreeMap<String, ConfiguredMount>,
    /// Directories that are kept from task to task: the path in the task's directory, by the name of the cache.
    #[serde(default)]
    pub caches: BTreeMap<String, String>,
    /// The program finds a proxy in `TASKCLUSTER_PROXY_URL` that signs its calls to the services of the task's Taskcluster, and that answers `GET /credentials` with the credentials of the run.
    #[serde(default)]
    pub task_credentials: bool,
    /// The program launches work elsewhere: it is called to start it, to look at it later, and to end it.
    pub staged: Option<StagedProgram>,
    /// That of the worker.
    #[serde(skip, default = "termination_grace")]
    pub termination_grace: Span,
}

impl ProgramHandler {
    /// A handler of this program with the built-in values.
    pub fn new(exec: Vec<String>) -> Self {
        Self {
            exec,
            check: Vec::new(),
            schema: None,
            env_allow: env_allow(),
            max_run_time: max_run_time(),
            mounts: BTreeMap::new(),
            caches: BTreeMap::new(),
            task_credentials: false,
            staged: None,
            termination_grace: termination_grace(),
        }
    }
}

/// Work that a program launches elsewhere.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct StagedProgram {
    /// Interval of its `verify` calls, unless the program says otherwise, at least 1 s.
    #[serde(default = "staged_check_interval")]
    pub check_interval: Span<1000>,
    /// How long phases may last, by their names [built-in: for ever].
    #[serde(default)]
    pub phases: BTreeMap<String, Span>,
    /// How often the work is launched again after it was lost.
    #[serde(default = "staged_retries")]
    pub retries: u32,
}

fn staged_check_interval() -> Span<1000> {
    built_in("30s")
}

pub(super) const fn staged_retries() -> u32 {
    3
}

/// Reads a program with its arguments, which needs the program at least.
fn program<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let arguments = Vec::<String>::deserialize(from)?;
    if arguments.is_empty() { Err(D::Error::custom("a program and its arguments")) } else { Ok(arguments) }
}

/// Programs that run before and after each task.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Hooks {
    /// Program and arguments to run before a payload [built-in: none]. If it fails, the payload does not run, and the task is released as for a fault of this host.
    pub pre_task: Vec<String>,
    /// Program and arguments to run after a payload, or after `pre_task` failed, whatever the outcome [built-in: none].
    pub post_task: Vec<String>,
    /// Program and arguments to run before `post_task` if a task did not succeed, and for a payload that is rejected [built-in: none].
    pub error: Vec<String>,
    /// Maximum run time of a hook.
    pub timeout: RunTime,
}

impl Default for Hooks {
    fn default() -> Self {
        Self { pre_task: Vec::new(), post_task: Vec::new(), error: Vec::new(), timeout: built_in("1m") }
    }
}

pub fn env_allow() -> Vec<String> {
    ["PATH", "LANG", "TZ", "USER"].map(str::to_owned).to_vec()
}

pub(crate) fn max_run_time() -> RunTime {
    built_in("24h")
}

pub fn termination_grace() -> Span {
    built_in("10s")
}
