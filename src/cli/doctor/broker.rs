//! Checks the connection to a broker, the request queue of a source, and the exchange for activity reports.

use tokio::time::timeout;

use super::Check;
use crate::amqp;
use crate::amqp::lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use crate::amqp::lapin::types::FieldTable;
use crate::amqp::lapin::{Connection, ExchangeKind};
use crate::cli::amqp_setup;
use crate::config::Environment;
use crate::config::schema::{Config, RequestSource};
use crate::domain::refusal::Refusal;
use crate::limits::{AMQP_CLOSE_TIMEOUT, DOCTOR_CALL_TIMEOUT};

pub(super) async fn check_source(
    name: String,
    source: RequestSource,
    config: Config,
    environment: Environment,
) -> Vec<Check> {
    let part = |part: &str| format!("{name}: {part}");
    let (connection, check) = match connect(part("broker"), &config, &environment).await {
        Ok(Connected { connection, check }) => (connection, check),
        Err(check) => return vec![check],
    };
    let mut checks = vec![check];
    let queue = amqp_setup::requests_queue(&source, &config);
    let declaring = async {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let channel = connection.create_channel().await?;
        channel
            .queue_declare(amqp::to_short_string_or_none(&queue).unwrap_or_default(), options, FieldTable::default())
            .await
    };
    checks.push(match timeout(DOCTOR_CALL_TIMEOUT, declaring).await {
        Ok(Ok(found)) => Check::ok(
            part("queue"),
            format!("{queue}: {} waiting, {} consumers", found.message_count(), found.consumer_count()),
        ),
        Ok(Err(error)) if amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => {
            let fix = "the controller declares it with the first request for its key; the worker waits for it";
            Check::warning(part("queue"), format!("queue {queue} does not exist"), fix)
        }
        Ok(Err(error)) => Check::failed(
            part("queue"),
            format!("{queue}: {}", amqp::error_text(&error)),
            "does this user have read permission?",
        ),
        Err(_) => {
            Check::failed(part("queue"), format!("{queue}: no response"), "does the broker have a resource alarm?")
        }
    });
    amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
    checks
}

pub(super) async fn check_pools_broker(config: Config, environment: Environment) -> Vec<Check> {
    match connect("pools: broker".to_owned(), &config, &environment).await {
        Ok(Connected { connection, check }) => {
            amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
            vec![check]
        }
        Err(check) => vec![check],
    }
}

struct Connected {
    connection: Connection,
    check: Check,
}

async fn connect(part: String, config: &Config, environment: &Environment) -> Result<Connected, Check> {
    let broker = match amqp_setup::build_broker(&config.amqp, environment) {
        Ok(broker) => broker,
        Err(failure) => return Err(Check::failed(part, failure.message, "see [amqp]")),
    };
    match broker.connect("journeyman doctor").await {
        Ok(connection) => Ok(Connected {
            connection,
            check: Check::ok(part, format!("{}: connected and authenticated", broker.display_url())),
        }),
        Err(refused) => {
            let fix = if refused.refusal == Refusal::Denied {
                "check user, password and virtual host of `amqp.uri`, and the user's permissions"
            } else {
                "check `amqp.uri`; is the broker running?"
            };
            Err(Check::failed(part, refused.message, fix))
        }
    }
}

pub(super) async fn check_activity(exchange: String, config: Config, environment: Environment) -> Vec<Check> {
    let part = || "activity".to_owned();
    let connected = match amqp_setup::build_broker(&config.amqp, &environment) {
        Ok(broker) => broker.connect("journeyman doctor").await.map_err(|refused| refused.message),
        Err(failure) => Err(failure.message),
    };
    let connection = match connected {
        Ok(connection) => connection,
        Err(what) => {
            return vec![Check::warning(part(), what, "no activity is reported without the broker; tasks still run")];
        }
    };
    let declaring = async {
        let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
        let name = amqp::to_short_string_or_none(&exchange).unwrap_or_default();
        let channel = connection.create_channel().await?;
        channel.exchange_declare(name, ExchangeKind::Fanout, options, FieldTable::default()).await
    };
    let check = match timeout(DOCTOR_CALL_TIMEOUT, declaring).await {
        Ok(Ok(())) => Check::ok(part(), format!("reported to {exchange}")),
        Ok(Err(error)) => {
            let what = format!("cannot report to {exchange}: {}", amqp::error_text(&error));
            Check::warning(
                part(),
                what,
                "the controller declares it; no activity is reported until then, tasks still run",
            )
        }
        Err(_) => Check::warning(part(), format!("{exchange}: no response"), "does the broker have a resource alarm?"),
    };
    amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
    vec![check]
}
