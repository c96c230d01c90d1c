//! `journeyman controller`: runs the controller, or sends a command to a running one.

mod commands;
mod poison;
mod reloadable_keys;
mod status;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Subcommand};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::config_args::{self, ConfigArgs, ControllerFlags};
use super::console::http_token;
use super::control::StatusArgs;
use super::controller_socket::{controller_socket, no_pools};
use super::exit::{Exit, ExitResult, Failure};
use super::reloader::Reloader;
use super::signals::ExitSignals;
use super::worker::listen_http;
use super::{amqp_setup, notify_setup, taskcluster_setup, worker_setup, zookeeper_setup};
use crate::config::Config;
use crate::config::schema::Source;
use crate::console::http::{self, SnapshotFn};
use crate::console::otlp;
use crate::control::controller_api::{ControllerStatusReply, PoolHandles, command_routes, serve};
use crate::control::worker_api::{ReloadSender, Socket};
use journeyman_domain::group::{KEY_BYTES_MAX, Key};
use journeyman_domain::limits::{CONTROLLER_HEARTBEAT, CONTROLLER_STANDBY_INTERVAL};
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::containment::{close_inherited_fds_on_exec, harden_process};
use journeyman_platform::log;
use journeyman_platform::settings::Environment;
use journeyman_platform::tasks::supervised;
use journeyman_services::controller;
use journeyman_services::controller::config::{DemandConfig, PoolConfig, QueueType};
use journeyman_worker::notify::Announcing;
use reloadable_keys::PoolsTarget;

/// `journeyman controller`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct ControllerArgs {
    #[command(subcommand)]
    command: Option<ControllerCommand>,
    #[command(flatten)]
    settings: ConfigArgs<ControllerFlags>,
}

#[derive(Debug, Subcommand)]
enum ControllerCommand {
    /// Show the groups, their workers, and what they wait for
    Status(StatusArgs),
    #[command(flatten)]
    Order(commands::PoolSubcommand),
    /// Requests that killed their workers
    #[command(subcommand)]
    Poison(poison::PoisonCommand),
}

pub(super) async fn run(arguments: ControllerArgs, environment: &Environment) -> ExitResult {
    match arguments.command {
        Some(ControllerCommand::Status(arguments)) => status::run(arguments, environment).await,
        Some(ControllerCommand::Order(command)) => commands::run(command, environment).await,
        Some(ControllerCommand::Poison(command)) => poison::run(command, environment).await,
        None => Box::pin(run_controller(arguments.settings, environment)).await,
    }
}

async fn run_controller(source: ConfigArgs<ControllerFlags>, environment: &Environment) -> ExitResult {
    let loaded = source.load(environment)?;
    log::start(&loaded.config.log, environment);
    config_args::log_warnings(&loaded);
    let config = loaded.config;
    let Some(socket) = controller_socket(&config) else { return Err(no_pools()) };
    worker_setup::redact_secrets(&config, environment);
    harden_process();
    let (announcer, announcing) = notify_setup::announcer(&config.notify, "controller".to_owned(), environment)?;
    let pool_config = |(name, pool): (&String, &PoolConfig)| {
        let settings = pool_config(name, pool, &config, environment)?;
        Ok(controller::ControllerConfig { announcer: announcer.clone(), ..settings })
    };
    let settings = config.pool.iter().map(pool_config).collect::<Result<Vec<_>, Failure>>()?;
    drop(announcer);
    Box::pin(Announcing::beside(announcing, run_pools(source, environment, config, socket, settings))).await
}

async fn run_pools(
    source: ConfigArgs<ControllerFlags>,
    environment: &Environment,
    config: Config,
    socket: PathBuf,
    settings: Vec<controller::ControllerConfig>,
) -> ExitResult {
    close_inherited_fds_on_exec();
    let mut signals = ExitSignals::listen()?;
    let token = http_token(&config, environment)?;
    let listener = listen_http(&config, "health, metrics and state").await?;
    let stop = CancellationToken::new();
    let (mut pools, mut handles) = (JoinSet::new(), Vec::new());
    for settings in settings {
        let (handle, inbox) = controller::ControllerHandle::new(&settings);
        handles.push(handle);
        pools.spawn(supervised("a pool", controller::run(settings, inbox, stop.clone())));
    }
    let (reloader, reloads) = Reloader::new(source, environment, config.clone(), PoolsTarget(handles.clone()))?;
    let handles = PoolHandles::new(handles, Clock::boot());
    let http = async {
        let Some(listener) = listener else { return std::future::pending().await };
        let (snapshot, commands) = (snapshot_provider(&handles), command_routes(handles.clone()));
        http::controller::serve(listener, snapshot, token, commands).await
    };
    let pools_of_metrics = handles.clone();
    let instance = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let snapshot = async || pools_of_metrics.snapshot().await;
    let metrics = otlp::export(environment, "controller", &instance, snapshot, crate::console::controller::metrics);
    let control_socket = serve_control_socket(socket, handles.clone(), reloads);
    tokio::select! {
        _ = signals.next() => {}
        Some(ended) = pools.join_next() => return match ended {
            Ok(Err(error)) => Err(Failure::new(Exit::HostUnusable, format!("cannot control a pool: {error}"))),
            Ok(Ok(())) | Err(_) => Err(Failure::new(Exit::Internal, "the controller of a pool ended unexpectedly")),
        },
        failure = control_socket => return Err(failure),
        never = http => match never {},
        never = reloader.run() => match never {},
        () = metrics => return Err(Failure::new(Exit::Internal, "the export of metrics ended")),
    }
    tracing::info!("controller stopped; workers keep running");
    stop.cancel();
    while pools.join_next().await.is_some() {}
    Ok(Exit::Success)
}

fn snapshot_provider(pools: &PoolHandles) -> Arc<SnapshotFn<ControllerStatusReply>> {
    let pools = pools.clone();
    Arc::new(move || {
        let pools = pools.clone();
        Box::pin(async move { pools.snapshot().await })
    })
}

/// Waits for the socket if another controller of this host holds it.
async fn serve_control_socket(path: PathBuf, pools: PoolHandles, reloads: ReloadSender) -> Failure {
    let mut is_waiting = false;
    loop {
        match Socket::listen(&path) {
            Ok(socket) => match serve(socket, pools, reloads).await {},
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                if !std::mem::replace(&mut is_waiting, true) {
                    let path = path.display();
                    tracing::info!(%path, "another process listens on the control socket; waiting for it to exit");
                }
                tokio::time::sleep(CONTROLLER_STANDBY_INTERVAL).await;
            }
            Err(error) => {
                let text = format!("{error}; `control.socket` configures another path");
                return Failure::new(Exit::HostUnusable, text);
            }
        }
    }
}

fn pool_config(
    name: &str,
    settings: &PoolConfig,
    config: &Config,
    environment: &Environment,
) -> Result<controller::ControllerConfig, Failure> {
    let names = controller::QueueNames::new(name);
    if !names.are_valid() {
        return Err(Failure::new(
            Exit::Config,
            format!("[pool.{name}]: the name is too long: the names of its exchanges exceed the limit of AMQP"),
        ));
    }
    let broker = amqp_setup::build_broker(&config.amqp, environment)?.with_default_heartbeat(CONTROLLER_HEARTBEAT);
    let controller = controller::ControllerConfig {
        pool: name.to_owned(),
        management: amqp_setup::build_management(&config.amqp, &broker)?,
        broker,
        names,
        settings: settings.clone(),
        demands: demand_configs(name, config, environment)?,
        announcer: None,
    };
    if settings.queue_type == QueueType::None && controller.zookeeper().is_none() {
        let text =
            format!("[pool.{name}]: `queue_type = \"none\"` needs a [demand.NAME] with a source of kind `zookeeper`");
        return Err(Failure::new(Exit::Config, text));
    }
    Ok(controller)
}

fn demand_configs(
    pool: &str,
    config: &Config,
    environment: &Environment,
) -> Result<Vec<controller::DemandSource>, Failure> {
    let of = |(name, demand): (&String, &DemandConfig)| {
        let failed = |what: String| Failure::new(Exit::Config, format!("[demand.{name}]: {what}"));
        let queue = match config.source.get(&demand.source) {
            Some(Source::Taskcluster(source)) => controller::DemandQueue::Taskcluster {
                api: taskcluster_setup::build_api(&demand.source, source, environment)?,
                task_queue: source.task_queue.to_string(),
            },
            Some(Source::Zookeeper(source)) => zookeeper_setup::demand_queue(source),
            Some(Source::Amqp(_) | Source::Screwdriver(_)) | None => {
                return Err(failed(format!("there is no [source.{}]", demand.source)));
            }
        };
        let too_long = || failed(format!("`key` has {KEY_BYTES_MAX} bytes at most"));
        Ok(controller::DemandSource { name: name.clone(), key: Key::new(&demand.key).ok_or_else(too_long)?, queue })
    };
    config.demand.iter().filter(|(_, demand)| demand.pool == pool).map(of).collect()
}
