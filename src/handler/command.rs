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

use crate::host::program::locate;
use crate::limits::{ARGUMENT_BYTES_MAX, PROCESS_GRACE};
use crate::redact;

use super::artifact::{self, Artifacts, Declaration, Need, What};
use super::environment::{self, Variables};
use super::log::NotHidden;
use super::message::Told;
use super::process::{Bounds, Cause, Ended, Input, Launch, Running, Status, shown};
use super::program::{Spoken, converse};
use super::{CancelCause, Context, NotCompleted, NotPrepared, PayloadHandler, fault};

/// What the commands of a request find in their environment of it: all but its body, as JSON.
const REQUEST: &str = "REQUEST";

/// What the operator decides about `command`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Variables of the worker's environment that are passed on; see [`environment::pick`].
    pub env: Variables,
    /// The `maxRunTime` of tasks that name none; `None` requires them to.
    pub run_time_default: Option<Duration>,
    /// The longest `maxRunTime` a task may ask for.
    pub max_run_time: Option<Duration>,
    /// From the order to end until processes are killed.
    pub grace: Duration,
    /// Names of variables whose values the task's log does not show; see [`redact::is_named_like_a_secret`].
    pub redact_env: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            env: Variables::new(),
            run_time_default: None,
            max_run_time: None,
            grace: PROCESS_GRACE,
            redact_env: redact::NAMED_LIKE_SECRETS.map(str::to_owned).to_vec(),
        }
    }
}

/// The handler.
#[derive(Debug, Default)]
pub struct Command {
    settings: Settings,
}

/// What a task says.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Payload {
    /// Programs with their arguments, run one after the other until one fails.
    #[schemars(length(min = 1), inner(length(min = 1)))]
    pub command: Vec<Vec<String>>,
    /// Variables for all commands.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// How long all commands together may take, in seconds.
    #[serde(default, deserialize_with = "whole")]
    #[schemars(range(min = 1, max = 4_294_967_295_u64))]
    pub max_run_time: Option<u32>,
    /// Files to keep.
    #[serde(default)]
    pub artifacts: Vec<Wanted>,
    /// What exit statuses mean, other than 0 for success.
    #[serde(default)]
    pub on_exit_status: OnExitStatus,
}

/// A whole number, as JSON Schema has it: 60.0 is one.
fn whole<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    let Some(number) = Option::<serde_json::Number>::deserialize(from)? else { return Ok(None) };
    let float =
        || number.as_f64().filter(|float| float.fract() == 0.0).and_then(|float| format!("{float}").parse().ok());
    let whole = number.as_u64().and_then(|number| number.try_into().ok()).or_else(float);
    whole.map(Some).ok_or_else(|| serde::de::Error::custom("a whole number of seconds"))
}

/// A file or folder to keep.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Wanted {
    /// What it is.
    #[serde(rename = "type")]
    pub kind: Kind,
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
pub enum Kind {
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
pub struct Ready {
    commands: Vec<Vec<String>>,
    env: Variables,
    run_time: Duration,
    artifacts: Vec<Declaration>,
    retry: BTreeSet<i32>,
}

impl Command {
    /// The handler with these settings.
    #[must_use]
    pub const fn new(settings: Settings) -> Self {
        Self { settings }
    }

    fn run_time(&self, asked: Option<u32>, wrong: &mut Vec<String>) -> Duration {
        let asked = asked.map(|seconds| Duration::from_secs(seconds.into()));
        let Some(run_time) = asked.or(self.settings.run_time_default) else {
            wrong.push("payload/maxRunTime: give the time in seconds; this worker has no default".to_owned());
            return Duration::ZERO;
        };
        if let Some(most) = self.settings.max_run_time.filter(|most| run_time > *most) {
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
    type Payload = Payload;
    type Prepared = Ready;

    fn describe(&self) -> String {
        "command".to_owned()
    }

    async fn prepare(&self, payload: Payload, context: &Context) -> Result<Ready, NotPrepared> {
        let mut wrong = Vec::new();
        let run_time = self.run_time(payload.max_run_time, &mut wrong);
        for (name, value) in &payload.env {
            if let Some(why) = environment::unusable(name, value) {
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
        let artifacts = artifacts(payload.artifacts, context, &mut wrong);
        let mut env = environment::with_payloads(&self.settings.env, payload.env, context);
        if context.replies().is_some() {
            let request = &context.task().definition["extra"]["request"];
            env.insert(REQUEST.to_owned(), request.to_string());
        }
        let secrets = env.iter().filter(|(name, _)| redact::is_named_like_a_secret(name, &self.settings.redact_env));
        for (_, value) in secrets {
            // What is too short to be hidden is too short to be a secret.
            if let Err(why @ NotHidden::TooMany) = context.log().hide(value) {
                context.log().note(&format!("a variable named like a secret: {why}"));
            }
        }
        if let Some(program) = payload.command.first().and_then(|argv| argv.first())
            && let Err(error) = locate(program, &env, context.workdir())
        {
            wrong.push(format!("payload/command/0: {error}"));
        }
        if !wrong.is_empty() {
            return Err(NotPrepared::Malformed(wrong));
        }
        Ok(Ready { commands: payload.command, env, run_time, artifacts, retry: payload.on_exit_status.retry })
    }

    async fn execute(&self, ready: Ready, context: &Context) -> Result<(), NotCompleted> {
        let started = Instant::now();
        let log = context.log();
        log.note(&format!("task {}", context.task().run));
        let outcome = self.run(&ready, context, started).await;
        // Whatever the commands did, what they left is kept.
        for artifact in ready.artifacts {
            if let Err(error) = context.artifacts().declare(artifact) {
                log.note(&error.to_string());
            }
        }
        let result = match &outcome {
            Ok(()) => "completed",
            Err(_) => "not completed",
        };
        log.note(&format!("result: {result} after {}", shown(started.elapsed())));
        outcome
    }
}

impl Command {
    async fn run(&self, ready: &Ready, context: &Context, started: Instant) -> Result<(), NotCompleted> {
        for (number, argv) in ready.commands.iter().enumerate() {
            let left = ready.run_time.saturating_sub(started.elapsed());
            if let Some(order) = context.cancel() {
                return Err(too_late(number, Cause::Canceled(order), ready));
            }
            if left.is_zero() {
                return Err(too_late(number, Cause::RunTime, ready));
            }
            let spoken = self.one(number, argv, ready, left, context).await?;
            judge(number, &spoken.ended, ready)?;
            spoken.told.judge(&format!("command {number}"))?;
        }
        Ok(())
    }

    async fn one(
        &self,
        number: usize,
        argv: &[String],
        ready: &Ready,
        left: Duration,
        context: &Context,
    ) -> Result<Spoken, NotCompleted> {
        let log = context.log();
        log.note(&format!("executing command {number}: {}", as_typed(argv)));
        let began = Instant::now();
        let (channel, writer) = answers(context).map_err(|error| not_started(number, &error))?;
        let launch = Launch {
            argv,
            env: &ready.env,
            workdir: context.workdir(),
            input: Input::Null,
            channel: writer,
            within: context.enclosure(),
        };
        let running = Running::start(launch).await.map_err(|error| not_started(number, &error))?;
        let bounds = Bounds { run_time: Some(left), grace: self.settings.grace };
        let spoken = match channel {
            Some(channel) => converse(running, &channel, b"", bounds, context).await,
            None => running.finish(bounds, context).await.map(|ended| Spoken { ended, told: Told::default() }),
        };
        let spoken = spoken
            .map_err(|error| NotCompleted::Internal(format!("command {number}: its end was not seen: {error}")))?;
        let ended = &spoken.ended;
        for remark in &ended.remarks {
            log.note(&format!("command {number}: {remark}"));
        }
        log.note(&format!("command {number}: {}, after {}", ended.status, shown(began.elapsed())));
        Ok(spoken)
    }
}

/// What commands say of the answer to a request, on their descriptor 3; nothing where nobody waits for one.
fn answers(context: &Context) -> io::Result<(Option<pipe::Receiver>, Option<OwnedFd>)> {
    if context.replies().is_none() {
        return Ok((None, None));
    }
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    Ok((Some(pipe::Receiver::from_owned_fd(reader)?), Some(writer)))
}

/// Decides what the end of a command means. Pure.
fn judge(number: usize, ended: &Ended, ready: &Ready) -> Result<(), NotCompleted> {
    if !ended.survivors.is_empty() || ended.status == Status::Stuck {
        return Err(NotCompleted::Internal(format!(
            "command {number}: processes are left that could not be killed: {:?}",
            ended.survivors
        )));
    }
    match (ended.cause, ended.status) {
        (cause @ (Cause::RunTime | Cause::Canceled(_)), _) => Err(too_late(number, cause, ready)),
        (Cause::Exceeded(exceeded), _) => Err(NotCompleted::Failed(format!("command {number}: {exceeded}"))),
        (Cause::Itself, _) if ended.over_its_disk() => {
            Err(NotCompleted::Failed(format!("command {number}: {}", ended.said())))
        }
        (Cause::Itself, Status::Code(0)) => Ok(()),
        (Cause::Itself, Status::Code(code)) if ready.retry.contains(&code) => Err(NotCompleted::Intermittent(format!(
            "command {number}: exit status {code}, which the task wants to be retried"
        ))),
        (Cause::Itself, _) => Err(NotCompleted::Failed(format!("command {number}: {}", ended.said()))),
    }
}

/// A command that was stopped, or was not even started.
fn too_late(number: usize, cause: Cause, ready: &Ready) -> NotCompleted {
    let why = match cause {
        Cause::Canceled(order) => ordered(order.cause).to_owned(),
        Cause::Itself | Cause::Exceeded(_) | Cause::RunTime => {
            format!("stopped after maxRunTime, {} s", ready.run_time.as_secs())
        }
    };
    NotCompleted::Failed(format!("command {number}: {why}"))
}

pub(super) const fn ordered(cause: CancelCause) -> &'static str {
    match cause {
        CancelCause::ClaimLost => "stopped: the task is canceled or no longer this worker's",
        CancelCause::Shutdown => "stopped: the worker has to go",
        CancelCause::HandedBack => "stopped: handed back by those who run the worker",
        CancelCause::Canceled => "stopped: canceled by those who run the worker",
    }
}

/// What cannot be executed is the task's own fault; what the host cannot give is not.
fn not_started(number: usize, error: &io::Error) -> NotCompleted {
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
        Some(_) if fault::is_of_host(error) => NotCompleted::Host(sentence),
        Some(code) if of_task.iter().all(|errno| errno.raw_os_error() != code) => NotCompleted::Internal(sentence),
        Some(_) => NotCompleted::Failed(sentence),
        None if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            NotCompleted::Failed(sentence)
        }
        // What is to be around it cannot be had.
        None => NotCompleted::Host(sentence),
    }
}

fn artifacts(wanted: Vec<Wanted>, context: &Context, wrong: &mut Vec<String>) -> Vec<Declaration> {
    // Declared for good only when the commands have run; this finds names that come twice, and counts.
    let trial = Artifacts::new();
    let mut declarations = Vec::new();
    for (number, wanted) in wanted.into_iter().enumerate() {
        let declaration = declaration(wanted);
        if let Err(error) = trial.declare(declaration.clone()) {
            wrong.push(format!("payload/artifacts/{number}: {error}"));
        } else if let Some(expires) = &declaration.expires
            && let Some(why) = artifact::never_fits(expires, &context.task().definition)
        {
            wrong.push(format!("payload/artifacts/{number}/expires: {why}"));
        }
        declarations.push(declaration);
    }
    declarations
}

fn declaration(wanted: Wanted) -> Declaration {
    let path = PathBuf::from(&wanted.path);
    let what = match wanted.kind {
        Kind::File => What::File { path, content_type: wanted.content_type },
        Kind::Directory => What::Directory { path },
    };
    let name = wanted.name.unwrap_or(wanted.path);
    let need = if wanted.optional { Need::Optional } else { Need::Required };
    Declaration { name, what, expires: wanted.expires, need }
}

/// An argument vector as somebody would type it into a shell.
fn as_typed(argv: &[String]) -> String {
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
        assert_eq!(as_typed(&argv), r"sh -c 'echo '\''a b'\'' > c' ''");
    }

    #[test]
    fn a_whole_number_is_one_however_it_is_written() {
        let read = |number: &str| {
            let text = format!(r#"{{"command":[["true"]],"maxRunTime":{number}}}"#);
            serde_json::from_str::<Payload>(&text).map(|payload| payload.max_run_time)
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
        assert!(matches!(not_started(0, &error(Errno::AGAIN)), NotCompleted::Host(_)));
        assert!(matches!(not_started(0, &error(Errno::MFILE)), NotCompleted::Host(_)));
        assert!(matches!(not_started(0, &error(Errno::PERM)), NotCompleted::Internal(_)));
        assert!(matches!(not_started(0, &error(Errno::NOEXEC)), NotCompleted::Failed(_)));
        assert!(matches!(not_started(0, &io::Error::other("no control group")), NotCompleted::Host(_)));
        let not_there = io::Error::new(io::ErrorKind::NotFound, "x: there is no such file");
        assert!(matches!(not_started(0, &not_there), NotCompleted::Failed(_)));
    }
}
