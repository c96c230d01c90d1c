//! What those who run a worker ask it and tell it: `status`, `pause`, `resume`, `drain`, `stop`, `reload`, `tasks`.

mod claim_details;
pub(super) mod status;
mod top;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use super::config_args::{ConfigArgs, NoFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::output::{self, Format};
use super::target::{DevState, state_dir};
use super::worker::control_socket;
use crate::config::Environment;
use crate::config::environment::SOCKET_VARIABLE;
use crate::config::values::Span;
use crate::control::client::{ControlClient, Error, Follow};
use crate::control::{WorkerCommand, WorkerCommandRequest, WorkerStatusReply};
use crate::limits::DRAIN_POLL_INTERVAL;
use crate::worker::Note;
pub(super) use top::{TopArgs, top};

/// Which worker.
#[derive(Debug, Args)]
pub(super) struct TargetArgs {
    /// The worker's control socket [env: JOURNEYMAN_SOCKET] [default: that of the configuration, or of `journeyman dev`]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    socket: Option<PathBuf>,
    /// Configuration file of the worker
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

/// Who says so, and why.
#[derive(Debug, Args)]
pub(super) struct NoteArgs {
    /// Why, for whoever looks at the worker or its log
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    note: String,
}

/// `journeyman status`
#[derive(Debug, Args)]
pub(super) struct WorkerStatusArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Output format
    #[arg(long, short, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// Show it again and again, every so often
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "2s")]
    watch: Option<Span>,
}

/// `journeyman pause`
#[derive(Debug, Args)]
pub(super) struct PauseArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Resume by itself after so long [default: until `journeyman resume`]
    #[arg(long = "for", value_name = "TIME")]
    span: Option<Span>,
    #[command(flatten)]
    note: NoteArgs,
}

/// `journeyman drain`
#[derive(Debug, Args)]
pub(super) struct DrainArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Hand back what still runs after so long [default: `worker.drain_deadline`]
    #[arg(long, value_name = "TIME")]
    deadline: Option<Span>,
    /// Wait until the worker has exited
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    note: NoteArgs,
}

/// `journeyman stop`
#[derive(Debug, Args)]
pub(super) struct StopArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Wait until the worker has exited
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    note: NoteArgs,
}

/// `journeyman resume`, `journeyman reload`
#[derive(Debug, Args)]
pub(super) struct CommandArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    note: NoteArgs,
}

/// `journeyman claims`
#[derive(Debug, Subcommand)]
pub(super) enum ClaimsCommand {
    /// List the worker's claims
    List {
        #[command(flatten)]
        which: TargetArgs,
        /// Output format
        #[arg(long, short, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
    /// Show the details of a claim
    Show {
        /// Task id, TASK/RUN, or a prefix of either
        task: String,
        #[command(flatten)]
        which: TargetArgs,
        /// Output format
        #[arg(long, short, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
    /// Stop a task and release its claim, so that the queue runs the task again
    ///
    /// The payload gets SIGTERM, SIGKILL after `worker.termination_grace`, and the run is reported as `worker-shutdown`, which the
    /// queue retries. This worker may claim it again unless it is paused.
    Release {
        /// Task id, TASK/RUN, or a prefix of either
        task: String,
        /// Wait until the claim has ended
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        which: TargetArgs,
        #[command(flatten)]
        why: NoteArgs,
    },
    /// Stop a task and fail it, so that the queue does not run it again
    ///
    /// The payload gets SIGTERM, SIGKILL after `worker.termination_grace`, and the run is reported as `internal-error`, which the
    /// queue does not retry. The task's log names the author and the reason. With credentials for the queue, prefer
    /// `journeyman task cancel`: it sets the task to `canceled` on any worker.
    Cancel {
        /// Task id, TASK/RUN, or a prefix of either
        task: String,
        /// Wait until the claim has ended
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        which: TargetArgs,
        #[command(flatten)]
        why: NoteArgs,
    },
    /// Print the log of a running task
    Logs {
        /// Task id, TASK/RUN, or a prefix of either
        task: String,
        #[command(flatten)]
        which: TargetArgs,
        /// Print new lines until the task ends
        #[arg(long, short)]
        follow: bool,
    },
}

impl TargetArgs {
    fn client(&self, environment: &Environment) -> Result<ControlClient, Failure> {
        Ok(ControlClient::new(&self.socket(environment)?)?)
    }

    fn socket(&self, environment: &Environment) -> Result<PathBuf, Failure> {
        let named = self.socket.clone().or_else(|| environment.get(SOCKET_VARIABLE).map(PathBuf::from));
        if let Some(socket) = named {
            return Ok(socket);
        }
        let loaded = ConfigArgs::<NoFlags>::from_file(self.config.clone())
            .load(&environment.without_controller_variables())
            .map_err(|failure| Failure {
                message: format!(
                    "{}\n\nIt names the worker's socket; `--socket PATH` does without it.",
                    failure.message
                ),
                ..failure
            })?;
        let socket = control_socket(&loaded.config);
        if self.config.is_none() && !socket.exists() {
            let dev = DevState::read(&state_dir(environment)).and_then(|note| note.socket);
            return Ok(dev.filter(|dev| dev.exists()).unwrap_or(socket));
        }
        Ok(socket)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let exit = match error {
            Error::NotRunning(_) | Error::NoResponse { .. } | Error::Timeout(_) => Exit::Unreachable,
            Error::Forbidden(_) | Error::Rejected(_) | Error::NotFound(_) => Exit::Failed,
            Error::InvalidResponse(..) => Exit::Internal,
        };
        Self::from_error(exit, &error)
    }
}

/// `journeyman status`
pub(super) async fn status(arguments: WorkerStatusArgs, environment: &Environment) -> ExitResult {
    let client = arguments.target.client(environment)?;
    let look = async || {
        let looked = client.status().await?;
        Ok(match arguments.output {
            Format::Json => format!("{:#}\n", to_json(&looked)),
            Format::Table => status::render(&looked),
        })
    };
    print_repeatedly(arguments.watch.as_ref(), look).await
}

/// Shows what a look brings: once, or again and again.
pub(super) async fn print_repeatedly(
    every: Option<&Span>,
    look: impl AsyncFn() -> Result<String, Failure>,
) -> ExitResult {
    loop {
        let shown = look().await?;
        let Some(every) = every else {
            output::print(&shown)?;
            return Ok(Exit::Success);
        };
        let clear = if std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
        output::print_raw(clear.as_bytes())?;
        output::print(&shown)?;
        tokio::time::sleep(every.0).await;
    }
}

fn to_json(status: &WorkerStatusReply) -> serde_json::Value {
    serde_json::to_value(status).unwrap_or_default()
}

/// `journeyman pause`
pub(super) async fn pause(arguments: PauseArgs, environment: &Environment) -> ExitResult {
    let seconds = arguments.span.map(|span| span.0.as_secs_f64());
    send_command(&arguments.target, WorkerCommand::Pause { seconds }, arguments.note, environment).await?;
    Ok(Exit::Success)
}

/// `journeyman resume`
pub(super) async fn resume(arguments: CommandArgs, environment: &Environment) -> ExitResult {
    send_command(&arguments.target, WorkerCommand::Resume, arguments.note, environment).await?;
    Ok(Exit::Success)
}

/// `journeyman stop`
pub(super) async fn stop(arguments: StopArgs, environment: &Environment) -> ExitResult {
    let client = send_command(&arguments.target, WorkerCommand::Stop, arguments.note, environment).await?;
    if arguments.wait {
        wait_for_exit(&client).await?;
    }
    Ok(Exit::Success)
}

/// `journeyman reload`
pub(super) async fn reload(arguments: CommandArgs, environment: &Environment) -> ExitResult {
    send_command(&arguments.target, WorkerCommand::Reload, arguments.note, environment).await?;
    Ok(Exit::Success)
}

/// `journeyman drain`
pub(super) async fn drain(arguments: DrainArgs, environment: &Environment) -> ExitResult {
    let seconds = arguments.deadline.map(|span| span.0.as_secs_f64());
    let client = send_command(&arguments.target, WorkerCommand::Drain { seconds }, arguments.note, environment).await?;
    if arguments.wait {
        wait_for_exit(&client).await?;
    }
    Ok(Exit::Success)
}

async fn wait_for_exit(client: &ControlClient) -> Result<(), Failure> {
    let mut left = usize::MAX;
    loop {
        match client.status().await {
            Ok(status) if status.snapshot.tasks.len() != left => {
                left = status.snapshot.tasks.len();
                output::print_stderr(&format!("{left} {} left", if left == 1 { "task" } else { "tasks" }));
            }
            Ok(_) | Err(Error::Timeout(_)) => {}
            Err(Error::InvalidResponse(..) | Error::NotRunning(_) | Error::NotFound(_)) => return Ok(()),
            Err(error @ (Error::Forbidden(_) | Error::NoResponse { .. } | Error::Rejected(_))) => {
                return Err(error.into());
            }
        }
        tokio::time::sleep(DRAIN_POLL_INTERVAL).await;
    }
}

/// Who runs this command.
pub(in crate::cli) fn operator_name(environment: &Environment) -> String {
    let named = ["SUDO_USER", "USER", "LOGNAME"].iter().find_map(|name| environment.get(name));
    // A container's shell names nobody.
    let user = || match rustix::process::getuid() {
        root if root.is_root() => "root".to_owned(),
        user => format!("user {}", user.as_raw()),
    };
    named.map_or_else(user, str::to_owned)
}

async fn send_command(
    which: &TargetArgs,
    command: WorkerCommand,
    why: NoteArgs,
    environment: &Environment,
) -> Result<ControlClient, Failure> {
    let client = which.client(environment)?;
    let note = Note { by: operator_name(environment), text: why.note };
    let message = client.send_command(&WorkerCommandRequest { command, note }).await?;
    output::line(&message)?;
    Ok(client)
}

/// `journeyman claims`
pub(super) async fn claims(command: ClaimsCommand, environment: &Environment) -> ExitResult {
    match command {
        ClaimsCommand::List { which, output } => {
            let looked = which.client(environment)?.status().await?;
            match output {
                Format::Json => output::json(&serde_json::to_value(&looked.snapshot.tasks).unwrap_or_default())?,
                Format::Table => output::print(&status::claim_table(&looked.snapshot.tasks))?,
            }
            Ok(Exit::Success)
        }
        ClaimsCommand::Show { task, which, output } => {
            let detail = which.client(environment)?.claim_details(&task).await?;
            match output {
                Format::Json => output::json(&serde_json::to_value(&detail).unwrap_or_default())?,
                Format::Table => output::print(&claim_details::render(&detail))?,
            }
            Ok(Exit::Success)
        }
        ClaimsCommand::Release { task, wait, which, why } => {
            end_claim(task, |task| WorkerCommand::Release { task }, wait, &which, why, environment).await
        }
        ClaimsCommand::Cancel { task, wait, which, why } => {
            end_claim(task, |task| WorkerCommand::Cancel { task }, wait, &which, why, environment).await
        }
        ClaimsCommand::Logs { task, which, follow } => {
            let follow = if follow { Follow::Yes } else { Follow::No };
            let mut answer = which.client(environment)?.log(&task, follow).await?;
            let mut log = output::UntrustedOutput::to_stdout();
            while let Some(piece) =
                answer.chunk().await.map_err(|error| Failure::from_error(Exit::Unreachable, &error))?
            {
                log.print(&piece)?;
            }
            Ok(Exit::Success)
        }
    }
}

/// Ends one task, and waits for that where it is wanted.
async fn end_claim(
    task: String,
    what: fn(String) -> WorkerCommand,
    wait: bool,
    which: &TargetArgs,
    why: NoteArgs,
    environment: &Environment,
) -> ExitResult {
    if !wait {
        send_command(which, what(task), why, environment).await?;
        return Ok(Exit::Success);
    }
    // By its whole name: what is meant by a part of one may be another task before long.
    let held = which.client(environment)?.claim_details(&task).await?.task;
    let name = format!("{}:{}/{}", held.source, held.task, held.run);
    let client = send_command(which, what(name.clone()), why, environment).await?;
    loop {
        match client.claim_details(&name).await {
            Ok(_) | Err(Error::Timeout(_)) => {}
            // It holds no such task, or is gone itself.
            Err(Error::NotFound(_) | Error::NotRunning(_) | Error::InvalidResponse(..)) => return Ok(Exit::Success),
            Err(error @ (Error::Forbidden(_) | Error::NoResponse { .. } | Error::Rejected(_))) => {
                return Err(error.into());
            }
        }
        tokio::time::sleep(DRAIN_POLL_INTERVAL).await;
    }
}

/// A span for a reader, of seconds.
pub(super) fn format_seconds(seconds: f64) -> String {
    crate::worker::snapshot::format_duration(Duration::from_secs_f64(seconds.max(0.0)))
}
