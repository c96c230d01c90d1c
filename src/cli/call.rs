//! `journeyman call`: asks a worker group over AMQP, and prints what it answers.

use std::io::Read as _;
use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::exit::{Exit, ExitResult, Failure};
use super::output;
use crate::amqp::{self, Broker, ClientCertificate, TlsFiles};
use crate::client::{ReplyPosition, RpcClient, RpcError, RpcReply, RpcRequest};
use crate::config::values::{Secret, Span};
use crate::config::{Environment, secrets};
use crate::limits::{CALL_ANSWER_TIMEOUT, CALL_BODY_BYTES_MAX, CALL_REASON_CHARS_MAX};

/// Where a broker is that nobody has named: RabbitMQ on this machine, as it is installed.
const BROKER_URI_DEFAULT: &str = "amqp://guest:guest@127.0.0.1:5672/";

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
    #[arg(long, value_name = "TIME", value_parser = parse_timeout)]
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
/// [`Exit::Unreachable`], [`Exit::Denied`] or [`Exit::Config`] about the broker, [`Exit::Failed`] where there is no good answer.
pub(super) async fn run(arguments: CallArgs, environment: &Environment) -> ExitResult {
    let broker = broker_from_args(&arguments, environment)?;
    let CallArgs { pool, exchange, key, path, timeout, .. } = arguments;
    let exchange = exchange.unwrap_or_else(|| format!("{}-req-xchg", pool.unwrap_or_default()));
    let call =
        RpcRequest { exchange, routing_key: key, path, body: read_body(arguments.body)?, ..RpcRequest::default() };
    let timeout = timeout.map(|timeout| timeout.0);
    let call = RpcRequest { timeout: timeout.unwrap_or(CALL_ANSWER_TIMEOUT), message_ttl: timeout, ..call };
    let client = RpcClient::new(broker, "journeyman call");
    if arguments.detach {
        let sent = if arguments.no_confirm { client.send_unconfirmed(&call).await } else { client.send(&call).await };
        sent.map_err(call_failure)?;
        return Ok(Exit::Success);
    }
    let mut answers = client.stream(&call).await.map_err(call_failure)?;
    while let Some(answer) = answers.next().await {
        let answer = answer.map_err(call_failure)?;
        if answer.position == ReplyPosition::Partial && !arguments.stream {
            continue;
        }
        output::print_raw(&answer.body)?;
        if !answer.body.is_empty() && !answer.body.ends_with(b"\n") {
            output::print_raw(b"\n")?;
        }
        if answer.position == ReplyPosition::Last && !answer.is_ok() {
            return Err(Failure::new(Exit::Failed, refusal_message(&answer)));
        }
    }
    Ok(Exit::Success)
}

/// A time in which something can come.
fn parse_timeout(text: &str) -> Result<Span, String> {
    let span: Span = text.parse()?;
    if span.0.is_zero() {
        return Err("no answer comes in no time; leave it out for 30s, or give it as long as you would wait".to_owned());
    }
    Ok(span)
}

fn broker_from_args(arguments: &CallArgs, environment: &Environment) -> Result<Broker, Failure> {
    let named = ["JOURNEYMAN__AMQP__URI", "JOURNEYMAN_AMQP_URI", "WORKER_AMQP_URI"]
        .into_iter()
        .find_map(|name| environment.get(name));
    let uri = match &arguments.amqp_uri_file {
        Some(path) => secrets::read(path, "the address of a broker")?,
        None => Secret::new(named.unwrap_or(BROKER_URI_DEFAULT)),
    };
    let own = arguments.amqp_certificate.clone().zip(arguments.amqp_key.clone());
    let own = own.map(|(certificate, key)| ClientCertificate { certificate, key });
    let certificates = TlsFiles { ca: arguments.amqp_ca.clone(), client: own };
    let settings = amqp::BrokerConfig { uri: uri.reveal().to_owned().into(), tls: certificates };
    Broker::new(&settings).map_err(|error| Failure::from_error(Exit::Config, &error))
}

fn read_body(argument: String) -> Result<Vec<u8>, Failure> {
    if argument != "-" {
        return Ok(argument.into_bytes());
    }
    let mut body = Vec::new();
    let most = CALL_BODY_BYTES_MAX as u64 + 1;
    std::io::stdin().lock().take(most).read_to_end(&mut body)?;
    Ok(body)
}

fn call_failure(error: RpcError) -> Failure {
    let exit = match error {
        RpcError::Denied(_) => Exit::Denied,
        RpcError::Unreachable(_) | RpcError::ConnectionLost => Exit::Unreachable,
        RpcError::ExchangeNotFound(_)
        | RpcError::Unroutable { .. }
        | RpcError::Nacked
        | RpcError::TimedOut(_)
        | RpcError::Overrun
        | RpcError::TooLarge { .. }
        | RpcError::NameTooLong(_) => Exit::Failed,
    };
    Failure::from_error(exit, &error)
}

/// A sentence about an answer that says no. Whatever it says more is in its body.
fn refusal_message(answer: &RpcReply) -> String {
    let status = answer.status.as_deref().unwrap_or("nothing about how it went");
    let said: Option<serde_json::Value> = serde_json::from_slice(&answer.body).ok();
    let text = |path: &str| said.as_ref()?.pointer(path)?.as_str().map(str::to_owned);
    let reason = answer.reason.clone().or_else(|| text("/context/reason"));
    let message = text("/message").map(|text| text.chars().take(CALL_REASON_CHARS_MAX).collect::<String>());
    match (reason, message) {
        (Some(reason), Some(message)) => format!("the answer is {status} ({reason}): {message}"),
        (Some(why), None) | (None, Some(why)) => format!("the answer is {status}: {why}"),
        (None, None) => format!("the answer is {status}"),
    }
}
