//! `journeyman controller poison`: lists, shows, requeues and discards requests of the poison queue.

use std::fmt::Write as _;

use clap::{Args, Subcommand};

use crate::cli::control::{SocketArgs, operator_name};
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::output::{self, Format};
use crate::cli::table::{align_columns, strip_control_chars, table};
use crate::config::Environment;
use crate::control::poison_api::{Inventories, PoisonActionRequest};
use crate::controller::poison_message::PoisonedRequest;
use crate::controller::poison_queue::{self, PoisonAction, PoisonOutcome};

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
            output::show(&seen, output, list_table)?;
            Ok(Exit::Success)
        }
        PoisonCommand::Show { id, place: PoisonTargetArgs { pool, target }, output } => {
            let seen = target.controller_client(environment)?.list_poison(pool.as_deref()).await?;
            let found = seen.values().flat_map(|inventory| &inventory.requests).find(|entry| entry.id == id);
            let Some(entry) = found else {
                return Err(Failure::new(Exit::Failed, format!("no request {id} in the poison queue")));
            };
            output::show(entry, output, details_table)?;
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

fn list_table(seen: &Inventories) -> String {
    let head = ["ID", "POOL", "KEY", "REASON", "ATTEMPTS", "MOVED AT", "WORKER", "EXIT", "BYTES"];
    let mut rows = Vec::new();
    let mut more = 0;
    let or_none = |text: &Option<String>| text.as_deref().map_or_else(|| "-".to_owned(), strip_control_chars);
    for (pool, inventory) in seen {
        more += inventory.not_scanned;
        rows.extend(inventory.requests.iter().map(|entry| {
            vec![
                strip_control_chars(&entry.id),
                strip_control_chars(pool),
                or_none(&entry.key),
                strip_control_chars(&entry.reason),
                entry.attempts.map_or_else(|| "-".to_owned(), |attempts| attempts.to_string()),
                or_none(&entry.poisoned_at),
                or_none(&entry.worker),
                or_none(&entry.worker_exit),
                entry.body_bytes.to_string(),
            ]
        }));
    }
    if rows.is_empty() {
        return "the poison queue is empty\n".to_owned();
    }
    let mut out = table(head, rows);
    if more > 0 {
        // Writing to a String cannot fail.
        _ = writeln!(out, "  and {more} more");
    }
    out
}

fn details_table(entry: &PoisonedRequest) -> String {
    let mut rows = Vec::new();
    let mut row = |name: &str, value: Option<String>| {
        rows.extend(value.map(|value| vec![name.to_owned(), strip_control_chars(&value)]));
    };
    row("id", Some(entry.id.clone()));
    row("key", entry.key.clone());
    row("reason", Some(entry.reason.clone()));
    row("attempts", entry.attempts.map(|attempts| attempts.to_string()));
    let times = if entry.poison_count > 1 { format!(", {} times", entry.poison_count) } else { String::new() };
    row("moved at", entry.poisoned_at.as_ref().map(|at| format!("{at}{times}")));
    row("worker", entry.worker.clone());
    row("exit", entry.worker_exit.clone());
    row("body", Some(format!("{} bytes", entry.body_bytes)));
    for (name, value) in entry.properties.iter().chain(&entry.headers) {
        row(name, Some(value.clone()));
    }
    let mut out = align_columns(rows);
    if !entry.worker_log.is_empty() {
        out.push_str("  last lines of the worker log\n");
    }
    for line in &entry.worker_log {
        // Writing to a String cannot fail.
        _ = writeln!(out, "    {}", strip_control_chars(line));
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::controller::poison_queue::PoisonList;

    fn entry() -> PoisonedRequest {
        PoisonedRequest {
            id: "a1b2c3d4e5f6".to_owned(),
            key: Some("infra=4\u{1b}[2J".to_owned()),
            reason: "delivery_limit".to_owned(),
            attempts: Some(3),
            poisoned_at: Some("2026-11-22T07:00:00Z".to_owned()),
            poison_count: 2,
            worker: Some("w-7".to_owned()),
            worker_exit: Some("signal: 9 (SIGKILL)".to_owned()),
            worker_log: vec!["loading".to_owned(), "out of memory".to_owned()],
            body_bytes: 512,
            properties: BTreeMap::from([("correlation_id".to_owned(), "c".to_owned())]),
            headers: BTreeMap::from([("x-rpc-path".to_owned(), "/echo".to_owned())]),
        }
    }

    #[test]
    fn the_tables_show_the_worker_its_exit_and_its_log_without_the_body() {
        let one = PoisonList { requests: vec![entry()], not_scanned: 4 };
        let text = list_table(&Inventories::from([("core".to_owned(), one)]));
        for part in ["a1b2c3d4e5f6  core  infra=4 [2J", "delivery_limit  3 ", "signal: 9 (SIGKILL)  512", "and 4 more"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = details_table(&entry());
        for part in ["2 times", "512 bytes", "/echo", "    loading\n    out of memory\n"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(
            list_table(&Inventories::from([("core".to_owned(), PoisonList::default())])),
            "the poison queue is empty\n"
        );
    }

    #[test]
    fn the_message_names_each_request_that_failed() {
        let not = BTreeMap::from([("b".to_owned(), "no such request".to_owned())]);
        let outcome = PoisonOutcome { succeeded: vec!["a".to_owned()], failed: not, not_scanned: 2 };
        let text = "1 requeued\nb: not requeued: no such request\n2 more were not scanned; repeat the command\n";
        assert_eq!(outcome_message(&outcome, PoisonAction::Requeue), text);
    }
}
