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
//! **Messages.** Optional JSON lines on descriptor 3: `artifact`, `directory`, `result`, `step`, `progress`, `redact`, `answer` for a request, and `pause` for a build of a Zuul; see [`program_messages`](super::program_messages). A program
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
//! **Work elsewhere.** With `[handler.NAME.staged]` the phases are `start`, `verify` and `cancel`; see `journeyman guide staged`.
//!
//! **Cancellation.** `SIGTERM` to the program's process group; after the termination grace, `SIGKILL`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::handler::config::ProgramHandler;
use journeyman_domain::limits::PROGRAM_CHECK_TIMEOUT;
use journeyman_platform::host::program_path::find_program;
use journeyman_platform::settings::Environment;

use super::environment::{self, Variables};
use super::payload_schema::PayloadSchema;
use super::process::{EndCause, Launch, ProcessStatus, RunLimits};
use super::program_messages::{ProgramReport, ProgramRun, run_with_messages};
use super::staged::{Work, drive};
use super::staged_program::ProgramWork;
use super::{
    Context, DynHandler, ExecuteError, ExecuteFailure, HandlerConfigError, PrepareError, PrepareFailure,
    PreparedPayload, Preparing, use_absolute_program,
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

/// Clones share the program.
#[derive(Debug, Clone)]
pub struct Program {
    inner: Arc<ProgramInner>,
}

#[derive(Debug)]
struct ProgramInner {
    name: String,
    config: ProgramHandler,
    env: Variables,
    schema: PayloadSchema,
}

impl Program {
    /// Reads the schema and makes program paths absolute, because the program starts in another directory.
    pub fn new(name: &str, mut config: ProgramHandler, worker: &Environment) -> Result<Self, HandlerConfigError> {
        use_absolute_program(&mut config.exec);
        use_absolute_program(&mut config.check);
        let schema = match &config.schema {
            Some(file) => read_schema(&file.0).map_err(|error| {
                let message = format!("cannot use schema {}: {error}", file.0.display());
                HandlerConfigError { handler: name.to_owned(), message }
            })?,
            None => PayloadSchema::new(Value::Bool(true)),
        };
        let env = environment::select(&config.env_allow, worker.pairs());
        Ok(Self { inner: Arc::new(ProgramInner { name: name.to_owned(), config, env, schema }) })
    }

    pub fn config(&self) -> &ProgramHandler {
        &self.inner.config
    }

    async fn run_check(&self, payload: &Value, context: &Context) -> Result<(), PrepareError> {
        let limits = RunLimits { run_time: Some(PROGRAM_CHECK_TIMEOUT), termination_grace: Duration::ZERO };
        let subject = format!("check of handler {}", self.inner.name);
        let internal = |text: String| PrepareError::new(PrepareFailure::Internal, format!("{subject}: {text}"));
        let run = self.run_phase("check", &self.inner.config.check, payload, limits, context);
        let ProgramRun { end, report: ProgramReport { mut reasons, .. } } =
            run.await.map_err(|error| PrepareError::from_io(&subject, &error))?;
        if reasons.is_empty() {
            reasons.push(format!("payload: rejected by the check of handler {}; see the log", self.inner.name));
        }
        match (end.cause, end.status) {
            (EndCause::Exited, ProcessStatus::Code(0)) => Ok(()),
            (EndCause::Exited, ProcessStatus::Code(status::MALFORMED)) => Err(PrepareError::malformed(reasons)),
            (EndCause::Exited, ProcessStatus::Code(status::UNAVAILABLE)) => {
                Err(PrepareError { reason: PrepareFailure::Unavailable, messages: reasons })
            }
            (EndCause::RunTime, _) => Err(internal(format!("timed out after {} s", PROGRAM_CHECK_TIMEOUT.as_secs()))),
            (EndCause::Canceled(_), _) => Err(internal("stopped early".to_owned())),
            (EndCause::Exited | EndCause::Exceeded(_), _) => Err(internal(end.describe())),
        }
    }

    pub(super) async fn run(
        &self,
        payload: &Value,
        limits: RunLimits,
        context: &Context,
    ) -> Result<ProgramRun, ExecuteError> {
        let run = self.run_phase("run", &self.inner.config.exec, payload, limits, context);
        run.await.map_err(|error| ExecuteError::from_io(&format!("cannot run handler {}", self.inner.name), &error))
    }

    async fn run_phase(
        &self,
        phase: &str,
        argv: &[String],
        payload: &Value,
        limits: RunLimits,
        context: &Context,
    ) -> std::io::Result<ProgramRun> {
        let (env, document) = (self.environment(phase, context), input_document(phase, payload, context));
        self.run_document(argv, &env, &document, limits, context).await
    }

    /// Runs a phase of work that is launched elsewhere.
    pub(super) async fn run_work_phase(
        &self,
        phase: &str,
        work: &Work<'_, Value>,
        limits: RunLimits,
        context: &Context,
    ) -> std::io::Result<ProgramRun> {
        let (mut env, mut document) = (self.environment(phase, context), input_document(phase, work.payload, context));
        let (record, key) = (work.record, work.key());
        let handle = record.handle.as_deref().or(record.announced.as_deref());
        document["work"] = json!({ "key": key, "launch": record.launch, "handle": handle, "phase": record.phase });
        env.insert("JOURNEYMAN_WORK".to_owned(), key);
        env.insert("JOURNEYMAN_LAUNCH".to_owned(), record.launch.to_string());
        env.insert("JOURNEYMAN_HANDLE".to_owned(), handle.unwrap_or_default().to_owned());
        self.run_document(&self.inner.config.exec, &env, &document, limits, context).await
    }

    async fn run_document(
        &self,
        argv: &[String],
        env: &Variables,
        document: &Value,
        limits: RunLimits,
        context: &Context,
    ) -> std::io::Result<ProgramRun> {
        let document = document.to_string();
        run_with_messages(Launch::new(argv, env, context), Some(document.as_bytes()), limits, context).await
    }

    pub(super) fn outcome(&self, ProgramRun { end, report }: &ProgramRun) -> Result<(), ExecuteError> {
        let time_limit = format!("{} s, the most this worker allows", self.inner.config.max_run_time.0.as_secs());
        let subject = format!("handler {}", self.inner.name);
        end.outcome(&subject, &time_limit, |code, message| {
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
        })?;
        report.check_reply(&subject)
    }

    fn environment(&self, phase: &str, context: &Context) -> Variables {
        let mut env = environment::for_task(&self.inner.env, context);
        let mut set = |name: &str, value: String| env.insert(format!("JOURNEYMAN_{name}"), value);
        set("PROTOCOL", PROTOCOL.to_owned());
        set("PHASE", phase.to_owned());
        set("HANDLER", self.inner.name.clone());
        set("EXIT_FAILED", status::FAILED.to_string());
        set("EXIT_MALFORMED", status::MALFORMED.to_string());
        set("EXIT_UNAVAILABLE", status::UNAVAILABLE.to_string());
        set("EXIT_INTERNAL", status::INTERNAL.to_string());
        set("EXIT_RETRY", status::RETRY.to_string());
        env
    }
}

impl DynHandler for Program {
    /// Omits the arguments, which may contain secrets.
    fn describe(&self) -> String {
        let ProgramInner { name, config, .. } = &*self.inner;
        format!("{name} (program, {})", config.exec.first().map_or("", String::as_str))
    }

    fn schema(&self) -> Value {
        self.inner.schema.schema().clone()
    }

    fn prepare<'a>(&'a self, payload: &'a Value, context: &'a Context) -> Preparing<'a> {
        Box::pin(async move {
            let ProgramInner { name, config, env, schema } = &*self.inner;
            schema.validate(payload)?;
            let env = environment::for_task(env, context);
            for program in [config.exec.first(), config.check.first()].into_iter().flatten() {
                // The program existed when the worker started; another host may still have it.
                find_program(program, &env, context.workdir()).map_err(|error| {
                    PrepareError::new(PrepareFailure::HostFault, format!("handler {name}: {error}"))
                })?;
            }
            if !config.check.is_empty() {
                self.run_check(payload, context).await?;
            }
            let limits =
                RunLimits { run_time: Some(config.max_run_time.0), termination_grace: config.termination_grace.0 };
            let (program, payload) = (self.clone(), payload.clone());
            if let Some(keys) = config.staged.clone() {
                let work = ProgramWork { program, keys };
                let execute: PreparedPayload =
                    Box::new(move |context| Box::pin(async move { drive(&work, &payload, context).await }));
                return Ok(execute);
            }
            let execute: PreparedPayload = Box::new(move |context| {
                Box::pin(async move { program.outcome(&program.run(&payload, limits, context).await?) })
            });
            Ok(execute)
        })
    }
}

fn input_document(phase: &str, payload: &Value, context: &Context) -> Value {
    let task = context.task();
    let mut definition = task.definition.json().clone();
    if let Some(keys) = definition.as_object_mut() {
        keys.remove("payload");
    }
    json!({
        "protocol": PROTOCOL,
        "phase": phase,
        "payload": payload,
        "task": definition,
        "taskId": task.run.task.as_str(),
        "attempt": task.run.run,
        "source": task.source,
        "lease": {"secondsLeft": context.time_until(context.expires_at()).as_secs_f64()},
        "workdir": context.workdir().to_string_lossy(),
    })
}

fn read_schema(path: &Path) -> Result<PayloadSchema, String> {
    let text = std::fs::read(path).map_err(|error| error.to_string())?;
    let schema = PayloadSchema::new(serde_json::from_slice(&text).map_err(|error| error.to_string())?);
    schema.error().map_or(Ok(()), |error| Err(error.to_owned()))?;
    Ok(schema)
}
