//! The handler kind `program`: runs a program in any language, by the protocol `stdio-json/1`.
//!
//! # Protocol `stdio-json/1`
//!
//! **Input.** One JSON document on standard input, then end of file:
//!
//! ```json
//! {"protocol": "stdio-json/1", "phase": "run", "payload": {}, "task": {}, "taskId": "fN1SbArXTPSVFNUvaOlinQ",
//!  "attempt": 0, "source": "local", "lease": {"secondsLeft": 1200.0}, "workdir": "/…"}
//! ```
//!
//! `task` is the task's definition without its payload. The worker reclaims the task while the program runs.
//!
//! **Log.** Standard output and standard error.
//!
//! **Messages.** Optional JSON lines on descriptor 3: `artifact`, `directory`, `result`, `link`, `reference`, `error`,
//! `step`, `progress`, `redact`, and `answer` for a request; see [`program_messages`](super::program_messages). A program
//! sends `redact` before it prints the secret: the worker reads descriptor 3 before the output.
//!
//! **Outcome.** The exit status; 0 is completed. The environment names the other statuses: `JOURNEYMAN_EXIT_FAILED`,
//! `…_RETRY` (retry the task), `…_UNAVAILABLE` (a declared resource is not available), `…_INTERNAL` (the handler failed).
//! Any other status, and any signal, is failed.
//!
//! **Rejecting a payload.** A malformed payload must be rejected before it starts: by the schema, or by the optional
//! `check` program. The worker runs `check` with the same document, with `phase` and `JOURNEYMAN_PHASE` set to `check`. It
//! may exit with `JOURNEYMAN_EXIT_MALFORMED` and send `{"type": "reason", "text": "…"}` lines. `check` may be the same
//! program as `exec`. In the phase `run` that status is a failure like any other.
//!
//! **Cancellation.** `SIGTERM` to the program's process group; after the termination grace, `SIGKILL`.

use std::io;
use std::os::fd::OwnedFd;
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

use super::environment::{self, Variables};
use super::payload_schema::PayloadSchema;
use super::process::{EndCause, Input, Launch, ProcessEnd, ProcessStatus, RunLimits, RunningProcess};
use super::program_messages::{MessageReader, ProgramReport};
use super::{
    Context, DynHandler, ExecuteError, ExecuteFailure, HandlerConfigError, HandlerFuture, PrepareError, PrepareFailure,
    PreparedPayload, use_absolute_program,
};

pub const PROTOCOL: &str = "stdio-json/1";

/// Exit statuses, by the names of `sysexits.h` where it has one.
pub mod status {
    pub const FAILED: i32 = 1;
    /// `EX_DATAERR`
    pub const MALFORMED: i32 = 65;
    /// `EX_UNAVAILABLE`
    pub const UNAVAILABLE: i32 = 69;
    /// `EX_SOFTWARE`
    pub const INTERNAL: i32 = 70;
    /// `EX_TEMPFAIL`
    pub const RETRY: i32 = 75;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramConfig {
    pub name: String,
    pub exec: Vec<String>,
    pub check: Option<Vec<String>>,
    pub schema: Option<PathBuf>,
    pub env: Variables,
    pub max_run_time: Option<Duration>,
    pub termination_grace: Duration,
}

impl ProgramConfig {
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

/// Clones share the program.
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
    /// Reads the schema and makes program paths absolute, because the program starts in another directory.
    pub fn new(mut config: ProgramConfig) -> Result<Self, HandlerConfigError> {
        use_absolute_program(&config.name, "exec", &mut config.exec)?;
        if let Some(check) = &mut config.check {
            use_absolute_program(&config.name, "check", check)?;
        }
        let value = config.schema.as_deref().map_or(Ok(Value::Bool(true)), read_schema);
        let schema = value.and_then(|value| PayloadSchema::new(value).map_err(|error| error.to_string()));
        let schema = schema.map_err(|error| {
            let path = config.schema.as_deref().unwrap_or_else(|| Path::new("")).display();
            HandlerConfigError { handler: config.name.clone(), message: format!("cannot use schema {path}: {error}") }
        })?;
        Ok(Self { inner: Arc::new(ProgramInner { config, schema }) })
    }

    #[must_use]
    pub fn config(&self) -> &ProgramConfig {
        &self.inner.config
    }

    pub(super) async fn run_for_test(
        &self,
        payload: &Value,
        limits: RunLimits,
        context: &Context,
    ) -> Result<PhaseResult, ExecuteError> {
        self.inner.run(payload, limits, context).await
    }
}

impl ProgramInner {
    async fn run_check(&self, argv: &[String], payload: &Value, context: &Context) -> Result<(), PrepareError> {
        let limits = RunLimits { run_time: Some(PROGRAM_CHECK_TIMEOUT), termination_grace: Duration::ZERO };
        let subject = format!("check of handler {}", self.config.name);
        let internal = |text: String| PrepareError::new(PrepareFailure::Internal, format!("{subject}: {text}"));
        let result = self.run_phase(ProgramPhase::Check, argv, payload, limits, context);
        let PhaseResult { end, report: ProgramReport { mut reasons, .. } } =
            result.await.map_err(|error| PrepareError::from_io(&subject, &error))?;
        if reasons.is_empty() {
            reasons.push(format!("payload: rejected by the check of handler {}; see the log", self.config.name));
        }
        match (end.cause, end.status) {
            (EndCause::Exited, ProcessStatus::Code(0)) => Ok(()),
            (EndCause::Exited, ProcessStatus::Code(status::MALFORMED)) => Err(PrepareError::malformed(reasons)),
            (EndCause::Exited, ProcessStatus::Code(status::UNAVAILABLE)) => {
                Err(PrepareError { reason: PrepareFailure::Unavailable, messages: reasons })
            }
            (EndCause::RunTime, _) => Err(internal(format!("timed out after {} s", PROGRAM_CHECK_TIMEOUT.as_secs()))),
            (EndCause::Exceeded(exceeded), _) => Err(internal(exceeded.to_string())),
            (EndCause::Canceled(_), _) => Err(internal("stopped early".to_owned())),
            (EndCause::Exited, status) => Err(internal(status.to_string())),
        }
    }

    async fn run(&self, payload: &Value, limits: RunLimits, context: &Context) -> Result<PhaseResult, ExecuteError> {
        let result = self.run_phase(ProgramPhase::Run, &self.config.exec, payload, limits, context);
        let subject = format!("cannot run handler {}", self.config.name);
        result.await.map_err(|error| ExecuteError::from_io(&subject, &error))
    }

    async fn run_phase(
        &self,
        phase: ProgramPhase,
        argv: &[String],
        payload: &Value,
        limits: RunLimits,
        context: &Context,
    ) -> io::Result<PhaseResult> {
        let (channel, writer) = message_pipe()?;
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
        let result = run_with_messages(running, &channel, document.as_bytes(), limits, context).await?;
        for note in &result.end.notes {
            context.log().write_note(note);
        }
        Ok(result)
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

pub(super) fn message_pipe() -> io::Result<(pipe::Receiver, OwnedFd)> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    Ok((pipe::Receiver::from_owned_fd(reader)?, writer))
}

/// Runs a process to its end while it reads its document and sends messages.
pub(super) async fn run_with_messages(
    mut running: RunningProcess,
    channel: &pipe::Receiver,
    document: &[u8],
    limits: RunLimits,
    context: &Context,
) -> io::Result<PhaseResult> {
    let input = running.input.take();
    let mut reader = MessageReader::new(context);
    let end = {
        let mut finish = std::pin::pin!(running.finish(limits, context));
        // A program need neither read its input nor close descriptor 3.
        let mut exchange = std::pin::pin!(async {
            tokio::join!(write_input(input, document), read_messages(channel, &mut reader));
        });
        // Messages before output: a `redact` message applies to the output that follows it.
        tokio::select! {
            biased;
            () = &mut exchange => finish.await,
            end = &mut finish => end,
        }
    }?;
    if timeout(PROCESS_OUTPUT_DRAIN, read_messages(channel, &mut reader)).await.is_err() {
        context
            .log()
            .write_note("a process outside the payload's group holds descriptor 3 open; the worker stops reading it");
    }
    Ok(PhaseResult { end, report: reader.finish() })
}

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

pub(super) struct PhaseResult {
    pub(super) end: ProcessEnd,
    pub(super) report: ProgramReport,
}

struct PreparedProgram {
    program: Arc<ProgramInner>,
    payload: Value,
}

impl DynHandler for Program {
    /// Omits the arguments, which may contain secrets.
    fn describe(&self) -> String {
        let ProgramConfig { name, exec, .. } = &self.inner.config;
        format!("{name} (program, {})", exec.first().map_or("", String::as_str))
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
            let ProgramInner { config, schema } = &*self.inner;
            schema.validate(payload)?;
            let env = environment::for_task(&config.env, context);
            for argv in [Some(&config.exec), config.check.as_ref()].into_iter().flatten() {
                let program = argv.first().map_or("", String::as_str);
                // The program existed when the worker started; another host may still have it.
                find_program(program, &env, context.workdir()).map_err(|error| {
                    PrepareError::new(PrepareFailure::HostFault, format!("handler {}: {error}", config.name))
                })?;
            }
            if let Some(check) = &config.check {
                self.inner.run_check(check, payload, context).await?;
            }
            let prepared: Box<dyn PreparedPayload> =
                Box::new(PreparedProgram { program: Arc::clone(&self.inner), payload: payload.clone() });
            Ok(prepared)
        })
    }
}

impl PreparedPayload for PreparedProgram {
    fn execute<'a>(self: Box<Self>, context: &'a Context) -> HandlerFuture<'a, Result<(), ExecuteError>> {
        Box::pin(async move {
            let config = &self.program.config;
            let limits = RunLimits { run_time: config.max_run_time, termination_grace: config.termination_grace };
            let result = self.program.run(&self.payload, limits, context).await?;
            execute_result(&result.end, config)?;
            result.report.check_reply(&format!("handler {}", config.name))
        })
    }
}

pub(super) fn execute_result(end: &ProcessEnd, config: &ProgramConfig) -> Result<(), ExecuteError> {
    let time_limit = format!("{} s, the most this worker allows", config.max_run_time.unwrap_or_default().as_secs());
    end.outcome(&format!("handler {}", config.name), &time_limit, |code, message| {
        Err(match code {
            0 => return Ok(()),
            status::RETRY => ExecuteError::new(ExecuteFailure::Intermittent, format!("{message}, retry requested")),
            status::UNAVAILABLE => {
                ExecuteError::new(ExecuteFailure::Unavailable, format!("{message}, resource unavailable"))
            }
            status::INTERNAL => ExecuteError::internal(format!("{message}, internal error")),
            status::MALFORMED => {
                ExecuteError::failed(format!("{message}, which rejects a payload only in the phase `check`"))
            }
            _ => ExecuteError::failed(message),
        })
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

/// A program may exit without reading its document.
async fn write_input(input: Option<ChildStdin>, document: &[u8]) {
    if let Some(mut input) = input
        && let Err(error) = input.write_all(document).await
    {
        tracing::debug!(%error, "program did not read its document");
    }
}

/// Cancel safe: every byte that is read is handled at once.
async fn read_messages(channel: &pipe::Receiver, reader: &mut MessageReader<'_>) {
    // A dropped call may have left a partial reply unsent.
    reader.send_partials().await;
    while channel.readable().await.is_ok() {
        if let ReadResult::End = read_available(channel, reader) {
            return;
        }
        reader.send_partials().await;
    }
}

enum ReadResult {
    More,
    End,
}

/// Not async, so that no future holds the buffer.
fn read_available(channel: &pipe::Receiver, reader: &mut MessageReader<'_>) -> ReadResult {
    let mut buffer = [0; PROGRAM_READ_BYTES];
    match channel.try_read(&mut buffer) {
        Ok(0) => return ReadResult::End,
        Ok(bytes) => reader.push(buffer.get(..bytes).unwrap_or_default()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(_) => return ReadResult::End,
    }
    ReadResult::More
}

fn read_schema(path: &Path) -> Result<Value, String> {
    use std::io::Read;
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let mut text = String::new();
    file.take(SCHEMA_BYTES_MAX + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > SCHEMA_BYTES_MAX {
        return Err(format!("larger than {SCHEMA_BYTES_MAX} bytes"));
    }
    serde_json::from_str(&text).map_err(|error| error.to_string())
}
