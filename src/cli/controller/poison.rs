//! `journeyman controller poison`: lists, shows, requeues and discards requests of the poison queue.

use std::fmt::Write as _;

use clap::{Args, Subcommand};

use crate::cli::control::{SocketArgs, operator_name};
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::output::{self, Format};
use crate::console::controller;
use crate::console::text::{self, strip_control_chars};
use crate::control::controller_api::PoisonActionRequest;
use journeyman_platform::settings::Environment;
use journeyman_services::controller::poison_queue::{self, PoisonAction, PoisonOutcome};

#[derive(Debug, Args)]
pub(super) struct PoisonTargetArgs {
    /// Pool [default: the only one]
    #[arg(long, short, value_name = "NAME")]
    pool: Option<String>,
    #[command(flatten)]
    target: SocketArgs,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(super) struct RequestSelection {
    /// IDs, as `list` shows them
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    /// All requests
    #[arg(long)]
    all: bool,
}

#[derive(Debug, Args)]
pub(super) struct PoisonActionArgs {
    #[command(flatten)]
    chosen: RequestSelection,
    #[command(flatten)]
    place: PoisonTargetArgs,
}

/// `journeyman controller poison`
#[derive(Debug, Subcommand)]
pub(super) enum PoisonCommand {
    /// List the poison queue, the oldest request first
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        place: PoisonTargetArgs,
        /// Output format
        #[arg(long, short, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
    /// Show a request: its properties, and the exit and the log of the last worker of its key
    Show {
        /// ID, as `list` shows it
        id: String,
        #[command(flatten)]
        place: PoisonTargetArgs,
        /// Output format
        #[arg(long, short, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
    /// Publish requests again under their keys, with a fresh delivery count
    ///
    /// A request leaves the poison queue once the broker has confirmed the new copy. Its client was already sent an error.
    Requeue(PoisonActionArgs),
    /// Delete requests from the poison queue
    Discard(PoisonActionArgs),
}

pub(super) async fn run(command: PoisonCommand, environment: &Environment) -> ExitResult {
    match command {
        PoisonCommand::List { place: PoisonTargetArgs { pool, target }, output } => {
            let seen = target.controller_client(environment)?.list_poison(pool.as_deref()).await?;
            output::show(&seen, output, |seen| text::table(&controller::poison(seen)))?;
            Ok(Exit::Success)
        }
        PoisonCommand::Show { id, place: PoisonTargetArgs { pool, target }, output } => {
            let seen = target.controller_client(environment)?.list_poison(pool.as_deref()).await?;
            let found = seen.values().flat_map(|inventory| &inventory.requests).find(|entry| entry.id == id);
            let Some(entry) = found else {
                return Err(Failure::new(Exit::Failed, format!("no request {id} in the poison queue")));
            };
            output::show(entry, output, |entry| text::facts(&controller::poisoned(entry)))?;
            Ok(Exit::Success)
        }
        PoisonCommand::Requeue(arguments) => apply_action(arguments, PoisonAction::Requeue, environment).await,
        PoisonCommand::Discard(arguments) => apply_action(arguments, PoisonAction::Discard, environment).await,
    }
}

async fn apply_action(
    PoisonActionArgs { chosen, place }: PoisonActionArgs,
    action: PoisonAction,
    environment: &Environment,
) -> ExitResult {
    let selection = if chosen.all {
        poison_queue::PoisonSelection::All
    } else {
        poison_queue::PoisonSelection::Ids(chosen.ids.into_iter().collect())
    };
    let request = PoisonActionRequest { pool: place.pool, selection, action, by: operator_name(environment) };
    let outcome = place.target.controller_client(environment)?.apply_poison_action(&request).await?;
    output::print(&outcome_message(&outcome, action))?;
    Ok(if outcome.failed.is_empty() { Exit::Success } else { Exit::Failed })
}

fn outcome_message(outcome: &PoisonOutcome, action: PoisonAction) -> String {
    let what = action.past_tense();
    let mut out = format!("{} {what}\n", outcome.succeeded.len());
    for (id, why) in &outcome.failed {
        // Writing to a String cannot fail.
        _ = writeln!(out, "{}: not {what}: {}", strip_control_chars(id), strip_control_chars(why));
    }
    if outcome.not_scanned > 0 {
        _ = writeln!(out, "{} more were not scanned; repeat the command", outcome.not_scanned);
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_message_names_each_request_that_failed() {
        let not = BTreeMap::from([("b".to_owned(), "no such request".to_owned())]);
        let outcome = PoisonOutcome { succeeded: vec!["a".to_owned()], failed: not, not_scanned: 2 };
        let text = "1 requeued\nb: not requeued: no such request\n2 more were not scanned; repeat the command\n";
        assert_eq!(outcome_message(&outcome, PoisonAction::Requeue), text);
    }
}
