//! The built-in handler `command`: runs the argument vectors that a task brings, as users of generic-worker write them.
//!
//! Commands run one after the other in the task's folder, and the first that does not exit with 0 ends the task. All of
//! them together have `maxRunTime`. A payload that cannot work is refused before anything of it runs; that includes a
//! first command whose program is not there, since nothing could have put it there. A later command may have been made
//! by an earlier one, so if that is not there the task failed.
//!
//! There are no mounts, caches or features here: such keys are violations of the schema.

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
use super::process::{EndCause, Input, Launch, ProcessEnd, ProcessStatus, RunLimits, RunningProcess, format_seconds};
use super::program::{PhaseResult, run_with_messages};
use super::program_messages::ProgramReport;
use super::{CancelCause, Context, ExecuteError, PayloadHandler, PrepareError, host_errors};

/// What the commands of a request find in their environment of it: all but its body, as JSON.
const REQUEST_VARIABLE: &str = "REQUEST";

/// What the operator decides about `command`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandConfig {
    /// Variables of the worker's environment that are passed on; see [`environment::select`].
    pub env: Variables,
    /// The `maxRunTime` of tasks that name none; `None` requires them to.
    pub default_run_time: Option<Duration>,
    /// The longest `maxRunTime` a task may ask for.
    pub max_run_time: Option<Duration>,
    /// From the order to end until processes are killed.
    pub termination_grace: Duration,
    /// Names of variables whose values the task's log does not show; see [`redact::is_secret_name`].
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

/// The handler.
#[derive(Debug, Default)]
pub struct Command {
    config: CommandConfig,
}

/// What a task says.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CommandPayload {
    /// Programs with their arguments, run one after the other until one fails.
    #[schemars(length(min = 1), inner(length(min = 1)))]
    pub command: Vec<Vec<String>>,
    /// Variables for all commands.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// How long all commands together may take, in seconds.
    #[serde(default, deserialize_with = "deserialize_whole_number")]
    #[schemars(range(min = 1, max = 4_294_967_295_u64))]
    pub max_run_time: Option<u32>,
    /// Files to keep.
    #[serde(default)]
    pub artifacts: Vec<PayloadArtifact>,
    /// What exit statuses mean, other than 0 for success.
    #[serde(default)]
    pub on_exit_status: OnExitStatus,
}

/// A whole number, as JSON Schema has it: 60.0 is one.
fn deserialize_whole_number<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    let Some(number) = Option::<serde_json::Number>::deserialize(from)? else { return Ok(None) };
    let float =
        || number.as_f64().filter(|float| float.fract() == 0.0).and_then(|float| format!("{float}").parse().ok());
    let whole = number.as_u64().and_then(|number| number.try_into().ok()).or_else(float);
    whole.map(Some).ok_or_else(|| serde::de::Error::custom("a whole number of seconds"))
}

/// A file or folder to keep.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PayloadArtifact {
    /// What it is.
    #[serde(rename = "type")]
    pub kind: PayloadArtifactType,
    /// Where it is, below the task's folder.
    #[schemars(length(min = 1))]
    pub path: String,
    /// The artifact's name; the path if not given.
    #[serde(default)]
    pub name: Option<String>,
    /// When it may be thrown away (RFC 3339), not before the task's deadline and not later than the task; with the task if
    /// not given.
    #[serde(default)]
    pub expires: Option<String>,
    /// The media type of a file; guessed from its extension if not given.
    #[serde(default)]
    pub content_type: Option<String>,
    /// Lets the task succeed without it: where it is not there, or the queue refuses it.
    #[serde(default)]
    pub optional: bool,
}

/// What an artifact is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PayloadArtifactType {
    /// One regular file.
    File,
    /// All regular files in a folder and below.
    Directory,
}

/// What exit statuses mean.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OnExitStatus {
    /// The task is worth another run.
    #[serde(default)]
    #[schemars(inner(range(min = 1, max = 255)))]
    pub retry: BTreeSet<i32>,
}

/// A payload that can be run.
#[derive(Debug)]
pub struct PreparedCommands {
    commands: Vec<Vec<String>>,
    env: Variables,
    run_time: Duration,
    artifacts: Vec<ArtifactDeclaration>,
    retry_statuses: BTreeSet<i32>,
}

impl Command {
    /// The handler with these settings.
    #[must_use]
    pub const fn new(config: CommandConfig) -> Self {
        Self { config }
    }

    fn resolve_run_time(&self, asked: Option<u32>, wrong: &mut Vec<String>) -> Duration {
        let asked = asked.map(|seconds| Duration::from_secs(seconds.into()));
        let Some(run_time) = asked.or(self.config.default_run_time) else {
            wrong.push("payload/maxRunTime: give the time in seconds; this worker has no default".to_owned());
            return Duration::ZERO;
        };
        if let Some(most) = self.config.max_run_time.filter(|most| run_time > *most) {
            wrong.push(format!(
                "payload/maxRunTime: {} s is more than the {} s this worker allows",
                run_time.as_secs(),
                most.as_secs()
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
        let mut wrong = Vec::new();
        let run_time = self.resolve_run_time(payload.max_run_time, &mut wrong);
        for (name, value) in &payload.env {
            if let Some(why) = environment::variable_error(name, value) {
                wrong.push(format!("payload/env/{name}: {why}"));
            }
        }
        for (number, argv) in payload.command.iter().enumerate() {
            if argv.iter().any(|argument| argument.contains('\0')) {
                wrong.push(format!("payload/command/{number}: NUL bytes cannot be passed on"));
            }
            if let Some(long) = argv.iter().position(|argument| argument.len() > ARGUMENT_BYTES_MAX) {
                wrong.push(format!(
                    "payload/command/{number}/{long}: it is longer than the {ARGUMENT_BYTES_MAX} bytes that can be passed on; \
                     put it into a file"
                ));
            }
        }
        let artifacts = validate_artifacts(payload.artifacts, context, &mut wrong);
        let mut env = environment::for_payload(&self.config.env, payload.env, context);
        if context.results().is_some() {
            let request = &context.task().definition["extra"]["request"];
            env.insert(REQUEST_VARIABLE.to_owned(), request.to_string());
        }
        let secrets = env.iter().filter(|(name, _)| redact::is_secret_name(name, &self.config.redact_env));
        for (_, value) in secrets {
            // What is too short to be hidden is too short to be a secret.
            if let Err(why @ AddSecretError::LimitReached) = context.log().add_secret(value) {
                context.log().write_note(&format!("a variable named like a secret: {why}"));
            }
        }
        if let Some(program) = payload.command.first().and_then(|argv| argv.first())
            && let Err(error) = find_program(program, &env, context.workdir())
        {
            wrong.push(format!("payload/command/0: {error}"));
        }
        if !wrong.is_empty() {
            return Err(PrepareError::Malformed(wrong));
        }
        Ok(PreparedCommands {
            commands: payload.command,
            env,
            run_time,
            artifacts,
            retry_statuses: payload.on_exit_status.retry,
        })
    }

    async fn execute(&self, ready: PreparedCommands, context: &Context) -> Result<(), ExecuteError> {
        let started = Instant::now();
        let log = context.log();
        log.write_note(&format!("task {}", context.task().run));
        let outcome = self.run(&ready, context, started).await;
        // Whatever the commands did, what they left is kept.
        for artifact in ready.artifacts {
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
    async fn run(&self, ready: &PreparedCommands, context: &Context, started: Instant) -> Result<(), ExecuteError> {
        for (number, argv) in ready.commands.iter().enumerate() {
            let left = ready.run_time.saturating_sub(started.elapsed());
            if let Some(order) = context.cancellation() {
                return Err(stopped_early(number, EndCause::Canceled(order), ready));
            }
            if left.is_zero() {
                return Err(stopped_early(number, EndCause::RunTime, ready));
            }
            let spoken = self.run_one(number, argv, ready, left, context).await?;
            execute_result(number, &spoken.end, ready)?;
            spoken.report.check_reply(&format!("command {number}"))?;
        }
        Ok(())
    }

    async fn run_one(
        &self,
        number: usize,
        argv: &[String],
        ready: &PreparedCommands,
        left: Duration,
        context: &Context,
    ) -> Result<PhaseResult, ExecuteError> {
        let log = context.log();
        log.write_note(&format!("executing command {number}: {}", shell_quoted(argv)));
        let began = Instant::now();
        let (channel, writer) = reply_channel(context).map_err(|error| start_error(number, &error))?;
        let launch = Launch {
            argv,
            env: &ready.env,
            workdir: context.workdir(),
            input: Input::Null,
            message_channel: writer,
            scope: context.scope(),
        };
        let running = RunningProcess::start(launch).await.map_err(|error| start_error(number, &error))?;
        let bounds = RunLimits { run_time: Some(left), termination_grace: self.config.termination_grace };
        let spoken = match channel {
            Some(channel) => run_with_messages(running, &channel, b"", bounds, context).await,
            None => running
                .finish(bounds, context)
                .await
                .map(|ended| PhaseResult { end: ended, report: ProgramReport::default() }),
        };
        let spoken = spoken
            .map_err(|error| ExecuteError::Internal(format!("command {number}: its end was not seen: {error}")))?;
        let ended = &spoken.end;
        for remark in &ended.notes {
            log.write_note(&format!("command {number}: {remark}"));
        }
        log.write_note(&format!("command {number}: {}, after {}", ended.status, format_seconds(began.elapsed())));
        Ok(spoken)
    }
}

/// What commands say of the answer to a request, on their descriptor 3; nothing where nobody waits for one.
fn reply_channel(context: &Context) -> io::Result<(Option<pipe::Receiver>, Option<OwnedFd>)> {
    if context.results().is_none() {
        return Ok((None, None));
    }
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    Ok((Some(pipe::Receiver::from_owned_fd(reader)?), Some(writer)))
}

/// Decides what the end of a command means. Pure.
fn execute_result(number: usize, ended: &ProcessEnd, ready: &PreparedCommands) -> Result<(), ExecuteError> {
    if !ended.survivors.is_empty() || ended.status == ProcessStatus::Stuck {
        return Err(ExecuteError::Internal(format!(
            "command {number}: processes are left that could not be killed: {:?}",
            ended.survivors
        )));
    }
    match (ended.cause, ended.status) {
        (cause @ (EndCause::RunTime | EndCause::Canceled(_)), _) => Err(stopped_early(number, cause, ready)),
        (EndCause::Exceeded(exceeded), _) => Err(ExecuteError::Failed(format!("command {number}: {exceeded}"))),
        (EndCause::Exited, _) if ended.exceeded_disk_limit() => {
            Err(ExecuteError::Failed(format!("command {number}: {}", ended.describe())))
        }
        (EndCause::Exited, ProcessStatus::Code(0)) => Ok(()),
        (EndCause::Exited, ProcessStatus::Code(code)) if ready.retry_statuses.contains(&code) => {
            Err(ExecuteError::Intermittent(format!(
                "command {number}: exit status {code}, which the task wants to be retried"
            )))
        }
        (EndCause::Exited, _) => Err(ExecuteError::Failed(format!("command {number}: {}", ended.describe()))),
    }
}

/// A command that was stopped, or was not even started.
fn stopped_early(number: usize, cause: EndCause, ready: &PreparedCommands) -> ExecuteError {
    let why = match cause {
        EndCause::Canceled(order) => cancel_message(order.cause).to_owned(),
        EndCause::Exited | EndCause::Exceeded(_) | EndCause::RunTime => {
            format!("stopped after maxRunTime, {} s", ready.run_time.as_secs())
        }
    };
    ExecuteError::Failed(format!("command {number}: {why}"))
}

pub(super) const fn cancel_message(cause: CancelCause) -> &'static str {
    match cause {
        CancelCause::ClaimLost => "stopped: the task is canceled or no longer this worker's",
        CancelCause::Shutdown => "stopped: the worker has to go",
        CancelCause::Released => "stopped: handed back by those who run the worker",
        CancelCause::Canceled => "stopped: canceled by those who run the worker",
    }
}

/// What cannot be executed is the task's own fault; what the host cannot give is not.
fn start_error(number: usize, error: &io::Error) -> ExecuteError {
    let sentence = format!("command {number} could not be started: {error}");
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
        Some(_) if host_errors::is_host_error(error) => ExecuteError::Host(sentence),
        Some(code) if of_task.iter().all(|errno| errno.raw_os_error() != code) => ExecuteError::Internal(sentence),
        Some(_) => ExecuteError::Failed(sentence),
        None if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            ExecuteError::Failed(sentence)
        }
        // What is to be around it cannot be had.
        None => ExecuteError::Host(sentence),
    }
}

fn validate_artifacts(
    wanted: Vec<PayloadArtifact>,
    context: &Context,
    wrong: &mut Vec<String>,
) -> Vec<ArtifactDeclaration> {
    // Declared for good only when the commands have run; this finds names that come twice, and counts.
    let trial = Artifacts::new();
    let mut declarations = Vec::new();
    for (number, wanted) in wanted.into_iter().enumerate() {
        let declaration = to_declaration(wanted);
        if let Err(error) = trial.declare(declaration.clone()) {
            wrong.push(format!("payload/artifacts/{number}: {error}"));
        } else if let Some(expires) = &declaration.expires
            && let Some(why) = artifact::expiry_conflict(expires, &context.task().definition)
        {
            wrong.push(format!("payload/artifacts/{number}/expires: {why}"));
        }
        declarations.push(declaration);
    }
    declarations
}

fn to_declaration(wanted: PayloadArtifact) -> ArtifactDeclaration {
    let path = PathBuf::from(&wanted.path);
    let what = match wanted.kind {
        PayloadArtifactType::File => ArtifactKind::File { path, content_type: wanted.content_type },
        PayloadArtifactType::Directory => ArtifactKind::Directory { path },
    };
    let name = wanted.name.unwrap_or(wanted.path);
    let need = if wanted.optional { Optionality::Optional } else { Optionality::Required };
    ArtifactDeclaration { name, kind: what, expires: wanted.expires, optionality: need }
}

/// An argument vector as somebody would type it into a shell.
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
    fn a_command_is_shown_so_that_it_can_be_typed_again() {
        let argv = ["sh", "-c", "echo 'a b' > c", ""].map(str::to_owned);
        assert_eq!(shell_quoted(&argv), r"sh -c 'echo '\''a b'\'' > c' ''");
    }

    #[test]
    fn a_whole_number_is_one_however_it_is_written() {
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
    fn what_the_host_cannot_give_is_not_the_tasks_fault() {
        let error = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        assert!(matches!(start_error(0, &error(Errno::AGAIN)), ExecuteError::Host(_)));
        assert!(matches!(start_error(0, &error(Errno::MFILE)), ExecuteError::Host(_)));
        assert!(matches!(start_error(0, &error(Errno::PERM)), ExecuteError::Internal(_)));
        assert!(matches!(start_error(0, &error(Errno::NOEXEC)), ExecuteError::Failed(_)));
        assert!(matches!(start_error(0, &io::Error::other("no control group")), ExecuteError::Host(_)));
        let not_there = io::Error::new(io::ErrorKind::NotFound, "x: no such file");
        assert!(matches!(start_error(0, &not_there), ExecuteError::Failed(_)));
    }
}
