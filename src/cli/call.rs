//! `journeyman call`: sends a request to a worker group over AMQP, and prints the replies.

use std::io::Read as _;
use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::exit::{Exit, ExitResult, Failure};
use super::output;
use crate::amqp::{Broker, BrokerConfig, ClientCertificate};
use crate::client::{ReplyPosition, RpcClient, RpcError, RpcRequest};
use crate::config::values::{Secret, Span};
use crate::config::{Environment, secrets};
use crate::limits::{CALL_BODY_BYTES_MAX, RPC_TIMEOUT_DEFAULT};

/// `journeyman call`
#[derive(Debug, Args)]
pub(super) struct CallArgs {
    /// Pool of the worker group; its exchange is POOL-req-xchg
    #[arg(long, value_name = "POOL", required_unless_present = "exchange")]
    pool: Option<String>,
    /// Exchange to publish to, where it is not named after the pool
    #[arg(long, value_name = "NAME", conflicts_with = "pool")]
    exchange: Option<String>,
    /// Key of the worker group
    #[arg(long, value_name = "KEY")]
    key: String,
    /// Method to call, for workers with several
    #[arg(long, value_name = "PATH")]
    path: Option<String>,
    /// Print partial replies too, each when it arrives
    #[arg(long)]
    stream: bool,
    /// Exit once the broker has the request, without waiting for a reply
    #[arg(long, conflicts_with = "stream")]
    detach: bool,
    /// How long to wait for the last reply; the broker drops the request after that [default: 30s; with --detach the request
    /// does not expire]
    #[arg(long, value_name = "TIME")]
    timeout: Option<Span>,
    /// File with the broker's address, user and password [env: JOURNEYMAN_AMQP_URI or WORKER_AMQP_URI holds the address
    /// itself] [default: RabbitMQ on this machine, as guest]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    amqp_uri_file: Option<PathBuf>,
    /// File with the CA certificates (PEM) for the broker [default: those of the system]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    amqp_ca: Option<PathBuf>,
    /// File with the client certificate (PEM) and its intermediates
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "amqp_key")]
    amqp_certificate: Option<PathBuf>,
    /// File with the private key (PEM) of the client certificate
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "amqp_certificate")]
    amqp_key: Option<PathBuf>,
    /// Body of the request, JSON for most workers; `-` reads it from standard input
    #[arg(value_name = "BODY", default_value = "null")]
    body: String,
}

/// Runs the command.
///
/// # Errors
///
/// [`Exit::Unreachable`], [`Exit::Denied`] or [`Exit::Config`] about the broker, [`Exit::Failed`] without a reply, or with an error reply.
pub(super) async fn run(arguments: CallArgs, environment: &Environment) -> ExitResult {
    let broker = broker_from_args(&arguments, environment)?;
    let CallArgs { pool, exchange, key, path, timeout, .. } = arguments;
    let exchange = exchange.unwrap_or_else(|| format!("{}-req-xchg", pool.unwrap_or_default()));
    let call =
        RpcRequest { exchange, routing_key: key, path, body: read_body(arguments.body)?, ..RpcRequest::default() };
    let timeout = timeout.map(|timeout| timeout.0);
    let call = RpcRequest { timeout: timeout.unwrap_or(RPC_TIMEOUT_DEFAULT), message_ttl: timeout, ..call };
    let client = RpcClient::new(broker, "journeyman call");
    if arguments.detach {
        client.send(&call).await.map_err(call_failure)?;
        return Ok(Exit::Success);
    }
    let mut replies = client.stream(&call).await.map_err(call_failure)?;
    let mut out = output::UntrustedOutput::to_stdout();
    while let Some(reply) = replies.next().await {
        let reply = reply.map_err(call_failure)?;
        if reply.position == ReplyPosition::Partial && !arguments.stream {
            continue;
        }
        out.print(&reply.body)?;
        if !reply.body.is_empty() && !reply.body.ends_with(b"\n") {
            out.print(b"\n")?;
        }
        if reply.position == ReplyPosition::Last && !reply.is_ok() {
            return Err(Failure::new(Exit::Failed, reply.status_text()));
        }
    }
    Ok(Exit::Success)
}

fn broker_from_args(arguments: &CallArgs, environment: &Environment) -> Result<Broker, Failure> {
    let uri = match &arguments.amqp_uri_file {
        Some(path) => secrets::read_file(path, "the address of a broker")?,
        None => Secret::new(environment.amqp_uri().unwrap_or(secrets::AMQP_URI_DEFAULT)),
    };
    let client = arguments.amqp_certificate.clone().zip(arguments.amqp_key.clone());
    let client = client.map(|(certificate, key)| ClientCertificate { certificate, key });
    let settings = BrokerConfig { ca: arguments.amqp_ca.clone(), client, ..BrokerConfig::new(uri.reveal().to_owned()) };
    Broker::new(&settings).map_err(|error| Failure::from_error(Exit::Config, &error))
}

fn read_body(argument: String) -> Result<Vec<u8>, Failure> {
    if argument != "-" {
        return Ok(argument.into_bytes());
    }
    let mut body = Vec::new();
    let max = CALL_BODY_BYTES_MAX as u64 + 1;
    std::io::stdin().lock().take(max).read_to_end(&mut body)?;
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
    if matches!(error, RpcError::TimedOut(_)) {
        let hint = "has the key a worker that serves this path? `journeyman controller status` shows its group, `journeyman controller \
                    poison list` what was given up";
        return Failure::new(exit, format!("{error}; {hint}"));
    }
    Failure::from_error(exit, &error)
}
