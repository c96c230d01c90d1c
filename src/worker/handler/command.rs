//! The built-in handler `command`: runs the argument vectors in a task's payload, in the format of generic-worker.
//!
//! Commands run one after the other in the task directory; the first that does not exit with 0 ends the task. `maxRunTime`
//! limits all commands together. A missing program of the first command makes the payload malformed. A missing program of
//! a later command makes the task fail, because an earlier command may have created it.
//!
//! Of what this handler lacks, such as the feature `interactive`, a payload may say that it does not want it: `false`, `[]`.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use rustix::fs::Gid;
use rustix::io::Errno;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::time::{Instant, timeout};

use journeyman_platform::committed_schema;
use journeyman_platform::host::containment::disk_usage;
use journeyman_platform::host::host_errors;
use journeyman_platform::host::program_path::find_program;
use journeyman_platform::host::task_user::find_group;
use journeyman_platform::settings::Environment;

use super::environment::{self, Variables};
use super::mounts::payload::{Mount, PayloadMount};
use super::mounts::{in_mib, lacking_scopes};
use super::payload_parts::{
    CHAIN_OF_TRUST, LogNames, OnExitStatus, PROXY, PayloadArtifact, PayloadSettings, RequestedParts, StartedPayload,
    hide_secrets, is_declined, is_wanted, unsupported_features,
};
use super::process::{Launch, RunLimits, format_seconds};
use super::program_messages::{ProgramRun, run_command};
use super::{Context, ExecuteError, ExecuteFailure, PayloadHandler, PrepareError};

/// The feature that runs commands as the worker's user.
const AS_WORKER: &str = "runTaskAsCurrentUser";

/// Holds the request without its body, as JSON.
const REQUEST_VARIABLE: &str = "REQUEST";

#[derive(Debug)]
pub struct Command {
    env: Variables,
    settings: PayloadSettings,
}

/// The payload of the `command` handler.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CommandPayload {
    /// Programs with their arguments, run one after the other until one fails.
    #[cfg_attr(debug_assertions, schemars(length(min = 1), inner(length(min = 1))))]
    pub command: Vec<Vec<String>>,
    /// Variables for all commands.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Time limit for all commands together, in seconds.
    #[cfg_attr(debug_assertions, schemars(range(min = 1, max = 4_294_967_295_u64)))]
    pub max_run_time: Option<u32>,
    /// Files to upload as artifacts.
    #[serde(default)]
    pub artifacts: Vec<PayloadArtifact>,
    /// Exit statuses with a special meaning.
    #[serde(default)]
    pub on_exit_status: OnExitStatus,
    /// Features of generic-worker: without `backingLog` the log is not published, without `liveLog` only once the task has ended; any other must be false.
    #[serde(default)]
    pub features: Map<String, Value>,
    /// Files, directories and caches to place before the commands run.
    #[serde(default)]
    pub mounts: Vec<PayloadMount>,
    /// Further groups of the task's user.
    #[serde(default)]
    pub os_groups: Vec<String>,
    /// Capabilities of docker-worker: each must be false.
    #[serde(default)]
    pub capabilities: Map<String, Value>,
    /// The names of the log's artifacts.
    #[serde(default)]
    pub logs: LogNames,
    /// Where the proxy listens: `localhost`, on this host.
    pub taskcluster_proxy_interface: Option<String>,
    /// Not used.
    pub superseder_url: Option<String>,
}

#[derive(Debug)]
pub struct PreparedCommands {
    commands: Vec<Vec<String>>,
    env: Variables,
    user: PayloadUser,
    monitors_resources: bool,
    begun: StartedPayload,
}

impl Command {
    /// Commands see the variables of the worker that `env_allow` names.
    pub fn new(env_allow: &[String], worker: &Environment, settings: PayloadSettings) -> Self {
        Self { env: environment::select(env_allow, worker.pairs()), settings }
    }
}

impl PayloadHandler for Command {
    type Payload = CommandPayload;
    type Prepared = PreparedCommands;

    fn describe(&self) -> String {
        "command".to_owned()
    }

    fn payload_schema(&self) -> Value {
        committed_schema::parse(include_str!("command.schema.json"))
    }

    async fn prepare(&self, payload: CommandPayload, context: &Context) -> Result<PreparedCommands, PrepareError> {
        let mut violations = unsupported(&payload);
        for (name, value) in &payload.env {
            if let Some(why) = environment::variable_error(name, value) {
                violations.push(format!("payload/env/{name}: {why}"));
            }
        }
        for (number, argv) in payload.command.iter().enumerate() {
            if argv.iter().any(|argument| argument.contains('\0')) {
                violations.push(format!("payload/command/{number}: an argument contains a NUL byte"));
            }
        }
        let user = PayloadUser::of(&payload, context, &mut violations).await?;
        let mounts = parse_mounts(payload.mounts, &mut violations);
        let mounter = self.settings.mounter.clone();
        violations.extend(mounter.missing_rights(&mounts, context).await?);
        let mut env = environment::for_payload(&self.env, payload.env, context);
        if context.results().is_some() {
            let request = &context.task().definition.json()["extra"]["request"];
            env.insert(REQUEST_VARIABLE.to_owned(), request.to_string());
        }
        hide_secrets(&env, &self.settings.redact_env, context);
        let is_worker = matches!(user, PayloadUser::Worker) || context.user().is_none();
        let exposure = "the task would run as the worker's own user, which can read the key; see `host.task_users`";
        let features = &payload.features;
        let asked = RequestedParts {
            features,
            max_run_seconds: payload.max_run_time,
            artifacts: payload.artifacts,
            logs: payload.logs,
            on_exit_status: payload.on_exit_status,
            key_exposure: is_worker.then_some(exposure),
        };
        let begun = self.settings.begin(asked, violations, context).await?;
        env.extend(begun.proxy_url().map(|url| (environment::PROXY_VARIABLE.to_owned(), url.to_owned())));
        // A task whose mounts take too long is a task that runs too long; no command is started.
        let mounter = mounter.with_prefix(if is_worker && context.user().is_some() { "worker/" } else { "" });
        if let Ok(placed) = timeout(begun.run_time, mounter.place(&mounts, context)).await {
            placed?;
            if let Some(program) = payload.command.first().and_then(|argv| argv.first())
                && let Err(error) = find_program(program, &env, context.workdir())
            {
                return Err(PrepareError::malformed(vec![format!("payload/command/0: {error}")]));
            }
        }
        context.decline_logs(!is_declined(features, "liveLog"), !is_declined(features, "backingLog"));
        let monitors_resources = is_wanted(features, "resourceMonitor");
        Ok(PreparedCommands { commands: payload.command, env, user, monitors_resources, begun })
    }

    async fn execute(&self, prepared: PreparedCommands, context: &Context) -> Result<(), ExecuteError> {
        context.log().write_note(&format!("task {}", context.task().run));
        let outcome = self.run(&prepared, context).await;
        if prepared.monitors_resources {
            context.log().write_note(&describe_usage(context).await);
        }
        prepared.begun.end(&outcome, context);
        outcome
    }
}

impl Command {
    async fn run(&self, prepared: &PreparedCommands, context: &Context) -> Result<(), ExecuteError> {
        let begun = &prepared.begun;
        for (number, argv) in prepared.commands.iter().enumerate() {
            let name = format!("command {number}");
            let remaining = begun.remaining(&name, context)?;
            let run = self.run_one(number, argv, prepared, remaining, context).await?;
            run.end.outcome(&name, &begun.time_limit(), |code, message| {
                begun.on_exit_status.result(code, message, context)
            })?;
            run.report.check_reply(&name)?;
        }
        Ok(())
    }

    async fn run_one(
        &self,
        number: usize,
        argv: &[String],
        prepared: &PreparedCommands,
        run_time: Duration,
        context: &Context,
    ) -> Result<ProgramRun, ExecuteError> {
        let log = context.log();
        let quoted = shlex::try_join(argv.iter().map(String::as_str)).unwrap_or_default();
        log.write_note(&format!("executing command {number}: {quoted}"));
        let started = Instant::now();
        let mut launch = Launch::new(argv, &prepared.env, context);
        launch.user = match &prepared.user {
            PayloadUser::Worker => None,
            PayloadUser::Task { groups } => launch.user.map(|(user, _)| (user, groups.as_slice())),
        };
        let limits = RunLimits { run_time: Some(run_time), termination_grace: self.settings.termination_grace };
        let run = run_command(launch, limits, context).await.map_err(|error| {
            let path = argv.first().and_then(|program| find_program(program, &prepared.env, context.workdir()).ok());
            let path = path.and_then(|path| path.canonicalize().ok());
            let folder = context.workdir().canonicalize().ok();
            let is_own = path.zip(folder).is_some_and(|(path, folder)| path.starts_with(folder));
            start_error(number, &error, if is_own { Program::OfTask } else { Program::OfHost })
        })?;
        let elapsed = format_seconds(started.elapsed());
        log.write_note(&format!("command {number}: {}, after {elapsed}", run.end.status));
        Ok(run)
    }
}

/// Whom commands run as.
#[derive(Debug)]
enum PayloadUser {
    /// The worker's own user, as the payload asks for.
    Worker,
    /// The task's user if there is one, in these further groups.
    Task { groups: Vec<Gid> },
}

impl PayloadUser {
    async fn of(
        payload: &CommandPayload,
        context: &Context,
        violations: &mut Vec<String>,
    ) -> Result<Self, PrepareError> {
        let definition = context.task().definition.json();
        let text = |key: &str| definition.get(key).and_then(Value::as_str).unwrap_or_default();
        let parts = || format!("{}/{}", text("provisionerId"), text("workerType"));
        let queue = Some(text("taskQueueId")).filter(|id| !id.is_empty()).map_or_else(parts, str::to_owned);
        let mut wanted = Vec::new();
        if is_wanted(&payload.features, AS_WORKER) {
            let place = format!("payload/features/{AS_WORKER}");
            wanted.push((place, format!("generic-worker:run-task-as-current-user:{queue}")));
        }
        let mut groups = Vec::new();
        for (number, name) in payload.os_groups.iter().enumerate() {
            let place = format!("payload/osGroups/{number}");
            let wanted_group = name.clone();
            let found = tokio::task::spawn_blocking(move || find_group(&wanted_group));
            match found.await.map_err(io::Error::other).flatten() {
                _ if context.user().is_none() => {
                    violations.push(format!("{place}: tasks have no users of their own here; see `host.task_users`"));
                }
                Ok(Some(group)) => groups.push(group),
                Ok(None) => violations.push(format!("{place}: this host has no such group")),
                Err(error) => return Err(PrepareError::from_io(&place, &error)),
            }
            wanted.push((place, format!("generic-worker:os-group:{queue}/{name}")));
        }
        let is_worker = is_wanted(&payload.features, AS_WORKER);
        if context.deployment().is_some() {
            violations.extend(lacking_scopes(wanted, context).await?);
        } else {
            let why = "tasks of this queue have no scopes that could allow it";
            violations.extend(wanted.into_iter().map(|(place, _)| format!("{place}: {why}")));
        }
        Ok(if is_worker { Self::Worker } else { Self::Task { groups } })
    }
}

/// Who made the file of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Program {
    /// It is in the task's directory.
    OfTask,
    OfHost,
}

/// A program that cannot be executed is the task's fault; a host out of resources, or a process scope that cannot be set up,
/// is not.
fn start_error(number: usize, error: &io::Error, program: Program) -> ExecuteError {
    let message = format!("cannot start command {number}: {error}");
    // What the kernel answers for a truncated file, and for one that claims more memory than there is.
    let is_broken = program == Program::OfTask
        && [Errno::IO, Errno::NOMEM].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()));
    let is_of_program = error.raw_os_error().is_some()
        || matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied);
    if is_broken || is_of_program && !host_errors::is_host_error(error) {
        ExecuteError::failed(message)
    } else {
        ExecuteError::new(ExecuteFailure::HostFault, message)
    }
}

async fn describe_usage(context: &Context) -> String {
    let (scope, dir) = (context.scope().clone(), context.workdir().to_owned());
    let measured = tokio::task::spawn_blocking(move || (scope.usage(), disk_usage(dir))).await;
    let (usage, disk) = measured.unwrap_or_default();
    let memory = usage.memory_peak.map_or_else(|| "not counted on this host".to_owned(), in_mib);
    let cpu = usage.cpu.map_or_else(|| "not counted on this host".to_owned(), format_seconds);
    format!("resources: peak memory {memory}, CPU time {cpu}, files of the task {}", in_mib(disk))
}

/// What a payload asks for and this handler lacks.
fn unsupported(payload: &CommandPayload) -> Vec<String> {
    let here = ["liveLog", "backingLog", PROXY, "resourceMonitor", CHAIN_OF_TRUST, AS_WORKER];
    let mut lacking = unsupported_features(&payload.features, &here);
    let mut capabilities = Vec::new();
    for (name, value) in &payload.capabilities {
        find_wanted(format!("payload/capabilities/{name}"), value, &mut capabilities);
    }
    lacking.extend(capabilities.into_iter().map(|what| format!("{what}: not supported by this worker")));
    let is_elsewhere = match payload.taskcluster_proxy_interface.as_deref() {
        None | Some("localhost") => false,
        Some("docker-bridge") => is_wanted(&payload.features, PROXY),
        Some(_) => true,
    };
    if is_elsewhere {
        lacking.push("payload/taskclusterProxyInterface: this worker supports localhost only".to_owned());
    }
    lacking
}

/// Finds what is neither false nor empty.
fn find_wanted(path: String, value: &Value, wanted: &mut Vec<String>) {
    match value {
        Value::Null | Value::Bool(false) => {}
        Value::Array(list) if list.is_empty() => {}
        Value::Object(keys) => {
            keys.iter().for_each(|(name, value)| find_wanted(format!("{path}/{name}"), value, wanted));
        }
        Value::Bool(true) | Value::Number(_) | Value::String(_) | Value::Array(_) => wanted.push(path),
    }
}

fn parse_mounts(mounts: Vec<PayloadMount>, violations: &mut Vec<String>) -> Vec<Mount> {
    let mut parsed = Vec::new();
    for (number, mount) in mounts.into_iter().enumerate() {
        match Mount::parse(mount) {
            Ok(mount) => parsed.push(mount),
            Err(why) => violations.push(format!("payload/mounts/{number}{why}")),
        }
    }
    parsed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b1_a_file_that_the_task_broke_is_the_tasks_fault_and_an_exhausted_host_is_not() {
        let error = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        let missing = || io::Error::new(io::ErrorKind::NotFound, "x: no such file");
        let (host, task) = (ExecuteFailure::HostFault, ExecuteFailure::Failed);
        for (error, of_host, of_task) in [
            (error(Errno::MFILE), &host, &host),
            (error(Errno::NFILE), &host, &host),
            (io::Error::other("no control group"), &host, &host),
            (error(Errno::NOEXEC), &task, &task),
            (missing(), &task, &task),
            (error(Errno::IO), &host, &task),
            (error(Errno::NOMEM), &host, &task),
        ] {
            assert_eq!(&start_error(0, &error, Program::OfHost).reason, of_host, "{error}");
            assert_eq!(&start_error(0, &error, Program::OfTask).reason, of_task, "{error}");
        }
    }
}
