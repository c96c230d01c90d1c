//! What people tell a controller: `pause`, `resume`, `scale`, `drain` and `retry`.

use clap::{Args, Subcommand};

use super::status::{ControllerTargetArgs, controller_failure};
use crate::cli::control::operator_name;
use crate::cli::exit::{Exit, ExitResult};
use crate::cli::output;
use crate::config::Environment;
use crate::config::values::Span;
use crate::control::controller_api::PoolCommandRequest;
use crate::controller::commands::PoolCommand;
use crate::worker::Note;

#[derive(Debug, Subcommand)]
pub(super) enum PoolSubcommand {
    /// Start nobody and tell nobody to go, in a group or in the whole pool
    ///
    /// Requests go on to be forwarded, and workers that are there go on to answer them. What was ordered is forgotten with the
    /// controller: one that takes over knows nothing of it.
    Pause {
        /// Only this group [default: the whole pool]
        #[arg(long, value_name = "KEY")]
        key: Option<String>,
        /// Resume by itself after so long [default: until `journeyman controller resume`]
        #[arg(long = "for", value_name = "TIME")]
        span: Option<Span>,
        #[command(flatten)]
        to: PoolCommandArgs,
    },
    /// Take a pause back
    Resume {
        /// Only this group [default: the whole pool, with all its groups]
        #[arg(long, value_name = "KEY")]
        key: Option<String>,
        #[command(flatten)]
        to: PoolCommandArgs,
    },
    /// Give a group other numbers of workers for a time
    ///
    /// With `--min` a group is made and kept that nobody asks, so that its workers are warm.
    Scale {
        /// The group
        #[arg(long, value_name = "KEY")]
        key: String,
        /// So many workers at least [default: as configured]
        #[arg(long, value_name = "COUNT")]
        min: Option<u32>,
        /// So many at most [default: as configured]
        #[arg(long, value_name = "COUNT")]
        max: Option<u32>,
        /// For how long; `0s` takes it back
        #[arg(long = "for", value_name = "TIME", default_value = "1h")]
        span: Span,
        #[command(flatten)]
        to: PoolCommandArgs,
    },
    /// Tell a worker to go: it finishes what it holds, and another one takes its place where one is wanted
    Drain {
        /// Its name, as `journeyman controller status -o json` and the page show it
        #[arg(value_name = "WORKER")]
        worker: String,
        #[command(flatten)]
        to: PoolCommandArgs,
    },
    /// Forget that workers of a group did not last, and start the next one now
    Retry {
        /// The group
        #[arg(long, value_name = "KEY")]
        key: String,
        #[command(flatten)]
        to: PoolCommandArgs,
    },
}

/// To whom it is said, and why.
#[derive(Debug, Args)]
pub(super) struct PoolCommandArgs {
    /// Which pool [default: the only one]
    #[arg(long, value_name = "POOL")]
    pool: Option<String>,
    /// Why, for whoever looks at the controller or its log
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    note: String,
    #[command(flatten)]
    target: ControllerTargetArgs,
}

/// Gives an order.
///
/// # Errors
///
/// Where there is no controller, or it does not obey.
pub(super) async fn run(command: PoolSubcommand, environment: &Environment) -> ExitResult {
    let seconds = |span: Span| span.0.as_secs_f64();
    let (command, to) = match command {
        PoolSubcommand::Pause { key, span, to } => (PoolCommand::Pause { key, seconds: span.map(seconds) }, to),
        PoolSubcommand::Resume { key, to } => (PoolCommand::Resume { key }, to),
        PoolSubcommand::Scale { key, min, max, span, to } => {
            (PoolCommand::Scale { key, min, max, seconds: seconds(span) }, to)
        }
        PoolSubcommand::Drain { worker, to } => (PoolCommand::Drain { worker }, to),
        PoolSubcommand::Retry { key, to } => (PoolCommand::Retry { key }, to),
    };
    let PoolCommandArgs { pool, note, target: which } = to;
    let note = Note { by: operator_name(environment), text: note };
    let said = which
        .client(environment)?
        .send_pool_command(&PoolCommandRequest { pool, command, note })
        .await
        .map_err(controller_failure)?;
    output::line(&said)?;
    Ok(Exit::Success)
}
