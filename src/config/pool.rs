//! The section of a pool of worker groups.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};

use super::schema::built_in;
use super::values::{File, MASK, Span, Url};
use crate::limits::MESSAGE_TTL_MIN;

/// A pool of worker groups.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PoolConfig {
    /// How requests are kept.
    pub queue_type: QueueType,
    /// How long after the last sign of demand the queue of a group is unbound. A request that comes later goes to the orphans, and makes the group active again.
    pub unbind_delay: Span,
    /// How long after that its workers are stopped and its queue is deleted.
    pub stop_delay: Span,
    /// How long a request may wait for a worker; `0s` is for ever. Then it is answered with an error.
    #[schemars(extend("x-least" = Span(MESSAGE_TTL_MIN), "x-zero" = "for ever"))]
    pub message_ttl: Span,
    /// How many requests may wait in one queue [built-in: any number].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<u32>,
    /// How often a request is handed out again whose worker ended. For `queue_type = "quorum"` only; what exceeds it is answered with an error, and put aside as poison [built-in: as the broker has it].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delivery_limit: Option<u32>,
    /// Who starts the workers: this host as processes, its systemd as instances of a unit, Docker, Kubernetes, or commands of your own. `noop` starts none, and says how many would be.
    pub driver: PoolDriver,
    /// A worker's program and its arguments; with `docker` and `kubernetes` those of its container, or empty for those of the image. Without, `subprocess` starts none. Each finds `WORKER_ID`, `WORKER_KEY`, `WORKER_POOL`, `WORKER_REQUESTS_QUEUE`, `WORKER_ACTIVITY_EXCHANGE` and `WORKER_AMQP_URI` in its environment.
    pub command: Vec<String>,
    /// What workers find in their environment besides, by name.
    pub env: BTreeMap<String, EnvValue>,
    /// Folder for the logs of workers, and for what they are found again by: each pool has one of its own in it, of its name.
    pub state_dir: File,
    /// How long a worker that was told to end has before it is killed.
    pub termination_grace: Span,
    /// How many workers a group has at least, while it is there.
    pub min: u32,
    /// How many workers a group has at most.
    #[schemars(range(min = 1))]
    pub max: u32,
    /// How many workers more than the load needs.
    pub min_idle: u32,
    /// How many requests a worker holds at once.
    #[schemars(range(min = 1))]
    pub concurrency: u32,
    /// How long fewer workers have to be enough before fewer are kept.
    pub scale_down_delay: Span,
    /// How many workers all groups of the pool have together [built-in: any number].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_total: Option<u32>,
    /// The `x-status` of answers that the controller gives in a worker's place. One known client ends at any that it does not know, so that this is `core_error` unless told otherwise; the reason is in the header `x-dead-letter-reason` and in the body.
    pub dead_letter_status: String,
    /// For `driver = "exec"`.
    pub exec: ExecDriverConfig,
    /// For `driver = "systemd"`.
    pub systemd: SystemdDriverConfig,
    /// For `driver = "docker"`.
    pub docker: DockerDriverConfig,
    /// For `driver = "kubernetes"`.
    pub kubernetes: KubernetesDriverConfig,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            queue_type: QueueType::default(),
            unbind_delay: minutes(10),
            stop_delay: minutes(10),
            message_ttl: minutes(0),
            max_length: None,
            delivery_limit: None,
            driver: PoolDriver::default(),
            command: Vec::new(),
            env: BTreeMap::new(),
            state_dir: File("/var/lib/journeyman/pool".into()),
            termination_grace: minutes(60),
            min: 1,
            max: 1,
            min_idle: 0,
            concurrency: 1,
            scale_down_delay: minutes(5),
            max_total: None,
            dead_letter_status: "core_error".to_owned(),
            exec: ExecDriverConfig::default(),
            systemd: SystemdDriverConfig::default(),
            docker: DockerDriverConfig::default(),
            kubernetes: KubernetesDriverConfig::default(),
        }
    }
}

/// Who starts the workers of a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PoolDriver {
    /// Processes of this host.
    #[default]
    Subprocess,
    /// Instances of a template unit.
    Systemd,
    /// Containers.
    Docker,
    /// Pods of a cluster.
    Kubernetes,
    /// Commands of the site's own.
    Exec,
    /// Nobody.
    Noop,
}

impl PoolDriver {
    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Subprocess => "subprocess",
            Self::Systemd => "systemd",
            Self::Docker => "docker",
            Self::Kubernetes => "kubernetes",
            Self::Exec => "exec",
            Self::Noop => "noop",
        }
    }
}

/// Commands of the site's own.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ExecDriverConfig {
    /// Program and arguments that list the workers.
    pub list: Vec<String>,
    /// Program and arguments that start one.
    pub start: Vec<String>,
    /// Program and arguments that tell one to go.
    pub stop: Vec<String>,
}

/// A template unit.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SystemdDriverConfig {
    /// Name of the template unit without `@.service`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
}

/// Containers of a daemon.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DockerDriverConfig {
    /// The image of a worker. It has to be there: it is not pulled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Where the daemon is: `unix:///…`, or `http://…` where nobody else can reach it.
    pub host: String,
    /// The network that workers are in, such as `host` [built-in: the daemon's own choice].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
}

impl Default for DockerDriverConfig {
    fn default() -> Self {
        Self { image: None, host: "unix:///var/run/docker.sock".to_owned(), network: None }
    }
}

/// Pods of a cluster.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesDriverConfig {
    /// The image of a worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The namespace that everything is made in.
    pub namespace: String,
    /// Who decides how many pods a key has.
    pub scaling: KubernetesScaling,
    /// The service account of workers [built-in: that of the namespace].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account: Option<String>,
    /// A pod template as JSON, for what a site says of its pods besides: resources, volumes, where they run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<File>,
    /// Address of the cluster's API; `http://127.0.0.1:8001` is that of `kubectl proxy`.
    pub server: Url,
    /// File with the token that the API is asked with, read at each call [built-in: none with `http://`, otherwise that of the controller's pod].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<File>,
    /// Who may vouch for the API (PEM) [built-in: as above].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<File>,
}

impl Default for KubernetesDriverConfig {
    fn default() -> Self {
        Self {
            image: None,
            namespace: "default".to_owned(),
            scaling: KubernetesScaling::Controller,
            service_account: None,
            template: None,
            server: built_in("https://kubernetes.default.svc"),
            token_file: None,
            ca_file: None,
        }
    }
}

/// Who decides how many pods a key has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KubernetesScaling {
    /// The controller.
    #[default]
    Controller,
    /// KEDA, which counts what waits.
    Keda,
}

/// What a worker finds in its environment under this name. It is shown nowhere.
#[derive(Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(extend("x-variable" = true))]
pub struct EnvValue(pub String);

// It may be a secret whatever it is called: an address with a password in it, say.
impl std::fmt::Debug for EnvValue {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(MASK)
    }
}

impl Serialize for EnvValue {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(MASK)
    }
}

const fn minutes(count: u64) -> Span {
    Span(Duration::from_secs(count * 60))
}

/// How requests are kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum QueueType {
    /// In memory, as existing workers know it. A restart of the broker loses what waits.
    #[default]
    Classic,
    /// On disk, in quorum queues.
    Quorum,
}
