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
//! `progress`, `redact`, and `answer` for a request; see [`Message`](super::message::Message). A program that has nothing to say need not know of it.
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

use crate::host::program::locate;
use crate::limits::{PROCESS_DRAIN, PROCESS_GRACE, PROGRAM_CHECK_TIME, PROGRAM_READ_BYTES, SCHEMA_BYTES_MAX};

use super::command::ordered;
use super::environment::{self, Variables};
use super::message::{Listener, Told};
use super::process::{Bounds, Cause, Ended, Input, Launch, Running, Status};
use super::schema::Checked;
use super::{Context, Handler, NotCompleted, NotPrepared, Pending, Prepared, fault};

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
pub struct Settings {
    /// The handler's name in the configuration.
    pub name: String,
    /// The program and its arguments. A name is looked for in `PATH`, a path is taken from the worker's own folder.
    pub exec: Vec<String>,
    /// What checks a payload before it is run.
    pub check: Option<Vec<String>>,
    /// A file with the payload's JSON Schema; without one, every payload fits.
    pub schema: Option<PathBuf>,
    /// Variables of the worker's environment that are passed on; see [`environment::pick`].
    pub env: Variables,
    /// How long a payload may run; `None` is as long as the claim lasts.
    pub max_run_time: Option<Duration>,
    /// From the order to end until processes are killed.
    pub grace: Duration,
}

impl Settings {
    /// A program without a check, a schema or a limit in time.
    pub fn new(name: impl Into<String>, exec: Vec<String>) -> Self {
        Self {
            name: name.into(),
            exec,
            check: None,
            schema: None,
            env: Variables::new(),
            max_run_time: None,
            grace: PROCESS_GRACE,
        }
    }
}

/// Why a program cannot be a handler.
#[derive(Debug, thiserror::Error)]
pub enum Misconfigured {
    /// Nothing to run is named.
    #[error("handler {name}: `{key}` is empty; name a program and its arguments")]
    Empty {
        /// The handler.
        name: String,
        /// `exec` or `check`.
        key: &'static str,
    },
    /// The schema cannot be read or used.
    #[error("handler {name}: schema {}: {what}", path.display())]
    Schema {
        /// The handler.
        name: String,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
}

/// A program as a handler. Clones share it.
#[derive(Debug, Clone)]
pub struct Program {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    settings: Settings,
    schema: Checked,
}

impl Program {
    /// Reads the schema, and makes paths independent of the folder that the program will start in.
    ///
    /// # Errors
    ///
    /// See [`Misconfigured`]. Whether the program is there is seen when it is needed.
    pub fn new(mut settings: Settings) -> Result<Self, Misconfigured> {
        settings.exec = settle(&settings.name, "exec", settings.exec)?;
        let check = settings.check.take().map(|check| settle(&settings.name, "check", check));
        settings.check = check.transpose()?;
        let schema = match &settings.schema {
            Some(path) => {
                let wrong = |what| Misconfigured::Schema { name: settings.name.clone(), path: path.clone(), what };
                Checked::new(read_schema(path).map_err(wrong)?).map_err(|error| wrong(error.to_string()))?
            }
            None => Checked::new(Value::Bool(true)).map_err(|error| Misconfigured::Schema {
                name: settings.name.clone(),
                path: PathBuf::new(),
                what: error.to_string(),
            })?,
        };
        Ok(Self { inner: Arc::new(Inner { settings, schema }) })
    }

    /// What the operator said.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// Runs a payload that was prepared, for who wants to know more of its end than the verdict.
    pub(super) async fn rehearse(
        &self,
        payload: &Value,
        bounds: Bounds,
        context: &Context,
    ) -> Result<Spoken, NotCompleted> {
        self.inner.run(payload, bounds, context).await
    }
}

impl Inner {
    async fn check(&self, argv: &[String], payload: &Value, context: &Context) -> Result<(), NotPrepared> {
        let bounds = Bounds { run_time: Some(PROGRAM_CHECK_TIME), grace: Duration::ZERO };
        let internal =
            |text: String| NotPrepared::Internal(format!("the check of handler {}: {text}", self.settings.name));
        let spoken = self.speak(Phase::Check, argv, payload, bounds, context);
        let Spoken { ended, told: Told { mut reasons, .. } } =
            spoken.await.map_err(|error| match fault::is_of_host(&error) {
                true => NotPrepared::Host(format!("the check of handler {}: {error}", self.settings.name)),
                false => internal(error.to_string()),
            })?;
        if reasons.is_empty() {
            reasons.push(format!("payload: the check of handler {} refuses it; the log tells why", self.settings.name));
        }
        match (ended.cause, ended.status) {
            (Cause::Itself, Status::Code(0)) => Ok(()),
            (Cause::Itself, Status::Code(status::MALFORMED)) => Err(NotPrepared::Malformed(reasons)),
            (Cause::Itself, Status::Code(status::UNAVAILABLE)) => Err(NotPrepared::Unavailable(reasons.join("; "))),
            (Cause::RunTime, _) => Err(internal(format!("not done after {} s", PROGRAM_CHECK_TIME.as_secs()))),
            (Cause::Exceeded(exceeded), _) => Err(internal(exceeded.to_string())),
            (Cause::Canceled(_), _) => Err(internal("stopped before it was done".to_owned())),
            (Cause::Itself, ended) => Err(internal(ended.to_string())),
        }
    }

    /// Runs the payload itself.
    async fn run(&self, payload: &Value, bounds: Bounds, context: &Context) -> Result<Spoken, NotCompleted> {
        let spoken = self.speak(Phase::Run, &self.settings.exec, payload, bounds, context);
        spoken.await.map_err(|error| {
            let sentence = format!("handler {} could not be run: {error}", self.settings.name);
            if fault::is_of_host(&error) { NotCompleted::Host(sentence) } else { NotCompleted::Internal(sentence) }
        })
    }

    /// Runs the program through one phase, with all that is said both ways.
    async fn speak(
        &self,
        phase: Phase,
        argv: &[String],
        payload: &Value,
        bounds: Bounds,
        context: &Context,
    ) -> io::Result<Spoken> {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let channel = pipe::Receiver::from_owned_fd(reader)?;
        let env = self.environment(phase, context);
        let launch = Launch {
            argv,
            env: &env,
            workdir: context.workdir(),
            input: Input::Pipe,
            channel: Some(writer),
            within: context.enclosure(),
        };
        let running = Running::start(launch).await?;
        let document = document(phase, payload, context).to_string();
        let spoken = converse(running, &channel, document.as_bytes(), bounds, context).await?;
        for remark in &spoken.ended.remarks {
            context.log().note(remark);
        }
        Ok(spoken)
    }

    fn environment(&self, phase: Phase, context: &Context) -> Variables {
        let mut env = environment::of_task(&self.settings.env, context);
        let mut set = |name: &str, value: String| env.insert(format!("JOURNEYMAN_{name}"), value);
        set("PROTOCOL", PROTOCOL.to_owned());
        set("PHASE", phase.as_str().to_owned());
        set("HANDLER", self.settings.name.clone());
        set("EXIT_FAILED", status::FAILED.to_string());
        set("EXIT_MALFORMED", status::MALFORMED.to_string());
        set("EXIT_UNAVAILABLE", status::UNAVAILABLE.to_string());
        set("EXIT_INTERNAL", status::INTERNAL.to_string());
        set("EXIT_RETRY", status::RETRY.to_string());
        env
    }
}

/// Sees a process to its end, with all that is said both ways.
pub(super) async fn converse(
    mut running: Running,
    channel: &pipe::Receiver,
    document: &[u8],
    bounds: Bounds,
    context: &Context,
) -> io::Result<Spoken> {
    let input = running.input.take();
    let mut listener = Listener::new(context);
    let ended = {
        let mut end = std::pin::pin!(running.finish(bounds, context));
        // Neither a program that does not read nor one that does not close its side keeps the other from ending.
        let mut talk = std::pin::pin!(async {
            tokio::join!(tell(input, document), listen(channel, &mut listener));
        });
        // Lines first: one of them may say what the output that follows must not show.
        tokio::select! {
            biased;
            () = &mut talk => end.await,
            ended = &mut end => ended,
        }
    }?;
    if timeout(PROCESS_DRAIN, listen(channel, &mut listener)).await.is_err() {
        context.log().note("something outside the payload's group holds descriptor 3 open; it is no longer read");
    }
    Ok(Spoken { ended, told: listener.finish() })
}

/// What a program is asked to do.
#[derive(Debug, Clone, Copy)]
enum Phase {
    Check,
    Run,
}

impl Phase {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Run => "run",
        }
    }
}

/// How a phase went.
pub(super) struct Spoken {
    pub(super) ended: Ended,
    pub(super) told: Told,
}

struct Ready {
    program: Arc<Inner>,
    payload: Value,
}

impl Handler for Program {
    /// Without its arguments, which may hold anything.
    fn describe(&self) -> String {
        let Settings { name, exec, .. } = &self.inner.settings;
        format!("{name}, the program {}", exec.first().map_or("", String::as_str))
    }

    fn schema(&self) -> Value {
        self.inner.schema.schema().clone()
    }

    fn prepare<'a>(
        &'a self,
        payload: &'a Value,
        context: &'a Context,
    ) -> Pending<'a, Result<Box<dyn Prepared>, NotPrepared>> {
        Box::pin(async move {
            let Inner { settings, schema } = &*self.inner;
            schema.check(payload)?;
            let env = environment::of_task(&settings.env, context);
            for argv in [Some(&settings.exec), settings.check.as_ref()].into_iter().flatten() {
                let program = argv.first().map_or("", String::as_str);
                // It was there when the worker started, and another host may have it still.
                locate(program, &env, context.workdir())
                    .map_err(|error| NotPrepared::Host(format!("handler {}: {error}", settings.name)))?;
            }
            if let Some(check) = &settings.check {
                self.inner.check(check, payload, context).await?;
            }
            let ready: Box<dyn Prepared> =
                Box::new(Ready { program: Arc::clone(&self.inner), payload: payload.clone() });
            Ok(ready)
        })
    }
}

impl Prepared for Ready {
    fn execute<'a>(self: Box<Self>, context: &'a Context) -> Pending<'a, Result<(), NotCompleted>> {
        Box::pin(async move {
            let settings = &self.program.settings;
            let bounds = Bounds { run_time: settings.max_run_time, grace: settings.grace };
            let spoken = self.program.run(&self.payload, bounds, context).await?;
            judge(&spoken.ended, settings)?;
            spoken.told.judge(&format!("handler {}", settings.name))
        })
    }
}

/// Decides what the end of a program means. Pure.
pub(super) fn judge(ended: &Ended, settings: &Settings) -> Result<(), NotCompleted> {
    let name = &settings.name;
    let sentence = |text: &str| format!("handler {name}: {text}");
    if !ended.survivors.is_empty() || ended.status == Status::Stuck {
        return Err(NotCompleted::Internal(sentence("processes are left that could not be killed")));
    }
    let said = ended.said();
    Err(match (ended.cause, ended.status) {
        (Cause::RunTime, _) => {
            let most = settings.max_run_time.unwrap_or_default().as_secs();
            NotCompleted::Failed(sentence(&format!("stopped after {most} s, the most this worker allows")))
        }
        (Cause::Canceled(order), _) => NotCompleted::Failed(sentence(ordered(order.cause))),
        (Cause::Exceeded(exceeded), _) => NotCompleted::Failed(sentence(&exceeded.to_string())),
        (Cause::Itself, _) if ended.over_its_disk() => NotCompleted::Failed(sentence(&said)),
        (Cause::Itself, Status::Code(0)) => return Ok(()),
        (Cause::Itself, Status::Code(status::RETRY)) => {
            NotCompleted::Intermittent(sentence(&format!("{said}, worth another run")))
        }
        (Cause::Itself, Status::Code(status::UNAVAILABLE)) => {
            NotCompleted::Unavailable(sentence(&format!("{said}, something it needs could not be had")))
        }
        (Cause::Itself, Status::Code(status::INTERNAL)) => {
            NotCompleted::Internal(sentence(&format!("{said}, it broke")))
        }
        (Cause::Itself, Status::Code(status::MALFORMED)) => {
            NotCompleted::Failed(sentence(&format!("{said}, which refuses a payload only while it is checked")))
        }
        (Cause::Itself, _) => NotCompleted::Failed(sentence(&said)),
    })
}

fn document(phase: Phase, payload: &Value, context: &Context) -> Value {
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
        "lease": {"secondsLeft": context.left(context.lease_ends()).as_secs_f64()},
        "workdir": context.workdir().to_string_lossy(),
    })
}

/// Writes the document. A program that does not read it, or not to its end, is free to do so.
async fn tell(input: Option<ChildStdin>, document: &[u8]) {
    if let Some(mut input) = input
        && let Err(error) = input.write_all(document).await
    {
        tracing::debug!(%error, "a program did not read its document");
    }
}

/// Reads lines until nobody can write any more.
///
/// Cancel safe: nothing is read that is not heeded at once.
async fn listen(channel: &pipe::Receiver, listener: &mut Listener<'_>) {
    // One may still be on its way, where the last look was given up.
    listener.pass_on().await;
    while channel.readable().await.is_ok() {
        if let Read::End = read(channel, listener) {
            return;
        }
        listener.pass_on().await;
    }
}

enum Read {
    More,
    End,
}

/// Apart from whatever waits, so that no wait keeps the buffer.
fn read(channel: &pipe::Receiver, listener: &mut Listener<'_>) -> Read {
    let mut buffer = [0; PROGRAM_READ_BYTES];
    match channel.try_read(&mut buffer) {
        Ok(0) => return Read::End,
        Ok(taken) => listener.push(buffer.get(..taken).unwrap_or_default()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(_) => return Read::End,
    }
    Read::More
}

fn settle(name: &str, key: &'static str, mut argv: Vec<String>) -> Result<Vec<String>, Misconfigured> {
    let program = argv.first_mut().filter(|program| !program.is_empty());
    let program = program.ok_or_else(|| Misconfigured::Empty { name: name.to_owned(), key })?;
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
