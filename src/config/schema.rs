//! The shape of a configuration. The doc comments below are what help texts, `config init` and the guide show.
//!
//! This is the one schema behind the file, the environment and the flags: a key added here exists in all three.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::demand::DemandConfig;
use super::pool::PoolConfig;
use super::values::{File, Filter, Listen, Queue as TaskQueue, Secret, SecretFile, Size, Span, Url, WorkerName};
use crate::limits::{
    ACTIVITY_REPEAT_MIN, CLAIM_TIMEOUT_MIN, POLL_INTERVAL_MIN, QUEUE_VISIBILITY_TIMEOUT_MIN, RUN_TIME_MIN,
    SERVICE_PROBE_INTERVAL_MIN, SERVICE_STARTUP_TIMEOUT_MIN, STATUS_POLL_MIN, TASK_LOG_BYTES_MIN,
};
use crate::source::taskcluster::{ArtifactStorage, Dialect};

/// A whole configuration.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// This worker.
    pub worker: Worker,
    /// The machine it runs on, and the end of it.
    pub host: Host,
    /// Where claims come from, by name.
    pub source: BTreeMap<String, Source>,
    /// The AMQP broker, and what the controller of AMQP workers calls this one.
    pub amqp: Amqp,
    /// What the controller of AMQP workers is told of this one.
    pub activity: Activity,
    /// What `journeyman bridge` hands on, by name.
    pub bridge: BTreeMap<String, Bridge>,
    /// Worker groups that `journeyman controller` keeps by demand, by the name of their pool. The broker is that of `[amqp]`.
    pub pool: BTreeMap<String, PoolConfig>,
    /// Queues of elsewhere whose tasks are done by workers of these pools, by name.
    pub demand: BTreeMap<String, DemandConfig>,
    /// What runs payloads, by name. `command` exists without being written.
    pub handler: BTreeMap<String, Handler>,
    /// The embedded queue (`journeyman queue` and `journeyman dev`).
    pub queue: Queue,
    /// The socket on which a worker takes questions and orders.
    pub control: Control,
    /// Health, metrics and a status page for those who watch a worker or a controller.
    pub http: Http,
    /// Traces for an OpenTelemetry collector.
    pub telemetry: Telemetry,
    /// Logs.
    pub log: Log,
}

/// This worker.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Worker {
    /// Name of this worker, its own within its group: the queue tells workers apart by it. `{hostname}` and `{pid}` are filled in. At most 38 characters, 22 with `dialect = "azure"`.
    pub id: WorkerName,
    /// Group of this worker, often a region. At most 38 characters, 22 with `dialect = "azure"`.
    pub group: WorkerName,
    /// How many tasks run at once.
    #[schemars(range(min = 1, max = 16384))]
    pub capacity: u16,
    /// Folder for the files of running tasks. One worker a folder.
    pub work_dir: File,
    /// How long running tasks may go on after the first TERM or INT, before they are handed back.
    pub drain_deadline: Span,
    /// How long a payload has to end when it is told to. It is killed half a second before that is over, or a quarter where that is less, so that its end is seen in time.
    pub termination_grace: Span,
    /// A message received more often than this raises one alert.
    #[schemars(range(min = 1))]
    pub dequeue_alert: u32,
    /// How many times in a row the queue may refuse our credentials before the worker ends.
    #[schemars(range(min = 1))]
    pub denied_max: u32,
    /// How often each running task is asked after, so that a canceled one stops early. `0s` switches it off.
    #[schemars(extend("x-least" = Span(STATUS_POLL_MIN), "x-zero" = "off"))]
    pub status_poll_interval: Span,
    /// How long to rest when every queue is empty and the queue has no long poll; varied by a fifth.
    #[schemars(extend("x-least" = Span(POLL_INTERVAL_MIN)))]
    pub poll_interval: Span,
    /// Leave after having held no task for so long; `0s` is never. Time in which the worker is paused does not count.
    pub exit_when_idle: Span,
    /// Leave after so many tasks; 0 is never.
    pub max_tasks: u32,
    /// Drain and leave after so long; `0s` is never.
    pub max_uptime: Span,
}

impl Default for Worker {
    fn default() -> Self {
        Self {
            id: built_in("{hostname}"),
            group: built_in("journeyman"),
            capacity: 1,
            work_dir: built_in("/var/lib/journeyman/work"),
            drain_deadline: built_in("1h"),
            termination_grace: built_in("10s"),
            dequeue_alert: 10,
            denied_max: 10,
            status_poll_interval: built_in("10s"),
            poll_interval: built_in("1s"),
            exit_when_idle: built_in("0s"),
            max_tasks: 0,
            max_uptime: built_in("0s"),
        }
    }
}

/// The machine it runs on, and the end of it.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Host {
    /// Whose metadata service says that a spot or preemptible host is taken away. `auto` looks for one at start and gives up after a minute where there is none.
    pub metadata_service: MetadataService,
    /// What becomes of running tasks at such a notice. What has not started is handed back at once.
    pub on_termination_notice: OnTerminationNotice,
    /// How long before the host goes tasks that still run are handed back. Where `termination_grace` and the reports need more, they get it.
    pub termination_margin: Span,
    /// File that says when the host goes: an RFC 3339 time. Nothing, or what is no time, means at once. It need not exist.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub termination_file: Option<File>,
    /// Address of the metadata service where it is not `http://169.254.169.254`; `http://[fd00:ec2::254]` on EC2 without IPv4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata_endpoint: Option<Url>,
    /// Nothing is claimed while less disk than this is free for `worker.work_dir`. What a poll under way still brings is handed back, which costs that task a retry.
    pub min_free_disk: Size,
    /// Nothing is claimed while less memory than this can be had. What a poll under way still brings is handed back, which costs that task a retry.
    pub min_free_memory: Size,
    /// How the processes of a task are held together, so that none outlives its claim.
    pub containment: Containment,
    /// What becomes of a slot whose task may still have processes although they were killed.
    pub on_cleanup_failure: OnCleanupFailure,
    /// The most memory that the processes of a task may have together. Needs control groups and their memory controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_memory: Option<Size>,
    /// The most processes and threads that a task may have. Needs control groups and their pids controller.
    #[schemars(range(min = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_pids: Option<u32>,
    /// How large a task's folder may grow. Looked at every 5 s and at the task's end, so that it can be more for that long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_disk: Option<Size>,
}

impl Default for Host {
    fn default() -> Self {
        Self {
            metadata_service: MetadataService::Auto,
            on_termination_notice: OnTerminationNotice::Finish,
            termination_margin: built_in("15s"),
            termination_file: None,
            metadata_endpoint: None,
            min_free_disk: built_in("512MiB"),
            min_free_memory: built_in("64MiB"),
            containment: Containment::Auto,
            on_cleanup_failure: OnCleanupFailure::KeepSlot,
            task_memory: None,
            task_pids: None,
            task_disk: None,
        }
    }
}

/// How the processes of a task are held together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Containment {
    /// By the best that the host offers; the log says which.
    Auto,
    /// By a control group each, with every limit that is set, or the worker does not start.
    Cgroup,
    /// By a process group each.
    Group,
}

/// What becomes of a slot whose task may still have processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnCleanupFailure {
    /// It stays taken until they are gone.
    KeepSlot,
    /// It is used again.
    ReuseSlot,
}

/// Whose metadata service is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MetadataService {
    /// The one that answers.
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

/// What becomes of running tasks when the host goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnTerminationNotice {
    /// They may finish as long as there is time.
    Finish,
    /// They are handed back at once.
    Release,
}

/// The socket on which a worker takes questions and orders.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Control {
    /// Where it is [built-in: `control.sock` in `worker.work_dir`; of a controller `controller.sock` in `state_dir` of its first pool]. The user and group of whose it is may use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<File>,
}

/// Health, metrics and a status page for those who watch a worker or a controller.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Http {
    /// Where `/livez`, `/readyz`, `/metrics` and the status page are served, such as `127.0.0.1:7080` [built-in: nowhere]. Port 0 lets the system choose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<Listen>,
    /// Whether `listen` may be an address that other machines can reach. Everyone who can connect sees what the worker does, task names and sources, but no secrets.
    pub allow_remote: bool,
    /// File that holds the token which orders to a controller need over HTTP; or `fd:N` or `systemd:NAME` [built-in: nobody can give any].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<SecretFile>,
}

/// Traces for an OpenTelemetry collector: one span for each run, and its parts below it.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Telemetry {
    /// Where a collector takes OTLP over HTTP, such as `http://127.0.0.1:4318` [built-in: what `OTEL_EXPORTER_OTLP_ENDPOINT` says, or nowhere].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub otlp_endpoint: Option<Url>,
    /// What the service is called there [built-in: what `OTEL_SERVICE_NAME` says, or `journeyman`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
}

/// A place that claims come from.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// What kind of queue it is.
    pub kind: SourceKind,
    /// Which dialect it speaks.
    #[serde(default)]
    pub dialect: Dialect,
    /// Root of the Taskcluster deployment. For `taskcluster`, and needed there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_url: Option<Url>,
    /// Address of the queue service where it is not `root_url` + `/api/queue/v1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_url: Option<Url>,
    /// Which tasks to claim: provisioner and worker type. For `taskcluster`, and needed there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_queue: Option<TaskQueue>,
    /// Who we are.
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
    /// Hosts besides that of `root_url` that signed queue addresses may lead to, on top of Azure's own; `.example.com` is every host below it. For `dialect = "azure"` only.
    #[serde(default)]
    pub queue_hosts: Vec<String>,
    /// Hosts that signed addresses and redirects may lead to although they are in a private network or on this host, such as an object storage of your own; `.example.com` is every host below it. Those of `root_url`, `queue_url` and `queue_hosts` may be anyway.
    #[serde(default)]
    pub allow_hosts: Vec<String>,
    /// How artifacts are stored. `dialect = "azure"` knows `s3` only.
    #[serde(default)]
    pub artifact_storage: ArtifactStorage,
    /// Queue whose requests are taken [built-in: `amqp.requests_queue`]. It is never declared: where it is missing it is waited for. For `amqp` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_queue: Option<String>,
    /// How often a request is tried whose worker does not come to an end with it, or whose handler asks for another run; 0 is without end. For `amqp` only.
    #[serde(default = "max_attempts")]
    pub max_attempts: u32,
    /// What becomes of a request that was tried so often. For `amqp` only.
    #[serde(default)]
    pub on_attempts_exhausted: OnAttemptsExhausted,
    /// Queue for copies of such requests, with the reason; their authors are told too. For `amqp` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poison_queue: Option<String>,
    /// Name of the handler that runs this source's tasks.
    #[serde(default = "command_name")]
    pub handler: String,
}

impl Source {
    /// A queue of requests for this handler, with built-in rules.
    #[must_use]
    pub fn requests(handler: &str) -> Self {
        Self {
            kind: SourceKind::Amqp,
            dialect: Dialect::default(),
            root_url: None,
            queue_url: None,
            task_queue: None,
            client_id: None,
            access_token_file: None,
            access_token: None,
            certificate_file: None,
            certificate: None,
            queue_hosts: Vec::new(),
            allow_hosts: Vec::new(),
            artifact_storage: ArtifactStorage::default(),
            requests_queue: None,
            max_attempts: max_attempts(),
            on_attempts_exhausted: OnAttemptsExhausted::default(),
            poison_queue: None,
            handler: handler.to_owned(),
        }
    }

    /// Which tasks of which Taskcluster are claimed; `None` where it is none.
    #[must_use]
    pub const fn tasks(&self) -> Option<Tasks<'_>> {
        match (&self.root_url, &self.task_queue) {
            (Some(root_url), Some(task_queue)) => Some(Tasks { root_url, task_queue }),
            _ => None,
        }
    }
}

/// Tasks of a Taskcluster.
#[derive(Debug, Clone, Copy)]
pub struct Tasks<'a> {
    /// Root of the deployment.
    pub root_url: &'a Url,
    /// Provisioner and worker type.
    pub task_queue: &'a TaskQueue,
}

const fn max_attempts() -> u32 {
    crate::limits::AMQP_ATTEMPTS_MAX
}

/// What becomes of a request that was tried too often.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnAttemptsExhausted {
    /// Its author is told.
    #[default]
    Reply,
    /// The broker dead-letters it, or drops it where no policy says otherwise.
    DeadLetter,
}

/// The AMQP broker, and what the controller of AMQP workers calls this one.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Amqp {
    /// Address of the broker, such as `amqps://user:password@broker.example.com/vhost` [built-in: RabbitMQ on this machine, as guest]. From the environment only; `JOURNEYMAN_AMQP_URI` and `WORKER_AMQP_URI` set it too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uri: Option<Secret>,
    /// File that holds the address; or `fd:N` or `systemd:NAME`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uri_file: Option<SecretFile>,
    /// File with the certificates (PEM) of those who may vouch for the broker, in the place of this system's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<File>,
    /// File with our own certificate (PEM), and those that vouch for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate_file: Option<File>,
    /// File with its private key (PEM).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_file: Option<File>,
    /// What the controller calls this worker [built-in: `worker.id`]. `WORKER_ID` sets it too, or, with `WORKER_ID_USE_HOSTNAME`, the name of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<String>,
    /// The key that this worker is for, as it is part of the queue's name. `WORKER_KEY` sets it too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_key: Option<String>,
    /// The pool that this worker is of. `WORKER_POOL` sets it too.
    pub pool: String,
    /// Queue whose requests are taken [built-in: `POOL-req-KEY`]. `WORKER_REQUESTS_QUEUE` sets it too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_queue: Option<String>,
    /// The largest message that is taken or sent. The broker has a bound of its own. `WORKER_MAX_MSG_SIZE` sets it too, in bytes.
    pub max_message_size: Size,
    /// How long the broker lets a request be worked at (its `consumer_timeout`), where its queue does not say otherwise: what takes longer is ended a little earlier and handed back. `0s` is without end.
    pub consumer_timeout: Span,
    /// Address of the broker's management interface, which is asked with the broker's user and password how long it lets requests of the queue be worked at. RabbitMQ tells so from 3.12 on, by the queue's argument or its policies. A controller counts by it what workers hold, and makes policies [built-in: none].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub management_url: Option<Url>,
}

impl Default for Amqp {
    fn default() -> Self {
        Self {
            uri: None,
            uri_file: None,
            ca_file: None,
            certificate_file: None,
            key_file: None,
            worker_id: None,
            worker_key: None,
            pool: "core".to_owned(),
            requests_queue: None,
            max_message_size: built_in("128MiB"),
            consumer_timeout: built_in("30m"),
            management_url: None,
        }
    }
}

/// What the controller of AMQP workers is told of this one.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Activity {
    /// Exchange that reports go to; empty is none [built-in: `POOL-activity-xchg` with a source of kind `amqp`, none otherwise]. `WORKER_ACTIVITY_EXCHANGE` sets it too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchange: Option<String>,
    /// How often a task that runs is reported while nothing else is.
    #[schemars(extend("x-least" = Span(ACTIVITY_REPEAT_MIN)))]
    pub repeat: Span,
}

impl Default for Activity {
    fn default() -> Self {
        Self { exchange: None, repeat: built_in("1m") }
    }
}

/// The handler that exists without being written.
pub const COMMAND: &str = "command";

fn command_name() -> String {
    COMMAND.to_owned()
}

/// Kinds of queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SourceKind {
    /// Taskcluster, and the embedded queue.
    Taskcluster,
    /// Requests of an AMQP queue.
    Amqp,
}

/// What is taken of one source and handed on to another.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Bridge {
    /// Name of the source whose tasks or requests are taken.
    pub from: String,
    /// Name of the source of the other kind where they are handed on to. Nothing is claimed there.
    pub to: String,
    /// How long the other side has.
    #[serde(default = "bridge_time")]
    #[schemars(extend("x-least" = Span(RUN_TIME_MIN)))]
    pub max_run_time: Span,
}

fn bridge_time() -> Span {
    built_in("25m")
}

/// Something that runs payloads.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Handler {
    /// What kind of handler it is.
    #[serde(default)]
    pub kind: HandlerKind,
    /// The program and its arguments. Needed for `program`; for `http` it is the service that the worker starts, asks after and starts again, and without it somebody else does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exec: Vec<String>,
    /// Where the service listens, such as `http://127.0.0.1:8080`; the path of a request is put behind it. For `http`, which needs it or `socket`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<Url>,
    /// The Unix socket that the service listens on. For `http` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<File>,
    /// The path that answers with 2xx where the service is well [built-in: it is well where it can be connected to]. For `http` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<String>,
    /// How often the service is asked after while it is well. For `http` only.
    #[serde(default = "health_interval")]
    #[schemars(extend("x-least" = Span(SERVICE_PROBE_INTERVAL_MIN)))]
    pub health_interval: Span,
    /// How long the service may take to say that it is well. Not in time three times in a row, it is ended and started again; while it is at work at a request, silence counts for nothing. For `http` only.
    #[serde(default = "health_timeout")]
    #[schemars(extend("x-least" = Span(SERVICE_PROBE_INTERVAL_MIN)))]
    pub health_timeout: Span,
    /// How long the service may take until it is well, before it is ended and started again, and how long a task waits for it before it is handed back. For `http` only.
    #[serde(default = "startup_timeout")]
    #[schemars(extend("x-least" = Span(SERVICE_STARTUP_TIMEOUT_MIN)))]
    pub startup_timeout: Span,
    /// Which headers of a request are passed on to the service; `*` at the end stands for anything. For `http` only.
    #[serde(default = "forward_headers")]
    pub forward_headers: Vec<String>,
    /// A program that checks a payload before it is run. For `program` only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub check: Vec<String>,
    /// File with the JSON Schema of the payloads. For `program` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<File>,
    /// Which variables of the worker's own environment a payload sees.
    #[serde(default = "passed_on")]
    pub env_allow: Vec<String>,
    /// The longest time a task may run, whatever it asks for.
    #[serde(default = "max_run_time")]
    #[schemars(extend("x-least" = Span(RUN_TIME_MIN)))]
    pub max_run_time: Span,
    /// How long a task may run that does not say. Tasks of `command` have to say where this is not set. For `command` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-least" = Span(RUN_TIME_MIN)))]
    pub default_run_time: Option<Span>,
    /// How long the processes of a task have to end after they were told to, before they are killed.
    #[serde(default = "termination_grace")]
    pub termination_grace: Span,
}

fn health_interval() -> Span {
    built_in("5s")
}

fn health_timeout() -> Span {
    built_in("5s")
}

fn startup_timeout() -> Span {
    built_in("1m")
}

fn forward_headers() -> Vec<String> {
    ["x-*", "tracestate"].map(str::to_owned).to_vec()
}

fn passed_on() -> Vec<String> {
    ["PATH", "LANG", "TZ"].map(str::to_owned).to_vec()
}

fn termination_grace() -> Span {
    built_in("10s")
}

fn max_run_time() -> Span {
    built_in("24h")
}

impl Default for Handler {
    fn default() -> Self {
        Self {
            kind: HandlerKind::Command,
            exec: Vec::new(),
            url: None,
            socket: None,
            health: None,
            health_interval: health_interval(),
            health_timeout: health_timeout(),
            startup_timeout: startup_timeout(),
            forward_headers: forward_headers(),
            check: Vec::new(),
            schema: None,
            env_allow: passed_on(),
            max_run_time: max_run_time(),
            default_run_time: None,
            termination_grace: termination_grace(),
        }
    }
}

/// Kinds of handler.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HandlerKind {
    /// Runs the argument vectors that the task brings.
    Command,
    /// Runs a program that is given the payload.
    #[default]
    Program,
    /// Forwards the task to a service that speaks HTTP.
    Http,
}

/// The embedded queue.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Queue {
    /// File that holds everything but the content of artifacts.
    pub db: File,
    /// Folder for the content of artifacts [built-in: beside `db`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub artifacts: Option<File>,
    /// Where to listen. Port 0 lets the system choose.
    pub listen: Listen,
    /// How long a claim lasts.
    #[schemars(extend("x-least" = Span(CLAIM_TIMEOUT_MIN)))]
    pub claim_timeout: Span,
    /// How long a message that a poll has brought stays hidden from the next one. It is claimed within moments, unless its worker
    /// has died.
    #[schemars(extend("x-least" = Span(QUEUE_VISIBILITY_TIMEOUT_MIN)))]
    pub visibility_timeout: Span,
    /// Root under which clients reach the queue where a proxy stands before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub public_root_url: Option<Url>,
    /// Whether callers have to prove who they are.
    pub auth: Auth,
    /// Who may call, by client id.
    pub clients: BTreeMap<String, Client>,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            db: built_in("/var/lib/journeyman/queue.db"),
            listen: built_in("127.0.0.1:7070"),
            artifacts: None,
            claim_timeout: built_in("20m"),
            visibility_timeout: built_in("5m"),
            public_root_url: None,
            auth: Auth::Checked,
            clients: BTreeMap::new(),
        }
    }
}

/// Whether callers of the embedded queue have to prove who they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Auth {
    /// Every call is signed by a client.
    Checked,
    /// Everybody may do everything. For a loopback address and trusted users only.
    Open,
    /// Everybody who can reach the address may do everything.
    OpenToNetwork,
}

/// Someone who may call the embedded queue.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Client {
    /// File that holds the client's access token, readable for its owner only; or `fd:N`, a descriptor; or `systemd:NAME`, a credential of the unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token_file: Option<SecretFile>,
    /// The access token itself. From the environment only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token: Option<Secret>,
    /// What the client may do. A scope that ends in `*` covers all that start like it.
    #[serde(default = "every_scope")]
    pub scopes: Vec<String>,
}

fn every_scope() -> Vec<String> {
    vec!["*".to_owned()]
}

/// Logs.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// How the worker's own log is written.
    pub format: LogFormat,
    /// Which lines are written: error, warn, info, debug, trace, or directives such as `info,journeyman::source=debug`.
    pub level: Filter,
    /// How much of a task's log is kept: three quarters head, one quarter tail, a marker between.
    #[schemars(extend("x-least" = Size(TASK_LOG_BYTES_MIN)))]
    pub task_log_max: Size,
    /// Names of variables, `*` standing for anything, whose values no log shows: those of the worker's own environment, and those that a task of `command` sets.
    pub redact_env: Vec<String>,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            format: LogFormat::Auto,
            level: built_in("info"),
            task_log_max: built_in("64MiB"),
            redact_env: crate::redact::SECRET_NAME_PATTERNS.map(str::to_owned).to_vec(),
        }
    }
}

/// How a log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// `human` on a terminal, `json` otherwise.
    Auto,
    /// A line a person reads.
    Human,
    /// A JSON object a line.
    Json,
}

#[expect(clippy::expect_used, reason = "every built-in value is read by a test")]
pub(super) fn built_in<T: std::str::FromStr<Err = String>>(text: &str) -> T {
    text.parse().expect("a built-in value is well formed")
}
