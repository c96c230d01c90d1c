//! The sections of the configuration. Help texts and the guide show the doc comments of their fields.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use journeyman_domain::named_enum;
pub use journeyman_platform::log::{Log, LogFormat};
pub use journeyman_platform::settings::broker::Amqp;
use journeyman_platform::settings::rules::Rules;
use journeyman_platform::settings::values::{File, Listen, SecretFile, Url};
pub use journeyman_services::bridge::config::Bridge;
pub use journeyman_services::controller::config::{DemandConfig, PoolConfig};
pub use journeyman_services::notifier::config::Notifier;
pub use journeyman_services::queue::config::Queue;
pub use journeyman_services::screwdriver::config::ScrewdriverSource;
pub use journeyman_worker::engine::config::{Host, Worker};
pub use journeyman_worker::handler::config::{CommandHandler, Handler, Hooks, ProgramHandler, StagedProgram};
pub use journeyman_worker::handler::http::config::HttpHandler;
pub use journeyman_worker::handler::kubernetes::config::{KubernetesHandler, WorkVolume};
pub use journeyman_worker::notify::Notify;
pub use journeyman_worker::source::amqp::config::RequestSource;
pub use journeyman_worker::source::taskcluster::config::TaskclusterSource;
pub use journeyman_worker::source::zookeeper::config::ZooKeeperSource;

/// A whole configuration.
#[derive(Debug, Clone, Default, Serialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[cfg_attr(debug_assertions, schemars(deny_unknown_fields))]
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
    /// Health checks, metrics and pages over HTTP.
    pub http: Http,
    /// What `journeyman console` shows.
    pub console: ConsoleConfig,
    /// Logs.
    pub log: Log,
}

/// The control socket.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Control {
    /// Path of the socket, usable by the user and group that own it [built-in: `control.sock` in `worker.work_dir`; for a controller `controller.sock` in `state_dir` of its first pool].
    pub socket: Option<File>,
}

/// Health checks, metrics and a status page over HTTP.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Http {
    /// Address of `/livez`, `/readyz`, `/metrics` and the status page [built-in: none]. With port 0 the system chooses a port.
    pub listen: Option<Listen>,
    /// Allow a `listen` address that other hosts can reach. Anyone who can connect sees task names and sources, but no secrets.
    pub allow_remote: bool,
    /// File with the bearer token for orders on pages and over HTTP [built-in: pages have no buttons].
    pub token_file: Option<SecretFile>,
}

impl Http {
    pub(crate) fn check(&self, rules: &mut Rules<'_>) {
        if let Some(listen) = self.listen
            && !self.allow_remote
            && !listen.0.ip().to_canonical().is_loopback()
        {
            let message = format!("other hosts can reach {}; set `http.allow_remote = true` to allow it", listen.0);
            rules.error("http", "listen", message, "use 127.0.0.1, or set `allow_remote`");
        }
    }
}

/// What `journeyman console` shows.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ConsoleConfig {
    /// Roles at their addresses, by name.
    pub target: BTreeMap<String, ConsoleTarget>,
}

/// Roles of one kind.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ConsoleTarget {
    /// What is there: `worker`, `controller`, `notifier` or `queue`.
    pub kind: TargetKind,
    /// Its address: of the pages (`http.listen`) of a worker or a controller, of a notifier, or the root URL of a queue. Workers of one
    /// fleet may have one section.
    pub urls: Vec<Url>,
    /// File with the token: that of `http.token_file` of a controller, of `notifier.token_file`, or of the client of a queue.
    #[serde(default)]
    pub token_file: Option<SecretFile>,
    /// Client id at a queue.
    #[serde(default)]
    pub client_id: Option<String>,
    /// Hosts with private addresses that logs and artifacts of a queue may lead to, such as workers that serve live logs: a name, `.example.com` for every subdomain, or `*` for every host.
    #[serde(default)]
    pub allow_hosts: Vec<String>,
}

named_enum! {
    /// A role that a console shows.
    #[derive(Default)]
    #[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
    pub enum TargetKind {
        #[default]
        Worker = "worker",
        Controller = "controller",
        Notifier = "notifier",
        Queue = "queue",
    }
}

/// A queue that the worker claims from.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
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
