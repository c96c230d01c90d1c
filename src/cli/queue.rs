//! `journeyman queue`: runs the embedded queue until a signal stops it.

use std::path::PathBuf;

use super::config_args::{self, ConfigArgs, QueueFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::notify_setup;
use super::signals::ExitSignals;
use crate::config::schema;
use journeyman_platform::host::clock::or_pending;
use journeyman_platform::http::raise_open_files;
use journeyman_platform::log;
use journeyman_platform::settings::Environment;
use journeyman_services::queue::{self, Auth, Db, RegisteredClient, StartError};

pub(super) async fn run(settings: ConfigArgs<QueueFlags>, environment: &Environment) -> ExitResult {
    let loaded = settings.load(&environment.without_controller_variables())?;
    log::start(&loaded.config.log, environment);
    config_args::log_warnings(&loaded);
    let config = &loaded.config.queue;
    if config.clients.is_empty() && config.auth == Auth::Checked {
        return Err(Failure::new(
            Exit::Config,
            "the queue has no clients: add [queue.clients.NAME], or set \
             JOURNEYMAN__QUEUE__CLIENTS__ME__ACCESS_TOKEN_FILE to a file with the token of a client `me`",
        ));
    }
    raise_open_files();
    let mut signals = ExitSignals::listen()?;
    let notify = notify_setup::notify_config(&loaded.config.notify, environment)?;
    let outbox_events = if notify.is_some() { loaded.config.notify.events.clone() } else { Vec::new() };
    let config_of_queue = queue::Config { outbox_events, ..queue_config(config, environment)? };
    let running = queue::start(config_of_queue).await.map_err(|error| start_failure(&error))?;
    tracing::info!(root_url = running.root_url(), db = %config.db, "queue listening");
    let failed = tokio::select! {
        _ = signals.next() => None,
        failed = running.failed() => Some(failed),
        never = or_pending(notify.map(|notify| running.hand_over_events(notify.publisher))) => match never {},
    };
    if let Some(failed) = failed {
        tracing::error!(error = %failed, "queue failed");
        // No graceful stop: the store is gone.
        return Err(Failure::new(Exit::Internal, failed));
    }
    tracing::info!("queue stopping");
    running.stop().await;
    Ok(Exit::Success)
}

fn start_failure(error: &StartError) -> Failure {
    let exit = match error {
        StartError::UnauthenticatedAddress(_) => Exit::Config,
        StartError::Database(_) | StartError::Listen { .. } | StartError::Folder { .. } => Exit::HostUnusable,
    };
    Failure::from_error(exit, error)
}

pub(super) fn queue_config(config: &schema::Queue, environment: &Environment) -> Result<queue::Config, Failure> {
    let mut artifacts = config.db.0.clone().into_os_string();
    artifacts.push("-artifacts");
    let mut clients = Vec::new();
    for (client_id, client) in &config.clients {
        let token = client.access_token_file.load("an access token", environment)?;
        clients.push(RegisteredClient {
            client_id: client_id.clone(),
            access_token: token.reveal().to_owned().into(),
            scopes: client.scopes.clone(),
        });
    }
    Ok(queue::Config {
        listen: config.listen.0,
        auth: config.auth,
        allowed_origins: config.allowed_origins.iter().map(|origin| origin.as_str().to_owned()).collect(),
        clients,
        claim_timeout: config.claim_timeout.0,
        ..queue::Config::new(Db::File(config.db.0.clone()), PathBuf::from(artifacts))
    })
}
