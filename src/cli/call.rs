//! `journeyman call`: sends a request to a worker group over AMQP, and prints the replies.

use std::io::Read as _;

use clap::Args;

use super::config_args::{ConfigArgs, NoFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::{amqp_setup, output};
use journeyman_domain::limits::{CALL_BODY_BYTES_MAX, RPC_TIMEOUT_DEFAULT};
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::Span;
use journeyman_services::client::{ReplyPosition, RpcClient, RpcError, RpcRequest};

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
    /// Body of the request, JSON for most workers; `-` reads it from standard input
    #[arg(value_name = "BODY", default_value = "null")]
    body: String,
    /// For `[amqp]`: the broker's address, user and password, and its certificates.
    #[command(flatten)]
    settings: ConfigArgs<NoFlags>,
}

/// Runs the command.
///
/// # Errors
///
/// [`Exit::Unreachable`], [`Exit::Denied`] or [`Exit::Config`] about the broker, [`Exit::Failed`] without a reply, or with an error reply.
pub(super) async fn run(arguments: CallArgs, environment: &Environment) -> ExitResult {
    let config = arguments.settings.load(&environment.without_controller_variables())?.config;
    let broker = amqp_setup::build_broker(&config.amqp, environment)?;
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
