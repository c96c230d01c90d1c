//! `journeyman dev`: queue and worker in one process, on the loopback address. Each handler has its own task queue, `dev/NAME`.

mod demo;
pub(super) mod state_file;

use std::fs::Permissions;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use tempfile::TempDir;

use super::config_args::{self, ConfigArgs, DevFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::signals::ExitSignals;
use super::{output, worker, worker_setup};
use crate::config::schema::{Config, Source};
use crate::config::{LoadedConfig, ValueOrigin, handler_kinds};
use crate::console::app::Console;
use crate::console::app::targets::QueueTarget;
use journeyman_platform::host::containment::{close_inherited_fds_on_exec, harden_process};
use journeyman_platform::host::remove_tree::remove_tree;
use journeyman_platform::host::termination_notice::MetadataProvider;
use journeyman_platform::host::work_dir::{LOCK_FILE, WorkDir};
use journeyman_platform::http::{BearerToken, HttpListener};
use journeyman_platform::log;
use journeyman_platform::log::LogFormat;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::broker::Amqp;
use journeyman_platform::settings::key::is_variable;
use journeyman_platform::settings::values::{self, Listen, OptionalSpan, Queue as TaskQueue, Secret};
use journeyman_services::queue::{self, Auth, RegisteredClient};
use journeyman_worker::handler::config::{CommandHandler, Handler, ProgramHandler};
use journeyman_worker::handler::http::config::HttpHandler;
use journeyman_worker::source::taskcluster::Dialect;
use journeyman_worker::source::taskcluster::config::TaskclusterSource;
use journeyman_worker::task::COMMAND;
use state_file::{DevState, DevStateFile, state_dir};

/// `journeyman dev`
#[derive(Debug, Args)]
pub(in crate::cli) struct DevArgs {
    /// Run fourteen varied tasks, show them until they are resolved, and exit
    #[arg(long)]
    demo: bool,
    /// Keep the queue, the worker and its page after the demo, so that logs and results can be read
    #[arg(long, requires = "demo")]
    keep: bool,
    /// Let payloads see this variable of the environment
    #[arg(long = "env", value_name = "NAME", value_parser = parse_variable)]
    variables: Vec<String>,
    /// Serve this program as a handler, under the task queue `dev/NAME`
    #[arg(long = "handler", value_name = "NAME=PROGRAM", value_parser = parse_handler_flag, conflicts_with = "demo")]
    handlers: Vec<HandlerProgram>,
    /// Which dialect the worker speaks with the queue
    #[arg(long, value_enum, default_value_t)]
    dialect: Dialect,
    #[command(flatten)]
    settings: ConfigArgs<DevFlags>,
}

#[derive(Debug, Clone)]
struct HandlerProgram {
    name: String,
    exec: Vec<String>,
}

fn parse_variable(text: &str) -> Result<String, String> {
    is_variable(text)
        .then(|| text.to_owned())
        .ok_or_else(|| "expected the name of a variable, without a value".to_owned())
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

const CAPACITY: u16 = 4;
/// Short, because a drain waits for the poll in flight.
const LONG_POLL: Duration = Duration::from_secs(2);
const STATUS_POLL: Duration = Duration::from_millis(500);
const CLIENT_ID: &str = "dev";

pub(in crate::cli) async fn run(arguments: DevArgs, environment: &Environment) -> ExitResult {
    let loaded = arguments.settings.load(environment)?;
    config_args::print_warnings(&loaded);
    let LoadedConfig { mut config, origins, .. } = loaded;
    let set = |key: &str| origins.contains_key(key);
    // The file may be that of a real queue on this host.
    let set_outside_file = |key: &str| origins.get(key).is_some_and(|origin| !matches!(origin, ValueOrigin::File(_)));
    if !set("worker.capacity") {
        config.worker.capacity = CAPACITY;
    }
    if !set("worker.status_poll_interval") {
        config.worker.status_poll_interval = OptionalSpan(Some(STATUS_POLL));
    }
    if !set_outside_file("worker.live_log") {
        config.worker.live_log = Some(Listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))));
    }
    if !set_outside_file("http.listen") {
        config.http.listen = Some(Listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))));
    }
    if !set_outside_file("queue.auth") {
        config.queue.auth = Auth::Checked;
    }
    if !set_outside_file("queue.listen") {
        config.queue.listen = Listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    }
    // Before the temporary directory: a signal from here on must not prevent its removal.
    let signals = ExitSignals::listen()?.with_hangup()?;
    // Not for the demo, which must not conflict with a `dev` that keeps running, unless it is kept.
    let needs_state = !arguments.demo || arguments.keep;
    let state_file = needs_state.then(|| DevStateFile::lock(&state_dir(environment))).transpose()?;
    let temp_dir = create_temp_dir()?;
    if !set_outside_file("queue.db") {
        config.queue.db = values::File(temp_dir.path().join("queue.db"));
    }
    remove_leftovers(temp_dir.path());
    let Some(state_file) = state_file else {
        demo::configure(&mut config, temp_dir.path(), set)?;
        log::start(&config.log, environment);
        let dev = DevSession::start(&arguments, config, temp_dir.path(), environment).await?;
        let failed = dev.queue.failed();
        return Box::pin(run_unless_failed(failed, demo::run(dev, demo::End::Exit, signals, environment))).await;
    };
    if !set("log.format") {
        config.log.format = LogFormat::Human;
    }
    if arguments.demo {
        demo::configure(&mut config, temp_dir.path(), set)?;
    }
    log::start(&config.log, environment);
    for kind in handler_kinds::all() {
        if !config.handler.contains_key(&kind.name) {
            config.handler.insert(kind.name.clone(), Handler::Custom(kind.without_section()?));
        }
    }
    for HandlerProgram { name, exec } in &arguments.handlers {
        config.handler.insert(name.clone(), Handler::Program(ProgramHandler::new(exec.clone())));
    }
    for variable in arguments.variables.iter().filter(|name| environment.get(name).is_none()) {
        output::print_stderr(&format!("note: `--env {variable}` has no effect: the variable is not set"));
    }
    if !config.source.is_empty() {
        output::print_stderr("note: dev uses its own queue only and ignores the sources of the configuration");
    }
    let dev = DevSession::start(&arguments, config, temp_dir.path(), environment).await?;
    state_file.write(&dev.state())?;
    let failed = dev.queue.failed();
    if arguments.demo {
        return Box::pin(run_unless_failed(failed, demo::run(dev, demo::End::Keep, signals, environment))).await;
    }
    run_unless_failed(failed, Box::pin(serve(dev, signals, environment))).await
}

/// The directories of this command begin with it.
const TEMP_DIR_PREFIX: &str = "journeyman-dev-";
const TOKEN_FILE: &str = "token";
/// One that is younger may be that of a process that has not locked it yet.
const LEFTOVER_AGE_MIN: Duration = Duration::from_secs(60);

/// Removes the directories of processes that were killed; those of others are locked by their workers. What is not ours and private,
/// as only this command makes it, is not looked into: any user may write where it lies.
fn remove_leftovers(own: &Path) {
    let entries = std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten();
    for dir in entries.map(|entry| entry.path()).filter(|dir| dir != own) {
        let is_of_dev =
            dir.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(TEMP_DIR_PREFIX.as_bytes()));
        let is_private = dir.symlink_metadata().is_ok_and(|metadata| {
            let is_ours = metadata.uid() == rustix::process::geteuid().as_raw();
            metadata.is_dir() && is_ours && metadata.mode() & 0o777 == 0o700
        });
        let work = dir.join("work");
        if !is_of_dev || !is_private || !dir.join(TOKEN_FILE).is_file() || !work.join(LOCK_FILE).is_file() {
            continue;
        }
        let age = work.metadata().and_then(|metadata| metadata.modified()).ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age > LEFTOVER_AGE_MIN) && WorkDir::acquire(&work).is_ok() {
            let done = match remove_tree(&dir) {
                Ok(()) => "removed".to_owned(),
                Err(error) => format!("cannot be removed: {error}"),
            };
            output::print_stderr(&format!("{} of a `journeyman dev` that was killed: {done}", dir.display()));
        }
    }
}

/// The owner alone may read it, because it holds the token.
fn create_temp_dir() -> Result<TempDir, Failure> {
    tempfile::Builder::new()
        .prefix(TEMP_DIR_PREFIX)
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .map_err(|error| Failure::new(Exit::HostUnusable, format!("cannot create a temporary directory: {error}")))
}

/// A failure of the queue is the cause of one of the worker.
async fn run_unless_failed(failed: impl Future<Output = String>, work: impl Future<Output = ExitResult>) -> ExitResult {
    tokio::select! {
        biased;
        failed = failed => Err(Failure::new(Exit::Internal, failed)),
        ended = work => ended,
    }
}

async fn serve(dev: DevSession, signals: ExitSignals, environment: &Environment) -> ExitResult {
    harden_process();
    let worker = worker_setup::build_worker(&dev.config, environment)?.worker;
    close_inherited_fds_on_exec();
    let (address, page) = dev.listen().await?;
    let background = async {
        match dev.print_banner(address) {
            Ok(()) => std::future::pending().await,
            Err(error) => error.into(),
        }
    };
    let ended = Box::pin(worker::serve(worker, &dev.config, environment, signals, None, page, background)).await;
    dev.queue.stop().await;
    ended
}

struct DevSession {
    queue: queue::RunningQueue,
    config: Config,
    token: Secret,
    token_file: PathBuf,
}

impl DevSession {
    async fn start(
        arguments: &DevArgs,
        mut config: Config,
        temp_dir: &Path,
        environment: &Environment,
    ) -> Result<Self, Failure> {
        let token = Secret::new(&format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple()));
        let queue = start_queue(&mut config, &token, environment).await?;
        let token_file = temp_dir.join(TOKEN_FILE);
        write_file(&token_file, token.reveal(), 0o600)?;
        config.handler.entry(COMMAND.to_owned()).or_default();
        for handler in config.handler.values_mut() {
            match handler {
                Handler::Command(CommandHandler { env_allow, .. })
                | Handler::Program(ProgramHandler { env_allow, .. })
                | Handler::Http(HttpHandler { env_allow, .. }) => env_allow.extend_from_slice(&arguments.variables),
                Handler::Kubernetes(_) | Handler::Custom(_) => {}
            }
        }
        config.host.metadata_service = MetadataProvider::Off;
        config.amqp = Amqp::default();
        config.source.clear();
        config.worker.work_dir = values::File(temp_dir.join("work"));
        for name in config.handler.keys() {
            let source = source_config(name, arguments.dialect, queue.root_url(), &token_file)?;
            config.source.insert(name.clone(), source);
        }
        Ok(Self { queue, config, token, token_file })
    }

    fn state(&self) -> DevState {
        let sources = self.config.source.values().filter_map(Source::as_taskcluster);
        let mut task_queues: Vec<String> = sources.map(|source| source.task_queue.to_string()).collect();
        task_queues.sort_by_key(|queue| *queue != format!("dev/{COMMAND}"));
        DevState {
            root_url: self.queue.root_url().to_owned(),
            client_id: CLIENT_ID.to_owned(),
            access_token: self.token.reveal().to_owned(),
            task_queues,
            pid: std::process::id(),
            socket: Some(worker::control_socket(&self.config)),
        }
    }

    /// Listens for readers of the pages of the queue and of the worker.
    async fn listen(&self) -> Result<(Option<SocketAddr>, Option<(HttpListener, Console)>), Failure> {
        let Some(listener) = worker::listen_http(&self.config, worker::PAGE).await? else { return Ok((None, None)) };
        let queue = QueueTarget { name: "dev".to_owned(), api: self.state().client()? };
        let token = Some(BearerToken::new(self.token.reveal()));
        let console = Console { queues: vec![queue], token, ..Console::default() };
        Ok((listener.address().ok(), Some((listener, console))))
    }

    fn print_banner(&self, page: Option<SocketAddr>) -> std::io::Result<()> {
        let state = self.state();
        let page = page.map_or_else(String::new, |address| {
            format!("page    http://{address}/\ntoken   {}, for its buttons\n", self.token_file.display())
        });
        let to_program =
            |queue: &String| format!("  journeyman task create --wait --queue {queue} --payload '{{…}}'\n");
        output::print(&format!(
            "queue   {}\n{page}worker  {} at once, for {}\n\nIn another terminal:\n  \
             journeyman task create --wait -- /bin/echo hello\n{}  journeyman task log TASK\n\n\
             Ctrl-C finishes running tasks and exits; twice releases them.\n\n",
            state.root_url,
            self.config.worker.capacity,
            state.task_queues.join(", "),
            state.task_queues.iter().skip(1).map(to_program).collect::<String>(),
        ))
    }
}

async fn start_queue(
    config: &mut Config,
    token: &Secret,
    environment: &Environment,
) -> Result<queue::RunningQueue, Failure> {
    // Its only client is the worker, which also serves `journeyman task`.
    config.queue.clients.clear();
    let client = RegisteredClient {
        client_id: CLIENT_ID.to_owned(),
        access_token: token.reveal().to_owned().into(),
        scopes: vec!["*".to_owned()],
    };
    let settings = queue::Config {
        clients: vec![client],
        long_poll: LONG_POLL,
        ..super::queue::queue_config(&config.queue, environment)?
    };
    queue::start(settings).await.map_err(|error| Failure::from_error(Exit::HostUnusable, &error))
}

/// In the temporary directory, which is private, so that the mode may be set later.
fn write_file(path: &Path, text: &str, mode: u32) -> Result<(), Failure> {
    std::fs::write(path, text)
        .and_then(|()| std::fs::set_permissions(path, Permissions::from_mode(mode)))
        .map_err(|error| Failure::new(Exit::HostUnusable, format!("cannot write {}: {error}", path.display())))
}

fn source_config(handler: &str, dialect: Dialect, root_url: &str, token_file: &Path) -> Result<Source, Failure> {
    let root_url: values::Url = root_url.parse().map_err(|what| Failure::new(Exit::Internal, what))?;
    let task_queue: TaskQueue = format!("dev/{handler}")
        .parse()
        .map_err(|what| Failure::new(Exit::Config, format!("`dev` cannot serve [handler.{handler}]: {what}")))?;
    Ok(Source::Taskcluster(TaskclusterSource {
        dialect,
        client_id: Some(CLIENT_ID.to_owned()),
        access_token_file: Some(values::SecretFile::File(token_file.to_owned())),
        ..TaskclusterSource::new(root_url, task_queue, handler)
    }))
}
