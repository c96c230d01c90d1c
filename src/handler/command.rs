//! The built-in handler `command`: runs the argument vectors in a task's payload, in the format of generic-worker.
//!
//! Commands run one after the other in the task directory; the first that does not exit with 0 ends the task. `maxRunTime`
//! limits all commands together. A missing program of the first command makes the payload malformed. A missing program of
//! a later command makes the task fail, because an earlier command may have created it.
//!
//! Mounts, caches and features are not supported: such keys violate the schema.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;
use schemars::JsonSchema;
use serde::Deserialize;
use tokio::net::unix::pipe;
use tokio::time::Instant;

use crate::host::program_path::find_program;
use crate::limits::{ARGUMENT_BYTES_MAX, TERMINATION_GRACE_DEFAULT};
use crate::redact;

use super::artifact::{self, ArtifactDeclaration, ArtifactKind, Artifacts, Optionality};
use super::environment::{self, Variables};
use super::log::AddSecretError;
use super::process::{Input, Launch, ProcessEnd, RunLimits, RunningProcess, format_seconds};
use super::program::{PhaseResult, message_pipe, run_with_messages};
use super::program_messages::ProgramReport;
use super::{Context, ExecuteError, ExecuteFailure, PayloadHandler, PrepareError, host_errors};

/// Holds the request without its body, as JSON.
const REQUEST_VARIABLE: &str = "REQUEST";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandConfig {
    pub env: Variables,
    /// The `maxRunTime` of a task that has none; `None` requires tasks to have one.
    pub default_run_time: Option<Duration>,
    pub max_run_time: Option<Duration>,
    pub termination_grace: Duration,
    /// Names of variables whose values are redacted; see [`redact::is_secret_name`].
    pub redact_env: Vec<String>,
}

impl Default for CommandConfig {
    fn default() -> Self {
        Self {
            env: Variables::new(),
            default_run_time: None,
            max_run_time: None,
            termination_grace: TERMINATION_GRACE_DEFAULT,
            redact_env: redact::SECRET_NAME_PATTERNS.map(str::to_owned).to_vec(),
        }
    }
}

#[derive(Debug, Default)]
pub struct Command {
    config: CommandConfig,
}

/// The payload of the `command` handler.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CommandPayload {
    /// Programs with their arguments, run one after the other until one fails.
    #[schemars(length(min = 1), inner(length(min = 1)))]
    pub command: Vec<Vec<String>>,
    /// Variables for all commands.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Time limit for all commands together, in seconds.
    #[serde(default, deserialize_with = "deserialize_whole_number")]
    #[schemars(range(min = 1, max = 4_294_967_295_u64))]
    pub max_run_time: Option<u32>,
    /// Files to upload as artifacts.
    #[serde(default)]
    pub artifacts: Vec<PayloadArtifact>,
    /// Exit statuses with a special meaning.
    #[serde(default)]
    pub on_exit_status: OnExitStatus,
}

/// Accepts 60.0, which is an integer in JSON Schema.
fn deserialize_whole_number<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    let Some(number) = Option::<serde_json::Number>::deserialize(from)? else { return Ok(None) };
    let float =
        || number.as_f64().filter(|float| float.fract() == 0.0).and_then(|float| format!("{float}").parse().ok());
    let whole = number.as_u64().and_then(|number| number.try_into().ok()).or_else(float);
    whole.map(Some).ok_or_else(|| serde::de::Error::custom("a whole number of seconds"))
}

/// A file or directory to upload.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PayloadArtifact {
    /// The kind of artifact.
    #[serde(rename = "type")]
    pub kind: PayloadArtifactType,
    /// Path below the task directory.
    #[schemars(length(min = 1))]
    pub path: String,
    /// Name of the artifact; by default the path.
    #[serde(default)]
    pub name: Option<String>,
    /// When the artifact expires (RFC 3339), between the task's deadline and the task's `expires`; by default with the task.
    #[serde(default)]
    pub expires: Option<String>,
    /// Media type of a file; by default guessed from its extension.
    #[serde(default)]
    pub content_type: Option<String>,
    /// Whether the task may succeed if the artifact is missing or the queue rejects it.
    #[serde(default)]
    pub optional: bool,
}

/// The kind of artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PayloadArtifactType {
    /// One regular file.
    File,
    /// All regular files in a directory and its subdirectories.
    Directory,
}

/// Exit statuses with a special meaning.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OnExitStatus {
    /// Exit statuses that retry the task.
    #[serde(default)]
    #[schemars(inner(range(min = 1, max = 255)))]
    pub retry: BTreeSet<i32>,
}

#[derive(Debug)]
pub struct PreparedCommands {
    commands: Vec<Vec<String>>,
    env: Variables,
    run_time: Duration,
    artifacts: Vec<ArtifactDeclaration>,
    retry_statuses: BTreeSet<i32>,
}

impl PreparedCommands {
    fn time_limit(&self) -> String {
        format!("maxRunTime, {} s", self.run_time.as_secs())
    }
}

impl Command {
    #[must_use]
    pub const fn new(config: CommandConfig) -> Self {
        Self { config }
    }

    fn resolve_run_time(&self, seconds: Option<u32>, violations: &mut Vec<String>) -> Duration {
        let requested = seconds.map(|seconds| Duration::from_secs(seconds.into()));
        let Some(run_time) = requested.or(self.config.default_run_time) else {
            violations.push("payload/maxRunTime: give the time in seconds; this worker has no default".to_owned());
            return Duration::ZERO;
        };
        if let Some(max) = self.config.max_run_time.filter(|max| run_time > *max) {
            violations.push(format!(
                "payload/maxRunTime: {} s is more than the {} s this worker allows",
                run_time.as_secs(),
                max.as_secs()
            ));
        }
        run_time
    }
}

impl PayloadHandler for Command {
    type Payload = CommandPayload;
    type Prepared = PreparedCommands;

    fn describe(&self) -> String {
        "command".to_owned()
    }

    async fn prepare(&self, payload: CommandPayload, context: &Context) -> Result<PreparedCommands, PrepareError> {
        let mut violations = Vec::new();
        let run_time = self.resolve_run_time(payload.max_run_time, &mut violations);
        for (name, value) in &payload.env {
            if let Some(why) = environment::variable_error(name, value) {
                violations.push(format!("payload/env/{name}: {why}"));
            }
        }
        for (number, argv) in payload.command.iter().enumerate() {
            if argv.iter().any(|argument| argument.contains('\0')) {
                violations.push(format!("payload/command/{number}: an argument contains a NUL byte"));
            }
            if let Some(long) = argv.iter().position(|argument| argument.len() > ARGUMENT_BYTES_MAX) {
                violations.push(format!(
                    "payload/command/{number}/{long}: longer than the {ARGUMENT_BYTES_MAX} bytes that Linux allows for an \
                     argument; use a file"
                ));
            }
        }
        let artifacts = validate_artifacts(payload.artifacts, context, &mut violations);
        let mut env = environment::for_payload(&self.config.env, payload.env, context);
        if context.results().is_some() {
            let request = &context.task().definition["extra"]["request"];
            env.insert(REQUEST_VARIABLE.to_owned(), request.to_string());
        }
        let secrets = env.iter().filter(|(name, _)| redact::is_secret_name(name, &self.config.redact_env));
        for (_, value) in secrets {
            // A value too short to be redacted is too short to be a secret.
            if let Err(error @ AddSecretError::LimitReached) = context.log().add_secret(value) {
                context.log().write_note(&format!("variable named like a secret: {error}"));
            }
        }
        if let Some(program) = payload.command.first().and_then(|argv| argv.first())
            && let Err(error) = find_program(program, &env, context.workdir())
        {
            violations.push(format!("payload/command/0: {error}"));
        }
        if !violations.is_empty() {
            return Err(PrepareError::malformed(violations));
        }
        Ok(PreparedCommands {
            commands: payload.command,
            env,
            run_time,
            artifacts,
            retry_statuses: payload.on_exit_status.retry,
        })
    }

    async fn execute(&self, prepared: PreparedCommands, context: &Context) -> Result<(), ExecuteError> {
        let started = Instant::now();
        let log = context.log();
        log.write_note(&format!("task {}", context.task().run));
        let outcome = self.run(&prepared, context, started).await;
        // A failed task uploads its artifacts too.
        for artifact in prepared.artifacts {
            if let Err(error) = context.artifacts().declare(artifact) {
                log.write_note(&error.to_string());
            }
        }
        let result = match &outcome {
            Ok(()) => "completed",
            Err(_) => "not completed",
        };
        log.write_note(&format!("result: {result} after {}", format_seconds(started.elapsed())));
        outcome
    }
}

impl Command {
    async fn run(&self, prepared: &PreparedCommands, context: &Context, started: Instant) -> Result<(), ExecuteError> {
        for (number, argv) in prepared.commands.iter().enumerate() {
            let remaining = prepared.run_time.saturating_sub(started.elapsed());
            if let Some(cancellation) = context.cancellation() {
                return Err(ExecuteError::failed(format!("command {number}: {}", cancellation.cause.message())));
            }
            if remaining.is_zero() {
                let time_limit = prepared.time_limit();
                return Err(ExecuteError::failed(format!("command {number}: stopped after {time_limit}")));
            }
            let result = self.run_one(number, argv, prepared, remaining, context).await?;
            execute_result(number, &result.end, prepared)?;
            result.report.check_reply(&format!("command {number}"))?;
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
    ) -> Result<PhaseResult, ExecuteError> {
        let log = context.log();
        log.write_note(&format!("executing command {number}: {}", shell_quoted(argv)));
        let started = Instant::now();
        let (channel, writer) = reply_channel(context).map_err(|error| start_error(number, &error))?;
        let launch = Launch {
            argv,
            env: &prepared.env,
            workdir: context.workdir(),
            input: Input::Null,
            message_channel: writer,
            scope: context.scope(),
        };
        let running = RunningProcess::start(launch).await.map_err(|error| start_error(number, &error))?;
        let limits = RunLimits { run_time: Some(run_time), termination_grace: self.config.termination_grace };
        let result = match channel {
            Some(channel) => run_with_messages(running, &channel, b"", limits, context).await,
            None => {
                running.finish(limits, context).await.map(|end| PhaseResult { end, report: ProgramReport::default() })
            }
        };
        let result = result.map_err(|error| {
            ExecuteError::internal(format!("command {number}: cannot wait for the process: {error}"))
        })?;
        for note in &result.end.notes {
            log.write_note(&format!("command {number}: {note}"));
        }
        log.write_note(&format!(
            "command {number}: {}, after {}",
            result.end.status,
            format_seconds(started.elapsed())
        ));
        Ok(result)
    }
}

/// Descriptor 3 of the commands, for a task that is a request.
fn reply_channel(context: &Context) -> io::Result<(Option<pipe::Receiver>, Option<OwnedFd>)> {
    if context.results().is_none() {
        return Ok((None, None));
    }
    message_pipe().map(|(reader, writer)| (Some(reader), Some(writer)))
}

fn execute_result(number: usize, end: &ProcessEnd, prepared: &PreparedCommands) -> Result<(), ExecuteError> {
    end.outcome(&format!("command {number}"), &prepared.time_limit(), |code, message| match code {
        0 => Ok(()),
        code if prepared.retry_statuses.contains(&code) => {
            Err(ExecuteError::new(ExecuteFailure::Intermittent, format!("{message}, listed in onExitStatus.retry")))
        }
        _ => Err(ExecuteError::failed(message)),
    })
}

/// A program that cannot be executed is the task's fault; a host out of resources is not.
fn start_error(number: usize, error: &io::Error) -> ExecuteError {
    let message = format!("cannot start command {number}: {error}");
    let of_task = [
        Errno::NOENT,
        Errno::ACCESS,
        Errno::NOEXEC,
        Errno::TOOBIG,
        Errno::NOTDIR,
        Errno::LOOP,
        Errno::NAMETOOLONG,
        Errno::TXTBSY,
        Errno::ISDIR,
    ];
    match error.raw_os_error() {
        Some(_) if host_errors::is_host_error(error) => ExecuteError::new(ExecuteFailure::HostFault, message),
        Some(code) if of_task.iter().all(|errno| errno.raw_os_error() != code) => ExecuteError::internal(message),
        Some(_) => ExecuteError::failed(message),
        None if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            ExecuteError::failed(message)
        }
        // The process scope cannot be set up.
        None => ExecuteError::new(ExecuteFailure::HostFault, message),
    }
}

fn validate_artifacts(
    artifacts: Vec<PayloadArtifact>,
    context: &Context,
    violations: &mut Vec<String>,
) -> Vec<ArtifactDeclaration> {
    // The artifacts are declared after the commands have run; this finds duplicate names and too many artifacts before.
    let trial = Artifacts::new();
    let mut declarations = Vec::new();
    for (number, artifact) in artifacts.into_iter().enumerate() {
        let declaration = to_declaration(artifact);
        if let Err(error) = trial.declare(declaration.clone()) {
            violations.push(format!("payload/artifacts/{number}: {error}"));
        } else if let Some(expires) = &declaration.expires
            && let Some(why) = artifact::expiry_conflict(expires, &context.task().definition)
        {
            violations.push(format!("payload/artifacts/{number}/expires: {why}"));
        }
        declarations.push(declaration);
    }
    declarations
}

fn to_declaration(artifact: PayloadArtifact) -> ArtifactDeclaration {
    let path = PathBuf::from(&artifact.path);
    let kind = match artifact.kind {
        PayloadArtifactType::File => ArtifactKind::File { path, content_type: artifact.content_type },
        PayloadArtifactType::Directory => ArtifactKind::Directory { path },
    };
    let name = artifact.name.unwrap_or(artifact.path);
    let optionality = if artifact.optional { Optionality::Optional } else { Optionality::Required };
    ArtifactDeclaration { name, kind, expires: artifact.expires, optionality }
}

fn shell_quoted(argv: &[String]) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_=/.,:+@%".contains(&byte);
    let quoted = argv.iter().map(|argument| {
        if !argument.is_empty() && argument.bytes().all(plain) {
            argument.clone()
        } else {
            format!("'{}'", argument.replace('\'', r"'\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logged_command_is_quoted_for_a_shell() {
        let argv = ["sh", "-c", "echo 'a b' > c", ""].map(str::to_owned);
        assert_eq!(shell_quoted(&argv), r"sh -c 'echo '\''a b'\'' > c' ''");
    }

    #[test]
    fn max_run_time_accepts_every_form_of_an_integer() {
        let read = |number: &str| {
            let text = format!(r#"{{"command":[["true"]],"maxRunTime":{number}}}"#);
            serde_json::from_str::<CommandPayload>(&text).map(|payload| payload.max_run_time)
        };
        assert_eq!(read("60").unwrap(), Some(60));
        assert_eq!(read("1000.0").unwrap(), Some(1000));
        assert_eq!(read("6e1").unwrap(), Some(60));
        assert_eq!(read("null").unwrap(), None);
        for wrong in ["1.5", "-1.0", "5e9", "\"60\""] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_exhausted_host_is_not_the_tasks_fault() {
        let error = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        assert!(matches!(start_error(0, &error(Errno::AGAIN)), ExecuteError { reason: ExecuteFailure::HostFault, .. }));
        assert!(matches!(start_error(0, &error(Errno::MFILE)), ExecuteError { reason: ExecuteFailure::HostFault, .. }));
        assert!(matches!(start_error(0, &error(Errno::PERM)), ExecuteError { reason: ExecuteFailure::Internal, .. }));
        assert!(matches!(start_error(0, &error(Errno::NOEXEC)), ExecuteError { reason: ExecuteFailure::Failed, .. }));
        assert!(matches!(
            start_error(0, &io::Error::other("no control group")),
            ExecuteError { reason: ExecuteFailure::HostFault, .. }
        ));
        let not_there = io::Error::new(io::ErrorKind::NotFound, "x: no such file");
        assert!(matches!(start_error(0, &not_there), ExecuteError { reason: ExecuteFailure::Failed, .. }));
    }
}
