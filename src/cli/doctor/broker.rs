//! Checks the connection to a broker, the request queue of a source, and the exchange for activity reports.

use tokio::time::timeout;

use super::Check;
use crate::amqp;
use crate::amqp::lapin::Connection;
use crate::cli::amqp_setup;
use crate::config::Environment;
use crate::config::schema::{Config, RequestSource};
use crate::domain::refusal::Refusal;
use crate::limits::{AMQP_CLOSE_TIMEOUT, DOCTOR_CALL_TIMEOUT};

const ALARM: &str = "does the broker have a resource alarm?";

pub(super) async fn check_source(
    name: &str,
    source: &RequestSource,
    config: &Config,
    environment: &Environment,
) -> Vec<Check> {
    let part = format!("{name}: queue");
    let (connection, check) = match connect(format!("{name}: broker"), config, environment).await {
        Ok(connected) => connected,
        Err(check) => return vec![check],
    };
    let queue = config.requests_queue(source);
    let queue_name = amqp::to_short_string_or_none(&queue).unwrap_or_default();
    let found = match timeout(DOCTOR_CALL_TIMEOUT, amqp::find_queue(&connection, queue_name)).await {
        Ok(Ok(found)) => {
            let counts = format!("{} waiting, {} consumers", found.message_count(), found.consumer_count());
            Check::ok(part, format!("{queue}: {counts}"))
        }
        Ok(Err(error)) if amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => {
            let fix = "the controller declares it with the first request for its key; the worker waits for it";
            Check::warning(part, format!("queue {queue} does not exist"), fix)
        }
        Ok(Err(error)) => {
            let found = format!("{queue}: {}", amqp::error_text(&error));
            Check::failed(part, found, "does this user have read permission?")
        }
        Err(_) => Check::failed(part, format!("{queue}: no response"), ALARM),
    };
    amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
    vec![check, found]
}

pub(super) async fn check_pools_broker(config: &Config, environment: &Environment) -> Vec<Check> {
    match connect("pools: broker".to_owned(), config, environment).await {
        Ok((connection, check)) => {
            amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
            vec![check]
        }
        Err(check) => vec![check],
    }
}

async fn connect(part: String, config: &Config, environment: &Environment) -> Result<(Connection, Check), Check> {
    let broker = match amqp_setup::build_broker(&config.amqp, environment) {
        Ok(broker) => broker,
        Err(failure) => return Err(Check::failed(part, failure.message, "see [amqp]")),
    };
    match broker.connect("journeyman doctor").await {
        Ok(connection) => {
            let check = Check::ok(part, format!("{}: connected and authenticated", broker.display_url()));
            Ok((connection, check))
        }
        Err(refused) => {
            let fix = if refused.refusal == Refusal::Denied {
                "check user, password and virtual host of the broker's URI, and the user's permissions"
            } else {
                "check `amqp.uri_file` or WORKER_AMQP_URI; is the broker running?"
            };
            Err(Check::failed(part, refused.message, fix))
        }
    }
}

/// Tasks run without the exchange, so that its failures are warnings.
pub(super) async fn check_activity(exchange: &str, config: &Config, environment: &Environment) -> Vec<Check> {
    let part = "activity";
    let connection = match connect(part.to_owned(), config, environment).await {
        Ok((connection, _)) => connection,
        Err(check) => {
            let fix = "no activity is reported without the broker; tasks still run";
            return vec![Check::warning(part, check.result, fix)];
        }
    };
    let name = amqp::to_short_string_or_none(exchange).unwrap_or_default();
    let check = match timeout(DOCTOR_CALL_TIMEOUT, amqp::find_exchange(&connection, name)).await {
        Ok(Ok(())) => Check::ok(part, format!("reported to {exchange}")),
        Ok(Err(error)) => {
            let fix = "the controller declares it; no activity is reported until then, tasks still run";
            Check::warning(part, format!("cannot report to {exchange}: {}", amqp::error_text(&error)), fix)
        }
        Err(_) => Check::warning(part, format!("{exchange}: no response"), ALARM),
    };
    amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
    vec![check]
}
