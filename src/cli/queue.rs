//! `journeyman queue`: runs the embedded queue until a signal stops it.

use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use uuid::Uuid;

use super::config_args::{self, ConfigArgs, QueueFlags};
use super::console::http_token;
use super::exit::{Exit, ExitResult, Failure};
use super::notify_setup;
use super::queue_client::build_api_within;
use super::signals::ExitSignals;
use super::taskcluster_setup::build_credentials;
use crate::config::schema;
use crate::console::app::targets::QueueTarget;
use crate::console::app::{self, Console};
use journeyman_platform::host::clock::or_pending;
use journeyman_platform::http::{Exposure, pages, raise_open_files};
use journeyman_platform::log;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::Secret;
use journeyman_services::queue::{self, Auth, Db, RegisteredClient, StartError};
use journeyman_worker::source::taskcluster::{ClientCredentials, Credentials};

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
    let mut config_of_queue = queue::Config { outbox_events, ..queue_config(config, environment)? };
    let credentials = console_client(&mut config_of_queue)?;
    let token = http_token(&loaded.config, environment)?;
    let is_private = config.auth == Auth::Checked;
    let exposure =
        if config.listen.0.ip().to_canonical().is_loopback() { Exposure::Loopback } else { Exposure::Network };
    let pages = |root_url: &str| match build_api_within(root_url, credentials, Vec::new()) {
        Ok(api) => {
            let queues = vec![QueueTarget { name: "queue".to_owned(), api }];
            pages(app::routes(Arc::new(Console { queues, token, is_private, ..Console::default() })), exposure)
        }
        Err(failure) => {
            tracing::error!("the queue has no pages: {}", failure.message);
            Router::new()
        }
    };
    let running = queue::start_with(config_of_queue, pages).await.map_err(|error| start_failure(&error))?;
    tracing::info!(root_url = running.root_url(), db = %config.db, "queue listening, with pages at its address");
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

/// The credentials with which the pages read the queue; none if it checks none.
fn console_client(config: &mut queue::Config) -> Result<Option<Credentials>, Failure> {
    if config.auth != Auth::Checked {
        return Ok(None);
    }
    let token = format!("{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple());
    config.clients.push(RegisteredClient {
        client_id: CONSOLE_CLIENT_ID.to_owned(),
        access_token: token.clone().into(),
        scopes: vec!["queue:*".to_owned()],
    });
    let client = ClientCredentials {
        client_id: CONSOLE_CLIENT_ID.to_owned(),
        access_token: Secret::new(&token),
        certificate: None,
    };
    build_credentials(&client).map(Some)
}

/// A configured client cannot have it.
const CONSOLE_CLIENT_ID: &str = "static/journeyman/console";

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
