//! Any language: a program that the operator names is a handler.
//!
//! # Protocol `stdio-json/1`
//!
//! **In.** One JSON document on standard input, then its end:
//!
//! ```json
//! {"protocol": "stdio-json/1", "phase": "run", "payload": {}, "task": {}, "taskId": "fN1SbArXTPSVFNUvaOlinQ",
//!  "attempt": 0, "source": "local", "lease": {"secondsLeft": 1200.0}, "workdir": "/…"}
//! ```
//!
//! `task` is the task's definition without its payload. The lease is extended while the program runs.
//!
//! **Log.** Standard output and error, byte for byte.
//!
//! **Out.** JSON lines on descriptor 3: `artifact`, `directory`, `result`, `link`, `reference`, `error`, `step`,
//! `progress`, `redact`, and `answer` for a request; see [`program_messages`](super::program_messages). A program that has nothing to say need not know of it.
//! `redact` comes before the output that holds the secret: what is written to both at once is taken from here first.
//!
//! **Outcome.** The exit status. 0 is completed. The environment names the others, so that no program needs to know a
//! number: `JOURNEYMAN_EXIT_FAILED`, `…_RETRY` (worth another run), `…_UNAVAILABLE` (something it declares could not be
//! had), `…_INTERNAL` (the handler broke). Any other status, and any signal, is failed.
//!
//! **Refusing a payload.** A malformed payload is one that was never started, so this is said before: by the schema, and
//! by an optional `check` program. That is run with the same document, `phase` and `JOURNEYMAN_PHASE` being `check`, and
//! may exit with `JOURNEYMAN_EXIT_MALFORMED` and tell why in `{"type": "reason", "text": "…"}` lines. It may be the same
//! program. Once the phase is `run`, that status is a failure like any other.
//!
//! **Ending early.** `SIGTERM` to the program's group; after the grace, `SIGKILL`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;
use tokio::process::ChildStdin;
use tokio::time::timeout;

use crate::host::program_path::find_program;
use crate::limits::{
    PROCESS_OUTPUT_DRAIN, PROGRAM_CHECK_TIMEOUT, PROGRAM_READ_BYTES, SCHEMA_BYTES_MAX, TERMINATION_GRACE_DEFAULT,
};

use super::command::cancel_message;
use super::environment::{self, Variables};
use super::payload_schema::PayloadSchema;
use super::process::{EndCause, Input, Launch, ProcessEnd, ProcessStatus, RunLimits, RunningProcess};
use super::program_messages::{MessageReader, ProgramReport};
use super::{Context, DynHandler, ExecuteError, HandlerFuture, PrepareError, PreparedPayload, host_errors};

/// The protocol's name.
pub const PROTOCOL: &str = "stdio-json/1";

/// The exit statuses that mean something, by the names of `sysexits.h` where it has one.
pub mod status {
    /// The task's own fault.
    pub const FAILED: i32 = 1;
    /// The payload can never work (`EX_DATAERR`).
    pub const MALFORMED: i32 = 65;
    /// Something the payload declares cannot be had (`EX_UNAVAILABLE`).
    pub const UNAVAILABLE: i32 = 69;
    /// The handler broke (`EX_SOFTWARE`).
    pub const INTERNAL: i32 = 70;
    /// Worth another run (`EX_TEMPFAIL`).
    pub const RETRY: i32 = 75;
}

/// What the operator says of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramConfig {
    /// The handler's name in the configuration.
    pub name: String,
    /// The program and its arguments. A name is looked for in `PATH`, a path is taken from the worker's own folder.
    pub exec: Vec<String>,
    /// What checks a payload before it is run.
    pub check: Option<Vec<String>>,
    /// A file with the payload's JSON Schema; without one, every payload fits.
    pub schema: Option<PathBuf>,
    /// Variables of the worker's environment that are passed on; see [`environment::select`].
    pub env: Variables,
    /// How long a payload may run; `None` is as long as the claim lasts.
    pub max_run_time: Option<Duration>,
    /// From the order to end until processes are killed.
    pub termination_grace: Duration,
}

impl ProgramConfig {
    /// A program without a check, a schema or a limit in time.
    pub fn new(name: impl Into<String>, exec: Vec<String>) -> Self {
        Self {
            name: name.into(),
            exec,
            check: None,
            schema: None,
            env: Variables::new(),
            max_run_time: None,
            termination_grace: TERMINATION_GRACE_DEFAULT,
        }
    }
}

/// Why a program cannot be a handler.
#[derive(Debug, thiserror::Error)]
pub enum ProgramConfigError {
    /// Nothing to run is named.
    #[error("handler {name}: `{key}` is empty; name a program and its arguments")]
    Empty {
        /// The handler.
        name: String,
        /// `exec` or `check`.
        key: &'static str,
    },
    /// The schema cannot be read or used.
    #[error("handler {name}: schema {}: {message}", path.display())]
    Schema {
        /// The handler.
        name: String,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
}

/// A program as a handler. Clones share it.
#[derive(Debug, Clone)]
pub struct Program {
    inner: Arc<ProgramInner>,
}

#[derive(Debug)]
struct ProgramInner {
    config: ProgramConfig,
    schema: PayloadSchema,
}

impl Program {
    /// Reads the schema, and makes paths independent of the folder that the program will start in.
    ///
    /// # Errors
    ///
    /// See [`ProgramConfigError`]. Whether the program is there is seen when it is needed.
    pub fn new(mut settings: ProgramConfig) -> Result<Self, ProgramConfigError> {
        settings.exec = absolute_program(&settings.name, "exec", settings.exec)?;
        let check = settings.check.take().map(|check| absolute_program(&settings.name, "check", check));
        settings.check = check.transpose()?;
        let schema = match &settings.schema {
            Some(path) => {
                let wrong = |what| ProgramConfigError::Schema {
                    name: settings.name.clone(),
                    path: path.clone(),
                    message: what,
                };
                PayloadSchema::new(read_schema(path).map_err(wrong)?).map_err(|error| wrong(error.to_string()))?
            }
            None => PayloadSchema::new(Value::Bool(true)).map_err(|error| ProgramConfigError::Schema {
                name: settings.name.clone(),
                path: PathBuf::new(),
                message: error.to_string(),
            })?,
        };
        Ok(Self { inner: Arc::new(ProgramInner { config: settings, schema }) })
    }

    /// What the operator said.
    #[must_use]
    pub fn config(&self) -> &ProgramConfig {
        &self.inner.config
    }

    /// Runs a payload that was prepared, for who wants to know more of its end than the verdict.
    pub(super) async fn run_for_test(
        &self,
        payload: &Value,
        bounds: RunLimits,
        context: &Context,
    ) -> Result<PhaseResult, ExecuteError> {
        self.inner.run(payload, bounds, context).await
    }
}

impl ProgramInner {
    async fn run_check(&self, argv: &[String], payload: &Value, context: &Context) -> Result<(), PrepareError> {
        let bounds = RunLimits { run_time: Some(PROGRAM_CHECK_TIMEOUT), termination_grace: Duration::ZERO };
        let internal =
            |text: String| PrepareError::Internal(format!("the check of handler {}: {text}", self.config.name));
        let spoken = self.run_phase(ProgramPhase::Check, argv, payload, bounds, context);
        let PhaseResult { end: ended, report: ProgramReport { mut reasons, .. } } =
            spoken.await.map_err(|error| match host_errors::is_host_error(&error) {
                true => PrepareError::Host(format!("the check of handler {}: {error}", self.config.name)),
                false => internal(error.to_string()),
            })?;
        if reasons.is_empty() {
            reasons.push(format!("payload: the check of handler {} refuses it; the log tells why", self.config.name));
        }
        match (ended.cause, ended.status) {
            (EndCause::Exited, ProcessStatus::Code(0)) => Ok(()),
            (EndCause::Exited, ProcessStatus::Code(status::MALFORMED)) => Err(PrepareError::Malformed(reasons)),
            (EndCause::Exited, ProcessStatus::Code(status::UNAVAILABLE)) => {
                Err(PrepareError::Unavailable(reasons.join("; ")))
            }
            (EndCause::RunTime, _) => Err(internal(format!("not done after {} s", PROGRAM_CHECK_TIMEOUT.as_secs()))),
            (EndCause::Exceeded(exceeded), _) => Err(internal(exceeded.to_string())),
            (EndCause::Canceled(_), _) => Err(internal("stopped before it was done".to_owned())),
            (EndCause::Exited, ended) => Err(internal(ended.to_string())),
        }
    }

    /// Runs the payload itself.
    async fn run(&self, payload: &Value, bounds: RunLimits, context: &Context) -> Result<PhaseResult, ExecuteError> {
        let spoken = self.run_phase(ProgramPhase::Run, &self.config.exec, payload, bounds, context);
        spoken.await.map_err(|error| {
            let sentence = format!("handler {} could not be run: {error}", self.config.name);
            if host_errors::is_host_error(&error) {
                ExecuteError::Host(sentence)
            } else {
                ExecuteError::Internal(sentence)
            }
        })
    }

    /// Runs the program through one phase, with all that is said both ways.
    async fn run_phase(
        &self,
        phase: ProgramPhase,
        argv: &[String],
        payload: &Value,
        bounds: RunLimits,
        context: &Context,
    ) -> io::Result<PhaseResult> {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let channel = pipe::Receiver::from_owned_fd(reader)?;
        let env = self.environment(phase, context);
        let launch = Launch {
            argv,
            env: &env,
            workdir: context.workdir(),
            input: Input::Pipe,
            message_channel: Some(writer),
            scope: context.scope(),
        };
        let running = RunningProcess::start(launch).await?;
        let document = input_document(phase, payload, context).to_string();
        let spoken = run_with_messages(running, &channel, document.as_bytes(), bounds, context).await?;
        for remark in &spoken.end.notes {
            context.log().write_note(remark);
        }
        Ok(spoken)
    }

    fn environment(&self, phase: ProgramPhase, context: &Context) -> Variables {
        let mut env = environment::for_task(&self.config.env, context);
        let mut set = |name: &str, value: String| env.insert(format!("JOURNEYMAN_{name}"), value);
        set("PROTOCOL", PROTOCOL.to_owned());
        set("PHASE", phase.as_str().to_owned());
        set("HANDLER", self.config.name.clone());
        set("EXIT_FAILED", status::FAILED.to_string());
        set("EXIT_MALFORMED", status::MALFORMED.to_string());
        set("EXIT_UNAVAILABLE", status::UNAVAILABLE.to_string());
        set("EXIT_INTERNAL", status::INTERNAL.to_string());
        set("EXIT_RETRY", status::RETRY.to_string());
        env
    }
}

/// Sees a process to its end, with all that is said both ways.
pub(super) async fn run_with_messages(
    mut running: RunningProcess,
    channel: &pipe::Receiver,
    document: &[u8],
    bounds: RunLimits,
    context: &Context,
) -> io::Result<PhaseResult> {
    let input = running.input.take();
    let mut listener = MessageReader::new(context);
    let ended = {
        let mut end = std::pin::pin!(running.finish(bounds, context));
        // Neither a program that does not read nor one that does not close its side keeps the other from ending.
        let mut talk = std::pin::pin!(async {
            tokio::join!(write_input(input, document), read_messages(channel, &mut listener));
        });
        // Lines first: one of them may say what the output that follows must not show.
        tokio::select! {
            biased;
            () = &mut talk => end.await,
            ended = &mut end => ended,
        }
    }?;
    if timeout(PROCESS_OUTPUT_DRAIN, read_messages(channel, &mut listener)).await.is_err() {
        context.log().write_note("something outside the payload's group holds descriptor 3 open; it is no longer read");
    }
    Ok(PhaseResult { end: ended, report: listener.finish() })
}

/// What a program is asked to do.
#[derive(Debug, Clone, Copy)]
enum ProgramPhase {
    Check,
    Run,
}

impl ProgramPhase {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Run => "run",
        }
    }
}

/// How a phase went.
pub(super) struct PhaseResult {
    pub(super) end: ProcessEnd,
    pub(super) report: ProgramReport,
}

struct PreparedProgram {
    program: Arc<ProgramInner>,
    payload: Value,
}

impl DynHandler for Program {
    /// Without its arguments, which may hold anything.
    fn describe(&self) -> String {
        let ProgramConfig { name, exec, .. } = &self.inner.config;
        format!("{name}, the program {}", exec.first().map_or("", String::as_str))
    }

    fn schema(&self) -> Value {
        self.inner.schema.schema().clone()
    }

    fn prepare<'a>(
        &'a self,
        payload: &'a Value,
        context: &'a Context,
    ) -> HandlerFuture<'a, Result<Box<dyn PreparedPayload>, PrepareError>> {
        Box::pin(async move {
            let ProgramInner { config: settings, schema } = &*self.inner;
            schema.validate(payload)?;
            let env = environment::for_task(&settings.env, context);
            for argv in [Some(&settings.exec), settings.check.as_ref()].into_iter().flatten() {
                let program = argv.first().map_or("", String::as_str);
                // It was there when the worker started, and another host may have it still.
                find_program(program, &env, context.workdir())
                    .map_err(|error| PrepareError::Host(format!("handler {}: {error}", settings.name)))?;
            }
            if let Some(check) = &settings.check {
                self.inner.run_check(check, payload, context).await?;
            }
            let ready: Box<dyn PreparedPayload> =
                Box::new(PreparedProgram { program: Arc::clone(&self.inner), payload: payload.clone() });
            Ok(ready)
        })
    }
}

impl PreparedPayload for PreparedProgram {
    fn execute<'a>(self: Box<Self>, context: &'a Context) -> HandlerFuture<'a, Result<(), ExecuteError>> {
        Box::pin(async move {
            let settings = &self.program.config;
            let bounds = RunLimits { run_time: settings.max_run_time, termination_grace: settings.termination_grace };
            let spoken = self.program.run(&self.payload, bounds, context).await?;
            execute_result(&spoken.end, settings)?;
            spoken.report.check_reply(&format!("handler {}", settings.name))
        })
    }
}

/// Decides what the end of a program means. Pure.
pub(super) fn execute_result(ended: &ProcessEnd, settings: &ProgramConfig) -> Result<(), ExecuteError> {
    let name = &settings.name;
    let sentence = |text: &str| format!("handler {name}: {text}");
    if !ended.survivors.is_empty() || ended.status == ProcessStatus::Stuck {
        return Err(ExecuteError::Internal(sentence("processes are left that could not be killed")));
    }
    let said = ended.describe();
    Err(match (ended.cause, ended.status) {
        (EndCause::RunTime, _) => {
            let most = settings.max_run_time.unwrap_or_default().as_secs();
            ExecuteError::Failed(sentence(&format!("stopped after {most} s, the most this worker allows")))
        }
        (EndCause::Canceled(order), _) => ExecuteError::Failed(sentence(cancel_message(order.cause))),
        (EndCause::Exceeded(exceeded), _) => ExecuteError::Failed(sentence(&exceeded.to_string())),
        (EndCause::Exited, _) if ended.exceeded_disk_limit() => ExecuteError::Failed(sentence(&said)),
        (EndCause::Exited, ProcessStatus::Code(0)) => return Ok(()),
        (EndCause::Exited, ProcessStatus::Code(status::RETRY)) => {
            ExecuteError::Intermittent(sentence(&format!("{said}, worth another run")))
        }
        (EndCause::Exited, ProcessStatus::Code(status::UNAVAILABLE)) => {
            ExecuteError::Unavailable(sentence(&format!("{said}, something it needs could not be had")))
        }
        (EndCause::Exited, ProcessStatus::Code(status::INTERNAL)) => {
            ExecuteError::Internal(sentence(&format!("{said}, it broke")))
        }
        (EndCause::Exited, ProcessStatus::Code(status::MALFORMED)) => {
            ExecuteError::Failed(sentence(&format!("{said}, which refuses a payload only while it is checked")))
        }
        (EndCause::Exited, _) => ExecuteError::Failed(sentence(&said)),
    })
}

fn input_document(phase: ProgramPhase, payload: &Value, context: &Context) -> Value {
    let task = context.task();
    let mut definition = task.definition.clone();
    if let Some(keys) = definition.as_object_mut() {
        keys.remove("payload");
    }
    json!({
        "protocol": PROTOCOL,
        "phase": phase.as_str(),
        "payload": payload,
        "task": definition,
        "taskId": task.run.task.as_str(),
        "attempt": task.run.run,
        "source": task.source,
        "lease": {"secondsLeft": context.time_until(context.expires_at()).as_secs_f64()},
        "workdir": context.workdir().to_string_lossy(),
    })
}

/// Writes the document. A program that does not read it, or not to its end, is free to do so.
async fn write_input(input: Option<ChildStdin>, document: &[u8]) {
    if let Some(mut input) = input
        && let Err(error) = input.write_all(document).await
    {
        tracing::debug!(%error, "a program did not read its document");
    }
}

/// Reads lines until nobody can write any more.
///
/// Cancel safe: nothing is read that is not heeded at once.
async fn read_messages(channel: &pipe::Receiver, listener: &mut MessageReader<'_>) {
    // One may still be on its way, where the last look was given up.
    listener.send_partials().await;
    while channel.readable().await.is_ok() {
        if let ReadResult::End = read_available(channel, listener) {
            return;
        }
        listener.send_partials().await;
    }
}

enum ReadResult {
    More,
    End,
}

/// Apart from whatever waits, so that no wait keeps the buffer.
fn read_available(channel: &pipe::Receiver, listener: &mut MessageReader<'_>) -> ReadResult {
    let mut buffer = [0; PROGRAM_READ_BYTES];
    match channel.try_read(&mut buffer) {
        Ok(0) => return ReadResult::End,
        Ok(taken) => listener.push(buffer.get(..taken).unwrap_or_default()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(_) => return ReadResult::End,
    }
    ReadResult::More
}

fn absolute_program(name: &str, key: &'static str, mut argv: Vec<String>) -> Result<Vec<String>, ProgramConfigError> {
    let program = argv.first_mut().filter(|program| !program.is_empty());
    let program = program.ok_or_else(|| ProgramConfigError::Empty { name: name.to_owned(), key })?;
    if program.contains('/')
        && let Ok(path) = std::path::absolute(&*program)
    {
        *program = path.to_string_lossy().into_owned();
    }
    Ok(argv)
}

fn read_schema(path: &Path) -> Result<Value, String> {
    use std::io::Read;
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let mut text = String::new();
    file.take(SCHEMA_BYTES_MAX + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > SCHEMA_BYTES_MAX {
        return Err(format!("it is larger than {SCHEMA_BYTES_MAX} bytes"));
    }
    serde_json::from_str(&text).map_err(|error| error.to_string())
}
