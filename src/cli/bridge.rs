//! `journeyman bridge`: has the work of one queue done by another.

use std::sync::Arc;

use super::amqp_setup::{self, RequestHandling};
use super::exit::{Exit, ExitResult, Failure};
use super::worker::{self, WorkerArgs};
use super::worker_setup::{self, WorkerIdentity};
use crate::bridge;
use crate::client::RpcClient;
use crate::config::Environment;
use crate::config::schema::{Bridge, Config, Form, Source};
use crate::handler::{self, DynHandler};
use crate::source::amqp;
use crate::worker::{SourceBinding, Worker};

/// Runs it.
///
/// # Errors
///
/// As [`worker::run`].
pub(super) async fn run(arguments: WorkerArgs, environment: &Environment) -> ExitResult {
    Box::pin(worker::run_with(build_worker, arguments, environment)).await
}

/// A worker that hands on what it claims.
fn build_worker(config: &Config, environment: &Environment) -> Result<Worker, Failure> {
    if config.bridge.is_empty() {
        return Err(Failure::new(
            Exit::Config,
            "there is no [bridge.NAME], so there is nothing to hand on; `journeyman guide bridge` shows one",
        ));
    }
    worker_setup::redact_secrets(config, environment);
    let name = WorkerIdentity::from_config(config);
    let feeds: Result<Vec<SourceBinding>, Failure> =
        config.bridge.iter().map(|(named, bridge)| source_binding(named, bridge, config, &name, environment)).collect();
    Ok(Worker::new(worker_setup::worker_config(config), feeds?))
}

fn source_binding(
    named: &str,
    bridge: &Bridge,
    config: &Config,
    name: &WorkerIdentity,
    environment: &Environment,
) -> Result<SourceBinding, Failure> {
    // The configuration was refused already where a source is not there or of the wrong kind.
    let source = |name: &str| {
        let missing = || Failure::new(Exit::Config, format!("[bridge.{named}]: there is no [source.{name}]"));
        config.source.get(name).ok_or_else(missing)
    };
    let (from, to) = (source(&bridge.from)?, source(&bridge.to)?);
    let form = match bridge.form {
        Form::Whole => bridge::BridgeForm::Whole,
        Form::Body => bridge::BridgeForm::Body,
    };
    let longest = bridge.max_run_time.0;
    match (from.tasks(), to.tasks()) {
        (None, Some(tasks)) => {
            let handler: Arc<dyn DynHandler> =
                handler::erase(bridge::requests_to_tasks::RequestsToTasks::new(bridge::requests_to_tasks::Config {
                    api: worker_setup::build_api(&bridge.to, to, tasks, environment)?,
                    task_queue: tasks.task_queue.clone(),
                    origin: amqp_setup::requests_queue(from, config),
                    form,
                    max_run_time: longest,
                }));
            let work = RequestHandling {
                handler,
                form: amqp::PayloadForm::Whole,
                max_run_time: amqp::MaxRunTime::Configured(longest),
            };
            amqp_setup::source_binding(&bridge.from, from, config, name, work, environment)
        }
        (Some(tasks), None) => {
            let PublishTarget { exchange, key } = PublishTarget::from_config(to, config);
            let handler =
                handler::erase(bridge::tasks_to_requests::TasksToRequests::new(bridge::tasks_to_requests::Config {
                    client: RpcClient::new(
                        amqp_setup::build_broker(&config.amqp, environment)?,
                        amqp_setup::worker_id(config, name),
                    ),
                    exchange,
                    routing_key: key,
                    origin: tasks.root_url.as_str().to_owned(),
                    form,
                    max_run_time: longest,
                }));
            worker_setup::source_binding(&bridge.from, from, tasks, name, handler, environment).map(|(feed, _)| feed)
        }
        (None, None) | (Some(_), Some(_)) => Err(Failure::new(
            Exit::Config,
            format!("[bridge.{named}] leads from one source to another of the same kind"),
        )),
    }
}

/// Where requests are published.
struct PublishTarget {
    exchange: String,
    key: String,
}

impl PublishTarget {
    /// A queue that is named is published to as it is; otherwise the pool's exchange finds it, and its controller starts who
    /// works for the key.
    fn from_config(to: &Source, config: &Config) -> Self {
        match to.requests_queue.as_ref().or(config.amqp.requests_queue.as_ref()) {
            Some(queue) => Self { exchange: String::new(), key: queue.clone() },
            None => Self {
                exchange: format!("{}-req-xchg", config.amqp.pool),
                key: config.amqp.worker_key.clone().unwrap_or_default(),
            },
        }
    }
}
