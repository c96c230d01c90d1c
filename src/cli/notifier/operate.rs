//! `journeyman notifier status`, `lanes`, `replay` and what else operators see and change in a running notifier.

use std::str::FromStr;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize as _, Serialize};
use serde_json::{Value, json};

use super::client::{Client, ClientArgs};
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::output::{self, Format};
use crate::console::rows::Table;
use crate::console::{notifier as console, text};
use journeyman_domain::lane::retry::MessageOutcome;
use journeyman_domain::staged::Stamp;
use journeyman_platform::host::clock::stamp;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::Span;
use journeyman_services::notifier::{AttemptRow, MessagePage, MessageRow, Status};

/// How to reach the notifier, and how to print.
#[derive(Debug, Args)]
pub(super) struct CallArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    #[command(flatten)]
    client: ClientArgs,
}

#[derive(Debug, Args)]
pub(super) struct ChangeArgs {
    /// Why, for other operators
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
    #[command(flatten)]
    call: CallArgs,
}

#[derive(Debug, Args)]
pub(super) struct RowsArgs {
    /// Rows of this endpoint only
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<String>,
    /// How many [default: 100]
    #[arg(long, value_name = "COUNT")]
    limit: Option<u32>,
    #[command(flatten)]
    call: CallArgs,
}

#[derive(Debug, Args)]
pub(super) struct EndpointChangeArgs {
    /// Name of the endpoint
    endpoint: String,
    #[command(flatten)]
    change: ChangeArgs,
}

/// An endpoint or a lane.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(super) struct Target {
    /// Name of the endpoint
    #[arg(value_name = "ENDPOINT")]
    endpoint: Option<String>,
    /// One lane instead, by its number in `journeyman notifier lanes`
    #[arg(long, value_name = "LANE")]
    lane: Option<i64>,
}

impl Target {
    fn path(self) -> (&'static str, String) {
        match self.lane {
            Some(lane) => ("lanes", lane.to_string()),
            None => ("endpoints", self.endpoint.unwrap_or_default()),
        }
    }
}

#[derive(Debug, Subcommand)]
pub(super) enum OperateCommand {
    /// Show whether each endpoint gets its messages, why not, and what waits
    #[command(visible_alias = "endpoints")]
    Status(CallArgs),
    /// List lanes that have messages or are stopped, the oldest head first
    Lanes {
        /// Lanes of this key, also empty ones
        #[arg(long, value_name = "KEY")]
        key: Option<String>,
        #[command(flatten)]
        rows: RowsArgs,
    },
    /// List attempts with what came back, the latest first
    Attempts {
        /// Attempts in this lane only
        #[arg(long, value_name = "LANE")]
        lane: Option<i64>,
        #[command(flatten)]
        rows: RowsArgs,
    },
    /// List messages of the latest events, or export them
    Messages(Box<MessagesArgs>),
    /// Show a message with its data and its attempts
    Message {
        /// Number of the lane
        lane: i64,
        /// Position of the message in it
        position: i64,
        #[command(flatten)]
        call: CallArgs,
    },
    /// Show the definition of an endpoint, without its secrets
    Endpoint {
        /// Name of the endpoint
        endpoint: String,
        #[command(flatten)]
        call: CallArgs,
    },
    /// Try what waits for an endpoint at once, also if it is disabled or paused
    Redeliver(EndpointChangeArgs),
    /// Send messages that have ended once more, in order
    Replay(Box<ReplayArgs>),
    /// Give up the message that a lane waits for
    SkipHead {
        /// Number of the lane
        lane: i64,
        /// Position of its head in `journeyman notifier lanes`, so that no other message is skipped
        #[arg(long, value_name = "NUMBER")]
        position: i64,
        /// Why it is never delivered
        #[arg(long, value_name = "TEXT")]
        reason: String,
        #[command(flatten)]
        call: CallArgs,
    },
    /// Deliver nothing to an endpoint or of a lane; messages are kept
    Pause {
        #[command(flatten)]
        target: Target,
        /// Resume after this time [default: until `journeyman notifier resume`]
        #[arg(long = "for", value_name = "TIME")]
        span: Option<Span<1_000>>,
        #[command(flatten)]
        change: ChangeArgs,
    },
    /// End a pause, or open a lane that is parked
    Resume {
        #[command(flatten)]
        target: Target,
        #[command(flatten)]
        change: ChangeArgs,
    },
    /// Deliver nothing to an endpoint until it is enabled; messages are kept
    Disable(EndpointChangeArgs),
    /// Deliver to an endpoint again
    Enable(EndpointChangeArgs),
    /// Send an endpoint an event of type `notifier.test`
    Test {
        /// Name of the endpoint
        endpoint: String,
        #[command(flatten)]
        call: CallArgs,
    },
}

/// Which events messages are of.
#[derive(Debug, Args)]
pub(super) struct EventArgs {
    /// Messages with this key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Messages of events with this type
    #[arg(long = "type", value_name = "TYPE")]
    event_type: Option<String>,
    /// Messages of the event with this id
    #[arg(long, value_name = "ID")]
    event: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct ReplayArgs {
    /// Name of the endpoint
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: String,
    /// Events that came at this time or later, such as 2026-11-26T10:00:00Z, or `2h` ago
    #[arg(long, value_name = "TIME")]
    since: Option<PastTime>,
    /// Events that came before
    #[arg(long, value_name = "TIME")]
    until: Option<PastTime>,
    #[command(flatten)]
    events: EventArgs,
    /// Messages that have ended so
    #[arg(long, value_parser = PossibleValuesParser::new(MessageOutcome::ALL.map(MessageOutcome::as_str)))]
    outcome: Option<String>,
    /// Only count them
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    call: CallArgs,
}

#[derive(Debug, Args)]
pub(super) struct MessagesArgs {
    #[command(flatten)]
    events: EventArgs,
    /// Messages in this state; `dead` are those that were never delivered
    #[arg(long, value_parser = PossibleValuesParser::new(console::message_states()))]
    outcome: Option<String>,
    /// Messages whose event has this text in its data
    #[arg(long, value_name = "TEXT")]
    contains: Option<String>,
    /// The `next` of the page before
    #[arg(long, value_name = "NUMBER")]
    before: Option<i64>,
    /// Print all pages, each message as a line of JSON with its data
    #[arg(long)]
    export: bool,
    #[command(flatten)]
    rows: RowsArgs,
}

async fn list_messages(arguments: MessagesArgs, environment: &Environment) -> Result<(), Failure> {
    let MessagesArgs { events, outcome, contains, mut before, export, rows } = arguments;
    let RowsArgs { endpoint, limit, call } = rows;
    let client = Client::new(call.client, environment)?;
    loop {
        let number = |number: Option<i64>| number.map(|number| number.to_string());
        let query = [
            ("endpoint", endpoint.clone()),
            ("key", events.key.clone()),
            ("type", events.event_type.clone()),
            ("event_id", events.event.clone()),
            ("outcome", outcome.clone()),
            ("contains", contains.clone()),
            ("before", number(before)),
            ("limit", limit.map(|limit| limit.to_string())),
            ("data", export.then(|| "true".to_owned())),
        ];
        let page: MessagePage = client.get(&["messages"], &query).await?;
        if !export {
            return Ok(output::show(&page, call.output, |page| {
                let next = page.next.map(|next| format!("\nmore with --before {next}\n")).unwrap_or_default();
                text::table(&console::message_table(&page.messages, stamp())) + &next
            })?);
        }
        for message in &page.messages {
            output::line(&json!(message).to_string())?;
        }
        before = page.next;
        if before.is_none() {
            return Ok(());
        }
    }
}

/// A time, or how long ago it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PastTime(Timestamp);

impl FromStr for PastTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(time) = text.parse() {
            return Ok(Self(time));
        }
        let span = text.parse::<Span>().map_err(|_| "a time such as 2026-11-26T10:00:00Z, or `2h` ago".to_owned())?;
        Timestamp::now().checked_sub(span.0).map(Self).map_err(|error| error.to_string())
    }
}

/// # Errors
///
/// [`Exit::Unreachable`] without an answer, [`Exit::Denied`] for a token that may not, [`Exit::Failed`] for a refused call.
pub(super) async fn run(command: OperateCommand, environment: &Environment) -> ExitResult {
    match command {
        OperateCommand::Status(call) => {
            let client = Client::new(call.client, environment)?;
            let status: Status = client.get(&["status"], &[]).await?;
            output::show(&status, call.output, |status| text::section(&console::status(status, stamp())))?;
        }
        OperateCommand::Lanes { key, rows } => {
            show_rows("lanes", ("key", key), rows, console::lane_table, environment).await?
        }
        OperateCommand::Attempts { lane, rows } => {
            let of = ("lane", lane.map(|lane| lane.to_string()));
            show_rows("attempts", of, rows, console::attempt_table, environment).await?;
        }
        OperateCommand::Messages(arguments) => list_messages(*arguments, environment).await?,
        OperateCommand::Message { lane, position, call } => {
            let path = ["messages", &lane.to_string(), &position.to_string()];
            let found: Value = Client::new(call.client, environment)?.get(&path, &[]).await?;
            let message = MessageRow::deserialize(&found["message"]).map_err(|error| unreadable(&error))?;
            let attempts = Vec::<AttemptRow>::deserialize(&found["attempts"]).map_err(|error| unreadable(&error))?;
            output::show(&found, call.output, |_| {
                let (now, data) = (stamp(), message.data.as_ref().map_or("", |data| data.get()));
                let table = console::message_table(std::slice::from_ref(&message), now);
                format!("{}{data}\n{}", text::table(&table), text::table(&console::attempt_table(&attempts, now)))
            })?;
        }
        OperateCommand::Endpoint { endpoint, call } => {
            let found: Value = Client::new(call.client, environment)?.get(&["endpoints", &endpoint], &[]).await?;
            output::json(&found)?;
        }
        OperateCommand::Redeliver(EndpointChangeArgs { endpoint, change }) => {
            note_one(("endpoints", endpoint), "redeliver", "what waits is tried now", change, environment).await?;
        }
        OperateCommand::Replay(arguments) => {
            let ReplayArgs { endpoint, since, until, events, outcome, dry_run, call } = *arguments;
            let time = |time: Option<PastTime>| time.map(|time| time.0.to_string());
            let asked = json!({
                "endpoint": endpoint, "since": time(since), "until": time(until), "key": events.key, "type": events.event_type,
                "event_id": events.event, "outcome": outcome, "dry_run": dry_run,
            });
            let answer = Client::new(call.client, environment)?.post(&["replay"], &asked).await?;
            let does = if dry_run { "would be" } else { "are" };
            output::show(&answer, call.output, |answer| {
                format!("{} messages {does} sent again\n", answer["messages"])
            })?;
        }
        OperateCommand::SkipHead { lane, position, reason, call } => {
            let (of, done) = (("lanes", lane.to_string()), format!("message {position} is skipped"));
            let body = json!({ "position": position, "note": reason });
            change_one(of, "skip-head", &done, body, call, environment).await?;
        }
        OperateCommand::Pause { target, span, change } => {
            let body = json!({ "seconds": span.map(|span| span.0.as_secs()), "note": change.note });
            change_one(target.path(), "pause", "paused", body, change.call, environment).await?;
        }
        OperateCommand::Resume { target, change } => {
            note_one(target.path(), "resume", "resumed", change, environment).await?;
        }
        OperateCommand::Disable(EndpointChangeArgs { endpoint, change }) => {
            note_one(("endpoints", endpoint), "disable", "disabled", change, environment).await?;
        }
        OperateCommand::Enable(EndpointChangeArgs { endpoint, change }) => {
            note_one(("endpoints", endpoint), "enable", "enabled", change, environment).await?;
        }
        OperateCommand::Test { endpoint, call } => {
            let done = "a `notifier.test` is sent; `journeyman notifier attempts` has what comes back";
            change_one(("endpoints", endpoint), "test", done, json!({}), call, environment).await?;
        }
    }
    Ok(Exit::Success)
}

fn unreadable(error: &serde_json::Error) -> Failure {
    Failure::new(Exit::Failed, format!("cannot read the answer of the notifier: {error}"))
}

async fn show_rows<T: Serialize + DeserializeOwned>(
    path: &str,
    of: (&str, Option<String>),
    RowsArgs { endpoint, limit, call }: RowsArgs,
    table: fn(&[T], Stamp) -> Table,
    environment: &Environment,
) -> Result<(), Failure> {
    let limit = limit.map(|limit| limit.to_string());
    let rows: Vec<T> =
        Client::new(call.client, environment)?.get(&[path], &[("endpoint", endpoint), ("limit", limit), of]).await?;
    Ok(output::show(&rows, call.output, |rows| text::table(&table(rows, stamp())))?)
}

async fn note_one(
    of: (&str, String),
    action: &str,
    done: &str,
    ChangeArgs { note, call }: ChangeArgs,
    environment: &Environment,
) -> Result<(), Failure> {
    change_one(of, action, done, json!({ "note": note }), call, environment).await
}

/// Changes an endpoint or a lane.
async fn change_one(
    (kind, name): (&str, String),
    action: &str,
    done: &str,
    body: Value,
    call: CallArgs,
    environment: &Environment,
) -> Result<(), Failure> {
    let answer = Client::new(call.client, environment)?.post(&[kind, &name, action], &body).await?;
    let done = format!("{} {name}: {done}\n", kind.trim_end_matches('s'));
    Ok(output::show(&answer, call.output, |_| done)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_one_of_the_calendar_or_a_span_before_now() {
        assert_eq!("2026-11-26T10:00:00Z".parse(), Ok(PastTime("2026-11-26T10:00:00Z".parse().unwrap())));
        let PastTime(time) = "2h".parse().unwrap();
        let ago = Timestamp::now().duration_since(time);
        assert!((7_200..7_260).contains(&ago.as_secs()), "{ago:?}");
        assert!("yesterday".parse::<PastTime>().unwrap_err().contains("`2h` ago"));
    }
}
