//! Checks the connection to a broker and the request queue of a source.

use crate::cli::amqp_setup;
use crate::cli::checks::Check;
use crate::config::schema::Config;
use journeyman_domain::limits::AMQP_CLOSE_TIMEOUT;
use journeyman_domain::refusal::{CallError, Refusal};
use journeyman_platform::amqp;
use journeyman_platform::amqp::delay::DelayGuarantee;
use journeyman_platform::amqp::lapin::Connection;
use journeyman_platform::settings::Environment;
use journeyman_worker::source::amqp::DeferralConfig;
use journeyman_worker::source::amqp::config::RequestSource;

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
    let queue = source.queue(&config.amqp);
    let queue_name = amqp::to_short_string_or_none(&queue).unwrap_or_default();
    let mut checks = vec![check];
    let found = match amqp::find_queue(&connection, queue_name.clone()).await {
        Ok(found) => {
            let counts = format!("{} waiting, {} consumers", found.message_count(), found.consumer_count());
            Check::ok(part, format!("{queue}: {counts}"))
        }
        Err(error) if amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => {
            let fix = "the controller declares it with the first request for its key; the worker waits for it";
            Check::warning(part, format!("queue {queue} does not exist"), fix)
        }
        Err(error) => {
            let found = format!("{queue}: {}", amqp::error_text(&error));
            Check::failed(part, found, "does this user have read permission?")
        }
    };
    checks.push(found);
    if source.deferred {
        let delays = Box::pin(DeferralConfig::of_requests(&queue_name).declare(&connection, &queue_name)).await;
        checks.extend(check_delays(format!("{name}: delays"), delays));
    }
    amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
    checks
}

/// The worker declares them as well.
fn check_delays(part: String, declared: Result<Option<DelayGuarantee>, CallError>) -> Option<Check> {
    match declared {
        Ok(guarantee) => guarantee.map(|guarantee| match guarantee {
            DelayGuarantee::AtLeastOnce => Check::ok(part, guarantee.to_string()),
            DelayGuarantee::AtMostOnce => Check::warning(part, guarantee.to_string(), "upgrade the broker"),
        }),
        Err(refused) => {
            let fix = "does the queue exist, and may this user configure, write and read what begins with its name and `.delay.`?";
            Some(Check::failed(part, refused.message, fix))
        }
    }
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
                "check address and virtual host in `amqp.uri_file` or WORKER_AMQP_URI; is the broker running?"
            };
            Err(Check::failed(part, refused.message, fix))
        }
    }
}
