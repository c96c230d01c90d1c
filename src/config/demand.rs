//! The section of a task queue whose pending tasks count as demand for a pool.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::schema::built_in;
use super::secrets::CredentialKeys;
use super::values::{Queue as TaskQueue, Secret, SecretFile, Span, Url};

/// A task queue whose pending tasks count as demand for a worker group.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DemandConfig {
    /// Kind of the queue.
    pub kind: DemandKind,
    /// Pool whose workers run its tasks.
    pub pool: String,
    /// Key of the worker group in the pool.
    pub key: String,
    /// Root URL of the Taskcluster deployment.
    pub root_url: Url,
    /// Tasks to count: provisioner and worker type.
    pub task_queue: TaskQueue,
    /// Interval of the counts.
    #[serde(default = "interval")]
    pub interval: Span<1_000>,
    /// Taskcluster client id. It needs `queue:pending-count:TASK_QUEUE`, and `queue:claimed-list:TASK_QUEUE` to count claimed tasks as well.
    pub client_id: Option<String>,
    /// File with the access token, readable by its owner only; or `fd:N` or `systemd:NAME`.
    pub access_token_file: Option<SecretFile>,
    /// The access token. From the environment only.
    pub access_token: Option<Secret>,
    /// File with the certificate of temporary credentials; or `fd:N` or `systemd:NAME`.
    pub certificate_file: Option<SecretFile>,
    /// The certificate. From the environment only.
    pub certificate: Option<Secret>,
}

impl DemandConfig {
    /// The keys of its client.
    pub const fn credentials(&self) -> CredentialKeys<'_> {
        CredentialKeys {
            client_id: self.client_id.as_ref(),
            access_token: self.access_token.as_ref(),
            access_token_file: self.access_token_file.as_ref(),
            certificate: self.certificate.as_ref(),
            certificate_file: self.certificate_file.as_ref(),
        }
    }
}

fn interval() -> Span<1_000> {
    built_in("10s")
}

/// Kinds of queues whose tasks are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DemandKind {
    /// A task queue of Taskcluster.
    Taskcluster,
}
