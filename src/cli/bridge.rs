//! `journeyman bridge`: a worker with handlers that forward to another queue.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::amqp_setup::{self, RequestHandling};
use super::config_args::{ConfigArgs, WorkerFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::worker_identity::WorkerIdentity;
use super::worker_pool::WorkerPools;
use super::worker_setup::{self, BuiltWorker};
use super::{taskcluster_setup, worker};
use crate::config::schema::{Config, Source};
use journeyman_platform::settings::Environment;
use journeyman_services::bridge::config::Bridge;
use journeyman_services::bridge::requests_to_tasks::RequestsToTasks;
use journeyman_services::bridge::tasks_to_requests::TasksToRequests;
use journeyman_services::client::RpcClient;
use journeyman_worker::engine::{SourceBinding, Worker};
use journeyman_worker::handler::{self, DynHandler};
use journeyman_worker::source::amqp;

/// Runs the command.
///
/// # Errors
///
/// Runs a worker whose handlers are bridges, as [`worker::run`] does.
pub(super) async fn run(settings: ConfigArgs<WorkerFlags>, environment: &Environment) -> ExitResult {
    Box::pin(worker::run_with(build_worker, settings, environment)).await
}

fn build_worker(config: &Config, environment: &Environment) -> Result<BuiltWorker, Failure> {
    if config.bridge.is_empty() {
        return Err(Failure::new(
            Exit::Config,
            "the configuration has no [bridge.NAME], so there is nothing to forward; `journeyman guide bridge` shows one",
        ));
    }
    worker_setup::redact_secrets(config, environment);
    let name = WorkerIdentity::from_config(config);
    let binding =
        |(bridge_name, bridge): (&String, &Bridge)| source_binding(bridge_name, bridge, config, &name, environment);
    let bindings: Result<Vec<SourceBinding>, Failure> = config.bridge.iter().map(binding).collect();
    let worker = Worker::new(worker_setup::worker_config(config), bindings?);
    // A bridge reads renewed credentials when the service answers 401.
    Ok(BuiltWorker { worker, apis: BTreeMap::new(), pools: WorkerPools::default() })
}

fn source_binding(
    bridge_name: &str,
    bridge: &Bridge,
    config: &Config,
    name: &WorkerIdentity,
    environment: &Environment,
) -> Result<SourceBinding, Failure> {
    // `config::rules` has rejected missing sources and wrong kinds.
    let source = |name: &str| {
        let missing = || Failure::new(Exit::Config, format!("[bridge.{bridge_name}]: [source.{name}] does not exist"));
        config.source.get(name).ok_or_else(missing)
    };
    let (from, to) = (source(&bridge.from)?, source(&bridge.to)?);
    let max_run_time = bridge.max_run_time.0;
    match (from, to) {
        (Source::Amqp(from), Source::Taskcluster(to)) => {
            let handler: Arc<dyn DynHandler> = handler::erase(RequestsToTasks {
                api: taskcluster_setup::build_api(&bridge.to, to, environment)?,
                task_queue: to.task_queue.clone(),
                origin: from.queue(&config.amqp),
                max_run_time,
            });
            let work = RequestHandling { handler, form: amqp::PayloadForm::Whole, max_run_time: Some(max_run_time) };
            amqp_setup::source_binding(&bridge.from, from, config, name, work, environment)
        }
        (Source::Taskcluster(from), Source::Amqp(to)) => {
            // A named queue is published to directly. Otherwise the pool's exchange routes by the key, and the pool's controller starts
            // workers for it.
            let amqp = &config.amqp;
            let (exchange, routing_key) = match to.requests_queue.as_ref().or(amqp.assignment.requests_queue.as_ref()) {
                Some(queue) => (String::new(), queue.clone()),
                None => (format!("{}-req-xchg", amqp.pool), amqp.worker_key.clone().unwrap_or_default()),
            };
            let worker_id = amqp_setup::worker_id(config, name);
            let short_name = |name: &str| {
                journeyman_platform::amqp::to_short_string("the name of a queue, exchange or key", name)
                    .map_err(|error| Failure::from_error(Exit::Config, &error))
            };
            short_name(&exchange)?;
            short_name(&routing_key)?;
            let handler = handler::erase(TasksToRequests {
                client: RpcClient::new(amqp_setup::build_broker(&config.amqp, environment)?, worker_id),
                exchange,
                routing_key,
                origin: from.root_url.as_str().to_owned(),
                max_run_time,
            });
            taskcluster_setup::source_binding(&bridge.from, from, name, handler, environment)
                .map(|(binding, _)| binding)
        }
        (Source::Amqp(_) | Source::Taskcluster(_) | Source::Zookeeper(_) | Source::Screwdriver(_), _) => {
            let message = "a bridge connects a source of kind `amqp` with one of kind `taskcluster`";
            Err(Failure::new(Exit::Config, format!("[bridge.{bridge_name}]: {message}")))
        }
    }
}
