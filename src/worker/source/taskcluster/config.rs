//! The section of a source of Taskcluster.

use serde::{Deserialize, Serialize};

use super::{ArtifactStorage, Dialect};
use crate::task::command_name;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::rules::Rules;
use journeyman_platform::settings::secrets::SecretError;
use journeyman_platform::settings::values::{
    Queue as TaskQueue, Secret, SecretFile, Url, WORKER_NAME_CHARS_MAX_AZURE, WorkerName,
};

/// Tasks of a Taskcluster deployment.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TaskclusterSource {
    /// How tasks are claimed: through Azure-style queues, or by `claimWork`.
    #[serde(default)]
    pub dialect: Dialect,
    /// Root URL of the Taskcluster deployment.
    pub root_url: Url,
    /// Tasks to claim: provisioner and worker type.
    pub task_queue: TaskQueue,
    /// Taskcluster client id.
    pub client_id: Option<String>,
    /// File with the access token, readable by its owner only.
    pub access_token_file: Option<SecretFile>,
    /// File with the certificate of temporary credentials.
    pub certificate_file: Option<SecretFile>,
    /// Hosts that signed URLs and redirects may lead to although they are in a private network or on this host; `.example.com` matches every host below it. The host of `root_url` is always allowed. Signed queue URLs may lead to these hosts and to Azure Queue Storage only.
    #[serde(default)]
    pub allow_hosts: Vec<String>,
    /// Where artifacts are stored. `dialect = "azure"` supports `s3` only.
    #[serde(default)]
    pub artifact_storage: ArtifactStorage,
    /// Membership in the worker pool that has the name of `task_queue`, at the deployment's worker-manager [built-in: none].
    #[serde(default)]
    pub worker_pool: Option<WorkerPoolSection>,
    /// Name of the handler that runs the tasks.
    #[serde(default = "command_name")]
    pub handler: String,
}

/// Membership in a worker pool.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct WorkerPoolSection {
    /// Provider of the pool, of type `static`: the worker registers there, and gets its credentials.
    pub provider_id: Option<String>,
    /// File with the static secret that the worker was created with.
    pub static_secret_file: Option<SecretFile>,
    /// Remove the worker from the pool when it exits because it was idle, reached its limit, is not needed, or its host terminates. A removed worker cannot register again.
    pub remove_on_exit: bool,
}

impl TaskclusterSource {
    /// A source without credentials.
    pub fn new(root_url: Url, task_queue: TaskQueue, handler: &str) -> Self {
        Self {
            dialect: Dialect::default(),
            root_url,
            task_queue,
            client_id: None,
            access_token_file: None,
            certificate_file: None,
            allow_hosts: Vec::new(),
            artifact_storage: ArtifactStorage::default(),
            worker_pool: None,
            handler: handler.to_owned(),
        }
    }

    /// Reads the credentials; `None` if no client is named.
    ///
    /// # Errors
    ///
    /// A secret that cannot be read, is empty or is far too large.
    pub fn read_credentials(&self, environment: &Environment) -> Result<Option<ClientCredentials>, SecretError> {
        let Some((client_id, token)) = self.client_id.clone().zip(self.access_token_file.as_ref()) else {
            return Ok(None);
        };
        let certificate = self.certificate_file.as_ref().map(|file| file.load("a certificate", environment));
        Ok(Some(ClientCredentials {
            client_id,
            access_token: token.load("an access token", environment)?,
            certificate: certificate.transpose()?,
        }))
    }

    pub fn check(&self, key: &str, worker: &[(&str, &WorkerName); 2], rules: &mut Rules<'_>) {
        let has_secret = self.access_token_file.is_some() || self.certificate_file.is_some();
        if self.client_id.is_none() && has_secret {
            rules.error(key, "", format!("[{key}] has credentials and no `client_id`"), "");
        }
        if self.client_id.is_some() && self.access_token_file.is_none() {
            rules.error(key, "client_id", format!("[{key}] has a `client_id` and no `access_token_file`"), "");
        }
        let pool = self.worker_pool.as_ref();
        let pool_key = format!("{key}.worker_pool");
        if pool.is_some_and(|pool| pool.provider_id.is_some() != pool.static_secret_file.is_some()) {
            let message =
                format!("[{pool_key}] needs both `provider_id` and `static_secret_file` to register, or none");
            rules.error(&pool_key, "", message, "");
        } else if pool.is_some_and(|pool| pool.provider_id.is_some()) && self.client_id.is_some() {
            let message = format!("[{pool_key}] gets its credentials by registering, and the source has a `client_id`");
            rules.error(&pool_key, "provider_id", message, "remove one of them");
        }
        match self.dialect {
            Dialect::Azure => self.check_azure(key, worker, rules),
            Dialect::ClaimWork => check_worker_type(key, self.task_queue.worker_type(), rules),
        }
    }

    fn check_azure(&self, key: &str, worker: &[(&str, &WorkerName); 2], rules: &mut Rules<'_>) {
        if self.artifact_storage == ArtifactStorage::Object {
            let message = format!("[{key}] has `dialect = \"azure\"`, which has no object service");
            rules.error(key, "artifact_storage", message, "did you mean \"s3\"?");
        }
        let chars_max = WORKER_NAME_CHARS_MAX_AZURE;
        let worker = worker.iter().map(|(key, name)| ("worker", *key, name.fill("h", 1, chars_max)));
        let queue = [self.task_queue.provisioner(), self.task_queue.worker_type()];
        let names = worker.chain(queue.map(|part| (key, "task_queue", part.to_owned())));
        for (section, name, text) in names.filter(|(_, _, text)| text.len() > chars_max) {
            let message = format!(
                "\"{text}\" has {} characters, but [{key}] with `dialect = \"azure\"` allows at most {chars_max}",
                text.len()
            );
            rules.error(section, name, message, "");
        }
    }
}

/// The credentials of a Taskcluster client.
#[derive(Debug, Clone)]
pub struct ClientCredentials {
    pub client_id: String,
    pub access_token: Secret,
    /// Set for temporary credentials.
    pub certificate: Option<Secret>,
}

/// Taskcluster's pattern is `^[a-z]([-a-z0-9]{0,36}[a-z0-9])?$`; the embedded queue accepts more.
fn check_worker_type(key: &str, text: &str, rules: &mut Rules<'_>) {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if text.bytes().all(plain) && text.starts_with(|first: char| first.is_ascii_lowercase()) && !text.ends_with('-') {
        return;
    }
    let message = format!("[{key}]: a Taskcluster refuses the worker type \"{text}\"");
    let help = "it has small letters, digits and dashes, begins with a letter and does not end with a dash";
    rules.warning(key, "task_queue", message, help);
}
