//! Builds the two sources of a Screwdriver, and their handler, from the configuration.

use std::sync::Arc;

use super::amqp_setup::{build_broker, build_management};
use super::exit::{Exit, Failure};
use super::worker_identity::WorkerIdentity;
use crate::config::schema::Config;
use journeyman_domain::limits::AMQP_SHARED_POLL_WAIT;
use journeyman_platform::amqp;
use journeyman_platform::amqp::delay::DelayQueues;
use journeyman_platform::settings::Environment;
use journeyman_services::screwdriver::config::ScrewdriverSource;
use journeyman_services::screwdriver::{BuildChecks, ScrewdriverHandler};
use journeyman_worker::engine::SourceBinding;
use journeyman_worker::handler;
use journeyman_worker::source::amqp::{AmqpSource, AmqpSourceConfig, CheckRoute, DeferralConfig, OnRetry, PayloadForm};

/// Builds a source for each of its queues.
///
/// # Errors
///
/// As [`build_broker`], and if the template of the pods cannot be used.
pub(super) fn source_bindings(
    source_name: &str,
    source: &ScrewdriverSource,
    config: &Config,
    worker: &WorkerIdentity,
    environment: &Environment,
) -> Result<[SourceBinding; 2], Failure> {
    let short = |name: &str| {
        amqp::to_short_string("the name of a queue", name).map_err(|error| Failure::from_error(Exit::Config, &error))
    };
    let builds = ScrewdriverHandler::new(source_name, source.clone());
    let handler = handler::erase(builds.map_err(|error| Failure::from_error(Exit::Config, &error))?);
    let retry_queue = short(&source.retry_queue)?;
    let limits = &source.limits;
    let route = match &source.wait_queue {
        Some(wait_queue) => CheckRoute::WaitQueue { exchange: short(&source.exchange)?, key: short(wait_queue)? },
        None => {
            let mut steps: Vec<_> =
                (0..limits.checks).map(|step| limits.delay.0 + limits.delay_step.0 * step).collect();
            steps.dedup();
            CheckRoute::Delays { delays: DelayQueues::new(&source.retry_queue, &steps), queue: retry_queue }
        }
    };
    let binding = |name: String, queue: &str, is_retry_queue: bool| -> Result<SourceBinding, Failure> {
        let broker = build_broker(&config.amqp, environment)?;
        let format =
            BuildChecks { queue: queue.to_owned(), is_retry_queue, has_wait_queue: source.wait_queue.is_some() };
        let settings = AmqpSourceConfig {
            payload_form: PayloadForm::Body,
            // The queues count, and the handler has limits of its own.
            max_attempts: None,
            on_retry: OnRetry::DeadLetter,
            poll_wait: AMQP_SHARED_POLL_WAIT,
            deferral: Some(DeferralConfig { format: Arc::new(format), route: route.clone() }),
            consumer_timeout: config.amqp.consumer_timeout.0,
            management: build_management(&config.amqp, &broker)?,
            message_bytes_max: config.amqp.max_message_size.0,
            ..AmqpSourceConfig::new(broker, short(queue)?, &worker.id)
        };
        let (source, handler) = (Arc::new(AmqpSource::new(settings)), Arc::clone(&handler));
        Ok(SourceBinding { name, source, handler, env: Arc::default() })
    };
    Ok([
        binding(source_name.to_owned(), &source.main_queue, false)?,
        binding(format!("{source_name}-retry"), &source.retry_queue, true)?,
    ])
}
