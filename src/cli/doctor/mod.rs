//! `journeyman doctor`: checks this host and the services that the configuration names, and says how to fix what fails.
//!
//! Changes nothing except for one empty file in the work directory, which it removes. Prints no secrets.

mod broker;
mod cluster;
pub(super) mod host;
mod taskcluster;
pub(super) mod zookeeper;

use clap::Args;
use futures_util::future::{BoxFuture, join_all};
use tokio::time::timeout;

use super::checks::{Check, report};
use super::config::names_any;
use super::config_args::{ConfigArgs, NoFlags};
use super::controller_socket::controller_socket;
use super::exit::ExitResult;
use super::output::Format;
use super::worker::control_socket;
use super::worker_identity::WorkerIdentity;
use super::{file_checks, screwdriver, worker_setup};
use crate::config::LoadedConfig;
use crate::config::schema::{Config, Source};
use journeyman_domain::limits::DOCTOR_CHECK_TIMEOUT;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::File;
use journeyman_services::controller::config::QueueType;
use journeyman_worker::handler::config::Handler;

#[derive(Debug, Args)]
pub(super) struct DoctorArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    #[command(flatten)]
    settings: ConfigArgs<NoFlags>,
}

pub(super) async fn run(arguments: DoctorArgs, environment: &Environment) -> ExitResult {
    let checks = match arguments.settings.load(environment) {
        Ok(loaded) => {
            worker_setup::redact_secrets(&loaded.config, environment);
            run_all(&loaded, environment).await
        }
        Err(failure) => {
            vec![Check::failed("configuration", failure.message, "see `journeyman config check`")]
        }
    };
    report(&checks, arguments.output)
}

pub(super) async fn run_all(loaded: &LoadedConfig, environment: &Environment) -> Vec<Check> {
    let mut checks = check_configuration(loaded, environment);
    checks.extend(run_checks(loaded, environment).await);
    checks
}

fn check_configuration(loaded: &LoadedConfig, environment: &Environment) -> Vec<Check> {
    let config = &loaded.config;
    let named = loaded.document.as_ref().map_or("built-in defaults", |document| &document.name);
    let mut checks = vec![if is_controller_config(config) {
        Check::ok("configuration", format!("{named}: pools {}", config.pool.len()))
    } else if config.source.is_empty() && !names_any(loaded, &["notifier", "queue"]) {
        let fix = "`journeyman config init journeyman.toml` writes an example";
        Check::failed("configuration", format!("{named}: no [source.NAME] is configured"), fix)
    } else {
        let (sources, capacity) = (config.source.len(), config.worker.capacity);
        Check::ok("configuration", format!("{named}: sources {sources}, capacity {capacity}"))
    }];
    let problems: Vec<_> =
        loaded.warnings.iter().cloned().chain(file_checks::check_files(loaded, environment)).collect();
    for problem in &problems {
        let fix = problem.help.clone().unwrap_or_default();
        checks.push(match problem.is_warning() {
            false => Check::failed("files", &problem.message, fix),
            true => Check::warning("files", &problem.message, fix),
        });
    }
    if problems.is_empty() {
        checks.push(Check::ok("files", "secrets are private, programs and schemas exist"));
    }
    checks
}

/// A controller claims nothing itself, so it needs fewer checks.
fn is_controller_config(config: &Config) -> bool {
    !config.pool.is_empty() && config.source.keys().all(|name| is_only_counted(config, name))
}

/// A controller counts the tasks of the sources of its demands.
fn is_only_counted(config: &Config, source_name: &str) -> bool {
    config.demand.values().any(|demand| demand.source == source_name)
        && config.bridge.values().all(|bridge| bridge.from != source_name && bridge.to != source_name)
}

/// Runs the checks concurrently; the order of the lines is fixed.
async fn run_checks(loaded: &LoadedConfig, environment: &Environment) -> Vec<Check> {
    let config = &loaded.config;
    let worker = WorkerIdentity::from_config(config);
    let mut groups: Vec<(&str, BoxFuture<'_, Vec<Check>>)> = Vec::new();
    for (name, source) in &config.source {
        let claims_as = (!is_only_counted(config, name)).then_some(&worker);
        let check: BoxFuture<'_, Vec<Check>> = match source {
            Source::Taskcluster(source) => Box::pin(taskcluster::check_source(name, source, claims_as, environment)),
            Source::Zookeeper(source) => Box::pin(zookeeper::check_source(name, source)),
            Source::Amqp(source) => Box::pin(broker::check_source(name, source, config, environment)),
            Source::Screwdriver(source) => Box::pin(screwdriver::check_source(name, source, config, environment)),
        };
        groups.push((name, check));
    }
    for (name, kubeconfig, namespace) in clusters(config) {
        let check = async move { vec![cluster::check(name.to_owned(), kubeconfig, namespace).await] };
        groups.push((name, Box::pin(check)));
    }
    if config.pool.values().any(|pool| pool.queue_type != QueueType::None) {
        groups.push(("pools", Box::pin(broker::check_pools_broker(config, environment))));
    }
    let is_controller = is_controller_config(config);
    let socket = if is_controller { controller_socket(config) } else { Some(control_socket(config)) };
    groups.push(("listeners", Box::pin(host::check_listeners(config, socket))));
    if !is_controller {
        groups.push(("cloud", Box::pin(host::check_cloud(&config.host))));
        groups.push(("host", Box::pin(host::check_host(config.clone()))));
        groups.push(("control socket", Box::pin(host::check_control_socket(control_socket(config)))));
    }
    let with_timeout = groups.into_iter().map(async |(name, checks)| {
        let found = || format!("no response within {} s", DOCTOR_CHECK_TIMEOUT.as_secs());
        let fix = "the service neither responds nor refuses; check it by hand";
        let late = |_| vec![Check::failed(name, found(), fix)];
        timeout(DOCTOR_CHECK_TIMEOUT, checks).await.unwrap_or_else(late)
    });
    join_all(with_timeout).await.concat()
}

/// Where pods of tasks and builds run, by the names of their handlers and sources.
fn clusters(config: &Config) -> impl Iterator<Item = (&str, Option<&File>, &str)> {
    let handlers = config.handler.iter().filter_map(|(name, handler)| match handler {
        Handler::Kubernetes(pods) => Some((name.as_str(), pods.kubeconfig.as_ref(), pods.namespace.as_str())),
        Handler::Command(_) | Handler::Program(_) | Handler::Http(_) | Handler::Custom(_) => None,
    });
    let sources = config.source.iter().filter_map(|(name, source)| match source {
        Source::Screwdriver(builds) => Some((name.as_str(), builds.kubeconfig.as_ref(), builds.namespace.as_str())),
        Source::Taskcluster(_) | Source::Zookeeper(_) | Source::Amqp(_) => None,
    });
    handlers.chain(sources)
}
