//! `journeyman notifier send`: hands one event to a running notifier.

use std::io::Read as _;

use clap::Args;
use serde_json::value::RawValue;

use super::client::{ClientArgs, failure};
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::output;
use journeyman_domain::limits::NOTIFIER_DATA_BYTES_MAX;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::Span;
use journeyman_worker::notify::{Event, Publisher};

/// `journeyman notifier send`
#[derive(Debug, Args)]
pub(super) struct SendArgs {
    /// Type of the event, such as `build.finished`
    #[arg(long = "type", value_name = "TYPE")]
    event_type: String,
    /// Key of the event: events of one key arrive in order
    #[arg(long, value_name = "KEY")]
    key: String,
    /// Id of the event, printed once the notifier has it; the notifier takes the same id of a source once [default: a random one]
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// Who sends the event
    #[arg(long, value_name = "NAME", default_value = "journeyman-send")]
    source: String,
    /// Run of what the key names, from 0; a higher one counts events from 1 again
    #[arg(long, value_name = "NUMBER")]
    epoch: Option<u32>,
    /// No other event of the key and epoch follows
    #[arg(long)]
    last: bool,
    /// Data of the event, JSON; `-` reads it from standard input
    #[arg(long, value_name = "JSON", default_value = "-")]
    data: String,
    /// Give up after this time; until then the event is sent again if there is no answer
    #[arg(long, value_name = "TIME", default_value = "30s")]
    timeout: Span,
    #[command(flatten)]
    client: ClientArgs,
}

/// # Errors
///
/// [`Exit::Unreachable`] without an answer in time, [`Exit::Denied`] for a wrong token, [`Exit::Failed`] for a refused event.
pub(super) async fn run(arguments: SendArgs, environment: &Environment) -> ExitResult {
    let mut publisher = Publisher::new(arguments.client.client(environment)?);
    let id = arguments.id.unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let event = Event {
        source: arguments.source,
        id: id.clone(),
        r#type: arguments.event_type,
        key: arguments.key,
        epoch: arguments.epoch,
        last: arguments.last,
        time: Some(jiff::Timestamp::now()),
        data: read_data(arguments.data)?,
    };
    event.check().map_err(|why| Failure::new(Exit::Failed, why))?;
    let sent = publisher.publish_within(&[event], arguments.timeout.0).await.map_err(failure);
    sent.map_err(|Failure { exit, message }| Failure { exit, message: format!("event `{id}`: {message}") })?;
    output::line(&id)?;
    Ok(Exit::Success)
}

fn read_data(argument: String) -> Result<Box<RawValue>, Failure> {
    let mut text = argument;
    if text == "-" {
        text.clear();
        let max = NOTIFIER_DATA_BYTES_MAX as u64 + 1;
        std::io::stdin().lock().take(max).read_to_string(&mut text)?;
    }
    let invalid = |error: serde_json::Error| {
        let place = format!("line {}, column {}", error.line(), error.column());
        let text = format!("the data are no JSON at {place}; a text is in quotes, `null` stands for none");
        Failure::new(Exit::Usage, text)
    };
    // Without the line break that `echo` adds.
    RawValue::from_string(text.trim().to_owned()).map_err(invalid)
}
