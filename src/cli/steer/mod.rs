//! What those who run a worker ask it and tell it: `status`, `pause`, `resume`, `drain`, `stop`, `reload`, `tasks`.

mod detail;
pub(super) mod status;
mod top;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use super::exit::{Ended, Exit, Failure};
use super::output::{self, Format};
use super::place::{DevNote, state_dir};
use super::settings::{NoFlags, Settings};
use super::worker::socket_of;
use crate::config::Environment;
use crate::config::environment::SOCKET_VARIABLE;
use crate::config::values::Span;
use crate::control::client::{Client, Error, Follow};
use crate::control::{Order, Ordered, Status};
use crate::limits::DRAIN_WAIT_EVERY;
use crate::worker::Note;
pub(super) use top::{TopArgs, top};

/// Which worker.
#[derive(Debug, Args)]
pub(super) struct Which {
    /// The worker's control socket [env: JOURNEYMAN_SOCKET] [default: that of the configuration, or of `journeyman dev`]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    socket: Option<PathBuf>,
    /// Configuration file of the worker
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

/// Who says so, and why.
#[derive(Debug, Args)]
pub(super) struct Why {
    /// Why, for whoever looks at the worker or its log
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    note: String,
}

/// `journeyman status`
#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    which: Which,
    /// How to answer
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
    which: Which,
    /// Resume by itself after so long [default: until `journeyman resume`]
    #[arg(long = "for", value_name = "TIME")]
    span: Option<Span>,
    #[command(flatten)]
    why: Why,
}

/// `journeyman drain`
#[derive(Debug, Args)]
pub(super) struct DrainArgs {
    #[command(flatten)]
    which: Which,
    /// Hand back what still runs after so long [default: `worker.drain_deadline`]
    #[arg(long, value_name = "TIME")]
    deadline: Option<Span>,
    /// Wait until the worker has exited
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    why: Why,
}

/// `journeyman stop`
#[derive(Debug, Args)]
pub(super) struct StopArgs {
    #[command(flatten)]
    which: Which,
    /// Wait until the worker has exited
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    why: Why,
}

/// `journeyman resume`, `journeyman reload`
#[derive(Debug, Args)]
pub(super) struct PlainArgs {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    why: Why,
}

/// `journeyman tasks`
#[derive(Debug, Subcommand)]
pub(super) enum TasksCommand {
    /// List what the worker holds
    Ls {
        #[command(flatten)]
        which: Which,
        /// How to answer
        #[arg(long, short, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
    /// Show all that is known of a task that the worker holds
    Show {
        /// The task, or task and run as TASK/RUN, or the beginning of it
        task: String,
        #[command(flatten)]
        which: Which,
        /// How to answer
        #[arg(long, short, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
    /// End a task, so that another worker does it
    ///
    /// The task is told to end, killed after `worker.cancel_grace`, and reported as `worker-shutdown`, which the queue
    /// retries. This worker may get it again; `journeyman pause` before it keeps it away.
    HandBack {
        /// The task, or task and run as TASK/RUN, or the beginning of it
        task: String,
        /// Wait until the worker holds it no more
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        why: Why,
    },
    /// End a task, so that nobody does it
    ///
    /// The task is told to end, killed after `worker.cancel_grace`, and reported as `internal-error`, which the queue does
    /// not retry; its log says who canceled it, and why. Who has credentials for the queue's own cancelTask says
    /// `journeyman task cancel` instead: that makes it `canceled` wherever it is, and its worker ends it.
    Cancel {
        /// The task, or task and run as TASK/RUN, or the beginning of it
        task: String,
        /// Wait until the worker holds it no more
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        why: Why,
    },
    /// Show the log of a task that the worker holds
    Logs {
        /// The task, or task and run as TASK/RUN, or the beginning of it
        task: String,
        #[command(flatten)]
        which: Which,
        /// Go on until the task ends
        #[arg(long, short)]
        follow: bool,
    },
}

impl Which {
    fn client(&self, environment: &Environment) -> Result<Client, Failure> {
        Ok(Client::new(&self.socket(environment)?)?)
    }

    fn socket(&self, environment: &Environment) -> Result<PathBuf, Failure> {
        let named = self.socket.clone().or_else(|| environment.get(SOCKET_VARIABLE).map(PathBuf::from));
        if let Some(socket) = named {
            return Ok(socket);
        }
        let loaded =
            Settings::<NoFlags>::of_file(self.config.clone()).load(&environment.of_nobody()).map_err(|failure| {
                Failure {
                    message: format!(
                        "{}\n\nIt names the worker's socket; `--socket PATH` does without it.",
                        failure.message
                    ),
                    ..failure
                }
            })?;
        let socket = socket_of(&loaded.config);
        if self.config.is_none() && !socket.exists() {
            let dev = DevNote::read(&state_dir(environment)).and_then(|note| note.socket);
            return Ok(dev.filter(|dev| dev.exists()).unwrap_or(socket));
        }
        Ok(socket)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let exit = match error {
            Error::NobodyThere(_) | Error::Silent { .. } | Error::Slow(_) => Exit::Unreachable,
            Error::Forbidden(_) | Error::Refused(_) | Error::Gone(_) => Exit::No,
            Error::Broken(..) => Exit::Internal,
        };
        Self::of(exit, &error)
    }
}

/// `journeyman status`
pub(super) async fn status(arguments: StatusArgs, environment: &Environment) -> Ended {
    let client = arguments.which.client(environment)?;
    let look = async || {
        let looked = client.status().await?;
        Ok(match arguments.output {
            Format::Json => format!("{:#}\n", to_json(&looked)),
            Format::Table => status::table(&looked),
        })
    };
    shown_every(arguments.watch.as_ref(), look).await
}

/// Shows what a look brings: once, or again and again.
pub(super) async fn shown_every(every: Option<&Span>, look: impl AsyncFn() -> Result<String, Failure>) -> Ended {
    loop {
        let shown = look().await?;
        let Some(every) = every else {
            output::print(&shown)?;
            return Ok(Exit::Done);
        };
        let clear = if std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
        output::print_raw(clear.as_bytes())?;
        output::print(&shown)?;
        tokio::time::sleep(every.0).await;
    }
}

fn to_json(status: &Status) -> serde_json::Value {
    serde_json::to_value(status).unwrap_or_default()
}

/// `journeyman pause`
pub(super) async fn pause(arguments: PauseArgs, environment: &Environment) -> Ended {
    let seconds = arguments.span.map(|span| span.0.as_secs_f64());
    order(&arguments.which, Order::Pause { seconds }, arguments.why, environment).await?;
    Ok(Exit::Done)
}

/// `journeyman resume`
pub(super) async fn resume(arguments: PlainArgs, environment: &Environment) -> Ended {
    order(&arguments.which, Order::Resume, arguments.why, environment).await?;
    Ok(Exit::Done)
}

/// `journeyman stop`
pub(super) async fn stop(arguments: StopArgs, environment: &Environment) -> Ended {
    let client = order(&arguments.which, Order::Stop, arguments.why, environment).await?;
    if arguments.wait {
        until_gone(&client).await?;
    }
    Ok(Exit::Done)
}

/// `journeyman reload`
pub(super) async fn reload(arguments: PlainArgs, environment: &Environment) -> Ended {
    order(&arguments.which, Order::Reload, arguments.why, environment).await?;
    Ok(Exit::Done)
}

/// `journeyman drain`
pub(super) async fn drain(arguments: DrainArgs, environment: &Environment) -> Ended {
    let seconds = arguments.deadline.map(|span| span.0.as_secs_f64());
    let client = order(&arguments.which, Order::Drain { seconds }, arguments.why, environment).await?;
    if arguments.wait {
        until_gone(&client).await?;
    }
    Ok(Exit::Done)
}

async fn until_gone(client: &Client) -> Result<(), Failure> {
    let mut left = usize::MAX;
    loop {
        match client.status().await {
            Ok(status) if status.view.tasks.len() != left => {
                left = status.view.tasks.len();
                output::note(&format!("{left} {} left", if left == 1 { "task" } else { "tasks" }));
            }
            Ok(_) | Err(Error::Slow(_)) => {}
            Err(Error::Broken(..) | Error::NobodyThere(_) | Error::Gone(_)) => return Ok(()),
            Err(error @ (Error::Forbidden(_) | Error::Silent { .. } | Error::Refused(_))) => return Err(error.into()),
        }
        tokio::time::sleep(DRAIN_WAIT_EVERY).await;
    }
}

/// Who runs this command.
pub(in crate::cli) fn by(environment: &Environment) -> String {
    let named = ["SUDO_USER", "USER", "LOGNAME"].iter().find_map(|name| environment.get(name));
    // A container's shell names nobody.
    let user = || match rustix::process::getuid() {
        root if root.is_root() => "root".to_owned(),
        user => format!("user {}", user.as_raw()),
    };
    named.map_or_else(user, str::to_owned)
}

async fn order(which: &Which, order: Order, why: Why, environment: &Environment) -> Result<Client, Failure> {
    let client = which.client(environment)?;
    let note = Note { by: by(environment), text: why.note };
    let said = client.order(&Ordered { order, note }).await?;
    output::line(&said)?;
    Ok(client)
}

/// `journeyman tasks`
pub(super) async fn tasks(command: TasksCommand, environment: &Environment) -> Ended {
    match command {
        TasksCommand::Ls { which, output } => {
            let looked = which.client(environment)?.status().await?;
            match output {
                Format::Json => output::json(&serde_json::to_value(&looked.view.tasks).unwrap_or_default())?,
                Format::Table => output::print(&status::tasks(&looked.view.tasks))?,
            }
            Ok(Exit::Done)
        }
        TasksCommand::Show { task, which, output } => {
            let detail = which.client(environment)?.show(&task).await?;
            match output {
                Format::Json => output::json(&serde_json::to_value(&detail).unwrap_or_default())?,
                Format::Table => output::print(&detail::table(&detail))?,
            }
            Ok(Exit::Done)
        }
        TasksCommand::HandBack { task, wait, which, why } => {
            end(task, |task| Order::HandBack { task }, wait, &which, why, environment).await
        }
        TasksCommand::Cancel { task, wait, which, why } => {
            end(task, |task| Order::Cancel { task }, wait, &which, why, environment).await
        }
        TasksCommand::Logs { task, which, follow } => {
            let follow = if follow { Follow::Yes } else { Follow::No };
            let mut answer = which.client(environment)?.log(&task, follow).await?;
            let mut log = output::Foreign::to_stdout();
            while let Some(piece) = answer.chunk().await.map_err(|error| Failure::of(Exit::Unreachable, &error))? {
                log.print(&piece)?;
            }
            Ok(Exit::Done)
        }
    }
}

/// Ends one task, and waits for that where it is wanted.
async fn end(
    task: String,
    what: fn(String) -> Order,
    wait: bool,
    which: &Which,
    why: Why,
    environment: &Environment,
) -> Ended {
    if !wait {
        order(which, what(task), why, environment).await?;
        return Ok(Exit::Done);
    }
    // By its whole name: what is meant by a part of one may be another task before long.
    let held = which.client(environment)?.show(&task).await?.task;
    let name = format!("{}:{}/{}", held.source, held.task, held.run);
    let client = order(which, what(name.clone()), why, environment).await?;
    loop {
        match client.show(&name).await {
            Ok(_) | Err(Error::Slow(_)) => {}
            // It holds no such task, or is gone itself.
            Err(Error::Gone(_) | Error::NobodyThere(_) | Error::Broken(..)) => return Ok(Exit::Done),
            Err(error @ (Error::Forbidden(_) | Error::Silent { .. } | Error::Refused(_))) => return Err(error.into()),
        }
        tokio::time::sleep(DRAIN_WAIT_EVERY).await;
    }
}

/// A span for a reader, of seconds.
pub(super) fn shown(seconds: f64) -> String {
    crate::worker::look::span(Duration::from_secs_f64(seconds.max(0.0)))
}
