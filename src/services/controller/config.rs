//! The sections of pools of worker groups and of their demand.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize, Serializer};

use journeyman_domain::named_enum;
use journeyman_platform::settings::rules::Rules;
use journeyman_platform::settings::values::{File, MASK, OptionalSpan, Span, built_in};

/// Of a quorum queue. A worker that exits costs everything that it held a delivery, so the limit must leave workers room
/// to find the request that ends them: journeyman's workers decide after [`AMQP_ATTEMPTS_MAX`](journeyman_domain::limits::AMQP_ATTEMPTS_MAX), others within twenty.
const DELIVERY_LIMIT: u32 = 20;

/// A pool of worker groups.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PoolConfig {
    /// Type of the request queues. A request in a `classic` queue outlives a restart of the broker if its client marks it persistent, one in a `quorum` queue always. A pool with `none` has no request queues and needs no broker: its groups follow the `[demand.NAME]` of a ZooKeeper alone.
    pub queue_type: QueueType,
    /// Time without demand until a group's queue is unbound. Later requests go to the orphan queue and activate the group again.
    pub unbind_delay: Span,
    /// Time after that until the group's workers are stopped and its queue is deleted.
    pub stop_delay: Span,
    /// How long a request may wait for a worker, at most 49 days; `0s` is no limit. An expired request gets an error reply.
    pub message_ttl: OptionalSpan<1>,
    /// Maximum number of requests in one queue [built-in: no limit].
    pub max_length: Option<u32>,
    /// Maximum redeliveries of a request whose worker exited. After it the request gets an error reply and moves to the poison queue. The broker counts the end of a worker for every request that the worker held: with a `concurrency` above 1 and a limit of 0, such requests reach the limit together. With `queue_type = "quorum"` only [built-in: 20].
    pub delivery_limit: Option<u32>,
    /// How workers are started: as processes of this host, as systemd units, with Docker, Kubernetes or commands of your own. `noop` only logs how many workers are needed.
    pub driver: PoolDriver,
    /// The worker's command line; with `docker` and `kubernetes` the container's [built-in: the image's]. `subprocess` starts no workers without it. Workers find `WORKER_ID`, `WORKER_KEY`, `WORKER_POOL`, `WORKER_REQUESTS_QUEUE`, `WORKER_ACTIVITY_EXCHANGE` and `WORKER_AMQP_URI` in their environment, and with `subprocess` a directory of their own in `WORKER_DIR`, which is removed after they exit.
    pub command: Vec<String>,
    /// Additional environment variables of the workers, by name.
    pub env: BTreeMap<String, EnvValue>,
    /// Directory for worker logs and the state of the controller; each pool has a subdirectory of its name.
    pub state_dir: File,
    /// Time that a worker may take to exit before it is killed.
    pub termination_grace: Span,
    /// Minimum number of workers of an active group.
    pub min: u32,
    /// Maximum number of workers of a group.
    pub max: NonZeroU32,
    /// Number of idle workers to keep in addition to the load.
    pub min_idle: u32,
    /// Number of requests that a worker takes at once.
    pub concurrency: NonZeroU32,
    /// How long fewer workers have to be sufficient before a group scales down.
    pub scale_down_delay: Span,
    /// Maximum number of workers of all groups together [built-in: no limit].
    pub max_total: Option<u32>,
    /// The program of `driver = "exec"` and its arguments, which lists, starts and stops workers.
    pub exec: Vec<String>,
    /// For `driver = "systemd"`.
    pub systemd: Option<SystemdDriverConfig>,
    /// For `driver = "docker"`.
    pub docker: Option<DockerDriverConfig>,
    /// For `driver = "kubernetes"`.
    pub kubernetes: Option<KubernetesDriverConfig>,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            queue_type: QueueType::default(),
            unbind_delay: built_in("10m"),
            stop_delay: built_in("10m"),
            message_ttl: OptionalSpan(None),
            max_length: None,
            delivery_limit: None,
            driver: PoolDriver::default(),
            command: Vec::new(),
            env: BTreeMap::new(),
            state_dir: built_in("/var/lib/journeyman/pool"),
            termination_grace: built_in("1h"),
            min: 1,
            max: NonZeroU32::MIN,
            min_idle: 0,
            concurrency: NonZeroU32::MIN,
            scale_down_delay: built_in("5m"),
            max_total: None,
            exec: Vec::new(),
            systemd: None,
            docker: None,
            kubernetes: None,
        }
    }
}

impl PoolConfig {
    pub fn check(&self, key: &str, rules: &mut Rules<'_>) {
        if self.delivery_limit.is_some() && self.queue_type != QueueType::Quorum {
            let message = format!("[{key}] has a `delivery_limit`, which only quorum queues support");
            rules.error(key, "delivery_limit", message, "did you mean queue_type = \"quorum\" as well?");
        }
        if self.min > self.max.get() {
            let message = format!("[{key}] has `min` = {}, which is more than `max` = {}", self.min, self.max);
            let name = if rules.is_set(key, "min") { "min" } else { "max" };
            rules.error(key, name, message, "`min` may be at most `max`");
        }
        let driver = self.driver.as_str();
        let tables = [
            ("exec", PoolDriver::Exec, !self.exec.is_empty(), "a program"),
            ("systemd", PoolDriver::Systemd, self.systemd.is_some(), "`unit`"),
            ("docker", PoolDriver::Docker, self.docker.is_some(), "`image`"),
            ("kubernetes", PoolDriver::Kubernetes, self.kubernetes.is_some(), "`image`"),
        ];
        for (table, of_driver, is_set, required) in tables {
            if is_set && self.driver != of_driver {
                let message = format!("[{key}] has `driver = \"{driver}\"` and `{table}`");
                rules.error(key, table, message, &format!("did you mean driver = \"{table}\"?"));
            } else if !is_set && self.driver == of_driver {
                let message = format!("[{key}] has `driver = \"{driver}\"` and no `{table}`");
                rules.error(key, "driver", message, &format!("`{table}` needs {required} at least"));
            }
        }
        let starts_command = match self.driver {
            PoolDriver::Subprocess | PoolDriver::Docker | PoolDriver::Kubernetes => true,
            PoolDriver::Systemd | PoolDriver::Exec | PoolDriver::Noop => false,
        };
        if !self.command.is_empty() && !starts_command {
            let message = format!("[{key}] has `driver = \"{driver}\"`, which does not use `command`");
            rules.error(key, "command", message, "did you mean driver = \"subprocess\"?");
        }
    }

    /// `None` for classic queues.
    pub(crate) fn delivery_limit(&self) -> Option<u32> {
        match self.queue_type {
            QueueType::Classic | QueueType::None => None,
            QueueType::Quorum => Some(self.delivery_limit.unwrap_or(DELIVERY_LIMIT)),
        }
    }

    pub(crate) fn is_scaled_by_keda(&self) -> bool {
        let scaling = self.kubernetes.as_ref().map(|kubernetes| kubernetes.scaling);
        self.driver == PoolDriver::Kubernetes && scaling == Some(KubernetesScaling::Keda)
    }
}

named_enum! {
    /// How the workers of a pool are started.
    #[derive(Default)]
    #[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
    pub enum PoolDriver {
        /// As processes of this host.
        #[default]
        Subprocess = "subprocess",
        /// As instances of a template unit.
        Systemd = "systemd",
        /// As containers.
        Docker = "docker",
        /// As pods.
        Kubernetes = "kubernetes",
        /// By commands of your own.
        Exec = "exec",
        /// Not at all.
        Noop = "noop",
    }
}

/// Instances of a template unit.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct SystemdDriverConfig {
    /// Name of the template unit without `@.service`.
    pub unit: String,
    /// The program and its leading arguments; tests use a stand-in.
    #[serde(skip, default = "systemctl")]
    pub systemctl: Vec<String>,
}

fn systemctl() -> Vec<String> {
    vec!["systemctl".to_owned()]
}

/// Containers of a Docker daemon.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DockerDriverConfig {
    /// Image of a worker. It must exist on the host; it is not pulled.
    pub image: String,
    /// Address of the daemon: `unix:///…`, or `http://…` on a trusted network.
    #[serde(default = "docker_host")]
    pub host: String,
    /// Network of the workers, such as `host` [built-in: the daemon's default].
    pub network: Option<String>,
}

fn docker_host() -> String {
    "unix:///var/run/docker.sock".to_owned()
}

/// Pods of a cluster.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct KubernetesDriverConfig {
    /// Image of a worker.
    pub image: String,
    /// Namespace of the workers.
    #[serde(default = "namespace")]
    pub namespace: String,
    /// What sets the number of pods of a key: the controller, or KEDA by the length of the queue.
    #[serde(default)]
    pub scaling: KubernetesScaling,
    /// File with a pod template (JSON) for resources, volumes, a service account and the like.
    pub template: Option<File>,
    /// Kubeconfig of the cluster. Its credentials and certificates may change while the controller runs [built-in: `KUBECONFIG`, else `~/.kube/config`, else the service account of the controller's pod].
    pub kubeconfig: Option<File>,
}

fn namespace() -> String {
    "default".to_owned()
}

/// What sets the number of pods of a key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum KubernetesScaling {
    /// The controller.
    #[default]
    Controller,
    /// KEDA, by the length of the queue.
    Keda,
}

/// The value of an environment variable of a worker. It is masked wherever it is shown.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct EnvValue(pub String);

// The value may be a secret whatever the variable is called, such as a URL with a password.
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

/// Type of the request queues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum QueueType {
    /// Classic queues. A restart of the broker loses waiting requests that are not persistent.
    #[default]
    Classic,
    /// Quorum queues, which keep every message on disk.
    Quorum,
    /// No request queues and no broker: groups follow the `[demand.NAME]` of a ZooKeeper alone.
    None,
}

/// A queue whose pending and claimed tasks count as demand for a worker group.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DemandConfig {
    /// Name of the source of kind `taskcluster` or `zookeeper` whose queue is counted. The controller claims nothing from it. A client of Taskcluster needs `queue:pending-count:TASK_QUEUE`, and `queue:claimed-list:TASK_QUEUE` to count claimed tasks as well.
    pub source: String,
    /// Pool whose workers run the tasks.
    pub pool: String,
    /// Key of the worker group in the pool.
    pub key: String,
}
