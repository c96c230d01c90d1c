//! `journeyman notifier setup`: makes what the notifier needs where it takes events from.

use std::collections::BTreeSet;

use super::endpoints::invalid;
use crate::cli::config_args::{self, ConfigArgs, NoFlags};
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::{amqp_setup, output};
use crate::config::schema;
use journeyman_domain::limits::AMQP_CLOSE_TIMEOUT;
use journeyman_platform::amqp::{self, Broker, BrokerConfig};
use journeyman_platform::settings::Environment;
use journeyman_services::notifier::{AmqpConfig, MistralConfig, Outbox, Topology, UrlKey};

pub(super) async fn run(settings: ConfigArgs<NoFlags>, environment: &Environment) -> ExitResult {
    let loaded = settings.load(&environment.without_controller_variables())?;
    config_args::print_warnings(&loaded);
    let config = &loaded.config;
    let (amqp, mistral) = (amqp_config(config, environment)?, mistral_config(config, environment)?);
    let outbox = outbox(&config.notifier, environment)?;
    if amqp.is_none() && mistral.is_none() && outbox.is_none() {
        let message = "the notifier takes events over HTTP only: add a section [notifier.amqp], [notifier.mistral] or [notifier.outbox]";
        return Err(Failure::new(Exit::Config, message));
    }
    if let Some(amqp) = amqp {
        set_up_amqp(&amqp).await?;
    }
    if let Some(mistral) = mistral {
        // The user that sets up, and the one that the notifier is at the broker.
        let mut users = BTreeSet::from([mistral.broker.user()]);
        if let Some(file) = &config.amqp.uri_file {
            let uri = BrokerConfig::new(file.load("an AMQP address", environment)?.reveal());
            users.insert(Broker::new(&uri).map_err(|error| invalid("amqp.uri_file", &error))?.user());
        }
        mistral.set_up(&users).await.map_err(|why| Failure::new(Exit::HostUnusable, why))?;
        let users: Vec<String> = users.into_iter().collect();
        output::line(&format!("prepared vhost {} for {}", mistral.broker.vhost(), users.join(" and ")))?;
    }
    if let Some(outbox) = outbox {
        outbox.set_up().await.map_err(|why| Failure::new(Exit::HostUnusable, format!("notifier.outbox: {why}")))?;
        output::line(&format!("prepared table {}", outbox.table))?;
    }
    Ok(Exit::Success)
}

pub(super) fn outbox(config: &schema::Notifier, environment: &Environment) -> Result<Option<Outbox>, Failure> {
    let Some(outbox) = &config.outbox else { return Ok(None) };
    let url = outbox.url_file.load("the URL of a database", environment)?;
    let ca = outbox.ca_file.as_ref().map(|file| file.0.as_path());
    let outbox = Outbox::new(url.reveal(), ca, &outbox.table);
    outbox.map(Some).map_err(|error| invalid("notifier.outbox", &error))
}

async fn set_up_amqp(AmqpConfig { broker, topology }: &AmqpConfig) -> Result<(), Failure> {
    let failure = |why: String| Failure::new(Exit::HostUnusable, why);
    let connection = broker.connect("journeyman notifier setup").await.map_err(|error| failure(error.message))?;
    let ended = topology.set_up(broker, &connection).await;
    amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
    ended.map_err(failure)?;
    Ok(output::line(&format!("prepared exchange {} and its queues", topology.exchange))?)
}

pub(super) fn mistral_config(
    config: &schema::Config,
    environment: &Environment,
) -> Result<Option<MistralConfig>, Failure> {
    let Some(mistral) = &config.notifier.mistral else { return Ok(None) };
    if config.notifier.seal_key_files.is_empty() {
        let message = "URLs and headers are kept sealed: set `notifier.seal_key_files`";
        return Err(invalid("notifier.mistral", &message));
    }
    let events = amqp_setup::build_broker(&config.amqp, environment)?;
    let broker = events.clone().in_vhost(&mistral.vhost).map_err(|error| invalid("notifier.mistral.vhost", &error))?;
    let Some(management) = amqp_setup::build_management(&config.amqp, &broker)? else {
        return Err(invalid("notifier.mistral", &"its queues are found at `amqp.management_url`: set it"));
    };
    let key = mistral.url_key_file.load("a key", environment)?;
    let url_key = UrlKey::new(key.reveal()).map_err(|error| invalid("notifier.mistral.url_key_file", &error))?;
    Ok(Some(MistralConfig { broker, management, events, url_key, delete_after: mistral.delete_after.0 }))
}

pub(super) fn amqp_config(config: &schema::Config, environment: &Environment) -> Result<Option<AmqpConfig>, Failure> {
    let Some(amqp) = &config.notifier.amqp else { return Ok(None) };
    let broker = amqp_setup::build_broker(&config.amqp, environment)?;
    let topology = Topology::new(&amqp.queue, amqp.shards).map_err(|error| invalid("notifier.amqp.queue", &error))?;
    Ok(Some(AmqpConfig { broker, topology }))
}
