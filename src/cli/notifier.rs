//! `journeyman notifier`: delivers webhooks until a signal stops it.

use std::collections::BTreeMap;
use std::sync::Arc;

use reqwest::header::HeaderMap;
use tokio_util::sync::CancellationToken;

use super::config_args::{self, ConfigArgs, NotifierFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::signals::ExitSignals;
use crate::config::{Environment, schema};
use crate::domain::lane::retry::RetryPolicy;
use crate::http::BearerToken;
use crate::notifier::{
    Endpoint, Notifier, NotifierConfig, NotifierError, SealKey, SealKeys, Sender, SenderConfig, SigningKey, TypePattern,
};
use crate::observe::log;
use crate::sqlite::Db;

pub(super) async fn run(settings: ConfigArgs<NotifierFlags>, environment: &Environment) -> ExitResult {
    let loaded = settings.load(&environment.without_controller_variables())?;
    log::start(&loaded.config.log, environment);
    config_args::log_warnings(&loaded);
    let config = notifier_config(&loaded.config.notifier, environment)?;
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
    let mut seal_keys = Vec::new();
    for file in &config.seal_key_files {
        let key: Result<SealKey, _> = file.load("a seal key", environment)?.reveal().parse();
        seal_keys.push(key.map_err(|error| invalid("notifier.seal_key_files", &error))?);
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
    let (db, listen, seal_keys) = (Db::File(config.db.0.clone()), config.listen.0, SealKeys(seal_keys));
    Ok(NotifierConfig { db, listen, token, sender, seal_keys, endpoints })
}
