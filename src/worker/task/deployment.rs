//! What a task may use of the deployment that its queue belongs to.

use std::pin::Pin;
use std::time::{Duration, SystemTime};

use reqwest::header::HeaderValue;
use secrecy::SecretString;
use url::Url;

use journeyman_domain::id::TaskId;
use journeyman_domain::refusal::CallError;

/// The credentials of a run. Deliberately without `Debug`.
#[derive(Clone)]
pub struct RunCredentials {
    /// The client id; not a secret.
    pub client_id: String,
    /// The access token.
    pub access_token: SecretString,
    /// The certificate, as JSON text.
    pub certificate: Option<SecretString>,
}

/// Purges caches of a name that were created before a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PurgeRequest {
    /// The name.
    pub cache_name: String,
    /// The time, by the service's clock.
    pub before: SystemTime,
}

/// The future of a call to a service, which is made once and limited in time.
pub type DeploymentFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, CallError>> + Send + 'a>>;

/// The services of a deployment, as the task and its worker may call them.
pub trait Deployment: Send + Sync {
    /// The root URL without a trailing slash.
    fn root_url(&self) -> &str;

    /// The group and the id under which the worker has claimed the task.
    fn worker(&self) -> (&str, &str);

    /// What requests of the task may use: its own scopes, and that for its artifacts.
    fn task_scopes(&self) -> &[String];

    /// The `Authorization` header of a request as the task: by the credentials of its last reclaim, restricted to its scopes, with
    /// a fresh nonce. `None` if the URL cannot be signed.
    fn sign(&self, method: &str, url: &Url) -> Option<HeaderValue>;

    /// The URL with a signature of its own: its bearer may GET it as the task, for `lifetime`.
    fn sign_url(&self, url: &Url, lifetime: Duration) -> Option<Url>;

    /// The credentials of the run, as of its last reclaim.
    fn run_credentials(&self) -> RunCredentials;

    /// Finds the task that the index has under a namespace.
    fn find_indexed<'a>(&'a self, namespace: &'a str) -> DeploymentFuture<'a, TaskId>;

    /// The task's scopes, with those of its roles.
    fn expand_scopes(&self) -> DeploymentFuture<'_, Vec<String>>;

    /// The requests to purge caches of workers of this task queue.
    fn purge_requests(&self) -> DeploymentFuture<'_, Vec<PurgeRequest>>;
}

impl std::fmt::Debug for dyn Deployment {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Deployment({})", self.root_url())
    }
}
