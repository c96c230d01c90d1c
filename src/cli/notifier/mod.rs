//! `journeyman notifier`: delivers webhooks until a signal stops it.

mod client;
mod dev;
mod endpoints;
mod listen;
mod operate;
mod send;
mod setup;

use clap::{Args, Subcommand};
use tokio_util::sync::CancellationToken;

use super::config_args::{self, ConfigArgs, NoFlags, NotifierFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::output;
use super::signals::ExitSignals;
use crate::config::schema;
use crate::console::notifier::{CONSOLE, metric_list};
use crate::console::otlp;
use endpoints::{endpoints, keys, sender};
use journeyman_platform::http::{BearerToken, raise_open_files};
use journeyman_platform::log;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::SecretFile;
use journeyman_platform::sqlite::Db;
use journeyman_services::notifier::{Database, Notifier, NotifierConfig, NotifierError, SealKeys, Tokens};

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
    /// Show ordered delivery to a receiver that fails, in this terminal, and exit
    Dev,
    /// Make in RabbitMQ and PostgreSQL what `[notifier.amqp]`, `[notifier.mistral]` and `[notifier.outbox]` need
    ///
    /// The user of the broker's URI needs the right to configure queues, which the notifier itself does not. JOURNEYMAN_AMQP_URI is
    /// the URI of another user. What exists already is kept. The vhost of Mistral needs an administrator; the user of
    /// `amqp.uri_file` gets all rights there.
    Setup(ConfigArgs<NoFlags>),
    /// Prepare the notifier's database
    #[command(subcommand)]
    Store(StoreCommand),
    /// Send an event to a running notifier
    Send(Box<send::SendArgs>),
    /// Receive webhooks on this machine, show and check them, and fail some on request
    Listen(listen::ListenArgs),
    #[command(flatten)]
    Operate(operate::OperateCommand),
}

#[derive(Debug, Subcommand)]
enum StoreCommand {
    /// Make the tables, or bring them to the format of this version
    ///
    /// The notifier does so itself when it starts, if its user of PostgreSQL may.
    Migrate(ConfigArgs<NoFlags>),
}

pub(super) async fn run(arguments: NotifierArgs, environment: &Environment) -> ExitResult {
    match arguments.command {
        Some(NotifierCommand::Dev) => Box::pin(dev::run()).await,
        Some(NotifierCommand::Setup(settings)) => setup::run(settings, environment).await,
        Some(NotifierCommand::Store(StoreCommand::Migrate(settings))) => migrate(settings, environment).await,
        Some(NotifierCommand::Send(arguments)) => send::run(*arguments, environment).await,
        Some(NotifierCommand::Listen(arguments)) => listen::run(arguments, environment).await,
        Some(NotifierCommand::Operate(command)) => operate::run(command, environment).await,
        None => Box::pin(deliver(arguments.settings, environment)).await,
    }
}

async fn deliver(settings: ConfigArgs<NotifierFlags>, environment: &Environment) -> ExitResult {
    let loaded = settings.load(&environment.without_controller_variables())?;
    log::start(&loaded.config.log, environment);
    config_args::log_warnings(&loaded);
    let config = notifier_config(&loaded.config, environment)?;
    raise_open_files();
    let mut signals = ExitSignals::listen()?;
    let notifier = Notifier::start(config).await.map_err(failure)?;
    let address = notifier.address().map_or_else(|error| error.to_string(), |address| address.to_string());
    tracing::info!(address, "notifier listening");
    let stop = CancellationToken::new();
    let stopping = async {
        signals.next().await;
        tracing::info!("notifier stopping");
        stop.cancel();
        std::future::pending::<()>().await;
    };
    let metrics = otlp::export(environment, "notifier", &address, notifier.snapshots(), metric_list);
    tokio::select! {
        ended = notifier.run(stop.clone()) => ended.map_err(failure)?,
        () = stopping => {}
        () = metrics => return Err(Failure::new(Exit::Internal, "the export of metrics ended")),
    }
    Ok(Exit::Success)
}

fn failure(error: NotifierError) -> Failure {
    let exit = match &error {
        NotifierError::Database(_) | NotifierError::Listen { .. } | NotifierError::Postgres(_) => Exit::HostUnusable,
        NotifierError::Sealed(_) => Exit::Config,
        NotifierError::Store(_) | NotifierError::Failed(_) => Exit::Internal,
    };
    Failure::from_error(exit, &error)
}

async fn migrate(settings: ConfigArgs<NoFlags>, environment: &Environment) -> ExitResult {
    let config = settings.load(&environment.without_controller_variables())?.config.notifier;
    database(&config, environment)?.migrate().await.map_err(failure)?;
    output::line("the tables have the format of this version")?;
    Ok(Exit::Success)
}

fn notifier_config(all: &schema::Config, environment: &Environment) -> Result<NotifierConfig, Failure> {
    let config = &all.notifier;
    let Some(token) = &config.token_file else {
        return Err(Failure::new(
            Exit::Config,
            "the notifier has no token for its callers: set `notifier.token_file` to a file with one",
        ));
    };
    let load = |file: &SecretFile| file.load("a token", environment).map(|token| BearerToken::new(token.reveal()));
    let optional = |file: &Option<SecretFile>| file.as_ref().map(load).transpose();
    let (read, publish) = (optional(&config.read_token_file)?, optional(&config.publish_token_file)?);
    let tokens = Tokens { write: load(token)?, read, publish };
    let seal_keys = SealKeys(keys("notifier.seal_key_files", &config.seal_key_files, environment)?);
    let (sender, endpoints) = (sender(config, environment)?, endpoints(config, environment)?);
    let (database, retention) = (database(config, environment)?, config.retention.0);
    Ok(NotifierConfig {
        database,
        listen: config.listen.0,
        console: CONSOLE,
        tokens,
        retention,
        sender,
        seal_keys,
        amqp: setup::amqp_config(all, environment)?,
        mistral: setup::mistral_config(all, environment)?,
        outbox: setup::outbox(config, environment)?,
        endpoints,
    })
}

fn database(config: &schema::Notifier, environment: &Environment) -> Result<Database, Failure> {
    let Some(postgres) = &config.postgres else { return Ok(Database::Sqlite(Db::File(config.db.0.clone()))) };
    let url = postgres.url_file.load("the URL of a database", environment)?;
    let ca = postgres.ca_file.as_ref().map(|file| file.0.clone());
    Ok(Database::Postgres { url: url.reveal().into(), ca })
}
