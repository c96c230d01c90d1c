//! `journeyman call`: asks a worker group over AMQP, and prints what it answers.

use std::io::Read as _;
use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::exit::{Ended, Exit, Failure};
use super::output;
use crate::amqp::{self, Broker, Certificates, Own};
use crate::client::{Answer, Call, CallError, Client, Part};
use crate::config::values::{Secret, Span};
use crate::config::{Environment, secrets};
use crate::limits::{CALL_ANSWER_TIMEOUT, CALL_BODY_BYTES_MAX, CALL_WHY_CHARS_MAX};

/// Where a broker is that nobody has named: RabbitMQ on this machine, as it is installed.
const BROKER: &str = "amqp://guest:guest@127.0.0.1:5672/";

/// `journeyman call`
#[derive(Debug, Args)]
pub(super) struct CallArgs {
    /// The pool; requests go to its exchange, POOL-req-xchg
    #[arg(long, value_name = "POOL", required_unless_present = "exchange")]
    pool: Option<String>,
    /// The exchange, where the pool's has another name
    #[arg(long, value_name = "NAME", conflicts_with = "pool")]
    exchange: Option<String>,
    /// Which worker group it is for
    #[arg(long, value_name = "KEY")]
    key: String,
    /// What is asked for, for workers that tell requests apart by a path
    #[arg(long, value_name = "PATH")]
    path: Option<String>,
    /// Print partial answers too, each when it comes
    #[arg(long)]
    stream: bool,
    /// Wait for no answer, only until the broker has the request
    #[arg(long, conflicts_with = "stream")]
    detach: bool,
    /// Nor until the broker has it for sure: a key that nobody works for, or a full queue, is not noticed
    #[arg(long, requires = "detach")]
    no_confirm: bool,
    /// How long to wait for the last answer; the broker drops the request after that [default: 30s; with --detach the request
    /// stays]
    #[arg(long, value_name = "TIME", value_parser = some_time)]
    timeout: Option<Span>,
    /// File that holds the broker's address, with user and password [env: JOURNEYMAN_AMQP_URI or WORKER_AMQP_URI holds the
    /// address itself] [default: RabbitMQ on this machine, as guest]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    amqp_uri_file: Option<PathBuf>,
    /// File with the certificates (PEM) that may vouch for the broker [default: this system's]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    amqp_ca: Option<PathBuf>,
    /// File with our own certificate (PEM), and those that vouch for it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "amqp_key")]
    amqp_certificate: Option<PathBuf>,
    /// File with its private key (PEM)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "amqp_certificate")]
    amqp_key: Option<PathBuf>,
    /// What to say, JSON for most workers; `-` reads it from standard input
    #[arg(value_name = "BODY", default_value = "null")]
    body: String,
}

/// Runs it.
///
/// # Errors
///
/// [`Exit::Unreachable`], [`Exit::Denied`] or [`Exit::Config`] about the broker, [`Exit::No`] where there is no good answer.
pub(super) async fn run(arguments: CallArgs, environment: &Environment) -> Ended {
    let broker = broker(&arguments, environment)?;
    let CallArgs { pool, exchange, key, path, timeout, .. } = arguments;
    let exchange = exchange.unwrap_or_else(|| format!("{}-req-xchg", pool.unwrap_or_default()));
    let call = Call { exchange, key, path, body: body(arguments.body)?, ..Call::default() };
    let timeout = timeout.map(|timeout| timeout.0);
    let call = Call { timeout: timeout.unwrap_or(CALL_ANSWER_TIMEOUT), expires: timeout, ..call };
    let client = Client::new(broker, "journeyman call");
    if arguments.detach {
        let sent = if arguments.no_confirm { client.send_unconfirmed(&call).await } else { client.send(&call).await };
        sent.map_err(failed)?;
        return Ok(Exit::Done);
    }
    let mut answers = client.stream(&call).await.map_err(failed)?;
    while let Some(answer) = answers.next().await {
        let answer = answer.map_err(failed)?;
        if answer.part == Part::Partial && !arguments.stream {
            continue;
        }
        output::print_raw(&answer.body)?;
        if !answer.body.is_empty() && !answer.body.ends_with(b"\n") {
            output::print_raw(b"\n")?;
        }
        if answer.part == Part::Last && !answer.is_ok() {
            return Err(Failure::new(Exit::No, refusal(&answer)));
        }
    }
    Ok(Exit::Done)
}

/// A time in which something can come.
fn some_time(text: &str) -> Result<Span, String> {
    let span: Span = text.parse()?;
    if span.0.is_zero() {
        return Err("no answer comes in no time; leave it out for 30s, or give it as long as you would wait".to_owned());
    }
    Ok(span)
}

fn broker(arguments: &CallArgs, environment: &Environment) -> Result<Broker, Failure> {
    let named = ["JOURNEYMAN__AMQP__URI", "JOURNEYMAN_AMQP_URI", "WORKER_AMQP_URI"]
        .into_iter()
        .find_map(|name| environment.get(name));
    let uri = match &arguments.amqp_uri_file {
        Some(path) => secrets::read(path, "the address of a broker")?,
        None => Secret::new(named.unwrap_or(BROKER)),
    };
    let own = arguments.amqp_certificate.clone().zip(arguments.amqp_key.clone());
    let own = own.map(|(certificate, key)| Own { certificate, key });
    let certificates = Certificates { ca: arguments.amqp_ca.clone(), own };
    let settings = amqp::Settings { uri: uri.reveal().to_owned().into(), certificates };
    Broker::new(&settings).map_err(|error| Failure::of(Exit::Config, &error))
}

fn body(argument: String) -> Result<Vec<u8>, Failure> {
    if argument != "-" {
        return Ok(argument.into_bytes());
    }
    let mut body = Vec::new();
    let most = CALL_BODY_BYTES_MAX as u64 + 1;
    std::io::stdin().lock().take(most).read_to_end(&mut body)?;
    Ok(body)
}

fn failed(error: CallError) -> Failure {
    let exit = match error {
        CallError::Denied(_) => Exit::Denied,
        CallError::Unreachable(_) | CallError::Lost => Exit::Unreachable,
        CallError::NoPool(_)
        | CallError::NoGroup { .. }
        | CallError::NotTaken
        | CallError::TimedOut(_)
        | CallError::Overrun
        | CallError::TooLarge { .. }
        | CallError::TooLong(_) => Exit::No,
    };
    Failure::of(exit, &error)
}

/// A sentence about an answer that says no. Whatever it says more is in its body.
fn refusal(answer: &Answer) -> String {
    let status = answer.status.as_deref().unwrap_or("nothing about how it went");
    let said: Option<serde_json::Value> = serde_json::from_slice(&answer.body).ok();
    let text = |path: &str| said.as_ref()?.pointer(path)?.as_str().map(str::to_owned);
    let reason = answer.reason.clone().or_else(|| text("/context/reason"));
    let message = text("/message").map(|text| text.chars().take(CALL_WHY_CHARS_MAX).collect::<String>());
    match (reason, message) {
        (Some(reason), Some(message)) => format!("the answer is {status} ({reason}): {message}"),
        (Some(why), None) | (None, Some(why)) => format!("the answer is {status}: {why}"),
        (None, None) => format!("the answer is {status}"),
    }
}
