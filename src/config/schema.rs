//! The keys of the configuration. Help texts and the guide show the doc comments of the fields.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::pool::{DemandConfig, PoolConfig};
use super::values::{
    AttemptRate, File, Filter, Listen, OptionalSpan, Queue as TaskQueue, SecretFile, ServiceAddress, Size, Span, Url,
    WebhookUrl, WorkerName,
};
use crate::notifier::Format;
use crate::queue::Auth;
use crate::source::amqp::OnAttemptsExhausted;
use crate::source::taskcluster::{ArtifactStorage, Dialect};
use crate::source::zookeeper;
use journeyman_domain::lane::retry::OnExhausted;
use journeyman_domain::limits::{
    CLAIM_TIMEOUT_MIN_MS, LAUNCHED_MAX, NOTIFIER_ATTEMPTS_PER_ENDPOINT, NOTIFIER_ATTEMPTS_PER_ORIGIN_MAX,
    NOTIFIER_SHARDS_MAX, RUN_TIME_MIN_MS, SERVICE_PROBE_INTERVAL_MIN_MS, SERVICE_STARTUP_TIMEOUT_MIN_MS,
    STATUS_POLL_MIN_MS, TASK_LOG_BYTES_MIN, WEBHOOK_TIMEOUT_MAX,
};
use journeyman_platform::host::containment::Requirement;
use journeyman_platform::host::termination_notice::MetadataProvider;

/// A time that a task may run.
pub type RunTime = Span<RUN_TIME_MIN_MS>;

/// A whole configuration.
#[derive(Debug, Clone, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(deny_unknown_fields))]
pub struct Config {
    /// This worker.
    pub worker: Worker,
    /// The host that the worker runs on.
    pub host: Host,
    /// Queues that the worker claims from, by name.
    pub source: BTreeMap<String, Source>,
    /// The AMQP broker and this worker's identity there.
    pub amqp: Amqp,
    /// Bridges of `journeyman bridge`, by name.
    pub bridge: BTreeMap<String, Bridge>,
    /// Pools of worker groups that `journeyman controller` scales, by name. They use the broker of `[amqp]`.
    pub pool: BTreeMap<String, PoolConfig>,
    /// Queues whose pending and claimed tasks count as demand for a pool, by name.
    pub demand: BTreeMap<String, DemandConfig>,
    /// Handlers that run payloads, by name. `command` exists without a section.
    pub handler: BTreeMap<String, Handler>,
    /// Programs that run before and after each task.
    pub hooks: Hooks,
    /// The embedded queue (`journeyman queue` and `journeyman dev`).
    pub queue: Queue,
    /// The notifier (`journeyman notifier`).
    pub notifier: Notifier,
    /// The notifier that a worker, a queue or a controller tells what has ended.
    pub notify: Notify,
    /// The control socket.
    pub control: Control,
    /// Health checks, metrics and a status page over HTTP.
    pub http: Http,
    /// Logs.
    pub log: Log,
}

/// This worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Worker {
    /// Worker id, unique within the group. `{hostname}` and `{pid}` are replaced. At most 38 characters, 22 with `dialect = "azure"`.
    pub id: WorkerName,
    /// Worker group, often a region. At most 38 characters, 22 with `dialect = "azure"`.
    pub group: WorkerName,
    /// Maximum number of tasks that run at once.
    #[cfg_attr(test, schemars(range(min = 1, max = 16384)))]
    #[serde(deserialize_with = "capacity")]
    pub capacity: u16,
    /// Maximum number of tasks beside these whose work runs elsewhere.
    #[cfg_attr(test, schemars(range(max = 100_000)))]
    #[serde(deserialize_with = "launched_max")]
    pub launched_max: u32,
    /// Directory for the files of running tasks. Two workers cannot share one.
    pub work_dir: File,
    /// How long running tasks may continue after the first TERM or INT before their claims are released.
    pub drain_deadline: Span,
    /// Time between SIGTERM and SIGKILL for a task that is stopped, and for the service of a handler. SIGKILL follows 0.5 s before its end, or a quarter before it if that is less, so that the exit is observed in time.
    pub termination_grace: Span,
    /// How often the status of each running task is checked for cancellation. `0s` disables it.
    pub status_poll_interval: OptionalSpan<STATUS_POLL_MIN_MS>,
    /// Address that serves the logs of running tasks, each under a secret path, which the artifact `public/logs/live.log` leads to until the task ends [built-in: none]. With port 0 the system chooses a port.
    pub live_log: Option<Listen>,
    /// How readers reach `live_log`, such as the URL of a proxy in front of it [built-in: `http://` and the address of `live_log`].
    pub live_log_url: Option<Url>,
    /// Exit after this time without a claim; `0s` is never. Time in which the worker is paused does not count.
    pub exit_when_idle: OptionalSpan,
    /// Exit after this many tasks; 0 is never.
    pub max_tasks: u32,
    /// Drain and exit after this time; `0s` is never.
    pub max_uptime: OptionalSpan,
}

impl Default for Worker {
    fn default() -> Self {
        Self {
            id: built_in("{hostname}"),
            group: built_in("journeyman"),
            capacity: 1,
            launched_max: 1_000,
            work_dir: built_in("/var/lib/journeyman/work"),
            drain_deadline: built_in("1h"),
            termination_grace: termination_grace(),
            status_poll_interval: built_in("10s"),
            live_log: None,
            live_log_url: None,
            exit_when_idle: OptionalSpan(None),
            max_tasks: 0,
            max_uptime: OptionalSpan(None),
        }
    }
}

const CAPACITY_MAX: u16 = 16_384;

fn launched_max<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let max = u32::deserialize(from)?;
    if max <= LAUNCHED_MAX {
        Ok(max)
    } else {
        Err(D::Error::custom(format!("a whole number from 0 to {LAUNCHED_MAX}")))
    }
}

fn capacity<'de, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
    let capacity = i64::deserialize(from)?;
    let capacity = u16::try_from(capacity).ok().filter(|capacity| (1..=CAPACITY_MAX).contains(capacity));
    capacity.ok_or_else(|| D::Error::custom(format!("a whole number from 1 to {CAPACITY_MAX}")))
}

/// The host that the worker runs on.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Host {
    /// Metadata service that announces the termination of a spot or preemptible host. `auto` tries all three at start and stops after a minute without an answer.
    #[cfg_attr(test, schemars(with = "platform_enums::MetadataProvider"))]
    pub metadata_service: MetadataProvider,
    /// What happens to running tasks on a termination notice. With `finish` they are released 15 s before the termination, or earlier if `termination_grace` and the reports need more. Tasks that have not started are released at once.
    pub on_termination_notice: OnTerminationNotice,
    /// File that announces a termination by an RFC 3339 time. Any other content means that the host terminates now. The file need not exist.
    pub termination_file: Option<File>,
    /// URL of the metadata service if it is not `http://169.254.169.254`; `http://[fd00:ec2::254]` on EC2 without IPv4.
    pub metadata_endpoint: Option<Url>,
    /// Stop claiming below this free disk space in `worker.work_dir`. Tasks of a poll in flight are released, which costs them a retry.
    pub min_free_disk: Size,
    /// Stop claiming below this available memory. Tasks of a poll in flight are released, which costs them a retry.
    pub min_free_memory: Size,
    /// How the processes of a task are contained.
    #[cfg_attr(test, schemars(with = "platform_enums::Requirement"))]
    pub containment: Requirement,
    /// Memory limit of all processes of a task. Needs control groups with the memory controller.
    pub task_memory: Option<Size>,
    /// Limit of processes and threads of a task. Needs control groups with the pids controller.
    pub task_pids: Option<NonZeroU32>,
    /// Maximum size of a task's directory, checked every 5 s and at the task's end [built-in: 80 % of the disk that holds `worker.work_dir`].
    pub task_disk: Option<Size>,
}

impl Default for Host {
    fn default() -> Self {
        Self {
            metadata_service: MetadataProvider::Auto,
            on_termination_notice: OnTerminationNotice::Finish,
            termination_file: None,
            metadata_endpoint: None,
            min_free_disk: built_in("512MiB"),
            min_free_memory: built_in("64MiB"),
            containment: Requirement::Auto,
            task_memory: None,
            task_pids: None,
            task_disk: None,
        }
    }
}

/// What happens to running tasks on a termination notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum OnTerminationNotice {
    /// They may finish while there is time.
    Finish,
    /// They are released at once.
    Release,
}

/// The control socket.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Control {
    /// Path of the socket, usable by the user and group that own it [built-in: `control.sock` in `worker.work_dir`; for a controller `controller.sock` in `state_dir` of its first pool].
    pub socket: Option<File>,
}

/// Health checks, metrics and a status page over HTTP.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Http {
    /// Address of `/livez`, `/readyz`, `/metrics` and the status page [built-in: none]. With port 0 the system chooses a port.
    pub listen: Option<Listen>,
    /// Allow a `listen` address that other hosts can reach. Anyone who can connect sees task names and sources, but no secrets.
    pub allow_remote: bool,
    /// File with the bearer token for commands to a controller [built-in: no commands over HTTP].
    pub token_file: Option<SecretFile>,
}

/// A queue that the worker claims from.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Source {
    /// Taskcluster and the embedded queue.
    Taskcluster(TaskclusterSource),
    /// A request queue of an AMQP broker.
    Amqp(RequestSource),
    /// A queue in a ZooKeeper.
    Zookeeper(ZooKeeperSource),
    /// The build messages of a Screwdriver.
    Screwdriver(Box<ScrewdriverSource>),
}

/// Tasks of a Taskcluster deployment.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// Name of the handler that runs the tasks.
    #[serde(default = "command_name")]
    pub handler: String,
}

/// Requests of an AMQP queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RequestSource {
    /// Queue to consume [built-in: `POOL-req-KEY`, or `WORKER_REQUESTS_QUEUE`]. The worker never declares it and waits until it exists.
    pub requests_queue: Option<String>,
    /// Maximum attempts of a request whose worker exits or whose handler asks for a retry; 0 is no limit.
    #[serde(default = "max_attempts")]
    pub max_attempts: u32,
    /// What happens to a request after its last attempt: the client gets an error reply, or the broker dead-letters the request.
    #[serde(default)]
    pub on_attempts_exhausted: OnAttemptsExhausted,
    /// Queue for copies of such requests with the reason; their clients get an error reply as well.
    pub poison_queue: Option<String>,
    /// Hold no request while staged work runs elsewhere: delayed messages have it looked at. The worker declares exchanges and queues for them, whose names begin with that of the queue and `.delay.`.
    #[serde(default)]
    pub deferred: bool,
    /// Name of the handler that runs the requests.
    #[serde(default = "command_name")]
    pub handler: String,
}

/// Requests or tasks that are nodes of a ZooKeeper.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ZooKeeperSource {
    /// Whose layout the queue has: the merge jobs or the builds of a Zuul, or one node a task.
    pub dialect: zookeeper::Dialect,
    /// The servers: hosts with ports, separated by commas.
    pub connect: String,
    /// Node below which all paths lie [built-in: none]. It is created if it does not exist.
    pub chroot: Option<String>,
    /// Path of the queue [built-in: that of a Zuul; `/journeyman` with `dialect = "native"`].
    pub queue: Option<String>,
    /// Zones whose builds are claimed, for `dialect = "zuul-executor"`.
    #[serde(default)]
    pub zones: Vec<String>,
    /// Also claim builds without a zone [built-in: true without `zones`].
    pub allow_unzoned: Option<bool>,
    /// File with the CA certificates (PEM) that verify the servers, whose certificates need subject alternative names. With it the connection uses TLS.
    pub ca_file: Option<File>,
    /// File with the client certificate chain (PEM).
    pub certificate_file: Option<File>,
    /// File with the private key of the client certificate (PEM).
    pub key_file: Option<File>,
    /// How long claims survive a lost connection. The server may shorten or extend it.
    #[serde(default = "session_timeout")]
    pub session_timeout: Span,
    /// Also end requests whose worker is gone and remove leftovers, as `journeyman zk janitor` does. One worker at a time does it.
    #[serde(default)]
    pub janitor: bool,
    /// Name of the handler that runs the requests.
    #[serde(default = "command_name")]
    pub handler: String,
}

const fn session_timeout() -> Span {
    Span(std::time::Duration::from_secs(40))
}

/// Builds of a Screwdriver, from the queues of its worker for build clusters.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ScrewdriverSource {
    /// Queue of the messages that start and stop builds and clear caches. The worker never declares it.
    pub main_queue: String,
    /// Queue of the messages that look at builds again. The worker never declares it.
    pub retry_queue: String,
    /// Queue whose messages expire into `retry_queue`, as the existing worker has it [built-in: none, which keeps short delays from waiting for longer ones].
    pub wait_queue: Option<String>,
    /// Exchange that these queues are bound to, each by its name.
    pub exchange: String,
    /// What the names of pods and the label `sdbuild` begin with, before the build's id.
    pub prefix: String,
    /// Namespace of the pods.
    pub namespace: String,
    /// Kubeconfig of the cluster [built-in: the cluster that the worker runs in].
    pub kubeconfig: Option<File>,
    /// File with a template of the pods, instead of the one that makes the existing worker's pods.
    pub template: Option<File>,
    /// URL of Screwdriver's API, for the worker and for builds [built-in: the one in each message].
    pub api: Option<Url>,
    /// URL of Screwdriver's user interface, for builds.
    pub ui: Option<Url>,
    /// URL of Screwdriver's store, for builds.
    pub store: Option<Url>,
    /// Image of the launcher, without its tag.
    pub launcher_image: String,
    /// Tag of the launcher's image.
    pub launcher_version: String,
    /// CPU of a class of builds, by the annotation `screwdriver.cd/cpu`, in thousandths of a core. `LOW` is for builds without a class, `MAX` also limits those that ask for a number of cores [built-in: `MICRO` 500, `LOW` 2000, `HIGH` 6000, `TURBO` and `MAX` 12000].
    #[serde(deserialize_with = "set_cpu_classes")]
    pub cpu: BTreeMap<String, u32>,
    /// Memory of a class of builds, by the annotation `screwdriver.cd/ram`, in GiB. `LOW` and `MAX` as for `cpu` [built-in: `MICRO` 1, `LOW` 2, `HIGH` 12, `TURBO` and `MAX` 16].
    #[serde(deserialize_with = "set_memory_classes")]
    pub memory: BTreeMap<String, u32>,
    /// How long a build may run that has no annotation `screwdriver.cd/timeout`.
    pub build_timeout: Span<60_000>,
    /// Maximum of that annotation.
    pub build_timeout_max: Span<60_000>,
    /// Minimum of the annotation `screwdriver.cd/terminationGracePeriodSeconds`.
    pub build_termination_grace: Span,
    /// Value of a label of the nodes that builds run on, which their pods tolerate as a taint too.
    pub node_selectors: BTreeMap<String, String>,
    /// Label of nodes that the annotation `screwdriver.cd/diskSpeed` selects [built-in: none].
    pub disk_speed_label: Option<String>,
    /// Directory of the build caches on every node and on this host [built-in: none, and caches are not cleared].
    pub cache_path: Option<File>,
    /// How long pods of builds are kept that have ended; `0s` is for ever.
    pub ended_pods_kept: OptionalSpan,
    /// How often a build is looked at, and for how long.
    pub limits: BuildLimits,
}

impl Default for ScrewdriverSource {
    fn default() -> Self {
        Self {
            main_queue: "sdQueue".to_owned(),
            retry_queue: "sdRetryQueue".to_owned(),
            wait_queue: None,
            exchange: "build".to_owned(),
            prefix: String::new(),
            namespace: "default".to_owned(),
            kubeconfig: None,
            template: None,
            api: None,
            ui: None,
            store: None,
            launcher_image: "screwdrivercd/launcher".to_owned(),
            launcher_version: "stable".to_owned(),
            cpu: cpu_classes(),
            memory: memory_classes(),
            build_timeout: built_in("90m"),
            build_timeout_max: built_in("120m"),
            build_termination_grace: built_in("60s"),
            node_selectors: BTreeMap::new(),
            disk_speed_label: None,
            cache_path: None,
            ended_pods_kept: built_in("24h"),
            limits: BuildLimits::default(),
        }
    }
}

fn cpu_classes() -> BTreeMap<String, u32> {
    classes([("MICRO", 500), ("LOW", 2_000), ("HIGH", 6_000), ("TURBO", 12_000), ("MAX", 12_000)])
}

fn memory_classes() -> BTreeMap<String, u32> {
    classes([("MICRO", 1), ("LOW", 2), ("HIGH", 12), ("TURBO", 16), ("MAX", 16)])
}

fn classes(values: [(&str, u32); 5]) -> BTreeMap<String, u32> {
    values.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Classes that are not set keep their built-in values.
fn set_cpu_classes<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, u32>, D::Error> {
    Ok(cpu_classes().into_iter().chain(BTreeMap::deserialize(from)?).collect())
}

fn set_memory_classes<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, u32>, D::Error> {
    Ok(memory_classes().into_iter().chain(BTreeMap::deserialize(from)?).collect())
}

/// How often builds are tried and looked at. The built-in values are the existing worker's.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct BuildLimits {
    /// How often the start of a build is tried again after an error of the cluster.
    pub reprocess: u32,
    /// How often it is tried again for want of quota.
    pub quota_retries: u32,
    /// How often a pod is looked at while it pulls its images.
    pub checks: u32,
    /// How long a pod may wait for a node.
    pub scheduling_timeout: Span,
    /// How long after its start a build is looked at.
    pub delay: Span<1000>,
    /// By how much each delay is longer than the one before while a pod pulls its images.
    pub delay_step: Span,
    /// How long the registry may say that there is no such image, or no right to it, before the build fails.
    pub pull_grace: Span,
    /// How long a container may fail to be created.
    pub create_grace: Span,
}

impl Default for BuildLimits {
    fn default() -> Self {
        Self {
            reprocess: 3,
            quota_retries: 60,
            checks: 6,
            scheduling_timeout: built_in("3m"),
            delay: built_in("30s"),
            delay_step: built_in("10s"),
            pull_grace: built_in("90s"),
            create_grace: built_in("30s"),
        }
    }
}

impl Source {
    /// The name of the handler; `None` for a source that has its own.
    pub fn handler(&self) -> Option<&str> {
        match self {
            Self::Taskcluster(source) => Some(&source.handler),
            Self::Amqp(source) => Some(&source.handler),
            Self::Zookeeper(source) => Some(&source.handler),
            Self::Screwdriver(_) => None,
        }
    }

    /// The source as one of Taskcluster.
    pub const fn as_taskcluster(&self) -> Option<&TaskclusterSource> {
        match self {
            Self::Taskcluster(source) => Some(source),
            Self::Amqp(_) | Self::Zookeeper(_) | Self::Screwdriver(_) => None,
        }
    }
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
            handler: handler.to_owned(),
        }
    }
}

impl RequestSource {
    /// A source for this handler with the built-in values.
    pub fn new(handler: &str) -> Self {
        Self {
            requests_queue: None,
            max_attempts: max_attempts(),
            on_attempts_exhausted: OnAttemptsExhausted::default(),
            poison_queue: None,
            deferred: false,
            handler: handler.to_owned(),
        }
    }
}

const fn max_attempts() -> u32 {
    journeyman_domain::limits::AMQP_ATTEMPTS_MAX
}

/// The AMQP broker and this worker's identity there.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Amqp {
    /// Where the URI of the broker is read, such as `amqps://user:password@broker.example.com/vhost` [built-in: RabbitMQ on this host, as guest]. The variables `JOURNEYMAN_AMQP_URI` and `WORKER_AMQP_URI` take precedence.
    pub uri_file: Option<SecretFile>,
    /// File with the CA certificates (PEM) that verify the broker, instead of the system's.
    pub ca_file: Option<File>,
    /// File with the client certificate chain (PEM).
    pub certificate_file: Option<File>,
    /// File with the private key of the client certificate (PEM).
    pub key_file: Option<File>,
    /// Key of the worker group, part of the name of its queue. `WORKER_KEY` sets it too.
    pub worker_key: Option<String>,
    /// Pool of this worker. `WORKER_POOL` sets it too.
    pub pool: String,
    /// Maximum size of a message that is received or published. The broker has a limit of its own. `WORKER_MAX_MSG_SIZE` sets it too, in bytes.
    pub max_message_size: Size<1>,
    /// The broker's `consumer_timeout`, if the queue does not set another. A request that takes longer is stopped and returned to the queue shortly before it. `0s` is no limit.
    pub consumer_timeout: OptionalSpan,
    /// URL of the broker's management interface, used with the user and password of the broker's URI [built-in: none]. A worker reads the queue's consumer timeout there (RabbitMQ 3.12 or later); a controller counts unacknowledged messages and sets policies.
    pub management_url: Option<Url>,
    /// What a controller assigns to this worker by environment variables.
    #[serde(skip)]
    pub assignment: Assignment,
}

/// What a controller assigns to a worker besides its pool and its key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Assignment {
    /// `WORKER_ID`, or the host name with `WORKER_ID_USE_HOSTNAME`.
    pub worker_id: Option<String>,
    /// `WORKER_REQUESTS_QUEUE`
    pub requests_queue: Option<String>,
    /// `WORKER_ACTIVITY_EXCHANGE`
    pub activity_exchange: Option<String>,
}

impl Config {
    /// The queue of an AMQP source.
    pub fn requests_queue(&self, source: &RequestSource) -> String {
        let amqp = &self.amqp;
        let named = source.requests_queue.as_ref().or(amqp.assignment.requests_queue.as_ref());
        let key = amqp.worker_key.as_deref().unwrap_or_default();
        named.cloned().unwrap_or_else(|| format!("{}-req-{key}", amqp.pool))
    }

    /// The exchange for activity reports. `None` without a worker group, because a controller attributes reports by its key.
    pub fn activity_exchange(&self) -> Option<String> {
        let built_in = || self.amqp.worker_key.as_ref().map(|_| format!("{}-activity-xchg", self.amqp.pool));
        self.amqp.assignment.activity_exchange.clone().or_else(built_in)
    }
}

impl Default for Amqp {
    fn default() -> Self {
        Self {
            uri_file: None,
            ca_file: None,
            certificate_file: None,
            key_file: None,
            worker_key: None,
            pool: "core".to_owned(),
            max_message_size: built_in("128MiB"),
            consumer_timeout: built_in("30m"),
            management_url: None,
            assignment: Assignment::default(),
        }
    }
}

/// The handler that exists without a section.
pub const COMMAND: &str = "command";

fn command_name() -> String {
    COMMAND.to_owned()
}

/// A bridge from one source to another.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Bridge {
    /// Name of the source whose tasks or requests are claimed.
    pub from: String,
    /// Name of the source of the other kind that they are sent to. Nothing is claimed from it.
    pub to: String,
    /// Maximum time that the other side may take.
    #[serde(default = "bridge_run_time")]
    pub max_run_time: RunTime,
}

fn bridge_run_time() -> RunTime {
    built_in("25m")
}

/// A handler that runs payloads.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[cfg_attr(test, schemars(extend("x-default-kind" = "program")))]
pub enum Handler {
    /// Runs the command lines of the task.
    Command(CommandHandler),
    /// Runs a program that reads the payload.
    Program(ProgramHandler),
    /// Forwards the task to an HTTP service.
    Http(HttpHandler),
    /// Runs the task as a pod.
    Kubernetes(KubernetesHandler),
}

impl Default for Handler {
    fn default() -> Self {
        Self::Command(CommandHandler::default())
    }
}

impl Handler {
    /// The maximum run time of its tasks.
    pub const fn max_run_time(&self) -> RunTime {
        match self {
            Self::Command(handler) => handler.max_run_time,
            Self::Program(handler) => handler.max_run_time,
            Self::Http(handler) => handler.max_run_time,
            Self::Kubernetes(handler) => handler.max_run_time,
        }
    }
}

/// A handler that runs the command lines of the task.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct CommandHandler {
    /// Variables of the worker's environment that a payload sees.
    pub env_allow: Vec<String>,
    /// Maximum run time of a task, whatever it asks for, and the run time of one that asks for none.
    pub max_run_time: RunTime,
    /// That of the worker.
    #[serde(skip)]
    pub termination_grace: Span,
}

impl Default for CommandHandler {
    fn default() -> Self {
        Self { env_allow: env_allow(), max_run_time: max_run_time(), termination_grace: termination_grace() }
    }
}

/// A handler that runs a program.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ProgramHandler {
    /// The program and its arguments. With `http`, the worker starts it as a sidecar that serves `url`, checks its health and restarts it.
    #[serde(deserialize_with = "program")]
    pub exec: Vec<String>,
    /// A program that validates a payload before it runs.
    #[serde(default)]
    pub check: Vec<String>,
    /// File with the JSON Schema of the payloads.
    pub schema: Option<File>,
    /// Variables of the worker's environment that a payload sees.
    #[serde(default = "env_allow")]
    pub env_allow: Vec<String>,
    /// Maximum run time of a task, whatever it asks for.
    #[serde(default = "max_run_time")]
    pub max_run_time: RunTime,
    /// The program launches work elsewhere: it is called to start it, to look at it later, and to end it.
    pub staged: Option<StagedProgram>,
    /// That of the worker.
    #[serde(skip, default = "termination_grace")]
    pub termination_grace: Span,
}

/// Work that a program launches elsewhere.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct StagedProgram {
    /// Interval of its `verify` calls, unless the program says otherwise, at least 1 s.
    #[serde(default = "staged_check_interval")]
    pub check_interval: Span<1000>,
    /// How long phases may last, by their names [built-in: for ever].
    #[serde(default)]
    pub phases: BTreeMap<String, Span>,
    /// How often the work is launched again after it was lost.
    #[serde(default = "staged_retries")]
    pub retries: u32,
}

fn staged_check_interval() -> Span<1000> {
    built_in("30s")
}

const fn staged_retries() -> u32 {
    3
}

impl ProgramHandler {
    /// A handler of this program with the built-in values.
    pub fn new(exec: Vec<String>) -> Self {
        Self {
            exec,
            check: Vec::new(),
            schema: None,
            env_allow: env_allow(),
            max_run_time: max_run_time(),
            staged: None,
            termination_grace: termination_grace(),
        }
    }
}

/// A handler that forwards tasks to an HTTP service.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct HttpHandler {
    /// The program and its arguments. With `http`, the worker starts it as a sidecar that serves `url`, checks its health and restarts it.
    #[serde(default)]
    pub exec: Vec<String>,
    /// Base URL of the service, to which the path of a request is appended, or `unix:` and the path of its socket.
    pub url: ServiceAddress,
    /// Path that answers with 2xx while the service is healthy [built-in: the service is healthy if it accepts connections].
    pub health: Option<String>,
    /// Interval of health checks while the service is healthy, and their timeout, at least 1 s. After three failures in a row the service is restarted; a timeout while it works on a request is not a failure.
    #[serde(default = "health_interval")]
    pub health_interval: Span<SERVICE_PROBE_INTERVAL_MIN_MS>,
    /// How long the service may take to become healthy before it is restarted, and how long a task waits for it before its claim is released.
    #[serde(default = "startup_timeout")]
    pub startup_timeout: Span<SERVICE_STARTUP_TIMEOUT_MIN_MS>,
    /// Variables of the worker's environment that the service sees.
    #[serde(default = "env_allow")]
    pub env_allow: Vec<String>,
    /// Maximum run time of a task, whatever it asks for.
    #[serde(default = "max_run_time")]
    pub max_run_time: RunTime,
    /// That of the worker.
    #[serde(skip, default = "termination_grace")]
    pub termination_grace: Span,
}

/// A handler that runs each task as a pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesHandler {
    /// Namespace of the pods.
    pub namespace: String,
    /// Kubeconfig of the cluster. Its credentials and certificates may change while the worker runs [built-in: `KUBECONFIG`, else `~/.kube/config`, else the service account of the worker's pod].
    pub kubeconfig: Option<File>,
    /// File with a pod template (YAML with the expressions of Jinja), filled with `payload` and `task`.
    pub template: Option<File>,
    /// Name of the container that runs the task.
    pub container: String,
    /// Volume that holds `worker.work_dir`: a pod gets its task directory as `/task`, and can leave artifacts there.
    pub work_volume: Option<WorkVolume>,
    /// How long a pod may wait for a node.
    pub schedule_timeout: Span,
    /// How long a pod may take from there until its container runs.
    pub pull_timeout: Span,
    /// How long the registry may say that there is no such image, or no right to it, before the task fails.
    pub pull_grace: Span,
    /// How long a container may fail to be created, such as for want of a Secret.
    pub create_grace: Span,
    /// How often a task gets another pod after the cluster has lost or ended one.
    pub retries: u32,
    /// Interval at which a pod is looked at without a change that the cluster tells of, at least 1 s.
    pub check_interval: Span<1000>,
    /// Maximum run time of a task, whatever it asks for.
    pub max_run_time: RunTime,
}

impl Default for KubernetesHandler {
    fn default() -> Self {
        Self {
            namespace: "default".to_owned(),
            kubeconfig: None,
            template: None,
            container: "task".to_owned(),
            work_volume: None,
            schedule_timeout: built_in("10m"),
            pull_timeout: built_in("15m"),
            pull_grace: built_in("90s"),
            create_grace: built_in("30s"),
            retries: staged_retries(),
            check_interval: built_in("1m"),
            max_run_time: max_run_time(),
        }
    }
}

/// A volume that pods share with the worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct WorkVolume {
    /// Where the worker has it mounted; `worker.work_dir` is below.
    pub path: File,
    /// The volume as a pod names it, such as `{ persistentVolumeClaim = { claimName = "work" } }`.
    pub source: BTreeMap<String, serde_json::Value>,
}

fn health_interval() -> Span<SERVICE_PROBE_INTERVAL_MIN_MS> {
    built_in("5s")
}

fn startup_timeout() -> Span<SERVICE_STARTUP_TIMEOUT_MIN_MS> {
    built_in("1m")
}

fn env_allow() -> Vec<String> {
    ["PATH", "LANG", "TZ"].map(str::to_owned).to_vec()
}

fn max_run_time() -> RunTime {
    built_in("24h")
}

fn termination_grace() -> Span {
    built_in("10s")
}

/// Reads a program with its arguments, which needs the program at least.
pub(super) fn program<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let arguments = Vec::<String>::deserialize(from)?;
    if arguments.is_empty() { Err(D::Error::custom("a program and its arguments")) } else { Ok(arguments) }
}

/// Programs that run before and after each task.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Hooks {
    /// Program and arguments to run before a payload [built-in: none]. If it fails, the payload does not run, and the task is released as for a fault of this host.
    pub pre_task: Vec<String>,
    /// Program and arguments to run after a payload, or after `pre_task` failed, whatever the outcome [built-in: none].
    pub post_task: Vec<String>,
    /// Program and arguments to run before `post_task` if a task did not succeed, and for a payload that is rejected [built-in: none].
    pub error: Vec<String>,
    /// Maximum run time of a hook.
    pub timeout: RunTime,
}

impl Default for Hooks {
    fn default() -> Self {
        Self { pre_task: Vec::new(), post_task: Vec::new(), error: Vec::new(), timeout: built_in("1m") }
    }
}

/// The embedded queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Queue {
    /// Database file. The content of artifacts is in the directory of the same name with `-artifacts` appended.
    pub db: File,
    /// Address to listen on. With port 0 the system chooses a port.
    pub listen: Listen,
    /// Length of a claim's lease.
    pub claim_timeout: Span<CLAIM_TIMEOUT_MIN_MS>,
    /// Whether callers have to sign their calls.
    pub auth: Auth,
    /// Origins of web pages that may call the queue, such as `https://tc.example.com`.
    pub allowed_origins: Vec<Url>,
    /// Clients that may call the queue, by client id.
    pub clients: BTreeMap<String, Client>,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            db: built_in("/var/lib/journeyman/queue.db"),
            listen: built_in("127.0.0.1:7070"),
            claim_timeout: built_in("20m"),
            auth: Auth::Checked,
            allowed_origins: Vec::new(),
            clients: BTreeMap::new(),
        }
    }
}

/// A client of the embedded queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Client {
    /// File with the client's access token, readable by its owner only.
    pub access_token_file: SecretFile,
    /// Scopes of the client. A trailing `*` matches any suffix.
    #[serde(default = "every_scope")]
    pub scopes: Vec<String>,
}

fn every_scope() -> Vec<String> {
    vec!["*".to_owned()]
}

/// Delivers events as webhooks.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Notifier {
    /// Database file.
    pub db: File,
    /// A PostgreSQL that several notifiers share, in place of the file.
    pub postgres: Option<NotifierPostgres>,
    /// Address where events are taken. With port 0 the system chooses a port.
    pub listen: Listen,
    /// File with the bearer token that callers need.
    pub token_file: Option<SecretFile>,
    /// File with a bearer token for callers that only read.
    pub read_token_file: Option<SecretFile>,
    /// How long a message and its attempts are kept after it has ended. An event that its source sends again later is a new one.
    pub retention: Span<1_000>,
    /// Takes events from RabbitMQ too [built-in: no].
    pub amqp: Option<NotifierAmqp>,
    /// Takes the notifications of a Mistral too [built-in: no].
    pub mistral: Option<NotifierMistral>,
    /// Takes events from a table of an application too [built-in: no].
    pub outbox: Option<NotifierOutbox>,
    /// Networks that webhooks may reach although they are not public, such as `10.0.0.0/8`.
    pub allowed_networks: Vec<String>,
    /// Refuses endpoints without TLS.
    pub https_only: bool,
    /// File with the URL of the proxy that webhooks go through, such as `http://user:password@proxy.example.com:3128`; `https` and `socks5` work too. The proxy resolves names, so it has to judge their addresses.
    pub proxy_file: Option<SecretFile>,
    /// File with CA certificates (PEM) that verify receivers, beside the system's.
    pub ca_file: Option<File>,
    /// File with the certificate chain (PEM) for receivers that ask for one.
    pub client_certificate_file: Option<File>,
    /// File with the private key of that certificate (PEM).
    pub client_key_file: Option<SecretFile>,
    /// Files with the keys that encrypt secrets in the database, each the base64 of 32 bytes. The first one encrypts, and all of them decrypt, so that keys can be replaced.
    pub seal_key_files: Vec<SecretFile>,
    /// Where events are delivered, by name.
    pub endpoint: BTreeMap<String, NotifierEndpoint>,
}

impl Default for Notifier {
    fn default() -> Self {
        Self {
            db: built_in("/var/lib/journeyman/notifier.db"),
            postgres: None,
            listen: built_in("127.0.0.1:7090"),
            token_file: None,
            read_token_file: None,
            retention: built_in("720h"),
            amqp: None,
            mistral: None,
            outbox: None,
            allowed_networks: Vec::new(),
            https_only: false,
            proxy_file: None,
            ca_file: None,
            client_certificate_file: None,
            client_key_file: None,
            seal_key_files: Vec::new(),
            endpoint: BTreeMap::new(),
        }
    }
}

/// The database of several notifiers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NotifierPostgres {
    /// File with the URL of the database, such as `postgres://user:password@db.example.com/notifier?sslmode=require`.
    pub url_file: SecretFile,
    /// Certificate of the CA of the server (PEM), in place of the system's.
    pub ca_file: Option<File>,
}

/// A table in PostgreSQL that an application writes events to, in its own transactions. `journeyman notifier setup` makes it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NotifierOutbox {
    /// File with the URL of the database.
    pub url_file: SecretFile,
    /// Certificate of the CA of the server (PEM), in place of the system's.
    pub ca_file: Option<File>,
    /// Name of the table, perhaps with its schema.
    #[serde(default = "outbox_table")]
    pub table: String,
}

fn outbox_table() -> String {
    "journeyman_outbox".to_owned()
}

/// The queues from which the notifier takes events, at the broker of `[amqp]`. `journeyman notifier setup` makes them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct NotifierAmqp {
    /// Exchange that events are published to, with their key as the routing key. The names of its queues begin with it.
    pub queue: String,
    /// Number of queues over which the exchange spreads the keys. It cannot be changed later. More than one needs RabbitMQ 4.3, or its plugin `rabbitmq_sharding`.
    #[cfg_attr(test, schemars(range(min = 1, max = 256)))]
    #[serde(deserialize_with = "up_to::<_, NOTIFIER_SHARDS_MAX>")]
    pub shards: u16,
}

impl Default for NotifierAmqp {
    fn default() -> Self {
        Self { queue: "journeyman.notify".to_owned(), shards: 16 }
    }
}

fn up_to<'de, D: Deserializer<'de>, const MAX: u16>(from: D) -> Result<u16, D::Error> {
    let number = i64::deserialize(from)?;
    let number = u16::try_from(number).ok().filter(|number| (1..=MAX).contains(number));
    number.ok_or_else(|| D::Error::custom(format!("a whole number from 1 to {MAX}")))
}

/// A vhost with a queue for each workflow execution and URL, at the broker of `[amqp]`. Needs `amqp.management_url` and `notifier.seal_key_files`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NotifierMistral {
    /// Vhost of the queues, made if it is missing.
    #[serde(default = "mistral_vhost")]
    pub vhost: String,
    /// File with the key of the hashes of URLs in the names of queues, the same as that of the publishers.
    pub url_key_file: SecretFile,
    /// How long nothing has to come after the end of an execution before its queues are deleted, less than the broker's consumer timeout. With `0s` none is, as publishers need that do not look whether the queue is still there after a message was confirmed.
    #[serde(default = "mistral_delete_after")]
    pub delete_after: OptionalSpan,
}

fn mistral_vhost() -> String {
    "mistral_guaranteed_notifies".to_owned()
}

fn mistral_delete_after() -> OptionalSpan {
    built_in("10m")
}

/// A receiver of webhooks.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NotifierEndpoint {
    /// Where its webhooks are sent. Messages and `config show` have no more of it than its origin.
    pub url: Option<WebhookUrl>,
    /// File with the URL, instead of `url`.
    pub url_file: Option<SecretFile>,
    /// Types of the events that it gets. A `*` at the end stands for the rest.
    #[serde(default = "every_event")]
    pub events: Vec<String>,
    /// Files with the keys that sign its webhooks, each `whsec_…` or `whsk_…`. All of them sign, so that a receiver can change its key at any time.
    #[serde(default)]
    pub key_files: Vec<SecretFile>,
    /// File with headers that its webhooks have, one `Name: value` in each line.
    pub headers_file: Option<SecretFile>,
    /// What it gets of an event.
    #[serde(default)]
    pub format: Format,
    /// What happens to an event that was tried for 5 days.
    #[serde(default)]
    #[cfg_attr(test, schemars(with = "String", extend("enum" = ["block", "skip", "park"])))]
    pub on_exhausted: OnExhausted,
    /// How many attempts may be under way at once.
    #[cfg_attr(test, schemars(range(min = 1, max = 64)))]
    #[serde(default = "webhook_attempts_max", deserialize_with = "up_to::<_, NOTIFIER_ATTEMPTS_PER_ORIGIN_MAX>")]
    pub attempts_max: u16,
    /// How many attempts may begin within a second, a minute or an hour, such as `10/s` [built-in: no limit].
    pub rate: Option<AttemptRate>,
    /// How long one attempt may take, up to 60s.
    #[serde(default = "webhook_timeout", deserialize_with = "timeout_within_limit")]
    pub timeout: Span<1_000>,
}

const fn webhook_attempts_max() -> u16 {
    NOTIFIER_ATTEMPTS_PER_ENDPOINT
}

fn timeout_within_limit<'de, D: Deserializer<'de>>(from: D) -> Result<Span<1_000>, D::Error> {
    let timeout = Span::deserialize(from)?;
    let longest = Span::<1_000>(WEBHOOK_TIMEOUT_MAX);
    if timeout.0 <= longest.0 { Ok(timeout) } else { Err(D::Error::custom(format!("\"{longest}\" or less"))) }
}

/// Tells a notifier which tasks of an embedded queue were resolved, which claims of a worker have ended, and which requests a controller has put aside.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Notify {
    /// Address of the notifier, such as `http://127.0.0.1:7090` [built-in: none].
    pub url: Option<Url>,
    /// File with the notifier's token.
    pub token_file: Option<SecretFile>,
    /// Types of the events. A `*` at the end stands for the rest.
    pub events: Vec<String>,
}

impl Default for Notify {
    fn default() -> Self {
        Self { url: None, token_file: None, events: every_event() }
    }
}

fn every_event() -> Vec<String> {
    vec!["*".to_owned()]
}

fn webhook_timeout() -> Span<1_000> {
    built_in("20s")
}

/// Logs.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// Format of the log: `auto` is `human` on a terminal and `json` otherwise.
    pub format: LogFormat,
    /// Lines that are logged: error, warn, info, debug, trace, or directives such as `info,journeyman::source=debug`.
    pub level: Filter,
    /// Maximum size of a task's log: the first three quarters and the last quarter are kept, with a marker between them.
    pub task_log_max: Size<TASK_LOG_BYTES_MIN>,
    /// Names of variables whose values are redacted from every log, `*` matching anything: those of the worker's environment, and those that a task of `command` sets.
    pub redact_env: Vec<String>,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            format: LogFormat::Auto,
            level: built_in("info"),
            task_log_max: built_in("64MiB"),
            redact_env: journeyman_platform::redact::SECRET_NAME_PATTERNS.map(str::to_owned).to_vec(),
        }
    }
}

/// Format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// `human` on a terminal, `json` otherwise.
    Auto,
    /// Lines for people.
    Human,
    /// One JSON object per line.
    Json,
}

#[expect(clippy::expect_used, reason = "every built-in value is parsed by a test")]
pub(super) fn built_in<T: std::str::FromStr<Err = String>>(text: &str) -> T {
    text.parse().expect("a built-in value is valid")
}

/// The schemas of enums of another crate, which derives none: the attribute `with` names what describes a field.
#[cfg(test)]
#[expect(dead_code, reason = "they are described, and have no values")]
mod platform_enums {
    #[derive(schemars::JsonSchema)]
    #[schemars(rename_all = "kebab-case")]
    pub(super) enum MetadataProvider {
        /// The first that answers.
        Auto,
        /// EC2.
        Aws,
        /// Compute Engine.
        Gcp,
        /// Azure.
        Azure,
        /// None.
        Off,
    }

    #[derive(schemars::JsonSchema)]
    #[schemars(rename_all = "kebab-case")]
    pub(super) enum Requirement {
        /// The strongest method that the host offers.
        Auto,
        /// A control group for each task, with every configured limit; otherwise the worker does not start.
        Cgroup,
        /// A process group for each task.
        Group,
    }
}
