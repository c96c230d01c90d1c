//! Commands that talk to a worker's control socket: `status`, `pause`, `resume`, `drain`, `stop`, `reload`, `claims`.

mod top;

use std::io::IsTerminal as _;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use serde_json::json;

use super::config_args::{ConfigArgs, NoFlags};
use super::controller_socket::{controller_socket, no_pools};
use super::dev::state_file::{DevState, state_dir};
use super::exit::{Exit, ExitResult, Failure};
use super::output::{self, Format};
use super::worker::control_socket;
use crate::config::Config;
use crate::console::{text, worker};
use crate::control::client::{ControlClient, Error, Follow};
use crate::control::{WorkerCommand, WorkerCommandRequest};
use journeyman_domain::limits::DRAIN_POLL_INTERVAL;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::environment::SOCKET_VARIABLE;
use journeyman_platform::settings::values::Span;
use journeyman_worker::engine::Note;
pub(super) use top::{TopArgs, top};

#[derive(Debug, Args)]
pub(super) struct SocketArgs {
    /// Control socket [env: JOURNEYMAN_SOCKET] [default: from the configuration, or of `journeyman dev`]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    socket: Option<PathBuf>,
    /// Configuration file of the worker or controller
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    pub(super) how: ShowArgs,
    /// Refresh at this interval [default: 2s]
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "2s")]
    pub(super) watch: Option<Span>,
}

#[derive(Debug, Args)]
pub(super) struct CommandArgs {
    #[command(flatten)]
    target: SocketArgs,
    /// Reason, shown in the worker's status and log
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    note: String,
    /// Output format
    #[arg(long, short, value_enum, default_value_t = Format::Table)]
    output: Format,
}

#[derive(Debug, Subcommand)]
pub(super) enum ControlCommand {
    /// Stop claiming; running tasks and tasks from a poll in flight continue
    Pause {
        /// Resume after this time [default: until `journeyman resume`]
        #[arg(long = "for", value_name = "TIME")]
        span: Option<Span>,
        #[command(flatten)]
        to: CommandArgs,
    },
    /// Resume claiming
    Resume(CommandArgs),
    /// Finish running tasks, then exit
    Drain {
        /// Release tasks that still run after this time [default: `worker.drain_deadline`]
        #[arg(long, value_name = "TIME")]
        deadline: Option<Span>,
        /// Wait until the worker has exited
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        to: CommandArgs,
    },
    /// Release running tasks, then exit
    Stop {
        /// Wait until the worker has exited
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        to: CommandArgs,
    },
    /// Reload the configuration of a worker or a controller
    Reload(CommandArgs),
}

#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    #[command(flatten)]
    pub(super) target: SocketArgs,
    /// Output format
    #[arg(long, short, value_enum, default_value_t = Format::Table)]
    pub(super) output: Format,
}

#[derive(Debug, Args)]
pub(super) struct EndClaimArgs {
    /// Task id, TASK/RUN, or a prefix of either
    task: String,
    /// Wait until the claim has ended
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    to: CommandArgs,
}

#[derive(Debug, Subcommand)]
pub(super) enum ClaimsCommand {
    /// List the worker's claims
    #[command(visible_alias = "ls")]
    List(ShowArgs),
    /// Show the details of a claim
    Show {
        /// Task id, TASK/RUN, or a prefix of either
        task: String,
        #[command(flatten)]
        how: ShowArgs,
    },
    /// Stop a task and release its claim, so that the queue runs the task again
    ///
    /// The payload gets SIGTERM, SIGKILL after `worker.termination_grace`, and the run is reported as `worker-shutdown`, which the
    /// queue retries. This worker may claim it again unless it is paused.
    Release(EndClaimArgs),
    /// Stop a task and fail it, so that the queue does not run it again
    ///
    /// The payload gets SIGTERM, SIGKILL after `worker.termination_grace`, and the run is reported as `internal-error`, which the
    /// queue does not retry. The task's log names the author and the reason. With credentials for the queue, prefer
    /// `journeyman task cancel`: it sets the task to `canceled` on any worker.
    Cancel(EndClaimArgs),
    /// Print the log of a running task
    Logs {
        /// Task id, TASK/RUN, or a prefix of either
        task: String,
        #[command(flatten)]
        target: SocketArgs,
        /// Print new lines until the task ends
        #[arg(long, short)]
        follow: bool,
    },
}

impl SocketArgs {
    fn client(&self, environment: &Environment) -> Result<ControlClient, Failure> {
        if let Some(socket) = self.given_socket(environment) {
            return Ok(ControlClient::new(&socket)?);
        }
        let socket = control_socket(&self.load(environment)?);
        let dev_socket = || DevState::read(&state_dir(environment))?.socket.filter(|socket| socket.exists());
        let dev = if self.config.is_none() && !socket.exists() { dev_socket() } else { None };
        Ok(ControlClient::new(&dev.unwrap_or(socket))?)
    }

    pub(in crate::cli) fn controller_client(&self, environment: &Environment) -> Result<ControlClient, Failure> {
        let socket = match self.given_socket(environment) {
            Some(socket) => socket,
            None => controller_socket(&self.load(environment)?).ok_or_else(|| with_socket_hint(no_pools()))?,
        };
        Ok(ControlClient::new(&socket)?)
    }

    fn given_socket(&self, environment: &Environment) -> Option<PathBuf> {
        self.socket.clone().or_else(|| environment.get(SOCKET_VARIABLE).map(PathBuf::from))
    }

    fn load(&self, environment: &Environment) -> Result<Config, Failure> {
        let settings = ConfigArgs::<NoFlags>::from_file(self.config.clone());
        Ok(settings.load(&environment.without_controller_variables()).map_err(with_socket_hint)?.config)
    }
}

fn with_socket_hint(failure: Failure) -> Failure {
    let hint = "The configuration is needed to find the control socket; use `--socket PATH` instead.";
    Failure { message: format!("{}\n\n{hint}", failure.message), ..failure }
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

pub(super) async fn status(arguments: StatusArgs, environment: &Environment) -> ExitResult {
    let client = arguments.how.target.client(environment)?;
    print_repeatedly(arguments.watch.as_ref(), async || {
        let status = client.status().await?;
        Ok(match arguments.how.output {
            Format::Json => format!("{:#}\n", json!(status)),
            Format::Table => text::report(&worker::report(&status, &[])),
        })
    })
    .await
}

/// Prints once, or at an interval until interrupted.
pub(super) async fn print_repeatedly(
    interval: Option<&Span>,
    render: impl AsyncFn() -> Result<String, Failure>,
) -> ExitResult {
    loop {
        let text = render().await?;
        let Some(interval) = interval else {
            output::print(&text)?;
            return Ok(Exit::Success);
        };
        let clear = if std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
        output::print_raw(clear.as_bytes())?;
        output::print(&text)?;
        tokio::time::sleep(interval.0).await;
    }
}

pub(super) async fn run(command: ControlCommand, environment: &Environment) -> ExitResult {
    let seconds = |span: Option<Span>| span.map(|span| span.0.as_secs_f64());
    let (command, to, wait) = match command {
        ControlCommand::Pause { span, to } => (WorkerCommand::Pause { seconds: seconds(span) }, to, false),
        ControlCommand::Resume(to) => (WorkerCommand::Resume, to, false),
        ControlCommand::Drain { deadline, wait, to } => (WorkerCommand::Drain { seconds: seconds(deadline) }, to, wait),
        ControlCommand::Stop { wait, to } => (WorkerCommand::Stop, to, wait),
        ControlCommand::Reload(to) => (WorkerCommand::Reload, to, false),
    };
    let client = to.target.client(environment)?;
    send_command(&client, command, to, environment).await?;
    if wait {
        wait_until_gone(async || client.status().await.map(drop)).await?;
    }
    Ok(Exit::Success)
}

/// Polls until the worker or the claim no longer exists.
async fn wait_until_gone(poll: impl AsyncFn() -> Result<(), Error>) -> Result<(), Failure> {
    loop {
        match poll().await {
            Ok(()) | Err(Error::Timeout(_)) => {}
            Err(Error::InvalidResponse(..) | Error::NotRunning(_) | Error::NotFound(_)) => return Ok(()),
            Err(error @ (Error::Forbidden(_) | Error::NoResponse { .. } | Error::Rejected(_))) => {
                return Err(error.into());
            }
        }
        tokio::time::sleep(DRAIN_POLL_INTERVAL).await;
    }
}

pub(in crate::cli) fn operator_name(environment: &Environment) -> String {
    let name = ["SUDO_USER", "USER", "LOGNAME"].iter().find_map(|name| environment.get(name));
    // The shell of a container may set none of these.
    name.map_or_else(|| format!("user {}", rustix::process::getuid().as_raw()), str::to_owned)
}

async fn send_command(
    client: &ControlClient,
    command: WorkerCommand,
    CommandArgs { note, output, .. }: CommandArgs,
    environment: &Environment,
) -> Result<(), Failure> {
    let note = Note { by: operator_name(environment), text: note };
    let message = client.send_command(&WorkerCommandRequest { command, note }).await?;
    Ok(output::message(&message, output)?)
}

pub(super) async fn claims(command: ClaimsCommand, environment: &Environment) -> ExitResult {
    match command {
        ClaimsCommand::List(ShowArgs { target, output }) => {
            let claims = target.client(environment)?.status().await?.snapshot.claims;
            output::show(claims.as_slice(), output, |claims| text::table(&worker::claim_table(claims)))?;
        }
        ClaimsCommand::Show { task, how: ShowArgs { target, output } } => {
            let detail = target.client(environment)?.claim_details(&task).await?;
            output::show(&detail, output, |detail| text::facts(&worker::claim(detail)))?;
        }
        ClaimsCommand::Release(claim) => end_claim(claim, |task| WorkerCommand::Release { task }, environment).await?,
        ClaimsCommand::Cancel(claim) => end_claim(claim, |task| WorkerCommand::Cancel { task }, environment).await?,
        ClaimsCommand::Logs { task, target, follow } => {
            let follow = if follow { Follow::Yes } else { Follow::No };
            let mut response = target.client(environment)?.log(&task, follow).await?;
            let mut log = output::UntrustedOutput::to_stdout();
            while let Some(chunk) =
                response.chunk().await.map_err(|error| Failure::from_error(Exit::Unreachable, &error))?
            {
                log.print(&chunk)?;
            }
        }
    }
    Ok(Exit::Success)
}

async fn end_claim(
    EndClaimArgs { task, wait, to }: EndClaimArgs,
    command: fn(String) -> WorkerCommand,
    environment: &Environment,
) -> Result<(), Failure> {
    let client = to.target.client(environment)?;
    if !wait {
        return send_command(&client, command(task), to, environment).await;
    }
    // The full name is used, because a prefix may match another task later.
    let claim = client.claim_details(&task).await?.claim;
    let name = format!("{}/{}", claim.task, claim.run);
    send_command(&client, command(name.clone()), to, environment).await?;
    wait_until_gone(async || client.claim_details(&name).await.map(drop)).await
}
