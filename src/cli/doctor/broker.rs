//! Looks at a broker: whether it lets us in, and whether the queue of requests and the exchange for reports are there.

use tokio::time::timeout;

use super::Check;
use crate::amqp;
use crate::amqp::lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use crate::amqp::lapin::types::FieldTable;
use crate::amqp::lapin::{Connection, ExchangeKind};
use crate::cli::amqp_setup;
use crate::config::Environment;
use crate::config::schema::{Config, Source};
use crate::domain::refusal::Refusal;
use crate::limits::{AMQP_CLOSE_TIMEOUT, DOCTOR_CALL_TIMEOUT};

/// Looks at a source.
pub(super) async fn check_source(name: String, source: Source, config: Config, environment: Environment) -> Vec<Check> {
    let part = |part: &str| format!("{name}: {part}");
    let (connection, check) = match connect(part("broker"), &config, &environment).await {
        Ok(Connected { connection, check }) => (connection, check),
        Err(check) => return vec![check],
    };
    let mut checks = vec![check];
    let queue = amqp_setup::requests_queue(&source, &config);
    let looking = async {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let channel = connection.create_channel().await?;
        channel
            .queue_declare(amqp::to_short_string_or_none(&queue).unwrap_or_default(), options, FieldTable::default())
            .await
    };
    checks.push(match timeout(DOCTOR_CALL_TIMEOUT, looking).await {
        Ok(Ok(found)) => Check::ok(
            part("queue"),
            format!("{queue}: {} waiting, {} consumers", found.message_count(), found.consumer_count()),
        ),
        Ok(Err(error)) if amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => {
            let fix =
                "its controller declares it with the first request for its key; until then the worker waits for it";
            Check::warning(part("queue"), format!("there is no queue {queue}"), fix)
        }
        Ok(Err(error)) => Check::failed(
            part("queue"),
            format!("{queue}: {}", amqp::error_text(&error)),
            "may this user read from it?",
        ),
        Err(_) => Check::failed(part("queue"), format!("{queue}: no answer"), "is the broker under an alarm?"),
    });
    amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
    checks
}

/// Looks at the broker of worker groups.
pub(super) async fn check_pools_broker(config: Config, environment: Environment) -> Vec<Check> {
    match connect("pools: broker".to_owned(), &config, &environment).await {
        Ok(Connected { connection, check }) => {
            amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
            vec![check]
        }
        Err(check) => vec![check],
    }
}

/// A connection, and that there is one.
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
        Ok(connection) => {
            Ok(Connected { connection, check: Check::ok(part, format!("{} lets us in", broker.display_url())) })
        }
        Err(refused) => {
            let fix = if refused.refusal == Refusal::Denied {
                "are user and password of `amqp.uri` right, and may that user use its virtual host?"
            } else {
                "is `amqp.uri` right, and does a broker listen there?"
            };
            Err(Check::failed(part, refused.message, fix))
        }
    }
}

/// Looks at where activity is reported.
pub(super) async fn check_activity(exchange: String, config: Config, environment: Environment) -> Vec<Check> {
    let part = || "activity".to_owned();
    let connected = match amqp_setup::build_broker(&config.amqp, &environment) {
        Ok(broker) => broker.connect("journeyman doctor").await.map_err(|refused| refused.message),
        Err(failure) => Err(failure.message),
    };
    let connection = match connected {
        Ok(connection) => connection,
        Err(what) => return vec![Check::warning(part(), what, "without its broker nothing is reported; tasks go on")],
    };
    let looking = async {
        let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
        let name = amqp::to_short_string_or_none(&exchange).unwrap_or_default();
        let channel = connection.create_channel().await?;
        channel.exchange_declare(name, ExchangeKind::Fanout, options, FieldTable::default()).await
    };
    let check = match timeout(DOCTOR_CALL_TIMEOUT, looking).await {
        Ok(Ok(())) => Check::ok(part(), format!("is reported to {exchange}")),
        Ok(Err(error)) => {
            let what = format!("cannot be reported to {exchange}: {}", amqp::error_text(&error));
            Check::warning(part(), what, "its controller declares it; until then nothing is reported, and tasks go on")
        }
        Err(_) => Check::warning(part(), format!("{exchange}: no answer"), "is the broker under an alarm?"),
    };
    amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
    vec![check]
}
