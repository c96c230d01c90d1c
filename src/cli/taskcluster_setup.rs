//! Builds Taskcluster clients and sources from the configuration.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use secrecy::SecretString;

use super::exit::{Exit, Failure};
use super::worker_identity::WorkerIdentity;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::Secret;
use journeyman_worker::engine::SourceBinding;
use journeyman_worker::handler::DynHandler;
use journeyman_worker::source::taskcluster::config::TaskclusterSource;
use journeyman_worker::source::taskcluster::{
    self, Api, ApiConfig, ClientCredentials, Credentials, INSTANCE_TYPE_VARIABLE, LOCATION_VARIABLE, Taskcluster,
};

pub(super) fn read_credentials(
    source: &TaskclusterSource,
    environment: &Environment,
) -> Result<Option<Credentials>, Failure> {
    source.read_credentials(environment)?.map(|credentials| build_credentials(&credentials)).transpose()
}

pub(super) fn build_credentials(own: &ClientCredentials) -> Result<Credentials, Failure> {
    let text = |secret: &Secret| SecretString::from(secret.reveal());
    let certificate = own.certificate.as_ref().map(text);
    Credentials::new(&own.client_id, text(&own.access_token), certificate.as_ref())
        .map_err(|error| Failure::from_error(Exit::Config, &error))
}

fn api_config(source: &TaskclusterSource, environment: &Environment) -> Result<ApiConfig, Failure> {
    let credentials = read_credentials(source, environment)?;
    let reread_credentials = credentials.clone().map(|latest| reread_credentials(latest, source, environment));
    let allow_hosts = source.allow_hosts.clone();
    Ok(ApiConfig { allow_hosts, reread_credentials, ..ApiConfig::new(source.root_url.as_str(), credentials) })
}

/// Compares with what was read last, because worker-runner may have replaced credentials since.
fn reread_credentials(
    latest: Credentials,
    source: &TaskclusterSource,
    environment: &Environment,
) -> taskcluster::RereadCredentials {
    let (source, environment, latest) = (source.clone(), environment.clone(), Mutex::new(latest));
    Arc::new(move || match read_credentials(&source, &environment) {
        Ok(read) => {
            let mut latest = latest.lock();
            let renewed = read.filter(|read| !read.is_same(&latest))?;
            *latest = renewed.clone();
            Some(renewed)
        }
        Err(failure) => {
            tracing::warn!("keeping the credentials in use: {}", failure.message);
            None
        }
    })
}

/// Makes the client of a source that is not polled.
pub(super) fn build_api(
    source_name: &str,
    source: &TaskclusterSource,
    environment: &Environment,
) -> Result<Api, Failure> {
    Api::new(api_config(source, environment)?)
        .map_err(|error| Failure::new(Exit::Config, format!("source.{source_name}.{error}")))
}

pub(super) fn source_binding(
    source_name: &str,
    source: &TaskclusterSource,
    name: &WorkerIdentity,
    handler: Arc<dyn DynHandler>,
    environment: &Environment,
) -> Result<(SourceBinding, Api), Failure> {
    let settings = taskcluster::Config {
        api: api_config(source, environment)?,
        dialect: source.dialect,
        task_queue: source.task_queue.to_string(),
        worker_group: name.group.clone(),
        worker_id: name.id.clone(),
        artifact_storage: source.artifact_storage,
    };
    let mut env = BTreeMap::from([
        ("TASKCLUSTER_ROOT_URL".to_owned(), source.root_url.as_str().to_owned()),
        ("TASKCLUSTER_WORKER_GROUP".to_owned(), name.group.clone()),
        ("TASKCLUSTER_WORKER_ID".to_owned(), name.id.clone()),
    ]);
    let of_host = [LOCATION_VARIABLE, INSTANCE_TYPE_VARIABLE];
    env.extend(of_host.into_iter().filter_map(|name| Some((name.to_owned(), environment.get(name)?.to_owned()))));
    let source = Taskcluster::new(settings)
        .map_err(|error| Failure::new(Exit::Config, format!("source.{source_name}.{error}")))?;
    let api = source.api().clone();
    Ok((SourceBinding { name: source_name.to_owned(), source: Arc::new(source), handler, env: Arc::new(env) }, api))
}
