//! `journeyman notifier`: delivers webhooks until a signal stops it, or prepares the broker for that.

use std::collections::BTreeMap;
use std::sync::Arc;

use clap::{Args, Subcommand};
use reqwest::header::HeaderMap;
use tokio_util::sync::CancellationToken;

use super::amqp_setup;
use super::config_args::{self, ConfigArgs, NoFlags, NotifierFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::output;
use super::signals::ExitSignals;
use crate::amqp;
use crate::config::{Environment, schema};
use crate::domain::lane::retry::RetryPolicy;
use crate::http::BearerToken;
use crate::limits::AMQP_CLOSE_TIMEOUT;
use crate::notifier::{
    AmqpConfig, Endpoint, Notifier, NotifierConfig, NotifierError, Sender, SenderConfig, SigningKey, Topology,
    TopologyError, TypePattern,
};
use crate::observe::log;
use crate::sqlite::Db;

/// `journeyman notifier`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct NotifierArgs {
    #[command(subcommand)]
    command: Option<NotifierCommand>,
    #[command(flatten)]
    settings: ConfigArgs<NotifierFlags>,
}

#[derive(Debug, Subcommand)]
enum NotifierCommand {
    /// Make the exchange and the queues of `[notifier.amqp]` in RabbitMQ
    ///
    /// The user of the broker's URI needs the right to configure them, which the notifier itself does not. JOURNEYMAN_AMQP_URI
    /// is the URI of another user. What exists already is kept.
    Setup(ConfigArgs<NoFlags>),
}

pub(super) async fn run(arguments: NotifierArgs, environment: &Environment) -> ExitResult {
    match arguments.command {
        Some(NotifierCommand::Setup(settings)) => set_up(settings, environment).await,
        None => Box::pin(run_notifier(arguments.settings, environment)).await,
    }
}

async fn set_up(settings: ConfigArgs<NoFlags>, environment: &Environment) -> ExitResult {
    let loaded = settings.load(&environment.without_controller_variables())?;
    config_args::print_warnings(&loaded);
    let Some(AmqpConfig { broker, topology }) = amqp_config(&loaded.config, environment)? else {
        return Err(Failure::new(
            Exit::Config,
            "the notifier takes no events from RabbitMQ: add a section [notifier.amqp]",
        ));
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

fn amqp_config(config: &schema::Config, environment: &Environment) -> Result<Option<AmqpConfig>, Failure> {
    let Some(amqp) = &config.notifier.amqp else { return Ok(None) };
    let broker = amqp_setup::build_broker(&config.amqp, environment)?;
    let topology = Topology::new(&amqp.queue, amqp.shards)
        .map_err(|error| Failure::new(Exit::Config, format!("notifier.amqp.queue: {error}")))?;
    Ok(Some(AmqpConfig { broker, topology }))
}

async fn run_notifier(settings: ConfigArgs<NotifierFlags>, environment: &Environment) -> ExitResult {
    let loaded = settings.load(&environment.without_controller_variables())?;
    log::start(&loaded.config.log, environment);
    config_args::log_warnings(&loaded);
    let config = NotifierConfig {
        amqp: amqp_config(&loaded.config, environment)?,
        ..notifier_config(&loaded.config.notifier, environment)?
    };
    let mut signals = ExitSignals::listen()?;
    let failure = |error: NotifierError| {
        let exit = match &error {
            NotifierError::Database(_) | NotifierError::Listen { .. } => Exit::HostUnusable,
            NotifierError::Store(_) | NotifierError::Failed(_) => Exit::Internal,
        };
        Failure::from_error(exit, &error)
    };
    let notifier = Notifier::start(config).await.map_err(failure)?;
    let address = notifier.address().map_or_else(|error| error.to_string(), |address| address.to_string());
    tracing::info!(address, db = %loaded.config.notifier.db, "notifier listening");
    let stop = CancellationToken::new();
    let stopping = async {
        signals.next().await;
        tracing::info!("notifier stopping");
        stop.cancel();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ended = notifier.run(stop.clone()) => ended.map_err(failure)?,
        () = stopping => {}
    }
    Ok(Exit::Success)
}

fn notifier_config(config: &schema::Notifier, environment: &Environment) -> Result<NotifierConfig, Failure> {
    let invalid = |key: &str, error: &dyn std::fmt::Display| Failure::new(Exit::Config, format!("{key}: {error}"));
    let Some(token) = &config.token_file else {
        return Err(Failure::new(
            Exit::Config,
            "the notifier has no token for its callers: set `notifier.token_file` to a file with one",
        ));
    };
    let token = BearerToken::new(token.load("a token", environment)?.reveal());
    let mut allowed_networks = Vec::new();
    for network in &config.allowed_networks {
        let parsed = network.parse().map_err(|_| {
            let expected = format!("{network:?} is no network such as \"10.0.0.0/8\"");
            invalid("notifier.allowed_networks", &expected)
        });
        allowed_networks.push(parsed?);
    }
    let sender = SenderConfig { allowed_networks, ..SenderConfig::default() };
    let sender = Sender::new(sender).map_err(|error| invalid("notifier", &error))?;
    let mut endpoints = BTreeMap::new();
    for (name, endpoint) in &config.endpoint {
        let mut keys = Vec::new();
        for file in &endpoint.key_files {
            let key = file.load("a signing key", environment)?;
            let key: SigningKey = key
                .reveal()
                .parse()
                .map_err(|error| invalid(&format!("notifier.endpoint.{name}.key_files"), &error))?;
            keys.push(key);
        }
        let patterns = endpoint.events.iter().map(|text| TypePattern::new(text)).collect();
        let endpoint = Endpoint {
            url: endpoint.url.parts().clone(),
            headers: HeaderMap::new(),
            keys: keys.into(),
            timeout: endpoint.timeout.0,
            retry: RetryPolicy::default(),
        };
        endpoints.insert(Arc::from(name.as_str()), (endpoint, patterns));
    }
    Ok(NotifierConfig {
        db: Db::File(config.db.0.clone()),
        listen: config.listen.0,
        token,
        sender,
        amqp: None,
        endpoints,
    })
}
