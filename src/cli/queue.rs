//! `journeyman queue`: the embedded queue on its own, until told to go.

use std::path::PathBuf;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::exit::{Ended, Exit, Failure};
use super::settings::{self, QueueFlags, Settings};
use crate::config::{Environment, schema, secrets};
use crate::observe::log;
use crate::queue::{self, Auth, Client, Db, StartError};

/// `journeyman queue`
#[derive(Debug, Args)]
pub(super) struct QueueArgs {
    #[command(flatten)]
    settings: Settings<QueueFlags>,
}

/// Runs it.
///
/// # Errors
///
/// A configuration that cannot be used; a file, folder or address that cannot be had.
pub(super) async fn run(arguments: QueueArgs, environment: &Environment) -> Ended {
    let loaded = arguments.settings.load(&environment.of_nobody())?;
    log::start(&loaded.config.log, log::color(environment));
    settings::log_warnings(&loaded);
    let config = &loaded.config.queue;
    if config.clients.is_empty() && config.auth == schema::Auth::Checked {
        return Err(Failure::new(
            Exit::Config,
            "nobody could call this queue: there is no [queue.clients.NAME]; \
             JOURNEYMAN__QUEUE__CLIENTS__ME__ACCESS_TOKEN=… makes a client `me`",
        ));
    }
    let failed = |error| Failure::new(Exit::Unfit, format!("no signals can be received: {error}"));
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut int = signal(SignalKind::interrupt()).map_err(failed)?;
    let running = queue::start(settings(config, environment)?).await.map_err(|error| refused(&error))?;
    tracing::info!(root_url = running.root_url(), db = %config.db, "the queue listens; it is for one machine");
    let failed = tokio::select! {
        _ = term.recv() => None,
        _ = int.recv() => None,
        failed = running.failed() => Some(failed),
    };
    if let Some(failed) = failed {
        tracing::error!(error = %failed, "the queue ends");
        // Without a stop in good order: there is nothing left that could be kept.
        return Err(Failure::of(Exit::Internal, &failed));
    }
    tracing::info!("the queue stops");
    running.stop().await;
    Ok(Exit::Done)
}

fn refused(error: &StartError) -> Failure {
    let exit = match error {
        StartError::Open(_) | StartError::TooShort { .. } | StartError::PublicUrl(_) => Exit::Config,
        StartError::File(_) | StartError::Listen { .. } | StartError::Folder { .. } | StartError::Interrupted => {
            Exit::Unfit
        }
    };
    Failure::of(exit, error)
}

fn settings(config: &schema::Queue, environment: &Environment) -> Result<queue::Settings, Failure> {
    let beside = || {
        let mut name = config.db.0.clone().into_os_string();
        name.push("-artifacts");
        PathBuf::from(name)
    };
    let artifacts = config.artifacts.as_ref().map_or_else(beside, |folder| folder.0.clone());
    let mut clients = Vec::new();
    for (client_id, client) in &config.clients {
        if let Some(token) = secrets::of_client(client, environment)? {
            let access_token = token.reveal().to_owned().into();
            clients.push(Client { client_id: client_id.clone(), access_token, scopes: client.scopes.clone() });
        }
    }
    Ok(queue::Settings {
        listen: config.listen.0,
        auth: match config.auth {
            schema::Auth::Checked => Auth::Checked,
            schema::Auth::Open => Auth::Open,
            schema::Auth::OpenToNetwork => Auth::OpenToNetwork,
        },
        clients,
        public_root_url: config.public_root_url.as_ref().map(|url| url.as_str().to_owned()),
        claim_timeout: config.claim_timeout.0,
        visibility: config.visibility.0,
        ..queue::Settings::new(Db::File(config.db.0.clone()), artifacts)
    })
}
