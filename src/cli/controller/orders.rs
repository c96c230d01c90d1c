//! What people tell a controller: `pause`, `resume`, `scale`, `drain` and `retry`.

use clap::{Args, Subcommand};

use super::status::{Which, failed};
use crate::cli::exit::{Ended, Exit};
use crate::cli::output;
use crate::cli::steer::by;
use crate::config::Environment;
use crate::config::values::Span;
use crate::control::controller::Ordered;
use crate::controller::orders::Order;
use crate::worker::Note;

#[derive(Debug, Subcommand)]
pub(super) enum OrderCommand {
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
        to: To,
    },
    /// Take a pause back
    Resume {
        /// Only this group [default: the whole pool, with all its groups]
        #[arg(long, value_name = "KEY")]
        key: Option<String>,
        #[command(flatten)]
        to: To,
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
        to: To,
    },
    /// Tell a worker to go: it finishes what it holds, and another one takes its place where one is wanted
    Drain {
        /// Its name, as `journeyman controller status -o json` and the page show it
        #[arg(value_name = "WORKER")]
        worker: String,
        #[command(flatten)]
        to: To,
    },
    /// Forget that workers of a group did not last, and start the next one now
    Retry {
        /// The group
        #[arg(long, value_name = "KEY")]
        key: String,
        #[command(flatten)]
        to: To,
    },
}

/// To whom it is said, and why.
#[derive(Debug, Args)]
pub(super) struct To {
    /// Which pool [default: the only one]
    #[arg(long, value_name = "POOL")]
    pool: Option<String>,
    /// Why, for whoever looks at the controller or its log
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    note: String,
    #[command(flatten)]
    which: Which,
}

/// Gives an order.
///
/// # Errors
///
/// Where there is no controller, or it does not obey.
pub(super) async fn run(command: OrderCommand, environment: &Environment) -> Ended {
    let seconds = |span: Span| span.0.as_secs_f64();
    let (order, to) = match command {
        OrderCommand::Pause { key, span, to } => (Order::Pause { key, seconds: span.map(seconds) }, to),
        OrderCommand::Resume { key, to } => (Order::Resume { key }, to),
        OrderCommand::Scale { key, min, max, span, to } => (Order::Scale { key, min, max, seconds: seconds(span) }, to),
        OrderCommand::Drain { worker, to } => (Order::Drain { worker }, to),
        OrderCommand::Retry { key, to } => (Order::Retry { key }, to),
    };
    let To { pool, note, which } = to;
    let note = Note { by: by(environment), text: note };
    let said = which.client(environment)?.tell(&Ordered { pool, order, note }).await.map_err(failed)?;
    output::line(&said)?;
    Ok(Exit::Done)
}
