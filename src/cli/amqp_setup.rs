//! Builds AMQP brokers, sources and activity reports from the configuration.

use std::collections::BTreeMap;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;

use super::exit::{Exit, Failure};
use super::worker_identity::WorkerIdentity;
use crate::config::schema;
use crate::config::schema::Config;
use journeyman_domain::limits::{AMQP_LONG_POLL_WAIT, AMQP_SHARED_POLL_WAIT};
use journeyman_platform::amqp::management::Management;
use journeyman_platform::amqp::{self, Broker, ClientCertificate};
use journeyman_platform::settings::{Environment, broker, secrets};
use journeyman_worker::activity;
use journeyman_worker::engine::{Control, SourceBinding};
use journeyman_worker::handler::DynHandler;
use journeyman_worker::handler::config::Handler;
use journeyman_worker::source::amqp::config::RequestSource;
use journeyman_worker::source::amqp::{AmqpSource, AmqpSourceConfig, DeferralConfig, PayloadForm};

/// Builds the broker.
///
/// # Errors
///
/// [`Exit::Config`] where the address or a certificate is invalid.
pub(super) fn build_broker(config: &schema::Amqp, environment: &Environment) -> Result<Broker, Failure> {
    let uri = broker::amqp_uri(config, environment)?;
    let client = config.certificate_file.as_ref().zip(config.key_file.as_ref());
    if let Some((_, key)) = client
        && secrets::is_world_readable(&key.0)
    {
        tracing::warn!(path = %key.0.display(), "every user of this host can read this private key; restrict it by chmod 600");
    }
    let settings = amqp::BrokerConfig {
        uri: SecretString::from(uri.reveal()),
        reread_uri: config.uri_file.is_some().then(|| reread_uri(config, environment)),
        ca: config.ca_file.as_ref().map(|file| file.0.clone()),
        client: client
            .map(|(certificate, key)| ClientCertificate { certificate: certificate.0.clone(), key: key.0.clone() }),
    };
    Broker::new(&settings).map_err(|error| Failure::new(Exit::Config, format!("amqp: {error}")))
}

fn reread_uri(config: &schema::Amqp, environment: &Environment) -> amqp::RereadUri {
    let (config, environment) = (config.clone(), environment.clone());
    Arc::new(move || match broker::amqp_uri(&config, &environment) {
        Ok(uri) => Some(SecretString::from(uri.reveal())),
        Err(error) => {
            tracing::warn!("keeping the login of the broker in use: {error}");
            None
        }
    })
}

/// Builds the client of the management interface; `None` where it is not configured.
pub(super) fn build_management(config: &schema::Amqp, broker: &Broker) -> Result<Option<Management>, Failure> {
    let Some(base) = &config.management_url else { return Ok(None) };
    let made = Management::new(broker, base.as_str(), config.ca_file.as_ref().map(|file| file.0.as_path()));
    made.map(Some).map_err(|error| Failure::new(Exit::Config, format!("amqp.management_url: {error}")))
}

/// The worker's id in activity reports.
pub(super) fn worker_id(config: &Config, name: &WorkerIdentity) -> String {
    config.amqp.assignment.worker_id.clone().unwrap_or_else(|| name.id.clone())
}

/// Builds the future that reports activity, which never ends.
///
/// # Errors
///
/// Fails as [`build_broker`] does.
pub(super) fn report_activity(
    config: &Config,
    control: &Control,
    environment: &Environment,
) -> Result<impl Future<Output = ()> + use<>, Failure> {
    let settings = match config.amqp.activity_exchange() {
        Some(exchange) => Some(activity::Config {
            broker: build_broker(&config.amqp, environment)?,
            exchange,
            key: config.amqp.worker_key.clone().unwrap_or_default(),
            worker_id: worker_id(config, &WorkerIdentity::from_config(config)),
        }),
        None => None,
    };
    let liveness = control.liveness();
    Ok(async move {
        match settings {
            Some(settings) => activity::report(settings, liveness).await,
            None => std::future::pending().await,
        }
    })
}

/// The handler of a request source, and what the source has to know of it.
pub(super) struct RequestHandling {
    pub handler: Arc<dyn DynHandler>,
    pub form: PayloadForm,
    pub max_run_time: Option<Duration>,
}

impl RequestHandling {
    /// Binds a handler of the configuration.
    pub(super) fn from_config(config: &Config, name: &str, handler: Arc<dyn DynHandler>) -> Self {
        let built_in = Handler::default();
        let handler_config = config.handler.get(name).unwrap_or(&built_in);
        let form = match handler_config {
            Handler::Command(_) | Handler::Kubernetes(_) | Handler::Custom(_) => PayloadForm::Body,
            Handler::Program(_) | Handler::Http(_) => PayloadForm::Whole,
        };
        // Of two defaults no warning, unless the broker reports another timeout.
        let is_compared = config.amqp.management_url.is_some()
            || handler_config.max_run_time().0 != built_in.max_run_time().0
            || config.amqp.consumer_timeout != schema::Amqp::default().consumer_timeout;
        Self { handler, form, max_run_time: is_compared.then_some(handler_config.max_run_time().0) }
    }
}

/// Builds an AMQP source with its handler.
///
/// # Errors
///
/// Fails as [`build_broker`] does.
pub(super) fn source_binding(
    source_name: &str,
    source: &RequestSource,
    config: &Config,
    name: &WorkerIdentity,
    work: RequestHandling,
    environment: &Environment,
) -> Result<SourceBinding, Failure> {
    let RequestHandling { handler, form, max_run_time } = work;
    let amqp = &config.amqp;
    let key = amqp.worker_key.clone().unwrap_or_default();
    let queue_name = |name: &str| {
        amqp::to_short_string("the name of a queue", name).map_err(|error| Failure::from_error(Exit::Config, &error))
    };
    let worker_id = worker_id(config, name);
    let broker = build_broker(amqp, environment)?;
    let queue = queue_name(&source.queue(amqp))?;
    let settings = AmqpSourceConfig {
        payload_form: form,
        max_attempts: NonZeroU32::new(source.max_attempts),
        on_attempts_exhausted: source.on_attempts_exhausted,
        poison_queue: source.poison_queue.as_deref().map(queue_name).transpose()?,
        consumer_timeout: amqp.consumer_timeout.0,
        management: build_management(amqp, &broker)?,
        // No request is held with deferral for as long as it runs.
        max_run_time: max_run_time.filter(|_| !source.deferred),
        deferral: source.deferred.then(|| DeferralConfig::of_requests(&queue)),
        message_bytes_max: amqp.max_message_size.0,
        poll_wait: if config.source.len() > 1 { AMQP_SHARED_POLL_WAIT } else { AMQP_LONG_POLL_WAIT },
        ..AmqpSourceConfig::new(broker, queue, &worker_id)
    };
    let env = BTreeMap::from([
        ("WORKER_ID".to_owned(), worker_id),
        ("WORKER_KEY".to_owned(), key),
        ("WORKER_POOL".to_owned(), amqp.pool.clone()),
    ]);
    Ok(SourceBinding {
        name: source_name.to_owned(),
        source: Arc::new(AmqpSource::new(settings)),
        handler,
        env: Arc::new(env),
    })
}
