//! The built-in handler `command`: runs the argument vectors in a task's payload, in the format of generic-worker.
//!
//! Commands run one after the other in the task directory; the first that does not exit with 0 ends the task. `maxRunTime`
//! limits all commands together. A missing program of the first command makes the payload malformed. A missing program of
//! a later command makes the task fail, because an earlier command may have created it.
//!
//! Of what this handler lacks, such as the feature `interactive`, a payload may say that it does not want it: `false`, `[]`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::Gid;
use rustix::io::Errno;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::time::{Instant, timeout};

use crate::handler::config::CommandHandler;
use crate::task::ContentEncoding;
use journeyman_platform::host::containment::disk_usage;
use journeyman_platform::host::host_errors;
use journeyman_platform::host::program_path::find_program;
use journeyman_platform::host::task_user::find_group;
use journeyman_platform::settings::Environment;
use journeyman_platform::{committed_schema, redact};

use super::artifact::{
    ArtifactDeclaration, ArtifactKind, Artifacts, Optionality, expiry_error, time_of, validate_name,
};
use super::chain_of_trust::{self, SigningKey};
use super::context::PublishedLogs;
use super::environment::{self, Variables};
use super::log::{self, AddSecretError};
use super::mounts::payload::{Mount, PayloadMount};
use super::mounts::{Mounter, in_mib, lacking_scopes};
use super::process::{Launch, RunLimits, format_seconds};
use super::program_messages::{ProgramRun, run_command};
use super::task_proxy::{Credentials, TaskProxy};
use super::{Context, ExecuteError, ExecuteFailure, PayloadHandler, PrepareError};

/// The feature that signs artifacts.
pub(super) const CHAIN_OF_TRUST: &str = "chainOfTrust";
/// The feature that runs commands as the worker's user.
const AS_WORKER: &str = "runTaskAsCurrentUser";

/// Holds the request without its body, as JSON.
const REQUEST_VARIABLE: &str = "REQUEST";

#[derive(Debug)]
pub struct Command {
    config: CommandHandler,
    env: Variables,
    redact_env: Vec<String>,
    mounter: Mounter,
    signing_key: Option<SigningKey>,
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

/// The names of the log's artifacts.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct LogNames {
    /// The artifact that leads to the log; by default `public/logs/live.log`.
    pub live: Option<String>,
    /// The artifact that holds it; by default `public/logs/live_backing.log`.
    pub backing: Option<String>,
}

/// A file or directory to upload.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PayloadArtifact {
    /// The kind of artifact.
    #[serde(rename = "type")]
    pub kind: PayloadArtifactType,
    /// Path below the task directory.
    #[cfg_attr(debug_assertions, schemars(length(min = 1)))]
    pub path: String,
    /// Name of the artifact; by default the path.
    pub name: Option<String>,
    /// When the artifact expires (RFC 3339): not before the task's deadline, and not later than the task; by default with the task.
    pub expires: Option<String>,
    /// Media type of a file, or of all files of a directory; by default guessed from the extension.
    pub content_type: Option<String>,
    /// How the file is compressed where it is stored, if the queue stores compressed content; by default with gzip, unless its extension is that of compressed content.
    pub content_encoding: Option<PayloadEncoding>,
    /// Whether the task may succeed if the artifact is missing or the queue rejects it.
    #[serde(default)]
    pub optional: bool,
}

/// The kind of artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PayloadArtifactType {
    /// One regular file.
    File,
    /// All regular files in a directory and its subdirectories.
    Directory,
}

/// How a file is compressed where it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PayloadEncoding {
    /// Not at all.
    Identity,
    /// The content is compressed with gzip.
    Gzip,
}

/// Exit statuses with a special meaning.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OnExitStatus {
    /// Exit statuses that retry the task.
    #[serde(default)]
    #[cfg_attr(debug_assertions, schemars(inner(range(min = 1))))]
    pub retry: BTreeSet<i64>,
    /// Exit statuses after which the task's caches are not kept.
    #[serde(default)]
    pub purge_caches: BTreeSet<i64>,
}

#[derive(Debug)]
pub struct PreparedCommands {
    commands: Vec<Vec<String>>,
    on_exit_status: OnExitStatus,
    env: Variables,
    run_time: Duration,
    /// Mounts count against the run time.
    started: Instant,
    artifacts: Vec<ArtifactDeclaration>,
    user: PayloadUser,
    monitors_resources: bool,
    /// Ends with the commands.
    _proxy: Option<TaskProxy>,
}

impl Command {
    /// `redact_env` names variables whose values are redacted; see [`redact::is_secret_name`].
    pub fn new(config: CommandHandler, redact_env: Vec<String>, worker: &Environment, mounter: Mounter) -> Self {
        let env = environment::select(&config.env_allow, worker.pairs());
        Self { config, env, redact_env, mounter, signing_key: None }
    }

    /// Signs the artifacts of tasks that ask for a chain of trust.
    #[must_use]
    pub fn signed_by(self, key: Option<SigningKey>) -> Self {
        Self { signing_key: key, ..self }
    }
}

/// Who can read the key can sign anything.
fn readable_key_reason(user: &PayloadUser, context: &Context) -> Option<&'static str> {
    let is_worker = matches!(user, PayloadUser::Worker) || context.user().is_none();
    is_worker.then_some("the task would run as the worker's own user, which can read the key; see `host.task_users`")
}

/// Has the artifacts of a task signed, or says why they cannot be.
pub(super) fn sign_artifacts(
    key: Option<&SigningKey>,
    artifacts: &[ArtifactDeclaration],
    context: &Context,
) -> Option<String> {
    let names = chain_of_trust::NAMES;
    let why = match key {
        None => "this worker has no key for it; see `chain_of_trust_key` of the handler".to_owned(),
        Some(_) if context.deployment().is_none() => "the task's queue belongs to no deployment".to_owned(),
        Some(_) if artifacts.iter().any(|artifact| names.contains(&artifact.name.as_str())) => {
            format!("it makes artifacts of the names {}", names.join(", "))
        }
        Some(key) => {
            context.set_signing_key(key.clone());
            return None;
        }
    };
    Some(format!("payload/features/{CHAIN_OF_TRUST}: {why}"))
}

pub(super) fn resolve_run_time(max: Duration, seconds: Option<u32>, violations: &mut Vec<String>) -> Duration {
    let run_time = seconds.map_or(max, |seconds| Duration::from_secs(seconds.into()));
    if run_time > max {
        violations.push(format!(
            "payload/maxRunTime: {} s is more than the {} s this worker allows",
            run_time.as_secs(),
            max.as_secs()
        ));
    }
    run_time
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
        let run_time = resolve_run_time(self.config.max_run_time.0, payload.max_run_time, &mut violations);
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
        let artifacts = validate_artifacts(payload.artifacts, context, &mut violations);
        let mounts = parse_mounts(payload.mounts, &mut violations);
        violations.extend(self.mounter.missing_rights(&mounts, context).await?);
        let is_signed = is_wanted(&payload.features, CHAIN_OF_TRUST);
        if let Some(why) = readable_key_reason(&user, context).filter(|_| is_signed && self.signing_key.is_some()) {
            violations.push(format!("payload/features/{CHAIN_OF_TRUST}: {why}"));
        }
        let features = &payload.features;
        let (has_live, has_backing) = (!is_declined(features, "liveLog"), !is_declined(features, "backingLog"));
        violations.extend(payload.logs.publish(has_live, has_backing, &artifacts, context));
        let mut env = environment::for_payload(&self.env, payload.env, context);
        if context.results().is_some() {
            let request = &context.task().definition.json()["extra"]["request"];
            env.insert(REQUEST_VARIABLE.to_owned(), request.to_string());
        }
        hide_secrets(&env, &self.redact_env, context);
        if is_signed && violations.is_empty() {
            violations.extend(sign_artifacts(self.signing_key.as_ref(), &artifacts, context));
        }
        if !violations.is_empty() {
            return Err(PrepareError::malformed(violations));
        }
        let monitors_resources = is_wanted(&payload.features, "resourceMonitor");
        let mut proxy = None;
        if is_wanted(&payload.features, "taskclusterProxy") {
            let started = TaskProxy::start(self.mounter.client(), Credentials::Hidden, context).await?;
            env.insert(environment::PROXY_VARIABLE.to_owned(), started.url().to_owned());
            proxy = Some(started);
        }
        let started = Instant::now();
        // A task whose mounts take too long is a task that runs too long; no command is started.
        let is_worker = matches!(user, PayloadUser::Worker) && context.user().is_some();
        let mounter = self.mounter.clone().with_prefix(if is_worker { "worker/" } else { "" });
        if let Ok(placed) = timeout(run_time, mounter.place(&mounts, context)).await {
            placed?;
            if let Some(program) = payload.command.first().and_then(|argv| argv.first())
                && let Err(error) = find_program(program, &env, context.workdir())
            {
                return Err(PrepareError::malformed(vec![format!("payload/command/0: {error}")]));
            }
        }
        let CommandPayload { command: commands, on_exit_status, .. } = payload;
        Ok(PreparedCommands {
            commands,
            on_exit_status,
            env,
            run_time,
            started,
            artifacts,
            user,
            monitors_resources,
            _proxy: proxy,
        })
    }

    async fn execute(&self, prepared: PreparedCommands, context: &Context) -> Result<(), ExecuteError> {
        let log = context.log();
        log.write_note(&format!("task {}", context.task().run));
        let outcome = self.run(&prepared, context).await;
        // A failed task uploads its artifacts too.
        for artifact in prepared.artifacts {
            if let Err(error) = context.artifacts().declare(artifact) {
                log.write_note(&error.to_string());
            }
        }
        if prepared.monitors_resources {
            log.write_note(&describe_usage(context).await);
        }
        let result = if outcome.is_ok() { "completed" } else { "not completed" };
        log.write_note(&format!("result: {result} after {}", format_seconds(prepared.started.elapsed())));
        outcome
    }
}

impl Command {
    async fn run(&self, prepared: &PreparedCommands, context: &Context) -> Result<(), ExecuteError> {
        for (number, argv) in prepared.commands.iter().enumerate() {
            let remaining = prepared.run_time.saturating_sub(prepared.started.elapsed());
            if let Some(cancellation) = context.cancellation() {
                return Err(ExecuteError::failed(format!("command {number}: {}", cancellation.cause.message())));
            }
            if remaining.is_zero() {
                let time_limit = time_limit(prepared);
                return Err(ExecuteError::failed(format!("command {number}: stopped after {time_limit}")));
            }
            let run = self.run_one(number, argv, prepared, remaining, context).await?;
            run.end.outcome(&format!("command {number}"), &time_limit(prepared), |code, message| {
                prepared.on_exit_status.result(code, message, context)
            })?;
            run.report.check_reply(&format!("command {number}"))?;
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
        let limits = RunLimits { run_time: Some(run_time), termination_grace: self.config.termination_grace.0 };
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

fn time_limit(prepared: &PreparedCommands) -> String {
    format!("maxRunTime, {} s", prepared.run_time.as_secs())
}

impl OnExitStatus {
    /// What the last exit status means. After one that purges them, the task's caches are not kept.
    pub(super) fn result(&self, code: i32, message: String, context: &Context) -> Result<(), ExecuteError> {
        if self.purge_caches.contains(&code.into()) {
            context.abandon_caches();
            let text = format!("caches are not kept: exit status {code} is in onExitStatus.purgeCaches");
            context.log().write_note(&text);
        }
        if self.retry.contains(&code.into()) && code != 0 {
            let text = format!("{message}, listed in onExitStatus.retry");
            return Err(ExecuteError::new(ExecuteFailure::Intermittent, text));
        }
        if code == 0 { Ok(()) } else { Err(ExecuteError::failed(message)) }
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

/// Whether a payload has set a feature to false that is wanted otherwise.
pub(super) fn is_declined(features: &Map<String, Value>, name: &str) -> bool {
    features.get(name) == Some(&Value::Bool(false))
}

async fn describe_usage(context: &Context) -> String {
    let (scope, dir) = (context.scope().clone(), context.workdir().to_owned());
    let measured = tokio::task::spawn_blocking(move || (scope.usage(), disk_usage(dir))).await;
    let (usage, disk) = measured.unwrap_or_default();
    let memory = usage.memory_peak.map_or_else(|| "not counted on this host".to_owned(), in_mib);
    let cpu = usage.cpu.map_or_else(|| "not counted on this host".to_owned(), format_seconds);
    format!("resources: peak memory {memory}, CPU time {cpu}, files of the task {}", in_mib(disk))
}

/// Redacts the values of variables with names of secrets.
pub(super) fn hide_secrets(env: &Variables, redact_env: &[String], context: &Context) {
    for (_, value) in env.iter().filter(|(name, _)| redact::is_secret_name(name, redact_env)) {
        // A value too short to be redacted is too short to be a secret.
        if let Err(error @ AddSecretError::LimitReached) = context.log().add_secret(value) {
            context.log().write_note(&format!("variable named like a secret: {error}"));
        }
    }
}

pub(super) fn is_wanted(features: &Map<String, Value>, name: &str) -> bool {
    features.get(name) == Some(&Value::Bool(true))
}

/// What a payload asks for and this handler lacks.
fn unsupported(payload: &CommandPayload) -> Vec<String> {
    let here = ["liveLog", "backingLog", "taskclusterProxy", "resourceMonitor", CHAIN_OF_TRUST, AS_WORKER];
    let mut lacking = unsupported_features(&payload.features, &here);
    let mut capabilities = Vec::new();
    for (name, value) in &payload.capabilities {
        find_wanted(format!("payload/capabilities/{name}"), value, &mut capabilities);
    }
    lacking.extend(capabilities.into_iter().map(|what| format!("{what}: not supported by this worker")));
    let is_elsewhere = match payload.taskcluster_proxy_interface.as_deref() {
        None | Some("localhost") => false,
        Some("docker-bridge") => is_wanted(&payload.features, "taskclusterProxy"),
        Some(_) => true,
    };
    if is_elsewhere {
        lacking.push("payload/taskclusterProxyInterface: this worker supports localhost only".to_owned());
    }
    lacking
}

/// What a payload asks for of features other than those that are here.
pub(super) fn unsupported_features(features: &Map<String, Value>, here: &[&str]) -> Vec<String> {
    let unsupported = |(name, value): (&String, &Value)| match value.as_bool() {
        Some(true) if !here.contains(&name.as_str()) => {
            Some(format!("payload/features/{name}: not supported by this worker{}", reason(name)))
        }
        Some(_) => None,
        None => Some(format!("payload/features/{name}: use true or false")),
    };
    features.iter().filter_map(unsupported).collect()
}

/// Why a feature is not to be had here.
fn reason(feature: &str) -> &'static str {
    match feature {
        "interactive" => ", which opens no shells to tasks",
        "loopbackVideo" | "loopbackAudio" => ", which lends no devices to tasks",
        "runAsAdministrator" | "hideCmdWindow" => ", because it is a feature of Windows",
        _ => "",
    }
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

impl LogNames {
    /// Has the logs published under these names, unless they are not to be had.
    pub(super) fn publish(
        self,
        has_live: bool,
        has_backing: bool,
        artifacts: &[ArtifactDeclaration],
        context: &Context,
    ) -> Vec<String> {
        let mut violations = Vec::new();
        let (live, backing) = (self.live.as_deref(), self.backing.as_deref());
        for (key, name) in [("live", live), ("backing", backing)] {
            let Some(name) = name else { continue };
            let is_default = name == log::LIVE_NAME || name == log::BACKING_NAME;
            if let Some(error) = validate_name(name).err().filter(|_| !is_default) {
                violations.push(format!("payload/logs/{key}: {error}"));
            } else if artifacts.iter().any(|artifact| artifact.name == name) {
                violations.push(format!("payload/logs/{key}: an artifact has this name too"));
            }
        }
        if live.unwrap_or(log::LIVE_NAME) == backing.unwrap_or(log::BACKING_NAME) {
            violations.push("payload/logs: both artifacts have one name".to_owned());
        }
        if violations.is_empty() {
            let PublishedLogs { live, backing, .. } = PublishedLogs::default();
            context.set_published_logs(PublishedLogs {
                live: self.live.or(live).filter(|_| has_live),
                backing: self.backing.or(backing).filter(|_| has_backing),
                encoding: ContentEncoding::Gzip,
            });
        }
        violations
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

pub(super) fn validate_artifacts(
    artifacts: Vec<PayloadArtifact>,
    context: &Context,
    violations: &mut Vec<String>,
) -> Vec<ArtifactDeclaration> {
    // The artifacts are declared after the commands have run; this finds duplicate names and too many artifacts before.
    let (trial, definition) = (Artifacts::new(), context.task().definition.json());
    // Generic-worker stores nothing after the deadline either.
    let stored_by = time_of(definition, "deadline").unwrap_or_else(jiff::Timestamp::now);
    let mut declarations = Vec::new();
    for (number, artifact) in artifacts.into_iter().enumerate() {
        let mut declaration = to_declaration(artifact);
        if let Err(error) = trial.declare(declaration.clone()) {
            violations.push(format!("payload/artifacts/{number}: {error}"));
        } else if let Some(why) = declaration.expires.as_ref().and_then(|at| expiry_error(at, definition, stored_by)) {
            violations.push(format!("payload/artifacts/{number}/expires: {why}"));
        }
        // The queue allows no later time than the task's.
        let task = time_of(definition, "expires");
        declaration.expires =
            declaration.expires.filter(|at| task.is_none_or(|task| at.parse().is_ok_and(|at| task >= at)));
        declarations.push(declaration);
    }
    declarations
}

fn to_declaration(artifact: PayloadArtifact) -> ArtifactDeclaration {
    let PayloadArtifact { kind, path, name, expires, content_type, content_encoding, optional } = artifact;
    let path = PathBuf::from(path);
    // Without `./` and a slash at the end.
    let plain = || path.iter().filter(|part| *part != ".").collect::<PathBuf>().to_string_lossy().into_owned();
    let name = name.unwrap_or_else(plain);
    let kind = match kind {
        PayloadArtifactType::File => ArtifactKind::File { path, content_type },
        PayloadArtifactType::Directory => ArtifactKind::Directory { path, content_type },
    };
    let encoding = content_encoding.map(|encoding| match encoding {
        PayloadEncoding::Identity => ContentEncoding::Identity,
        PayloadEncoding::Gzip => ContentEncoding::Gzip,
    });
    let optionality = if optional { Optionality::Optional } else { Optionality::Required };
    ArtifactDeclaration { expires, optionality, encoding, ..ArtifactDeclaration::new(name, kind) }
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
