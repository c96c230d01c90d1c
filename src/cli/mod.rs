//! The command line: from arguments to an exit code. One file a command; what a command does lives elsewhere.

mod assemble;
mod bridge;
mod call;
mod config;
mod controller;
mod dev;
mod doctor;
pub mod exit;
mod guide;
mod handler;
mod inspect;
mod man;
pub mod output;
pub mod place;
mod queue;
mod reload;
mod requests;
mod run;
pub mod settings;
mod signals;
mod spot;
mod steer;
mod supervised;
pub mod task;
mod worker;

use std::ffi::OsString;
use std::future::Future;

use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;

use crate::config::Environment;
use crate::limits::ABORT_WAIT;
use crate::observe::log;
use exit::{Ended, Exit, Failure};

/// The whole command line.
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
    command: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run queue and worker in one process, to try things out
    Dev(Box<dev::DevArgs>),
    /// Claim and run tasks until told to go
    Worker(worker::WorkerArgs),
    /// Have the work of one queue done by another: requests as tasks, tasks as requests
    Bridge(worker::WorkerArgs),
    /// Start, scale and stop groups of AMQP workers by demand
    Controller(controller::ControllerArgs),
    /// Claim and run tasks under Taskcluster's worker-runner
    Run(run::RunArgs),
    /// Show what a worker does, holds, and waits for
    Status(steer::StatusArgs),
    /// Watch a worker on a terminal
    Top(steer::TopArgs),
    /// Let a worker claim nothing more; what runs goes on, and so do tasks that a poll under way still brings
    Pause(steer::PauseArgs),
    /// Let a paused worker claim again
    Resume(steer::PlainArgs),
    /// Let a worker finish what runs, and exit
    Drain(steer::DrainArgs),
    /// Let a worker hand back what runs, and exit
    Stop(steer::StopArgs),
    /// Let a worker read its configuration again
    Reload(steer::PlainArgs),
    /// List, show, end what a worker holds, and read its logs
    #[command(subcommand)]
    Tasks(steer::TasksCommand),
    /// Serve the embedded queue
    Queue(queue::QueueArgs),
    /// Create, watch, read, cancel and list tasks
    Task(task::TaskArgs),
    /// Ask a worker group over AMQP
    Call(call::CallArgs),
    /// Show and test handlers
    #[command(subcommand)]
    Handler(handler::HandlerCommand),
    /// Write, check and show the configuration
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Say what would keep a worker from working on this host
    Doctor(doctor::DoctorArgs),
    /// Print a page of the documentation
    Guide(guide::GuideArgs),
    /// Print a script that completes this command line in a shell
    Completions {
        /// Which shell
        shell: Shell,
    },
    /// Write the manual pages into a folder
    Man(man::ManArgs),
}

/// Runs the command line.
#[must_use]
pub fn run(arguments: Vec<OsString>, environment: &Environment) -> Exit {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let ended = dispatch(cli.command, environment);
    log::finish();
    match ended {
        Ok(exit) => exit,
        Err(failure) => {
            output::failure(&failure.message);
            failure.exit
        }
    }
}

/// Shows what clap has to say: help and version are answers, the rest is a usage error.
fn usage(error: &clap::Error) -> Exit {
    drop(error.print());
    if error.use_stderr() { Exit::Usage } else { Exit::Done }
}

fn dispatch(verb: Verb, environment: &Environment) -> Ended {
    match verb {
        Verb::Dev(arguments) => serve(server_runtime()?, dev::run(*arguments, environment)),
        Verb::Queue(arguments) => serve(server_runtime()?, queue::run(arguments, environment)),
        Verb::Worker(arguments) => serve(worker_runtime()?, worker::run(arguments, environment)),
        Verb::Bridge(arguments) => serve(worker_runtime()?, bridge::run(arguments, environment)),
        Verb::Controller(arguments) => serve(server_runtime()?, controller::run(arguments, environment)),
        Verb::Run(arguments) => serve(worker_runtime()?, run::run(arguments, environment)),
        Verb::Status(arguments) => client_runtime()?.block_on(steer::status(arguments, environment)),
        Verb::Top(arguments) => client_runtime()?.block_on(steer::top(arguments, environment)),
        Verb::Pause(arguments) => client_runtime()?.block_on(steer::pause(arguments, environment)),
        Verb::Resume(arguments) => client_runtime()?.block_on(steer::resume(arguments, environment)),
        Verb::Drain(arguments) => client_runtime()?.block_on(steer::drain(arguments, environment)),
        Verb::Stop(arguments) => client_runtime()?.block_on(steer::stop(arguments, environment)),
        Verb::Reload(arguments) => client_runtime()?.block_on(steer::reload(arguments, environment)),
        Verb::Tasks(command) => client_runtime()?.block_on(steer::tasks(command, environment)),
        Verb::Call(arguments) => client_runtime()?.block_on(call::run(arguments, environment)),
        Verb::Task(arguments) => client_runtime()?.block_on(task::run(arguments, environment)),
        Verb::Handler(command) => client_runtime()?.block_on(handler::run(command, environment)),
        Verb::Config(command) => config::run(command, environment),
        Verb::Doctor(arguments) => doctor(arguments, environment),
        Verb::Guide(arguments) => guide::run(&arguments),
        Verb::Man(arguments) => man::run(&arguments),
        Verb::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "journeyman", &mut script);
            output::print_raw(&script)?;
            Ok(Exit::Done)
        }
    }
}

/// Runs `doctor`, and leaves behind what hangs in a look-up or a file system.
fn doctor(arguments: doctor::DoctorArgs, environment: &Environment) -> Ended {
    let runtime = client_runtime()?;
    let ended = runtime.block_on(doctor::run(arguments, environment));
    runtime.shutdown_background();
    ended
}

/// Runs what runs for long, and waits no longer for its blocking calls (a name look-up, a hung disk) than [`ABORT_WAIT`].
fn serve(runtime: tokio::runtime::Runtime, command: impl Future<Output = Ended>) -> Ended {
    let ended = runtime.block_on(command);
    runtime.shutdown_timeout(ABORT_WAIT);
    ended
}

/// A runtime for a command that makes a few calls.
fn client_runtime() -> Result<tokio::runtime::Runtime, Failure> {
    built(tokio::runtime::Builder::new_current_thread())
}

/// A runtime for a worker: one thread keeps its leases, and what its handlers do is on threads of their own.
fn worker_runtime() -> Result<tokio::runtime::Runtime, Failure> {
    built(tokio::runtime::Builder::new_current_thread())
}

/// A runtime for what serves others.
fn server_runtime() -> Result<tokio::runtime::Runtime, Failure> {
    built(tokio::runtime::Builder::new_multi_thread())
}

fn built(mut runtime: tokio::runtime::Builder) -> Result<tokio::runtime::Runtime, Failure> {
    runtime
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Unfit, format!("no runtime can be started: {error}")))
}
