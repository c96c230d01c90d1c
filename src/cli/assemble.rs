//! Makes a worker of a configuration: its sources, the handlers they name, and the limits it keeps to.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::exit::{Exit, Failure};
use super::{place, requests, spot};
use crate::config::schema::{
    ArtifactStorage, COMMAND, Config, Handler as HandlerConfig, HandlerKind, Protocol, Source, SourceKind, Tasks,
};
use crate::config::secrets::Credentials;
use crate::config::values::{Size, WORKER_NAME_CHARS_MAX, WORKER_NAME_CHARS_MAX_AZURE};
use crate::config::{Environment, schema};
use crate::handler::log::LogLimits;
use crate::handler::{self, Handler, command, environment, http, program};
use crate::host::containment::{Demand, Level, Limits, Unproven, Wanted};
use crate::host::program::locate;
use crate::redact;
use crate::source::taskcluster::{self, Api, ApiSettings, Dialect, Taskcluster, Timeouts};
use crate::worker::{Feed, Least, Settings, Stay, Worker};

/// How this worker is called where it claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name {
    /// Its group.
    pub group: String,
    /// Its id within the group.
    pub id: String,
}

impl Name {
    /// The name with the host's name and the process id filled in, within the limit of the narrowest protocol in use.
    #[must_use]
    pub(super) fn of(config: &Config) -> Self {
        let azure = config.source.values().any(|source| source.protocol == Protocol::Azure);
        let most = if azure { WORKER_NAME_CHARS_MAX_AZURE } else { WORKER_NAME_CHARS_MAX };
        let system = rustix::system::uname();
        let hostname = system.nodename().to_string_lossy();
        let fill = |name: &crate::config::values::WorkerName| name.fill(&hostname, std::process::id(), most);
        Self { group: fill(&config.worker.group), id: fill(&config.worker.id) }
    }
}

/// Makes a worker.
///
/// # Errors
///
/// [`Exit::Config`] where a secret cannot be read, or where a source or a handler cannot be made.
pub(super) fn worker(config: &Config, environment: &Environment) -> Result<Worker, Failure> {
    Ok(made(config, environment)?.worker)
}

/// A worker, and the clients whose credentials may be replaced while it works.
pub(super) struct Made {
    /// The worker.
    pub worker: Worker,
    /// One for each source, by its name.
    pub apis: BTreeMap<String, Api>,
}

/// As [`worker()`], with what it takes to renew credentials.
///
/// # Errors
///
/// As [`worker()`].
pub(super) fn made(config: &Config, environment: &Environment) -> Result<Made, Failure> {
    if config.source.is_empty() {
        return Err(Failure::new(
            Exit::Config,
            "there is no [source.NAME], so there is nothing to work for; `journeyman config init journeyman.toml` writes \
             one to start from, and `journeyman dev` needs none",
        ));
    }
    hide_secrets(config, environment);
    let name = Name::of(config);
    let mut handlers = BTreeMap::new();
    let (mut feeds, mut apis) = (Vec::new(), BTreeMap::new());
    for (source_name, source) in &config.source {
        let handler = match handlers.get(&source.handler) {
            Some(handler) => Arc::clone(handler),
            None => {
                let handler = handler(config, &source.handler, environment)?;
                handlers.insert(source.handler.clone(), Arc::clone(&handler));
                handler
            }
        };
        match (source.kind, source.tasks()) {
            (SourceKind::Taskcluster, Some(tasks)) => {
                let (feed, api) = feed(source_name, source, tasks, &name, handler, environment)?;
                feeds.push(feed);
                apis.insert(source_name.clone(), api);
            }
            // The configuration was refused already.
            (SourceKind::Taskcluster, None) => {}
            (SourceKind::Amqp, _) => {
                let work = requests::Work::of(config, &source.handler, handler);
                feeds.push(requests::feed(source_name, source, config, &name, work, environment)?);
            }
        }
    }
    Ok(Made { worker: Worker::new(settings(config), feeds), apis })
}

/// Keeps what the environment holds under the name of a secret out of every log, and what that of a pool's workers does.
pub(super) fn hide_secrets(config: &Config, environment: &Environment) {
    let named = |(name, _): &(String, String)| redact::is_named_like_a_secret(name, &config.log.redact_env);
    let of_pools = config.pool.values().flat_map(|pool| &pool.env).map(|(name, value)| (name.clone(), value.0.clone()));
    let values: Vec<String> = environment.pairs().chain(of_pools).filter(named).map(|(_, value)| value).collect();
    redact::hide(values.iter().map(String::as_str)).for_good();
}

/// The worker's own settings.
#[must_use]
pub(super) fn settings(config: &Config) -> Settings {
    let worker = &config.worker;
    Settings {
        capacity: worker.capacity.into(),
        work_dir: worker.work_dir.0.clone(),
        cancel_grace: worker.cancel_grace.0,
        drain_deadline: Some(worker.drain_deadline.0),
        noticed: spot::noticed(&config.host),
        poll_interval: worker.poll_interval.0,
        check_every: some(worker.status_poll.0),
        dequeue_alert: worker.dequeue_alert,
        denied_max: worker.denied_max,
        stay: Stay {
            idle_exit: some(worker.exit_when_idle.0),
            max_tasks: Some(u64::from(worker.max_tasks)).filter(|most| *most > 0),
            max_uptime: some(worker.max_uptime.0),
        },
        least: Least { disk: config.host.min_free_disk.0, memory: config.host.min_free_memory.0 },
        log: log_limits(config.log.task_max),
        containment: containment(&config.host),
        ..Settings::default()
    }
}

/// Zero is never.
fn some(span: Duration) -> Option<Duration> {
    Some(span).filter(|span| !span.is_zero())
}

/// What is asked of the host for holding the processes of a task together.
#[must_use]
fn containment(host: &schema::Host) -> Wanted {
    Wanted {
        demand: match host.containment {
            schema::Containment::Auto => Demand::Best,
            schema::Containment::Cgroup => Demand::Cgroup,
            schema::Containment::Group => Demand::AtMost(Level::Group),
        },
        limits: Limits {
            memory: host.task_memory.map(|size| size.0),
            processes: host.task_pids,
            disk: host.task_disk.map(|size| size.0),
        },
        unproven: match host.unproven {
            schema::Unproven::Keep => Unproven::Kept,
            schema::Unproven::Reuse => Unproven::Reused,
        },
    }
}

/// Three quarters are kept from the start, one quarter from the end.
#[must_use]
pub(super) const fn log_limits(most: Size) -> LogLimits {
    let tail_bytes = most.0 / 4;
    LogLimits { head_bytes: most.0 - tail_bytes, tail_bytes }
}

/// How the deployment of a source is reached.
fn api_settings(source: &Source, tasks: Tasks<'_>, environment: &Environment) -> Result<ApiSettings, Failure> {
    let credentials = Credentials::of_source(source, environment)?
        .map(|own| place::credentials(&own.client_id, &own.access_token, own.certificate.as_ref()))
        .transpose()?;
    Ok(ApiSettings {
        root_url: tasks.root_url.as_str().to_owned(),
        queue_url: source.queue_url.as_ref().map(|url| url.as_str().to_owned()),
        credentials,
        proxy: None,
        allow_hosts: source.allow_hosts.clone(),
        timeouts: Timeouts::default(),
    })
}

/// The client of a source that is not polled.
///
/// # Errors
///
/// [`Exit::Config`] where a secret cannot be read or an address not be used.
pub(super) fn api(
    source_name: &str,
    source: &Source,
    tasks: Tasks<'_>,
    environment: &Environment,
) -> Result<Api, Failure> {
    Api::new(api_settings(source, tasks, environment)?)
        .map_err(|error| Failure::new(Exit::Config, format!("source.{source_name}.{error}")))
}

/// A source of tasks and what runs them.
///
/// # Errors
///
/// As [`api`].
pub(super) fn feed(
    source_name: &str,
    source: &Source,
    tasks: Tasks<'_>,
    name: &Name,
    handler: Arc<dyn Handler>,
    environment: &Environment,
) -> Result<(Feed, Api), Failure> {
    let mut queue_hosts = taskcluster::Settings::azure_queue_hosts();
    queue_hosts.extend(source.queue_hosts.iter().cloned());
    let settings = taskcluster::Settings {
        api: api_settings(source, tasks, environment)?,
        dialect: match source.protocol {
            Protocol::Azure => Dialect::Azure,
            Protocol::ClaimWork => Dialect::ClaimWork,
        },
        task_queue: tasks.task_queue.to_string(),
        worker_group: name.group.clone(),
        worker_id: name.id.clone(),
        artifact_storage: match source.artifact_storage {
            ArtifactStorage::S3 => taskcluster::ArtifactStorage::S3,
            ArtifactStorage::Object => taskcluster::ArtifactStorage::Object,
        },
        queue_hosts,
    };
    let env = BTreeMap::from([
        ("TASKCLUSTER_ROOT_URL".to_owned(), tasks.root_url.as_str().to_owned()),
        ("TASKCLUSTER_WORKER_GROUP".to_owned(), name.group.clone()),
        ("TASKCLUSTER_WORKER_ID".to_owned(), name.id.clone()),
    ]);
    let source = Taskcluster::new(settings)
        .map_err(|error| Failure::new(Exit::Config, format!("source.{source_name}.{error}")))?;
    let api = source.api().clone();
    Ok((Feed { name: source_name.to_owned(), source: Arc::new(source), handler, env }, api))
}

/// Makes the handler of that name. `command` exists without being configured.
///
/// # Errors
///
/// [`Exit::Config`] where it cannot be made.
pub(super) fn handler(config: &Config, name: &str, environment: &Environment) -> Result<Arc<dyn Handler>, Failure> {
    let built_in = HandlerConfig::default();
    let wanted = match config.handler.get(name) {
        Some(handler) => handler,
        None if name == COMMAND => &built_in,
        None => return Err(Failure::new(Exit::Config, format!("there is no [handler.{name}]"))),
    };
    match wanted.kind {
        HandlerKind::Command => {
            Ok(handler::erase(command::Command::new(of_command(wanted, environment, config.log.redact_env.clone()))))
        }
        HandlerKind::Program => program(name, wanted, environment),
        HandlerKind::Http => Ok(handler::erase(service(name, wanted, environment)?)),
    }
}

/// A service as a handler.
///
/// # Errors
///
/// [`Exit::Config`] where it cannot be forwarded to, [`Exit::Unfit`] where its program is not there.
pub(super) fn service(name: &str, wanted: &HandlerConfig, environment: &Environment) -> Result<http::Http, Failure> {
    let target = match (&wanted.url, &wanted.socket) {
        (Some(url), _) => http::Target::Tcp(url.parts().clone()),
        (None, Some(socket)) => http::Target::Unix(socket.0.clone()),
        (None, None) => {
            return Err(Failure::new(Exit::Config, format!("handler {name}: it needs `url` or `socket`")));
        }
    };
    let env = environment::pick(&wanted.env_allow, environment.pairs());
    if let Some(program) = wanted.exec.first() {
        locate(program, &env, Path::new(""))
            .map_err(|error| Failure::new(Exit::Unfit, format!("handler {name}: {error}")))?;
    }
    let service = || http::Service { exec: wanted.exec.clone(), env, grace: wanted.grace.0 };
    let settings = http::Settings {
        name: name.to_owned(),
        target,
        health: wanted.health.clone(),
        health_every: wanted.health_every.0,
        health_timeout: wanted.health_timeout.0,
        start_within: wanted.start_within.0,
        max_run_time: wanted.max_run_time.0,
        forward_headers: wanted.forward_headers.clone(),
        service: (!wanted.exec.is_empty()).then(service),
    };
    http::Http::new(settings).map_err(|error| Failure::of(Exit::Config, &error))
}

fn of_command(wanted: &schema::Handler, environment: &Environment, redact_env: Vec<String>) -> command::Settings {
    command::Settings {
        env: environment::pick(&wanted.env_allow, environment.pairs()),
        run_time_default: wanted.default_run_time.map(|span| span.0),
        max_run_time: Some(wanted.max_run_time.0),
        grace: wanted.grace.0,
        redact_env,
    }
}

fn program(name: &str, wanted: &HandlerConfig, environment: &Environment) -> Result<Arc<dyn Handler>, Failure> {
    let settings = program::Settings {
        check: Some(wanted.check.clone()).filter(|check| !check.is_empty()),
        schema: wanted.schema.as_ref().map(|file| file.0.clone()),
        env: environment::pick(&wanted.env_allow, environment.pairs()),
        max_run_time: Some(wanted.max_run_time.0),
        grace: wanted.grace.0,
        ..program::Settings::new(name, wanted.exec.clone())
    };
    let env = settings.env.clone();
    let made = program::Program::new(settings).map_err(|error| Failure::of(Exit::Config, &error))?;
    // Found out here, it costs no task anything; found out later, every task that is claimed.
    for named in [&wanted.exec, &wanted.check].into_iter().filter_map(|arguments| arguments.first()) {
        locate(named, &env, Path::new(""))
            .map_err(|error| Failure::new(Exit::Unfit, format!("handler {name}: {error}")))?;
    }
    Ok(Arc::new(made))
}
