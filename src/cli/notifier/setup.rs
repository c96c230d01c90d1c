//! `journeyman notifier setup`: makes in RabbitMQ what the notifier takes events from.

use crate::amqp;
use crate::cli::config_args::{self, ConfigArgs, NoFlags};
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::{amqp_setup, output};
use crate::config::{Environment, schema};
use crate::limits::AMQP_CLOSE_TIMEOUT;
use crate::notifier::{AmqpConfig, Topology, TopologyError};

pub(super) async fn run(settings: ConfigArgs<NoFlags>, environment: &Environment) -> ExitResult {
    let loaded = settings.load(&environment.without_controller_variables())?;
    config_args::print_warnings(&loaded);
    let Some(AmqpConfig { broker, topology }) = amqp_config(&loaded.config, environment)? else {
        let message = "the notifier takes no events from RabbitMQ: add a section [notifier.amqp]";
        return Err(Failure::new(Exit::Config, message));
    };
    let failure = |error: TopologyError| Failure::from_error(Exit::HostUnusable, &error);
    let connection = broker.connect("journeyman notifier setup").await.map_err(|error| failure(error.into()))?;
    let mut lines = Vec::new();
    let made = |what: &str, is_new: bool| lines.push(format!("{} {what}", if is_new { "created" } else { "exists " }));
    let ended = topology.set_up(&broker, &connection, made).await;
    amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
    for line in lines {
        output::line(&line)?;
    }
    ended.map_err(failure)?;
    Ok(Exit::Success)
}

pub(super) fn amqp_config(config: &schema::Config, environment: &Environment) -> Result<Option<AmqpConfig>, Failure> {
    let Some(amqp) = &config.notifier.amqp else { return Ok(None) };
    let broker = amqp_setup::build_broker(&config.amqp, environment)?;
    let topology = Topology::new(&amqp.queue, amqp.shards)
        .map_err(|error| Failure::new(Exit::Config, format!("notifier.amqp.queue: {error}")))?;
    Ok(Some(AmqpConfig { broker, topology }))
}
