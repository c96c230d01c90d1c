//! The section of demand that comes from elsewhere than AMQP.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Queue as TaskQueue, Secret, SecretFile, Span, Url};

/// A queue whose tasks are done by the workers of a group.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DemandConfig {
    /// What kind of queue it is.
    pub kind: DemandKind,
    /// The pool whose workers do its tasks.
    pub pool: String,
    /// Their key: the group is the one of this key in the pool.
    pub key: String,
    /// Root of the Taskcluster deployment.
    pub root_url: Url,
    /// Which tasks are counted: provisioner and worker type.
    pub task_queue: TaskQueue,
    /// How often they are counted.
    #[serde(default = "interval_default")]
    #[schemars(extend("x-least" = Span(Duration::from_secs(1))))]
    pub interval: Span,
    /// Who we are. It takes `queue:pending-count:TASK_QUEUE`, and where claimed tasks are to be counted too `queue:claimed-list:TASK_QUEUE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    /// File that holds the access token, readable for its owner only; or `fd:N`, a descriptor; or `systemd:NAME`, a credential of the unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token_file: Option<SecretFile>,
    /// The access token itself. From the environment only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token: Option<Secret>,
    /// File that holds the certificate of temporary credentials; or `fd:N` or `systemd:NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_file: Option<SecretFile>,
    /// The certificate itself. From the environment only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<Secret>,
}

const fn interval_default() -> Span {
    Span(Duration::from_secs(10))
}

/// Kinds of queues whose tasks are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DemandKind {
    /// A task queue of Taskcluster.
    Taskcluster,
}
