//! Builds the sender and the endpoints of a notifier from its configuration.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use crate::cli::exit::{Exit, Failure};
use crate::config::schema;
use journeyman_domain::lane::dispatcher::EndpointLimits;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::{Secret, SecretFile};
use journeyman_services::notifier::config::NotifierEndpoint;
use journeyman_services::notifier::{ClientCertificate, Endpoint, EndpointSettings, Endpoints, Sender, SenderConfig};
use journeyman_worker::notify::TypePattern;

pub(super) fn invalid(key: &str, error: &dyn Display) -> Failure {
    Failure::new(Exit::Config, format!("{key}: {error}"))
}

pub(super) fn sender(config: &schema::Notifier, environment: &Environment) -> Result<Sender, Failure> {
    let mut allowed_networks = Vec::new();
    for network in &config.allowed_networks {
        let parsed = network.parse().map_err(|_| {
            let expected = format!("{network:?} is no network such as \"10.0.0.0/8\"");
            invalid("notifier.allowed_networks", &expected)
        });
        allowed_networks.push(parsed?);
    }
    let load = |file: &SecretFile, what| file.load(what, environment).map(|secret| secret.reveal().to_owned().into());
    let client_certificate = match (&config.client_certificate_file, &config.client_key_file) {
        (Some(certificate), Some(key)) => {
            Some(ClientCertificate { certificate: certificate.0.clone(), key: load(key, "a private key")? })
        }
        (Some(_), None) | (None, Some(_)) => {
            let message = "`client_certificate_file` and `client_key_file` belong together: set both or none";
            return Err(invalid("notifier", &message));
        }
        (None, None) => None,
    };
    let config = SenderConfig {
        allowed_networks,
        https_only: config.https_only,
        proxy: config.proxy_file.as_ref().map(|file| load(file, "a proxy's URL")).transpose()?,
        ca: config.ca_file.as_ref().map(|file| file.0.clone()),
        client_certificate,
    };
    Sender::new(config).map_err(|error| invalid("notifier", &error))
}

pub(super) fn endpoints(config: &schema::Notifier, environment: &Environment) -> Result<Endpoints, Failure> {
    let mut endpoints = BTreeMap::new();
    for (name, endpoint) in &config.endpoint {
        let key = format!("notifier.endpoint.{name}");
        let (built, wanted) = build(&key, endpoint, environment)?;
        if config.https_only && built.url.scheme() != "https" {
            return Err(invalid(&key, &"its URL has no TLS, and `notifier.https_only` is set"));
        }
        endpoints.insert(Arc::from(name.as_str()), (built, wanted));
    }
    Ok(endpoints)
}

fn build(
    key: &str,
    endpoint: &NotifierEndpoint,
    environment: &Environment,
) -> Result<(Endpoint, Vec<TypePattern>), Failure> {
    let load = |file: &SecretFile, what| file.load(what, environment).map(|secret| secret.reveal().to_owned());
    let url = match (&endpoint.url, &endpoint.url_file) {
        (Some(url), None) => url.parts().to_string(),
        (None, Some(file)) => load(file, "a URL")?,
        (Some(_), Some(_)) | (None, None) => return Err(invalid(key, &"set either `url` or `url_file`")),
    };
    let keys: Result<_, _> = endpoint.key_files.iter().map(|file| load(file, "a signing key")).collect();
    let settings = EndpointSettings {
        url,
        events: endpoint.events.clone(),
        headers: endpoint.headers_file.as_ref().map(|file| load(file, "headers")).transpose()?.unwrap_or_default(),
        keys: keys?,
        filter: endpoint.filter.clone(),
        format: endpoint.format,
        on_exhausted: endpoint.on_exhausted,
        timeout_seconds: endpoint.timeout.0.as_secs(),
        retry_seconds: None,
    };
    let (mut built, wanted) = settings.build().map_err(|error| invalid(key, &error))?;
    built.timeout = endpoint.timeout.0;
    built.limits =
        EndpointLimits { attempts_max: endpoint.attempts_max.into(), rate: endpoint.rate.map(|rate| rate.0) };
    Ok((built, wanted))
}

/// Reads a key of each file.
pub(super) fn keys<K: FromStr<Err: Display>>(
    key: &str,
    files: &[SecretFile],
    environment: &Environment,
) -> Result<Vec<K>, Failure> {
    let parse = |secret: Secret| secret.reveal().parse().map_err(|error| invalid(key, &error));
    files.iter().map(|file| parse(file.load("a key", environment)?)).collect()
}
