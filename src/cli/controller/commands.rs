//! `journeyman controller pause|resume|scale|drain|retry`.

use clap::{Args, Subcommand};

use crate::cli::control::{SocketArgs, operator_name};
use crate::cli::exit::{Exit, ExitResult};
use crate::cli::output::{self, Format};
use crate::control::controller_api::PoolCommandRequest;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::Span;
use journeyman_services::controller::commands::{PoolCommand, ScaleCommand};
use journeyman_worker::engine::Note;

#[derive(Debug, Subcommand)]
pub(super) enum PoolSubcommand {
    /// Start and stop no workers, in a group or in the whole pool
    ///
    /// Requests are still forwarded, and running workers still answer them. A restart of the controller ends the pause.
    Pause {
        /// Only this group [default: the whole pool]
        #[arg(long, value_name = "KEY")]
        key: Option<String>,
        /// Resume after this time [default: until `journeyman controller resume`]
        #[arg(long = "for", value_name = "TIME")]
        span: Option<Span>,
        #[command(flatten)]
        to: PoolCommandArgs,
    },
    /// End a pause
    Resume {
        /// Only this group [default: the whole pool, with all its groups]
        #[arg(long, value_name = "KEY")]
        key: Option<String>,
        #[command(flatten)]
        to: PoolCommandArgs,
    },
    /// Override the limits of a group for a time
    ///
    /// With `--min`, the group is created even without requests, so that its workers are warm.
    Scale {
        /// The group
        #[arg(long, value_name = "KEY")]
        key: String,
        /// Minimum number of workers [default: as configured]
        #[arg(long, value_name = "COUNT")]
        min: Option<u32>,
        /// Maximum number of workers [default: as configured]
        #[arg(long, value_name = "COUNT")]
        max: Option<u32>,
        /// How long; `0s` removes the override
        #[arg(long = "for", value_name = "TIME", default_value = "1h")]
        span: Span,
        #[command(flatten)]
        to: PoolCommandArgs,
    },
    /// Stop a worker after it has finished what it holds; it is replaced if the group needs it
    Drain {
        /// Worker ID, as `journeyman controller status -o json` shows it
        #[arg(value_name = "WORKER")]
        worker: String,
        #[command(flatten)]
        to: PoolCommandArgs,
    },
    /// Reset the failures of a group and start its next worker now
    Retry {
        /// The group
        #[arg(long, value_name = "KEY")]
        key: String,
        #[command(flatten)]
        to: PoolCommandArgs,
    },
}

#[derive(Debug, Args)]
pub(super) struct PoolCommandArgs {
    /// Pool [default: the only one]
    #[arg(long, value_name = "POOL")]
    pool: Option<String>,
    /// Reason, shown in the status and the log
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    note: String,
    /// Output format
    #[arg(long, short, value_enum, default_value_t = Format::Table)]
    output: Format,
    #[command(flatten)]
    target: SocketArgs,
}

pub(super) async fn run(command: PoolSubcommand, environment: &Environment) -> ExitResult {
    let seconds = |span: Span| span.0.as_secs_f64();
    let (command, to) = match command {
        PoolSubcommand::Pause { key, span, to } => (PoolCommand::Pause { key, seconds: span.map(seconds) }, to),
        PoolSubcommand::Resume { key, to } => (PoolCommand::Resume { key }, to),
        PoolSubcommand::Scale { key, min, max, span, to } => {
            (PoolCommand::Scale(ScaleCommand { key, min, max, seconds: seconds(span) }), to)
        }
        PoolSubcommand::Drain { worker, to } => (PoolCommand::Drain { worker }, to),
        PoolSubcommand::Retry { key, to } => (PoolCommand::Retry { key }, to),
    };
    let PoolCommandArgs { pool, note, output: format, target: which } = to;
    let note = Note { by: operator_name(environment), text: note };
    let said = which.controller_client(environment)?.send_command(&PoolCommandRequest { pool, command, note }).await?;
    output::message(&said, format)?;
    Ok(Exit::Success)
}
