//! Builds a worker from the configuration: its sources, handlers and limits.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;

use super::exit::{Exit, Failure};
use super::worker_identity::WorkerIdentity;
use super::worker_pool::WorkerPools;
use super::{amqp_setup, screwdriver_setup, taskcluster_setup, termination_watch, zookeeper_setup};
use crate::config::schema::{Config, Source};
use journeyman_platform::host::caches::{CacheLimits, CacheStore};
use journeyman_platform::host::containment::{ContainmentConfig, ResourceLimits, install_shim};
use journeyman_platform::host::program_path::find_program;
use journeyman_platform::host::resources;
use journeyman_platform::host::task_user::TaskUser;
use journeyman_platform::redact;
use journeyman_platform::settings::Environment;
use journeyman_worker::engine::config::Host;
use journeyman_worker::engine::{ExitPolicy, MinResources, Worker, WorkerConfig};
use journeyman_worker::handler::chain_of_trust::SigningKey;
use journeyman_worker::handler::config::{CommandHandler, Handler as HandlerConfig, Hooks, ProgramHandler};
use journeyman_worker::handler::containers::config::ContainersConfig;
use journeyman_worker::handler::containers::{Containers, with_containers};
use journeyman_worker::handler::http::config::HttpHandler;
use journeyman_worker::handler::log::LogLimits;
use journeyman_worker::handler::mounts::Mounter;
use journeyman_worker::handler::mounts::configured::with_mounts;
use journeyman_worker::handler::payload_parts::PayloadSettings;
use journeyman_worker::handler::task_proxy::with_task_credentials;
use journeyman_worker::handler::task_users::{UserPool, with_users};
use journeyman_worker::handler::{self, DynHandler, command, environment, hooks, http, program};
use journeyman_worker::source::taskcluster::Api;
use journeyman_worker::task::COMMAND;

/// A worker, and its API clients: worker-runner may replace their credentials.
pub(super) struct BuiltWorker {
    pub worker: Worker,
    /// The clients of the sources, by name.
    pub apis: BTreeMap<String, Api>,
    pub pools: WorkerPools,
}

pub(super) fn build_worker(config: &Config, environment: &Environment) -> Result<BuiltWorker, Failure> {
    if config.source.is_empty() {
        return Err(Failure::new(
            Exit::Config,
            "there is no [source.NAME], so there is nothing to work for; `journeyman config init journeyman.toml` writes \
             one to start from, and `journeyman dev` needs none",
        ));
    }
    redact_secrets(config, environment);
    let name = WorkerIdentity::from_config(config);
    let handlers: BTreeSet<&str> = config.source.values().filter_map(Source::handler).collect();
    let (mounter, users) = (build_mounter(config)?, find_users(config)?);
    let build = |name| build_handler(config, name, environment, &mounter, users.as_ref());
    let handlers = handlers.into_iter().map(|name| Ok((name, build(name)?)));
    let handlers: BTreeMap<&str, Arc<dyn DynHandler>> = handlers.collect::<Result<_, Failure>>()?;
    let (mut bindings, mut apis, mut pools) = (Vec::new(), BTreeMap::new(), WorkerPools::default());
    for (source_name, source) in &config.source {
        let handler = |name: &str| Arc::clone(&handlers[name]);
        match source {
            Source::Taskcluster(source) => {
                let handler = handler(&source.handler);
                let (binding, api) =
                    taskcluster_setup::source_binding(source_name, source, &name, handler, environment)?;
                pools.add(source, &name, &api, environment)?;
                bindings.push(binding);
                apis.insert(source_name.clone(), api);
            }
            Source::Zookeeper(source) => {
                bindings.push(zookeeper_setup::source_binding(source_name, source, &name, handler(&source.handler)));
            }
            Source::Amqp(source) => {
                let handler = handler(&source.handler);
                let work = amqp_setup::RequestHandling::from_config(config, &source.handler, handler);
                bindings.push(amqp_setup::source_binding(source_name, source, config, &name, work, environment)?);
            }
            Source::Screwdriver(source) => {
                bindings.extend(screwdriver_setup::source_bindings(source_name, source, config, &name, environment)?);
            }
        }
    }
    Ok(BuiltWorker { worker: Worker::new(worker_config(config), bindings), apis, pools })
}

/// Redacts the values of variables with names of secrets, of this process and of the workers of pools.
pub(super) fn redact_secrets(config: &Config, environment: &Environment) {
    let named = |(name, _): &(String, String)| redact::is_secret_name(name, &config.log.redact_env);
    let of_pools = config.pool.values().flat_map(|pool| &pool.env).map(|(name, value)| (name.clone(), value.0.clone()));
    let values: Vec<String> = environment.pairs().chain(of_pools).filter(named).map(|(_, value)| value).collect();
    redact::hide(values.iter().map(String::as_str)).until_exit();
}

pub(super) fn worker_config(config: &Config) -> WorkerConfig {
    let worker = &config.worker;
    WorkerConfig {
        capacity: worker.capacity.into(),
        launched_max: worker.launched_max,
        work_dir: worker.work_dir.0.clone(),
        termination_grace: worker.termination_grace.0,
        drain_deadline: Some(worker.drain_deadline.0),
        on_termination_notice: termination_watch::on_termination_notice(&config.host),
        poll_interval: worker.poll_interval.0,
        status_poll_interval: worker.status_poll_interval.0,
        exit_policy: ExitPolicy {
            exit_when_idle: worker.exit_when_idle.0,
            max_tasks: Some(u64::from(worker.max_tasks)).filter(|max| *max > 0),
            max_uptime: worker.max_uptime.0,
        },
        min_resources: MinResources { disk: config.host.min_free_disk.0, memory: config.host.min_free_memory.0 },
        log: log_limits(config.log.task_log_max.0),
        log_times: config.log.task_log_times,
        containment: containment_requirement(config),
        ..WorkerConfig::default()
    }
}

/// In percent of the disk that holds the work directory, unless `host.task_disk` is set.
const TASK_DISK_DEFAULT: u64 = 80;

fn containment_requirement(config: &Config) -> ContainmentConfig {
    let host = &config.host;
    let most_of_disk = || Some(resources::disk_size(&config.worker.work_dir.0)? / 100 * TASK_DISK_DEFAULT);
    ContainmentConfig {
        requirement: host.containment,
        limits: ResourceLimits {
            memory: host.task_memory.map(|size| size.0),
            processes: host.task_pids.map(NonZeroU32::get),
            disk: host.task_disk.map(|size| size.0).or_else(most_of_disk),
        },
    }
}

/// Three quarters are kept from the start, one quarter from the end.
pub(super) const fn log_limits(bytes_max: u64) -> LogLimits {
    let tail_bytes = bytes_max / 4;
    LogLimits { head_bytes: bytes_max - tail_bytes, tail_bytes }
}

/// The handlers of a worker share its caches.
pub(super) fn build_mounter(config: &Config) -> Result<Mounter, Failure> {
    let Host { download_cache, cache_free_disk, .. } = &config.host;
    let limits = CacheLimits { downloads_bytes_max: download_cache.0, free_bytes_min: cache_free_disk.0 };
    let store = CacheStore::new(config.worker.work_dir.0.join("caches"), limits);
    Mounter::new(store).map_err(|error| Failure::from_error(Exit::HostUnusable, &error))
}

fn signing_key(name: &str, section: &CommandHandler, environment: &Environment) -> Result<Option<SigningKey>, Failure> {
    let Some(file) = &section.chain_of_trust_key else { return Ok(None) };
    let unusable = |why: String| Failure::new(Exit::Config, format!("handler.{name}.chain_of_trust_key: {why}"));
    let text = file.load("a signing key", environment).map_err(|error| unusable(error.to_string()))?;
    SigningKey::parse(text.reveal()).map(Some).map_err(unusable)
}

/// The users that tasks run as; `None` for the worker's own.
fn find_users(config: &Config) -> Result<Option<UserPool>, Failure> {
    let names = &config.host.task_users;
    if names.is_empty() {
        return Ok(None);
    }
    let unusable = |text: String| Failure::new(Exit::HostUnusable, format!("host.task_users: {text}"));
    if !rustix::process::geteuid().is_root() {
        return Err(unusable("only a worker that runs as root can run tasks as other users".to_owned()));
    }
    let work_dir = &config.worker.work_dir.0;
    let shim = install_shim(work_dir).map_err(|error| unusable(format!("work_dir {}: {error}", work_dir.display())))?;
    let users = names.iter().map(|name| TaskUser::find(name, &shim).map_err(|error| unusable(error.to_string())));
    Ok(Some(UserPool::new(users.collect::<Result<_, _>>()?)))
}

/// `command` exists without a section.
pub(super) fn build_handler(
    config: &Config,
    name: &str,
    environment: &Environment,
    mounter: &Mounter,
    users: Option<&UserPool>,
) -> Result<Arc<dyn DynHandler>, Failure> {
    let built_in = HandlerConfig::default();
    let section = match config.handler.get(name) {
        Some(handler) => handler,
        None if name == COMMAND => &built_in,
        None => return Err(Failure::new(Exit::Config, format!("there is no [handler.{name}]"))),
    };
    let termination_grace = config.worker.termination_grace;
    let none = Vec::new();
    let env_allow = match section {
        HandlerConfig::Command(section) => &section.env_allow,
        HandlerConfig::Program(section) => &section.env_allow,
        HandlerConfig::Http(section) => &section.env_allow,
        HandlerConfig::Kubernetes(_) | HandlerConfig::Custom(_) => &none,
    };
    let env = environment::select(env_allow, environment.pairs());
    let Hooks { pre_task, post_task, error, .. } = &config.hooks;
    find_programs("hooks", &env, [pre_task, post_task, error])?;
    let handler: Arc<dyn DynHandler> = match section.clone() {
        HandlerConfig::Command(section) => {
            let settings = PayloadSettings {
                max_run_time: section.max_run_time,
                termination_grace: termination_grace.0,
                redact_env: config.log.redact_env.clone(),
                mounter: mounter.clone(),
                signing_key: signing_key(name, &section, environment)?,
            };
            let commands = command::Command::new(&section.env_allow, environment, settings.clone());
            let containers = match section.containers {
                Some(containers) => Some(build_containers(config, name, containers, environment, settings)?),
                None => None,
            };
            with_containers(handler::erase(commands), containers, name)
        }
        HandlerConfig::Program(section) => {
            find_programs(&format!("handler {name}"), &env, [&section.exec, &section.check])?;
            let may_call = section.task_credentials;
            let program = program::Program::new(name, ProgramHandler { termination_grace, ..section }, environment);
            let program = Arc::new(program.map_err(|error| Failure::from_error(Exit::Config, &error))?);
            if may_call { with_task_credentials(program, mounter.client()) } else { program }
        }
        HandlerConfig::Http(section) => {
            find_programs(&format!("handler {name}"), &env, [&section.exec])?;
            let service = http::Http::new(name, HttpHandler { termination_grace, ..section }, environment);
            handler::erase(service.map_err(|error| Failure::from_error(Exit::Config, &error))?)
        }
        HandlerConfig::Kubernetes(section) => {
            let pods = handler::kubernetes::Kubernetes::new(name, section);
            handler::erase(handler::staged::Staged(pods.map_err(|error| Failure::from_error(Exit::Config, &error))?))
        }
        HandlerConfig::Custom(custom) => custom.handler,
    };
    let mounts = section.mounts().map_err(|why| Failure::new(Exit::Config, format!("[handler.{name}]: {why}")))?;
    let handler = with_mounts(handler, mounter, mounts, section.max_run_time().0);
    let handler = match (section, users) {
        (HandlerConfig::Command(_) | HandlerConfig::Program(_), Some(users)) => with_users(handler, users.clone()),
        _ => handler,
    };
    Ok(hooks::with_hooks(handler, config.hooks.clone(), env))
}

fn build_containers(
    config: &Config,
    name: &str,
    section: ContainersConfig,
    environment: &Environment,
    settings: PayloadSettings,
) -> Result<Containers, Failure> {
    let section = ContainersConfig { limits: containment_requirement(config).limits, ..section };
    Containers::new(section, environment, settings)
        .map_err(|error| Failure::new(Exit::HostUnusable, format!("[handler.{name}.containers]: {error}")))
}

/// A missing program is found at the start, so that it costs no task.
fn find_programs<const N: usize>(
    name: &str,
    env: &BTreeMap<String, String>,
    programs: [&Vec<String>; N],
) -> Result<(), Failure> {
    for program in programs.into_iter().filter_map(|arguments| arguments.first()) {
        find_program(program, env, Path::new(""))
            .map_err(|error| Failure::new(Exit::HostUnusable, format!("{name}: {error}")))?;
    }
    Ok(())
}
