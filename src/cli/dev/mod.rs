//! `journeyman dev`: queue and worker in one process, on the loopback address, for trying things out.
//!
//! Every handler is served under a task queue of its own, `dev/NAME`. What it keeps lies in a folder that goes with it,
//! unless a file is named.

mod demo;
mod groups;
mod live_display;
mod play;
mod screen;
mod tasks;
mod tempdir;

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use self::tempdir::TempDir;
use super::config_args::{self, ConfigArgs, DevFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::signals::ExitSignals;
use super::target::{DevState, DevStateFile, state_dir};
use super::{output, worker, worker_setup};
use crate::config::schema::{COMMAND, Config, Handler, HandlerKind, LogFormat, Source, SourceKind};
use crate::config::values::{self, Listen, Queue as TaskQueue, Secret, Span};
use crate::config::{Environment, LoadedConfig};
use crate::control::worker_api::ReloadFuture;
use crate::host::containment::{close_inherited_fds_on_exec, harden_process};
use crate::limits::CLAIM_TIMEOUT_MIN;
use crate::observe::log;
use crate::queue::{self, Db, RegisteredClient};
use crate::source::taskcluster::{ArtifactStorage, Dialect};
use crate::worker::Control;

/// `journeyman dev`
#[derive(Debug, Args)]
pub(in crate::cli) struct DevArgs {
    /// Create fourteen varied tasks, show them until they are resolved, and end
    #[arg(long)]
    demo: bool,
    /// Call worker groups by way of this broker, show how they come and go, and end: `amqp://guest:guest@127.0.0.1:5672/`
    ///
    /// A controller starts workers on this machine, in a pool of its own; nothing of it stays on the broker. The address is seen by
    /// who lists the processes of this machine: it is for a broker to try things on.
    #[arg(long, value_name = "URI", conflicts_with_all = ["demo", "handlers", "dialect", "listen", "db", "claim_timeout"])]
    rabbitmq: Option<String>,
    /// Serve this program as a handler, under the task queue `dev/NAME`
    #[arg(long = "handler", value_name = "NAME=PROGRAM", value_parser = parse_handler_flag, conflicts_with = "demo")]
    handlers: Vec<HandlerProgram>,
    /// Which dialect the worker speaks with the queue
    #[arg(long, value_enum, default_value_t)]
    dialect: Dialect,
    /// Where to listen; port 0 lets the system choose
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: Listen,
    /// Keep the queue in this file [default: a folder that goes with this process]
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    db: Option<PathBuf>,
    /// How long a claim lasts [default: 20m]
    #[arg(long, value_name = "TIME", value_parser = parse_claim_timeout, conflicts_with = "demo")]
    claim_timeout: Option<Span>,
    #[command(flatten)]
    settings: ConfigArgs<DevFlags>,
}

/// A program that becomes a handler.
#[derive(Debug, Clone)]
struct HandlerProgram {
    name: String,
    exec: Vec<String>,
}

fn parse_handler_flag(text: &str) -> Result<HandlerProgram, String> {
    let (name, path) = text.split_once('=').ok_or("expected NAME=PROGRAM, such as greet=./greet.py")?;
    format!("dev/{name}").parse::<TaskQueue>().map_err(|what| format!("the name has to be {what}"))?;
    if name == COMMAND {
        return Err("`command` is built in and runs what tasks bring; give the program another name".to_owned());
    }
    if path.is_empty() {
        return Err("the program is missing after the `=`".to_owned());
    }
    Ok(HandlerProgram { name: name.to_owned(), exec: vec![path.to_owned()] })
}

fn parse_claim_timeout(text: &str) -> Result<Span, String> {
    Span::read_from(text, CLAIM_TIMEOUT_MIN).map_err(|expected| format!("expected {expected}"))
}

/// How many tasks run at once where nobody says.
const CAPACITY: u16 = 4;
/// How long a claim lasts where nobody says.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(20 * 60);
/// How long the queue holds a request for work; a drain waits for the one under way.
const LONG_POLL: Duration = Duration::from_secs(2);
/// How often running tasks are asked after where nobody says.
const STATUS_POLL: Duration = Duration::from_millis(500);
/// Who calls.
const CLIENT_ID: &str = "dev";

/// Runs it.
///
/// # Errors
///
/// A configuration that cannot be used; a file, folder or address that cannot be had.
pub(in crate::cli) async fn run(arguments: DevArgs, environment: &Environment) -> ExitResult {
    let loaded = arguments.settings.load(environment)?;
    config_args::print_warnings(&loaded);
    let LoadedConfig { mut config, origins, .. } = loaded;
    let set = |key: &str| origins.contains_key(key);
    if !set("worker.capacity") {
        config.worker.capacity = CAPACITY;
    }
    if !set("worker.status_poll_interval") {
        config.worker.status_poll_interval = Span(STATUS_POLL);
    }
    // From here on there is something to clean up, which a signal must not prevent.
    let signals = ExitSignals::listen()?;
    if let Some(uri) = &arguments.rabbitmq {
        let room = TempDir::create()?;
        if !set("log.level") {
            // The table is drawn over what a log would write between.
            config.log.level = demo::LOG_LEVEL.parse().map_err(|what: String| Failure::new(Exit::Internal, what))?;
        }
        log::start(&config.log, log::color_from_environment(environment));
        return Box::pin(groups::run(uri, &room, signals, environment)).await;
    }
    if arguments.demo {
        let room = TempDir::create()?;
        demo::configure(&mut config, room.path(), set)?;
        log::start(&config.log, log::color_from_environment(environment));
        let dev = DevSession::start(&arguments, config, room.path()).await?;
        let failed = dev.queue.failed();
        return Box::pin(run_unless_failed(failed, demo::run(dev, room.path(), signals, environment))).await;
    }
    // The demo is over before anybody could look for its note, and must not be in the way of a `dev` that stays.
    let place = DevStateFile::lock(&state_dir(environment))?;
    let room = TempDir::create()?;
    if !set("log.format") {
        config.log.format = LogFormat::Human;
    }
    log::start(&config.log, log::color_from_environment(environment));
    add_handlers(&arguments.handlers, &mut config)?;
    if !config.source.is_empty() {
        output::print_stderr("note: dev works for its own queue only; the sources of the configuration are not used");
    }
    let dev = DevSession::start(&arguments, config, room.path()).await?;
    place.write(&dev.state())?;
    let failed = dev.queue.failed();
    run_unless_failed(failed, serve(dev, signals, environment)).await
}

/// Works as long as the queue does.
async fn run_unless_failed<E: std::error::Error>(
    failed: impl Future<Output = E>,
    work: impl Future<Output = ExitResult>,
) -> ExitResult {
    let mut failed = pin!(failed);
    tokio::select! {
        ended = work => match tokio::time::timeout(Duration::ZERO, &mut failed).await {
            // What else went wrong follows from the queue's end.
            Ok(failed) if ended.is_err() => Err(Failure::from_error(Exit::Internal, &failed)),
            Ok(_) | Err(_) => ended,
        },
        failed = &mut failed => Err(Failure::from_error(Exit::Internal, &failed)),
    }
}

/// Adds the programs of the command line to the handlers of the configuration.
fn add_handlers(programs: &[HandlerProgram], config: &mut Config) -> Result<(), Failure> {
    for (at, program) in programs.iter().enumerate() {
        let name = &program.name;
        if programs[..at].iter().any(|earlier| earlier.name == *name) {
            return Err(Failure::new(
                Exit::Usage,
                format!("--handler names `{name}` twice; give each program its own"),
            ));
        }
        let handler = Handler { kind: HandlerKind::Program, exec: program.exec.clone(), ..Handler::default() };
        if config.handler.insert(name.clone(), handler).is_some() {
            output::print_stderr(&format!(
                "note: --handler {name}=… stands in for [handler.{name}] of the configuration"
            ));
        }
    }
    Ok(())
}

async fn serve(dev: DevSession, signals: ExitSignals, environment: &Environment) -> ExitResult {
    harden_process();
    let worker = worker_setup::build_worker(&dev.config, environment)?;
    close_inherited_fds_on_exec();
    let control = worker.control();
    let reload =
        || -> ReloadFuture { Box::pin(async { Err("dev has nothing to read again; start it anew".to_owned()) }) };
    let answers = worker::serve_control_socket(&dev.config, control.clone(), Arc::new(reload))?;
    let watched = worker::serve_http(&dev.config, &control).await?;
    dev.print_banner()?;
    let ended = tokio::select! {
        ended = worker::run_until_exit(worker, signals.apply_to(control.clone())) => ended,
        broken = answers => Err(broken),
        () = watched => Err(Failure::new(Exit::Internal, "the status page is no longer served")),
        () = dev.wake_on_pending(control) => Err(Failure::new(Exit::Internal, "the queue has ended by itself")),
    };
    dev.queue.stop().await;
    ended
}

/// A queue that runs, and what a worker for it is made of.
struct DevSession {
    queue: queue::RunningQueue,
    config: Config,
    token: Secret,
    dialect: Dialect,
}

impl DevSession {
    async fn start(arguments: &DevArgs, mut config: Config, room: &Path) -> Result<Self, Failure> {
        let token = Secret::new(&format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple()));
        let queue = start_queue(arguments, &token, room).await?;
        let dialect = arguments.dialect;
        config.handler.entry(COMMAND.to_owned()).or_insert_with(|| Handler {
            default_run_time: Some(Span(Duration::from_secs(3600))),
            ..Handler::default()
        });
        config.worker.work_dir = values::File(room.join(tempdir::WORK_DIR));
        config.source = config
            .handler
            .keys()
            .map(|name| source_config(name, dialect, queue.root_url(), &token).map(|source| (name.clone(), source)))
            .collect::<Result<_, _>>()?;
        Ok(Self { queue, config, token, dialect })
    }

    fn state(&self) -> DevState {
        let queues = self.config.source.values().filter_map(Source::tasks).map(|tasks| tasks.task_queue.to_string());
        let (first, rest): (Vec<_>, Vec<_>) = queues.partition(|queue| *queue == format!("dev/{COMMAND}"));
        DevState {
            root_url: self.queue.root_url().to_owned(),
            client_id: CLIENT_ID.to_owned(),
            access_token: self.token.reveal().to_owned(),
            task_queues: first.into_iter().chain(rest).collect(),
            pid: std::process::id(),
            socket: Some(worker::control_socket(&self.config)),
        }
    }

    fn print_banner(&self) -> std::io::Result<()> {
        let note = self.state();
        let dialect = match self.dialect {
            Dialect::Azure => "azure",
            Dialect::ClaimWork => "claim-work",
        };
        let to_program =
            |queue: &String| format!("  journeyman task create --wait --queue {queue} --payload '{{…}}'\n");
        output::print(&format!(
            "queue   {} ({dialect})\nworker  {} at once, for {}\n\nIn another terminal:\n  \
             journeyman task create --wait -- /bin/echo hello\n{}  journeyman task log TASK\n\n\
             Ctrl-C finishes what runs and ends; twice hands it back.\n\n",
            note.root_url,
            self.config.worker.capacity,
            note.task_queues.join(", "),
            note.task_queues.iter().skip(1).map(to_program).collect::<String>(),
        ))
    }

    /// Wakes the worker whenever something has become pending. Resolves when the queue is gone.
    async fn wake_on_pending(&self, control: Control) {
        let mut pending = self.queue.pending();
        while pending.changed().await.is_ok() {
            control.wake();
        }
    }
}

async fn start_queue(arguments: &DevArgs, token: &Secret, room: &Path) -> Result<queue::RunningQueue, Failure> {
    let claim_timeout = match (&arguments.claim_timeout, arguments.demo) {
        (Some(span), _) => span.0,
        (None, true) => demo::CLAIM_TIMEOUT,
        (None, false) => CLAIM_TIMEOUT,
    };
    let db = arguments.db.clone().unwrap_or_else(|| room.join("queue.db"));
    let artifacts = match &arguments.db {
        Some(db) => PathBuf::from(format!("{}-artifacts", db.display())),
        None => room.join("artifacts"),
    };
    let client = RegisteredClient {
        client_id: CLIENT_ID.to_owned(),
        access_token: token.reveal().to_owned().into(),
        scopes: vec!["*".to_owned()],
    };
    let settings = queue::Config {
        listen: arguments.listen.0,
        clients: vec![client],
        claim_timeout,
        long_poll: LONG_POLL,
        ..queue::Config::new(Db::File(db), artifacts)
    };
    queue::start(settings).await.map_err(|error| Failure::from_error(Exit::HostUnusable, &error))
}

fn source_config(handler: &str, dialect: Dialect, root_url: &str, token: &Secret) -> Result<Source, Failure> {
    let root_url: values::Url = root_url.parse().map_err(|what| Failure::new(Exit::Internal, what))?;
    let task_queue: TaskQueue = format!("dev/{handler}")
        .parse()
        .map_err(|what| Failure::new(Exit::Config, format!("[handler.{handler}] cannot be served by dev: {what}")))?;
    Ok(Source {
        kind: SourceKind::Taskcluster,
        dialect,
        root_url: Some(root_url),
        task_queue: Some(task_queue),
        client_id: Some(CLIENT_ID.to_owned()),
        access_token: Some(token.clone()),
        artifact_storage: ArtifactStorage::S3,
        ..Source::requests(handler)
    })
}
