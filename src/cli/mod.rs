//! The command line: parses arguments, dispatches to one module per command, and returns an exit code.

mod amqp_setup;
mod bridge;
mod bundle;
mod call;
mod checks;
mod config;
pub mod config_args;
mod console;
mod control;
mod controller;
mod controller_socket;
mod dev;
mod doctor;
pub mod exit;
mod file_checks;
mod guide;
mod handler;
mod man;
mod new;
mod notifier;
mod notify_setup;
pub mod output;
mod queue;
pub mod queue_client;
mod reloader;
mod screwdriver;
mod screwdriver_setup;
mod setup;
mod signals;
mod source_args;
mod systemd_notify;
pub mod task;
mod taskcluster_setup;
mod termination_watch;
mod worker;
mod worker_identity;
mod worker_pool;
mod worker_runner;
mod worker_setup;
mod zk;
mod zookeeper_setup;

use std::ffi::OsString;
use std::future::Future;
use std::path::PathBuf;

use clap::error::ContextKind;
use clap::{CommandFactory as _, Parser, Subcommand, ValueHint};
use clap_complete::Shell;

use config_args::{ConfigArgs, QueueFlags, WorkerFlags};
use exit::{Exit, ExitResult, Failure};
use journeyman_domain::limits::ABORT_TIMEOUT;
use journeyman_platform::settings::{Environment, Setting};
use journeyman_platform::{log, tasks};
use journeyman_worker::engine::Worker;

#[derive(Debug, Parser)]
#[command(
    name = "journeyman",
    version,
    about = "A worker for the queue you already run",
    long_about = "A worker for the queue you already run: claims tasks, runs them with your handler, reclaims in time, \
                  and reports exactly one outcome.",
    after_help = "Try it: journeyman dev --demo",
    arg_required_else_help = true,
    propagate_version = false,
    max_term_width = 110
)]
pub struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Run a queue and a worker in one process, to try things out
    Dev(Box<dev::DevArgs>),
    /// Claim and run tasks until stopped
    Worker(ConfigArgs<WorkerFlags>),
    /// Forward requests as tasks, or tasks as requests
    Bridge(ConfigArgs<WorkerFlags>),
    /// Start, scale and stop groups of AMQP workers by demand
    Controller(controller::ControllerArgs),
    /// Claim and run tasks under Taskcluster's worker-runner
    Run(worker_runner::WorkerRunnerArgs),
    /// Show a worker's state, claims and sources
    Status(control::StatusArgs),
    /// Show a worker's state, or a fleet, live in a terminal
    Top(control::TopArgs),
    #[command(flatten)]
    Control(control::ControlCommand),
    /// List, show, release and cancel a worker's claims, and read their logs
    #[command(subcommand)]
    Claims(control::ClaimsCommand),
    /// Serve the embedded queue
    Queue(ConfigArgs<QueueFlags>),
    /// Serve pages over queues, workers, controllers and notifiers
    Console(Box<console::ConsoleArgs>),
    /// Deliver events as webhooks, in order
    Notifier(notifier::NotifierArgs),
    /// Create, watch, read, cancel and list tasks
    Task(task::TaskArgs),
    /// Call a worker group over AMQP
    Call(call::CallArgs),
    /// Submit requests to a queue in a ZooKeeper
    #[command(subcommand)]
    Zk(zk::ZkCommand),
    /// Look at the queues of a Screwdriver
    #[command(subcommand)]
    Screwdriver(screwdriver::ScrewdriverCommand),
    /// Show and test handlers
    #[command(subcommand)]
    Handler(handler::HandlerCommand),
    /// Make a folder with a handler to start from
    New(new::NewArgs),
    /// Write, check and show the configuration
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Prepare this host for a worker
    #[command(subcommand)]
    Setup(setup::SetupCommand),
    /// Check that this host and its services are ready for a worker
    Doctor(doctor::DoctorArgs),
    /// Write what a bug report needs into a file, without secrets
    Bundle(bundle::BundleArgs),
    /// Print a page of the documentation
    Guide {
        /// Page [default: list the pages]
        #[arg(value_name = "PAGE", value_parser = guide::page_names())]
        page: Option<String>,
    },
    /// Print a shell completion script
    Completions {
        /// Shell
        shell: Shell,
    },
    /// Write the manual pages to a directory
    Man {
        /// Target directory, such as /usr/local/share/man/man1; created if missing, existing pages are replaced
        #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
        folder: PathBuf,
    },
}

/// Runs the command line.
pub fn run(arguments: Vec<OsString>, environment: &Environment) -> Exit {
    let cli = match parse(arguments) {
        Ok(cli) => cli,
        // Help, the version, or what is wrong.
        Err(error) => {
            drop(error.print());
            return if error.use_stderr() { Exit::Usage } else { Exit::Success };
        }
    };
    exit_after(dispatch(cli.command, environment))
}

/// Runs a worker with these settings, as `journeyman worker` does.
pub(crate) fn run_worker(settings: Vec<Setting>, environment: &Environment) -> Exit {
    exit_after(run_local(worker::run(ConfigArgs::with_settings(settings), environment)))
}

/// Builds the worker that [`run_worker`] runs, or returns what is wrong with its configuration.
pub(crate) fn build_worker(settings: Vec<Setting>, environment: &Environment) -> Result<Worker, String> {
    let build = || {
        let loaded = ConfigArgs::<WorkerFlags>::with_settings(settings).load(environment)?;
        Ok(worker_setup::build_worker(&loaded.config, environment)?.worker)
    };
    build().map_err(|failure: Failure| failure.message)
}

fn exit_after(result: ExitResult) -> Exit {
    log::flush_and_stop();
    match result {
        Ok(exit) => exit,
        Err(failure) => {
            output::print_failure(&failure.message);
            failure.exit
        }
    }
}

/// `--json` means `-o json` where it is not an argument of its own.
fn parse(mut arguments: Vec<OsString>) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(&arguments).or_else(|error| {
        let unknown = error.get(ContextKind::InvalidArg).map(ToString::to_string);
        match arguments.iter_mut().find(|argument| *argument == "--json") {
            Some(json) if unknown.as_deref() == Some("--json") => *json = "--output=json".into(),
            Some(_) | None => return Err(error),
        }
        Cli::try_parse_from(arguments)
    })
}

fn dispatch(command: CliCommand, environment: &Environment) -> ExitResult {
    match command {
        CliCommand::Dev(arguments) => run_server(dev::run(*arguments, environment)),
        CliCommand::Queue(settings) => run_server(queue::run(settings, environment)),
        CliCommand::Console(arguments) => run_server(console::run(*arguments, environment)),
        CliCommand::Notifier(arguments) => run_server(notifier::run(arguments, environment)),
        CliCommand::Worker(settings) => run_local(worker::run(settings, environment)),
        CliCommand::Bridge(settings) => run_local(bridge::run(settings, environment)),
        CliCommand::Controller(arguments) => run_server(controller::run(arguments, environment)),
        CliCommand::Run(arguments) => run_local(worker_runner::run(arguments, environment)),
        CliCommand::Status(arguments) => run_local(control::status(arguments, environment)),
        CliCommand::Top(target) => run_local(control::top(target, environment)),
        CliCommand::Control(command) => run_local(control::run(command, environment)),
        CliCommand::Claims(command) => run_local(control::claims(command, environment)),
        CliCommand::Call(arguments) => run_local(call::run(arguments, environment)),
        CliCommand::Zk(command) => run_local(zk::run(command, environment)),
        CliCommand::Screwdriver(command) => run_local(screwdriver::run(command, environment)),
        CliCommand::Task(arguments) => run_local(task::run(arguments, environment)),
        CliCommand::Handler(command) => run_local(handler::run(command, environment)),
        CliCommand::New(arguments) => new::run(&arguments),
        CliCommand::Config(command) => config::run(command, environment),
        CliCommand::Setup(command) => run_local(setup::run(command)),
        CliCommand::Doctor(arguments) => run_local(doctor::run(arguments, environment)),
        CliCommand::Bundle(arguments) => run_local(bundle::run(arguments, environment)),
        CliCommand::Guide { page } => guide::run(page.as_deref()),
        CliCommand::Man { folder } => man::run(&folder),
        CliCommand::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "journeyman", &mut script);
            output::print_raw(&script)?;
            Ok(Exit::Success)
        }
    }
}

/// Handlers of a worker run on their own threads.
fn run_local(command: impl Future<Output = ExitResult>) -> ExitResult {
    run_on(tokio::runtime::Builder::new_current_thread(), command)
}

fn run_server(command: impl Future<Output = ExitResult>) -> ExitResult {
    run_on(tokio::runtime::Builder::new_multi_thread(), command)
}

/// Waits up to [`ABORT_TIMEOUT`] for blocking calls (a name lookup, a hung disk) at the end of the command.
fn run_on(mut runtime: tokio::runtime::Builder, command: impl Future<Output = ExitResult>) -> ExitResult {
    let failed = |error| Failure::new(Exit::HostUnusable, format!("cannot start the async runtime: {error}"));
    let runtime = tasks::build_runtime(&mut runtime).map_err(failed)?;
    let result = runtime.block_on(async {
        tokio::select! {
            biased;
            result = command => result,
            // A worker ends its payloads meanwhile.
            () = async { (tasks::failure().await, tokio::time::sleep(ABORT_TIMEOUT).await).1 } => Ok(Exit::Internal),
        }
    });
    runtime.shutdown_timeout(ABORT_TIMEOUT);
    tasks::failed().map_or(result, |message| Err(Failure::new(Exit::Internal, message)))
}
